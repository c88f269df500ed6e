"""Awaiting a call's handle, from asyncio and from trio: a thread waits for the call. Neither is imported for it.

The client's threads, too: the end of the process waits for them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

_END_SECONDS = 5.0  # for which the end of the process waits for all threads together
_begun: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def begin(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread. It ends soon after its connection is closed, and the end of the process waits for that.

    A thread that the interpreter stops inside of somebody's C++ (torch, CUDA) takes the process down by SIGABRT.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    _begun.add(thread)
    return thread


def join(seconds: float, *names: str) -> None:
    """Wait for the end of all threads, or of those with these names, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    for thread in list(_begun):
        if not names or thread.name in names:
            thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(join, _END_SECONDS)  # before connect registers its own: so this runs when connections are closed


def awaited(settle: Callable[[], object]) -> Generator[Any, Any, None]:
    """For an __await__: return when settle() has, or raise what it raised.

    A task that is cancelled leaves; the call goes on, and its thread ends with it or with the connection.
    """
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        yield from trio.to_thread.run_sync(settle, abandon_on_cancel=True).__await__()
        return
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def tell(bad: BaseException | None) -> None:
        if not future.done():
            future.set_result(None) if bad is None else future.set_exception(bad)

    def run() -> None:
        outcome = None
        try:
            settle()
        except BaseException as bad:
            outcome = bad
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(tell, outcome)

    # Not the loop's own threads, whose end it waits for: this one ends when the call does.
    begin(run, "wancoll-await")
    yield from future
