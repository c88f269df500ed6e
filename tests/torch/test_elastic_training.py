"""The elastic training loop of docs/training.md, as printed, in processes that are killed in the middle of backward."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wancoll.torch
from tests.torch.programs import Tripwire
from tests.torch.ranks import ROOT, Ranks
from wancoll.demo import data
from wancoll.testing import Cluster
from wancoll.torch import ElasticDataParallel, ElasticSampler

MEMBERS = 4
BATCH = 32  # as the loop has it


def loop() -> str:
    """The loop, as docs/training.md prints it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "ElasticSampler(len(dataset), batch_size" in block]
    return str(found)


class Images(torch.utils.data.Dataset[Any]):
    """The digits. It remembers what was taken."""

    def __init__(self, digits: data.Digits) -> None:
        self.images, self.labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
        self.taken: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Any:
        self.taken.append(i)
        return self.images[i], self.labels[i]


class Net(nn.Module):
    """One hidden layer; *burn* is called in the middle of backward."""

    def __init__(self, burn: Any = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.burn = nn.Linear(64, 128), nn.Linear(128, 10), burn

    def forward(self, x: Any) -> Any:
        return self.two(Tripwire.apply(torch.relu(self.one(x)), self.burn))


def accuracy(net: nn.Module, digits: data.Digits) -> float:
    with torch.no_grad():
        found = net(torch.from_numpy(digits.test_images)).argmax(1)
    return float((found == torch.from_numpy(digits.test_labels)).float().mean())


@dataclass(frozen=True)
class Life:
    """What a member does.

    Attributes:
        source: the loop.
        digits: the data.
        log: takes a line for each committed step.
        epochs: of the training.
        dies_after: so many of its own steps, in the middle of the next backward; -1: it does not.
        waits: it dies only once the step's first bucket is committed, so that it must be reduced again.
        go: it begins when this file is there.
    """

    source: str
    digits: data.Digits
    log: str
    epochs: int
    dies_after: int
    waits: bool
    go: str


def member(_rank: int, _size: int, life: Life) -> Any:
    """Run the loop. Returns the steps, a digest of all state, and the accuracy."""
    dataset = Images(life.digits)
    models: list[Any] = []
    steps = 0

    def burn() -> None:
        if steps == life.dies_after:
            step = models[-1]._step
            assert step.posted
            if life.waits:
                step.works[0].wait(20)
            os.kill(os.getpid(), signal.SIGKILL)

    class Told(ElasticSampler):
        def commit(self, receipt: Any) -> None:
            nonlocal steps
            steps += 1
            mine = [] if self.weight == 0 else dataset.taken
            line = [names["step"], self.epoch, mine, receipt.contributors, self._name, receipt.rounds]
            with open(life.log, "a") as file:
                file.write(json.dumps(line) + "\n")
            dataset.taken = []
            super().commit(receipt)

        def follow(self, *arguments: Any) -> None:
            dataset.taken = []
            super().follow(*arguments)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        models.append(ElasticDataParallel(*arguments, bucket_bytes=5200, **options))
        return models[-1]

    wancoll.torch.ElasticDataParallel = wrapped  # type: ignore[assignment,misc]
    wancoll.torch.ElasticSampler = Told  # type: ignore[misc]
    names: dict[str, Any] = {"net": Net(burn), "dataset": dataset, "EPOCHS": life.epochs, "__name__": "loop"}
    while not os.path.exists(life.go):
        time.sleep(0.01)
    exec(life.source, names)
    state = [*names["net"].state_dict().values()]
    state += [each["momentum_buffer"] for each in names["optimizer"].state_dict()["state"].values()]
    digest = hashlib.blake2b(b"".join(each.numpy().tobytes() for each in state)).hexdigest()
    return names["step"], digest, accuracy(names["net"], life.digits)


def alone(digits: data.Digits, batches: list[list[int]]) -> float:
    """The accuracy of a single process that takes these batches."""
    dataset, net = Images(digits), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(dataset.images[batch]), dataset.labels[batch]).backward()
        optimizer.step()
    return accuracy(net, digits)


def survive(folder: Path, *, kills: int, epochs: int, chance: random.Random) -> None:
    """Train with four members; *kills* of them die in the middle of backward, and others join in their place."""
    digits = data.digits()
    logs: list[Path] = []
    ranks: list[Ranks] = []
    source = loop()

    def start(dies_after: int) -> None:
        log = folder / f"member-{len(logs)}"
        socket = cluster.socket(len(logs) % MEMBERS)
        life = Life(source, digits, str(log), epochs, dies_after, chance.random() < 0.7, f"{log}-go")
        logs.append(log)
        ranks.append(Ranks(1, member, life, env={"WANCOLL_SOCKET": socket}))

    def go(which: int) -> None:
        Path(f"{logs[which]}-go").touch()

    with Cluster(MEMBERS, fork=True, lanes=2) as cluster:
        try:
            for k in range(MEMBERS):
                start(chance.randrange(3, 10) if k == MEMBERS - 1 else -1)
                go(k)
            for killed in range(1, kills + 1):
                start(chance.randrange(3, 15) if killed < kills else -1)  # ready before it is needed
                with pytest.raises(RuntimeError, match="ended without a result"):
                    ranks[-2].result(0, 120)
                go(-1)
            results = [ranks[k].result(0, 600) for k in (*range(MEMBERS - 1), -1)]  # after the epochs that are left
        finally:
            for each in ranks:
                each.__exit__()

    assert len(results) == MEMBERS
    assert len({(step, digest) for step, digest, _ in results}) == 1, "the replicas differ"
    used: Counter[tuple[int, int]] = Counter()
    batches: dict[int, list[int]] = {}
    named: dict[int, set[tuple[str, ...]]] = {}
    most_rounds = 0
    for log in logs:
        for line in log.read_text().splitlines():
            step, epoch, samples, contributors, name, rounds = json.loads(line)
            assert name in contributors
            used.update((epoch, sample) for sample in samples)
            batches.setdefault(step, []).extend(samples)
            named.setdefault(step, set()).add(tuple(contributors))
            most_rounds = max(most_rounds, rounds)
    right = Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(len(digits.labels))})
    assert used == right, f"{len(used - right)} too often, {len(right - used)} too seldom"
    assert sorted(batches) == list(range(results[0][0])), "a step was lost"
    assert all(len(each) == 1 for each in named.values())
    assert most_rounds >= 2, "no step was reduced again"
    assert any(line for line in logs[-1].read_text().splitlines()), "the last newcomer came too late"
    reference = alone(digits, [batches[step] for step in sorted(batches)])
    for _, _, found in results:
        assert abs(found - reference) <= 0.01, (found, reference)


@pytest.mark.check
@pytest.mark.timeout(200)
def test_a_member_killed_in_backward_and_one_that_joins(tmp_path: Path) -> None:
    survive(tmp_path, kills=1, epochs=5, chance=random.Random(1))


@pytest.mark.nightly
def test_fifty_members_killed_in_backward(tmp_path: Path, rng: random.Random) -> None:
    began = time.monotonic()
    survive(tmp_path, kills=50, epochs=75, chance=rng)
    print(f"50 kills in {time.monotonic() - began:.0f} s")
