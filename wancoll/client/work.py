"""One call on its way: where its bytes lie, what a commit does with them, and the caller's handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wancoll import errors
from wancoll._native import lib
from wancoll.client.memory import EXCHANGE_BYTES, Arena, Block, Lease
from wancoll.client.tensors import Region
from wancoll.collective import Descriptor, Receipt
from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll.client.connection import Connection


class Placement:
    """Where an operation reads (*front*) and where its result is built (*back*), as offsets into the arena's file.

    Args:
        arena: of the connection.
        x: the input.
        target: where the result belongs (x itself, in place).
    """

    __slots__ = ("_arena", "_back", "_exchanged", "_front", "_target", "_x", "back", "front", "pins", "reads", "writes")

    def __init__(self, arena: Arena, x: Region, target: Region) -> None:
        self._arena, self._x, self._target = arena, x, target
        self._front: Lease | None = None
        self._back: Lease | None = None
        self._exchanged: Block | None = None  # the target's block, if its pages will be exchanged
        self.front = self.back = 0
        # The caller's memory, as (start, end).
        self.writes = (target.address, target.address + target.nbytes)
        self.reads = (x.address, x.address + x.nbytes)
        self.pins = self.reads if arena.find(x.address, x.nbytes) else (0, 0)  # outside the arena it is copied first

    def conflicts(self, earlier: Placement) -> bool:
        """Whether this call would use what *earlier* is going to write, or write what *earlier* still reads."""
        return any(
            a[0] < b[1] and b[0] < a[1]
            for a, b in ((self.writes, earlier.writes), (self.reads, earlier.writes), (self.writes, earlier.pins))
        )

    def prepare(self) -> None:
        """Take the blocks, and copy the input to its block if it lies outside the arena.

        Raises:
            ConfigError: the arena is full.
        """
        arena, x, target, nbytes = self._arena, self._x, self._target, self._x.nbytes
        if not nbytes:
            return
        inside = arena.find(x.address, nbytes)
        if inside is not None:
            self.front = inside.offset + x.address - inside.address
        size = None
        if nbytes >= EXCHANGE_BYTES:
            block = arena.find(target.address, nbytes)
            # Only whole arrays: a block then always shows one contiguous part of the file.
            if block is not None and block.address == target.address and block.used == nbytes:
                self._exchanged, size = block, block.nbytes
        self._back = arena.take(nbytes, size)
        self.back = self._back.block.offset
        if inside is None:
            self._front = arena.take(nbytes)
            self.front = self._front.block.offset
            lib.wc_pages_copy(self._front.block.address, x.address, nbytes)

    def commit(self) -> None:
        """Bring the result to its target. Doing it again, after an interruption, is harmless."""
        back = self._back
        if back is None:
            return
        if self._exchanged is None or not self._arena.exchange(self._exchanged, back.block, self.back):
            lib.wc_pages_copy(self._target.address, back.block.address, self._target.nbytes)


class Work:
    """Handle of a call that may still be running. Get it from all_reduce(..., async_op=True)."""

    __slots__ = ("_answer", "_connection", "_out", "_x", "descriptor", "finished", "id", "placement", "posted_at")

    def __init__(
        self,
        connection: Connection,
        descriptor: Descriptor,
        placement: Placement | None,
        x: Region | None,
        out: Region | None,
    ) -> None:
        self._connection, self.descriptor, self.placement = connection, descriptor, placement
        self._x, self._out = x, out  # the caller's objects and what pins their memory
        self.id = 0  # counts the connection's calls from 1, once posted
        self._answer: m.Result | m.Failure | None = None
        self.finished = False
        self.posted_at = 0.0

    def wait(self, timeout: float | None = None) -> Receipt:
        """Block until the operation is committed and its result is where it belongs.

        Args:
            timeout: seconds; None waits as long as it takes.

        Returns:
            The receipt, each time.

        Raises:
            TimeoutError: still pending; nothing is lost, wait() again. Its .work is this handle.
            WancollError: the operation failed; the tensor is as it was.
        """
        if not self.finished:
            self._connection.wait(self, timeout)
        answer = self._answer
        assert answer is not None
        if isinstance(answer, m.Failure):
            raise rebuild(answer)
        return Receipt(
            out=self._out.owner if self._out is not None else None,
            op_id=f"{self._connection.group}/{answer.seq}",
            epoch=answer.epoch,
            seq=answer.seq,
            contributors=tuple(answer.contributors),
            world_size=len(answer.contributors),
            digest=f"{answer.digest:016x}",
            attempts=answer.attempts,
            algorithm=answer.algorithm,
            bytes_sent=answer.bytes_sent,
            seconds=answer.seconds,
        )

    def done(self) -> bool:
        """Whether wait() would return or raise at once."""
        if not self.finished:
            self._connection.poll(self)
        return self.finished

    def finish(self, answer: m.Result | m.Failure) -> None:
        """The daemon's answer is there. Doing it again, after an interruption, is harmless."""
        if self.finished:
            return
        if self.placement is not None and isinstance(answer, m.Result):
            self.placement.commit()
        self._x = None
        self.placement = None  # gives the blocks back: the daemon no longer touches them
        self._answer = answer
        self.finished = True

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
    return kind(failure.what, **fields)


def as_failure(error: errors.WancollError) -> m.Failure:
    """An error of this side in the shape of the daemon's, to be raised afresh by each call."""
    return m.Failure(0, type(error).__name__, error.what, error.who, error.expected, error.got, error.hint, {})
