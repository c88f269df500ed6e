"""What elastic examples share: a cluster on this machine, a member killed a third of the way, and a newcomer."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

import wancoll
from wancoll.cli.units import format_bytes
from wancoll.errors import WancollError
from wancoll.examples.common import Options, parsed
from wancoll.process import die_with_parent
from wancoll.testing import Cluster
from wancoll.testing.proxy import proxied_cluster

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

SILENCE_SECONDS = 120.0  # without a word from anybody: then something is wrong


@dataclass(frozen=True, slots=True)
class Told:
    """A step, as one member saw it; those of its last step have its weights' digest."""

    member: str
    step: int
    loss: float
    contributors: tuple[str, ...]
    sent: int  # bytes
    tokens: int  # that it has trained on
    digest: str = ""
    at: float = field(default_factory=time.monotonic)


class Member:
    """A training process. Its *train* is called with the communicator, again where it had to connect anew.

    Attributes:
        name: of the member.
        options: of the example.
    """

    def __init__(self, name: str, options: Options, pipe: Connection) -> None:
        self.name, self.options, self._pipe = name, options, pipe

    def tell(
        self, step: int, loss: float, contributors: tuple[str, ...], sent: int, tokens: int, digest: str = ""
    ) -> None:
        """Say what a step came to."""
        self._pipe.send(Told(self.name, step, loss, contributors, sent, tokens, digest))


Train = Callable[[Any, Member], None]


def _be_member(train: Train, parent: int, socket: str, name: str, options: Options, pipe: Connection) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    member = Member(name, options, pipe)

    def life(comm: Communicator) -> None:
        train(comm, member)

    wancoll.run(life, socket=socket, name=name, start_world=options.world, min_world=options.world - 1)


@dataclass(slots=True)
class Story:
    """What happened: all that was told, in order, who was killed, when, and who came."""

    told: list[Told]
    victim: str = ""
    newcomer: str = ""
    killed_at: float = 0.0

    def of(self, member: str) -> list[Told]:
        """What this one told."""
        return [each for each in self.told if each.member == member]

    @property
    def survivors(self) -> list[str]:
        """Who was there at the end."""
        return [name for name in dict.fromkeys(each.member for each in self.told) if name != self.victim]

    @property
    def worlds(self) -> str:
        """The world's sizes, one after the other: "4 -> 3 -> 4"."""
        sizes = [len(each.contributors) for each in self.of(self.survivors[0])]
        return " -> ".join(str(n) for i, n in enumerate(sizes) if i == 0 or n != sizes[i - 1])

    @property
    def losses(self) -> list[float]:
        """Of each step, the mean of its members."""
        return [sum(each.loss for each in step) / len(step) for step in self._steps]

    @property
    def times(self) -> list[float]:
        """When the last member had taken each step, time.monotonic()."""
        return [max(each.at for each in step) for step in self._steps]

    @property
    def joined_at(self) -> float:
        """When the newcomer had taken its first step."""
        return self.of(self.newcomer)[0].at

    @property
    def _steps(self) -> list[list[Told]]:
        ordered = sorted(self.told, key=lambda each: each.step)
        return [list(told) for _, told in itertools.groupby(ordered, key=lambda each: each.step)]

    @property
    def faults(self) -> list[str]:
        """What should not have been."""
        found = []
        last = [self.of(name)[-1] for name in self.survivors]
        if len({each.digest for each in last}) != 1 or not last[0].digest:
            found.append("the replicas differ")
        if self.newcomer not in last[0].contributors or self.victim in last[0].contributors:
            found.append("nobody joined, or nobody was killed")
        for name in self.survivors:
            steps = [each.step for each in self.of(name)]
            if any(b <= a for a, b in itertools.pairwise(steps)):
                found.append(f"{name} took a step twice")
            if any(b > a + 1 for a, b in itertools.pairwise(steps)) or (name != self.newcomer and steps[0] != 1):
                found.append(f"{name} lost a step")
        return found

    def show(self, title: str, alone: Sequence[float], options: Options, formula: str, points: float) -> bool:
        """Print the table; whether all went well, and the loss is at most *points* percent from a single process's."""
        mine = self.of(self.survivors[0])
        last = [sum(some[-8:]) / len(some[-8:]) for some in (self.losses, alone)]
        apart = 100 * abs(last[0] - last[1]) / last[1]
        print(f"{title}: {self.victim} is killed, {self.newcomer} joins\n")
        for name, measured, expected in (
            ("", "measured", "expected"),
            ("members", self.worlds, f"{options.world} -> {options.world - 1} -> {options.world}"),
            ("steps", str(len(mine)), str(options.steps)),
            ("bytes sent a step", format_bytes(sum(each.sent for each in mine) / len(mine)), formula),
            ("loss of the last 8", f"{last[0]:.4f}", f"{last[1]:.4f}, a single process"),
        ):
            print(f"{name:<22}{measured:>20}   {expected}")
        faults = self.faults + ([f"the losses are {apart:.1f} % apart"] if apart > points else [])
        print(f"\n{'; '.join(faults) or f'all replicas hold the same bytes; losses {apart:.2f} % apart: right'}")
        return not faults


def told_options(title: str, steps: int, *, shares: bool = False) -> Options:
    """The command line's options of an example that starts its own cluster; see common.parsed."""
    if "RANK" in os.environ:
        sys.exit(f"{title}: RANK is set, but it starts all its members itself: expected python -m, not torchrun")
    defaults = Options(steps=steps, hidden=64, dtype="float32")
    return parsed(title, defaults, shares=shares, without=("backend", "micro_batches", "device_ms"))


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits that are equal where all bytes are."""
    hashed = hashlib.blake2b(digest_size=8)
    for each in tensors:
        hashed.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@contextlib.contextmanager
def _cluster(peers: int, rate: float) -> Iterator[Cluster]:
    if not rate:
        with Cluster(peers) as cluster:
            yield cluster
        return
    with proxied_cluster(peers, lanes=1, peer_args=["--max-lanes=1"]) as (cluster, proxies):
        proxies.throttle(rate)
        yield cluster


def play(
    train: Train,
    options: Options,
    kill_in: int,
    *,
    rate: float = 0.0,
    watch: Callable[[Story], None] = lambda _: None,
) -> Story:
    """Train on `options.world` members; after step *kill_in* SIGKILL one with its daemon, half as late start another.

    Args:
        train: a member's life.
        options: of the example.
        kill_in: the step.
        rate: bytes per second that each member's link to each other one carries, each way; 0: what there is.
        watch: called after each thing that was told.

    Raises:
        WancollError: a process ended that was not killed, or none said anything for a while.
    """
    fork = multiprocessing.get_context("fork")  # torch is loaded once
    torch.set_num_threads(1)
    with _cluster(options.world + 1, rate) as cluster:  # the newcomer's daemon is there, and waits for a client
        live: dict[Connection, BaseProcess] = {}

        def start(i: int) -> BaseProcess:
            ours, theirs = fork.Pipe(duplex=False)
            arguments = (train, os.getpid(), cluster.socket(i), cluster.name(i), options, theirs)
            process = fork.Process(target=_be_member, args=arguments, daemon=True)
            process.start()
            theirs.close()
            live[ours] = process
            return process

        processes = [start(i) for i in range(options.world)]
        story, last = Story([]), options.world - 1
        while live:
            heard = wait(list(live), SILENCE_SECONDS)
            if not heard:
                raise WancollError(f"no member has said anything for {SILENCE_SECONDS:g} s", who="the example")
            for pipe in heard:
                assert isinstance(pipe, Connection)
                try:
                    told = pipe.recv()
                except EOFError:
                    process = live.pop(pipe)
                    process.join()
                    if process.exitcode and process is not processes[last]:
                        raise WancollError(
                            f"a member ended with status {process.exitcode}", who="the example"
                        ) from None
                    continue
                story.told.append(told)
                if told.step >= kill_in and not story.victim:
                    processes[last].kill()
                    cluster.kill(last)
                    story.killed_at, story.victim = time.monotonic(), cluster.name(last)
                if told.step >= kill_in * 3 // 2 and not story.newcomer:
                    start(last + 1)
                    story.newcomer = cluster.name(last + 1)
                watch(story)
    return story
