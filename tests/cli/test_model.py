"""`wancoll model`: units, the tables to the printed digit, crossovers, the map, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.later import later
from wancoll.cli.model import command as model
from wancoll.cli.model import regions
from wancoll.errors import ConfigError
from wancoll.limits import format_size
from wancoll.schedule.cost import ALGORITHMS, LinkCost, seconds
from wancoll.units import (
    format_duration,
    format_rate,
    parse_duration,
    parse_rate,
    parse_size,
)

COMMAND = ["model"]
BOOK = LinkCost(5e-6, 1 / 100e9)

TABLES = """\
# all_reduce, milliseconds: alpha 5 us, bandwidth 100 GB/s

64 MiB
       K       naive        tree        ring  winner
       2       1.352       1.352       0.681  ring
       8       9.465       4.057       1.244  ring
      32      41.917       6.761       1.610  ring
     128     171.727       9.465       2.602  ring
     512     690.963      12.170       6.450  ring
    1024    1383.277      13.522      11.571  ring

K = 64
    size       naive        tree        ring  winner
   256 B       0.630       0.060       0.630  tree
   4 KiB       0.635       0.060       0.630  tree
  64 KiB       0.713       0.068       0.631  tree
   1 MiB       1.951       0.186       0.651  tree
  16 MiB      21.769       2.073       0.960  ring
 256 MiB     338.859      32.272       5.915  ring
"""


# ---- units ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5us", 5e-6),
        ("5 us", 5e-6),
        ("40ms", 0.04),
        ("1.5ms", 0.0015),
        ("250ns", 250e-9),
        ("2s", 2.0),
        ("0us", 0.0),
        ("7µs", 7e-6),
    ],
)
def test_durations_are_read_exactly(text: str, value: float) -> None:
    assert parse_duration(text, "--alpha") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("100GB/s", 100e9),
        ("500Mbit/s", 62.5e6),
        ("8bit/s", 1.0),
        ("1Tbit/s", 125e9),
    ],
)
def test_rates_are_read(text: str, value: float) -> None:
    assert parse_rate(text, "--bandwidth") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64MiB", 64 << 20),
        ("1K", 1024),
        ("4096", 4096),
        ("1GB", 10**9),
        ("64 MB", 64 * 10**6),
        ("2kb", 2000),
    ],
)
def test_sizes_are_read(text: str, value: int) -> None:
    assert parse_size(text, "--size") == value


@pytest.mark.parametrize(
    "text", ["", "5", "us", "-5us", "5 minutes", "5US", "1e3us", "nan s", "infs", "\u0665us", "1.us", "5us5us"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--alpha: not a duration; expected a number and ns, us, ms or s"):
        parse_duration(text, "--alpha")


@pytest.mark.parametrize(
    "text", ["", "100", "100GB", "0GB/s", "100gb/s", "100Gb/s", "100mB/s", "-1GB/s", "GB/s", "1GB/h"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--bandwidth: .*; expected a number above 0 and a unit such as B/s"):
        parse_rate(text, "--bandwidth")


@pytest.mark.parametrize("text", ["", "0", "0K", "K", "-1", "1.5M", "64Mi", "64 M iB", "1PiB", "9" * 15 + "T", "٤"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--size: no size; expected bytes"):
        parse_size(text, "--size")


def test_units_are_written() -> None:
    assert [format_size(n) for n in (0, 1, 1023, 1024, 1536, 64 << 20, 5 << 40)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1.50 KiB", "64 MiB", "5 TiB",
    ]  # fmt: skip
    assert [format_duration(s) for s in (0, 5e-6, 0.04, 1.5, 3e-9)] == ["0 us", "5 us", "40 ms", "1.5 s", "3 ns"]
    assert [format_rate(r) for r in (100e9, 62.5e6, 3, 2e12)] == ["100 GB/s", "62.5 MB/s", "3 B/s", "2 TB/s"]
    assert format_size(1536, 3) == "1.5 KiB"
    assert (format_rate(999.7e6, 3), format_duration(0.9997, 3)) == ("1 GB/s", "1 s")
    assert (format_rate(12.5e15, 3), format_duration(2634, 3)) == ("12500 TB/s", "2630 s")


# ---- tables --------------------------------------------------------------------------------------------


def test_the_two_tables_to_the_printed_digit(call: Any) -> None:
    assert call("--alpha", "5us", "--bandwidth", "100GB/s") == TABLES
    assert call() == TABLES


def test_one_question(call: Any) -> None:
    assert call("--size", "64MiB", "--world", "8").splitlines()[2:] == [
        "64 MiB, K = 8",
        "       K       naive        tree        ring  winner",
        "       8       9.465       4.057       1.244  ring",
    ]
    assert call("--size", "64M") == TABLES[: TABLES.index("\nK = 64")]
    assert call("--world", "64").splitlines()[2:] == TABLES.splitlines()[11:]
    assert "       1       0.000       0.000       0.000  naive" in call("--size", "1K", "--world", "1")


def test_all_algorithms_compete(call: Any) -> None:
    lines = call("--algorithms", "--world", "8").splitlines()
    assert max(map(len, lines)) <= 80  # what does not fit stands below
    assert [*lines[3].split(), *lines[11].split()] == ["size", *ALGORITHMS[:5], "size", *ALGORITHMS[5:-1], "winner"]
    assert lines[10] == ""
    assert lines[12].split()[-1] == "full_exchange"
    assert lines[-1].split()[-1] == "direct"
    with_sites = call("--algorithms", "--sites", "4", "--alpha", "40ms", "--size", "1M", "--world", "8").splitlines()
    assert with_sites[0].endswith("4 sites: inside 5 us, 100 GB/s")
    assert with_sites[-2].split()[-2:] == ["hierarchical", "winner"]


def test_sites_are_as_even_as_they_can_be(call: Any) -> None:
    args = ("--sites", "3", "--inside-alpha", "1us", "--inside-bandwidth", "10GB/s", "--algorithms", "--json")
    answer = json.loads(call(*args, "--size", "1M", "--world", "8", "--bandwidth", "1GB/s"))
    row = answer["tables"][0][0]
    # Sites of 3, 3 and 2: a third of the tensor stays inside, and the site of two carries most between.
    n = 1 << 20
    expected = 2 * 1e-6 + 2 * 2 / 3 * n / 10e9 + 2 * 5e-6 + 2 * 2 / 3 * n / 2 / 1e9
    assert row["seconds"]["hierarchical"] == pytest.approx(expected)


def test_overhead_is_paid_a_message(call: Any) -> None:
    answer = json.loads(call("--overhead", "1us", "--size", "1K", "--world", "8", "--json"))
    assert answer["overhead"] == 1e-6
    times = answer["tables"][0][0]["seconds"]
    assert times["ring"] == pytest.approx(seconds("ring", 1024, 8, BOOK) + 28e-6)


def test_json_has_the_same_numbers_in_seconds(call: Any) -> None:
    answer = json.loads(call("--json"))
    assert (answer["alpha"], answer["bandwidth"], answer["algorithms"]) == (5e-6, 100e9, ["naive", "tree", "ring"])
    first, second = answer["tables"]
    assert [row["world_size"] for row in first] == [2, 8, 32, 128, 512, 1024]
    assert [row["size"] for row in second] == [256, 4096, 65536, 1 << 20, 1 << 24, 1 << 28]
    assert {row["size"] for row in first} == {64 << 20}
    assert {row["world_size"] for row in second} == {64}
    for row in (*first, *second):
        for name, value in row["seconds"].items():
            assert value == seconds(name, row["size"], row["world_size"], BOOK)
        assert row["winner"] == min(row["seconds"], key=row["seconds"].get)


def test_columns_are_chosen(call: Any) -> None:
    """The bound, what algorithms are above it, the rule of thumb and naive's root, to the printed digit."""
    columns = "ring,ring/bound,naive/bound,bound,bytes,2S,root"
    lines = call("--size", "1000000000", "--world", "8", "--columns", columns).splitlines()
    # 8 peers and 1 GB: 1.75 GB each.
    assert lines[3:] == [
        "       K        ring  ring/bound  naive/bound       bound       bytes",
        "       8      17.570       1.00x        8.00x      17.500     1.75 GB",
        "",
        "       K          2S        root  winner",
        "       8      20.070    800 GB/s  ring",
    ]
    [row] = json.loads(call("--size", "1M", "--world", "4", "--columns", "bytes,2S", "--json"))["tables"][0]
    assert row["columns"] == {"bytes": 1.5 * 2**20, "2S": pytest.approx(6 * 5e-6 + 2 * 2**20 / 100e9)}
    assert (row["seconds"], row["winner"]) == ({}, "")
    assert call("--size", "1M", "--world", "4", "--columns", "bound").splitlines()[3:] == [
        "       K       bound",
        "       4       0.016",
    ]
    assert call("--size", "1M", "--world", "1", "--columns", "ring/bound,root").split()[-2:] == ["100", "GB/s"]


def test_the_halves_by_themselves(call: Any) -> None:
    """(p-1)V/p each: half of the ring's all-reduce."""
    for kind in ("reduce_scatter", "all_gather"):
        answer = json.loads(call("--collective", kind, "--size", "64M", "--world", "8", "--json"))
        assert answer["collective"] == kind
        [row] = answer["tables"][0]
        assert row["seconds"] == {
            "ring": pytest.approx(7 * 5e-6 + 7 / 8 * (64 << 20) / 100e9),
            "direct": pytest.approx(5e-6 + 7 / 8 * (64 << 20) / 100e9),
        }
        assert call("--collective", kind).startswith(f"# {kind}, milliseconds")
        assert "all_reduce" not in call("--collective", kind, "--columns", "ring,bytes", "--algorithms")


def test_naives_root_may_have_a_link_of_its_own(call: Any) -> None:
    def naive(*args: str) -> float:
        answer = json.loads(call("--size", "64M", "--world", "8", "--json", *args))
        return float(answer["tables"][0][0]["seconds"]["naive"])

    once = (64 << 20) / 100e9
    assert naive("--root-bandwidth", "100GB/s") == pytest.approx(naive())
    assert naive("--root-bandwidth", "350GB/s") == pytest.approx(14 * 5e-6 + 2 * 2 * once)
    # However fast the root is: each other one sends its tensor and receives the result.
    assert naive("--root-bandwidth", "100TB/s") == pytest.approx(14 * 5e-6 + 2 * once)


# ---- crossover -----------------------------------------------------------------------------------------


def test_crossover_is_where_both_take_the_same_time(call: Any) -> None:
    lines = call("--crossover", "tree,ring").splitlines()
    assert lines[2] == "tree and ring take the same time at"
    assert lines[4].split() == ["2", "none", "ring", "is", "never", "slower"]
    assert lines[5].split() == ["8", "941176", "919.12", "KiB", "0.086"]
    assert len(lines) == 4 + len(model.WORLDS)
    answer = json.loads(call("--crossover", "tree, ring", "--world", "64", "--json"))
    assert answer["tables"] == []
    assert answer["crossover"]["between"] == ["tree", "ring"]
    [found] = answer["crossover"]["at"]
    assert found["world_size"] == 64
    assert seconds("tree", found["size"], 64, BOOK) == pytest.approx(seconds("ring", found["size"], 64, BOOK))


def test_crossover_says_who_is_faster_where_there_is_none(call: Any) -> None:
    assert "2            none  they are alike" in call("--crossover", "ring,halving-doubling", "--world", "2")
    assert "direct is never slower" in call("--crossover", "direct,ring", "--world", "8")
    out = call("--crossover", "hierarchical,full_exchange", "--sites", "2", "--world", "8", "--alpha", "40ms")
    assert re.search(r"^ +8 +\d+ ", out, re.MULTILINE)


# ---- the map -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classic() -> model.Question:
    return model.Question(model.CLASSIC, BOOK, 100e9)


def test_the_map_agrees_with_the_tables(classic: model.Question) -> None:
    best = regions.winners(classic)
    sizes = 2.0 ** regions.cells(regions.LOW_SIZE, regions.HIGH_SIZE)
    members = np.round(2.0 ** regions.cells(regions.LOW_WORLD, regions.HIGH_WORLD))
    assert best.shape == (len(members), len(sizes))
    assert set(members) >= set(range(2, 33))
    for row in range(0, len(members), 17):
        for column in range(0, len(sizes), 31):
            times = classic.times(int(sizes[column]), int(members[row]))
            assert times[model.CLASSIC[best[row, column]]] <= min(times.values()) * (1 + 1e-6)
    assert set(np.unique(best)) == {1, 2}  # a naive exchange is never fastest


def test_the_map_shows_powers_of_two_where_halving_doubling_wins() -> None:
    """At 4 GiB halving_doubling beats the ring with 8, 16, ... members, and with no other number."""
    question = model.Question(("tree", "ring", "halving_doubling"), BOOK, 100e9)
    best, members = regions.winners(question)[:, -1], regions.worlds(question)
    for k in range(3, 1025):
        names = {question.names[i] for i in best[members == k]}
        fastest = "halving_doubling" if k & (k - 1) == 0 else "ring"
        assert names == {fastest} or (not names and fastest == "ring"), k
    for k in (64, 512):  # wide enough to be seen
        assert np.count_nonzero(members == k) == regions.FINE // 4
    assert set(regions.worlds(model.Question(("tree", "ring"), BOOK, 100e9))) >= set(range(2, 33))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), *later((".svg", b"<?xml"), (".pdf", b"%PDF"))])
def test_the_map_is_written_in_the_asked_format(suffix: str, magic: bytes, call: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"map{suffix}"
    out = call("--size", "1K", "--world", "4", "--plot", str(path))
    assert out.endswith(f"\nregions: {path}\n")
    assert path.read_bytes().startswith(magic)


def test_the_map_names_each_region_and_who_has_none(classic: model.Question) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().subplots()
    best = regions.winners(classic)
    regions._name_regions(axes, classic, best)
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == ["naive: fastest nowhere", "tree", "ring"]


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--alpha", "5"], "--alpha"),
        (["--bandwidth", "0GB/s"], "--bandwidth"),
        (["--bandwidth", "100"], "500Mbit/s"),
        (["--size", "64MX"], "--size"),
        (["--world", "-1"], "from 0 to 1048576"),
        (["--crossover", "tree"], "two of naive, tree"),
        (["--crossover", "hierarchical,ring"], "--sites"),
        (["--crossover", "tree,ring", "--collective", "all_gather"], "no --collective"),
        (["--columns", "ring,star"], "'star'"),
        (["--plot", "map.png", "--columns", "bound"], "one at least in --columns"),
        (["--plot", "map.jpeg"], ".png, .svg, .pdf"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(args: list[str], says: str, call: Any) -> None:
    assert says in call(*args, code=2)


def test_without_matplotlib_the_map_is_refused_with_the_way_to_get_it(
    call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = call("--plot", str(tmp_path / "map.png"), code=2)
    assert "ConfigError: --plot: a package that" in said
    assert "got no matplotlib" in said
    assert "pip install '.[demo]'" in said


def test_variables_set_options_and_the_option_wins(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANCOLL_MODEL_ALPHA", "40ms")
    monkeypatch.setenv("WANCOLL_MODEL_ALGORITHMS", "true")
    assert "alpha 40 ms" in call("--world", "4")
    assert "halving_doubling" in call("--world", "4")
    assert "alpha 1 ms" in call("--world", "4", "--alpha", "1ms")
    monkeypatch.setenv("WANCOLL_MODEL_BANDWIDTH", "much")
    assert "much" in call(code=2)
