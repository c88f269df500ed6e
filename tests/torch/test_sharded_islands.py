"""Islands of ranks that shard a model by torch (FSDP2, HSDP, tensor parallel): ElasticDataParallel between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.later import at_night, later
from tests.torch.ranks import free_port
from wancoll.testing import Cluster
from wancoll.torch import ElasticDataParallel, ElasticSampler, islands

ISLANDS, STEPS, BATCH = 2, 4, 3
SAMPLES = torch.randn(ISLANDS * STEPS * BATCH, 5, generator=torch.Generator().manual_seed(1))
SHAPES = {"FSDP2": (2,), "HSDP": (2, 2), "TP": (2,), "FSDP2 and TP": (2, 2)}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))  # 5 does not divide, nor 3


def sharded(how: str, mesh: Any) -> nn.Sequential:
    model = net()
    if "TP" in how:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh if how == "TP" else mesh["inner"], plan)
    if how == "FSDP2":
        fully_shard(model[0], mesh=mesh)
    if how != "TP":
        fully_shard(model, mesh=mesh["outer"] if how == "FSDP2 and TP" else mesh)
    return model


def whole(x: Any) -> list[float]:
    return [float(each) for each in (x.full_tensor() if isinstance(x, DTensor) else x).detach().reshape(-1)]


def rank(socket: str, how: str, island: int, shard: int, port: int) -> Any:
    """Trains with the other islands; then the whole parameters, and what a state of this island's own came to."""
    shape = SHAPES[how]
    size = torch.Size(shape).numel()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=shard, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    model = sharded(how, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    with islands(mesh, how.replace(" ", "-"), island="ab"[island], socket=socket, start_world=ISLANDS) as comm:
        sampler = ElasticSampler(len(SAMPLES), batch_size=BATCH, shuffle=False)
        loader = torch.utils.data.DataLoader(SAMPLES, batch_sampler=sampler)
        sampler.follow(comm, comm.sync_state(model, sampler, revision=0))
        wrapped = ElasticDataParallel(model, comm, sampler=sampler, bucket_bytes=100)
        for samples in sampler.batches(loader):
            wrapped(samples).square().mean().backward()
            assert [type(each.grad) for each in model.parameters()] == [type(each) for each in wrapped.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        parameters = [whole(each) for each in model.parameters()]
        if island == 1:  # begins anew, without a state of the optimizer: as a joiner
            model = sharded(how, mesh)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
        receipt = comm.sync_state(model, optimizer, revision=STEPS * (1 - island))
        assert receipt.revision == STEPS
        for each in model.parameters():
            assert type(optimizer.state[each]["exp_avg"]) is type(each.data)
        state = [whole(each) for each in model.parameters()]
        state += [whole(optimizer.state[each]["exp_avg"]) for each in model.parameters()]
        dist.barrier()
        return parameters, state


@pytest.mark.parametrize("how", [*later("FSDP2"), *at_night("HSDP", "TP", "FSDP2 and TP")])  # each loads much of torch
@pytest.mark.timeout(120)
def test_islands_train_as_one_process_does(how: str) -> None:
    size, ports = torch.Size(SHAPES[how]).numel(), [free_port() for _ in range(ISLANDS)]
    with Cluster(ISLANDS, fork=True) as cluster:
        where = [(island, shard) for island in range(ISLANDS) for shard in range(size)]
        ranks = [cluster.client(at, rank, how, at, shard, ports[at]) for at, shard in where]
        told = [each.result(60) for each in ranks]
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model(SAMPLES[step * ISLANDS * BATCH : (step + 1) * ISLANDS * BATCH]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = [whole(each) for each in model.parameters()]
    moments = [whole(optimizer.state[each]["exp_avg"]) for each in model.parameters()]
    for parameters, state in told:
        assert parameters == told[0][0]
        assert state == told[0][1]
        for one, other in zip([*parameters, *state], [*expected, *expected, *moments], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
