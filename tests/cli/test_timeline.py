"""The trace file that rows of daemons make, and files of several machines as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wancoll.cli.looking.timeline import TraceFile, merged, timeline
from wancoll.cli.main import app
from wancoll.errors import ConfigError
from wancoll.wire.messages import Clock


def row(
    seq: int, member: str = "m", outcome: str = "committed", attempt: int = 1, epoch: int = 1, **at: float
) -> dict[str, Any]:
    return {
        "group": "g", "member": member, "epoch": epoch, "seq": seq, "op": "all_reduce", "algorithm": "ring",
        "codec": "none", "bytes": 4, "attempt": attempt, "contributors": 2, "outcome": outcome, "at": at,
    }  # fmt: skip


def as_read(file: TraceFile) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(msgspec.json.encode(file))
    return told


def spans(told: dict[str, Any]) -> list[tuple[str, int, int, int, int]]:
    return [
        (one["name"], one["pid"], one["tid"], one["ts"], one["dur"]) for one in told["traceEvents"] if one["ph"] == "X"
    ]


def names(told: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    found = (one for one in told["traceEvents"] if one["name"] == what)
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in found}


def test_phases_add_up_and_what_is_missing_is_left_out() -> None:
    whole = row(7, posted=1.0, started=1.25, first=1.5, last=2.0, done=2.25, committed=2.5)
    short = row(8, outcome="aborted", attempt=2, posted=3.0, started=3.5, done=4.0)
    told = as_read(timeline({"b": [short], "a": [whole]}))
    assert told["displayTimeUnit"] == "ms"
    assert spans(told) == [
        ("all_reduce 7", 1, 1, 1_000_000, 1_500_000),
        ("waits for links", 1, 1, 1_000_000, 250_000),
        ("waits for others' first bytes", 1, 1, 1_250_000, 250_000),
        ("bytes move", 1, 1, 1_500_000, 500_000),
        ("finishes", 1, 1, 2_000_000, 250_000),
        ("waits for the commit", 1, 1, 2_250_000, 250_000),
        ("all_reduce 8, attempt 2", 2, 1, 3_000_000, 1_000_000),
        ("waits for links", 2, 1, 3_000_000, 500_000),
        ("finishes", 2, 1, 3_500_000, 500_000),
    ]
    assert names(told, "process_name") == {(1, 0): "a", (2, 0): "b"}
    (first,) = (one for one in told["traceEvents"] if one["name"] == "all_reduce 7")
    assert first["args"] == {name: value for name, value in whole.items() if name != "at"}


def test_calls_that_overlap_have_threads_of_their_own() -> None:
    rows = [row(3, posted=1.5, done=2.5), row(1, posted=0.0, done=1.0), row(2, posted=0.5, done=2.0)]
    told = as_read(timeline({"a": [*rows, row(1, "n", posted=0.0, done=1.0)]}))
    operations = [one[:3] for one in spans(told) if one[0].startswith("all_reduce")]
    assert operations == [
        ("all_reduce 1", 1, 1), ("all_reduce 1", 1, 2), ("all_reduce 2", 1, 3), ("all_reduce 3", 1, 1),
    ]  # fmt: skip
    assert names(told, "thread_name") == {(1, 1): "g: m", (1, 2): "g: n", (1, 3): "g: m (2)"}


def of_machine(daemon: str, ahead: float, began: float, master: str = "a1") -> TraceFile:
    """One operation, which began when the master's clock was at *began*."""
    at = {"posted": began - ahead, "started": began - ahead + 0.5, "done": began - ahead + 1}
    return timeline({daemon: [row(1, daemon, **at)]}, Clock(ahead, 0.01 + abs(ahead) / 100, master))


def test_files_of_several_machines_go_by_the_first_ones_clock() -> None:
    whole = merged({"a.json": of_machine("a", 2.0, 100.0), "b.json": of_machine("b", -7.5, 100.25)})
    more = as_read(merged({"all": whole, "c.json": of_machine("c", 3.25, 100.5)}))
    operations = [one[1:4:2] for one in spans(more) if one[0] == "all_reduce 1"]
    assert operations == [(1, 98_000_000), (2, 98_250_000), (3, 98_500_000)]
    assert [one[1:] for one in spans(more) if one[0] == "waits for links"][1] == (2, 1, 98_250_000, 500_000)
    assert names(more, "process_name") == {(1, 0): "a", (2, 0): "b", (3, 0): "c"}
    assert more["metadata"]["clock"] == {"ahead": 2.0, "uncertain": pytest.approx(0.085), "master": "a1"}


def test_files_whose_clocks_cannot_be_compared() -> None:
    alone = timeline({"a": [row(1, posted=1.0, done=2.0)]})
    with pytest.raises(ConfigError, match=r"b\.json: cannot be laid beside others"):
        merged({"a.json": of_machine("a", 1.0, 100.0), "b.json": alone})
    with pytest.raises(ConfigError, match=r"b\.json: was compared with another master's clock; expected master a1 as"):
        merged({"a.json": of_machine("a", 1.0, 100.0), "b.json": of_machine("b", 1.0, 100.0, "a2")})
    with pytest.raises(ConfigError, match="has a clock that is none"):
        merged({"a.json": of_machine("a", 1e300, 100.0)})


def test_merge_reads_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def merge(*options: str) -> Any:
        return app(["trace", "merge", *options], result_action="return_value", exit_on_error=False)

    a, b, c, out = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json", "all.json"))
    Path(a).write_bytes(msgspec.json.encode(of_machine("a", 2.0, 100.0)))
    Path(b).write_bytes(msgspec.json.encode(of_machine("b", -4.0, 100.0)))
    assert merge(a, b, "-o", out) == 0
    assert capsys.readouterr().out == f"2 files in {out}; times of two machines compare to within 100 ms\n"
    assert [one[3] for one in spans(json.loads(Path(out).read_text())) if one[0] == "waits for links"] == [
        98 * 10**6
    ] * 2
    for text in ("[]", "{", json.dumps({"traceEvents": [{"ph": "X"}], "displayTimeUnit": "ms", "metadata": {}})):
        Path(c).write_text(text)
        with pytest.raises(ConfigError, match=r"c\.json: is none; expected a file of `wancoll trace`"):
            merge(a, c, "-o", out)
    with pytest.raises(ConfigError, match="cannot be read"):
        merge(a, str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be written"):
        merge(a, b, "-o", str(tmp_path))
