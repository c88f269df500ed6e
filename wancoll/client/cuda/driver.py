"""The thin shell around NVIDIA's driver, through the package cuda-bindings: calls, a device's streams; marks."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from wancoll.errors import ConfigError, DeviceError

TO_DEVICE, TO_HOST, WITHIN = "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"
_NOT_READY = 600
_NOT_INITIALIZED = 3
_SHORTEST, _LONGEST = 20e-6, 1e-3  # pauses between two looks at a mark
_LATER = 32  # a mark is seen this part of the wait too late at most

_loading = threading.Lock()
_driver: Driver | None = None
_inside = threading.local()  # .device: whose context is the thread's


Copy = tuple[str, int, int, int]  # the driver's call, to, from, bytes


class Driver:
    """The driver of this process; calling it makes one of its calls."""

    def __init__(self, api: Any) -> None:
        self.api, self.pid = api, os.getpid()

    def code(self, name: str, *arguments: Any) -> tuple[int, list[Any]]:
        """What a call returns."""
        code, *values = getattr(self.api, name)(*arguments)
        return int(code), values

    def __call__(self, name: str, *arguments: Any) -> Any:
        """What a call gives. Raises DeviceError: it failed."""
        code, values = self.code(name, *arguments)
        if code:
            raise DeviceError("a call of the CUDA driver failed", who=name, got=self.explain(code))
        return values if len(values) != 1 else values[0]

    def explain(self, code: int) -> str:
        """A code for people."""
        said = [value for call in ("cuGetErrorName", "cuGetErrorString") for value in self._text(call, code)]
        return f"{code}: {', '.join(said)}" if said else str(code)

    def _text(self, call: str, code: int) -> list[str]:
        with suppress(Exception):
            failed, values = self.code(call, self.api.CUresult(code))
            return [values[0].decode()] if not failed else []
        return []


def driver(who: str) -> Driver:
    """The driver, loaded once. Raises ConfigError: there is none, or not in this process."""
    global _driver  # noqa: PLW0603 -- there is one driver in a process
    with _loading:
        if _driver is None:
            _driver = _load(who)
        if _driver.pid != os.getpid():
            raise _forked(who)
        return _driver


def _load(who: str) -> Driver:
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as bad:
        raise ConfigError(
            "tensors of CUDA devices, and pinned memory, need a package that is not installed", who=who,
            expected="cuda-bindings, 13.0.3 or newer, below 14", got=str(bad),
            hint="run, in the source folder, pip install '.[cuda]', or copy the tensor to plain host memory first",
        ) from bad  # fmt: skip
    found = Driver(api)
    try:
        code, _ = found.code("cuInit", 0)
    except RuntimeError as bad:  # the library itself is missing
        raise _no_driver(who, str(bad)) from bad
    if code == _NOT_INITIALIZED:  # what a child gets whose parent had initialised it
        raise _forked(who)
    if code:
        raise _no_driver(who, found.explain(code))
    return found


def _no_driver(who: str, got: str) -> ConfigError:
    return ConfigError(
        "there is no CUDA driver that can be used", who=who, expected="libcuda.so.1 and a device", got=got,
        hint="install NVIDIA's driver (nvidia-smi shows it), or copy the tensor to the host first",
    )  # fmt: skip


def _forked(who: str) -> ConfigError:
    return ConfigError(
        "CUDA cannot be used in a process that was forked after its parent had begun to", who=who,
        expected="a process of its own", got=f"a forked child, {os.getpid()}",
        hint="start it with multiprocessing's 'spawn', or fork before CUDA is used",
    )  # fmt: skip


class Device:
    """One device as one connection uses it: its primary context, and streams of our own."""

    def __init__(self, driver: Driver, ordinal: int, lock: threading.RLock) -> None:
        self.driver, self.ordinal, self.lock = driver, ordinal, lock
        self.last: Mark | None = None  # behind the last copy to the device
        self._over = ""  # why its marks cannot be looked at any more
        self._closed = False  # all that was queued is done
        self._events: list[Any] = []  # that no mark uses
        self._all_events: list[Any] = []
        self.streams: list[Any] = []  # all of ours
        self._lent: list[tuple[Any, Mark]] = []  # and when each is free
        self._loose: list[Mark] = []  # that nobody else looks at
        self._pool: Any = None  # of memory for early results; False: the driver has no such pools
        self._taken: dict[int, int] = {}  # by address: bytes of an early result; 0: of something else
        self.dropped: list[int] = []  # addresses that nobody uses but what is queued on `inward`
        self.residents: weakref.WeakSet[Any] = weakref.WeakSet()  # residuals that lie there
        self.codecs: Any = None  # the codecs' kernels, loaded when they are needed; False: there are none
        self._leaving: list[tuple[Mark, int]] = []  # bytes that are free behind the mark
        self.number = driver("cuDeviceGet", ordinal)
        self.context = driver("cuDevicePrimaryCtxRetain", self.number)
        try:
            with self.current():
                _, self._priority = driver("cuCtxGetStreamPriorityRange")
                for _ in range(3):
                    self._new_stream()
                self._turn = self._new_event()
        except BaseException:
            self.close("it could not be set up")
            raise
        # Of copies from the device, of copies to it, and of what is to be told of copies: they do not wait for that.
        self.inward, self.outward, self.telling = self.streams

    @contextmanager
    def current(self) -> Iterator[None]:
        """Its context is the thread's while this is entered, again or not."""
        outside = getattr(_inside, "device", None)
        if outside is self:
            yield
            return
        self.driver("cuCtxPushCurrent", self.context)
        _inside.device = self
        try:
            yield
        finally:
            _inside.device = outside
            self.driver.code("cuCtxPopCurrent")

    def follow(self, stream: Any, earlier: Any) -> None:
        """What will be queued on *stream* comes after what is queued on *earlier* now."""
        self.driver("cuEventRecord", self._turn, earlier)
        self.driver("cuStreamWaitEvent", stream, self._turn, 0)

    def follow_mark(self, stream: Any, mark: Mark) -> None:
        """What will be queued on *stream* comes after *mark*."""
        if not mark.ready():
            self.wait_for(stream, mark)

    def wait_for(self, stream: Any, mark: Mark) -> None:
        """Do as follow_mark() with a mark that was just made, and is not worth a look."""
        if mark.event is not None:
            self.driver("cuStreamWaitEvent", stream, mark.event, 0)

    def mark(self, stream: Any) -> Mark:
        """A mark behind what is queued on *stream*. Whoever drops one that was not reached gives it to forget()."""
        event = self._events.pop() if self._events else self._new_event()
        try:
            self.driver("cuEventRecord", event, stream)
        except BaseException:
            self._events.append(event)
            raise
        return Mark(self, event)

    def forget(self, mark: Mark) -> None:
        """Nobody will look at the mark any more: its event comes back when it is reached."""
        self._loose = [each for each in [*self._loose, mark] if not each.settled()]

    def lend(self) -> Any:
        """A stream of ours on which nothing waits for anything; give_back() ends that."""
        for i, (stream, mark) in enumerate(self._lent):
            if mark.settled():
                del self._lent[i]
                return stream
        return self._new_stream()

    def give_back(self, stream: Any, mark: Mark | None = None) -> None:
        """A stream that was lent is free behind *mark*; without one now, as nothing is left on it."""
        self._lent.append((stream, mark or Mark(self, None)))

    def room(self, most: int) -> int:
        """How much of *most* bytes of memory may be taken."""
        self._leaving = [each for each in self._leaving if not each[0].settled()]
        return most - sum(self._taken.values()) - sum(nbytes for _, nbytes in self._leaving)

    def take_memory(self, nbytes: int, stream: Any, *, early: bool = False) -> int:
        """Memory of the device, to be used on *stream*, or behind what is queued there now; 0: there is none.

        *early*: it counts for room().
        """
        while self.dropped:
            self.leave_memory(self.dropped.pop(), self.inward)
        if self._pool is None:
            self._pool = self._new_pool() or False
        if self._pool is False:
            return 0
        code, values = self.driver.code("cuMemAllocFromPoolAsync", nbytes, self._pool, stream)
        if code:
            return 0
        address = int(values[0])
        self._taken[address] = nbytes if early else 0
        return address

    def leave_memory(self, address: int, stream: Any) -> int:
        """It is free behind what is queued on *stream*; how many bytes of an early result, for left()."""
        self.driver("cuMemFreeAsync", address, stream)
        return self._taken.pop(address)

    def left(self, nbytes: int, mark: Mark) -> None:
        """Memory that was left is free behind *mark*."""
        self._leaving.append((mark, nbytes))

    def fetch(self, address: int, nbytes: int, seconds: float) -> bytes:
        """What lies in memory that is used on `inward`, once all that is queued there is done. Without the lock.

        No other stream is waited for: one of the caller's may wait for us.

        Raises:
            DeviceError: the device fails, or does not come to it in so many *seconds*.
            ConfigError: this is a forked child.
        """
        if self.driver.pid != os.getpid():
            raise _forked(f"cuda:{self.ordinal}")

        def ready() -> bool:
            with self.lock:
                return mark.ready()

        with self.current():
            to = int(self.driver("cuMemHostAlloc", nbytes, 0))
            with self.lock:
                self.queue((TO_HOST, to, address, nbytes), self.inward)
                mark = self.mark(self.inward)
            if not until(ready, time.monotonic() + seconds):  # and `to` stays: it may be written to
                raise DeviceError(
                    "the device does not come to what was queued", who=f"cuda:{self.ordinal}",
                    expected=f"an end within {seconds:.0f} s",
                )  # fmt: skip
            found = ctypes.string_at(to, nbytes)
            self.driver("cuMemFreeHost", to)
        return found

    def queue(self, copy: Copy, stream: Any) -> None:
        """Queue a copy; memory of the host must be pinned."""
        self.driver(*copy, stream)

    def _new_pool(self) -> Any:
        """A pool whose memory goes back to the system, and whose streams do not come to wait for each other."""
        api = self.driver.api
        wanted = api.CUmemPoolProps()
        wanted.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = self.ordinal
        with suppress(DeviceError, RuntimeError):  # the device, or the driver, has no such thing
            pool = self.driver("cuMemPoolCreate", wanted)
            try:
                reuse = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES
                self.driver("cuMemPoolSetAttribute", pool, reuse, 0)
            except DeviceError:
                self.driver.code("cuMemPoolDestroy", pool)
                raise
            return pool
        return None

    def reached(self, event: Any) -> bool:
        """Whether all before a mark is done; its event is free then."""
        if self._closed:
            return True
        if self._over:
            raise DeviceError("the device was given up", who=f"cuda:{self.ordinal}", got=self._over)
        code, _ = self.driver.code("cuEventQuery", event)
        if code == _NOT_READY:
            return False
        if code:
            raise DeviceError(
                "the device failed", who=f"cuda:{self.ordinal}", got=self.driver.explain(code),
                hint="after most such errors a process cannot use CUDA any more",
            )  # fmt: skip
        self._events.append(event)
        return True

    def close(self, over: str) -> None:
        """Give all back; each part by itself, so that one that fails keeps no other. *over*: why it still copies."""
        self._over, self._closed = over, not over
        with suppress(DeviceError), self.current():
            self._destroy()
        self._destroy()
        self.driver.code("cuDevicePrimaryCtxRelease", self.number)

    def _new_stream(self) -> Any:
        flags = self.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams.append(self.driver("cuStreamCreateWithPriority", flags, self._priority))
        return self.streams[-1]

    def _new_event(self) -> Any:
        event = self.driver("cuEventCreate", self.driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._all_events.append(event)
        return event

    def _destroy(self) -> None:
        if self.codecs and self._closed:
            self.codecs.close()
        self.codecs = False
        while self._taken and self._closed:
            self.driver.code("cuMemFreeAsync", self._taken.popitem()[0], self.streams[0])
        if self._pool:
            self.driver.code("cuMemPoolDestroy", self._pool)
            self._pool = False
        while self._all_events:
            self.driver.code("cuEventDestroy", self._all_events.pop())
        while self.streams:
            self.driver.code("cuStreamDestroy", self.streams.pop())


class Memory:
    """Memory of a device, until nobody holds this; it outlives the connection. Raises DeviceError: there is none."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, driver: Driver, ordinal: int, nbytes: int) -> None:
        number = driver("cuDeviceGet", ordinal)
        context = driver("cuDevicePrimaryCtxRetain", number)
        try:
            driver("cuCtxPushCurrent", context)
            try:
                self.address = int(driver("cuMemAlloc", nbytes))
            finally:
                driver.code("cuCtxPopCurrent")
        except BaseException:
            driver.code("cuDevicePrimaryCtxRelease", number)
            raise
        weakref.finalize(self, _free, driver, number, context, self.address).atexit = False


def _free(driver: Driver, number: Any, context: Any, address: int) -> None:
    if driver.pid == os.getpid():  # else it is the parent's
        driver.code("cuCtxPushCurrent", context)
        driver.code("cuMemFree", address)
        driver.code("cuCtxPopCurrent")
        driver.code("cuDevicePrimaryCtxRelease", number)


class Mark:
    """A place in a stream that the device will come to."""

    __slots__ = ("_device", "event")

    def __init__(self, device: Device, event: Any) -> None:
        self._device, self.event = device, event

    def ready(self) -> bool:
        """Whether it has. Raises DeviceError: it failed."""
        if self.event is not None and self._device.reached(self.event):
            self.event = None
        return self.event is None

    def settled(self) -> bool:
        """Whether it has, or never will, as the device failed."""
        try:
            return self.ready()
        except DeviceError:
            return True


def until(ready: Callable[[], bool], deadline: float | None) -> bool:
    """Wait for *ready*, or until *deadline*, a time.monotonic(); whether it came true. Ctrl-C ends it."""
    began = time.monotonic()
    while not ready():
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        time.sleep(min(max(_SHORTEST, (now - began) / _LATER), _LONGEST))
    return True
