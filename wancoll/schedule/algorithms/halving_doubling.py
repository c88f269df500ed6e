"""Recursive halving and doubling: an all-reduce of 2 log2 N hops; a power of two of ranks sends what a ring does.

Rabenseifner, 2004, "Optimization of collective reduction operations"; Thakur, Rabenseifner and Gropp, 2005,
"Optimization of collective communication operations in MPICH". Here a half is a set of chunks, each sent by itself,
so that one can be passed on while the others arrive.
"""

from __future__ import annotations

from wancoll.schedule.build import Builder, Shape, Value, spans


def all_reduce(builder: Builder, shape: Shape) -> None:
    """Halve with partners at distance 1, 2, 4, ...; then double with the same partners, farthest first.

    The core are as many players as the largest power of two within N. If it is less than N, the first ranks form pairs,
    of which the odd one hands its tensor to the even one first and gets the result last. Players are the even ones of
    the pairs and the ranks behind them. The order of the operands is ((y0 op y1) op (y2 op y3)) op ..., where y is what
    the players have. With a codec every halving encodes anew.
    """
    n, rank = builder.world_size, builder.rank
    core = 1 << (n.bit_length() - 1)
    pairs = n - core
    chunks = spans(shape, core, builder.coding)
    if rank < 2 * pairs and rank % 2:
        player = rank // 2
        for chunk in _wanted(player, 1, core):
            builder.send(rank - 1, builder.mine(*chunks[chunk]))
        for chunk in _held(player, 1, core):
            start, length = chunks[chunk]
            builder.recv(rank - 1, start, length, result=start)
        return
    player = rank // 2 if rank < 2 * pairs else rank - pairs
    values = [builder.mine(start, length) for start, length in chunks]
    if player < pairs:
        for chunk in _wanted(player, 1, core):
            values[chunk] = builder.recv_reduced(rank + 1, values[chunk], to=builder.making(*chunks[chunk]))
    _halve(builder, player, pairs, values)
    _double(builder, player, pairs, values)
    if player < pairs:
        for chunk in _held(player, 1, core):
            builder.send(rank + 1, values[chunk])


def _halve(builder: Builder, player: int, pairs: int, values: list[Value]) -> None:
    core, mask = len(values), 1
    while mask < core:
        other = player ^ mask
        for chunk in _wanted(other, 2 * mask, core):
            builder.send(_rank(other, pairs), values[chunk])
        for chunk in _wanted(player, 2 * mask, core):
            value = values[chunk]
            values[chunk] = builder.recv_reduced(
                _rank(other, pairs), value, to=builder.making(value.start, value.length), last=2 * mask == core
            )
        mask *= 2


def _double(builder: Builder, player: int, pairs: int, values: list[Value]) -> None:
    core = len(values)
    mask = core // 2
    while mask:
        other = player ^ mask
        for chunk in _held(player, 2 * mask, core):
            values[chunk] = builder.send(_rank(other, pairs), values[chunk])
        for chunk in _held(other, 2 * mask, core):
            value = values[chunk]
            values[chunk] = builder.recv(_rank(other, pairs), value.start, value.length, result=value.start)
        mask //= 2


def _rank(player: int, pairs: int) -> int:
    return 2 * player if player < pairs else player + pairs


def _own(player: int, core: int) -> int:
    """The chunk that the player reduces to the end: at distance 2^i bit i says which half it keeps."""
    return int(f"{player:0{core.bit_length() - 1}b}"[::-1], 2)


def _wanted(player: int, mask: int, core: int) -> list[int]:
    """Chunks that the player still has to do with when it meets its partner at distance *mask*: first needed first."""
    if mask == core:
        return [_own(player, core)]
    return _wanted(player ^ mask, 2 * mask, core) + _wanted(player, 2 * mask, core)


def _held(player: int, mask: int, core: int) -> list[int]:
    """Chunks whose result the player has after doubling at distance *mask*: first had first."""
    if mask == core:
        return [_own(player, core)]
    return _held(player, 2 * mask, core) + _held(player ^ mask, 2 * mask, core)
