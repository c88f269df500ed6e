"""Strangers at a port of the master: senders of new TLS keys alone are disconnected."""

from __future__ import annotations

import contextlib
from pathlib import Path

import trio
from structlog.testing import capture_logs

from tests.master.dialler import secure
from tests.records import HANDSHAKE, NEW_KEYS, ByHand
from wancoll.local import split_address
from wancoll.net.tls import to_dial


async def test_who_sends_new_keys_again_and_again_is_put_out(tmp_path: Path) -> None:
    stranger = ByHand(to_dial(), tmp_path)
    async with secure(tmp_path) as master:
        with capture_logs() as lines, trio.fail_after(60):
            async with await trio.open_tcp_stream(*split_address(master.address)) as stream:
                await stream.send_all(stranger.shake())
                while not stranger.done:
                    await stream.send_all(stranger.shake(await stream.receive_some()))
                with contextlib.suppress(trio.BrokenResourceError):  # it does not wait for all of them
                    await stream.send_all(b"".join(stranger.record(NEW_KEYS, HANDSHAKE) for _ in range(2000)))
                    while await stream.receive_some():
                        pass
    (line,) = [line for line in lines if line["event"] == "connection ended"]
    assert line["reason"] == "it sends records without data again and again"
