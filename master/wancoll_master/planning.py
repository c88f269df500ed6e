"""What the master decides for an epoch beside its members: lanes, how finely they share, who avoids whom. Pure."""

from __future__ import annotations

from wancoll.wire import messages as m
from wancoll_master.state import Group, State
from wancoll_master.topology import LOCAL_STRIPE, STRIPE, one_machine, pair

MAX_AVOID = 4096  # pairs that a Plan can carry


def plan(state: State, group: Group) -> m.Plan:
    """The plan for the group's members as they are now, in rank order."""
    members = group.members
    local = one_machine(address for member in members for address in member.daemon.addresses)
    return m.Plan(
        lanes=min(member.daemon.lanes for member in members),
        stripe=LOCAL_STRIPE if local else STRIPE,
        turns=not local,
        choices={},
        avoid=_avoid(state, group),
        pacing=0,
        congestion="",
    )


def _avoid(state: State, group: Group) -> list[tuple[int, int]]:
    """Pairs that cannot reach each other; not ring neighbours, which must try, since no order keeps them apart."""
    mids = [member.mid for member in group.members]
    neighbours = {pair(one, other) for one, other in zip(mids, mids[1:] + mids[:1], strict=True)}
    bad = (ends for ends, until in group.bad_pairs.items() if until > state.now and ends not in neighbours)
    return sorted(bad)[:MAX_AVOID]
