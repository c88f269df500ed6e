"""What the live page costs a master: `python -m tests.bench.page [MEMBERS] [VIEWERS]`.

A real master with its page, and viewers that read over sockets what a browser would. Of the members only the control
connections are there: sockets of this process that join one group, call an operation a second, and say with each
heartbeat what moves to their neighbours once the master tells them that somebody looks.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from tests.bench.cost import cpu_seconds
from tests.bench.report import Bar, bar_table
from tests.page.support import frames, page_of
from wancoll.chaos import Cluster
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

MEMBERS, VIEWERS, SECONDS = 100, 10, 20.0
FLOWS = 4  # daemons that each one tells of


@dataclass
class Member:
    """A daemon's control connection, with one member."""

    number: int
    sock: socket.socket
    decoder: Any = field(default_factory=lambda: Decoder(m.FromMaster, 1 << 26))
    mid: int = 0
    epoch: int = 0
    watched: bool = False

    def take(self) -> None:
        for message in self.decoder.feed(self.sock.recv(1 << 20)):
            if isinstance(message, m.Joined):
                self.mid = message.mid
            elif isinstance(message, m.Epoch):
                self.epoch = message.epoch
            elif isinstance(message, m.Pong):
                self.watched = message.watched

    def beat(self, count: int, members: int, since: float) -> None:
        said = m.Heartbeat(count, [(self.mid, self.epoch, int(since), 0)] if self.epoch else [])
        if self.watched:
            gone = int(since * 1e7 * (1 + self.number % 7))
            others = [f"daemon-{(self.number + i) % members}" for i in range(1, FLOWS + 1)]
            moved = [(other, gone // (i + 1), gone // 1000, gone // 10**6) for i, other in enumerate(others)]
            said = m.Heartbeat(count, said.called, [], 0, moved)
        self.sock.sendall(encode(said))


class Crowd:
    """All of them."""

    def __init__(self, address: tuple[str, int], members: int) -> None:
        self.members: list[Member] = []
        self._poll = select.epoll()
        self._by_number: dict[int, Member] = {}
        self._began, self._said = time.monotonic(), 0
        for i in range(members):
            one = Member(i, socket.create_connection(address))
            where = [f"10.0.{i >> 8}.{i & 255}:7401"]
            one.sock.sendall(encode(m.Hello(PROTOCOL_VERSION, f"daemon-{i}", 1, where, 8, "", "0.1.0")))
            one.sock.sendall(encode(m.Join("group", f"member-{i}", members, 2)) + encode(m.Heartbeat(0)))
            self.members.append(one)
            self._by_number[one.sock.fileno()] = one
            self._poll.register(one.sock, select.EPOLLIN)

    def play(self, seconds: float, viewers: list[Viewer]) -> None:
        """Heartbeats, evenly over the time; what is told is read."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            due = int((now - self._began) / DEFAULT.heartbeat_interval * len(self.members))
            self._said = max(self._said, due - 2 * len(self.members))
            for number in range(self._said, due):
                one = self.members[number % len(self.members)]
                one.beat(1 + number // len(self.members), len(self.members), now - self._began)
            self._said = due
            for fileno, _ in self._poll.poll(0.002):
                self._by_number[fileno].take()
            for viewer in viewers:
                viewer.take()


class Viewer:
    """Somebody who looks."""

    def __init__(self, at: str) -> None:
        host, port = at.split(":")
        self.sock = socket.create_connection((host, int(port)))
        self.sock.sendall(f"GET /events HTTP/1.1\r\nHost: {at}\r\n\r\n".encode())
        self.sock.setblocking(False)
        self.nbytes, self.text = 0, b""

    def take(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        assert data, "it was cut off"
        self.nbytes += len(data)
        self.text = (self.text + data)[-(1 << 22) :]


def measure(members: int = MEMBERS, count: int = VIEWERS, seconds: float = SECONDS) -> list[Bar]:
    """Percent of a core that the page takes beside what the master does anyway, and what a viewer gets."""
    with Cluster(peers=0, heartbeat_timeout=60, master_args=["--page=127.0.0.1:0"]) as cluster:
        at = page_of(cluster.master_logs(1000))
        crowd = Crowd(cluster.master_address, members)
        end = time.monotonic() + 120
        while not all(one.epoch for one in crowd.members):
            crowd.play(0.5, [])
            assert time.monotonic() < end, "the group has not formed"
        crowd.play(2.0, [])

        def share(viewers: list[Viewer]) -> float:
            before, began = cpu_seconds(cluster.master_pid), time.monotonic()
            crowd.play(seconds, viewers)
            return 100 * (cpu_seconds(cluster.master_pid) - before) / (time.monotonic() - began)

        alone = share([])
        viewers = [Viewer(at) for _ in range(count)]
        crowd.play(3.0, viewers)
        assert all(one.watched for one in crowd.members)
        for one in viewers:
            one.nbytes = 0
        watched = share(viewers)
        found = frames(viewers[0].text)
        last = next(one for one in reversed(found) if one.get("g/group/now", {}).get("rate"))
        assert last["g/group/now"]["world"] == members
        for one in viewers:
            one.sock.close()
        crowd.play(8.0, [])  # until daemons are told that nobody looks
        alone = (alone + share([])) / 2
    what = f"{members} members, {count} viewers"
    return [
        Bar(f"{members} members, nobody looks: percent of a core", alone, most=100),
        Bar(f"{what}: percent of a core", watched, most=100),
        Bar(f"{what}: the page's part", watched - alone, most=5),
        Bar(f"{what}: kB a second for each", viewers[0].nbytes / seconds / 1e3, most=1000),
        Bar(f"{what}: looks a second", len(found) / (seconds + 3), least=0.2),
    ]


if __name__ == "__main__":
    print(bar_table(measure(*map(int, sys.argv[1:]))))
