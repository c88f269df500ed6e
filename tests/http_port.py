"""A port that speaks HTTP, served in a test: bytes to it and back, and the lines that it logs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
import trio


def get(path: str, method: str = "GET", *headers: str, host: str = "localhost:1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


async def say(address: tuple[str, int], *parts: bytes) -> bytes:
    """All that is answered."""
    async with await trio.open_tcp_stream(*address) as stream:
        with contextlib.suppress(trio.BrokenResourceError):
            for part in parts:
                await stream.send_all(part)
        answer = b""
        with contextlib.suppress(trio.BrokenResourceError):
            while data := await stream.receive_some():
                answer += data
        return answer


@contextlib.asynccontextmanager
async def served(sockets: list[socket.socket], serve: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """While *serve* runs over *sockets*."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            yield
            nursery.cancel_scope.cancel()
    finally:
        for one in sockets:
            one.close()


def logged(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[dict[str, Any]]:
    """Lines of the log of *module*, of all levels."""
    lines: list[dict[str, Any]] = []

    class Log:
        def __getattr__(self, level: str) -> Any:
            return lambda event, **fields: lines.append({"event": event, "level": level, **fields})

    monkeypatch.setattr(module, "log", Log())
    return lines
