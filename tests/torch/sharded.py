"""Training whose parameters, layers or batches are split over ranks, each against one process: see test_training.py."""

import itertools
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.torch.programs import alone, batch, model, train


def shards(net: nn.Module, mesh: dist.DeviceMesh | None = None, **options: object) -> nn.Module:
    """FSDP2 over each linear layer, and over the whole."""
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)  # type: ignore[call-overload]
    return fully_shard(net, mesh=mesh, **options)  # type: ignore[call-overload, no-any-return]


def as_alone(net: nn.Module, losses: list[float], tolerance: float = 1e-5) -> None:
    """Assert that sharded parameters and losses are those of one process that has all samples."""
    reference, expected = alone()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    for one, other in zip(reference.parameters(), net.parameters(), strict=True):
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(whole.detach(), one.detach(), rtol=tolerance, atol=tolerance)


def fsdp(rank: int, size: int) -> None:
    """ZeRO-3 as torch has it: each rank holds its share of each parameter."""
    net = shards(model())
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size)
    as_alone(net, losses)
    first = next(net.parameters())
    assert isinstance(first, DTensor)
    assert first.to_local().numel() < first.numel()


def fsdp_mixed_precision(rank: int, size: int) -> None:
    """The same with bfloat16 parameters for the computation and float32 sums of gradients."""
    net = shards(model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size, lambda net, x: net(x).float())
    _, expected = alone()
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-2, atol=2e-3)
    assert all(each.dtype == torch.float32 for each in net.parameters())


def tensor_parallel(rank: int, size: int) -> None:
    """The first layer split by columns, the second by rows; all ranks see all samples."""
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(
        nn.Sequential(*list(model().children())[:3]), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    reference = nn.Sequential(*list(model().children())[:3])
    x = batch(0)[0]
    output, expected = net(x), reference(x)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.square().mean().backward()
    expected.square().mean().backward()
    for one, other in zip(reference.parameters(), net.parameters(), strict=True):
        assert one.grad is not None
        assert isinstance(other.grad, DTensor)
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-5, atol=1e-6)


def tensors(rank: int, size: int) -> None:
    """DTensor moves between layouts: split by rows, by columns, whole, also where it does not divide evenly."""
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float((2 * size + 1) * (size + 2))).reshape(2 * size + 1, size + 2)
    rows = distribute_tensor(whole if rank == 0 else torch.zeros_like(whole), mesh, [Shard(0)])
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), whole.chunk(size, dim=1)[rank])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    product = rows.redistribute(mesh, [Shard(1)]) @ distribute_tensor(whole.T.contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)
    assert float(columns.sum().full_tensor()) == float(whole.sum())


def two_levels(rank: int, size: int) -> None:
    """Shards within a node, replicas across nodes (HYBRID), on a mesh of 2 x size/2; then TP within and DP across."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("across", "within"))
    assert mesh["within"].size() == size // 2
    net = shards(model(), mesh)
    as_alone(net, train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size))

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    both = shards(parallelize_module(model(), mesh["within"], plan), mesh["across"])
    losses = train(
        both, torch.optim.SGD(both.parameters(), lr=0.2), rank // (size // 2), 2, mean=mesh["across"].get_group()
    )
    as_alone(both, losses)


def pipeline(rank: int, size: int) -> None:
    """GPipe and 1F1B: micro-batches through stages; outputs and gradients of one process."""
    layers = list(model(7).children())
    stages = [nn.Sequential(*part) for part in _split(layers, size)]
    reference = nn.Sequential(*layers)
    x, y = batch(0)
    expected = nn.functional.mse_loss(reference(x), y)
    expected.backward()
    grads = [each.grad.clone() for each in stages[rank].parameters() if each.grad is not None]
    micro = 4
    for schedule in (ScheduleGPipe, Schedule1F1B):
        stages[rank].zero_grad()
        stage = PipelineStage(stages[rank], rank, size, torch.device("cpu"))
        steps = schedule(stage, n_microbatches=micro, loss_fn=nn.functional.mse_loss)
        losses: list[torch.Tensor] = []
        if rank == 0:
            steps.step(x)
        elif rank == size - 1:
            steps.step(target=y, losses=losses)
            mean = torch.stack(losses).mean()
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
        else:
            steps.step()
        for one, other in zip(stages[rank].parameters(), grads, strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad, other, rtol=1e-5, atol=1e-6, msg=lambda m, s=schedule: f"{s}: {m}")


def _split(layers: list[nn.Module], parts: int) -> list[list[nn.Module]]:
    bounds = [round(each * len(layers) / parts) for each in range(parts + 1)]
    return [layers[a:b] for a, b in itertools.pairwise(bounds)]


def checkpoints(rank: int, size: int) -> None:
    """A sharded model and its Adam are saved, at once and in the background, and come back."""
    folders = [tempfile.mkdtemp(prefix="checkpoint-") if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    net = shards(model())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, optimizer, rank, size)
    expected = [each.full_tensor().detach() for each in net.parameters() if isinstance(each, DTensor)]
    for name, background in (("now", False), ("background", True)):
        folder = Path(folders[0]) / name
        parameters, state = get_state_dict(net, optimizer)
        content = {"model": parameters, "optimizer": state}
        if background:
            dcp.async_save(content, checkpoint_id=folder).result(timeout=50)  # type: ignore[union-attr]
        else:
            dcp.save(content, checkpoint_id=folder)
        other = shards(model(seed=5))
        again = torch.optim.Adam(other.parameters(), lr=0.01)
        parameters, state = get_state_dict(other, again)
        content = {"model": parameters, "optimizer": state}
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(other, again, model_state_dict=content["model"], optim_state_dict=content["optimizer"])  # type: ignore[arg-type]
        for one, two in zip(expected, other.parameters(), strict=True):
            assert isinstance(two, DTensor)
            assert torch.equal(one, two.full_tensor())
        for one, two in zip(optimizer.state.values(), again.state.values(), strict=True):
            assert torch.equal(one["exp_avg"].full_tensor(), two["exp_avg"].full_tensor())
    dist.barrier()
