"""The collectives that move data from or to one member, the root: broadcast, gather, scatter."""

from __future__ import annotations

from typing import Any, Literal, overload

from wancoll.client.calls import Caller
from wancoll.client.checks import block_of, check_options, check_rank
from wancoll.client.placement import Placement
from wancoll.client.tensors import check_pair, region, require_writable
from wancoll.client.work import Work
from wancoll.collective import Descriptor, Kind, Receipt
from wancoll.errors import ConfigError


class Rooted(Caller):
    """See the module."""

    @overload
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Give every member the root's tensor.

        Args:
            x: at the root what is given; elsewhere, without out, it takes the result. The same dtype and count on all
                members; see all_reduce for what it may be.
            root: rank. If it is lost, every other member gets OperationAborted.
            out: takes the result in place of x.
            algorithm: "ring", "tree" or "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out is x or out.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "broadcast", self._connection.place
        check_options(call, async_op, on_failure, timeout, algorithm)
        root = check_rank(call, "root", root, len(place.members))
        source = target = region(x, f"{call}(x)")
        if out is not None and out is not x:
            target = region(out, f"{call}(out=...)")
            check_pair(source, target, call)
        here = place.rank == root
        kept = here and target.address == source.address  # the root's tensor is the result already
        if not kept:
            require_writable(target, f"{call}(x)" if target is source else f"{call}(out=...)")
        placement = Placement(
            self._connection.arena,
            (source,) if here else (),
            () if kept else (target,),
            unwanted=source.nbytes if kept else 0,
        )
        descriptor = Descriptor(
            Kind.broadcast, source.dtype, count=source.count, root=root, algorithm=algorithm, on_failure=on_failure
        )
        return self._post(Work(self._connection, descriptor, place.epoch, placement, target), async_op, timeout)

    @overload
    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def gather(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Give the root the blocks of all members, in rank order.

        If members are lost, the blocks of the others move together, as with all_gather.

        Args:
            x: this member's block; see all_reduce for what it may be.
            out: takes the world_size blocks at the root. None: a new tensor, in the arena, of shape
                (world_size, *x.shape). Not looked at elsewhere.
            root: rank. If it is lost, every other member gets OperationAborted.
            algorithm: "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has the blocks at the root and is None elsewhere.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "gather", self._connection.place
        check_options(call, async_op, on_failure, timeout, algorithm)
        world = len(place.members)
        root = check_rank(call, "root", root, world)
        source = region(x, f"{call}(x)")
        target, fresh = None, False
        if place.rank == root:
            target, fresh = self._result(call, out, source, world * source.count, (world, *source.shape))
        descriptor = Descriptor(
            Kind.gather, source.dtype, count=source.count, root=root, algorithm=algorithm, on_failure=on_failure
        )
        return self._start(
            descriptor, place, source, target, fresh, blocks=dict.fromkeys(place.members, source.count),
            async_op=async_op, timeout=timeout,
        )  # fmt: skip

    @overload
    def scatter(
        self,
        x: Any = None,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def scatter(
        self,
        x: Any = None,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def scatter(
        self,
        x: Any = None,
        out: Any = None,
        root: int = 0,
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Give every member its block of the root's tensor.

        Blocks are by the ranks of the epoch in which the call was made.

        Args:
            x: at the root: world_size blocks, one after the other in the order of the ranks. Not looked at elsewhere.
            out: takes this member's block; says its size and dtype where there is no x. None, at the root: a new
                tensor as with reduce_scatter.
            root: rank. If it is lost, every other member gets OperationAborted.
            algorithm: "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has this member's block.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; tensors are as they were.
        """
        call, place = "scatter", self._connection.place
        check_options(call, async_op, on_failure, timeout, algorithm)
        world = len(place.members)
        root = check_rank(call, "root", root, world)
        source, fresh = None, False
        if place.rank == root:
            source = region(x, f"{call}(x)")
            count, shape = block_of(call, source, world)
            target, fresh = self._result(call, out, source, count, shape)
        elif out is None:
            raise ConfigError(
                "a member that is not the root must say what it expects", who=f"{call}(out=...)",
                expected="an array of its block's size and dtype", got="None",
                hint=f"the root is rank {root}, this is rank {place.rank}",
            )  # fmt: skip
        else:
            target = region(out, f"{call}(out=...)")
            require_writable(target, f"{call}(out=...)")
        descriptor = Descriptor(
            Kind.scatter, target.dtype, count=target.count, root=root, algorithm=algorithm, on_failure=on_failure
        )
        return self._start(descriptor, place, source, target, fresh, async_op=async_op, timeout=timeout)
