"""Plays the story: a cluster on this machine, a member killed a third of the way, and a newcomer."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch

from wancoll.client.run import run
from wancoll.errors import WancollError
from wancoll.examples.shared.arguments import Options
from wancoll.examples.shared.story import Story, Told
from wancoll.process import die_with_parent
from wancoll.testing import Cluster

if TYPE_CHECKING:
    from wancoll.client.communicator import Communicator

SILENCE_SECONDS = 120.0  # without a word from anybody: then something is wrong


class Member:
    """A training process. Its *train* is called with the communicator, again where it had to connect anew."""

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

    run(life, socket=socket, name=name, start_world=options.world, min_world=options.world - 1)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """16 hex digits that are equal where all bytes are."""
    hashed = hashlib.blake2b(digest_size=8)
    for each in tensors:
        hashed.update(each.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def play(train: Train, options: Options) -> Story:
    """Train on `options.world` members; after a third of the steps kill one and its daemon, after half start another.

    Raises WancollError: a process ended that was not killed, or none said anything for a while.
    """
    kill_in = options.steps // 3
    fork = multiprocessing.get_context("fork")  # torch is loaded once
    torch.set_num_threads(1)
    with Cluster(options.world + 1) as cluster:  # the newcomer's daemon is there, and waits for a client
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
                    story.victim = cluster.name(last)
                if told.step >= kill_in * 3 // 2 and not story.newcomer:
                    start(last + 1)
                    story.newcomer = cluster.name(last + 1)
    return story
