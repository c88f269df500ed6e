"""Steps of DistributedDataParallel over wancoll beside gloo: `python -m tests.bench.ddp [--ranks 2] [--steps 12]`.

A model of 25 M parameters in layers of 1 M, one sample a step, so that the exchange is nearly all there is. Both
backends live in the same processes; rounds of each follow each other, and the medians of the steps are printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.ranks import run
from wancoll.testing import Cluster


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))


def steps(rank: int, size: int, rounds: int, profile: str) -> dict[str, list[float]]:
    dist.init_process_group("wancoll")
    groups = {"wancoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    took: dict[str, list[float]] = {name: [] for name in groups}
    models = {name: DistributedDataParallel(model(), process_group=group) for name, group in groups.items()}
    x = torch.randn(1, 1024)
    for turn in range(rounds + 1):
        for name, each in models.items():
            dist.barrier()
            for step in range(3):
                began = time.perf_counter()
                each(x).sum().backward()
                each.zero_grad()
                if turn and step:
                    took[name].append(time.perf_counter() - began)
    if profile and rank == 0:
        profiled(models["wancoll"], x, profile)
    elif profile:
        for _ in range(10):
            models["wancoll"](x).sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return took


def profiled(of: Any, x: torch.Tensor, path: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(10):
            of(x).sum().backward()
    with open(path, "w") as out:
        out.write(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", default="", help="file for torch's profile of rank 0")
    given = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}")
    with Cluster(peers=given.ranks, startup_timeout=120) as cluster:
        env = [{"WANCOLL_SOCKET": cluster.socket(i)} for i in range(given.ranks)]
        from tests.bench import ddp  # not __main__, which the ranks do not know

        found = run(given.ranks, ddp.steps, given.rounds, given.profile, env=env, timeout=600)[0]
    for name, took in found.items():
        print(f"{name:8} {1000 * statistics.median(took):7.1f} ms a step (median of {len(took)}; "
              f"{1000 * min(took):.1f} to {1000 * max(took):.1f})")  # fmt: skip


if __name__ == "__main__":
    main()
