"""The communicator: one member's place in a group, its arrays, and the collectives it can call."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from wancoll.client.checks import check_timeout
from wancoll.client.exchanges import Exchanges
from wancoll.client.reductions import Reductions
from wancoll.client.results import new_array
from wancoll.client.rooted import Rooted
from wancoll.client.tensors import numpy_dtype
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Kind, Receipt
from wancoll.errors import ConfigError


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
