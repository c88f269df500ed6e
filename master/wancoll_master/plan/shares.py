"""How much of a tensor each member owns in a direct all_reduce, so that slow uplinks do not hold the others up. Pure.

Among n members one that owns the share s of a tensor sends 1 + (n - 2) s of it. The shares that are over first are
found by water filling (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from wancoll_master.plan.topology import MATERIAL

UNIT = 1024  # the largest share


def share_out(speeds: Sequence[float], gain: float = MATERIAL) -> list[int]:
    """Whole numbers to compare, one for each member; []: even shares are about as good.

    *speeds*: bytes per second that a member sends, or receives where that is less.
    """
    count, owners = len(speeds), list(range(len(speeds)))
    if count < 3:
        return []  # each of two sends the tensor once, whoever owns it
    while True:
        level = (count - 2 + len(owners)) / sum(speeds[owner] for owner in owners)  # seconds for each byte
        kept = [owner for owner in owners if level * speeds[owner] > 1]
        if len(kept) == len(owners):
            break
        owners = kept
    owned = {owner: level * speeds[owner] - 1 for owner in owners}
    most = max(owned.values())
    shares = [round(UNIT * owned.get(member, 0.0) / most) for member in range(count)]
    return shares if busiest([], speeds) >= gain * busiest(shares, speeds) else []


def busiest(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Seconds for each byte of the tensor, of the member that takes longest; [] are even shares."""
    count = len(speeds)
    shares = shares or [1] * count
    whole = sum(shares)
    return max((1 + (count - 2) * share / whole) / speed for share, speed in zip(shares, speeds, strict=True))
