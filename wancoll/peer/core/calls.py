"""What a client called, kept in terms that outlive epochs, and what it means in one of them. Pure.

A client names ranks as it knows them when it calls; the members may be others by the time the call runs, or runs again.
A root stays the member that it was. Blocks of lost ranks stay where they are in front and are left out of the result.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from wancoll.collective import REDUCING, ROOTED, Codec, Descriptor, DType, Kind, ReduceOp
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, Limits
from wancoll.schedule import choose
from wancoll.schedule.steps import Schedule
from wancoll.wire import messages as m

UNEVEN = frozenset({Kind.all_gather, Kind.reduce_scatter})  # kinds that take counts
NOTHING = Schedule(())
_CALLS_KEPT = 256  # with what they mean in the current epoch
_WORLDS_KEPT = 4096  # epochs that a client which has not read for long may still speak of


@dataclass(frozen=True, slots=True)
class World:
    """An epoch's members in rank order, as far as calls speak of them."""

    mids: tuple[int, ...]
    names: tuple[str, ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, epoch: m.Epoch) -> World:
        """That of *epoch*."""
        members = epoch.members
        return cls(
            tuple(one.mid for one in members), tuple(one.name for one in members), tuple(one.site for one in members)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """A call in the terms of one epoch.

    Args:
        descriptor: with root and counts by the epoch's ranks.
        fingerprint: of the descriptor.
        front_bytes: of the caller's memory that this member reads.
        back_bytes: of the result.
        algorithm: the schedule's name.
        schedule: this member's.
        needs: mids of the members with which it exchanges bytes.
        refusal: why it cannot run in this epoch, "" if it can.
    """

    descriptor: Descriptor
    fingerprint: int
    front_bytes: int
    back_bytes: int
    algorithm: str = "none"
    schedule: Schedule = NOTHING
    needs: frozenset[int] = frozenset()
    refusal: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """A client's call, in its own words.

    Args:
        posted: descriptor in the terms of *world*.
        world: the members that the client knew.
    """

    posted: Descriptor
    world: World
    epoch: int = 0  # of *meaning*
    meaning: Meaning | None = None

    def in_epoch(self, epoch: m.Epoch, world: World, rank: int, limits: Limits = DEFAULT) -> Meaning:
        """What it means in *epoch*; found once."""
        if self.meaning is None or self.epoch != epoch.epoch:
            self.epoch, self.meaning = epoch.epoch, resolve(self.posted, self.world, world, rank, epoch.plan, limits)
        return self.meaning


def posted(post: m.Post, world: World | None, who: str) -> Call:
    """The call that *post* makes, by a client that knew *world*.

    Raises:
        ProtocolError: fields that do not fit together.
    """
    kind = Kind(post.kind)
    size = len(world.mids) if world is not None else 0
    expected = ""
    if world is None:
        expected, got = "an epoch that this member has told its client lately", f"epoch {post.epoch}"
    elif kind in ROOTED and not 0 <= post.root < size:
        expected, got = f"a root from 0 to {size - 1}", str(post.root)
    elif post.counts and (kind not in UNEVEN or len(post.counts) != size):
        expected, got = f"{size} counts, of all_gather or reduce_scatter", f"{len(post.counts)} for {kind.name}"
    elif kind in choose.ALGORITHMS and post.algorithm not in ("auto", *choose.ALGORITHMS[kind]):
        expected, got = ", ".join(("auto", *choose.ALGORITHMS[kind])), post.algorithm
    elif post.codec and not _takes(kind, DType(post.dtype), Codec(post.codec)):
        expected, got = (
            "a codec that all_reduce has for this dtype",
            f"{Codec(post.codec).name} for {DType(post.dtype).name}",
        )
    elif post.on_failure not in ("retry", "raise"):
        expected, got = "on_failure retry or raise", post.on_failure
    if expected or world is None:
        raise ProtocolError("posted a call that cannot be", who=who, expected=expected, got=got)
    descriptor = Descriptor(
        kind,
        DType(post.dtype),
        ReduceOp(post.op) if kind in REDUCING else ReduceOp.sum,
        post.count,
        tuple(post.counts),
        post.root if kind in ROOTED else -1,
        Codec(post.codec),
        post.algorithm,
        post.on_failure,
        "stochastic" if post.stochastic else "nearest",
        post.seed,
    )
    return Call(descriptor, world)


def _takes(kind: Kind, dtype: DType, codec: Codec) -> bool:
    """Whether operations of *kind* encode elements of *dtype* so."""
    halves = dtype in (DType.float16, DType.bfloat16) and codec in (Codec.int8, Codec.int4)
    return kind is Kind.all_reduce and (halves or dtype in (DType.float32, DType.float64))


def resolve(call: Descriptor, knew: World, world: World, rank: int, plan: m.Plan, limits: Limits = DEFAULT) -> Meaning:
    """What *call* means in an epoch.

    Args:
        call: in the terms of *knew*.
        knew: the members that its caller knew.
        world: the epoch's members.
        rank: this member's, in *world*.
        plan: the epoch's.
        limits: bounds.
    """
    size = len(world.mids)
    known = {mid: i for i, mid in enumerate(knew.mids)}
    place = [known.get(mid, -1) for mid in world.mids]  # of each rank, in the caller's order
    by_rank = bool(call.counts) or call.kind in choose.BLOCKS_IN_FRONT
    descriptor, root = call, -1
    if call.kind in ROOTED:
        mid = knew.mids[call.root]
        root = world.mids.index(mid) if mid in world.mids else -1
    if by_rank and -1 in place:
        newcomer = world.names[place.index(-1)]
        refusal = f"{newcomer} joined the group after {call.kind.name} was called"
        return Meaning(call, call.fingerprint(), 0, 0, refusal=refusal)
    if root != call.root or call.counts:
        counts = tuple(call.counts[i] for i in place) if call.counts else ()
        descriptor = dataclasses.replace(call, root=root, counts=counts)
    fingerprint = descriptor.fingerprint()
    if call.kind in ROOTED and root < 0:
        refusal = f"the root of {call.kind.name}, {knew.names[call.root]}, was lost"
        return Meaning(descriptor, fingerprint, 0, 0, refusal=refusal)
    blocks: tuple[int, ...] = ()
    if call.kind in choose.BLOCKS_IN_FRONT:
        starts = list(accumulate(call.block_counts(len(knew.mids)), initial=0))
        blocks = tuple(starts[i] for i in place)
    front_bytes, back_bytes = choose.sizes(descriptor, rank, size, blocks)
    ranks = {mid: i for i, mid in enumerate(world.mids)}
    avoid = {(ranks[a], ranks[b]) for a, b in plan.avoid if a in ranks and b in ranks}
    try:
        algorithm = choose.choose(descriptor, size, plan.choices, avoid=avoid, sites=world.sites)
    except choose.NoRoute as bad:
        one, other = (world.names[rank] for rank in bad.pair)
        refusal = f"{bad.algorithm} needs a link between {one} and {other}, who cannot reach each other"
        return Meaning(descriptor, fingerprint, front_bytes, back_bytes, refusal=refusal)
    schedule = choose.make(descriptor, algorithm, rank, size, blocks=blocks, sites=world.sites)
    if schedule.scratch > limits.scratch_bytes:
        refusal = (
            f"{algorithm} of {descriptor} needs {schedule.scratch} bytes of memory at {world.names[rank]}, more than "
            f"the {limits.scratch_bytes} that one operation may have; take another algorithm, or smaller tensors"
        )
        return Meaning(descriptor, fingerprint, front_bytes, back_bytes, refusal=refusal)
    needs = frozenset(world.mids[other] for other in choose.links(schedule))
    return Meaning(descriptor, fingerprint, front_bytes, back_bytes, algorithm, schedule, needs)


def noise(call: Descriptor, seq: int, mid: int) -> tuple[int, int]:
    """Keys of the generator that rounds, for measured encodes and for all others. Not of the attempt.

    They are the member's own: errors of members that round alike would add up in the sum.
    """
    if call.rounding != "stochastic":
        return 0, 0
    return _key(call.seed, seq, mid, 0), _key(call.seed, seq, mid, 1)


def _key(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class CallBook:
    """The calls that a client repeats, and the epochs that it may speak of.

    Args:
        who: name of the member, for errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._worlds: dict[int, World] = {}  # by epoch
        self._calls: dict[tuple[Any, ...], Call] = {}  # by the fields of Post

    def enter(self, epoch: int, world: World) -> None:
        """The client is told of *epoch*."""
        self._worlds[epoch] = world
        if len(self._worlds) > _WORLDS_KEPT:
            del self._worlds[next(iter(self._worlds))]

    def world(self, epoch: int) -> World | None:
        """The members of *epoch*, None if it is none that the client can know."""
        return self._worlds.get(epoch)

    def call(self, post: m.Post) -> Call:
        """What *post* calls; kept, since training repeats its calls.

        Raises:
            ProtocolError: nothing that can be called.
        """
        how = (post.kind, post.dtype, post.op, post.count, post.root, post.codec, post.algorithm, post.on_failure)
        key = (*how, post.stochastic, post.seed, post.epoch, *post.counts)
        known = self._calls.get(key)
        if known is None:
            while self._worlds and next(iter(self._worlds)) < post.epoch:  # what the client knows only grows
                del self._worlds[next(iter(self._worlds))]
            if len(self._calls) >= _CALLS_KEPT:
                del self._calls[next(iter(self._calls))]
            known = self._calls[key] = posted(post, self._worlds.get(post.epoch), self._who)
        return known
