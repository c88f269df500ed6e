"""Calls with a codec on tensors of devices: they encode and decode there, and all is as with tensors of the host."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import wancoll
from tests.client.fake_daemon import FakeDaemon
from tests.client.tools import joined_worlds, numpy_kind
from tests.cuda.test_order import array
from tests.faults.support import (
    PEERS,
    Background,
    attempt,
    close_all,
    cluster_fixture,
    join,
    repair,
)
from tests.later import later
from tests.schedule import codec as reference
from wancoll.chaos import Cluster, in_threads
from wancoll.client.communicator import Communicator
from wancoll.client.cuda import encode
from wancoll.collective import Codec, DType, Kind
from wancoll.errors import WorldTooSmall
from wancoll.limits import BLOCK
from wancoll.schedule.build import takes
from wancoll.schedule.choose import ALGORITHMS
from wancoll.schedule.numbers import storage

WORLD = 3
ALL = [(codec, dtype) for codec in Codec for dtype in DType if takes(codec, dtype)]
PAIRS = [(codec, dtype) for codec, dtype in ALL if codec in encode.CODECS]
STYLES = ("interface", "dlpack", "legacy", "per thread", "managed")


@pytest.fixture(scope="module")
def worlds(standin: Any) -> Iterator[dict[int, list[Any]]]:
    with Cluster(WORLD, fork=True) as cluster, joined_worlds(cluster, WORLD) as groups:
        yield groups


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    found: list[str] = []
    run = encode.Codecs._run

    def counted(self: Any, stream: Any, launch: Any, *rest: Any) -> None:
        found.append(launch.kernel)
        run(self, stream, launch, *rest)

    monkeypatch.setattr(encode.Codecs, "_run", counted)
    return found


def values(dtype: DType, count: int, seed: int) -> Any:
    x = np.random.default_rng(seed).standard_normal(count)
    if count > 8:
        x[3], x[count // 2] = np.inf, -np.nan
    return x.astype(numpy_kind(dtype))


class Member:
    """One member's calls: with tensors of the host where *gpu* is None."""

    def __init__(self, comm: Any, gpu: Any, dtype: DType, style: str = "dlpack") -> None:
        self.comm, self.gpu, self.dtype = comm, gpu, dtype
        self.style = "dlpack" if style == "interface" and dtype is DType.bfloat16 else style

    def tensor(self, of: Any) -> Any:
        if self.gpu is None:
            return of.copy()
        x = array(self.gpu, np.zeros_like(of), self.style)
        x.put(of)
        return x

    def bytes(self, x: Any) -> bytes:
        return bytes((x.get() if self.gpu is not None else x).tobytes())

    def run(self, count: int, codec: str, **how: Any) -> list[Any]:
        """In place, into out, several tensors as one, and twice with feedback: all bytes, and what receipts say."""
        mine = [values(self.dtype, n, 10 * self.comm.rank + k) for k, n in enumerate((count, count, 7, 131))]
        x, y, a, b = (self.tensor(each) for each in mine)
        out = self.tensor(np.zeros_like(mine[0]))
        feedback, how = wancoll.ErrorFeedback(), {"codec": codec, "op": "avg", **how}
        receipts = [self.comm.all_reduce(x, out, **how), self.comm.all_reduce(x, **how)]
        receipts += self.comm.all_reduce_many([y, a, b], **how).receipts
        if how.get("rounding") is None:
            for _ in range(2):
                z = self.tensor(mine[1])
                receipts.append(self.comm.all_reduce(z, feedback=feedback, name="z", **how))
                receipts += self.comm.all_reduce_many([z, b, a], feedback=feedback, name="m", **how).receipts
        state = feedback.state_dict()
        found = [self.bytes(each) for each in (x, y, a, b, out)]
        return [*found, *((name, state[name].tobytes()) for name in sorted(state)), [each.digest for each in receipts]]


def check(
    worlds: dict[int, list[Any]], gpu: Any, world: int, dtype: DType, count: int, codec: Codec, **how: Any
) -> None:
    comms = worlds[world]
    host = in_threads(lambda rank: Member(comms[rank], None, dtype).run(count, codec.name, **how), world, 60)
    for turn in range(2):
        mixed = in_threads(
            lambda rank, turn=turn: Member(
                comms[rank], gpu if (rank + turn) % 2 == 0 else None, dtype, STYLES[(rank + count + turn) % len(STYLES)]
            ).run(count, codec.name, **how),
            world,
            60,
        )
        assert mixed == host
    gc.collect()


@pytest.mark.parametrize(("codec", "dtype"), ALL, ids=[f"{codec.name}-{dtype.name}" for codec, dtype in ALL])
def test_members_with_devices_and_without_get_the_same_bytes(
    worlds: dict[int, list[Any]], kernels: Any, launched: list[str], codec: Codec, dtype: DType
) -> None:
    """Also residuals and digests; codecs without kernels are the host's."""
    check(worlds, kernels, 3, dtype, 1021, codec)
    assert {name.split("_")[0] for name in launched} == (
        {"encode", "decode", "feed", "lost"} if codec in encode.CODECS else set()
    )


@pytest.mark.parametrize("count", [0, 1, 128, BLOCK // 4 + 1])
@pytest.mark.parametrize("world", [1, 2, *later(3)])
def test_worlds_and_sizes(worlds: dict[int, list[Any]], kernels: Any, world: int, count: int) -> None:
    check(worlds, kernels, world, DType.float32, count, Codec.int8)


@pytest.mark.parametrize("algorithm", ALGORITHMS[Kind.all_reduce])
def test_algorithms(worlds: dict[int, list[Any]], kernels: Any, algorithm: str) -> None:
    check(worlds, kernels, 3, DType.float32, 3001, Codec.fp8, algorithm=algorithm)


def test_stochastic_rounding_is_the_hosts(worlds: dict[int, list[Any]], kernels: Any, launched: list[str]) -> None:
    """Its random bits depend on the operation's number, which the daemon gives. Results are decoded on the device."""
    comms, seqs = worlds[2], []

    def once(gpu: Any) -> list[Any]:
        def run(rank: int) -> Any:
            x = Member(comms[rank], gpu, DType.float32)
            tensor = x.tensor(values(DType.float32, 1000, rank))
            receipt = comms[rank].all_reduce(tensor, codec="int8", rounding="stochastic", seed=5)
            return receipt.seq, x.bytes(tensor)

        found = in_threads(run, 2, 60)
        seqs.append(found[0][0])
        assert found[0] == found[1]
        return found

    once(None)
    once(kernels)
    assert seqs[1] == seqs[0] + 1
    assert set(launched) == {"decode_int8_f32"}


# ---- what lies in the arena -----------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "dtype"), PAIRS, ids=[f"{codec.name}-{dtype.name}" for codec, dtype in PAIRS])
def test_the_arena_has_encoded_bytes(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon, codec: Codec, dtype: DType
) -> None:
    """The input is told as it comes; the result goes to the device as it becomes final, and is decoded there."""
    count = (3 * BLOCK + 4) // dtype.itemsize
    mine = np.random.default_rng(1).standard_normal(count).astype(numpy_kind(dtype))
    x, out = array(gpu, np.zeros_like(mine), "dlpack"), array(gpu, np.zeros_like(mine), "dlpack")
    x.put(mine)
    work = held.all_reduce(x, out, codec=codec.name, async_op=True)
    post = manual.next_post()
    assert (post.input_coded, post.result_coded) == (True, True)
    manual.input_buffer(post)  # waits
    arena = manual.bytes[post.input_buffer : post.input_buffer + manual.memory(post)[0]]
    stored = mine.view(storage(dtype))
    assert arena.tobytes() == reference.encode(codec, dtype, stored).tobytes()
    wanted = np.random.default_rng(2).standard_normal(count).astype(numpy_kind(dtype)).view(storage(dtype))
    result = reference.encode(codec, dtype, wanted)
    manual.result_buffer(post)[:] = 0xEE  # of an attempt that came to nothing
    manual.show(post, 1)
    work.done()
    block = reference.coded_bytes(codec, BLOCK // dtype.itemsize)
    for first in range(4):  # what is not shown yet is not copied
        manual.result_buffer(post)[first * block : (first + 1) * block] = result[first * block : (first + 1) * block]
        manual.show(post, 2, first, first + 1)
        work.done()
        gpu.lib.standin_drain()
    manual.commit(post, attempts=2)
    work.wait(20)
    decoded = reference.decode(codec, dtype, result, count)
    assert out.get().tobytes() == decoded.tobytes()
    assert x.get().tobytes() == mine.tobytes()


def test_what_failed_leaves_tensors_and_residuals(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon
) -> None:
    mine = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x, feedback = array(gpu, mine), wancoll.ErrorFeedback()
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", async_op=True)
    manual.answer(manual.next_post())
    work.wait(20)
    before, result = feedback.residual("x"), x.get()
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", async_op=True)
    post = manual.next_post()
    manual.input_buffer(post)
    manual.show(post, 1)
    work.done()
    manual.fail(post)
    with pytest.raises(WorldTooSmall):
        work.wait(20)
    assert x.get().tobytes() == result.tobytes()
    assert feedback.residual("x").tobytes() == before.tobytes()


@pytest.mark.parametrize("dtype", [DType.float32, DType.float64, DType.float16, DType.bfloat16])
def test_a_tensor_that_came_too_late_is_the_residual(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon, dtype: DType
) -> None:
    """All of it, the residual of before included; what is not finite is not."""
    mine, found = values(dtype, 1000, 3), []
    for on_device in (True, False):
        feedback = wancoll.ErrorFeedback()
        for counted in (True, False):
            x = array(gpu, mine, "dlpack") if on_device else mine.copy()
            work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", grace=1.0, async_op=True)
            post = manual.next_post()
            assert (post.input_coded, post.result_coded) == (True, False)
            manual.compute(post)
            manual.drop(post)
            manual.send(replace(manual.result(post), counted=counted))
            work.wait(20)
            found.append(feedback.residual("x").tobytes())
    assert found[:2] == found[2:]
    lost, whole = (np.frombuffer(each, np.float64 if dtype is DType.float64 else np.float32) for each in found[:2])
    expected = mine.astype(lost.dtype) + lost
    expected[~np.isfinite(expected)] = 0
    assert whole.tobytes() == expected.tobytes()


def test_a_result_that_comes_before_the_input_was_read(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon
) -> None:
    """Its place is the tensor's: all of that was to be kept, and is."""
    feedback, mine = wancoll.ErrorFeedback(), np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x = array(gpu, np.zeros_like(mine))
    gpu.hold(x)
    x.put(mine)
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", grace=1.0, async_op=True)
    post = manual.next_post()
    manual.result_buffer(post).view(np.float32)[:] = 7
    manual.drop(post)
    manual.send(replace(manual.result(post), counted=False))
    work.wait(20)
    gpu.lib.standin_release()
    assert (x.get() == 7).all()
    assert feedback.residual("x").tobytes() == mine.tobytes()


def test_memory_of_a_call_that_failed_is_free_behind_its_kernels(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon
) -> None:
    """They run long after: what they write to must not be another call's by then."""
    feedback, mine = wancoll.ErrorFeedback(), np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x, y = array(gpu, mine), array(gpu, 2 * mine)
    gpu.hold(x)
    x.put(3 * mine)
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", async_op=True)
    manual.fail(manual.next_post())
    with pytest.raises(WorldTooSmall):
        work.wait(20)
    del work
    gc.collect()
    works = [held.all_reduce(y, codec="int8", feedback=feedback, name="y", async_op=True)]
    post = manual.next_post()
    gpu.lib.standin_release()
    manual.answer(post)
    works[0].wait(20)
    assert feedback.names == ("y",)
    assert feedback.residual("y").tobytes() == (2 * mine - through(2 * mine)).tobytes()
    assert x.get().tobytes() == (3 * mine).tobytes()


def test_a_residual_can_be_read_while_streams_wait(
    kernels: Any, gpu: Any, held: Communicator, manual: FakeDaemon
) -> None:
    """They wait for a result, which another thread brings: who reads holds nobody up."""
    feedback, mine = wancoll.ErrorFeedback(), np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x = array(gpu, mine, "legacy")
    work = held.all_reduce(x, codec="int8", feedback=feedback, name="x", async_op=True)
    manual.answer(manual.next_post())
    work.wait(20)
    of = feedback.residual("x")
    y, z = array(gpu, mine, "legacy"), array(gpu, mine, "legacy")
    work = held.all_reduce(y, codec="int8", async_op=True)
    work.wait_stream(1, timeout=20)
    later_work = held.all_reduce(z, codec="int8", feedback=feedback, name="z", async_op=True)
    manual.wait_for_posts(2)
    first, second = list(manual.posts)
    timer = threading.Timer(0.3, lambda: (manual.answer(first), manual.answer(second)))
    timer.start()
    assert feedback.residual("x").tobytes() == of.tobytes()
    work.wait(20)
    later_work.wait(20)
    timer.join()
    assert gpu.waiting() == 0


def test_without_memory_for_it_the_host_encodes(kernels: Any, gpu: Any, comm: Communicator, daemon: FakeDaemon) -> None:
    mine = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    feedback, got = wancoll.ErrorFeedback(), []
    for most, coded in ((1 << 62, (True, True)), (10_000, (True, False)), (1 << 62, (True, True)), (0, (True, False))):
        gpu.lib.standin_most_pooled(most)
        x = array(gpu, mine)
        comm.all_reduce(x, codec="int8", feedback=feedback, name="x")
        assert (daemon.seen[-1].input_coded, daemon.seen[-1].result_coded) == coded  # the host's feedback encodes, too
        got.append(x.get())
    for k, x in enumerate(got):
        host = wancoll.ErrorFeedback()
        for _ in range(k + 1):
            expected = mine.copy()
            comm.all_reduce(expected, codec="int8", feedback=host, name="x")
        if k in (0, 2):
            coded = reference.encode(Codec.int8, DType.float32, expected)
            expected = reference.decode(Codec.int8, DType.float32, coded, 1000)
        assert x.tobytes() == expected.tobytes(), k
    assert feedback.residual("x").tobytes() == host.residual("x").tobytes()


def test_without_kernels_the_host_encodes(
    gpu: Any, comm: Communicator, daemon: FakeDaemon, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "compiled", lambda *capability: b"")
    x = array(gpu, np.ones(1000, np.float32))
    comm.all_reduce(x, codec="int8")
    assert not daemon.seen[-1].input_coded
    assert "tensors are encoded on the host" in caplog.text
    assert (x.get() == 2).all()


def test_residuals_outlive_the_connection(kernels: Any, gpu: Any, path: str) -> None:
    mine, feedback, found = np.arange(300, dtype=np.float32) / 7, wancoll.ErrorFeedback(), []
    for number in range(2):
        with FakeDaemon(f"{path}{number}") as daemon, wancoll.connect(socket=daemon.path, timeout=10) as comm:
            x = array(gpu, mine)
            comm.all_reduce(x, codec="int8", feedback=feedback, name="x")
            found.append(x.get())
    host = wancoll.ErrorFeedback()
    with FakeDaemon(f"{path}h") as daemon, wancoll.connect(socket=daemon.path, timeout=10) as comm:
        for _ in range(2):
            comm.all_reduce(mine.copy(), codec="int8", feedback=host, name="x")
    assert feedback.residual("x").tobytes() == host.residual("x").tobytes()
    assert found[0].tobytes() != found[1].tobytes()


# ---- members that are lost ------------------------------------------------------------------------------


lossy = cluster_fixture(PEERS, after="standin")


@pytest.mark.parametrize("moment", ["on_post", *later("mid_op", "before_done")])
def test_a_member_is_lost_and_the_rest_get_the_same_bytes(
    lossy: Cluster, kernels: Any, gpu: Any, seed: int, moment: str
) -> None:
    """The retry reads what is in the arena: its bytes are those of a group that never had the lost member."""
    count = 5 * BLOCK // 4 + 3
    of = [np.random.default_rng(k).standard_normal(count).astype(np.float32) for k in range(WORLD)]
    repair(lossy)
    comms = join(lossy, range(WORLD))
    tensors = [array(gpu, of[k], STYLES[k]) if k != 1 else of[k].copy() for k in range(WORLD)]
    feedbacks = [wancoll.ErrorFeedback() for _ in range(WORLD)]
    lossy.failpoint(2, moment, "kill")

    def call(k: int) -> Any:
        how = {"codec": "int8", "feedback": feedbacks[k], "name": "x", "algorithm": "direct"}
        if k == 2:
            time.sleep(0.3)  # so that they have mostly begun with it
        return attempt(lambda: comms[k].all_reduce(tensors[k], async_op=True, **how).wait(25))

    outcomes = Background(call, WORLD).results()
    lossy.wait(2)
    close_all(comms)
    receipts = [outcome.receipt for outcome in outcomes[:2]]
    assert receipts[0] is not None
    assert receipts[1] is not None
    names = receipts[0].contributors
    assert moment != "on_post" or len(names) == 2
    parts = [of[int(name[1:])] for name in names]
    assert tensors[0].get().tobytes() == tensors[1].tobytes() == expected(parts).tobytes()
    assert receipts[0].digest == receipts[1].digest
    for k in range(2):
        lost = of[k] - through(of[k])
        assert feedbacks[k].residual("x").tobytes() == lost.tobytes()


def through(x: Any) -> Any:
    return reference.decode(Codec.int8, DType.float32, reference.encode(Codec.int8, DType.float32, x), x.size)


def expected(parts: list[Any]) -> Any:
    """The direct all-reduce: chunks begin at blocks, so that it is the same as of the whole."""
    total = through(parts[0])
    for part in parts[1:]:
        total = total + through(part)
    return through(total)
