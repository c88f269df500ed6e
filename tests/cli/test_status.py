"""`wancoll status` and `events`: whether all is well, the plan and the measured paths, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from wancoll.cli.looking import events, status, tables
from wancoll.health import health
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


def wide() -> Console:
    """On which each line is one."""
    return Console(width=160, highlight=False)


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


def test_a_path_says_what_was_sent_and_a_plan_who_owns_how_much():
    assert tables.path(m.LinkStatus("b", "a", 0.08, 12e6, 0, 0.0, 3_000_000)) == "80 ms, 12 MB/s (probe), sent 3 MB"
    plan = m.PlanStatus(msgspec.structs.replace(PLAN, shares=[1024, 0, 512]), 45e6, 0.32, 0.04, 2e-8)
    assert "  a direct all_reduce's tensor is owned to 66.7, 0, 33.3 %, by rank" in tables.plan_lines(plan)


def test_many_paths_are_listed(capsys):
    links = [m.LinkStatus(f"d{i:02}", f"d{i + 1:02}", 0.01, 0.0, 0, 0.0) for i in range(60)]
    status.print_tables(answer(links, None))
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == tables.LISTED
    assert [cell.strip() for cell in rows[1].split("│")[1:4]] == ["d01", "d02", "10 ms"]
    assert "the first 50 of 60" in out


def test_the_plan_in_words(capsys):
    status.print_tables(answer([], m.PlanStatus(PLAN, 45e6, 0.32, 0.04, 2e-8)), console=wide())
    out = capsys.readouterr().out
    assert "ring: slowest edge 45 MB/s, once around 320 ms\n" in out
    assert "operations are committed by the master\n" in out
    assert "plan: lanes 16, lane groups 1, parts from 8 KiB, pacing 7.81 MB/s per lane, congestion control bbr\n" in out
    assert "  all_reduce: full_exchange up to 96 KiB, direct up to 5 MiB, ring\n  broadcast: tree\n" in out


def test_json_has_all_of_it_by_the_fields_names(capsys):
    whole = answer(LINKS, m.PlanStatus(PLAN, 45e6, 0.32, 0.04, 2e-8))
    status.print_json(msgspec.structs.replace(whole, groups=[*whole.groups, waiting()]))
    told = json.loads(capsys.readouterr().out)
    assert told["links"][0] == {
        "source": "a",
        "target": "b",
        "rtt": 0.0801,
        "bandwidth": 62.5e6,
        "lanes": 16,
        "loss": 0.001,
        "sent": 0,
    }
    plan = told["groups"][0]["plan"]
    assert (plan["bottleneck"], plan["alpha"]) == (45e6, 0.04)
    assert plan["plan"]["choices"]["all_reduce"][0] == [98304, "full_exchange"]
    [wait, _] = told["groups"][1]["waits"]
    assert (wait["op"], wait["seq"], wait["seconds"]) == ("g/7", 7, 3.04)
    assert wait["causes"][0] == {
        "member": "m1",
        "rank": 1,
        "other": "m2\x1b[0m",
        "other_rank": 2,
        "why": "its packets do not arrive",
        "seconds": 1.26,
    }
    assert told["groups"][1]["pairs"][0]["done"] == "routed around"


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
    status.print_tables(m.Status(1, 1.0, "0.1.0", ["a", "b"], [waiting()], [], []), console=wide())
    out = capsys.readouterr().out
    assert (
        "g/7, all_reduce(10 x float32, op=sum), epoch 3: not ended after 3.0 s, done by 1 member\n"
        "  waits for link m1 (rank 1) -> m2?[0m (rank 2): its packets do not arrive, since 1.3 s ago\n"
        "  waits for m3 (rank 3): it has not called the operation, since 3.0 s ago\n"
        "m0: recv(1 x int8, source=m1, tag=0), epoch 3: not ended after 2.0 s, done by 0 members\n"
        "  no member or link stands out\n"
    ) in out
    line = "  m1 -> m2: lost 1 min 5 s ago, 2 times, last 5 s ago: it took nothing; routed around"
    assert " ".join(out.split()).count(" ".join(line.split())) == 1


def test_all_of_it_fits_80_columns_whatever_the_names_are(capsys):
    """But the first line, which is one for programs: nothing of names and addresses is lost."""
    names = [f"trainer-{i}." + "eu-central-1.compute." * 5 + "internal" for i in range(4)]
    members = [
        m.MemberStatus(name, i, f"d-{name}", "member", i, [f"203.0.113.{i}:7401", f"[2001:db8:1::{i}]:7401"], 7, 0.1)
        for i, name in enumerate(names)
    ]  # fmt: skip
    pairs = [m.PairStatus(names[0], names[1], "lost", "it took nothing", 65.0, 5.0, 2, "routed around")]
    causes = [m.WaitCause(names[1], 1, names[2], 2, "its packets do not arrive", 1.26)]
    waits = [m.WaitStatus("g/7", 7, 3, "all_reduce(10 x float32, op=sum)", 40, 3.04, 1, causes)]
    plan = m.PlanStatus(PLAN, 45e6, 0.32, 0.04, 2e-8)
    group = m.GroupStatus("g" * 128, "running", 3, 2, 1, 16, 4, members, "x" * 200, plan, waits, pairs)
    links = [m.LinkStatus(a, b, 0.0801, 62.5e6, 16, 0.001) for a in names for b in names if a != b]
    happened = [m.EventRecord(5.0, "g" * 128, 3, "evicted", f"lost {names[3]}: silent for 3 s")]
    status.print_tables(m.Status(1, 1.0, "0.1.0", names, [group], happened, links))
    first, *rest = capsys.readouterr().out.splitlines()
    assert "its packets do not arrive" in first
    assert max(map(len, rest)) == 80
    assert not any("from \\ to" in line for line in rest), "a matrix of so many would be folded beyond reading"
    columns = list(zip(*[line.split("│")[1:-1] for line in rest if line.count("│") == 7], strict=True))
    assert "".join(cell.strip() for cell in columns[1]) == "".join(names)
    assert "".join(cell.strip() for cell in columns[5]).count(":7401") == 8


def narrow(height: int = 24) -> Console:
    return Console(width=80, height=height, highlight=False, force_terminal=False)


def shown(whole: m.Status, height: int) -> list[str]:
    console = narrow(height)
    rest = tables.render(msgspec.structs.replace(whole, events=[]), (), console, brief=True)
    with console.capture() as caught:
        console.print(tables.screen(["all is well"], whole, rest, console), end="")
    return [line.rstrip() for line in caught.get().splitlines()]


def test_a_screen_shows_the_newest_events_whatever_the_rest_takes():
    """`wancoll top` at 80x24: of many members some are not shown, and it says how many lines."""
    happened = [m.EventRecord(float(i), "g", 3, "epoch", f"number {i} " + "x" * 50) for i in range(10)]
    whole = m.Status(1, 9.0, "0.1.0", ["a"], [running("g", 30)], happened)
    lines = shown(whole, 24)
    assert len(lines) == 24
    assert (lines[0], lines[-2].endswith("number 9"), lines[-1].strip()) == ("all is well", True, "x" * 50)
    assert sum("number" in line for line in lines) == 3
    [more] = [line for line in lines if "more lines" in line]
    hidden = [i for i in range(30) if not any(f" m{i} " in line for line in lines)]
    assert int(more.split()[1]) == len(hidden) + 1, "with the table's lower edge"
    few = msgspec.structs.replace(whole, groups=[running("g", 2)])
    lines = shown(few, 24)
    assert not any("more lines" in line for line in lines)
    assert (len(lines) in (23, 24), lines[-1].strip()) == (True, "x" * 50), "as many as fit, the newest"
    assert [line.split()[-1] for line in lines if "number" in line] == ["5", "6", "7", "8", "9"]
    assert len(shown(few, 60)) < 60


def test_one_group_alone_leaves_the_masters_own_counts(capsys):
    whole = m.Status(1, 9.0, "0.1.0", ["a", "b"], [running("g", 2), running("h", 2)], [])
    for group in ("g", "nix"):
        status.print_tables(whole, shown=status.Shown(group), console=narrow())
        assert "2 daemons, 2 groups" in capsys.readouterr().out
    status.print_tables(m.Status(1, 9.0, "0.1.0", ["a"], [running("g", 1)], []), console=narrow())
    assert "1 daemon, 1 group\n" in capsys.readouterr().out


def test_a_rotation_in_progress_is_one_line(capsys):
    status.print_tables(m.Status(1, 9.0, "0.1.0", [], [], [], rotating=True), console=narrow())
    assert "two keys of the master are good: `wancoll key rotate --finish` drops the old one" in capsys.readouterr().out
    status.print_tables(m.Status(1, 9.0, "0.1.0", [], [], []), console=narrow())
    assert "rotate" not in capsys.readouterr().out


def test_no_cell_breaks_an_address_inside_its_port(capsys):
    def cells(name: str, *addresses: str) -> list[str]:
        member = m.MemberStatus(name, 1, f"daemon-of-{name}", "member", 0, list(addresses), 7, 0.1)
        group = msgspec.structs.replace(running("g", 1), members=[member])
        status.print_tables(m.Status(1, 9.0, "0.1.0", ["a"], [group], []), console=narrow())
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        return [line.split("│")[-2].strip() for line in lines if line.startswith("│") and line.split("│")[-2].strip()]

    assert cells("x" * 50, "203.0.113.200:17401", "[2001:db8:1::200]:17402") == [
        "203.0.113.200:17401", "[2001:db8:1::200]:17402",
    ]  # fmt: skip
    long = cells("x" * 50, "trainer-0." + "eu-central-1." * 6 + "internal:17401")
    assert (long[-1], "".join(long[:-1])) == (":17401", "trainer-0." + "eu-central-1." * 6 + "internal")


# ---- whether all is well ------------------------------------------------------------------------------


def running(name: str, world: int, *, silent: float = 0.1, **others: Any) -> m.GroupStatus:
    members = [m.MemberStatus(f"m{i}", i + 1, "a", "member", i, [], 3, silent if i == 0 else 0.1) for i in range(world)]
    return msgspec.structs.replace(m.GroupStatus(name, "running", 3, 2, 2, 8, 3, members, ""), **others)


def says(*groups: m.GroupStatus, events: Sequence[m.EventRecord] = (), **options: Any) -> tuple[bool, str, str]:
    found = health(m.Status(1, 9.0, "0.1.0", ["a", "b"], list(groups), list(events)), 1000.0, **options)
    return found.well, found.line, found.note


LOST = m.EventRecord(996.0, "g", 3, "daemon died", "lost m2: daemon d2: its connection broke")


def test_all_is_well():
    assert says() == (True, "all is well: no group, 2 daemons", "")
    assert says(running("g", 4), running("h", 4)) == (True, "all is well: 2 groups, 8 members", "")
    assert says(running("g", 4, waiting_for="m0 to be done with operation 3, for 0.1 s"))[0]


def test_a_loss_is_told_of_for_a_while_after_the_group_goes_on():
    note = "group g lost m2 4 s ago: daemon d2: its connection broke"
    assert says(running("g", 2), events=[LOST]) == (True, "all is well again: 1 group, 2 members", note)
    assert says(running("g", 2), events=[msgspec.structs.replace(LOST, time=699.0)])[2] == ""
    late = msgspec.structs.replace(LOST, time=1003.0)  # the master's clock is ahead of ours
    assert " 0 s ago" in says(running("g", 2), events=[late])[2]
    left = m.EventRecord(997.0, "g", 4, "left", "m1 left")
    assert says(running("g", 2), events=[LOST, left])[2] == note, "somebody who leaves does not make it unsaid"


def test_who_is_back_is_not_lost():
    """By name: who is missing where the group has begun anew is not back."""
    back = "group g lost m2 4 s ago, now back: daemon d2: its connection broke"
    assert says(running("g", 3), events=[LOST])[2] == back
    both = msgspec.structs.replace(LOST, text="lost m2, m3: daemon d2: its connection broke")
    assert ", now back" not in says(running("g", 3), events=[both])[2], "m3 is not"
    assert ", now back" in says(running("g", 4), events=[both])[2]
    first = m.EventRecord(996.0, "g", 1, "epoch", "the group has formed: m0, m1; 2 members: m0, m1")
    assert ", now back" not in says(running("g", 2), events=[LOST, first])[2]
    joins = running("g", 3)
    joiners = [msgspec.structs.replace(one, rank=-1, state="joining") for one in joins.members[2:]]
    joins = msgspec.structs.replace(joins, members=joins.members[:2] + joiners)
    assert ", now back" not in says(joins, events=[LOST])[2], "it only asks to be let in"


def test_a_group_that_was_lost_whole():
    line = "group g lost m2 4 s ago: daemon d2: its connection broke; nobody is left"
    assert says(running("h", 2), events=[LOST]) == (False, line, "")
    assert says(running("h", 2), events=[LOST], group="g") == (False, line, ""), "that it is not there is no more"
    left = m.EventRecord(997.0, "g", 4, "left", "m1 left")
    note = "group g lost m2 4 s ago: daemon d2: its connection broke"
    assert says(running("h", 2), events=[LOST, left]) == (True, "all is well again: 1 group, 2 members", note)
    stopped = m.EventRecord(997.0, "g", 0, "stopped", "an operator says that all of its members stopped")
    assert says(running("h", 2), events=[LOST, stopped]) == (True, "all is well again: 1 group, 2 members", note)


def test_a_group_that_ran_and_of_which_nobody_is_here_comes_first():
    """Not an older loss, after which it went on; a loss of all that is left says why."""
    line = "group g of 2 members was running, and none has come back: m0, m1 did not say that they stop. "
    line += "Start them again; if they are gone for good: `wancoll evict --group g --all`"
    on = m.EventRecord(997.0, "g", 4, "epoch", "m2 is back; 3 members: m0, m1, m2")
    whole = m.Status(1, 9.0, "0.1.0", ["a"], [running("h", 1)], [LOST, on], gone=[("g", 2, "m0, m1")])
    found = health(whole, 1000.0)
    assert (found.well, found.line) == (False, f"{line} (and 1 more)")
    assert health(msgspec.structs.replace(whole, events=[]), 1000.0, group="g").line == line
    lost = health(msgspec.structs.replace(whole, events=[LOST]), 1000.0, group="g")
    why = "group g lost m2 4 s ago: daemon d2: its connection broke; nobody is left. "
    assert lost.line == why + line.partition(". ")[2]
    assert health(whole, 1000.0, group="h").line.startswith("group h waits for joiners")
    assert health(msgspec.structs.replace(whole, groups=[], gone=[]), 1000.0).well


def test_whom_a_group_waits_for():
    slow = waiting().waits
    assert says(running("g", 4, waits=slow))[:2] == (
        False,
        "group g waits for the link m1 -> m2\x1b[0m (3 s): its packets do not arrive",
    )
    late = msgspec.structs.replace(slow[0], seconds=12.4, causes=slow[0].causes[1:])
    found = says(running("g", 4, waits=[late], silent=1.6))
    assert found[1] == "group g waits for m3 (12 s): it has not called the operation (and 1 more)"
    assert says(running("g", 4, waits=slow[1:]))[1] == (
        "group g: m0: recv(1 x int8, source=m1, tag=0) has not ended after 2 s"
    )
    assert says(running("g", 4, silent=1.6))[:2] == (False, "group g: m0 has been silent for 1.6 s")
    assert says(running("g", 1))[1] == "group g waits for joiners: 1 of min_world=2 members are here"
    forming = running("g", 1, phase="forming", waiting_for="1 more member to start: 1 of 2 are here")
    assert says(forming)[1] == "group g is forming, and waits for 1 more member to start: 1 of 2 are here"


def refusal(time: float, who: str, *, group: str = "g", why: str = "m0 cannot reach it: timed out") -> m.EventRecord:
    return m.EventRecord(time, group, 3 if group else 0, "refused", f"{who}: {why}")


def test_a_joiner_that_is_refused_again_and_again_comes_first():
    """By whichever name it comes, until it is in, or has not come for a minute. Once only is for itself to know."""
    first, second = refusal(960.0, "p1 of daemon d1"), refusal(990.0, "p2 of daemon d2")
    line = "group g refused p2 10 s ago, refusal 2 in 40 s: m0 cannot reach it: timed out"
    note = "group g lost m2 4 s ago: daemon d2: its connection broke"
    for world in (running("g", 2), running("g", 1), running("g", 2, silent=0.2)):
        assert says(world, events=[LOST, first, second])[1].removesuffix(" (and 1 more)") == line
    assert says(running("g", 2), events=[first, second, LOST]) == (False, line, note)
    assert says(running("g", 2), running("h", 2), events=[first, second], group="h")[0]
    assert says(running("g", 2), events=[first, refusal(990.0, "p2 of daemon d2", group="h")])[0], "once each"
    assert says(running("g", 2), events=[refusal(100.0, "p1 of daemon d1"), second])[0], "that was long ago"
    assert says(running("g", 2), events=[refusal(930.0, "p1 of daemon d1"), refusal(935.0, "p1 of daemon d1")])[0]
    assert says(running("g", 2), events=[first, refusal(990.0, "m1 of daemon d2")])[0], "it is in"
    away = [refusal(each, "daemon d1", group="", why="another's address") for each in (980.0, 990.0)]
    assert says(events=away)[1] == "the master refused daemon d1 10 s ago, refusal 2 in 20 s: another's address"
    assert says(events=away[1:])[1] == "the master refused daemon d1 10 s ago: another's address", "and it has ended"
    assert says(events=[refusal(939.0, "daemon d1", group="")])[0]


def test_one_group_alone_and_masters_that_are_mute():
    sick = running("sick", 1)
    assert says(running("g", 4), sick, group="g") == (True, "all is well: 1 group, 4 members", "")
    assert says(running("g", 4), sick, group="h")[:2] == (False, "there is no group h; the master has g, sick")
    assert says(group="h")[1] == "there is no group h; the master has none"
    assert says(*(running(f"g{i}", 2) for i in range(9)), group="h")[1].endswith("g7 and 1 more")
    assert says(running("g", 4), mute=["b:7400"])[:2] == (False, "master b:7400 gives no status")
    roles = [status.Role("a:1", "leads, term 1"), status.Role("b:1", "stands by"), status.Role("c:1", "no answer yet")]
    assert [role.there for role in roles] == [True, True, False]


def test_a_part_has_the_groups_own_events_and_links(capsys):
    whole = m.Status(1, 9.0, "0.1.0", ["a", "b"], [running("g", 2), running("h", 2)], [], LINKS)
    happened = [m.EventRecord(float(i), "g" if i % 2 else "h", 3, "epoch", f"number {i}") for i in range(9)]
    whole = msgspec.structs.replace(whole, events=happened)
    status.print_json(whole, shown=status.Shown("g", 2))
    told = json.loads(capsys.readouterr().out)
    assert [event["text"] for event in told["events"]] == ["number 5", "number 7"]
    assert ([group["name"] for group in told["groups"]], told["links"], told["well"]) == (["g"], [], True)
    assert status.Shown("", 0).part(whole).events == []


# ---- tokens and keys ----------------------------------------------------------------------------------


def test_columns_fit_80_of_a_terminal_and_are_a_line_each_for_a_program(capsys):
    names, rows = ("ID", "NAME", "ENDS"), [("1a2b", "n" * 70, "never"), ("3c4d", "\x1b[31m", "2026-11-24T22:05Z")]
    tables.columns(names, rows, Console(width=80, force_terminal=True, highlight=False), wide=["NAME"])
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert told == [
        f"ID    {'NAME':55}  ENDS",
        f"1a2b  {'n' * 55}  never",
        f"      {'n' * 15}",
        f"3c4d  {'?[31m':55}  2026-11-24T22:05Z",
    ]
    tables.columns(names, rows, Console(width=80, force_terminal=False, highlight=False), wide=["NAME"])
    told = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert told == [
        f"ID    {'NAME':70}  ENDS",
        f"1a2b  {'n' * 70}  never",
        f"3c4d  {'?[31m':70}  2026-11-24T22:05Z",
    ]


# ---- what happened ------------------------------------------------------------------------------------


def test_events_of_a_group_that_there_is_not(capsys, monkeypatch):
    """Also of one that is over its events are shown; one without any may be there all the same."""
    here = answer([], None)
    told = msgspec.structs.replace(here, events=[m.EventRecord(0.0, "over", 2, "left", "m1 left")])
    monkeypatch.setattr(events, "find", lambda *_: (told, []))
    assert events.events(master="h:1", group="typo") == 3
    assert capsys.readouterr() == ("", "wancoll: there is no group typo; the master has g\n")
    for group in ("g", "over", ""):
        assert events.events(master="h:1", group=group) == 0
        out, err = capsys.readouterr()
        assert (out, err) == ("" if group == "g" else "1970-01-01 00:00:00 over, epoch 2: left: m1 left\n", "")


def test_events_fit_80_of_a_terminal_and_are_a_line_each_for_a_program(capsys, monkeypatch):
    told = msgspec.structs.replace(answer([], None), events=[m.EventRecord(0.0, "g", 2, "left", "word " * 40)])
    monkeypatch.setattr(events, "find", lambda *_: (told, []))
    for terminal in (True, False):
        console = Console(width=80, force_terminal=terminal, highlight=False)
        monkeypatch.setattr(tables, "terminal", lambda console=console: console)
        assert events.events(master="h:1") == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert " ".join(" ".join(lines).split()) == "1970-01-01 00:00:00 g, epoch 2: left:" + 40 * " word"
        assert (max(map(len, lines)) <= 80, len(lines) > 1) == (terminal, terminal)


def test_events_that_came_later():
    told = [m.EventRecord(float(i), "g", 1, "epoch", str(i)) for i in range(6)]
    assert events.later([], told[:2]) == (told[:2], False)
    assert events.later(told[:2], told[1:4]) == (told[2:4], False)
    assert events.later(told[:2], told[:2]) == ([], False)
    assert events.later(told[:2], told[3:]) == (told[3:], True), "more than a master tells of"
    assert events.later(told[:4], told[:2] + told[4:]) == (told[4:], True), "of one that led before"
    assert events.later(told[4:5], told[:2]) == (told[:2], True), "another master's, whose clock is behind"
    many = [m.EventRecord(9.0, "g", 1, "epoch", str(i)) for i in range(status.MOST_EVENTS)]
    assert events.later([], many[1:]) == (many[1:], False)
    assert events.later([], many) == (many, True), "more may have come since there were none"
    assert events.later(told[:2] + told[4:], told[:2]) == ([], False)
    assert events.later(told[3:4], []) == ([], False)


def test_pairs_that_punch_or_need_a_relay_are_named_with_their_rate(capsys):
    why = "m0 has dialled m1: no answer"
    group = running("g", 3, punched=[("m0", "m1", 1.25e7, why)], relayed=[("m0", "m2", 0.0, "")])
    whole = msgspec.structs.replace(answer([], None), groups=[group], relays=["r"])
    status.print_tables(whole)
    out = capsys.readouterr().out
    assert "punched: both dial at once\n  m0 - m1: 12.5 MB/s (m0 has dialled m1: no answer)\n" in out
    assert "through a relay (r)\n  m0 - m2\n" in out
