"""The reference executor: runs the schedules of all ranks in numpy. The engine must equal it bit for bit.

All ranks' steps are one graph of parts, run in any order that it allows.

The order is what makes it a test. A part waits for the parts that bound it (but for one to be received, which waits for
its bytes) and for its turn on its lane; nothing else. Memory knows which steps wrote and read each byte last, so that a
step that comes too early or too late is caught, and not only where the bytes happen to differ. Every part knows which
others it could not have come before, whatever the lanes: those that bound what is received must be among them, or the
engine would refuse the bytes of a correct sender.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise

import numpy as np

from tests.schedule import numbers
from tests.schedule.codec import decode, encode
from tests.schedule.numbers import Array, average, reduce, storage
from wancoll.collective import Codec, DType, ReduceOp
from wancoll.schedule.build import Coding
from wancoll.schedule.steps import Action, Buffer, Direction, Place, Schedule, Step

_POISON = 0xA5
_NOBODY = -1


def execute(
    schedules: Sequence[Schedule],
    inputs: Sequence[Array],
    dtype: DType,
    op: ReduceOp,
    *,
    codec: Codec = Codec.none,
    result_bytes: Sequence[int] | None = None,
    noise: Sequence[tuple[int, int, int]] | None = None,
    order: int | None = None,
    cut: int = 0,
    lanes: int = 1,
    digests: list[int] | None = None,
    kept: list[Array] | None = None,
) -> list[Array]:
    """Runs the schedules of all ranks as the engine does and returns every rank's result.

    Args:
        schedules: one for each rank.
        inputs: each rank's input: a one-dimensional array of dtype storage(dtype). They are not changed. Where a
            schedule takes it encoded, that is done first; a result that it leaves encoded is decoded.
        dtype: what the elements are.
        op: the reduce op.
        codec: of what the schedules encode.
        result_bytes: size of each rank's result; None: that of its input.
        noise: three keys for each rank, of stochastic rounding: for results, inputs and sums. None: nearest.
        order: seed of a random order of all that may happen next; None: one rank after the other, as far as it comes.
        cut: steps are done in parts, cut at multiples of that many bytes of the whole; 0: in one piece.
        lanes: of every pair of ranks; part p of a step is on lane p % lanes. On a lane sends and receives are in order.
        digests: takes each rank's digest.
        kept: takes the sums that each rank keeps, as far as its schedule says.

    Returns:
        Arrays of dtype storage(dtype).

    Raises:
        ValueError: the schedules do not fit together, a step reads what its bounds did not write or overwrites what
            others than its bounds read last, bytes can be received before what bounds them, or a result is not written
            exactly once.
    """
    sizes = [input_buffer.nbytes for input_buffer in inputs] if result_bytes is None else result_bytes
    run = _Run(schedules, inputs, dtype, op, codec, sizes, noise, cut, lanes)
    results = run.results(order)
    if digests is not None:
        digests += [run.digest(rank) for rank in range(len(schedules))]
    if kept is not None:
        kept += [run.kept(rank, *schedule.kept) for rank, schedule in enumerate(schedules)]
    return results


@dataclass(slots=True, eq=False)
class _Part:
    """Bytes [begin, end) of the range of one rank's step, and what waits for them."""

    rank: int
    index: int
    step: Step
    begin: int
    end: int
    waits: int = 0
    next: list[_Part] = field(default_factory=list)
    causes: list[_Part] = field(default_factory=list)  # without which it could not be, whatever the lanes
    bounds: list[_Part] = field(default_factory=list)  # of a recv
    known: int = 0  # a bit for each of its causes, theirs included, that bounds a recv
    bit: int = 0  # of this one, if it bounds a recv
    receiver: _Part | None = None  # of a send
    wire: Array | None = None  # what the send put there for this recv
    key: tuple[float, int] = (0, 0)

    def then(self, other: _Part) -> None:
        self.next.append(other)
        other.waits += 1

    def enables(self, other: _Part) -> None:
        self.then(other)
        other.causes.append(self)

    def __str__(self) -> str:
        return f"rank {self.rank}, step {self.index} ({self.step}), bytes {self.begin} to {self.end}"


class _Memory:
    """One of a rank's buffers, the steps that wrote and used each byte last, and which bytes are final."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.full(nbytes, _POISON, np.uint8)
        self.writer = np.full(nbytes, _NOBODY, np.int32)
        self.user = np.full(nbytes, _NOBODY, np.int32)
        self.final = np.zeros(nbytes, bool)


class _Run:
    """See the module; the arguments are those of `execute`."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        inputs: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        codec: Codec,
        result_bytes: Sequence[int],
        noise: Sequence[tuple[int, int, int]] | None,
        cut: int,
        lanes: int,
    ) -> None:
        self._dtype, self._op, self._codec, self._noise = dtype, op, codec, noise
        self._coding = Coding.of(codec, dtype)
        self._world_size = len(schedules)
        self._input_buffers = [np.ascontiguousarray(input_buffer).view(np.uint8) for input_buffer in inputs]
        self._sizes, self._ends = result_bytes, [schedule.ends for schedule in schedules]
        self._adopts = [schedule.adopts for schedule in schedules]
        for rank, ends in enumerate(self._ends):
            if ends.input:
                key = None if noise is None else noise[rank][1]
                self._input_buffers[rank] = encode(codec, dtype, inputs[rank], key=key)
        self._memory = [
            {
                Buffer.result: _Memory(self._memory_bytes(rank) * (1 + schedule.ends.kept)),
                Buffer.scratch: _Memory(schedule.scratch),
            }
            for rank, schedule in enumerate(schedules)
        ]
        self._parts = self._graph(schedules, cut, lanes)

    def results(self, order: int | None) -> list[Array]:
        """Run everything; *order* and the errors are those of `execute`."""
        keys = self._keys(order)
        for index, part in enumerate(self._parts):
            part.key = (keys[index], index)
        ready = sorted(part.key for part in self._parts if not part.waits)
        done = 0
        while ready:
            part = self._parts[heappop(ready)[1]]
            self._do(part)
            done += 1
            for other in part.next:
                other.waits -= 1
                if not other.waits:
                    heappush(ready, other.key)
        if done < len(self._parts):
            stuck = next(part for part in self._parts if part.waits)
            raise ValueError(f"schedules do not fit together: steps wait for each other, the first is {stuck}")
        for rank, memory in enumerate(self._memory):
            missing = np.flatnonzero(~memory[Buffer.result].final[: self._memory_bytes(rank)])
            if missing.size:
                raise ValueError(f"rank {rank} never gets {missing.size} bytes of its result, from {missing[0]} on")
        return [self._result(rank) for rank in range(self._world_size)]

    def _memory_bytes(self, rank: int) -> int:
        size = self._sizes[rank]
        return self._coding.coded_bytes(size) if self._ends[rank].result and self._coding is not None else size

    def _result(self, rank: int) -> Array:
        data = self._memory[rank][Buffer.result].data[: self._memory_bytes(rank)]
        if self._ends[rank].result:
            return decode(self._codec, self._dtype, data, self._sizes[rank] // self._dtype.itemsize)
        return self._elements(data)

    def kept(self, rank: int, start: int, stop: int) -> Array:
        """Sums of elements [start, stop) of the tensor."""
        at = self._sizes[rank] + np.array([start, stop]) * self._dtype.itemsize
        return self._elements(self._memory[rank][Buffer.result].data[at[0] : at[1]])

    def digest(self, rank: int) -> int:
        """The digest of the rank's result, which is there; or of the encoded form that it adopts."""
        if self._coding is None or not self._adopts[rank]:
            return numbers.digest(self._memory[rank][Buffer.result].data.tobytes())
        coded = self._memory[rank][Buffer.result if self._ends[rank].result else Buffer.scratch].data
        block = self._coding.coded_bytes(numbers.DIGEST_BLOCK)
        return numbers.digest(coded[: self._coding.coded_bytes(self._sizes[rank])].tobytes(), block)

    def _keys(self, seed: int | None) -> Sequence[float]:
        """One for each part, lower ones go first. Some ranks and some kinds of steps are far slower than others."""
        if seed is None:
            return range(len(self._parts))
        rng = np.random.default_rng(seed)
        slowness = rng.uniform(0, 3, (self._world_size, len(Direction)))
        noise = rng.random(len(self._parts))
        return [slowness[part.rank, part.step.direction] + noise[index] for index, part in enumerate(self._parts)]

    # ---- who waits for whom --------------------------------------------------------------------------

    def _graph(self, schedules: Sequence[Schedule], cut: int, lanes: int) -> list[_Part]:
        everything: list[_Part] = []
        bits = count()
        queues: dict[tuple[int, ...], list[_Part]] = defaultdict(list)  # direction, from, to, lane
        for rank, schedule in enumerate(schedules):
            made: list[list[_Part]] = []
            for index, step in enumerate(schedule.steps):
                parts = [_Part(rank, index, step, *ends) for ends in _cuts(step, cut)]
                for bound in step.after:
                    before = schedule.steps[bound]
                    recv, sent = step.direction is Direction.recv, before.direction is Direction.send
                    if (before.start, before.length) != (step.start, step.length) or (sent and not recv):
                        raise ValueError(f"{parts[0]} must not be bound by {before}")
                    for earlier, later in zip(made[bound], parts, strict=True):
                        if recv:
                            earlier.bit = earlier.bit or 1 << next(bits)
                            later.bounds.append(earlier)
                        else:
                            earlier.enables(later)
                if step.direction is not Direction.local:
                    pair = (rank, step.peer) if step.direction is Direction.send else (step.peer, rank)
                    for number, part in enumerate(parts):
                        queues[step.direction, *pair, number % lanes].append(part)
                made.append(parts)
                everything += parts
        for (direction, *lane), queue in queues.items():
            for part, following in pairwise(queue):
                part.then(following)
            other = Direction.recv if direction is Direction.send else Direction.send
            _join(direction, queue, queues.get((other, *lane), []))
        return everything

    # ---- what happens --------------------------------------------------------------------------------

    def _do(self, part: _Part) -> None:
        step = part.step
        for cause in part.causes:
            part.known |= cause.known | cause.bit
        for bound in part.bounds:
            if not part.known & bound.bit:
                raise ValueError(f"{part} can come before {bound}, which bounds it")
        if part.begin == part.end:
            return
        if step.direction is Direction.send:
            assert part.receiver is not None
            part.receiver.wire = self._read(part, step.left).copy()
            return
        elements = (part.end - part.begin) // self._dtype.itemsize
        match step.action:
            case Action.copy:
                outcome = self._read(part, step.left) if part.wire is None else part.wire
            case Action.encode:
                assert step.left is not None
                which = 0 if step.measured else 1 if step.left.buffer is Buffer.input else 2
                key = None if self._noise is None else self._noise[part.rank][which]
                left = self._elements(self._read(part, step.left))
                first = (step.start + part.begin) // self._dtype.itemsize
                outcome = encode(self._codec, self._dtype, left, key=key, first=first)
            case Action.decode:
                outcome = decode(self._codec, self._dtype, self._read(part, step.left), elements)
            case Action.reduce | Action.final:
                left = self._elements(self._read(part, step.left))
                if part.wire is not None:
                    right = self._elements(part.wire)
                elif step.right is not None and step.right.encoded:
                    right = decode(self._codec, self._dtype, self._read(part, step.right), elements)
                else:
                    right = self._elements(self._read(part, step.right))
                outcome = self._reduced(left, right, step.action is Action.final)
        self._write(part, outcome.view(np.uint8))

    def _reduced(self, left: Array, right: Array, final: bool) -> Array:
        if final and self._op is ReduceOp.avg:
            return average(self._dtype, left, right, self._world_size)
        return reduce(self._dtype, self._op, left, right)

    def _elements(self, data: Array) -> Array:
        return data.view(storage(self._dtype))

    def _range(self, part: _Part, place: Place) -> slice:
        begin, length = part.begin, part.end - part.begin
        if place.encoded:
            assert self._coding is not None
            if (part.step.start + begin) % (self._coding.elements * self._coding.itemsize):
                raise ValueError(f"{part} does not begin at a block of the codec")
            begin, length = self._coding.coded_bytes(begin), self._coding.coded_bytes(length)
        return slice(place.offset + begin, place.offset + begin + length)

    def _read(self, part: _Part, place: Place | None) -> Array:
        assert place is not None
        where = self._range(part, place)
        memory = None if place.buffer is Buffer.input else self._memory[part.rank][place.buffer]
        data = (self._input_buffers[part.rank] if memory is None else memory.data)[where]
        if data.size != where.stop - where.start:
            raise ValueError(f"{part} reads beyond the end of {place.buffer.name}")
        if memory is not None:
            wrong = np.flatnonzero(~np.isin(memory.writer[where], part.step.after))
            if wrong.size:
                wrote = int(memory.writer[where][wrong[0]])
                raise ValueError(f"{part} reads from {place} what step {wrote} wrote, which does not bound it")
            memory.user[where] = part.index
        return data

    def _write(self, part: _Part, data: Array) -> None:
        place = part.step.to
        assert place is not None
        if place.buffer is Buffer.input:
            raise ValueError(f"{part} writes the caller's bytes")
        memory, where = self._memory[part.rank][place.buffer], self._range(part, place)
        if where.stop > memory.data.size:
            raise ValueError(f"{part} writes beyond the end of {place.buffer.name}")
        if memory.final[where].any():
            raise ValueError(f"{part} writes over a result")
        wrong = np.flatnonzero(~np.isin(memory.user[where], (_NOBODY, part.index, *part.step.after)))
        if wrong.size:
            used = int(memory.user[where][wrong[0]])
            raise ValueError(f"{part} writes over what step {used} uses, which does not bound it")
        memory.data[where], memory.writer[where], memory.user[where] = data, part.index, part.index
        memory.final[where] = part.step.result


def _cuts(step: Step, cut: int) -> list[tuple[int, int]]:
    """[begin, end) of every part of a step, relative to its start."""
    if not cut:
        return [(0, step.length)]
    inner = range(-step.start % cut or cut, step.length, cut)
    return list(zip((0, *inner), (*inner, step.length), strict=True))


def _join(direction: int, queue: list[_Part], other: list[_Part]) -> None:
    """Let the receives of a lane wait for its sends, which must be the same ones in the same order."""
    if len(queue) != len(other):
        raise ValueError(f"schedules do not fit together: {queue[-1]}, which the other end does not know")
    if direction is Direction.recv:
        return
    for send, recv in zip(queue, other, strict=True):
        ours, theirs = send.step, recv.step
        assert ours.left is not None
        assert theirs.to is not None
        if (ours.number, ours.start, ours.length, ours.left.encoded) != (
            theirs.number,
            theirs.start,
            theirs.length,
            theirs.to.encoded,
        ):
            raise ValueError(f"schedules do not fit together: {send} meets {recv}")
        send.receiver = recv
        send.enables(recv)
