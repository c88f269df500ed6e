"""The communicator: one member's place in a group, and the collectives it can call."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import DTypeLike

from wancoll.client.connection import Connection, check_timeout
from wancoll.client.memory import ArrayMemory
from wancoll.client.tensors import check_pair, numpy_dtype, region, require_writable
from wancoll.client.work import Placement, Work
from wancoll.collective import Descriptor, Kind, Receipt, ReduceOp
from wancoll.errors import ConfigError

CODECS = ("none",)
ALGORITHMS = ("auto", "ring")
ON_FAILURE = ("retry", "raise")
_OPS = ReduceOp.__members__


class Communicator:
    """Made by wancoll.connect(). A context manager; close() leaves the group.

    Any number of threads may call and wait at the same time; the order of their calls is the order that all members
    must agree on.

    Args:
        connection: to the peer daemon, with a place in the group.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def group(self) -> str:
        """The group's name."""
        return self._connection.group

    @property
    def name(self) -> str:
        """This member's name, unique in its group."""
        return self._connection.place.member

    @property
    def rank(self) -> int:
        """This member's place in the current epoch, from 0."""
        return self._connection.place.rank

    @property
    def world_size(self) -> int:
        """How many members the current epoch has."""
        return len(self._connection.place.members)

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._connection.place.epoch

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the current epoch's members, in rank order."""
        return tuple(self._connection.place.members)

    @property
    def pending(self) -> tuple[Work, ...]:
        """Calls that are not finished, in program order: also those whose wait timed out or was interrupted."""
        return self._connection.pending

    # ---- collectives ---------------------------------------------------------------------------------

    @overload
    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        codec: str = "none",
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        codec: str = "none",
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        codec: str = "none",
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Reduce the members' tensors element by element; every member gets the same bytes.

        All members must make the same call (op, dtype, count, codec, algorithm, on_failure) in the same order.

        Args:
            x: C-contiguous tensor of float32, float64, float16, bfloat16, int8, int16, int32, int64 or uint8:
                a numpy array, a CPU torch tensor, or anything with DLPack or the buffer protocol. Do not change it
                before the call is finished.
            out: takes the result: same dtype and shape, writable, either x's own memory or none of it. None: in
                place. Untouched until the commit.
            op: "sum", "avg", "min", "max" or "prod".
            codec: how elements travel: "none", as they are.
            algorithm: "ring", or "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out is the caller's own object.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; x and out are as they were.
        """
        reduce_op = _OPS.get(op)
        if reduce_op is None:
            raise _unavailable("op", op, tuple(_OPS))
        if codec not in CODECS:
            raise _unavailable("codec", codec, CODECS)
        if algorithm not in ALGORITHMS:
            raise _unavailable("algorithm", algorithm, ALGORITHMS)
        if on_failure not in ON_FAILURE:
            raise _unavailable("on_failure", on_failure, ON_FAILURE)
        check_timeout(timeout)
        if async_op and timeout is not None:
            raise ConfigError(
                "timeout says how long to wait, and async_op does not wait", who="all_reduce(timeout=...)",
                got=str(timeout), hint="give it to .wait(timeout=...)",
            )  # fmt: skip
        source = target = region(x, "all_reduce(x)")
        if out is not None and out is not x:
            target = region(out, "all_reduce(out=...)")
            check_pair(source, target)
        require_writable(target, "all_reduce(x)" if target is source else "all_reduce(out=...)")
        descriptor = Descriptor(
            Kind.all_reduce, source.dtype, reduce_op, source.count, codec, algorithm, on_failure
        )  # fmt: skip
        connection = self._connection
        work = Work(connection, descriptor, Placement(connection.arena, source, target), source, target)
        if async_op:
            connection.post(work)
            return work
        return self._run(work, timeout)

    def update_membership(self, timeout: float | None = None) -> Receipt:
        """Admit the joiners that wait. A collective: all members call it, in the same place of their programs.

        Below min_world it waits for joiners.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            A receipt without tensor (out is None). rank, world_size, epoch and members are those of the new epoch.

        Raises:
            TimeoutError: still pending: its .work goes on waiting.
            WancollError: it failed.
        """
        check_timeout(timeout)
        return self._run(Work(self._connection, Descriptor(Kind.update_membership), None, None, None), timeout)

    def _run(self, work: Work, timeout: float | None) -> Receipt:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._connection.post(work, deadline)
        return work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def empty(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """A numpy array in the arena, contents undefined: all_reduce on the whole of it copies nothing.

        Args:
            shape: as for numpy.empty.
            dtype: as for numpy.empty; "bfloat16" needs the package ml_dtypes.

        Raises:
            ConfigError: unknown dtype, or the arena is full.
        """
        self._connection.check_usable()
        kind = numpy_dtype(dtype)
        dims = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
        if any(n < 0 for n in dims):
            raise ConfigError(
                "a dimension is negative", who="empty(shape)", expected="dimensions of 0 or more", got=str(dims)
            )
        nbytes = kind.itemsize
        for n in dims:
            nbytes *= n
        if not nbytes:
            return np.empty(dims, kind)
        memory = ArrayMemory(self._connection.arena.take(nbytes), nbytes)
        return np.asarray(memory).view(kind).reshape(dims)

    def zeros(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: DTypeLike = np.float32
    ) -> np.ndarray[Any, Any]:
        """As empty(), filled with zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def close(self) -> None:
        """Leave the group. Pending calls fail. Arrays from empty() stay readable. Safe to call again."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Communicator {self.name!r} of group {self.group!r}: {self._connection.state}>"


def _unavailable(argument: str, got: object, available: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"{argument} is not available",
        who=f"all_reduce({argument}=...)",
        expected=" or ".join(available),
        got=repr(got),
    )
