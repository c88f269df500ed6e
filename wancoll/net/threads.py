"""Calls in a thread, of which a machine may have no more for a while."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")

_NONE_LEFT = "can't start new thread"  # CPython's words


async def in_thread(call: Callable[..., T], *arguments: object, limiter: trio.CapacityLimiter | None = None) -> T:
    """Run *call* in a thread as trio.to_thread.run_sync does; a cancelled caller waits for the end.

    Raises:
        OSError: no thread can be started now, as where a container's processes are all it may have.
    """
    try:
        return await trio.to_thread.run_sync(call, *arguments, limiter=limiter)
    except RuntimeError as bad:
        if str(bad) != _NONE_LEFT:
            raise
        raise OSError(errno.EAGAIN, "no thread can be started: this machine or container has all it may have") from bad
