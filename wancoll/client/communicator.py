"""The communicator: one member's place in a group, its arrays, and every call that it can make.

A collective checks its arguments, becomes a Descriptor by the ranks of the epoch that is current then, and a Work,
which is posted. The types of arguments that several calls take stand once, in the TypedDicts, for type checkers, which
have to tell two cases apart: a call that blocks gives a Receipt, one with async_op=True a Work.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, SupportsIndex, TypeAlias, TypedDict, Unpack, cast, overload

import numpy as np

from wancoll.client.checks import (
    block_of,
    check_counts,
    check_grace,
    check_options,
    check_other,
    check_rank,
    check_tag,
    reduce_op,
    unavailable,
    whole_number,
)
from wancoll.client.codecs import RAW, Coding, ErrorFeedback, Feed, coding, coding_where_taken, dense, feed
from wancoll.client.connection import Connection, deadline_after, seconds_left
from wancoll.client.many import BUCKET_BYTES, ManyReceipt, ManyWork
from wancoll.client.memory.placement import Placement
from wancoll.client.memory.tensors import (
    Region,
    check_out,
    check_pair,
    is_torch,
    new_array,
    new_on_device,
    new_result,
    numpy_dtype,
    region,
    require_writable,
)  # fmt: skip
from wancoll.client.syncing.state import tensors_of
from wancoll.client.syncing.sync_state import SyncWork
from wancoll.client.syncing.things import things_of
from wancoll.client.work import Work
from wancoll.collective import ROOTED, Codec, Descriptor, DType, Kind, Receipt, shortened
from wancoll.errors import ConfigError, WancollError
from wancoll.sync.receipt import SyncReceipt
from wancoll.sync.strategy import MAJORITY, SEND_ONLY, STRATEGIES

Blocking: TypeAlias = Literal[False]
Async: TypeAlias = Literal[True]
OpName: TypeAlias = Literal["sum", "avg", "min", "max", "prod"]


class TorchOp(Protocol):
    """torch.distributed.ReduceOp.SUM and the like."""

    @property
    def name(self) -> str:
        """SUM, AVG, MIN, MAX or PRODUCT."""


Op: TypeAlias = OpName | TorchOp
CodecName: TypeAlias = Literal[  # and sparse ones of other shares: there are too many of them
    "none", "bf16", "fp16", "int8", "int4", "fp8", "top1.5%", "top5%-int8", "top1.5%/top1.5%", "top5%-int8/top5%-int8"
]
DenseName: TypeAlias = Literal["none", "bf16", "fp16", "int8", "int4", "fp8"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
OnFailure: TypeAlias = Literal["retry", "raise"]
Strategy: TypeAlias = Literal["majority", "send-only", "receive-only", "overwrite"]
Algorithm: TypeAlias = Literal[  # which call has which: checks.ALGORITHMS
    "auto", "ring", "direct", "halving_doubling", "tree", "double_tree", "full_exchange", "naive", "hierarchical"
]


class Options(TypedDict, total=False):
    """What collectives take by keyword."""

    algorithm: Algorithm
    on_failure: OnFailure
    timeout: float | None


class Reducing(Options, total=False):
    """Options of calls that reduce."""

    op: Op


class Coded(Reducing, total=False):
    """Options of calls that may travel in fewer bytes."""

    codec: CodecName
    max_rel_error: float | None
    rounding: Rounding
    seed: int
    feedback: ErrorFeedback | None
    name: str


class Graced(Coded, total=False):
    """Options of all_reduce, which may go on without members that are late."""

    grace: float | None


class Many(Coded, total=False):
    """Options of all_reduce_many."""

    bucket_bytes: int


class Dense(Options, total=False):
    """Options of calls that move tensors, whose elements may be encoded."""

    codec: DenseName


class Blocks(Dense, total=False):
    """Options of calls whose blocks may differ in size."""

    counts: Sequence[int] | None


class ReducedBlocks(Reducing, Blocks, total=False):
    """Options of reduce_scatter, which reduces blocks."""

    feedback: ErrorFeedback | None
    name: str


class Labelled:
    """A connection whose calls say *label*, too, which all members have to say alike."""

    def __init__(self, connection: Connection, label: str) -> None:
        self._connection, self.label = connection, label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


_IN_RINGS = (Kind.all_reduce, Kind.reduce_scatter)  # each rank begins with its own share


class Communicator:
    """One member's place in a group. Made by wancoll.connect(). A context manager; close() leaves the group.

    Any number of threads may call and wait at the same time; the order of their calls is the order that all members
    must agree on. Every call is by the ranks of the epoch that was current when it was made.

    Args:
        connection: to the peer daemon, with a place in the group.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def labelled(self, label: str) -> Communicator:
        """The same member, whose calls with one tensor say *label*, of any length: another one is a named mismatch."""
        return Communicator(cast("Connection", Labelled(self._connection, shortened(label)))) if label else self

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

    def on_island_lost(self, hook: Callable[[WancollError], object]) -> None:
        """Call *hook* when this member is out, of an island of several shards: also while it sits in another library.

        It is called once, in a thread, with the error that the next call raises here. It replaces the hook before.
        """
        if self._connection.shards > 1:
            self._connection.watch(hook)

    @property
    def pending(self) -> tuple[Work, ...]:
        """Calls that are not finished, in program order: also those whose wait timed out or was interrupted."""
        return self._connection.pending

    # ---- calls that reduce ---------------------------------------------------------------------------

    @overload
    def all_reduce(
        self, x: Any, out: Any = None, *, async_op: Blocking = False, **options: Unpack[Graced]
    ) -> Receipt: ...
    @overload
    def all_reduce(self, x: Any, out: Any = None, *, async_op: Async, **options: Unpack[Graced]) -> Work: ...
    def all_reduce(
        self, x: Any, out: Any = None, *, op: Op = "sum", codec: CodecName = "none", max_rel_error: float | None = None,
        rounding: Rounding = "nearest", seed: int = 0, feedback: ErrorFeedback | None = None, name: str = "",
        grace: float | None = None, algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Reduce the members' tensors element by element; every member gets the same bytes.

        All members must make the same call (op, dtype, count, codec, algorithm, on_failure, grace) in the same order.

        Tensors are C-contiguous, of float32, float64, float16, bfloat16, int8, int16, int32, int64 or uint8: numpy
        arrays, CPU torch tensors, or anything with DLPack or the buffer protocol. Do not change them before the call is
        finished. A new tensor lies in the arena.

        Args:
            x: this member's tensor.
            out: takes the result: same dtype and shape, writable, either x's own memory or none of it. None: in
                place. Untouched until the commit.
            grace: for sums: seconds after the first member's call from which on missing members are not waited for and
                count as zeros. A late member gets the same result when it calls, with receipt.counted False; with
                *feedback* its tensor is sent with the next call. None: all members are waited for.
            op: "sum", "avg", "min", "max" or "prod", or torch.distributed.ReduceOp.SUM and so on.
            codec: how floating elements travel: "none", as they are; "bf16", "fp16" (float32 and float64 only),
                "int8", "int4", "fp8" (e4m3); of sums "top1.5%", the greatest 1.5 % with 2 bits each, or "top5%-int8",
                with 8; "top1.5%/top1.5%": so is the result. Take feedback with these.
            max_rel_error: instead of codec: take the smallest format whose error is at most this. Nominal relative L2
                errors (Gaussian data): int4 0.15, int8 0.01, bf16 0.003, fp16 0.0005; 1.42 times these with
                stochastic rounding; fp8, of int8's size, has 0.04 and is never taken. Not with algorithms that encode
                sums again ("ring", "halving_doubling", "tree", "double_tree"). All members must say the same.
            rounding: how the codec rounds: "nearest", or "stochastic", whose random bits depend on seed, seq and
                element only.
            seed: seeds stochastic rounding: 64 bits; the same on all members.
            feedback: add what the codec lost of this tensor in earlier calls, and keep what it loses now. For sum and
                avg, rounded to nearest.
            name: names the tensor in *feedback*; no other call with this name may be pending.
            algorithm: the schedule, by name: "ring" or "direct" or "halving_doubling" or "tree" or "double_tree" or
                "full_exchange" or "naive" or "hierarchical"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out is the caller's own object.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.all_reduce, async_op, on_failure, timeout, algorithm, op)
        source, target = call.source_and_target(x, out)
        require_writable(target, "all_reduce(x)" if target is source else "all_reduce(out=...)")
        how = coding("all_reduce", source.dtype, codec, max_rel_error, rounding, seed, algorithm, call.op)
        waits = check_grace(grace, call.op)
        late = waits > 0
        fed = feed("all_reduce", feedback, name, source.dtype, source.count, call.op, how, late=late)
        return call.start(source, target, source.count, coding=how, feed=fed, grace=waits)

    @overload
    def all_reduce_many(
        self, tensors: Iterable[Any], *, async_op: Blocking = False, **options: Unpack[Many]
    ) -> ManyReceipt: ...
    @overload
    def all_reduce_many(self, tensors: Iterable[Any], *, async_op: Async, **options: Unpack[Many]) -> ManyWork: ...
    def all_reduce_many(
        self, tensors: Iterable[Any], *, op: Op = "sum", codec: CodecName = "none", max_rel_error: float | None = None,
        rounding: Rounding = "nearest", seed: int = 0, feedback: ErrorFeedback | None = None, name: str = "",
        bucket_bytes: int = BUCKET_BYTES, algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> ManyReceipt | ManyWork:  # fmt: skip
        """Reduce many tensors in place, in few operations: tensors of one dtype share buckets, in the list's order.

        Each bucket is an operation of its own and all of them are under way together. The promise holds for each
        bucket: its tensors change together or not at all. If one bucket fails others may have been committed.

        The codec is for all tensors of dtypes that it takes; others travel as they are. With *feedback* each bucket has
        a residual, named "NAME/0", "NAME/1", ...; for a list that stays the same from call to call.

        Tensors are as in all_reduce.

        Args:
            tensors: writable; no two may share memory. The same list (dtypes and sizes) on all members. Also
                model.parameters(): their data is reduced; for gradients there is wancoll.torch.all_reduce_gradients.
            name: of the list in *feedback*.
            bucket_bytes: a bucket takes tensors up to this size together; a larger tensor is a bucket of its own.
            async_op: return a ManyWork when all buckets are under way.
            op: "sum", "avg", "min", "max" or "prod", or torch.distributed.ReduceOp.SUM and so on.
            codec: how floating elements travel, as in all_reduce.
            max_rel_error: instead of codec: take the smallest format whose error is at most this, as in all_reduce.
            rounding: how the codec rounds: "nearest" or "stochastic".
            seed: seeds stochastic rounding: 64 bits; the same on all members.
            feedback: add what the codec lost of these tensors in earlier calls, and keep what it loses now.
            algorithm: the schedule, by name: "ring" or "direct" or "halving_doubling" or "tree" or "double_tree" or
                "full_exchange" or "naive" or "hierarchical"; "auto" for the group's choice.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            A receipt for each bucket, and the tensors.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            TimeoutError: some buckets are pending: its .work goes on waiting.
            WancollError: a bucket failed; its tensors are as they were. All buckets have ended.
        """
        call = "all_reduce_many"
        reduction = reduce_op(call, op)
        check_options(call, async_op, on_failure, timeout, algorithm)

        def how(dtype: DType) -> Coding:
            return coding_where_taken(call, dtype, codec, max_rel_error, rounding, seed, algorithm, reduction)

        like = Descriptor(Kind.all_reduce, op=reduction, algorithm=algorithm, on_failure=on_failure)
        work = ManyWork(self._connection, tensors, like, how, bucket_bytes, feedback, name)
        if async_op:
            work.post()
            return work
        return work.wait(timeout)

    @overload
    def reduce_scatter(
        self, x: Any, out: Any = None, *, async_op: Blocking = False, **options: Unpack[ReducedBlocks]
    ) -> Receipt: ...
    @overload
    def reduce_scatter(self, x: Any, out: Any = None, *, async_op: Async, **options: Unpack[ReducedBlocks]) -> Work: ...
    def reduce_scatter(
        self, x: Any, out: Any = None, *, op: Op = "sum", counts: Sequence[int] | None = None,
        codec: DenseName = "none", feedback: ErrorFeedback | None = None, name: str = "",
        algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Reduce the members' tensors element by element; every member gets the block of its rank.

        Blocks are by the ranks of the epoch in which the call was made: a survivor of a loss still gets its own block,
        reduced over the survivors.

        Tensors are as in all_reduce.

        Args:
            x: world_size blocks, one after the other in the order of the ranks.
            out: takes this member's block. None: a new tensor, of shape x.shape[1:] if x is a stack of blocks (several
                dimensions, the first of length world_size), else x's with the first dimension divided by world_size if
                it can be, else flat.
            op: "sum", "avg", "min", "max" or "prod", or torch.distributed.ReduceOp.SUM and so on.
            counts: elements of each rank's block, if blocks differ in size; a new tensor is flat then.
            codec: how floating elements travel, as in all_reduce, but no sparse one. Each block is encoded on its own,
                the sum is not. "ring" encodes sums again on their way.
            feedback: add what the codec lost of this tensor in earlier calls, and keep what it loses now.
            name: names the tensor in *feedback*; no other call with this name may be pending.
            algorithm: the schedule, by name: "ring" or "direct"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has this member's block, its digest is that of the block.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.reduce_scatter, async_op, on_failure, timeout, algorithm, op)
        source = region(x, "reduce_scatter(x)")
        how = dense(call.name, source.dtype, codec)
        if counts is None:
            count, shape = block_of(call.name, source, call.world)
            blocks = [count] * call.world
        else:
            blocks = check_counts(call.name, counts, call.world)
            if sum(blocks) != source.count:
                raise ConfigError(
                    "counts do not add up to the tensor", who="reduce_scatter(counts=...)",
                    expected=f"a sum of {source.count}", got=str(sum(blocks)),
                )  # fmt: skip
            count = blocks[call.place.rank]
            shape = (count,)
        owned = dict(zip(call.place.members, blocks, strict=True))
        fed = feed(call.name, feedback, name, source.dtype, source.count, call.op, how, blocks=owned)
        target, fresh = call.result(out, source, count, shape)
        if counts is None:
            return call.start(source, target, count, coding=how, feed=fed, fresh=fresh)
        return call.start(source, target, 0, counts=tuple(blocks), coding=how, feed=fed, fresh=fresh)

    @overload
    def reduce(
        self, x: Any, out: Any = None, root: int = 0, *, async_op: Blocking = False, **options: Unpack[Reducing]
    ) -> Receipt: ...
    @overload
    def reduce(
        self, x: Any, out: Any = None, root: int = 0, *, async_op: Async, **options: Unpack[Reducing]
    ) -> Work: ...
    def reduce(
        self, x: Any, out: Any = None, root: int = 0, *, op: Op = "sum", algorithm: Algorithm = "auto",
        async_op: bool = False, on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Reduce the members' tensors element by element; the root gets the result.

        Tensors are as in all_reduce.

        Args:
            x: this member's tensor.
            out: takes the result at the root; may be x. None: a new tensor of x's shape. Not looked at elsewhere.
            root: rank of the root. If the root is lost, every other member gets OperationAborted.
            op: "sum", "avg", "min", "max" or "prod", or torch.distributed.ReduceOp.SUM and so on.
            algorithm: the schedule, by name: "ring" or "tree" or "double_tree" or "direct"; "auto" for the group's
                choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has the result at the root and is None elsewhere.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.reduce, async_op, on_failure, timeout, algorithm, op, root)
        source = region(x, "reduce(x)")
        target, fresh = call.result(out, source, source.count, source.shape)
        return call.start(source, target, source.count, fresh=fresh)

    # ---- calls that move tensors ---------------------------------------------------------------------

    @overload
    def broadcast(
        self, x: Any, root: int = 0, *, out: Any = None, async_op: Blocking = False, **options: Unpack[Dense]
    ) -> Receipt: ...
    @overload
    def broadcast(
        self, x: Any, root: int = 0, *, out: Any = None, async_op: Async, **options: Unpack[Dense]
    ) -> Work: ...
    def broadcast(
        self, x: Any, root: int = 0, *, out: Any = None, codec: DenseName = "none", algorithm: Algorithm = "auto",
        async_op: bool = False, on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Give every member the root's tensor.

        Tensors are as in all_reduce.

        Args:
            x: at the root what is given; elsewhere, without out, it takes the result. The same dtype and count on all
                members.
            out: takes the result in place of x.
            root: rank of the root. If the root is lost, every other member gets OperationAborted.
            codec: how floating elements travel, as in all_reduce, but no sparse one. The root takes the result, too.
            algorithm: the schedule, by name: "ring" or "tree" or "double_tree" or "direct"; "auto" for the group's
                choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out is x or out.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.broadcast, async_op, on_failure, timeout, algorithm, root=root)
        source, target = call.source_and_target(x, out)
        how = dense("broadcast", source.dtype, codec)
        # The root's tensor is the result already, unless that is what a codec makes of it.
        kept = call.here and target.address == source.address and not how.codec
        if not kept:
            require_writable(target, "broadcast(x)" if target is source else "broadcast(out=...)")
        return call.start(source if call.here else None, target, source.count, coding=how, kept=kept)

    @overload
    def gather(
        self, x: Any, out: Any = None, root: int = 0, *, async_op: Blocking = False, **options: Unpack[Options]
    ) -> Receipt: ...
    @overload
    def gather(
        self, x: Any, out: Any = None, root: int = 0, *, async_op: Async, **options: Unpack[Options]
    ) -> Work: ...
    def gather(
        self, x: Any, out: Any = None, root: int = 0, *, algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Give the root the blocks of all members, in rank order.

        If members are lost, the blocks of the others move together, as with all_gather.

        Tensors are as in all_reduce.

        Args:
            x: this member's block.
            out: takes the world_size blocks at the root. None: a new tensor of shape `(world_size, *x.shape)`. Not
                looked at elsewhere.
            root: rank of the root. If the root is lost, every other member gets OperationAborted.
            algorithm: the schedule, by name: "direct" or "ring"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has the blocks at the root and is None elsewhere.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.gather, async_op, on_failure, timeout, algorithm, root=root)
        source = region(x, "gather(x)")
        target, fresh = call.result(out, source, call.world * source.count, (call.world, *source.shape))
        return call.start(source, target, source.count, fresh=fresh, blocks=[source.count] * call.world)

    @overload
    def scatter(
        self, x: Any = None, out: Any = None, root: int = 0, *, async_op: Blocking = False, **options: Unpack[Options]
    ) -> Receipt: ...
    @overload
    def scatter(
        self, x: Any = None, out: Any = None, root: int = 0, *, async_op: Async, **options: Unpack[Options]
    ) -> Work: ...
    def scatter(
        self, x: Any = None, out: Any = None, root: int = 0, *, algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Give every member its block of the root's tensor.

        Blocks are by the ranks of the epoch in which the call was made.

        Tensors are as in all_reduce.

        Args:
            x: at the root: world_size blocks, one after the other in the order of the ranks. Not looked at elsewhere.
            out: takes this member's block; says its size and dtype where there is no x. None, at the root: a new
                tensor as with reduce_scatter.
            root: rank of the root. If the root is lost, every other member gets OperationAborted.
            algorithm: the schedule, by name: "direct" or "ring"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has this member's block.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.scatter, async_op, on_failure, timeout, algorithm, root=root)
        if call.here:
            source = region(x, "scatter(x)")
            count, shape = block_of("scatter", source, call.world)
            target, fresh = call.result(out, source, count, shape)
            return call.start(source, target, count, fresh=fresh)
        if out is None:
            raise ConfigError(
                "a member that is not the root must say what it expects", who="scatter(out=...)",
                expected="an array of its block's size and dtype", got="None",
                hint=f"the root is rank {call.root}, this is rank {call.place.rank}",
            )  # fmt: skip
        target = region(out, "scatter(out=...)")
        require_writable(target, "scatter(out=...)")
        return call.start(None, target, target.count)

    @overload
    def all_gather(
        self, x: Any, out: Any = None, *, async_op: Blocking = False, **options: Unpack[Blocks]
    ) -> Receipt: ...
    @overload
    def all_gather(self, x: Any, out: Any = None, *, async_op: Async, **options: Unpack[Blocks]) -> Work: ...
    def all_gather(
        self, x: Any, out: Any = None, *, counts: Sequence[int] | None = None, codec: DenseName = "none",
        algorithm: Algorithm = "auto", async_op: bool = False,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Give every member the blocks of all, in rank order.

        If members are lost, the blocks of the others move together: receipt.out is then the leading part of the
        result, one block for each of receipt.contributors, and what follows in out is as it was.

        Tensors are as in all_reduce.

        Args:
            x: this member's block.
            out: takes the world_size blocks. None: a new tensor of shape `(world_size, *x.shape)`.
            counts: elements of each rank's block, if blocks differ in size; a new tensor is flat then.
            codec: how floating elements travel, as in all_reduce, but no sparse one. All get what the encoded blocks
                say, of their own, too.
            algorithm: the schedule, by name: "ring" or "direct"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has the blocks.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.all_gather, async_op, on_failure, timeout, algorithm)
        source = region(x, "all_gather(x)")
        how = dense(call.name, source.dtype, codec)
        if counts is None:
            target, fresh = call.result(out, source, call.world * source.count, (call.world, *source.shape))
            sizes = [source.count] * call.world
            return call.start(source, target, source.count, coding=how, fresh=fresh, blocks=sizes)
        blocks = check_counts(call.name, counts, call.world)
        if blocks[call.place.rank] != source.count:
            raise ConfigError(
                "the tensor is not as large as counts says", who="all_gather(x)",
                expected=f"{blocks[call.place.rank]} elements at rank {call.place.rank}", got=str(source.count),
            )  # fmt: skip
        target, fresh = call.result(out, source, sum(blocks), (sum(blocks),))
        return call.start(source, target, 0, counts=tuple(blocks), coding=how, fresh=fresh, blocks=blocks)

    @overload
    def all_to_all(
        self, x: Any, out: Any = None, *, async_op: Blocking = False, **options: Unpack[Dense]
    ) -> Receipt: ...
    @overload
    def all_to_all(self, x: Any, out: Any = None, *, async_op: Async, **options: Unpack[Dense]) -> Work: ...
    def all_to_all(
        self, x: Any, out: Any = None, *, codec: DenseName = "none", algorithm: Algorithm = "auto",
        async_op: bool = False, on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> Receipt | Work:  # fmt: skip
        """Give every member the blocks that are for it: block j of rank i becomes block i of rank j.

        If members are lost, the blocks of the others move together, as with all_gather.

        Tensors are as in all_reduce.

        Args:
            x: world_size equal blocks, one after the other in the order of the ranks.
            out: takes the result: same dtype and count, either x's own memory or none of it. None: a new tensor of
                x's shape.
            codec: how floating elements travel, as in all_reduce, but no sparse one; a member's own block, too.
            algorithm: the schedule, by name: "direct" or "ring"; "auto" for the group's choice.
            async_op: return a Work at once.
            on_failure: "retry" runs again with the survivors; "raise" raises OperationAborted on every member.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out has a block from each contributor.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.all_to_all, async_op, on_failure, timeout, algorithm)
        source = region(x, "all_to_all(x)")
        count, _ = block_of("all_to_all", source, call.world)
        how = dense(call.name, source.dtype, codec)
        target, fresh = call.result(out, source, source.count, source.shape)
        return call.start(source, target, count, coding=how, fresh=fresh, blocks=[count] * call.world)

    # ---- one member to another -----------------------------------------------------------------------

    @overload
    def send(
        self, x: Any, dest: int, tag: int = 0, *, async_op: Blocking = False, timeout: float | None = None
    ) -> Receipt: ...
    @overload
    def send(self, x: Any, dest: int, tag: int = 0, *, async_op: Async, timeout: float | None = None) -> Work: ...
    def send(
        self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Receipt | Work:
        """Send a tensor to one other member, which calls recv with this rank and the same tag.

        Sends with the same tag arrive in the order of their calls. No other member takes part.

        Tensors are as in all_reduce.

        Args:
            x: what is sent.
            dest: rank of the receiver. If it is lost: OperationAborted.
            tag: 0 to 2^64 - 2^56 - 1.
            async_op: return a Work at once.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt, when the receiver has the data (out is None).

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.send, async_op, timeout=timeout)
        call.pair("dest", dest, tag)
        given = region(x, "send(x)")
        return call.start(given, None, given.count)

    @overload
    def recv(
        self, x: Any, source: int, tag: int = 0, *, async_op: Blocking = False, timeout: float | None = None
    ) -> Receipt: ...
    @overload
    def recv(self, x: Any, source: int, tag: int = 0, *, async_op: Async, timeout: float | None = None) -> Work: ...
    def recv(
        self, x: Any, source: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Receipt | Work:
        """Receive into a tensor what one other member sends with send.

        Tensors are as in all_reduce.

        Args:
            x: takes the data: dtype and count as sent. Untouched until the commit.
            source: rank of the sender. If it is lost: OperationAborted.
            tag: the sender's.
            async_op: return a Work at once.
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().

        Returns:
            The receipt; its out is x.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        call = _Call(self._connection, Kind.recv, async_op, timeout=timeout)
        call.pair("source", source, tag)
        target = region(x, "recv(x)")
        require_writable(target, "recv(x)")
        return call.start(None, target, target.count)

    # ---- the group -----------------------------------------------------------------------------------

    def barrier(self, timeout: float | None = None) -> Receipt:
        """Return when all members have called it.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            A receipt without tensor (out is None).

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        return _Call(self._connection, Kind.barrier, timeout=timeout).bare()  # type: ignore[return-value]

    @overload
    def update_membership(self, timeout: float | None = None, *, async_op: Blocking = False) -> Receipt: ...
    @overload
    def update_membership(self, timeout: float | None = None, *, async_op: Async) -> Work: ...
    def update_membership(self, timeout: float | None = None, *, async_op: bool = False) -> Receipt | Work:
        """Admit the joiners that wait. A collective: all members call it, in the same place of their programs.

        Below min_world it waits for joiners. What members call after it joiners call, too; with async_op: from the
        post on, not from the end of wait(): sync_state and calls with a block from each member come after wait(), since
        a joiner makes those that were called before void.

        Args:
            timeout: seconds to wait for the commit; None: as long as it takes. With async_op give it to wait().
            async_op: return a Work at once.

        Returns:
            A receipt without tensor (out is None). rank, world_size, epoch and members are those of the new epoch. With
            async_op a Work whose wait() returns it.

        Raises:
            ConfigError: an argument that cannot be used; nothing was sent.
            ArenaFull: no memory for it; nothing was sent.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting.
            WancollError: the operation failed; all tensors are as they were.
        """
        return _Call(self._connection, Kind.update_membership, async_op, timeout=timeout).bare()

    def sync_state(
        self, *state: Any, revision: int, strategy: Strategy = MAJORITY,
        on_failure: OnFailure = "retry", timeout: float | None = None,
    ) -> SyncReceipt:  # fmt: skip
        """Give all members the same state: parameters, optimizer state, counters. A collective: all members call it.

        The state with the highest revision wins; of several the one that most members hold; of equals that of the
        lowest rank. Who differs from it fetches what differs, from all that hold it at the same time. If a member is
        lost, the others go on with what they have received. Other calls of this communicator go before or after it;
        async calls posted earlier, and other communicators, go on meanwhile.

        All or nothing: tensors change when every member has all of the state, and not before. A member may do without,
        for itself: see "overwrite".

        Args:
            state: name -> tensor, with the same names, shapes and dtypes on all members. Of any dtype of fixed size;
                else as in all_reduce; on CUDA devices on some members or all, too. Do not change the tensors before the
                call is finished. Two names may stand for the very same memory, if they do so on all members. Or things,
                the same kinds in the same order: torch modules; whatever has state_dict() and load_state_dict(), such
                as optimizers, schedulers and samplers, whose states may differ in all; random generators of torch,
                numpy and Python; dicts that nest. Plain values in them (None, bool, int, float, str, bytes, list,
                tuple, dict) are synchronised, too.
            revision: which state this is, 0 to 2^63 - 1, for example the step that it is the result of.
            strategy: of this member. "majority": it votes, sends and receives. "send-only": it votes and is never
                changed; if another state wins, the call fails. "receive-only": it has no vote and sends nothing.
                "overwrite": so, too, and what its tensors hold is worth nothing: in main memory they take the winner's
                bytes as they come, without memory for a second state. If the call fails, or while it is pending, they
                hold anything: call again before you use them.
            on_failure: "retry": go on without members that are lost; "raise": fail then.
            timeout: seconds; None: as long as it takes.

        Returns:
            What was moved, and who holds the state now.

        Raises:
            ConfigError: an argument that cannot be used, and nothing was sent; or states that do not fit together,
                the same error on all members.
            OperationAborted: a part of the state was lost with its last holder, or a member cannot take part.
            TimeoutError: still pending, nothing is lost: its .work goes on waiting. Without .work: a device did not
                hand its tensor over, and nothing was sent.
            DeviceError: a device failed; where the hint says that the state is committed tensors are undefined.
            WancollError: it failed. Whatever else is raised, the tensors are as they were, but for "overwrite".
        """
        check_options("sync_state", False, on_failure, timeout)
        deadline = deadline_after(timeout)
        if strategy not in STRATEGIES:
            raise unavailable("sync_state", "strategy", strategy, STRATEGIES)
        number = whole_number("sync_state", "revision", revision, 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")
        things = things_of(state)
        found = tensors_of(state[0] if things is None else things.tensors, changing=strategy != SEND_ONLY)
        work = SyncWork(self.all_gather, self._connection, found, number, strategy, on_failure, deadline, things)
        return work.wait(seconds_left(deadline))

    # ---- arrays --------------------------------------------------------------------------------------

    @overload
    def empty(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, device: None = None
    ) -> np.ndarray[Any, Any]: ...
    @overload
    def empty(self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, *, device: Any) -> Any: ...
    def empty(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, device: Any = None
    ) -> Any:  # fmt: skip
        """A numpy array in the arena, contents undefined: all_reduce on the whole of it copies nothing.

        Args:
            shape: as for numpy.empty.
            dtype: as for numpy.empty, or torch's; "bfloat16" needs the package ml_dtypes.
            device: "cuda:0" and the like, or a torch.device: a torch tensor in that device's own memory instead. It
                saves no copy: a device's tensors go through pinned memory wherever they were made.

        Raises:
            ConfigError: unknown dtype, or a device that cannot be used.
            ArenaFull: no memory for it.
            DeviceError: no memory for it on the device.
        """
        self._connection.check_usable()
        try:
            dims = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
        except TypeError as bad:
            raise ConfigError(
                "the shape cannot be used", who="empty(shape)", expected="whole numbers", got=repr(shape)[:200]
            ) from bad
        if any(n < 0 for n in dims):
            raise ConfigError(
                "a dimension is negative", who="empty(shape)", expected="dimensions of 0 or more", got=str(dims)
            )
        if device is not None and str(device) != "cpu":
            return new_on_device(dims, dtype, device)
        return new_array(self._connection.arena, dims, numpy_dtype(dtype))

    @overload
    def zeros(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, device: None = None
    ) -> np.ndarray[Any, Any]: ...
    @overload
    def zeros(self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, *, device: Any) -> Any: ...
    def zeros(
        self, shape: SupportsIndex | Iterable[SupportsIndex], dtype: Any = np.float32, device: Any = None
    ) -> Any:  # fmt: skip
        """Make a tensor as empty() does, filled with zeros.

        Raises:
            ConfigError, ArenaFull, DeviceError: as empty().
        """
        array = self.empty(shape, dtype, device=device)
        array[...] = 0
        return array

    # ---- the end -------------------------------------------------------------------------------------

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
        where = f"{self._connection.state}; {self._connection.daemon}"
        return f"<Communicator {self.name!r} of group {self.group!r}: {where}>"


class _Call:
    """One call on its way from arguments, checked here, to a Work that is posted: by the ranks of the current epoch.

    What is refused is refused in one order: op, other options, root, tensors.
    """

    root = -1
    here = True  # whether this member is the root, if there is one
    _peer, _tag = -1, 0

    def __init__(
        self, connection: Connection, kind: Kind, async_op: bool = False, on_failure: str = "retry",
        timeout: float | None = None, algorithm: str = "auto", op: Op = "sum", root: int = -1,
    ) -> None:  # fmt: skip
        self._connection, self._kind, self.place = connection, kind, connection.place
        self.name = name = kind._name_  # .name is a property that Enum computes each time
        self.op = reduce_op(name, op)
        check_options(name, async_op, on_failure, timeout, algorithm)
        self._async_op, self._on_failure, self._timeout, self._algorithm = async_op, on_failure, timeout, algorithm
        self.world = len(self.place.members)
        if kind in ROOTED:
            self.root = check_rank(name, "root", root, self.world)
            self.here = self.root == self.place.rank

    def pair(self, argument: str, peer: int, tag: int) -> None:
        """It is between this member and *peer*."""
        self._peer = check_other(self.name, argument, peer, self.place.rank, self.world)
        self._tag = check_tag(self.name, tag)

    def source_and_target(self, x: Any, out: Any) -> tuple[Region, Region]:
        """The tensor given and the one that takes the result: the same one without *out*."""
        source = region(x, f"{self.name}(x)")
        if out is None or out is x:
            return source, source
        target = region(out, f"{self.name}(out=...)")
        check_pair(source, target, self.name)
        return source, target

    def result(self, out: Any, source: Region, count: int, shape: tuple[int, ...]) -> tuple[Region | None, bool]:
        """Where *count* elements go, and whether that was made for them (with *shape*), as out is None; at a root."""
        if not self.here:
            return None, False
        if out is None:
            self._connection.check_usable()
            if source.device is not None and not is_torch(source.owner):
                return self._connection.staging.new(shape, source), False
            made = new_result(self._connection.arena, shape, source)
            return made, made.device is None
        target = region(out, f"{self.name}(out=...)")
        check_out(source, target, count, self.name)
        require_writable(target, f"{self.name}(out=...)")
        return target, False

    def start(
        self, source: Region | None, target: Region | None, count: int, *, counts: tuple[int, ...] = (),
        blocks: Sequence[int] = (), coding: Coding = RAW, feed: Feed | None = None, fresh: bool = False,
        kept: bool = False, grace: float = 0.0,
    ) -> Receipt | Work:  # fmt: skip
        """Post it, and wait for it unless it is asynchronous.

        This member gives *source*, and *target* takes the result here: it is *fresh* where it was made for that, and
        *kept* where it has the result already. *blocks*: where the result has a block from each contributor, their
        elements, in rank order. *count*, *counts* and *grace* are as Descriptor has them.
        """
        either = source or target
        assert either is not None
        if grace and self._connection.shards > 1:
            raise ConfigError(
                "islands of several shards wait for each other", who=f"{self.name}(grace=...)", expected="grace=None",
                got=f"{grace:g} s, in islands of {self._connection.shards} shards",
            )  # fmt: skip
        same = target if self._kind is Kind.scatter else either  # what all members have alike
        label = shortened(" ".join(filter(None, (self._connection.label, same.spread if same is not None else ""))))
        descriptor = Descriptor(
            self._kind, either.dtype, self.op, count, counts, self.root, coding.codec, self._algorithm,
            self._on_failure, coding.rounding, coding.seed, grace, label,
            coding.bounded,
        )  # fmt: skip
        placement = Placement(
            self._connection.arena, () if source is None else (source,), () if target is None or kept else (target,),
            fresh=fresh, feed=feed, unwanted=either.nbytes if kept else 0, staging=self._connection.staging,
            codec=coding.codec if self._kind is Kind.all_reduce else Codec.none,
            nearest=coding.rounding == "nearest", late=grace > 0,
            share=self._connection.share if self._kind in _IN_RINGS else (0, 1),
        )  # fmt: skip
        work = Work(
            self._connection, descriptor, self.place.epoch, placement, target,
            blocks=dict(zip(self.place.members, blocks, strict=True)) if blocks else None,
            peer=self._peer, tag=self._tag, ahead=self._connection.ahead and self._kind is Kind.recv,
        )  # fmt: skip
        return self._run(work)

    def bare(self) -> Receipt | Work:
        """Post a call that moves no tensors, and wait for it as start() does."""
        return self._run(Work(self._connection, Descriptor(self._kind), self.place.epoch))

    def _run(self, work: Work) -> Receipt | Work:
        if self._async_op:
            self._connection.post(work)
            return work
        deadline = deadline_after(self._timeout)
        self._connection.post(work, deadline)
        return work.wait(seconds_left(deadline))
