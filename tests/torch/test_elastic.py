"""ElasticDataParallel over a real cluster: means, steps that lose members, steps that are interrupted."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import cluster_fixture
from wancoll.errors import ConfigError, OutcomeUnknown, PeerDaemonLost, WorldTooSmall
from wancoll.testing import Cluster, in_threads

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.torch.programs import Tripwire  # noqa: E402
from wancoll.torch import ElasticDataParallel, all_reduce_gradients  # noqa: E402

NAMES = itertools.count(1)
SMALL = 1024  # bytes of a bucket: several of them
cluster = cluster_fixture(4)


def net(*, seed: int = 0, dtype: Any = torch.float32) -> nn.Module:
    """Several buckets, each layer of a weight and a bias."""
    generator = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).to(dtype)
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float32) / 4)
    return made


def batch(k: int, rows: int = 6) -> Any:
    return torch.from_numpy(np.random.default_rng(k).normal(size=(rows, 8)).astype(np.float32))


def gradients(module: nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.clone() for each in module.parameters()]


def expected(batches: list[Any], weights: list[float] | None = None) -> list[Any]:
    """The mean of the gradients of a single process, in float64."""
    weights = weights or [1.0] * len(batches)
    sums = [torch.zeros(each.shape, dtype=torch.float64) for each in net().parameters()]
    for x, weight in zip(batches, weights, strict=True):
        alone = net()
        loss(alone, x).backward()
        for total, each in zip(sums, alone.parameters(), strict=True):
            total += weight * each.grad.double()
    return [total / sum(weights) for total in sums]


def loss(model: nn.Module, x: Any) -> Any:
    return model(x).square().sum()


def members(cluster: Cluster, work: Callable[[Any, int], Any], world: int = 2, **options: Any) -> list[Any]:
    """work(comm, rank) of each member, in rank order."""
    group = f"group-{next(NAMES)}"

    def life(k: int) -> Any:
        with wancoll.connect(group, socket=cluster.socket(k), name=f"m{k}", start_world=world, **options) as comm:
            return comm.rank, work(comm, comm.rank)

    return [answer for _, answer in sorted(in_threads(life, world, 50))]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Any], other: list[Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


# ---- means -------------------------------------------------------------------------------------------


def test_gradients_are_the_mean_and_the_same_bytes(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL)
        loss(model, batch(rank)).backward()
        return gradients(module), model.receipt, len(model._buckets)

    found = members(cluster, work, 3)
    assert found[0][2] > 2
    close(found[0][0], expected([batch(k) for k in range(3)]))
    assert all(same(found[0][0], each) for each, _, _ in found)
    assert {receipt.world_size for _, receipt, _ in found} == {3}
    assert {(receipt.rounds, receipt.weight) for _, receipt, _ in found} == {(1, 3.0)}


def test_weights_and_a_step_without_a_gradient(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL)
        if rank == 2:
            model.skip_step()
        else:
            model.weight = (0.5, 2.0)[rank]
            loss(model, batch(rank)).backward()
        return gradients(module), model.receipt

    found = members(cluster, work, 3)
    close(found[0][0], expected([batch(0), batch(1)], [0.5, 2.0]))
    assert all(same(found[0][0], each) for each, _ in found)
    assert {(receipt.weight, receipt.world_size) for _, receipt in found} == {(2.5, 3)}


def test_a_member_with_no_weight_gives_nothing_even_where_it_is_not_finite(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm)
        model.weight = float(rank)
        loss(model, batch(rank) if rank else batch(0) * float("nan")).backward()
        return gradients(module)

    found = members(cluster, work)
    close(found[0], expected([batch(1)]))
    assert same(*found)


class Branches(nn.Module):
    """Which of its layers compute, and in which order, the call says; *never* is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.never = (nn.Linear(3, 3) for _ in range(4))
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        with torch.no_grad():
            for i, each in enumerate(self.parameters()):
                each.copy_(torch.arange(each.numel()).reshape(each.shape) / 10 + i)

    def forward(self, x: Any, order: str) -> Any:
        for name in order:
            x = getattr(self, name)(x)
        return self.frozen(x)


def test_graphs_that_differ_make_no_mismatch(cluster: Cluster) -> None:
    orders = ("abc", "cba", "b")

    def work(comm: Any, rank: int) -> Any:
        module = Branches()
        model = ElasticDataParallel(module, comm, bucket_bytes=30)  # a bucket for each parameter
        found = []
        for step in range(3):
            model.zero_grad()
            model(torch.ones(2, 3), orders[(rank + step) % 3]).sum().backward()
            found.append(gradients(module))
        return found

    found = members(cluster, work, 3)
    sums: dict[str, Any] = {}
    for order in orders:
        alone = Branches()
        alone(torch.ones(2, 3), order).sum().backward()
        for name, each in alone.named_parameters():
            if each.grad is not None:
                sums[name] = sums.get(name, 0) + each.grad.double() / 3
    for step in range(3):
        for (name, _), *three in zip(Branches().named_parameters(), *(each[step] for each in found), strict=True):
            if name.startswith(("never", "frozen")):
                assert three == [None] * 3, name
            else:
                assert torch.equal(three[0], three[1]), name
                assert torch.equal(three[0], three[2]), name
                assert torch.allclose(three[0].double(), sums[name], rtol=1e-4), name


def test_what_only_members_without_weight_used_is_no_gradient_of_anybody(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = Branches()
        model = ElasticDataParallel(module, comm)
        model.weight = float(rank == 0)
        model(torch.ones(2, 3), "ab" if rank else "a").sum().backward()
        return [each.grad is None for each in module.parameters()], module.a.weight.grad

    (mine, one), (others, other) = members(cluster, work)
    assert mine == others
    assert mine[:4] == [False, False, True, True]  # a and b
    assert torch.equal(one, other)


def test_dtypes_together(cluster: Cluster) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)

    def work(comm: Any, rank: int) -> Any:
        module = nn.ModuleList(nn.Linear(2, 2).to(dtype) for dtype in dtypes)
        model = ElasticDataParallel(module, comm)
        total = sum(each(torch.full((1, 2), 1.0 + 2 * rank, dtype=each.weight.dtype)).double().sum() for each in module)
        total.backward()
        return [each.weight.grad.clone() for each in model.module], len(model._buckets)

    (one, count), (other, _) = members(cluster, work)
    assert count == 4
    assert same(one, other)
    assert all(torch.equal(each, torch.full((2, 2), 2.0, dtype=dtype)) for each, dtype in zip(one, dtypes, strict=True))


def test_no_sync_adds_up_and_grad_that_is_not_zeroed_too(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL)
        with model.no_sync():
            loss(model, batch(10 * rank)).backward()
            assert model.receipt is None
            loss(model, batch(10 * rank + 1)).backward()
        loss(model, batch(10 * rank + 2)).backward()
        first = gradients(module)
        loss(model, batch(10 * rank + 3)).backward()  # on top of the mean
        return first, gradients(module)

    (one, one_more), (other, other_more) = members(cluster, work)
    assert same(one, other)
    assert same(one_more, other_more)
    close(one, [3 * each for each in expected([batch(k) for k in (0, 1, 2, 10, 11, 12)])])
    close(one_more, [4 * each for each in expected([batch(k) for k in (0, 1, 2, 3, 10, 11, 12, 13)])])


def test_a_codec_with_feedback_gives_all_of_it_in_the_long_run(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        errors = {}
        for feedback in (None, False):
            module = net()
            model = ElasticDataParallel(module, comm, codec="int8", feedback=feedback, bucket_bytes=SMALL)
            total = [torch.zeros_like(each) for each in module.parameters()]
            for _ in range(12):
                model.zero_grad()
                loss(model, batch(rank)).backward()
                for sum_, each in zip(total, module.parameters(), strict=True):
                    sum_ += each.grad / 12
            right = expected([batch(0), batch(1)])
            errors[feedback] = sum(float((a - b).abs().sum()) for a, b in zip(total, right, strict=True))
        return errors, gradients(module)

    (one, last), (other, its_last) = members(cluster, work)
    assert one == other
    assert same(last, its_last)
    assert 0 < one[None] < 0.8 * one[False]  # what encoding the sum loses is not made up for


def test_it_is_the_module_elsewhere(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        first = ElasticDataParallel(module, comm)
        with pytest.raises(ConfigError, match="no step is under way"):
            first.wait()
        model = ElasticDataParallel(module, comm)  # ends the first
        loss(model, batch(0)).backward()
        assert (first.receipt, model.receipt is None) == (None, False)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(batch(1)), module(batch(1)))
        other = net(seed=1)
        other.load_state_dict(model.state_dict())
        again = ElasticDataParallel(net(seed=2), comm)
        again.load_state_dict(other.state_dict())
        assert same(list(again.parameters()), list(module.parameters()))
        assert list(model.state_dict()) == list(module.state_dict())
        with pytest.raises(ConfigError, match=r"another wrapper.*one of Sequential with \d more.*close\(\)"):
            ElasticDataParallel(module[0], comm)
        whole = ElasticDataParallel(nn.Sequential(module, nn.Linear(1, 1)), comm)  # ends the one of a part of it
        loss(module, batch(0)).backward()
        assert whole.receipt is not None
        receipt, model.receipt = model.receipt, None
        assert receipt is not None
        whole.close()
        module.zero_grad()
        loss(module, batch(rank)).backward()  # alone
        assert model.receipt is None
        return gradients(module)

    for rank, found in enumerate(members(cluster, work)):
        close(found, expected([batch(rank)]))


def test_what_cannot_be_averaged_is_refused(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> None:
        with pytest.raises(ConfigError, match="no parameter to train"):
            ElasticDataParallel(nn.ReLU(), comm)
        with pytest.raises(ConfigError, match=r"cannot be averaged.*complex64"):
            ElasticDataParallel(nn.Linear(1, 1, dtype=torch.complex64), comm)
        with pytest.raises(ConfigError, match=r"int7"):
            ElasticDataParallel(nn.Linear(1, 1), comm, codec="int7")
        with pytest.raises(ConfigError, match=r"expected a Module; got list"):
            ElasticDataParallel([], comm)
        model = ElasticDataParallel(nn.Linear(1, 1), comm)
        for weight in (float("nan"), -1.0):
            model.weight = weight
            with pytest.raises(ConfigError, match="weight cannot be used"):
                model(torch.ones(1, 1)).sum().backward()
        model = ElasticDataParallel(nn.Embedding(3, 2, sparse=True), comm)
        with pytest.raises(ConfigError, match="sparse=False"):
            model(torch.tensor([1])).sum().backward()

    members(cluster, work, 1)


def test_gradients_by_one_call(cluster: Cluster) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        loss(module, batch(rank)).backward()
        if rank:
            list(module.parameters())[-1].grad = None
        receipt = all_reduce_gradients(comm, module)
        assert len(receipt.receipts) == 1
        return gradients(module)

    one, other = members(cluster, work)
    assert same(one, other)
    right = expected([batch(0), batch(1)])
    close(one[:-1], right[:-1])
    close(one[-1:], [each / 2 for each in expected([batch(0)])[-1:]])


def test_torchs_own_names_and_a_modules_parameters(cluster: Cluster) -> None:
    ops = torch.distributed.ReduceOp

    def work(comm: Any, rank: int) -> Any:
        module = net(seed=rank)
        receipt = comm.all_reduce_many(module.parameters(), op=ops.AVG)
        assert all(one is other for one, other in zip(receipt.out, module.parameters(), strict=True))
        found = []
        for op in (ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT, ops(ops.SUM)):
            x = torch.from_numpy(comm.empty(2, dtype=torch.float32))
            x[:] = rank + 2
            comm.all_reduce(x, op=op)
            found.append(x.tolist())
        for refused in (ops.BAND, ops.PREMUL_SUM):
            with pytest.raises(ConfigError, match="op is not available"):
                comm.all_reduce(torch.ones(1), op=refused)
        return list(module.parameters()), found

    (one, found), (other, its) = members(cluster, work)
    assert same(one, other)
    close(one, [(a + b) / 2 for a, b in zip(net(seed=0).parameters(), net(seed=1).parameters(), strict=True)])
    assert found == its == [[each] * 2 for each in (5, 2, 3, 6, 5)]


# ---- steps that are interrupted ----------------------------------------------------------------------


def tripped(model: Any, x: Any, act: Callable[[], None]) -> Any:
    """loss(), with *act* in its backward, when the gradients of all layers but the first are there."""
    layers = list(model.module)
    wire = layers[2].register_forward_pre_hook(lambda _, inputs: (Tripwire.apply(inputs[0], act),))
    try:
        return loss(model, x)
    finally:
        wire.remove()


def dies(model: Any, x: Any, kill: Callable[[], None]) -> None:
    """A step of a member that is killed in its backward, once the first bucket is committed."""

    def act() -> None:
        model._step.works[0].wait()
        kill()

    with pytest.raises((OutcomeUnknown, PeerDaemonLost)):
        tripped(model, x, act).backward()


class Bang(Exception):
    pass


def bang() -> None:
    raise Bang


@pytest.mark.parametrize("how", ["again", "set to zero", "skip"])
def test_an_exception_in_backward_leaves_the_step_open(cluster: Cluster, how: str) -> None:
    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL)
        found = []
        for step in range(3):
            model.zero_grad()
            if rank == 1 and step == 1:
                with pytest.raises(Bang):
                    tripped(model, batch(99), bang).backward()
                assert model._step is not None
                assert model._step.posted > 0  # of what comes from the wrong batch
                model.zero_grad(set_to_none=how != "set to zero")
                if how == "skip":
                    model.skip_step()
                    found.append((gradients(module), model.receipt))
                    continue
            loss(model, batch(10 * rank + step)).backward()
            found.append((gradients(module), model.receipt))
        return found

    one, other = members(cluster, work)
    for step in range(3):
        (mine, receipt), (its, its_receipt) = one[step], other[step]
        assert same(mine, its)
        assert receipt.rounds == its_receipt.rounds == (2 if step == 1 else 1)
        given = [batch(step), batch(10 + step)]
        close(mine, expected(given[:1] if step == 1 and how == "skip" else given))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_member_lost_in_the_middle_of_backward_is_in_no_bucket(cluster: Cluster, codec: Any) -> None:
    """Its first bucket was committed by all three; in the end each bucket is the mean of the other two."""
    doomed = cluster.add_peer()
    peers = [0, 1, doomed]
    group = f"group-{next(NAMES)}"

    def life(k: int) -> Any:
        with wancoll.connect(group, socket=cluster.socket(peers[k]), name=f"m{k}", start_world=3) as comm:
            module = net()
            model = ElasticDataParallel(module, comm, bucket_bytes=SMALL, codec=codec)

            if k == 2:
                return dies(model, batch(k), lambda: cluster.kill(doomed))
            loss(model, batch(k)).backward()
            first, receipt = gradients(module), model.receipt
            model.zero_grad()
            loss(model, batch(k + 10)).backward()
            return first, gradients(module), receipt, model.receipt

    def alone(comm: Any, rank: int) -> Any:
        """The same two steps where there were never more than two, of the same ranks: a codec's bits depend on them."""
        first = int(receipt.contributors[rank][1:])
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL, codec=codec)
        found = []
        for k in (first, first + 10):
            model.zero_grad()
            loss(model, batch(k)).backward()
            found.append(gradients(module))
        return found

    (one, one_later, receipt, later), (other, other_later, *_), nothing = in_threads(life, 3, 50)
    assert nothing is None
    assert same(one, other)
    assert same(one_later, other_later)
    assert (set(receipt.contributors), receipt.weight) == ({"m0", "m1"}, 2.0)
    assert (receipt.rounds, later.rounds) == (2, 1)
    right, right_later = members(cluster, alone)[0]
    assert same(one, right)
    assert same(one_later, right_later)  # what error feedback keeps is that of the step that counts


def test_a_step_that_cannot_be_finished_has_not_happened(cluster: Cluster) -> None:
    doomed = cluster.add_peer()
    fresh = cluster.add_peer()
    group = f"group-{next(NAMES)}"
    lost = threading.Event()

    def life(k: int) -> Any:
        if k == 2:
            assert lost.wait(30)
        with wancoll.connect(
            group, socket=cluster.socket((0, doomed, fresh)[k]), name=f"m{k}", start_world=2, min_world=2
        ) as comm:
            module = net()
            model = ElasticDataParallel(module, comm, bucket_bytes=SMALL, codec="int8")

            if k == 1:
                return dies(model, batch(k), lambda: cluster.kill(doomed))
            if k == 0:
                with pytest.raises(WorldTooSmall):
                    loss(model, batch(k)).backward()
                assert model.receipt is None
                assert len(model._feedback) == 0
                close(gradients(module), expected([batch(0)]))
                lost.set()
                comm.update_membership()
                model.zero_grad()
            loss(model, batch(k)).backward()
            return gradients(module), model.receipt

    (one, receipt), _, (other, _) = in_threads(life, 3, 50)
    assert same(one, other)
    assert (set(receipt.contributors), receipt.rounds) == ({"m0", "m2"}, 1)


def test_a_step_whose_backward_was_interrupted_is_not_waited_for(cluster: Cluster) -> None:
    """What was not computed would count as zero."""
    stopped = threading.Event()

    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL)
        if rank == 0:

            def fail(*_: Any) -> None:
                raise LookupError

            handle = module[2].register_full_backward_pre_hook(fail)
            with pytest.raises(LookupError):
                loss(model, batch(0)).backward()
            handle.remove()
            with pytest.raises(ConfigError, match=r"interrupted.*skip_step"):
                model.wait()
            module.zero_grad()
            stopped.set()
        else:
            assert stopped.wait(30)
        loss(model, batch(rank)).backward()
        return gradients(module)

    one, other = members(cluster, work)
    assert same(one, other)
    close(one, expected([batch(0), batch(1)]))


def test_a_timeout_leaves_the_step_under_way(cluster: Cluster) -> None:
    late = threading.Event()

    def work(comm: Any, rank: int) -> Any:
        module = net()
        model = ElasticDataParallel(module, comm, bucket_bytes=SMALL, timeout=0.1 if rank == 0 else None)
        if rank == 1:
            assert late.wait(30)
        with pytest.raises(wancoll.TimeoutError) if rank == 0 else contextlib.nullcontext():
            loss(model, batch(rank)).backward()
        if rank == 0:
            assert gradients(module) == [None] * 6  # what is under way is not to be written to
            with pytest.raises(ConfigError, match="still pending"):
                loss(model, batch(5)).backward()
            late.set()
            model.wait()
        return gradients(module)

    one, other = members(cluster, work)
    assert same(one, other)
    close(one, expected([batch(0), batch(1)]))
