"""ElasticDataParallel: gradients averaged over whoever takes part, while backward still computes.

A step of n buckets is n + 1 operations, in the same order on all members, whatever their graphs look like: the buckets,
then the marks (this member's weight, whether its backward had to begin again, which parameters it used). All members
see the same receipts. Where a bucket was reduced by others than the marks, because somebody was lost in between, that
bucket and the marks are reduced again, from gradients that are still there; so in the end all buckets of a step are the
mean over the very same members. Until then nothing of the parameters' gradients changes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from wancoll.client.checks import check_seconds
from wancoll.client.codecs import FLOATS, ErrorFeedback, coding
from wancoll.client.communicator import CodecName, Communicator, Op
from wancoll.client.connection import deadline_after, seconds_left
from wancoll.client.many import ManyReceipt, buckets
from wancoll.client.memory.tensors import check_plain, local_part, made_like, most_of, spread_of
from wancoll.client.work import Work
from wancoll.collective import Codec, DType, Receipt
from wancoll.errors import ArenaFull, ConfigError, TimeoutError, WancollError
from wancoll.limits import MIB
from wancoll.schedule.build import takes
from wancoll.torch.training.sampler import ElasticSampler

BUCKET_BYTES = 8 * MIB

_WHO = "ElasticDataParallel(module)"
_INTERRUPTED = "call backward() again, or skip_step() to take part without a gradient"
_MARKS = -1  # beside the buckets' numbers
_WEIGHT, _BEGUN_AGAIN, _USED = 0, 1, 2  # of the marks: two numbers, then one for each parameter


@dataclass(frozen=True, slots=True)
class StepReceipt:
    """What a backward came to; the same on all members, but for bytes_sent and seconds.

    Attributes:
        contributors: names of the members whose gradients are in the mean, of all buckets, in rank order.
        weight: sum of their weights.
        epoch: in which the last operation was committed.
        rounds: 1, and one more for each time that buckets were reduced again, because somebody was lost in between.
        bytes_sent: payload that this member sent.
        seconds: that backward waited at its end.
    """

    contributors: tuple[str, ...]
    weight: float
    epoch: int
    rounds: int
    bytes_sent: int
    seconds: float

    @property
    def world_size(self) -> int:
        """How many took part."""
        return len(self.contributors)


class ElasticDataParallel(nn.Module):
    """A module whose gradients are averaged over the members that take part, in buckets, while backward computes.

    When backward returns, each parameter's grad is the same bytes on all members: the mean over the very same members,
    which *receipt* names, for all parameters. A member that is lost in the middle of backward is in none of them or in
    all. What is averaged is what grad holds at the end of backward: what no_sync() left there is part of it. A
    parameter that nobody with a weight used has no grad; where somebody did, the others count as zero.

    All members call backward equally often. Where an exception ends it on one member, the others wait: the next
    backward there is the same step's, or skip_step() takes part in it without a gradient. After a WancollError the step
    has not happened, here or on any member that is left: grad holds what this member gave; zero it, and compute again.
    While a step is under way, as after a TimeoutError, there are no gradients.

    state_dict() and load_state_dict() are the module's own. A parameter has one wrapper: a new one for the same module,
    or for one that it is a part of, ends the one before. Parameters that are frozen when it is wrapped are left out.

    Args:
        module: same parameters, in the same order, on all members. Of DTensors (FSDP2, tensor parallelism) it averages
            this rank's part.
        comm: a communicator.
        sampler: an ElasticSampler: its weight counts, and it is told of each step.
        codec: how gradients of floating types travel; see Communicator.all_reduce.
        feedback: keeps what the codec loses for the next step; None: one of its own. False: it is lost.
        bucket_bytes: parameters up to this size travel together, those of one dtype, the last ones first.
        timeout: seconds that backward waits for the others at its end, then TimeoutError; wait() goes on. None: as long
            as it takes.

    Attributes:
        weight: of this member's gradients in the mean; set it before backward where batches differ in size.
        receipt: of the last backward; None before it.

    Raises:
        ConfigError: the module has nothing to train, parameters of a dtype that cannot be averaged, or some of those
            of another wrapper, but not all.
        ArenaFull: no memory for two buckets for each one: what is given, and the mean.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, *, sampler: ElasticSampler | None = None,
        codec: CodecName = "none", feedback: ErrorFeedback | bool | None = None, bucket_bytes: int = BUCKET_BYTES,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_seconds("ElasticDataParallel", "timeout", timeout)
        for name, value, kind in (("module", module, nn.Module), ("comm", comm, Communicator)):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{name} cannot be used", who="ElasticDataParallel(module, comm)", expected=f"a {kind.__name__}",
                    got=type(value).__name__,
                )  # fmt: skip
        coding("ElasticDataParallel", DType.float32, codec, None, "nearest", 0)
        self.module, self.comm, self.sampler = module, comm, sampler
        self.weight = 1.0
        self.receipt: StepReceipt | None = None
        self._codec: CodecName = codec
        self._feedback = _feedback(codec, feedback)
        self._timeout = timeout
        parameters = [each for each in module.parameters() if each.requires_grad]
        self._buckets = _layout(comm, parameters, bucket_bytes, codec)
        before = _wrappers(parameters)
        self._marks = _flat(comm, _USED + len(parameters), torch.float32)
        self._seen = _flat(comm, _USED + len(parameters), torch.float32)  # the members' together
        self._syncing = True
        self._task = -1  # number of the backward that is under way
        self._step: _Step | None = None
        self._hooks: list[Any] = []
        for each in before:
            each.close()
        for bucket in self._buckets:
            for i, parameter in enumerate(bucket.parameters):
                self._hooks.append(_register(parameter, _Hook(weakref.ref(self), bucket, i)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside it only adds to grad; the next one outside averages all that has been added."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def skip_step(self) -> StepReceipt:
        """Take part in a step with nothing, in place of a backward; grad becomes the others' mean."""
        self._begin(0.0).computed = True
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        return self.wait(self._timeout)

    def wait(self, timeout: float | None = None) -> StepReceipt:
        """Go on waiting for a step that a TimeoutError interrupted.

        Raises:
            ConfigError: there is none.
            TimeoutError: again; nothing is lost.
            WancollError: the step has not happened.
        """
        check_seconds("wait", "timeout", timeout)
        step = self._step
        if step is None:
            raise ConfigError("no step is under way", who="ElasticDataParallel.wait", hint="call backward first")
        if not step.computed:
            raise ConfigError(
                "backward was interrupted before it had all gradients", who="ElasticDataParallel.wait",
                hint=_INTERRUPTED,
            )  # fmt: skip
        began = time.monotonic()
        try:
            self._finish(step, deadline_after(timeout))
        except TimeoutError as late:
            late.work = self
            raise
        except WancollError:
            self._end(step, happened=False)
            raise
        finally:
            step.seconds += time.monotonic() - began
        self.receipt = receipt = StepReceipt(
            step.last.contributors, float(self._seen[_WEIGHT]), step.last.epoch, step.rounds, step.bytes_sent,
            step.seconds,
        )  # fmt: skip
        self._end(step, happened=True)
        if self.sampler is not None:
            self.sampler.commit(receipt)
        return receipt

    def close(self) -> None:
        """Average no more; the module is as any other then. Safe to call again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The module's."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    # ---- a backward ----------------------------------------------------------------------------------

    def _given(self) -> float:
        """The weight of what this member computes on."""
        weight = self.weight if self.sampler is None else self.weight * self.sampler.weight
        if not 0 <= weight < math.inf:
            raise ConfigError(
                "the weight cannot be used", who="ElasticDataParallel.weight", expected="a finite number, 0 or more",
                got=repr(self.weight),
            )  # fmt: skip
        return weight

    def _begin(self, weight: float) -> _Step:
        """A step, or the one that an exception in backward interrupted."""
        step = self._step
        if step is None:
            step = self._step = _Step(self._buckets, weight)
        elif step.marked:
            raise ConfigError(
                "the step before it is still pending", who="ElasticDataParallel: backward",
                hint="call wait() until it returns",
            )  # fmt: skip
        else:
            step.begun_again, step.computed, step.weight = True, False, weight
        for bucket in self._buckets:
            bucket.taken = [False] * len(bucket.parameters)
        return step

    def _ready(self, bucket: _Bucket, i: int) -> None:
        """A parameter's gradient is there."""
        if not self._syncing:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(self._given())
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
        step = self._step
        assert step is not None
        if bucket.number < step.posted:
            return  # an exception interrupted the step, and pending operations still read the bucket
        bucket.take(i, step.weight)
        while step.posted < len(self._buckets) and all(self._buckets[step.posted].taken):
            self._post(step, self._buckets[step.posted])

    def _end_of_backward(self) -> None:
        self._task = -1
        if self._step is None:
            raise ConfigError(
                "a step has ended while its backward goes on", who="ElasticDataParallel: backward",
                hint="a backward within backward: give torch.utils.checkpoint use_reentrant=False",
            )  # fmt: skip
        self._step.computed = True
        self.wait(self._timeout)

    def _post(self, step: _Step, bucket: _Bucket) -> None:
        name = ""
        if self._feedback is not None and bucket.encoded:
            name = str(bucket.number)
            if step.rounds == 1:
                step.residuals[name] = self._feedback.current(name)
            else:
                self._feedback.restore(name, step.residuals[name])
        while bucket.number not in step.works:
            try:
                step.works[bucket.number] = self.comm.labelled(bucket.spread).all_reduce(
                    bucket.local, bucket.mean, op="avg", codec=self._codec if bucket.encoded else "none",
                    feedback=self._feedback if name else None, name=name, async_op=True,
                )  # fmt: skip
            except ArenaFull:
                flying = next((work for work in step.works.values() if not work.finished), None)
                if flying is None:
                    raise
                try:
                    flying.wait(self._timeout)
                except TimeoutError as late:
                    late.hint = _INTERRUPTED
                    raise
                except WancollError:
                    pass  # wait() meets it again
        step.posted = max(step.posted, bucket.number + 1)

    def _finish(self, step: _Step, deadline: float | None) -> None:
        """Bring the step to where all buckets are the mean over the same members."""
        while True:
            if not step.marked:
                self._post_rest(step)
            failed: WancollError | None = None
            for number, work in step.works.items():
                try:
                    receipt = work.wait(seconds_left(deadline))
                except TimeoutError:
                    raise
                except WancollError as bad:
                    failed = failed or bad
                else:
                    step.committed(number, receipt)
            if failed is not None:
                raise failed
            again = range(len(self._buckets)) if self._seen[_BEGUN_AGAIN] else step.differing()
            if not again:
                return
            step.again(again)

    def _post_rest(self, step: _Step) -> None:
        """What is left of this round: buckets, with zeros where there is no gradient, then the marks."""
        for number in step.todo:
            if number not in step.works:
                bucket = self._buckets[number]
                for i, taken in enumerate(bucket.taken):
                    if not taken:
                        bucket.take(i, step.weight)
                self._post(step, bucket)
        self._marks[_WEIGHT] = step.weight
        self._marks[_BEGUN_AGAIN] = float(step.begun_again)
        step.begun_again = False
        used = itertools.chain.from_iterable(bucket.used for bucket in self._buckets)
        self._marks[_USED:] = torch.tensor([float(each) for each in used])
        step.works[_MARKS] = self.comm.all_reduce(self._marks, self._seen, op="sum", async_op=True)
        step.marked = True

    def _end(self, step: _Step, *, happened: bool) -> None:
        self._step = None
        if not happened:
            if self._feedback is not None:
                for name, residual in step.residuals.items():
                    self._feedback.restore(name, residual)
            for bucket in self._buckets:
                bucket.give_back(step.weight)
            return
        total = float(self._seen[_WEIGHT])
        world = len(step.last.contributors)
        used = iter(self._seen[_USED:].tolist())
        for bucket in self._buckets:
            if total != world and total > 0:
                bucket.mean.mul_(world / total)
            for parameter, mean in zip(bucket.parameters, bucket.means, strict=True):
                # Alike: a member without weight may have one of its own.
                parameter.grad = made_like(parameter, mean) if next(used) else None


@dataclass(slots=True)
class _Step:
    """A backward's operations."""

    buckets: Sequence[_Bucket]  # of the wrapper
    weight: float  # of this member
    begun_again: bool = False  # an exception interrupted an earlier backward of it
    computed: bool = False  # its backward has come to its end, so that what has no gradient now has none
    todo: list[int] = field(init=False)  # numbers of the buckets to reduce in this round
    posted: int = 0  # buckets below this number are
    works: dict[int, Work] = field(default_factory=dict)  # of this round, by bucket
    marked: bool = False  # the marks are posted, so that all of this round is
    rounds: int = 1  # so far, this one too
    residuals: dict[str, Any] = field(default_factory=dict)  # what error feedback held before
    receipts: dict[int, Receipt] = field(default_factory=dict)  # of the buckets, from the round that reduced them last
    bytes_sent: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.todo = list(range(len(self.buckets)))

    @property
    def last(self) -> Receipt:
        """The receipt of the marks."""
        return self.receipts[_MARKS]

    def committed(self, number: int, receipt: Receipt) -> None:
        """Doing it again, after a timeout, is harmless."""
        before = self.receipts.get(number)
        if before is None or before.op_id != receipt.op_id:
            self.receipts[number] = receipt
            self.bytes_sent += receipt.bytes_sent

    def differing(self) -> list[int]:
        """Buckets that other members reduced than the marks; within a step members only get fewer."""
        right = self.last.contributors
        return [number for number in range(len(self.buckets)) if self.receipts[number].contributors != right]

    def again(self, numbers: Iterable[int]) -> None:
        """The next round."""
        self.todo, self.works, self.marked = list(numbers), {}, False
        self.rounds += 1


class _Bucket:
    """Parameters of one dtype and device, whose gradients travel together. All members post buckets by their number."""

    def __init__(self, comm: Communicator, number: int, parameters: Sequence[nn.Parameter], codec: CodecName) -> None:
        self.number, self.parameters = number, tuple(parameters)
        first, locals_ = self.parameters[0], [local_part(each.detach()) for each in self.parameters]
        sizes = [each.numel() for each in locals_]
        self.spread = ", ".join(filter(None, map(spread_of, self.parameters)))
        self.local = _flat(comm, sum(sizes), first.dtype, first.device)  # what this member gives
        self.mean = _flat(comm, sum(sizes), first.dtype, first.device)  # what comes back
        self._locals, self.means = (  # these, as views for the parameters
            [part.view(each.shape) for part, each in zip(torch.split(flat, sizes), locals_, strict=True)]
            for flat in (self.local, self.mean)
        )
        self.taken = [False] * len(sizes)  # which gradients are in *local*, in this backward
        self.used = [False] * len(sizes)  # which parameters had a gradient
        self.encoded = codec != "none" and takes(Codec.named(codec) or Codec.none, _dtype(first))

    @torch.no_grad()
    def take(self, i: int, weight: float) -> None:
        """Bring a parameter's gradient to *local*, times *weight*; none is zero."""
        parameter, mine = self.parameters[i], self._locals[i]
        grad = parameter.grad
        self.taken[i] = True
        self.used[i] = grad is not None and weight != 0
        if grad is None or weight == 0:
            mine.zero_()  # zero times what is not finite would not be zero
            return
        if spread_of(grad) != spread_of(parameter):  # a sum that is pending, under tensor parallelism
            grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        grad = local_part(grad)
        if grad.layout is not torch.strided:
            raise ConfigError(
                "a gradient has no plain layout", who=f"ElasticDataParallel: a parameter of shape {tuple(grad.shape)}",
                expected="torch.strided", got=str(grad.layout), hint="make the embedding with sparse=False",
            )  # fmt: skip
        if weight != 1:
            torch.mul(grad, weight, out=mine)
        elif grad.data_ptr() != mine.data_ptr():
            mine.copy_(grad)
        parameter.grad = None  # what is under way reads *local*: nobody else may write there

    @torch.no_grad()
    def give_back(self, weight: float) -> None:
        """The step has not happened: grad holds what this member gave."""
        for parameter, mine, taken, used in zip(self.parameters, self._locals, self.taken, self.used, strict=True):
            if taken and used and parameter.grad is None:
                parameter.grad = made_like(parameter, mine if weight == 1 else mine / weight)


def all_reduce_gradients(
    comm: Communicator, parameters: nn.Module | Iterable[nn.Parameter], *, op: Op = "avg", **options: Any
) -> ManyReceipt:
    """Reduce the gradients of a module, or of parameters, in place: comm.all_reduce_many of them, by its options.

    A parameter that is trained and has no gradient counts as zero, and gets one.

    Raises:
        ConfigError, TimeoutError, WancollError: as Communicator.all_reduce_many.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    gradients = []
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            gradients.append(parameter.grad)
    receipt: ManyReceipt = comm.all_reduce_many(gradients, op=op, **options)
    return receipt


def _layout(
    comm: Communicator, parameters: Sequence[nn.Parameter], bucket_bytes: int, codec: CodecName
) -> list[_Bucket]:
    """Buckets in the order in which backward has filled them: the last parameters first."""
    if not parameters:
        raise ConfigError("the module has no parameter to train", who=_WHO, expected="one that requires grad")
    order = list(reversed(parameters))
    found: list[list[nn.Parameter]] = []
    for device in dict.fromkeys(each.device for each in order):
        there = [each for each in order if each.device == device]
        sizes = [(_dtype(each), most_of(each) * each.element_size()) for each in there]
        packed = sorted(buckets(sizes, bucket_bytes, "ElasticDataParallel"), key=lambda bucket: bucket[-1])
        found += [[there[i] for i in bucket] for bucket in packed]
    return [_Bucket(comm, number, each, codec) for number, each in enumerate(found)]


def _dtype(parameter: nn.Parameter) -> DType:
    check_plain(local_part(parameter), f"{_WHO}: a parameter")
    found = DType.__members__.get(str(parameter.dtype).removeprefix("torch."))
    if found is None or found not in FLOATS:
        raise ConfigError(
            "a parameter's dtype cannot be averaged", who=_WHO, expected=", ".join(each.name for each in FLOATS),
            got=str(parameter.dtype),
        )  # fmt: skip
    return found


def _flat(comm: Communicator, count: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """A flat tensor of zeros; in main memory it lies in the arena."""
    if device is not None and device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(comm.zeros(count * size, np.uint8)).view(dtype)


def _feedback(codec: CodecName, feedback: ErrorFeedback | bool | None) -> ErrorFeedback | None:
    if codec == "none" or feedback is False:
        return None
    return feedback if isinstance(feedback, ErrorFeedback) else ErrorFeedback()


@dataclass(frozen=True, slots=True)
class _Hook:
    """What a parameter calls when its gradient is there; the parameter does not hold the wrapper."""

    wrapper: weakref.ref[ElasticDataParallel]
    bucket: _Bucket
    i: int

    def __call__(self, _: torch.Tensor) -> None:
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper._ready(self.bucket, self.i)


def _register(parameter: nn.Parameter, hook: Any) -> Any:
    """A handle: torch gives it no types."""
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _wrappers(parameters: Sequence[nn.Parameter]) -> list[ElasticDataParallel]:
    """Those that average some of *parameters* now. They must not have others, whose gradients nobody would average."""
    found: dict[int, ElasticDataParallel] = {}
    for parameter in parameters:
        handle = _register(parameter, id)  # the way to the hooks that are there
        for hook in handle.hooks_dict_ref().values():
            if isinstance(hook, _Hook) and (wrapper := hook.wrapper()) is not None:
                found[id(wrapper)] = wrapper
        handle.remove()
    mine = set(map(id, parameters))
    for wrapper in found.values():
        theirs = [each for bucket in wrapper._buckets for each in bucket.parameters]
        more = sum(id(each) not in mine for each in theirs)
        if more:
            raise ConfigError(
                "another wrapper averages some of these parameters", who=_WHO,
                expected="none, or one whose parameters are all here",
                got=f"one of {type(wrapper.module).__name__} with {more} more", hint="close() that one first",
            )  # fmt: skip
    return list(found.values())
