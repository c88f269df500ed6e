"""A master that dies at any step of a script and is started again: nobody is lost, every op has one outcome (R7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.later import later
from tests.master.test_membership_machine import P2P_IDS, Client, Cluster, Daemon, program
from tests.master.transcript import GROUP, Room, report_of
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.peer.core import member as core
from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll_master.core import membership
from wancoll_master.core.ready import Ready, Received, Send, Used
from wancoll_master.plan.planning import propose

OPS = 7


class Scripted(Cluster):
    """One atomic action a step, in turns, so that a test can stop anywhere; keeps what clients were told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, list[Any]] = {}
        self.said_both = False

    def tell(self, client: Client, message: Any) -> None:
        self.told.setdefault(client.core.name, []).append(message)
        super().tell(client, message)

    def failures(self) -> list[str]:
        return [one.error for told in self.told.values() for one in told if isinstance(one, m.Failure)]

    def results_of(self, name: str) -> list[m.Result]:
        return [one for one in self.told.get(name, ()) if isinstance(one, m.Result)]

    def actions(self) -> list[Any]:
        """What everybody would do next, as callables."""
        found: list[Any] = []
        for daemon in self.daemons:
            found += [lambda d=daemon: self.deliver_up(d), lambda d=daemon: self.deliver_down(d)]
        for daemon, client in self.live():
            found += [
                lambda d=daemon, c=client: self.ready(d, c),
                lambda d=daemon, c=client: c.next_seq <= OPS and self.post(d, c),
                lambda d=daemon, c=client: self.finish(d, c),
                lambda d=daemon, c=client: self.move(d, c),
            ]
        return found

    def talk(self) -> None:
        """m1 sends to m2, once both know their epoch."""
        by_name = {client.core.name: (daemon, client) for daemon, client in self.live()}
        if not self.said_both and {"m1", "m2"} <= by_name.keys():
            one, two = by_name["m1"], by_name["m2"]
            if one[1].core.epoch_number == two[1].core.epoch_number > 0:
                self.said_both = True
                self.exchange(*one, two[1].core.mid, True, 0)
                self.exchange(*two, one[1].core.mid, False, 0)

    def play(self, steps: int, *, exchanges: bool) -> int:
        """Take *steps* actions, in turns."""
        taken = 0
        while taken < steps:
            for action in self.actions():
                if taken == steps:
                    break
                action()
                taken += 1
            if exchanges:
                self.talk()
        return taken


def master_dies(cluster: Scripted, *, lost: bool = False) -> None:
    """Everything that is on its way is lost with it."""
    for daemon in cluster.daemons:
        daemon.up.clear()
        daemon.down.clear()
        if daemon.conn:
            daemon.down.append(None)
    cluster.room.restart(lost=lost)
    cluster.aborted.clear()
    if lost:  # what nobody has heard of never was
        cluster.highest = max(client.core.epoch_number for _, client in cluster.live())
        for number in [number for number in cluster.epochs if number > cluster.highest]:
            del cluster.epochs[number], cluster.lives[number]
    cluster.restarted = True


def begun(*, exchanges: bool = False) -> Scripted:
    cluster = Scripted()
    for index in range(3):
        cluster.join(index)
    return cluster


def finish(cluster: Scripted, *, exchanges: bool) -> None:
    for _ in range(40):
        cluster.play(60, exchanges=exchanges)
        cluster.time_passes(0.05)


@pytest.mark.parametrize("first", [0, *later(*range(1, 7))])
@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("lost", [False, True], ids=["journal", "lost journal"])
def test_nothing_is_lost_wherever_the_master_dies(lost: bool, exchanges: bool, first: int) -> None:
    """Everyone comes back: no member is evicted, each op ends once, with one value, and those that retry succeed."""
    for at in range(first, 260, 7):
        cluster = begun()
        cluster.play(at, exchanges=exchanges)
        mids = {client.core.name: client.core.mid for _, client in cluster.live() if client.core.epoch is not None}
        master_dies(cluster, lost=lost)
        finish(cluster, exchanges=exchanges)
        live = {client.core.name: client.core for _, client in cluster.live()}
        assert sorted(live) == ["m1", "m2", "m3"], (at, cluster.failures())
        assert all(live[name].mid == mid for name, mid in mids.items()), at
        assert set(cluster.failures()) <= {"OperationAborted"}, at  # of calls with on_failure="raise"
        for name in live:
            ends = [one for one in cluster.told[name] if isinstance(one, m.Result | m.Failure)]
            assert len({one.id for one in ends}) == len(ends) == OPS + (exchanges and name != "m3"), (at, name, ends)
            aborted = [one.id for one in ends if isinstance(one, m.Failure)]
            assert all(program(seq).on_failure == "raise" for seq in aborted), at
            if exchanges and name != "m3":
                assert any(one.id > P2P_IDS for one in cluster.results_of(name)), at
        assert len({core.epoch_number for core in live.values()}) == 1


def test_running_operations_do_not_run_again() -> None:
    """All know the same epoch: it goes on under its number, and one attempt is enough."""
    cluster = begun()
    cluster.play(120, exchanges=False)
    epochs = {client.core.epoch_number for _, client in cluster.live()}
    master_dies(cluster)
    finish(cluster, exchanges=False)
    assert {client.core.epoch_number for _, client in cluster.live()} == epochs == {1}
    for name in ("m1", "m2", "m3"):
        results = cluster.results_of(name)
        assert [one.seq for one in results] == list(range(1, OPS + 1))
        assert {one.attempts for one in results} == {1}
    assert cluster.failures() == []


@pytest.mark.parametrize("first", [100, *later(105, 110)])
def test_twice_in_a_row(first: int) -> None:
    """The second master dies before it has decided anything."""
    for at in range(first, 180, 15):
        for then in range(0, 40, 3):
            cluster = begun()
            cluster.play(at, exchanges=True)
            master_dies(cluster)
            cluster.play(then, exchanges=True)
            master_dies(cluster)
            finish(cluster, exchanges=True)
            assert len(cluster.live()) == 3, (at, then)
            assert set(cluster.failures()) <= {"OperationAborted"}, (at, then)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_member_dies_with_the_master(dead: int) -> None:
    """The survivors get a new epoch once the grace time is over, and what one of them was told stays so."""
    for at in range(40, 240, 3):
        cluster = begun()
        cluster.play(at, exchanges=True)
        before = {name: {one.seq: one.epoch for one in cluster.results_of(name)} for name in ("m1", "m2", "m3")}
        master_dies(cluster)
        cluster.daemons[dead] = Daemon("elsewhere", 2)
        cluster.daemons[dead].clients.clear()
        if not any(client.core.epoch is not None for _, client in cluster.live()):
            continue  # none of them had begun
        finish(cluster, exchanges=True)
        names = {client.core.name for _, client in cluster.live()}
        assert names == {"m1", "m2", "m3"} - {f"m{dead + 1}"}, at
        assert set(cluster.failures()) <= {"OperationAborted", "OutcomeUnknown"}, at
        for name in names:
            told = {one.seq: one for one in cluster.results_of(name) if one.id < P2P_IDS}
            assert all(told[seq].epoch == epoch for seq, epoch in before[name].items() if seq in told)
            assert not cluster.live()[0][1].core.in_flight, at


def test_what_was_said_is_said_again() -> None:
    """Complaints and give-ups that the old master took with it."""
    member = core.Member(GROUP, "m1", 2, 1, first_engine_id=100)
    member.join()
    member.joined(1, 1, 11)
    info = [m.MemberInfo(mid, f"m{mid}", f"d{mid}", ["h:1"], "") for mid in (1, 2)]
    plan = m.Plan(8, 1024, True, {}, [], 0, "")
    member.enter_epoch(m.Epoch(GROUP, 1, 1, 1, info, plan, b"k" * 16, 1, 0, [], "formed"), 0.0)
    [complaint] = member.link_lost(2, "reset")
    [told] = member.reconnected(2, 22)
    assert isinstance(told.message, m.Report)
    assert member.standing.reporting
    assert member.resumed(m.Resumed(GROUP, 1, 1, 2)) == [complaint]
    assert not member.standing.reporting
    assert member.reconnected(3, 22) == [], "the same master has dropped it"


def test_a_member_is_of_one_group() -> None:
    """One mid in the reports for two groups would be one member that two groups hold, and end with one of them."""
    state = membership.new_state(Limits(commit="master"), b"s" * 32, term=2, floor=3, next_mid=1025, now=100.0)

    def say(message: m.FromPeer) -> Ready:
        return membership.step(state, 100.0, Received(1, message), propose)

    plan = m.Plan(1, 1 << 18, True, {}, [], 0, "")
    members = [(7, "h", "H"), (9, "y", "Y")]
    say(m.Hello(PROTOCOL_VERSION, "H", 1, ["10.0.0.1:5"], 1, "", "0", 0, [], False, 1, 9))
    for group in ("z", "g"):
        ready = say(m.Report(group, 7, 3, members, plan, b"k" * 16, 2, 1, "r", 0, 0, [], False, [], [], [], 0, [], []))
        if group == "z":
            assert not ready.closes
            assert not ready.messages
    assert not ready.closes, "it may have members that are its own"
    assert isinstance(ready.messages[0], Send)
    assert isinstance(fate := ready.messages[0].message, m.Evicted)
    assert (fate.group, fate.reason) == ("g", "member 7 is one of group z")
    assert state.members == {}


def test_members_of_another_group_are_not_reported_by_the_first_who_comes() -> None:
    """Ids are small numbers, so that a daemon of group "a" can guess those of "b": the journal knows whose they are."""
    used = {"b": Used(3, frozenset({1, 2}), 0)}
    state = membership.new_state(Limits(commit="master"), b"s" * 32, term=2, floor=5, next_mid=1025, used=used)
    who = {name: Identity(name, "peer", (name[0],)) for name in ("a1", "b1", "b2")}
    conns = {name: conn for conn, name in enumerate(who)}
    plan = m.Plan(1, 1 << 18, True, {}, [], 0, "")

    def say(name: str, message: m.FromPeer) -> dict[str, m.FromMaster]:
        ready = membership.step(state, 1.0, Received(conns[name], message, who[name]), propose)
        assert not ready.closes
        names = {conn: one for one, conn in conns.items()}
        return {names[one.conn]: one.message for one in ready.messages if isinstance(one, Send)}

    def report(name: str, mid: int, members: list[tuple[int, str, str]]) -> dict[str, m.FromMaster]:
        numbers = (plan, b"k" * 16, 2, 2, "r", 0, 0, [], False, [], [], [], 0, [], [])
        return say(name, m.Report(name[0], mid, 3, members, *numbers))

    for name in who:
        say(name, m.Hello(PROTOCOL_VERSION, name, conns[name] + 1, ["10.0.0.1:5"], 1, "", "0"))
    for mid in (1, 2, 7):
        fate = report("a1", mid, [(1, "m1", "a1"), (2, "m2", "a1"), (7, "m7", "a1")]).get("a1")
        assert isinstance(fate, m.Evicted) == (mid < 7)
    members = [(1, "x", "b1"), (2, "y", "b2")]
    assert report("b1", 1, members) == {}
    told = report("b2", 2, members)
    assert {name: type(message) for name, message in told.items()} == {"b1": m.Resumed, "b2": m.Resumed}


def test_joiners_of_another_group_keep_their_ids() -> None:
    """Who reports them names what its group's members never were, but where the journal is lost."""
    room = Room()
    room.restarted(mids=(8, 9))
    room.join("z1", start=2, group="z")
    mid = room.mid("z1")
    room.say("d2", report_of(2, 2, of=(1, 2, mid)))
    assert room.mid("z1") == mid
    assert len(room.take("d1", m.Joined)) == 1


A, B = (1, 7, 9), (1, 8, 9)
LIES = {
    # what each says is committed, and is done with; who is put out, what is committed, and of what nobody knows it
    "nobody lies": ([(1, [A]), (0, [A]), (0, [A])], [], 1, []),
    "a claim without a result, where two have come apart": ([(0, [A]), (0, [B]), (1, [])], [3], 0, []),
    "a claim of one of the two results": ([(0, [A]), (0, [B]), (1, [A])], [2], 1, []),
    "a claim of another result": ([(0, [A]), (0, [A]), (1, [B])], [3], 1, []),
    "a claim of what nobody has": ([(0, []), (0, []), (9, [])], [3], 0, []),
    "what was committed is denied": ([(1, [A]), (0, [A]), (0, [])], [3], 1, []),
    "it is denied by one of two": ([(1, [A]), (0, [])], [], 0, [1]),
}


@pytest.mark.parametrize("case", LIES)
def test_no_report_decides_alone_where_the_master_commits(case: str) -> None:
    said, out, upto, unknown = LIES[case]
    room, mids = Room(), tuple(range(1, len(said) + 1))
    room.restarted(mids=mids)
    for mid, (committed, done) in zip(mids, said, strict=True):
        room.say(f"d{mid}", report_of(mid, of=mids, committed_upto=committed, done=done))
    assert [mid for mid in mids if room.take(f"d{mid}", m.Evicted)] == out
    assert room.group.committed == upto
    assert [void.seq for void in room.group.voids.values() if void.error == "OutcomeUnknown"] == unknown
    assert room.epoch == (2 if out or unknown else 1)
    assert room.state.members.keys() == set(mids) - set(out)


def test_a_void_that_one_report_names_does_not_hide_what_another_has_committed() -> None:
    room = Room()
    room.restarted(mids=(1, 2, 3))
    void = m.Void(1, "OperationAborted", "", {})
    for mid, told in ((1, {"committed_upto": 1, "done": [A]}), (2, {"done": [A]}), (3, {"voids": [void]})):
        room.say(f"d{mid}", report_of(mid, **told))
    assert len(room.take("d3", m.Evicted)) == 1
    assert (room.group.committed, room.group.voids) == (1, {})


def test_who_reports_too_late_with_another_result_is_told_no_receipt_of_it() -> None:
    room = Room()
    room.restarted(mids=(1, 2, 3))
    room.say("d1", report_of(1, committed_upto=1, done=[A]))
    room.say("d2", report_of(2, done=[A]))
    room.sleep(room.limits.rejoin_grace + 0.1)
    room.say("d3", report_of(3, done=[B]))
    fate = room.one("d3", m.Evicted)
    assert (fate.committed_upto, fate.unknown_upto, fate.digests) == (0, 1, [A])


def test_the_report_of_a_member_that_is_lost_since_counts() -> None:
    room = Room()
    room.restarted(mids=(1, 2, 3))
    room.say("d1", report_of(1, committed_upto=1, done=[A]))
    room.drop("d1")
    room.say("d2", report_of(2, done=[A]))
    room.say("d3", report_of(3))
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert (room.group.committed, [one.mid for one in room.group.members]) == (1, [2])


def test_who_says_that_it_had_not_heard_of_an_epoch_in_which_most_have_committed_is_put_out() -> None:
    room = Room()
    room.restarted(mids=(1, 2, 3))
    room.say("d3", m.Join(GROUP, "m3", 3, 1, 3))
    room.say("d1", report_of(1, committed_upto=1, done=[A]))
    room.say("d2", report_of(2, done=[A]))
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert "operation 1 is committed, as most have it" in room.one("d3", m.Evicted).reason
    assert (room.group.committed, [one.mid for one in room.group.members]) == (1, [1, 2])
