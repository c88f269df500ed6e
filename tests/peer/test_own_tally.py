"""The tally that a member keeps: what it knows, says again, and never does once it is frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.peer.test_member import data, epoch, infos, kinds, post, told
from tests.sim import mistakes
from wancoll.collective import Descriptor, DType, Kind
from wancoll.commit.own_tally import OwnTally
from wancoll.commit.tally import UPDATE as STANDS
from wancoll.errors import ProtocolError
from wancoll.limits import Limits
from wancoll.peer.core import commands as cmd
from wancoll.peer.core import links
from wancoll.peer.core import member as core
from wancoll.wire import messages as m
from wancoll.wire.note import ROUNDS, Ask, NewRound, pack, unpack

OTHERS = frozenset({2, 3})


def tally(*, base: int = 0, voids: tuple[int, ...] = (), window: int = 8) -> OwnTally:
    return OwnTally(("g", 1, 5), OTHERS, base, voids, window)


def vote(epoch: int, committed: int, seq: int = 0, digest: int = 0, fingerprint: int = 0) -> m.Vote:
    """As m1 says it; whose it is the link says."""
    return m.Vote("g", 1, epoch, seq, digest, fingerprint, committed)


def test_it_commits_what_all_have_finished_alike() -> None:
    b = tally()
    assert b.finish(1, (7, 9)) == vote(5, 0, 1, 7, 9)
    b.hear(2, vote(5, 0, 1, 7, 9))
    assert b.prefix() == 0
    b.hear(3, vote(5, 0, 1, 7, 9))
    assert b.prefix() == 1


@pytest.mark.parametrize("other", [(8, 9), (7, 8)])
def test_what_differs_is_never_committed(other: tuple[int, int]) -> None:
    b = tally()
    b.hear(2, vote(5, 0, 1, 7, 9))
    b.hear(3, vote(5, 0, 1, *other))
    b.finish(1, (7, 9))
    assert (b.prefix(), b.divergent, b.differing(1, (7, 9))) == (0, [1], [(3, other)])


def test_results_are_compared_within_a_column_and_kinds_between_them() -> None:
    """Members 1 and 3 are of one column, 2 and 4 of another."""

    def columns() -> OwnTally:
        return OwnTally(("g", 1, 5), frozenset({2, 3, 4}), 0, (), 9, {1: 0, 2: 1, 3: 0, 4: 1})

    sums, others = (
        Descriptor(Kind.all_reduce, count=3).fingerprint(),
        Descriptor(Kind.all_reduce, count=2).fingerprint(),
    )
    a = columns()
    a.finish(1, (7, sums))
    for mid, result in ((2, (8, others)), (3, (7, sums)), (4, (8, others))):
        assert a.prefix() == 0
        a.hear(mid, vote(5, 0, 1, *result))
    assert (a.prefix(), a.agreed(1), a.divergent) == (1, {0: (7, sums), 1: (8, others)}, [])
    apart = columns()  # its own column is alike, the other one is not: they say so
    apart.finish(1, (7, sums))
    for mid, result in ((2, (8, others)), (3, (7, sums)), (4, (9, others))):
        apart.hear(mid, vote(5, 0, 1, *result))
    assert (apart.prefix(), apart.divergent, apart.differing(1, (7, sums))) == (0, [1], [])
    other = columns()  # another column calls another kind
    other.finish(1, (7, sums))
    other.hear(2, vote(5, 0, 1, *STANDS))
    assert (other.divergent, other.differing(1, (7, sums))) == ([1], [(2, STANDS)])
    stands = columns()  # at what only the master collects: others' votes for another kind show
    stands.hear(2, vote(5, 0, 1, 8, others))
    assert (stands.differing(1, STANDS), stands.differing(1, (0, others))) == ([(2, (8, others))], [])


def test_everything_below_has_to_be_committed_or_void() -> None:
    b = tally(base=3, voids=(5,))
    for seq in (6, 7):
        b.finish(seq, (seq, 1))
        for other in OTHERS:
            b.hear(other, vote(5, 3, seq, seq, 1))
    assert b.prefix() == 3
    b.told_master(4)
    assert b.prefix() == 3
    b.hear(2, vote(5, 4))  # who has heard the master's word
    assert b.prefix() == 7


def test_nobody_commits_on_another_members_word() -> None:
    """Not on that of all others but one, either."""
    b = tally()
    b.finish(1, (7, 9))
    b.hear(2, vote(5, 1, 2, 1, 1))
    b.hear(3, vote(5, 1))
    assert (b.prefix(), b.claimed) == (0, 1)
    b.hear(2, vote(5, 1, 1, 7, 9))
    assert b.prefix() == 0
    b.hear(3, vote(5, 1, 1, 7, 9))
    assert b.prefix() == 1


def test_votes_are_said_again_to_who_has_not_said_that_it_has_committed_that_far() -> None:
    b, kept = tally(), [(1, 7, 9), (2, 8, 9)]
    for seq, digest, fingerprint in kept:
        b.finish(seq, (digest, fingerprint))
        b.hear(2, vote(5, seq - 1, seq, digest, fingerprint))
        b.hear(3, vote(5, 0, seq, digest, fingerprint))
    b.advance(b.prefix())
    b.finish(3, (9, 9))
    assert b.again(3, kept) == [vote(5, 2), vote(5, 2, 1, 7, 9), vote(5, 2, 2, 8, 9), vote(5, 2, 3, 9, 9)]
    assert b.again(2, kept) == [vote(5, 2), vote(5, 2, 2, 8, 9), vote(5, 2, 3, 9, 9)]


def test_nobody_has_committed_what_is_not_finished_here() -> None:
    b = tally(base=3, voids=(5,))
    b.finish(4, (7, 9))
    for committed in (5, 6):
        with pytest.raises(ProtocolError, match="committed what it cannot have"):
            b.hear(2, vote(5, committed, 7, 7, 9))
    for mid in OTHERS:
        b.hear(mid, vote(5, 3, 4, 7, 9))
    b.told_master(6)
    b.hear(2, vote(5, 6, 7, 7, 9))
    assert b.prefix() == 6


def test_an_update_ends_by_the_votes_of_all_or_the_masters_word_and_not_by_that_of_who_passes_it_on() -> None:
    b = tally()
    b.told_master(1, relayed=False)
    b.hear(2, vote(5, 1))
    assert b.prefix() == 0


def test_frozen_it_finishes_and_believes_nothing() -> None:
    b = tally()
    b.finish(1, (7, 9))
    b.hear(2, vote(5, 0, 1, 7, 9))
    b.freeze()
    b.hear(3, vote(5, 1, 1, 8, 9))
    assert (b.claimed, b.divergent, b.unheard(1)) == (0, [], {3})
    for other in OTHERS:
        b.hear(other, vote(5, 1, 1, 7, 9))
    assert b.prefix() == 0
    with pytest.raises(AssertionError):
        b.finish(2, (7, 9))


def test_notes_of_strangers_count_for_nothing() -> None:
    b = tally()
    b.finish(1, (7, 9))
    b.hear(4, vote(5, 1, 1, 7, 9))
    b.hear(3, vote(5, 0, 1, 7, 9))
    assert b.prefix() == 0


def test_memory_is_bounded_and_what_is_committed_is_forgotten() -> None:
    b = tally(window=2)
    b.told_master(1)
    b.hear(2, vote(5, 0, 1, 7, 9))
    b.hear(2, vote(5, 0, 2, 7, 9))
    with pytest.raises(ProtocolError, match="cannot have"):
        b.hear(2, vote(5, 0, 3, 7, 9))
    b.advance(1)
    b.hear(2, vote(5, 0, 1, 7, 9))  # said again
    b.hear(2, vote(5, 0, 3, 7, 9))
    b.advance(0)  # a master's word that comes late
    assert (b.committed, sorted(b.open), b._collected) == (1, [2, 3], set())
    with pytest.raises(ProtocolError, match="cannot have"):
        b.hear(2, vote(5, 1, 4, 7, 9))
    assert b.claims[2] == 0  # nothing has changed


def test_a_vote_that_began_before_its_senders_commit_takes_back_nothing_that_it_has_said() -> None:
    b = tally()
    b.finish(1, (7, 9))
    b.hear(2, vote(5, 1))
    b.hear(2, vote(5, 0, 2, 7, 9))
    assert b.claimed == 1


def test_unheard_are_those_that_have_not_voted_while_nobody_says_that_it_is_committed() -> None:
    b = tally()
    assert b.unheard(1) == OTHERS
    b.finish(1, (7, 9))
    b.hear(3, vote(5, 0, 1, 7, 9))
    assert b.unheard(1) == {2}
    b.hear(3, vote(5, 1))
    assert (b.unheard(1), b.unheard(2)) == (set(), OTHERS)


# ---- a member that has one --------------------------------------------------------------------------


class Voter:
    """m1 of three, all linked."""

    def __init__(self, *, limits: Limits | None = None) -> None:
        self.member = core.Member("g", "m1", 3, 1, first_engine_id=100, limits=limits or Limits())
        self.owner = links.MemberLinks(mid=1)
        self.calls = 0
        self.member.join()
        self.member.joined(1, 1)
        self.enter(1)
        self.member.links_ready(1, [2, 3])

    def enter(self, number: int, upto: int = 0) -> list[cmd.Command]:
        told = epoch(number, 1, 2, 3, upto=upto)
        plan = m.Plan(8, 1024, True, {}, [], 0, "", collectors="members")
        return self.member.enter_epoch(
            m.Epoch("g", 1, 1, number, infos(1, 2, 3), plan, told.key, 1, upto, [], "because"), 0.0
        )

    def post(self, call: Descriptor | None = None) -> list[cmd.Command]:
        self.calls += 1
        said = post(self.calls, call or data(), self.member.epoch_number)
        return self.member.post(said, self.member.call(said), 1.0)

    def run(self, call: Descriptor | None = None) -> list[cmd.Command]:
        """Post it, and let it finish."""
        commands = self.post(call)
        if call is None or call.kind is not Kind.update_membership:
            commands += self.member.op_finished(self.engine_id, 7, 0, now=2.0)
        return commands

    @property
    def engine_id(self) -> int:
        """The youngest attempt's."""
        return self.member.attempts.next - 1

    def master_says(self, said: m.ToMember, now: float = 0.0) -> list[cmd.Command]:
        """What follows from a message of the master."""
        return self.member.hear(said, now, 1, 1)

    def hear(self, mid: int, note: m.Vote | NewRound | Ask) -> list[cmd.Command]:
        return self.member.links_say(links.Noted(self.owner, mid, pack(note)), 3.0)


def notes(commands: list[cmd.Command]) -> list[tuple[int, m.Vote]]:
    return [(mid, unpack(one.note, "g", 1)) for one in commands if isinstance(one, cmd.SendNote) for mid in one.mids]


def masters(commands: list[cmd.Command]) -> list[m.FromPeer]:
    return [one.message for one in commands if isinstance(one, cmd.ToMaster)]


SUM = data().fingerprint()
BARRIER = Descriptor(Kind.barrier)
ROOTED = Descriptor(Kind.broadcast, DType.float32, count=4, root=0)


def test_a_sum_is_said_to_all_others_and_ends_with_their_notes() -> None:
    v = Voter()
    commands = v.run()
    assert notes(commands) == [(2, vote(1, 0, 1, 7, SUM)), (3, vote(1, 0, 1, 7, SUM))]
    assert not masters(commands)
    assert v.hear(2, vote(1, 0, 1, 7, SUM)) == []
    [result] = told(v.hear(3, vote(1, 0, 1, 7, SUM)), m.Result)
    assert (result.seq, result.epoch, result.digest, result.seconds) == (1, 1, 7, 2.0)


def test_the_master_hears_of_a_rooted_call_when_all_below_is_committed() -> None:
    v = Voter()
    v.run()
    assert masters(v.run(ROOTED)) == []
    v.hear(2, vote(1, 0, 1, 7, SUM))
    [done] = masters(v.hear(3, vote(1, 0, 1, 7, SUM)))
    assert isinstance(done, m.Vote)
    assert (done.seq, done.committed) == (2, 1)
    assert told(v.master_says(m.Commit("g", 1, 2, 1), 4.0), m.Result)[0].seq == 2
    [said] = masters(v.master_says(m.Abort("g", 1, 0, "lost")))
    assert said.finished.collected == []


def test_told_to_stop_it_reports_what_it_has_and_finishes_nothing_else() -> None:
    v = Voter()
    v.run()
    v.run(ROOTED)
    v.post()
    number = v.engine_id
    [said] = masters(v.master_says(m.Abort("g", 1, 0, "lost")))
    assert said == m.Frozen("g", 1, 1, m.EpochReport(0, [(1, 7, SUM)], [], []))
    assert v.member.op_finished(number, 7, 0) == []
    assert v.hear(2, vote(1, 1, 1, 7, SUM)) == []
    commands = v.enter(2, upto=1)
    assert [result.seq for result in told(commands, m.Result)] == [1]
    assert "ToMaster:Vote" not in kinds(commands)


def test_what_a_master_asked_for_in_an_epoch_is_not_answered_in_the_next_one() -> None:
    v = Voter()
    v.master_says(m.Abort("g", 1, 1, "calls differ"))
    v.enter(2)
    v.member.links_ready(2, [2, 3])
    assert masters(v.run()) == []


def test_another_digest_is_told_to_the_master_once_and_another_call_is_a_mismatch() -> None:
    v = Voter()
    v.run()
    assert masters(v.hear(2, vote(1, 0, 1, 8, SUM))) == [m.Differs("g", 1, 1, 1, 7, 2, 8)]
    assert v.hear(3, vote(1, 0, 1, 9, SUM)) == []
    v.run()
    assert kinds(v.hear(2, vote(1, 0, 2, 7, SUM + 1))) == ["ToMaster:Mismatch"]


def test_a_link_that_was_lost_is_asked_for_and_hears_all_again() -> None:
    v = Voter()
    v.post()
    v.member.collectives.link_lost(3, "reset")
    commands = v.member.op_finished(v.engine_id, 7, 0)
    assert [mid for mid, _ in notes(commands)] == [2]
    assert [one.mids for one in commands if isinstance(one, links.Need)] == [{3}]
    again = v.member.links_ready(1, [2, 3])
    assert notes(again) == [(3, vote(1, 0)), (3, vote(1, 0, 1, 7, SUM)), (3, NewRound(1, 1))]
    v.hear(2, vote(1, 0, 1, 7, SUM))
    beside = v.member.attempts.next - 1  # it runs again for the others' sake, until it is committed
    assert v.hear(3, vote(1, 0, 1, 7, SUM)) == [cmd.CancelOp(beside)]  # the others have heard the same votes
    assert [result.seq for result in told(v.member.op_cancelled(beside), m.Result)] == [1]


def test_what_the_engine_said_over_a_link_that_was_lost_is_said_again_over_the_next_one() -> None:
    """The link is up again before the member hears that the operation had finished, and that the engine said so."""
    v = Voter()
    v.post()
    number = v.engine_id
    v.member.collectives.link_lost(3, "reset")
    v.member.links_ready(1, [2, 3])
    assert notes(v.member.op_finished(number, 7, 0, voted=True)) == [(3, vote(1, 0, 1, 7, SUM))]


def test_who_cannot_run_again_for_others_says_so_to_each_master() -> None:
    """C12."""
    v = Voter()
    v.run()
    v.member.collectives.link_lost(2, "reset")
    [again] = [one for one in v.member.links_ready(1, [2, 3]) if isinstance(one, cmd.StartOp)]
    assert again.beside
    [said] = masters(v.member.op_refused(again.op.engine_id, "no memory"))
    assert said == m.LinkDown(
        "g", 1, 1, 2, "lost", "not again for others' sake: the engine refuses it: no memory", False
    )
    v.member.links_ready(1, [2, 3])
    v.member.reconnected(2, 99)
    assert said in masters(v.member.resumed(m.Resumed("g", 1, 1, 1)))
    v.hear(2, vote(1, 0, 1, 7, SUM))
    assert len(told(v.hear(3, vote(1, 0, 1, 7, SUM)), m.Result)) == 1  # it is finished here all the same


def test_a_round_of_an_epoch_that_is_never_heard_of_hides_no_other() -> None:
    v = Voter()
    said = (2, NewRound(1 << 60, 1)), (3, NewRound(2, 3)), (2, NewRound(1 << 60, 2)), (9, NewRound(2, 5))
    for sender, begun in said:  # 9 is no member of epoch 2
        v.member.links_say(links.Noted(v.owner, sender, pack(begun)), 3.0)
    v.enter(2)
    assert v.member.collectives.round == 3


@pytest.mark.parametrize(("before", "complaints"), [(ROUNDS - 3, 0), (ROUNDS - 1, 1)])
def test_what_breaks_in_the_last_round_is_told_to_a_later_master(before: int, complaints: int) -> None:
    v = Voter()
    v.member.links_say(links.Noted(v.owner, 3, pack(NewRound(1, before))), 3.0)
    v.post()
    v.member.collectives.link_lost(2, "reset")
    v.member.links_ready(1, [2, 3])
    v.member.reconnected(2, 99)
    said_again = masters(v.member.resumed(m.Resumed("g", 1, 1, 1)))
    assert len([one for one in said_again if isinstance(one, m.LinkDown)]) == complaints


def test_a_note_of_an_epoch_that_is_not_known_here_is_not_kept() -> None:
    """Nobody can have finished anything in it."""
    v = Voter()
    assert v.hear(2, vote(2, 0)) == v.hear(3, vote(2, 5, 6, 7, SUM)) == []
    v.enter(2)
    v.member.links_ready(2, [2, 3])
    assert told(v.run(), m.Result) == []


def test_a_note_or_a_question_of_an_epoch_that_is_over_counts_for_nothing() -> None:
    v = Voter()
    v.enter(2)
    v.member.links_ready(2, [2, 3])
    v.run()
    for mid in (2, 3):
        assert v.hear(mid, vote(1, 0, 1, 7, SUM)) == v.hear(mid, Ask(1, 0)) == []
    v.hear(2, vote(2, 0, 1, 7, SUM))
    assert len(told(v.hear(3, vote(2, 0, 1, 7, SUM)), m.Result)) == 1


def test_nothing_runs_in_a_new_round_before_the_engine_has_let_go_of_the_older_one() -> None:
    v = Voter()
    v.post()
    running = v.engine_id
    assert cmd.CancelOp(running) in v.member.collectives.link_lost(2, "reset")
    assert "StartOp" not in " ".join(kinds(v.member.links_ready(1, [2, 3])))
    [again] = [one for one in v.member.op_cancelled(running) if isinstance(one, cmd.StartOp)]
    assert again.op.seq == 1


def test_nonsense_breaks_the_link_and_nothing_else() -> None:
    v = Voter()
    [redial] = v.member.links_say(links.Noted(v.owner, 2, b"\7nothing"))
    assert isinstance(redial, links.Redial)
    assert (redial.others, redial.channel) == ((2,), links.COLLECTIVES)


def test_alone_it_commits_what_it_finishes() -> None:
    v = Voter()
    plan = m.Plan(8, 1024, True, {}, [], 0, "", collectors="members")
    v.member.enter_epoch(m.Epoch("g", 1, 1, 2, infos(1), plan, b"k" * 16, 1, 0, [], "lost all"), 0.0)
    v.member.links_ready(2, [])
    assert [result.contributors for result in told(v.run(), m.Result)] == [["m1"]]


def test_an_update_that_has_ended_in_a_later_epoch_lets_nothing_above_it_end_in_this_one() -> None:
    v = Voter()
    v.run(Descriptor(Kind.update_membership))
    v.run()
    v.run()
    for mid in (2, 3):
        assert v.hear(mid, vote(1, 0, 2, 7, SUM)) == []
    v.post()
    running = v.engine_id
    commands = v.master_says(m.Updated("g", 1, m.UpdateOutcome(1, 2, ["m1", "m2", "m3", "m4"])), 2.0)
    assert told(commands, m.Result) == []
    assert cmd.CancelOp(running) in commands
    assert v.hear(2, vote(1, 3, 3, 7, SUM)) == []
    v.member.op_cancelled(running)
    assert [(result.seq, result.epoch) for result in told(v.enter(3, upto=1), m.Result)] == [(1, 2)]
    again = v.member.links_ready(3, [2, 3])
    assert [one.op.seq for one in again if isinstance(one, cmd.StartOp)] == [2, 3, 4]


def test_an_update_that_has_ended_in_this_epoch_stops_nothing() -> None:
    v = Voter()
    v.run(Descriptor(Kind.update_membership))
    v.run()
    for mid in (2, 3):
        assert v.hear(mid, vote(1, 0, 2, 7, SUM)) == []
    commands = v.master_says(m.Updated("g", 1, m.UpdateOutcome(1, 1, ["m1", "m2", "m3"])), 2.0)
    assert sorted((result.seq, result.epoch) for result in told(commands, m.Result)) == [(1, 1), (2, 1)]


# ---- update_membership without a master (C11) ---------------------------------------------------------

UPDATE = Descriptor(Kind.update_membership)


def test_without_a_master_an_update_ends_when_all_others_pass_it_too() -> None:
    v = Voter()
    assert notes(v.run(UPDATE)) == []
    note = vote(1, 0, 1, 0, UPDATE.fingerprint())
    assert v.hear(2, note) == []
    assert notes(v.member.without_master(3.0)) == [(2, vote(1, 0)), (3, vote(1, 0)), (2, note), (3, note)]
    [result] = told(v.hear(3, note), m.Result)
    assert (result.seq, result.epoch, result.asked_master) == (1, 1, False)
    assert notes(v.run(UPDATE)) == [(other, vote(1, 1, 2, 0, UPDATE.fingerprint())) for other in (2, 3)]


def test_a_master_that_is_back_is_asked_and_what_was_said_stands() -> None:
    v = Voter()
    v.run(UPDATE)
    v.member.without_master(3.0)
    v.member.master_is_back()
    [result] = told(v.master_says(m.Commit("g", 1, 1, 1), 4.0), m.Result)
    assert result.asked_master
    assert notes(v.run(UPDATE)) == []


def test_it_reports_what_it_would_pass_and_ends_it_in_the_epoch_in_which_all_have() -> None:
    v = Voter()
    v.run(UPDATE)
    v.member.without_master(3.0)
    [said] = masters(v.master_says(m.Abort("g", 1, 0, "lost")))
    assert isinstance(said, m.Frozen)
    assert said.finished == m.EpochReport(0, [(1, 0, UPDATE.fingerprint())], [], [])
    told_so = epoch(2, 1, 2, 3, upto=1)
    [result] = told(v.member.enter_epoch(replace(told_so, passed=True), 5.0), m.Result)
    assert (result.epoch, result.asked_master) == (1, False)


def test_it_says_again_what_who_was_late_with_the_epoch_has_dropped() -> None:
    v = Voter()
    v.run(UPDATE)
    first = notes(v.member.without_master(3.0))[2:]
    assert notes(v.member.without_master(3.5)) == first
    assert len(first) == 2


def at(v: Voter, *moments: float) -> list[tuple[int, m.Vote]]:
    """Heartbeat intervals pass: what it says then."""
    return [said for now in moments for said in notes(v.member.ask(now))]


def test_who_alone_heard_the_master_commit_it_is_asked_for_its_vote_when_the_master_is_gone() -> None:
    v, late = Voter(), Voter()
    for each in (v, late):
        each.run(UPDATE)
    v.master_says(m.Commit("g", 1, 1, 1), 1.0)
    for each in (v, late):
        said = notes(each.member.without_master(3.0))
        assert said[:2] == [(2, vote(1, each is v)), (3, vote(1, each is v))]
    passes = vote(1, 0, 1, 0, UPDATE.fingerprint())
    assert late.hear(3, passes) == late.hear(2, vote(1, 1)) == []
    assert at(late, 3.5, 4.0) == [(2, Ask(1, 0)), (3, Ask(1, 0))]
    [first, again] = notes(v.hear(3, Ask(1, 0)))
    assert (first, again) == ((3, vote(1, 1)), (3, replace(passes, committed=1)))
    [result] = told(late.hear(2, again[1]), m.Result)
    assert result.seq == 1


def test_who_passes_it_says_so_to_one_who_was_late_with_the_epoch_and_had_dropped_a_note() -> None:
    """It asks for the vote that it has dropped."""
    update, v, late = UPDATE.fingerprint(), Voter(), Voter()
    for each in (v, late):
        each.run(UPDATE)
        each.member.without_master(3.0)
    v.hear(2, vote(1, 0, 1, 0, update))
    said = v.hear(3, vote(1, 0, 1, 0, update))
    assert notes(said) == [(2, vote(1, 1)), (3, vote(1, 1))]
    assert late.hear(2, vote(1, 0, 1, 0, update)) == late.hear(3, vote(1, 1)) == []
    assert at(late, 3.5, 4.0) == [(2, Ask(1, 0)), (3, Ask(1, 0))]
    [result] = told(late.hear(3, vote(1, 1, 1, 0, update)), m.Result)
    assert (result.seq, result.asked_master) == (1, False)


def test_votes_are_asked_for_at_each_interval_in_which_another_one_has_more_and_nothing_came_here() -> None:
    v = Voter()
    v.run()
    v.run()
    assert at(v, 3.0, 3.5) == []
    v.hear(2, vote(1, 1, 2, 7, SUM))
    assert at(v, 4.0) == []  # they may be on their way
    assert at(v, 4.5) == at(v, 5.0) == [(2, Ask(1, 0)), (3, Ask(1, 0))]
    for mid in (2, 3):
        v.hear(mid, vote(1, 1, 1, 7, SUM))
    v.hear(3, vote(1, 2))
    assert at(v, 5.5) == []
    assert at(v, 6.0) == [(2, Ask(1, 1)), (3, Ask(1, 1))]
    v.hear(3, vote(1, 1, 2, 7, SUM))
    assert at(v, 6.5, 7.0) == []


def test_who_is_asked_says_its_votes_again_once_an_interval_and_not_once_it_is_frozen() -> None:
    v = Voter()
    v.run()
    v.run()
    for mid in (2, 3):
        v.hear(mid, vote(1, 0, 1, 7, SUM))
    again = [(3, vote(1, 1)), (3, vote(1, 1, 1, 7, SUM)), (3, vote(1, 1, 2, 7, SUM))]
    assert notes(v.hear(3, Ask(1, 0))) == again
    assert notes(v.hear(3, Ask(1, 0))) == []
    assert len(notes(v.hear(2, Ask(1, 0)))) == 3
    at(v, 4.0)
    assert notes(v.hear(3, Ask(1, 1))) == [again[0], again[2]]
    v.master_says(m.Abort("g", 1, 0, "lost"))
    at(v, 5.0)
    assert v.hear(3, Ask(1, 0)) == at(v, 6.0) == []


def test_as_many_votes_are_kept_as_another_member_can_lack() -> None:
    """It reports them, too: a master that ends the epoch compares them with what the others have."""
    v = Voter(limits=Limits(ops_in_flight=2, zero_contributions=1))
    for seq in range(1, 6):
        v.run()
        for mid in (2, 3):
            v.hear(mid, vote(1, 0, seq, 7, SUM))
    assert [note.seq for _, note in notes(v.hear(3, Ask(1, 0)))] == [0, 3, 4, 5]
    [said] = masters(v.master_says(m.Abort("g", 1, 0, "lost")))
    assert said == m.Frozen("g", 1, 1, m.EpochReport(5, [(seq, 7, SUM) for seq in (3, 4, 5)], [], []))


def test_frozen_it_passes_nothing() -> None:
    v = Voter()
    v.run(UPDATE)
    v.master_says(m.Abort("g", 1, 0, "lost"))
    assert v.member.without_master(3.0) == v.hear(2, NewRound(1, 1)) == []


def test_votes_of_another_column_may_come_before_the_epoch() -> None:
    """What is finished there waits for nobody of this column, and is said once."""
    v = Voter()
    v.enter(2)
    whole = [m.MemberInfo(mid, name, "d", ["h:1"], "") for mid, name in enumerate(("a/0", "a/1", "b/0", "b/1"), 1)]
    plan = m.Plan(8, 1024, True, {}, [], 0, "", collectors="members")

    def enter(number: int) -> None:
        v.member.enter_epoch(m.Epoch("g", 1, 1, number, whole, plan, b"k" * 16, 1, 0, [], "because", shards=2), 0.0)
        v.member.links_ready(number, [2, 3, 4])

    enter(3)
    assert (v.member.rank, v.member.member_names) == (0, ["a/0", "b/0"])
    for mid in (2, 4):
        assert v.hear(mid, vote(4, 0, 1, 9, SUM)) == []
    enter(4)
    v.run()
    results = told(v.hear(3, vote(4, 0, 1, 7, SUM)), m.Result)
    assert [(one.seq, one.epoch, one.contributors) for one in results] == [(1, 4, ["a/0", "b/0"])]
    v.member.shards = 2
    assert v.member.leave("bye")[0] == cmd.ToMaster(m.Leave("g", v.member.name, "", False, 1))


def test_a_barrier_that_the_engine_has_voted_for_is_said_again_where_a_column_is_one_member() -> None:
    v = Voter()
    whole = [m.MemberInfo(mid, name, "d", ["h:1"], "") for mid, name in enumerate(("a/0", "a/1", "b/0", "b/1"), 1)]
    plan = m.Plan(8, 1024, True, {}, [], 0, "", collectors="members")
    for number, members in ((2, whole), (3, whole[:2])):
        told = m.Epoch("g", 1, 1, number, members, plan, b"k" * 16, 1, 0, [], "because", shards=2)
        commands = v.member.enter_epoch(told, 0.0) + v.member.links_ready(number, [2, 3, 4][: len(members) - 1])
        if number == 2:
            v.post(BARRIER)
            v.member.op_finished(v.engine_id, 0, 0, now=2.0, voted=True)
    assert notes(commands) == [(2, vote(3, 0, 1, 0, BARRIER.fingerprint()))]


@pytest.mark.parametrize(
    ("mistake", "test"),
    [
        ("votes_of_a_later_epoch_dropped", test_votes_of_another_column_may_come_before_the_epoch),
        (
            "not_reporting_what_was_passed_alone",
            test_it_reports_what_it_would_pass_and_ends_it_in_the_epoch_in_which_all_have,
        ),
        (
            "ending_in_the_next_epoch_what_was_passed",
            test_it_reports_what_it_would_pass_and_ends_it_in_the_epoch_in_which_all_have,
        ),
        ("votes_of_an_older_epoch", test_a_note_or_a_question_of_an_epoch_that_is_over_counts_for_nothing),
    ],
)
def test_planted_mistakes_are_found(mistake: str, test: Callable[[], None]) -> None:
    with getattr(mistakes, mistake)(), pytest.raises(AssertionError):
        test()
