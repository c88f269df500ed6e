"""Ring all-reduce as a pure function: reduce-scatter, then all-gather, 2(N-1) steps."""

from __future__ import annotations

from wancoll.schedule.plan import Action, Direction, Schedule, Transfer


def ring_all_reduce(rank: int, world_size: int) -> Schedule:
    """The schedule of *rank* (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms").

    Chunk c starts at rank c with that rank's own bytes, is reduced at ranks c+1, c+2, ... and is
    final at rank c-1; the all-gather then passes it on around the ring. World size 1 needs no transfer.
    """
    n = world_size
    if n == 1:
        return ()
    right, left = (rank + 1) % n, (rank - 1) % n
    lines: list[Transfer] = []
    last_recv = -1
    for step in range(2 * (n - 1)):
        scatter = step < n - 1
        sent = (rank - step) % n if scatter else (rank + 1 - (step - (n - 1))) % n
        received = (sent - 1) % n
        source = Action.front if step == 0 else Action.back
        lines.append(Transfer(Direction.send, right, step, sent, source, last_recv))
        if not scatter:
            what = Action.copy
        else:
            what = Action.final if step == n - 2 else Action.reduce
        last_recv = len(lines)
        lines.append(Transfer(Direction.recv, left, step, received, what))
    return tuple(lines)


def membership_token(rank: int, world_size: int) -> Schedule:
    """One empty frame to the right neighbour: update_membership has no data, but members must agree on the call."""
    if world_size == 1:
        return ()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    return (
        Transfer(Direction.send, right, 0, 0, Action.front),
        Transfer(Direction.recv, left, 0, 0, Action.copy),
    )
