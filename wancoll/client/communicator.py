"""The communicator: one member's place in a group, its arrays, and the collectives it can call."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from wancoll.client.checks import check_options, check_timeout, unavailable
from wancoll.client.exchanges import Exchanges
from wancoll.client.reductions import Reductions
from wancoll.client.results import new_array
from wancoll.client.rooted import Rooted
from wancoll.client.state_tensors import tensors
from wancoll.client.sync import SyncWork
from wancoll.client.tensors import numpy_dtype
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Kind, Receipt
from wancoll.errors import ConfigError
from wancoll.sync.receipt import SyncReceipt
from wancoll.sync.strategy import MAJORITY, SEND_ONLY, STRATEGIES


class Communicator(Reductions, Rooted, Exchanges):
    """One member's place in a group. Made by wancoll.connect(). A context manager; close() leaves the group.

    Any number of threads may call and wait at the same time; the order of their calls is the order that all members
    must agree on.
    """

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
        connection = self._connection
        return self._run(Work(connection, Descriptor(Kind.update_membership), connection.place.epoch), timeout)

    def sync_state(
        self,
        state: Mapping[str, Any],
        *,
        revision: int,
        strategy: str = MAJORITY,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> SyncReceipt:
        """Give all members the same state: parameters, optimizer state, counters. A collective: all members call it.

        The state with the highest revision wins; of several the one that most members hold; of equals that of the
        lowest rank. Who differs from it fetches what differs, from all that hold it at the same time. If a member is
        lost, the others go on with what they have received. Other calls of this communicator go before or after it;
        async calls posted earlier, and other communicators, go on meanwhile.

        All or nothing: tensors change when every member has all of the state, and not before.

        Args:
            state: name -> tensor, with the same names, shapes and dtypes on all members. Of any dtype of fixed size;
                else as in all_reduce. Do not change the tensors before the call is finished. Two names may stand for
                the very same memory, if they do so on all members.
            revision: which state this is, 0 to 2^63 - 1, for example the step that it is the result of.
            strategy: of this member. "majority": it votes, sends and receives. "send-only": it votes and is never
                changed; if another state wins, the call fails. "receive-only": it has no vote and sends nothing.
            on_failure: "retry": go on without members that are lost; "raise": fail then.
            timeout: seconds; None: as long as it takes.

        Returns:
            What was moved, and who holds the state now.

        Raises:
            ConfigError: an argument that cannot be used, and nothing was sent; or states that do not fit together,
                the same error on all members.
            OperationAborted: a part of the state was lost with its last holder, or a member cannot take part.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: it failed. Whatever is raised, the tensors are as they were.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        check_options("sync_state", False, on_failure, timeout)
        if strategy not in STRATEGIES:
            raise unavailable("sync_state", "strategy", strategy, STRATEGIES)
        try:
            number = operator.index(revision)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 63:
            raise ConfigError(
                "revision cannot be used", who="sync_state(revision=...)",
                expected="a whole number from 0 to 2^63 - 1", got=repr(revision),
            )  # fmt: skip
        found = tensors(state, changing=strategy != SEND_ONLY)
        work = SyncWork(self, self._connection, found, number, strategy, on_failure)
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
        return new_array(self._connection.arena, dims, kind)

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
