"""A master that dies at any step of a script and is started again: nobody is lost, every op has one outcome (R7)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.master.test_membership_machine import P2P_IDS, Client, Cluster, Daemon, program
from tests.master.transcript import GROUP, Room
from wancoll.limits import Limits
from wancoll.peer.core import member as core
from wancoll.wire import messages as m

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


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("lost", [False, True], ids=["journal", "lost journal"])
def test_nothing_is_lost_wherever_the_master_dies(lost: bool, exchanges: bool) -> None:
    """Everyone comes back: no member is evicted, each op ends once, with one value, and those that retry succeed."""
    for at in range(0, 260, 1 if not lost else 7):
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


def test_twice_in_a_row() -> None:
    """The second master dies before it has decided anything."""
    for at in range(100, 180, 5):
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


# ---- single rules -----------------------------------------------------------------------------------


def report(mid: int, epoch: int = 1, *, of: tuple[int, ...] = (1, 2, 3), **fields: Any) -> m.Report:
    """What member m<mid> of daemon d<mid> reports."""
    basis = m.Report(
        group=GROUP,
        mid=mid,
        epoch=epoch,
        members=[(each, f"m{each}", f"d{each}") for each in of],
        plan=m.Plan(4, 1024, True, {}, [], 0, ""),
        key=b"k" * 16,
        start_world=3,
        min_world=1,
        reason="formed",
        base=0,
        committed_upto=0,
        voids=[],
        aborted=False,
        done=[],
        updates=[],
        p2p=[],
        heard=0,
        settled=[],
        failed=[],
    )
    return msgspec.structs.replace(basis, **fields)


def restarted(epoch: int = 1, mids: tuple[int, ...] = (1, 2, 3), base: int = 0) -> Room:
    """A master whose journal says that the group's newest epoch had these members, and began with *base* committed."""
    room = Room(Limits(rejoin_grace=5.0))
    room.form(3)
    room.restart()
    room.persisted = (epoch, 1025)
    used = type(room.journal[GROUP])(epoch, frozenset(mids), base)
    room.journal = {GROUP: used}
    room.restart()
    for mid in (1, 2, 3):
        room.hello(f"d{mid}")
    room.clear()
    return room


def tell(room: Room, *reports: m.Report) -> None:
    for each in reports:
        room.say(f"d{each.mid}", each)


def test_all_report_and_are_done_so_it_is_committed() -> None:
    room = restarted()
    tell(room, report(1, done=[(1, 7, 9)]), report(2, done=[(1, 7, 9)]))
    assert room.take("d1", m.Commit) == []
    tell(room, report(3, done=[(1, 7, 9)]))
    for mid in (1, 2, 3):
        assert room.one(f"d{mid}", m.Resumed) == m.Resumed(GROUP, mid, 1, 3)
        assert room.commits(f"d{mid}") == [1]
    assert room.epoch == 1


def test_one_heard_of_the_commit_so_all_do() -> None:
    room = restarted()
    tell(
        room,
        report(1, committed_upto=2),
        report(2, done=[(1, 7, 9), (2, 7, 9)]),
        report(3, done=[(2, 7, 9), (1, 7, 9)]),
    )
    assert [room.commits(f"d{mid}") for mid in (1, 2, 3)] == [[2]] * 3


def test_one_is_missing_and_the_others_are_done() -> None:
    """The old master may have told the one that is lost (race 3)."""
    room = restarted()
    done = [(1, 7, 9), (2, 5, 9)]
    tell(room, report(1, done=done), report(2, done=done[:1]))
    room.no_epoch()
    room.sleep(5.1)
    epoch = room.new_epoch()
    assert (epoch.epoch, epoch.committed_upto, [one.mid for one in epoch.members]) == (2, 1, [1, 2])
    tell(room, report(3, done=done))  # it was only late
    assert room.one("d3", m.Evicted).committed_upto == 1
    assert not room.state.groups[GROUP].rebuild


def test_digests_that_differ_are_not_committed() -> None:
    room = restarted()
    tell(room, report(1, done=[(1, 7, 9)]), report(2, done=[(1, 8, 9)]))
    room.sleep(5.1)
    assert room.new_epoch().committed_upto == 0


def test_a_member_that_knows_an_earlier_epoch_has_finished_nothing() -> None:
    room = restarted(2)
    tell(
        room,
        report(1, 2, base=1, committed_upto=1),
        report(2, done=[(1, 7, 9), (2, 7, 9)]),
        report(3, 2, base=1, committed_upto=1),
    )
    epoch = room.new_epoch()
    assert (epoch.epoch, epoch.committed_upto, len(epoch.members)) == (3, 1, 3)


def test_members_that_were_put_out_decide_nothing() -> None:
    """The journal knows an epoch without them, in which others may have gone on."""
    room = restarted(2, (1, 2))
    tell(room, report(3, done=[(1, 7, 9)]))
    room.sleep(5.1)
    told = room.one("d3", m.Evicted)
    assert (told.committed_upto, told.unknown) == (0, True)
    assert GROUP not in room.state.groups


def test_a_member_of_the_journalled_epoch_may_go_on_with_the_one_before() -> None:
    """The master died between journal and network: nobody can have finished anything in epoch 2."""
    room = restarted(2, (1, 2))
    tell(room, report(1), report(2), report(3))
    assert [room.one(f"d{mid}", m.Resumed).epoch for mid in (1, 2, 3)] == [1, 1, 1]
    room.link_down("m1", "m2")
    room.sleep(0.2)
    assert room.new_epoch().epoch == 3, "2 may have been used"


def test_a_daemon_that_does_not_name_a_member_has_lost_it() -> None:
    room = restarted()
    tell(room, report(1), report(2))
    room.say("d3", m.Heartbeat(0))
    assert [one.mid for one in room.new_epoch().members] == [1, 2]


def test_a_joiner_that_was_admitted_and_had_not_heard() -> None:
    room = restarted(2)
    tell(room, report(1, 2), report(2, 2))
    room.say("d3", m.Join(GROUP, "m3", 3, 1, 3))
    epoch = room.new_epoch()
    assert [(one.mid, one.name) for one in epoch.members] == [(1, "m1"), (2, "m2"), (3, "m3")]
    assert room.take("d3", m.Joined)[-1].mid == 3


def test_a_group_does_not_form_anew_while_its_members_may_come_back() -> None:
    room = restarted()
    for mid in (1, 2, 3):
        room.say(f"d{mid}", m.Join(GROUP, f"new{mid}", 3, 1))
    room.no_epoch()
    room.sleep(5.1)
    assert room.new_epoch().epoch == 2


def test_a_lost_journal_gives_no_number_again() -> None:
    room = Room(Limits(rejoin_grace=5.0))
    room.form(3)
    room.restart(lost=True)
    room.hello("d9")
    room.say("d9", m.Join(GROUP, "newcomer", 3, 1))
    assert room.one("d9", m.Joined).mid == 1
    for mid in (1, 2, 3):
        room.hello(f"d{mid}", term=4, master=99)
    assert room.state.term == 5
    tell(room, report(1, 6), report(2, 6), report(3, 6))
    assert room.one("d1", m.Resumed) == m.Resumed(GROUP, 1, 6, 5)
    assert room.one("d9", m.Joined).mid == 4
    room.drop("d3")
    assert room.new_epoch().epoch == 7


def test_a_send_that_the_receiver_knows_to_be_settled() -> None:
    room = restarted()
    half = m.OpenP2P(1, 2, True, 5, True, True, 0)
    tell(room, report(1, p2p=[half], heard=5), report(2, heard=5, settled=[(5, 77)]), report(3))
    told = room.one("d1", m.Settled)
    assert (told.number, told.digest, told.error, told.epoch) == (1, 77, "", 1)
    assert room.one("d1", m.Resumed).epoch == 1


def test_a_send_under_way_takes_a_new_epoch() -> None:
    room = restarted()
    halves = m.OpenP2P(1, 2, True, 5, True, True, 0), m.OpenP2P(1, 1, False, 5, True, False, 0)
    tell(room, report(1, p2p=[halves[0]], heard=5), report(2, p2p=[halves[1]], heard=5), report(3))
    assert room.new_epoch().epoch == 2
    assert room.take("d1", m.Settled) == []


def test_a_send_whose_receiver_is_lost_is_unknown() -> None:
    room = restarted()
    tell(room, report(1, p2p=[m.OpenP2P(1, 2, True, 5, True, True, 0)], heard=5), report(3))
    room.sleep(5.1)
    assert room.one("d1", m.Settled).error == "OutcomeUnknown"


@pytest.mark.parametrize(
    "bad",
    [
        report(1, of=(2, 3)),
        report(1, done=[(1, 7, 9), (1, 7, 9)]),
        report(1, done=[(1, 7, 9)], committed_upto=1),
        report(1, done=[(9999, 7, 9)]),
        report(1, base=2),
    ],
)
def test_reports_that_cannot_be_true_cost_the_connection(bad: m.Report) -> None:
    room = restarted()
    conn = room.conns["d1"]
    tell(room, bad)
    assert conn in room.closed
    assert not room.state.members


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
    assert member.reporting
    assert member.resumed(m.Resumed(GROUP, 1, 1, 2)) == [complaint]
    assert not member.reporting
    assert member.reconnected(3, 22) == [], "the same master has dropped it"


def test_an_epoch_that_was_stopped_does_not_go_on() -> None:
    room = restarted()
    tell(room, report(1), report(2, aborted=True), report(3))
    assert room.new_epoch().epoch == 2


@pytest.mark.parametrize(("newest", "fate"), [(2, (1, False)), (3, (0, True))])
def test_what_the_one_that_was_put_out_is_told(newest: int, fate: tuple[int, bool]) -> None:
    """What the next epoch began with decides; with another one between them nobody can say."""
    room = restarted(newest, (1, 2))
    tell(room, report(3, done=[(1, 7, 9)]))
    tell(room, *(report(mid, newest, of=(1, 2), base=1, committed_upto=1) for mid in (1, 2)))
    told = room.one("d3", m.Evicted)
    assert (told.committed_upto, told.unknown) == fate
    assert room.one("d1", m.Resumed).epoch == newest


def test_the_journal_says_whom_else_to_wait_for() -> None:
    """Only the joiner has heard of the epoch that admitted it."""
    room = restarted(2, (1, 2, 3))
    pair = (1, 2)
    tell(room, report(1, of=pair, updates=[1]), report(2, of=pair, updates=[1]))
    room.no_epoch()
    tell(room, report(3, 2, base=1, committed_upto=1))
    epoch = room.new_epoch()
    assert (epoch.epoch, epoch.committed_upto, len(epoch.members)) == (3, 1, 3)


def test_a_member_that_was_put_out_may_report_before_it_hears_so() -> None:
    """It was the only one; taken back it would be a member of a group for ever, which its daemon does not have."""
    room = restarted(1, (1,))
    tell(room, report(1, of=(1,)))
    assert room.one("d1", m.Resumed).epoch == 1
    room.drop("d1")
    assert GROUP not in room.state.groups
    room.hello("d1")
    assert room.one("d1", m.Evicted).mid == 1
    tell(room, report(1, of=(1,)))
    assert room.one("d1", m.Evicted).mid == 1
    assert GROUP not in room.state.groups
    assert not room.state.members


@pytest.mark.parametrize(("base", "committed"), [(1, 1), (2, 2), (0, 2), (9, 2)])
def test_an_epoch_that_nobody_here_has_heard_of_says_what_was_committed(base: int, committed: int) -> None:
    """Member 3 was left out of epoch 2, and told so before the master died. A base of another history says nothing."""
    room = restarted(2, (1, 2), base)
    tell(room, *(report(mid, committed_upto=1, done=[(2, 7, 9)]) for mid in (1, 2)))
    room.sleep(5.1)
    epoch = room.new_epoch()
    assert (epoch.epoch, epoch.committed_upto, len(epoch.members)) == (3, committed, 2)
