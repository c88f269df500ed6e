"""Sealed lanes of real daemons, and somebody on the path: an attack is no more than a redial, a recording nothing."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.faults.attacks import attack
from tests.faults.support import (
    Background,
    attempt,
    check_agreed,
    close_all,
    contribution,
    join,
    links_lost,
    new_group,
    reduce_all,
    wait_until,
)
from tests.faults.wire import Wire
from wancoll.chaos import Cluster, in_threads
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.net.ask import ask
from wancoll.net.tls import server_name, to_dial
from wancoll.net.wallet import Wallet
from wancoll.peer.core.links import wire_plan
from wancoll.testing import Proxies
from wancoll.testing.proxy import proxied_cluster
from wancoll.trust.keys import shown
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

PEERS = 3
COUNT = 1 << 18  # elements: 1 MiB
ATTACKS = ("flip", "drop", "repeat", "reorder", "splice", "truncate")


@pytest.fixture(scope="module")
def sealed() -> Iterator[tuple[Cluster, Proxies]]:
    options = ["--max-lanes=2", "--lane-timeout=2", "--link-timeout=5", "--connect-timeout=2", "--no-measure"]
    with proxied_cluster(PEERS, fork=True, secure=True, lanes=2, peer_args=options, forward=attack) as both:
        yield both


def ids(cluster: Cluster, group: str) -> dict[str, int]:
    """Of the group's members: who comes again is another one."""
    return {one.name: one.mid for found in cluster.status().groups if found.name == group for one in found.members}


def attacked(sealed: tuple[Cluster, Proxies], seeds: range) -> None:
    """Operations with one attack each: right bytes, of everybody; nobody is evicted; what was hit is dialled anew."""
    cluster, proxies = sealed
    group, hits = new_group(), dict.fromkeys(ATTACKS, 0)
    comms = join(cluster, range(PEERS), group=group)
    reduce_all(comms, range(PEERS), COUNT)
    before = ids(cluster, group)
    for seed in seeds:
        chance = random.Random(seed)
        ring = [int(name[1:]) for name in comms[0].members]
        kind, rank = ATTACKS[seed % len(ATTACKS)], chance.randrange(PEERS)
        source, to = ring[rank], ring[(rank + 1) % PEERS]
        lost = links_lost(cluster, to)
        rule = proxies.add(kind, source, to, amount=chance.uniform(1000, 100_000), at=chance.random())
        tensors = [contribution(i, COUNT) for i in range(PEERS)]
        running = Background(lambda i, mine=tensors: attempt(lambda: comms[i].all_reduce(mine[i], op="sum")), PEERS)
        outcomes = running.results(30)
        assert sorted(check_agreed(outcomes, tensors)) == ["m0", "m1", "m2"], (seed, kind)
        assert all((tensor == np.float32(111)).all() for tensor in tensors), (seed, kind)
        proxies.clear(rule)
        if proxies.fired(rule, 0):
            hits[kind] += 1
            wait_until(lambda before=lost, at=to: links_lost(cluster, at) > before, 10, f"{kind} of {seed} is found")
    assert ids(cluster, group) == before, "nobody was evicted"
    print(f"attacks that met a lane: {hits}")
    assert all(hits.values()), hits
    close_all(comms)


@pytest.mark.check
@pytest.mark.timeout(120)
def test_attacks_on_sealed_lanes_are_redials(sealed: tuple[Cluster, Proxies]) -> None:
    attacked(sealed, range(18))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_thousand_attacks_on_sealed_lanes_are_redials(sealed: tuple[Cluster, Proxies]) -> None:
    attacked(sealed, range(1000, 2000))


# ---- a recording ---------------------------------------------------------------------------------------------------


class _Tap:
    """A socket, and all that is read from it."""

    def __init__(self, sock: socket.socket, heard: bytearray) -> None:
        self._sock, self._heard = sock, heard

    def recv(self, most: int) -> bytes:
        data = self._sock.recv(most)
        self._heard += data
        return data


class Recorder(Wire):
    """A wire that keeps what passes: of each connection what each end has said."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.streams: list[bytearray] = []
        super().__init__(target)

    def aim(self, target: tuple[str, int]) -> None:
        """Where connections go from now on."""
        self._target = target

    def _pump(self, source: Any, to: socket.socket) -> None:
        self.streams.append(bytearray())
        super()._pump(_Tap(source, self.streams[-1]), to)


def replay(stream: bytes, where: tuple[str, int]) -> None:
    """Say it all, and read until the other end has closed."""
    with socket.create_connection(where, timeout=20) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(stream)
        with contextlib.suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_recording_of_all_traffic_replayed_to_each_port_changes_nothing() -> None:
    """Tokens that are used, joins, calls and leaves: by the time it is said again nobody believes it."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(0, fork=True, secure=True, lanes=1, peer_args=["--max-lanes=1"]))
        recorders = [stack.enter_context(Recorder(cluster.master_address))]
        for i in range(PEERS):
            recorders.append(stack.enter_context(Recorder(("", 0))))
            cluster.add_peer(f"--master={recorders[0].address}", f"--advertise={recorders[-1].address}")
            recorders[-1].aim(cluster.peer_address(i))
        close_all(join(cluster, range(PEERS)))  # a group that is left, too
        group = new_group()
        comms = join(cluster, range(PEERS), group=group)
        for _ in range(5):
            reduce_all(comms, range(PEERS))
        before, epoch, daemons = ids(cluster, group), comms[0].epoch, sorted(cluster.status().daemons)
        streams = [bytes(stream) for recorder in recorders for stream in recorder.streams if stream]
        assert len(recorders[0].streams) >= 2 * PEERS, "each has come in, and stayed"
        assert sum(bool(recorder.streams) for recorder in recorders[1:]) >= PEERS - 1, "the younger dial"
        logs = [links_lost(cluster, i) for i in range(PEERS)]
        for where in (cluster.master_address, *map(cluster.peer_address, range(PEERS))):
            for stream in streams:
                replay(stream, where)
            outcomes = reduce_all(comms, range(PEERS))
            assert all(outcome.receipt.attempts == 1 for outcome in outcomes)
        assert (ids(cluster, group), comms[0].epoch, sorted(cluster.status().daemons)) == (before, epoch, daemons)
        assert [found.name for found in cluster.status().groups] == [group]
        assert [links_lost(cluster, i) for i in range(PEERS)] == logs
        close_all(comms)


# ---- who was evicted -----------------------------------------------------------------------------------------------


class Rogue:
    """Joins *group* as the one member of a daemon of its own, by hand, with a key that a token has let in."""

    def __init__(self, cluster: Cluster, folder: Path, group: str, world: int) -> None:
        self.wallet = Wallet(str(folder), parse(cluster.token()))
        self._decoder: Decoder[Any] = Decoder(m.FromMaster, DEFAULT.message_bytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        here = f"127.0.0.1:{self.listener.getsockname()[1]}"
        hello = m.Hello(PROTOCOL_VERSION, "rogue", 1, [here], 1, "", "0")
        self._control = self._dial(cluster.master_address, self.wallet.masters[0], hello)
        self._control.sendall(encode(m.Join(group, "rogue", world, 1)))
        self.wallet.keep(self.hears(m.Admitted))

    def _dial(self, where: tuple[str, int], key: bytes, first: Any) -> socket.socket:
        """A connection to the owner of *key*, which begins with this message."""
        raw = socket.create_connection(where, timeout=20)
        tls = to_dial().wrap_socket(raw, server_hostname=server_name(key))
        assert shown(tls.getpeercert(binary_form=True) or b"") == key
        (challenge,) = Decoder[Any](m.Challenge, DEFAULT.message_bytes).feed(tls.recv(65536))
        tls.sendall(encode(self.wallet.proof("rogue").first(key, challenge.nonce, first)))
        return tls

    def hears(self, kind: type[Any]) -> Any:
        """The next message of this kind from the master."""
        while True:
            for message in self._decoder.feed(self._control.recv(65536)):
                if isinstance(message, kind):
                    return message

    def lane(self, where: tuple[str, int], key: bytes, hello: m.LaneHello) -> tuple[m.LaneAnswer, socket.socket]:
        """What the daemon with this *key* says to a lane that begins so; and the lane."""
        lane = self._dial(where, key, hello)
        (answer,) = Decoder[Any](m.LaneAnswer, DEFAULT.message_bytes).feed(lane.recv(65536))
        return answer, lane

    def close(self) -> None:
        self._control.close()
        self.listener.close()


@pytest.mark.check
@pytest.mark.timeout(120)
def test_an_evicted_member_with_a_good_receipt_reaches_nobodys_lanes(tmp_path: Path) -> None:
    """While it is a member its lanes are let in; then none is, by whatever name, and nobody's link is broken."""
    options = ["--max-lanes=1", "--no-measure", "--connect-timeout=5", "--link-timeout=5"]
    with Cluster(2, fork=True, secure=True, lanes=1, heartbeat_timeout=60, peer_args=options) as cluster:
        group = new_group()
        with ThreadPoolExecutor(2) as pool:
            coming = [
                pool.submit(cluster.connect, k, group=group, name=f"m{k}", start_world=3, min_world=1) for k in range(2)
            ]
            wait_until(lambda: len(ids(cluster, group)) == 2, 10, "the others are older: it is the rogue's to dial")
            rogue = Rogue(cluster, tmp_path / "rogue", group, 3)
            epoch: m.Epoch = rogue.hears(m.Epoch)
            comms = [each.result(30) for each in coming]

        def knock(i: int, number: int, *, by: int = epoch.to, of: m.Epoch = epoch) -> m.LaneAnswer:
            (to,) = [one for one in epoch.members if one.daemon == cluster.name(i)]
            hello = m.LaneHello(PROTOCOL_VERSION, group, of.key, by, to.mid, 0, wire_plan(of), 0, (1 << 40) + number)
            answer, lane = rogue.lane(cluster.peer_address(i), to.key, hello)
            lane.close()
            return answer

        assert [type(knock(i, 0)) for i in range(2)] == [m.LaneWelcome] * 2, "it is a member"
        evict = m.Evict(PROTOCOL_VERSION, group, "rogue", False, "a test")
        answer = ask(cluster.master_address, evict, m.FromMaster, timeout=10, who="the master", proof=cluster.proof())
        assert answer.done, answer
        rogue.hears(m.Evicted)
        outcomes = reduce_all(comms, range(2))
        assert sorted(outcomes[0].receipt.contributors) == ["m0", "m1"]
        others = {one.name: one.mid for one in epoch.members}
        wrong = replace(epoch, key=bytes(16))
        knocks = [
            lambda: knock(0, 1),
            lambda: knock(1, 1),
            lambda: knock(0, 2, of=wrong),
            lambda: knock(1, 2, of=wrong),
            lambda: knock(0, 3, by=others["m1"]),  # as another one, whose link is up
            lambda: knock(1, 3, by=others["m0"]),
        ]
        said = in_threads(lambda k: knocks[k](), len(knocks), 30)
        assert all(isinstance(one, m.LaneRefused) for one in said), said
        assert all("whose key is" in one.reason for one in said[4:]), said
        outcomes = reduce_all(comms, range(2))
        assert all(outcome.receipt.attempts == 1 for outcome in outcomes), "the link between the others is as it was"
        rogue.close()
        close_all(comms)
