"""Every kind of torch tensor over every call: the right values, or an error that names it. Never a signal."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wancoll.chaos import Cluster, in_threads
from wancoll.errors import CollectiveMismatch, ConfigError, WancollError
from wancoll.torch import DiLoCo, ElasticDataParallel, all_reduce_gradients

NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def comms() -> Iterator[list[Any]]:
    """Two members. A mesh of two ranks, of which this process is the first, and which talk to nobody."""
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with Cluster(2, fork=True) as cluster:
            found = in_threads(lambda k: cluster.connect(k, name=f"m{k}", group="kinds", start_world=2), 2, 30)
            yield sorted(found, key=lambda comm: comm.rank)
            for each in found:
                each.close()
    finally:
        dist.destroy_process_group()


class Named(torch.Tensor):
    """A subclass without rules of its own."""


def dtensor(*placements: Placement) -> Callable[[torch.Tensor], Any]:
    sizes = (4,) if len(placements) == 1 else (2, 2)
    return lambda x: DTensor.from_local(x, init_device_mesh("cpu", sizes), placements, run_check=False)


def fake(x: torch.Tensor) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def asynchronous(x: torch.Tensor) -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(x)


GOOD: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda x: x,
    "subclass": lambda x: x.as_subclass(Named),
    "buffer": nn.Buffer,
    "frozen parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "view": lambda x: torch.cat([x, x])[2:].copy_(x),
    "sharded": dtensor(Shard(0)),
    "by columns": dtensor(Shard(1)),
    "replicated": dtensor(Replicate()),
    "HSDP": dtensor(Replicate(), Shard(0)),
    "FSDP and TP": dtensor(Shard(0), Shard(1)),
}
BAD: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "pending": (dtensor(Partial()), "DTensor"),
    "HSDP, pending": (dtensor(Partial(), Shard(0)), "DTensor"),
    "fake": (fake, "FakeTensor"),
    "meta": (lambda x: x.to("meta"), "meta"),
    "functional": (torch._to_functional_tensor, "values do not lie|memory|bytes"),
    "asynchronous": (asynchronous, "AsyncCollectiveTensor"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), "nested"),
    "jagged": (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), "nested"),
    "sparse": (lambda x: x.to_sparse(), "sparse_coo"),
    "sparse rows": (lambda x: x.to_sparse_csr(), "sparse_csr"),
    "quantised": (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), "qint8|quantized"),
    "freed": (freed, "0 of 16 bytes"),
    "sharded, freed": (lambda x: dtensor(Shard(0))(freed(x)), "0 of 16 bytes"),
    "conjugated": (lambda x: torch.view_as_complex(x).conj(), "complex|conjugated"),
    "negated": (torch._neg_view, "negated"),
    "with steps": (lambda x: x.t(), "contiguous"),
    "lazy": (lambda x: nn.UninitializedParameter(requires_grad=False), "Uninitialized"),
}


def local(x: Any) -> list[float]:
    part = x.to_local() if isinstance(x, DTensor) else x
    return [float(each) for each in part.detach().as_subclass(torch.Tensor).reshape(-1)]


def sent(comm: Any, k: int, x: Any) -> Any:
    comm.send(x, 1) if k == 0 else comm.recv(x, 0)
    return x


def synced(comm: Any, k: int, x: Any) -> Any:
    comm.sync_state({"x": x}, revision=2 - k)
    return x


CALLS: dict[str, tuple[Callable[[Any, int, Any], Any], list[float]]] = {
    "all_reduce": (lambda comm, k, x: comm.all_reduce(x).out, [3] * 4),
    "all_reduce, out": (lambda comm, k, x: comm.all_reduce(x, torch.empty(2, 2)).out, [3] * 4),
    "all_reduce_many": (lambda comm, k, x: comm.all_reduce_many([torch.ones(3), x]).out[1], [3] * 4),
    "int8": (lambda comm, k, x: comm.all_reduce(x, codec="int8").out, [3] * 4),
    "broadcast": (lambda comm, k, x: comm.broadcast(x, 0).out, [1] * 4),
    "reduce": (lambda comm, k, x: comm.reduce(x, x if k == 0 else None, 0).out if k == 0 else comm.reduce(x) and None,
               [3] * 4),
    "reduce_scatter": (lambda comm, k, x: comm.reduce_scatter(x).out, [3] * 2),
    "all_gather": (lambda comm, k, x: comm.all_gather(x).out, [1] * 4 + [2] * 4),
    "gather": (lambda comm, k, x: comm.gather(x, root=0).out, [1] * 4 + [2] * 4),
    "scatter": (lambda comm, k, x: comm.scatter(torch.arange(8.0) if k == 0 else None, x, root=0).out, []),
    "all_to_all": (lambda comm, k, x: comm.all_to_all(x).out, [1, 1, 2, 2]),
    "send and recv": (sent, [1] * 4),
    "sync_state": (synced, [1] * 4),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_values(comms: list[Any], kind: str) -> None:
    made = {call: [GOOD[kind](torch.full((2, 2), k + 1.0)) for k in range(2)] for call in CALLS}  # torch: one thread
    for call, (make, expected) in CALLS.items():
        found = in_threads(lambda k, make=make, call=call: make(comms[k], k, made[call][k]), 2, 20)
        for k, result in enumerate(found):
            wanted = [4.0 * k + i for i in range(4)] if call == "scatter" else expected
            if result is not None:
                assert local(result) == wanted, (kind, call, k)


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("ignore")
def test_refusals(comms: list[Any], kind: str) -> None:
    make, why = BAD[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = make(torch.full((2, 2), 1.0))
    for call, (do, _) in CALLS.items():
        with pytest.raises(ConfigError, match=why) as bad:
            do(comms[0], 0, x)
        assert call.split()[0].rstrip(",") in f"{bad.value} all_reduce(codec=int8)", (kind, call)
    for build in (lambda p: DiLoCo(p, every=2), lambda p: ElasticDataParallel(module_of(p[0]), comms[0])):
        with contextlib.suppress(RuntimeError, TypeError):  # torch lets no such tensor be a parameter
            parameter = nn.Parameter(x) if kind != "lazy" else nn.UninitializedParameter()
            with contextlib.nullcontext() if kind in ("negated", "with steps") else pytest.raises(ConfigError):
                build([parameter])
    assert in_threads(lambda k: comms[k].barrier() and 1, 2, 20) == [1, 1]


def module_of(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


def test_an_empty_tensor_of_each_kind(comms: list[Any]) -> None:
    for make in (*GOOD.values(), dtensor(Shard(0))):
        made = [make(torch.empty(0, 2)) for _ in range(2)]
        for call in ("all_reduce", "all_reduce_many", "broadcast", "all_gather", "sync_state"):
            found = in_threads(lambda k, made=made, call=call: CALLS[call][0](comms[k], k, made[k]), 2, 20)
            assert [local(each) for each in found] == [[], []]


def test_parts_of_other_tensors_are_told_from_each_other(comms: list[Any]) -> None:
    """A part of another tensor has as many elements: the difference is named."""
    part = torch.ones(2, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    over_a, over_b = (
        DTensor.from_local(part, mesh[name], [Shard(0)], shape=(8, 2), stride=(2, 1)) for name in ("a", "b")
    )
    for one, other in (
        (over_a, over_b),
        (dtensor(Shard(0))(part), dtensor(Shard(1))(part)),
        (dtensor(Shard(0))(part), part.clone()),
        (DTensor.from_local(part, init_device_mesh("cpu", (4,)), [Shard(0)], shape=(7, 2), stride=(2, 1)),
         dtensor(Shard(0))(part)),
    ):  # fmt: skip
        for call in ("all_reduce", "all_reduce_many", "broadcast", "all_gather"):

            def make(k: int, both: Any = (one, other), call: str = call) -> str:
                with pytest.raises(CollectiveMismatch) as bad:
                    CALLS[call][0](comms[k], k, both[k])
                return str(bad.value)

            assert all("of [8, 2]" in told for told in in_threads(make, 2, 20)), call
        with pytest.raises(WancollError, match="a part of"):
            in_threads(lambda k, both=(one, other): synced(comms[k], k, both[k]), 2, 20)


@pytest.mark.parametrize("placements", [(Shard(0),), (Replicate(),), (Replicate(), Shard(0))])
def test_gradients_and_training(comms: list[Any], placements: tuple[Placement, ...]) -> None:
    make = dtensor(*placements)
    modules = [module_of(nn.Parameter(make(torch.full((2, 2), 1.0)))) for _ in range(2)]
    for k, each in enumerate(modules):
        each.weight.grad = make(torch.full((2, 2), k + 1.0))
    in_threads(lambda k: all_reduce_gradients(comms[k], modules[k]), 2, 20)
    assert [local(each.weight.grad) for each in modules] == [[1.5] * 4] * 2
    wrapped = [ElasticDataParallel(each, comm) for each, comm in zip(modules, comms, strict=True)]
    for each in modules:
        each.weight.grad = None
        each.forward = lambda x, each=each: (each.weight.to_local() * x).sum()

    def backward(k: int) -> Any:
        wrapped[k](k + 1.0).backward()
        return modules[k].weight.grad

    for grad in in_threads(backward, 2, 20):
        assert isinstance(grad, DTensor)
        assert (grad.placements, local(grad)) == (placements, [1.5] * 4)


def test_a_compiled_module(comms: list[Any]) -> None:
    nets = [torch.compile(nn.Linear(2, 1, bias=False), backend="eager") for _ in range(2)]
    wrapped = [ElasticDataParallel(net, comm) for net, comm in zip(nets, comms, strict=True)]
    in_threads(lambda k: comms[k].sync_state(nets[k], revision=2 - k), 2, 20)
    assert torch.equal(*(next(net.parameters()) for net in nets))

    def backward(k: int) -> list[float]:
        wrapped[k](torch.full((1, 2), k + 1.0)).sum().backward()
        return local(next(nets[k].parameters()).grad)

    assert in_threads(backward, 2, 60) == [[1.5, 1.5]] * 2
    diloco = DiLoCo(nets[0].parameters(), every=2)
    assert [each.numel() for each in diloco.outer] == [2]


def test_a_state_that_is_made_anew_lies_on_the_mesh(comms: list[Any]) -> None:
    """A member whose optimizer has taken no step gets DTensors like its parameters'."""
    made = [nn.Parameter(dtensor(Shard(0))(torch.ones(2, 2))) for _ in range(2)]
    optimizers = [torch.optim.Adam([each]) for each in made]
    made[0].grad = dtensor(Shard(0))(torch.full((2, 2), 2.0))
    optimizers[0].step()
    in_threads(lambda k: comms[k].sync_state({"w": made[k].detach()}, optimizers[k], revision=2 - k), 2, 20)
    for optimizer, parameter in zip(optimizers, made, strict=True):
        moment = optimizer.state[parameter]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert (moment.placements, tuple(moment.shape)) == ((Shard(0),), (8, 2))
        assert local(moment) == pytest.approx([0.2] * 4)
