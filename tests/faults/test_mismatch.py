"""Members that call different things at the same place: all are told who called what, and the group goes on."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.faults.support import (
    BUSY,
    PEERS,
    WancollError,
    close_all,
    contribution,
    in_threads,
    join,
    reduce_all,
    untouched,
)
from wancoll.chaos import Cluster
from wancoll.collective import Receipt
from wancoll.errors import CollectiveMismatch, Evicted, OperationAborted, OutcomeUnknown

BOUND = BUSY
COUNT = 203530

Call = Callable[[Any, np.ndarray], Any]

CALLS: dict[str, tuple[Call, str]] = {  # what the odd one calls, and a word of its description
    "op": (lambda comm, x: comm.all_reduce(x, op="prod"), "op=prod"),
    "dtype": (lambda comm, x: comm.all_reduce(x.view(np.int32), op="sum"), "int32"),
    "count": (lambda comm, x: comm.all_reduce(x[:-1], op="sum"), str(COUNT - 1)),
    "no elements": (lambda comm, x: comm.all_reduce(x[:0], op="sum"), "0 x float32"),
    "update_membership": (lambda comm, x: comm.update_membership(), "update_membership"),
}


def usual_call(comm: Any, x: np.ndarray) -> Any:
    return comm.all_reduce(x, op="sum")


def mismatch(cluster: Cluster, world: int, odd: int, what: str, late: float = 0.0) -> None:
    comms = join(cluster, range(world))
    reduce_all(comms, range(world))
    odd_call, word = CALLS[what]
    tensors = [contribution(k, COUNT) for k in range(world)]

    def member(k: int) -> tuple[WancollError, float]:
        if k == odd:
            time.sleep(late)  # the others wait in their call
        call = odd_call if k == odd else usual_call
        with pytest.raises(CollectiveMismatch) as caught:
            call(comms[k], tensors[k])
        return caught.value, time.monotonic()

    started = time.monotonic() + late
    found = in_threads(member, world, 20)
    for k, (error, ended) in enumerate(found):
        assert isinstance(error, CollectiveMismatch)
        assert ended - started < BOUND, f"m{k} was told after {ended - started:.2f} s"
        assert sorted(error.calls) == sorted(f"m{i}" for i in range(world)), error.calls
        assert word in error.calls[f"m{odd}"], error.calls
        others = {error.calls[f"m{i}"] for i in range(world) if i != odd}
        assert others == {f"all_reduce({COUNT} x float32, op=sum)"}
        assert f"m{odd}" in str(error), "the text names who called what"
        assert untouched(tensors[k], k)
    reduce_all(comms, range(world))
    assert comms[0].world_size == world
    close_all(comms)


@pytest.mark.parametrize("what", list(CALLS))
@pytest.mark.parametrize("world", [2, 3, 4])
def test_mismatch(cluster: Cluster, rng: random.Random, world: int, what: str) -> None:
    mismatch(cluster, world, rng.randrange(world), what)


def test_mismatch_of_one_that_comes_late(cluster: Cluster) -> None:
    mismatch(cluster, 3, 1, "count", late=0.5)


def test_everybody_calls_something_else(comms: list[Any]) -> None:
    tensors = [contribution(k, 1000 + k) for k in range(PEERS)]

    def member(k: int) -> CollectiveMismatch:
        with pytest.raises(CollectiveMismatch) as caught:
            comms[k].all_reduce(tensors[k], op="sum")
        return caught.value

    started = time.monotonic()
    for error in in_threads(member, PEERS, 20):
        assert error.calls == {f"m{k}": f"all_reduce({1000 + k} x float32, op=sum)" for k in range(PEERS)}
    assert time.monotonic() - started < BOUND
    assert all(untouched(tensor, k) for k, tensor in enumerate(tensors))
    reduce_all(comms, range(PEERS))


def test_the_ops_around_a_mismatch_commit(comms: list[Any]) -> None:
    """Three ops in flight, the second one differs: the first and the third have their result."""

    def member(k: int) -> tuple[list[Any], list[np.ndarray]]:
        tensors = [contribution(k, 50_000) for _ in range(3)]
        ops = ["sum", "prod" if k == 2 else "sum", "sum"]
        works = [comms[k].all_reduce(x, op=op, async_op=True) for x, op in zip(tensors, ops, strict=True)]
        outcomes: list[Any] = []
        for work in works:
            try:
                outcomes.append(work.wait(timeout=20))
            except WancollError as bad:
                outcomes.append(bad)
        return outcomes, tensors

    for k, (outcomes, tensors) in enumerate(in_threads(member, PEERS, 30)):
        assert isinstance(outcomes[1], CollectiveMismatch), outcomes
        assert untouched(tensors[1], k)
        for op in (0, 2):
            assert not isinstance(outcomes[op], WancollError), outcomes[op]
            assert (tensors[op] == 1111).all()
    reduce_all(comms, range(PEERS))


# ---- a client that writes to a tensor during its call -------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize(("what", "secure"), [("full_exchange", False), ("full_exchange", True), ("broadcast", True)])
def test_who_writes_to_a_tensor_during_its_call_is_out_alone(what: str, secure: bool) -> None:
    """Readers get other bytes than the checksum was of, or than one another. Its own daemon sees what changes."""
    world, writer = 3, 1
    with Cluster(world, fork=True, secure=secure, lanes=2) as cluster:
        comms = join(cluster, range(world), min_world=2)
        tensor = comms[writer].empty(1 << 17, np.float32)  # too small to be exchanged: it stays where it is
        tensor[:] = 1
        arena = comms[writer]._connection.arena
        block = arena.find(tensor.ctypes.data, tensor.nbytes)
        code = f"import mmap; import numpy as np; shared = mmap.mmap({arena._fd}, {block.offset + tensor.nbytes}); "
        code += f"x = np.frombuffer(shared, np.float32, offset={block.offset})\nwhile True:\n    x += 1"
        writing = subprocess.Popen([sys.executable, "-c", code], pass_fds=[arena._fd])

        def call(k: int) -> Receipt:
            x = tensor if k == writer else np.full(1 << 17, 1.0 + k, np.float32)
            if what != "broadcast":
                return comms[k].all_reduce(x, op="sum", algorithm=what)
            return comms[k].broadcast(x, root=comms[k].members.index("m1") if comms[k].world_size == world else 0)

        def member(k: int) -> list[Any]:
            """Call until the writer has been out for five calls."""
            found: list[Any] = []
            until = time.monotonic() + 90
            while time.monotonic() < until and not (found and isinstance(found[-1], WancollError)):
                try:
                    found.append(call(k))
                except OperationAborted:  # its root is out
                    found.append(None)
                except WancollError as bad:
                    found.append(bad)
                if len(found) >= 5 and all(getattr(one, "world_size", 0) == 2 for one in found[-5:]):
                    break
            return found

        try:
            first, written, last = in_threads(member, world, 120)
        finally:
            writing.kill()
            writing.wait()
        assert isinstance(written[-1], Evicted | OutcomeUnknown), written[-1]
        assert "the tensor was written to during the call" in str(written[-1])
        for one, other in zip(first, last, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.digest, one.contributors) == (other.digest, other.contributors)
        assert set(first[-1].contributors) == {"m0", "m2"}
        assert [event.kind for event in cluster.status().events].count("evicted") == 1
        close_all([comms[0], comms[2]])
