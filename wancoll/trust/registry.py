"""Which tokens there are and which daemons came in with them: pure, and what a master keeps of it as rows of text.

Secrets are kept as their SHA-256: they are 256 random bits, so nothing slower is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from wancoll.errors import ConfigError
from wancoll.trust.identity import Identity, Role

MOST_TOKENS = 1024
MOST_USES = 1024
MOST_NAMES = 65536  # beyond, the name that was said longest ago is forgotten: its daemon comes back by its receipt
_OTHERS: tuple[Role, ...] = ("relay", "observer", "chaos", "admin")  # than daemons
_LIST = "`wancoll token list` shows what there is, and `wancoll token create` makes a new one, on the master's machine"


_Row = TypeVar("_Row")
ChangedRows = dict[str, dict[str, str | None]]  # to be written, by kind and id; None: it is to be deleted


class NotNow(ConfigError):
    """Refused for a moment: another try does better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a token allows.

    Attributes:
        id: of the token.
        hashed: SHA-256 of its secret, in hex.
        role: of who comes with it.
        name: that it must have; "": any that nobody else has.
        groups: it may join; empty: any.
        uses: how many daemons may come with it, each a name with its key; 0: any number.
        expires: seconds since 1970 from when on nobody new may come; 0.0: never.
        revoked: it is good for nothing, and neither are those who came with it.
        used: hashes of the names and keys that came with it, where they are counted.
        master: the master's public key that its text names, in hex.
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
    master: str = ""


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a name: its public key in hex, and what it was admitted to."""

    key: str
    token: str
    role: Role = "peer"
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Revoked:
    """A key that is void, and the name that it had."""

    name: str


class Registry:
    """Tokens, the names and keys that came with them, and keys that are void.

    Args:
        rows: of before, by kind ("token", "name", "key") and id, as take_changed() gave them.
        masters: the master's public keys that are good, in hex: a token that names another is for nobody new.

    Raises:
        ConfigError: a row cannot be read.
    """

    def __init__(self, rows: dict[str, dict[str, str]], masters: Collection[str] = ()) -> None:
        self.masters = masters
        self._changed: ChangedRows = {}
        self.grants: dict[str, Grant] = _read(rows, "token", Grant)
        self.holders: dict[str, Holder] = _read(rows, "name", Holder)
        self.revoked: dict[str, Revoked] = _read(rows, "key", Revoked)

    def copy(self) -> Registry:
        """The same, of which what changes is not noted here."""
        found = Registry({}, self.masters)
        found.grants, found.holders, found.revoked = dict(self.grants), dict(self.holders), dict(self.revoked)
        return found

    def take_changed(self) -> ChangedRows:
        """What is to be written since the last call."""
        changed, self._changed = self._changed, {}
        return changed

    def _note(self, kind: str, id: str, row: Grant | Holder | Revoked | None) -> None:
        self._changed.setdefault(kind, {})[id] = None if row is None else msgspec.json.encode(row).decode()

    # ---- tokens --------------------------------------------------------------------------------------

    def add(self, grant: Grant, now: float) -> None:
        """A new token. Where there are too many, those that nobody can come with are forgotten.

        Raises:
            ConfigError: there are too many, or it asks for what cannot be.
        """
        if not 0 <= grant.uses <= MOST_USES:
            raise ConfigError(
                "a token cannot have so many uses", who="--uses", expected=f"1 to {MOST_USES}, or 0: any number",
                got=str(grant.uses),
            )  # fmt: skip
        good = [one for one in self.grants.values() if not one.revoked]
        if len(good) >= MOST_TOKENS:  # whoever came with one that has ended has a name
            for one in [one for one in good if not self.good(one, now)]:
                self.forget(one.id)
                good.remove(one)
        if len(good) >= MOST_TOKENS:
            raise ConfigError(
                "there are too many tokens", who="wancoll token create", expected=f"at most {MOST_TOKENS}",
                got=str(len(good)), hint="make fewer, with more uses each",
            )  # fmt: skip
        self._grant(grant)

    def forget(self, id: str) -> None:
        """The token is not known any more."""
        del self.grants[id]
        self._note("token", id, None)

    def good(self, grant: Grant, now: float) -> bool:
        """Whether newcomers may come with it."""
        return self._unfit(grant, now) is None

    def replaced(self, grant: Grant) -> bool:
        """Whether no newcomer can come with it, since the master does not show the key that it names."""
        return bool(grant.master) and grant.master not in self.masters

    def _unfit(self, grant: Grant, now: float) -> tuple[str, str] | None:
        """Why newcomers may not come with it, and what it is; None: they may."""
        if grant.revoked:
            return "is revoked", "this one"
        if self.replaced(grant):
            return "names no key of this master's any more", "one of a key that was replaced"
        if 0 < grant.expires <= now:
            return "has expired", f"one that ended {now - grant.expires:.0f} s ago by the master's clock"
        return None

    def revoke(self, id: str) -> None:
        """The token is good for nothing any more, and its names are free.

        Raises:
            ConfigError: there is none of this id.
        """
        held = next((held for held in self.holders.values() if held.token == id), None)
        if id not in self.grants and held is None:
            raise ConfigError("there is no such token", who=id, hint="`wancoll token list` shows their ids")
        if sum(one.revoked for one in self.grants.values()) >= MOST_NAMES:
            raise _full(id)
        self._grant(replace(self.grants.get(id, Grant(id=id, hashed="")), revoked=True))

    def _grant(self, grant: Grant) -> None:
        self.grants[grant.id] = grant
        self._note("token", grant.id, grant)

    # ---- names and keys ------------------------------------------------------------------------------

    def known(self, name: str, key: bytes) -> Identity | None:
        """The identity of a daemon that was admitted before, which is moved to the end of the names; None: it was not.

        Ask check() next.
        """
        for slot in (name, *(f"{role} {name}" for role in _OTHERS)):
            held = self.holders.get(slot)
            if held is not None and held.key == key.hex():
                self.holders[slot] = self.holders.pop(slot)
                return Identity(name, held.role, held.groups, held.token, key)
        return None

    def admit(self, id: str, secret: str, name: str, key: bytes, now: float, present: Collection[str] = ()) -> Identity:
        """Admit a newcomer with its token.

        Args:
            id: of the token.
            secret: its secret.
            name: that is asked for.
            key: its public key; one that comes again under the same name is counted once.
            now: seconds since 1970.
            present: names that are connected, which are not forgotten.

        Raises:
            ConfigError: it is refused, and why.
        """
        grant = self.grants.get(id)
        good = hmac.compare_digest(hash_of(secret), grant.hashed if grant is not None else hash_of(""))
        if grant is None or not good:
            raise _refused(id, "is not known, or its secret is wrong", "a token of this master", "another one", _LIST)
        if (unfit := self._unfit(grant, now)) is not None:
            raise _refused(id, unfit[0], "a token that is good", unfit[1], _LIST)
        if not name:
            raise _refused(id, "is for somebody with a name", "a name", "none", "give a --name")
        if grant.name and name != grant.name:
            hint = f"start it with --name {grant.name}, or make a token for it"
            raise _refused(id, "is for another name", grant.name, repr(name), hint)
        who = Identity(name, grant.role, grant.groups, id, key)
        self._check_key(who)
        if not grant.name:
            self._check_name(who)
        elif self._holder_before(who) is not None and name in present:  # it takes it from another key that is away
            raise NotNow(
                "is for a name whose daemon is here, with another key", who=f"token {id}", expected="one that is away",
                got=repr(name), hint="it comes in once that one has ended, or was evicted",
            )  # fmt: skip
        used, use = grant.used, hash_of(f"{key.hex()} {name}")
        if grant.uses and use not in used:
            if len(used) >= grant.uses:
                what = f"at most {grant.uses} daemons, each with one name and key"
                raise _refused(id, "is used up", what, "one more", _LIST)
            self._grant(replace(grant, used=(*used, use)))
        self._hold(who, present)
        return who

    def adopt(self, who: Identity, now: float, present: Collection[str] = ()) -> None:
        """Take in whoever has shown a receipt: its name was forgotten, or lost with a journal.

        Its token, where that is not known either, can be revoked from now on, and lets in nobody new.

        Raises:
            ConfigError: it is refused, and why.
        """
        self.check(who)
        self._check_name(who)
        self._hold(who, present)
        if who.token and who.token not in self.grants and len(self.grants) < MOST_TOKENS:
            self._grant(Grant(id=who.token, hashed="", role=who.role, groups=who.groups, expires=now))

    def check(self, who: Identity) -> None:
        """Refuse whoever came with a token that was revoked, or whose key was.

        Raises:
            ConfigError: it was revoked.
        """
        if self._is_revoked(who.token):
            hint = "start it with a new token: --join"
            raise _refused(who.token, "by which it came in is revoked", "one that is good", "this one", hint)
        self._check_key(who)

    def revoke_key(self, who: str) -> None:
        """The key of the daemon *who*, or the key that *who* is in hex, is void, and its names are free.

        Raises:
            ConfigError: nobody has that name, or too many keys are void.
        """
        key = self.holders[who].key if who in self.holders else who
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise ConfigError(
                "is no daemon that was admitted here, and no key", who=who, expected="a name, or 64 hex digits",
                hint="`wancoll status` shows the names of daemons",
            )  # fmt: skip
        if len(self.revoked) >= MOST_NAMES:
            raise _full(who)
        names = [name for name, held in self.holders.items() if held.key == key]
        self.revoked[key] = Revoked(next(iter(names), ""))
        self._note("key", key, self.revoked[key])  # written first: a crash between frees no name alone
        for name in names:
            del self.holders[name]
            self._note("name", name, None)

    def _is_revoked(self, token: str) -> bool:
        return token in self.grants and self.grants[token].revoked

    def _check_key(self, who: Identity) -> None:
        if who.key.hex() in self.revoked:
            raise ConfigError(
                "has a key that an operator has revoked", who=who.name, expected="a key that is good",
                got=f"{who.key.hex()}, once of {self.revoked[who.key.hex()].name or 'nobody known here'}",
                hint="start it with an empty --state and a new token: --join",
            )  # fmt: skip

    def _check_name(self, who: Identity) -> None:
        """Check that no other key has the name."""
        holder = self._holder_before(who)
        if holder is not None and not self._is_revoked(holder.token):
            raise _refused(
                who.token, "cannot give this name, which is another daemon's (it has another key)",
                "a name of its own", repr(who.name),
                "choose another --name; or, if it is the same one and has lost its --state, start it with a token for "
                "this name (`wancoll token create --name`), or free the name (`wancoll key revoke`)",
            )  # fmt: skip

    def _hold(self, who: Identity, present: Collection[str]) -> None:
        slot = _slot(who)
        if (before := self._holder_before(who)) is not None:  # its receipt is good for nothing any more
            if len(self.revoked) >= MOST_NAMES:
                raise _full(who.name)
            self.revoked[before.key] = Revoked(who.name)
            self._note("key", before.key, self.revoked[before.key])
        if slot not in self.holders and len(self.holders) >= MOST_NAMES:
            oldest = next((name for name in self.holders if name not in present), None)
            if oldest is None:
                raise _refused(who.token, "cannot be used now", f"at most {MOST_NAMES} names", "one more", _LIST)
            del self.holders[oldest]
            self._note("name", oldest, None)
        self.holders.pop(slot, None)
        self.holders[slot] = held = Holder(who.key.hex(), who.token, who.role, who.groups)
        self._note("name", slot, held)

    def _holder_before(self, who: Identity) -> Holder | None:
        """The holder of its name, if that is another key."""
        held = self.holders.get(_slot(who))
        return held if held is not None and held.key != who.key.hex() else None


def _slot(who: Identity) -> str:
    """Its name among the holders: only daemons have daemons' names."""
    return who.name if who.role == "peer" else f"{who.role} {who.name}"


def _full(who: str) -> ConfigError:
    return ConfigError(
        "there are too many keys and tokens that are void", who=who, expected=f"at most {MOST_NAMES} of each",
        got="one more", hint="`wancoll key rotate --now --yes` makes all void, and forgets them",
    )  # fmt: skip


def hash_of(secret: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(secret.encode()).hexdigest()


def _read(rows: dict[str, dict[str, str]], kind: str, type: type[_Row]) -> dict[str, _Row]:
    found: dict[str, _Row] = {}
    for id, row in rows.get(kind, {}).items():
        try:
            found[id] = msgspec.json.decode(row, type=type)
        except (ValueError, RecursionError) as bad:
            raise ConfigError(
                "what was kept of it cannot be read by this version", who=f"{kind} {id}",
                expected=f"a {type.__name__}", got=f"{row[:100]!r} ({bad})",
                hint="run the same version as before, on all masters",
            ) from bad  # fmt: skip
    return found


def _refused(id: str, what: str, expected: str, got: str, hint: str) -> ConfigError:
    return ConfigError(what, who=f"token {id}", expected=expected, got=got, hint=hint)
