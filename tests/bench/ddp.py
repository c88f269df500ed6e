"""Steps of data parallel training over wancoll beside gloo: `python -m tests.bench.ddp [--ranks 2] [--rounds 6]`.

A model of 25 M parameters in layers of 1 M, one sample a step, so that the exchange is nearly all there is. All
contenders live in the same processes; rounds of each follow each other, and the medians of the steps are printed, with
the processor time of rank 0 and its daemon: that says more than time where the machine does other things, too.
With `--wan 40ms,500Mbit` each rank is on a host of its own, so far away and with such an uplink (needs root, as
tests/wan), and ElasticDataParallel with int8 takes part, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch.ranks import run
from tests.wan import namespace
from tests.wan.network import DEVICE, Wan
from tests.wan.units import BITS, SECONDS, parse
from wancoll.testing import Cluster
from wancoll.torch import ElasticDataParallel
from wancoll.torch.backend.buckets import OPTION

COPIED, INT8 = "wancoll, buckets copied", "wancoll, int8"
NEAR, FAR = ("wancoll", COPIED, "gloo"), ("wancoll", INT8, "gloo")
LANES = 8  # far apart
STEPS = 3  # a round; the first of them is not counted


def model() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))


def steps(
    rank: int,
    size: int,
    names: Sequence[str],
    rounds: int,
    profile: str,
    daemons: list[int],
    store: str,
    hosts: list[str],
) -> dict[str, list[tuple[float, float]]]:
    """Seconds and processor seconds of each step."""
    with ExitStack() as stack:
        if hosts:
            host = os.open(hosts[rank], os.O_RDONLY)
            stack.enter_context(namespace.inside(host))
            os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        dist.init_process_group("wancoll", init_method=f"file://{store}", rank=rank, world_size=size)
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        models = {name: wrapped(name) for name in names}
        x = torch.randn(1, 1024)
        for turn in range(rounds + 1):
            for name, each in models.items():
                os.environ[OPTION] = "0" if name == COPIED else "1"
                dist.barrier()
                for step in range(STEPS):
                    began, worked = time.perf_counter(), time.process_time() + processor_seconds(daemons[rank])
                    each(x).sum().backward()
                    each.zero_grad()
                    if turn and step:
                        worked = time.process_time() + processor_seconds(daemons[rank]) - worked
                        took[name].append((time.perf_counter() - began, worked))
        if profile and rank == 0:
            profiled(models["wancoll"], x, profile)
        elif profile:
            for _ in range(10):
                models["wancoll"](x).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        return took


def wrapped(name: str) -> torch.nn.Module:
    if name == INT8:
        world: Any = dist.group.WORLD
        return ElasticDataParallel(model(), world._comm, codec="int8")
    return DistributedDataParallel(model(), process_group=dist.new_group(backend=name.partition(",")[0]))


def processor_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


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
    parser.add_argument("--wan", default="", help="delay one way and rate, such as 40ms,500Mbit")
    given = parser.parse_args()
    where = f", {given.wan} between hosts" if given.wan else ""
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, torch {torch.__version__}{where}")
    with ExitStack() as stack:
        wan = None
        if given.wan:
            delay, rate = given.wan.split(",")
            wan = stack.enter_context(Wan(given.ranks, delay=parse(delay, SECONDS), rate=parse(rate, BITS)))
        lanes = {"lanes": LANES} if wan is not None else {}
        cluster = stack.enter_context(Cluster(peers=given.ranks, startup_timeout=120, network=wan, **lanes))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        env = [{"WANCOLL_SOCKET": cluster.socket(i)} for i in range(given.ranks)]
        from tests.bench import ddp  # not __main__, which the ranks do not know

        pids = [cluster.pid(i) for i in range(given.ranks)]
        hosts = [wan.namespace(i) for i in range(given.ranks)] if wan is not None else []
        found = run(
            given.ranks, ddp.steps, FAR if given.wan else NEAR, given.rounds, given.profile, pids, f"{folder}/store",
            hosts, env=env, timeout=600,
        )[0]  # fmt: skip
    gloo = statistics.median(seconds for seconds, _ in found["gloo"])
    for name, took in found.items():
        middle = statistics.median(seconds for seconds, _ in took)
        print(f"{name:24} {1000 * middle:7.1f} ms a step (median of {len(took)}; {1000 * min(took)[0]:.1f} to "
              f"{1000 * max(took)[0]:.1f}), {1000 * statistics.mean(worked for _, worked in took):.0f} ms of a "
              f"processor, {gloo / middle:.2f} of gloo's speed")  # fmt: skip
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
