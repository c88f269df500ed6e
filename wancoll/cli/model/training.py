"""`wancoll model training`: options to a job, its estimates to a table or JSON."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.config import Env

from wancoll.errors import ConfigError
from wancoll.limits import format_size
from wancoll.options import between
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
WIDTH = 13

training = App(
    name="training",
    config=Env("WANCOLL_MODEL_TRAINING_", command=False),
    help_epilogue=(
        "All rows compute the same batch. To try: what fits, the fastest step first, of steps within 5 % the simpler "
        "one. DiLoCo changes what is computed: H steps alone, then an average. Formulas and sources: "
        "wancoll/schedule/training.py. Memory: GiB is 2^30 bytes. What is sent: GB is 10^9 bytes."
    ),
)
_Count = Annotated[int, Parameter(validator=between(1, 1 << 30))]


@training.default
def run(
    *,
    parameters: Annotated[str, Parameter(help="Of the model: a number, with k, M, B or T.")] = "7B",
    layers: Annotated[_Count, Parameter(help="Transformer layers.")] = 32,
    hidden: Annotated[_Count, Parameter(help="Width of a layer.")] = 4096,
    sequence: Annotated[_Count, Parameter(help="Tokens of a sample.")] = 2048,
    micro_batches: Annotated[_Count, Parameter(help="Micro-batches of one step, over all members.")] = 32,
    micro_batch: Annotated[_Count, Parameter(help="Samples of a micro-batch.")] = 1,
    inner_steps: Annotated[
        _Count, Parameter(name=["--inner-steps", "-H"], help="H: steps between two exchanges of DiLoCo.")
    ] = 100,
    members: Annotated[int, Parameter(validator=between(1, MOST_MEMBERS), help="Devices.")] = 8,
    device_memory: Annotated[str, Parameter(help="Of a device, bytes (K, KiB, M, MiB, G, GiB).")] = "80GiB",
    alpha: Annotated[str, Parameter(help="Time of one message over one hop, unit ns, us, ms or s.")] = "5us",
    bandwidth: Annotated[
        str, Parameter(help="Bandwidth of a member's link, each way, unit B/s or bit/s with k, M, G, T, Ki, Mi or Gi.")
    ] = "100GB/s",
    flops: Annotated[
        str, Parameter(help="Operations that a device gets done in a second: a number, with k, M, G or T.")
    ] = "150T",
    precision: Annotated[
        Literal["mixed", "half-moments", "single"],
        Parameter(
            help="Bytes of a parameter: weight, gradient, optimizer: "
            + "; ".join(f"{name} {p.weight}+{p.gradient}+{p.optimizer}" for name, p in PRECISIONS.items())
            + "."
        ),
    ] = "mixed",
    split: Annotated[
        str, Parameter(help="Of the row 3D: data x pipeline x tensor, as in 2x2x2. Empty: the fastest.")
    ] = "",
    columns: Annotated[
        str,
        Parameter(
            help="Columns, with commas between: "
            + ", ".join(f"{name} ({meaning})" for name, meaning in COLUMNS.items())
            + "."
        ),
    ] = ",".join(COLUMNS),
    as_json: Annotated[
        bool, Parameter(name="--json", negative=(), help="Print one JSON object instead of a table.")
    ] = False,
) -> int:
    """Print what a step of training takes with DP, ZeRO, tensor and pipeline parallel, 3D and DiLoCo."""
    chosen = _columns(columns)
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
    found = estimates(job, members, link, split=_split(split, members, layers))
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
    print(
        f"# {parameters} parameters of {job.precision.total} bytes, {members} members of {format_size(memory)}, "
        f"alpha {format_duration(link.alpha)}, bandwidth {format_rate(rate)}"
    )
    print(
        f"# all_reduce of the gradients, {format_bytes(job.gradients)}: {format_bytes(gradients['bound_bytes'])} each, "
        f"{format_duration(gradients['ring_seconds'], 3)}; "
        f"{format_duration(gradients['2S_seconds'], 3)} with the approximation 2 S"
    )
    print(f"\n{'':<8}{''.join(f'{name:>{WIDTH}}' for name in chosen)}")
    for one in found:
        cells = _cells(one, places.get(one.name))
        print(f"{one.name:<8}{''.join(f'{cells[name]:>{WIDTH}}' for name in chosen)}")
    if not places:
        print("\nnone fits: more members, fewer or smaller micro-batches, or half-moments")
    return 0


def _columns(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in names if name not in COLUMNS or names.count(name) > 1), None)
    if wrong is not None or not names:
        raise ConfigError(
            "no column, or twice", who="--columns", expected=f"some of {', '.join(COLUMNS)}", got=repr(wrong or text)
        )
    return names


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
    return {
        "name": one.name,
        "split": one.split,
        "state": one.state,
        "activations": one.activations,
        "memory": one.memory,
        "sent": one.sent,
        "comm": one.communicating,
        "computing": one.computing,
        "bubble": one.bubble,
        "step": one.step,
        "share": one.share,
    }


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
