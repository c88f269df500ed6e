"""sync_state where a member is lost between two of its gathers: what the caller said of failures counts there, too."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from wancoll.client.communicator import Communicator
from wancoll.client.syncing.state import tensors_of
from wancoll.client.syncing.sync_state import SyncWork
from wancoll.collective import Receipt
from wancoll.errors import OperationAborted, TimeoutError
from wancoll.sync.manifest import Header, pack_header, unpack_header


class Gathered:
    """A gather that has committed: what each contributor gave, in rank order."""

    finished = True

    def __init__(self, given: Mapping[str, bytes]) -> None:
        self._given = given

    def wait(self) -> Receipt:
        names = tuple(self._given)
        out = np.frombuffer(b"".join(self._given.values()), np.uint8)
        return Receipt(out, "g/1", 1, 1, names, len(names), "", 1, "ring", 0, 0.0)


class Gathers:
    """The first gather has the other member's header, which differs; then it is lost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, array: Any, **options: Any) -> Any:
        self.calls += 1
        mine = array.tobytes()
        if self.calls > 1:
            return Gathered({"me": mine})
        header = unpack_header(mine, "me")
        other = Header(header.revision - 1, "majority", b"another state ..", header.nbytes)
        return Gathered({"me": mine, "other": pack_header(other)})


def synchronise(comm: Communicator, on_failure: str) -> Any:
    x = np.arange(10.0)
    work = SyncWork(Gathers(), comm._connection, tensors_of({"x": x}, changing=True), 3, "majority", on_failure)
    try:
        return work.wait(10)
    finally:
        assert (x == np.arange(10.0)).all()


def test_the_others_go_on(held: Communicator) -> None:
    receipt = synchronise(held, "retry")
    assert (receipt.revision, receipt.contributors, receipt.rounds) == (3, ("me",), 0)


def test_or_fail_if_that_was_asked_for(held: Communicator) -> None:
    with pytest.raises(OperationAborted, match=r"membership changed; expected all of me, other; got other left or was"):
        synchronise(held, "raise")


def test_who_overwrites_is_told_of_the_mixture_by_a_timeout_too(held: Communicator) -> None:
    tensors = tensors_of({"x": np.arange(10.0)}, changing=True)
    work = SyncWork(Gathers(), held._connection, tensors, 3, "overwrite", "retry")
    assert work._late().hint == "nothing is lost: .work.wait() goes on waiting"
    work._rounds = 1
    assert "hold a part of another state; .work.wait() goes on waiting" in work._late().hint
    work._answer = OperationAborted("the holder is lost", hint="all tensors are as they were")
    with pytest.raises(OperationAborted) as failed:
        work.wait(1)
    assert failed.value.hint.endswith("another state: call sync_state again; the others' tensors are as they were")


def test_several_threads_may_wait_for_it(held: Communicator) -> None:
    """One of them goes on with it; the others have its receipt then, or their own time is over."""
    work = SyncWork(
        Gathers(), held._connection, tensors_of({"x": np.arange(10.0)}, changing=True), 3, "majority", "retry"
    )
    entered, go, steps = threading.Event(), threading.Event(), work._steps

    def slow() -> Generator[Any, None, Any]:
        entered.set()
        assert go.wait(30)
        return (yield from steps)

    work._steps = slow()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(work.wait, 30)
        assert entered.wait(30)
        with pytest.raises(TimeoutError, match=r"still pending.*\.work\.wait\(\) goes on"):
            work.wait(0)
        second = pool.submit(work.wait, 30)
        go.set()
        assert first.result(30) is second.result(30)
    assert work.wait(0).contributors == ("me",)
