"""The thin shell around NVIDIA's driver, through the package cuda-bindings: calls, a device's streams; marks."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from wancoll.errors import ConfigError, DeviceError

_NOT_READY = 600
_NOT_INITIALIZED = 3
_SHORTEST, _LONGEST = 20e-6, 1e-3  # pauses between two looks at a mark

_loading = threading.Lock()
_driver: Driver | None = None


class Driver:
    """The driver of this process; calling it makes one of its calls."""

    def __init__(self, api: Any) -> None:
        self.api, self.pid = api, os.getpid()

    def code(self, name: str, *arguments: Any) -> tuple[int, list[Any]]:
        """What a call returns."""
        code, *values = getattr(self.api, name)(*arguments)
        return int(code), values

    def __call__(self, name: str, *arguments: Any) -> Any:
        """What a call gives.

        Raises:
            DeviceError: it failed.
        """
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
    """The driver, loaded once.

    Raises:
        ConfigError: there is none, or not in this process.
    """
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
            "tensors of CUDA devices need a package that is not installed", who=who,
            expected="cuda-bindings, 13.0.3 or newer, below 14", got=str(bad),
            hint='pip install "wancoll[cuda]", or copy the tensor to the host first',
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
    """One device as one connection uses it: its primary context, and streams of our own.

    Attributes:
        inward: the stream of copies from the device.
        outward: the stream of copies to it.
        telling: the stream of what is to be told of copies; they do not wait for that.
        last: the mark behind the last copy to it.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self.ordinal = driver, ordinal
        self.last: Mark | None = None
        self._over = ""  # why its marks cannot be looked at any more
        self._closed = False  # all that was queued is done
        self._events: list[Any] = []  # that no mark uses
        self._all_events: list[Any] = []
        self.streams: list[Any] = []  # all of ours
        self._lent: list[tuple[Any, Mark]] = []  # and when each is free
        self._loose: list[Mark] = []  # that nobody else looks at
        self._number = driver("cuDeviceGet", ordinal)
        self.context = driver("cuDevicePrimaryCtxRetain", self._number)
        try:
            with self.current():
                _, self._priority = driver("cuCtxGetStreamPriorityRange")
                for _ in range(3):
                    self._new_stream()
                self._turn = self._new_event()
        except BaseException:
            self.close("it could not be set up")
            raise
        self.inward, self.outward, self.telling = self.streams

    @contextmanager
    def current(self) -> Iterator[None]:
        """Its context is the thread's while this is entered."""
        self._driver("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self._driver.code("cuCtxPopCurrent")

    def follow(self, stream: Any, earlier: Any) -> None:
        """What will be queued on *stream* comes after what is queued on *earlier* now."""
        self._driver("cuEventRecord", self._turn, earlier)
        self._driver("cuStreamWaitEvent", stream, self._turn, 0)

    def follow_mark(self, stream: Any, mark: Mark) -> None:
        """What will be queued on *stream* comes after *mark*."""
        if not mark.ready():
            self._driver("cuStreamWaitEvent", stream, mark.event, 0)

    def mark(self, stream: Any) -> Mark:
        """A mark behind what is queued on *stream*. Whoever drops one that was not reached gives it to forget()."""
        event = self._events.pop() if self._events else self._new_event()
        try:
            self._driver("cuEventRecord", event, stream)
        except BaseException:
            self._events.append(event)
            raise
        return Mark(self, event)

    def forget(self, mark: Mark) -> None:
        """Nobody will look at the mark any more: its event comes back when it is reached."""
        self._loose = [each for each in [*self._loose, mark] if not each.settled()]

    def lend(self) -> Any:
        """A stream of ours on which nothing waits for anything; return_after() gives it back."""
        for i, (stream, mark) in enumerate(self._lent):
            if mark.settled():
                del self._lent[i]
                return stream
        return self._new_stream()

    def return_after(self, stream: Any, mark: Mark) -> None:
        """A stream that was lent is free behind *mark*."""
        self._lent.append((stream, mark))

    def reached(self, event: Any) -> bool:
        """Whether all before a mark is done; its event is free then."""
        if self._closed:
            return True
        if self._over:
            raise DeviceError("the device was given up", who=f"cuda:{self.ordinal}", got=self._over)
        code, _ = self._driver.code("cuEventQuery", event)
        if code == _NOT_READY:
            return False
        if code:
            raise DeviceError(
                "the device failed", who=f"cuda:{self.ordinal}", got=self._driver.explain(code),
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
        self._driver.code("cuDevicePrimaryCtxRelease", self._number)

    def _new_stream(self) -> Any:
        flags = self._driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams.append(self._driver("cuStreamCreateWithPriority", flags, self._priority))
        return self.streams[-1]

    def _new_event(self) -> Any:
        event = self._driver("cuEventCreate", self._driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._all_events.append(event)
        return event

    def _destroy(self) -> None:
        while self._all_events:
            self._driver.code("cuEventDestroy", self._all_events.pop())
        while self.streams:
            self._driver.code("cuStreamDestroy", self.streams.pop())


class Mark:
    """A place in a stream that the device will come to."""

    __slots__ = ("_device", "event")

    def __init__(self, device: Device, event: Any) -> None:
        self._device, self.event = device, event

    def ready(self) -> bool:
        """Whether it has.

        Raises:
            DeviceError: it failed.
        """
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
    pause = _SHORTEST
    while not ready():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return True
