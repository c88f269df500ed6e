"""`wancoll perf`: sizes, the values that it checks, its table, and runs on real clusters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wancoll.chaos import Cluster
from wancoll.cli import perf
from wancoll.client.tensors import numpy_dtype
from wancoll.collective import DType, ReduceOp
from wancoll.errors import ConfigError, OperationAborted
from wancoll.local import join_address
from wancoll.schedule import reference

DEADLINE = 50.0  # seconds for one run


def run(*args: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANCOLL_")}
    command = [sys.executable, "-m", "wancoll", "perf", "all_reduce", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    return out


# ---- sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "size"), [("1", 1), ("4096", 4096), ("4K", 4096), ("3m", 3 << 20), ("2G", 2 << 30)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert perf.parse_size(text, "--min-bytes") == size


@pytest.mark.parametrize("text", ["", "0", "0K", "K", "-1", "1.5M", "4KB", "4 K", "٤", "1" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-bytes is no size; expected bytes such as 4096"):
        perf.parse_size(text, "--max-bytes")


def test_sizes_grow_by_the_factor() -> None:
    assert perf.sizes_between(1000, 20000, 3) == (1000, 3000, 9000)
    assert perf.sizes_between(8, 8, 2) == (8,)
    assert perf.sizes_between(2, 16, 2) == (2, 4, 8, 16)
    with pytest.raises(ConfigError, match="at least 9 bytes; got 8 bytes"):
        perf.sizes_between(9, 8, 2)


def test_bus_bandwidth_counts_what_each_member_sends() -> None:
    assert perf.busbw(10**9, 1.0, 2) == pytest.approx(1.0)
    assert perf.busbw(10**9, 0.5, 4) == pytest.approx(3.0)
    assert perf.busbw(10**9, 1.0, 1) == 0


# ---- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, perf.MAX_PEERS])
@pytest.mark.parametrize("op", [op.name for op in ReduceOp])
@pytest.mark.parametrize("dtype", [dtype.name for dtype in DType])
def test_known_values_reduce_exactly(dtype: str, op: str, world_size: int) -> None:
    kind, each = numpy_dtype(dtype), DType[dtype]
    given = [perf.known_values(op, rank, world_size) for rank in range(world_size)]
    parts = [values.astype(kind).view(reference.storage(each)) for values in given]
    result = parts[0]
    for part in parts[1:-1]:
        result = reference.reduce(each, ReduceOp[op], result, part)
    if world_size > 1:
        result = (
            reference.average(each, result, parts[-1], world_size)
            if op == "avg"
            else reference.reduce(each, ReduceOp[op], result, parts[-1])
        )
    assert np.array_equal(result.view(kind), perf.reduced(op, given).astype(kind))


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_a_contribution_that_is_lost_or_doubled_shows(op: str, world_size: int) -> None:
    given = [perf.known_values(op, rank, world_size) for rank in range(world_size)]
    right = perf.reduced(op, given)
    for rank in range(world_size):
        neutral = np.ones_like(given[rank]) if op == "prod" else np.zeros_like(given[rank])
        twice = given[rank] ** 2 if op == "prod" else 2 * given[rank]
        for instead in (neutral, twice):
            assert not np.array_equal(perf.reduced(op, [*given[:rank], instead, *given[rank + 1 :]]), right)


class TwoRanks:
    """Rank 0 of a group whose other member is computed here, and which can be made to spoil elements."""

    rank = 0

    def __init__(self, spoiled: int = 0, contributors: tuple[str, ...] = ("a", "b")) -> None:
        self._spoiled, self._contributors = spoiled, contributors

    def all_reduce(self, x: np.ndarray[Any, Any], op: str, timeout: float) -> SimpleNamespace:
        x += np.resize(perf.known_values(op, 1, 2), x.shape).astype(x.dtype)
        x[: self._spoiled] += 1
        return SimpleNamespace(contributors=self._contributors, op_id="g/1")


@pytest.mark.parametrize("spoiled", [0, 1, 17])
def test_wrong_elements_are_counted(spoiled: int) -> None:
    comm: Any = TwoRanks(spoiled)
    assert perf.check_values(comm, np.empty(1000, np.float32), "sum", ("a", "b"), 1.0) == spoiled


def test_another_group_ends_the_measurement() -> None:
    comm: Any = TwoRanks(contributors=("a",))
    with pytest.raises(OperationAborted, match="the group changed while it was measured; expected a, b; got a; run it"):
        perf.check_values(comm, np.empty(10, np.float32), "sum", ("a", "b"), 1.0)


# ---- the command --------------------------------------------------------------------------------------


def test_a_private_cluster_prints_nccl_tests_columns() -> None:
    lines = finish(run("-n", "3", "-b", "4", "-e", "64K", "-f", "128", "--iters", "3", "--warmup", "1")).splitlines()
    assert lines[2].split() == ["#", "size", "count", "type", "redop", "time", "algbw", "busbw", "#wrong"]
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:4] for row in rows] == [
        ["4", "1", "float32", "sum"],
        ["512", "128", "float32", "sum"],
        ["65536", "16384", "float32", "sum"],
    ]
    for size, _, _, _, time, _, bus, wrong in rows:
        assert wrong == "0"
        assert float(time) > 0
        assert float(bus) == pytest.approx(4 / 3 * int(size) / float(time) / 1e3, abs=1e-3)
    assert lines[-2] == "# Out of bounds values : 0 OK"
    assert re.fullmatch(r"# Avg bus bandwidth    : [\d.e-]+", lines[-1])


def test_json_holds_every_row_and_the_settings() -> None:
    options = ["-n", "2", "-b", "1M", "-e", "1M", "--iters", "2", "--dtype", "bfloat16", "--op", "avg", "--lanes", "2"]
    answer = json.loads(finish(run(*options, "--no-checksum", "--outside-arena", "--json")))
    assert answer["peers"] == 2
    assert answer["settings"]["arena"] is False
    (row,) = answer["rows"]
    assert (row["size"], row["count"], row["type"], row["redop"]) == (1 << 20, 1 << 19, "bfloat16", "avg")
    assert row["wrong"] == 0
    assert row["time_min"] <= row["time"] <= row["time_max"]
    assert 1 << 20 < row["bytes_sent"] < 1.001 * (1 << 20)


def test_ranks_on_separate_machines_join_one_group() -> None:
    sizes = ("-b", "4K", "-e", "16K", "--iters", "2", "--json")
    with Cluster(peers=1) as cluster:
        master = join_address(*cluster.master_address)
        processes = [
            run("-n", "2", f"--socket={cluster.socket(0)}", *sizes),
            run("-n", "2", f"--master={master}", *sizes),
        ]
        answers = [json.loads(finish(process)) for process in processes]
    assert answers[0]["rows"] == answers[1]["rows"]
    assert [row["size"] for row in answers[0]["rows"]] == [4096, 16384]
    assert all(row["wrong"] == 0 for row in answers[0]["rows"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-b", "2", "--dtype", "float32"], "--min-bytes holds no element; expected at least 4 bytes; got 2"),
        (["--master", "a:1", "--socket", "b"], "--master and --socket exclude each other"),
        (["-n", "0"], "Expected a whole number from 1 to 32, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], text: str) -> None:
    process = run(*options)
    out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out) == (2, "")
    assert text in " ".join(err.split())


def test_ranks_that_stay_away_are_named_in_time() -> None:
    with Cluster(peers=1) as cluster:
        process = run("-n", "2", f"--socket={cluster.socket(0)}", "--timeout", "0.3")
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "not all ranks came in time; expected 2 members, each within 0.3 s" in err
    assert "Traceback" not in err
