"""Which algorithm an operation takes, and the schedule it makes: pure functions, the same answer on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate

from wancoll.collective import DATALESS, REDUCING, Codec, Descriptor, Kind
from wancoll.errors import ConfigError
from wancoll.schedule import cost, pairs
from wancoll.schedule.algorithms import (
    direct,
    double_tree,
    full_exchange,
    halving_doubling,
    hierarchical,
    naive,
    ring,
    tree,
)
from wancoll.schedule.build import SPARSE, Builder, Coding, Shape
from wancoll.schedule.steps import RAW_ENDS, Direction, Ends, Schedule, chunk_bounds

_ALGORITHMS: dict[Kind, dict[str, Callable[[Builder, Shape], None]]] = {
    Kind.all_reduce: {
        "ring": ring.all_reduce,
        "direct": direct.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "tree": tree.all_reduce,
        "double_tree": double_tree.all_reduce,
        "full_exchange": full_exchange.all_reduce,
        "naive": naive.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    Kind.reduce_scatter: {"ring": ring.reduce_scatter, "direct": direct.reduce_scatter},
    Kind.all_gather: {"ring": ring.all_gather, "direct": direct.all_gather},
    Kind.broadcast: {
        "ring": ring.broadcast,
        "tree": tree.broadcast,
        "double_tree": double_tree.broadcast,
        "direct": direct.broadcast,
    },
    Kind.reduce: {"ring": ring.reduce, "tree": tree.reduce, "double_tree": double_tree.reduce, "direct": direct.reduce},
    Kind.gather: {"direct": direct.gather, "ring": ring.gather},
    Kind.scatter: {"direct": direct.scatter, "ring": ring.scatter},
    Kind.all_to_all: {"direct": direct.all_to_all, "ring": ring.all_to_all},
    # The frames that every schedule has, from each rank to its right neighbour, are all that a "ring" of these needs.
    Kind.update_membership: {"ring": lambda builder, shape: None},
    Kind.barrier: {"ring": lambda builder, shape: None, "direct": direct.barrier},
}

# What each kind offers; the first is taken where nothing else says which. All have a ring: see `choose`.
ALGORITHMS = {kind: tuple(offered) for kind, offered in _ALGORITHMS.items()}

# All-reduces that encode nothing but what ranks contribute and the result, whatever the number of ranks.
ENCODE_ONCE = ("direct", "full_exchange", "naive")
BOUNDED = (*ENCODE_ONCE, "hierarchical")  # those that a limit on the error may name: see Builder's raw_sums

MOST_PLANNED = 1 << 14  # messages that one rank may have where the caller leaves the choice to the plan
_MOST_BUILT = 4  # schedules, to see which links they need

# Where the input has a block for every rank (of scatter: at the root).
BLOCKS_IN_INPUT = frozenset({Kind.reduce_scatter, Kind.scatter, Kind.all_to_all})
_BLOCKS = BLOCKS_IN_INPUT | {Kind.all_gather, Kind.gather}  # kinds whose tensors are made of blocks


class NoRoute(Exception):
    """No schedule of an operation does without the link between the ranks of *pair*, which *algorithm* needs."""

    def __init__(self, pair: tuple[int, int], algorithm: str) -> None:
        super().__init__(f"{algorithm} needs a link between ranks {pair[0]} and {pair[1]}, which is not to be had")
        self.pair, self.algorithm = pair, algorithm


def choose(
    descriptor: Descriptor,
    world_size: int,
    choices: Mapping[str, Sequence[tuple[int, str]]],
    *,
    avoid: Collection[tuple[int, int]] = (),
    sites: Sequence[str] = (),
    shares: Sequence[int] = (),
) -> str:
    """The algorithm of an operation. *shares* are the plan's.

    What the caller asked for, else what the plan says for this size (the epoch's *choices*, as `cost.choices` makes
    them), else the kind's first. Where that needs a link that cannot be had it is the ring, whose order the master lays
    around such links, the pairs of ranks to *avoid*.

    Raises:
        ConfigError: the kind does not offer what the caller asked for.
        NoRoute: neither that nor a ring avoids all pairs.
    """
    algorithm = _preferred(descriptor, world_size, choices, sites)
    hit = _hit(descriptor, algorithm, world_size, avoid, sites, shares)
    if hit is None:
        return algorithm
    if _hit(descriptor, "ring", world_size, avoid, sites, ()) is not None:
        raise NoRoute(hit, algorithm)
    return "ring"


def _preferred(
    descriptor: Descriptor, world_size: int, choices: Mapping[str, Sequence[tuple[int, str]]], sites: Sequence[str]
) -> str:
    offered = ALGORITHMS[descriptor.kind]
    if descriptor.algorithm != "auto" and descriptor.algorithm not in offered:
        raise ConfigError(
            f"{descriptor.kind.name} has no such algorithm",
            expected=", ".join(("auto", *offered)),
            got=descriptor.algorithm,
        )
    if descriptor.algorithm != "auto" and (descriptor.algorithm != "hierarchical" or has_sites(sites)):
        return descriptor.algorithm
    if descriptor.codec.sparse:
        return SPARSE[descriptor.codec.of_result][0]
    entries = choices.get(descriptor.kind.name, ())
    planned = cost.chosen(entries, _plan_bytes(descriptor, world_size)) if entries else offered[0]
    if planned not in offered or (planned == "hierarchical" and not has_sites(sites)):
        planned = offered[0]
    if pairs.most_messages(descriptor, planned, world_size, sites) > MOST_PLANNED:
        planned = offered[0]
    if descriptor.codec is not Codec.none and descriptor.kind in REDUCING and planned not in ENCODE_ONCE:
        return "direct"
    return planned


def _plan_bytes(descriptor: Descriptor, world_size: int) -> int:
    """The size that the plan goes by: of the larger tensor, and of what is on the wire."""
    coding = Coding.of(descriptor.codec, descriptor.dtype)
    if descriptor.kind in _BLOCKS:
        return sum(descriptor.block_counts(world_size)) * descriptor.dtype.itemsize
    return coding.coded_bytes(descriptor.nbytes) if coding else descriptor.nbytes


def _hit(
    descriptor: Descriptor,
    algorithm: str,
    world_size: int,
    avoid: Collection[tuple[int, int]],
    sites: Sequence[str],
    shares: Sequence[int],
) -> tuple[int, int] | None:
    """The first of the pairs to avoid that *algorithm* uses, or may use."""
    built: dict[int, set[int]] = {}
    counts = pairs.counts(descriptor, algorithm, world_size, shares) if avoid else ()
    for one, other in sorted(avoid):
        hit = pairs.talk(descriptor, algorithm, one, other, counts)
        if hit is None:
            if one not in built:
                if len(built) == _MOST_BUILT:
                    return one, other
                built[one] = links(make(descriptor, algorithm, one, world_size, sites=sites))
            hit = other in built[one]
        if hit:
            return one, other
    return None


def has_sites(sites: Sequence[str]) -> bool:
    """Whether there are at least two sites, one of them with two members."""
    return 1 < len(hierarchical.members_by_site(sites)) < len(sites)


def make(
    descriptor: Descriptor,
    algorithm: str,
    rank: int,
    world_size: int,
    *,
    blocks: Sequence[int] = (),
    sites: Sequence[str] = (),
    ends: Ends = RAW_ENDS,
    shares: Sequence[int] = (),
) -> Schedule:
    """The schedule of *rank*, by an algorithm of the kind; hierarchical needs the label of every rank's site.

    *ends*: which of this rank's buffers are encoded. Those of others need not be, and the result is the same.

    *blocks*, where the input has a block for every rank (BLOCKS_IN_INPUT): element offsets of those of the present
    ranks, in rank order; the input may have blocks of lost ranks, too. Left out: one after the other.

    *shares*: how much of the tensor each rank owns in a direct all_reduce, one number a rank; empty: all alike.
    """
    if descriptor.kind not in _ALGORITHMS:
        raise ValueError(f"{descriptor.kind.name} is no collective: it has no schedule")
    size = descriptor.dtype.itemsize
    shape = Shape(
        descriptor.count,
        size,
        descriptor.root,
        lengths=[count * size for count in descriptor.block_counts(world_size)],
        starts=[start * size for start in _block_starts(descriptor, world_size, blocks)],
        sites=sites,
        shares=shares,
    )
    coding = Coding.of(descriptor.codec, descriptor.dtype, descriptor.kind)
    builder = Builder(rank, world_size, coding, shape.nbytes, ends, raw_sums=descriptor.bounded and coding is not None)
    kept = (0, 0)
    if world_size > 1:
        sparse = descriptor.codec.sparse and algorithm == "ring"
        (ring.all_reduce_sparse if sparse else _ALGORITHMS[descriptor.kind][algorithm])(builder, shape)
        if ends.kept and coding is not None:
            kept = chunk_bounds(shape.count, world_size, coding.elements, shares)[rank]
    elif descriptor.kind not in DATALESS:
        builder.keep(builder.mine(0, shape.lengths[0], shape.starts[0]), 0)
    return builder.finish()._replace(kept=kept)


def sizes(descriptor: Descriptor, rank: int, world_size: int, blocks: Sequence[int] = ()) -> tuple[int, int]:
    """Bytes of input and of result that *rank* has. The arguments are those of `make`."""
    kind, at_root = descriptor.kind, rank == descriptor.root
    counts = descriptor.block_counts(world_size)
    reads = writes = descriptor.count
    if kind in DATALESS:
        reads = writes = 0
    elif kind is Kind.broadcast:
        reads = reads if at_root else 0
    elif kind is Kind.reduce:
        writes = writes if at_root else 0
    elif kind in _BLOCKS:
        starts = _block_starts(descriptor, world_size, blocks)
        spread = max(start + count for start, count in zip(starts, counts, strict=True))
        reads = spread if kind in BLOCKS_IN_INPUT else counts[rank]
        writes = counts[rank] if kind in (Kind.reduce_scatter, Kind.scatter) else sum(counts)
        reads = 0 if kind is Kind.scatter and not at_root else reads
        writes = 0 if kind is Kind.gather and not at_root else writes
    return reads * descriptor.dtype.itemsize, writes * descriptor.dtype.itemsize


def _block_starts(descriptor: Descriptor, world_size: int, blocks: Sequence[int]) -> Sequence[int]:
    counts = descriptor.block_counts(world_size)
    return blocks or [stop - count for stop, count in zip(accumulate(counts), counts, strict=True)]


def links(schedule: Schedule) -> set[int]:
    """Ranks that this one talks to."""
    return {step.peer for step in schedule.steps if step.direction is not Direction.local}
