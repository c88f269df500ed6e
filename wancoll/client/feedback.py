"""Error feedback: what a codec lost of a tensor is added to the same tensor's next call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from wancoll._native import ffi
from wancoll.client.codecs import FLOATS, Wire, lossy
from wancoll.collective import Codec, DType, ReduceOp
from wancoll.errors import ConfigError
from wancoll.schedule.codec import block
from wancoll.schedule.numbers import narrowed, storage, widened
from wancoll.schedule.plan import chunk_bounds

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class ErrorFeedback:
    """A residual for each named tensor: what codecs have lost of it so far.

    comm.all_reduce(x, codec="int4", feedback=feedback, name="layer1") sends x plus the residual. When that is
    committed the residual becomes what the codec loses of it; after a failure it is as it was. So over many calls
    what was sent adds up to what was given (Seide et al., "1-bit stochastic gradient descent", 2014).

    A residual is what encoding this member's tensor once loses; where an algorithm encodes partial sums again ("ring",
    "tree", "halving_doubling", "hierarchical") what that loses is in nobody's residual, nor is what the result loses. A
    residual belongs to this member: save it with the rest of the member's state, and reset() it where a tensor begins
    anew.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self._residuals)

    def __repr__(self) -> str:
        return f"<ErrorFeedback of {len(self)} tensors, {self.nbytes} bytes>"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that have a residual."""
        return tuple(self._residuals)

    @property
    def nbytes(self) -> int:
        """Memory that the residuals take."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def residual(self, name: str) -> Array:
        """A copy of the tensor's residual: float64 for float64, else float32; flat, shape (count,).

        Raises:
            KeyError: no call with that name has been committed.
        """
        return self._residuals[name].copy()

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Forget the residuals of *names*; None: all."""
        for name in tuple(self._residuals) if names is None else names:
            self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Array]:
        """A copy of every residual, by name."""
        return {name: residual.copy() for name, residual in self._residuals.items()}

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
    """One call's use of a residual.

    Args:
        call: names the call in errors.
        feedback: the caller's.
        name: of the tensor.
        dtype: of the tensor, floating.
        count: of its elements.
        codec: that it will be encoded with.

    Raises:
        ConfigError: the residual of that name belongs to another tensor.
    """

    __slots__ = ("_codec", "_count", "_dtype", "_feedback", "_name", "_next", "_rounded")

    def __init__(self, call: str, feedback: ErrorFeedback, name: str, dtype: DType, count: int, codec: Codec) -> None:
        self._feedback, self._name, self._codec = feedback, name, codec
        self._dtype, self._count = dtype, count
        self._next: Array | None = None
        self._rounded: Array | None = None  # of half types: what adding the residual lost
        residual = feedback._residuals.get(name)
        if residual is not None and (residual.size != count or residual.dtype != _kept(dtype)):
            raise ConfigError(
                "the residual of that name belongs to another tensor", who=f"{call}(name={name!r})",
                expected=f"{residual.size} elements, kept as {residual.dtype}",
                got=f"{count} of {dtype.name}, kept as {_kept(dtype)}",
                hint=f"take another name, or feedback.reset([{name!r}]) if the tensor begins anew",
            )  # fmt: skip

    def conflicts(self, other: Feed) -> bool:
        """Whether both use the same residual."""
        return self._feedback is other._feedback and self._name == other._name

    def add(self, address: int) -> None:
        """Add the residual to the tensor at *address*, and find what the codec will lose of that."""
        if not self._count:
            return
        nbytes = self._count * self._dtype.itemsize
        sent = np.frombuffer(ffi.buffer(ffi.cast("char *", address), nbytes), storage(self._dtype))
        residual = self._feedback._residuals.get(self._name)
        with np.errstate(all="ignore"):
            if sent.dtype == _kept(self._dtype):
                if residual is not None:
                    sent += residual
                lost = sent - lossy(self._codec, self._dtype, sent)
            else:
                wanted = widened(self._dtype, sent)
                if residual is not None:
                    wanted += residual
                    sent[:] = narrowed(self._dtype, wanted)
                self._rounded = _finite(wanted - widened(self._dtype, sent))
                lost = wanted - widened(self._dtype, lossy(self._codec, self._dtype, sent))
        self._next = _finite(lost)

    def commit(self, algorithm: str, rank: int, world_size: int) -> None:
        """The call is committed. Doing it again is harmless.

        Args:
            algorithm: that ran.
            rank: of this member among the contributors.
            world_size: contributors.
        """
        if self._next is not None:
            start, stop = exact_part(algorithm, rank, world_size, self._count, self._codec)
            self._next[start:stop] = 0 if self._rounded is None else self._rounded[start:stop]
            self._feedback._residuals[self._name] = self._next


def exact_part(algorithm: str, rank: int, world_size: int, count: int, codec: Codec) -> tuple[int, int]:
    """[start, stop) of what *rank* contributed to an all-reduce without encoding it: it reduces that part itself."""
    if world_size == 1 or (algorithm == "naive" and rank == 0):
        return 0, count
    if algorithm == "direct":
        return chunk_bounds(count, world_size, max(1, block(codec)[0]))[rank]
    return 0, 0


def feed(
    call: str, feedback: ErrorFeedback | None, name: str, dtype: DType, count: int, op: ReduceOp, wire: Wire
) -> Feed | None:
    """What *call* does with its feedback argument; None: nothing.

    Raises:
        ConfigError: the arguments do not fit together.
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
    if wire.rounding != "nearest":
        raise ConfigError(
            "what stochastic rounding loses is not known here", who=who, expected="rounding='nearest'",
            got=repr(wire.rounding), hint="stochastic rounding needs no feedback: its errors have mean zero",
        )  # fmt: skip
    if wire.codec is Codec.none and name not in feedback.names:
        return None
    return Feed(call, feedback, name, dtype, count, wire.codec)


def _kept(dtype: DType) -> np.dtype[Any]:
    """Residuals of half types are kept in float32, so that what rounding loses is in them, too."""
    return np.dtype(np.float64 if dtype is DType.float64 else np.float32)


def _finite(lost: Array) -> Array:
    """Without infinities and NaN, which travel as they are."""
    return lost if np.isfinite(lost).all() else np.where(np.isfinite(lost), lost, lost.dtype.type(0))
