"""`wancoll evict`: has the master put a member out, or tells it that one which nobody hears has stopped."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from wancoll.errors import ConfigError, MasterUnreachable, ProtocolError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import MASTER_PORT, split_address
from wancoll.net.ask import ask
from wancoll.options import DEFAULT_MASTER, Seconds, addresses
from wancoll.wire.messages import Bye, Evict, EvictAnswer, FromMaster, StandsBy


def evict(
    member: Annotated[str, Parameter(help="The member's name, as `wancoll status` shows it.")] = "",
    /,
    *,
    group: Annotated[str, Parameter(help="Its group.")],
    everyone: Annotated[bool, Parameter(name="--all", negative=(), help="All members, instead of one.")] = False,
    reason: Annotated[str, Parameter(help="What the member is told, and the log.")] = "",
    master: Annotated[
        str, Parameter(help="HOST:PORT of the master; with standby masters HOST:PORT,HOST:PORT.")
    ] = DEFAULT_MASTER,
    timeout: Annotated[Seconds, Parameter(help="Seconds for each master's answer.")] = DEFAULT.connect_timeout,
) -> int:
    """Put a member out of its group: its calls end with Evicted, and the others go on without it.

    A group whose members commit among themselves, and who were all lost, keeps its name for --master-grace of their
    daemons, since they may go on unheard. If they have stopped say so with this: then the name is free.
    """
    if bool(member) == everyone:
        raise ConfigError(
            "does not know whom to evict", who="wancoll evict", expected="a member's name, or --all",
            got="both" if member else "neither", hint=f"`wancoll status --master {master}` shows the names",
        )  # fmt: skip
    if len(member) > DEFAULT.name_chars or not 0 < len(group) <= DEFAULT.name_chars or len(reason) > 500:
        raise ConfigError(
            "cannot ask for this", who="wancoll evict",
            expected=f"names of at most {DEFAULT.name_chars} characters, a reason of at most 500",
            got=f"{len(member)} and {len(group)}, {len(reason)}",
        )  # fmt: skip
    question = Evict(PROTOCOL_VERSION, group, member, everyone, reason)
    known = addresses(master, what="--master", default_port=MASTER_PORT).split(",")
    answer = _ask_leader(question, known, timeout)
    if not answer.done:
        raise ConfigError(
            answer.what, who="the master", expected=answer.expected, got=answer.got,
            hint="`wancoll status` shows groups and members",
        )  # fmt: skip
    print(answer.what)
    return 0


def _ask_leader(question: Evict, masters: list[str], timeout: float) -> EvictAnswer:
    """Try one after the other, and whom a standby names."""
    failed: dict[str, str] = {}
    todo = list(masters)
    while todo:
        address = todo.pop(0)
        try:
            answer = ask(split_address(address), question, FromMaster, timeout=timeout, who=f"master {address}")
        except OSError as error:
            failed[address] = str(error) or type(error).__name__
            continue
        if isinstance(answer, EvictAnswer):
            return answer
        if isinstance(answer, StandsBy):
            failed[address] = "stands by"
            if answer.leader and answer.leader not in (*failed, *todo):
                todo.insert(0, answer.leader)
            continue
        reason = answer.reason if isinstance(answer, Bye) else ""
        got = f"{type(answer).__name__} {reason}".strip()
        raise ProtocolError("did not answer", who=f"master {address}", expected="EvictAnswer", got=got)
    raise MasterUnreachable(
        "no master takes the request; nobody was evicted, unless an answer was lost", who=",".join(masters),
        got="; ".join(f"{address}: {why}" for address, why in failed.items()),
        hint="is `wancoll master` running there, and is --master right? Ask again: it does no harm",
    )  # fmt: skip
