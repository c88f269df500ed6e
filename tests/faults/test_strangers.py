"""What scanners and browsers say, at each port: one line of the log each, and no effect."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import structlog
import trio

from wancoll.local import split_address
from wancoll.net import listen
from wancoll.peer.config import PeerConfig
from wancoll.peer.daemon import Started
from wancoll.peer.daemon import serve as serve_peer
from wancoll_master.config import MasterConfig
from wancoll_master.serve import serve as serve_master


def client_hello() -> bytes:
    """As `openssl s_client` begins."""
    says = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), says, server_hostname="example.org").do_handshake()
    return says.read()


SAID = {
    "a connection, and no word": b"",
    "openssl s_client": client_hello(),
    "HTTP": b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: curl\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lines": b"\r\n\r\n",
    "HELP": b"HELP\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "SMB": bytes.fromhex("000000a4ff534d4272000000000801400000000000000000000000000000400600000100"),
    "RPC": bytes.fromhex("8000002872fe1d130000000000000002000186a0000197dc00000000000000000000000000000000"),
    "DNS": bytes.fromhex("001e0006010000010000000000000776657273696f6e0462696e640000100003"),
    "X11": bytes.fromhex("6c000b00000000000000000000000000"),
    "LDAP": bytes.fromhex("300c020101600702010204008000"),
    "RDP": bytes.fromhex("030000130ee000000000000100080003000000"),
    "redis": b"*1\r\n$4\r\nINFO\r\n",
}


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[dict[str, tuple[str, int] | str]]:
    """A master and a daemon, in here; where their three listeners are."""
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        [address] = await nursery.start(serve_master, MasterConfig(listen="127.0.0.1:0"))
        config = PeerConfig(socket=str(folder / "s"), listen="127.0.0.1:0", master=address, name="d")
        started: Started = await nursery.start(partial(serve_peer, config, stop=stop))
        with trio.fail_after(20):
            await started.answered.wait()
        yield {
            "master": split_address(address),
            "data": split_address(started.data[0]),
            "unix": started.socket,
        }
        stop.set()
        nursery.cancel_scope.cancel()


async def say(where: tuple[str, int] | str, what: bytes) -> None:
    """Say it, end, and read until the other end has closed."""
    if isinstance(where, str):
        stream = await trio.open_unix_socket(where)
    else:
        stream = await trio.open_tcp_stream(*where)
    async with stream:
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(what)
            await stream.send_eof()
            while await stream.receive_some():
                pass


@pytest.mark.parametrize("port", ["master", "data", "unix"])
async def test_a_stranger_is_one_line_of_the_log(port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_LINES_A_SECOND", 1000)
    async with served(tmp_path) as ports:
        for what, said in SAID.items():
            with structlog.testing.capture_logs() as lines:
                with trio.fail_after(10):
                    await say(ports[port], said)
                    await trio.testing.wait_all_tasks_blocked(0.02)
            if port == "unix" and not said:  # a daemon that starts looks whether another one is there
                assert not lines
                continue
            assert len(lines) == 1, (what, lines)
            assert lines[0]["log_level"] in ("info", "warning"), (what, lines)
            assert lines[0]["who"].startswith("127.0.0.1" if port != "unix" else "user "), (what, lines)
