"""`wancoll perf`: its conventions, the values that it checks, its turns, its table, and runs on real clusters."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from tests.schedule import codec, numbers
from wancoll.chaos import Cluster
from wancoll.cli.perf import command as perf
from wancoll.cli.perf import report as perf_report
from wancoll.cli.perf import run as perf_run
from wancoll.cli.perf import values
from wancoll.cli.perf.run import Row, Settings, Variant
from wancoll.client.memory.tensors import numpy_dtype
from wancoll.collective import Codec, DType, ReduceOp
from wancoll.errors import ConfigError, OperationAborted
from wancoll.local import join_address
from wancoll.schedule.cost import AVAILABLE

DEADLINE = 50.0  # seconds for one run
NAMES = tuple(values.COLLECTIVES)
WITH_DATA = tuple(name for name in NAMES if name != "barrier")

DEFAULTS = Settings(
    collective="all_reduce", sizes=(4096,), iterations=3, warmup=1, dtype="float32", op="sum", root=0,
    variants=(Variant(),), in_flight=1, arena=False, timeout=DEADLINE,
)  # fmt: skip


def run(*args: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANCOLL_")}
    command = [sys.executable, "-m", "wancoll", "perf", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out + err
    return out


# ---- conventions --------------------------------------------------------------------------------------


def test_sizes_grow_by_the_factor() -> None:
    assert perf.sizes_between(1000, 20000, 3) == (1000, 3000, 9000)
    assert perf.sizes_between(8, 8, 2) == (8,)
    assert perf.sizes_between(2, 16, 2) == (2, 4, 8, 16)
    with pytest.raises(ConfigError, match="at least 9 bytes; got 8 bytes"):
        perf.sizes_between(9, 8, 2)


@pytest.mark.parametrize(
    ("name", "factor", "blocks"),
    [
        ("all_reduce", 6 / 4, 1),
        ("reduce_scatter", 3 / 4, 4),
        ("all_gather", 3 / 4, 4),
        ("broadcast", 1, 1),
        ("reduce", 1, 1),
        ("gather", 3 / 4, 4),
        ("scatter", 3 / 4, 4),
        ("all_to_all", 3 / 4, 4),
        ("send_recv", 1, 1),
    ],
)
def test_bus_bandwidth_and_count_are_those_of_nccl_tests(name: str, factor: float, blocks: int) -> None:
    collective = values.COLLECTIVES[name]
    assert collective.busbw(10**9, 1.0, 4) == pytest.approx(factor)
    assert collective.busbw(10**9, 0.5, 4) == pytest.approx(2 * factor)
    assert collective.blocks(4) == blocks


def test_the_command_offers_every_collective() -> None:
    assert set(get_args(perf.CollectiveName)) == set(NAMES)


def test_algorithms_and_codecs_are_crossed() -> None:
    two = perf.variants("all_reduce", "ring,tree", "none,int8", DType.float32)
    assert two == (("ring", "none"), ("tree", "none"), ("ring", "int8"), ("tree", "int8"))
    assert perf.variants("broadcast", "tree,all", "none", DType.int8)[:2] == (("tree", "none"), ("auto", "none"))
    assert len(perf.variants("all_reduce", "all", "none", DType.int32)) == 9
    assert [each.codec for each in perf.variants("all_reduce", "auto", "all", DType.float16)] == [
        "none",
        "int8",
        "int4",
        "fp8",
    ]
    assert perf.variants("barrier", "all", "all", DType.float32) == (("auto", "none"),)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gather", "tree", "none", DType.float32), "--algorithm is not to be had for gather; expected auto, direct"),
        (("all_reduce", "ring,", "none", DType.float32), "got ''"),
        (
            ("all_reduce", "auto", "int8", DType.int32),
            "--codec is not to be had for all_reduce of int32; expected none",
        ),
        (("all_gather", "auto", "int8", DType.float32), "--codec is not to be had for all_gather"),
    ],
)
def test_what_is_not_offered_is_refused(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        perf.variants(*arguments)


# ---- exact values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, perf.MAX_PEERS])
@pytest.mark.parametrize("op", [op.name for op in ReduceOp])
@pytest.mark.parametrize("dtype", [dtype.name for dtype in DType])
def test_known_values_reduce_exactly(dtype: str, op: str, world_size: int) -> None:
    kind, each = numpy_dtype(dtype), DType[dtype]
    given = [values.known_values(op, rank, world_size) for rank in range(world_size)]
    parts = [part.astype(kind).view(numbers.storage(each)) for part in given]
    result = parts[0]
    for part in parts[1:-1]:
        result = numbers.reduce(each, ReduceOp[op], result, part)
    if world_size > 1:
        result = (
            numbers.average(each, result, parts[-1], world_size)
            if op == "avg"
            else numbers.reduce(each, ReduceOp[op], result, parts[-1])
        )
    assert np.array_equal(result.view(kind), values.reduced(op, given).astype(kind))


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7, perf.MAX_PEERS])
def test_a_contribution_that_is_lost_or_doubled_shows(op: str, world_size: int) -> None:
    given = [values.known_values(op, rank, world_size) for rank in range(world_size)]
    right = values.reduced(op, given)
    for rank in range(world_size):
        neutral = np.ones_like(given[rank]) if op == "prod" else np.zeros_like(given[rank])
        twice = given[rank] ** 2 if op == "prod" else 2 * given[rank]
        for instead in (neutral, twice):
            assert not np.array_equal(values.reduced(op, [*given[:rank], instead, *given[rank + 1 :]]), right)


def test_a_block_from_or_for_another_rank_shows() -> None:
    for one in range(perf.MAX_PEERS):
        for other in range(one):
            for rank in (0, 7):
                assert np.all(values.moved(one, rank) != values.moved(other, rank))
                assert np.all(values.moved(rank, one) != values.moved(rank, other))
    assert values.moved(31, 31).min() >= 0
    assert values.moved(31, 31).max() < values.MOVED_PERIOD <= 127


def computed(name: str, inputs: list[np.ndarray | None], rank: int, root: int) -> np.ndarray | None:
    """What the collective gives *rank*, said with numpy; inputs: what all ranks give."""
    world, given = len(inputs), [each for each in inputs if each is not None]
    if name in ("reduce", "gather") and rank != root:
        return None
    total = np.sum(given, axis=0)
    split = [np.split(each, world) for each in given] if given and given[0].size % world == 0 else []
    return {
        "all_reduce": lambda: total,
        "reduce": lambda: total,
        "reduce_scatter": lambda: np.split(total, world)[rank],
        "all_gather": lambda: np.concatenate(given),
        "gather": lambda: np.concatenate(given),
        "broadcast": lambda: given[0],
        "scatter": lambda: split[0][rank],
        "all_to_all": lambda: np.concatenate([blocks[rank] for blocks in split]),
        "send_recv": lambda: given[rank - 1],
    }[name]()


@pytest.mark.parametrize("name", WITH_DATA)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_what_is_expected_follows_from_what_is_given(name: str, world_size: int) -> None:
    count = 120  # neither a multiple of a period nor the other way round
    collective, root = values.COLLECTIVES[name], world_size - 1
    inputs: list[np.ndarray | None] = []
    for rank in range(world_size):
        periods = values.given(collective, "sum", rank, world_size, root)
        x = np.empty(count * len(periods), np.float32)
        values.fill(x, periods) if periods else None
        inputs.append(x if periods else None)
    for rank in range(world_size):
        right = computed(name, inputs, rank, root)
        periods = values.expected(collective, "sum", rank, world_size, root)
        assert (right is None) == (not periods)
        if right is not None:
            right = right.copy()
            assert right.size == count * len(periods)
            assert values.wrong_elements(right, periods) == 0
            right[::50] += 1
            assert values.wrong_elements(right, periods) == -(-right.size // 50)


# ---- values for codecs --------------------------------------------------------------------------------


def coded_sum(which: Codec, parts: list[np.ndarray]) -> np.ndarray:
    """Sum of parts that are encoded once, then the result."""

    def wire(x: np.ndarray) -> np.ndarray:
        return codec.decode(which, DType.float32, codec.encode(which, DType.float32, x), x.size)

    return wire(np.sum([wire(part) for part in parts], axis=0, dtype=np.float32))


CODECS = [each for each in Codec if each is not Codec.none]


@pytest.mark.parametrize("count", [1, 2, 3, 33, 1000, 10000])
@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
@pytest.mark.parametrize("which", CODECS)
def test_the_rounding_of_a_codec_is_allowed_and_a_lost_contributor_is_not(
    which: Codec, world_size: int, count: int
) -> None:
    parts = [np.resize(values.noise(rank).astype(np.float32), count) for rank in range(world_size)]
    allowed = values.allowed_error(which, "direct", world_size, count)
    wrong, error = values.rounding_error(coded_sum(which, parts), "sum", world_size, allowed)
    assert wrong == 0
    assert error <= allowed
    if count > 1000:
        assert error > allowed / 10  # the bound means something
        for instead in ([np.zeros_like(parts[0]), *parts[1:]], [2 * parts[0], *parts[1:]]):
            assert values.rounding_error(coded_sum(which, instead), "sum", world_size, allowed)[0] > 0


def test_single_elements_far_off_are_counted() -> None:
    part = np.resize(values.noise(0).astype(np.float32), 10000)
    result = coded_sum(Codec.int8, [part])
    result[[5, 5000, 9999]] += 0.3
    result[7] = np.nan
    wrong, error = values.rounding_error(result, "sum", 1, values.allowed_error(Codec.int8, "direct", 1, 10000))
    assert wrong == 4
    assert 0.3 * (3 / 10000) ** 0.5 < error < 0.02


def test_a_result_that_is_a_little_off_everywhere_is_wrong() -> None:
    part = np.resize(values.noise(0), 10000)
    allowed = values.allowed_error(Codec.int8, "direct", 1, part.size)
    signs = np.where(np.arange(part.size) % 2, -1.0, 1.0)
    assert values.rounding_error(part + 0.9 * allowed * signs, "sum", 1, allowed)[0] == 0
    assert values.rounding_error(part + 1.1 * allowed * signs, "sum", 1, allowed)[0] == 1


# ---- turns --------------------------------------------------------------------------------------------


class Handle:
    def __init__(self, comm: Solo, receipt: Any) -> None:
        self._comm, self._receipt = comm, receipt

    def wait(self, timeout: float) -> Any:
        self._comm.running -= 1
        return self._receipt


class Solo:
    """Rank 0 of a group whose other member is computed here, and which can be made to spoil elements."""

    rank = 0

    def __init__(self, spoiled: int = 0, contributors: tuple[str, ...] = ("a", "b"), others_digest: str = "ff") -> None:
        self._spoiled, self._contributors, self._others_digest = spoiled, contributors, others_digest
        self.members: tuple[str, ...] = ("a", "b")
        self.calls: list[str] = []
        self.running = self.most_running = 0

    def all_reduce(self, x: np.ndarray, op: str, algorithm: str, codec: str, async_op: bool) -> Handle:
        if not self.calls:
            x += np.resize(values.known_values(op, 1, 2), x.shape).astype(x.dtype)
            x[: self._spoiled] += 1
        assert async_op
        self.calls.append(algorithm)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return Handle(self, self._receipt(algorithm=algorithm))

    def all_gather(self, x: np.ndarray, timeout: float) -> Any:
        other = x.view(perf_run.FACTS).copy()
        other["digest"] = int(self._others_digest, 16)
        return self._receipt(out=np.stack([x, other.view(np.uint8)]))

    def _receipt(self, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(
            contributors=self._contributors, op_id="g/1", digest="ff", bytes_sent=7, bytes_saved=0, codec_error=0.0,
            attempts=1, **more,
        )  # fmt: skip


def measured(comm: Any, **changes: Any) -> list[Row]:
    (rows,) = perf_run.sweep(comm, dataclasses.replace(DEFAULTS, **changes))
    return rows


@pytest.mark.parametrize("spoiled", [0, 1, 17])
def test_wrong_elements_are_counted(spoiled: int) -> None:
    (row,) = measured(Solo(spoiled))
    assert row.wrong == 2 * spoiled  # both ranks have them
    assert (row.size, row.count, row.bytes_sent, row.retries) == (4096, 1024, 7, 0)


def test_ranks_with_other_bytes_are_counted() -> None:
    assert measured(Solo(others_digest="fe"))[0].wrong == 1


def test_another_group_ends_the_measurement() -> None:
    with pytest.raises(OperationAborted, match="the group changed while it was measured; expected a, b; got a; run it"):
        measured(Solo(contributors=("a",)))


class Leaver(Solo):
    """Its other member leaves when the last exchange is over, as a rank does that is done."""

    def send(self, x: np.ndarray, dest: int, async_op: bool) -> Handle:
        assert (dest, async_op) == (1, True)
        return Handle(self, self._receipt(algorithm="direct"))

    def recv(self, x: np.ndarray, source: int, async_op: bool) -> Handle:
        assert (source, async_op) == (1, True)
        values.fill(x, [values.moved(1, 0)])
        return Handle(self, self._receipt(algorithm="direct"))

    def all_gather(self, x: np.ndarray, timeout: float) -> Any:
        self.members = ("a",)
        return super().all_gather(x, timeout)


def test_ranks_may_leave_when_they_are_done() -> None:
    (row,) = measured(Leaver(), collective="send_recv")
    assert (row.wrong, row.algorithm) == (0, "direct")


def test_variants_take_turns_and_none_is_always_first() -> None:
    comm = Solo()
    rows = measured(comm, variants=(Variant("ring"), Variant("tree")), warmup=1, iterations=3)
    assert comm.calls == ["ring", "tree"] * 2 + ["ring", "tree", "tree", "ring", "ring", "tree"]
    assert [row.algorithm for row in rows] == ["ring", "tree"]
    assert comm.most_running == 1


def test_operations_overlap_as_far_as_asked() -> None:
    comm = Solo()
    settings = dataclasses.replace(DEFAULTS, in_flight=3, iterations=20, warmup=2)
    list(perf_run.sweep(comm, settings))  # type: ignore[arg-type]
    assert comm.most_running == 3
    assert (settings.runs, settings.run_length) == (2, 12)
    assert len(comm.calls) == 1 + 2 * 3 + 24 <= settings.operations
    assert comm.running == 0


# ---- reports ------------------------------------------------------------------------------------------


def row(variant: Variant, size: int, seconds: float) -> Row:
    return Row(
        "all_reduce", size, size // 4, "float32", "sum", -1, seconds, seconds, seconds, 1.0, 1.5, 0,
        variant.algorithm, "ring", variant.codec, 0.01, 0.009, 10, 20, 0,
    )  # fmt: skip


def test_variants_are_shown_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    variants = (Variant("auto"), Variant("ring", "int8"))
    groups = [
        [row(variants[0], 4, 1e-6), row(variants[1], 4, 2e-6)],
        [dataclasses.replace(row(variants[0], 8, 9e-6), algbw=4.7e-8, busbw=0.04567), row(variants[1], 8, 3e-6)],
    ]
    perf_report.report_table(dataclasses.replace(DEFAULTS, variants=variants), 4, "here", groups)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "#wrong" in line)
    assert lines[at].split() == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]
    assert lines[at + 2].split() == ["4", "1", "float32", "sum", "1.0", "1.000", "1.500", "0"]
    assert lines[at + 3] == "#   ring (auto)"
    assert lines[at + 6].split()[-3:] == ["4.7e-08", "0.04567", "0"]  # 47 bytes per second show, too
    assert lines[at + 5] == "#   ring, int8: error 1.00e-02, saved 20 B"
    words = [line.split() for line in lines]
    begin = words.index(["#", "time", "(us)", "side", "by", "side,", "*", "the", "fastest"])
    assert words[begin + 2 : begin + 4] == [["#", "auto", "1.0*", "9.0"], ["#", "ring", "int8", "2.0", "3.0*"]]


def test_a_row_is_of_the_algorithm_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """Without sites hierarchical is what the plan takes: no row says that hierarchical was the fastest."""
    variants = (Variant("ring"), Variant("hierarchical", "int8"), Variant("hierarchical"))
    ran = ("ring", "halving_doubling", "hierarchical")
    groups = [
        [dataclasses.replace(row(each, size, 0.1), algorithm=name) for each, name in zip(variants, ran, strict=True)]
        for size in (4, 8, 16, 32)
    ]
    perf_report.report_table(dataclasses.replace(DEFAULTS, variants=variants), 4, "here", groups)
    out = capsys.readouterr().out
    lines = out[out.index("side by side") :].splitlines()
    names = [" ".join(word for word in line[1:].split() if "." not in word) for line in lines[2:5]]
    assert names == ["ring", "halving_doubling (hierarchical) int8", "hierarchical"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("in_flight", [1, 64])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_fits_80_columns(
    name: str, several: bool, in_flight: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the sizes that are usual, and the longest names."""
    coded = "int8" if several and name == "all_reduce" else "none"
    algorithms = sorted(AVAILABLE.get(name, ("auto",)), key=len)
    variants = [Variant(algorithms[-1], coded), Variant("auto", "none")][: 1 + several]
    sizes = tuple(4096 * 4**i for i in range(8))
    settings = dataclasses.replace(
        DEFAULTS, collective=name, sizes=sizes, variants=tuple(variants), in_flight=in_flight, iterations=1000
    )
    groups = [
        [dataclasses.replace(row(each, size, 0.25), collective=name, algorithm=algorithms[-1]) for each in variants]
        for size in sizes
    ]
    perf_report.report_table(settings, 32, "word " * 40, groups)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith(" ") for line in lines)
    data = [line for line in lines if not line.startswith("#")]
    assert len(data) == len(sizes) * len(variants)
    [head] = [line for line in lines if "#wrong" in line]
    shown = [line for line in (data if head.endswith("algorithm") else lines) if algorithms[-1] in line]
    assert len(shown) >= len(data), "the algorithm is behind each line, or below it"
    if several:
        assert sum("size (B)" in line for line in lines) == 2, "four sizes at a time"


# ---- the command --------------------------------------------------------------------------------------


def test_a_private_cluster_prints_nccl_tests_columns() -> None:
    options = ("all_reduce", "-n", "3", "-b", "4", "-e", "64K", "-f", "128", "--iters", "3", "--warmup", "1")
    lines = finish(run(*options)).splitlines()
    assert lines[1] == "# on this machine alone, over loopback; on several: --master HOST:PORT on each"
    assert "after 1 to warm up, algorithm auto" in lines[2]
    head = ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong", "algorithm"]
    assert lines[3].split() == head
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:4] for row in rows] == [
        ["4", "1", "float32", "sum"],
        ["512", "128", "float32", "sum"],
        ["65536", "16384", "float32", "sum"],
    ]
    for size, _, _, _, time, _, bus, wrong, algorithm in rows:
        assert (wrong, algorithm in AVAILABLE["all_reduce"]) == ("0", True)
        assert float(time) > 0
        assert float(bus) == pytest.approx(4 / 3 * int(size) / float(time) / 1e3, abs=1e-3)
    assert lines[-2] == "# Out of bounds values : 0 OK"
    assert re.fullmatch(r"# Avg bus bandwidth    : [\d.e-]+", lines[-1])


@pytest.mark.check
def test_json_holds_every_row_and_the_settings() -> None:
    options = ["all_reduce", "-n", "2", "-b", "1M", "-e", "1M", "--iters", "2", "--dtype", "bfloat16", "--op", "avg"]
    variants = ["--algorithm", "ring,direct", "--codec", "none,int8"]
    output = finish(run(*options, *variants, "--lanes", "2", "--no-checksum", "--outside-arena", "--json"))
    answer = json.loads(output)
    assert answer["peers"] == 2
    assert answer["settings"]["arena"] is False
    rows = answer["rows"]
    assert [(each["asked"], each["algorithm"], each["codec"]) for each in rows] == [
        ("ring", "ring", "none"), ("direct", "direct", "none"), ("ring", "ring", "int8"), ("direct", "direct", "int8"),
    ]  # fmt: skip
    for each in rows:
        assert (each["size"], each["count"], each["type"], each["redop"]) == (1 << 20, 1 << 19, "bfloat16", "avg")
        assert (each["wrong"], each["retries"]) == (0, 0)
        assert each["time_min"] <= each["time"] <= each["time_max"]
    for plain, coded in zip(rows[:2], rows[2:], strict=True):
        assert 1 << 20 < plain["bytes_sent"] < 1.001 * (1 << 20)
        assert (plain["error"], plain["bytes_saved"]) == (0, 0)
        assert 0.0005 < coded["error"] < 0.012
        assert 0 < coded["codec_error"] < 0.01
        assert coded["bytes_saved"] == pytest.approx((1 << 20) * (1 - 132 / 256), rel=1e-3)
        assert plain["bytes_sent"] - coded["bytes_sent"] == pytest.approx(coded["bytes_saved"], rel=1e-3)


def every_collective(socket: str, peers: int) -> Generator[list[Row], None, None]:
    """One rank's measurements, each name in NAMES with all its algorithms, blocking and pipelined."""
    import wancoll

    with wancoll.connect("perf", socket=socket, start_world=peers, min_world=peers, timeout=DEADLINE) as comm:
        for name in NAMES:
            for in_flight, op, dtype in (
                ((1, "sum", "int8"), (2, "avg", "float32")) if name != "barrier" else ((1, "sum", "int8"),)
            ):
                variants = perf.variants(name, "all", "none", DType.float32)
                settings = dataclasses.replace(
                    DEFAULTS, collective=name, sizes=(40000,), root=1, variants=variants, in_flight=in_flight, op=op,
                    dtype=dtype, iterations=1, arena=True,
                )  # fmt: skip
                yield from perf_run.sweep(comm, settings)


@pytest.mark.check
def test_every_collective_with_every_algorithm_has_the_right_values() -> None:
    with Cluster(peers=3, fork=True) as cluster:
        ranks = [cluster.client(i, every_collective, 3) for i in range(3)]
        for name in NAMES:
            for _ in range(2 if name != "barrier" else 1):
                rows = [rank.next(DEADLINE) for rank in ranks]
                assert rows[0] == rows[1] == rows[2]
                assert [each.wrong for each in rows[0]] == [0] * len(perf.variants(name, "all", "none", DType.int8))
                for each in rows[0]:
                    blocks = values.COLLECTIVES[name].blocks(3)
                    assert each.collective == name
                    assert each.count == (0 if name == "barrier" else 40000 // DType[each.type].itemsize // blocks)
                    assert each.root == (1 if name in ("broadcast", "reduce", "gather", "scatter") else -1)
                    assert each.asked in ("auto", "hierarchical", each.algorithm)


@pytest.mark.check
def test_sites_make_hierarchical_possible() -> None:
    options = ("all_reduce", "-n", "3", "--site", "a,a,b", "--algorithm", "hierarchical", "-b", "64K", "-e", "64K")
    (each,) = json.loads(finish(run(*options, "--iters", "1", "--json")))["rows"]
    assert (each["asked"], each["algorithm"], each["wrong"]) == ("hierarchical", "hierarchical", 0)


@pytest.mark.check
def test_ranks_on_separate_machines_join_one_group() -> None:
    sizes = ("-b", "4K", "-e", "16K", "--iters", "2", "--json")
    with Cluster(peers=1, fork=True) as cluster:
        master = join_address(*cluster.master_address)
        processes = [
            run("all_gather", "-n", "2", f"--socket={cluster.socket(0)}", *sizes),
            run("all_gather", "-n", "2", f"--master={master}", "--site=a", *sizes),
        ]
        answers = [json.loads(finish(process)) for process in processes]
    assert answers[0]["rows"] == answers[1]["rows"]
    assert [row["size"] for row in answers[0]["rows"]] == [4096, 16384]
    assert all(row["wrong"] == 0 for row in answers[0]["rows"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["all_reduce", "-b", "2"], "--min-bytes holds no element; expected at least 4 bytes; got 2"),
        (["all_gather", "-b", "12"], "--min-bytes holds no element; expected at least 16 bytes; got 12"),
        (["all_reduce", "-e", "4KX"], "--max-bytes: no size; expected bytes"),
        (["all_reduce", "--master", "a:1", "--socket", "b"], "--master and --socket exclude each other"),
        (["all_reduce", "-n", "0"], "Expected a whole number from 1 to 32, got 0"),
        (["reduce", "-r", "4"], "--root is no rank; expected 0 to 3; got 4"),
        (["send_recv", "-n", "1"], "nobody sends to itself; expected --peers of at least 2; got 1"),
        (["barrier", "--async", "2"], "a barrier is waited for; expected --async 1; got 2"),
        (["all_reduce", "--codec", "int8", "--op", "prod"], "errors of a product have no bound"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from wancoll.cli import main

    for name in [name for name in os.environ if name.startswith("WANCOLL_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as end:
        main.run(["perf", *options])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert text in " ".join(err.split())


@pytest.mark.check
def test_ranks_that_stay_away_are_named_in_time() -> None:
    with Cluster(peers=1, fork=True) as cluster:
        process = run("all_reduce", "-n", "2", f"--socket={cluster.socket(0)}", "--timeout", "0.3")
        out, err = process.communicate(timeout=DEADLINE)
    words = " ".join(out.replace("#", " ").split())
    assert f"one of 2 ranks of group perf through the daemon at {cluster.socket(0)}: run the same on all" in words
    assert process.returncode == 1
    assert "not all ranks came in time; expected 2 members, each within 0.3 s" in err
    assert "Traceback" not in err
