"""How commands that ask a master prove who asks: as admin on its own machine, with a token, or as the daemon here."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter

from wancoll.errors import ConfigError, MasterUnreachable, ProtocolError, WancollError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import MASTER_PORT, default_socket, default_state, split_address
from wancoll.net.ask import ask
from wancoll.net.listen import is_loopback_host
from wancoll.net.proof import Proof
from wancoll.options import DEFAULT_MASTER, NO_MASTER, Seconds, Unseen, address, addresses, join_text
from wancoll.trust.folder import ADMIN_KEY, public_keys
from wancoll.trust.token import Token, parse
from wancoll.wire import messages as m

_Answer = TypeVar("_Answer", m.EvictAnswer, m.Tokens, m.KeysAre)
_OfTrust = TypeVar("_OfTrust", m.Tokens, m.KeysAre)
OneMaster = Annotated[str, Parameter(help=f"HOST:PORT of the master, or of one that stands by. {NO_MASTER}")]
IS_THERE = "is `wancoll master` running there, and is --master right?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Options of commands that ask a master. Without any: as admin where its state folder is here, else in clear.

    Attributes:
        join: A token of the master, where it takes no others and runs on another machine: @FILE reads it from a file,
            - from standard input.
        state: The master's own --state, on its machine, where that is another folder.
        timeout: Seconds for each answer.
    """

    join: str = ""
    state: str = ""
    timeout: Seconds = DEFAULT.connect_timeout
    own: Annotated[str, Unseen] = ""  # this machine's daemon's folder, "": none, or in clear; see found()
    way: Annotated[str, Unseen] = ""  # how the master was found where no option says it, for errors

    def found(self, master: str) -> tuple[list[str], Asking]:
        """The masters, each "host:port", and who asks them: as options say; without any as this machine's daemon does.

        Raises:
            ConfigError: an address is none.
            MasterUnreachable: the daemon's key cannot be read.
        """
        if master or self.join or self.state:
            return self.masters(master), self
        path = ""
        try:
            path = default_socket()
            answer = ask(path, m.LocalStatusRequest(), m.LocalStatus, timeout=self.timeout, who="the daemon")
            masters, own = (said := json.loads(answer.text))["master"], said["state"]
        except (OSError, WancollError, ValueError, KeyError) as bad:
            return self.masters(""), replace(self, way=f", since no daemon here names another ({path}: {bad})")
        way = f", named by the daemon at {path}"
        if own and _as_daemon(own) is None:
            raise MasterUnreachable(
                "cannot be asked as the daemon", who=masters + way, expected="its receipt, for this user to read",
                got=f"none in {own}", hint="has the daemon reached its master? See its log, or give --join",
            )  # fmt: skip
        return masters.split(","), replace(self, own=own, way=way)

    def where(self, master: str) -> str:
        """*master*, or where that was not given ("") the address in the token, or this machine's."""
        return master or (parse(join_text(self.join)).address if self.join else DEFAULT_MASTER)

    def masters(self, master: str) -> list[str]:
        """All of them, each "host:port", that where() gives. Raises ConfigError: one is no address."""
        return addresses(self.where(master), what="--master", default_port=MASTER_PORT).split(",")

    def proof(self, master: str, *, named_by: str = "") -> Proof | None:
        """What to ask *master* ("host:port") with; None: in clear.

        *named_by* is the standby that says that *master* leads, which is asked as that one was: it has the same key.
        What was asked in clear on loopback does not leave it for a standby's word.

        Raises:
            ConfigError: what was given cannot be used.
            MasterUnreachable: it is beyond this machine, and in clear.
        """
        if named_by:
            proof = self.proof(named_by)
            if proof is None and _is_near(named_by) and not _is_near(master):
                raise MasterUnreachable(
                    "is not asked in clear", who=f"master {master}",
                    expected="one on loopback, as the standby that names it",
                    got=f"one beyond this machine, by the word of {named_by} alone",
                    hint="name it with --master if you mean it",
                )  # fmt: skip
            return proof
        host, port = split_address(master)
        folder = self.state or (default_state(f"master-{port}") if _is_here(host) else "")
        token = parse(join_text(self.join)) if self.join else None
        if folder and (admin := _as_admin(folder)) is not None and (token is None or token.master in admin.acceptors):
            return admin
        if token is not None:
            return self._joined(token)
        if self.state:
            raise ConfigError(
                "is no state folder of a master that runs and speaks TLS", who=f"--state {self.state}",
                expected=f"{ADMIN_KEY} in it", got="none",
                hint="give what the master was given, on its machine and as its user; is it WANCOLL_STATE of a daemon?",
            )  # fmt: skip
        return _as_daemon(self.own) if self.own else None

    def ask_as_admin(self, question: msgspec.Struct, kind: type[_OfTrust], master: str) -> _OfTrust:
        """What *master* (as given to a command), or whoever leads, answers to what only an admin may ask.

        Raises:
            ConfigError: it may not be asked, or refuses.
            MasterUnreachable: no master that leads answers.
            ProtocolError: the answer makes no sense.
        """
        where = address(self.where(master), what="--master", default_port=MASTER_PORT)
        if self.proof(where) is None:
            raise ConfigError(
                "tokens and keys are looked after on the master's machine, as its user", who=f"master {where}",
                expected="its state folder, or --join with a token of role admin", got="neither",
                hint="is it running there, with --secure or beyond loopback? Where it has a --state give the same here",
            )  # fmt: skip
        answer = ask_leader(question, kind, [where], self)
        if answer.refused:
            raise ConfigError("refuses", who=f"master {where}", got=answer.refused)
        return answer

    def _joined(self, token: Token) -> Proof:
        from wancoll.net.wallet import Wallet

        wallet = Wallet(default_state(f"asks-{token.id}"), token)
        # All commands with this token have one folder, and one key in it.
        with wallet.held(f"a command, process {os.getpid()}", self.timeout):
            key = wallet.key.public.hex()
        return wallet.proof(f"{socket.gethostname()[:60]}-asks-{key[:6]}")


def _as_daemon(folder: str) -> Proof | None:
    """What the daemon with this state *folder* proves itself with; None: it has no receipt, or is another user's."""
    from wancoll.net.wallet import Wallet

    with contextlib.suppress(OSError, ConfigError):
        proof = Wallet(folder, None).proof()
        return proof if proof.receipt else None
    return None


def _as_admin(folder: str) -> Proof | None:
    """What the master with this state *folder* takes for its admin; None: none runs, or it is another user's."""
    from wancoll.trust.keys import Key

    with contextlib.suppress(OSError, ValueError):
        return Proof(Key.read(os.path.join(folder, ADMIN_KEY)), public_keys(folder))
    return None


def other_answer(answer: msgspec.Struct, who: str, expected: str) -> ProtocolError:
    """The error for a master that answered something else."""
    reason = answer.reason if isinstance(answer, m.Bye) else ""
    return ProtocolError("did not answer", who=who, expected=expected, got=f"{type(answer).__name__} {reason}".strip())


def check_request(command: str, names: Sequence[str], reason: str) -> None:
    """Refuse names and a reason that no master takes. Raises ConfigError: one is too long."""
    if max(map(len, names)) > DEFAULT.name_chars or len(reason) > 500:
        raise ConfigError(
            "cannot ask for this", who=command,
            expected=f"names of at most {DEFAULT.name_chars} characters, a reason of at most 500",
            got=f"{' and '.join(str(len(name)) for name in names)}, {len(reason)}",
        )  # fmt: skip


def ask_leader(question: msgspec.Struct, kind: type[_Answer], masters: list[str], asking: Asking) -> _Answer:
    """What the master that leads answers, of *kind*: try one after the other, and whom a standby names.

    Raises:
        ConfigError: it may not be asked so.
        ProtocolError: an answer makes no sense.
        MasterUnreachable: none takes it.
    """
    failed: dict[str, str] = {}
    todo: list[tuple[str, str]] = [(each, "") for each in masters]  # and the standby that has named it
    while todo:
        address, named_by = todo.pop(0)
        try:
            where, proof = split_address(address), asking.proof(address, named_by=named_by)
            answer = ask(where, question, m.FromMaster, timeout=asking.timeout, who=f"master {address}", proof=proof)
        except (OSError, MasterUnreachable) as error:
            failed[address] = str(error) or type(error).__name__
            continue
        if isinstance(answer, kind):
            return answer
        if not isinstance(answer, m.StandsBy):
            raise other_answer(answer, f"master {address}", kind.__name__)
        failed[address] = "stands by"
        if answer.leader and answer.leader not in (*failed, *dict(todo)):
            todo.insert(0, (answer.leader, address))
    raise MasterUnreachable(
        "no master takes the request; nothing was done, unless an answer was lost",
        who=",".join(masters),
        got="; ".join(f"{address}: {why}" for address, why in failed.items()),
        hint=f"{IS_THERE} Ask again: it does no harm",
    )


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


def fetch(master: str, asking: Asking = Asking(), *, named_by: str = "") -> m.Status | m.StandsBy:
    """Ask the master at "host:port"; the whole exchange takes at most its timeout. For *named_by* see Asking.

    Raises:
        MasterUnreachable: no connection, or no answer in time.
        ProtocolError: the answer is no status.
        ConfigError: this master will not answer who asks so: the token is revoked, or another master's.
    """
    who = f"master {master}{asking.way}"
    try:
        where, proof = split_address(master), asking.proof(master, named_by=named_by)
        question = m.StatusRequest(PROTOCOL_VERSION)
        answer = ask(where, question, m.FromMaster, timeout=asking.timeout, who=who, proof=proof)
    except OSError as error:
        got = str(error) or type(error).__name__
        who = f"{master}{asking.way}"
        raise MasterUnreachable("the master gives no status", who=who, got=got, hint=IS_THERE) from error
    if isinstance(answer, m.Status | m.StandsBy):
        return answer
    if isinstance(answer, m.Bye) and answer.final:
        raise ConfigError("does not answer who asks", who=who, expected="Status", got=f"Bye {answer.reason}")
    raise other_answer(answer, who, "Status")
