"""One question to a daemon or a master and its answer, over a blocking socket: for commands and tests."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec

from wancoll.limits import DEFAULT
from wancoll.net.unix import connect_local
from wancoll.wire.framing import Decoder, encode

_RECEIVE_BYTES = 65536


def ask(where: tuple[str, int] | str, question: msgspec.Struct, answers: Any, *, timeout: float, who: str) -> Any:
    """Connect, send *question*, return the first message that comes back.

    Args:
        where: (host, port), or the path of a unix socket.
        question: a message.
        answers: type of what may come back.
        timeout: seconds for all of it.
        who: is asked, for errors.

    Raises:
        OSError: no connection, or no answer in time.
        ProtocolError: what came back cannot be read.
    """
    deadline = time.monotonic() + timeout
    decoder: Decoder[Any] = Decoder(answers, DEFAULT.message_bytes, who=who)
    with _connect(where, timeout) as connection:
        connection.sendall(encode(question))
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("it closed the connection without an answer")
            for answer in decoder.feed(data):
                return answer
        raise TimeoutError(f"no answer within {timeout:g} s")


def _connect(where: tuple[str, int] | str, timeout: float) -> socket.socket:
    if not isinstance(where, str):
        return socket.create_connection(where, timeout)
    return connect_local(where, timeout)
