"""What elastic examples share: a cluster on this machine, a member killed a third of the way, and a newcomer."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

import wancoll
from wancoll.cli.units import format_bytes
from wancoll.errors import WancollError
from wancoll.process import die_with_parent
from wancoll.testing import Cluster

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator
    from wancoll.examples.common import Options

SILENCE_SECONDS = 120.0  # without a word from anybody: then something is wrong


@dataclass(frozen=True, slots=True)
class Told:
    """A step, as one member saw it; those of its last step have its weights' digest."""

    member: str
    step: int
    loss: float
    contributors: tuple[str, ...]
    sent: int  # bytes
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

    def tell(self, step: int, loss: float, contributors: tuple[str, ...], sent: int, digest: str = "") -> None:
        """Say what a step came to."""
        self._pipe.send(Told(self.name, step, loss, contributors, sent, digest))


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
    """What happened: all that was told, in order, who was killed and who came."""

    told: list[Told]
    victim: str
    newcomer: str

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
        return found

    def show(self, title: str, alone: Sequence[float], options: Options, formula: str, points: float) -> bool:
        """Print the table; whether all went well, and the loss is at most *points* percent from a single process's."""
        mine = self.of(self.survivors[0])
        by_step: dict[int, list[float]] = {}
        for each in self.told:
            by_step.setdefault(each.step, []).append(each.loss)
        losses = {step: sum(values) / len(values) for step, values in by_step.items()}
        last = [sum(some[-8:]) / len(some[-8:]) for some in ([losses[step] for step in sorted(losses)], alone)]
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


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits that are equal where all bytes are."""
    hashed = hashlib.blake2b(digest_size=8)
    for each in tensors:
        hashed.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def play(train: Train, options: Options, kill_in: int) -> Story:
    """Train on `options.world` members; in step *kill_in* SIGKILL one with its daemon, and start another one.

    Raises:
        WancollError: a process ended that was not killed, or none said anything for a while.
    """
    fork = multiprocessing.get_context("fork")  # torch is loaded once
    torch.set_num_threads(1)
    with Cluster(options.world) as cluster:
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
        story, last = Story([], "", ""), options.world - 1
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
                    story.victim, i = cluster.name(last), cluster.add_peer()
                    story.newcomer = cluster.name(i)
                    start(i)
    return story
