"""Runs a long-lived service under trio: signals, the readiness line, and word to the service manager."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import structlog
import trio

from wancoll.cli.running.notify import notify, watchdog_interval
from wancoll.cli.variables import misspelt
from wancoll.errors import ConfigError

log = structlog.get_logger("wancoll.service")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


# A service says by its task_status what it bound, and returns some time after stop is set.
Serve = Callable[..., Awaitable[object]]
Waits = Callable[[Any], tuple[str, trio.Event | None]]  # for what a service waits before it is ready; None: it does not


@dataclass
class _Announcer:
    """The service's task_status: says how far it is to whoever waits for that."""

    name: str
    describe: Callable[[Any], str]
    waits: Waits | None
    watchers: trio.Nursery
    has_started: bool = False

    def started(self, value: Any = None) -> None:
        self.has_started = True
        where, until = self.describe(value), None
        if self.waits is not None:
            what, until = self.waits(value)
            say(f"wancoll {self.name} started {where} and waits for {what}")
            notify(f"STATUS=waits for {what}")
        if until is None:
            self._ready(where)
        else:
            self.watchers.start_soon(self._ready_at, until, where)

    async def _ready_at(self, until: trio.Event, where: str) -> None:
        await until.wait()
        self._ready(where)

    def _ready(self, where: str) -> None:
        say(f"wancoll {self.name} ready {where}")
        notify("READY=1", f"STATUS=ready {where}")


def say(line: str) -> None:
    """Print a line. Whoever started us may read no more, or its disk be full: that is no reason to end."""
    try:
        print(line, flush=True)
    except OSError as bad:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor must the exit's own flush fail
        log.warning("standard output cannot be written", reason=str(bad))


def run(name: str, serve: Serve, describe: Callable[[Any], str], waits: Waits | None = None) -> None:
    """Run *serve* until it returns. The first SIGTERM or SIGINT sets its stop event, a second one ends the process.

    It says "wancoll NAME ready ...", with what *describe* makes of the value that *serve* started with. *waits* gives
    for that value what the service waits for before it is ready; meanwhile the line is "wancoll NAME started ... and
    waits for ...". None: it is ready when it has started.

    Raises:
        ConfigError: in an exception group; the system refused something before the service had started (an address in
            use, for example).
    """
    for variable, meant in misspelt.items():
        log.warning("a variable is no option of this command", variable=variable, did_you_mean=meant)
    os.umask(0o077)  # journal, keys, logs: all that it makes is its user's alone
    gc.collect()
    gc.freeze()  # what was imported stays: later collections, which interrupt operations, need not walk it
    trio.run(_run, name, serve, describe, waits)


async def _run(name: str, serve: Serve, describe: Callable[[Any], str], waits: Waits | None) -> None:
    stop = trio.Event()
    async with trio.open_nursery() as watchers:
        announcer = _Announcer(name, describe, waits, watchers)
        await watchers.start(_stop_on_signal, stop)
        if (interval := watchdog_interval()) is not None:
            watchers.start_soon(_keep_alive, interval)
        try:
            await serve(stop=stop, task_status=announcer)
        except* OSError as refused:
            if announcer.has_started:
                raise
            raise ConfigError(
                "the service cannot start",
                who=f"wancoll {name}",
                got=str(_first(refused)),
                hint="check the addresses and paths among its options",
            ) from refused
        watchers.cancel_scope.cancel()


async def serve_until(serve: Serve, *, stop: trio.Event, task_status: trio.TaskStatus[Any]) -> None:
    """Run `serve(task_status=...)`, which knows no stop event, and cancel it when *stop* is set."""

    async def cancel_when_stopped() -> None:
        await stop.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when_stopped)
        await serve(task_status=task_status)
        nursery.cancel_scope.cancel()


async def _stop_on_signal(stop: trio.Event, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        number = await anext(signals)
    for each in SIGNALS:
        signal.signal(each, _end_now)
    log.info("stopping; a second signal ends the process at once", signal=signal.Signals(number).name)
    notify("STOPPING=1", "STATUS=draining")
    stop.set()


def _end_now(number: int, _frame: FrameType | None) -> None:
    # Not through the event loop: it may be busy with what the user does not want to wait for.
    os._exit(128 + number)


async def _keep_alive(interval: float) -> None:
    """Tell the manager that the event loop turns."""
    while True:
        notify("WATCHDOG=1")
        await trio.sleep(interval)


def _first(group: BaseExceptionGroup[OSError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
