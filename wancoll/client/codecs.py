"""How a call's elements travel: what its codec arguments mean, and error feedback.

Error feedback adds what a codec lost of a tensor to the same tensor's next call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from wancoll.client.checks import refused, unavailable, whole_number
from wancoll.collective import ROUNDINGS, Codec, DType, ReduceOp
from wancoll.errors import ConfigError
from wancoll.native import ffi, lib
from wancoll.schedule.build import SPARSE, fits_sparse, takes
from wancoll.schedule.choose import BOUNDED
from wancoll.schedule.numbers import narrowed, storage, widened

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Residual: TypeAlias = Any  # an Array, or what has its attributes, copy() and __array__() and lies on a device

FLOATS = (DType.float32, DType.float64, DType.float16, DType.bfloat16)
# Relative L2 error of an all-reduce of Gaussian data that encodes contributions once, rounded to nearest; cheapest
# first; of the same size, the better one first. Nominal, so that all members choose the same.
NOMINAL_ERROR = (
    (Codec.int4, 0.15),
    (Codec.int8, 0.01),
    (Codec.fp8, 0.04),
    (Codec.bf16, 0.003),
    (Codec.fp16, 0.0005),
)

_STOCHASTIC = math.sqrt(2)  # times the error of rounding to nearest: the variance is 1/6 of a step's square, not 1/12

_CODECS = (*Codec.__members__, "top1.5%", "top5%-int8", "top1.5%/top1.5%")  # of which any share will do
_AT_ONCE = 1 << 17  # elements, whole blocks of every codec: what is made of so many stays in a cache


class Coding(NamedTuple):
    """How elements travel; see Descriptor."""

    codec: Codec = Codec.none
    rounding: str = "nearest"
    seed: int = 0
    bounded: bool = False


RAW = Coding()


def dense(call: str, dtype: DType, codec: str) -> Coding:
    """What the codec argument of *call* means, which is no all_reduce."""
    named: Any = codec  # the callers are not all type-checked
    if not isinstance(named, str) or named not in Codec.__members__:
        raise unavailable(call, "codec", codec, tuple(Codec.__members__))
    return coding(call, dtype, codec, None, "nearest", 0)


def coding(
    call: str, dtype: DType, codec: str, max_rel_error: float | None, rounding: str, seed: int,
    algorithm: str = "auto", op: ReduceOp = ReduceOp.sum,
) -> Coding:  # fmt: skip
    """What the codec arguments of *call* mean."""
    if codec == "none" and max_rel_error is None and rounding == "nearest":
        return RAW
    named: Any = codec  # the callers are not all type-checked
    wanted = Codec.named(codec) if isinstance(named, str) else None
    if wanted is None:
        raise unavailable(call, "codec", codec, _CODECS)
    if rounding not in ROUNDINGS:
        raise unavailable(call, "rounding", rounding, ROUNDINGS)
    if max_rel_error is not None:
        if wanted is not Codec.none:
            raise ConfigError(
                "codec and max_rel_error exclude each other", who=f"{call}(max_rel_error=...)",
                expected="one of them", got=f"codec={codec!r} and max_rel_error={max_rel_error!r}",
            )  # fmt: skip
        wanted = cheapest(call, dtype, max_rel_error, rounding)
        if wanted is Codec.none:
            return RAW
        if algorithm not in ("auto", *BOUNDED):
            raise ConfigError(
                "the algorithm encodes sums again, and its error grows with the members: max_rel_error cannot hold",
                who=f"{call}(max_rel_error=..., algorithm=...)", expected=f"one of {', '.join(('auto', *BOUNDED))}",
                got=repr(algorithm), hint=f"codec={wanted.name!r} takes this format without a limit",
            )  # fmt: skip
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
    if wanted.sparse and not (fits_sparse(wanted, op, algorithm) and rounding == "nearest"):
        raise ConfigError(
            "a sparse codec cannot do this", who=f"{call}(codec={wanted.name!r})",
            expected=f"op sum or avg, rounding='nearest', algorithm 'auto' or {' or '.join(SPARSE[wanted.of_result])}",
            got=f"op {op.name}, rounding={rounding!r}, algorithm={algorithm!r}",
        )  # fmt: skip
    if rounding != "stochastic":
        seed = 0
    seed = whole_number(call, "seed", seed, 0, 2**64 - 1, "a whole number of 64 bits, 0 or more")
    return Coding(wanted, rounding, seed, max_rel_error is not None)


def coding_where_taken(call: str, dtype: DType, codec: str, max_rel_error: float | None, *how: Any) -> Coding:
    """Return coding(), or RAW for elements that the codec does not take."""
    wire = coding(call, DType.float32, codec, max_rel_error, *how)
    if max_rel_error is None and not takes(wire.codec, dtype):
        return RAW
    return coding(call, dtype, codec, max_rel_error, *how)


def cheapest(call: str, dtype: DType, max_rel_error: float, rounding: str = "nearest") -> Codec:
    """The smallest format whose nominal error is at most *max_rel_error*; else none, which is exact."""
    bound: Any = max_rel_error
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound < math.inf:
        raise refused(call, "max_rel_error", max_rel_error, "a relative error, such as 0.01")
    factor = _STOCHASTIC if rounding == "stochastic" else 1
    for codec, error in NOMINAL_ERROR:
        if error * factor <= bound and takes(codec, dtype):
            return codec
    return Codec.none


def through(codec: Codec, dtype: DType, x: Array, coded: Array, decoded: DType) -> Array:
    """Encode *x*, a flat array of dtype storage(dtype), to *coded*, rounded to nearest; what *decoded* keeps of it."""
    out = np.empty(x.size, storage(decoded))
    kernels = lib.wc_kernels_default()
    entered = lib.wc_fpenv_enter()
    try:
        lib.wc_encode(kernels, codec, dtype, _address(coded), _address(x), x.size, ffi.NULL)
        lib.wc_decode(kernels, codec, decoded, _address(out), _address(coded), x.size)
    finally:
        lib.wc_fpenv_leave(entered)
    return out


def coded_bytes(codec: Codec, count: int) -> int:
    """Bytes of *count* elements in a codec."""
    elements, size = codec.block
    return -(-count // elements) * size


def _address(x: Array) -> Any:
    return ffi.cast("void *", x.ctypes.data)


def _formats(dtype: DType) -> str:
    return " or ".join(repr(codec.name) for codec in Codec if takes(codec, dtype)) or "only codec='none'"


# ---- error feedback ----------------------------------------------------------------------------------


class ErrorFeedback:
    """A residual for each named tensor: what codecs have lost of it so far.

    comm.all_reduce(x, codec="int4", feedback=feedback, name="layer1") sends x plus the residual. When that is
    committed the residual becomes what the codec loses of it; after a failure it is as it was. So over many calls
    what was sent adds up to what was given (Seide et al., "1-bit stochastic gradient descent", 2014).

    A residual is what encoding this member's tensor once loses; where an algorithm encodes partial sums again ("ring",
    "tree", "halving_doubling", "hierarchical") what that loses is in nobody's residual, nor is what the result loses;
    but what a sparse codec with "/" drops of a sum is in the residual of the member that made that sum. A residual
    belongs to this member: save it with the rest of the member's state, and reset() it where a tensor begins anew.
    Those of tensors that are encoded on a CUDA device stay there.

    Args:
        decay: what is left of a residual from one call to the next, 0 to 1 (1: all).
    """

    def __init__(self, decay: float = 1.0) -> None:
        given: Any = decay  # the callers are not all type-checked
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
            raise refused("ErrorFeedback", "decay", decay, "a number from 0 to 1")
        self._residuals: dict[str, Residual] = {}
        self.decay = decay

    def __len__(self) -> int:
        return len(self._residuals)

    def __repr__(self) -> str:
        return f"<ErrorFeedback of {len(self)} tensors, {self.nbytes} bytes>"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that have a residual."""
        return tuple(self._residuals.copy())  # a copy at once, here and below: calls of other threads end meanwhile

    @property
    def nbytes(self) -> int:
        """Memory that the residuals take."""
        return sum(residual.nbytes for residual in self._residuals.copy().values())

    def residual(self, name: str) -> Array:
        """A copy of the tensor's residual: float64 for float64, else float32; flat, shape (count,).

        Raises:
            KeyError: no call with that name has been committed.
        """
        return np.asarray(self._residuals[name].copy())

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Forget the residuals of *names*; None: all."""
        for name in self.names if names is None else names:
            self._residuals.pop(name, None)

    def current(self, name: str) -> Residual | None:
        """The residual itself, which no call changes: for restore(), where a call that is committed shall not count."""
        return self._residuals.get(name)

    def restore(self, name: str, residual: Residual | None) -> None:
        """Take the residual back that current() gave."""
        if residual is None:
            self._residuals.pop(name, None)
        else:
            self._residuals[name] = residual

    def state_dict(self) -> dict[str, Array]:
        """A copy of every residual, by name."""
        return {name: residual.copy() for name, residual in self._residuals.copy().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the residuals from *state*, as state_dict() gave them, and forget all others.

        Raises:
            ConfigError: a name or a residual that state_dict() would not give; nothing has changed then.
        """
        loaded = {}
        name: Any  # the callers are not all type-checked
        for name, value in state.items():
            array = np.asarray(value)
            if not isinstance(name, str) or array.dtype not in (np.float32, np.float64) or array.ndim != 1:
                raise ConfigError(
                    "a residual cannot be loaded", who=f"ErrorFeedback.load_state_dict: {name!r}",
                    expected="a name and a flat array of float32 or float64", got=f"{array.dtype}{list(array.shape)}",
                )  # fmt: skip
            loaded[name] = array.copy()
        self._residuals = loaded


class Feed:
    """One call's use of a residual. A ConfigError: the residual of that name belongs to another tensor."""

    __slots__ = (
        "_blocks", "_call", "_count", "_feedback", "_lost", "_name", "_whole", "codec", "dtype", "error", "late"
    )  # fmt: skip

    def __init__(
        self, call: str, feedback: ErrorFeedback, name: str, dtype: DType, count: int, codec: Codec, late: bool = False,
        blocks: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._call, self._feedback, self._name, self._count = call, feedback, name, count
        self._blocks = blocks or {}  # by owner: elements of what the daemon encodes each on its own; none: it is one
        self.dtype, self.codec, self.late = dtype, codec, late
        self._lost: Residual | None = None  # what the codec loses
        self._whole: Residual | None = None  # the tensor and what was added to it, if it may come too late
        self.error = 0.0  # relative, of what add() has encoded, where the result is not
        self.residual()

    def residual(self) -> Residual | None:
        """What is to be added. Looked at anew when it is: a call of another thread may have ended since."""
        name, residual = self._name, self._feedback._residuals.get(self._name)
        if residual is not None and (residual.size != self._count or residual.dtype != _kept(self.dtype)):
            raise ConfigError(
                "the residual of that name belongs to another tensor", who=f"{self._call}(name={name!r})",
                expected=f"{residual.size} elements, kept as {residual.dtype}",
                got=f"{self._count} of {self.dtype.name}, kept as {_kept(self.dtype)}",
                hint=f"take another name, or feedback.reset([{name!r}]) if the tensor begins anew",
            )  # fmt: skip
        return residual

    def conflicts(self, other: Feed) -> bool:
        """Whether both use the same residual."""
        return self._feedback is other._feedback and self._name == other._name

    @property
    def decay(self) -> float:
        """What is left of a residual from one call to the next."""
        return self._feedback.decay

    @property
    def nbytes(self) -> int:
        """Bytes of memory that add() needs."""
        raw = self._count * self.dtype.itemsize
        return max(raw, coded_bytes(self.codec, self._count)) if self.encodes else raw

    @property
    def encodes(self) -> bool:
        """Whether add() leaves the tensor encoded."""
        return self.codec is not Codec.none and not self._blocks

    def add(self, address: int) -> None:
        """Add the residual to the tensor at *address*, and find what is lost; if it `encodes`, it lies there so.

        A slice's encoded form is shorter: it comes upon slices that were read.
        """
        if not self._count:
            return
        memory = np.frombuffer(ffi.buffer(ffi.cast("char *", address), self.nbytes), np.uint8)
        given = memory[: self._count * self.dtype.itemsize].view(storage(self.dtype))
        lost = np.empty(self._count, _kept(self.dtype))
        whole = np.empty_like(lost) if self.late else None
        residual = self.residual()
        residual = None if residual is None else np.asarray(residual)
        squares = [0.0, 0.0]
        with np.errstate(all="ignore"):
            for at in self._slices():
                wanted = np.array(widened(self.dtype, given[at]))
                if residual is not None:
                    wanted += residual[at] if self.decay == 1 else residual[at] * self.decay
                if not self.encodes:
                    given[at] = sent = narrowed(self.dtype, wanted)
                    if self.codec is not Codec.none:
                        coded = np.empty(coded_bytes(self.codec, sent.size), np.uint8)
                        sent = through(self.codec, self.dtype, sent, coded, self.dtype)
                else:
                    coded = memory[coded_bytes(self.codec, at.start) :]
                    sent = through(self.codec, kept_as(self.dtype), wanted, coded, self.dtype)
                np.subtract(wanted, widened(self.dtype, sent), out=lost[at])
                _drop_infinite(lost[at])
                if whole is not None or not self.codec.of_result:
                    _drop_infinite(wanted)
                if whole is not None:
                    whole[at] = wanted
                if not self.codec.of_result:
                    wide = lost[at].astype(np.float64), wanted.astype(np.float64)  # squares of floats are in its range
                    squares = [sums + float(x @ x) for sums, x in zip(squares, wide, strict=True)]
        self.error = math.sqrt(squares[0] / squares[1]) if squares[1] > 0 else 0.0
        self.found(lost, whole)

    def _slices(self) -> Iterator[slice]:
        """All elements: so many at once as lie in a cache, each slice from a block of the codec on."""
        counts = tuple(self._blocks.values()) or (self._count,)
        for stop, count in zip(accumulate(counts), counts, strict=True):
            for start in range(stop - count, stop, _AT_ONCE):
                yield slice(start, min(start + _AT_ONCE, stop))

    def found(self, lost: Residual, whole: Residual | None) -> None:
        """What the codec loses; and all of it, where it may come too late."""
        self._lost, self._whole = lost, whole

    def commit(self, counted: bool, contributors: Sequence[str], dropped: tuple[int, Array] | None = None) -> None:
        """The call is committed, *counted* or without this tensor, which came too late: then all of it was lost.

        A block whose owner is not among the contributors reached nobody: its residual stays as it was. *dropped*: what
        encoding the sums that this member made loses of them, and where in the tensor these begin.
        """
        residual = self._lost if counted else self._whole
        if residual is not None and dropped is not None:
            start, lost = dropped
            residual = residual.copy()  # doing it again is harmless
            residual[start : start + lost.size] += lost
        if residual is not None and self._blocks.keys() - set(contributors):
            before, stop, residual = self.residual(), 0, residual.copy()
            for owner, count in self._blocks.items():
                at, stop = slice(stop, stop + count), stop + count
                if owner not in contributors:
                    residual[at] = 0 if before is None else before[at]
        if residual is not None:
            self._feedback._residuals[self._name] = residual


def feed(
    call: str, feedback: ErrorFeedback | None, name: str, dtype: DType, count: int, op: ReduceOp, how: Coding, *,
    late: bool = False, blocks: Mapping[str, int] | None = None,
) -> Feed | None:  # fmt: skip
    """What *call* does with its feedback argument; None: nothing. *late*: the whole tensor may come too late.

    *blocks*: by owner, elements of those that the daemon encodes each on its own.
    """
    who = f"{call}(feedback=...)"
    named: Any = name  # the callers are not all type-checked
    if feedback is None:
        if name:
            raise ConfigError(
                "a name is for error feedback", who=f"{call}(name=...)", expected="feedback= with it", got=repr(name)
            )
        return None
    if not isinstance(feedback, ErrorFeedback):
        raise ConfigError(
            "this is no error feedback", who=who, expected="a wancoll.ErrorFeedback", got=type(feedback).__name__
        )
    if not isinstance(named, str) or not named:
        raise ConfigError(
            "error feedback needs the tensor's name", who=f"{call}(name=...)", expected="a name that stays the same",
            got=repr(name),
        )  # fmt: skip
    if op not in (ReduceOp.sum, ReduceOp.avg):
        raise ConfigError("only sums can make up for errors", who=who, expected="op sum or avg", got=op.name)
    if dtype not in FLOATS:
        raise ConfigError(
            "only floating elements are encoded", who=who, expected=", ".join(each.name for each in FLOATS),
            got=dtype.name,
        )  # fmt: skip
    if how.rounding != "nearest":
        raise ConfigError(
            "what stochastic rounding loses is not known here", who=who, expected="rounding='nearest'",
            got=repr(how.rounding), hint="stochastic rounding needs no feedback: its errors have mean zero",
        )  # fmt: skip
    if how.codec is Codec.none and name not in feedback.names and not late:
        return None
    return Feed(call, feedback, name, dtype, count, how.codec, late, blocks)


def dropped(dtype: DType, sums: Array, result: Array, times: int) -> Array:
    """*times* what is lost where the elements *sums* become *result*, 0 where that is not finite."""
    with np.errstate(all="ignore"):
        lost = (widened(dtype, sums) - widened(dtype, result)) * times
    _drop_infinite(lost)
    return lost


def kept_as(dtype: DType) -> DType:
    """The dtype of residuals: of half types it is float32, so that what rounding loses is in them, too."""
    return DType.float64 if dtype is DType.float64 else DType.float32


def _kept(dtype: DType) -> np.dtype[Any]:
    return np.dtype(kept_as(dtype).name)


def _drop_infinite(lost: Array) -> None:
    """Infinities and NaN become 0: they travel as they are."""
    finite = np.isfinite(lost)
    if not finite.all():
        lost[~finite] = 0
