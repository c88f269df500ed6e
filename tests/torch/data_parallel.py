"""Training that is the same on every rank, each against one process: what ranks run for test_training.py."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.torch.programs import WIDTH, alone, batch, close, model, same_everywhere, share, train


def as_alone(net: Any, losses: list[float], reference: tuple[nn.Module, list[float]], tolerance: float = 1e-5) -> None:
    """Assert that all ranks have the same bits, and that losses and parameters are those of one process."""
    alike, expected = reference
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance)
    close(net.module, alike, tolerance)
    same_everywhere(net)


def ddp(rank: int, size: int) -> None:
    """Bit-identical replicas; parameters and losses as of one process that sees all samples."""
    net = DistributedDataParallel(model(seed=rank), bucket_cap_mb=0.002)  # what rank 0 has is broadcast
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size)
    as_alone(net, losses, alone())


class Branches(nn.Module):
    """Uses one of two layers, by the step and the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        return self.second(x) if second else self.first(x)  # type: ignore[no-any-return]


def unused_parameters(rank: int, size: int) -> None:
    """Ranks that use other layers: those of a layer that nobody used have no gradient, others the mean over all."""
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    reference = Branches()
    for step in range(3):
        x, y = batch(step)
        picks = [step == 1 or (step == 2 and each == 0) for each in range(size)]
        net.zero_grad()
        nn.functional.mse_loss(net(share(x, rank, size), picks[rank]), share(y, rank, size)).backward()
        reference.zero_grad()
        for each in range(size):
            loss = nn.functional.mse_loss(reference(share(x, each, size), picks[each]), share(y, each, size))
            (loss / size).backward()
        for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"step {step}"
            if mine.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def sparse_gradients(rank: int, size: int) -> None:
    """An embedding whose gradients are sparse; the ranks look up other words, some of them the same."""
    words = torch.tensor([[each, 3, each, 5 + each] for each in range(size)])

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5 + size, WIDTH, sparse=True), nn.Flatten(), nn.Linear(4 * WIDTH, 1))

    both = DistributedDataParallel(net()), net()
    for each, given in zip(both, (words[rank : rank + 1], words), strict=True):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.2)
        for _ in range(3):
            optimizer.zero_grad()
            each(given).square().mean().backward()
            optimizer.step()
        grad = next(each.parameters()).grad
        assert grad is not None
        assert grad.is_sparse
    close(both[0].module, both[1])
    same_everywhere(both[0])


def accumulation(rank: int, size: int) -> None:
    """no_sync(): gradients stay apart until the last micro-batch, and then are the mean of all."""
    net = DistributedDataParallel(model())
    reference = model()
    parts = 2
    x, y = (share(each, rank, size) for each in batch(0))
    for part, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        with net.no_sync() if part < parts - 1 else contextlib.nullcontext():
            (nn.functional.mse_loss(net(a), b) / parts).backward()
        mine = torch.cat([each.grad.reshape(-1) for each in net.parameters() if each.grad is not None])
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        assert torch.equal(low, high) == (part == parts - 1), f"micro-batch {part}"
    nn.functional.mse_loss(reference(batch(0)[0]), batch(0)[1]).backward()
    for (name, one), other in zip(reference.named_parameters(), net.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def mixed_precision(rank: int, size: int) -> None:
    """Autocast to bfloat16, and a model that is bfloat16: as one process within bfloat16's rounding."""

    def forward(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x).float()  # type: ignore[no-any-return]

    net = DistributedDataParallel(model())
    losses = train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size, forward)
    reference = model()
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.2), forward=forward)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-2, atol=1e-3)
    same_everywhere(net)

    half = DistributedDataParallel(model().to(torch.bfloat16))
    x, y = (share(each, rank, size) for each in batch(0))
    nn.functional.mse_loss(half(x.bfloat16()), y.bfloat16()).backward()
    whole = model().to(torch.bfloat16)
    nn.functional.mse_loss(whole(batch(0)[0].bfloat16()), batch(0)[1].bfloat16()).backward()
    for one, other in zip(whole.parameters(), half.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert other.grad.dtype == torch.bfloat16
        torch.testing.assert_close(other.grad, one.grad, rtol=3e-2, atol=2e-3)


def sync_batch_norm(rank: int, size: int) -> None:
    """torch refuses SyncBatchNorm on CPU tensors, whatever the backend; plain running statistics are broadcast."""
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(WIDTH))
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        sync(batch(0)[0])
    net = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    for step in range(2):
        net(share(batch(step)[0], rank, size)).sum().backward()
    mean = net.module[1].running_mean
    assert mean is not None
    before = mean.clone()
    net.eval()  # buffers are those of rank 0 from the next training forward on
    net.train()
    net(share(batch(2)[0], rank, size))
    whose = torch.stack([before, mean])
    dist.broadcast(whose, 0)
    assert (rank == 0) == torch.equal(whose[0], before)


def compiled(rank: int, size: int) -> None:
    """torch.compile over DDP (without a C++ compiler's work: the graphs run as they are)."""
    torch._dynamo.reset()
    net = DistributedDataParallel(model())
    fast = torch.compile(net, backend="aot_eager")
    losses = train(fast, torch.optim.SGD(net.parameters(), lr=0.2), rank, size)  # type: ignore[arg-type]
    as_alone(net, losses, alone())


def zero_redundancy_optimizer(rank: int, size: int) -> None:
    """Each rank keeps its share of Adam's state; the parameters are as with plain Adam."""
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    losses = train(net, optimizer, rank, size)
    as_alone(net, losses, alone(lambda net: torch.optim.Adam(net.parameters(), lr=0.01)), 1e-4)
    mine = sum(each.numel() for state in optimizer.optim.state.values() for each in state.values() if each.ndim)
    whole = 2 * sum(each.numel() for each in net.parameters())
    assert 0 < mine < whole
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def hooks(rank: int, size: int) -> None:
    """DDP's communication hooks: half precision on the wire, torch's own in C++, and one that calls in a callback."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs

    reference = alone()
    for hook, tolerance in (
        (torchs.allreduce_hook, 1e-5),
        (torchs.fp16_compress_hook, 2e-3),
        (bf16, 1e-2),
        (dist.BuiltinCommHookType.ALLREDUCE, 1e-5),
        (dist.BuiltinCommHookType.FP16_COMPRESS, 2e-3),
        (nested, 1e-5),
    ):
        net = DistributedDataParallel(model())
        if isinstance(hook, dist.BuiltinCommHookType):
            net._register_builtin_comm_hook(hook)
        else:
            net.register_comm_hook(None, hook)
        losses = train(net, torch.optim.SGD(net.parameters(), lr=0.2), rank, size)
        as_alone(net, losses, reference, tolerance)


def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook; by its own name torch takes it with NCCL only."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


def nested(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook whose callback waits for another collective, in the thread that completes the first one's future."""
    gradient = bucket.buffer().div_(dist.get_world_size())
    first: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(gradient, async_op=True).get_future()

    def check(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (reduced,) = done.value()
        low = reduced.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        assert torch.equal(low, reduced), "ranks disagree within a callback"
        return reduced

    return first.then(check)
