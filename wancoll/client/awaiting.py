"""Awaiting a call's handle, from asyncio and from trio: its wait() runs in a thread. Neither is imported for it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def awaited(wait: Callable[[], T]) -> Generator[Any, Any, T]:
    """For an __await__: what wait() returns or raises.

    A task that is cancelled leaves; the call goes on, and its thread ends with it or with the connection.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        found: T = yield from trio.to_thread.run_sync(wait, abandon_on_cancel=True).__await__()
        return found
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(outcome: T | None, bad: BaseException | None) -> None:
        if not future.done():
            future.set_result(outcome) if bad is None else future.set_exception(bad)  # type: ignore[arg-type]

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = wait(), None
        except BaseException as bad:
            outcome = None, bad
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, *outcome)

    # Not the loop's own threads, whose end it waits for: this one ends when the call does.
    threading.Thread(target=run, name="wancoll-await", daemon=True).start()
    return (yield from future)
