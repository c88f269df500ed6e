"""Daemons with keys: what they send each other goes over TLS, through a loss, and nobody else gets in."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from wancoll.chaos import Cluster, in_threads
from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll.wire.framing import encode


@pytest.mark.check
def test_tensors_of_daemons_with_keys_are_sealed_also_after_a_loss() -> None:
    with Cluster(3, fork=True, secure=True, listen="127.0.0.{i}:0") as cluster:  # each has an address of its own
        comms = in_threads(lambda i: cluster.connect(i, group="g", start_world=3), 3, 30)

        def work(i: int) -> tuple[int, float, float]:
            x = np.full(1 << 20, i + 1, np.float32)
            receipt = comms[i].all_reduce(x, op="sum")
            return receipt.world_size, float(x[0]), float(x[-1])

        assert set(in_threads(work, 3, 30)) == {(3, 6.0, 6.0)}
        cluster.kill(2)
        assert set(in_threads(work, 2, 30)) == {(2, 3.0, 3.0)}
        host, _, port = cluster.peer_status(0)["addresses"][0].rpartition(":")
        with socket.create_connection((host, int(port)), 5) as plain:
            plain.sendall(encode(m.ProbeHello(PROTOCOL_VERSION, "peer-0")))
            assert b"speaks TLS only" in plain.recv(4096)
        with socket.create_connection((host, int(port)), 5) as plain:  # as doctor does: a full packet each way
            plain.sendall(encode(m.ProbeHello(PROTOCOL_VERSION, "peer-0", 9000, 9000)) + bytes(9000))
            came = b""
            while more := plain.recv(65536):  # no reset, which would hide that nothing came back
                came += more
            assert b"speaks TLS only" in came[:200]
            assert len(came) >= 9000
