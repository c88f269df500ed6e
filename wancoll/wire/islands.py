"""Islands: members that are admitted and lost together, one for each shard of a model. Pure.

An epoch's members stand island by island, each with its shards in order: the rank is the island's place. A *column* is
the members of one shard; collectives run within it. A member of an island with several shards is named ISLAND/SHARD.
Where each island is one member (shards = 1) the group has one column.
"""

from __future__ import annotations

from collections.abc import Sequence


def member_name(island: str, shard: int, shards: int) -> str:
    """The name of a member."""
    return f"{island}/{shard}" if shards > 1 else island


def parted(name: str, shards: int) -> tuple[str, int]:
    """The island and the shard of the member called *name*; shard -1: it is no name of a member."""
    if shards == 1:
        return name, 0
    island, _, shard = name.rpartition("/")
    known = island and shard.isascii() and shard.isdigit() and str(int(shard)) == shard and int(shard) < shards
    return (island, int(shard)) if known else (name, -1)


def in_order(names: Sequence[str], shards: int) -> bool:
    """Whether members of these *names* are whole islands, one after the other."""
    places = [parted(name, shards) for name in names]
    first = [island for island, shard in places if shard == 0]
    return places == [(island, shard) for island in first for shard in range(shards)]
