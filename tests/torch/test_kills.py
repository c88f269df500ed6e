"""A rank killed in the middle of backward under plain DDP: the others get an error that names it, and begin anew."""

import os
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import wancoll
from tests.torch.programs import Tripwire
from tests.torch.ranks import Ranks, free_port

NOTICED_SECONDS = 20.0  # a killed process closes its connection: at once; the rest is a busy machine's
LAYERS = 6


class Net(torch.nn.Module):
    """*tell* is called in backward, when half of the gradients are there."""

    def __init__(self, tell):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(LAYERS))
        self.tell = tell

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == LAYERS // 2:
                x = Tripwire.apply(x, self.tell)
        return x


def step(net):
    net.zero_grad()
    net(torch.ones(4, 64)).sum().backward()
    return [each.grad.clone() for each in net.parameters()]


def steps(net):
    for _ in range(100):
        step(net)


class Doom:
    """Kills this process when it is called, once it is near."""

    near = False

    def __call__(self):
        if self.near:
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank, size, ports, victims):
    """Worlds of all ranks, one after the other; in each the victim dies, and its place is left empty."""
    alive = list(range(size))
    for port, victim in zip(ports, victims, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("wancoll", rank=alive.index(rank), world_size=len(alive))
        doom = Doom()
        net = DistributedDataParallel(Net(doom), bucket_cap_mb=0.02)
        for _ in range(2):
            step(net)
        dist.barrier()
        doom.near = rank == victim
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            steps(net)
        took = time.monotonic() - began
        assert isinstance(caught.value, wancoll.OperationAborted), repr(caught.value)  # as DDP's C++ raises it, too
        advice = "destroy_process_group(), and init_process_group() with those that are left"
        assert caught.value.hint.endswith(advice), caught.value.hint
        assert re.search(rf"\brank-{alive.index(victim)}\b", str(caught.value)), str(caught.value)
        dist.destroy_process_group()
        alive.remove(victim)
        yield took
    os.environ["MASTER_PORT"] = str(ports[0])
    dist.init_process_group("wancoll", rank=alive.index(rank), world_size=len(alive))
    gradients = step(DistributedDataParallel(Net(Doom())))
    alone = step(Net(Doom()))
    for one, other in zip(gradients, alone, strict=True):
        torch.testing.assert_close(one, other)
    dist.destroy_process_group()


def kill(rounds, seed):
    """Four ranks, of which two die one after the other, again and again."""
    chance = random.Random(seed)
    kills = 0
    while kills < rounds:
        victims = chance.sample(range(4), min(2, rounds - kills))
        ports = [free_port() for _ in victims]
        with Ranks(4, train, ports, victims) as ranks:
            for number in range(len(victims)):
                for rank in sorted(set(range(4)) - set(victims[: number + 1])):
                    took = ranks.next(rank, 120)
                    assert took < NOTICED_SECONDS, f"rank {rank} heard of rank {victims[number]} after {took:.1f} s"
                kills += 1
            for rank in sorted(set(range(4)) - set(victims)):
                ranks.result(rank, 120)


@pytest.mark.check
@pytest.mark.timeout(200)
def test_some():
    kill(2, seed=1)


@pytest.mark.nightly
def test_fifty():
    kill(50, seed=2)
