"""Strangers at a port of the master: senders of new keys alone are disconnected, dear certificates hold up nobody."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import trio
from structlog.testing import capture_logs

from tests.dear import Dear, LongestStep
from tests.master.test_gate import secure
from tests.records import HANDSHAKE, NEW_KEYS, ByHand
from wancoll.local import split_address
from wancoll.trust.papers import unverified


async def test_who_sends_new_keys_again_and_again_is_put_out(tmp_path: Path) -> None:
    stranger = ByHand(unverified(), tmp_path)
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


async def test_certificates_that_are_dear_to_read_hold_up_nobody(tmp_path: Path) -> None:
    stranger, longest = Dear(tmp_path), LongestStep()
    async with secure(tmp_path) as master:
        with capture_logs() as lines:
            trio.lowlevel.add_instrument(longest)
            await stranger.call(socket.create_connection(split_address(master.address)))
    (line,) = [line for line in lines if line["event"] == "connection ended"]
    assert "its certificate is of another authority" in line["reason"]  # it was read
    assert 0 < longest.seconds < stranger.cost / 4
