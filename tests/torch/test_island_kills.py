"""Three islands of two FSDP2 ranks, gloo inside: processes are killed at random moments of training, to its end."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.torch.ranks import Ranks
from wancoll.examples.shared.play import digest
from wancoll.testing import Cluster
from wancoll.torch import DiLoCo, islands

NAMES, SHARDS, H, AHEAD = "abc", 2, 4, 80


def samples(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with noise that no model learns, so that losses of two runs can be compared."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, x.sum(1, keepdim=True).mul(0.3).tanh() + 0.5 * torch.randn(count, 1, generator=generator)


def train(rank: int, size: int, island: int, socket: str, seed: int, end: str, pace: float) -> Iterator[Any]:
    """A rank's life, until the outer step that the file *end* names; what it has come to after each."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 1))  # no part of it is as long at both ranks
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    diloco = DiLoCo(model.parameters(), every=H, lr=0.7, momentum=0.5)
    comm = islands(mesh, f"g{seed}", island=NAMES[island], socket=socket, start_world=len(NAMES))
    diloco.join(comm)
    yield "joined", (), digest(diloco.outer), time.monotonic()
    while not os.path.exists(end) or diloco.steps < H * int(Path(end).read_text()):
        x, y = samples((diloco.steps * 10 + island) * 10 + rank + 1_000_000 * seed, 32)
        (model(x) - y).square().mean().backward()
        inner.step()
        inner.zero_grad()
        time.sleep(0.0 if os.path.exists(end) else pace)
        for outer in diloco.step(tokens=len(x)):
            islands_in = tuple(name[0] for name in outer.weights)
            yield outer.step // H, islands_in, digest(diloco.outer), time.monotonic()
    x, y = samples(seed, 4096)
    with torch.no_grad():
        loss = float((model(x) - y).square().mean())
    dist.barrier()
    comm.close()
    return loss


class Life:
    """One start of an island: what its ranks have said, and how they ended (a loss, or the error)."""

    def __init__(self, cluster: Cluster, island: int, seed: int, end: Path, pace: float) -> None:
        self.ranks = Ranks(SHARDS, train, island, cluster.socket(island), seed, str(end), pace)
        self.said: list[list[Any]] = [[] for _ in range(SHARDS)]
        self.ended: dict[int, tuple[float, Any]] = {}
        for rank in range(SHARDS):
            threading.Thread(target=self._take, args=(rank,), daemon=True).start()

    def _take(self, rank: int) -> None:
        try:
            while True:
                kind, value = self.ranks._receive(rank, time.monotonic() + 120)
                if kind == "return":
                    break
                self.said[rank].append(value)
        except Exception as bad:  # whatever a rank raised
            value = bad
        self.ended[rank] = time.monotonic(), value

    @property
    def steps(self) -> list[Any]:
        """Outer steps that rank 0 has ended."""
        return self.said[0][1:]


def until(what: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def play(folder: Path, seed: int, kills: int, pace: float, steps: int = 0) -> tuple[list[list[Life]], list[float]]:
    """All lives of each island, and how long after each kill another island ended an outer step without it."""
    chance, end, waits = random.Random(seed), folder / f"end-{seed}-{kills}", list[float]()
    if steps:
        end.write_text(str(steps))
    with Cluster(len(NAMES), fork=True) as cluster:
        lives = [[Life(cluster, island, seed, end, pace)] for island in range(len(NAMES))]
        for _ in range(kills):
            count = [len(each[-1].steps) for each in lives]
            until(lambda count=count: all(
                len(each[-1].steps) > n + 1 and len(each[-1].steps[-1][1]) == len(NAMES)
                for each, n in zip(lives, count, strict=True)
            ))  # fmt: skip
            time.sleep(chance.random() / 3)
            island, rank = chance.randrange(len(NAMES)), chance.randrange(SHARDS)
            other, victim = lives[(island + 1) % len(NAMES)][-1], lives[island][-1]
            victim.ranks.kill(rank)
            killed = time.monotonic()
            until(lambda victim=victim: len(victim.ended) == SHARDS, 5)
            assert victim.ended[1 - rank][0] - killed < 2.0  # the other rank, wherever it was
            until(lambda: NAMES[island] not in other.steps[-1][1])  # noqa: B023 -- is called before the next round
            first = next(at for _, names, _, at in other.steps if at > killed and NAMES[island] not in names)
            waits.append(first - killed)
            assert not any(each[-1].ended for i, each in enumerate(lives) if i != island)
            lives[island].append(Life(cluster, island, seed, end, pace))
        if not steps:
            last = lives[0][-1]
            until(lambda: all(each[-1].steps and len(each[-1].steps[-1][1]) == len(NAMES) for each in lives))
            (folder / "new").write_text(str(last.steps[-1][0] + AHEAD))
            (folder / "new").replace(end)  # ranks read it whole
        until(lambda: all(len(each[-1].ended) == SHARDS for each in lives))
        for life in (life for each in lives for life in each):
            life.ranks.__exit__()
    return lives, waits


def check(lives: list[list[Life]]) -> tuple[int, float]:
    """Replicas are equal shard by shard, and who lived lost no step. The last outer step, and the loss."""
    outer: dict[tuple[int, int], set[Any]] = {}
    for each in lives:
        for life in each:
            for rank in range(SHARDS):
                steps = [step for step, *_ in life.said[rank][1:]]
                if steps:
                    assert steps == list(range(steps[0], steps[0] + len(steps)))  # none is lost, none comes twice
                for step, names, what, _ in life.said[rank][1:]:
                    outer.setdefault((step, rank), set()).add((names, what))
    assert all(len(alike) == 1 for alike in outer.values())
    for life in (life for each in lives for life in each[1:]):  # it came back where the others were
        for rank in range(SHARDS):
            if steps := life.said[rank][1:]:
                assert life.said[rank][0][2] in {what for _, what in outer[steps[0][0] - 1, rank]}
    ends = [life.ended[rank][1] for life in (each[-1] for each in lives) for rank in range(SHARDS)]
    assert all(isinstance(loss, float) for loss in ends), ends
    assert max(ends) - min(ends) < 1e-6
    return max(step for step, _ in outer), ends[0]


def run(folder: Path, seeds: range, kills: int, pace: float) -> None:
    with_kills, without, waits = [], [], list[float]()
    for seed in seeds:
        lives, waited = play(folder, seed, kills, pace)
        steps, loss = check(lives)
        undisturbed, _ = play(folder, seed, 0, 0.0, steps)
        assert check(undisturbed)[0] == steps
        with_kills.append(loss)
        without.append(check(undisturbed)[1])
        waits += waited
    print(f"losses {with_kills}, undisturbed {without}; the next outer step came {sorted(waits)} s after a kill")
    assert statistics.fmean(with_kills) == pytest.approx(statistics.fmean(without), rel=0.01)


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_two_kills(tmp_path: Path) -> None:
    run(tmp_path, range(1, 2), 2, 0.005)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path: Path) -> None:
    run(tmp_path, range(1, 4), 17, 0.005)
