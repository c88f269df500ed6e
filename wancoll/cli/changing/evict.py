"""`wancoll evict`: has the master put a member out, or tells it that one which nobody hears has stopped."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from wancoll.cli.asking import Asking, ask_leader, check_request, say_done
from wancoll.cli.looking.status import Master
from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.options import Flat
from wancoll.wire.messages import Evict, EvictAnswer


def evict(
    member: str = "",
    /,
    *,
    group: str,
    everyone: Annotated[bool, Parameter(name="--all", negative=())] = False,
    reason: str = "",
    master: Master = "",
    asking: Annotated[Asking, Flat] = Asking(),
) -> int:
    """Put a member out of its group: its calls end with Evicted, and the others go on without it.

    A group whose members commit among themselves, and who were all lost, keeps its name for --master-grace of their
    daemons, since they may go on unheard. If they have stopped say so with this: then the name is free.

    Args:
        member: The member's name, as `wancoll status` shows it.
        group: Its group.
        everyone: All members, instead of one.
        reason: What the member is told, and the log.
    """
    if bool(member) == everyone:
        raise ConfigError(
            "does not know whom to evict", who="wancoll evict", expected="a member's name, or --all",
            got="both" if member else "neither",
            hint=f"`wancoll status --master {asking.where(master)}` shows the names",
        )  # fmt: skip
    if not group:
        raise ConfigError("no group", who="wancoll evict", expected="its name after --group", got="nothing")
    check_request("wancoll evict", (member, group), reason)
    question = Evict(PROTOCOL_VERSION, group, member, everyone, reason)
    say_done(ask_leader(question, EvictAnswer, asking.masters(master), asking), shown="groups and members")
    return 0
