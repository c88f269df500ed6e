"""`wancoll demo torch`: its judgement and figures, the picture, and the whole command."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytest.importorskip("matplotlib", reason="the extra 'demo' is not installed")

from wancoll.demo import data
from wancoll.demo.curves import draw
from wancoll.demo.picture import DPI, HEIGHT, WIDTH
from wancoll.demo.transformer import LEAST_STEPS, Run, table
from wancoll.errors import ConfigError
from wancoll.examples.shared.story import Story, Told

STEPS, KILL, JOIN = 16, 6, 12


def told(member: str, step: int, *, loss: float = 0.0, digest: str = "x") -> Told:
    """c is killed after step KILL, d joins before step JOIN. Each step takes a second, b is a tenth of it later."""
    world = tuple(n for n in "abcd" if not (n == "c" and step > KILL) and not (n == "d" and step < JOIN))
    late = 0.1 if member == "b" else 0.0
    return Told(member, step, loss or 4 / step, world, 60, 10, digest if step == STEPS else "", 100 + step + late)


def steps_of(member: str) -> range:
    return range(JOIN if member == "d" else 1, (KILL if member == "c" else STEPS) + 1)


def run(*changed: Told, lost: tuple[str, int] = ("", 0)) -> Run:
    by_place = {(n, s): told(n, s) for s in range(1, STEPS + 1) for n in "dabc" if s in steps_of(n)}
    by_place |= {(each.member, each.step): each for each in changed}
    by_place.pop(lost, None)
    return Run("way", Story(list(by_place.values()), "c", "d", killed_at=107.5), began=102.0)


def test_a_success_has_no_reason_to_fail_and_the_right_figures() -> None:
    good = run()
    assert list(good.reasons_to_fail(STEPS)) == []
    seconds, losses = good.curve
    assert seconds[:2] == pytest.approx([0.1, 1.1])  # of the last member
    assert losses[:2] == [2.0, pytest.approx(4 / 3)]
    assert good.seconds == pytest.approx(14.1)
    assert (good.killed, good.joined) == (5.5, 10.0)
    told_after = 2 * 14 + 4 + 5  # by a and b, c, d
    assert (good.tokens, good.sent) == (10 * told_after, 60 * told_after)
    assert good.ends == (3.0, pytest.approx((4 / 15 + 4 / 16) / 2))
    assert table([good, good]).row_count == 8


def test_each_flaw_is_a_reason_to_fail() -> None:
    def reasons(bad: Run, steps: int = STEPS) -> str:
        return "; ".join(bad.reasons_to_fail(steps))

    assert reasons(run(told("b", STEPS, digest="y"))) == "way: the replicas differ"
    assert reasons(run(lost=("a", 7))) == "way: a lost a step"
    assert reasons(run(lost=("b", 1))) == "way: b lost a step"
    assert reasons(run(lost=("d", 13))) == "way: d lost a step"
    assert reasons(run(), STEPS + 1) == "way: 16 steps were taken instead of 17"
    for last in (90.0, float("nan")):
        assert "way: the loss did not fall: 3.0000 at first" in reasons(run(told("a", STEPS, loss=last)))


def check_png(path: Path) -> None:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (WIDTH * DPI, HEIGHT * DPI)


def test_the_picture_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    draw([run(), run()], "title", str(tmp_path / "loss"))
    check_png(tmp_path / "loss")


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from wancoll.cli.trying.demo_torch import run as command

    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(ConfigError, match=r"got no torch; run, in the source folder: pip install '.\[demo,torch\]'"):
        command()


def test_a_width_that_heads_cannot_share_is_refused() -> None:
    from wancoll.cli.trying.demo_torch import run as command

    with pytest.raises(ConfigError, match="--hidden: no width; expected a multiple of 4; got 6"):
        command(hidden=6)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_both_runs_survive_a_kill_and_a_join(tmp_path: Path) -> None:
    small = [f"--steps={LEAST_STEPS}", "--peers=3", "--hidden=16", "--layers=1", "--batch=6"]
    done = subprocess.run(
        [sys.executable, "-m", "wancoll", "demo", "torch", *small], cwd=tmp_path, timeout=280, check=False,
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for way in ("data parallel", "DiLoCo, int8"):
        assert re.search(rf"{way}\n(?s:.*)SIGKILL: peer-2's daemon(?s:.*)peer-3 joined", done.stdout)
    assert re.search(r"members[ │]+3 -> 2 -> 3[ │]+3 -> 2 -> 3", done.stdout)
    assert re.search(r"replicas hold the same bytes[ │]+yes[ │]+yes", done.stdout)
    sent = re.search(r"bytes sent a token[ │]+([\d,]+)[ │]+([\d,]+)", done.stdout)
    assert sent
    plain, diloco = (int(each.replace(",", "")) for each in sent.groups())
    assert plain > 10 * diloco
    check_png(tmp_path / "wancoll-demo-torch.png")
