"""Refusals that calls share, all of them ConfigErrors: names of options, ranks, tags, counts, blocks."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from wancoll.client.memory.tensors import Region
from wancoll.collective import LIBRARY_TAGS, ON_FAILURE, ReduceOp
from wancoll.errors import ConfigError
from wancoll.schedule import choose

_OPS = ReduceOp.__members__
_TORCH_OPS = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max", "PRODUCT": "prod"}
ALGORITHMS = {kind.name: ("auto", *names) for kind, names in choose.ALGORITHMS.items()}
ALGORITHMS["all_reduce_many"] = ALGORITHMS["all_reduce"]


def unavailable(call: str, argument: str, got: object, available: tuple[str, ...]) -> ConfigError:
    """The refusal of a name that is not one of *available*."""
    return ConfigError(
        f"{argument} is not available", who=f"{call}({argument}=...)", expected=" or ".join(available), got=repr(got)
    )


def refused(call: str, argument: str, got: object, expected: str, hint: str = "") -> ConfigError:
    """The refusal of an argument's value."""
    return ConfigError(
        f"{argument} cannot be used", who=f"{call}({argument}=...)", expected=expected, got=repr(got)[:200], hint=hint
    )


def reduce_op(call: str, op: Any) -> ReduceOp:
    """The reduction of that name, or torch.distributed's of the same meaning."""
    if type(op).__module__.startswith("torch."):
        op = _TORCH_OPS.get(getattr(op, "op", op).name, op)
    found = _OPS.get(op) if isinstance(op, str) else None
    if found is None:
        raise unavailable(call, "op", op, tuple(_OPS))
    return found


def check_options(
    call: str, async_op: bool, on_failure: str = "retry", timeout: float | None = None, algorithm: str = "auto"
) -> None:
    """Refuse options that *call* does not have."""
    if algorithm != "auto" and algorithm not in ALGORITHMS[call]:
        raise unavailable(call, "algorithm", algorithm, ALGORITHMS[call])
    if on_failure not in ON_FAILURE:
        raise unavailable(call, "on_failure", on_failure, ON_FAILURE)
    check_seconds(call, "timeout", timeout)
    if async_op and timeout is not None:
        raise ConfigError(
            "timeout says how long to wait, and async_op does not wait", who=f"{call}(timeout=...)",
            got=str(timeout), hint="give it to .wait(timeout=...)",
        )  # fmt: skip


def check_seconds(
    call: str, argument: str, seconds: Any, *, zero: bool = True, most: float = math.inf, none: str = "for no limit"
) -> None:
    """Refuse what is neither None, whose meaning *none* says, nor a number of seconds."""
    if seconds is None:
        return
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not (0 <= seconds if zero else 0 < seconds) or seconds > most:
        bounds = ("0 or more" if zero else "above 0") + (f" and at most {most:g}" if most < math.inf else "")
        raise refused(call, argument, seconds, f"seconds, {bounds}, or None {none}")


def check_grace(grace: Any, op: ReduceOp) -> float:
    """*grace* of an all_reduce in seconds; 0.0 for None."""
    if grace is None:
        return 0.0
    check_seconds("all_reduce", "grace", grace, zero=False, most=1e9, none="to wait for all")
    if op is not ReduceOp.sum:
        raise ConfigError(
            "only a sum can go on without a tensor", who="all_reduce(grace=...)", expected='op="sum"', got=op.name,
            hint="send weights beside the values, and divide by their sum",
        )  # fmt: skip
    return float(grace)


def whole(value: Any) -> int:
    """*value* as a whole number; -1 where it is none."""
    try:
        return operator.index(value)
    except TypeError:
        return -1


def whole_number(call: str, argument: str, value: Any, least: int, most: float = math.inf, expected: str = "") -> int:
    """*value* as a whole number from *least* to *most*; *expected* says so in other words."""
    number = whole(value)
    if isinstance(value, bool) or not least <= number <= most:
        bounds = f" from {least} to {most}" if most < math.inf else f", {least} or more"
        raise refused(call, argument, value, expected or f"a whole number{bounds}")
    return number


def check_rank(call: str, argument: str, rank: Any, world_size: int) -> int:
    """*rank* as a rank of the current epoch."""
    number = whole(rank)
    if not 0 <= number < world_size or isinstance(rank, bool):
        raise ConfigError(
            f"{argument} is no rank of the current epoch", who=f"{call}({argument}=...)",
            expected=f"0 to {world_size - 1}", got=repr(rank),
            hint="ranks change with the membership: see comm.members",
        )  # fmt: skip
    return number


def check_other(call: str, argument: str, rank: Any, me: int, world_size: int) -> int:
    """*rank* as that of another member."""
    number = check_rank(call, argument, rank, world_size)
    if number == me:
        raise ConfigError(
            f"{argument} is this member's own rank", who=f"{call}({argument}=...)",
            expected="the rank of another member", got=repr(rank),
        )  # fmt: skip
    return number


def check_tag(call: str, tag: Any) -> int:
    """*tag* as a number of 64 bits, below those that the library uses itself."""
    return whole_number(call, "tag", tag, 0, LIBRARY_TAGS - 1, "a whole number from 0 to 2^64 - 2^56 - 1")


def check_counts(call: str, counts: Sequence[int], world_size: int) -> list[int]:
    """*counts* as the elements of each rank's block."""
    who = f"{call}(counts=...)"
    try:
        numbers = [operator.index(count) for count in counts]
    except TypeError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise ConfigError("counts cannot be used", who=who, expected="whole numbers, 0 or more", got=repr(counts))
    if len(numbers) != world_size:
        raise ConfigError(
            "counts has another length than the group has members", who=who, expected=f"{world_size} counts",
            got=str(len(numbers)), hint="the membership may have changed: see comm.members",
        )  # fmt: skip
    return numbers


def block_of(call: str, x: Region, world_size: int) -> tuple[int, tuple[int, ...]]:
    """(elements, shape) of one of *world_size* equal blocks of *x*.

    The shape is x.shape[1:] if x is a stack of blocks (more than one dimension, the first of length world_size), else
    x's with the first dimension divided, else flat.
    """
    count, rest = divmod(x.count, world_size)
    if rest:
        raise ConfigError(
            "the tensor cannot be divided into one block for each member", who=f"{call}(x)",
            expected=f"a multiple of {world_size} elements", got=str(x.count),
            hint="pad it" + ("; or say counts=" if call == "reduce_scatter" else ""),
        )  # fmt: skip
    shape = x.shape
    if len(shape) > 1 and shape[0] == world_size:
        return count, shape[1:]
    if shape and shape[0] % world_size == 0:
        return count, (shape[0] // world_size, *shape[1:])
    return count, (count,)
