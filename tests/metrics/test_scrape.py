"""What real masters and daemons tell, beside what a test had them do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import wancoll
from tests.metrics.support import Scrape, documented, port_of, scrape, until
from wancoll.chaos import Cluster, in_threads
from wancoll.cli import main
from wancoll.metrics.core import families as f
from wancoll.net.listen import open_listeners
from wancoll_master.config import MasterConfig
from wancoll_master.server import Server
from wancoll_master.store.journal import Journal

METRICS = "--metrics=127.0.0.1:0"
TCP = "--no-shared-memory"  # of which the kernel knows round trips
TOKEN = "a-token-of-24-characters"


def peer(cluster: Cluster, i: int) -> Scrape:
    return scrape(port_of(cluster.logs(i, 1000)))


def master(cluster: Cluster) -> Scrape:
    return scrape(port_of(cluster.master_logs(1000)))


def test_metrics_say_what_was_done_and_who_was_lost() -> None:
    with Cluster(3, fork=True, lanes=2, peer_args=[METRICS, TCP], master_args=[METRICS]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", name=f"m{i}", start_world=3), 3, 30)

        def work(i: int) -> list[tuple[int, int]]:
            small, large = np.ones(1000, np.float32), np.ones(300_000, np.float32)
            receipts = [comms[i].all_reduce(small) for _ in range(5)]
            receipts.append(comms[i].all_reduce(large, codec="int8"))
            receipts.append(comms[i].broadcast(small, root=0))
            comms[i].sync_state({"x": np.full(1000, i, np.float32)}, revision=i)
            return [(one.bytes_sent, one.bytes_saved) for one in receipts]

        moved = in_threads(work, 3, 30)[0]
        before = peer(cluster, 0)
        assert before.value("wancoll_operations_total", group="g", kind="all_reduce", outcome="committed") == 6
        assert before.value("wancoll_operations_total", group="g", kind="broadcast", outcome="committed") == 1
        counts = before.all("wancoll_operation_seconds_count")
        by_size = {key[2:]: value for key, value in counts.items() if key[3] in ("all_reduce", "broadcast")}
        assert by_size == {
            ("g", "all_reduce", "4KiB"): 5,
            ("g", "all_reduce", "16MiB"): 1,
            ("g", "broadcast", "4KiB"): 1,
        }
        assert before.value("wancoll_operation_bytes_total", group="g", kind="all_reduce") == 5 * 4000 + 1_200_000
        assert before.value("wancoll_operation_bus_bytes_total", group="g", kind="all_reduce") == pytest.approx(
            (5 * 4000 + 1_200_000) * 4 / 3
        )
        assert before.value("wancoll_sent_bytes_total", group="g", codec="int8") == moved[5][0]
        assert before.value("wancoll_saved_bytes_total", group="g", codec="int8") == moved[5][1] > 0
        assert before.value("wancoll_sent_bytes_total", group="g", codec="none") >= sum(sent for sent, _ in moved[:5])
        assert (
            sum(peer(cluster, i).all("wancoll_sync_state_bytes_total").get(("received", "g"), 0) for i in range(3))
            == 2 * 4000
        )  # of the member that is furthest
        lanes = {("peer-1",): 2, ("peer-2",): 4}  # one is for notes; sync_state's stripes have a link of their own
        assert before.all("wancoll_link_lanes") == lanes
        for name in ("sent", "received"):
            assert before.value(f"wancoll_link_{name}_bytes_total", daemon="peer-2") > 10_000
        assert before.value("wancoll_link_round_trip_seconds", daemon="peer-2") < 10
        assert before.value("wancoll_link_segments_total", daemon="peer-2") > 0
        assert 0 < before.value("wancoll_arena_used_bytes", group="g") < 100e6
        assert before.value("wancoll_arena_size_bytes", group="g") > 100e6
        assert before.all("wancoll_recovery_seconds_count") == {}
        here = master(cluster)
        assert here.value("wancoll_master_members", group="g") == 3
        assert here.value("wancoll_master_daemons") == 3
        assert here.all("wancoll_master_evictions_total") == {}

        cluster.kill(2)
        in_threads(lambda i: comms[i].all_reduce(np.ones(10, np.float32)), 2, 30)
        after = peer(cluster, 0)
        assert after.value("wancoll_operations_total", group="g", kind="all_reduce", outcome="committed") == 7
        assert after.value("wancoll_epochs_total", group="g") == 2
        assert after.value("wancoll_lost_members_total", group="g") == 1
        assert after.value("wancoll_recovery_seconds_count", group="g") == 1
        assert 0 < after.value("wancoll_recovery_seconds_sum", group="g") < 30
        assert after.value("wancoll_members", group="g") == 2
        assert after.all("wancoll_link_lanes") == {("peer-1",): 2}
        for name in ("sent", "received"):  # what went to the dead one is not forgotten
            name = f"wancoll_link_{name}_bytes_total"
            assert after.value(name, daemon="peer-2") >= before.value(name, daemon="peer-2")
        there = master(cluster)
        assert there.all("wancoll_master_evictions_total") == {("g", "daemon died"): 1}
        assert there.value("wancoll_master_events_total", group="g", kind="epoch") == 2
        assert there.value("wancoll_master_members", group="g") == 2
        assert there.value("wancoll_master_daemons") == 2
        assert there.value("wancoll_master_leads") == 1

        known = {name: kind for name, kind, _, _ in documented()}
        assert after.types | there.types == known  # all are told by somebody, and nothing else is
        labels = {name: set(labels) for name, _, labels, _ in documented()}
        for found in (after, there):
            for name, key in found._values:
                base = name if name in labels else name.rpartition("_")[0]
                assert {label for label, _ in key} - {"le"} == labels[base]

        comms[1].close()  # a member that leaves is no eviction
        there = until(lambda: master(cluster), lambda one: one.value("wancoll_master_members", group="g") == 1)
        assert there.all("wancoll_master_evictions_total") == {("g", "daemon died"): 1}
        assert there.value("wancoll_master_events_total", group="g", kind="left") == 1


@pytest.mark.check
def test_metrics_say_who_is_waited_for_and_when_no_master_is_there() -> None:
    with Cluster(2, fork=True, lanes=1, peer_args=[METRICS], master_args=[METRICS, "--slow-after=0.1"]) as cluster:
        comms = in_threads(lambda i: cluster.connect(i, group="g", name=f"m{i}", start_world=2), 2, 30)
        work = comms[0].all_reduce(np.ones(10, np.float32), async_op=True)
        found = until(lambda: master(cluster), lambda one: bool(one.all("wancoll_master_waited_for")))
        assert found.all("wancoll_master_waited_for") == {("g", "m1"): 1}
        assert found.value("wancoll_master_waited_for_seconds", group="g", member="m1") > 0.1
        here = peer(cluster, 0)
        assert here.value("wancoll_operations_in_flight", group="g") == 1
        assert here.value("wancoll_oldest_operation_seconds", group="g") > 0.1
        comms[1].all_reduce(np.ones(10, np.float32))
        work.wait(timeout=20)
        assert peer(cluster, 0).value("wancoll_operations_in_flight", group="g") == 0
        assert peer(cluster, 0).value("wancoll_oldest_operation_seconds", group="g") == 0
        found = until(lambda: master(cluster), lambda one: not one.all("wancoll_master_waited_for"))
        assert found.all("wancoll_master_waited_for") == {}

        ready = f"http://{port_of(cluster.logs(0, 1000))}/readyz"
        assert urllib.request.urlopen(ready, timeout=10).status == 200
        cluster.kill_master()
        found = until(lambda: peer(cluster, 0), lambda one: one.value("wancoll_master_connected") == 0)
        assert found.value("wancoll_master_connected") == 0
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(ready, timeout=10)


def test_a_master_that_waits_for_etcd_is_alive_and_not_ready(tmp_path: Path) -> None:
    ports = [open_listeners("127.0.0.1:0")[0] for _ in range(2)]
    nobody, metrics = (port.getsockname()[1] for port in ports)
    for port in ports:
        port.close()
    command = [sys.executable, "-m", "wancoll", "master", "--listen=127.0.0.1:0", "--secure", f"--state={tmp_path}/m"]
    command += [f"--etcd=http://127.0.0.1:{nobody}", f"--metrics=127.0.0.1:{metrics}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
        try:
            url = f"http://127.0.0.1:{metrics}"
            until(lambda: answers(f"{url}/healthz"), lambda alive: alive)
            assert urllib.request.urlopen(f"{url}/metrics", timeout=10).status == 200
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{url}/readyz", timeout=10)
        finally:
            master.terminate()
        assert master.wait(10) == 0


def answers(url: str) -> bool:
    with contextlib.suppress(urllib.error.URLError):
        return bool(urllib.request.urlopen(url, timeout=10).status == 200)
    return False


def member(socket: str, name: str) -> None:
    """A training process that waits for its end."""
    with wancoll.connect(socket=socket, group="g", name=name, start_world=4):
        time.sleep(60)


@pytest.mark.check
def test_metrics_say_why_members_are_out() -> None:
    with Cluster(4, fork=True, lanes=1, master_args=[METRICS], heartbeat_timeout=3.0) as cluster:
        clients = [cluster.client(i, member, f"m{i}") for i in range(4)]

        def out(number: int) -> dict[tuple[str, ...], float]:
            name = "wancoll_master_evictions_total"
            found = until(lambda: master(cluster), lambda one: sum(one.all(name).values()) >= number)
            return {key[1:]: value for key, value in found.all(name).items()}

        formed = until(lambda: master(cluster), lambda one: one.all("wancoll_master_members") == {("g",): 4})
        assert formed.all("wancoll_master_members") == {("g",): 4}
        clients[0].kill()
        assert out(1) == {("client died",): 1}
        with pytest.raises(SystemExit) as ended:
            main.run(["evict", "m1", "--group=g", f"--master={cluster.master_option}"])
        assert ended.value.code == 0
        assert out(2) == {("client died",): 1, ("operator",): 1}
        clients[2].pause()
        assert out(3) == {("client died",): 1, ("operator",): 1, ("trainer",): 1}
        cluster.pause(3)
        assert out(4) == {("client died",): 1, ("operator",): 1, ("trainer",): 1, ("silent",): 1}


async def test_a_master_that_stands_by_tells_of_itself_alone() -> None:
    journal = Journal("")
    with contextlib.closing(journal):
        server = Server(MasterConfig(), journal)
        standing = {one.spec: list(one.samples) for one in server.families() if one is not None}
        assert standing[f.LEADS] == [((), 0)]
        assert f.TERM not in standing
        server.lead(journal)
        leading = {one.spec: list(one.samples) for one in server.families() if one is not None}
        assert leading[f.LEADS] == [((), 1)]
        assert leading[f.TERM] == [((), server.state.term)]


@pytest.mark.check
def test_a_secure_cluster_tells_its_metrics_to_who_has_the_token() -> None:
    env = {"WANCOLL_METRICS_TOKEN": TOKEN}
    with Cluster(1, fork=True, secure=True, peer_args=[METRICS], master_args=[METRICS], env=env) as cluster:
        for log in (cluster.logs(0, 1000), cluster.master_logs(1000)):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                scrape(port_of(log))
            assert scrape(port_of(log), TOKEN).all("wancoll_build_info")
            assert TOKEN not in log


@pytest.mark.parametrize("command", ["master", "peer"])
def test_a_port_that_all_reach_is_refused_without_a_token(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wancoll", command, "--listen=127.0.0.1:0"]
        + ([f"--socket={tmp_path}/s"] if command == "peer" else []),
        env=os.environ | {"WANCOLL_METRICS": "*:0"}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "WANCOLL_METRICS_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr
