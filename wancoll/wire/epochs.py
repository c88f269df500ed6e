"""What changed from one epoch to the next, so that a thousand members are not told of a thousand members again. Pure.

A control stream is in order, so the master knows which epoch a member was told last. A member of it is told what
changed since; one that was told none, or that joins, is told the whole. The texts of operations that were given up are
said once: whoever is told again, or later, is told a short form.
"""

from __future__ import annotations

from msgspec.structs import replace

from wancoll.errors import ProtocolError
from wancoll.wire import messages as m

BRIEF = 60  # characters of a Void's text that is told again


def brief(void: m.Void) -> m.Void:
    """The short form, for whoever has been told the long one, or comes later."""
    if len(void.text) <= BRIEF and not void.calls:
        return void
    text = void.text if len(void.text) <= BRIEF else void.text[: BRIEF - 3] + "..."
    return replace(void, text=text, calls={})


def change(base: m.Epoch, epoch: m.Epoch) -> m.EpochChange | None:
    """What those who know *base* have to be told of *epoch*; None: only the whole will do."""
    known = {member.mid: member for member in base.members}
    now = {member.mid: member for member in epoch.members}
    left = [mid for mid, member in known.items() if now.get(mid) != member]
    joined = [member for mid, member in now.items() if known.get(mid) != member]
    gone = set(left)
    pool = [*(mid for mid in known if mid not in gone), *(member.mid for member in joined)]
    places = {mid: place for place, mid in enumerate(pool)}
    order = [places[mid] for mid in now]
    voids = _still_void(base, epoch.committed_upto)
    found = m.EpochChange(
        group=epoch.group,
        to=epoch.to,
        term=epoch.term,
        epoch=epoch.epoch,
        base=base.epoch,
        left=left,
        joined=joined,
        order=[] if order == list(range(len(order))) else order,
        plan=None if epoch.plan == base.plan else epoch.plan,
        committed_upto=epoch.committed_upto,
        voids=epoch.voids[len(voids) :],
        reason=epoch.reason,
        passed=epoch.passed,
        goodbyes=epoch.goodbyes,
    )
    numbers = [(each.group, each.key, each.min_world, each.shards) for each in (base, epoch)]
    kept = numbers[0] == numbers[1] and len(now) == len(epoch.members)
    return found if kept and voids == epoch.voids[: len(voids)] else None


def applied(base: m.Epoch, told: m.EpochChange) -> m.Epoch:
    """The epoch that is meant. Raises ProtocolError: it is about another base, or members that are not in it."""
    if (told.group, told.base) != (base.group, base.epoch):
        raise ProtocolError(
            "tells what changed since an epoch that is not known here",
            expected=f"epoch {base.epoch} of group {base.group}",
            got=f"epoch {told.base} of group {told.group}",
            hint="connect again, to be told the whole",
        )
    left = set(told.left)
    pool = [member for member in base.members if member.mid not in left] + told.joined
    if len(pool) != len(base.members) - len(left) + len(told.joined) or (
        told.order and sorted(told.order) != list(range(len(pool)))
    ):
        raise ProtocolError(
            "tells of an impossible change of members",
            expected=f"some of the {len(base.members)} of epoch {base.epoch}, and an order of all who stay and come",
            got=f"{len(left)} who left, {len(told.joined)} who joined, an order of {len(told.order)}",
        )
    return replace(
        base,
        to=told.to,
        term=told.term,
        epoch=told.epoch,
        members=[pool[place] for place in told.order] if told.order else pool,
        plan=base.plan if told.plan is None else told.plan,
        committed_upto=told.committed_upto,
        voids=_still_void(base, told.committed_upto) + told.voids,
        reason=told.reason,
        passed=told.passed,
        goodbyes=told.goodbyes,
    )


def _still_void(base: m.Epoch, committed_upto: int) -> list[m.Void]:
    """The voids of *base* that no commit has passed."""
    return [brief(void) for void in base.voids if void.seq > committed_upto]
