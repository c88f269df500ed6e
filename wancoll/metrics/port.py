"""The port: GET /metrics, /healthz and /readyz over HTTP/1.1, one answer for each connection. A trio shell.

Whatever comes, a connection costs a few KiB and seconds, and at most one line of the log. Many requests for /metrics
share a text, so that they take no more than a share of the event loop's time.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import h11
import structlog
import trio

from wancoll.limits import PROTOCOL_VERSION
from wancoll.metrics import text
from wancoll.metrics.core import families as f
from wancoll.metrics.core.operations import Histogram
from wancoll.metrics.guard import refused
from wancoll.net.contain import contained
from wancoll.net.listen import Handshakes, Sparing, forget, trio_listeners, whose, why_ended

log = structlog.get_logger("wancoll.metrics")

_CONNECTIONS = 16  # at once
_SECONDS = 5.0  # for a request and its answer
_LEAST = 0.25  # for so long a connection gives way to nobody
_REQUEST_BYTES = 8192  # of a request's line and headers
_LINGER = 1.0  # seconds for the other end to close after its answer
_LOOK = 0.25  # seconds between looks at how late the event loop is
_SHARE = 0.05  # of the event loop's time that goes into texts at most

_HEALTH = "text/plain; charset=utf-8"


class Source:
    """Whom the port tells of.

    Args:
        role: "peer" or "master".
        kernels: of the engine; "": it has none.
        families: gives all metrics but those of the port itself, each made when it is taken; None is a pause.
        unready: gives why it is not ready, "" if it is.
    """

    def __init__(
        self, role: str, kernels: str, families: Callable[[], Iterator[f.Family | None]], unready: Callable[[], str]
    ) -> None:
        self.role, self.kernels, self.families, self.unready = role, kernels, families, unready


class Port:
    """See the module.

    Args:
        source: whom it tells of.
        listeners: closed by who opened them.
        token: that a reader of /metrics has to show; "": none, and only under a name of loopback.
    """

    def __init__(self, source: Source, listeners: list[socket.socket], token: str = "") -> None:
        self._source, self._listeners, self._token = source, listeners, token.encode()
        self._open = Handshakes(_CONNECTIONS, _SECONDS, _LEAST)
        self._refusals = Sparing()
        self._lag = Histogram(f.LAG_SECONDS)
        self._started_at = trio.current_time()
        self._making = trio.Lock()
        self._text, self._good_until = b"", self._started_at

    async def serve(self) -> None:
        """Task: answer, until cancelled."""
        log.info("metrics", at=", ".join("{}:{}".format(*one.getsockname()[:2]) for one in self._listeners))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_loop)
            await trio.serve_listeners(self.accept, trio_listeners(self._listeners))

    async def _watch_loop(self) -> None:
        while True:
            due = (trio.current_time() // _LOOK + 1) * _LOOK  # when a daemon's other tasks wake, too
            await trio.sleep_until(due)
            self._lag.add(trio.current_time() - due)

    # ---- one connection ------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the process stays up."""
        who, gone = whose(stream.socket), (trio.BrokenResourceError, trio.ClosedResourceError, OSError)
        with (
            contextlib.suppress(*gone),
            self._open.one(who) as scope,
            contained("the metrics port", lambda: who, expected=gone),
        ):
            await self._answer(stream, who)
        if scope.cancelled_caught:
            self._refuse(who, why_ended(scope))
        stream.socket.close()

    async def _answer(self, stream: trio.SocketStream, who: str) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_REQUEST_BYTES)
        try:
            request = await _request(http, stream)
        except h11.RemoteProtocolError as bad:
            self._refuse(who, f"sent what is no request: {bad}")
            await _send(http, stream, bad.error_status_hint or 400, b"this is no request\n")
            return
        if request is None:
            return
        status, body, kind, more = await self._page(request)
        if status in (400, 401, 403, 404, 405):
            self._refuse(who, f"was answered with {status}")
        await _send(http, stream, status, body, kind, more, head=request.method == b"HEAD")

    async def _page(self, request: h11.Request) -> tuple[int, bytes, str, list[tuple[str, str]]]:
        """Status, body, its type, and headers."""
        if request.method not in (b"GET", b"HEAD"):
            return 405, b"only GET and HEAD\n", _HEALTH, [("Allow", "GET, HEAD")]
        match request.target.partition(b"?")[0]:
            case b"/healthz":
                return 200, b"ok\n", _HEALTH, []
            case b"/readyz":
                why = self._source.unready()
                return (503, f"{why}\n".encode(), _HEALTH, []) if why else (200, b"ready\n", _HEALTH, [])
            case b"/metrics":
                status, why = refused(self._token, *(_all(request, name) for name in (b"authorization", b"host")))
                if status == 401:
                    text_401 = f"{why} of WANCOLL_METRICS_TOKEN as bearer\n".encode()
                    return 401, text_401, _HEALTH, [("WWW-Authenticate", "Bearer")]
                if status:
                    return status, f"{why}\n".encode(), _HEALTH, []
                return 200, await self._metrics(), text.CONTENT_TYPE, []
        return 404, b"/metrics, /healthz and /readyz are here\n", _HEALTH, []

    def _refuse(self, who: str, reason: str) -> None:
        self._refusals.say(log.info, "request refused", who=who, reason=reason)

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
        about = self._source.role, _version(), str(PROTOCOL_VERSION), self._source.kernels
        yield f.Family(f.BUILD, [(about, 1)])
        yield f.Family(f.UPTIME, [((), trio.current_time() - self._started_at)])
        yield f.Family(f.LAG, [((), self._lag.bins)])
        yield f.Family(f.SCRAPES_REFUSED, [((), self._refusals.count)])
        yield from self._source.families()


def _all(request: h11.Request, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in request.headers if name == header]


async def _request(http: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
    """The first one; None: the other end says nothing.

    Raises:
        h11.RemoteProtocolError: it is none, or too large.
    """
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some(_REQUEST_BYTES))
        else:
            return None


async def _send(
    http: h11.Connection, stream: trio.SocketStream, status: int, body: bytes, kind: str = _HEALTH,
    more: list[tuple[str, str]] | None = None, *, head: bool = False,
) -> None:  # fmt: skip
    """The answer, and the end of the connection once the other end has read it."""
    headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close"), *(more or [])]
    said = http.send(h11.Response(status_code=status, headers=headers))
    await stream.send_all(said + (b"" if head else body))
    await stream.send_eof()
    with trio.move_on_after(_LINGER):
        await forget(stream)


def _version() -> str:
    try:
        return version("wancoll")
    except PackageNotFoundError:
        return "unknown"
