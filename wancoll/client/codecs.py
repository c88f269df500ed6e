"""The codec arguments of a call: which wire format they mean, and what it does to elements."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from wancoll._native import ffi, lib
from wancoll.client.checks import unavailable
from wancoll.collective import Codec, DType
from wancoll.errors import ConfigError
from wancoll.schedule.codec import coded_bytes, takes

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

FLOATS = (DType.float32, DType.float64, DType.float16, DType.bfloat16)
ROUNDINGS = ("nearest", "stochastic")
# Relative L2 error of an all-reduce of Gaussian data, cheapest first. Nominal, so that all members choose the same.
NOMINAL_ERROR = ((Codec.int4, 0.15), (Codec.int8, 0.01), (Codec.bf16, 0.003), (Codec.fp16, 0.0005))

_CODECS = Codec.__members__


class Wire(NamedTuple):
    """How elements travel; see Descriptor."""

    codec: Codec = Codec.none
    rounding: str = "nearest"
    seed: int = 0


RAW = Wire()


def wire_format(call: str, dtype: DType, codec: str, max_rel_error: float | None, rounding: str, seed: int) -> Wire:
    """What the codec arguments of *call* mean.

    Raises:
        ConfigError: one of them cannot be used, or not with the others or *dtype*.
    """
    if codec == "none" and max_rel_error is None and rounding == "nearest":
        return RAW
    wanted = _CODECS.get(codec)
    if wanted is None:
        raise unavailable(call, "codec", codec, tuple(_CODECS))
    if rounding not in ROUNDINGS:
        raise unavailable(call, "rounding", rounding, ROUNDINGS)
    if max_rel_error is not None:
        if wanted is not Codec.none:
            raise ConfigError(
                "codec and max_rel_error exclude each other", who=f"{call}(max_rel_error=...)",
                expected="one of them", got=f"codec={codec!r} and max_rel_error={max_rel_error!r}",
            )  # fmt: skip
        wanted = cheapest(call, dtype, max_rel_error)
        if wanted is Codec.none:
            return RAW
    if wanted is Codec.none:
        raise ConfigError(
            "without a codec nothing is rounded for the wire", who=f"{call}(rounding=...)",
            expected="codec= or max_rel_error= with it", got=repr(rounding),
        )  # fmt: skip
    if not takes(wanted, dtype):
        taken = [each.name for each in FLOATS if takes(wanted, each)]
        raise ConfigError(
            "the codec does not take this dtype", who=f"{call}(codec={wanted.name!r})",
            expected=" or ".join(taken), got=dtype.name,
            hint=f"for {dtype.name} there is {_formats(dtype)}",
        )  # fmt: skip
    return Wire(wanted, rounding, _seed(call, seed) if rounding == "stochastic" else 0)


def wire_where_taken(
    call: str, dtype: DType, codec: str, max_rel_error: float | None, rounding: str, seed: int
) -> Wire:
    """As wire_format, but elements that the codec does not take travel as they are."""
    wire = wire_format(call, DType.float32, codec, max_rel_error, rounding, seed)
    if max_rel_error is None and not takes(wire.codec, dtype):
        return RAW
    return wire_format(call, dtype, codec, max_rel_error, rounding, seed)


def cheapest(call: str, dtype: DType, max_rel_error: float) -> Codec:
    """The smallest format whose nominal error is at most *max_rel_error*; none, which is exact, if there is no other.

    Raises:
        ConfigError: *max_rel_error* is no error.
    """
    bound: Any = max_rel_error
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound < math.inf:
        raise ConfigError(
            "max_rel_error cannot be used", who=f"{call}(max_rel_error=...)",
            expected="a relative error, such as 0.01", got=repr(max_rel_error),
        )  # fmt: skip
    for codec, error in NOMINAL_ERROR:
        if error <= bound and takes(codec, dtype):
            return codec
    return Codec.none


def lossy(codec: Codec, dtype: DType, x: Array) -> Array:
    """What *x* is after the wire, rounded to nearest.

    Args:
        codec: the format.
        dtype: what the elements are.
        x: shape (n,), C-contiguous, of dtype storage(dtype).

    Returns:
        A new array like *x*; with codec none *x* itself.
    """
    if codec is Codec.none:
        return x
    coded = np.empty(coded_bytes(codec, x.size), np.uint8)
    decoded = np.empty_like(x)
    kernels = lib.wc_kernels_default()
    entered = lib.wc_fpenv_enter()
    try:
        kernels.encode[codec][dtype](_address(coded), _address(x), x.size, ffi.NULL)
        kernels.decode[codec][dtype](_address(decoded), _address(coded), x.size)
    finally:
        lib.wc_fpenv_leave(entered)
    return decoded


def _address(x: Array) -> Any:
    return ffi.cast("void *", x.ctypes.data)


def _seed(call: str, seed: Any) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise ConfigError(
            "seed cannot be used", who=f"{call}(seed=...)", expected="a whole number of 64 bits, 0 or more",
            got=repr(seed),
        )  # fmt: skip
    return number


def _formats(dtype: DType) -> str:
    return " or ".join(repr(codec.name) for codec in Codec if takes(codec, dtype)) or "only codec='none'"
