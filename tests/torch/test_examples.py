"""The examples: losses, bytes and memory against a single process and the textbook; schedules; the printed table."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.torch.ranks import free_port, run
from wancoll.examples.shared import ranks
from wancoll.examples.shared.alone import train_alone
from wancoll.examples.shared.arguments import Options, parsed, shared_batch, told_options
from wancoll.examples.shared.report import Report, show
from wancoll.examples.shared.schedules import SCHEDULES, Step
from wancoll.examples.shared.story import Story, Told

PLAIN = Options(steps=3, layers=4, hidden=64, batch=8, micro_batches=4, sequence=32, dtype="float32", device_ms=0.0)
EVERY = ("ddp", "zero1", "fsdp", "tensor_parallel", "pipeline", "parallel_3d")


def train(rank: int, size: int, runs: list[tuple[str, Options]]) -> list[Report]:
    """Each example after the other, in one group."""
    dist.init_process_group("wancoll")
    try:
        return [importlib.import_module(f"wancoll.examples.{name}").train(options) for name, options in runs]
    finally:
        dist.destroy_process_group()


def busiest(reports: list[Report]) -> tuple[float, list[float]]:
    """Bytes sent, and held, of the rank that has most."""
    return max(one.sent for one in reports), [max(each) for each in zip(*(one.memory for one in reports), strict=True)]


# ---- against a single process, and the textbook --------------------------------------------------------


@pytest.mark.check
@pytest.mark.timeout(200)  # seconds of a machine that does much else
def test_losses_bytes_and_memory_of_four_ranks(sockets: list[dict[str, str]]) -> None:
    bf16 = dataclasses.replace(PLAIN, dtype="bfloat16")
    runs = [
        ("ddp", PLAIN), ("ddp", bf16), ("zero1", bf16), ("zero1", PLAIN), ("fsdp", PLAIN), ("fsdp", bf16),
        ("tensor_parallel", PLAIN), ("pipeline", dataclasses.replace(PLAIN, micro_batches=8)),
    ]  # fmt: skip
    by_rank = run(4, train, runs, env=sockets, timeout=180)
    alone = {options: train_alone(options) for options in {options for _, options in runs}}
    for i, (name, options) in enumerate(runs):
        reports = [reports[i] for reports in by_rank]
        for one in reports:
            exact = options.dtype == "float32"
            assert one.losses == pytest.approx(alone[options], rel=1e-5 if exact else 5e-3), name
        assert all(one.losses == reports[0].losses for one in reports), name
        sent, memory = busiest(reports)
        formula = reports[0].sent_formula[0]
        assert formula <= sent <= 1.05 * formula + 8000, name  # headers, and small operations
        if name in ("ddp", "zero1", "fsdp"):
            assert memory == pytest.approx(reports[0].memory_formula, rel=0.01), name
        else:  # embedding and head are not shared
            assert all(want <= have < 2 * want for have, want in zip(memory, reports[0].memory_formula, strict=True))
    pipeline = dict(row[:2] for row in by_rank[0][-1].rows)
    kept = {name.strip(): had.split(", ")[1] for name, had in pipeline.items() if "%" in had}
    assert kept == {"GPipe": "8", "1F1B": "4"}


@pytest.mark.check
@pytest.mark.timeout(200)  # seconds of a machine that does much else
def test_three_axes_on_eight_ranks(sockets: list[dict[str, str]]) -> None:
    reports = [each for [each] in run(8, train, [("parallel_3d", PLAIN)], env=[*sockets, *sockets], timeout=180)]
    assert reports[0].losses == pytest.approx(train_alone(PLAIN), rel=1e-5)
    sent, _ = busiest(reports)
    assert reports[0].sent_formula[0] <= sent <= 1.1 * reports[0].sent_formula[0] + 8000


@pytest.mark.nightly  # it measures, and shall have the machine for itself
@pytest.mark.timeout(200)
def test_bubbles_are_as_long_as_the_textbook_says(sockets: list[dict[str, str]]) -> None:
    options = dataclasses.replace(PLAIN, micro_batches=8, device_ms=40.0, steps=6)
    [report] = run(4, train, [("pipeline", options)], env=sockets, timeout=180)[0]
    rows = {name.strip(): float(measured.split(" %")[0]) for name, measured, _ in report.rows[1:]}
    for name in ("GPipe", "1F1B"):
        assert 100 * 3 / 11 - 1 < rows[name] < 100 * 3 / 11 + 20, rows  # what it says, and what a busy machine adds


# ---- pipelines' schedules ------------------------------------------------------------------------------


def played(plan: Callable[[int, int, int], list[Step]], p: int, m: int) -> tuple[int, list[int]]:
    """(ticks until all stages are through, the most micro-batches that each stage kept), with infinitely fast links."""
    plans, ends = [plan(s, p, m) for s in range(p)], {}
    at, now, kept, most = [0] * p, [0] * p, [0] * p, [0] * p
    for _ in range(sum(map(len, plans))):  # the stages take turns: as many as there are steps at the most
        for s in range(p):
            if at[s] == len(plans[s]):
                continue
            what, i = plans[s][at[s]]
            before = s - 1 if what == "F" else s + 1
            needs = (what, before, i) if 0 <= before < p else None
            if needs is not None and needs not in ends:
                continue
            now[s] = max(now[s], ends[needs] if needs else 0) + (2 if what == "B" else 1)
            ends[what, s, i] = now[s]
            at[s] += 1
            kept[s] += 1 if what == "F" else -1
            most[s] = max(most[s], kept[s])
    assert at == [len(each) for each in plans], "it stands still"
    return max(now), most


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 4), (4, 8), (8, 16), (4, 2)])
def test_schedules_are_complete_and_wait_as_long_as_they_must(p: int, m: int) -> None:
    for name, plan in SCHEDULES.items():
        for s in range(p):
            assert sorted(plan(s, p, m)) == [(what, i) for what in "BF" for i in range(m)]
        ticks, kept = played(plan, p, m)
        assert 1 - 3 * m / ticks == pytest.approx((p - 1) / (m + p - 1))
        assert kept == ([m] * p if name == "GPipe" else [min(p - s, m) for s in range(p)])


# ---- members that come and go --------------------------------------------------------------------------


def told(member: str, step: int, world: str, digest: str = "") -> Told:
    return Told(member, step, 2.0, tuple(world), 100, digest)


def test_a_story_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    right = [
        told("a", 1, "abc"), told("c", 1, "abc"), told("b", 1, "abc"), told("a", 2, "ab"), told("b", 2, "ab"),
        told("d", 3, "abd", "x"), told("a", 3, "abd", "x"), told("b", 3, "abd", "x"),
    ]  # fmt: skip
    story = Story(right, victim="c", newcomer="d")
    assert (story.survivors, story.worlds, story.faults) == (["a", "b", "d"], "3 -> 2 -> 3", [])
    options = dataclasses.replace(PLAIN, world=3)
    assert story.show("title", [2.0] * 3, options, "S", points=1.0)
    said = capsys.readouterr().out
    assert said.startswith("title: c is killed, d joins\n")
    assert "members                        3 -> 2 -> 3   3 -> 2 -> 3\n" in said
    assert not story.show("title", [2.1] * 3, options, "S", points=1.0)
    assert "4.8 % apart" in capsys.readouterr().out
    assert Story([*right[:-1], told("b", 3, "abd", "y")], "c", "d").faults == ["the replicas differ"]
    assert Story([*right[:3], told("a", 1, "ab"), *right[3:]], "c", "d").faults == ["a took a step twice"]
    assert Story([*right[:4], told("a", 3, "abd", "x"), *right[5:6], *right[7:]], "c", "d").faults == ["b lost a step"]
    assert Story(right, "c", "e").faults == ["nobody joined, or nobody was killed", "d lost a step"]
    assert "nobody joined, or nobody was killed" in Story(right, "b", "d").faults
    assert Story([*right[:5], told("a", 3, "ab", "x"), told("b", 3, "ab", "x")], "c", "d").faults


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "steps"), [("elastic", "60"), ("diloco", "120")])
def test_a_member_is_killed_and_another_one_joins(name: str, steps: str) -> None:
    done = start("-m", f"wancoll.examples.{name}", "--steps", steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 -> 3 -> 4   4 -> 3 -> 4" in done.stdout
    assert f"steps {steps:>36}   {steps}\n" in done.stdout


# ---- the command ---------------------------------------------------------------------------------------


def report(losses: list[float]) -> Report:
    return Report(losses, math.nan, (2e6, "S"), (1.0, 2e3, 3e6), (1.0, 2e3, 3e6), [("mesh", "2", "two")])


def test_the_table_and_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Options(layers=1, hidden=8, sequence=4)
    assert show("title", report([2.0, 1.0]), [2.0, 1.0195], tiny, 3)
    said = capsys.readouterr().out
    assert said.startswith("title: 3 ranks, 4,920 parameters of bfloat16, 2 steps\n")
    assert "bytes sent a step              not counted   2 MB = S\n" in said
    assert "losses differ by 1.913 % at most: right\n" in said
    assert not show("title", report([2.0, 1.0]), [2.0, 1.03], tiny, 3)
    assert "WRONG" in capsys.readouterr().out
    float32 = dataclasses.replace(tiny, dtype="float32")
    assert not show("title", report([2.0, 1.0]), [2.0, 1.002], float32, 3)
    assert not show("title", report([math.nan]), [2.0], tiny, 3)


def start(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_example_starts_its_own_ranks(name: str) -> None:
    done = start("-m", f"wancoll.examples.{name}", "--steps", "3", "--hidden", "32", "--device-ms", "0")
    assert done.returncode == 0, done.stderr
    assert "at most: right" in done.stdout
    assert "not counted" not in done.stdout


@pytest.mark.check
@pytest.mark.timeout(200)  # seconds of a machine that does much else
def test_two_ranks_of_their_own() -> None:
    done = start("-m", "wancoll.examples.zero1", "--world", "2", "--steps", "2", "--hidden", "32", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ZeRO-1: 2 ranks, ")
    assert "at most: right" in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_example_under_torchrun() -> None:
    done = start(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m",
        "wancoll.examples.zero1", "--steps", "3", "--hidden", "32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ZeRO-1: 2 ranks" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--world", "5"], {}, "--batch: expected a multiple of 5, the ranks that share it, got 16"),
        (["--world", "0"], {}, "--batch: expected a multiple of 0"),
        ([], {"RANK": "0", "WORLD_SIZE": "3"}, "--batch: expected a multiple of 3"),
        (["--world", "2", "--heads", "3"], {}, "--hidden: expected a multiple of 3, the heads, got 128"),
        (["--dtype", "float16"], {}, "--dtype: invalid choice: 'float16'"),
        (["--backend", "gloo"], {}, "unrecognized arguments: --backend gloo"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(
    arguments: list[str], env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        parsed("title", Options(), multiples=shared_batch, without=("backend",))
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("tensor_parallel", "--world 3", "--heads: expected a multiple of 3, the ranks, got 4"),
        ("pipeline", "--micro-batches 5", "--batch: expected a multiple of 5, the micro-batches, got 16"),
        ("pipeline", "--world 6 --layers 4", "--layers: expected a multiple of 6, the stages, got 4"),
        ("parallel_3d", "--world 6", "--world: expected a multiple of 4, the ranks that hold one model, got 6"),
        ("parallel_3d", "--world 12", "--micro-batches: expected a multiple of 3, the models, got 8"),
    ],
)
def test_what_cannot_be_cut_into_equal_parts_is_refused(
    name: str, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else ranks compute another model than one process does."""
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    monkeypatch.delitem(sys.modules, f"wancoll.examples.{name}", raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"wancoll.examples.{name}", run_name="__main__")
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_an_example_with_a_cluster_of_its_own_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["elastic", "--world", "3"])
    assert told_options("elastic", 60) == Options(world=3, steps=60, hidden=64, dtype="float32")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="RANK is set"):
        told_options("elastic", 60)


def test_a_wrong_result_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda *_: report([2.0])  # noqa: E731
    for name in ("init_process_group", "destroy_process_group", "all_reduce", "barrier"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(ranks, "train_alone", lambda _: [3.0])
    assert ranks._rank("title", wrong, Options(backend="gloo", layers=1, hidden=8)) == 1
    monkeypatch.setattr(ranks, "train_alone", lambda _: [2.0])
    assert ranks._rank("title", wrong, Options(backend="gloo", layers=1, hidden=8)) == 0
