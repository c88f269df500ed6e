"""`wancoll leave`: has a member, or a daemon with all of its members, leave in order, and waits until it has."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import msgspec
from cyclopts import Parameter

from wancoll.cli.asking import Asking, ask_leader, check_request, say_done
from wancoll.cli.looking.status import Master, find
from wancoll.errors import ConfigError, Evicted, MasterUnreachable, PeerDaemonLost, ProtocolError, WancollError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.net.ask import said
from wancoll.net.unix import what_to_do
from wancoll.options import Flat, SecondsOrNone
from wancoll.wire import messages as m

_LOOK_SECONDS = 0.2  # between looks at whether it has left


def leave(
    name: Annotated[str, Parameter(show_env_var=False)] = "",
    /,
    *,
    group: Annotated[str, Parameter(show_env_var=False)] = "",
    within: SecondsOrNone = 30.0,
    reason: str = "",
    socket: Annotated[str, Parameter(show_env_var=False)] = "",
    master: Master = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Have a daemon leave its groups in order and stop; or with --group one member leave, whose daemon goes on.

    Each member finishes what it has called. It leaves where its program calls update_membership, since no other member
    has anything open there: nothing is run again. If it does not call that --within so many seconds, it leaves between
    two calls, and the others run again what they had begun without it. Its training process gets AskedToLeave.

    Who leaves is said on the command line: no variable counts for NAME, --group and --socket.

    Waits until that is done. Exit code 1: it has not left yet, or was lost before it did, and may come back.

    Args:
        name: The daemon's name, or with --group the member's.
        group: Of the member; its daemon goes on.
        within: Seconds to wait for the next update_membership, before it leaves anyhow; 0: not at all.
        reason: What its training process is told, and the log.
        socket: Instead of NAME: the unix socket of a daemon on this machine.
    """
    if bool(name) == bool(socket) or (group and not name):
        given = filter(None, [name, group and f"--group {group}", socket and f"--socket {socket}"])
        raise ConfigError(
            "does not know who shall leave", who="wancoll leave",
            expected="a member with --group, a daemon's name, or --socket", got=" and ".join(given) or "neither",
            hint="`wancoll status` shows the names; with --socket alone that daemon leaves, with all its members; "
            "WANCOLL_SOCKET and other variables do not say who leaves",
        )  # fmt: skip
    check_request("wancoll leave", (name, group), reason)
    question = m.AskToLeave(PROTOCOL_VERSION, group, name, within, reason)
    patience = within + DEFAULT.drain_timeout + asking.timeout
    if not name:
        _here(socket, question, patience)
        print(f"the daemon at {socket} has left its groups and stopped")
        return 0
    known = asking.masters(master)
    answer = ask_leader(question, m.EvictAnswer, known, asking)
    say_done(answer, shown="daemons, groups and members")
    whom = f"{name} of group {group}" if group else f"daemon {name}"
    _await_gone(known, question, answer.master, patience, asking, whom)
    print(f"{whom} has left")
    return 0


def _here(path: str, question: m.AskToLeave, patience: float) -> None:
    """Ask the daemon at *path*; it says Ok when its members have left, and ends the connection when it stops."""
    left = False
    try:
        who = f"daemon at {path}"
        for message in said(path, question, m.FromDaemon, timeout=patience, who=who, anybody=True):
            if isinstance(message, m.Failure):
                raise ProtocolError(message.what, who=f"daemon at {path}", expected=message.expected, got=message.got)
            left = left or isinstance(message, m.Ok)
    except TimeoutError as late:
        raise PeerDaemonLost(
            "has not left yet", who=f"daemon at {path}", got=f"nothing in {patience:g} s",
            hint="its log says what it waits for; ask again with --within 0",
        ) from late  # fmt: skip
    except OSError as bad:
        raise PeerDaemonLost("cannot be asked", who=f"daemon at {path}", got=str(bad), hint=what_to_do(bad)) from bad
    if not left:
        raise PeerDaemonLost("ended before it said that it had left", who=f"daemon at {path}", hint="its log says why")


def _await_gone(
    known: list[str], question: m.AskToLeave, passed_by: int, patience: float, asking: Asking, whom: str
) -> None:
    """Look until it has left in order, by the word of the master that passed the question on (*passed_by*).

    A master that was started again, or took over, has yet to hear of it, and is asked again: harmless where it heard.
    """
    deadline = time.monotonic() + patience
    last = "no master gave a status"
    while (now := time.monotonic()) < deadline:
        status = _newest(known, asking)
        if status is not None and status.master == passed_by:
            if (question.group, question.name) in status.left:
                return
            if not _is_there(status, question):
                raise (Evicted if question.group else PeerDaemonLost)(
                    "was lost before it left; it may come back", who=whom,
                    hint="`wancoll status` shows who is there, `wancoll events` how it was lost; then ask it again",
                )  # fmt: skip
            last = "`wancoll status` shows it"
        elif status is not None:
            last = "another master leads since, and has not heard of it: it may have left meanwhile, or be away"
            within = min(question.within, deadline - now)
            with contextlib.suppress(OSError, WancollError):
                again = msgspec.structs.replace(question, within=within)
                answer = ask_leader(again, m.EvictAnswer, known, asking)
                passed_by = answer.master if answer.done else passed_by
        time.sleep(_LOOK_SECONDS)
    raise MasterUnreachable(
        "has not left yet, as far as the master knows", who=whom, got=last,
        hint="its daemon's log says what it waits for; ask again with --within 0, or `wancoll evict` it",
    )  # fmt: skip


def _newest(known: list[str], asking: Asking) -> m.Status | None:
    """What the master says that leads; one that was replaced may still believe that it does."""
    with contextlib.suppress(WancollError):
        return find(known, asking)[0]
    return None


def _is_there(status: m.Status, question: m.AskToLeave) -> bool:
    if not question.group:
        return question.name in status.daemons
    found = (group for group in status.groups if group.name == question.group)
    return any(member.name == question.name for group in found for member in group.members)
