"""Admission at a master that listens with TLS: its authority's files, its tokens, the answers to joining daemons.

The folder, for its user alone, holds the authorities, with their keys and how far a rotation is (core/rotation.py), in
one file; the certificates of those that are believed; the master's own and those of whoever works on this machine as
"admin", which are made anew while it runs. Masters that share an etcd have the authorities, tokens and names there; who
stands by knows no tokens, and answers for none. With certificates of one's own (--cert) there is no authority here, and
tokens are refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog
import trio

from wancoll.errors import ConfigError
from wancoll.limits import CLOCKS_DIFFER, DEFAULT, PROTOCOL_VERSION
from wancoll.net.listen import Sparing
from wancoll.net.tls import ignore_strange_names
from wancoll.trust.authority import Authority, Request, issuer_of, new_key, request, times
from wancoll.trust.identity import Identity
from wancoll.trust.papers import (
    ADMIN,
    AUTHORITY,
    AUTHORITY_KEY,
    LIFETIME,
    MASTER,
    Papers,
    identity_of,
    in_memory,
    own_folder,
    server_name,
    write_secret,
)
from wancoll.trust.registry import Grant, NotNow, Registry, hash_of, text
from wancoll.trust.token import Token
from wancoll.wire import messages as m
from wancoll_master.core.rotation import Rotation
from wancoll_master.store.authorities import as_text, from_text

if TYPE_CHECKING:
    from wancoll.net.tls import Tls

log = structlog.get_logger("wancoll.master")

_ID_BYTES, _SECRET_BYTES = 4, 32
_LONGEST_NAME = chr(0x10FFFF) * DEFAULT.name_chars  # in a certificate
_LEAST_RENEWED = 10.0  # seconds, or a quarter of a certificate's life: what a renewal has to win
_LOOK_SECONDS = 30.0  # between looks at whether certificates are to be made anew
_SHOWN = 12  # characters of a fingerprint that tell it from others
FIRST_TOKEN_SECONDS = 24 * 3600.0
_LONGEST_PHASE = 366 * 24 * 3600.0


class Book(Protocol):
    """Keeps the registry's rows."""

    def trust(self, kind: str) -> dict[str, str]:
        """Rows of before, by id; *kind*: "token", "name"; of a journal also "authority", whose they are."""

    def keep_trust(self, kind: str, rows: dict[str, str], gone: Collection[str] = ()) -> None:
        """Write these, and forget those that are *gone*."""


class SharedBook(Book, Protocol):
    """One that has the authorities, too."""

    rotation: Rotation[Authority]

    def keep_rotation(self, rotation: Rotation[Authority], tokens: dict[str, str] | None = None) -> None:
        """Write it; with *tokens* these are all the rows that there are from then on."""


class Gate:
    """Decides which connections a master lets in.

    Args:
        folder: for its files; made.
        book: keeps tokens, and names. None: it comes with lead().
        own: certificates that the operator gives; None: there is an authority.
        lifetime: seconds, of daemons' certificates.
        clock: seconds since 1970.
        shared: the authorities of all masters of an etcd; None: this one's own.

    Attributes:
        address: that tokens tell to dial, once it is known.
        shares: whether this is one of several masters with one authority.
        changed: what to tell daemons, and when to look next, is other than before.

    Raises:
        ConfigError: files cannot be read, written or used.
    """

    def __init__(
        self,
        folder: str,
        book: Book | None,
        own: Papers | None = None,
        *,
        lifetime: float = LIFETIME,
        clock: Callable[[], float] = time.time,
        shared: Rotation[Authority] | None = None,
    ) -> None:
        self._folder, self._book, self._own = folder, book, own
        self.shares, self.changed = shared is not None, trio.Event()
        self._shared: SharedBook | None = None  # while this master leads
        self._lifetime, self._clock = lifetime, clock
        self._refusals = Sparing()
        self._unwritten: dict[str, dict[str, str]] = {}  # rows for the book, by kind and id
        self.address = ""
        self._fresh_until = 0.0
        self._pending: Callable[[], tuple[str, str]] | None = None  # what counts once the book has it
        self._rotation = None if own else self._adopt(shared) if shared else self._load()
        self._registry = self._remembered(self._believed)
        self._context: ssl.SSLContext
        self._make_anew()

    # ---- files ---------------------------------------------------------------------------------------

    def _load(self) -> Rotation[Authority]:
        """The authorities of before, or a new one."""
        path = self._path(AUTHORITY_KEY)
        try:
            own_folder(self._folder)
            if os.path.exists(path):
                with open(path, "rb") as file:
                    rotation, _ = from_text(file.read())
                return self._written(rotation.taken_up(self._clock()))
            rotation = self._written(Rotation((Authority.make(self._clock()),)))
            log.info("a new authority", folder=self._folder, sha256=rotation.signs.fingerprint)
            return rotation
        except (OSError, ValueError) as bad:
            raise ConfigError(
                "the authority cannot be used", who=self._folder, got=str(bad),
                expected=f"a folder to write in, or {AUTHORITY_KEY} of an earlier master",
                hint="choose another folder with --state; a new authority takes new tokens for all",
            ) from bad  # fmt: skip

    def _written(self, rotation: Rotation[Authority]) -> Rotation[Authority]:
        """It, in the folder: the file with the keys last, which counts; a start writes the other one again.

        Raises:
            OSError: it cannot be written.
        """
        write_secret(self._path(AUTHORITY), _bundle(rotation))
        write_secret(self._path(AUTHORITY_KEY), as_text(rotation).encode())
        return rotation

    def _adopt(self, shared: Rotation[Authority]) -> Rotation[Authority]:
        """Have the certificates that all masters share in the folder, for commands; never their keys."""
        try:
            own_folder(self._folder)
            if os.path.exists(self._path(AUTHORITY_KEY)):
                raise ConfigError(
                    "is the state folder of a master with an authority of its own", who=self._folder,
                    expected="another one, since masters with --etcd share an authority", got=AUTHORITY_KEY,
                    hint="choose another folder with --state; daemons need new tokens",
                )  # fmt: skip
            write_secret(self._path(AUTHORITY), _bundle(shared))
        except OSError as bad:
            raise ConfigError(
                "cannot be written to", who=self._folder, got=str(bad), hint="choose another --state"
            ) from bad
        return shared

    def lead(self, book: SharedBook) -> None:
        """This master leads now, with what is known of authorities, tokens and names.

        Raises:
            ConfigError: that cannot be read.
        """
        self.follow(book.rotation.taken_up(self._clock()))
        self._book = self._shared = book
        self._wake()
        self._registry = Registry(book.trust("token"), book.trust("name"), self._believed)

    def stand_by(self) -> None:
        """This master leads no more: what was not written is not so."""
        self._pending = None
        self._wake()

    def follow(self, rotation: Rotation[Authority]) -> None:
        """The authorities that the masters share are these now, also where the folder cannot be written."""
        if self._rotation is not None and _same(rotation, self._rotation):
            self._rotation = rotation
            return
        self._use(rotation)

    def _remembered(self, believed: list[str]) -> Registry:
        """Tokens and names of before; those of another authority are good for nothing, and are forgotten."""
        book = self._book
        if book is None:
            return Registry({}, {})
        if self._own is None:
            known = list(book.trust("authority"))
            if not set(known) & set(believed):
                for kind in ("token", "name"):
                    self._write(kind, {}, list(book.trust(kind)))
            if set(known) != set(believed):
                self._write("authority", dict.fromkeys(believed, ""), [one for one in known if one not in believed])
        return Registry(book.trust("token"), book.trust("name"), believed)

    @property
    def _believed(self) -> list[str]:
        return _prints(self._rotation) if self._rotation is not None else []

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def reload(self) -> None:
        """Read the operator's certificates again, or make the master's own anew; what cannot be used is logged."""
        try:
            self._make_anew()
            log.info("certificates are new")
        except ConfigError as bad:
            log.error("certificates are as before: the new ones cannot be used", reason=str(bad))
        except OSError as bad:
            self._try_later(bad)

    def _make_anew(self) -> None:
        """Listen with new certificates from now on; and only then have new ones in the folder, for commands.

        Raises:
            ConfigError: the operator's own cannot be used.
            OSError: the folder cannot be written.
        """
        if self._own is not None or self._rotation is None:
            assert self._own is not None
            self._context = self._own.to_listen()
            return
        now, rotation = self._clock(), self._rotation
        context, mine = self._shows(rotation, rotation.signs, now)
        ignore_strange_names()
        for one in rotation.believed[1:]:  # who dials says which one it knows, and is shown a certificate of that
            context.sni_callback = _chooser(server_name(one.fingerprint), self._shows(rotation, one, now)[0])
        self._context, self._fresh_until = context, now + LIFETIME / 2
        if self.shares:  # else they are there, or it had not become so
            write_secret(self._path(AUTHORITY), _bundle(rotation))
        key = new_key()
        admin = rotation.signs.sign(Request.read(request(key)), Identity("admin", "admin"), now, LIFETIME)
        write_secret(self._path(f"{ADMIN}.pem"), admin + key)  # one file: whoever reads has both of one time
        write_secret(self._path(MASTER), mine)  # for metrics, which say when it ends

    def _try_later(self, bad: OSError) -> None:
        self._fresh_until = self._clock() + _LOOK_SECONDS  # not for each stranger who connects
        log.error("certificates for commands on this machine cannot be written; it is tried again", reason=str(bad))

    def _shows(self, rotation: Rotation[Authority], sign: Authority, now: float) -> tuple[ssl.SSLContext, bytes]:
        """To listen with, and its certificate by *sign*. In memory: the folder may be unwritable now."""
        key = new_key()
        mine = sign.sign_master(Request.read(request(key)), now, LIFETIME)
        with in_memory(_bundle(rotation)) as believed, in_memory(mine + key) as own:
            return Papers(believed, own).to_listen(), mine

    # ---- rotation ------------------------------------------------------------------------------------

    @property
    def authorities(self) -> m.AuthorityIs | None:
        """The authorities that daemons shall believe; None: the operator says so."""
        return None if self._rotation is None else m.AuthorityIs(_bundle(self._rotation))

    @property
    def rotating(self) -> tuple[str, float]:
        """The phase of a rotation in progress, and when the next begins, seconds since 1970; ("", 0.0): none is."""
        rotation = self._rotation
        return ("", 0.0) if rotation is None or rotation.phase == "steady" else (rotation.phase, rotation.until)

    @property
    def next_look(self) -> float:
        """Seconds until advance() and context() are to be called at the latest."""
        if self._rotation is None or self._rotation.phase == "steady":
            return _LOOK_SECONDS
        left = self._rotation.until - self._clock()
        return min(left, _LOOK_SECONDS) if left > 0 else _LOOK_SECONDS  # a standby waits for who leads

    @property
    def due(self) -> bool:
        """Whether it is time for advance()."""
        return self.settled and self._rotation is not None and self._rotation.due(self._clock())

    def advance(self) -> bool:
        """Have the next phase written, for settle(), if it is time; whether it is. Of a master that leads."""
        rotation, now = self._rotation, self._clock()
        if rotation is None or not self.due:
            return False
        try:
            self._turn(rotation, rotation.next(now, self._registry.ends))
        except (ConfigError, OSError) as bad:
            self._rotation = replace(rotation, until=now + _LOOK_SECONDS)
            log.error("the rotation of the authority cannot go on; it is tried again", reason=str(bad))
            return False
        return True

    @property
    def settled(self) -> bool:
        """Whether settle() has nothing to do. Until then all is as before, and answer() changes nothing more."""
        return self._pending is None

    def settle(self) -> tuple[str, str] | None:
        """The book has what takes rights away, so that is so now: check() has to be asked of all who are there.

        Returns: for the event log: its kind, and what was done.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        done = pending()
        self._wake()
        return done

    def _turn(self, former: Rotation[Authority], rotation: Rotation[Authority], anew: Registry | None = None) -> None:
        """Have another phase written, for settle(): a crash leaves the one or the other.

        *anew*: instead of all that is known; it has tokens only.

        Raises:
            OSError: it cannot be written; all is as before.
        """
        tokens = None if anew is None else {id: text(one) for id, one in anew.grants.items()}
        if self._shared is not None:
            self._shared.keep_rotation(rotation, tokens)
            registry = anew or self._registry.believing(_prints(rotation))
        else:
            try:
                self._written(rotation)
            except OSError:
                with contextlib.suppress(OSError):
                    write_secret(self._path(AUTHORITY), _bundle(former))
                raise
            registry = self._remembered(_prints(rotation))
            if anew is not None:
                self._unwritten.clear()
                self._write("token", tokens or {})
                registry = anew
        self._pending = partial(self._turned, rotation, registry)

    def _turned(self, rotation: Rotation[Authority], registry: Registry) -> tuple[str, str]:
        before = self._believed
        self._use(rotation)
        self._registry = registry
        log.warning(
            "the authority is rotated" if rotation.phase != "steady" else "the authority is another one",
            phase=rotation.phase, signs=rotation.signs.fingerprint, believed=self._believed,
            seconds=max(0.0, round(rotation.until - self._clock(), 1)),
        )  # fmt: skip
        return "authority", _turns(rotation, before)

    def _use(self, rotation: Rotation[Authority]) -> None:
        self._rotation, self._fresh_until = rotation, 0.0
        self.reload()
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def _rotate(self, rotation: Rotation[Authority], ask: m.Rotate) -> m.RotationIs:
        """Begin; with *now* there is a new token."""
        now, new, made, anew = self._clock(), Authority.make(self._clock()), "", None
        if ask.now:
            next, anew = Rotation((new,)), Registry({}, {}, [new.fingerprint])
            made, *_ = self._draw(_first(now), anew, new)
        else:
            least, period = self._lifetime, ask.seconds or self._lifetime + CLOCKS_DIFFER
            if not least <= period <= _LONGEST_PHASE:
                raise ConfigError(
                    "a phase cannot be so long", who="--phase", expected=f"{least:.0f} s, the lifetime of "
                    f"certificates, to {_LONGEST_PHASE:.0f} s", got=f"{period:g} s",
                    hint="leave it out for what is safe",
                )  # fmt: skip
            next = rotation.begin(new, now, period, self._registry.ends)
        try:
            self._turn(rotation, next, anew)
        except OSError as bad:
            raise ConfigError("cannot be written to", who=self._folder, got=str(bad)) from bad
        return _told(next, made)

    def context(self) -> ssl.SSLContext:
        """To listen with, now."""
        if self._own is None and self._clock() >= self._fresh_until:
            try:
                self._make_anew()
            except OSError as bad:
                self._try_later(bad)
        return self._context

    def close(self) -> None:
        """Nobody is to ask this master as admin any more."""
        with contextlib.suppress(OSError):
            if self._own is None:
                os.unlink(self._path(f"{ADMIN}.pem"))

    # ---- who comes -----------------------------------------------------------------------------------

    def identity(self, tls: Tls) -> Identity | None:
        """The identity in the verified certificate. Ask check() next: the believed authorities may have changed."""
        who, rotation = identity_of(tls.certificate()), self._rotation
        if who is None or rotation is None:
            return who
        signed = issuer_of(ssl.DER_cert_to_PEM_cert(tls.shown()).encode(), _bundle(rotation))
        return replace(who, authority=rotation.believed[signed].fingerprint if signed is not None else "")

    def renewed(self, who: Identity) -> Identity:
        """The same, by a certificate that is made now."""
        return replace(who, authority=self._rotation.signs.fingerprint) if self._rotation is not None else who

    def check(self, who: Identity) -> None:
        """Check that *who* is still authorised. Call on the leader only: standbys do not know tokens.

        Raises:
            ConfigError: another authority has signed its certificate than those that are believed now, or the token
                that it was got with is revoked.
        """
        if self._rotation is None:
            return
        if who.authority not in self._believed:
            raise ConfigError(
                "has a certificate of an authority that was replaced", who=who.name,
                expected="one that this master believes: " + " or ".join(self._believed),
                got=who.authority or "another", hint="start it with a new token: --join",
            )  # fmt: skip
        self._registry.check(who)
        if self.settled and self._registry.adopt(who, self._clock()):
            log.warning(
                "not known, and so not known to be revoked: it was lost with the journal",
                token=who.token,
                name=who.name,
            )
            self._write("token", {who.token: text(self._registry.grants[who.token])})

    def first_token(self) -> str:
        """A token to paste, where there is none that is good: for any number of daemons, for a day. Else ""."""
        now = self._clock()
        if self._rotation is None or any(self._registry.good(one, now) for one in self._registry.grants.values()):
            return ""
        return self._make(_first(now), self._registry, self._rotation.newest)

    def answer(self, message: m.AboutTrust, who: Identity | None) -> m.AnswersOfTrust | m.Bye:
        """What to say to a message about trust from *who*, once what it does is written; see settled.

        Bye: a newcomer is to ask again, since a refusal would end it.
        """
        try:
            if self._rotation is None:
                raise ConfigError(
                    "takes certificates of its operator's own authority only", who="this master",
                    expected="--ca, --cert and --key", got="a token", hint="ask whoever runs it for a certificate",
                )  # fmt: skip
            if isinstance(message, m.AskAuthority):
                return m.AuthorityIs(_bundle(self._rotation))
            if not self.settled and not isinstance(message, m.AskRotation | m.ListTokens):
                raise NotNow(
                    "writes another change of its tokens or authority", who="this master",
                    expected="one at a time", got="one more", hint="ask again",
                )  # fmt: skip
            if isinstance(message, m.Enroll):
                return self._enroll(self._rotation, message)
            if who is not None:
                self.check(who)
            if isinstance(message, m.Renew):
                return self._renew(self._rotation, message, who)
            if who is None or who.groups:  # else it could make a token for all groups
                raise ConfigError(
                    "may not look after tokens", who=who.name if who else "who has no certificate",
                    expected="an admin of all groups", got=", ".join(who.groups) if who else "nobody",
                    hint="run this on the master's machine, as its user",
                )  # fmt: skip
            if isinstance(message, m.AskRotation):
                return _told(self._rotation)
            if isinstance(message, m.Rotate):
                return self._rotate(self._rotation, message)
            return self._administer(self._rotation, message)
        except ConfigError as refused:
            what, by = type(message).__name__, who.name if who else "a stranger"
            self._refusals.say(log.warning, "refused", what=what, by=by, reason=str(refused))
            if isinstance(message, m.Enroll) and isinstance(refused, NotNow):
                return m.Bye(str(refused)[:1000])
            if isinstance(message, m.Enroll | m.Renew):
                return m.Enrolled(b"", str(refused))
            about = m.RotationIs if isinstance(message, m.AskRotation | m.Rotate) else m.Tokens
            return about(refused=str(refused))

    def _enroll(self, rotation: Rotation[Authority], ask: m.Enroll) -> m.Enrolled:
        if ask.protocol != PROTOCOL_VERSION:
            raise ConfigError(
                "speaks another version of the protocol", who="this daemon", expected=str(PROTOCOL_VERSION),
                got=str(ask.protocol), hint="run the same wancoll version everywhere",
            )  # fmt: skip
        now, registry = self._clock(), self._registry
        registry.check_secret(ask.token, ask.secret)  # before anything costs time
        wanted = Request.read(ask.request)
        who = registry.admit(ask.token, ask.secret, ask.name, wanted.hashed, now, now + self._lifetime)
        self._keep(who)
        log.info("a certificate", name=who.name, role=who.role, token=who.token)
        return m.Enrolled(rotation.signs.sign(wanted, who, now, self._lifetime), authorities=_bundle(rotation))

    def _renew(self, rotation: Rotation[Authority], ask: m.Renew, who: Identity | None) -> m.Enrolled:
        if who is None:
            raise ConfigError("has no certificate to renew", who="this connection", hint="join with a token")
        now, held = self._clock(), self._registry.holders.get(who.name)
        won = now + self._lifetime - held.until if held else _LEAST_RENEWED
        of_now = now - won >= rotation.since  # else another authority has signed it
        # Before it costs time. Less than 0: a shorter life is wanted.
        if of_now and 0 <= won < min(_LEAST_RENEWED, self._lifetime / 4):
            raise ConfigError("renews its certificate too often", who=who.name, got=f"again within {won:.1f} s")
        wanted = Request.read(ask.request)
        self._registry.renew(who, wanted.hashed, now, now + self._lifetime)
        self._keep(who)
        log.info("a certificate is renewed", name=who.name, token=who.token)
        return m.Enrolled(rotation.signs.sign(wanted, who, now, self._lifetime), authorities=_bundle(rotation))

    def _administer(
        self, rotation: Rotation[Authority], message: m.MakeToken | m.RevokeToken | m.ListTokens
    ) -> m.Tokens:
        made, registry = "", self._registry
        if isinstance(message, m.MakeToken):
            until = self._clock() + message.seconds if message.seconds else 0.0
            made = self._make(
                Grant(
                    id="", hashed="", role=message.role, name=message.name, groups=tuple(message.groups),
                    uses=message.uses, expires=until,
                ),
                registry, rotation.newest,
            )  # fmt: skip
        elif isinstance(message, m.RevokeToken):
            registry = registry.believing(registry.believed)
            registry.revoke(message.token)
            unwritten = self._write("token", {message.token: text(registry.grants[message.token])})
            self._pending = partial(self._revoked, registry, message.token)
            if unwritten:  # it counts all the same, as far as it can
                return m.Tokens(refused=str(ConfigError(
                    "is revoked only until this master ends: that cannot be written", who=f"token {message.token}",
                    got=unwritten, hint="put that right where the master has its --journal, and revoke it again",
                )))  # fmt: skip
        shown = [
            m.TokenInfo(one.id, one.role, one.name, list(one.groups), one.uses, len(one.used), one.expires, one.revoked,
                        registry.replaced(one))
            for one in registry.grants.values()
        ]  # fmt: skip
        return m.Tokens(shown, made)

    def _revoked(self, registry: Registry, token: str) -> tuple[str, str]:
        self._registry = registry
        log.warning("a token is revoked", token=token)
        return "revoked", f"an operator has revoked token {token}: who came in with it is sent away"

    def _make(self, grant: Grant, registry: Registry, authority: Authority) -> str:
        """The text of a new token, which the *registry* knows from now on; its row is written."""
        made, id, gone = self._draw(grant, registry, authority)
        if unwritten := self._write("token", {id: text(registry.grants[id])}, gone):
            del registry.grants[id], self._unwritten["token"][id]
            raise ConfigError(
                "a new token cannot be written", who="this master", got=unwritten,
                hint="put that right where it has its --journal, and ask again",
            )  # fmt: skip
        return made

    def _draw(self, grant: Grant, registry: Registry, authority: Authority) -> tuple[str, str, list[str]]:
        """The same, not written, and its id; ids of tokens that were forgotten for it."""
        id, secret = secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_SECRET_BYTES)
        made = replace(grant, id=id, hashed=hash_of(secret), authority=authority.fingerprint)
        largest = authority.size(Identity(made.name or _LONGEST_NAME, made.role, made.groups, id))
        if largest > m.PEM_BYTES:
            raise ConfigError(
                "asks for a certificate that is too large", who="wancoll token create --group",
                expected=f"at most {m.PEM_BYTES} bytes, with all groups' names", got=f"up to {largest} bytes",
                hint="name fewer groups, or shorter names (a letter beyond ASCII takes 6 to 12 bytes); no --group is "
                "for any",
            )  # fmt: skip
        gone = registry.add(made, self._clock())
        return str(Token(authority.fingerprint, id, secret, self.address)), id, gone

    def _keep(self, who: Identity) -> None:
        """Write what came of *who*."""
        grant = self._registry.grants.get(who.token)
        if grant is not None:
            self._write("token", {grant.id: text(grant)})
        if who.name:
            held = self._registry.holders
            self._write("name", {who.name: text(held[who.name])}, self._registry.forgotten)
            self._registry.forgotten.clear()

    def _write(self, kind: str, rows: dict[str, str], gone: list[str] | None = None) -> str:
        """Why they are not written now, but with the next ones; "": they are."""
        assert self._book is not None
        waiting = self._unwritten.setdefault(kind, {})
        for id in gone or ():
            waiting.pop(id, None)
        waiting.update(rows)
        try:
            self._book.keep_trust(kind, waiting, gone or ())
        except sqlite3.Error as bad:
            log.error("tokens cannot be written; a restart of the master may forget", reason=str(bad))
            return str(bad)
        waiting.clear()
        return ""


def _bundle(rotation: Rotation[Authority]) -> bytes:
    """Certificates of all that are believed, PEM."""
    return b"".join(one.certificate for one in rotation.believed)


def _prints(rotation: Rotation[Authority]) -> list[str]:
    """SHA-256 of each."""
    return [one.fingerprint for one in rotation.believed]


def _turns(rotation: Rotation[Authority], before: Collection[str]) -> str:
    """How a phase begins, for people, where these were believed *before*."""
    new = f"{rotation.newest.fingerprint[:_SHOWN]}..."
    if rotation.phase == "spreading":
        return f"an operator rotates it: {new} is made known to all"
    if rotation.phase == "retiring":
        return f"{new} signs from now on; what the old one has signed is believed still"
    if rotation.newest.fingerprint in before:
        return f"the rotation is over: {new} alone is believed"
    return f"an operator has replaced it at once by {new}: all daemons are sent away, no token of before is good"


def _told(rotation: Rotation[Authority], made: str = "") -> m.RotationIs:
    """For an admin."""
    shown = [
        m.AuthorityInfo(one.fingerprint, *times(one.certificate), one is rotation.signs) for one in rotation.authorities
    ]
    return m.RotationIs(rotation.phase, rotation.until, shown, made)


def _first(now: float) -> Grant:
    """Where there is no good token: for any number of daemons, for a day."""
    return Grant(id="", hashed="", expires=now + FIRST_TOKEN_SECONDS)


def _same(one: Rotation[Authority], other: Rotation[Authority]) -> bool:
    """Whether the same are believed, and the same one signs."""
    return _bundle(one) == _bundle(other)


def _chooser(name: str, other: ssl.SSLContext) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]:
    """Has who asks for *name* served by the *other* context."""

    def choose(connection: ssl.SSLObject, asked: str | None, _: ssl.SSLContext) -> None:
        if asked == name:
            connection.context = other

    return choose
