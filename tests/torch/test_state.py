"""sync_state of torch's own things: a joiner gets the model, the optimizer's state, the schedule and chance."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.faults.support import cluster_fixture
from wancoll.errors import ConfigError
from wancoll.testing import Cluster, in_threads

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.check  # the first use of torch.optim costs seconds
from torch import nn  # noqa: E402

NAMES = itertools.count(1)
BUILDING = threading.Lock()
cluster = cluster_fixture(3)


def members(cluster: Cluster, work: Callable[[Any, int], Any], world: int = 2) -> list[Any]:
    """work(comm, k) of each member."""
    group = f"group-{next(NAMES)}"

    def life(k: int) -> Any:
        with wancoll.connect(group, socket=cluster.socket(k), name=f"m{k}", start_world=world) as comm:
            return work(comm, k)

    return in_threads(life, world, 50)


class Trainer:
    """A model, its optimizer and its schedule."""

    def __init__(self, seed: int, optimizer: str = "AdamW") -> None:
        with BUILDING:  # torch's own generator is everybody's
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        made = {
            "AdamW": lambda: torch.optim.AdamW(self.net.parameters(), lr=0.1, amsgrad=True),
            "SGD": lambda: torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9),
            "LBFGS": lambda: torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3),
        }
        self.optimizer: Any = made[optimizer]()
        self.scheduler: Any = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 3, 9], 0.5),
            ],
            [2],
        )
        self.chance = (torch.Generator().manual_seed(abs(seed)), np.random.default_rng(abs(seed)), random.Random(seed))
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 3, generator=self.chance[0])
            self.steps += 1

            def closure(x: Any = x) -> Any:
                self.optimizer.zero_grad()
                loss = (self.net(x) - self.chance[1].normal() - self.chance[2].random()).square().sum()
                loss.backward()
                return loss

            self.optimizer.step(closure)
            self.scheduler.step()

    def sync(self, comm: Any, **options: Any) -> Any:
        receipt = comm.sync_state(
            self.net, self.optimizer, self.scheduler, *self.chance, revision=self.steps, timeout=30, **options
        )
        self.steps = receipt.revision
        return receipt

    @property
    def result(self) -> list[Any]:
        return [each.clone() for each in self.net.state_dict().values()]


def alike(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "LBFGS"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_newcomer_goes_on_as_if_it_had_been_there(cluster: Cluster, optimizer: str, fresh: bool) -> None:
    """Whether its optimizer has no state yet, or that of another training."""

    def work(comm: Any, k: int) -> Any:
        trainer = Trainer(k, optimizer)
        trainer.train(3 if k == 0 else 0 if fresh else 1)
        receipt = trainer.sync(comm)
        again = trainer.sync(comm)
        assert (again.rounds, again.bytes_moved, set(again.holders)) == (0, 0, {"m0", "m1"})
        trainer.train(4)
        return trainer.result, receipt, trainer.optimizer.param_groups[0]["lr"]

    (one, receipt, rate), (other, _, its_rate) = members(cluster, work)
    assert alike(one, other)
    assert rate == its_rate
    assert (receipt.revision, receipt.holders) == (3, ("m0",))
    alone = Trainer(0, optimizer)
    alone.train(7)
    assert alike(one, alone.result)


def test_only_plain_values_differ(cluster: Cluster) -> None:
    def work(comm: Any, k: int) -> Any:
        trainer = Trainer(0)
        trainer.train(1)
        progress: dict[str, Any] = {"best": 0.5, "seen": {"epochs": 1}, "spare": 3}
        if k == 0:
            trainer.optimizer.param_groups[0]["lr"] = 0.25
            progress = {"best": 0.75, "seen": {"epochs": 2, "names": ["a", ("b", None)]}, "big": 1 << 200}
        receipt = comm.sync_state(trainer.optimizer, progress, revision=5 - k)
        assert receipt.bytes_moved == 0
        return trainer.optimizer.param_groups[0]["lr"], progress

    right = (0.25, {"best": 0.75, "seen": {"epochs": 2, "names": ["a", ("b", None)]}, "big": 1 << 200})
    assert members(cluster, work) == [right, right]


def test_nested_state_dicts_in_one_dict(cluster: Cluster) -> None:
    def work(comm: Any, k: int) -> Any:
        trainer = Trainer(k)
        state = {"model": trainer.net.state_dict(), "extra": {"ema": [torch.full((2,), float(k)), np.full(2, k)]}}
        comm.sync_state(state, revision=k)
        return trainer.result, state["extra"]["ema"]

    (one, (ema, array)), (other, _) = members(cluster, work)
    assert alike(one, other)
    assert torch.equal(ema, torch.ones(2))
    assert array.tolist() == [1, 1]


def test_what_does_not_fit_is_said_by_name_on_all(cluster: Cluster) -> None:
    def work(comm: Any, k: int) -> None:
        with pytest.raises(ConfigError, match=r"Linear/weight.*shape or dtype"):
            comm.sync_state(nn.Linear(2 + k, 2), revision=k)
        layer = nn.Linear(2, 2)
        things = [layer, torch.optim.SGD(layer.parameters())] if k else [layer]
        with pytest.raises(ConfigError, match=r"other things; expected Linear, SGD, as on m1; got Linear;"):
            comm.sync_state(*things, revision=k)
        layer = nn.Linear(2, 2)
        before = layer.weight.detach().clone()
        optimizer = torch.optim.SGD([{"params": [layer.weight]}, {"params": [layer.bias]}][: 1 + k], momentum=0.5)
        if k:
            comm.sync_state(optimizer, revision=k)
        else:
            with pytest.raises(ConfigError, match=r"SGD.*could not be loaded.*different number of parameter groups"):
                comm.sync_state(optimizer, revision=k)
        assert torch.equal(layer.weight, before)
        comm.barrier()

    members(cluster, work)


def test_what_cannot_be_synchronised_is_refused_here(cluster: Cluster) -> None:
    class Odd:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    deep: Any = []
    for _ in range(40):
        deep = [deep]

    def work(comm: Any, k: int) -> None:
        for given, text in [
            ((nn.Linear(1, 1), 5), "this cannot be synchronised.*got int"),
            ((Odd({"a": object()}),), r"Odd, at a: has a value that cannot be carried.*got object"),
            ((Odd({"a": {1, 2}}),), "cannot be carried.*got set"),
            ((Odd({"a": deep}),), "nested too deeply"),
            ((Odd({"a": 1 << 9000}),), "a number that is too large"),
            ((Odd({"a": b"." * (5 << 20)}),), "too much beside its tensors"),
            ((Odd({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}),), "two tensors of one name"),
            ((Odd({"a": torch.ones(1, requires_grad=True)}),), "requires grad"),
            ((nn.Conv2d(3, 3, 2).to(memory_format=torch.channels_last),), "memory_format=torch.contiguous_format"),
            ((), "nothing is to be synchronised"),
        ]:
            with pytest.raises(ConfigError, match=text):
                comm.sync_state(*given, revision=1)

    members(cluster, work, 1)
