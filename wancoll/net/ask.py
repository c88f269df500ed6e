"""One question to a daemon or a master and its answer, over a blocking socket: for commands and tests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from wancoll.limits import DEFAULT
from wancoll.net.proof import Proof
from wancoll.net.tls import Tls, TlsFailed
from wancoll.net.unix import check_owner, connect_local
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

_RECEIVE_BYTES = 65536


def ask(
    where: tuple[str, int] | str,
    question: msgspec.Struct,
    answers: Any,
    *,
    timeout: float,
    who: str,
    proof: Proof | None = None,
) -> Any:
    """Connect, send *question*, return the first message of type *answers* that comes back in *timeout* seconds.

    With a *proof* it asks over TLS, a master that has one of its keys; None: in clear.

    Raises:
        OSError: no connection, or no answer in time.
        ProtocolError: what came back cannot be read.
        ConfigError: the unix socket is another user's.
    """
    for answer in said(where, question, answers, timeout=timeout, who=who, proof=proof):
        return answer
    raise ConnectionError("it closed the connection without an answer")


def said(
    where: tuple[str, int] | str,
    question: msgspec.Struct,
    answers: Any,
    *,
    timeout: float,
    who: str,
    proof: Proof | None = None,
    anybody: bool = False,
) -> Iterator[Any]:
    """Ask as ask() does, and yield all that comes back until the connection is closed; of *anybody*'s socket, too."""
    decoder: Decoder[Any] = Decoder(answers, DEFAULT.message_bytes, who=who)
    ends = time.monotonic() + timeout
    with contextlib.closing(_connect(where, timeout)) as connection:
        if isinstance(where, str) and not anybody:
            check_owner(connection, where)
        try:
            line = _Line(connection, ends)
            acceptor = line.seal(proof.acceptors) if proof is not None else b""
            if proof is None:
                line.send(encode(question))
            while data := line.receive():
                for answer in decoder.feed(data):
                    if proof is None or not isinstance(answer, m.Challenge):
                        yield answer
                    else:
                        line.send(encode(proof.first(acceptor, answer.nonce, question)))
        except TlsFailed as failed:
            raise ConnectionError(str(failed)) from failed
        except TimeoutError as late:
            raise TimeoutError(f"no answer within {timeout:g} s") from late


class _Line:
    """A blocking socket, over TLS from seal() on, that raises TimeoutError once it is *ends* by time.monotonic()."""

    def __init__(self, connection: socket.socket, ends: float) -> None:
        self._connection, self._ends = connection, ends
        self._tls: Tls | None = None

    def seal(self, expects: Sequence[bytes]) -> bytes:
        """The key of the other end, one that this end *expects*; from now on all goes over TLS."""
        self._tls = tls = Tls(expects=expects)
        data = b""  # who dials begins
        while True:
            tls.shake(data)
            self._send(tls.outgoing())
            if tls.done:
                return tls.key
            if not (data := self._receive()):
                raise ConnectionError("it closed the connection in the middle of TLS's handshake")

    def send(self, data: bytes) -> None:
        """All of it."""
        self._send(self._tls.seal(data) if self._tls else data)

    def receive(self) -> bytes:
        """Some bytes; b"" at the end."""
        if self._tls is None:
            return self._receive()
        data = b"" if self._tls.more else self._receive()
        while not self._tls.over and (data or self._tls.more):
            if opened := self._tls.open(data):
                return opened
            self._send(self._tls.outgoing())
            data = b"" if self._tls.more else self._receive()
        return b""

    def _send(self, data: bytes) -> None:
        self._connection.settimeout(self._left())
        self._connection.sendall(data)

    def _receive(self) -> bytes:
        self._connection.settimeout(self._left())
        return self._connection.recv(_RECEIVE_BYTES)

    def _left(self) -> float:
        """Seconds."""
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError
        return left


def _connect(where: tuple[str, int] | str, timeout: float) -> socket.socket:
    if not isinstance(where, str):
        try:
            return socket.create_connection(where, timeout)
        except ValueError as bad:
            raise ConnectionError(f"this is no name that can be looked up ({bad})") from bad
    return connect_local(where, timeout)
