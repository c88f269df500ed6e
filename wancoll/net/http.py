"""HTTP for people's tools: metrics, health and the live page. HTTP/1.1 on h11, one request a connection. A trio shell.

GET and HEAD alone, a short head and no body. Whatever else comes costs a few KiB, seconds, and at most one line of the
log. An answer ends, or goes on for as long as its reader stays and reads.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import h11
import structlog
import trio

from wancoll.net.contain import contained, trace
from wancoll.net.listen import Handshakes, Sparing, forget, serve_connections, whose, why_ended

log = structlog.get_logger("wancoll.http")

CONNECTIONS = 64  # at once, beside readers that stay
_SECONDS = 10.0  # for a request and its answer
_LEAST = 0.25  # for so long a connection gives way to nobody
_HEAD_BYTES = 8192  # of a request
_LINGER = 1.0  # seconds for the other end to close after its answer
_WRITE_SECONDS = 10.0  # for one piece to a reader that stays
_SEND_BUFFER = 256 * 1024  # bytes that the kernel holds for a reader
_GONE_MS = 30_000  # without an acknowledgement: the reader's machine is gone

TEXT = "text/plain; charset=utf-8"
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")  # h11 takes a bare line feed for the end of a line
_MORE = {"content-length", "transfer-encoding", "upgrade", "expect"}  # something is to follow the head
_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)

Send = Callable[[bytes], Awaitable[None]]


class Request(NamedTuple):
    """What is asked for."""

    path: str  # without its query
    headers: dict[str, list[str]] = {}  # values by the name in lower case
    head: bool = False  # the answer's body is not wanted


class Answer(NamedTuple):
    """A status, a text of some type, and further headers."""

    status: int
    body: bytes
    kind: str = TEXT
    headers: dict[str, str] = {}
    # sends what follows, piece by piece; it is cancelled when the reader goes. None: the body is all.
    stream: Callable[[Send], Awaitable[None]] | None = None


class Port:
    """One port, and what it answers. Who opened the *listeners* closes them."""

    def __init__(
        self, name: str, listeners: list[socket.socket], answer: Callable[[Request], Awaitable[Answer]]
    ) -> None:
        self._name, self._listeners, self._answer = name, listeners, answer
        self.open = Handshakes(CONNECTIONS, _SECONDS, _LEAST)
        self.refusals, self.bugs = Sparing(), Sparing()

    async def serve(self) -> None:
        """Task: answer, until cancelled."""
        log.info(self._name, at=", ".join("{}:{}".format(*one.getsockname()[:2]) for one in self._listeners))
        await serve_connections(self._listeners, self._accept)

    async def _accept(self, stream: trio.SocketStream) -> None:
        """Handler of the listeners: whatever arrives, the process stays up."""
        who = whose(stream.socket)
        try:
            with (
                contextlib.suppress(*_GONE),
                self.open.one(who) as scope,
                contained(f"the port of the {self._name}", lambda: who, expected=_GONE),
            ):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
                await self._serve_one(stream, who, scope)
            if scope.cancelled_caught:
                self.refusals.say(log.info, "request refused", who=who, reason=why_ended(scope))
        finally:
            stream.socket.close()

    async def _serve_one(self, stream: trio.SocketStream, who: str, scope: trio.CancelScope) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
        asked = await _read(http, stream)
        if asked is None:
            return
        answer = asked if isinstance(asked, Answer) else await self._ask(asked)
        if 400 <= answer.status < 500:
            why = answer.body.decode().strip()
            self.refusals.say(log.info, "request refused", who=who, status=answer.status, reason=why)
        headers = {"Content-Type": answer.kind, **_HEADERS, **answer.headers}
        if answer.stream is None:
            headers["Content-Length"] = str(len(answer.body))
        said = http.send(h11.Response(status_code=answer.status, headers=list(headers.items())))
        unwanted = isinstance(asked, Request) and asked.head
        if answer.stream is not None and not unwanted:
            scope.deadline = float("inf")
            self.open.leave(scope)
            await self._stream(http, stream, who, said, answer.stream)
            return
        await stream.send_all(said if unwanted else said + answer.body)
        await stream.send_eof()
        with trio.move_on_after(_LINGER):
            await forget(stream)

    async def _ask(self, asked: Request) -> Answer:
        try:
            return await self._answer(asked)
        except Exception as bug:  # whoever comes can cause it again and again
            self.bugs.say(log.error, "a bug: there is no answer", port=self._name, trace=trace(bug))
            return Answer(500, b"this is a bug; the log says more\n")

    async def _stream(
        self, http: h11.Connection, stream: trio.SocketStream, who: str, said: bytes,
        tell: Callable[[Send], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Serve a reader until it goes."""

        async def send(piece: bytes) -> None:
            nonlocal said
            framed, said = said + (http.send(h11.Data(piece)) or b""), b""
            with trio.move_on_after(_WRITE_SECONDS) as scope:
                await stream.send_all(framed)
            if scope.cancelled_caught:
                log.info("a reader does not read, and is cut off", who=who)
                raise trio.BrokenResourceError("it does not read")

        async def tell_all() -> None:
            try:
                await tell(send)
            except _GONE:
                pass
            except Exception as bug:  # its reader comes again at once
                self.bugs.say(log.error, "a bug: an answer breaks off", port=self._name, trace=trace(bug))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell_all)
            with contextlib.suppress(*_GONE):
                await forget(stream)
            nursery.cancel_scope.cancel()


async def _read(http: h11.Connection, stream: trio.SocketStream) -> Request | Answer | None:
    """The request, or what is to be said where it is none; None: the other end says nothing."""
    raw, event = b"", None
    while not isinstance(event, h11.Request):
        try:
            event = http.next_event()
        except h11.RemoteProtocolError as bad:
            return Answer(bad.error_status_hint or 400, f"this is no request: {bad}"[:200].encode() + b"\n")
        if event is h11.NEED_DATA:
            data = await stream.receive_some(_HEAD_BYTES)
            raw += data
            http.receive_data(data)
        elif not isinstance(event, h11.Request):
            return None
    headers: dict[str, list[str]] = {}
    for name, value in event.headers:
        headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    head = raw.partition(b"\r\n\r\n")[0]
    if len(head) > _HEAD_BYTES:  # h11 looks at its size only while it lacks some of it
        return Answer(431, b"expected a shorter head\n")
    if not event.target.startswith(b"/") or _BARE.search(head):
        return Answer(400, b"expected a path, and lines that end with CR LF\n")
    if event.method not in (b"GET", b"HEAD"):
        return Answer(405, b"only GET and HEAD\n", headers={"Allow": "GET, HEAD"})
    if not _MORE.isdisjoint(headers):
        return Answer(400, b"expected a head with nothing behind it\n")
    return Request(event.target.partition(b"?")[0].decode("latin-1"), headers, event.method == b"HEAD")


def shows(token: bytes, shown: list[str]) -> bool:
    """Whether that is among what a request has for Authorization: as bearer, or as password of any user."""
    scheme, _, what = (shown[0] if len(shown) == 1 else "").partition(" ")
    found = what.strip().encode()
    if scheme.lower() == "basic":
        try:
            found = base64.b64decode(found, validate=True).partition(b":")[2]
        except binascii.Error:
            return False
    return scheme.lower() in ("basic", "bearer") and hmac.compare_digest(found, token)


def refused(request: Request, token: bytes, variable: str) -> Answer | None:
    """The answer to a *request* that may not know, by its Authorization and Host; None: it may.

    Without a token (in *variable*) the listeners are on loopback, where a browser may be led by a name of somebody
    else's (DNS rebinding): only this machine's own names count.
    """
    if token and not shows(token, request.headers.get("authorization", [])):
        said = f"needs the token of {variable}, as bearer or as password of any user\n"
        return Answer(401, said.encode(), headers={"WWW-Authenticate": 'Basic realm="wancoll", charset="UTF-8"'})
    if token or _is_local(request.headers.get("host", [])):
        return None
    return Answer(403, b"without a token only as localhost, 127.0.0.1 or [::1]: other names may be somebody else's\n")


def _is_local(hosts: list[str]) -> bool:
    name = re.sub(r":\d*$", "", hosts[0] if len(hosts) == 1 else "")
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
