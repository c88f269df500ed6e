"""The ranks of a torch world, each a process forked from one that has imported torch already.

    with Ranks(4, train, arguments...) as ranks:      # train(rank, size, *arguments) runs in each
        ranks.kill(2)
        assert ranks.results() == [...]                # what each returned; raises what one raised
    answers = run(2, train, arguments...)              # the same without faults

The target is a function of a module, found by name. If it is a generator function, ranks.next(rank) gives what that
rank yields. Ranks have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun gives them, one thread for
computing, and end with this process.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Self

from wancoll.process import die_with_parent
from wancoll.testing.ports import port_of, reserve

ROOT = Path(__file__).parents[2]
HANGS = 150.0  # seconds after which a rank will never answer, on a machine that does much else
# torch._dynamo: the first DistributedDataParallel of a process loads it.
_PRELOAD = ("torch.nn.parallel", "torch._dynamo", "torch.distributed.distributed_c10d", "wancoll.client.connect",
            "wancoll.torch.backend.process_group")  # fmt: skip
_nursery: subprocess.Popen[bytes] | None = None
_reserved: list[socket.socket] = []  # what free_port() has given out


class Ranks:
    """See the module.

    Args:
        size: how many.
        target: called with rank, size and *arguments*.
        env: of all ranks, or by rank.
        port: MASTER_PORT; 0: a free one.
    """

    def __init__(
        self, size: int, target: Callable[..., Any], *arguments: Any,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] = {}, port: int = 0,
    ) -> None:  # fmt: skip
        self._last: dict[int, tuple[str, Any]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="wancoll-ranks-")
        listener = Listener(f"{self._folder.name}/hello", "AF_UNIX", backlog=size)
        each = [env] * size if isinstance(env, Mapping) else list(env)
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port())}
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **each[rank]} for rank in range(size)]
        where = f"{target.__module__}:{target.__qualname__}"
        _order(listener.address, environments, where, arguments)
        listener._listener._socket.settimeout(0.2)  # type: ignore[attr-defined]
        self._pipes: dict[int, Connection] = {}
        self.pids: dict[int, int] = {}
        with listener:
            while len(self._pipes) < size:
                try:
                    pipe = listener.accept()
                except TimeoutError:
                    assert _nursery is not None
                    assert _nursery.poll() is None, "the process that forks ranks has ended"
                    continue
                rank, self.pids[rank] = pipe.recv()
                self._pipes[rank] = pipe

    def next(self, rank: int, timeout: float = HANGS) -> Any:
        """The next value that this rank yields."""
        kind, value = self._receive(rank, time.monotonic() + timeout)
        assert kind == "yield", f"rank {rank} has ended: {value!r}"
        return value

    def result(self, rank: int, timeout: float = HANGS) -> Any:
        """What this rank returned; raises what it raised."""
        deadline = time.monotonic() + timeout
        while True:
            kind, value = self._receive(rank, deadline)
            if kind == "return":
                return value

    def results(self, timeout: float = HANGS) -> list[Any]:
        """What each rank returned; raises what one raised, the lowest."""
        deadline = time.monotonic() + timeout
        return [self.result(rank, max(0.0, deadline - time.monotonic())) for rank in sorted(self._pipes)]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to it."""
        os.kill(self.pids[rank], number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank, pid in self.pids.items():
            if rank not in self._last:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._pipes[rank].close()
        self._folder.cleanup()

    def _receive(self, rank: int, deadline: float) -> tuple[str, Any]:
        if rank not in self._last:
            pipe = self._pipes[rank]
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} has not answered in time")
            try:
                kind, value, *where = pickle.loads(pipe.recv_bytes())  # recv() would have torch share memory
                if kind == "raise":
                    value.add_note(f"rank {rank}: {where[0]}")
            except (EOFError, ConnectionResetError):
                kind, value = "raise", RuntimeError(f"rank {rank} ended without a result")
            if kind == "yield":
                return kind, value
            self._last[rank] = kind, value
        kind, value = self._last[rank]
        if kind == "raise":
            raise value
        return kind, value


def run(
    size: int, target: Callable[..., Any], *arguments: Any, timeout: float = HANGS,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = {},
) -> list[Any]:  # fmt: skip
    """What `target(rank, size, *arguments)` returned on each rank."""
    with Ranks(size, target, *arguments, env=env) as ranks:
        return ranks.results(timeout)


def free_port() -> int:
    """Nobody else gets it as long as this process lives; torch, which sets SO_REUSEADDR, can listen there.

    Kept at all addresses, as torch listens: else one at 127.0.0.2 may get the same number.
    """
    _reserved.append(reserve("*"))
    return port_of(_reserved[-1])


# ---- the process that forks ---------------------------------------------------------------------------


def _order(*what: Any) -> None:
    global _nursery  # noqa: PLW0603
    if _nursery is None or _nursery.poll() is not None:
        _nursery = subprocess.Popen(
            [sys.executable, "-c", f"from tests.torch.ranks import serve; serve({os.getpid()})"], cwd=ROOT,
            stdin=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert _nursery.stdin is not None
    pickle.dump(what, _nursery.stdin)
    _nursery.stdin.flush()


def serve(parent: int) -> None:
    """Fork ranks as they are asked for, until standard input ends."""
    die_with_parent(parent)
    for name in _PRELOAD:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        try:
            address, environments, where, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        me = os.getpid()
        for environment in environments:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent(me)
                os.environ.update(environment)
                _be_one(address, where, arguments)
                return  # to the end of the interpreter: what runs at exit runs


def _be_one(address: str, where: str, arguments: tuple[Any, ...]) -> None:
    sys.stdin.close()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with Client(address) as pipe:
        pipe.send((rank, os.getpid()))
        outcome: tuple[str, Any]
        where_it_was = ""
        try:
            module, _, name = where.partition(":")
            target = getattr(importlib.import_module(module), name)
            if inspect.isgeneratorfunction(target):
                values = target(rank, size, *arguments)
                while True:
                    try:
                        pipe.send_bytes(pickle.dumps(("yield", next(values))))
                    except StopIteration as end:
                        outcome = "return", end.value
                        break
            else:
                outcome = "return", target(rank, size, *arguments)
        except BaseException as bad:
            where_it_was = traceback.format_exc()
            outcome = "raise", bad
        try:
            said = pickle.dumps((*outcome, where_it_was))
            pickle.loads(said)
        except Exception:
            bad = RuntimeError(f"{type(outcome[1]).__name__}: {outcome[1]}")
            said = pickle.dumps(("raise", bad, where_it_was))
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(said)
