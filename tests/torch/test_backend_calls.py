"""Every call beside gloo's answer, with the ring in another order than the ranks."""

import itertools
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.torch.ranks import run
from wancoll import CollectiveMismatch, ConfigError
from wancoll.torch.backend.rendezvous import Cluster
from wancoll.torch.backend.sparse import Pieces


def begin(rank, size):
    """Join so that the ring is not in the order of the ranks; returns what compares a call with gloo's."""
    join = Cluster.join

    def later(self, group, number, of, *arguments):
        place = (1 - number) % of
        if place:
            while not self._store.check([f"asks/{place - 1}"]):  # wait() would keep rank 0's thread from the store
                time.sleep(0.01)
            time.sleep(0.1)
        self._store.set(f"asks/{place}", "")
        return join(self, group, number, of, *arguments)

    Cluster.join = later
    dist.init_process_group("wancoll", timeout=timedelta(seconds=100))
    Cluster.join = join
    assert not dist.group.WORLD._places.straight
    gloo = dist.new_group(backend="gloo")

    def compare(call, *tensors):
        """`call(group, *copies)` over both; what is left in the tensors is the same."""
        both = []
        for group in (None, gloo):
            both.append([each.clone() for each in tensors])
            call(group, *both[-1])
        for ours, theirs in zip(*both, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, equal_nan=True)

    return compare


def filled(rank, shape, dtype):
    x = (torch.arange(torch.Size(shape).numel()).reshape(shape or ()) * 7 + rank * 3) % 11
    return x.to(dtype) if dtype is not torch.bool else x % 2 == 0


def same(x, y):
    return x.dtype == y.dtype and x.shape == y.shape and x.tolist() == y.tolist()


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64)
SHAPES = ((), (3,), (4, 3), (0,))


def all_reduced(op, group, x):
    dist.all_reduce(x, op=op, group=group)


def reduced(op, rank, group, x):
    """At the root; the others' tensor stays what it was, or with gloo what it likes."""
    before = x.clone()
    dist.reduce(x, dst=1, op=op, group=group)
    if rank != 1:
        assert group is not None or torch.equal(x, before)
        x.zero_()


def sparse(rank, dtype, *, sparse_dims=1):
    """Rank 0 brings nothing, the others some places twice; the ranks' places overlap in part."""
    places = torch.tensor([[rank, 1, rank, 4]])[:, : 4 * min(rank, 1)]
    values = filled(rank, (places.shape[1], 2), dtype)
    if sparse_dims == 2:
        return torch.sparse_coo_tensor(torch.cat([places, places % 3]), values[:, 0], (5, 3), check_invariants=True)
    return torch.sparse_coo_tensor(places, values, (5, 2), check_invariants=True)


def sparse_reductions(rank, size, compare):
    for dtype in (torch.float32, torch.float64, torch.int64):
        for dims in (1, 2):
            compare(partial(all_reduced, ReduceOp.SUM), sparse(rank, dtype, sparse_dims=dims))
    x = sparse(rank, torch.float16)
    future = dist.all_reduce(x, async_op=True).get_future()
    want = sum(sparse(r, torch.float16).to_dense() for r in range(size))
    assert torch.equal(future.wait()[0].to_dense(), want)
    assert torch.equal(x.to_dense(), want)
    x = sparse(0, torch.float32)
    dist.all_reduce(x)
    assert x.shape == (5, 2)
    assert x._nnz() == 0
    with pytest.raises(CollectiveMismatch, match=r"not alike.*\(5, 2\) of torch\.float|\(5, 3\) of torch\.float"):
        dist.all_reduce(sparse(rank, torch.float32, sparse_dims=1 + (rank == 1)))
    blocks = [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
    with pytest.raises(CollectiveMismatch, match=r"all_gather.*sparse"):  # its header is not taken for a tensor
        dist.all_reduce(x) if rank else dist.all_gather(blocks, torch.tensor([7, 8]))
    for count in (-1, 6):
        pieces = Pieces(x, ReduceOp.SUM, "all_reduce")
        header = torch.tensor([count, int(pieces.header[1])])
        with pytest.raises(CollectiveMismatch, match=f"0 to 5 places.*{count} at rank 1"):
            pieces.room([pieces.header, header])
    for place in (-1, 5):
        pieces = Pieces(x, ReduceOp.SUM, "all_reduce")
        forged = [torch.tensor([[0]]), torch.tensor([[place]])], [torch.ones(1, 2), torch.ones(1, 2)]
        with pytest.raises(CollectiveMismatch, match=r"outside of it.*\(5, 2\).*at rank 1"):
            pieces.put(list(forged))
    with pytest.raises(ConfigError, match=r"SUM, of torch\.sparse_coo"):
        dist.all_reduce(x, op=ReduceOp.MAX)
    with pytest.raises(RuntimeError, match=r"torch\.sparse_coo; pass x\.to_dense"):
        dist.broadcast(x, 0)


def reductions(rank, size):
    compare = begin(rank, size)
    for dtype, op in itertools.product((*FLOATS, *WHOLE), (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)):
        for shape in ((), (4, 3)) if dtype is torch.float32 else ((5,),):
            x = filled(rank, shape, dtype)
            compare(partial(all_reduced, op), x)
            compare(partial(reduced, op, rank), x)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        compare(partial(all_reduced, op), filled(rank, (9,), torch.int32))
        x = filled(rank, (9,), torch.bool)
        dist.all_reduce(x, op=op)
        columns = torch.stack([filled(r, (9,), torch.bool) for r in range(size)])
        counts = columns.sum(0)
        want = counts == size if op == ReduceOp.BAND else counts > 0 if op == ReduceOp.BOR else counts % 2 == 1
        assert torch.equal(x, want)
    strided = filled(rank, (6, 4), torch.float32)[::2, 1:3]
    dist.all_reduce(strided)
    assert torch.equal(strided, sum(filled(r, (6, 4), torch.float32)[::2, 1:3] for r in range(size)))
    x = torch.full((3,), complex(rank, 1), dtype=torch.complex64)
    compare(partial(all_reduced, ReduceOp.SUM), x)
    x = filled(rank, (3,), torch.float32)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x, sum(filled(r, (3,), torch.float32) for r in range(size)) * 0.5)
    for x, op in ((torch.ones(2, dtype=torch.bool), ReduceOp.AVG), (torch.ones(2), ReduceOp.BAND),
                  (torch.ones(2, dtype=torch.complex64), ReduceOp.MAX)):  # fmt: skip
        with pytest.raises(
            (RuntimeError, ValueError), match=r"all_reduce: there is no such reduction|does not support"
        ):
            dist.all_reduce(x, op=op)
    sparse_reductions(rank, size, compare)
    for dtype in (torch.float32, torch.int64):
        blocks = [filled(rank + 5 * r, (2, 3), dtype) for r in range(size)]
        out = torch.zeros(2, 3, dtype=dtype)
        dist.reduce_scatter(out, blocks)
        assert torch.equal(out, sum(filled(r + 5 * rank, (2, 3), dtype) for r in range(size)))
        out = torch.zeros(2, 3, dtype=dtype)
        dist.reduce_scatter_single(out, torch.cat(blocks), op=ReduceOp.MAX)
        assert torch.equal(out, torch.stack([filled(r + 5 * rank, (2, 3), dtype) for r in range(size)]).amax(0))
    uneven = [torch.full((r + 1,), rank + r, dtype=torch.int32) for r in range(size)]
    for op, want in ((ReduceOp.SUM, sum(range(size)) + size * rank), (ReduceOp.BOR, 0)):
        out = torch.zeros(rank + 1, dtype=torch.int32)
        dist.reduce_scatter(out, uneven, op=op)
        if op == ReduceOp.BOR:
            for r in range(size):
                want |= r + rank
        assert out.tolist() == [want] * (rank + 1)
    many = [filled(rank, (n,), torch.float32) for n in (1, 5, 2)]
    with dist._coalescing_manager():
        for x in many:
            dist.all_reduce(x)
    for x, n in zip(many, (1, 5, 2), strict=True):
        assert torch.equal(x, sum(filled(r, (n,), torch.float32) for r in range(size)))
    dist.destroy_process_group()


def moves(rank, size):
    compare = begin(rank, size)
    odd = (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
    for dtype in (*FLOATS, *WHOLE, torch.int16, *odd):
        for shape in SHAPES if dtype is torch.float32 else ((4, 3),):
            x = filled(rank, shape, dtype)
            for root in range(size):
                y = x.clone()
                dist.broadcast(y, src=root)
                assert same(y, filled(root, shape, dtype))
            blocks = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(blocks, x)
            for r, block in enumerate(blocks):
                assert same(block, filled(r, shape, dtype)), (dtype, shape)
            gathered = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == 1 else None
            dist.gather(x, gathered, dst=1)
            for r, block in enumerate(gathered or ()):
                assert same(block, filled(r, shape, dtype))
            given = [filled(7 * r, shape, dtype) for r in range(size)] if rank == size - 1 else None
            y = torch.zeros(shape, dtype=dtype)
            dist.scatter(y, given, src=size - 1)
            assert same(y, filled(7 * rank, shape, dtype))
    x = filled(rank, (2, 3), torch.float32)
    compare(lambda group, x, y: dist.all_gather_single(y, x, group=group), x, torch.zeros(2 * size, 3))
    stacked = torch.zeros(size, 2, 3)
    dist.all_gather_single(stacked, x)
    assert torch.equal(stacked, torch.stack([filled(r, (2, 3), torch.float32) for r in range(size)]))
    uneven = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [each.tolist() for each in uneven] == [[float(r)] * (r + 1) for r in range(size)]
    turned = [torch.zeros(3, 2).t() for _ in range(size)]
    dist.all_gather(turned, filled(rank, (3, 2), torch.float32).t())
    assert all(torch.equal(each, filled(r, (3, 2), torch.float32).t()) for r, each in enumerate(turned))

    x, y = torch.arange(size * 2) + 100 * rank, torch.zeros(size * 2, dtype=torch.int64)
    dist.all_to_all_single(y, x)
    assert y.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    # Rank i gives i + j + 1 rows to rank j.
    splits = [rank + r + 1 for r in range(size)]
    x = torch.full((sum(splits), 2), rank)
    y = torch.zeros(sum(splits), 2, dtype=torch.int64)
    dist.all_to_all_single(y, x, splits, splits)
    assert y[:, 0].tolist() == [r for r in range(size) for _ in range(splits[r])]
    blocks = [torch.zeros(n, dtype=torch.bool) for n in splits]
    dist.all_to_all(blocks, [torch.ones(n, dtype=torch.bool) for n in splits])
    assert all(each.all() for each in blocks)

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    one = [("from", rank)]
    dist.broadcast_object_list(one, src=1)
    assert one == [("from", 1)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]

    right, left = (rank + 1) % size, (rank - 1) % size
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]):
        work.wait()
    assert y.tolist() == [left] * 3
    # Tags: the other order than they were sent in.
    if rank == 0:
        works = [dist.isend(torch.tensor([tag]), 1, tag=tag) for tag in (1, 2, 3)]
        assert all(work.wait() for work in works)
    if rank == 1:
        for tag in (3, 1, 2):
            x = torch.zeros(1, dtype=torch.int64)
            dist.recv(x, 0, tag=tag)
            assert x.item() == tag
    # Any source, twice from each, mixed with receives that name theirs.
    if rank == 0:
        seen = []
        for _ in range(2 * (size - 1)):
            x = torch.zeros(2)
            source = dist.recv(x)
            assert x.tolist() == [source, source + 10 * seen.count(source)]
            seen.append(source)
        dist.group.WORLD.get_group_store().set("named", "1")
        x = torch.zeros(2)
        assert dist.recv(x, src=1) == 1
        assert x.tolist() == [1.0, 20.0 + 1]
    else:
        for i in range(2 + (rank == 1)):
            if i == 2:
                dist.group.WORLD.get_group_store().wait(["named"])
            dist.send(torch.tensor([float(rank), rank + 10.0 * i]), dst=0)
    # What those have left posted is passed by by what does not fit it, from any source and from one that is named.
    if rank == 0:
        x, y, z = torch.zeros(5), torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
        sources = [dist.recv(x), dist.recv(y, src=1), dist.recv(z), dist.recv(torch.zeros(2), src=2)]
        assert sources == [2, 1, 1, 2]
        assert (x.tolist(), y.tolist(), z.tolist()) == ([2.0] * 5, [1] * 3, [True] * 2)
    elif rank == 1:
        dist.send(torch.ones(3, dtype=torch.int64), dst=0)
        dist.send(torch.ones(2, dtype=torch.bool), dst=0)
    else:
        dist.send(torch.full((5,), 2.0), dst=0)
        dist.send(torch.zeros(2), dst=0)
    groups = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [0, 2])]
    for pair, group in zip(([0, 1], [1, 2], [0, 2]), groups, strict=True):
        if rank in pair:
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(pair)
            dist.broadcast(x, src=pair[1], group=group)
            assert dist.get_group_rank(group, rank) == pair.index(rank)
    dist.destroy_process_group(groups[0]) if rank < 2 else None
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.check
@pytest.mark.timeout(200)
def test_reductions(sockets):
    run(3, reductions, env=sockets, timeout=180)


@pytest.mark.check
@pytest.mark.timeout(200)
def test_moves(sockets):
    run(3, moves, env=sockets, timeout=180)
