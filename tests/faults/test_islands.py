"""Islands of two members: calls go column by column, and happen on all members or on none; an island is lost whole."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import new_group
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import ConfigError, Evicted, WancollError
from wancoll.testing.processes import ClientProcess

SHARDS = 2
WHO = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.fixture(scope="module", params=[32, 0], ids=["members", "master"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(2, fork=True, master_args=[f"--voters={request.param}"]) as made:
        yield made


def member(socket: str, group: str, island: str, shard: int) -> Any:
    """Joins, and adds up what it is told to, until it is killed."""
    comm = wancoll.connect(group, socket=socket, start_world=2, island=island, shard=shard, shards=SHARDS)
    while True:
        comm.all_reduce(tensor(island, shard))


def tensor(island: str, shard: int) -> np.ndarray:
    """A contribution that tells who made it; shards differ in size."""
    return np.full(3 + 2 * shard, {"a": 1.0, "b": 10.0, "c": 100.0}[island] * (shard + 1), np.float32)


def joined(cluster: Cluster, group: str, who: list[tuple[str, int]], **options: Any) -> dict[tuple[str, int], Any]:
    def connect(at: int) -> Any:
        island, shard = who[at]
        options_of = {"start_world": 2, "shards": SHARDS, **options}
        return cluster.connect(ord(island) % 2, group=group, island=island, shard=shard, **options_of)

    return dict(zip(who, in_threads(connect, range(len(who)), timeout=30), strict=True))


def reduced(comms: dict[tuple[str, int], Any]) -> dict[tuple[str, int], Any]:
    """All add up at the same time; the receipts."""
    who = list(comms)
    receipts = in_threads(lambda at: comms[who[at]].all_reduce(tensor(*who[at])), range(len(who)), timeout=30)
    return dict(zip(who, receipts, strict=True))


def test_calls_go_column_by_column(cluster: Cluster) -> None:
    comms = joined(cluster, new_group(), WHO)
    for (_, shard), receipt in reduced(comms).items():
        assert receipt.out.tolist() == [11.0 * (shard + 1)] * (3 + 2 * shard)
        assert sorted(receipt.contributors) == [f"a/{shard}", f"b/{shard}"]
    for (island, shard), comm in comms.items():
        assert (comm.name, comm.world_size, comm.rank) == (f"{island}/{shard}", 2, comms[island, 1 - shard].rank)
    with pytest.raises(ConfigError, match="shards=3; expected the group's shards=2"):
        joined(cluster, comms["a", 0].group, [("c", 0)], shards=3)
    first = min(comms, key=lambda who: comms[who].rank)[0]
    got = in_threads(
        lambda at: comms[WHO[at]].broadcast(tensor(*WHO[at]), root=0).out.tolist(), range(len(WHO)), timeout=30
    )
    assert got == [tensor(first, shard).tolist() for _, shard in WHO]
    for comm in comms.values():
        comm.close()


def test_columns_that_call_different_kinds_hear_so(cluster: Cluster) -> None:
    comms = joined(cluster, new_group(), WHO)

    def call(at: int) -> Any:
        comm = comms[WHO[at]]
        with pytest.raises(wancoll.CollectiveMismatch):
            comm.barrier() if WHO[at][1] else comm.all_reduce(tensor(*WHO[at]))
        return True

    assert all(in_threads(call, range(len(WHO)), timeout=30))
    assert all(receipt.world_size == 2 for receipt in reduced(comms).values())
    for comm in comms.values():
        comm.close()


def test_half_an_island_waits_and_a_whole_one_is_admitted(cluster: Cluster) -> None:
    group = new_group()
    comms = joined(cluster, group, WHO)
    half = threading.Thread(target=lambda: comms.update(joined(cluster, group, [("c", 0)])))
    half.start()
    deadline = time.monotonic() + 10
    while "c/0" not in str(cluster.status().groups):
        assert time.monotonic() < deadline
    who = list(comms)
    in_threads(lambda at: comms[who[at]].update_membership(), range(len(who)), timeout=30)
    assert {comm.world_size for comm in comms.values()} == {2}
    rest = threading.Thread(target=lambda: comms.update(joined(cluster, group, [("c", 1)])))
    rest.start()
    while "c/1" not in str(cluster.status().groups):
        assert time.monotonic() < deadline
    in_threads(lambda at: comms[who[at]].update_membership(), range(len(who)), timeout=30)
    half.join(10)
    rest.join(10)
    for (_, shard), receipt in reduced(comms).items():
        assert receipt.out.tolist() == [111.0 * (shard + 1)] * (3 + 2 * shard)
    for comm in comms.values():
        comm.close()


def test_shards_of_two_launches_make_no_island(cluster: Cluster) -> None:
    group, comms = new_group(), dict[Any, Any]()
    old = threading.Thread(target=lambda: comms.update(old=_refused(cluster, group)))
    old.start()
    deadline = time.monotonic() + 10
    while "a/0" not in str(cluster.status().groups):
        assert time.monotonic() < deadline
    who = [("a", 1), ("a", 0)]
    new = threading.Thread(target=lambda: comms.update(joined(cluster, group, who[:1], start_world=1, launch="two")))
    new.start()
    old.join(10)
    assert "another launch" in comms.pop("old")
    comms.update(joined(cluster, group, who[1:], start_world=1, launch="two"))
    new.join(10)
    assert {who: each.out.tolist()[0] for who, each in reduced(comms).items()} == {("a", 0): 1.0, ("a", 1): 2.0}
    for comm in comms.values():
        comm.close()


def _refused(cluster: Cluster, group: str) -> str:
    with pytest.raises(ConfigError) as bad:
        joined(cluster, group, [("a", 0)], start_world=1, launch="one")
    return str(bad.value)


def test_a_killed_process_takes_its_island_along_and_no_other(cluster: Cluster) -> None:
    """The others of its island hear so at once, without a call; the other island loses no operation."""
    group, told, heard = new_group(), threading.Event(), list[Any]()
    victim: ClientProcess = cluster.client(ord("b") % 2, member, group, "b", 1)
    comms = joined(cluster, group, [("a", 0), ("a", 1), ("b", 0)])
    comms["b", 0].on_island_lost(lambda error: (heard.append((time.monotonic(), error)), told.set()))
    for _ in range(3):
        for (_, shard), receipt in reduced(comms).items():
            assert receipt.out.tolist() == [11.0 * (shard + 1)] * (3 + 2 * shard)
    killed = time.monotonic()
    victim.kill()
    assert told.wait(10)
    at, error = heard[0]
    assert at - killed < 2.0
    assert isinstance(error, Evicted)
    assert "b/1" in str(error)
    with pytest.raises(Evicted, match="b/1"):
        comms["b", 0].all_reduce(tensor("b", 0))
    comms.pop(("b", 0)).close()
    for (_, shard), receipt in reduced(comms).items():
        assert receipt.out.tolist() == [1.0 * (shard + 1)] * (3 + 2 * shard)
    assert {comm.world_size for comm in comms.values()} == {1}
    assert len(heard) == 1
    for comm in comms.values():
        comm.close()


def test_a_hook_is_not_called_for_a_goodbye_of_ones_own(cluster: Cluster) -> None:
    comms = joined(cluster, new_group(), WHO)
    heard = list[Any]()
    for comm in comms.values():
        comm.on_island_lost(heard.append)
    for comm in comms.values():
        comm.close()
    deadline = time.monotonic() + 5
    while any(thread.name == "wancoll island" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
    assert [str(error) for error in heard if "its island is out: left" not in str(error)] == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shards": 2}, "shards are of an island"),
        ({"island": "a", "name": "b"}, "exclude each other"),
        ({"island": "a", "shard": 2, "shards": 2}, "shard"),
        ({"island": "a", "shards": 0}, "shards"),
        ({"island": 7}, "name"),
        ({"island": "a", "shards": 600, "start_world": 2}, "start_world"),
    ],
)
def test_what_no_island_can_be_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        wancoll.connect(socket="/nowhere", **options)


def test_a_grace_time_is_refused(cluster: Cluster) -> None:
    comms = joined(cluster, new_group(), [("a", 0), ("a", 1)], start_world=1)
    with pytest.raises(ConfigError, match="wait for each other"):
        comms["a", 0].all_reduce(tensor("a", 0), grace=1.0)
    for comm in comms.values():
        comm.close()


def test_columns_that_lack_more_and_less_end_a_sync_state_together(cluster: Cluster) -> None:
    """One column is alike already; in the other one a member lacks all."""
    comms = joined(cluster, new_group(), WHO)
    states = {who: np.full(3, 7.0 if who[1] or who[0] == "a" else 0.0) for who in WHO}

    def sync(at: int) -> Any:
        comm, who = comms[WHO[at]], WHO[at]
        receipt = comm.sync_state({"x": states[who]}, revision=2 if who[0] == "a" else 1)
        return receipt.revision, comm.all_reduce(tensor(*who)).seq

    assert len(set(in_threads(sync, range(len(WHO)), timeout=30))) == 1
    assert all(state.tolist() == [7.0] * 3 for state in states.values())
    for comm in comms.values():
        comm.close()


def talker(socket: str, group: str, island: str, shard: int) -> Iterator[Any]:
    """Adds up, and says what came of it, until it is out."""
    comm = wancoll.connect(group, socket=socket, start_world=3, island=island, shard=shard, shards=SHARDS)
    try:
        for number in itertools.count(1):
            if number % 10 == 0:
                comm.update_membership()
                continue
            receipt = comm.all_reduce(tensor(island, shard))
            islands = tuple(name[0] for name in receipt.contributors)
            yield receipt.seq, receipt.epoch, islands, receipt.digest, float(receipt.out[0])
    except WancollError as bad:
        yield str(bad)


class Told:
    """What a talker has said, taken in by a thread; *over*: its last word."""

    def __init__(self, process: ClientProcess) -> None:
        self.process, self.results, self.over = process, list[Any](), ""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while not isinstance(said := self.process.next(), str):
                self.results.append(said)
            self.over = said
        except ConfigError:
            self.over = "killed"


@pytest.mark.check
@pytest.mark.timeout(120)
def test_processes_that_are_killed_at_random_moments(cluster: Cluster) -> None:
    """Each takes its island along and no other; it comes back; all say the same of an operation, in all columns."""
    group, chance, said = new_group(), random.Random(1), list[Told]()

    def start(island: str) -> list[Told]:
        place = "abc".index(island) % 2
        return [Told(cluster.client(place, talker, group, island, shard)) for shard in range(SHARDS)]

    live = {island: start(island) for island in "abc"}
    for _ in range(8):
        before = {island: len(each[0].results) for island, each in live.items()}
        deadline = time.monotonic() + 20
        while any(len(live[island][0].results) < count + 5 for island, count in before.items()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.random() / 10)
        island, shard = chance.choice("abc"), chance.randrange(SHARDS)
        victim, mate = live[island][shard], live[island][1 - shard]
        victim.process.kill()
        deadline = time.monotonic() + 2
        while not mate.over:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert f"{island}/{shard}" in mate.over or "others may have committed" in mate.over
        assert not any(each.over for other in "abc" if other != island for each in live[other])
        said += live[island]
        live[island] = start(island)
    told: dict[int, dict[int, set[Any]]] = defaultdict(lambda: defaultdict(set))
    for each in live.values():
        said += each
        for one in each:
            one.process.kill()
    for each in said:
        for seq, epoch, islands, digest, value in list(each.results):
            shard = int(value / sum({"a": 1.0, "b": 10.0, "c": 100.0}[island] for island in islands)) - 1
            told[seq][shard].add((epoch, islands, digest))
    assert len(told) > 50
    assert all(len(alike) == 1 for columns in told.values() for alike in columns.values())
    assert all(len({next(iter(alike))[:2] for alike in columns.values()}) == 1 for columns in told.values())
    assert {len(columns) for columns in told.values()} <= {1, 2}
