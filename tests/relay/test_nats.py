"""Members behind NATs of several kinds form a group with a master that is a relay, and with relays that are killed."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.support import links_lost, wait_until
from tests.relay.nat import KINDS, PORT, Nats, why_not
from tests.relay.running import relays
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import WancollError
from wancoll.wire.messages import Way

PAIRS = list(itertools.product(KINDS, KINDS))
OFTEN = [("symmetric", "restricted"), ("open", "symmetric"), ("restricted", "cone"), ("restricted", "restricted")]
SLOW = ("wancoll", "relay", "--rate=300Mbit/s")
RELAY = ["--relay=1Gbit/s"]  # of the master; without it all is by the pasted line alone
LISTEN = f"--listen=*:{PORT}"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def cluster_behind(
    nats: Nats, peers: int, *master: str, peer_args: Sequence[str] = (LISTEN,), secure: bool = True, **more: Any
) -> Cluster:
    return Cluster(peers, lanes=2, network=nats, secure=secure, master_args=master, peer_args=peer_args, **more)


def sum_of(comms: list[Any], count: int = 1000) -> list[Any]:
    """Receipts of an all_reduce whose sum is checked."""
    tensors = [np.full(count, i + 1, np.float32) for i in range(len(comms))]
    receipts = in_threads(lambda i: comms[i].all_reduce(tensors[i]), len(comms))
    for tensor in tensors:
        np.testing.assert_array_equal(tensor, len(comms) * (len(comms) + 1) / 2)
    return receipts


def reachable(kind: str) -> bool:
    return kind in ("open", "cone")


def ways_in(cluster: Cluster, group: str = "default") -> dict[tuple[str, str], Way]:
    """How those reach each other that the plan names, by their daemons."""
    [found] = [one for one in cluster.status().groups if one.name == group]
    names = {member.mid: member.daemon for member in found.members}
    assert found.plan is not None
    return {(min(ends), max(ends)): way for a, b, way in found.plan.plan.ways for ends in [(names[a], names[b])]}


def way_of(one: str, other: str) -> Way:
    """Which one they have to go."""
    if reachable(one) or reachable(other):
        return Way.direct
    return Way.relayed if "symmetric" in (one, other) else Way.punched


def check_pair(one: str, other: str) -> None:
    way = way_of(one, other)
    with Nats([one, other]) as nats, cluster_behind(nats, 2, *RELAY[: way is Way.relayed]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
        assert [receipt.world_size for receipt in sum_of(comms)] == [2, 2]
        [group] = cluster.status().groups
        names = {member.mid: member.daemon for member in group.members}
        assert group.plan is not None
        ways = [(names[dialler], by) for dialler, _, by in group.plan.plan.ways]
        if way is not Way.direct:
            assert [by for _, by in ways] == [way]
        elif not reachable(one) or not reachable(other):
            dialler = "peer-0" if not reachable(one) else "peer-1"  # who cannot be dialled dials, if need be by this
            assert ways in ([], [(dialler, Way.direct)])
            assert ways or max(names) == max(mid for mid, name in names.items() if name == dialler)
        shown = {Way.punched: group.punched, Way.relayed: group.relayed}
        assert {by: [{*pair[:2]} for pair in pairs] for by, pairs in shown.items()} == {
            by: [{member.name for member in group.members}] if by is way else [] for by in shown
        }
        for _, _, _, why in group.punched + group.relayed:
            assert why.count(" has dialled ") == 2
            assert why.count(" has punched ") == (2 if way is Way.relayed else 0)
        assert group.epoch == 1


@pytest.mark.check
@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", OFTEN, ids="-".join)
def test_pairs_behind_nats_commit_with_nothing_but_the_masters_token(pair: tuple[str, str]) -> None:
    check_pair(*pair)


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in OFTEN], ids="-".join)
def test_all_pairs_of_kinds_do(pair: tuple[str, str]) -> None:
    check_pair(*pair)


@pytest.mark.check
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("other", "way"), [("restricted", Way.punched), ("symmetric", Way.relayed)], ids=["restricted", "symmetric"]
)
def test_members_behind_one_nat_reach_each_other_by_local_addresses_and_others_as_the_nat_lets_them(
    other: str, way: Way
) -> None:
    kinds = ["restricted", "=0", other]
    with Nats(kinds) as nats, cluster_behind(nats, 3, *RELAY[: way is Way.relayed]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=3, min_world=3), 3)
        assert [receipt.world_size for receipt in sum_of(comms)] == [3, 3, 3]
        assert ways_in(cluster) == {("peer-0", "peer-2"): way, ("peer-1", "peer-2"): way}


@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kinds", "way"), [(["restricted", "/0", "/0"], Way.relayed), (["restricted", "restricted", "/0"], Way.punched)],
    ids=["one outer NAT", "two"],
)  # fmt: skip
def test_two_layers_of_nat_are_punched_from_outside_and_not_from_beside(kinds: list[str], way: Way) -> None:
    with Nats(kinds) as nats, cluster_behind(nats, 3, *RELAY[: way is Way.relayed]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i + 1, group="two", start_world=2, min_world=2), 2)
        assert [receipt.world_size for receipt in sum_of(comms)] == [2, 2]
        assert ways_in(cluster, "two") == {("peer-1", "peer-2"): way}


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_group_in_clear_meets_at_a_relay_too() -> None:
    with Nats(["restricted", "symmetric"]) as nats, cluster_behind(nats, 2, "--relay=1Gbit/s", secure=False) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
        assert [receipt.world_size for receipt in sum_of(comms)] == [2, 2]


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_joiner_behind_nat_is_admitted_through_a_relay_and_reaches_joiners_beside_it() -> None:
    with Nats(["restricted", "symmetric", "restricted"]) as nats, cluster_behind(nats, 3, "--relay=1Gbit/s") as cluster:

        def client(i: int) -> Any:
            comm = cluster.connect(i, start_world=1, min_world=1)
            while comm.world_size < 3:
                comm.update_membership()
            return comm

        comms = in_threads(client, 3)
        assert [receipt.world_size for receipt in sum_of(comms)] == [3, 3, 3]


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_member_that_can_be_dialled_is_a_relay_for_two_that_cannot() -> None:
    kinds = ["restricted", "symmetric", "open"]
    relay = {2: {"WANCOLL_RELAY": "300Mbit/s"}}
    with Nats(kinds) as nats, cluster_behind(nats, 3, peer_env=relay) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=3, min_world=3), 3)
        assert [receipt.world_size for receipt in sum_of(comms)] == [3, 3, 3]
        assert cluster.status().relays == ["peer-2"]
        found = ways_in(cluster)
        assert found.pop(("peer-0", "peer-1")) is Way.relayed
        assert set(found.values()) <= {Way.direct}


@pytest.mark.check
@pytest.mark.timeout(120)
def test_without_a_relay_the_second_is_refused_and_told_the_ways_out() -> None:
    with Nats(["restricted", "symmetric"]) as nats, cluster_behind(nats, 2) as cluster:
        first = ThreadPoolExecutor(1).submit(cluster.connect, 0, start_world=2, min_world=2)
        while not cluster.status().groups:
            time.sleep(0.02)
        with pytest.raises(WancollError, match=r"cannot reach.*--relay RATE.*wancoll relay.*--advertise.*VPN"):
            cluster.connect(1, start_world=2, min_world=2)
        assert not first.done()


@pytest.mark.check
@pytest.mark.timeout(180)
def test_killing_a_relay_costs_no_epoch_where_another_one_is_and_no_member_where_it_comes_back(tmp_path: Path) -> None:
    with Nats(["restricted", "symmetric"]) as nats:
        for host, last in (("r1", 201), ("r2", 202)):
            nats.add_open(host, last)  # type: ignore[arg-type]
        with (
            cluster_behind(nats, 2) as cluster,
            relays(cluster, nats, tmp_path, "r1", "r2", program=SLOW) as (one, other),  # type: ignore[arg-type]
        ):
            comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
            sum_of(comms)
            epochs = [cluster.status().groups[0].epoch]
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(sum_of, comms, 8 << 20)
                while not cluster.peer_status(0)["members"][0]["ops"]:
                    time.sleep(0.01)
                time.sleep(0.3)  # it takes two seconds, lanes go through the first relay
                assert not running.done()
                one.kill()
                running.result()
            epochs.append(cluster.status().groups[0].epoch)
            other.kill()
            one.start()
            sum_of(comms, 1 << 20)
            epochs.append(cluster.status().groups[0].epoch)
            one.kill()
            one.start()  # within link_timeout
            receipts = sum_of(comms, 1 << 20)
            epochs.append(cluster.status().groups[0].epoch)
        assert [receipt.world_size for receipt in receipts] == [2, 2]
        cost = [after - before for before, after in itertools.pairwise(epochs)]
        assert cost[0] == 0
        assert max(cost) <= 1


@pytest.mark.check
@pytest.mark.timeout(120)
def test_a_master_that_is_a_relay_is_killed_and_started_again_and_nobody_is_lost() -> None:
    with Nats(["restricted", "symmetric"]) as nats, cluster_behind(nats, 2, "--relay=1Gbit/s") as cluster:
        comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
        sum_of(comms)
        cluster.kill_master()
        cluster.start_master()
        assert [receipt.world_size for receipt in sum_of(comms)] == [2, 2]
        wait_until(lambda: bool(cluster.status().groups), 30, "the new master hears of the group")  # they need none
        [group] = cluster.status().groups
        assert group.plan is not None
        assert [way for _, _, way in group.plan.plan.ways] == [Way.relayed]


@pytest.mark.check
@pytest.mark.timeout(180)
def test_what_a_relay_changes_is_found_and_no_sum_is_wrong(tmp_path: Path) -> None:
    asked, evil = tmp_path / "attack", Path(__file__).with_name("evil.py")
    with Nats(["restricted", "symmetric"]) as nats:
        nats.add_open("evil", 201)  # type: ignore[arg-type]
        with (
            cluster_behind(nats, 2, peer_args=[LISTEN, "--no-measure"]) as cluster,  # bursts are not what is attacked
            relays(cluster, nats, tmp_path, "evil", program=[sys.executable, str(evil), str(asked)]),  # type: ignore[arg-type]
        ):
            comms = in_threads(lambda i: cluster.connect(i, start_world=2, min_world=2), 2)
            sum_of(comms)
            for kind in ("flip", "drop", "repeat", "reorder", "splice"):
                before = [links_lost(cluster, i) for i in range(2)]
                asked.write_text(kind)
                receipts = sum_of(comms, 1 << 20)
                assert not asked.exists(), f"{kind}: never done"
                assert [receipt.world_size for receipt in receipts] == [2, 2], kind
                until = time.monotonic() + 10  # it may show when all had come already
                while [links_lost(cluster, i) for i in range(2)] == before:
                    assert time.monotonic() < until, f"{kind}: nobody noticed"
                    time.sleep(0.02)
