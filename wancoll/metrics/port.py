"""The port of metrics: GET /metrics, /healthz and /readyz. A trio shell.

Many requests for /metrics share a text, so that they take no more than a share of the event loop's time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from wancoll.limits import PROTOCOL_VERSION, package_version
from wancoll.metrics import text
from wancoll.metrics.core import families as f
from wancoll.metrics.core.operations import Histogram
from wancoll.net import http

_LOOK = 0.25  # seconds between looks at how late the event loop is
_SHARE = 0.05  # of the event loop's time that goes into texts at most


@dataclass(slots=True)
class Source:
    """The process that the port tells of."""

    role: str  # "peer" or "master"
    kernels: str  # of the engine; "": it has none
    # gives all metrics but those of the port itself, each made when it is taken; None is a pause
    families: Callable[[], Iterator[f.Family | None]]
    unready: Callable[[], str]  # gives why it is not ready, "" if it is


class MetricsPort:
    """Answers GET /metrics, /healthz and /readyz. Who opened the *listeners* closes them.

    A reader of /metrics shows the *token*; "": anybody may read, under a name of loopback only.
    """

    def __init__(self, source: Source, listeners: list[socket.socket], token: str = "") -> None:
        self._source, self._token = source, token.encode()
        self._port = http.Port("metrics", listeners, self._answer)
        self._lag = Histogram(f.LAG_SECONDS)
        self._started_at = trio.current_time()
        self._making = trio.Lock()
        self._text, self._good_until = b"", self._started_at

    async def serve(self) -> None:
        """Task: answer, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_loop)
            await self._port.serve()

    async def _watch_loop(self) -> None:
        while True:
            due = (trio.current_time() // _LOOK + 1) * _LOOK  # when a daemon's other tasks wake, too
            await trio.sleep_until(due)
            self._lag.add(trio.current_time() - due)

    async def _answer(self, request: http.Request) -> http.Answer:
        match request.path:
            case "/healthz":
                return http.Answer(200, b"ok\n")
            case "/readyz":
                why = self._source.unready()
                return http.Answer(503, f"{why}\n".encode()) if why else http.Answer(200, b"ready\n")
            case "/metrics":
                refusal = http.refused(request, self._token, "WANCOLL_METRICS_TOKEN")
                return refusal or http.Answer(200, await self._metrics(), text.CONTENT_TYPE)
        return http.Answer(404, b"/metrics, /healthz and /readyz are here\n")

    # ---- the text ------------------------------------------------------------------------------------

    async def _metrics(self) -> bytes:
        """What is so now; whoever asks again soon after gets the same."""
        async with self._making:
            if trio.current_time() >= self._good_until:
                parts: list[bytes] = []
                took, began = 0.0, trio.current_time()
                for piece in self._pieces():
                    parts.append(piece)
                    took += trio.current_time() - began
                    await trio.lowlevel.checkpoint()
                    began = trio.current_time()
                self._text, self._good_until = b"".join(parts), trio.current_time() + took * (1 / _SHARE - 1)
            return self._text

    def _pieces(self) -> Iterator[bytes]:
        """The text, with pauses between."""
        for family in self._families():
            yield b""
            if family is not None:
                yield from text.pieces(family)

    def _families(self) -> Iterator[f.Family | None]:
        about = self._source.role, package_version(), str(PROTOCOL_VERSION), self._source.kernels
        yield f.Family(f.BUILD, [(about, 1)])
        yield f.Family(f.UPTIME, [((), trio.current_time() - self._started_at)])
        yield f.Family(f.LAG, [((), self._lag.bins)])
        yield f.Family(f.SCRAPES_REFUSED, [((), self._port.refusals.count)])
        yield from self._source.families()
