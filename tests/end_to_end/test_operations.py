"""Whole operations through a real cluster: values bit for bit, receipts, membership, groups, addresses."""

from __future__ import annotations

import functools
import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import wancoll
from tests.client.tools import joined_worlds
from tests.faults.support import close_all, cluster_fixture, ranked, wait_joining, wait_until
from tests.later import at_night, later
from tests.schedule.numbers import digest, storage
from tests.schedule.reference import execute
from wancoll.chaos import Cluster, in_threads
from wancoll.collective import Descriptor, DType, Kind, ReduceOp
from wancoll.errors import PeerDaemonLost
from wancoll.schedule.choose import make

WORLD = 5
COUNTS = (0, 1, 2, 3, 1025, 203530)
BIG = 4 * (1 << 20) + 7
cluster = cluster_fixture(WORLD, whole=True)


@pytest.fixture(scope="module")
def one_lane(cluster: Cluster) -> int:
    return cluster.add_peer("--lanes=1")


@pytest.fixture(scope="module")
def three_lanes(cluster: Cluster) -> int:
    return cluster.add_peer("--lanes=3", env={"WANCOLL_CPU": "generic"})


@pytest.fixture(scope="module")
def generic(cluster: Cluster) -> int:
    """Its lanes to itself have no checksums; those to others have."""
    return cluster.add_peer("--no-checksum", env={"WANCOLL_CPU": "generic"})


@pytest.fixture(scope="module")
def elsewhere(cluster: Cluster) -> int:
    """A daemon at another address: in its groups all lanes share each step, as over a network."""
    return cluster.add_peer("--listen=127.0.0.2:0")


# ---- values ------------------------------------------------------------------------------------------


def numbers(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Elements of *dtype* as bits: of all magnitudes, with the values that are easy to get wrong among them."""
    rng = np.random.default_rng((int(dtype), count, seed))
    kind = storage(dtype)
    if dtype not in (DType.float32, DType.float64, DType.float16, DType.bfloat16):
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, count, kind, endpoint=True)
    values = rng.standard_normal(count) * 2.0 ** rng.integers(-12, 12, count)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-7, 65504.0, 3e38])
    places = rng.random(count) < 0.02
    values[places] = rng.choice(special, places.sum())
    with np.errstate(over="ignore"):
        if dtype is DType.bfloat16:
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(kind)


def place_tensor(comm: Any, dtype: DType, bits: np.ndarray, in_arena: bool) -> tuple[Any, np.ndarray]:
    """A tensor with these bits, and its memory as a numpy array of storage(dtype)."""
    if in_arena:
        tensor = comm.empty(bits.size, dtype.name)
        memory = np.asarray(tensor).view(storage(dtype))
        memory[...] = bits
        return tensor, memory
    memory = bits.copy()
    if dtype is DType.bfloat16:  # numpy lacks it
        torch = pytest.importorskip("torch")
        return torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16), memory
    return memory, memory


def check_values(
    comms: list[Any], dtype: DType, ops: list[ReduceOp], counts: list[int], sites: Sequence[str] = ()
) -> None:
    """Every op and count, in place and out of place, in and outside of the arena, all in flight at once."""
    world = len(comms)
    cases = list(itertools.product(ops, counts))
    inputs = {count: [numbers(dtype, count, rank) for rank in range(world)] for count in counts}

    @functools.cache
    def reference(op: ReduceOp, count: int, algorithm: str) -> list[bytes]:
        call = Descriptor(Kind.all_reduce, dtype, op, count)
        schedules = [make(call, algorithm, rank, world, sites=sites) for rank in range(world)]
        return [result.tobytes() for result in execute(schedules, inputs[count], dtype, op)]

    def member(rank: int) -> list[tuple[Any, np.ndarray, np.ndarray | None]]:
        comm = comms[rank]
        calls = []
        for number, (op, count) in enumerate(cases):
            for in_place in (True, False):
                in_arena = (number + in_place) % 2 == 0
                x, memory = place_tensor(comm, dtype, inputs[count][rank], in_arena)
                if in_place:
                    calls.append((comm.all_reduce(x, op=op.name, async_op=True), memory, None))
                else:
                    y, result = place_tensor(comm, dtype, np.zeros(count, storage(dtype)), number % 3 == 0)
                    calls.append((comm.all_reduce(x, out=y, op=op.name, async_op=True), result, memory))
        return [(work.wait(timeout=60), result, untouched) for work, result, untouched in calls]

    found = in_threads(member, world, 120)
    for number, (op, count) in enumerate(cases):
        wanted, *others = reference(op, count, found[0][2 * number][0].algorithm)
        assert all(each == wanted for each in others)
        for rank in range(world):
            for receipt, result, untouched in found[rank][2 * number : 2 * number + 2]:
                where = f"{op.name} of {count} x {dtype.name}, rank {rank} of {world}, {receipt}"
                assert result.tobytes() == wanted, where
                assert untouched is None or untouched.tobytes() == inputs[count][rank].tobytes(), where
                assert receipt.digest == f"{digest(wanted):016x}", where
                assert receipt.attempts == 1, where


@pytest.fixture(scope="module")
def worlds(cluster: Cluster) -> Iterator[dict[int, list[Any]]]:
    with joined_worlds(cluster, WORLD) as groups:
        yield groups


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("world", [1, WORLD, *later(*range(2, WORLD))])
def test_values(worlds: dict[int, list[Any]], world: int, dtype: DType) -> None:
    check_values(worlds[world], dtype, list(ReduceOp), list(COUNTS))


@pytest.mark.parametrize(
    ("world", "dtype", "op"),
    [(3, DType.float32, ReduceOp.avg), (2, DType.int16, ReduceOp.max), *later((5, DType.bfloat16, ReduceOp.sum))],
)
def test_big_values(worlds: dict[int, list[Any]], world: int, dtype: DType, op: ReduceOp) -> None:
    check_values(worlds[world], dtype, [op], [BIG])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_all_big_values(worlds: dict[int, list[Any]], world: int, dtype: DType) -> None:
    for op in ReduceOp:
        check_values(worlds[world], dtype, [op], [BIG])


@pytest.mark.parametrize("dtype", [DType.float32, *later(DType.bfloat16), *at_night(DType.float16, DType.int64)])
def test_same_bytes_with_fewer_lanes_and_portable_kernels(
    cluster: Cluster, one_lane: int, three_lanes: int, generic: int, dtype: DType
) -> None:
    """check_values compares with the reference, so equal to it with each setting means equal to each other."""
    for peers in ([0, one_lane, 1], [0, three_lanes, three_lanes], [generic, generic, generic], [0, generic, 1]):
        comms = ranked(cluster, peers)
        check_values(comms, dtype, list(ReduceOp), [3, 1025, 203530])
        close_all(comms)


@pytest.mark.parametrize("dtype", at_night(DType.float32, DType.bfloat16))
def test_same_bytes_where_all_lanes_share_a_step(
    cluster: Cluster, elsewhere: int, three_lanes: int, dtype: DType
) -> None:
    for peers in ([0, elsewhere], [0, elsewhere, 1, 2], [elsewhere, three_lanes, 0]):
        comms = ranked(cluster, peers)
        where = [peers[int(name[1:])] for name in comms[0].members]
        sites = ["" if peer == elsewhere else "here" for peer in where]  # those that share a machine
        check_values(comms, dtype, [ReduceOp.sum, ReduceOp.avg], [1025, BIG], sites)
        close_all(comms)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("world", range(1, WORLD + 1))
def test_all_values_with_fewer_lanes_and_portable_kernels(
    cluster: Cluster, one_lane: int, three_lanes: int, generic: int, world: int, dtype: DType
) -> None:
    for special in (one_lane, three_lanes, generic):
        comms = ranked(cluster, [special] * world)
        check_values(comms, dtype, list(ReduceOp), list(COUNTS))
        close_all(comms)


# ---- calls and receipts ------------------------------------------------------------------------------


def test_receipt(cluster: Cluster) -> None:
    comms = ranked(cluster, [0, 1, 2, 3], group="receipts", min_world=2)
    count = 1_000_003
    for seq in (1, 2):
        tensors = [np.full(count, 10.0**rank, np.float32) for rank in range(4)]
        outs = [np.empty(count, np.float32) if seq == 2 else None for _ in range(4)]
        started = time.monotonic()
        receipts = in_threads(lambda r, x=tensors, y=outs: comms[r].all_reduce(x[r], out=y[r], op="sum"), 4)
        took = time.monotonic() - started
        for rank, receipt in enumerate(receipts):
            assert receipt.out is (tensors[rank] if outs[rank] is None else outs[rank])
            assert (np.asarray(receipt.out) == 1111).all()
            assert receipt.op_id == f"receipts/{seq}"
            assert (receipt.seq, receipt.epoch, receipt.attempts) == (seq, comms[rank].epoch, 1)
            assert receipt.contributors == tuple(comms[rank].members)
            assert receipt.world_size == comms[rank].world_size == 4
            assert receipt.algorithm == "ring"
            assert receipt.digest == f"{digest(np.full(count, 1111, np.float32).tobytes()):016x}"
            assert 0 < receipt.seconds <= took
            least = 2 * 3 * 4 * (count // 4)
            assert least <= receipt.bytes_sent <= 2 * 3 / 4 * 4 * count * 1.001 + 64
    assert [comm.rank for comm in comms] == [0, 1, 2, 3]
    assert sorted(comms[0].members) == ["m0", "m1", "m2", "m3"]
    assert {comm.name for comm in comms} == set(comms[0].members)
    close_all(comms)


# ---- membership --------------------------------------------------------------------------------------


def sum_of_ones(comms: list[Any]) -> list[float]:
    """One op by all; returns each one's result."""

    def member(k: int) -> float:
        x = np.ones(1000, np.float32)
        comms[k].all_reduce(x, op="sum")
        assert (x == x[0]).all()
        return float(x[0])

    return in_threads(member, len(comms), 30)


def connecting(cluster: Cluster, i: int, **options: Any) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(cluster.connect, i, **options)
    pool.shutdown(wait=False)
    return future


def test_update_membership(cluster: Cluster) -> None:
    comms = ranked(cluster, [0, 1], group="growing")
    epoch = comms[0].epoch
    assert sum_of_ones(comms) == [2.0, 2.0]
    in_threads(lambda k: comms[k].update_membership(), 2)  # nobody waits
    assert [comm.epoch for comm in comms] == [epoch, epoch]
    joiner = connecting(cluster, 2, group="growing", name="late", start_world=2)
    wait_joining(cluster, "growing", "late")
    assert sum_of_ones(comms) == [2.0, 2.0]  # a joiner never blocks an op
    assert not joiner.done()
    in_threads(lambda k: comms[k].update_membership(), 2)
    comms.append(joiner.result(60))
    assert comms[0].epoch > epoch
    assert {comm.epoch for comm in comms} == {comms[0].epoch}
    assert {comm.members for comm in comms} == {comms[0].members}
    assert sorted(comms[0].members) == ["late", "m0", "m1"]
    assert sorted(comm.rank for comm in comms) == [0, 1, 2]
    assert all(comm.members[comm.rank] == comm.name for comm in comms)
    assert sum_of_ones(comms) == [3.0, 3.0, 3.0]
    comms.pop(0).close()  # a leave
    assert sum_of_ones(comms) == [2.0, 2.0]
    assert comms[0].world_size == 2
    close_all(comms)


def test_two_groups_at_once(cluster: Cluster) -> None:
    """The same daemons serve both; each has its own order of calls."""
    first, second = ranked(cluster, [0, 1, 2]), ranked(cluster, [2, 1, 0])

    def run(place: int) -> list[int]:
        group, rank = divmod(place, 3)
        comm = (first, second)[group][rank]
        seqs = []
        for step in range(20 + 10 * group):
            x = np.full(50_000, (group + 1) * 10.0**rank + step, np.float64)
            seqs.append(comm.all_reduce(x, op="sum").seq)
            assert (x == 111 * (group + 1) + 3 * step).all()
        return seqs

    for place, seqs in enumerate(in_threads(run, 6)):
        assert seqs == list(range(1, 21 if place < 3 else 31))
    close_all([*first, *second])


def test_two_clients_of_one_daemon(cluster: Cluster) -> None:
    comms = ranked(cluster, [0, 0, 1, 1])
    check_values(comms, DType.float32, [ReduceOp.sum, ReduceOp.avg], [0, 5, 203530])
    close_all(comms)


def test_names_are_made_where_none_are_given(cluster: Cluster) -> None:
    comms = in_threads(lambda k: cluster.connect(0, group="nameless", start_world=2), 2)
    assert len(set(comms[0].members)) == 2
    assert {comm.name for comm in comms} == set(comms[0].members)
    close_all(comms)


def test_sigterm_drains_and_leaves() -> None:
    """The op that runs when the signal comes commits with all members; then the daemon leaves, the others go on."""
    with Cluster(3, fork=True) as cluster:
        comms = ranked(cluster, [0, 1, 2])
        tensors = [np.full(4_000_000, 10.0**rank, np.float32) for rank in range(3)]
        works = [comm.all_reduce(x, op="sum", async_op=True) for comm, x in zip(comms, tensors, strict=True)]
        leaver = next(k for k, comm in enumerate(comms) if comm.name == "m1")
        cluster.terminate(1)
        receipts = in_threads(lambda k: works[k].wait(timeout=20), 3)
        assert cluster.wait(1) == 0
        for receipt, tensor in zip(receipts, tensors, strict=True):
            assert receipt.world_size == 3
            assert (tensor == 111).all()
        with pytest.raises(PeerDaemonLost):
            comms[leaver].all_reduce(tensors[leaver])
        rest = [comm for k, comm in enumerate(comms) if k != leaver]
        assert sum_of_ones(rest) == [2.0, 2.0]
        close_all(comms)


# ---- addresses ---------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["[::1]", "localhost", "*"])
def test_other_listen_addresses(host: str) -> None:
    if "::" in host and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    advertise = ["--advertise=localhost"] if host == "localhost" else []
    with Cluster(2, fork=True, listen=f"{host}:0", peer_args=advertise) as cluster:
        assert cluster.status().daemons
        comms = ranked(cluster, [0, 1])
        assert sum_of_ones(comms) == [2.0, 2.0]
        if advertise:
            addresses = [x for group in cluster.status().groups for member in group.members for x in member.addresses]
            assert addresses
            assert all(address.startswith(("127.0.0.1:", "[::1]:")) for address in addresses), "the master looks it up"
        close_all(comms)


def test_private_daemon(cluster: Cluster) -> None:
    """connect(master=...) starts a daemon and stops it again."""
    host, port = cluster.master_address

    def member(k: int) -> float:
        with wancoll.connect(master=f"{host}:{port}", group="private", name=f"m{k}", start_world=2) as comm:
            x = np.full(10, 10.0**k)
            comm.all_reduce(x, op="sum")
            return float(x[0])

    daemons = len(cluster.status().daemons)
    assert in_threads(member, 2) == [11.0, 11.0]
    wait_until(lambda: len(cluster.status().daemons) == daemons, 10, "the private daemons have gone")
