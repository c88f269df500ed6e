"""The backend's calls, by value, as torch's users make them."""

import pytest
import torch
import torch.distributed as dist

import wancoll
from tests.later import later
from tests.torch.ranks import run


def first_calls(rank, size):
    dist.init_process_group("wancoll")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "wancoll")
    x = torch.arange(4.0) + rank
    dist.all_reduce(x)
    assert x.tolist() == [sum(i + r for r in range(size)) for i in range(4)]
    x = torch.full((3,), float(rank))
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    assert work.wait()
    assert x.tolist() == [(size - 1) / 2] * 3
    x = torch.full((5,), rank)
    dist.broadcast(x, src=1)
    assert x.tolist() == [1] * 5
    blocks = [torch.empty(2, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(blocks, torch.tensor([rank, 10 * rank]))
    assert [b.tolist() for b in blocks] == [[r, 10 * r] for r in range(size)]
    out = torch.empty(2)
    dist.reduce_scatter(out, [torch.tensor([r, rank], dtype=torch.float32) for r in range(size)])
    assert out.tolist() == [size * rank, sum(range(size))]
    with pytest.raises(wancoll.ConfigError, match=r"another backend.*cpu:wancoll,cuda:gloo"):
        dist.new_group(backend="cpu:wancoll,cuda:gloo")
    dist.barrier()
    if rank == 0:
        dist.send(torch.tensor([7, 8]), dst=1)
    elif rank == 1:
        x = torch.zeros(2, dtype=torch.int64)
        assert dist.recv(x, src=0) == 0
        assert x.tolist() == [7, 8]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    torch.manual_seed(rank)
    inputs = torch.randn(3, 4)
    model(inputs).sum().backward()
    mine = inputs.sum(0)
    dist.all_reduce(mine, op=dist.ReduceOp.AVG)
    torch.testing.assert_close(model.module.weight.grad, torch.stack([mine, mine]))
    dist.destroy_process_group()
    return model.module.weight.grad


@pytest.mark.parametrize("size", [2, *later(3)])
def test_first_calls(sockets, size):
    grads = run(size, first_calls, env=sockets)
    assert all(torch.equal(grads[0], each) for each in grads)
