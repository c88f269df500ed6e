"""`wancoll status`: the plan and the measured paths, as tables and as JSON."""

from __future__ import annotations

import json

import pytest

from wancoll.cli import status
from wancoll.limits import format_size
from wancoll.wire import messages as m

PLAN = m.Plan(
    lanes=16,
    stripe=8192,
    turns=True,
    choices={"broadcast": [(0, "tree")], "all_reduce": [(98304, "full_exchange"), (5 << 20, "direct"), (0, "ring")]},
    avoid=[],
    pacing=7_812_500,
    congestion="bbr",
)


def answer(links: list[m.LinkStatus], plan: m.PlanStatus | None) -> m.Status:
    group = m.GroupStatus("g", "running", 3, 2, 1, 16, 4, [], "", plan)
    return m.Status(1, 1.0, "0.1.0", ["a", "b"], [group], [], links)


LINKS = [
    m.LinkStatus("a", "b", 0.0801, 62.5e6, 16, 0.001),
    m.LinkStatus("b", "a", 0.08, 12e6, 0, 0.0),
    m.LinkStatus("b", "c\x1b[31m", 0.0, 0.0, 0, 0.0),
]


def test_the_matrix_has_a_row_for_each_sender_and_a_column_for_each_receiver(capsys):
    status.print_tables(answer(LINKS, None))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        ["a", "", "80.1 ms, 62.5 MB/s, 0.1 %", ""],
        ["b", "80 ms, 12 MB/s (probe)", "", ""],
        ["c?[31m", "", "", ""],
    ]
    assert "from \\ to" in out
    assert "\x1b" not in out
    assert "plan:" not in out


def test_many_paths_are_listed(capsys):
    links = [m.LinkStatus(f"d{i:02}", f"d{i + 1:02}", 0.01, 0.0, 0, 0.0) for i in range(60)]
    status.print_tables(answer(links, None))
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == status.LISTED
    assert [cell.strip() for cell in rows[1].split("│")[1:4]] == ["d01", "d02", "10 ms"]
    assert "the first 50 of 60" in out


def test_the_plan_in_words(capsys):
    status.print_tables(answer([], m.PlanStatus(PLAN, 45e6, 0.32, 0.04, 2e-8)))
    out = capsys.readouterr().out
    assert "ring: slowest edge 45 MB/s, once around 320 ms\n" in out
    assert "operations are committed by the master\n" in out
    assert "plan: lanes 16, tracks 1, parts from 8 KiB, pacing 7.81 MB/s per lane, congestion control bbr\n" in out
    assert "  all_reduce: full_exchange up to 96 KiB, direct up to 5 MiB, ring\n  broadcast: tree\n" in out


def test_a_plan_from_nothing(capsys):
    plan = m.Plan(1, 1 << 30, False, {}, [], 0, "")
    status.print_tables(answer([], m.PlanStatus(plan, 0.0, 0.0, 0.0, 0.0)))
    out = capsys.readouterr().out
    assert "ring:" not in out
    assert "plan: lanes 1, tracks 1, parts from 1 GiB, pacing none, congestion control as each daemon is set\n" in out


def test_json_has_all_of_it(capsys):
    status.print_json(answer(LINKS, m.PlanStatus(PLAN, 45e6, 0.32, 0.04, 2e-8)))
    told = json.loads(capsys.readouterr().out)
    assert told["links"][0] == {
        "source": "a",
        "target": "b",
        "rtt": 0.0801,
        "bandwidth": 62.5e6,
        "lanes": 16,
        "loss": 0.001,
    }
    plan = told["groups"][0]["plan"]
    assert (plan["bottleneck"], plan["alpha"]) == (45e6, 0.04)
    assert plan["plan"]["choices"]["all_reduce"][0] == [98304, "full_exchange"]


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB")])
def test_sizes(nbytes, text):
    assert format_size(nbytes, 3) == text


def waiting() -> m.GroupStatus:
    causes = [
        m.WaitCause("m1", 1, "m2\x1b[0m", 2, "its packets do not arrive", 1.26),
        m.WaitCause("m3", 3, "", -1, "it has not called the operation", 3.0),
    ]
    slow = m.WaitStatus("g/7", 7, 3, "all_reduce(10 x float32, op=sum)", 40, 3.04, 1, causes)
    calm = m.WaitStatus("m0: recv(1 x int8, source=m1, tag=0)", 0, 3, "recv(1 x int8, source=m1, tag=0)", 1, 2.0, 0, [])
    pairs = [m.PairStatus("m1", "m2", "lost", "it took nothing", 65.0, 5.0, 2, "routed around")]
    return m.GroupStatus("g", "running", 3, 2, 1, 16, 4, [], "x", None, [slow, calm], pairs)


def test_what_waits_and_which_links_failed(capsys):
    status.print_tables(m.Status(1, 1.0, "0.1.0", ["a", "b"], [waiting()], [], []))
    out = capsys.readouterr().out
    assert (
        "g/7, all_reduce(10 x float32, op=sum), epoch 3: not ended after 3.0 s, 1 members are done\n"
        "  waits for link m1 (rank 1) -> m2?[0m (rank 2): its packets do not arrive, since 1.3 s ago\n"
        "  waits for m3 (rank 3): it has not called the operation, since 3.0 s ago\n"
        "m0: recv(1 x int8, source=m1, tag=0), epoch 3: not ended after 2.0 s, 0 members are done\n"
        "  no member or link stands out\n"
    ) in out
    row = next(line for line in out.splitlines() if "routed around" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["m1", "m2", "lost", "1 min 5 s ago", "5 s ago", "2", "routed around", "it took nothing"]


def test_json_has_what_waits(capsys):
    status.print_json(m.Status(1, 1.0, "0.1.0", ["a", "b"], [waiting()], [], []))
    group = json.loads(capsys.readouterr().out)["groups"][0]
    assert group["waits"][0]["causes"][0] == {
        "member": "m1",
        "rank": 1,
        "other": "m2\x1b[0m",
        "other_rank": 2,
        "why": "its packets do not arrive",
        "seconds": 1.26,
    }
    assert (group["waits"][0]["op"], group["waits"][0]["seq"], group["waits"][0]["seconds"]) == ("g/7", 7, 3.04)
    assert group["pairs"][0]["done"] == "routed around"
