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

from wancoll.errors import ConfigError
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net import unix
from wancoll.net.ask import ask
from wancoll.trust.papers import Papers, write_secret
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

QUESTION = m.AskAuthority(PROTOCOL_VERSION)
ANSWER = m.AuthorityIs(b"certificates")
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


def asked(where: tuple[str, int], timeout: float = 60.0, papers: Papers | None = None) -> Any:
    return ask(where, QUESTION, m.FromMaster, timeout=timeout, who="x", papers=papers, believe_anybody=not papers)


def master(papers: Papers, answer: bytes, piece: int = 1 << 20) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(papers.certificate)
        with context.wrap_socket(connection, server_side=True) as sealed:
            assert sealed.recv(1000) == encode(QUESTION)
            for begin in range(0, len(answer), piece):
                sealed.sendall(answer[begin : begin + piece])

    return serve


@pytest.mark.parametrize("piece", [1, 1000])
def test_the_answer_is_found_in_records_of_any_size(papers: Papers, piece: int) -> None:
    with served(master(papers, encode(ANSWER), piece)) as where:
        assert asked(where) == ANSWER
    with served(master(papers, encode(ANSWER), piece)) as where:
        assert asked(where, papers=papers) == ANSWER


def test_a_goodbye_is_no_answer(papers: Papers) -> None:
    with (
        served(master(papers, encode(ANSWER)[:-1])) as where,
        pytest.raises(ConnectionError, match="closed the connection without an answer"),
    ):
        asked(where)


def test_a_handshake_has_few_bytes(papers: Papers, tmp_path: Path) -> None:
    long = tmp_path / "long"
    write_secret(str(long), Path(papers.certificate).read_bytes() + 60 * Path(papers.authorities).read_bytes())
    serve = master(Papers(papers.authorities, str(long)), encode(ANSWER))
    with served(serve) as where, pytest.raises(ConnectionError, match="its handshake goes on and on"):
        asked(where)


@pytest.mark.parametrize("sealed", [False, True])
def test_bytes_that_come_one_by_one_make_it_no_later(papers: Papers, sealed: bool) -> None:
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"\x16\x03\x03\x40\x00" if sealed else b"\x00\x00\x40\x00")  # the head of much
        while not over.wait(0.05):
            connection.sendall(b"\2")

    with served(drip) as where:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
            ask(where, QUESTION, m.FromMaster, timeout=0.5, who="x", believe_anybody=sealed)
        assert time.monotonic() - began < LATE
        over.set()


def test_one_that_ends_in_the_middle_says_so() -> None:
    def end(connection: socket.socket) -> None:
        connection.recv(10_000)
        connection.sendall(b"\x16\x03")

    with (
        served(end) as where,
        pytest.raises(ConnectionError, match=r"in the middle of TLS's handshake"),
    ):
        asked(where)
