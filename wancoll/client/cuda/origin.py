"""Where a tensor of a device comes from: whose earlier work must be done before it is read, and what comes after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wancoll.errors import ConfigError

LEGACY, PER_THREAD, NO_SYNC = 1, 2, -1  # streams by number, as DLPack and the array interface have them


@dataclass(frozen=True, slots=True)
class Origin:
    """How a tensor's users are ordered. With neither stream nor order nobody has to be waited for before it is read."""

    ordinal: int | None = None  # of the device; None: the driver knows
    stream: int | None = None  # the stream on which the tensor is used, as the driver takes it
    # lets the tensor's owner order a stream of ours behind its own work (DLPack)
    order: Callable[[int], object] | None = None
    now: Callable[[], int] | None = None  # the stream that is the caller's at this moment, where that can be asked

    @property
    def lasting(self) -> int | None:
        """The stream, if any thread may name it later; with None the host waits for the copies to the device."""
        return None if self.stream == PER_THREAD else self.stream


def of_torch(x: Any, torch: Any) -> Origin:
    """The origin of a torch tensor, which is used on torch's current stream."""

    def now() -> int:
        return int(torch.cuda.current_stream(x.device).cuda_stream)

    return Origin(x.device.index, now(), now=now)


def of_dlpack(x: Any, ordinal: int) -> Origin:
    """The origin of a DLPack exporter, which orders a given stream behind its own."""
    return Origin(ordinal, order=lambda stream: x.__dlpack__(stream=stream))


def of_interface(interface: Any, who: str) -> Origin:
    """The origin of an object that has __cuda_array_interface__."""
    stream = interface.get("stream")
    if stream is None:
        return Origin()
    if not isinstance(stream, int) or isinstance(stream, bool) or stream < 1:
        raise ConfigError(
            "the tensor's stream cannot be used", who=who,
            expected="in __cuda_array_interface__ None, 1 (legacy default), 2 (per thread) or a stream",
            got=repr(stream),
        )  # fmt: skip
    return Origin(stream=stream)
