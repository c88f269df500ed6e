"""`wancoll model training`: options to a job, its estimates to a table or JSON."""

from __future__ import annotations

import json
import math
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.cli.columns import comment, print_columns
from wancoll.cli.model.question import Alpha, Bandwidth, named_columns
from wancoll.errors import ConfigError
from wancoll.limits import counted, format_size
from wancoll.options import AsJson, between
from wancoll.schedule.cost import LinkCost, lower_bound, seconds
from wancoll.schedule.training import PRECISIONS, Estimate, Job, all_reduce_twice, estimates, order
from wancoll.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_count,
    parse_duration,
    parse_rate,
    parse_size,
)

MOST_MEMBERS = 1 << 16
COLUMNS = {
    "split": "members that share data x layers x each layer",
    "state": "weights, gradients and optimizer",
    "activations": "what backward needs, at most",
    "memory": "both",
    "sent": "bytes of a step on a member's uplink",
    "comm": "time of these, nothing overlapped",
    "bubble": "part of computing that a stage waits",
    "step": "computing, waiting, communicating",
    "share": "communication's part of a step",
    "try": "whether it fits, and which to try first",
}

training = App(
    name="training",
    config=Env("WANCOLL_MODEL_TRAINING_", command=False),
    help_epilogue=(
        "All rows compute the same batch. To try: what fits, in the order of the rows; ways whose step takes more than "
        "twice the fastest come last. DiLoCo changes what is computed: H steps alone, then an average. Sources: "
        "wancoll/schedule/training.py. Memory: GiB is 2^30 bytes. What is sent: GB is 10^9 bytes."
    ),
)
_Count = Annotated[int, Parameter(validator=between(1, 1 << 30))]


@training.default
def run(
    *,
    parameters: str = "7B",
    layers: _Count = 32,
    hidden: _Count = 4096,
    sequence: _Count = 2048,
    micro_batches: _Count = 32,
    micro_batch: _Count = 1,
    inner_steps: Annotated[_Count, Parameter(name=["--inner-steps", "-H"])] = 100,
    members: Annotated[int, Parameter(validator=between(1, MOST_MEMBERS))] = 8,
    device_memory: str = "80GiB",
    alpha: Alpha = "5us",
    bandwidth: Bandwidth = "100GB/s",
    inside: str = "",
    machine: Annotated[int, Parameter(validator=between(1, MOST_MEMBERS))] = 8,
    flops: str = "150T",
    precision: Annotated[
        Literal["mixed", "half-moments", "single"],
        Parameter(
            help="Bytes of a parameter: weight, gradient, optimizer: "
            + "; ".join(f"{name} {p.weight}+{p.gradient}+{p.optimizer}" for name, p in PRECISIONS.items())
            + "."
        ),
    ] = "mixed",
    split: str = "",
    columns: Annotated[
        str,
        Parameter(
            help="Columns, with commas between: "
            + ", ".join(f"{name} ({meaning})" for name, meaning in COLUMNS.items())
            + "."
        ),
    ] = ",".join(COLUMNS),
    as_json: AsJson = False,
) -> int:
    """Print what a step of training takes with DP, ZeRO, tensor and pipeline parallel, 3D and DiLoCo.

    Args:
        parameters: Of the model: a number, with k, M, B or T.
        layers: Transformer layers.
        hidden: Width of a layer.
        sequence: Tokens of a sample.
        micro_batches: Micro-batches of one step, over all members.
        micro_batch: Samples of a micro-batch.
        inner_steps: H: steps between two exchanges of DiLoCo.
        members: Devices.
        device_memory: Of a device, bytes (K, M, G; KB, MB, GB).
        inside: As --bandwidth, between devices of one machine, 5 us a message. Empty: as the others.
        machine: Devices of one, for --inside.
        flops: Operations that a device gets done in a second: a number, with k, M, G or T.
        split: Of the row 3D: data x pipeline x tensor, as in 2x2x2. Empty: the fastest.
    """
    chosen = named_columns(columns, COLUMNS)
    if not chosen:
        raise ConfigError("no column", who="--columns", expected=f"some of {', '.join(COLUMNS)}", got=repr(columns))
    memory = parse_size(device_memory, "--device-memory")
    rate = parse_rate(bandwidth, "--bandwidth")
    link = LinkCost(parse_duration(alpha, "--alpha"), 1 / rate)
    job = Job(
        parse_count(parameters, "--parameters"),
        layers,
        hidden,
        sequence,
        micro_batches,
        micro_batch,
        inner_steps,
        PRECISIONS[precision],
        parse_count(flops, "--flops"),
    )
    near = LinkCost(5e-6, 1 / parse_rate(inside, "--inside")) if inside else None
    found = estimates(
        job, members, link, split=_split(split, members, layers), inside=near, machine=machine, memory=memory
    )
    places = {one.name: place for place, one in enumerate(order(found, memory), start=1)}
    gradients = {
        "bytes": job.gradients,
        "bound_bytes": lower_bound("all_reduce", job.gradients, members),
        "ring_seconds": seconds("ring", job.gradients, members, link),
        "2S_seconds": all_reduce_twice(job.gradients, members, link),
    }
    if as_json:
        rows = [_numbers(one) | {"fits": one.name in places, "try": places.get(one.name)} for one in found]
        print(json.dumps({"members": members, "gradients": gradients, "training": rows}, indent=2))
        return 0
    links = f"alpha {format_duration(link.alpha)}, bandwidth {format_rate(rate)}"
    links += f"; {format_rate(1 / near.beta)} inside a machine of {machine}" if near else ""
    comment(f"{parameters} parameters of {job.precision.total} bytes, {counted(members, 'member')} of "
            f"{format_size(memory, 3)}, {links}")  # fmt: skip
    bound = format_bytes(gradients["bound_bytes"])
    comment(f"all_reduce of the gradients, {format_bytes(job.gradients)}: {bound} each, "
            f"{format_duration(gradients['ring_seconds'], 3)}; {format_duration(gradients['2S_seconds'], 3)} with the "
            "approximation 2 S")  # fmt: skip
    print()
    cells = [_cells(one, places.get(one.name)) for one in found]
    left = [f"{name:<6}" for name in ("", *(one.name for one in found))]
    print_columns(left, [[name, *(each[name] for each in cells)] for name in chosen])
    print()
    if (own := -(-micro_batches // members)) > 1 < members:
        comment(f"ZeRO-2 and ZeRO-3 reduce gradients after each of {own} micro-batches: fewer larger ones send less")
    if not places:
        comment(f"none fits: {_advice(min(found, key=lambda one: one.state), job, memory)}")
    return 0


def _advice(least: Estimate, job: Job, memory: int) -> str:
    if least.state <= memory:
        return "more members, or fewer or smaller micro-batches"
    short = counted(math.ceil(job.parameters * job.precision.total / memory) - 1, "member")
    state = f"the state alone takes {format_size(least.state, 3)} of a member with {least.name}"
    return f"{state}; it needs more than {short}, more memory in each, or fewer bytes of a parameter"


def _split(text: str, members: int, layers: int) -> tuple[int, int, int] | None:
    if not text:
        return None
    parts = text.split("x")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 10]
    data, pipeline, tensor = numbers if len(numbers) == len(parts) == 3 else (0, 0, 0)
    if data * pipeline * tensor != members or pipeline > layers:
        raise ConfigError(
            "not a split of the members",
            who="--split",
            expected=f"data x pipeline x tensor that multiply to {members}, with at most {layers} stages, as in 2x2x2",
            got=repr(text),
        )
    return data, pipeline, tensor


def _numbers(one: Estimate) -> dict[str, object]:
    """Bytes and seconds."""
    names = "name", "split", "state", "activations", "memory", "sent", "computing", "bubble", "step", "share"
    return {name: getattr(one, name) for name in names} | {"comm": one.communicating}


def _cells(one: Estimate, place: int | None) -> dict[str, str]:
    return {
        "split": "x".join(map(str, one.split)),
        "state": format_size(one.state, 3),
        "activations": format_size(one.activations, 3),
        "memory": format_size(one.memory, 3),
        "sent": format_bytes(one.sent),
        "comm": format_duration(one.communicating, 3),
        "bubble": f"{100 * one.bubble:.1f} %",
        "step": format_duration(one.step, 3),
        "share": f"{100 * one.share:.1f} %",
        "try": str(place) if place else "no fit",
    }
