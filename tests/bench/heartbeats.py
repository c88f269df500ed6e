"""What many daemons' heartbeats cost a real master over real sockets: `python -m tests.bench.heartbeats [DAEMONS]`.

The daemons are sockets of this process, which says their heartbeats evenly over the time, and reads the answers.
"""

from __future__ import annotations

import select
import socket
import sys
import time

from tests.bench.cost import cpu_seconds
from tests.bench.report import Bar, bar_table
from wancoll.chaos import Cluster
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll.wire.framing import encode

DAEMONS = 1000
SECONDS = 10.0


def _hello(address: tuple[str, int], number: int) -> socket.socket:
    daemon = socket.create_connection(address)
    where = [f"10.0.{number >> 8}.{number & 255}:7401"]
    daemon.sendall(encode(m.Hello(PROTOCOL_VERSION, f"daemon-{number}", 1, where, 8, "", "0.1.0")))
    assert daemon.recv(1), "no welcome"  # the rest of it is read with the answers
    return daemon


def measure(daemons: int = DAEMONS, seconds: float = SECONDS) -> Bar:
    """Percent of a core that the master takes."""
    with Cluster(peers=0, heartbeat_timeout=60) as cluster:  # the machine may be busy
        sockets: list[socket.socket] = []
        beat_at = 0.0
        for number in range(daemons):
            sockets.append(_hello(cluster.master_address, number))
            if time.monotonic() >= beat_at:  # those that are here are not to seem silent
                for one in sockets:
                    one.sendall(encode(m.Heartbeat(1)))
                beat_at = time.monotonic() + DEFAULT.heartbeat_interval
        poll = select.epoll()
        for one in sockets:
            one.setblocking(False)
            poll.register(one, select.EPOLLIN)
        by_number = {one.fileno(): one for one in sockets}
        said = beats = heard = 0
        begin = time.monotonic()
        before = cpu_seconds(cluster.master_pid)
        while (passed := time.monotonic() - begin) < seconds:
            due = int(passed / DEFAULT.heartbeat_interval * daemons)
            for number in range(said, due):
                beats = 1 + number // daemons
                sockets[number % daemons].sendall(encode(m.Heartbeat(beats, [(number % daemons + 1, 1, 1, 0)])))
            said = due
            for fileno, _ in poll.poll(0.001):
                heard += len(by_number[fileno].recv(65536)) > 0
        took = cpu_seconds(cluster.master_pid) - before
        known = len(cluster.status().daemons)
        assert known == daemons, f"the master has evicted {daemons - known} of {daemons} daemons"
        assert heard > said / 2, "it does not answer"
        for one in sockets:
            one.close()
    return Bar(f"{daemons} daemons' heartbeats: percent of a core", 100 * took / seconds, most=20)


if __name__ == "__main__":
    print(bar_table([measure(*map(int, sys.argv[1:]))]))
