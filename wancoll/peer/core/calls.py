"""What a client called, kept in terms that outlive epochs, and what it means in one of them. Pure.

A client names ranks as it knows them when it calls; the members may be others by the time the call runs, or runs again.
A root stays the member that it was, and so does the other side of a send or recv. Blocks of lost ranks stay where they
are in the input and are left out of the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import accumulate

from msgspec.structs import replace

from wancoll.collective import (
    CODED,
    DATALESS,
    ON_FAILURE,
    P2P_KINDS,
    REDUCING,
    ROOTED,
    ROUNDINGS,
    Descriptor,
    Kind,
    ReduceOp,
)
from wancoll.errors import ProtocolError
from wancoll.limits import DEFAULT, Limits, keep_newest
from wancoll.schedule import choose
from wancoll.schedule.build import Coding, fits_sparse, takes
from wancoll.schedule.cost import usable
from wancoll.schedule.pairs import most_messages
from wancoll.schedule.steps import MAX_STEPS, RAW_ENDS, Action, Buffer, Direction, Ends, Place, Schedule, Step
from wancoll.wire import messages as m
from wancoll.wire.islands import in_order

UNEVEN = frozenset({Kind.all_gather, Kind.reduce_scatter})  # kinds that take counts
_BY_RANK = choose.BLOCKS_IN_INPUT | {Kind.all_gather, Kind.gather}  # kinds with a block for or from every rank
NOTHING = Schedule(())
EPOCHS_SPOKEN_OF = 16  # threads of a client may post calls that they made so many epochs before the newest one
_CALLS_KEPT = 256  # with what they mean in the current epoch
_WORLDS_KEPT = 4096  # epochs that a client which has not read for long may still speak of


@dataclass(frozen=True, slots=True)
class World:
    """An epoch's members in rank order, as far as calls speak of them."""

    mids: tuple[int, ...]
    names: tuple[str, ...]
    sites: tuple[str, ...]

    @classmethod
    def of(cls, epoch: m.Epoch, shard: int = 0) -> World:
        """Return the world of *epoch*, as a member of this *shard* sees it: its column."""
        members = epoch.members[shard :: epoch.shards]
        return cls(
            tuple(one.mid for one in members), tuple(one.name for one in members), tuple(one.site for one in members)
        )


def check_epoch(epoch: m.Epoch, mid: int) -> None:
    """Raise ProtocolError where no master can have made *epoch* for the member *mid*."""
    mids, names = ({getattr(one, field) for one in epoch.members} for field in ("mid", "name"))
    whole = len(mids) == len(names) == len(epoch.members)
    whole = whole and epoch.committed_upto <= m.MOST // 2  # calls are counted on from there (R19)
    plan = epoch.plan
    whole = whole and in_order([one.name for one in epoch.members], epoch.shards)
    whole = whole and plan.lane_groups <= plan.lanes and usable(plan.choices, plan.shares, len(mids) // epoch.shards)
    if mid not in mids or not whole:
        raise ProtocolError(
            "announced an epoch that cannot be",
            who="the master",
            expected=f"member {mid} among different ones, known algorithms for every size, numbers to count on from",
            got=str(epoch)[:500],
        )


@dataclass(frozen=True, slots=True, eq=False)
class EpochView:
    """A member's place in one epoch; the next epoch's replaces it as a whole."""

    epoch: m.Epoch  # as the master announced it
    mid: int
    world: World  # its column
    columns: dict[int, int]  # of all members, by mid
    rank: int
    neighbours: frozenset[int]  # mids of those next to it in the ring
    spares: frozenset[int]  # mids of its neighbours once one of these is lost, if their links are to be kept up
    head: tuple[str, int, int]  # what every message of the epoch to the master begins with
    too_small: bool  # it has fewer than min_world members
    votes: bool  # members commit among themselves: then the links to all are kept up

    @classmethod
    def of(cls, epoch: m.Epoch, mid: int) -> EpochView:
        """Return the view of the member *mid* in *epoch*."""
        columns = {one.mid: at % epoch.shards for at, one in enumerate(epoch.members)}
        world = World.of(epoch, columns[mid])
        mids, size = world.mids, len(world.mids)
        rank = mids.index(mid)
        neighbours = frozenset((mids[rank - 1], mids[(rank + 1) % size])) - {mid}
        spares: frozenset[int] = frozenset()
        if epoch.plan.spares:
            apart = {other for pair in epoch.plan.avoid if mid in pair for other in pair}
            next_but_one = {mids[(rank + places) % size] for places in (-2, 2)}
            spares = frozenset(next_but_one - neighbours - apart - {mid})
        votes = epoch.plan.collectors == "members"
        if votes:
            spares = frozenset(columns) - neighbours - {mid}
        head = (epoch.group, mid, epoch.epoch)
        return cls(epoch, mid, world, columns, rank, neighbours, spares, head, size < epoch.min_world, votes)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedCall:
    """A call in the terms of one epoch."""

    descriptor: Descriptor  # with root and counts by the epoch's ranks
    fingerprint: int  # of the descriptor; of a send or recv what both halves agree on
    input_bytes: int  # of the elements that this member reads
    result_bytes: int
    algorithm: str = "none"  # the schedule's name
    schedule: Schedule = NOTHING  # this member's
    needs: frozenset[int] = frozenset()  # mids of the members with whom bytes go back and forth
    refusal: str = ""  # why it cannot run in this epoch; "": it can

    @property
    def bytes_received(self) -> int:
        """Payload that this member takes from others, in all."""
        coding = Coding.of(self.descriptor.codec, self.descriptor.dtype)
        came = [(step.length, step.to) for step in self.schedule.steps if step.direction is Direction.recv]
        return sum(coding.coded_bytes(size) if coding and to and to.encoded else size for size, to in came)

    @property
    def proves_all(self) -> bool:
        """Whether this member can finish it only after every other one has made the call and given its share."""
        return self.descriptor.proves_all or (self.descriptor.kind is Kind.barrier and self.algorithm == "direct")


@dataclass(slots=True, eq=False)
class Call:
    """A client's call, in its own words."""

    posted: Descriptor  # in the terms of *world*
    world: World  # the members that the client knew
    peer: int  # rank of the other side of a send or recv
    input_bytes: int  # of the elements that the call may read, in any epoch
    result_bytes: int  # of those that it may write
    p2p: bool  # it is a send or recv
    ends: Ends = RAW_ENDS  # which of the two are encoded
    _view: EpochView | None = field(default=None, init=False)
    _resolved: ResolvedCall | None = field(default=None, init=False)

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the client's memory for its input and its result."""
        coding = Coding.of(self.posted.codec, self.posted.dtype)
        sizes = self.input_bytes, self.result_bytes
        if coding is None:
            return sizes
        read, written = (
            coding.coded_bytes(size) if coded else size for size, coded in zip(sizes, self.ends[:2], strict=True)
        )
        return read, 2 * written if self.ends.kept else written

    def resolved(self, view: EpochView, limits: Limits = DEFAULT) -> ResolvedCall:
        """Resolve the call in the epoch of *view*, once for each epoch."""
        if self._resolved is None or self._view is not view:
            self._view = view
            self._resolved = resolve(
                self.posted,
                self.world,
                view.world,
                view.rank,
                view.epoch.plan,
                limits,
                peer=self.peer,
                ends=self.ends,
            )
        return self._resolved


def posted(post: m.Post, knew: World | None, mid: int, who: str) -> Call:
    """The call that *post* makes, by the member *mid*, called *who*, whose client knew the members *knew*.

    Raises:
        ProtocolError: fields that do not fit together.
    """
    call = post.call
    if knew is None:
        expected, got = "an epoch that this member has told its client lately", f"epoch {post.epoch}"
    else:
        expected, got = _misfit(call, post.peer, knew, mid)
        if post.ahead and call.kind is not Kind.recv:
            expected, got = "ahead for recv only", call.kind.name
        elif post.input_coded and not (call.codec and call.kind is Kind.all_reduce):
            expected, got = "an input that is encoded for an all_reduce with a codec", str(call)
        elif post.input_coded and call.codec.sparse and post.filled >= 0:  # its daemon looks at the blocks
            expected, got = "an input that is there, of a sparse codec", str(call)
        elif post.result_coded and (not call.codec.of_result or call.kind is not Kind.all_reduce or call.grace):
            # With grace its daemon may have taken part by now.
            expected, got = "a result that is encoded of an all_reduce with a codec, and without grace", str(call)
        elif post.result_kept and (not (call.codec.sparse and call.codec.of_result) or post.result_coded):
            expected, got = "sums that are kept of a sparse codec that encodes the result, too", str(call)
    if expected or knew is None:
        raise ProtocolError("posted a call that cannot be", who=who, expected=expected, got=got)
    p2p = call.kind in P2P_KINDS
    nbytes = _p2p_sizes(call) if p2p else choose.sizes(call, knew.mids.index(mid), len(knew.mids))
    return Call(call, knew, post.peer, *nbytes, p2p, Ends(post.input_coded, post.result_coded, post.result_kept))


def call_of_zeros(asked: m.ContributeZeros, view: EpochView) -> Call | None:
    """The call that a daemon shall take part in for its client.

    None: it is none, or one that needs the client's own tensor. Another member's daemon has made it up, or can do more.
    """
    call = asked.call
    if _misfit(call, -1, view.world, view.mid)[0] or not call.grace:
        return None
    sizes, kept = choose.sizes(call, view.rank, len(view.world.mids)), call.codec.sparse and call.codec.of_result
    return Call(call, view.world, -1, *sizes, False, Ends(kept=kept))


def _misfit(call: Descriptor, peer: int, knew: World, mid: int) -> tuple[str, str]:
    """What is expected in place of what, "" if all fits together."""
    kind, size = call.kind, len(knew.mids)
    if kind in P2P_KINDS and (not 0 <= peer < size or knew.mids[peer] == mid):
        return "the rank of another member", f"rank {peer}"
    if kind in ROOTED and not 0 <= call.root < size:
        return f"a root from 0 to {size - 1}", str(call.root)
    if kind in DATALESS and call.count:
        return f"no elements, which {kind.name} has not", str(call.count)
    if kind not in ROOTED and call.root != -1:
        return f"no root, which {kind.name} has not", str(call.root)
    if kind not in REDUCING and call.op is not ReduceOp.sum:
        return f"no op, since {kind.name} reduces nothing", call.op.name
    if call.counts and (kind not in UNEVEN or len(call.counts) != size):
        return f"{size} counts, of all_gather or reduce_scatter", f"{len(call.counts)} for {kind.name}"
    if kind in choose.ALGORITHMS and call.algorithm not in ("auto", *choose.ALGORITHMS[kind]):
        return ", ".join(("auto", *choose.ALGORITHMS[kind])), call.algorithm
    if call.codec and not (kind in CODED and takes(call.codec, call.dtype)):
        return f"a codec that {kind.name} has for this dtype", f"{call.codec.name} for {call.dtype.name}"
    if kind is not Kind.all_reduce and (call.codec.sparse or call.rounding != "nearest" or call.bounded):
        return f"a codec that {kind.name} has, rounded to nearest", str(call)
    if call.codec.sparse and not (fits_sparse(call.codec, call.op, call.algorithm) and call.rounding == "nearest"):
        return "a sum or avg, and an algorithm for sparse codecs", str(call)
    if call.on_failure not in ON_FAILURE:
        return "on_failure " + " or ".join(ON_FAILURE), call.on_failure
    if call.grace and not call.takes_grace:
        return "grace for all_reduce of a sum only", f"grace={call.grace:g} for {kind.name} of {call.op.name}"
    if call.rounding not in ROUNDINGS:
        return "rounding " + " or ".join(ROUNDINGS), call.rounding
    return "", ""


def _p2p_sizes(call: Descriptor) -> tuple[int, int]:
    """Bytes of the input and of the result of a send or recv."""
    return (call.nbytes, 0) if call.kind is Kind.send else (0, call.nbytes)


def resolve(
    call: Descriptor, knew: World, world: World, rank: int, plan: m.Plan, limits: Limits = DEFAULT, *, peer: int = -1,
    ends: Ends = RAW_ENDS,
) -> ResolvedCall:  # fmt: skip
    """What *call* means in an epoch with the members *world*, among whom this one has *rank*.

    The root of *call*, and *peer* of a send or recv, are ranks in *knew*, the members that its caller knew. *ends* says
    which of its buffers are encoded.
    """
    if call.kind in P2P_KINDS:
        return _p2p(call, knew, world, rank, plan, peer)
    size = len(world.mids)
    known = {mid: i for i, mid in enumerate(knew.mids)}
    place = [known.get(mid, -1) for mid in world.mids]  # of each rank, in the caller's order
    descriptor, root = call, -1
    if call.kind in ROOTED:
        mid = knew.mids[call.root]
        root = world.mids.index(mid) if mid in world.mids else -1
    if call.kind in _BY_RANK and -1 in place:
        refusal = f"{world.names[place.index(-1)]} joined the group after {call.kind.name} was called"
        return ResolvedCall(call, call.fingerprint(), 0, 0, refusal=refusal)
    if root != call.root or call.counts:
        counts = tuple(call.counts[i] for i in place) if call.counts else ()
        descriptor = replace(call, root=root, counts=counts)
    fingerprint = descriptor.fingerprint()
    gone = [name for mid, name in zip(knew.mids, knew.names, strict=True) if mid not in world.mids]
    if call.on_failure == "raise" and gone:
        refusal = f"the membership changed: {', '.join(gone)} left or was lost"
        return ResolvedCall(descriptor, fingerprint, 0, 0, refusal=refusal)
    if call.kind in ROOTED and root < 0:
        refusal = f"the root of {call.kind.name}, {knew.names[call.root]}, was lost"
        return ResolvedCall(descriptor, fingerprint, 0, 0, refusal=refusal)
    blocks: tuple[int, ...] = ()
    if call.kind in choose.BLOCKS_IN_INPUT:
        starts = list(accumulate(call.block_counts(len(knew.mids)), initial=0))
        blocks = tuple(starts[i] for i in place)
    nbytes = choose.sizes(descriptor, rank, size, blocks)
    asked = descriptor
    if call.kind is Kind.barrier and plan.collectors == "members":
        asked = replace(descriptor, algorithm="direct")  # whose end anywhere says that all have called it (C1)
    ranks = {mid: i for i, mid in enumerate(world.mids)}
    avoid = {(ranks[a], ranks[b]) for a, b in plan.avoid if a in ranks and b in ranks}
    try:
        algorithm = choose.choose(asked, size, plan.choices, avoid=avoid, sites=world.sites, shares=tuple(plan.shares))
    except choose.NoRoute as bad:
        one, other = (world.names[rank] for rank in bad.pair)
        refusal = f"{bad.algorithm} needs a link between {one} and {other}, who cannot reach each other"
        return ResolvedCall(descriptor, fingerprint, *nbytes, refusal=refusal)
    messages = most_messages(descriptor, algorithm, size, world.sites)
    if messages > MAX_STEPS:
        refusal = (
            f"{algorithm} of {descriptor} takes {messages} messages of one of {size} members, more than the "
            f"{MAX_STEPS} steps that one operation may have; take another algorithm"
        )
        return ResolvedCall(descriptor, fingerprint, *nbytes, refusal=refusal)
    schedule = choose.make(
        descriptor, algorithm, rank, size, blocks=blocks, sites=world.sites, ends=ends, shares=tuple(plan.shares)
    )
    if schedule.scratch > limits.scratch_bytes:
        refusal = (
            f"{algorithm} of {descriptor} needs {schedule.scratch} bytes of memory at {world.names[rank]}, more than "
            f"the {limits.scratch_bytes} that one operation may have; take another algorithm, or smaller tensors"
        )
        return ResolvedCall(descriptor, fingerprint, *nbytes, refusal=refusal)
    if len(schedule.steps) > MAX_STEPS:
        refusal = (
            f"{algorithm} of {descriptor} takes {len(schedule.steps)} steps at {world.names[rank]}, more than the "
            f"{MAX_STEPS} that one operation may have; take another algorithm"
        )
        return ResolvedCall(descriptor, fingerprint, *nbytes, refusal=refusal)
    needs = frozenset(world.mids[other] for other in choose.links(schedule))
    return ResolvedCall(descriptor, fingerprint, *nbytes, algorithm, schedule, needs)


def _p2p(call: Descriptor, knew: World, world: World, rank: int, plan: m.Plan, peer: int) -> ResolvedCall:
    """A send or recv: one step, to or from the other side."""
    nbytes = _p2p_sizes(call)
    fingerprint = replace(call, kind=Kind.send).fingerprint()
    me, other = world.mids[rank], knew.mids[peer]
    if other not in world.mids:
        refusal = f"{knew.names[peer]}, the other side, has left the group or was lost"
        return ResolvedCall(call, fingerprint, *nbytes, refusal=refusal)
    if (min(me, other), max(me, other)) in plan.avoid:
        refusal = f"{world.names[rank]} and {knew.names[peer]} cannot reach each other"
        return ResolvedCall(call, fingerprint, *nbytes, refusal=refusal)
    at = world.mids.index(other)
    if call.kind is Kind.send:
        step = Step(Direction.send, Action.copy, 0, call.nbytes, at, left=Place(Buffer.input, 0))
    else:
        step = Step(Direction.recv, Action.copy, 0, call.nbytes, at, to=Place(Buffer.result, 0), result=True)
    return ResolvedCall(call, fingerprint, *nbytes, "direct", Schedule((step,)), frozenset({other}))


def noise(call: Descriptor, seq: int, mid: int) -> tuple[int, int, int]:
    """Keys of the generator that rounds: for results, for this member's tensor and for sums. Not of the attempt.

    Several members may encode the same result. The other keys are the member's own: errors of members that round alike
    would add up in the sum.
    """
    if call.rounding != "stochastic":
        return 0, 0, 0
    return _key(call.seed, seq), _key(call.seed, seq, mid, 0), _key(call.seed, seq, mid, 1)


def _key(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class RepeatedCalls:
    """The calls that a client repeats, and the epochs that it may speak of; *who* names the member in errors."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._worlds: dict[int, World] = {}  # by epoch
        self._calls: dict[tuple[Descriptor, int, int, Ends], Call] = {}  # by descriptor, epoch, peer and buffers

    def enter(self, epoch: int, world: World) -> None:
        """The client is told of *epoch*."""
        keep_newest(self._worlds, epoch, world, _WORLDS_KEPT)

    def call(self, post: m.Post, mid: int) -> Call:
        """What *post* calls, by the member *mid*; kept, since training repeats its calls.

        Raises:
            ProtocolError: nothing that can be called.
        """
        key = post.call, post.epoch, post.peer, Ends(post.input_coded, post.result_coded, post.result_kept)
        known = self._calls.get(key)
        if known is None:
            while self._worlds and next(iter(self._worlds)) < post.epoch - EPOCHS_SPOKEN_OF:
                del self._worlds[next(iter(self._worlds))]
            known = posted(post, self._worlds.get(post.epoch), mid, self._who)
            keep_newest(self._calls, key, known, _CALLS_KEPT)
        return known
