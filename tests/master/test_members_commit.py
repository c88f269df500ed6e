"""How reports are counted where members lie (C3), as tables of cases; scripts/closing.txt has the order of events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.master.script import Script
from tests.master.transcript import GROUP, Room, report_of
from wancoll.commit import close
from wancoll.commit.tally import UPDATE
from wancoll.limits import Limits
from wancoll.wire import messages as m
from wancoll_master.core.ready import Former, Used


def voters(count: int, **limits: Any) -> Script:
    room = Script(Limits(voters=32, **limits))
    room.form(count)
    assert room.group.told.plan.collectors == "members"
    return room


def test_a_pair_that_cannot_talk_and_too_many_members_leave_it_to_the_master() -> None:
    room = voters(4)
    room.link_down("m0", "m2", "unreachable")
    room.sleep(1.0)
    room.all_frozen()
    assert room.new_epoch().plan.collectors == "master"
    many = Room(Limits())
    many.form(33)
    assert many.group.told.plan.collectors == "master"


def test_by_default_members_commit_while_they_are_few_enough() -> None:
    room = Script(Limits())
    room.form(32)
    assert room.group.told.plan.collectors == "members"
    room.join("m32", start=32)
    room.admit("m32")
    room.all_update(1)
    room.all_frozen()
    epoch = room.new_epoch()
    assert (len(epoch.members), epoch.committed_upto, epoch.plan.collectors) == (33, 1, "master")
    room.lose("d0")
    epoch = room.new_epoch()
    assert (len(epoch.members), epoch.plan.collectors) == (32, "members")


def test_who_says_too_much_is_cut_off_and_not_who_speaks_next() -> None:
    room = voters(2)
    room.join("x", group="other", daemon="d1", start=1)
    for seq in range(1000, 1000 + 4096):
        room.say("d0", m.Vote(GROUP, room.mid("m0"), 1, seq, 7, 9))
    room.say("d1", m.Vote(GROUP, room.mid("m1"), 1, 1, *UPDATE))
    assert "d1" in room.state.daemons
    room.say("d0", m.Vote(GROUP, room.mid("m0"), 1, 900, 7, 9))
    assert ("d0" in room.state.daemons, "d1" in room.state.daemons) == (False, True)


def test_a_link_that_is_lost_again_and_again_with_nothing_committed_is_avoided() -> None:
    room = voters(4)
    for _ in range(6):
        assert not room.group.bad_pairs
        room.beats(0, **dict.fromkeys(room.names, (1, 0)))
        room.link_down("m0", "m1", "lost")
        room.sleep(1.0)
        room.all_frozen()
    assert list(room.group.bad_pairs) == [(1, 2)]


def test_nobody_vouches_for_a_member_whose_process_is_not_known() -> None:
    """It did not report, and the journal is lost: nobody can say what process that was."""
    room = Room(Limits(voters=32))
    unknown = Used(3, frozenset({1}), 0, {}, 600, {1: Former("member 1", 0)})
    room.journal = {GROUP: unknown}
    room.restart()
    room.hello("e0", incarnation=11, ended=[0])
    assert room.state.used[GROUP] == unknown


# ---- members that lie (C3) ----------------------------------------------------------------------------


def closed(*said: tuple[int, dict[int, int]], lost: int = 0, **limits: Any) -> Room:
    """The epoch ends, and each has committed so much and has these digests by seq; the last *lost* have gone since."""
    room = voters(len(said), **limits)
    room.mismatch("m0", 99, "a")
    for number, (upto, digests) in enumerate(said):
        room.frozen(f"m{number}", upto=upto, results=digests)
    for number in range(len(said) - lost, len(said)):
        room.lose(f"d{number}")
    room.sleep(room.limits.mismatch_wait + 0.1)
    return room


def outcome(room: Room) -> tuple[list[str], int, list[int]]:
    """The members that go on, what is committed, and the calls of which nobody can say whether they are."""
    epoch = room.group.told
    unknown = [void.seq for void in epoch.voids if void.error == "OutcomeUnknown"]
    return [one.name for one in epoch.members], epoch.committed_upto, unknown


A, B, NONE = {1: 7}, {1: 8}, dict[int, int]()
COUNTED = {
    # what each has committed, and its digests; who goes on, D, what is unknown
    "the liar says nothing of what it voted for": ([(1, A), (0, A), (0, NONE)], "m0 m1", 1, []),
    "the liar has another result": ([(1, A), (0, A), (0, B)], "m0 m1", 1, []),
    "the liar claims what nobody has": ([(0, A), (0, A), (1, B)], "m0 m1", 1, []),
    "the liar claims what nobody has finished": ([(0, NONE), (0, NONE), (1, B)], "m0 m1", 0, []),
    "the liar claims, and does not say with which result": ([(0, A), (0, B), (1, NONE)], "m0 m1", 0, []),
    "the liar made two results, and claims one": ([(0, A), (0, B), (1, A)], "m0 m2", 1, []),
    "the liar claims what another one has, and one lags": ([(0, A), (0, NONE), (1, A)], "m0 m2", 1, []),
    "two claims": ([(1, A), (0, A), (0, A), (1, B)], "m0 m1 m2", 1, []),
    "two claims, and only one is contradicted by most": ([(1, A), (1, A), (1, B), (0, NONE)], "m0 m1", 1, []),
    "a claim contradicted by most, and who has the same and claims nothing": (
        [(1, A), (0, A), (0, NONE), (0, NONE), (0, NONE)], "m1 m2 m3 m4", 0, []
    ),
    "who is out for one operation does not count in the next": (
        [(2, A | {2: 7}), (0, A | {2: 7}), (0, A), (0, A), (0, B)], "m0 m1 m2 m3", 1, [2]
    ),
    "what was counted with a report stands when it counts no more": (
        [(1, A), (0, A | {2: 7}), (2, {2: 7})], "m1 m2", 2, []
    ),
    "the same of five, and one liar": (
        [(3, {1: 7, 2: 7, 3: 7}), (2, {1: 7, 2: 7}), (1, A), (0, {1: 7, 2: 7, 3: 7}), (3, {3: 7})], "m0 m3 m4", 3, []
    ),
    "two claims, both contradicted by most": ([(1, A), (1, B), (0, NONE), (0, NONE), (0, NONE)], "m2 m3 m4", 0, []),
    "a tie": ([(1, A), (0, NONE)], "m0 m1", 0, [1]),
    "a tie of results": ([(1, A), (0, B)], "m0 m1", 0, [1]),
    "a tie of claims": ([(1, A), (1, B)], "m0 m1", 0, [1]),
    "a tie of four": ([(1, A), (0, A), (0, B), (0, NONE)], "m0 m1 m2 m3", 0, [1]),
    "what is above a tie": ([(3, {1: 7, 2: 7, 3: 7}), (1, {1: 7, 3: 7})], "m0 m1", 1, [2, 3]),
    "results are kept of the newest alone": ([(50, {50: 7}), (49, {49: 7, 50: 7}), (0, NONE)], "m0 m1", 50, []),
    "the liar claims all up to what all have": ([(5, {5: 7}), (0, {5: 7}), (0, {5: 7})], "m1 m2", 0, []),
    "a huge claim": ([(0, A), (0, A), (1 << 40, {1 << 40: 7})], "m0 m1", 1, []),
    "most lie": ([(1, A), (0, B), (0, B)], "m1 m2", 1, []),
}  # fmt: skip


def test_a_closing_that_puts_out_all_who_are_left_ends_the_group_and_not_the_master() -> None:
    room = voters(4)
    room.mismatch("m0", 99, "a")
    for name, (upto, done) in {"m0": (0, []), "m1": (1, [1]), "m2": (1, [1])}.items():
        room.frozen(name, upto=upto, results=dict.fromkeys(done, 7))
    room.sleep(room.limits.mismatch_wait + 0.1)
    for daemon in ("d1", "d2", "d3"):
        room.lose(daemon)
    assert GROUP not in room.state.groups
    assert "operation 1 is committed, as most have it" in room.one("d0", m.Evicted).reason


@pytest.mark.parametrize("third", [(1, [(1, 7, 9)]), (2, [(1, 7, 9), (2, 3, 9)])])
def test_a_restart_that_puts_out_all_who_are_left_ends_the_group_and_not_the_master(
    third: tuple[int, list[tuple[int, int, int]]],
) -> None:
    """Three contradict the fourth, or each other too, and are lost."""
    room = Room(Limits(voters=0))
    room.restarted(mids=(1, 2, 3, 4))
    room.hello("d4", incarnation=1)
    claims = {1: (2, [(1, 7, 9), (2, 1, 9)]), 2: (2, [(1, 7, 9), (2, 2, 9)]), 3: third, 4: (0, [])}
    for mid, (upto, done) in claims.items():
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3, 4), committed_upto=upto, done=done))
        if mid < 4:
            room.drop(f"d{mid}")
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert GROUP not in room.state.groups
    fate = room.one("d4", m.Evicted)
    assert (fate.committed_upto, fate.unknown_upto) == (0, m.MOST)
    room.join("n0", daemon="d4", start=1)
    room.sleep(room.limits.rejoin_grace + 0.1)
    assert room.epoch > 1


def test_liars_that_are_lost_are_counted_once_and_not_at_each_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else lists that a few members choose hold up a master for minutes."""
    removed: list[int] = []
    real = close._Said.remove
    monkeypatch.setattr(close._Said, "remove", lambda said, mids: removed.append(len(mids)) or real(said, mids))  # type: ignore[func-returns-value]
    right = {seq: (7, seq) for seq in range(1, 201)}
    liars = {100 + k: close.Word(200, {seq: (k, seq) for seq in right}) for k in range(40)}  # one of them is right
    honest = {mid: close.Word(200, right) for mid in range(1, 51)}
    found = close.close_epoch(honest | liars, honest.keys(), 0, lambda seq: False, ())
    assert (found.upto, found.out, removed) == (200, {}, [39])
    assert found.results == [(seq, 7, seq, 0) for seq in right]


@pytest.mark.parametrize("apart", [False, True])
def test_what_only_a_lost_liar_says_is_committed_is_not_so_for_having_been_finished(apart: bool) -> None:
    """Another member may have another result, or only the master may commit it."""
    honest = {mid: close.Word(0, {1: (1, 9), 2: (2, 9)}, () if apart else {2}) for mid in (1, 2)}
    liar = close.Word(2, {1: (5, 9), 2: (2, 9)})
    found = close.close_epoch(honest | {3: liar}, {1, 2}, 0, {2}.__contains__ if apart else lambda seq: False, ())
    assert (found.sure, found.upto, found.results, found.out) == (0, 1, [(1, 1, 9, 0)], {})


def test_reports_are_counted_anew_without_a_lost_liar() -> None:
    words = {1: close.Word(1, {1: (1, 9)}), 2: close.Word(0, {1: (1, 9)}), 3: close.Word(0, {})}
    found = close.close_epoch(words | {4: close.Word(1, {1: (5, 9)})}, {1, 2, 3}, 0, lambda seq: False, ())
    assert set(found.out) == {3}
    assert not found.tied


@pytest.mark.parametrize("case", COUNTED)
def test_reports_are_counted_where_one_says_that_an_operation_is_committed_and_another_contradicts(case: str) -> None:
    said, names, upto, unknown = COUNTED[case]
    assert outcome(closed(*said)) == (names.split(), upto, unknown)


def test_the_report_of_a_member_that_is_lost_since_counts() -> None:
    assert outcome(closed((0, A), (0, NONE), (0, A), (1, A), lost=1)) == (["m0", "m2"], 1, [])
    assert outcome(closed((0, A), (0, NONE), (1, A), lost=1)) == (["m0"], 1, [])
    assert outcome(closed((0, A), (0, NONE), lost=1)) == (["m0"], 1, [])  # nobody claims it


@pytest.mark.parametrize("collectors", ["members", "master"])
def test_after_a_restart_reports_of_the_lost_whom_an_epoch_that_nobody_heard_of_left_out_do_not_count(
    collectors: str,
) -> None:
    """They had been evicted, and may lack what the others have committed; else it would be a tie."""
    room = reported(collectors, {1: 1, 2: 1, 3: 0, 4: 0}, mids=(1, 2), lost=(3, 4))
    assert [one.mid for one in room.group.members] == [1, 2]
    assert outcome(room) == (["m1", "m2"], 1, [])


@pytest.mark.parametrize("collectors", ["members", "master"])
@pytest.mark.parametrize(("claims", "upto"), [((1, 1, 0), 1), ((1, 1, 0, 0), 0), ((1, 0, 0), 0), ((1, 1, 1), 1)])
def test_after_a_restart_an_epoch_that_nobody_heard_of_bounds_what_is_committed_unless_most_say_more(
    collectors: str, claims: tuple[int, ...], upto: int
) -> None:
    """It is of another history then; who says the contrary has been found wrong by most."""
    said = dict(enumerate(claims, 1))
    room = reported(collectors, said, mids=tuple(said))
    names = [f"m{mid}" for mid, claim in said.items() if not upto or claim]
    assert outcome(room) == (names, upto, [])


LIE = m.UpdateOutcome(1, 9, ["m4"])
TRUTH, NEWER = (m.UpdateOutcome(1, epoch, ["m1", "m2", "m3", "m4"]) for epoch in (1, 2))


@pytest.mark.parametrize("collectors", ["members", "master"])
@pytest.mark.parametrize(
    ("told", "stands", "believed"),
    [
        ({1: TRUTH}, (2, 3, 4), TRUTH),
        ({1: TRUTH, 3: TRUTH, 4: LIE}, (2,), TRUTH),
        ({4: LIE}, (2,), None),  # the others have not come to it, so it cannot have ended
        ({1: TRUTH, 2: TRUTH, 4: m.UpdateOutcome(7, 1, ["m4"])}, (3,), TRUTH),
        ({1: TRUTH, 4: NEWER}, (2, 3), None),  # a tie: it ends for them with what comes next
    ],
)
def test_how_an_update_has_ended_is_not_believed_on_one_members_word(
    collectors: str, told: dict[int, m.UpdateOutcome], stands: tuple[int, ...], believed: m.UpdateOutcome | None
) -> None:
    """What all bear, and most say, those hear that stand at it. *told*: who says what; *stands*: members that wait."""
    room = Room(Limits(voters=32 if collectors == "members" else 0))
    room.restarted(mids=(1, 2, 3, 4, 9))
    room.hello("d4")
    for mid in (1, 2, 3, 4):
        said: dict[str, Any] = {"updates": [1]} if mid in stands else {}
        if mid in told:
            said |= {"committed_upto": told[mid].seq, "updated": told[mid], "done": [(1, *UPDATE)]}
        room.say(f"d{mid}", report_of(mid, of=(1, 2, 3, 4, 9), collectors=collectors, **said))
    room.sleep(room.limits.rejoin_grace + 0.1)
    heard = [one.outcome for mid in stands for one in room.take(f"d{mid}", m.Updated)]
    assert heard == ([believed] * len(stands) if believed else [])


def reported(collectors: str, said: dict[int, int], mids: tuple[int, ...], lost: tuple[int, ...] = ()) -> Room:
    """A master whose journal knows a newer epoch than all who report: each has committed so much. Some are lost since.

    Member 9 never reports.
    """
    room = Room(Limits(voters=32 if collectors == "members" else 0))
    room.restarted(epoch=2, mids=mids)
    if 4 in said:
        room.hello("d4")
    for mid in sorted(said, key=lambda mid: mid not in lost):
        done = [(1, 7, 9)] if said[mid] else []
        room.say(f"d{mid}", report_of(mid, of=(*said, 9), collectors=collectors, committed_upto=said[mid], done=done))
        if mid in lost:
            room.drop(f"d{mid}")
    room.sleep(room.limits.rejoin_grace + 0.1)
    return room


def test_a_tie_about_a_huge_number_is_about_no_more_than_an_honest_member_can_lack() -> None:
    room = closed((1 << 40, NONE), (0, NONE), ops_in_flight=4, zero_contributions=2)
    assert outcome(room) == (["m0", "m1"], 0, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        {"done": [(1, 5, UPDATE[1])]},  # a result of what has none
        {"committed_upto": 1, "done": [(4097, 1, 1)]},  # beyond all that the others can have
    ],
)
def test_what_one_reports_is_charged_to_nobody_else(ahead: bool, said: dict[str, Any]) -> None:
    """Neither to the last who reports, nor to the master's own clock; *ahead*: the journal knows a newer epoch."""
    room = Room(Limits(voters=0))
    room.restarted(epoch=2, mids=(1, 2, 3, 4)) if ahead else room.restarted()
    room.say("d1", report_of(1, **said))
    for mid in (2, 3):
        room.say(f"d{mid}", report_of(mid))
    room.sleep(room.limits.rejoin_grace + 1)
    assert {"m2", "m3"} <= set(room.names)
    assert {"d2", "d3"} <= set(room.conns)


def test_a_close_of_which_nobody_who_is_right_is_left() -> None:
    words = {mid: close.Word(2, {2: (mid, 9)}) for mid in (1, 2, 3)}
    assert close.close_epoch(words, (), 1, lambda seq: False, ()) == close.EpochOutcome(1, 1, [])
    assert close.close_epoch({}, (), 1, lambda seq: False, ()) == close.EpochOutcome(1, 1, [])
