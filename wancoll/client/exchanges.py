"""The collectives that move data among all members, all_gather and all_to_all; barrier; send and recv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from wancoll.client.calls import Caller
from wancoll.client.checks import block_of, check_counts, check_options, check_other, check_tag
from wancoll.client.tensors import region, require_writable
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Kind, Receipt
from wancoll.errors import ConfigError


class Exchanges(Caller):
    """See the module."""

    @overload
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def all_gather(
        self,
        x: Any,
        out: Any = None,
        *,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Give every member the blocks of all, in rank order.

        If members are lost, the blocks of the others move together: receipt.out is then the leading part of the
        result, one block for each of receipt.contributors, and what follows in out is as it was.

        Args:
            x: this member's block; see all_reduce for what it may be.
            out: takes the world_size blocks. None: a new tensor, in the arena, of shape (world_size, *x.shape).
            counts: elements of each rank's block, if they are not equal; a new tensor is flat then.
            algorithm: "ring" or "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has the blocks.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "all_gather", self._connection.place
        check_options(call, async_op, on_failure, timeout, algorithm)
        source = region(x, f"{call}(x)")
        world = len(place.members)
        blocks = [source.count] * world
        shape = (world, *source.shape)
        if counts is not None:
            blocks = check_counts(call, counts, world)
            if blocks[place.rank] != source.count:
                raise ConfigError(
                    "the tensor is not as large as counts says", who=f"{call}(x)",
                    expected=f"{blocks[place.rank]} elements at rank {place.rank}", got=str(source.count),
                )  # fmt: skip
            shape = (sum(blocks),)
        target, fresh = self._result(call, out, source, sum(blocks), shape)
        descriptor = Descriptor(
            Kind.all_gather, source.dtype, count=0 if counts is not None else source.count,
            counts=tuple(blocks) if counts is not None else (), algorithm=algorithm, on_failure=on_failure,
        )  # fmt: skip
        return self._start(
            descriptor, place, source, target, fresh, blocks=dict(zip(place.members, blocks, strict=True)),
            async_op=async_op, timeout=timeout,
        )  # fmt: skip

    @overload
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Give every member the blocks that are for it: block j of rank i becomes block i of rank j.

        If members are lost, the blocks of the others move together, as with all_gather.

        Args:
            x: world_size equal blocks, one after the other in the order of the ranks; see all_reduce for what it may
                be.
            out: takes the result: same dtype and count, either x's own memory or none of it. None: a new tensor of
                x's shape, in the arena.
            algorithm: "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has a block from each contributor.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "all_to_all", self._connection.place
        check_options(call, async_op, on_failure, timeout, algorithm)
        source = region(x, f"{call}(x)")
        count, _ = block_of(call, source, len(place.members))
        target, fresh = self._result(call, out, source, source.count, source.shape)
        descriptor = Descriptor(
            Kind.all_to_all, source.dtype, count=count, algorithm=algorithm, on_failure=on_failure
        )  # fmt: skip
        return self._start(
            descriptor, place, source, target, fresh, blocks=dict.fromkeys(place.members, count),
            async_op=async_op, timeout=timeout,
        )  # fmt: skip

    def barrier(self, timeout: float | None = None) -> Receipt:
        """Return when all members have called it.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            A receipt without tensor (out is None).

        Raises:
            TimeoutError: still pending: its .work goes on waiting.
            WancollError: it failed.
        """
        check_options("barrier", False, timeout=timeout)
        return self._run(Work(self._connection, Descriptor(Kind.barrier), self._connection.place.epoch), timeout)

    @overload
    def send(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def send(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work: ...

    def send(
        self,
        x: Any,
        dest: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Send a tensor to one other member, which calls recv with this rank and the same tag.

        Sends with the same tag arrive in the order of their calls. No other member takes part.

        Args:
            x: as in all_reduce; do not change it before the call is finished.
            dest: rank of the receiver. If it is lost: OperationAborted.
            tag: 0 to 2^64 - 2^56 - 1.
            async_op: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt, when the receiver has the data (out is None).

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "send", self._connection.place
        check_options(call, async_op, timeout=timeout)
        peer = check_other(call, "dest", dest, place.rank, len(place.members))
        tag = check_tag(call, tag)
        source = region(x, f"{call}(x)")
        descriptor = Descriptor(Kind.send, source.dtype, count=source.count)
        return self._start(descriptor, place, source, None, peer=peer, tag=tag, async_op=async_op, timeout=timeout)

    @overload
    def recv(
        self,
        x: Any,
        source: int,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def recv(
        self,
        x: Any,
        source: int,
        tag: int = 0,
        *,
        async_op: Literal[True],
        timeout: float | None = None,
    ) -> Work: ...

    def recv(
        self,
        x: Any,
        source: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Receive into a tensor what one other member sends with send.

        Args:
            x: takes the data: dtype and count as sent. Untouched until the commit.
            source: rank of the sender. If it is lost: OperationAborted.
            tag: the sender's.
            async_op: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out is x.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "recv", self._connection.place
        check_options(call, async_op, timeout=timeout)
        peer = check_other(call, "source", source, place.rank, len(place.members))
        tag = check_tag(call, tag)
        target = region(x, f"{call}(x)")
        require_writable(target, f"{call}(x)")
        descriptor = Descriptor(Kind.recv, target.dtype, count=target.count)
        return self._start(descriptor, place, None, target, peer=peer, tag=tag, async_op=async_op, timeout=timeout)
