"""sync_state with tensors of devices, through real daemons: all have the state that won, or nothing is changed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.client.tools import in_thread, refused
from tests.cuda.test_order import array, same
from tests.faults.support import close_all, cluster_fixture, join
from tests.later import later
from wancoll.chaos import Cluster, in_threads
from wancoll.errors import ConfigError, DeviceError, OperationAborted, TimeoutError, WancollError
from wancoll.sync.manifest import STRIPE

LARGE = STRIPE + 4 * 1001


cluster = cluster_fixture(3, after="standin")


@pytest.fixture
def comms(cluster: Cluster, gpu: Any) -> Iterator[list[Any]]:
    comms = join(cluster, range(3))
    yield comms
    close_all(comms)


@functools.cache
def values(of: int) -> dict[str, Any]:
    rng = np.random.default_rng(of)
    return {
        "large": rng.integers(0, 1 << 30, LARGE // 4).astype(np.float32),
        "half": rng.random(7).astype(ml_dtypes.bfloat16),
        "complex": rng.random((3, 5)).astype(np.complex128),
        "counters": rng.integers(0, 100, (2, 2)),
        "nothing": np.zeros(0, np.int8),
        "shared": np.full(11, 3, np.int16),  # by all: never moved
    }


class State:
    """One member's: on devices in several ways, or in host memory."""

    def __init__(self, gpu: Any, kind: str, of: int) -> None:
        self.kind, self.gpu, found = kind, gpu, values(of)
        self.tensors: dict[str, Any] = {key: wanted.copy() for key, wanted in found.items()} if kind == "host" else {}
        if kind == "host":
            return
        styles = {"complex": "interface", "counters": "per thread", "nothing": "interface"}
        for number, (key, wanted) in enumerate(found.items()):
            style = styles.get(key, kind)
            x = array(gpu, np.zeros_like(wanted), style, device=number % 2)
            x.put(wanted)  # late
            self.tensors[key] = x

    def check(self, of: int) -> None:
        for key, wanted in values(of).items():
            x = self.tensors[key]
            same((x if self.kind == "host" else x.get()).view(np.uint8), wanted.view(np.uint8))


def sync(comms: list[Any], states: list[State], revisions: list[int], timeout: float = 50) -> list[Any]:
    def one(k: int) -> Any:
        try:
            return comms[k].sync_state(states[k].tensors, revision=revisions[k], timeout=timeout)
        except WancollError as bad:
            return bad

    return in_threads(one, len(comms), 60)


@pytest.mark.parametrize("kinds", [("interface", "dlpack", "host"), *later((("host", "managed", "legacy"),))])
def test_who_differs_gets_the_state(gpu: Any, comms: list[Any], kinds: tuple[str, ...]) -> None:
    """What was queued before the call is the state, or still reads the old one; what is queued after has the new."""
    states = [State(gpu, kind, k) for k, kind in enumerate(kinds)]
    early = None if kinds[1] == "host" else states[1].tensors["counters"].snapshot()
    receipts = sync(comms, states, [4, 7, 7])
    assert [receipt.revision for receipt in receipts] == [7, 7, 7], receipts
    winner = receipts[0].holders[0]
    of = int(winner.removeprefix("m"))
    for state in states:
        state.check(of)
    assert [sorted(receipt.tensors) for receipt in receipts] == [
        [] if k == of else ["complex", "counters", "half", "large"] for k in range(3)
    ]
    if early is not None:
        same(states[1].tensors["counters"].seen(early), values(1)["counters"])
    assert all(receipt.tensors_moved == 0 for receipt in sync(comms, states, [9, 9, 9]))


@pytest.mark.check
def test_memory_that_cannot_be_pinned(gpu: Any, comms: list[Any]) -> None:
    gpu.lib.standin_most_registered(0)
    states = [State(gpu, "dlpack", k) for k in range(3)]
    assert [receipt.revision for receipt in sync(comms, states, [1, 1, 5])] == [5, 5, 5]
    for state in states:
        state.check(2)


def before_stripes(comm: Any, act: Any) -> None:
    """Call *act* before each stripe that is to be sent is read. The first look at tensors is the call's own."""
    staging, looks = comm._connection.staging, []
    fill, check = staging.fill, staging.check

    def looking(regions: Any) -> None:
        looks.append(regions)
        check(regions)

    def filling(*arguments: Any) -> Any:
        if len(looks) > 1:
            act()
        return fill(*arguments)

    staging.check, staging.fill = looking, filling


def test_nothing_is_written_before_all_have_it(gpu: Any, comms: list[Any]) -> None:
    """A member whose tensor cannot be read fails for all; nobody's tensor has changed."""
    states = [State(gpu, "dlpack", k) for k in range(3)]

    def broken() -> None:
        raise DeviceError("the device failed", who="cuda:0")

    before_stripes(comms[2], broken)
    outcomes = sync(comms, states, [1, 1, 5])
    for k, (outcome, state) in enumerate(zip(outcomes, states, strict=True)):
        assert isinstance(outcome, OperationAborted), outcome
        state.check(k)


def test_a_device_that_does_not_get_on(gpu: Any, comms: list[Any]) -> None:
    states = [State(gpu, "dlpack", k) for k in range(3)]
    x = states[1].tensors["large"]
    gpu.hold(x)
    others = in_thread(lambda: sync([comms[0], comms[2]], [states[0], states[2]], [1, 5]))
    with refused("did not hand the tensor over in time", "nothing was sent", error=TimeoutError) as caught:
        comms[1].sync_state(states[1].tensors, revision=1, timeout=0.2)
    assert caught.value.work is None
    gpu.lib.standin_release()
    assert comms[1].sync_state(states[1].tensors, revision=1, timeout=50).revision == 5
    assert [receipt.revision for receipt in others()] == [5, 5]
    for state in states:
        state.check(2)


@pytest.mark.check
def test_a_stripe_that_comes_late(gpu: Any, comms: list[Any]) -> None:
    """The call's time is over, and nothing is lost: its handle goes on."""
    states = [State(gpu, "dlpack", k) for k in range(3)]
    held: list[Any] = []

    def hold() -> None:
        if not held:
            held.append(states[2].tensors["large"])
            gpu.hold(held[0])

    before_stripes(comms[2], hold)
    others = in_thread(lambda: sync(comms[:2], states[:2], [1, 1]))
    with refused("is still pending", error=TimeoutError) as caught:
        comms[2].sync_state(states[2].tensors, revision=5, timeout=4)  # enough for what is not held
    with refused("is still pending", error=TimeoutError):
        caught.value.work.wait(0.1)
    gpu.lib.standin_release()
    assert caught.value.work.wait(50).revision == 5
    assert [receipt.revision for receipt in others()] == [5, 5]
    for state in states:
        state.check(2)


def test_what_cannot_be_synchronised(gpu: Any, comms: list[Any]) -> None:
    x = array(gpu, np.zeros(8, np.float32))
    inside = array(gpu, np.zeros(2, np.float32))
    inside.address = x.address + 8
    with refused("two tensors share a part of their memory"):
        comms[0].sync_state({"a": x, "b": inside}, revision=1)
    freed = array(gpu, np.zeros(8, np.float32))
    gpu.frees.pop()()
    with refused("unknown to this process's CUDA driver", error=ConfigError):
        comms[0].sync_state({"a": freed}, revision=1)
