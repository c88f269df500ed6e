"""Admission at a master that listens with TLS: its keys, its tokens, whose key may come in, what admins ask.

The state folder, for the master's user alone, holds the master's keys in one file (two keys while a rotation is on),
their public halves for commands on this machine, and the key by which such commands are "admin", which is new at each
start. Masters that share an etcd have keys, tokens, names and one admin's key there, sealed; a standby knows no tokens,
and admits nobody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from wancoll.errors import ConfigError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.net.listen import Sparing
from wancoll.net.proof import make_receipt, read_receipt
from wancoll.net.tls import Listening
from wancoll.trust.folder import ADMIN_KEY, MASTER_KEY, MASTER_PUBLIC, own_folder, write_secret
from wancoll.trust.identity import Identity
from wancoll.trust.keys import Key, read_keys
from wancoll.trust.registry import ChangedRows, Grant, NotNow, Registry, hash_of
from wancoll.trust.token import Token
from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll_master.store.journal import Journal
    from wancoll_master.store.shared_trust import Rows

log = structlog.get_logger("wancoll.master")

_ID_BYTES, _SECRET_BYTES = 4, 32
_LONGEST_NAME = chr(0x10FFFF) * DEFAULT.name_chars
_SHOWN = 12  # characters of a key that tell it from others
_KINDS = ("token", "name", "key")
# Where there is no good token: for any number of daemons, for a day.
_FIRST = m.MakeToken(PROTOCOL_VERSION, "peer", "", [], uses=0, seconds=24 * 3600.0)
_ON_ITS_MACHINE = "run this on the master's machine, as its user"


class Gate:
    """Decides which connections a master lets in.

    Args:
        folder: for its files; made.
        book: keeps tokens, names, and keys that are void. None: it comes with lead().
        clock: seconds since 1970.
        shared: the keys of all masters of an etcd, the newest last; None: this one's own.
        admin: the key by which commands are admin at all these masters; None: a new one.

    Attributes:
        address: that tokens tell to dial, once it is known.
        shares: whether this is one of several masters with one key.
        keys: of this master, the newest last; two while a rotation is on.
        listening: shows them.

    Raises:
        ConfigError: files cannot be read, written or used.
    """

    def __init__(
        self, folder: str, book: Journal | Rows | None, *, clock: Callable[[], float] = time.time,
        shared: Sequence[Key] | None = None, admin: Key | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._book, self._clock = folder, book, clock
        self.shares = shared is not None
        self._shared: Rows | None = None  # while this master leads
        self._refusals = Sparing()
        self._unwritten: ChangedRows = {}  # rows for the book, by kind and id
        self.address = ""
        self._pending: Callable[[], tuple[str, str]] | None = None  # what counts once the book has it
        try:
            own_folder(folder)
            self._use(self._load() if shared is None else self._share(shared))
            self._admin = admin or Key.new()
            write_secret(self._path(ADMIN_KEY), self._admin.pem)
        except OSError as bad:
            raise ConfigError(
                "cannot be written to", who=folder, got=str(bad), hint="choose another folder with --state"
            ) from bad
        self._registry = self._remembered()

    # ---- keys ----------------------------------------------------------------------------------------

    def _load(self) -> list[Key]:
        """The keys of before, or a new one."""
        path = self._path(MASTER_KEY)
        if os.path.exists(path):
            return read_keys(path)
        new = Key.new()
        log.info("a new key", folder=self._folder, key=new.public.hex())
        return self._write_keys([new])

    def _write_keys(self, keys: Sequence[Key]) -> list[Key]:
        """*keys*, which count from now on after a crash, too."""
        write_secret(self._path(MASTER_KEY), b"".join(key.pem for key in keys))
        return list(keys)

    def _share(self, shared: Sequence[Key]) -> Sequence[Key]:
        if os.path.exists(self._path(MASTER_KEY)):
            raise ConfigError(
                "is the state folder of a master with a key of its own", who=self._folder,
                expected="another one, since masters with --etcd share a key", got=MASTER_KEY,
                hint="choose another folder with --state; daemons need new tokens",
            )  # fmt: skip
        return shared

    def _use(self, keys: Sequence[Key]) -> None:
        self.keys, self.listening = list(keys), Listening(list(keys)[::-1])
        self._tell(MASTER_PUBLIC, "\n".join(self.publics).encode())

    def _tell(self, name: str, data: bytes) -> None:
        """Have it in the folder, for commands on this machine."""
        try:
            write_secret(self._path(name), data)
        except OSError as bad:
            log.error("commands on this machine do not have the newest keys", reason=str(bad))

    @property
    def publics(self) -> list[str]:
        """Public keys in hex, the newest last."""
        return [key.public.hex() for key in self.keys]

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def close(self) -> None:
        """Nobody is to ask this master as admin any more."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(ADMIN_KEY))

    # ---- what is remembered --------------------------------------------------------------------------

    def _remembered(self) -> Registry:
        """Tokens and names of before; those of other keys are good for nothing, and are forgotten."""
        book, publics = self._book, self.publics
        if book is None:
            return Registry({})
        known = set(book.trust("master"))
        void = not known & set(publics)
        rows = {kind: {} if void else book.trust(kind) for kind in _KINDS}
        if known != set(publics):
            self._write_owners(self.keys, {} if void else None)
        return Registry(rows, publics)

    def _write_owners(self, keys: Sequence[Key], anew: dict[str, str] | None) -> None:
        """Rows of the journal are of these keys; *anew*: tokens, instead of all rows. A start does the same."""
        assert self._book is not None
        book, changed = self._book, ChangedRows()
        if anew is not None:
            self._unwritten.clear()
            changed = {kind: dict.fromkeys(book.trust(kind)) for kind in _KINDS}
            changed["token"].update(anew)
        changed["master"] = dict.fromkeys(book.trust("master")) | {key.public.hex(): "" for key in keys}
        self._write(changed)

    def lead(self, book: Rows) -> None:
        """This master leads now, with what is known of keys, tokens and names.

        Raises:
            ConfigError: that cannot be read.
        """
        self.follow(book.keys, book.admin)
        self._book = self._shared = book
        self._registry = Registry({kind: book.trust(kind) for kind in _KINDS}, self.publics)

    def stand_by(self) -> None:
        """This master leads no more: what was not written is not so."""
        self._pending = None

    def follow(self, keys: Sequence[Key], admin: Key) -> None:
        """The keys that the masters share, and that of their admin, are these now."""
        if [key.public for key in keys] != [key.public for key in self.keys]:
            self._use(keys)
        if admin.public != self._admin.public:
            self._admin = admin
            self._tell(ADMIN_KEY, admin.pem)

    def _write(self, changed: ChangedRows) -> str:
        """Write what has *changed*. Why it is not written now, but with what comes next; "": it is."""
        assert self._book is not None
        for kind, rows in changed.items():
            self._unwritten.setdefault(kind, {}).update(rows)
        try:
            for kind, rows in self._unwritten.items():
                kept = {id: row for id, row in rows.items() if row is not None}
                self._book.keep_trust(kind, kept, [id for id, row in rows.items() if row is None])
        except sqlite3.Error as bad:
            log.error("tokens and names cannot be written; a restart of the master may forget", reason=str(bad))
            return str(bad)
        self._unwritten.clear()
        return ""

    # ---- what counts once it is written --------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether settle() has nothing to do. Until then all is as before, and nothing more is changed."""
        return self._pending is None

    def settle(self) -> tuple[str, str] | None:
        """The book has what takes rights away, so that is so now: check() has to be asked of all who are there.

        Returns: for the event log: its kind, and what was done.
        """
        pending, self._pending = self._pending, None
        return pending() if pending is not None else None

    def _turn(self, registry: Registry, keys: Sequence[Key], event: tuple[str, str]) -> tuple[str, str]:
        self._registry = registry
        self.follow(keys, self._shared.admin if self._shared is not None else self._admin)
        registry.masters = self.publics
        log.warning(event[1], keys=self.publics)
        return event

    # ---- who comes -----------------------------------------------------------------------------------

    def identify(self, first: m.Signed, present: Collection[str] = ()) -> Identity:
        """The identity of whoever has signed *first*, of which proof.check_first() holds. Of a master that leads.

        A newcomer is admitted. Names in *present* are connected, and are not forgotten for it.

        Raises:
            NotNow: it may come in a moment.
            ConfigError: nobody knows it, or it is refused.
        """
        if first.key == self._admin.public:
            return Identity("admin", "admin", key=first.key)
        registry, token = self._registry, first.token.partition(".")[0]
        who = registry.known(first.name, first.key)
        if who is not None and token in ("", who.token):
            registry.check(who)
            return who
        self._check_settled()
        if who is None:
            who = read_receipt(first.receipt, first.key, [key.public for key in self.keys])
            who = who if who is not None and who.name == first.name else None
        if who is None or token not in ("", who.token):  # a newcomer, or with another token than before
            try:
                who = self._admit(first, present)
                log.info("admitted", name=who.name, role=who.role, token=who.token)
            except NotNow:
                raise
            except ConfigError as refused:
                if who is None:
                    raise
                log.warning("another token is refused, and not needed", name=who.name, reason=str(refused))
        if registry.known(who.name, who.key) is None:
            registry.adopt(who, self._clock(), present)
            what = "known by its receipt alone: its name was forgotten, or lost with a journal"
            log.warning(what, name=who.name, token=who.token)
        registry.check(who)
        self._write(registry.take_changed())
        return who

    def _admit(self, first: m.Signed, present: Collection[str]) -> Identity:
        token, _, secret = first.token.partition(".")
        if not token:
            raise ConfigError(
                "has a key that this master does not know", who=first.name or "whoever asks",
                expected="a key that was admitted before, or a token", got=f"key {first.key.hex()}",
                hint="start it with --join and a token: `wancoll token create` makes one, on the master's machine",
            )  # fmt: skip
        return self._registry.admit(token, secret, first.name, first.key, self._clock(), present)

    def admitted(self, who: Identity) -> m.Admitted | None:
        """What to tell a daemon after its Welcome, and when the keys change; None: whoever is admin for this run."""
        if who.key == self._admin.public:
            return None
        return m.Admitted(make_receipt(self.keys, who), [key.public for key in self.keys])

    def check(self, who: Identity) -> None:
        """Check that *who* is still authorised. Call on the leader only: standbys do not know tokens.

        Raises:
            ConfigError: its token or its key was revoked, or it is not known any more.
        """
        if who.key == self._admin.public:
            return
        self._registry.check(who)
        if self._registry.known(who.name, who.key) is None:
            raise ConfigError(
                "is not known any more", who=who.name, expected="a key that this master has admitted",
                got=f"key {who.key.hex()}", hint="start it with a new token: --join",
            )  # fmt: skip

    # ---- what admins ask -----------------------------------------------------------------------------

    def first_token(self) -> str:
        """A token to paste, where there is none that is good: for any number of daemons, for a day. Else ""."""
        now = self._clock()
        if any(self._registry.good(one, now) for one in self._registry.grants.values()):
            return ""
        try:
            return self._make(_granted(_FIRST, now))
        except ConfigError as bad:  # no reason not to lead: whoever was admitted needs none
            log.error("no token can be made for daemons to come", reason=str(bad))
            return ""

    def answer(self, message: m.AboutTrust, who: Identity | None) -> m.AnswersOfTrust:
        """What to say to a message about trust from *who*, once what it does is written; see settled."""
        try:
            if who is None or who.groups:  # else it could make a token for all groups
                raise ConfigError(
                    "may not look after tokens and keys", who=who.name if who else "whoever has no key",
                    expected="an admin of all groups", got=", ".join(who.groups) if who else "nobody",
                    hint=_ON_ITS_MACHINE,
                )  # fmt: skip
            self.check(who)
            match message:
                case m.ListTokens():
                    return self._tokens(self._registry)
                case m.AskKeys():
                    return self._keys_are(self.keys)
            self._check_settled()
            match message:
                case m.MakeToken():
                    return self._tokens(self._registry, self._make(_granted(message, self._clock())))
                case m.RotateKey():
                    return self._rotate(message)
            return self._revoke(message)
        except ConfigError as refused:
            what, by = type(message).__name__, who.name if who else "a stranger"
            self._refusals.say(log.warning, "refused", what=what, by=by, reason=str(refused))
            about = m.Tokens if isinstance(message, m.MakeToken | m.RevokeToken | m.ListTokens) else m.KeysAre
            return about(refused=str(refused))

    def _check_settled(self) -> None:
        if not self.settled:
            raise NotNow(
                "writes another change of its tokens or keys", who="this master", expected="one at a time",
                got="one more", hint="ask again",
            )  # fmt: skip

    def _revoke(self, ask: m.RevokeToken | m.RevokeKey) -> m.AnswersOfTrust:
        """Have a revocation written, for settle(). Raises ConfigError: it counts, but cannot be written."""
        registry = self._registry.copy()
        if isinstance(ask, m.RevokeToken):
            registry.revoke(ask.token)
            what, whom = f"token {ask.token}", "who came in with it"
        else:
            registry.revoke_key(ask.name)
            what, whom = f"the key of {ask.name}", "it"
        unwritten = self._write(registry.take_changed())
        event = "revoked", f"an operator has revoked {what}: {whom} is sent away"
        self._pending = partial(self._turn, registry, self.keys, event)
        if unwritten:
            raise ConfigError(
                "is revoked only until this master ends: that cannot be written", who=what, got=unwritten,
                hint="put that right where the master has its --journal, and revoke it again",
            )  # fmt: skip
        return self._tokens(registry) if isinstance(ask, m.RevokeToken) else self._keys_are(self.keys)

    def _rotate(self, ask: m.RotateKey) -> m.KeysAre:
        """Begin a rotation, finish it, or replace all at once; a crash leaves the one or the other."""
        old, made, registry = self.keys, "", self._registry.copy()
        anew: dict[str, str] | None = None
        if ask.now:
            keys, registry = [Key.new()], Registry({})
            made = self._draw(registry, _granted(_FIRST, self._clock()), keys[-1])
            anew = {id: row for id, row in registry.take_changed()["token"].items() if row is not None}
            text = "an operator has replaced it at once by {}: all daemons are sent away, no token of before is good"
        elif ask.finish:
            if len(old) < 2:
                raise ConfigError(
                    "there is no rotation to finish", who="wancoll key rotate --finish", expected="two keys", got="one",
                    hint="`wancoll key rotate` begins one",
                )  # fmt: skip
            keys, text = old[-1:], "the rotation is finished: {} alone is good"
        else:
            if len(old) > 1:
                raise ConfigError(
                    "a rotation is under way already", who="wancoll key rotate", expected="one key", got="two",
                    hint="--finish ends it once all daemons have been connected since; where a key was stolen, --now",
                )  # fmt: skip
            keys, text = [old[-1], Key.new()], "an operator rotates it: {} is made known to all"
        event = "key", text.format(f"{keys[-1].public.hex()[:_SHOWN]}...")
        try:
            if self._shared is not None:
                self._shared.keep_keys(keys, anew=anew)
            else:
                self._write_keys(keys)  # they count now, whatever becomes of the journal's rows
                self._write_owners(keys, anew)
        except OSError as bad:
            raise ConfigError("cannot be written", who="the master's key", got=str(bad)) from bad
        self._pending = partial(self._turn, registry, keys, event)
        return self._keys_are(keys, made)

    def _make(self, grant: Grant) -> str:
        """The text of a new token, which is known from now on, and written."""
        registry = self._registry
        made = self._draw(registry, grant, self.keys[-1])
        if unwritten := self._write(registry.take_changed()):
            id = next(reversed(registry.grants))
            registry.forget(id)
            registry.take_changed()
            del self._unwritten["token"][id]
            raise ConfigError(
                "a new token cannot be written", who="this master", got=unwritten,
                hint="put that right where it has its --journal, and ask again",
            )  # fmt: skip
        return made

    def _draw(self, registry: Registry, grant: Grant, master: Key) -> str:
        """The text of a new token, which *registry* knows from now on; it is not written."""
        id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
        largest = Identity(grant.name or _LONGEST_NAME, grant.role, grant.groups, id, master.public)
        size = len(make_receipt([master, master], largest))
        if size > m.RECEIPT_BYTES:
            raise ConfigError(
                "asks for a receipt that is too large", who="wancoll token create --group",
                expected=f"at most {m.RECEIPT_BYTES} bytes, with all groups' names", got=f"up to {size} bytes",
                hint="name fewer groups, or shorter names (a letter beyond ASCII takes 2 to 4 bytes); no --group is "
                "for any",
            )  # fmt: skip
        registry.add(replace(grant, id=id, hashed=hash_of(secret), master=master.public.hex()), self._clock())
        return str(Token(master.public, id, secret, self.address))

    def _tokens(self, registry: Registry, made: str = "") -> m.Tokens:
        shown = [
            m.TokenInfo(one.id, one.role, one.name, list(one.groups), one.uses, len(one.used), one.expires, one.revoked,
                        registry.replaced(one))
            for one in registry.grants.values()
        ]  # fmt: skip
        return m.Tokens(shown, made)

    def _keys_are(self, keys: Sequence[Key], made: str = "") -> m.KeysAre:
        return m.KeysAre([key.public for key in keys], made)


def _granted(asked: m.MakeToken, now: float) -> Grant:
    until = now + asked.seconds if asked.seconds else 0.0
    return Grant(
        id="", hashed="", role=asked.role, name=asked.name, groups=tuple(asked.groups), uses=asked.uses, expires=until
    )
