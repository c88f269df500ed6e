"""The core of links, step by step: one end, without a network."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from tests.peer.test_member import epoch
from wancoll.limits import DEFAULT
from wancoll.peer.core import links as core
from wancoll.wire import messages as m
from wancoll.wire.messages import Way


class End:
    """Member *mid* with its links, in a ring with *neighbours*."""

    def __init__(self, mid: int, neighbours: set[int], spares: set[int] | None = None) -> None:
        self.links = core.Links(DEFAULT)
        self.owner = self.links.member()
        self.mid, self.knocks = mid, 0
        self.entered = self.enter(1, neighbours, spares)

    def enter(
        self, number: int, neighbours: set[int], spares: set[int] | None = None, lanes: int = 0
    ) -> list[core.Command]:
        told = epoch(number, 1, 2, 3, 4)
        plan = msgspec.structs.replace(told.plan, lanes=lanes or told.plan.lanes)
        members = [msgspec.structs.replace(one, key=bytes([one.mid]) * 32) for one in told.members]
        told = msgspec.structs.replace(told, to=self.mid, plan=plan, members=members)
        wish = core.Enter(told, frozenset(neighbours), frozenset(spares or ()))
        return self.links.ask(self.owner, wish, float(number))

    def knock(
        self, sender: int, generation: int, lane: int = 0, key: bytes | None = None, connection: int = 1
    ) -> list[core.Command]:
        assert self.owner.epoch is not None
        known = self.owner.epoch
        self.knocks += 1
        hello = m.LaneHello(
            1,
            known.group,
            known.key,
            sender,
            self.mid,
            core.COLLECTIVES,
            core.wire_plan(known),
            lane,
            generation,
            connection=connection,
        )
        return self.links.step(core.Knock(self.knocks, hello, key), 2.0)

    def attach(self, number: int) -> list[core.Command]:
        """All lanes."""
        assert self.owner.epoch is not None
        told = []
        for lane in range(core.lanes_of(self.owner.epoch.plan)):
            assert self.links.awaits(number, lane)
            told += self.links.step(core.Attached(number, lane), 2.0)
        return told


def only(commands: list[core.Command], kind: type[core.Command]) -> list[core.Command]:
    return [command for command in commands if isinstance(command, kind)]


def dialled(commands: list[core.Command]) -> list[int]:
    return [command.other.mid for command in commands if isinstance(command, core.Dial)]


def test_a_lane_is_for_the_key_that_the_epoch_lists() -> None:
    """The set that is up hears nothing of another key's."""
    end = End(2, {1, 3})
    [welcome] = only(end.knock(3, 5, key=bytes([3]) * 32), core.Welcome)
    for wrong in (bytes([1]) * 32, bytes(32), b""):
        [refused] = only(end.knock(3, 6, key=wrong), core.Refuse)
        assert refused.reason == f"m3 is a member of d3, whose key is {'03' * 32}; yours is {wrong.hex()}"
        assert only(end.knock(1, 9, key=wrong), core.Welcome) == [] or wrong == bytes([1]) * 32
    assert welcome.number in end.links.open()
    assert only(end.knock(3, 5, 1, key=bytes([3]) * 32), core.Welcome), "the second lane of the same set"


def test_the_younger_dials_neighbours_and_spares_and_whoever_needs_it_any_other() -> None:
    assert dialled(End(3, {2, 4}, {1}).entered) == [2, 1]
    elder = End(1, {2, 4}, {3})
    assert dialled(elder.entered) == []
    younger = End(4, {1, 3})
    assert dialled(younger.links.ask(younger.owner, core.Need(frozenset({2})), 1.0)) == [2]
    other = End(2, {1, 3})
    assert dialled(other.links.ask(other.owner, core.Need(frozenset({4})), 1.0)) == [4]


def test_a_link_is_up_when_all_lanes_are_and_a_lane_takes_it_along() -> None:
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    assert [hello.lane for hello in dial.hellos] == list(range(8 + 1))  # the last one for notes
    assert only(end.attach(dial.number), core.LinksUp) == [core.LinksUp(end.owner, 1)]
    commands = end.links.step(core.Broken(dial.number, "reset"), 3.0)
    assert [type(command).__name__ for command in commands] == ["CloseLink", "OpenLink", "Dial", "LinkLost"]
    assert end.links.step(core.Broken(dial.number, "late word"), 3.0) == []


def test_a_lane_whose_bytes_go_over_others_is_dialled_again_alone() -> None:
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    assert end.links.step(core.LaneLost(dial.number, 3, 1, "reset"), 3.0) == []
    assert end.links.deadline() == 3.0
    [again] = end.links.step(core.Tick(), 3.0)
    assert isinstance(again, core.Dial)
    assert [(hello.lane, hello.connection, hello.generation) for hello in again.hellos] == [(3, 3, 1)]
    assert end.links.step(core.LaneLost(dial.number, 3, 1, "late word of the first"), 3.1) == []
    assert end.links.step(core.NotAttached(dial.number, 3, "refused", 3), 3.2) == []
    assert 3.2 < end.links.deadline() < 4.2
    [again] = end.links.step(core.Tick(), 4.2)
    assert isinstance(again, core.Dial)
    assert again.hellos[0].connection == 5
    assert end.links.awaits(dial.number, 3, 5)
    assert not end.links.awaits(dial.number, 3, 3), "the one before, late"
    assert end.links.step(core.Attached(dial.number, 3), 4.3) == []
    assert end.links.deadline() == inf
    end.links.step(core.LaneLost(dial.number, 3, 5, "reset"), 4.4)
    assert end.links.deadline() > 4.4, "it breaks as soon as it is up"


def test_a_lane_that_cannot_be_had_again_costs_the_link_in_time() -> None:
    end = End(1, {2})
    [welcome] = only(end.knock(2, 5), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    end.attach(welcome.number)
    assert end.links.step(core.LaneLost(welcome.number, 4, 1, "reset"), 3.0) == []
    assert end.links.step(core.LaneLost(welcome.number, 5, 1, "reset"), 4.0) == []
    assert end.links.deadline() == 3.0 + DEFAULT.link_timeout / 4
    [dial] = end.links.step(core.Tick(), 3.0 + DEFAULT.link_timeout / 4)
    assert isinstance(dial, core.Dial)
    assert [hello.lane for hello in dial.hellos] == [4, 5]
    assert end.links.deadline() == 3.0 + DEFAULT.link_timeout
    assert only(end.links.step(core.Tick(), 3.0 + DEFAULT.link_timeout), core.LinkLost)


def test_what_the_other_end_dials_in_vain_shuts_nobody_out() -> None:
    """Only the end that began can get through: the other one's dials, numbered above its, come to nothing."""
    end = End(1, {2})
    [welcome] = only(end.knock(2, 5), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    end.attach(welcome.number)
    end.links.step(core.LaneLost(welcome.number, 4, 1, "reset"), 3.0)
    at = end.links.deadline()
    [dial] = end.links.step(core.Tick(), at)
    assert isinstance(dial, core.Dial)
    [vain] = [hello.connection for hello in dial.hellos]
    assert vain > 3
    [came] = only(end.knock(2, 5, lane=4, connection=3), core.Welcome)  # while that dial hangs
    assert isinstance(came, core.Welcome)
    assert end.links.awaits(welcome.number, 4, 3)
    assert not end.links.awaits(welcome.number, 4, vain), "late"
    assert end.links.step(core.NotAttached(welcome.number, 4, "no answer", vain), at) == []
    [refused] = only(end.knock(2, 5, lane=4, connection=3), core.Refuse)
    assert isinstance(refused, core.Refuse)
    assert end.links.step(core.Attached(welcome.number, 4), at) == []
    assert end.links.deadline() == inf


def test_where_both_dial_a_lane_at_once_that_of_who_began_stays() -> None:
    """But for a while only: it may dial in vain."""
    for lost_at, expected in (
        (2.0 - DEFAULT.link_timeout / 8, core.Refuse),
        (2.0 - DEFAULT.link_timeout / 2, core.Welcome),
    ):
        end = End(2, {1})
        [dial] = only(end.entered, core.Dial)
        assert isinstance(dial, core.Dial)
        end.attach(dial.number)
        end.links.step(core.LaneLost(dial.number, 4, 1, "reset"), lost_at)
        assert only(end.links.step(core.Tick(), lost_at), core.Dial)
        assert only(end.knock(1, 1, lane=4, connection=1024), expected)  # at 2.0


def test_the_lane_for_notes_is_dialled_again_and_the_member_knows_when_it_is_not_heard() -> None:
    for channel in (core.COLLECTIVES, core.P2P):
        end = End(2, {1})
        if channel == core.P2P:
            end.entered = end.links.ask(end.owner, core.Need(frozenset({1}), core.P2P), 1.5)
        dial = only(end.entered, core.Dial)[-1]
        assert isinstance(dial, core.Dial)
        end.attach(dial.number)
        told = [core.NotesLost(end.owner, dial.other)] if channel == core.COLLECTIVES else []
        assert end.links.step(core.LaneLost(dial.number, 8, 1, "reset"), 3.0) == told
        assert (1 in end.owner.up(channel)) == (not told), "sends and recvs need no notes"
        [again] = only(end.links.step(core.Tick(), 3.0), core.Dial)
        assert isinstance(again, core.Dial)
        assert [(hello.lane, hello.connection) for hello in again.hellos] == [(8, 3)]
        said = end.links.step(core.Attached(dial.number, 8), 3.1)
        assert said == ([core.LinksUp(end.owner, 1)] if told else [])
        assert 1 in end.owner.up(channel)


def newest(end: End, number: int, lane: int) -> int:
    """The number of the lane's newest connection."""
    return end.links.open()[number].connections.get(lane, 1)


def broken(end: End, number: int, now: float) -> None:
    """All lanes of the link break, and the member hears so of the last one."""
    link = end.links.open()[number]
    for lane in range(8, -1, -1):
        said = end.links.step(core.LaneLost(number, lane, newest(end, number, lane), "reset"), now)
        told = core.LinkBroken(end.owner, link.other, link.channel, "reset")
        assert [one for one in said if not isinstance(one, core.NotesLost)] == ([] if lane else [told])


def test_a_link_that_loses_all_its_lanes_goes_on_with_others_and_the_member_hears_at_once() -> None:
    """The other end may be gone, and the master is to hear of it."""
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    broken(end, dial.number, 3.0)
    [again] = end.links.step(core.Tick(), 3.0)
    assert isinstance(again, core.Dial)
    assert [(hello.lane, hello.connection) for hello in again.hellos] == [(lane, 3) for lane in range(9)]
    for lane in range(9):
        assert end.links.step(core.NotAttached(dial.number, lane, "refused", 3), 3.01) == []
    assert end.links.deadline() == 3.01 + DEFAULT.redial_interval, "one pause, not nine"
    [again] = end.links.step(core.Tick(), end.links.deadline())
    assert isinstance(again, core.Dial)
    assert [(hello.lane, hello.connection) for hello in again.hellos] == [(lane, 5) for lane in range(9)]
    said = [end.links.step(core.Attached(dial.number, lane), 3.1) for lane in range(9)]
    assert said == [[]] * 8 + [[core.LinksUp(end.owner, 1)]]
    assert end.links.deadline() == inf


@pytest.mark.parametrize("hangs", [False, True])
def test_a_link_whose_lanes_stay_away_is_lost_and_out_of_reach_after_link_timeout(hangs: bool) -> None:
    """Whether dials are refused or hang."""
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    broken(end, dial.number, 3.0)
    said, now, dials = list[core.Command](), 3.0, 0
    while not only(said, core.LinkLost):
        now = end.links.deadline()
        said = end.links.step(core.Tick(), now)
        dials += len(only(said, core.Dial))
        for lane in range(0 if hangs or only(said, core.LinkLost) else 9):
            end.links.step(core.NotAttached(dial.number, lane, "refused", newest(end, dial.number, lane)), now)
    assert now == 3.0 + DEFAULT.link_timeout
    assert (dials == 1) if hangs else (7 < dials < 12)
    assert [type(one) for one in said if isinstance(one, core.Told)] == [core.LinkLost, core.LinkUnreachable]


@pytest.mark.parametrize("planned", [None, Way.direct, Way.punched, Way.relayed])
def test_lanes_are_dialled_again_as_they_came_up_and_else_by_a_relay(planned: Way | None) -> None:
    end = End(2, set())
    [dial] = only(with_ways(end, 2, *(((2, 1, planned),) if planned is not None else ())), core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    broken(end, dial.number, 3.0)
    ways, now = [], 3.0
    for _ in range(4):
        [again] = end.links.step(core.Tick(), now)
        assert isinstance(again, core.Dial)
        ways.append(again.way)
        assert again.instead is again.way, "it waits for a relay"
        for lane in range(9):
            end.links.step(core.NotAttached(dial.number, lane, "refused", newest(end, dial.number, lane)), now)
        now = end.links.deadline()
    first = planned or Way.direct
    assert ways == [first, first if planned is Way.direct else Way.relayed] * 2


def test_lanes_that_come_up_and_break_at_once_again_and_again_cost_the_link_in_time() -> None:
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    broken(end, dial.number, 3.0)
    now = 3.0
    while not only(said := end.links.step(core.Tick(), now), core.LinkLost):
        assert only(said, core.Dial)
        for lane in range(9):
            end.links.step(core.Attached(dial.number, lane), now)
        broken(end, dial.number, now + 0.1)
        now = end.links.deadline()
    assert now == 3.0 + DEFAULT.link_timeout


def test_the_end_that_was_dialled_dials_when_its_patience_is_over_and_neither_takes_an_older_connection() -> None:
    elder, younger = End(1, {2}), End(2, {1})
    [dial] = only(younger.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    younger.attach(dial.number)
    generation = dial.hellos[0].generation
    [welcome] = only(elder.knock(2, generation), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    elder.attach(welcome.number)
    broken(elder, welcome.number, 3.0)
    assert elder.links.deadline() == 3.0 + DEFAULT.link_timeout / 4
    [back] = elder.links.step(core.Tick(), elder.links.deadline())
    assert isinstance(back, core.Dial)
    hello = back.hellos[5]
    assert (hello.generation, hello.connection % 2) == (generation, 0)
    # The younger has noticed nothing, or dials in vain.
    for said in (
        younger.knock(1, generation + 1, 5, connection=hello.connection),  # there is no such set
        younger.knock(1, generation, 5, connection=hello.connection + 1),  # it was not made there
    ):
        assert [refused.over for refused in said if isinstance(refused, core.Refuse)] == [True]
    said = younger.knock(1, generation, 5, connection=hello.connection)
    assert said == [core.Welcome(younger.knocks, dial.number, 5)]
    assert younger.links.deadline() == 2.0 + DEFAULT.link_timeout, "it leaves that lane to the elder now"
    assert younger.links.awaits(dial.number, 5, hello.connection)
    [refused] = younger.knock(1, generation, 5, connection=2)
    assert refused == core.Refuse(younger.knocks, "connection 2 of lane 5 of a set that is not up here", over=False)
    due = younger.links.deadline()
    assert younger.links.step(core.NotAttached(dial.number, 5, "an older dial of its own", 3), 4.0) == []
    assert younger.links.deadline() == due
    assert younger.links.step(core.NotAttached(dial.number, 5, "it went away", hello.connection), 4.0) == []
    [again] = younger.links.step(core.Tick(), younger.links.deadline())
    assert isinstance(again, core.Dial)
    assert again.hellos[0].connection == hello.connection + 1
    assert only(elder.knock(2, generation, 5, connection=hello.connection + 1), core.Welcome), "the newer one"
    assert only(elder.knock(2, generation, 5, connection=3), core.Refuse)


def test_who_cannot_dial_waits_for_the_other_end_until_link_timeout() -> None:
    end = End(1, {2})
    with_ways(end, 2, (2, 1, Way.direct))
    [welcome] = only(end.knock(2, 5), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    end.attach(welcome.number)
    broken(end, welcome.number, 3.0)
    assert end.links.deadline() == 3.0 + DEFAULT.link_timeout
    assert only(end.links.step(core.Tick(), end.links.deadline()), core.LinkLost)


@pytest.mark.parametrize("round_only", [False, True])
def test_another_round_or_epoch_while_all_lanes_are_away(round_only: bool) -> None:
    """The engine's link goes along; nothing is said to be up before its lane for notes is."""
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    broken(end, dial.number, 3.0)
    end.links.step(core.Tick(), 3.0)
    said = end.links.ask(end.owner, core.Round(1), 3.1) if round_only else end.enter(2, {1})
    assert only(said, core.MoveLink)
    assert not only(said, core.Dial)
    assert end.owner.up(core.COLLECTIVES) == frozenset()
    told = [end.links.step(core.Attached(dial.number, lane), 3.2) for lane in range(9)]
    assert told[-1] == [core.LinksUp(end.owner, 1 if round_only else 2)]
    assert end.owner.up(core.COLLECTIVES) == {1}


def test_the_end_that_was_dialled_takes_the_newest_connection_of_a_lane() -> None:
    end = End(1, {2})
    [welcome] = only(end.knock(2, 5), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    end.attach(welcome.number)
    assert only(end.knock(2, 5, 3), core.Refuse), "the first one is there"
    assert end.knock(2, 5, 3, connection=3) == [core.Welcome(end.knocks, welcome.number, 3)]
    assert end.links.awaits(welcome.number, 3, 3)
    assert only(end.knock(2, 5, 3, connection=3), core.Refuse), "once"
    assert only(end.knock(2, 5, 9, connection=3), core.Refuse), "there is none"
    assert only(end.knock(2, 6, 0, connection=7), core.Refuse), "a set begins with the first connections"
    assert end.links.step(core.LaneLost(welcome.number, 3, 1, "late word"), 3.0) == []
    assert end.links.step(core.Attached(welcome.number, 3), 3.0) == []


def test_lanes_of_an_older_dial_are_refused_and_a_newer_one_replaces_the_link_and_says_so() -> None:
    end = End(1, {2})
    [welcome] = only(end.knock(2, 5), core.Welcome)
    assert isinstance(welcome, core.Welcome)
    assert only(end.knock(2, 4), core.Refuse)
    end.attach(welcome.number)
    assert only(end.knock(2, 5), core.Refuse)
    commands = end.knock(2, 6)
    [lost] = only(commands, core.LinkLost)
    assert isinstance(lost, core.LinkLost)
    assert lost.other.mid == 2
    [anew] = only(commands, core.Welcome)
    assert isinstance(anew, core.Welcome)
    assert anew.number > welcome.number
    assert core.CloseLink(welcome.number) in commands


def test_lanes_of_an_older_dial_stay_out_where_plans_change_and_change_back() -> None:
    """Their connection waits for an epoch of their plan, and its dialler has given them up."""
    end = End(1, {2})
    assert only(end.knock(2, 5), core.Welcome)
    end.enter(2, {2}, lanes=3)
    end.enter(3, {2})
    assert only(end.knock(2, 4), core.Refuse)
    assert only(end.knock(2, 6), core.Welcome)


def test_what_an_epoch_needed_the_next_one_does_not() -> None:
    end = End(4, {3})
    [dial] = only(end.links.ask(end.owner, core.Need(frozenset({1})), 1.0), core.Dial)
    assert isinstance(dial, core.Dial)
    end.enter(2, {3})
    commands = end.links.step(core.Broken(dial.number, "refused"), 100.0)
    assert only(commands, core.LinkUnreachable) == []
    assert dialled(end.links.step(core.Tick(), 200.0)) == []


def test_a_needed_link_that_does_not_come_up_is_out_of_reach_in_time() -> None:
    end = End(2, {1})
    now, told = 1.0, []
    while now < 1.0 + 2.5 * DEFAULT.link_timeout:
        for number in list(end.links.open()):
            told += end.links.step(core.Broken(number, "refused"), now)
        now = max(now, end.links.deadline())
        told += end.links.step(core.Tick(), now)
    assert len(only(told, core.LinkUnreachable)) == 2


def test_where_both_dial_the_youngers_set_stays() -> None:
    younger, elder = End(4, {3}), End(1, {2})
    younger.links.ask(younger.owner, core.Need(frozenset({1})), 1.0)
    assert only(younger.knock(1, 1), core.Refuse)
    [dial] = only(elder.links.ask(elder.owner, core.Need(frozenset({4})), 1.0), core.Dial)
    assert isinstance(dial, core.Dial)
    commands = elder.knock(4, 1)
    assert core.CloseLink(dial.number) in commands
    assert only(commands, core.Welcome)


def test_the_elder_dials_when_the_younger_has_had_its_time_and_gives_way_to_it() -> None:
    """Connections may come through in one direction only."""
    elder, younger = End(1, {2}), End(2, {1})
    patience = DEFAULT.link_timeout / 4
    assert elder.links.deadline() == 1.0 + patience
    [dial] = only(elder.links.step(core.Tick(), 1.0 + patience), core.Dial)
    assert isinstance(dial, core.Dial)
    [own] = only(younger.entered, core.Dial)
    assert isinstance(own, core.Dial)
    hello = dial.hellos[0]
    assert only(younger.links.step(core.Knock(1, hello), 0.9 + patience), core.Refuse)
    let_in = younger.links.step(core.Knock(2, hello), 1.1 + patience)
    assert only(let_in, core.Welcome)
    assert core.CloseLink(own.number) in let_in
    late = elder.links.step(core.Knock(3, own.hellos[0]), 1.2 + patience)
    assert core.CloseLink(dial.number) in late
    assert only(late, core.Welcome)


def test_an_elder_that_dials_has_lost_a_link_that_is_up_here() -> None:
    """Its word for it may have come to the master after the end of the epoch, which tells nobody to dial anew then."""
    younger = End(2, {1})
    [dial] = only(younger.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    younger.attach(dial.number)  # at 2.0
    hello = m.LaneHello(1, *_ends(younger, sender=1), 0, 1)
    assert only(younger.links.step(core.Knock(1, hello), 2.0 + 0.9 * DEFAULT.link_timeout / 4), core.Refuse)
    told = younger.links.step(core.Knock(2, hello), 2.0 + 1.1 * DEFAULT.link_timeout / 4)
    assert [type(command).__name__ for command in told] == ["CloseLink", "OpenLink", "Welcome", "LinkLost"]


def _ends(end: End, sender: int) -> tuple[str, bytes, int, int, int, int]:
    known = end.owner.epoch
    assert known is not None
    return known.group, known.key, sender, end.mid, core.COLLECTIVES, core.wire_plan(known)


def test_an_elder_that_is_cut_off_by_hand_only_tries_again() -> None:
    elder, told, now = End(1, {2}), [], 1.0
    elder.links.step(core.Cut("d2"), 1.0)
    while now < 1.0 + 2 * DEFAULT.link_timeout:
        now = elder.links.deadline()
        told += elder.links.step(core.Tick(), now)
    assert dialled(told) == []
    assert only(told, core.LinkUnreachable)
    elder.links.step(core.Heal("d2"), now)
    while not dialled(told):
        told = elder.links.step(core.Tick(), elder.links.deadline())


def test_the_younger_keeps_a_set_of_which_a_lane_came_through() -> None:
    younger = End(2, {1})
    [dial] = only(younger.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    younger.links.step(core.Attached(dial.number, 3), 1.5)
    assert only(younger.knock(1, 1), core.Refuse)


def test_a_link_that_breaks_as_soon_as_it_is_up_is_dialled_ever_more_seldom() -> None:
    end = End(2, {1})
    now, dials = 2.0, list(only(end.entered, core.Dial))
    while now < 12.0:
        for number in list(end.links.open()):
            end.attach(number)
            dials += only(end.links.step(core.Broken(number, "closed"), now), core.Dial)
        now = end.links.deadline()
        dials += only(end.links.step(core.Tick(), now), core.Dial)
    assert len(dials) < 20
    end.attach(dials[-1].number)
    assert dialled(end.links.step(core.Broken(dials[-1].number, "reset"), now + core.LONGEST_PAUSE)) == [1]


def test_a_lane_is_let_in_once() -> None:
    """Also while it is between the welcome and the engine."""
    end = End(1, {2})
    assert only(end.knock(2, 5), core.Welcome)
    assert only(end.knock(2, 5), core.Refuse)
    assert only(end.knock(2, 5, lane=1), core.Welcome)


def test_an_unreachable_link_for_sends_is_given_up_unless_it_is_asked_for_again() -> None:
    for again in (False, True):
        end = End(4, set())
        need = core.Need(frozenset({1}), core.P2P)
        told, out, now = 0, end.links.ask(end.owner, need, 1.0), 1.0
        while now < 1.0 + 4.5 * DEFAULT.link_timeout:
            found = only(out, core.LinkUnreachable)
            told += len(found)
            out = end.links.ask(end.owner, need, now) if found and again else []
            for number in list(end.links.open()):
                out += end.links.step(core.Broken(number, "refused"), now)
            now = max(now + 0.01, min(end.links.deadline(), now + 1.0))
            out += end.links.step(core.Tick(), now)
        assert told >= 3 if again else told == 1


def test_who_needs_a_link_anew_has_all_the_time_again() -> None:
    end = End(4, set())
    need = core.Need(frozenset({1}), core.P2P)
    end.links.ask(end.owner, need, 1.0)
    link = end.owner.links[1, core.P2P]
    end.links.ask(end.owner, core.LetGo(1), 2.0)
    end.links.ask(end.owner, need, 1.0 + DEFAULT.link_timeout)
    out = end.links.step(core.Broken(link.number, "refused"), 1.1 + DEFAULT.link_timeout)
    assert only(out, core.LinkUnreachable) == []
    end.links.ask(end.owner, core.LetGo(1), 8.0)
    end.links.step(core.Tick(), 9.0)
    assert end.links.deadline() == float("inf")


def test_let_go_of_one_channel_the_other_stays() -> None:
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    assert end.links.ask(end.owner, core.Redial((1,), 0.5, "x", core.P2P), 4.0) == []
    assert only(end.links.ask(end.owner, core.Redial((1,), 0.5, "x", core.COLLECTIVES), 4.0), core.LinkLost)


def test_a_dialler_that_knows_the_epoch_first_waits_for_it() -> None:
    end = End(1, {2})
    links, owner = core.Links(DEFAULT), None
    owner = links.member()
    assert end.owner.epoch is not None
    hello = m.LaneHello(1, "g", end.owner.epoch.key, 2, 1, 0, core.wire_plan(end.owner.epoch), 0, 1)
    assert links.step(core.Knock(1, hello), 1.0) == []
    entered = links.ask(owner, core.Enter(end.owner.epoch, frozenset({2})), 1.1)
    assert only(entered, core.Welcome)
    links.ask(owner, core.Leave(), 1.2)
    assert links.step(core.Knock(2, hello), 2.0) == []
    [refused] = links.step(core.Tick(), links.deadline())
    assert isinstance(refused, core.Refuse)


# ---- ways --------------------------------------------------------------------------------------------


def with_ways(end: End, number: int, *ways: tuple[int, int, Way]) -> list[core.Command]:
    """The member enters an epoch whose plan names these pairs; members 1 and 2 are neighbours."""
    told = epoch(number, 1, 2, 3, 4)
    told = msgspec.structs.replace(told, to=end.mid, plan=msgspec.structs.replace(told.plan, ways=list(ways)))
    other = 3 - end.mid
    return end.links.ask(end.owner, core.Enter(told, frozenset({other})), float(number))


def test_the_elder_dials_at_once_where_it_alone_can_and_the_younger_waits_for_it() -> None:
    elder, younger = End(1, set()), End(2, set())
    assert dialled(with_ways(elder, 2, (1, 2, Way.direct))) == [2]
    assert dialled(with_ways(younger, 2, (1, 2, Way.direct))) == []
    late = 2.0 + DEFAULT.link_timeout / 4
    assert dialled(younger.links.step(core.Tick(), late)) == [1]  # it may have changed
    assert only(younger.knock(1, generation=1), core.Welcome)  # the elder's set goes before its own


def test_a_need_of_the_end_that_cannot_dial_waits_for_the_other_end() -> None:
    elder, younger = End(1, set()), End(2, set())
    for end in (elder, younger):
        with_ways(end, 2, (3, 1, Way.direct), (3, 2, Way.direct))
    assert dialled(elder.links.ask(elder.owner, core.Need(frozenset({3})), 3.0)) == []
    assert dialled(elder.links.ask(elder.owner, core.Need(frozenset({4})), 3.0)) == [4]  # as others


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (None, [(Way.direct, Way.direct), (Way.relayed, Way.direct)]),
        (Way.direct, [(Way.direct, Way.direct)] * 2),  # by the younger, which alone can
        (Way.punched, [(Way.punched, Way.punched), (Way.relayed, Way.punched)]),
        (Way.relayed, [(Way.relayed, Way.direct)] * 2),
    ],
)
def test_a_dial_that_has_failed_tries_a_relay_unless_one_end_can_dial(
    planned: Way | None, expected: list[tuple[Way, Way]]
) -> None:
    end = End(2, {1})
    ways = []
    now, commands = 1.0, end.entered
    if planned is not None:
        end = End(2, set())
        commands = with_ways(end, 2, (2, 1, planned) if planned is Way.direct else (1, 2, planned))
        assert end.owner.links[1, core.COLLECTIVES].relayed is (planned is Way.relayed)
        now = 2.0
    for _ in range(4):
        [dial] = only(commands, core.Dial)
        assert isinstance(dial, core.Dial)
        ways.append((dial.way, dial.instead))
        end.links.step(core.Broken(dial.number, "no answer"), now)
        now = end.links.deadline()
        commands = end.links.step(core.Tick(), now)
    assert ways == 2 * expected


def test_a_lane_that_comes_up_and_breaks_at_once_was_not_had_again() -> None:
    """Again and again, that for notes: the link is lost as if the lane had stayed away, and the master hears of it."""
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    now, said = 3.0, list[core.Command]()
    for connection in range(1, 200, 2):
        said = end.links.step(core.LaneLost(dial.number, 8, connection, "reset"), now)
        now = max(now, end.links.deadline())
        said = end.links.step(core.Tick(), now)
        if only(said, core.LinkLost):
            break
        assert only(said, core.Dial)
        said = end.links.step(core.Attached(dial.number, 8), now := now + 0.1)
        now += 0.1
    assert only(said, core.LinkLost)
    assert now < 3.0 + DEFAULT.link_timeout + core.LONGEST_PAUSE


def test_a_dial_that_takes_long_holds_up_no_other_lane() -> None:
    end = End(2, {1})
    [dial] = only(end.entered, core.Dial)
    assert isinstance(dial, core.Dial)
    end.attach(dial.number)
    for lane, now in ((0, 3.0), (8, 3.1)):
        end.links.step(core.LaneLost(dial.number, lane, 1, "reset"), now)
        [again] = only(end.links.step(core.Tick(), now), core.Dial)
        assert isinstance(again, core.Dial)
        assert [hello.lane for hello in again.hellos] == [lane]


def test_one_that_is_heard_again_is_told_so_while_a_neighbour_is_not() -> None:
    end = End(3, {1}, spares={2})
    for one in only(end.entered, core.Dial):
        assert isinstance(one, core.Dial)
        end.attach(one.number)
    numbers = {link.other.mid: number for number, link in end.links.open().items()}
    for mid in (1, 2):
        end.links.step(core.LaneLost(numbers[mid], 8, 1, "reset"), 3.0)
    end.links.step(core.Tick(), 3.0)
    assert core.LinksUp(end.owner, 1) in end.links.step(core.Attached(numbers[2], 8), 3.1)
    assert end.owner.up(core.COLLECTIVES) == {2}
