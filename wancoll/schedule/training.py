"""What a step of training takes on several members: memory, bytes and time of each way to spread it. PURE.

On paper, from a few numbers, to choose what to try first; nothing is measured. All ways compute the same batch, so
their times compare. What a member sends is counted in full: nothing overlaps with computing, so times are from above.

Sources: 16 bytes a parameter with Adam in mixed precision, and the stages: Rajbhandari et al., 2020, "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models". Activations of a transformer's layer, tensor and sequence
parallel: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models"; attention's square
matrix is not kept. Pipelines: Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".
DiLoCo: Douillard et al., 2023. 6 operations for each parameter and token, forward and backward: Kaplan et al., 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wancoll.schedule.cost import LinkCost, lower_bound, seconds

SLOW = 2.0  # times the fastest step: a way that takes longer is tried after those that do not
OUTER_BYTES = 8  # of a parameter that DiLoCo keeps besides: the weights of the last exchange and Nesterov's momentum


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a parameter: the weight, its gradient, and what the optimizer keeps."""

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of a parameter that nobody shares."""
        return self.weight + self.gradient + self.optimizer


PRECISIONS = {
    "mixed": Precision(2, 2, 12),  # the optimizer has float32: weight and two moments
    "half-moments": Precision(2, 2, 8),  # moments of two bytes each
    "single": Precision(4, 4, 8),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. Raises ValueError: one of them is below 1."""

    parameters: int  # of the whole model
    layers: int  # transformer layers, which a pipeline's stages share evenly
    hidden: int  # width of a layer
    sequence: int  # tokens of a sample
    micro_batches: int  # of one step, over all members
    micro_batch: int  # samples of each
    inner_steps: int  # H, steps between two exchanges of DiLoCo
    precision: Precision  # bytes of a parameter
    flops: float  # operations that a device gets done in a second

    def __post_init__(self) -> None:
        counts = (self.parameters, self.layers, self.hidden, self.sequence)
        if min(*counts, self.micro_batches, self.micro_batch, self.inner_steps, self.flops) < 1:
            raise ValueError(f"all of a job's numbers are 1 or above, got {self}")

    @property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return self.parameters * self.precision.gradient

    @property
    def boundary(self) -> int:
        """Bytes of a micro-batch's activations between two layers."""
        return self.sequence * self.micro_batch * self.hidden * self.precision.weight

    def layer(self, tensor: int = 1, *, sequence_parallel: bool = False) -> float:
        """Bytes that a layer keeps of a micro-batch for backward: 34 for each token and unit in half precision.

        Of these 24 lie inside attention and MLP, which *tensor* members share; 10 lie in norms and dropouts, which
        each has whole unless the sequence is shared there, too.
        """
        inside, outside = 12 / tensor, 5 / (tensor if sequence_parallel else 1)
        return self.boundary * (inside + outside)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one way takes of a member."""

    name: str  # of the way
    split: tuple[int, int, int]  # members that share the data, the layers and each layer; their product is the world
    state: float  # bytes of weights, gradients and optimizer
    activations: float  # bytes, at most
    sent: float  # bytes in a step, on the busiest member's uplink
    computing: float  # seconds of a step
    idle: float  # seconds of a step in the pipeline's bubble
    communicating: float  # seconds of a step

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.state + self.activations

    @property
    def step(self) -> float:
        """Seconds."""
        return self.computing + self.idle + self.communicating

    @property
    def share(self) -> float:
        """Communication's part of a step, 0 to 1."""
        return self.communicating / self.step

    @property
    def bubble(self) -> float:
        """The bubble's part of computing and waiting, (p-1)/(m+p-1)."""
        return self.idle / (self.computing + self.idle)


def bubble(stages: int, micro_batches: int) -> float:
    """Part of the time in which a stage of GPipe or 1F1B has nothing to do: (p-1)/(m+p-1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def all_reduce_twice(nbytes: float, world_size: int, cost: LinkCost) -> float:
    """Seconds of a ring's all-reduce by the rule of thumb that a member sends 2 S, whatever the world."""
    return 2 * (world_size - 1) * cost.alpha + 2 * nbytes * cost.beta if world_size > 1 else 0.0


def estimates(
    job: Job, members: int, link: LinkCost, *, split: tuple[int, int, int] | None = None,
    inside: LinkCost | None = None, machine: int = 1, memory: float = math.inf,
) -> list[Estimate]:  # fmt: skip
    """Each way, in the order of the textbooks: data parallel, ZeRO, tensor parallel, pipeline, all three, DiLoCo.

    Args:
        job: what is trained.
        members: devices, each with a link of its own.
        link: what a message costs.
        split: of 3D, (data, pipeline, tensor); without it the fastest, if possible one that fits, that uses as many of
            the three as it can.
        inside: what a message costs between devices of one machine; None: as *link*.
        machine: devices of a machine. Those that share a layer lie next to each other, then those that share the data.
        memory: bytes of a device.

    Raises:
        ValueError: no members, or a *split* that has not their number or more stages than layers.
    """
    if members < 1:
        raise ValueError(f"a world has at least one member, got {members}")
    if split is not None and (min(split) < 1 or math.prod(split) != members or split[1] > job.layers):
        raise ValueError(
            f"data x pipeline x tensor of {members} members multiply to them, with at most {job.layers} stages; "
            f"got {'x'.join(map(str, split))}"
        )

    def between(world: int, stride: int = 1) -> LinkCost:
        return inside if inside and (members <= machine or machine % (world * stride) == 0) else link

    found = [*_replicated(job, members, between(members))]
    found.append(_spread(job, "TP", (1, 1, members), between))
    found.append(_spread(job, "TP+SP", (1, 1, members), between, sequence_parallel=True))
    if members <= job.layers:
        found.append(_spread(job, "PP", (1, members, 1), between))
    if splits := [split] if split is not None else _splits(members, job.layers):
        every = [_spread(job, "3D", each, between, sequence_parallel=True) for each in splits]
        found.append(min(every, key=lambda one: (one.memory > memory, one.step)))
    found.append(_diloco(job, members, between(members)))
    return found


def order(found: Sequence[Estimate], memory: float) -> list[Estimate]:
    """Those that fit into *memory* bytes, in the order in which one would try them.

    The order of *found*, but what is SLOW, beside the fastest of those that are left, waits for the others.
    """
    left = [one for one in found if one.memory <= memory]
    tried = []
    while left:
        limit = min(one.step for one in left) * SLOW
        tried.append(next(one for one in left if one.step <= limit))
        left.remove(tried[-1])
    return tried


# ---- the ways ------------------------------------------------------------------------------------------


def _exchange(nbytes: float, world_size: int, link: LinkCost) -> tuple[float, float]:
    """(bytes that a member sends, seconds) of one reduce-scatter or all-gather of *nbytes* on a ring."""
    kind = "all_gather"
    return lower_bound(kind, nbytes, world_size), seconds("ring", nbytes, world_size, link, kind=kind)


def _computing(job: Job, data: int, sharers: int) -> float:
    tokens = math.ceil(job.micro_batches / data) * job.micro_batch * job.sequence
    return 6 * job.parameters * tokens / sharers / job.flops


def _replicated(job: Job, n: int, link: LinkCost) -> Iterator[Estimate]:
    """DP and ZeRO: every member computes all layers on its part of the data."""
    p, each = job.precision, job.parameters
    weights, gradients = each * p.weight, each * p.gradient
    own = math.ceil(job.micro_batches / n)
    activations = job.layers * job.layer()
    # Bytes of a parameter, and how often gradients are scattered and weights gathered. DP's all-reduce is one of each.
    # What keeps only its shard of the gradients hands them over after each micro-batch; what keeps only its shard of
    # the weights gathers them for each forward and each backward.
    ways = (
        ("DP", p.total, 1, gradients, 1),
        ("ZeRO-1", p.weight + p.gradient + p.optimizer / n, 1, weights, 1),
        ("ZeRO-2", p.weight + (p.gradient + p.optimizer) / n, own, weights, 1),
        ("ZeRO-3", p.total / n, own, weights, 2 * own),
    )
    for name, held, scattered, spread, gathered in ways:
        down, up = _exchange(gradients, n, link), _exchange(spread, n, link)
        sent, time = (scattered * a + gathered * b for a, b in zip(down, up, strict=True))
        yield Estimate(name, (n, 1, 1), each * held, activations, sent, _computing(job, n, 1), 0.0, time)


def _spread(
    job: Job, name: str, split: tuple[int, int, int], between: Callable[..., LinkCost], *,
    sequence_parallel: bool = False,
) -> Estimate:  # fmt: skip
    """The model's parts on different members: its layers in stages, each layer's matrices in columns and rows."""
    data, stages, tensor = split
    own = math.ceil(job.micro_batches / data)
    layers = math.ceil(job.layers / stages)
    held = job.parameters / (stages * tensor)
    # 1F1B: a stage has at most as many micro-batches under way as stages follow it, and itself.
    activations = layers * job.layer(tensor, sequence_parallel=sequence_parallel) * min(own, stages)
    sent = time = 0.0
    # Each layer sums up twice forward and twice backward. An all-reduce is a reduce-scatter and an all-gather, which
    # stand apart with sequence parallel: the same bytes.
    shared = (8 * layers * own, job.boundary, tensor, 1), (2, held * job.precision.gradient, data, tensor)
    for count, nbytes, world, stride in shared:
        a, b = _exchange(nbytes, world, between(world, stride))
        sent, time = sent + count * a, time + count * b
    if stages > 1:  # the outer stages have one neighbour; of the inner ones activations go on and gradients back
        count, nbytes = (2 if stages > 2 else 1) * own, job.boundary / (tensor if sequence_parallel else 1)
        link = between(stages, data * tensor)
        sent, time = sent + count * nbytes, time + count * (link.alpha + nbytes * link.beta)
    computing = _computing(job, data, stages * tensor)
    idle = computing * (stages - 1) / own
    return Estimate(name, split, held * job.precision.total, activations, sent, computing, idle, time)


def _diloco(job: Job, n: int, link: LinkCost) -> Estimate:
    """Every member trains alone for H steps; then the ways that they went are averaged."""
    sent, time = (2 * each / job.inner_steps for each in _exchange(job.gradients, n, link))
    state = job.parameters * (job.precision.total + OUTER_BYTES)
    return Estimate("DiLoCo", (n, 1, 1), state, job.layers * job.layer(), sent, _computing(job, n, 1), 0.0, time)


def _splits(members: int, layers: int) -> list[tuple[int, int, int]]:
    """(data, pipeline, tensor) that multiply to *members*, of those with most numbers above 1; none below two."""
    divisors = [n for n in range(1, members + 1) if members % n == 0]
    every = [(members // n // t, n, t) for n in divisors if n <= layers for t in divisors if members // n % t == 0]
    most = max(sum(each > 1 for each in split) for split in every)
    return [split for split in every if sum(each > 1 for each in split) == most] if most > 1 else []
