"""Which tokens there are and who came in with them: pure, and what a master keeps of it as rows of text.

Secrets are kept as their SHA-256: they are 256 random bits, so nothing slower is needed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from wancoll.errors import ConfigError
from wancoll.trust.identity import Identity, Role

MOST_TOKENS = 1024
MOST_USES = 1024
MOST_NAMES = 65536  # daemons whose certificates are good at one time
_LIST = "`wancoll token list` shows what there is, and `wancoll token create` makes a new one, on the master's machine"


_Row = TypeVar("_Row")


class NotNow(ConfigError):
    """Refused for a while: another try may do better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a token allows.

    Attributes:
        id: of the token.
        hashed: SHA-256 of its secret, in hex.
        role: of who comes with it.
        name: that it must have; "": any that nobody else has.
        groups: it may join; empty: any.
        uses: how many daemons may come with it, each a name with its key, that may come again; 0: any number.
        expires: seconds since 1970; 0.0: never.
        revoked: it is good for nothing, and neither are the certificates that were got with it.
        used: hashes of the names and keys that came with it, where they are counted.
        authority: SHA-256 of the authority that its text names; "": of versions that did not keep it.
    """

    id: str
    hashed: str
    role: Role = "peer"
    name: str = ""
    groups: tuple[str, ...] = ()
    uses: int = 0
    expires: float = 0.0
    revoked: bool = False
    used: tuple[str, ...] = ()
    authority: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a name, by a certificate good until *until* (seconds since 1970); *key*: its public key's hash."""

    token: str
    until: float
    key: str = ""


class Registry:
    """Tokens, and the daemons that came with them. Methods that change it return the id or name of the row to write.

    A token that names an authority which was replaced lets no newcomer in. Who has a name by it, with that key, comes
    back with it: its certificate may have ended while no master was there to renew it.

    Args:
        grants: rows of before, by id, as text() gave them.
        holders: the same by name.
        believed: SHA-256 of the authorities that are believed: a token that names another is for nobody new.

    Raises:
        ConfigError: a row cannot be read.
    """

    def __init__(self, grants: dict[str, str], holders: dict[str, str], believed: Collection[str] = ()) -> None:
        self.believed = believed
        self.grants: dict[str, Grant] = {id: _read(f"token {id}", row, Grant) for id, row in grants.items()}
        self.holders: dict[str, Holder] = {name: _read(f"name {name}", row, Holder) for name, row in holders.items()}
        self.forgotten: list[str] = []  # names whose rows are to be deleted

    def add(self, grant: Grant, now: float) -> list[str]:
        """A new token; ids of those that were forgotten for it.

        Raises:
            ConfigError: there are too many, or it asks for what cannot be.
        """
        gone: list[str] = []
        if len(self.grants) >= MOST_TOKENS:
            used = {held.token for held in self.holders.values() if held.until > now}  # they may renew, or be revoked
            over = [one.id for one in self.grants.values() if not self.good(one, now)]
            gone = [id for id in over if id not in used]
            for id in gone:
                del self.grants[id]
        if len(self.grants) >= MOST_TOKENS:
            raise ConfigError(
                "there are too many tokens", who="wancoll token create", expected=f"at most {MOST_TOKENS}",
                got=str(len(self.grants)), hint="make fewer, with more uses each",
            )  # fmt: skip
        if not 0 <= grant.uses <= MOST_USES:
            raise ConfigError(
                "a token cannot have so many uses", who="--uses", expected=f"1 to {MOST_USES}, or 0: any number",
                got=str(grant.uses),
            )  # fmt: skip
        self.grants[grant.id] = grant
        return gone

    @property
    def ends(self) -> float:
        """Seconds since 1970: when the last certificate of all does."""
        return max((one.until for one in self.holders.values()), default=0.0)

    def good(self, grant: Grant, now: float) -> bool:
        """Whether newcomers may come with it."""
        return self._unfit(grant, now) is None

    def _unfit(self, grant: Grant, now: float, *, comes_back: bool = False) -> tuple[str, str] | None:
        """Why a newcomer, or who came with it before, may not come with it, and what it is; None: it may."""
        if grant.revoked:
            return "is revoked", "this one"
        if self.replaced(grant) and not comes_back:
            return "names no authority of this master's any more", "one of an authority that was replaced"
        if 0 < grant.expires <= now:
            return "has expired", f"one that ended {now - grant.expires:.0f} s ago by the master's clock"
        return None

    def replaced(self, grant: Grant) -> bool:
        """Whether no newcomer can come with it, since the authority that it names is gone."""
        return bool(grant.authority) and grant.authority not in self.believed

    def revoke(self, id: str) -> None:
        """It is good for nothing any more.

        Raises:
            ConfigError: there is none of this id.
        """
        if id not in self.grants:
            raise ConfigError("there is no such token", who=id, hint="`wancoll token list` shows their ids")
        self.grants[id] = replace(self.grants[id], revoked=True)

    def believing(self, believed: Collection[str]) -> Registry:
        """A copy, where these authorities are believed."""
        found = Registry({}, {}, believed)
        found.grants, found.holders, found.forgotten = dict(self.grants), dict(self.holders), list(self.forgotten)
        return found

    def check_secret(self, id: str, secret: str) -> Grant:
        """What the token allows.

        Raises:
            ConfigError: it is not known, or has another secret; which of both is not told.
        """
        grant = self.grants.get(id)
        good = hmac.compare_digest(hash_of(secret), grant.hashed if grant is not None else hash_of(""))
        if grant is None or not good:
            raise _refused(id, "is not known, or its secret is wrong", "a token of this master", "another one", _LIST)
        return grant

    def admit(self, id: str, secret: str, name: str, key: str, now: float, until: float) -> Identity:
        """Admit a daemon with its token; it gets a certificate that is good until *until*.

        Args:
            id: of the token.
            secret: its secret.
            name: that is asked for.
            key: hash of the public key; with the same name it may come again, and is counted once.
            now: seconds since 1970.
            until: the same.

        Raises:
            ConfigError: it is refused, and why.
        """
        grant = self.check_secret(id, secret)
        held = self.holders.get(name)
        comes_back = held is not None and (held.token, held.key) == (id, key)
        if (unfit := self._unfit(grant, now, comes_back=comes_back)) is not None:
            raise _refused(id, unfit[0], "a token that is good", unfit[1], _LIST)
        if grant.name and name != grant.name:
            hint = f"start it with --name {grant.name}, or make a token for it"
            raise _refused(id, "is for another name", grant.name, repr(name), hint)
        if not grant.name:  # one that is for this name takes it from another key
            self._check_key(id, name, key, now)
        used, use = grant.used, hash_of(f"{key} {name}")
        if grant.uses and use not in used:
            used = tuple(one for one in used if one != key)  # of earlier versions, which knew no name: it is this one's
            if len(used) >= grant.uses:
                what = f"at most {grant.uses} daemons, each with one name and key"
                raise _refused(id, "is used up", what, "one more", _LIST)
            used = (*used, use)
        self._hold(name, Holder(id, until, key), now)
        self.grants[id] = replace(grant, used=used)
        return Identity(name, grant.role, grant.groups, id)

    def renew(self, identity: Identity, key: str, now: float, until: float) -> None:
        """Whoever has a good certificate gets one that is good until *until*, for the same *key* (its hash).

        Raises:
            ConfigError: it is refused, and why.
        """
        self.check(identity)
        self._check_key(identity.token, identity.name, key, now)
        self._hold(identity.name, Holder(identity.token, until, key), now)

    def check(self, identity: Identity) -> None:
        """Refuse whoever came with a token that was revoked; one that is not known may have been lost with a journal.

        Raises:
            ConfigError: it was revoked.
        """
        if self._is_revoked(identity.token):
            hint = "start it with a new token: --join"
            raise _refused(identity.token, "by which it came in is revoked", "one that is good", "this one", hint)

    def adopt(self, identity: Identity, now: float) -> bool:
        """Take in the token, not known so far, of *identity*: it can be revoked, and lets in nobody new."""
        id = identity.token
        if not id or id in self.grants or len(self.grants) >= MOST_TOKENS:
            return False
        self.grants[id] = Grant(id=id, hashed="", role=identity.role, groups=identity.groups, expires=now)
        return True

    def _is_revoked(self, token: str) -> bool:
        return token in self.grants and self.grants[token].revoked

    def _check_key(self, id: str, name: str, key: str, now: float) -> None:
        """Check that no other key has the *name* by a certificate that is still good."""
        holder = self.holders.get(name)
        if holder is not None and holder.key != key and holder.until > now and not self._is_revoked(holder.token):
            raise _refused(
                id, "cannot give this name, which is another daemon's (it has another key)", "a name of its own",
                repr(name), "choose another --name; or, if it is the same one and has lost its --state, start it with "
                f"a token for this name (`wancoll token create --name`), or wait {holder.until - now:.0f} s for the "
                "other certificate to end",
            )  # fmt: skip

    def _hold(self, name: str, holder: Holder, now: float) -> None:
        if name not in self.holders and len(self.holders) >= MOST_NAMES:
            for old in [one for one, held in self.holders.items() if held.until <= now]:
                del self.holders[old]
                self.forgotten.append(old)
            if len(self.holders) >= MOST_NAMES:
                what = f"at most {MOST_NAMES} names with certificates"
                raise NotNow(
                    "cannot give a certificate now", who=f"token {holder.token}", expected=what, got="one more",
                    hint="wait for some to end",
                )  # fmt: skip
        self.holders[name] = holder


def hash_of(secret: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def text(row: Grant | Holder) -> str:
    """One row, to be kept."""
    return msgspec.json.encode(row).decode()


def _read(who: str, row: str, kind: type[_Row]) -> _Row:
    try:
        return msgspec.json.decode(row, type=kind)
    except (ValueError, RecursionError) as bad:
        raise ConfigError(
            "what was kept of it cannot be read by this version", who=who, expected=f"a {kind.__name__}",
            got=f"{row[:100]!r} ({bad})", hint="run the same version as before, on all masters",
        ) from bad  # fmt: skip


def _refused(id: str, what: str, expected: str, got: str, hint: str) -> ConfigError:
    return ConfigError(what, who=f"token {id}", expected=expected, got=got, hint=hint)
