"""Every collective's client side against a test double of the daemon: values, places, losses, refusals."""

from __future__ import annotations

import array
import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.client.fake_daemon import FakeDaemon, made, shifted
from tests.client.tools import BIG, address, refused
from wancoll.client.communicator import Communicator
from wancoll.collective import DType, Kind, ReduceOp
from wancoll.errors import ConfigError, OperationAborted

WORLD = ("a", "b", "me", "d")
ME = 2
LAST_TAG = 2**64 - 2**56 - 1


@pytest.fixture
def world() -> tuple[tuple[str, ...], int]:
    return WORLD, ME


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return (np.arange(np.prod(shape, dtype=int)) % 50).astype(dtype).reshape(shape)


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def block(x: np.ndarray[Any, Any], rank: int) -> np.ndarray[Any, Any]:
    """The block that rank contributes where mine is x."""
    return shifted(x, rank - ME).view(x.dtype).reshape(x.shape)


def sent(nbytes: int, mark: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return made(nbytes, mark).view(dtype)


# ---- values, whole memberships --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 5), (), (0,), (BIG + 3,)])
@pytest.mark.parametrize("inside", [True, False])
def test_all_gather(comm: Communicator, daemon: FakeDaemon, shape: tuple[int, ...], inside: bool) -> None:
    x = comm.empty(shape) if inside else np.empty(shape, np.float32)
    x[...] = numbers(*shape)
    before = x.copy()
    receipt = comm.all_gather(x)
    expected = np.stack([block(before, rank) for rank in range(4)])
    assert receipt.out.shape == (4, *shape)
    assert bits(receipt.out) == bits(expected)
    assert bits(x) == bits(before)
    assert receipt.contributors == WORLD
    post = daemon.seen[-1]
    assert (post.call.kind, post.call.count, post.call.counts) == (Kind.all_gather, x.size, ())
    assert (post.call.root, post.epoch) == (-1, 1)
    out = np.empty((4 * x.size,), np.float32) if not inside else comm.empty((4, *shape))
    assert comm.all_gather(x, out).out is out
    assert bits(out) == bits(expected)


def test_a_new_result_is_built_where_it_stays(comm: Communicator, daemon: FakeDaemon) -> None:
    """No second block, no copy: what the daemon writes is the array."""
    x = comm.empty(BIG)
    x[:] = 1
    arena = comm._connection.arena
    page = arena.take(1)  # counts what came back
    before = arena.leased_bytes
    result = comm.all_gather(x).out
    assert arena.leased_bytes - before == result.nbytes
    del page
    post = daemon.seen[-1]
    daemon.bytes[post.result_buffer : post.result_buffer + 4].view(np.float32)[0] = -1
    assert result[0, 0] == -1


@pytest.mark.parametrize("counts", [(1, 2, 3, 4), (5, 0, 2, 0), (3, 3, 0, 1), (0, 0, 0, 0)])
def test_all_gather_with_counts(comm: Communicator, daemon: FakeDaemon, counts: tuple[int, ...]) -> None:
    x = numbers(counts[ME])
    expected = [shifted(np.resize(x, n), rank - ME).tobytes() for rank, n in enumerate(counts)]
    receipt = comm.all_gather(x, counts=counts)
    assert receipt.out.shape == (sum(counts),)
    assert bits(receipt.out) == b"".join(expected)
    post = daemon.seen[-1]
    assert (post.call.count, tuple(post.call.counts)) == (0, counts)
    out = np.empty(sum(counts), np.float32)
    assert comm.all_gather(x, out, counts=np.array(counts)).out is out
    assert bits(out) == b"".join(expected)
    receipt = comm.all_gather(x.reshape(1, -1), counts=list(counts))
    assert bits(receipt.out) == b"".join(expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8,), (2,)), ((4,), (1,)), ((4, 3), (3,)), ((4, 3, 2), (3, 2)), ((12, 2), (3, 2)), ((2, 6), (3,)), ((0,), (0,))],
)
def test_reduce_scatter(
    comm: Communicator, daemon: FakeDaemon, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    x = numbers(*shape)
    receipt = comm.reduce_scatter(x, op="sum", algorithm="direct", on_failure="raise")
    mine = x.reshape(4, -1)[ME]
    assert receipt.out.shape == expected
    assert (receipt.out.reshape(-1) == 4 * mine).all()
    post = daemon.seen[-1]
    assert (post.call.kind, post.call.count, post.call.op) == (Kind.reduce_scatter, x.size // 4, ReduceOp.sum)
    assert (post.call.algorithm, post.call.on_failure) == ("direct", "raise")
    out = np.empty(mine.shape, np.float32)
    assert comm.reduce_scatter(x, out, op="max").out is out
    assert (out == mine).all()


def test_reduce_scatter_with_counts(comm: Communicator, daemon: FakeDaemon) -> None:
    x = numbers(11)
    for counts in ((1, 2, 5, 3), (5, 6, 0, 0), (0, 0, 11, 0)):
        start = sum(counts[:ME])
        receipt = comm.reduce_scatter(x, counts=counts)
        assert receipt.out.shape == (counts[ME],)
        assert (receipt.out == 4 * x[start : start + counts[ME]]).all()
        assert tuple(daemon.seen[-1].call.counts) == counts


@pytest.mark.parametrize("count", [0, 5, BIG])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("root", [0, ME])
def test_broadcast(comm: Communicator, daemon: FakeDaemon, count: int, inside: bool, root: int) -> None:
    x = comm.empty(count) if inside else np.empty(count, np.float32)
    x[:] = 7
    receipt = comm.broadcast(x, root)
    expected = np.full(count, 7, np.float32) if root == ME else sent(4 * count, root)
    assert receipt.out is x
    assert bits(x) == bits(expected)
    post = daemon.seen[-1]
    assert (post.call.kind, post.call.count, post.call.root) == (Kind.broadcast, count, root)
    x[:] = 7
    out = np.zeros(count, np.float32)
    assert comm.broadcast(x, root, out=out).out is out
    assert (x == 7).all()
    assert bits(out) == bits(expected)


def test_the_root_of_a_broadcast_may_give_what_it_cannot_write(comm: Communicator) -> None:
    x = b"some text"
    assert comm.broadcast(x, ME).out is x
    with pytest.raises(ConfigError, match=r"broadcast\(x\): the result cannot be written"):
        comm.broadcast(x, 1)


@pytest.mark.parametrize("inside", [True, False])
def test_reduce(comm: Communicator, daemon: FakeDaemon, inside: bool) -> None:
    x = comm.empty((BIG // 2, 2)) if inside else np.empty((BIG // 2, 2), np.float32)
    x[:] = 3
    receipt = comm.reduce(x, root=ME)
    assert (receipt.out == 12).all()
    assert receipt.out.shape == x.shape
    assert (x == 3).all()
    assert comm.reduce(x, x, ME, op="prod").out is x
    assert (x == 81).all()
    assert comm.reduce(x, "not looked at", 1).out is None
    assert (x == 81).all()
    post = daemon.seen[-1]
    assert (post.call.kind, post.call.root, post.call.op, post.result_buffer) == (Kind.reduce, 1, ReduceOp.sum, 0)


def test_gather(comm: Communicator, daemon: FakeDaemon) -> None:
    x = numbers(2, 3, dtype=np.int16)
    receipt = comm.gather(x, root=ME)
    expected = np.stack([block(x, rank) for rank in range(4)])
    assert receipt.out.shape == (4, 2, 3)
    assert bits(receipt.out) == bits(expected)
    out = np.empty((8, 3), np.int16)
    assert comm.gather(x, out, ME).out is out
    assert bits(out) == bits(expected)
    assert comm.gather(x, out=3).out is None
    assert (daemon.seen[-1].call.kind, daemon.seen[-1].call.root, daemon.seen[-1].call.count) == (Kind.gather, 0, 6)


def test_scatter(comm: Communicator, daemon: FakeDaemon) -> None:
    x = numbers(4, 6, dtype=np.int64)
    receipt = comm.scatter(x, root=ME)
    assert (receipt.out == x[ME]).all()
    assert receipt.out.shape == (6,)
    out = np.zeros(6, np.int64)
    assert comm.scatter(x, out, ME).out is out
    assert (out == x[ME]).all()
    out = np.zeros((2, 3), np.float64)
    assert comm.scatter(None, out, 1).out is out
    assert bits(out) == bits(sent(48, 1))
    call = daemon.seen[-1].call
    assert (call.kind, call.root, call.count, call.dtype) == (Kind.scatter, 1, 6, DType.float64)
    assert daemon.seen[-1].input_buffer == 0


@pytest.mark.parametrize("shape", [(8,), (4, 3), (2, 2), (BIG,)])
@pytest.mark.parametrize("inside", [True, False])
def test_all_to_all(comm: Communicator, daemon: FakeDaemon, shape: tuple[int, ...], inside: bool) -> None:
    x = comm.empty(shape) if inside else np.empty(shape, np.float32)
    x[...] = numbers(*shape)
    before = x.copy()
    blocks = before.reshape(4, -1)
    expected = np.stack([block(blocks[rank], rank) for rank in range(4)])
    receipt = comm.all_to_all(x)
    assert receipt.out.shape == shape
    assert bits(receipt.out) == bits(expected)
    assert bits(x) == bits(before)
    assert (daemon.seen[-1].call.kind, daemon.seen[-1].call.count) == (Kind.all_to_all, x.size // 4)
    assert comm.all_to_all(x, x).out is x
    assert bits(x) == bits(expected)


def test_barrier_and_its_timeout(held: Communicator, manual: FakeDaemon) -> None:
    with pytest.raises(TimeoutError, match=r"barrier\(\) of group 'default'.*still pending") as caught:
        held.barrier(timeout=0.01)
    manual.answer(manual.next_post())
    receipt = caught.value.work.wait(10)  # type: ignore[attr-defined]
    assert receipt.out is None
    assert (manual.seen[0].call.kind, manual.seen[0].input_buffer, manual.seen[0].result_buffer) == (Kind.barrier, 0, 0)


@pytest.mark.parametrize("count", [0, 3, BIG])
@pytest.mark.parametrize("inside", [True, False])
def test_send_and_recv(comm: Communicator, daemon: FakeDaemon, count: int, inside: bool) -> None:
    x = comm.empty(count) if inside else np.empty(count, np.float32)
    x[:] = numbers(count)
    assert comm.send(x, 3, tag=9).out is None
    assert daemon.sent == {(3, 9): [bits(x)]}
    assert bits(x) == bits(numbers(count))
    assert comm.recv(x, 1, tag=LAST_TAG).out is x
    assert bits(x) == bits(sent(4 * count, 1 + LAST_TAG)) if count else True
    post = daemon.seen[-1]
    assert (post.call.kind, post.peer, post.tag, post.call.count) == (Kind.recv, 1, LAST_TAG, count)


def test_all_at_once(held: Communicator, manual: FakeDaemon) -> None:
    """Works of all kinds in flight together, answered in reverse order."""
    x = numbers(8)
    y, z, w = np.zeros(8), np.zeros(8), np.zeros(8)
    works = [
        held.all_gather(x, async_op=True),
        held.reduce_scatter(x, async_op=True),
        held.broadcast(y, 1, async_op=True),
        held.reduce(x, root=1, async_op=True),
        held.gather(x, root=ME, async_op=True),
        held.scatter(None, z, 1, async_op=True),
        held.all_to_all(x, async_op=True),
        held.send(x, 0, async_op=True),
        held.recv(w, 0, async_op=True),
    ]
    assert [str(work.descriptor) for work in works] == [
        "all_gather(8 x float32)",
        "reduce_scatter(2 x float32, op=sum)",
        "broadcast(8 x float64, root=1)",
        "reduce(8 x float32, op=sum, root=1)",
        "gather(8 x float32, root=2)",
        "scatter(8 x float64, root=1)",
        "all_to_all(2 x float32)",
        "send(8 x float32)",
        "recv(8 x float64)",
    ]
    manual.wait_for_posts(len(works))
    for post in reversed(list(manual.posts)):
        assert not y.any() if post.call.kind == Kind.broadcast else True
        manual.answer(post)
    receipts = [work.wait(10) for work in works]
    assert receipts[2].out is y
    assert bits(y) == bits(sent(64, 1, np.float64))
    assert bits(z) == bits(sent(64, 1, np.float64))
    assert bits(w) == bits(sent(64, 0, np.float64))
    assert (receipts[1].out == 4 * x[4:6]).all()
    assert bits(receipts[4].out) == bits(receipts[0].out)


# ---- other tensors ------------------------------------------------------------------------------------


def test_new_results_are_of_the_callers_kind(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        x = torch.arange(6).to(dtype).view(2, 3)
        out = comm.all_gather(x).out
        assert (type(out), out.dtype, tuple(out.shape)) == (torch.Tensor, dtype, (4, 2, 3))
        assert torch.equal(out[ME], x)
        whole = torch.stack([x] * 4)
        mine = comm.reduce_scatter(whole).out
        assert torch.equal(mine, 4 * x)
        assert comm.reduce_scatter(torch.zeros(0, dtype=dtype)).out.shape == (0,)
    big = torch.ones(BIG)
    out = comm.reduce(big, root=ME).out
    assert torch.equal(out, 4 * big)
    del comm, big
    gc.collect()
    assert (out == 4).all()  # the tensor holds its memory


def test_bfloat16_of_numpy(comm: Communicator) -> None:
    x = np.ones(4, ml_dtypes.bfloat16)
    out = comm.all_gather(x).out
    assert out.dtype == ml_dtypes.bfloat16
    assert (out[ME] == 1).all()


def test_buffers(comm: Communicator, daemon: FakeDaemon) -> None:
    x = array.array("i", [1, 2])
    out = array.array("i", range(8))
    assert comm.all_gather(x, out).out is out
    assert out.tobytes() == b"".join(shifted(np.array([1, 2], np.int32), rank - ME).tobytes() for rank in range(4))
    daemon.lost = {"b"}
    part = comm.all_gather(x, out).out
    assert isinstance(part, np.ndarray)
    assert part.dtype == np.int32
    assert part.tobytes() == out.tobytes()[: 3 * 8]


# ---- members that were lost ---------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [{"a"}, {"b", "d"}, {"a", "b", "d"}])
@pytest.mark.parametrize("inside", [True, False])
def test_fewer_blocks(comm: Communicator, daemon: FakeDaemon, lost: set[str], inside: bool) -> None:
    """The result is the leading part; what follows in out stays."""
    daemon.lost = lost
    ranks = [rank for rank, name in enumerate(WORLD) if name not in lost]
    make = comm.empty if inside else np.empty
    x = numbers(BIG // 4, 2)
    expected = b"".join(bits(block(x, rank)) for rank in ranks)
    for call in (comm.all_gather, lambda x, out=None: comm.gather(x, out, ME)):
        out = make((4, BIG // 4, 2), np.float32)
        out[:] = -1
        part = call(x, out).out
        assert part.shape == (len(ranks), BIG // 4, 2)
        assert address(part) == address(out)
        assert bits(part) == expected
        assert (out[len(ranks) :] == -1).all()
        fresh = call(x)
        assert fresh.contributors == tuple(WORLD[rank] for rank in ranks)
        assert fresh.out.shape == part.shape
        assert bits(fresh.out) == expected
        flat = make(4 * x.size, np.float32)
        assert call(x, flat).out.shape == (len(ranks) * x.size,)
        odd = make((8, BIG // 4), np.float32)
        assert call(x, odd).out.shape == (2 * len(ranks), BIG // 4)

    x = make((4, BIG), np.float32)
    x[:] = numbers(4, BIG)
    before = x.copy()
    expected = b"".join(bits(block(before[rank], rank)) for rank in ranks)
    part = comm.all_to_all(x).out
    assert part.shape == (len(ranks), BIG)
    assert bits(part) == expected
    part = comm.all_to_all(x, x).out  # in place: the rest stays
    assert bits(part) == expected
    assert bits(x[: len(ranks)]) == expected
    assert bits(x[len(ranks) :]) == bits(before[len(ranks) :])

    x = numbers(2, 2)
    assert comm.all_to_all(x).out.shape == (len(ranks),)  # four blocks of one: no rows to cut


def test_fewer_blocks_of_different_sizes(comm: Communicator, daemon: FakeDaemon) -> None:
    daemon.lost = {"b"}
    counts = (3, 4, 2, 5)
    x = numbers(2)
    out = np.full(14, -1, np.float32)
    part = comm.all_gather(x, out, counts=counts).out
    assert part.shape == (10,)
    assert address(part) == address(out)
    assert bits(part) == b"".join(shifted(np.resize(x, counts[rank]), rank - ME).tobytes() for rank in (0, 2, 3))
    assert (out[10:] == -1).all()
    assert comm.all_gather(x, counts=counts).out.shape == (10,)


def test_reductions_over_the_survivors(comm: Communicator, daemon: FakeDaemon) -> None:
    daemon.lost = {"a", "d"}
    x = numbers(4, 5)
    receipt = comm.reduce_scatter(x)
    assert (receipt.out == 2 * x[ME]).all()  # still the block of the rank at the call
    assert receipt.contributors == ("b", "me")
    assert (comm.reduce(x, root=ME).out == 2 * x).all()
    assert comm.scatter(x, root=ME).out.tolist() == x[ME].tolist()


def test_a_call_is_by_the_ranks_that_its_caller_knew(held: Communicator, manual: FakeDaemon) -> None:
    x = numbers(3)
    work = held.all_gather(x, async_op=True)
    manual.wait_for_posts(1)
    manual.lost = {"a"}
    manual.epoch(2, WORLD[1:], 1)
    later = held.all_gather(x, async_op=True)
    manual.wait_for_posts(2)
    manual.answer(manual.posts[0])
    assert work.wait(10).out.shape == (3, 3)
    assert held.rank == 1
    after = held.all_gather(x, async_op=True)
    manual.answer_all(2)
    assert later.wait(10).out.shape == (3, 3)  # made before or after it knew: three blocks either way
    receipt = after.wait(10)
    assert manual.seen[-1].epoch == 2
    assert receipt.out.base is not None
    assert bits(receipt.out) == b"".join(shifted(x, rank - 1).tobytes() for rank in range(3))


def test_a_lost_root(held: Communicator, manual: FakeDaemon) -> None:
    x = held.zeros(BIG)
    works = [held.broadcast(x, 1, async_op=True), held.scatter(None, np.zeros(3), 1, async_op=True)]
    manual.wait_for_posts(2)
    for post in list(manual.posts):
        manual.fail(post, "OperationAborted")
    for work in works:
        with pytest.raises(OperationAborted):
            work.wait(10)
    assert not x.any()


# ---- memory ---------------------------------------------------------------------------------------------


def test_memory_in_use(held: Communicator, manual: FakeDaemon) -> None:
    x, block = held.zeros((4, 100)), held.zeros(100)
    held.reduce_scatter(x, block, async_op=True)
    for bad in (
        lambda: held.broadcast(x, 1),  # would write what is read
        lambda: held.send(block, 1),  # would read what is written
        lambda: held.recv(block[50:], 1),
        lambda: held.scatter(None, x[3], 1),
    ):
        with pytest.raises(ConfigError, match="the memory is in use by a call that is not finished"):
            bad()
    held.broadcast(x, ME, async_op=True)  # both only read
    held.send(x[1], 1, async_op=True)
    manual.answer_all(3)


def test_nothing_is_left_in_the_arena(comm: Communicator, daemon: FakeDaemon) -> None:
    x = numbers(4, 1000)
    for _ in range(3):
        comm.all_gather(x)
        comm.reduce_scatter(x)
        comm.broadcast(x, 1)
        comm.broadcast(x, ME)
        comm.all_to_all(x)
        comm.send(x, 1)
        comm.recv(x, 1)
        daemon.lost = {"a"}
    gc.collect()
    arena = comm._connection.arena
    del daemon
    assert arena.take(1).block.nbytes == arena.leased_bytes


# ---- refusals -------------------------------------------------------------------------------------------

X = np.zeros(8, np.float32)
READ_ONLY = np.frombuffer(bytes(32), np.float32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.reduce_scatter(X[:7]), ("reduce_scatter(x)", "cannot be divided", "multiple of 4", "counts=")),
        (lambda c: c.all_to_all(X[:7]), ("all_to_all(x)", "cannot be divided", "a multiple of 4 elements", "pad it")),
        (lambda c: c.scatter(None, root=1), ("must say what it expects", "scatter(out=...)", "the root is rank 1")),
        (lambda c: c.scatter(None, root=ME), ("scatter(x)", "cannot be reduced")),
        (lambda c: c.broadcast(X, 4), ("broadcast(root=...)", "root is no rank", "expected 0 to 3", "got 4")),
        (lambda c: c.broadcast(X, root=None), ("root is no rank", "got None")),
        (lambda c: c.gather(X, root="a"), ("gather(root=...)", "got 'a'", "comm.members")),
        (lambda c: c.all_gather(X, counts=[8, 8, 8]), ("another length", "expected 4 counts", "got 3")),
        (lambda c: c.all_gather(X, counts=[8, 8, 9, 8]), ("not as large as counts", "9 elements at rank 2", "got 8")),
        (lambda c: c.all_gather(X, counts=[8, -1, 8, 8]), ("counts cannot be used", "0 or more")),
        (lambda c: c.reduce_scatter(X, counts=[1, 2, 3, 4]), ("do not add up", "a sum of 8", "got 10")),
        (lambda c: c.all_gather(X, np.zeros(8, np.float32)), ("another size", "expected 32 elements", "got 8, of")),
        (lambda c: c.all_gather(X, np.zeros((4, 8))), ("another dtype", "expected float32", "got float64")),
        (lambda c: c.all_gather(X[:2], READ_ONLY), ("read-only", "all_gather(out=...)")),
        (lambda c: c.reduce_scatter(X, X[:2]), ("overlaps a part", "reduce_scatter(out=...)", "32 and 8 bytes")),
        (lambda c: c.broadcast(X, 1, out=np.zeros((2, 4), np.float32)), ("another shape", "broadcast(out=...)")),
        (lambda c: c.recv(READ_ONLY, 1), ("read-only", "recv(x)")),
        (lambda c: c.send(X, ME), ("this member's own rank", "send(dest=...)", "another member", "got 2")),
        (lambda c: c.send(X, 9), ("dest is no rank", "expected 0 to 3", "got 9")),
        (lambda c: c.send(X, 1, -1), ("tag cannot be used", "send(tag=...)", "2^64 - 2^56 - 1", "got -1")),
    ],
)  # fmt: skip
def test_refused_before_anything_is_sent(
    comm: Communicator, daemon: FakeDaemon, call: Callable[[Communicator], Any], words: tuple[str, ...]
) -> None:
    with refused(*words) as caught:
        call(comm)
    comm.barrier()
    assert len(daemon.seen) == 1
    assert caught.value.expected or caught.value.hint


@pytest.mark.parametrize("world", [(("me",), 0)])
def test_alone(comm: Communicator) -> None:
    x = numbers(6)
    assert bits(comm.all_gather(x).out) == bits(x)
    assert (comm.reduce_scatter(x).out == x).all()
    assert (comm.all_to_all(x).out == x).all()
    assert comm.broadcast(x).out is x
    assert (comm.gather(x).out == x).all()
    assert (comm.scatter(x).out == x).all()
    with pytest.raises(ConfigError, match="own rank"):
        comm.send(x, 0)
