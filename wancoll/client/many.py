"""all_reduce_many: a list of tensors in few operations, each of them over a bucket of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from wancoll.client.awaiting import awaited
from wancoll.client.checks import check_seconds, whole_number
from wancoll.client.codecs import FLOATS, Coding, ErrorFeedback, feed
from wancoll.client.connection import Connection, deadline_after, seconds_left
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import Region, is_torch, most_of, region, require_writable
from wancoll.client.work import STREAM_SECONDS, Work
from wancoll.collective import Descriptor, DType, Receipt, shortened
from wancoll.errors import ArenaFull, ConfigError, TimeoutError, WancollError
from wancoll.limits import MIB

BUCKET_BYTES = 25 * MIB  # as torch's DistributedDataParallel

_CALL = "all_reduce_many"


@dataclass(frozen=True, slots=True)
class ManyReceipt:
    """What the commits of one all_reduce_many hand back.

    Attributes:
        out: the caller's tensors, in the order of the list.
        receipts: one for each bucket, in the order in which they were posted; its out is a list of its tensors.
    """

    out: list[Any]
    receipts: tuple[Receipt, ...]


class ManyWork:
    """Handle of an all_reduce_many that may still be running.

    *like* is a bucket's descriptor, but for dtype, count and how elements travel, which *coding* says.
    """

    def __init__(
        self,
        connection: Connection,
        tensors: Iterable[Any],
        like: Descriptor,
        coding: Callable[[DType], Coding],
        bucket_bytes: int,
        feedback: ErrorFeedback | None,
        name: str,
    ) -> None:
        connection.check_usable()
        self._connection = connection
        regions = _regions(tensors)
        self.out = [each.owner for each in regions]
        self.works: list[Work] = []  # one for each bucket
        self._posted = 0
        epoch = connection.place.epoch
        codings = {dtype: coding(dtype) for dtype in (DType.float32, *(each.dtype for each in regions))}
        for number, bucket in enumerate(buckets([(each.dtype, _size(each)) for each in regions], bucket_bytes)):
            parts = tuple(regions[i] for i in bucket)
            dtype, count = parts[0].dtype, sum(part.count for part in parts)
            how = codings[dtype]
            fed = None
            if dtype in FLOATS:
                fed = feed(_CALL, feedback, name and f"{name}/{number}", dtype, count, like.op, how)
            label = shortened(", ".join(part.spread for part in parts if part.spread))
            descriptor = replace(like, dtype=dtype, count=count, label=label, **how._asdict())
            placement = Placement(
                connection.arena, parts, parts, codec=how.codec, nearest=how.rounding == "nearest", feed=fed,
                staging=connection.staging, share=connection.share,
            )  # fmt: skip
            connection.check_free(placement, descriptor)
            work = _Bucket(connection, descriptor, epoch, placement)
            work.parts = parts
            self.works.append(work)

    def post(self, deadline: float | None = None) -> None:
        """Get the buckets under way that are not yet. Where the arena is full it waits for earlier ones.

        Raises:
            TimeoutError: not by *deadline*, a time.monotonic(); wait() goes on.
            WancollError: the connection is over, or the arena has no room for one bucket.
        """
        while (number := self._posted) < len(self.works):  # other threads may do the same: what is posted stays so
            try:
                self._connection.post(self.works[number], deadline)
            except ArenaFull:
                flying = next((each for each in self.works[:number] if not each.finished), None)
                if flying is None:
                    raise
                self._connection.wait(flying, seconds_left(deadline))
            else:
                self._posted = max(self._posted, number + 1)

    def wait(self, timeout: float | None = None) -> ManyReceipt:
        """Block until all buckets have ended.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            The receipts, each time.

        Raises:
            TimeoutError: some are pending; nothing is lost, wait() again. Its .work is this handle.
            WancollError: a bucket failed, the first of them is named; its tensors are as they were. Notes say how many.
        """
        check_seconds("wait", "timeout", timeout)
        deadline = deadline_after(timeout)
        receipts: list[Receipt] = []
        failures: list[WancollError] = []
        try:
            self.post(deadline)
            for work in self.works:
                try:
                    receipts.append(work.wait(seconds_left(deadline)))
                except TimeoutError:
                    raise
                except WancollError as bad:
                    failures.append(bad)
        except TimeoutError as late:
            late.work = self
            raise
        if failures:
            failures[0].add_note(
                f"{_CALL}: {len(failures)} of {len(self.works)} buckets failed, {len(receipts)} were committed"
            )
            raise failures[0]
        return ManyReceipt(self.out, tuple(receipts))

    def wait_stream(self, stream: int | None = None, timeout: float = STREAM_SECONDS) -> None:
        """Wait on a CUDA stream for each bucket, as Work.wait_stream() does; all tensors must be on CUDA devices.

        Raises:
            WancollError: as Work.wait_stream().
        """
        self.post()
        for work in self.works:
            work.wait_stream(stream, timeout)

    def __await__(self) -> Generator[Any, Any, ManyReceipt]:
        """Await all buckets in asyncio or trio, as wait() does, while other tasks run."""
        yield from awaited(self._settle)
        return self.wait()

    def _settle(self) -> None:
        self.post()
        for work in self.works:
            work.settle()

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        return self._posted == len(self.works) and all(work.done() for work in self.works)

    def __repr__(self) -> str:
        ended = sum(work.finished for work in self.works)
        return f"<ManyWork of {len(self.out)} tensors: {ended} of {len(self.works)} buckets have ended>"


class _Bucket(Work):
    """A Work whose result lies in several tensors."""

    parts: tuple[Region, ...]

    def _result_count(self, contributors: list[str]) -> int:
        return self.descriptor.count

    def _result(self, contributors: list[str]) -> Any:
        return [part.owner for part in self.parts]


def buckets(sizes: Sequence[tuple[DType, int]], bucket_bytes: int, call: str = _CALL) -> list[list[int]]:
    """Which tensors go together: indices, ascending in each bucket, buckets in the order of their first tensor.

    A bucket takes the tensors of one dtype as they come, as long as they are *bucket_bytes* together at most; a larger
    tensor is a bucket of its own. *sizes* are dtype and bytes of each tensor; *call* is named in errors.
    """
    limit = whole_number(call, "bucket_bytes", bucket_bytes, 1, expected="a number of bytes, 1 or more")
    found: list[list[int]] = []
    filling: dict[DType, tuple[list[int], int]] = {}  # the bucket that still takes tensors, and its bytes
    for index, (dtype, nbytes) in enumerate(sizes):
        bucket, used = filling.get(dtype, ([], limit))
        if bucket and used + nbytes <= limit:
            bucket.append(index)
            filling[dtype] = (bucket, used + nbytes)
            continue
        found.append([index])
        if nbytes <= limit:
            filling[dtype] = (found[-1], nbytes)
    return found


def _size(part: Region) -> int:
    """Bytes by which buckets are cut: alike in all columns."""
    return most_of(part.owner) * part.dtype.itemsize if part.spread else part.nbytes


def _regions(tensors: Any) -> list[Region]:
    who = f"{_CALL}(tensors)"
    if isinstance(tensors, Iterator):
        tensors = list(tensors)
    if not isinstance(tensors, list | tuple):
        raise ConfigError(
            "tensors is no list", who=who, expected="a list or tuple of tensors", got=type(tensors).__name__
        )
    regions = []
    for i, tensor in enumerate(tensors):
        name = f"{_CALL}(tensors[{i}])"
        parameter = is_torch(tensor) and tensor.requires_grad and tensor.is_leaf
        found = region(tensor.detach() if parameter else tensor, name)
        found.owner = tensor
        require_writable(found, name)
        regions.append(found)
    laid = sorted((each.address, i) for i, each in enumerate(regions) if each.nbytes)
    for (first, i), (second, j) in itertools.pairwise(laid):
        if first + regions[i].nbytes > second:
            i, j = sorted((i, j))
            raise ConfigError(
                "two tensors share memory", who=who, expected="tensors that do not overlap",
                got=f"number {i} and number {j}", hint="leave one of them out",
            )  # fmt: skip
    return regions
