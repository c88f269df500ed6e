"""Bytes that no wancoll would send, at every port, while joins and ops go on: all processes stay up and serve."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.support import BUSY, PEERS, close_all, contribution, join, new_group, reduce_all, wait_until
from tests.fuzz.absurd import Absurd, Drawn, kinds
from wancoll.chaos import Cluster, in_threads
from wancoll.collective import Descriptor, Kind
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.peer.core.links import wire_plan
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

Attack = Callable[[socket.socket, random.Random], None]
IDLE = DEFAULT.pending_connections + 14  # more than may be in their handshake at once
PORTS = ("master", "data", "unix")

HELLOS = {
    "master": encode(m.Hello(PROTOCOL_VERSION, "nobody", 1, ["127.0.0.1:1"], 8, "", "0")),
    "data": encode(m.LaneHello(PROTOCOL_VERSION, "group", b"0" * 16, 1, 2, 0, 0, 0, 1)),
    "unix": encode(m.Attach(PROTOCOL_VERSION, "hostile", "", 64, 64, 1)),
}


def dial(cluster: Cluster, port: str, i: int) -> socket.socket:
    if port == "unix":
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(cluster.socket(i))  # waits while the queue is full; with a timeout set it would not
        except BaseException:
            connection.close()
            raise
        connection.settimeout(10)
        return connection
    address = cluster.master_address if port == "master" else cluster.peer_address(i)
    return socket.create_connection(address, timeout=10)


def until_closed(connection: socket.socket) -> None:
    """Read what comes until the other end closes; raises TimeoutError if it never does."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass


def hang_up(connection: socket.socket, rng: random.Random) -> None:
    """Half of the time with a reset."""
    if rng.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def zeros(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(bytes(rng.choice([1, 4, 8, 100, 70_000])))


def noise(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(rng.randbytes(rng.randint(1, 5000)))


def oversized(connection: socket.socket, rng: random.Random) -> None:
    length = rng.choice([DEFAULT.message_bytes + 1, 1 << 31, (1 << 32) - 1])
    connection.sendall(struct.pack("!I", length) + b"x" * 100)
    until_closed(connection)  # at once: nobody waits for 4 GiB


def noise_in_a_frame(connection: socket.socket, rng: random.Random) -> None:
    body = rng.randbytes(rng.randint(1, 2000))
    connection.sendall(struct.pack("!I", len(body)) + body)


def nested(connection: socket.socket, rng: random.Random) -> None:
    body = b"\x91" * rng.choice([100, 3000, 100_000])  # arrays in arrays
    connection.sendall(struct.pack("!I", len(body)) + body)


def huge_containers(connection: socket.socket, rng: random.Random) -> None:
    body = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
    connection.sendall(struct.pack("!I", len(body)) + body)


def other_messages(connection: socket.socket, rng: random.Random) -> None:
    """Well-formed frames that do not belong here."""
    frames = well_formed()
    connection.sendall(b"".join(rng.choices(frames, k=rng.randint(1, 4))))


def well_formed() -> list[bytes]:
    return [
        encode(m.Vote("group", 1, 1, 1, 0, 0)),
        encode(m.Commit("group", 1, 1 << 60, 1)),
        encode(m.Join("group", "intruder", 1, 1)),
        encode(m.Detach()),
        encode(m.Post(1, Descriptor(Kind.all_reduce, count=1 << 60), 0, 0, 1)),
        encode(m.Arm("guess", "mid_op", "kill")),
        encode(m.ProbeHello(PROTOCOL_VERSION + 1, "peer-0")),
        encode(m.Hello(PROTOCOL_VERSION + 1, "peer-0", 1, ["127.0.0.1:1"], 8, "", "0")),
        *HELLOS.values(),
    ]


_ABSURD = Absurd()
_SAID = {"master": m.SaidToMaster, "data": m.LaneFirst, "unix": m.FromClient}


def absurd(connection: socket.socket, rng: random.Random) -> None:
    """Messages that a decoder takes, with anything in them, after a hello."""
    port = rng.choice(PORTS)
    chance = Drawn(rng.getrandbits(32))
    said = [_ABSURD.message(rng.choice(kinds(_SAID[port])), chance) for _ in range(rng.randint(1, 10))]
    connection.sendall(HELLOS[port] + b"".join(map(encode, said)))


def after_a_hello(connection: socket.socket, rng: random.Random) -> None:
    connection.sendall(rng.choice(list(HELLOS.values())) + rng.randbytes(rng.randint(1, 3000)))


def truncated(connection: socket.socket, rng: random.Random) -> None:
    hello = rng.choice(list(HELLOS.values()))
    connection.sendall(hello[: rng.randrange(1, len(hello))])


ATTACKS: list[Attack] = [
    zeros,
    noise,
    oversized,
    noise_in_a_frame,
    nested,
    huge_containers,
    other_messages,
    absurd,
    after_a_hello,
    truncated,
]


@contextlib.contextmanager
def under_attack(cluster: Cluster, rng: random.Random) -> Iterator[list[int]]:
    """Attack every port from three threads; yields how many attacks each thread has made."""
    stop = threading.Event()
    made = [0] * len(PORTS)
    failures: list[BaseException] = []

    def attack(place: int, seed: int) -> None:
        chance = random.Random(seed)
        try:
            for how in itertools.cycle(ATTACKS):
                if stop.is_set():
                    return
                with contextlib.suppress(ConnectionError), dial(cluster, PORTS[place], chance.randrange(PEERS)) as sock:
                    how(sock, chance)
                    hang_up(sock, chance)
                made[place] += 1
        except BaseException as bad:
            failures.append(bad)

    threads = [threading.Thread(target=attack, args=(i, rng.random()), daemon=True) for i in range(len(PORTS))]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not failures, failures
    assert min(made) > 0


def all_up(cluster: Cluster, pids: list[int]) -> bool:
    return pids == [cluster.master_pid, *(cluster.pid(i) for i in range(PEERS))] and all(
        cluster.running(i) for i in range(PEERS)
    )


def open_files(pids: list[int]) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def check_unharmed(cluster: Cluster, pids: list[int], files: list[int]) -> None:
    """The same processes, and what the attacks and the groups had open is closed again."""
    assert all_up(cluster, pids)
    wait_until(
        lambda: all(now <= before for now, before in zip(open_files(pids), files, strict=True)),
        DEFAULT.handshake_timeout + BUSY,
        f"open files as before, {files}",
    )


def joins_and_ops(cluster: Cluster, seconds: float) -> int:
    """Fresh groups, one after the other, with ops of several sizes; returns how many."""
    until = time.monotonic() + seconds
    groups = 0
    while groups == 0 or time.monotonic() < until:
        comms = join(cluster, range(PEERS))
        for count in (1, 1000, 300_000):
            outcomes = reduce_all(comms, range(PEERS), count)
            assert all(outcome.receipt is not None and outcome.receipt.attempts == 1 for outcome in outcomes)
        close_all(comms)
        groups += 1
    return groups


def test_well_formed_frames_are_understood() -> None:
    """Else they would end at the decoder, and try nothing of what comes behind it."""
    everything = m.FromPeer | m.FromMaster | m.FromClient | m.LaneHello | m.ProbeHello
    for frame in well_formed():
        assert Decoder[Any](everything, DEFAULT.message_bytes).feed(frame)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(4.0, marks=pytest.mark.check),
        pytest.param(120.0, marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
    ],
)
def test_hostile_bytes_while_joins_and_ops_go_on(cluster: Cluster, rng: random.Random, seconds: float) -> None:
    joins_and_ops(cluster, 0)
    pids = [cluster.master_pid, *(cluster.pid(i) for i in range(PEERS))]
    wait_until(lambda: not cluster.status().groups, BUSY, "the groups so far are gone")
    files = open_files(pids)
    with under_attack(cluster, rng) as made:
        groups = joins_and_ops(cluster, seconds)
    print(f"{groups} groups joined and reduced under {made} attacks")
    joins_and_ops(cluster, 0)
    check_unharmed(cluster, pids, files)


def test_idle_connections_block_nobody(cluster: Cluster) -> None:
    """More silent connections to each port than may be in their handshake; joins go on, and they are closed in time."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(dial(cluster, port, 0)) for port in PORTS for _ in range(IDLE)]
        opened = time.monotonic()
        comms = join(cluster, range(PEERS))
        assert time.monotonic() - opened < DEFAULT.handshake_timeout - 0.5
        reduce_all(comms, range(PEERS))
        close_all(comms)
        for connection in idle:
            connection.settimeout(max(0.1, opened + DEFAULT.handshake_timeout + BUSY - time.monotonic()))
            until_closed(connection)


def test_one_byte_at_a_time(cluster: Cluster) -> None:
    """A slow writer's whole frames are understood at every port, and hold up nobody."""
    comms = join(cluster, range(PEERS))
    questions = {
        "master": encode(m.StatusRequest(PROTOCOL_VERSION)),
        "data": encode(m.ProbeHello(PROTOCOL_VERSION, cluster.name(0))),
        "unix": encode(m.LocalStatusRequest()),
    }

    def ask(place: int) -> int:
        with dial(cluster, PORTS[place], 0) as connection:
            for byte in questions[PORTS[place]]:
                connection.sendall(bytes([byte]))
                time.sleep(0.002)
            return len(connection.recv(65536))

    def ops(_: int) -> int:
        return len([reduce_all(comms, range(PEERS)) for _ in range(10)])

    answers = in_threads(lambda place: ops(place) if place == len(PORTS) else ask(place), len(PORTS) + 1, 30)
    assert min(answers) > 0
    close_all(comms)


def test_a_client_that_sends_nonsense_is_out_and_the_others_go_on(cluster: Cluster, rng: random.Random) -> None:
    """A member's own connection turns hostile after it has joined: that is its leave."""
    group = new_group()
    rogue = dial(cluster, "unix", 3)
    rogue.sendall(encode(m.Attach(PROTOCOL_VERSION, group, "m3", 3, 1, 1)))
    comms = in_threads(lambda k: cluster.connect(k, group=group, name=f"m{k}", start_world=3, min_world=1), 2, 30)
    assert sorted(comms[0].members) == ["m0", "m1", "m3"]
    rogue.sendall(rng.randbytes(4000) + b"\xff" * 8)
    reduce_all(comms, [0, 1])
    rogue.settimeout(BUSY)
    until_closed(rogue)
    rogue.close()
    close_all(comms)


def posted_by_hand(connection: socket.socket, call: Descriptor, input_buffer: int, result_buffer: int) -> m.FromDaemon:
    """Join as the only member, make the call, and return what the daemon answers it."""
    connection.sendall(encode(m.Attach(PROTOCOL_VERSION, new_group(), "rogue", 1, 1, 1)))
    decoder: Decoder[m.FromDaemon] = Decoder(m.FromDaemon, DEFAULT.message_bytes)
    said = False
    while True:
        for message in decoder.feed(connection.recv(65536)):
            if isinstance(message, m.EpochInfo) and not said:
                connection.sendall(encode(m.Post(1, call, input_buffer, result_buffer, message.epoch)))
                said = True
            elif isinstance(message, m.Result | m.Failure):
                return message


@pytest.mark.parametrize(
    ("input_buffer", "result_buffer", "count", "says"),
    [
        (0, 0, 1000, "overlap"),
        (0, 1 << 62, 1000, "outside the arena"),
        (m.MOST, 0, 1, "outside the arena"),
        (0, 4096, 1 << 61, "outside the arena"),
        (0, 100, 1000, "overlap"),
        (0, 4096, 1000, ""),
    ],
)
def test_a_client_that_points_outside_its_arena_is_out(
    cluster: Cluster, input_buffer: int, result_buffer: int, count: int, says: str
) -> None:
    """And is told why; one that does not gets a result."""
    pid = cluster.pid(0)
    with dial(cluster, "unix", 0) as rogue:
        answer = posted_by_hand(rogue, Descriptor(Kind.all_reduce, count=count), input_buffer, result_buffer)
        if says:
            assert isinstance(answer, m.Failure)
            assert (answer.id, answer.error) == (0, "ProtocolError")
            assert says in answer.what
            until_closed(rogue)
        else:
            assert isinstance(answer, m.Result)
    assert cluster.pid(0) == pid
    assert cluster.running(0)
    comms = join(cluster, [0, 1])
    reduce_all(comms, [0, 1])
    close_all(comms)


class RogueDaemon:
    """Joins *group* as a member of a daemon of its own, by hand; knows all that a member knows."""

    def __init__(self, cluster: Cluster, group: str, world: int) -> None:
        self._decoder: Decoder[Any] = Decoder(m.FromMaster, DEFAULT.message_bytes)
        self.control = socket.create_connection(cluster.master_address, timeout=20)
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.control.sendall(encode(m.Hello(PROTOCOL_VERSION, "rogue", 1, [address], 1, "", "0")))
        self.control.sendall(encode(m.Join(group, "rogue", world, 1)))
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(OSError):
            while not self._over.wait(0.3):
                self.control.sendall(encode(m.Heartbeat(number)))
                number += 1

    def epoch(self) -> m.Epoch:
        """The one that it is in."""
        while True:
            for message in self._decoder.feed(self.control.recv(65536)):
                if isinstance(message, m.Epoch):
                    return message

    def lane(self, cluster: Cluster, i: int, epoch: m.Epoch, number: int) -> socket.socket:
        """One that the daemon *i* has taken for its member's; the first of a dial."""
        (receiver,) = [one.mid for one in epoch.members if one.daemon == cluster.name(i)]
        ends = epoch.to, receiver
        link = epoch.group, epoch.key, *ends, 0, wire_plan(epoch)
        hello = m.LaneHello(PROTOCOL_VERSION, *link, number, (1 << 40) + number)
        lane = dial(cluster, "data", i)
        lane.sendall(encode(hello))
        (answer,) = Decoder[Any](m.LaneAnswer, DEFAULT.message_bytes).feed(lane.recv(65536))
        assert isinstance(answer, m.LaneWelcome), answer
        return lane

    def close(self) -> None:
        self._over.set()
        self._beating.join()
        self.control.close()
        self._listener.close()


def joining(cluster: Cluster, group: str) -> int:
    return sum(len(found.members) for found in cluster.status().groups if found.name == group)


def garbage(cluster: Cluster, rogue: RogueDaemon, epoch: m.Epoch, what: bytes) -> None:
    """Where frames should come, or notes; the daemons close such lanes."""
    assert epoch.plan.lanes == 1
    for number, i in itertools.product(range(2), range(2)):
        with rogue.lane(cluster, i, epoch, number) as lane, contextlib.suppress(ConnectionError):
            lane.sendall(what)
            if what:
                lane.settimeout(10)
                until_closed(lane)


@pytest.mark.parametrize("what", ["noise", "zeros", "nothing"])
def test_bytes_on_a_lane_after_its_handshake(cluster: Cluster, rng: random.Random, what: str) -> None:
    """A member that has gone mad sends garbage instead of frames: its links end, and the others go on without it."""
    group = new_group()
    pids = [cluster.pid(i) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(cluster.connect, k, group=group, name=f"m{k}", start_world=3, min_world=1) for k in range(2)
        ]
        wait_until(lambda: joining(cluster, group) == 2, 10, "the others are older, so that it is the rogue's to dial")
        rogue = RogueDaemon(cluster, group, 3)
        comms = [each.result(30) for each in coming]
    epoch = rogue.epoch()
    try:
        garbage(cluster, rogue, epoch, {"noise": rng.randbytes(100_000), "zeros": bytes(100_000), "nothing": b""}[what])
    finally:
        rogue.close()
    tensors = [contribution(k, 1000) for k in range(2)]
    in_threads(lambda k: comms[k].all_reduce(tensors[k], op="sum"), 2, 30)
    assert all((tensor == 11).all() for tensor in tensors)
    assert [cluster.pid(i) for i in range(2)] == pids
    assert all(cluster.running(i) for i in range(PEERS))
    close_all(comms)
