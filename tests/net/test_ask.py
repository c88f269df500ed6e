"""One question over a blocking socket, to masters that mean no good: it costs whoever asks little, and ends in time."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.keyed import showing
from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net import unix
from wancoll.net.ask import ask
from wancoll.net.proof import Proof, check_first
from wancoll.net.tls import Listening
from wancoll.trust.keys import Key
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

QUESTION = m.AskElection(PROTOCOL_VERSION)
ANSWER = m.StandsBy("h:1", 7)
NONCE, MINE = bytes(range(32)), Key.new()
LATE = 30.0  # seconds; an answer that comes sooner has not waited for what never ends


@contextlib.contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Where *serve* has one connection, in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize(("uid", "taken"), [(0, True), (7001, True), (7002, False)])
def test_a_unix_socket_of_another_user_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uid: int, *, taken: bool
) -> None:
    monkeypatch.setattr(unix, "peer_credentials", lambda _: (5, uid, 0))
    monkeypatch.setattr(os, "geteuid", lambda: 7001)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := str(tmp_path / "s"))
        listener.listen()
        patience = 0.05 if taken else LATE
        words = "no answer within" if taken else f"another user's socket.* process 5 of user {uid}"
        with pytest.raises(TimeoutError if taken else ConfigError, match=words):
            ask(path, QUESTION, m.FromDaemon, timeout=patience, who="x")
        near, _ = listener.accept()
        with near:
            assert near.recv(4096) == (encode(QUESTION) if taken else b"")


def asked(where: tuple[str, int], master: Key | None = None, timeout: float = 60.0) -> Any:
    proof = Proof(MINE, (master.public,), b"receipt", "d", "id.secret") if master is not None else None
    return ask(where, QUESTION, m.FromMaster, timeout=timeout, who="x", proof=proof)


def master(context: ssl.SSLContext, key: Key, answer: bytes, piece: int = 1 << 20) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as sealed:
            sealed.sendall(encode(m.Challenge(NONCE)))
            [first] = Decoder[Any](m.Signed, 10_000).feed(sealed.recv(10_000))
            assert check_first(first, key.public, NONCE, m.FromPeer) == QUESTION
            assert (first.key, first.name, first.token) == (MINE.public, "d", "id.secret")
            for begin in range(0, len(answer), piece):
                sealed.sendall(answer[begin : begin + piece])

    return serve


@pytest.mark.parametrize("piece", [1, 1000])
def test_the_answer_is_found_in_records_of_any_size(listening: Listening, key: Key, piece: int) -> None:
    with served(master(listening.context, key, encode(ANSWER), piece)) as where:
        assert asked(where, key) == ANSWER


def test_another_master_is_not_asked(key: Key) -> None:
    """Nor is the token shown to it."""
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        with Listening([Key.new()]).context.wrap_socket(connection, server_side=True) as sealed:
            sealed.sendall(encode(m.Challenge(NONCE)))
            heard.append(sealed.recv(10_000))

    with served(serve) as where, pytest.raises(ConnectionError, match=f"and not {key.public.hex()}: somebody else"):
        asked(where, key)
    assert heard in ([], [b""])


def test_one_in_clear_is_not_asked(key: Key) -> None:
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        connection.sendall(encode(m.Challenge(NONCE)))
        while data := connection.recv(10_000):
            heard.append(data)

    with served(serve) as where, pytest.raises(ConnectionError, match="it does not speak TLS"):
        asked(where, key)
    assert b"id.secret" not in b"".join(heard)


def test_a_master_of_another_version_is_heard_without_a_challenge(listening: Listening, key: Key) -> None:
    def serve(connection: socket.socket) -> None:
        with listening.context.wrap_socket(connection, server_side=True) as sealed:
            sealed.sendall(encode(m.Bye("speaks another version", True)))
            sealed.recv(1)

    with served(serve) as where:
        assert asked(where, key) == m.Bye("speaks another version", True)


def test_a_goodbye_is_no_answer(listening: Listening, key: Key) -> None:
    with (
        served(master(listening.context, key, encode(ANSWER)[:-1])) as where,
        pytest.raises(ConnectionError, match="closed the connection without an answer"),
    ):
        asked(where, key)


def test_a_handshake_has_few_bytes(key: Key) -> None:
    serve = master(showing([key.certificate()] * 10, key.pem), key, encode(ANSWER))
    with served(serve) as where, pytest.raises(ConnectionError, match="its handshake goes on and on"):
        asked(where, key)


@pytest.mark.parametrize("sealed", [False, True])
def test_bytes_that_come_one_by_one_make_it_no_later(key: Key, sealed: bool) -> None:
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x40\x00" if sealed else b"\x00\x00\x40\x00")  # the head of much
        while not over.wait(0.05):
            connection.sendall(b"\2")

    with served(drip) as where:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
            asked(where, key if sealed else None, 0.5)
        assert time.monotonic() - began < LATE
        over.set()


def test_one_that_ends_in_the_middle_says_so(key: Key) -> None:
    def end(connection: socket.socket) -> None:
        connection.recv(10_000)
        connection.sendall(b"\x16\x03")

    with (
        served(end) as where,
        pytest.raises(ConnectionError, match=r"in the middle of TLS's handshake"),
    ):
        asked(where, key)
