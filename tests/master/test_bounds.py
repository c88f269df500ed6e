"""What the master's core remembers has bounds: each is filled, and goes no further."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.master.transcript import GROUP, Room, report_of
from wancoll.collective import Descriptor, DType, Kind
from wancoll.limits import MIB, Limits
from wancoll.wire import messages as m
from wancoll.wire.framing import Decoder, encode

FEW = Limits(
    voters=0,
    groups_known=3,
    daemons_gone=3,
    members_missing=3,
    bad_pairs=3,
    troubles=3,
    ops_in_flight=2,
    rejoin_grace=0.5,
)


@pytest.fixture
def room() -> Room:
    return Room(FEW)


def test_groups_that_are_known(room: Room) -> None:
    for i in range(6):
        room.join(f"m{i}", group=f"g{i}")
    assert list(room.state.used) == ["g3", "g4", "g5"]


def test_voids_of_groups_that_ended() -> None:
    room = Room()
    room.join("m0", group="g")
    room.say("d0", m.GiveUp("g", room.mid("m0"), 1, list(range(1, 100)), "x"))
    assert len(room.state.used["g"].voids) == 99
    room.say("d0", m.Leave("g", "m0", "done"))
    assert not room.state.groups
    assert room.state.used["g"].voids == {}


def test_fates_of_daemons_that_are_gone(room: Room) -> None:
    room.form(6)
    for i in range(5):
        room.drop(f"d{i}")
        room.sleep(2 * room.limits.heartbeat_timeout)
    assert list(room.state.gone) == [("d2", 1), ("d3", 1), ("d4", 1)]


def test_fates_of_one_daemon() -> None:
    room = Room(replace(FEW, group_members=2))
    for i in range(4):
        room.join(f"m{i}", daemon="d0", group=f"g{i}")
        room.say("d0", m.Heartbeat(1, [], [(room.mid(f"m{i}"), 100.0, "stopped")]))
    assert [one.group for one in room.state.gone["d0", 1]] == ["g2", "g3"]


def test_fates_of_members_that_did_not_report(room: Room) -> None:
    room.restarted(mids=tuple(range(1, 8)))
    members = [(mid, f"m{mid}", f"d{mid}") for mid in range(1, 8)]
    plan = m.Plan(4, 1024, True, {}, [], 0, "")
    head = (GROUP, 1, 1, members, plan, b"k" * 16, 1, 1, "formed", 0, [])
    room.say("d1", m.Report(*head, False, m.EpochReport(0, [], [], []), [], 0, [], []))
    room.sleep(1)
    assert room.names == ["m1"]
    assert list(room.state.missing) == [(GROUP, 5), (GROUP, 6), (GROUP, 7)]


def test_members_that_report() -> None:
    """What bounds who joins bounds who reports: of a group, of a daemon, of a master."""
    room = Room(Limits(voters=0, group_members=4, members=6, rejoin_grace=0.5))
    room.restarted(mids=(1, 2, 3, 4))
    for daemon in "abcd":
        room.hello(daemon)

    def report(daemon: str, group: str, mids: range) -> list[str]:
        """The last one's fate."""
        members = [(mid, f"m{mid}", daemon) for mid in mids]
        for mid in mids:
            room.clear()
            room.say(daemon, msgspec.structs.replace(report_of(mid), group=group, members=members))
        return [told.reason for told in room.take(daemon, m.Evicted)]

    assert report("a", GROUP, range(1, 5)) == [], "a whole group comes back"
    assert report("b", "wide", range(10, 15)) == ["it reports a group of 5; expected at most 4 members"]
    assert report("a", "second", range(20, 21)) == ["expected at most 4 members of one daemon"]
    assert report("c", "third", range(30, 32)) == []
    assert report("d", "fourth", range(40, 41)) == ["expected at most 6 members of one master"]
    room.sleep(1)
    assert len(room.state.members) == 6
    assert len(room.group.members) == 4


def test_pairs_that_cannot_reach_each_other_and_complaints(room: Room) -> None:
    room.form(9)
    for i in range(3, 8):
        room.link_down("m0", f"m{i}", "unreachable")
        room.link_down("m1", f"m{i}", "unreachable")
    assert len(room.group.current.complaints) == 3
    assert len(room.group.bad_pairs) == 3
    assert len(room.group.troubles) <= 3


def test_operations_that_are_not_committed_and_those_that_stand_still(room: Room) -> None:
    room.form(2)
    for seq in range(1, 9):
        room.done("m0", seq)
    assert len(room.group.current.tally.open) == 8
    still = m.OpWait(9, "all_reduce", 4, "moving", 100.0, 100.0)
    for name in ("m0", "m1"):
        room.say(f"d{name[1:]}", m.Waits(GROUP, room.mid(name), room.epoch, [still], []))
    assert room.group.stalls == {}
    room.done("m0", 9)
    assert "d0" not in room.conns, "it names an operation that no member can have called"


def test_who_holds_whose_bytes_back(room: Room) -> None:
    room.form(3)
    for first in range(0, 1000, 100):
        links = [m.LinkWait(mid, False, "parked", 2.0, 2.0, 1) for mid in range(first, first + 100)]
        room.say("d0", m.Waits(GROUP, 1, 1, [], links))
    assert set(room.group.current.parks) <= {1, 2, 3}


def test_what_is_called_with_a_grace_time_and_what_it_costs_to_take_that_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room, hashed = Room(), []
    real = Descriptor.__hash__

    def counted(self: Descriptor) -> int:
        hashed.append(self)
        return real(self)

    def call(name: str, count: int) -> None:
        said = Descriptor(Kind.all_reduce, DType.float32, count=count, grace=5.0)
        room.say("d" + name[1:], m.CalledWithGrace(GROUP, room.mid(name), 1, 1, said))

    room.form(33)
    for count in range(2, 100):
        call("m0", count)
    monkeypatch.setattr(Descriptor, "__hash__", counted)
    for name in room.names[1:]:
        call(name, 4)
    assert len(hashed) <= 10 * len(room.names)
    grace = room.group.current.straggler_deadlines[1]
    assert {each.count: many for each, many in grace.counts.items()} == {99: 1, 4: 32}
    assert grace.call.count == 4


def test_operations_with_a_grace_time_are_bounded() -> None:
    room = Room(Limits(ops_in_flight=4))
    room.form(2)
    said = Descriptor(Kind.all_reduce, DType.float32, count=4, grace=5.0)
    for seq in range(1000, 1100):
        room.say("d1", m.CalledWithGrace(GROUP, 2, 1, seq, said))
    room.say("d0", m.CalledWithGrace(GROUP, 1, 1, 1, said))
    deadlines = room.group.current.straggler_deadlines
    assert len(deadlines) == 16
    assert 1 in deadlines, "what is late first counts"


# ---- reports, in bytes ------------------------------------------------------------------------------

_MANY = range(1, 2049)
FULL: dict[str, dict[str, Any]] = {  # some ten KB on the wire, and much more in memory
    "large results": {"done": [(seq, (1 << 63) + seq, (1 << 62) + seq) for seq in _MANY]},
    "small results": {"done": [(seq, 1, 1) for seq in _MANY]},
    "updates": {"updates": list(_MANY)},
    "voids": {"voids": [m.Void(seq, "OperationAborted", "é", {"é": "é", "è": "ü"}) for seq in _MANY]},
    "sends": {"p2p": [m.OpenP2P(seq, 1, True, 0, False, False, 1) for seq in _MANY]},
    "names": {
        "failed": [(seq, seq, "éa") for seq in range(256)],
        "updated": m.UpdateOutcome(1, 1, ["€" * 128] * 256),
        "settled": [(seq + 300, seq + 300) for seq in range(256)],
    },
    "members": {"plan": m.Plan(4, 1024, True, {}, [(seq, seq) for seq in range(300, 1324)], 0, "")},
}


def heard(message: Any) -> Any:
    """*message*, as a master reads it."""
    return Decoder[Any](m.FromPeer, 1 << 20).feed(encode(message))[0]


def reported(daemon: str, mid: int, **fields: Any) -> m.Report:
    """The report of one of two members of a group of its own; the other one does not report."""
    members = [(mid, "m", daemon), (mid + 1, "n", "nobody")]
    if "plan" in fields:
        members += [(mid + 10_000 + k, f"m{k}", "nobody") for k in range(250)]
    return heard(report_of(mid, group=f"{daemon}-{mid}", members=members, committed_upto=2048, **fields))


@pytest.fixture
def held() -> Iterator[Callable[[], int]]:
    """Bytes that were allocated since the first call, and are still held."""
    tracemalloc.start()
    yield lambda: (gc.collect(), tracemalloc.get_traced_memory()[0])[1]
    tracemalloc.stop()


@pytest.mark.parametrize("kind", FULL)
def test_bytes_that_one_daemon_reports(kind: str, held: Callable[[], int]) -> None:
    most = 8 * MIB
    room = Room(Limits(report_bytes=most))
    room.restart()
    for daemon in ("bad", "good"):
        room.hello(daemon)
    room.say("good", reported("good", 1, done=[(2049, 5, 5)]))
    before, refused, worst = held(), [], 0
    for k in range(12):
        room.clear()
        room.say("bad", reported("bad", 10 + 2 * k, **FULL[kind]))
        refused += [one.reason for one in room.take("bad", m.Evicted)]
        worst = max(worst, held() - before)
    assert worst < most // 8 + MIB // 4
    assert set(refused) == {"reports of daemon bad take more memory than they may; expected at most 1 MiB of one"}
    assert room.state.groups["good-1"].rebuild.reports.keys() == {1}
    assert set(room.conns) == {"bad", "good"}


def test_bytes_of_a_member_that_reports_again_and_again(held: Callable[[], int]) -> None:
    most, members = 8 * MIB, [(1, "m", "good"), (2, "n", "bad"), (3, "o", "nobody")]
    room = Room(Limits(report_bytes=most))
    room.restart()
    for daemon in ("bad", "good"):
        room.hello(daemon)
    room.say("good", report_of(1, members=members))
    before, worst = held(), 0
    for k in range(12):
        room.clear()
        room.say("bad", heard(report_of(2, members=members, committed_upto=2048 + k, **FULL["large results"])))
        worst = max(worst, held() - before)
    assert worst < most // 8 + MIB // 2
    assert 1 in room.group.rebuild.reports


def test_bytes_that_all_daemons_report_and_those_of_daemons_that_are_gone(held: Callable[[], int]) -> None:
    most = 6 * MIB
    room = Room(Limits(report_bytes=most))
    room.restart()
    before, out, worst = held(), set(), 0
    for k in range(20):
        room.hello(f"d{k}")
        room.clear()
        room.say(f"d{k}", reported(f"d{k}", 10 + 2 * k, **FULL["large results"]))
        out |= {daemon for daemon in room.conns if room.take(daemon, m.Evicted)}
        if k % 2:
            room.drop(f"d{k}")
        worst = max(worst, held() - before)
    assert worst < most + MIB // 2
    assert out
    kept = [group for group in room.state.groups.values() if group.rebuild.reports or group.rebuild.lost]
    assert 3 <= len(kept) < 20


@pytest.mark.parametrize("kind", ["done", "collected", "divergent"])
def test_bytes_of_reports_at_the_end_of_an_epoch(kind: str, held: Callable[[], int]) -> None:
    most = 8 * MIB
    room = Room(Limits(report_bytes=most))
    for k in range(12):
        for name, daemon in ((f"b{k}", "bad"), (f"g{k}", "good")):
            room.join(name, daemon=daemon, group=f"g{k}", start=2)
    before, worst = held(), 0
    for k in range(12):
        room.clear()
        group = room.state.groups[f"g{k}"]
        mid = next((member.mid for member in group.members if member.daemon.name == "bad"), 0)
        if not mid:
            break
        room.say("bad", m.GiveUp(group.name, mid, group.epoch, [1], "ends it"))
        assert group.current.closing is not None
        lists: dict[str, Any] = {"done": [], "collected": [], "divergent": []}
        lists[kind] = [(seq, 1 << 60, 1 << 61) for seq in _MANY] if kind == "done" else list(_MANY)
        room.say("bad", heard(m.Frozen(group.name, mid, group.epoch, m.EpochReport(0, **lists))))
        worst = max(worst, held() - before)
    assert worst < most // 8 + MIB // 2
    if kind == "done":
        assert not any("bad" in {one.daemon.name for one in room.state.groups[f"g{k}"].members} for k in range(2))
    assert "bad" in room.conns
