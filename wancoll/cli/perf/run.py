"""How one rank measures: operations on its tensors, their values checked, timed in turns, and all ranks' rows made."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wancoll.cli.perf.values import (
    COLLECTIVES,
    Array,
    Collective,
    allowed_error,
    expected,
    fill,
    given,
    noise,
    rounding_error,
    wrong_elements,
)
from wancoll.client.memory.tensors import numpy_dtype
from wancoll.collective import SAME_RESULT, Codec, DType, Kind, Receipt
from wancoll.errors import OperationAborted

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

OTHER_OPERATIONS = 6  # for each size and variant: the check, what the ranks tell each other, the start
RUN_TURNS = 4  # times that each operation in flight is started anew in one run of pipelined operations
MARK = 101  # what is in a result before it is there

# What a rank tells the others of each variant.
FACTS = np.dtype(
    [
        ("median", "f8"), ("least", "f8"), ("most", "f8"), ("wrong", "i8"), ("error", "f8"), ("codec_error", "f8"),
        ("digest", "u8"), ("bytes_sent", "i8"), ("bytes_saved", "i8"), ("retries", "i8"),
    ]
)  # fmt: skip


class Variant(NamedTuple):
    """What takes turns: the arguments of a call that are compared."""

    algorithm: str = "auto"
    codec: str = "none"


@dataclass(frozen=True)
class Settings:
    """What every rank runs. Sizes are bytes."""

    collective: str
    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    dtype: str
    op: str
    root: int
    variants: tuple[Variant, ...]
    in_flight: int  # operations; 1: blocking, one after the other
    arena: bool
    timeout: float  # seconds for the group to start, and for each operation

    @property
    def run_length(self) -> int:
        """Operations that are timed together."""
        return 1 if self.in_flight == 1 else RUN_TURNS * self.in_flight

    @property
    def runs(self) -> int:
        """How many times each variant is timed."""
        return -(-self.iterations // self.run_length)

    @property
    def operations(self) -> int:
        """How many there are of one size."""
        each = self.runs * self.run_length + self.warmup * self.in_flight + OTHER_OPERATIONS
        return each * len(self.variants)


@dataclass(frozen=True)
class Row:
    """One size of one variant: times are seconds per operation, the mean over ranks of each rank's median and so on."""

    collective: str
    size: int  # bytes of the larger tensor
    count: int  # elements: of the tensor, or of the block that one rank gives another
    type: str
    redop: str  # "none" where nothing is reduced
    root: int  # -1 where there is none
    time: float
    time_min: float
    time_max: float
    algbw: float  # GB/s: size / time
    busbw: float  # GB/s: algbw by nccl-tests' factor
    wrong: int  # elements that differ from what they should be, of all ranks
    asked: str  # algorithm that was asked for
    algorithm: str  # that ran
    codec: str
    error: float  # relative L2 error of the values checked, the greatest of all ranks; 0 without codec
    codec_error: float  # what the receipts say of the operation checked, the greatest
    bytes_sent: int  # of the busiest rank, for one operation
    bytes_saved: int  # by the codec, of the rank that saved most
    retries: int  # attempts of all timed operations and ranks beyond the first ones


@dataclass
class Tensors:
    """What one operation in flight works on. result is x itself where it takes its place."""

    x: Array | None
    result: Array | None


@dataclass
class Sample:
    """What one rank saw of one variant: the operation whose values were checked, and the timed ones."""

    wrong: int
    error: float
    checked: Receipt
    last: Receipt
    times: list[float] = field(default_factory=list)  # seconds for each operation
    retries: int = 0

    def facts(self) -> tuple[Any, ...]:
        """One element of FACTS."""
        times, checked, last = self.times, self.checked, self.last
        return (
            statistics.median(times), min(times), max(times), self.wrong, self.error, checked.codec_error,
            int(checked.digest, 16), last.bytes_sent, last.bytes_saved, self.retries,
        )  # fmt: skip


def sizes_of(collective: Collective, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes to measure: one that means nothing where there is no tensor."""
    return sizes if collective.given else (0,)


def sweep(comm: Communicator, settings: Settings) -> Generator[list[Row], None, None]:
    """Measure all sizes; all members call it together and get the same rows, a list for each size.

    Raises:
        OperationAborted: a member was lost meanwhile.
        TimeoutError: an operation took too long.
    """
    for size in sizes_of(COLLECTIVES[settings.collective], settings.sizes):
        yield Bench(comm, settings, size).rows()


class Bench:
    """One size on one rank: *size* bytes of the larger tensor, rounded down to what all ranks can share."""

    def __init__(self, comm: Communicator, settings: Settings, size: int) -> None:
        self._comm, self._settings = comm, settings
        self._collective = COLLECTIVES[settings.collective]
        self._world = comm.members
        self._dtype = numpy_dtype(settings.dtype)
        self._count = size // DType[settings.dtype].itemsize // self._collective.blocks(len(self._world))
        self._tensors = [self._new_tensors() for _ in range(settings.in_flight)]

    def rows(self) -> list[Row]:
        """Check and time every variant; a row for each."""
        settings = self._settings
        samples = [self._check(variant) for variant in settings.variants]
        for each in self._tensors:
            for tensor in (each.x, each.result):
                if tensor is not None:
                    tensor[...] = 0  # stays as it is, however often it is reduced in place
        for _ in range(settings.warmup):
            for variant in settings.variants:
                self._run(variant, settings.in_flight)
        for turn in range(settings.runs):
            for i in range(len(samples)):
                i = (i + turn) % len(samples)
                self._time(settings.variants[i], samples[i])
        facts = self._exchange([sample.facts() for sample in samples])
        return [
            self._row(variant, sample.last.algorithm, facts[:, i])
            for i, (variant, sample) in enumerate(zip(settings.variants, samples, strict=True))
        ]

    # ---- operations ----------------------------------------------------------------------------------

    def _new_tensors(self) -> Tensors:
        kind, rank, root = self._collective, self._comm.rank, self._settings.root
        sizes = {"blocks": len(self._world) * self._count, "tensor": self._count}
        gives = kind.given and (not kind.given_at_root or rank == root or kind.in_place)
        gets = kind.gets and (not kind.gets_at_root or rank == root)
        x = self._new(sizes[kind.given]) if gives else None
        return Tensors(x, x if kind.in_place else self._new(sizes[kind.gets]) if gets else None)

    def _new(self, count: int) -> Array:
        return self._comm.empty(count, self._dtype) if self._settings.arena else np.empty(count, self._dtype)

    def _start(self, variant: Variant, tensors: Tensors) -> list[Any]:
        """Start one operation; its handles."""
        comm: Any = self._comm  # the names of its methods are data here
        x, result, name = tensors.x, tensors.result, self._settings.collective
        if name == "barrier":
            return [SimpleNamespace(wait=lambda timeout: comm.barrier(timeout=timeout))]  # runs when it is waited for
        if name == "send_recv":
            rank, world_size = self._comm.rank, len(self._world)
            return [
                comm.send(x, (rank + 1) % world_size, async_op=True),
                comm.recv(result, (rank - 1) % world_size, async_op=True),
            ]
        options = {"async_op": True, "algorithm": variant.algorithm}
        if self._collective.reduces:
            options["op"] = self._settings.op
        if name == "all_reduce":
            options["codec"] = variant.codec
        if self._collective.rooted:
            options["root"] = self._settings.root
        call = getattr(comm, name)
        return [call(x, **options) if self._collective.in_place else call(x, result, **options)]

    def _finish(self, handles: list[Any]) -> Receipt:
        """Wait for one operation; of a send and a recv: the sender's receipt."""
        receipts: list[Receipt] = [handle.wait(self._settings.timeout) for handle in handles]
        one_pair = self._settings.collective == "send_recv"
        self._same_world(receipts[0], self._comm.members if one_pair else receipts[0].contributors)
        return receipts[0]

    def _same_world(self, receipt: Receipt, here: Sequence[str]) -> None:
        """Refuse to go on measuring with other members."""
        if tuple(here) != self._world:
            raise OperationAborted(
                "the group changed while it was measured",
                who=receipt.op_id,
                expected=", ".join(self._world),
                got=", ".join(here),
                hint="run it again",
            )

    def _run(self, variant: Variant, operations: int) -> list[Receipt]:
        """Operations back to back, as many in flight as set."""
        waiting: deque[list[Any]] = deque()
        receipts: list[Receipt] = []
        for i in range(operations):
            waiting.append(self._start(variant, self._tensors[i % len(self._tensors)]))
            if len(waiting) == len(self._tensors):
                receipts.append(self._finish(waiting.popleft()))
        receipts += [self._finish(handles) for handles in waiting]
        return receipts

    def _time(self, variant: Variant, sample: Sample) -> None:
        operations = self._settings.run_length
        begin = time.perf_counter()
        receipts = self._run(variant, operations)
        sample.times.append((time.perf_counter() - begin) / operations)
        sample.last = receipts[-1]
        sample.retries += sum(receipt.attempts - 1 for receipt in receipts)

    # ---- values --------------------------------------------------------------------------------------

    def _check(self, variant: Variant) -> Sample:
        """One operation on known values."""
        settings, tensors = self._settings, self._tensors[0]
        rank, world_size, coded = self._comm.rank, len(self._world), variant.codec != "none"
        about = self._collective, settings.op, rank, world_size, settings.root
        inputs = [noise(rank)] if coded else given(*about)
        if tensors.result is not None:
            tensors.result[...] = MARK
        if tensors.x is not None and inputs:
            fill(tensors.x, inputs)
        receipt = self._finish(self._start(variant, tensors))
        wrong, error = 0, 0.0
        if tensors.result is not None and coded:
            allowed = allowed_error(Codec[variant.codec], receipt.algorithm, world_size, self._count)
            wrong, error = rounding_error(tensors.result, settings.op, world_size, allowed)
        elif tensors.result is not None:
            wrong = wrong_elements(tensors.result, expected(*about))
        return Sample(wrong, error, receipt, receipt)

    # ---- all ranks -----------------------------------------------------------------------------------

    def _exchange(self, facts: list[tuple[Any, ...]]) -> Array:
        """All ranks' facts of all variants, shape (ranks, variants), of dtype FACTS."""
        mine = np.array(facts, FACTS).view(np.uint8)
        receipt = self._comm.all_gather(mine, timeout=self._settings.timeout)
        self._same_world(receipt, receipt.contributors)  # others may have left since
        return np.array(receipt.out).view(FACTS)

    def _row(self, variant: Variant, algorithm: str, facts: Array) -> Row:
        """The row of all ranks' *facts*, shape (ranks,)."""
        kind, settings = self._collective, self._settings
        size = self._count * kind.blocks(len(self._world)) * self._dtype.itemsize
        seconds = float(np.mean(facts["median"]))
        return Row(
            collective=kind.name,
            size=size,
            count=self._count,
            type=settings.dtype if kind.given else "none",
            redop=settings.op if kind.reduces else "none",
            root=settings.root if kind.rooted else -1,
            time=seconds,
            time_min=float(np.mean(facts["least"])),
            time_max=float(np.mean(facts["most"])),
            algbw=size / seconds / 1e9,
            busbw=kind.busbw(size, seconds, len(self._world)),
            wrong=int(np.sum(facts["wrong"])) + disagreeing(kind, facts),
            asked=variant.algorithm,
            algorithm=algorithm,
            codec=variant.codec,
            error=float(np.max(facts["error"])),
            codec_error=float(np.max(facts["codec_error"])),
            bytes_sent=int(np.max(facts["bytes_sent"])),
            bytes_saved=int(np.max(facts["bytes_saved"])),
            retries=int(np.sum(facts["retries"])),
        )


def disagreeing(kind: Collective, facts: Array) -> int:
    """Ranks whose result is not rank 0's, where all must have the same bytes. facts: shape (ranks,)."""
    same = kind.name in Kind.__members__ and Kind[kind.name] in SAME_RESULT
    return int(np.count_nonzero(facts["digest"] != facts["digest"][0])) if same else 0
