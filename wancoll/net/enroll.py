"""How somebody gets a certificate from a master with a token, and keeps it with its key in a folder of its own.

First the authorities are fetched from whoever answers, and that one is believed whose hash is the token's; or, where
the token got a certificate before, one of which its master has told since, in a rotation. Over a second connection, to
a master that shows a certificate of it, the secret and a request go; the certificate comes back, and all authorities
that the master believes: a new one may be about to take the other's place. Blocking: for commands, and for a thread of
a daemon.
"""

from __future__ import annotations

import contextlib
import math
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.local import split_address
from wancoll.net.ask import ask
from wancoll.trust.identity import Identity
from wancoll.trust.papers import AUTHORITY, Papers, fingerprints, held_folder, named, own_folder, write_secret
from wancoll.trust.token import Token
from wancoll.wire import messages as m

_RENEW_AFTER = 2 / 3  # of a certificate's life
_CERTIFICATE, _KEY = "certificate.pem", "certificate.key"
_MOST_SHOWN = 3  # of a stranger's certificates, in a message
_NAMED = "named.pem"  # the authority that the token names, while a certificate is asked for


class Refused(ConfigError):
    """The token's own master, verified, does not take it: another try would do no better."""


class WrongMaster(ConfigError):
    """The master that answers is not the token's. Anybody may pretend to be one: this counts as no answer."""


@dataclass(frozen=True, slots=True)
class Wallet:
    """A folder that holds a certificate, its key and the token that got it.

    Args:
        folder: for this user alone; made. Or "": *own* are used.
        token: to get certificates with; None: those in the folder, or *own*, are all there is.
        own: certificates of the operator's own authority.
    """

    folder: str
    token: Token | None
    own: Papers | None = None

    @property
    def papers(self) -> Papers:
        """To dial a master with."""
        if self.own is not None:
            return self.own
        return Papers(self._path(AUTHORITY), self._path(_CERTIFICATE), self._path(_KEY))

    def check_role(self) -> None:
        """Check that the certificate here is a daemon's: members take lanes of no other.

        Raises:
            Refused: it is for somebody else.
            ConfigError: the operator's own names nobody, or cannot be read.
        """
        who = self._owner()
        if who is not None and who.role != "peer":
            raise Refused(
                "is not for daemons", who=f"the token {who.token}" if self.own is None else self.own.certificate,
                expected="a token of role peer" if self.own is None else "no organisational unit that gives a role",
                got=who.role, hint="`wancoll token create` makes a token, on the master's machine",
            )  # fmt: skip

    @property
    def name(self) -> str:
        """The name in the certificate; "": there is no certificate.

        Raises:
            ConfigError: the operator's own names nobody, or cannot be read.
        """
        who = self._owner()
        return who.name if who else ""

    def _owner(self) -> Identity | None:
        """The identity in the certificate; None: there is no certificate."""
        from wancoll.trust import authority

        if self.own is None:
            found = self._certificate()
            return authority.owner(found) if found else None
        try:
            with open(self.own.certificate, "rb") as file:
                who = authority.owner(file.read())
        except (OSError, ValueError) as bad:
            raise ConfigError("cannot be read", who=self.own.certificate, expected="PEM", got=str(bad)) from bad
        if who is None:
            raise ConfigError("names nobody", who=self.own.certificate, expected="a DNS name or a common name")
        return who

    def _certificate(self) -> bytes:
        """PEM. Empty: there is none, or it is damaged, which is as good as none: the token gets another one."""
        from wancoll.trust import authority

        found = _read(self._path(_CERTIFICATE))
        try:
            authority.owner(found)
        except ValueError:
            return b""
        return found

    @contextlib.contextmanager
    def held(self, owner: str, wait: float = 0.0) -> Iterator[None]:
        """The folder is one daemon's, or command's, for as long; *owner* says which to another one that wants it.

        Raises:
            ConfigError: another one has it for *wait* seconds, or it cannot be written to.
        """
        if self.own is not None:
            yield
            return
        with contextlib.ExitStack() as holding:
            try:
                holding.enter_context(held_folder(self.folder, "daemon", owner, wait))
            except OSError as bad:
                raise self._unwritable(bad) from bad
            yield

    def _unwritable(self, bad: OSError) -> ConfigError:
        return ConfigError("cannot be written to", who=self.folder, got=str(bad), hint="choose another --state")

    def good(self, name: str, now: float) -> bool:
        """Whether there is a certificate for *name* that was got with the token and has not expired.

        Raises:
            OSError, ConfigError: that cannot be read now, which says nothing of it.
        """
        from wancoll.trust import authority

        if self.own is not None:
            return True
        certificate, believed = self._certificate(), _read(self._path(AUTHORITY))
        try:
            self.papers.to_dial()  # all are there, none is damaged, and the key is the certificate's
        except ConfigError as bad:
            why = bad.__cause__
            if isinstance(why, OSError) and not isinstance(why, ssl.SSLError | FileNotFoundError):
                raise
            return False
        try:
            who, issuer = authority.owner(certificate), authority.issuer_of(certificate, believed)
        except ValueError:
            return False
        return (
            who is not None
            and self.token is not None
            and (who.name, who.token) == (name, self.token.id)
            and now < authority.times(certificate)[1]
            and issuer is not None
        )

    def came_before(self) -> bool:
        """Whether a certificate was got with the token, be it over: then its master is there, or was.

        Raises:
            OSError: that cannot be read now.
        """
        from wancoll.trust import authority

        found = self._certificate()
        who = authority.owner(found) if found else None
        return who is not None and self.token is not None and who.token == self.token.id

    def renew_at(self) -> float:
        """From when on, seconds since 1970, the certificate is to be renewed; inf: there is none.

        It is old then, or is of another authority than signs now (0.0).

        Raises:
            OSError: that cannot be read now.
        """
        from wancoll.trust import authority

        if self.own is not None or not (certificate := self._certificate()):
            return math.inf
        made, until = authority.times(certificate)
        try:
            of = authority.issuer_of(certificate, _read(self._path(AUTHORITY)))
        except ValueError:
            of = 0
        return made + (until - made) * _RENEW_AFTER if of == 0 else 0.0

    def request(self) -> bytes:
        """For a new certificate, with the key of before: by that a token knows who comes again.

        Raises:
            OSError, ConfigError: the folder cannot be used now.
        """
        from wancoll.trust import authority

        own_folder(self.folder)
        try:
            return authority.request(_read(self._path(_KEY)))
        except ValueError:  # there is none, or it is damaged
            key = authority.new_key()
            write_secret(self._path(_KEY), key)
            return authority.request(key)

    def keep(self, certificate: bytes, authorities: bytes) -> None:
        """Use it, and believe these *authorities*, from now on.

        Raises:
            OSError: it cannot be written.
            ValueError: it is none.
        """
        from wancoll.trust import authority

        authority.times(certificate)
        self.believe(authorities)
        write_secret(self._path(_CERTIFICATE), certificate)

    def believe(self, authorities: bytes) -> bool:
        """Believe these alone, that which signs first, from now on. Whether it was otherwise before.

        Raises:
            OSError: it cannot be written.
            ValueError: they are none.
        """
        from wancoll.trust import authority

        authority.times(authorities)
        if self.own is not None or authorities == _read(self._path(AUTHORITY)):
            return False
        write_secret(self._path(AUTHORITY), authorities)
        return True

    def enroll(self, address: str, name: str, timeout: float, *, follow: bool = True) -> None:
        """Get a certificate for *name* of the master at *address*, or of that which leads while this one stands by.

        Each of two answers takes at most *timeout* seconds.

        Raises:
            WrongMaster: the token is of another one.
            Refused: it is not taken.
            OSError: nobody answers, or not over TLS; or no master leads.
            ProtocolError: the answer makes no sense.
            ConfigError: files cannot be written.
        """
        token, where, who = self.token, split_address(address), f"master {address}"
        assert token is not None
        question = m.AskAuthority(PROTOCOL_VERSION)
        found = ask(where, question, m.FromMaster, timeout=timeout, who=who, believe_anybody=True)
        if not isinstance(found, m.AuthorityIs):
            raise _unexpected(who, found)
        try:
            shown, believed = fingerprints(found.certificates), named(found.certificates, token.authority)
            if not shown:
                raise ValueError("nothing of the kind")
        except ValueError as bad:
            raise ProtocolError("sent what is no certificate", who=who, got=str(bad)) from bad
        if not believed and self.came_before():
            believed = self._told_of(found.certificates)
        if not believed:
            raise WrongMaster(
                "is not the master that the token is of", who=who, got=", ".join(shown[:_MOST_SHOWN]),
                expected=f"an authority with SHA-256 {token.authority}",
                hint="see that the address is right; if the master's authority was replaced (`wancoll ca show`) or its "
                "state folder is lost, make a new token (`wancoll token create`); else somebody else answers there",
            )  # fmt: skip
        try:
            wanted = self.request()
            write_secret(self._path(_NAMED), believed)
            enroll = m.Enroll(PROTOCOL_VERSION, token.id, token.secret, name, wanted)
            papers = Papers(self._path(_NAMED))
        except OSError as bad:
            raise self._unwritable(bad) from bad
        try:
            answer = ask(where, enroll, m.FromMaster, timeout=timeout, who=who, papers=papers)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(papers.authorities)
        if isinstance(answer, m.StandsBy):
            if not follow or not answer.leader:
                raise ConnectionError(f"{who} stands by; {answer.leader or 'nobody'} leads")
            try:
                self.enroll(answer.leader, name, timeout, follow=False)
            except WrongMaster as bad:  # that says nothing of the one that was asked
                raise ConnectionError(str(bad)) from bad
            return
        if not isinstance(answer, m.Enrolled):
            raise _unexpected(who, answer)
        if answer.refused:
            raise Refused("does not take the token", who=who, got=answer.refused)
        self.keep(answer.certificate, answer.authorities)

    def _told_of(self, shown: bytes) -> bytes:
        """Return the CA certificate in *shown* (PEM) that the master announced during a rotation, or b""."""
        with contextlib.suppress(ValueError):  # a damaged file tells of none
            for one in fingerprints(_read(self._path(AUTHORITY))):
                if mine := named(shown, one):
                    return mine
        return b""

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def _unexpected(who: str, answer: object) -> Exception:
    got = answer.reason if isinstance(answer, m.Bye) else type(answer).__name__
    return ProtocolError("did not answer who wants to join", who=who, got=got)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""
