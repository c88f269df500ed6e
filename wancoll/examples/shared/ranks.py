"""An example's ranks: with no arguments it starts them on this machine; under torchrun it is one of them.

It exits with 0 only if its losses are those of a single process, up to rounding.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from wancoll.examples.shared.alone import train_alone
from wancoll.examples.shared.arguments import Multiples, Options, parsed
from wancoll.examples.shared.report import Report, show


class Sent:
    """Counts what this rank sends while it is entered, in bytes, headers included; the backend "wancoll" knows."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._before = 0.0

    @property
    def per_step(self) -> float:
        """Mean, without the first step, which sets things up. Not a number where nobody counts."""
        steps = self._steps[1:] or self._steps
        return sum(steps) / len(steps)

    def __enter__(self) -> None:
        self._before = self._count()

    def __exit__(self, *_: object) -> None:
        self._steps.append(self._count() - self._before)

    def _count(self) -> float:
        return float(getattr(getattr(dist.group.WORLD, "cluster", None), "bytes_sent", math.nan))


def mean(value: Tensor | float) -> float:
    """Over all ranks."""
    total = torch.as_tensor(value, dtype=torch.float64).detach().clone().reshape(1)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def launch(
    title: str, train: Callable[[Options], Report], world: int = 4, multiples: Multiples = lambda _: {},
    **defaults: object,
) -> None:  # fmt: skip
    """Run *train* on every rank, in a process group that stands, print what it found out, and exit.

    There are *world* ranks, unless torchrun or --world says otherwise. *multiples* is as in parsed(), *title* heads the
    table, and *defaults* are of Options, for this example.
    """
    options = parsed(title, Options(world=world, **defaults), multiples=multiples)  # type: ignore[arg-type]
    if "RANK" in os.environ:
        sys.exit(_rank(title, train, options))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")  # torch is loaded once
    torch.set_num_threads(1)
    ranks = [fork.Process(target=_forked, args=(title, train, options, rank, port)) for rank in range(options.world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _forked(title: str, train: Callable[[Options], Report], options: Options, rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.exit(_rank(title, train, options))


def _rank(title: str, train: Callable[[Options], Report], options: Options) -> int:
    if options.backend == "wancoll":
        import wancoll.torch  # noqa: F401

    dist.init_process_group(options.backend)
    try:
        report = train(options)
        worst = torch.tensor([report.sent, *report.memory], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)  # of the rank that has most
        report.sent, *memory = worst.tolist()
        report.memory = (memory[0], memory[1], memory[2])
        world = dist.get_world_size()
        right = dist.get_rank() != 0 or show(title, report, train_alone(options), options, world)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if right else 1
