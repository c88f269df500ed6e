"""`wancoll model training`: the table to the printed digit, JSON, columns, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from wancoll.cli.model.training import COLUMNS
from wancoll.errors import ConfigError
from wancoll.units import format_bytes, parse_count

COMMAND = ["model", "training"]


def flat(out: str) -> str:
    """Each comment on one line."""
    return out.replace("\n#   ", " ")


def test_the_table_to_the_printed_digit(call: Any) -> None:
    columns = "split,state,activations,memory,sent,comm,bubble,step,share,try"
    assert columns == ",".join(COLUMNS)
    lines = call("--members", "8").splitlines()
    assert lines[:4] == [
        "# 7B parameters of 16 bytes, 8 members of 80 GiB, alpha 5 us, bandwidth 100 GB/s",
        "# all_reduce of the gradients, 14 GB: 24.5 GB each, 245 ms; 280 ms with the",
        "#   approximation 2 S",
        "",
    ]
    assert max(map(len, lines)) == 80
    first, second = ([re.split(r"  +", line) for line in lines[at : at + 10]] for at in (4, 15))
    assert [*first[0][1:], *second[0][1:]] == columns.split(",")
    assert [[*one, *other[1:]] for one, other in zip(first[1:], second[1:], strict=True)] == [
        ["DP", "8x1x1", "104 GiB", "8.5 GiB", "113 GiB", "24.5 GB", "245 ms", "0.0 %", "2.54 s", "9.7 %",
         "no fit"],
        ["ZeRO-1", "8x1x1", "35.9 GiB", "8.5 GiB", "44.4 GiB", "24.5 GB", "245 ms", "0.0 %", "2.54 s", "9.7 %", "1"],
        ["ZeRO-2", "8x1x1", "24.4 GiB", "8.5 GiB", "32.9 GiB", "61.2 GB", "613 ms", "0.0 %", "2.91 s", "21.1 %", "2"],
        ["ZeRO-3", "8x1x1", "13 GiB", "8.5 GiB", "21.5 GiB", "147 GB", "1.47 s", "0.0 %", "3.76 s", "39.1 %", "3"],
        ["TP", "1x1x8", "13 GiB", "3.25 GiB", "16.3 GiB", "120 GB", "1.49 s", "0.0 %", "3.78 s", "39.4 %", "4"],
        ["TP+SP", "1x1x8", "13 GiB", "1.06 GiB", "14.1 GiB", "120 GB", "1.49 s", "0.0 %", "3.78 s", "39.4 %", "5"],
        ["PP", "1x8x1", "13 GiB", "8.5 GiB", "21.5 GiB", "1.07 GB", "11.1 ms", "17.9 %", "2.81 s", "0.4 %", "6"],
        ["3D", "2x2x2", "26.1 GiB", "4.25 GiB", "30.3 GiB", "20.8 GB", "218 ms", "5.9 %", "2.66 s", "8.2 %", "7"],
        ["DiLoCo", "8x1x1", "156 GiB", "8.5 GiB", "165 GiB", "245 MB", "2.45 ms", "0.0 %", "2.3 s", "0.1 %",
         "no fit"],
    ]  # fmt: skip
    assert flat("\n".join(lines[25:])) == (
        "\n# ZeRO-2 and ZeRO-3 reduce gradients after each of 4 micro-batches: fewer larger ones send less"
    )
    assert "micro-batches" not in call("--micro-batches", "8")


def test_half_a_million_parameters_on_four_workers(call: Any) -> None:
    out = call("--parameters", "500k", "--members", "4", "--precision", "single", "--alpha", "50us",
               "--bandwidth", "2GB/s", "--columns", "try , sent")  # fmt: skip
    assert "gradients, 2 MB: 3 MB each, 1.8 ms; 2.3 ms with the approximation 2 S" in flat(out)
    assert flat(out).splitlines()[3].split() == ["try", "sent"]


def test_json_has_bytes_and_seconds(call: Any) -> None:
    answer = json.loads(call("--json", "--split", "4x2x1", "-H", "10"))
    assert answer["gradients"]["bytes"] == 14e9
    rows = {row["name"]: row for row in answer["training"]}
    assert rows["3D"]["split"] == [4, 2, 1]
    assert rows["DiLoCo"]["sent"] == pytest.approx(2.45e9)
    assert (rows["DP"]["fits"], rows["DP"]["try"]) == (False, None)
    assert sorted(row["try"] for row in rows.values() if row["fits"]) == list(range(1, 8))


def test_it_says_what_would_fit(call: Any) -> None:
    """More members where the state alone is too large; else fewer or smaller micro-batches help, too."""
    args = ("--parameters", "70B", "--layers", "80", "--hidden", "8192", "--columns", "try")
    assert flat(call(*args)).endswith(
        "# none fits: the state alone takes 130 GiB of a member with ZeRO-3; it needs more than 13 members, more "
        "memory in each, or fewer bytes of a parameter\n"
    )
    assert "none fits" in call(*args, "--members", "13")
    long = call(*args, "--members", "14", "--sequence", "65536")
    assert "none fits: more members, or fewer or smaller micro-batches" in flat(long)
    assert "none fits" not in call()
    assert ", 1 member of 200 GiB," in call("--members", "1", "--device-memory", "200G")
    assert ", 1 member of 74.5 GiB," in call("--members", "1", "--device-memory", "80GB"), "what was taken is shown"
    assert "more than 1 member," in flat(call("--members", "1"))


def test_links_inside_a_machine_show_where_each_part_belongs(call: Any) -> None:
    """A layer is shared inside a machine, stages and data across."""
    args = ("--parameters", "70B", "--layers", "80", "--hidden", "8192", "--members", "64", "--bandwidth", "50GB/s")
    rows = {row["name"]: row for row in json.loads(call(*args, "--inside", "450GB/s", "--json"))["training"]}
    assert (rows["3D"]["split"], rows["3D"]["try"]) == ([4, 2, 8], 1)
    alone = {row["name"]: row for row in json.loads(call(*args, "--json"))["training"]}
    assert alone["3D"]["split"] != [4, 2, 8]
    assert rows["TP"]["step"] == alone["TP"]["step"]  # it spans machines
    assert "450 GB/s inside a machine of 4" in flat(call(*args, "--inside", "450GB/s", "--machine", "4"))


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--parameters", "many"], "--parameters"),
        (["--members", "0"], "from 1 to"),
        (["--split", "2x2"], "multiply to 8"),
        (["--split", "1x8x1", "--layers", "4"], "at most 4 stages"),
        (["--columns", "memory,speed"], "'speed'"),
        (["--columns", ","], "some of split"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(args: list[str], says: str, call: Any) -> None:
    assert says in call(*args, code=2)


def test_numbers_are_read_and_bytes_written() -> None:
    assert [parse_count(text, "-n") for text in ("4096", "500k", "7B", "7 G", "1.5M", "2T")] == [
        4096, 500_000, 7 * 10**9, 7 * 10**9, 1_500_000, 2 * 10**12,
    ]  # fmt: skip
    for text in ("", "B", "-1", "0", "1e9", "7b", "\u0665", "9" * 15 + "T"):
        with pytest.raises(ConfigError, match="-n: no number"):
            parse_count(text, "-n")
    assert [format_bytes(n) for n in (0, 999, 1.75e9, 3e6)] == ["0 B", "999 B", "1.75 GB", "3 MB"]
