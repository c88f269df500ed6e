"""Islands of FSDP2 ranks: one process is killed, and the rest of its island ends with it, and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.torch.ranks import free_port
from wancoll.errors import ConfigError, Evicted
from wancoll.examples import islands as example
from wancoll.examples.shared.arguments import Options
from wancoll.limits import PROTOCOL_VERSION
from wancoll.net.ask import ask
from wancoll.testing import Cluster
from wancoll.torch import islands
from wancoll.wire import messages as m

SMALL = Options(steps=30, layers=2, hidden=32, heads=2, batch=8, sequence=16, dtype="float32")


@pytest.mark.timeout(120)
def test_a_killed_process_costs_its_island_and_that_comes_back() -> None:
    told = example.play(SMALL)
    last = max(each.outer_steps for each in told)
    assert last == SMALL.steps // example.H
    ends = {each.member: each for each in told if each.outer_steps == last}
    assert {name: each.islands for name, each in ends.items()} == dict.fromkeys(("a/0", "a/1", "b/0", "b/1"), 2)
    for shard in range(example.SHARDS):
        assert ends[f"a/{shard}"].outer == ends[f"b/{shard}"].outer
    assert ends["a/0"].outer != ends["a/1"].outer
    by_member = {name: [each for each in told if each.member == name] for name in ends}
    for name in ("a/0", "a/1"):  # the other island lost nothing, and is what it was
        assert [each.outer_steps for each in by_member[name]] == list(range(1, last + 1))
        assert len({each.pid for each in by_member[name]}) == 1
    for name in ("b/0", "b/1"):  # the lost one is another, and has gone on where that one was
        pids = [each.pid for each in by_member[name]]
        assert len(set(pids)) == 2
        first = by_member[name][pids.index(pids[-1])]
        same = next(each for each in by_member[name.replace("b", "a")] if each.outer_steps == first.outer_steps)
        assert (first.steps, first.outer) == (same.steps, same.outer)


def rank(socket: str, shard: int, port: int) -> Iterator[Any]:
    """One of two; the first waits in an inner collective for the second, which sleeps."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=shard, world_size=2)
    with pytest.raises(ConfigError, match="the mesh has several replicas"):
        islands(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard")), island="a", socket=socket)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard"))
    with islands(mesh, "torn", island="a", socket=socket) as comm:
        yield comm.all_reduce(torch.full((3,), float(shard))).out.tolist(), comm.name, comm.world_size
        if shard:
            time.sleep(60)
        try:
            dist.all_reduce(torch.ones(4), group=mesh.get_group("shard"))
        except RuntimeError:
            yield time.monotonic()
        try:
            comm.all_reduce(torch.ones(3))
        except Evicted as bad:
            yield str(bad)


@pytest.mark.timeout(60)
def test_a_rank_that_waits_in_an_inner_collective_is_told() -> None:
    """Nobody has ended: it is evicted, and the other rank has yet to call."""
    port = free_port()
    with Cluster(1, fork=True) as cluster:
        ranks = [cluster.client(0, rank, shard, port) for shard in range(2)]
        assert [each.next() for each in ranks] == [([float(k)] * 3, f"a/{k}", 1) for k in range(2)]
        time.sleep(0.2)  # it may not be in the inner call yet, which ends then as well
        evict = m.Evict(PROTOCOL_VERSION, "torn", "a/1", False, "a test")
        answer = ask(cluster.master_address, evict, m.FromMaster, timeout=5.0, who="the master")
        began = time.monotonic()
        assert isinstance(answer, m.EvictAnswer)
        assert answer.done
        assert ranks[0].next() - began < 2.0
        assert "a/1" in ranks[0].next()
