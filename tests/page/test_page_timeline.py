"""What the page shows, of the master's real state machine: sections, flows, epochs and what they cost, throughput."""

from __future__ import annotations

import gc
import itertools
import json
from typing import Any

import msgspec
import pytest

from tests.master.transcript import GROUP, Room
from wancoll.limits import Limits
from wancoll.wire import messages as m
from wancoll_master.core.paths import flows
from wancoll_master.core.ready import Watched
from wancoll_master.core.views import page
from wancoll_master.core.views.page import GroupTimeline

WALL = 1_000_000.0  # seconds since 1970 at the room's time 0


class Looked:
    """A room whose page somebody looks at."""

    def __init__(self, members: int = 3, **limits: Any) -> None:
        self.room, self.timeline, self._told = Room(Limits(voters=32, **limits)), GroupTimeline(), 0
        if members:
            self.room.form(members, least=2)

    def look(self) -> dict[str, Any]:
        """All sections, as a browser has them."""
        for record in self.room.records[self._told :]:
            at = WALL + self.room.now
            self.timeline.note(m.EventRecord(at, record.group, record.epoch, record.kind, record.text))
        self._told = len(self.room.records)
        room = self.room
        found = [
            one for one in self.timeline.look(room.state, room.now, WALL + room.now, since=WALL) if one is not None
        ]
        assert len(dict(found)) == len(found), "a section is told twice"
        return dict(json.loads(msgspec.json.encode(dict(found))))

    def of(self, part: str) -> Any:
        return self.look()[f"g/{GROUP}/{part}"]

    def beat(self, i: int, *, called: int = 0, committed: int = 0, **more: Any) -> m.Pong:
        """Daemon d*i* says this of itself and of its member."""
        group = self.room.group
        calls = [(self.room.mid(f"m{i}"), group.epoch, called, committed)]
        self.room.say(f"d{i}", m.Heartbeat(1, calls, **more))
        pong: m.Pong = self.room.take(f"d{i}", m.Pong)[-1]
        return pong


def test_while_nobody_looks_daemons_are_not_asked_for_more() -> None:
    looked = Looked()
    assert not looked.beat(0).watched
    looked.room.step(Watched(looked.room.now + 5))
    assert looked.beat(0).watched
    looked.room.now += 5
    assert not looked.beat(0).watched


def test_the_first_line_says_who_is_missing_and_since_when() -> None:
    looked = Looked()
    top = looked.look()["top"]
    assert (top["well"], top["line"], top["note"]) == (True, "all is well: 1 group, 3 members", "")
    assert (top["groups"], top["more"], top["daemons"], top["term"]) == ([GROUP], 0, 3, 1)
    looked.room.drop("d1", "reset")
    next_epoch(looked)
    looked.look()
    looked.room.now += 7
    for i in (0, 2):
        looked.beat(i)
    top = looked.look()["top"]
    assert (top["well"], top["line"]) == (True, "all is well again: 1 group, 2 members")
    assert top["note"] == f"group {GROUP} lost m1 7 s ago: daemon d1: reset"
    looked.room.drop("d2", "reset")
    next_epoch(looked)
    top = looked.look()["top"]
    assert not top["well"]
    assert top["line"] == f"group {GROUP} waits for joiners: 1 of min_world=2 members are here"
    assert top["note"] == f"group {GROUP} lost m2 0 s ago: daemon d2: reset"


def test_an_epoch_tells_whom_it_lost_and_what_that_cost() -> None:
    looked = Looked(4)
    assert looked.of("epochs") == [[1, WALL + 100, 4, "first", looked.timeline.epochs[0].reason, 0, 0]]
    looked.room.drop("d1", "reset")
    looked.look()  # the loss is known, the epoch has not begun
    looked.room.now += 0.25
    next_epoch(looked)
    number, at, world, kind, reason, gap, recovery = looked.of("epochs")[-1]
    assert (number, at, world, kind) == (2, WALL + 100.25, 3, "lost")
    assert reason == "lost m1: daemon d1: reset"
    assert (gap, recovery) == (0.25, 0)
    assert looked.of("members")["lost"] == [["m1", WALL + 100, "daemon d1: reset"]]
    mids = {name: looked.room.mid(name) for name in looked.room.names}
    looked.beat(0, recovered=[(mids["m0"], 2, 0.5)])
    looked.beat(2, recovered=[(mids["m2"], 2, 0.4), (mids["m0"], 2, 9.0), (mids["m2"], 1, 9.0)])
    assert looked.of("epochs")[-1][-1] == 0.5  # what is of others, and of before, does not count
    looked.room.join("m1", daemon="e1", start=4, least=2)
    assert looked.of("members")["lost"] == []  # it is back
    looked.room.drop("e1", "reset")
    assert [one[0] for one in looked.of("members")["lost"]] == ["m1"]
    looked.room.now += 400
    assert looked.of("members")["lost"] == []


def next_epoch(looked: Looked) -> None:
    """The members say what they have finished, so that the next epoch begins."""
    epoch = looked.room.epoch
    for member in list(looked.room.group.members):
        looked.room.say(member.daemon.name, m.Frozen(GROUP, member.mid, epoch, m.EpochReport(0, [], [], [])))
    assert looked.room.epoch == epoch + 1


def test_links_are_as_fast_as_heartbeats_say() -> None:
    looked = Looked()
    ring = [[0, 1], [1, 2], [2, 0]]
    assert [one[:3] for one in looked.of("links")["drawn"]] == [[*ends, None] for ends in ring]
    names = [member.daemon.name for member in looked.room.group.members]
    numbers = [int(name[1:]) for name in names]
    right = dict(zip(numbers, [*names[1:], names[0]], strict=True))
    for seconds in range(3):
        for i in numbers:
            faster = 2 if i == numbers[1] else 1
            looked.beat(i, moved=[(right[i], faster * seconds * 1_000_000, 1000 * seconds, 100 * seconds)])
        looked.room.now += 1
    looked.room.now -= 1
    links = looked.of("links")["drawn"]
    assert [one[:3] for one in links] == [[0, 1, 1e6], [1, 2, 2e6], [2, 0, 1e6]]
    assert all(one[3] == pytest.approx(0.1 * (1 - (1 - flows._NEWEST) ** 2), rel=0.01) for one in links)
    assert looked.of("links")["sends"] == [1e6, 2e6, 1e6]
    assert looked.of("now")["rate"] == 4e6
    looked.room.now += flows.FRESH + 0.1  # nothing more is said
    assert [one[:3] for one in looked.of("links")["drawn"]] == [[*ends, None] for ends in ring]
    assert looked.of("now")["rate"] is None


def test_a_link_beside_the_ring_is_drawn_if_it_carries_much() -> None:
    looked = Looked(5)
    order = [member.daemon.name for member in looked.room.group.members]
    first = int(order[0][1:])
    for seconds in range(2):
        looked.beat(first, moved=[(order[1], seconds * 10**6, 1, 0), (order[2], seconds * 10**6, 1, 0),
                                  (order[3], seconds * 1000, 1, 0), ("elsewhere", seconds * 10**9, 1, 0)])  # fmt: skip
        looked.room.now += 1
    looked.room.now -= 1
    assert [one[:2] for one in looked.of("links")["drawn"]] == [[i, (i + 1) % 5] for i in range(5)] + [[0, 2]]
    assert looked.of("now")["rate"] == 2.0e6


def test_what_a_daemon_says_of_links_is_bounded_and_may_begin_anew() -> None:
    looked = Looked()
    daemon = looked.room.state.daemons["d0"]
    for many in range(4):
        looked.beat(0, moved=[(f"n{many}-{i}", 5, 5, 5) for i in range(64)])
    assert len(daemon.flows) == flows.MOST
    looked.beat(0, moved=[("d1", 10**9, 10, 10)])
    looked.room.now += 1
    looked.beat(0, moved=[("d1", 5, 1, 0)])  # another process, which counts from 0
    assert not daemon.flows["d1"].known
    looked.room.now += 1
    looked.beat(0, moved=[("d1", 5, 1, 0)])
    assert (daemon.flows["d1"].rate, daemon.flows["d1"].loss) == (0, 0)


def test_what_runs_and_who_has_not_called_it() -> None:
    looked = Looked()
    assert looked.of("now")["runs"] == 0
    looked.beat(0, called=1)
    looked.beat(1, called=1)
    now = looked.of("now")
    assert (now["runs"], now["lacks"], now["lacking"], now["since"]) == (1, ["m2"], 1, WALL + 100)
    looked.room.now += 2
    for i in range(3):
        looked.beat(i, called=1)
    now = looked.of("now")
    assert (now["runs"], now["lacks"], now["since"]) == (1, [], WALL + 100)
    for i in range(3):
        looked.beat(i, called=2, committed=1)
    now = looked.of("now")
    assert (now["runs"], now["committed"], now["since"]) == (2, 1, WALL + 102)


def test_who_is_waited_for_is_named_and_marked() -> None:
    looked = Looked()
    looked.beat(0, called=1)
    looked.room.now += 2
    wait = m.OpWait(1, "all_reduce(10 x float32)", 40, "links", 2.0, 2.0)
    for i in (0, 1):
        looked.beat(i, called=1)
        looked.room.say(f"d{i}", m.Waits(GROUP, looked.room.mid(f"m{i}"), 1, [wait], []))
    looked.beat(2)
    sections = looked.look()
    ((text, nbytes, since),) = sections[f"g/{GROUP}/now"]["waits"]
    assert "waits for m2" in text
    assert (nbytes, since) == (40, WALL + 100)
    marked = {one[0]: one[6] for one in sections[f"g/{GROUP}/members"]["here"]}
    assert marked["m2"] == "it has not called the operation"
    assert (marked["m0"], marked["m1"]) == ("", "")
    assert not sections["top"]["well"]


def test_throughput_is_sampled_each_second_while_somebody_looks() -> None:
    looked = Looked()
    for committed in range(0, 60, 2):
        for i in range(3):
            looked.beat(i, called=committed, committed=committed)
        looked.look()
        looked.room.now += 0.5
    samples = looked.of("history")
    assert [round(b[0] - a[0], 1) for a, b in itertools.pairwise(samples)] == [1.0] * (len(samples) - 1)
    assert {one[2] for one in samples[1:-1]} == {4.0}
    assert looked.of("now")["sample"] == samples[-1]


def test_the_plan_says_what_was_decided_and_why() -> None:
    looked = Looked()
    looked.timeline.note(m.EventRecord(WALL, GROUP, 1, "plan", "lanes 4 to 8: <b>"))
    found = looked.of("plan")
    assert ["lanes", "4 a link, in 4 lane groups"] in found["facts"]
    assert ["commit", "by the members"] in found["facts"]
    assert found["why"] == [[WALL, 1, "lanes 4 to 8: <b>"]]


def test_of_many_groups_those_that_wait_are_shown() -> None:
    looked = Looked(0)
    for i in range(page.MOST_GROUPS + 10):
        looked.room.join("m0", daemon=f"d{i}", group=f"g{i:03}")
    looked.room.join("m0", daemon="e", start=2, group="zz-forming")
    top = looked.look()["top"]
    assert len(top["groups"]) == page.MOST_GROUPS
    assert top["groups"][-1] == "zz-forming"
    assert top["more"] == 11
    assert not top["well"]
    assert len(looked.timeline._throughput) == page.MOST_GROUPS


def test_of_very_many_groups_a_look_has_pauses_and_keeps_little(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, many, told, most = Looked(0), 3 * page._AT_ONCE // page._WEIGHT, 0, 0
    for i in range(many):
        looked.room.join("m0", daemon=f"d{i}", group=f"g{i:03}", start=1)
    groups = page.report.groups

    def counted(*asked: Any) -> list[m.GroupStatus]:
        nonlocal told
        told += 1
        return groups(*asked)

    monkeypatch.setattr(page.report, "groups", counted)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for section in looked.timeline.look(looked.room.state, 100.0, WALL, since=WALL):
            if section is None:
                most, told = max(most, told), 0
            elif section[0] == "top":
                grown = len(gc.get_objects()) - before
                assert section[1]["line"] == f"all is well: {many} groups, {many} members"
    finally:
        gc.enable()
    assert 0 < most <= page._AT_ONCE // page._WEIGHT
    assert grown < 2 * many  # a collection of it all would hold the master up longer than any piece


def test_of_what_moves_between_very_many_members_a_look_has_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_MOST_CHORDS", 3)
    monkeypatch.setattr(page, "_FLOWS_AT_ONCE", 1)
    looked = Looked(6)
    looked.room.step(Watched(looked.room.now + 5))
    for seconds in (0, 1):
        looked.room.now += 1
        for i in range(6):
            moved = [(f"d{j}", seconds * (10 * i + j) * 10**6, 0, 0) for j in range(6) if j != i]
            looked.beat(i, moved=moved)
    drawn = looked.of("links")["drawn"]
    assert [one[:3] for one in drawn[6:]] == [[5, 4, 54e6], [5, 3, 53e6], [5, 2, 52e6]]
    found = list(looked.timeline.look(looked.room.state, looked.room.now, WALL, since=WALL))
    first = [one is not None and one[0] == f"g/{GROUP}/members" for one in found].index(True)
    assert found[first - 6 : first] == [None] * 6


def test_what_is_kept_is_bounded() -> None:
    timeline = GroupTimeline()
    for i in range(1000):
        timeline.note(m.EventRecord(i, f"g{i}", i, "daemon died", f"lost m{i}: x"))
        timeline.note(m.EventRecord(i, f"h{i}", i, "epoch", f"why; {i} members: m"))
    assert len(timeline.events) == page.EVENTS
    assert len(timeline.epochs) == page._EPOCHS
    assert len(timeline._lost_at) == page._MOST_GROUPS_KNOWN


def test_a_look_at_a_state_that_ends_meanwhile_does_not_fail() -> None:
    looked = Looked()
    looking = looked.timeline.look(looked.room.state, 100.0, WALL, since=WALL)
    assert next(looking) is not None  # top
    looked.room.state.groups.clear()
    assert [name for name, _ in filter(None, looking)] == ["events"]


def test_names_are_told_as_they_are() -> None:
    looked = Looked(0)
    name = "<script>alert(1)</script>"
    looked.room.join(name, daemon="<b>", group="</script><svg onload=x>", start=1)
    sections = looked.look()
    assert sections["g/</script><svg onload=x>/members"]["here"][0][:2] == [name, "<b>"]
