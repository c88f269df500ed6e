"""The collectives that reduce: all_reduce, all_reduce_many, reduce_scatter, reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from wancoll.client.calls import Caller
from wancoll.client.checks import block_of, check_counts, check_options, check_rank, unavailable
from wancoll.client.codecs import Wire, wire_format, wire_where_taken
from wancoll.client.feedback import ErrorFeedback, feed
from wancoll.client.many import BUCKET_BYTES, ManyReceipt, ManyWork
from wancoll.client.placement import Placement
from wancoll.client.tensors import check_pair, region, require_writable
from wancoll.client.work import Work
from wancoll.collective import Descriptor, DType, Kind, Receipt, ReduceOp
from wancoll.errors import ConfigError

_OPS = ReduceOp.__members__


class Reductions(Caller):
    """See the module."""

    @overload
    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        codec: str = "none",
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
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
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
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
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
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
            codec: how floating elements travel: "none", as they are; "bf16", "fp16" (float32 and float64 only),
                "int8", "int4".
            max_rel_error: instead of codec: take the smallest format whose error is at most this. Nominal relative L2
                errors (Gaussian data): int4 0.15, int8 0.01, bf16 0.003, fp16 0.0005. All members must say the same.
            rounding: of the codec: "nearest", or "stochastic", whose random bits depend on seed, seq and element only.
            seed: of stochastic rounding, 64 bits; the same on all members.
            feedback: add what the codec lost of this tensor in earlier calls, and keep what it loses now. For sum and
                avg, rounded to nearest.
            name: of the tensor in *feedback*; no other call with it may be pending.
            algorithm: the schedule, by name: "ring", "direct", "halving_doubling", "tree", "full_exchange", "naive",
                "hierarchical"; "auto" for the group's choice.
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
        reduce_op = _op("all_reduce", op)
        check_options("all_reduce", async_op, on_failure, timeout, algorithm)
        source = target = region(x, "all_reduce(x)")
        if out is not None and out is not x:
            target = region(out, "all_reduce(out=...)")
            check_pair(source, target)
        require_writable(target, "all_reduce(x)" if target is source else "all_reduce(out=...)")
        wire = wire_format("all_reduce", source.dtype, codec, max_rel_error, rounding, seed)
        fed = feed("all_reduce", feedback, name, source.dtype, source.count, reduce_op, wire)
        descriptor = Descriptor(
            Kind.all_reduce, source.dtype, reduce_op, source.count, codec=wire.codec, algorithm=algorithm,
            on_failure=on_failure, rounding=wire.rounding, seed=wire.seed,
        )  # fmt: skip
        connection = self._connection
        placement = Placement(connection.arena, (source,), (target,), feed=fed)
        return self._post(Work(connection, descriptor, connection.place.epoch, placement, target), async_op, timeout)

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[Any],
        *,
        op: str = "sum",
        codec: str = "none",
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> ManyReceipt: ...

    @overload
    def all_reduce_many(
        self,
        tensors: Sequence[Any],
        *,
        op: str = "sum",
        codec: str = "none",
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> ManyWork: ...

    def all_reduce_many(
        self,
        tensors: Sequence[Any],
        *,
        op: str = "sum",
        codec: str = "none",
        max_rel_error: float | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        feedback: ErrorFeedback | None = None,
        name: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> ManyReceipt | ManyWork:
        """Reduce many tensors in place, in few operations: tensors of one dtype share buckets, in the list's order.

        Each bucket is an operation of its own and all of them are under way together. The promise holds for each
        bucket: its tensors change together or not at all. If one bucket fails others may have been committed.

        Args:
            tensors: as x of all_reduce, writable; no two may share memory. The same list (dtypes and sizes) on all
                members.
            op: as in all_reduce.
            codec: as in all_reduce, for all tensors of floating dtypes that it takes; others travel as they are.
            max_rel_error: as in all_reduce.
            rounding: as in all_reduce.
            seed: as in all_reduce.
            feedback: as in all_reduce, with a residual for each bucket, named "NAME/0", "NAME/1", ...; for a list that
                stays the same from call to call.
            name: of the list in *feedback*.
            bucket_bytes: a bucket takes tensors up to this size together; a larger tensor is a bucket of its own.
            algorithm: as in all_reduce.
            async_op: return a ManyWork when all buckets are under way.
            on_failure: as in all_reduce.
            timeout: seconds to wait for all commits. With async_op give it to wait().

        Returns:
            A receipt for each bucket, and the tensors.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: some buckets are pending: its .work goes on waiting.
            WancollError: a bucket failed; its tensors are as they were. All buckets have ended.
        """
        reduce_op = _op("all_reduce_many", op)
        check_options("all_reduce_many", async_op, on_failure, timeout, algorithm)

        def wire(dtype: DType) -> Wire:
            return wire_where_taken("all_reduce_many", dtype, codec, max_rel_error, rounding, seed)

        like = Descriptor(Kind.all_reduce, op=reduce_op, algorithm=algorithm, on_failure=on_failure)
        work = ManyWork(self._connection, tensors, like, wire, bucket_bytes, feedback, name)
        if async_op:
            work.post()
            return work
        return work.wait(timeout)

    @overload
    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Reduce the members' tensors element by element; every member gets the block of its rank.

        Blocks are by the ranks of the epoch in which the call was made: a survivor of a loss still gets its own block,
        reduced over the survivors.

        Args:
            x: world_size blocks, one after the other in the order of the ranks; see all_reduce for what it may be.
            out: takes this member's block. None: a new tensor, in the arena, of shape x.shape[1:] if x is a stack of
                blocks (several dimensions, the first of length world_size), else x's with the first dimension
                divided by world_size if it can be, else flat.
            op: as in all_reduce.
            counts: elements of each rank's block, if they are not equal; a new tensor is flat then.
            algorithm: "ring" or "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has this member's block, its digest is that of the block.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; x and out are as they were.
        """
        call, place = "reduce_scatter", self._connection.place
        reduce_op = _op(call, op)
        check_options(call, async_op, on_failure, timeout, algorithm)
        source = region(x, f"{call}(x)")
        world = len(place.members)
        blocks: list[int] = []
        if counts is None:
            count, shape = block_of(call, source, world)
            each = count
        else:
            blocks = check_counts(call, counts, world)
            if sum(blocks) != source.count:
                raise ConfigError(
                    "counts do not add up to the tensor", who=f"{call}(counts=...)",
                    expected=f"a sum of {source.count}", got=str(sum(blocks)),
                )  # fmt: skip
            count, each = blocks[place.rank], 0
            shape = (count,)
        target, fresh = self._result(call, out, source, count, shape)
        descriptor = Descriptor(
            Kind.reduce_scatter, source.dtype, reduce_op, each, tuple(blocks), algorithm=algorithm,
            on_failure=on_failure,
        )  # fmt: skip
        return self._start(descriptor, place, source, target, fresh, async_op=async_op, timeout=timeout)

    @overload
    def reduce(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: Literal[False] = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt: ...

    @overload
    def reduce(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: Literal[True],
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Work: ...

    def reduce(
        self,
        x: Any,
        out: Any = None,
        root: int = 0,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        async_op: bool = False,
        on_failure: str = "retry",
        timeout: float | None = None,
    ) -> Receipt | Work:
        """Reduce the members' tensors element by element; the root gets the result.

        Args:
            x: as in all_reduce.
            out: takes the result at the root; may be x. None: a new tensor of x's shape, in the arena. Not looked at
                elsewhere.
            root: rank. If it is lost, every other member gets OperationAborted.
            op: as in all_reduce.
            algorithm: "tree" or "direct"; "auto" for the group's choice.
            async_op: as in all_reduce.
            on_failure: as in all_reduce.
            timeout: as in all_reduce.

        Returns:
            The receipt; its out has the result at the root and is None elsewhere.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; x and out are as they were.
        """
        call, place = "reduce", self._connection.place
        reduce_op = _op(call, op)
        check_options(call, async_op, on_failure, timeout, algorithm)
        root = check_rank(call, "root", root, len(place.members))
        source = region(x, f"{call}(x)")
        target, fresh = None, False
        if place.rank == root:
            target, fresh = self._result(call, out, source, source.count, source.shape)
        descriptor = Descriptor(
            Kind.reduce, source.dtype, reduce_op, source.count, root=root, algorithm=algorithm, on_failure=on_failure
        )
        return self._start(descriptor, place, source, target, fresh, async_op=async_op, timeout=timeout)


def _op(call: str, op: str) -> ReduceOp:
    found = _OPS.get(op)
    if found is None:
        raise unavailable(call, "op", op, tuple(_OPS))
    return found
