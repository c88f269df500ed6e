"""Streams of the caller that are held until a result is there: each waits for a word of pinned memory that we write.

To let a stream go on is a store to memory, no call of the driver: it works while the driver or the device is stuck, and
at the process's exit. Every way out of a call does it, and so does time.

    the caller's stream    what was queued | a mark | wait for the word | what the caller queues from now on
    a stream that we lend  wait for the mark | the copies                                    (queued at the commit)
    a thread               the call is finished | the copies are done, or there are none | the word is written

The copies wait for the mark, not for the stream as it is then: that waits for the word, which waits for the copies. And
they go to a stream on which nothing else waits.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wancoll.client.cuda.driver import Device, Driver, Mark, until
from wancoll.client.cuda.origin import Origin
from wancoll.client.memory.tensors import Region
from wancoll.errors import ConfigError, DeviceError

_PAGE = 4096
_COUNT = _PAGE // 4
_NOT_SUPPORTED = 801


class Words:
    """A page of pinned words. A word only counts up, so it may be used again before its stream has come past it."""

    def __init__(self, driver: Driver) -> None:
        flags = driver.api.CU_MEMHOSTALLOC_PORTABLE | driver.api.CU_MEMHOSTALLOC_DEVICEMAP
        self._driver = driver
        self._address = int(driver("cuMemHostAlloc", _PAGE, flags))
        ctypes.memset(self._address, 0, _PAGE)
        self._values = (ctypes.c_uint32 * _COUNT).from_address(self._address)
        self._wanted = [0] * _COUNT
        self._free = list(range(_COUNT))
        self._passed: list[Mark | None] = [None] * _COUNT  # the place behind its last wait
        self._unsure = False  # a stream may wait for a word, and no mark says until when

    def hold(self, device: Device, stream: int) -> int:
        """Let *stream* wait; the word's number, for release().

        Raises:
            ConfigError: the device cannot, or too many streams wait.
            DeviceError: the driver fails.
        """
        if not self._free:
            raise ConfigError(
                "too many streams wait for results", who="wait_stream", expected=f"at most {_COUNT}", got="one more",
                hint="wait() for some of them",
            )  # fmt: skip
        number = self._free[-1]
        at = self._driver("cuMemHostGetDevicePointer", self._address + 4 * number, 0)
        value = (self._wanted[number] + 1) & 0xFFFFFFFF
        try:
            code, _ = self._driver.code("cuStreamWaitValue32", stream, at, value, 0)  # cyclic: greater or equal
        except RuntimeError:  # the driver has no such call
            code = _NOT_SUPPORTED
        if code == _NOT_SUPPORTED:
            raise ConfigError(
                "streams of this device cannot wait on memory", who=f"wait_stream on cuda:{device.ordinal}",
                expected="a device and a driver with cuStreamWaitValue32", got="CUDA_ERROR_NOT_SUPPORTED",
                hint="use wait(), which blocks the host instead",
            )  # fmt: skip
        if code:
            raise DeviceError(
                "a call of the CUDA driver failed", who="cuStreamWaitValue32", got=self._driver.explain(code)
            )
        self._wanted[number] = value
        self._free.pop()
        earlier, self._passed[number] = self._passed[number], None
        if earlier is not None:
            device.forget(earlier)
        try:
            self._passed[number] = device.mark(stream)
        except DeviceError:
            self._unsure = True
            self.release(number)
            raise
        return number

    def release(self, number: int) -> None:
        """Let the stream go on."""
        self._values[number] = self._wanted[number]
        self._free.append(number)

    def close(self, device: Device, deadline: float) -> bool:
        """Free the page when all streams have come past their words; False: that is not so, and it is kept."""

        def passed() -> bool:
            return all(mark is None or mark.ready() for mark in self._passed)

        try:
            if self._unsure or not until(passed, deadline):
                return False
            with device.current():
                self._driver("cuMemFreeHost", self._address)
        except DeviceError:
            return False
        return True


@dataclass(eq=False)
class StreamWaits:
    """The streams that wait for one result."""

    words: Words
    numbers: list[int] = field(default_factory=list)  # their words
    before: dict[int, list[Mark]] = field(default_factory=dict)  # marks that the copies to each device come behind
    released: bool = False  # they wait no more; a result that comes now is ordered as others are
    pid: int = field(default_factory=os.getpid)

    def release(self) -> None:
        """Let them go on; again is harmless."""
        if not self.released and self.pid == os.getpid():
            self.released = True
            for number in self.numbers:
                self.words.release(number)


def check_may_wait(targets: Sequence[Region], pinned: bool) -> None:
    """Refuse to let a stream wait for a result that does not come from pinned memory to a device."""
    host = [target for target in targets if target.device is None]
    if host:
        raise ConfigError(
            "the result is for main memory, which no stream has to wait for", who="wait_stream",
            expected="tensors on CUDA devices", got=str(host[0]), hint="use wait()",
        )  # fmt: skip
    if targets and not pinned:
        raise ConfigError(
            "the copy of this result will block, as no memory could be pinned for it", who="wait_stream",
            expected="pinned memory", got=str(targets[0]), hint="use wait()",
        )  # fmt: skip


def stream_of(origin: Origin, asked: int | None) -> int:
    """The caller's stream for a tensor: the one that it asked for, else the one that is the tensor's now."""
    if asked is not None:
        return asked
    found = origin.now() if origin.now is not None else origin.stream
    if found is None:
        raise ConfigError(
            "the tensor does not say which stream it is used on", who="wait_stream(stream=None)",
            expected="stream=, the stream that is to wait, as a number", got="None",
            hint="1 is the legacy default stream, 2 that of the thread",
        )  # fmt: skip
    return found


def hold(words: Words, targets: Iterable[tuple[Device, Origin]], asked: int | None) -> StreamWaits:
    """Let the streams of these targets wait; all of them, or none.

    Raises:
        ConfigError: a stream is not known, or cannot wait.
        DeviceError: the driver fails.
    """
    streams = [(device, origin, stream_of(origin, asked)) for device, origin in targets]
    stream_waits = StreamWaits(words)
    _stream_waits.add(stream_waits)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)  # runs before what was registered so far, which may wait for the device
    done: set[tuple[int, int]] = set()
    try:
        # First all marks: what comes before the copies must not wait for a word of ours.
        for device, origin, stream in streams:
            for each in {stream, origin.lasting if origin.lasting is not None else stream}:
                if (device.ordinal, each) not in done:
                    done.add((device.ordinal, each))
                    with device.current():
                        stream_waits.before.setdefault(device.ordinal, []).append(device.mark(each))
        for device, stream in {(device, stream) for device, _, stream in streams}:
            with device.current():
                stream_waits.numbers.append(words.hold(device, stream))
    except BaseException:
        stream_waits.release()
        raise
    return stream_waits


_stream_waits: weakref.WeakSet[StreamWaits] = weakref.WeakSet()


def _at_exit() -> None:
    """Threads that would write the words end now."""
    for stream_waits in list(_stream_waits):
        stream_waits.release()
