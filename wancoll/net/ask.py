"""One question to a daemon or a master and its answer, over a blocking socket: for commands and tests."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Any

import msgspec

from wancoll.limits import DEFAULT
from wancoll.net.tls import explained
from wancoll.net.unix import connect_local
from wancoll.trust.papers import Papers, unverified
from wancoll.wire.framing import Decoder, encode

_RECEIVE_BYTES = 65536


def ask(
    where: tuple[str, int] | str,
    question: msgspec.Struct,
    answers: Any,
    *,
    timeout: float,
    who: str,
    papers: Papers | None = None,
    believe_anybody: bool = False,
) -> Any:
    """Connect, send *question*, return the first message that comes back.

    Args:
        where: (host, port), or the path of a unix socket.
        question: a message.
        answers: type of what may come back.
        timeout: seconds for all of it.
        who: is asked, for errors.
        papers: to ask over TLS with; None: in clear.
        believe_anybody: over TLS, whoever answers: only for what is checked afterwards.

    Raises:
        OSError: no connection, or no answer in time.
        ProtocolError: what came back cannot be read.
    """
    deadline = time.monotonic() + timeout
    decoder: Decoder[Any] = Decoder(answers, DEFAULT.message_bytes, who=who)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(_connect(where, timeout))
        if papers is not None or believe_anybody:
            connection = stack.enter_context(_over_tls(connection, where[0], None if believe_anybody else papers))
        connection.sendall(encode(question))
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                data = connection.recv(_RECEIVE_BYTES)
            except ssl.SSLError as refused:  # in TLS 1.3 it comes this late
                raise ConnectionError(explained(refused)) from refused
            if not data:
                raise ConnectionError("it closed the connection without an answer")
            for answer in decoder.feed(data):
                return answer
        raise TimeoutError(f"no answer within {timeout:g} s")


def _over_tls(connection: socket.socket, host: str, papers: Papers | None) -> ssl.SSLSocket:
    """*connection* to a master, which has proved that it is one; *papers* None: nobody has looked."""
    context = unverified() if papers is None else papers.to_dial()
    try:
        sealed = context.wrap_socket(connection, server_hostname=papers.asks_for(host) if papers else host)
    except ssl.SSLError as failed:
        raise ConnectionError(explained(failed)) from failed
    if papers is not None and not papers.is_master(sealed.getpeercert() or {}):
        sealed.close()
        raise ConnectionError("its certificate is not a master's: somebody else answers at this address")
    return sealed


def _connect(where: tuple[str, int] | str, timeout: float) -> socket.socket:
    if not isinstance(where, str):
        try:
            return socket.create_connection(where, timeout)
        except ValueError as bad:
            raise ConnectionError(f"this is no name that can be looked up ({bad})") from bad
    return connect_local(where, timeout)
