"""How commands that ask a master prove who asks: as admin on its own machine, with a token, or certificates."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter

from wancoll.errors import ConfigError, MasterUnreachable, ProtocolError, WancollError
from wancoll.local import MASTER_PORT, default_socket, default_state, split_address
from wancoll.net.ask import ask
from wancoll.net.enroll import Wallet, WrongMaster
from wancoll.net.listen import is_loopback_host
from wancoll.options import DEFAULT_MASTER, NO_MASTER, Seconds, Unseen, address, addresses
from wancoll.trust.papers import ADMIN, AUTHORITY, Papers, fingerprints
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.messages import Bye, FromMaster, RotationIs, StandsBy, Tokens

_Answer = TypeVar("_Answer", Tokens, RotationIs)
OneMaster = Annotated[str, Parameter(help=f"HOST:PORT of the master, or of one that stands by. {NO_MASTER}")]
Timeout = Annotated[Seconds, Parameter(help="Seconds for the answer.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Options of commands that ask a master. Without any: as admin where its state folder is here, else in clear.

    Attributes:
        join: A token of the master, where it takes no others and runs on another machine.
        state: The master's own --state, on its machine, where that is another folder.
        ca: PEM file of an authority of your own, with --cert and --key.
        cert: PEM file of your certificate.
        key: PEM file of its key, where --cert does not hold it.
    """

    join: str = ""
    state: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    own: Annotated[Papers | None, Unseen] = None  # this machine's daemon's; see found()
    way: Annotated[str, Unseen] = ""  # how the master was found where no option says it, for errors

    def found(self, master: str, timeout: float) -> tuple[list[str], Asking]:
        """The masters, each "host:port", and who asks them: as options say; without any as this machine's daemon does.

        Raises:
            ConfigError: an address is none.
            MasterUnreachable: the daemon's certificate cannot be read.
        """
        if master or self.join or self.state or self.ca or self.cert or self.key:
            return self.masters(master), self
        path = ""
        try:
            path = default_socket()
            answer = ask(path, m.LocalStatusRequest(), m.LocalStatus, timeout=timeout, who="the daemon")
            masters, own = (said := json.loads(answer.text))["master"], said["papers"] and Papers(**said["papers"])
        except (OSError, WancollError, ValueError, KeyError) as bad:
            return self.masters(""), replace(self, way=f", since no daemon here names another ({path}: {bad})")
        way = f", named by the daemon at {path}"
        if own and not os.access(own.certificate, os.R_OK):
            raise MasterUnreachable(
                "cannot be asked as the daemon", who=masters + way, expected="its certificate, for this user to read",
                got=f"none at {own.certificate}", hint="has the daemon reached its master? See its log, or give --join",
            )  # fmt: skip
        return masters.split(","), replace(self, own=own, way=way)

    def where(self, master: str) -> str:
        """*master*, or where that was not given ("") the address in the token, or this machine's."""
        return master or (parse(self.join).address if self.join else DEFAULT_MASTER)

    def masters(self, master: str) -> list[str]:
        """All of them, each "host:port", that where() gives.

        Raises:
            ConfigError: one is no address.
        """
        return addresses(self.where(master), what="--master", default_port=MASTER_PORT).split(",")

    def papers(self, master: str, timeout: float, *, named_by: str = "") -> Papers | None:
        """To ask *master* ("host:port") with; None: in clear.

        Args:
            master: its address.
            timeout: seconds for each answer.
            named_by: the standby that says that *master* leads, which is asked as that one was: it has the same
                authority. What was asked in clear on loopback does not leave it for a standby's word.

        Raises:
            ConfigError: what was given cannot be used, or the master refuses the token.
            MasterUnreachable: nobody answers who gives a certificate for it, or it is beyond this machine.
        """
        if named_by:
            papers = self.papers(named_by, timeout)
            if papers is None and _is_near(named_by) and not _is_near(master):
                raise MasterUnreachable(
                    "is not asked in clear", who=f"master {master}",
                    expected="one on loopback, as the standby that names it",
                    got=f"one beyond this machine, by the word of {named_by} alone",
                    hint="name it with --master if you mean it",
                )  # fmt: skip
            return papers
        if self.ca or self.cert:
            return Papers(self.ca, self.cert, self.key, by_host=True)
        host, port = split_address(master)
        folder = self.state or (default_state(f"master-{port}") if _is_here(host) else "")
        admin = os.path.join(folder, f"{ADMIN}.pem")
        if folder and os.path.exists(admin) and self._is_of(os.path.join(folder, AUTHORITY)):
            return Papers(os.path.join(folder, AUTHORITY), admin)
        if self.join:
            return self._joined(master, timeout)
        if self.state:
            raise ConfigError(
                "is no state folder of a master that runs with an authority", who=f"--state {self.state}",
                expected=f"{ADMIN}.pem in it", got="none",
                hint="give what the master was given, on its machine and as its user; is it WANCOLL_STATE of a daemon?",
            )  # fmt: skip
        return self.own

    def ask_as_admin(self, question: msgspec.Struct, kind: type[_Answer], master: str, timeout: float) -> _Answer:
        """What *master* (as given to a command), or whoever leads, answers to what only an admin may ask.

        Raises:
            ConfigError: it may not be asked, or refuses.
            MasterUnreachable: no master that leads answers.
            ProtocolError: the answer makes no sense.
        """
        where = address(self.where(master), what="--master", default_port=MASTER_PORT)
        papers = self.papers(where, timeout)
        if papers is None:
            raise ConfigError(
                "tokens and authorities are looked after on the master's machine, as its user", who=f"master {where}",
                expected="its state folder, or --join with a token of role admin", got="neither",
                hint="is it running there, with --secure or beyond loopback? Where it has a --state give the same here",
            )  # fmt: skip
        try:
            for _ in range(2):
                whom = split_address(where)
                answer = ask(whom, question, FromMaster, timeout=timeout, who=f"master {where}", papers=papers)
                if not isinstance(answer, StandsBy) or not answer.leader:
                    break
                where = answer.leader  # which has the same authority
        except OSError as bad:
            raise MasterUnreachable(
                "the master does not answer", who=where, got=str(bad) or type(bad).__name__,
                hint="is `wancoll master` running there, not in clear, and is --master right?",
            ) from bad  # fmt: skip
        if isinstance(answer, StandsBy):
            raise MasterUnreachable(
                "stands by, and no master leads", who=where, got=f"leader {answer.leader or 'nobody'}",
                hint="one takes over soon if etcd can be reached; ask again",
            )  # fmt: skip
        if not isinstance(answer, kind):
            got = answer.reason if isinstance(answer, Bye) else type(answer).__name__
            raise ProtocolError("did not answer", who=f"master {where}", expected=kind.__name__, got=got)
        if answer.refused:
            raise ConfigError("refuses", who=f"master {where}", got=answer.refused)
        return answer

    def _is_of(self, file: str) -> bool:
        """Whether the token, if any, is of these authorities: then who may be admin needs none, and takes no use."""
        with open(file, "rb") as found:
            return not self.join or parse(self.join).authority in fingerprints(found.read())

    def _joined(self, master: str, timeout: float) -> Papers:
        token = parse(self.join)
        wallet = Wallet(default_state(f"asks-{token.id}"), token)
        # All commands with this token have one folder. Who is before this one asks twice.
        with wallet.held(f"a command, process {os.getpid()}", 3 * timeout):
            name = wallet.name or f"{socket.gethostname()[:60]}-asks-{secrets.token_hex(3)}"
            if not wallet.good(name, time.time()):
                try:
                    wallet.enroll(master, name, timeout)
                except OSError as bad:
                    raise MasterUnreachable(
                        "the master gives no certificate", who=master, got=str(bad) or type(bad).__name__,
                        hint="is `wancoll master` running there, not in clear, and is --master right?",
                    ) from bad  # fmt: skip
        return wallet.papers


def ask_leader(question: m.Evict | m.AskToLeave, masters: list[str], timeout: float, asking: Asking) -> m.EvictAnswer:
    """Have the master that leads do something: try one after the other, and whom a standby names.

    Raises:
        ProtocolError: an answer makes no sense.
        MasterUnreachable: none takes it.
        WrongMaster: the only one is not the one that the token is of.
    """
    failed: dict[str, str] = {}
    todo = [(address, "") for address in masters]  # and the standby that has named it
    while todo:
        address, named_by = todo.pop(0)
        try:
            where, papers = split_address(address), asking.papers(address, timeout, named_by=named_by)
            answer = ask(where, question, m.FromMaster, timeout=timeout, who=f"master {address}", papers=papers)
        except (OSError, MasterUnreachable, WrongMaster) as error:
            if isinstance(error, WrongMaster) and masters == [address]:
                raise
            failed[address] = str(error) or type(error).__name__
            continue
        if isinstance(answer, m.EvictAnswer):
            return answer
        if isinstance(answer, m.StandsBy):
            failed[address] = "stands by"
            if answer.leader and answer.leader not in (*failed, *dict(todo)):
                todo.insert(0, (answer.leader, address))
            continue
        reason = answer.reason if isinstance(answer, m.Bye) else ""
        got = f"{type(answer).__name__} {reason}".strip()
        raise ProtocolError("did not answer", who=f"master {address}", expected="EvictAnswer", got=got)
    raise MasterUnreachable(
        "no master takes the request; nobody was put out or asked to leave, unless an answer was lost",
        who=",".join(masters),
        got="; ".join(f"{address}: {why}" for address, why in failed.items()),
        hint="is `wancoll master` running there, and is --master right? Ask again: it does no harm",
    )  # fmt: skip


def say_done(answer: m.EvictAnswer, *, shown: str) -> None:
    """Print what the master has done. *shown*: what `wancoll status` shows of what may be asked for.

    Raises:
        ConfigError: it refuses.
    """
    if not answer.done:
        raise ConfigError(
            answer.what, who="the master", expected=answer.expected, got=answer.got,
            hint=answer.hint or f"`wancoll status` shows {shown}",
        )  # fmt: skip
    print(answer.what, flush=True)


def _is_near(address: str) -> bool:
    return is_loopback_host(split_address(address)[0])


def _is_here(host: str) -> bool:
    """Whether *host* is this machine: its address can be listened on."""
    with contextlib.suppress(OSError):
        for family, kind, *_, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(where)
                return True
    return False
