"""sync_state through a real cluster: values, strategies, revisions, dtypes, refusals, calls before and after."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import wancoll
from tests.faults.support import MIB, PEERS, cluster_fixture, joined
from tests.later import later
from wancoll.chaos import Cluster, in_threads
from wancoll.client.communicator import Communicator
from wancoll.client.memory.arena import SWAP_BYTES
from wancoll.errors import ArenaFull, ConfigError, OperationAborted
from wancoll.sync.manifest import STRIPE

State = dict[str, Any]


ARENA = (1 << 30) + STRIPE // 2  # can be filled with stripes, and a little more
cluster = cluster_fixture(PEERS, peer_args=[f"--arena-bytes={ARENA}"])


def sync(comms: list[Any], states: list[State], revisions: list[int], **options: Any) -> list[Any]:
    """All members' receipts. An option that is a list has one value for each member."""

    def call(k: int) -> Any:
        mine = {name: value[k] if isinstance(value, list) else value for name, value in options.items()}
        return comms[k].sync_state(states[k], revision=revisions[k], timeout=60, **mine)

    return in_threads(call, len(comms), 90)


def refused(comms: list[Any], states: list[State], revisions: list[int], **options: Any) -> str:
    """The text of the error that all members got; checks that nothing has changed and that the group is usable."""
    before = [snapshot(state) for state in states]

    def call(k: int) -> str:
        mine = {name: value[k] if isinstance(value, list) else value for name, value in options.items()}
        with pytest.raises(ConfigError) as caught:
            comms[k].sync_state(states[k], revision=revisions[k], timeout=60, **mine)
        return str(caught.value)

    texts = in_threads(call, len(comms), 90)
    assert len(set(texts)) == 1, texts
    assert [snapshot(state) for state in states] == before
    check_usable(comms)
    return texts[0]


def check_usable(comms: list[Any]) -> None:
    receipts = in_threads(lambda k: comms[k].all_reduce(np.full(5, 10**k, np.int64), op="sum"), len(comms), 30)
    for receipt in receipts:
        assert receipt.out.tolist() == [sum(10**k for k in range(len(comms)))] * 5


def snapshot(state: State) -> dict[str, bytes]:
    return {key: bytes_of(x) for key, x in state.items()}


def bytes_of(x: Any) -> bytes:
    if hasattr(x, "numpy"):
        x = x.view(__import__("torch").uint8).numpy()
    return np.asarray(x).tobytes()


def numbers(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def every_dtype(seed: int) -> State:
    """One tensor of each dtype, and odd shapes."""
    dtypes = [np.dtype(bool), *map(np.dtype, "bhilBHILefdFD")]
    state: State = {
        name: (numbers(1001, seed) & 1).view(bool) if name == "bool" else numbers(16 * 61, seed).view(name)
        for name in (dtype.name for dtype in dtypes)
    }
    for other in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "datetime64[ns]", "U5", [("a", "<f4"), ("b", "<i2")]):
        dtype = np.dtype(other)
        state[f"x {dtype}"] = (
            numbers(120 * dtype.itemsize, seed).view(dtype)
            if dtype.kind != "U"
            else np.array(["abc", str(seed)], dtype)
        )
    state["scalar"] = np.array(seed, np.int32)
    state["empty"] = np.zeros((0, 3), np.float32)
    state["stack"] = numbers(24, seed).reshape(2, 3, 4)
    return state


def test_every_dtype_and_shape(cluster: Cluster) -> None:
    with joined(cluster, 3) as comms:
        states = [every_dtype(1), every_dtype(1), every_dtype(2)]
        right = snapshot(states[0])
        receipts = sync(comms, states, [1, 1, 1])
        assert [snapshot(state) for state in states] == [right] * 3
        names = tuple(sorted(set(right) - {"empty"}))
        assert [receipt.tensors for receipt in receipts] == [(), (), names]
        total = sum(map(len, right.values()))
        for receipt in receipts:
            assert receipt.holders == (comms[0].name, comms[1].name)
            assert (receipt.revision, receipt.rounds, receipt.epoch) == (1, 1, comms[0].epoch)
            assert (receipt.tensors_moved, receipt.bytes_moved) == (len(names), total)
            assert receipt.contributors == comms[0].members
            assert receipt.bytes_repeated == 0
        assert [receipt.bytes_received for receipt in receipts] == [0, 0, total]
        assert sum(receipt.bytes_sent for receipt in receipts) == total
        check_usable(comms)


def test_all_alike_moves_nothing_and_takes_one_gather(cluster: Cluster) -> None:
    with joined(cluster, 3) as comms:
        states = [every_dtype(1) for _ in comms]
        before = in_threads(lambda k: comms[k].barrier(), 3)[0].seq
        receipts = sync(comms, states, [4, 9, 4])
        assert in_threads(lambda k: comms[k].barrier(), 3)[0].seq == before + 2
        for receipt in receipts:
            assert (receipt.revision, receipt.rounds, receipt.bytes_moved, receipt.tensors) == (9, 0, 0, ())
            assert receipt.holders == comms[0].members


def test_alone(cluster: Cluster) -> None:
    with joined(cluster, 1) as comms:
        state = every_dtype(1)
        right = snapshot(state)
        (receipt,) = sync(comms, [state], [3])
        assert (receipt.revision, receipt.contributors, receipt.bytes_moved) == (3, comms[0].members, 0)
        assert snapshot(state) == right
        assert sync(comms, [{}], [0])[0].revision == 0


@pytest.mark.parametrize("inside", [True, *later(False)])
def test_stripes_come_from_all_holders_and_only_those_that_differ(cluster: Cluster, inside: bool) -> None:
    """Large tensors, in the arena and outside: one differs as a whole, one in two stripes, one not at all."""
    sizes = {"large": 4 * STRIPE + 999, "part": 3 * STRIPE + 1, "same": SWAP_BYTES + 5}
    with joined(cluster, 4) as comms:
        states = [
            {key: comm.empty(n, np.uint8) if inside else np.empty(n, np.uint8) for key, n in sizes.items()}
            for comm in comms
        ]
        for state in states:
            for x in state.values():
                x[...] = numbers(x.size, 7)
        right = snapshot(states[0])
        joiner = states[3]
        joiner["large"][...] = 3
        joiner["part"][STRIPE + 5] ^= 1
        joiner["part"][-1] ^= 1
        addresses = {key: x.ctypes.data for key, x in joiner.items()}
        receipts = sync(comms, states, [2, 2, 2, 1])
        assert [snapshot(state) for state in states] == [right] * 4
        assert addresses == {key: x.ctypes.data for key, x in joiner.items()}
        assert receipts[3].bytes_received == sizes["large"] + STRIPE + 1 == receipts[0].bytes_moved
        assert receipts[3].tensors == ("large", "part")
        sent = [receipt.bytes_sent for receipt in receipts[:3]]
        assert sum(sent) == receipts[3].bytes_received
        assert max(sent) - min(sent) <= STRIPE
        assert min(sent) >= STRIPE
        joiner["large"][:5] = 1  # what is the caller's again can be written, and nobody else sees it
        assert snapshot(states[0]) == right
        check_usable(comms)


def test_several_joiners_and_holders_of_parts(cluster: Cluster) -> None:
    """Who differs in one tensor is a holder of the others."""
    with joined(cluster, 4) as comms:
        states = [{"a": numbers(2 * STRIPE, 1), "b": numbers(2 * STRIPE, 2)} for _ in comms]
        right = snapshot(states[1])
        states[0]["a"][0] ^= 1
        states[2]["b"][:] = 0
        states[3]["a"][:] = states[3]["b"][:] = 0
        receipts = sync(comms, states, [5, 6, 5, 0])
        assert [snapshot(state) for state in states] == [right] * 4
        assert receipts[0].holders == (comms[1].name,)
        assert receipts[0].bytes_sent + receipts[2].bytes_sent > 0
        assert sum(r.bytes_sent for r in receipts) == sum(r.bytes_received for r in receipts) == receipts[0].bytes_moved
        assert [receipt.tensors for receipt in receipts] == [("a",), (), ("b",), ("a", "b")]
        assert receipts[0].tensors_moved == 4


def test_strategies(cluster: Cluster) -> None:
    with joined(cluster, 3) as comms:
        states = [{"x": np.full(10, value)} for value in (1, 2, 3)]
        receipts = sync(comms, states, [9, 9, 4], strategy=["receive-only", "send-only", "majority"])
        assert [state["x"][0] for state in states] == [2, 2, 2]
        assert receipts[0].holders == (comms[1].name,)
        assert "no member's state can win" in refused(comms, states, [1, 1, 1], strategy="receive-only")
        fixed = np.full(10, 5)
        fixed.flags.writeable = False
        states[0] = {"x": fixed}
        sync(comms, states, [2, 1, 1], strategy=["send-only", "majority", "majority"])
        assert states[1]["x"].tolist() == [5] * 10


@pytest.mark.check
def test_who_overwrites_needs_no_memory_for_a_second_state(cluster: Cluster) -> None:
    """Its tensors lie in the arena, of which nothing is left, or outside of it; large ones, and small ones together."""
    with joined(cluster, 2) as comms:
        right = {"inside": numbers(3 * STRIPE + 5, 1), "outside": numbers(STRIPE + 5, 2), "x": numbers(9, 3)}
        mine: State = {"inside": comms[1].empty(3 * STRIPE + 5, np.uint8), "outside": np.zeros(STRIPE + 5, np.uint8)}
        mine["x"] = numbers(9, 3)  # the same: it is fetched, too
        mine["inside"][:] = 7
        room = comms[1].empty(24 * MIB, np.uint8)  # for one stripe on its way outside
        little = comms[1].empty(MIB, np.uint8)  # for gathers
        rest = []
        for size in (STRIPE, MIB):
            with contextlib.suppress(ArenaFull):
                while True:
                    rest.append(comms[1].empty(size, np.uint8))
        del little
        texts = in_threads(lambda k: failing(comms[k], (right, mine)[k], k, "receive-only"), 2, 90)
        assert all("the arena has no room" in text for text in texts), texts
        assert set(mine["inside"]) == {7}
        del room
        receipts = sync(comms, [right, mine], [1, 0], strategy=["majority", "overwrite"])
        assert snapshot(mine) == snapshot(right)
        total = sum(map(len, snapshot(right).values()))
        assert (receipts[1].bytes_received, receipts[0].bytes_sent, receipts[1].rounds) == (total, total, 1)
        del rest
        check_usable(comms)


def failing(comm: Any, state: State, k: int, strategy: str) -> str:
    with pytest.raises(OperationAborted) as caught:
        comm.sync_state(state, revision=1 - k, strategy=strategy if k else "majority", timeout=60)
    return str(caught.value)


@pytest.mark.check
def test_ten_thousand_tiny_tensors(cluster: Cluster) -> None:
    with joined(cluster, 3) as comms:
        states = [
            {f"layer/{i}": np.full(1 + i % 50, k * 10_000 + i, np.float32) for i in range(10_000)} for k in (0, 0, 1)
        ]
        right = snapshot(states[0])
        receipts = sync(comms, states, [1, 1, 0])
        assert snapshot(states[2]) == right
        assert receipts[2].bytes_received == receipts[0].bytes_moved == sum(map(len, right.values()))
        assert receipts[0].tensors_moved == 10_000
        assert receipts[2].rounds == 1


def test_torch_and_numpy_mix(cluster: Cluster) -> None:
    torch = pytest.importorskip("torch")
    with joined(cluster, 2) as comms:
        model = torch.nn.Linear(300, 200)
        stale = {key: np.zeros(tuple(x.shape), np.float32) for key, x in model.state_dict().items()}
        mine = {**model.state_dict(), "half": torch.ones(5, dtype=torch.bfloat16), "on": torch.tensor(True)}
        mine["phase"] = torch.ones(3, dtype=torch.complex64)
        theirs = {**stale, "half": np.zeros(5, ml_dtypes.bfloat16), "on": np.array(False)}
        theirs["phase"] = np.zeros(3, np.complex64)
        sync(comms, [mine, theirs], [1, 0])
        assert theirs["weight"].tobytes() == model.weight.detach().numpy().tobytes()
        assert theirs["half"].astype(np.float32).tolist() == [1.0] * 5
        assert theirs["on"]
        theirs["weight"][:] = 4.0
        sync(comms, [mine, theirs], [1, 2])
        assert (model.weight == 4.0).all()


def test_tied_weights(cluster: Cluster) -> None:
    with joined(cluster, 2) as comms:
        one, other = np.arange(100.0), np.zeros(100)
        sync(comms, [{"a": one, "tied": one}, {"a": other, "tied": other}], [1, 0])
        assert other.tolist() == one.tolist()
        text = refused(comms, [{"a": one, "tied": one}, {"a": other, "tied": other.copy()}], [1, 0])
        assert "'tied'" in text
        assert "expected the memory of 'a'" in text


X = np.zeros((4, 5), np.float32)


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        ({"x": np.zeros((5, 4), np.float32), "y": X}, ("'x'", "expected float32[4, 5]", "got float32[5, 4]")),
        ({"y": X}, ("lacks a tensor", "'x'", "got no such key")),
        ({"x": X.copy(), "y": X, "z": X.copy()}, ("a tensor too many", "'z'", "got float32[4, 5]")),
    ],
)
def test_states_that_do_not_fit_are_named_on_all_members(
    cluster: Cluster, state: State, texts: tuple[str, ...]
) -> None:
    with joined(cluster, 3) as comms:
        states = [{"x": X.copy(), "y": X.copy()} for _ in range(2)]
        text = refused(comms, [*states, state], [1, 1, 0])
        for part in (f"{comms[2].name}, sync_state(state[", f"as on {comms[0].name}", *texts):
            assert part in text


def frozen() -> np.ndarray:
    x = np.zeros(3)
    x.flags.writeable = False
    return x


def overlapping() -> State:
    x = np.zeros(10)
    return {"a": x[:6], "b": x[4:]}


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (lambda c: c.sync_state([X], revision=1), ("state is no mapping", "got list")),
        (lambda c: c.sync_state({1: X}, revision=1), ("a key is no string", "got 1")),
        (lambda c: c.sync_state({"x": X.T}, revision=1), ("state['x']", "not C-contiguous", "x.T")),
        (lambda c: c.sync_state({"x": frozen()}, revision=1), ("state['x']", "read-only", "strategy='send-only'")),
        (lambda c: c.sync_state({"x": b"abc"}, revision=1), ("read-only", "got bytes")),
        (lambda c: c.sync_state({"x": 5}, revision=1), ("state['x']", "cannot be synchronised", "got int")),
        (lambda c: c.sync_state({"x": np.array([None])}, revision=1), ("Python objects",)),
        (lambda c: c.sync_state({"x": np.ma.zeros(3)}, revision=1), ("a plain array",)),
        (lambda c: c.sync_state(overlapping(), revision=1), ("share a part", "'a' and 'b'")),
        (lambda c: c.sync_state({"x": X}, revision=-1), ("revision cannot be used", "got -1")),
        (lambda c: c.sync_state({"x": X}, revision=2**63), ("revision cannot be used",)),
        (lambda c: c.sync_state({"x": X}, revision=1, strategy="all"), ("strategy", "receive-only", "'all'")),
        (lambda c: c.sync_state({"x": X}, revision=1, on_failure="no"), ("on_failure",)),
        (lambda c: c.sync_state({"x": X}, revision=1, timeout=-1), ("timeout",)),
    ],
)
def test_arguments_that_cannot_be_used(
    cluster: Cluster, call: Callable[[Communicator], Any], texts: tuple[str, ...]
) -> None:
    with joined(cluster, 1) as (comm,):
        with pytest.raises(ConfigError) as caught:
            call(comm)
        for text in texts:
            assert text in str(caught.value)
        assert not comm.pending


def test_memory_of_a_pending_call_is_refused(cluster: Cluster) -> None:
    with joined(cluster, 2) as comms:
        x = np.ones(1000)
        work = comms[0].all_reduce(x, op="sum", async_op=True)
        with pytest.raises(ConfigError, match=r"in use by a call.*memory of call"):
            comms[0].sync_state({"x": x}, revision=1)
        comms[1].all_reduce(np.ones(1000), op="sum")
        work.wait(30)


def test_calls_before_and_after_go_on(cluster: Cluster) -> None:
    """Async calls that were posted before, sends and recvs on the same communicator, and other groups beside."""
    with joined(cluster, 3) as comms, joined(cluster, 3) as others:
        states = [{"x": numbers(3 * STRIPE, k)} for k in (0, 0, 1)]
        right = snapshot(states[0])

        def member(k: int) -> None:
            y = np.full(MIB, 10**k, np.int64)
            works = [comms[k].all_reduce(y, out=np.empty_like(y), op="sum", async_op=True) for _ in range(3)]
            z = np.full(10, k)
            sent = comms[k].send(z, (k + 1) % 3, async_op=True)
            comms[k].sync_state(states[k], revision=5, timeout=60)
            got = np.empty_like(z)
            comms[k].recv(got, (k + 2) % 3, timeout=30)
            sent.wait(30)
            assert got.tolist() == [(k + 2) % 3] * 10
            for work in works:
                assert set(work.wait(30).out.tolist()) == {111}

        def other(k: int) -> None:
            for _ in range(20):
                assert set(others[k].all_reduce(np.full(1000, 10**k, np.int64), op="sum").out.tolist()) == {111}

        in_threads(lambda k: member(k) if k < 3 else other(k - 3), 6, 90)
        assert [snapshot(state) for state in states] == [right] * 3


def test_a_timeout_loses_nothing(cluster: Cluster) -> None:
    with joined(cluster, 2) as comms:
        states = [{"x": numbers(2 * STRIPE + 1, k)} for k in range(2)]
        right, stale = snapshot(states[0]), snapshot(states[1])
        with pytest.raises(TimeoutError, match=r"sync_state of group.*still pending.*goes on") as caught:
            comms[1].sync_state(states[1], revision=1, timeout=0.05)
        assert snapshot(states[1]) == stale
        work = caught.value.work  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            work.wait(0)
        receipts = in_threads(
            lambda k: work.wait(60) if k else comms[0].sync_state(states[0], revision=2, timeout=60), 2, 90
        )
        assert snapshot(states[1]) == right
        assert receipts[1] == work.wait()
        assert isinstance(receipts[1], wancoll.SyncReceipt)
        assert receipts[1].bytes_received == 2 * STRIPE + 1
        check_usable(comms)


def test_a_joiner_catches_up_when_it_is_admitted(cluster: Cluster) -> None:
    with joined(cluster, 2) as comms:
        states = [{"x": numbers(STRIPE + 5, 1)} for _ in comms]
        mine = {"x": np.zeros(STRIPE + 5, np.uint8)}

        def member(k: int) -> Any:
            if k == 2:
                with cluster.connect(2, group=comms[0].group, name="late", start_world=2, timeout=30) as late:
                    return late.sync_state(mine, revision=0, strategy="receive-only", timeout=60)
            while comms[k].world_size == 2:
                comms[k].update_membership(30)
            return comms[k].sync_state(states[k], revision=1, timeout=60)

        receipts = in_threads(member, 3, 90)
        assert mine["x"].tobytes() == states[0]["x"].tobytes()
        assert [receipt.tensors for receipt in receipts] == [(), (), ("x",)]
        assert set(receipts[0].contributors) == {comms[0].name, comms[1].name, "late"}


def test_bytes_that_are_not_those_of_the_digest_are_not_taken(cluster: Cluster) -> None:
    """A holder changes its tensors after it has said what they are: found out, and another one asked."""
    with joined(cluster, 3) as comms:
        for holders in (2, 1):
            states = [{"x": numbers(STRIPE, 1), "y": numbers(999, 1), "z": numbers(9, 1)} for _ in range(holders + 1)]
            for x in states[-1].values():
                x[...] = 0
            right, changed = snapshot(states[0]), threading.Event()

            def member(k: int) -> Any:
                if k > holders:  # noqa: B023
                    return None
                revision = 1 if k < holders else 0  # noqa: B023
                if k == holders:  # noqa: B023
                    assert changed.wait(60)  # noqa: B023 - else it may have all before that
                if k:
                    return comms[k].sync_state(states[k], revision=revision, timeout=60)  # noqa: B023
                with pytest.raises(TimeoutError) as caught:
                    comms[0].sync_state(states[0], revision=revision, timeout=0)  # noqa: B023
                if holders == 2:  # noqa: B023
                    states[0]["x"][5] ^= 1  # noqa: B023
                states[0]["y"][5] ^= 1  # noqa: B023
                changed.set()  # noqa: B023
                return caught.value.work.wait(60)  # type: ignore[attr-defined]

            if holders == 1:
                comms[2].close()
                in_threads(lambda k: comms[k].barrier(), 2, 30)
                with pytest.raises(OperationAborted, match=r"nobody is left who could send.*sync_state again"):
                    in_threads(member, 2, 90)
                assert not any(x.any() for x in states[-1].values())
                continue
            receipts = in_threads(member, 3, 90)
            assert snapshot(states[-1]) == right
            assert receipts[2].rounds == 2
            assert receipts[2].bytes_received == sum(map(len, right.values()))


@pytest.mark.parametrize("full", [0, *later(1)])
def test_an_arena_without_room_is_everybodys_error(cluster: Cluster, full: int) -> None:
    """The joiner cannot receive, or the only holder cannot send: both hear of it, and nothing hangs."""
    with joined(cluster, 2) as comms:
        arena = comms[full]._connection.arena
        hog = comms[full].empty(arena.nbytes - arena.nbytes // 4, np.uint8)
        rest = []
        with contextlib.suppress(ArenaFull):
            while True:
                rest.append(comms[full].empty(STRIPE, np.uint8))
        states = [{"x": numbers(2 * STRIPE, k)} for k in range(2)]
        before = [snapshot(state) for state in states]

        def call(k: int) -> str:
            with pytest.raises(OperationAborted) as caught:
                comms[k].sync_state(states[k], revision=1 - k, timeout=60)
            return str(caught.value)

        one, other = in_threads(call, 2, 90)
        assert one == other
        assert (
            "nobody is left who could send" if full == 0 else f"{comms[1].name}, sync_state: a member cannot"
        ) in one
        assert full == 0 or "the arena has no room" in one
        assert [snapshot(state) for state in states] == before
        del hog, rest
        sync(comms, states, [1, 0])
        assert snapshot(states[1]) == before[0]
        check_usable(comms)


@pytest.mark.nightly
def test_incoming_memory_is_given_back(cluster: Cluster) -> None:
    """What a sync took once is not kept."""
    with joined(cluster, 2) as comms:
        arena = comms[1]._connection.arena
        states = [{"x": comm.empty(20 * STRIPE, np.uint8), "y": np.zeros(STRIPE, np.uint8)} for comm in comms]
        for turn in range(2):
            for k, state in enumerate(states):
                state["x"][...], state["y"][...] = k, k
            sync(comms, states, [2, 1])
            assert (states[1]["x"] == 0).all(), turn
        check_usable(comms)
        assert arena.resident_bytes() < (20 + 18) * STRIPE  # the array, and what may stay warm


@pytest.mark.nightly
def test_offsets_beyond_four_gib(cluster: Cluster) -> None:
    """Large and almost empty, so that it takes no memory: only the stripes with something in them move."""
    size = (4 << 30) + 3 * STRIPE + 12345
    with joined(cluster, 2) as comms:
        states = [{"x": np.zeros(size, np.uint8)} for _ in comms]
        spots = [7, (4 << 30) - 1, (4 << 30) + 5, size - 1]
        for value, spot in enumerate(spots):
            states[0]["x"][spot] = value + 1
        receipts = sync(comms, states, [1, 0])
        assert [states[1]["x"][spot] for spot in spots] == [1, 2, 3, 4]
        assert receipts[1].bytes_received == 3 * STRIPE + 12345
        assert states[1]["x"][:: 1 << 20].sum() == 0
