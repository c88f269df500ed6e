"""Mistakes that one can make where members commit, planted one at a time: the simulation has to find each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import patch

import msgspec

from tests.sim.daemon import Session
from tests.sim.engine import Engine, EngineLink, Frame
from tests.sim.lent import Lent
from tests.sim.links import LinkHub
from tests.sim.master import Master
from wancoll.collective import Descriptor, Kind
from wancoll.commit import close, own_tally, tally
from wancoll.commit.own_tally import OwnTally
from wancoll.commit.tally import Tally
from wancoll.limits import WINDOW_FACTOR
from wancoll.peer.core import collectives, outcomes
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import member as core
from wancoll.peer.core.calls import ResolvedCall
from wancoll.peer.core.collectives import Collectives
from wancoll.peer.core.op import OpState
from wancoll.schedule import choose
from wancoll.wire import messages as m
from wancoll.wire.note import ROUND_BITS, NewRound, unpack
from wancoll_master.core import counting, epochs, losses, ready, reserved
from wancoll_master.core.liveness import blame
from wancoll_master.core.state import Group, State

Planted = contextlib.AbstractContextManager[Any]  # while it is entered, the mistake is made


def reporting_without_freezing() -> Planted:
    def abort(self: Collectives, ask: int) -> list[cmd.Command]:
        assert self.tally is not None
        frozen = m.Frozen(*self.view.head, self._stopped(self.tally))
        return [cmd.ToMaster(frozen), *(self.mismatch(ask) if ask else [])]

    return patch.object(Collectives, "abort", abort)


@contextlib.contextmanager
def a_note_after_the_freeze() -> Iterator[None]:
    """The engine is told too late to say none."""
    real = Engine.cancel

    def cancel(self: Engine, number: int) -> None:
        self._process.after(0.002, lambda: real(self, number))

    with patch.object(Session, "hush", lambda self: None), patch.object(Engine, "cancel", cancel):
        yield


def freezing_before_the_engine_is_asked() -> Planted:
    """Though it has said what the member does not know of."""
    return patch.object(Engine, "take_events", lambda self: None)


def telling_the_evicted_at_once() -> Planted:
    """With what the master has heard of until then."""
    real = losses.lose

    def lose(step: Any, gone: Any, kind: str, **more: Any) -> None:
        groups = {member.group.name: member.group for member in gone}
        real(step, gone, kind, **more)
        for group in groups.values():
            epochs._tell_out(step, group, group.committed, {})

    return patch.object(losses, "lose", lose)


def forgetting_what_is_done() -> Planted:
    """Done operations go back to waiting before the report."""
    real = Collectives.abort

    def abort(self: Collectives, ask: int) -> list[cmd.Command]:
        for op in self.open.values():
            if op.state is OpState.done:
                op.state = OpState.waiting
        return real(self, ask)

    return patch.object(Collectives, "abort", abort)


def not_waiting_for_all() -> Planted:
    """The first report stands for all."""
    real = epochs._close

    def close(step: Any, group: Any) -> bool:
        closing = group.current.closing
        if closing is not None and closing.reports:
            first = next(iter(closing.reports.values()))
            for member in group.members:
                closing.reports.setdefault(member.mid, first)
        return real(step, group)

    return patch.object(epochs, "_close", close)


def no_digest_for_the_evicted() -> Planted:
    """What others have committed is what is finished here."""
    real = core.Member.evicted

    def evicted(self: core.Member, told: m.Evicted, now: float) -> list[cmd.Command]:
        known = told.unknown_upto if told.unknown_upto < m.MOST else 0
        return real(self, msgspec.structs.replace(told, committed_upto=max(told.committed_upto, known)), now)

    return patch.object(core.Member, "evicted", evicted)


def definite_with_nobody_left() -> Planted:
    real = epochs._tell_out

    def tell_out(step: Any, group: Any, sure: int, fate: dict[str, Any]) -> None:
        real(step, group, sure, {} if fate == {"unknown_upto": m.MOST} else fate)

    return patch.object(epochs, "_tell_out", tell_out)


def rooted_kinds_included() -> Planted:
    return patch.object(Descriptor, "proves_all", property(lambda self: self.kind is not Kind.update_membership))


@contextlib.contextmanager
def barriers_of_one_frame() -> Iterator[None]:
    """A member ends one as soon as its left neighbour has called it."""
    chosen, proves = choose.choose, ResolvedCall.proves_all.fget  # type: ignore[attr-defined]

    def choose_ring(what: Descriptor, *rest: Any, **options: Any) -> str:
        return "ring" if what.kind is Kind.barrier else chosen(what, *rest, **options)

    barriers = property(lambda self: self.descriptor.kind is Kind.barrier or proves(self))
    with patch.object(choose, "choose", choose_ring), patch.object(ResolvedCall, "proves_all", barriers):
        yield


def a_window_of_the_master() -> Planted:
    """What members may be at is counted from what the master has heard of."""

    def window_end(step: Any, group: Any) -> int:
        return int(group.committed + WINDOW_FACTOR * step.limits.ops_in_flight)

    return patch.object(counting, "window_end", window_end)


def notes_without_room() -> Planted:
    """Some are dropped where many come."""
    real, count = LinkHub.noted, [0]

    def noted(self: LinkHub, number: int, note: bytes) -> None:
        count[0] += 1
        if count[0] % 50:
            real(self, number, note)

    return patch.object(LinkHub, "noted", noted)


def notes_behind_data() -> Planted:
    """On the data's lane: a frame that is parked holds them up."""
    real = Engine._arrived

    def send_note(self: Engine, number: int, note: bytes) -> None:
        self.links[number].ends[0].send(note)

    def arrived(self: Engine, link: EngineLink, frame: Any) -> None:
        if isinstance(frame, bytes) and link.socket:
            self._process.after(0.01, lambda: arrived(self, link, frame) if link.id in self.links else None)
        else:
            real(self, link, frame)

    return patch.multiple(Engine, _arrived=arrived, send_note=send_note)


def notes_not_said_again() -> Planted:
    """After a link was lost."""
    real = Collectives.links_up

    def links_up(self: Collectives, up: Any) -> list[cmd.Command]:
        return [command for command in real(self, up) if not isinstance(command, cmd.SendNote)]

    return patch.object(Collectives, "links_up", links_up)


def nobody_waits_where_all_were_lost() -> Planted:
    """The group forms anew beside members that may commit among themselves (C8)."""
    return patch.object(reserved, "held", lambda step, group: False)


def admitting_beside_who_goes_on_alone() -> Planted:
    """Joiners are admitted where all stand at an update_membership, without asking who has passed it (C11)."""

    def admit(step: Any, group: Any, seq: int, able: list[Any], reason: str) -> None:
        counting.set_committed(step, group, seq)
        epochs._next_epoch(step, group, epochs._let_in(group, able, seq) if able else reason, free=True)

    return patch.object(epochs, "_close_at_update", admit)


def not_reporting_what_was_passed_alone() -> Planted:
    real = Collectives._stopped

    def stopped(self: Collectives, tally: Any) -> m.EpochReport:
        report = real(self, tally)
        return msgspec.structs.replace(report, collected=report.collected + sorted(self._alone))

    return patch.object(Collectives, "_stopped", stopped)


def ending_in_the_next_epoch_what_was_passed() -> Planted:
    """An update_membership that some have passed alone, for those who have not heard of it."""
    real = Collectives.leave_epoch

    def leave_epoch(self: Collectives, upto: int, now: float, *, passed: bool = False) -> list[cmd.Command]:
        return real(self, upto, now)

    return patch.object(Collectives, "leave_epoch", leave_epoch)


def passing_on_ones_own() -> Planted:
    """An update_membership, without a master, that others do not stand at."""
    real = Collectives._decide

    def decide(self: Collectives) -> list[cmd.Command] | None:
        before = set(self._alone)
        said = real(self)
        passed = self._alone - before
        return said + self._commit(max(passed), self.now, alone=True) if said is not None and passed else said

    return patch.object(Collectives, "_decide", decide)


def not_telling_those_who_came_late() -> Planted:
    """That an update_membership at which they stand was passed."""
    real = Collectives._commit

    def commit(self: Collectives, upto: int, now: float, **how: bool) -> list[cmd.Command]:
        self._alone = {seq for seq in self._alone if seq > upto}
        return real(self, upto, now, **how)

    return patch.object(Collectives, "_commit", commit)


def no_round_after_a_loss() -> Planted:
    return patch.object(Collectives, "_begin_round", lambda self, tally, number: [])


def rounds_said_to_nobody() -> Planted:
    """By who hears of one, and by who finds a link up again."""
    real, links_up = Collectives._hear_round, Collectives.links_up

    def quiet(commands: list[cmd.Command]) -> list[cmd.Command]:
        said = [
            one for one in commands if isinstance(one, cmd.SendNote) and isinstance(unpack(one.note, "", 0), NewRound)
        ]
        return [one for one in commands if one not in said]

    def hear(self: Collectives, sender: int, begun: Any) -> list[cmd.Command]:
        return quiet(real(self, sender, begun))

    def up(self: Collectives, mids: Any) -> list[cmd.Command]:
        return quiet(links_up(self, mids))

    return patch.multiple(Collectives, _hear_round=hear, links_up=up)


def running_again_in_place() -> Planted:
    """What is finished, for others' sake, over the result that may be committed meanwhile."""
    real = Collectives.hand_over

    def hand_over(self: Collectives, op: Any, *, beside: bool = False) -> cmd.Command:
        return real(self, op)

    return patch.object(Collectives, "hand_over", hand_over)


def undoing_what_was_said() -> Planted:
    """What is finished is so no more in another round, though others were told, and may have committed it."""
    real = Collectives._begin_round

    def begin(self: Collectives, tally: Any, number: int) -> list[cmd.Command]:
        for op in self.open.values():
            if op.state is OpState.done and op.kind is not Kind.update_membership:
                op.state = OpState.waiting
        return real(self, tally, number)

    return patch.object(Collectives, "_begin_round", begin)


def not_running_again_what_is_finished() -> Planted:
    """Though others may lack it."""
    return patch.object(Collectives, "_lacked", lambda self, op: False)


def forming_at_once_where_nothing_is_known() -> Planted:
    """By a master that may not be the first."""

    def held_until(state: State, name: str) -> float:
        return max(state.alone.get(name, -inf), state.rejoin_until if name in state.inherited else -inf)

    return patch.object(reserved, "held_until", held_until)


def doubt_about_what_is_decided() -> Planted:
    """All calls of a member that is evicted end as unknown."""
    real = outcomes.evicted

    def evicted(name: str, told: m.Evicted) -> outcomes.Ending:
        return real(name, msgspec.structs.replace(told, unknown_upto=m.MOST))

    return patch.object(outcomes, "evicted", evicted)


def believing_another_members_word() -> Planted:
    """What one says is committed is so."""
    real = OwnTally.agreed

    def agreed(self: OwnTally, seq: int) -> Any:
        return {0: (0, 0)} if self.committed < seq <= self.claimed else real(self, seq)

    return patch.object(OwnTally, "agreed", agreed)


def giving_numbers_again_after_a_loss() -> Planted:
    return patch.object(ready, "JUMP", 0)


def the_last_word_first() -> Planted:
    """The end of the member is told before what became of its calls."""
    real = core.Member._finish

    def finish(self: core.Member, ending: outcomes.Ending, *first: cmd.Command) -> list[cmd.Command]:
        last = [cmd.ToClient(ending.last)] if ending.last is not None and not self.over else []
        return [*last, *real(self, ending._replace(last=None), *first)]

    return patch.object(core.Member, "_finish", finish)


def no_look_at_what_stands_still() -> Planted:
    """A vote that a member keeps to itself holds up another one for ever."""
    return patch.object(blame, "_act_if_stalled", lambda step, group, wait, message: None)


def a_vote_missing() -> Planted:
    """All but one are enough."""

    def agreed(self: Tally, seq: int) -> Any:
        count = self.open.get(seq)
        enough = count is not None and not count.divergent and len(count.votes) >= max(1, len(self.voters) - 1)
        return dict(count.first) if count is not None and enough else None

    return patch.object(Tally, "agreed", agreed)


def a_vote_counted_for_another_member() -> Planted:
    """Beside its own."""
    real = Tally.vote

    def vote(self: Tally, voter: int, seq: int, result: Any, now: float = 0.0) -> bool:
        counted = real(self, voter, seq, result, now)
        silent = self.voters.difference(self.open[seq].votes) if seq in self.open else ()
        if counted and silent:
            real(self, min(silent), seq, result, now)
        return counted

    return patch.object(Tally, "vote", vote)


def a_tally_that_does_not_freeze() -> Planted:
    """The report is sent, and votes are counted on."""
    return patch.object(Tally, "freeze", lambda self: None)


def frames_of_an_older_round() -> Planted:
    """What was sent before a link was lost counts after it."""
    real = Engine._arrived

    def arrived(self: Engine, link: EngineLink, frame: Any) -> None:
        if isinstance(frame, Frame) and frame.epoch >> ROUND_BITS == link.epoch >> ROUND_BITS:
            frame = replace(frame, epoch=max(frame.epoch, link.epoch))
        real(self, link, frame)

    return patch.object(Engine, "_arrived", arrived)


def votes_of_an_older_epoch() -> Planted:
    real = Collectives.hear

    def hear(self: Collectives, sender: int, note: Any) -> list[cmd.Command]:
        if isinstance(note, m.Vote) and self.tally is not None and note.epoch < self.tally.epoch:
            note = msgspec.structs.replace(note, epoch=self.tally.epoch)
        return real(self, sender, note)

    return patch.object(Collectives, "hear", hear)


def saying_before_it_is_written() -> Planted:
    real = Master._persist

    def persist(self: Master, what: Any) -> None:
        self.after(0.05, lambda: real(self, what))

    return patch.object(Master, "_persist", persist)


def contributors_as_the_client_knew_them() -> Planted:
    """When it made the call, not those of the epoch that committed it."""
    real = outcomes.result

    def result(op: Any, epoch: int, contributors: list[str], digest: int, now: float) -> m.Result:
        return real(op, epoch, list(op.call.world.names), digest, now)

    return patch.object(outcomes, "result", result)


def again_from_the_result() -> Planted:
    """What is taken out of the engine has written to the input."""
    real = Engine.cancel

    def cancel(self: Engine, number: int) -> None:
        work = self.works.get(number)
        if work is not None and len(work.input_buffer) == len(work.result_buffer):
            work.input_buffer[:] = work.result_buffer
        real(self, number)

    return patch.object(Engine, "cancel", cancel)


def a_joiner_in_the_middle() -> Planted:
    """It is admitted once one member stands at an update_membership."""

    def at_hand(group: Any) -> int | None:
        return min((seq for seq, count in group.current.tally.open.items() if count.update), default=None)

    return patch.object(epochs, "_update_at_hand", at_hand)


def a_close_that_drops_a_report() -> Planted:
    """Of one who goes on."""
    real = close.close_epoch

    def close_epoch(words: Any, stay: Any, *rest: Any) -> close.EpochOutcome:
        lost = max(stay)
        kept = {mid: word for mid, word in words.items() if mid != lost or len(stay) == 1}
        return real(kept, [mid for mid in stay if mid in kept], *rest)

    return patch.object(close, "close_epoch", close_epoch)


def a_void_counted_twice() -> Planted:
    """What follows it is taken for void, too."""
    real = Tally.__init__

    def init(self: Tally, voters: Any, base: int, voids: Any, *rest: Any) -> None:
        real(self, voters, base, {*voids, *(seq + 1 for seq in voids)}, *rest)

    return patch.object(Tally, "__init__", init)


# ---- members that are lent to the engine ---------------------------------------------------------------


def an_engine_that_counts_one_vote_too_few() -> Planted:
    """All but one are enough."""
    real = Lent.lend

    def lend(self: Lent) -> None:
        before = self.lent
        real(self)
        if self.lent and not before and len(self._others) > 1:
            self._law.voters -= 1

    return patch.object(Lent, "lend", lend)


def an_engine_that_goes_on_while_its_member_freezes() -> Planted:
    """What comes from the master finds the member as it was when it was lent."""
    real = Session.member.fget  # type: ignore[attr-defined]

    def member(self: Session) -> core.Member:
        return self.peek if self._hushed or (self.engine.lent and self.daemon.connected) else real(self)

    return patch.object(Session, "member", property(member))


def lending_what_is_open() -> Planted:
    """The engine numbers its calls from what is committed."""

    def at_rest(self: Collectives) -> bool:
        return self.tally is not None and not self.tally.frozen and self._ready and self.tally.others <= self._up

    return patch.object(Collectives, "at_rest", property(at_rest))


def taking_over_without_what_is_finished() -> Planted:
    """What was voted for runs on, and its vote is said no more."""
    real = Collectives.take_over

    def take_over(self: Collectives, begun: Any, calls: Any, claims: Any, *, decide: bool) -> list[cmd.Command]:
        return real(self, [one._replace(done=one.committed) for one in begun], calls, claims, decide=decide)

    return patch.object(Collectives, "take_over", take_over)


def taking_over_in_another_order() -> Planted:
    """The oldest call comes last."""
    real = Collectives.take_over

    def take_over(self: Collectives, begun: Any, calls: Any, claims: Any, *, decide: bool) -> list[cmd.Command]:
        told = list(begun)
        swapped = zip(told, reversed([one.call for one in told]), strict=True)
        return real(self, [one._replace(call=call) for one, call in swapped], calls, claims, decide=decide)

    return patch.object(Collectives, "take_over", take_over)


# ---- islands of several shards ------------------------------------------------------------------------


def a_commit_with_a_column_missing() -> Planted:
    """The votes of the first column are enough."""
    real = Tally.agreed

    def agreed(self: Tally, seq: int) -> Any:
        first = frozenset(mid for mid in self.voters if not self.columns.get(mid, 0))
        with patch.object(self, "voters", first):
            count = self.open.get(seq)
            return real(self, seq) if count is not None and first <= count.votes.keys() else None

    return patch.object(Tally, "agreed", agreed)


def results_compared_between_columns() -> Planted:
    real = Tally.__init__

    def init(self: Tally, voters: Any, base: int, voids: Any, window: int, columns: Any = None) -> None:
        real(self, voters, base, voids, window)

    return patch.object(Tally, "__init__", init)


def results_compared_with_nobody() -> Planted:
    real = Tally.__init__

    def init(self: Tally, voters: Any, base: int, voids: Any, window: int, columns: Any = None) -> None:
        real(self, voters, base, voids, window, {mid: mid for mid in columns or ()})

    return patch.object(Tally, "__init__", init)


@contextlib.contextmanager
def columns_that_call_what_they_like() -> Iterator[None]:
    """Kinds of calls are not compared between columns."""

    def alike(one: int, other: int) -> bool:
        return True

    with patch.object(tally, "same_kind", alike), patch.object(own_tally, "same_kind", alike):
        yield


def half_an_island_admitted() -> Planted:
    real = Group.whole
    return patch.object(
        Group, "whole", lambda self, members: list(members) if not self.members else real(self, members)
    )


def the_rest_of_an_island_goes_on() -> Planted:
    """After one of its members was lost."""
    return patch.object(Group, "mates", lambda self, member: [])


def the_rest_of_an_island_comes_back() -> Planted:
    """After a restart of the master to which not all of it report."""
    real = Group.whole
    return patch.object(
        Group, "whole", lambda self, members: members if members is self.members else real(self, members)
    )


def reports_counted_over_all_columns() -> Planted:
    real = close.word
    return patch.object(close, "word", lambda report, column, **more: real(report, 0, **more))


def votes_of_a_later_epoch_dropped() -> Planted:
    """Another column may have finished an operation of an epoch that this member is yet to hear of."""
    real = Collectives._keep_ahead

    def keep(self: Collectives, sender: int, note: Any) -> None:
        if isinstance(note, NewRound):
            real(self, sender, note)

    return patch.object(Collectives, "_keep_ahead", keep)


def empty_shards_collected_by_the_master() -> Planted:
    """While members collect the votes of other columns for the same call."""
    return patch.object(collectives, "PROVING", frozenset())
