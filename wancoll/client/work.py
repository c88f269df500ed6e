"""The caller's handle of one call on its way, and what its answer becomes."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from wancoll import errors
from wancoll.client.awaiting import awaited, begin
from wancoll.client.checks import check_seconds
from wancoll.client.cuda.staging import HostToDevice, Staging
from wancoll.client.cuda.stream_wait import StreamWaits
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import Region, leading
from wancoll.collective import Descriptor, Kind, Receipt, ReduceOp
from wancoll.wire import messages as m

STREAM_SECONDS = 60.0  # a stream waits this long for a result
_OPEN = "the call was open when the connection ended: others may have committed it; input and result are kept"
_WENT_ON = "streams that waited for it went on, and kernels read the old bytes"


class Waiter(Protocol):
    """The connection, as its calls see it."""

    group: str
    place: m.EpochInfo
    staging: Staging
    regrets: dict[int, errors.WancollError]

    def wait(self, work: Work, timeout: float | None) -> None:
        """Return once *work* is finished, or raise TimeoutError."""

    def poll(self, work: Work) -> None:
        """Take in what is there."""


class Work:
    """Handle of a call that may still be running. Get it from all_reduce(..., async_op=True) and the like.

    Args:
        connection: that the call is made on.
        descriptor: of the call, by the ranks of *epoch*.
        epoch: number of the epoch that the call was made in.
        placement: where its bytes lie; None: it moves none.
        out: the tensor that takes the result; None: there is none here.
        blocks: where the result has a block from each contributor: its elements, by name of the contributor.
        peer: the other rank of a send or recv.
        tag: of a send or recv.
        ahead: of a recv: a send that does not fit it passes it by.
    """

    def __init__(
        self,
        connection: Waiter,
        descriptor: Descriptor,
        epoch: int,
        placement: Placement | None = None,
        out: Region | None = None,
        *,
        blocks: dict[str, int] | None = None,
        peer: int = -1,
        tag: int = 0,
        ahead: bool = False,
    ) -> None:
        self._connection, self.descriptor, self.placement = connection, descriptor, placement
        self.epoch, self.peer, self.tag, self.ahead = epoch, peer, tag, ahead
        self._out, self._blocks = out, blocks
        self.id = 0  # counts the connection's calls from 1, once posted
        self._answer: m.Result | m.Failure | None = None
        self._to_devices: list[HostToDevice] = []
        self._told = False  # that it failed
        self.finished = False
        self.posted_at = 0.0

    def wait(self, timeout: float | None = None) -> Receipt:
        """Block until the operation is committed and its result is where it belongs.

        A result for a tensor of a CUDA device is on its way there: work that the caller queues from now on, on the
        stream that was current at the call or is now, finds it. Where that stream is not known, it has arrived.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            The receipt, each time.

        Raises:
            TimeoutError: still pending; nothing is lost, wait() again. Its .work is this handle.
            WancollError: the operation failed; the tensor is as it was.
        """
        began = time.monotonic()
        if not self.finished:
            self._connection.wait(self, timeout)
        answer = self._answer
        assert answer is not None
        self._told = isinstance(answer, m.Failure)  # before the regret is looked for: see _attend
        if (regret := self._connection.regrets.pop(self.id, None)) is not None:
            raise regret
        if isinstance(answer, m.Failure):
            raise rebuild(answer)
        for to_device in self._to_devices:
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            try:
                self._connection.staging.order(to_device, left)
            except errors.TimeoutError as late:
                late.work = self
                raise
        return Receipt(
            out=self._result(answer.contributors),
            op_id=f"{self._connection.group}/{'p2p-' if self.peer >= 0 else ''}{answer.seq}",
            epoch=answer.epoch,
            seq=answer.seq,
            contributors=tuple(answer.contributors),
            world_size=len(answer.contributors),
            digest=f"{answer.digest:016x}",
            attempts=answer.attempts,
            algorithm=answer.algorithm,
            bytes_sent=answer.bytes_sent,
            seconds=answer.seconds,
            codec=self.descriptor.codec.name,
            bytes_saved=answer.bytes_saved,
            codec_error=answer.codec_error,
            counted=answer.counted,
            asked_master=answer.asked_master,
            bytes_in_memory=answer.bytes_in_memory,
            by_engine=answer.by_engine,
            bytes_received=answer.bytes_received,
        )

    def wait_stream(self, stream: int | None = None, timeout: float = STREAM_SECONDS) -> None:
        """Let the caller's stream wait for the result, and not the host: returns at once, without a receipt.

        What the caller queues on the stream from now on finds the result, if the operation is committed and copied by
        then. **If it fails, or *timeout* is over, the stream goes on and kernels read the old bytes**: the error is
        raised by wait(), or else by the next call on this communicator. Until then all that waits for that stream waits
        too: synchronising the device, freeing its memory.

        Args:
            stream: a CUDA stream as a number (1: legacy default, 2: the thread's). None: torch's current one, or that
                of __cuda_array_interface__.
            timeout: seconds after which the stream goes on, whatever has become of the operation.

        Raises:
            ConfigError: no stream is known, this device's cannot wait on memory, the result is for main memory, or
                *timeout* has no end. Nothing waits.
            DeviceError: the driver failed. Nothing waits.
            WancollError: the operation has failed already.
        """
        given: float | None = timeout
        check_seconds("wait_stream", "timeout", given)
        if given is None or math.isinf(given):
            raise errors.ConfigError(
                "a stream must not wait without end", who="wait_stream(timeout=...)", expected="seconds",
                got=repr(timeout),
            )  # fmt: skip
        placement = self.placement
        if self.done() or placement is None:
            if isinstance(self._answer, m.Failure):
                self.wait()
            for to_device in self._to_devices:
                self._connection.staging.follow(to_device, stream)
            return
        stream_waits = placement.hold(stream)
        if stream_waits is None:
            return
        try:
            begin(partial(self._attend, stream_waits, time.monotonic() + timeout), "wancoll-stream")
        except BaseException:
            self._connection.staging.let_go(stream_waits)
            raise

    def _attend(self, stream_waits: StreamWaits, deadline: float) -> None:
        """Let the streams go on when the result is where it belongs, or will not come."""
        staging, regret = self._connection.staging, None
        try:
            self._connection.wait(self, max(0.0, deadline - time.monotonic()))
            if isinstance(self._answer, m.Failure):
                raise rebuild(self._answer)
            if not all(staging.landed(to_device, deadline) for to_device in self._to_devices):
                raise errors.TimeoutError("the result is committed, and still on its way to the device", work=self)
        except errors.WancollError as bad:
            regret = bad
        finally:
            staging.let_go(stream_waits)
        if regret is not None:
            regret.hint = "; ".join(filter(None, (_WENT_ON, regret.hint)))
            self._connection.regrets[self.id] = regret
            if self._told:
                self._connection.regrets.pop(self.id, None)

    def settle(self) -> None:
        """Block until wait() returns or raises at once. A failure is told by wait() alone, or by the next call."""
        self._connection.wait(self, None)
        for to_device in self._to_devices:
            self._connection.staging.order(to_device, None)

    def __await__(self) -> Generator[Any, Any, Receipt]:
        """Await the call in asyncio or trio, as wait() does, while other tasks run."""
        yield from awaited(self.settle)
        return self.wait()  # here: a task that was cancelled meanwhile has not been told

    @property
    def failed(self) -> bool:
        """Whether it is finished, and wait() raises."""
        return isinstance(self._answer, m.Failure)

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        if not self.finished:
            self._connection.poll(self)
        return self.finished

    def finish(self, answer: m.Result | m.Failure) -> None:
        """The daemon's answer is there. Doing it again, after an interruption, is harmless."""
        if self.finished:
            return
        if self._answer is None:
            self._answer = self._committed(answer)  # before the blocks go: who does it again cannot bring it any more
        if self.placement is not None:
            self.placement.end()
        self.placement = None  # gives the blocks back: the daemon no longer touches them
        self.finished = True

    def _committed(self, answer: m.Result | m.Failure) -> m.Result | m.Failure:
        """What has become of the call here, after a result was brought to where it belongs."""
        if self.placement is not None and isinstance(answer, m.Result):
            names = answer.contributors
            if (feed := self.placement.feed) is not None:
                times = len(names) if self.descriptor.op is ReduceOp.avg else 1
                feed.commit(answer.counted, names, self.placement.dropped(*answer.kept, times))
                if not feed.codec.of_result:
                    answer = replace(answer, codec_error=feed.error)
            try:
                self.placement.commit(self._result_count(names) * self.descriptor.dtype.itemsize, answer.attempts)
            except errors.DeviceError as bad:
                bad.hint = "the operation is committed; this member's tensor has undefined contents"
                return as_failure(bad)
            else:
                self._to_devices = self.placement.to_devices
        return answer

    def _result_count(self, contributors: list[str]) -> int:
        """Elements of the result: without those who were lost it is shorter, where it has a block from each."""
        if self._out is None:
            return 0
        if self._blocks is None:
            return self._out.count
        return sum(self._blocks.get(name, 0) for name in contributors)

    def _result(self, contributors: list[str]) -> Any:
        if self._out is None:
            return None
        if self._blocks is None or len(contributors) == len(self._blocks):
            return self._out.owner
        of = 0 if self.descriptor.counts else len(self._blocks)
        return leading(self._out, len(contributors), of, self._result_count(contributors))

    def __repr__(self) -> str:
        state = "pending" if not self.finished else "failed" if isinstance(self._answer, m.Failure) else "committed"
        return f"<Work {self.id} of group {self._connection.group!r}: {self.descriptor}, {state}>"


def rebuild(failure: m.Failure) -> errors.WancollError:
    """The exception that the daemon's message describes."""
    kind = errors.BY_NAME.get(failure.error, errors.WancollError)
    fields: dict[str, Any] = {
        name: getattr(failure, name) for name in ("who", "expected", "got", "hint") if getattr(failure, name)
    }
    if kind is errors.CollectiveMismatch:
        fields["calls"] = dict(failure.calls)
    error = kind(failure.what, **fields)
    if failure.cause:
        cause = errors.BY_NAME.get(failure.cause, errors.WancollError)
        error.__cause__ = cause(failure.got, who=failure.who, hint=failure.hint)
    return error


def cut_off(why: m.Failure, number: int, kind: Kind) -> m.Failure:
    """What open call *number* of this *kind* ends with when the connection does; *why* where nothing has happened."""
    if number > why.taken or kind is Kind.update_membership:
        return why
    got = f"{why.error}: {rebuild(replace(why, who='', hint=''))}"
    return m.Failure(0, "OutcomeUnknown", _OPEN, who=why.who, got=got, hint=why.hint, cause=why.error)


def as_failure(error: errors.WancollError) -> m.Failure:
    """An error of this side in the shape of the daemon's, to be raised afresh by each call."""
    return m.Failure(0, type(error).__name__, error.what, error.who, error.expected, error.got, error.hint)
