"""Islands: two sharded models (FSDP2, gloo inside), DiLoCo by wancoll between them. A process of one island is killed.

Its island dies as one, whatever its other processes wait in. The other island loses no step; the lost one is started
again, and goes on at the last outer step that was committed. Each shard is the same bytes in both islands at the end.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch._dynamo  # torch's optimizers want it: once, before members are forked
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wancoll.examples.shared.adam import LEARNING_RATE
from wancoll.examples.shared.arguments import Options, shared_batch, told_options
from wancoll.examples.shared.model import backward, loss_of, transformer
from wancoll.examples.shared.play import digest
from wancoll.examples.shared.text import batch, text
from wancoll.process import die_with_parent
from wancoll.testing import Cluster
from wancoll.torch import DiLoCo, islands

ISLANDS, SHARDS, H = 2, 2, 5


class Told(NamedTuple):
    """What a rank says of an outer step. *outer* is a digest of its shard's outer parameters."""

    member: str
    pid: int
    outer_steps: int
    steps: int
    loss: float
    islands: int
    outer: str


def train(island: int, shard: int, port: int, path: str, options: Options, told: Connection) -> None:
    """One rank's life; an error ends it, and with it its island."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=shard, world_size=SHARDS)
    mesh = init_device_mesh("cpu", (SHARDS,), mesh_dim_names=("shard",))
    source, model = text(), transformer(options)
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    inner = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    diloco = DiLoCo(model.parameters(), every=H)
    comm = islands(mesh, island="ab"[island], socket=path, start_world=ISLANDS)
    diloco.join(comm)
    while diloco.steps < options.steps:
        place, step = island * SHARDS + shard, diloco.steps
        x, y = (each.chunk(ISLANDS * SHARDS)[place] for each in batch(source, step, options))
        loss = loss_of(model(x), y)
        backward(loss)
        inner.step()
        inner.zero_grad()
        if diloco.step(tokens=x.numel()):
            outer = digest(diloco.outer)
            told.send(Told(comm.name, os.getpid(), diloco.outer_steps, step + 1, loss.item(), comm.world_size, outer))
        while diloco.steps == options.steps * 2 // 3 // H * H and comm.world_size < ISLANDS:
            time.sleep(0.05)  # here the others wait for the island that is started again
            comm.update_membership()
            diloco.join(comm)
    dist.barrier()  # who leaves takes its island along: all ranks of it have heard of the last step by now
    comm.close()


def _rank(parent: int, told: Connection, island: int, shard: int, port: int, path: str, options: Options) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    try:
        train(island, shard, port, path, options, told)
    except Exception as bad:
        print(f"{'ab'[island]}/{shard}: {type(bad).__name__}: {str(bad)[:200]}", file=sys.stderr, flush=True)
        os._exit(1)  # what inner groups still wait for is not
    os._exit(0)


def play(options: Options) -> list[Told]:
    """Train; kill a process a third of the way, and start its island again. Raises RuntimeError: another one ended."""
    fork, told, victim = multiprocessing.get_context("fork"), list[Told](), 0
    with Cluster(ISLANDS) as cluster:
        live: dict[Any, tuple[int, multiprocessing.process.BaseProcess]] = {}  # by the pipe that it tells over

        def start(island: int) -> None:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            for shard in range(SHARDS):
                ours, theirs = fork.Pipe(duplex=False)
                arguments = os.getpid(), theirs, island, shard, port, cluster.socket(island), options
                process = fork.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                live[ours] = island, process

        for island in range(ISLANDS):
            start(island)
        while live:
            for pipe in wait(list(live)):
                assert isinstance(pipe, Connection)
                island, process = live[pipe]
                try:
                    told.append(pipe.recv())
                except EOFError:
                    del live[pipe]
                    process.join()
                    if process.exitcode and (island == 0 or not victim):
                        raise RuntimeError(f"a process of island {'ab'[island]} ended: {process.exitcode}") from None
                    if process.exitcode and all(of != island for of, _ in live.values()):
                        start(island)
                    continue
                if not victim and told[-1].steps >= options.steps // 3 and told[-1].member == "b/1":
                    victim = told[-1].pid
                    process.kill()
    return told


def main() -> int:
    """Play, and say what came of it."""
    told = play(told_options("islands", steps=30, multiples=shared_batch))
    for each in told:
        print(f"outer step {each.outer_steps}: {each.member} of {each.islands} islands, loss {each.loss:.3f}")
    ends = {each.member: each.outer for each in told}
    alike = all(ends[f"a/{shard}"] == ends[f"b/{shard}"] for shard in range(SHARDS))
    print("each shard is the same bytes in both islands" if alike else f"shards differ: {ends}")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
