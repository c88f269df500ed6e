"""Tensors in a call's codec on their device: encoded before the copy to the arena, decoded after the copy from it.

    reading           the residual is added (error feedback); encode -> memory of ours -> the arena
    a residual        what the codec loses stays on the device, in memory of ours, from call to call
    after the commit  the arena -> memory of ours; decode -> the tensors

The parts of one tensor are gathered first, and spread last, as the codec's blocks know nothing of parts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from wancoll.client.codecs import Feed, coded_bytes, kept_as
from wancoll.client.cuda.driver import WITHIN, Device
from wancoll.client.cuda.eager_copy import EagerCopy, Queued
from wancoll.client.cuda.encode import Codecs
from wancoll.client.memory.tensors import Region
from wancoll.collective import Codec
from wancoll.errors import ConfigError, DeviceError
from wancoll.limits import BLOCK, KIB

log = logging.getLogger("wancoll")

LEAST = 64 * KIB  # bytes of elements: from here on it is worth the kernels
_ALIGN = 256
_FETCH_SECONDS, _CLOSE_SECONDS = 60.0, 5.0


class NoRoom(DeviceError):
    """The device has no memory."""


class OnDevice:
    """A residual on a device: what is queued on the device's stream of copies from it finds it there."""

    def __init__(self, device: Device, size: int, dtype: np.dtype[Any]) -> None:
        self.device, self.size, self.dtype = device, size, dtype
        self.address = 0
        self._fetched: np.ndarray[Any, np.dtype[Any]] | None = None  # when the connection ended
        self.address = _room(device, self.nbytes)
        device.residents.add(self)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.size * self.dtype.itemsize

    def copy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Its elements here, as an array. Raises DeviceError: the device fails."""
        if self._fetched is not None:
            return self._fetched.copy()
        return np.frombuffer(self.device.fetch(self.address, self.nbytes, _FETCH_SECONDS), self.dtype).copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, np.dtype[Any]]:
        return self.copy()

    def fetch(self) -> bool:
        """The connection ends: the memory goes, and what is in it stays; False: it does not, as the device is stuck."""
        with suppress(DeviceError):
            self._fetched = np.frombuffer(self.device.fetch(self.address, self.nbytes, _CLOSE_SECONDS), self.dtype)
        return self._fetched is not None

    def __del__(self) -> None:
        if self.address:
            self.device.dropped.append(self.address)  # no call of the driver: this may be any thread


def loaded(device: Device) -> bool:
    """Whether the device has the codecs' kernels, which are loaded once; its context is the thread's."""
    if device.codecs is None:
        try:
            device.codecs = Codecs(device.driver, device.number)
        except (ConfigError, DeviceError) as bad:
            log.warning("cuda:%d: tensors are encoded on the host: %s", device.ordinal, bad)
            device.codecs = False
    return bool(device.codecs)


def _room(device: Device, nbytes: int) -> int:
    address = device.take_memory(nbytes, device.inward)
    if not address:
        raise NoRoom("the device has no memory", who=f"cuda:{device.ordinal}", expected=f"{nbytes} bytes")
    return address


def encode(
    device: Device, codec: Codec, sources: Sequence[Region], feed: Feed | None, residual: OnDevice | None
) -> int:
    """Queue what encodes the parts of a tensor, and the *residual* that *feed* adds; where it will be: leave_memory().

    Raises:
        NoRoom: the device has no memory.
        DeviceError: the device fails.
    """
    stream, dtype, codecs = device.inward, sources[0].dtype, device.codecs
    count = sum(source.count for source in sources)
    coded = gathered = 0
    try:
        coded = _room(device, coded_bytes(codec, count))
        if feed is None:
            address, kind = sources[0].address, dtype
            if len(sources) > 1:
                address = gathered = _room(device, count * dtype.itemsize)
                for source, at in _spread(sources, address):
                    device.queue((WITHIN, at, source.address, source.nbytes), stream)
        else:
            kind = kept_as(dtype)
            wanted = OnDevice(device, count, np.dtype(kind.name))
            address, at, size = wanted.address, 0, wanted.dtype.itemsize
            for source in sources:
                before = residual.address + at if residual is not None else 0
                codecs.feed(stream, dtype, address + at, source.address, source.count, before)
                at += source.count * size
        codecs.encode(stream, codec, kind, coded, address, count)
        if feed is not None:
            lost = OnDevice(device, count, wanted.dtype) if feed.late else wanted
            codecs.lost(stream, codec, dtype, lost.address, address, count, coded)
            if feed.late:
                codecs.lost(stream, codec, dtype, address, address, count, 0)
            feed.found(lost, wanted if feed.late else None)
    except BaseException:
        if coded:
            device.leave_memory(coded, stream)
        raise
    finally:
        if gathered:
            device.leave_memory(gathered, stream)
    return coded


def _spread(parts: Sequence[Region], address: int) -> list[tuple[Region, int]]:
    """Each part that is not empty, and where it lies when they lie one after the other from *address* on."""
    found = []
    for part in parts:
        if part.nbytes:
            found.append((part, address))
        address += part.nbytes
    return found


class CodedResult(EagerCopy):
    """A result that comes encoded, for the parts of a tensor on one device: all of it goes to memory of ours there."""

    def __init__(self, device: Device, codec: Codec, targets: Sequence[Region]) -> None:
        self._codec, self._targets, self._dtype = codec, targets, targets[0].dtype
        self._count = sum(target.count for target in targets)
        nbytes = coded_bytes(codec, self._count)
        self._spread_at = -(-nbytes // _ALIGN) * _ALIGN
        super().__init__(device, 0, nbytes, coded_bytes(codec, BLOCK // self._dtype.itemsize))

    def take(self) -> bool:
        """Take memory for it, and to spread it; whether there was some. Nothing is there."""
        self._copied[:] = 0
        spread = self._count * self._dtype.itemsize if len(_spread(self._targets, 0)) > 1 else 0
        return self._take(self._spread_at + spread)

    def copies(self, to: int, result_buffer: int, attempt: int, nbytes: int) -> list[Queued]:
        """What brings the result that *attempt* has made, which lies at *result_buffer*, to the parts."""
        rest = super().copies(self.memory, result_buffer, attempt, nbytes)
        return [*(each for each in rest if callable(each) or each[0] != WITHIN), self._decode]

    def _decode(self, stream: Any) -> None:
        parts = _spread(self._targets, self.memory + self._spread_at)
        address = parts[0][1] if len(parts) > 1 else parts[0][0].address
        self.device.codecs.decode(stream, self._codec, self._dtype, address, self.memory, self._count)
        if len(parts) > 1:
            for target, at in parts:
                self.device.queue((WITHIN, target.address, at, target.nbytes), stream)
