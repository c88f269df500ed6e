"""Runs a long-lived service under trio: signals, the readiness line, and word to the service manager."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, Protocol

import structlog
import trio

from wancoll.cli.notify import Notifier
from wancoll.errors import ConfigError

log = structlog.get_logger("wancoll.service")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Serve(Protocol):
    """A service: says through *task_status* what it bound, and returns some time after *stop* is set."""

    def __call__(self, *, stop: trio.Event, task_status: trio.TaskStatus[Any]) -> Awaitable[None]:
        """Run until *stop* is set and all is put away."""
        ...


class _Ready:
    """The service's task_status: announces it to whoever waits for it."""

    def __init__(self, name: str, describe: Callable[[Any], str], notifier: Notifier) -> None:
        self._name, self._describe, self._notifier = name, describe, notifier
        self.announced = False

    def started(self, value: Any = None) -> None:
        self.announced = True
        where = self._describe(value)
        try:
            print(f"wancoll {self._name} ready {where}", flush=True)
        except BrokenPipeError:
            # Whoever started us reads no more; that is no reason to end. The exit's own flush must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._notifier.send("READY=1", f"STATUS=ready {where}")


def run(name: str, serve: Serve, describe: Callable[[Any], str]) -> None:
    """Run *serve* until it returns. The first SIGTERM or SIGINT sets its stop event, a second one ends the process.

    Args:
        name: of the service, for the readiness line "wancoll NAME ready ...".
        serve: the service.
        describe: turns the value that *serve* started with into the rest of the readiness line.

    Raises:
        ConfigError: in an exception group; the system refused something before the service was ready (an address in
            use, for example).
    """
    notifier = Notifier.from_environment()
    gc.collect()
    gc.freeze()  # what was imported stays: later collections, which interrupt operations, need not walk it
    try:
        trio.run(_run, name, serve, describe, notifier)
    finally:
        notifier.close()


async def _run(name: str, serve: Serve, describe: Callable[[Any], str], notifier: Notifier) -> None:
    stop = trio.Event()
    ready = _Ready(name, describe, notifier)
    async with trio.open_nursery() as watchers:
        await watchers.start(_stop_on_signal, stop, notifier)
        if notifier.watchdog_interval is not None:
            watchers.start_soon(_keep_alive, notifier, notifier.watchdog_interval)
        try:
            await serve(stop=stop, task_status=ready)
        except* OSError as refused:
            if ready.announced:
                raise
            raise ConfigError(
                "the service cannot start",
                who=f"wancoll {name}",
                got=str(_first(refused)),
                hint="check the addresses and paths among its options",
            ) from refused
        watchers.cancel_scope.cancel()


async def serve_until(
    serve: Callable[..., Awaitable[None]], *, stop: trio.Event, task_status: trio.TaskStatus[Any]
) -> None:
    """Run `serve(task_status=...)`, which knows no stop event, and cancel it when *stop* is set."""

    async def cancel_when_stopped() -> None:
        await stop.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when_stopped)
        await serve(task_status=task_status)
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    stop: trio.Event, notifier: Notifier, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        number = await anext(signals)
    for each in SIGNALS:
        signal.signal(each, _end_now)
    log.info("stopping; a second signal ends the process at once", signal=signal.Signals(number).name)
    notifier.send("STOPPING=1", "STATUS=draining")
    stop.set()


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Not through the event loop: it may be busy with what the user does not want to wait for.
    os._exit(128 + number)


async def _keep_alive(notifier: Notifier, interval: float) -> None:
    """Tell the manager that the event loop turns."""
    while True:
        notifier.send("WATCHDOG=1")
        await trio.sleep(interval)


def _first(group: BaseExceptionGroup[OSError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
