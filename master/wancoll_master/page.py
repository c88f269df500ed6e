"""The live page: a small site for browsers that is told anew what has changed. Starlette on hypercorn's trio worker.

Of a connection one head of a request is read, within bounds, and nothing else of it reaches the HTTP server: no bodies,
upgrades or second requests. What is shown is made once for all viewers, while there are any; a viewer that is behind
gets the newest, not all that was. One that does not read is cut off.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import msgspec
import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, LifespanState
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from wancoll.metrics.guard import refused
from wancoll.net.contain import contained, trace
from wancoll.net.listen import Handshakes, Sparing, forget, trio_listeners, whose, why_ended
from wancoll_master.core.page import Section

log = structlog.get_logger("wancoll.page")

MOST_VIEWERS = 32
_CONNECTIONS = 64  # at once, beside viewers
_SECONDS = 10.0  # for a request and its answer
_LEAST = 0.25  # for so long a connection gives way to nobody
_HEAD_BYTES = 8192
_LINGER = 1.0  # seconds for the other end to close after its answer
_WRITE_SECONDS = 10.0  # for one send: a viewer that does not read is cut off
_SEND_BUFFER = 256 * 1024  # bytes that the kernel holds for a viewer
_GONE_MS = 30_000  # without an acknowledgement: the viewer's machine is gone
_LOOK = 0.5  # seconds between looks
_SHARE = 0.05  # of the event loop's time that goes into looks at most
_QUIET = 10.0  # seconds without news, until a viewer is told that there are none

_HEAD = re.compile(rb"(GET|HEAD) /[!-~]* HTTP/1\.[01]\r\n")
_MORE = re.compile(rb"\n(?:content-length|transfer-encoding|upgrade|expect)[ \t]*:", re.IGNORECASE)
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")  # the HTTP server takes a bare line feed for the end of a line
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class Page:
    """See the module.

    Args:
        look: gives the sections as they are now, each made when it is taken; None is a pause.
        listeners: closed by who opened them.
        token: that who looks has to show, as password or bearer; "": none, and only under a name of loopback.
    """

    def __init__(
        self, look: Callable[[], Iterator[Section | None]], listeners: list[socket.socket], token: str = ""
    ) -> None:
        self._source, self._listeners, self._token = look, listeners, token.encode()
        self._open = Handshakes(_CONNECTIONS, _SECONDS, _LEAST)
        self._refusals, self._bugs = Sparing(), Sparing()
        self._viewers = 0
        self._somebody = trio.Event()  # there is a viewer
        self._streams: set[_OneRequest] = set()
        self._sections: dict[str, tuple[int, bytes]] = {}  # by name: the version that changed it, and it as JSON
        self._frames: dict[int, bytes] = {}  # by the version that a viewer has: what it is told now
        self._version, self._news = 0, trio.Event()
        self._config = Config()
        self._config.errorlog = self._config.accesslog = None
        self._config.include_server_header = False
        self._config.h11_max_incomplete_size = 2 * _HEAD_BYTES
        self._config.keep_alive_timeout = _SECONDS
        folder = resources.files("wancoll_master") / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
        routes = [Route(path, self._file) for path in _FILES]
        site = Starlette(routes=[*routes, Route("/events", self._events)])
        site.router.redirect_slashes = False
        self._site, self._context = site, WorkerContext(None)
        self._app = ASGIWrapper(self._answer)  # type: ignore[arg-type]  # its own types of what ASGI is

    async def serve(self) -> None:
        """Task: answer, until cancelled."""
        log.info("page", at=", ".join("{}:{}".format(*one.getsockname()[:2]) for one in self._listeners))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                nursery.start_soon(self._close_at_end)
                await trio.serve_listeners(self.accept, trio_listeners(self._listeners))
        finally:
            self._sections.clear()

    async def _close_at_end(self) -> None:
        """What is being sent is shielded by the HTTP server: only its socket's end ends it."""
        try:
            await trio.sleep_forever()
        finally:
            for one in self._streams:
                one.socket.close()

    # ---- one connection ------------------------------------------------------------------------------

    async def accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the master stays up."""
        who = whose(stream.socket)
        with contextlib.suppress(*_GONE):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
        one = _OneRequest(stream, who, self._refusals)
        self._streams.add(one)
        try:
            with (
                contextlib.suppress(*_GONE),
                contained("the page", lambda: one.head, expected=_GONE),
                self._open.one(who) as scope,
            ):
                one.is_viewer = lambda: self._is_viewer(who, scope)
                if (refusal := await one.read_head()) is not None:
                    self._refuse(who, f"was answered with {refusal.partition(' ')[0]}")
                    await one.refuse(refusal)
                elif one.head:
                    state = ConnectionState(LifespanState({"connection": one}))
                    await TCPServer(self._app, self._config, self._context, state, one).run()  # type: ignore[arg-type]
            if scope.cancelled_caught:
                self._refuse(who, why_ended(scope))
        finally:
            self._streams.discard(one)
            stream.socket.close()

    def _is_viewer(self, who: str, scope: trio.CancelScope) -> None:
        """It may stay for long."""
        scope.deadline = float("inf")
        self._open.leave(who, scope)

    def _refuse(self, who: str, reason: str) -> None:
        self._refusals.say(log.info, "request refused", who=who, reason=reason)

    # ---- the site ------------------------------------------------------------------------------------

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        request = Request(scope, receive)
        try:
            app: Any = self._site
            headers = request.headers
            status, why = refused(self._token, headers.getlist("authorization"), headers.getlist("host"))
            if status == 401:
                text = f"{why} of WANCOLL_PAGE_TOKEN, as password of any user\n"
                basic = {"WWW-Authenticate": 'Basic realm="wancoll", charset="UTF-8"'}
                app = Response(text, 401, {**_HEADERS, **basic}, "text/plain")
            elif status:
                app = Response(f"{why}\n", status, _HEADERS, "text/plain")
            elif scope["path"] not in (*_FILES, "/events"):
                app = Response("the page is at /\n", 404, _HEADERS, "text/plain")
            if app is not self._site:
                self._refuse(scope["state"]["connection"].who, f"was answered with {app.status_code}")
            await app(scope, receive, send)
        except Exception as bug:
            if not isinstance(bug, _GONE):
                self._bugs.say(log.error, "a bug: the page does not answer", trace=trace(bug))
            raise

    async def _file(self, request: Request) -> Response:
        content, kind = self._files[request.url.path]
        return Response(content, 200, _HEADERS, kind)

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(b"", 200, _HEADERS, "text/event-stream")
        if self._viewers >= MOST_VIEWERS:
            return Response(f"{MOST_VIEWERS} look already\n", 503, {**_HEADERS, "Retry-After": "10"}, "text/plain")
        return _News(self)

    async def tell(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a viewer until it goes."""
        headers = {**_HEADERS, "Content-Type": "text/event-stream"}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._viewers += 1
        try:
            scope["state"]["connection"].is_viewer()
            await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send({"type": "http.response.body", "body": b"retry: 1000\n\n", "more_body": True})
            self._somebody.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, send)
                while (await receive())["type"] != "http.disconnect":
                    pass
                nursery.cancel_scope.cancel()
        finally:
            self._viewers -= 1

    async def _tell(self, send: Send) -> None:
        known = 0
        while True:
            news = self._news
            if known == self._version:
                with trio.move_on_after(_QUIET):
                    await news.wait()
            frame = self._frame(known)
            known = self._version
            await send({"type": "http.response.body", "body": frame, "more_body": True})

    # ---- what is told --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look while somebody does."""
        while True:
            await self._somebody.wait()
            took = await self._look()
            await trio.sleep(max(_LOOK, took * (1 / _SHARE - 1)))
            if not self._viewers:
                self._somebody = trio.Event()
                self._sections.clear()
                self._frames.clear()
                self._version = 0

    async def _look(self) -> float:
        """What is so now. Returns the seconds that it took."""
        took, began, version = 0.0, trio.current_time(), self._version + 1
        found: dict[str, tuple[int, bytes]] = {}
        for section in self._source():
            if section is not None:
                name, what = section
                said = msgspec.json.encode(what)
                known = self._sections.get(name)
                found[name] = known if known is not None and known[1] == said else (version, said)
            took += trio.current_time() - began
            await trio.lowlevel.checkpoint()
            began = trio.current_time()
        if any(changed == version for changed, _ in found.values()):
            self._sections, self._version = found, version
            self._frames.clear()
            self._news.set()
            self._news = trio.Event()
        return took

    def _frame(self, known: int) -> bytes:
        """For a viewer that has version *known*; 0: nothing. The past is told once, and goes on with what is new.

        Without news it says that the master is there.
        """
        frame = self._frames.get(known)
        if frame is None:
            changed = (
                msgspec.json.encode(name) + b":" + said
                for name, (version, said) in self._sections.items()
                if version > known and not (known and name.endswith("/history"))
            )
            at = b'"at":%.3f' % time.time()
            frame = self._frames[known] = b"data: {" + b",".join((at, *changed)) + b"}\n\n"
        return frame


class _News(Response):
    """The answer to a viewer, which ends when that goes."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._page.tell(scope, receive, send)


class _OneRequest(trio.abc.HalfCloseableStream):
    """A connection as the HTTP server sees it: one good head of a request, and then nothing.

    Attributes:
        socket: of the stream.
        head: of the request.
        is_viewer: to be called if it may stay.
    """

    def __init__(self, stream: trio.SocketStream, who: str, lines: Sparing) -> None:
        self._stream, self.socket, self.who, self._lines = stream, stream.socket, who, lines
        self.head, self._given = b"", False
        self._over = trio.Event()
        self.is_viewer: Callable[[], None] = lambda: None

    async def read_head(self) -> str | None:
        """Why it is refused, as a status line has it; None: see *head*, which is empty if the other end is gone."""
        data = b""
        while b"\r\n\r\n" not in data:
            if len(data) > _HEAD_BYTES:
                return "431 Request Header Fields Too Large"
            if not (more := await self._stream.receive_some(_HEAD_BYTES)):
                return None
            data += more
        head = data[: data.index(b"\r\n\r\n") + 4]
        if len(head) > _HEAD_BYTES:
            return "431 Request Header Fields Too Large"
        if _HEAD.match(head) is None:
            good = re.match(rb"[A-Z]+ /[!-~]* HTTP/1\.[01]\r\n", head)
            return "405 Method Not Allowed" if good else "400 Bad Request"
        if _BARE.search(head) or _MORE.search(head):
            return "400 Bad Request"
        self.head = head
        return None

    async def refuse(self, status: str) -> None:
        """Say so, and end."""
        text = b"only GET and HEAD, with a short head and nothing behind it\n"
        said = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
        await self._stream.send_all(said + text)
        await self._stream.send_eof()
        with trio.move_on_after(_LINGER):
            await forget(self._stream)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """The head, then the end."""
        if not self._given:
            self._given = True
            return self.head
        try:
            await forget(self._stream)
        finally:
            self._over.set()
        return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """In time, or never."""
        with trio.move_on_after(_WRITE_SECONDS) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            self._lines.say(log.info, "a viewer does not read, and is cut off", who=self.who)
            self.socket.close()
            raise trio.BrokenResourceError("it does not read")

    async def wait_send_all_might_not_block(self) -> None:
        """See SendStream."""
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """See HalfCloseableStream."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Once the other end has read, and closed."""
        if self._given and not self._over.is_set():
            with trio.move_on_after(_LINGER):
                await self._over.wait()
        await self._stream.aclose()
