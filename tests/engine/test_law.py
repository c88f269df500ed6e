"""The engine's law of commit (native/engine/calls/law.c) says yes only where the tally in Python does.

Both are told one history of a member: calls that begin, results that are finished in any order, votes of the others as
they come, right and wrong. What the engine does not judge it leaves with all that follows from that member, as notes do.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from wancoll.commit.own_tally import OwnTally
from wancoll.errors import ProtocolError
from wancoll.native import ffi, lib
from wancoll.wire.messages import Vote

EPOCH = 7
SLOTS = lib.WC_CALLS


def fingerprint(seq: int) -> int:
    return 1000 + seq


class Both:
    """The engine's law and the tally, side by side, of a member with *others*."""

    def __init__(self, others: int, base: int) -> None:
        self.law: Any = ffi.new("wc_law *")
        lib.wc_law_open(self.law, EPOCH, others, base, ffi.new("uint64_t[]", [base] * others))
        self.tally = OwnTally(("g", others, EPOCH), frozenset(range(others)), base, (), 4 * SLOTS)
        self.running: list[int] = []
        self.left = set[int]()  # members whose notes the engine has left to the daemon
        self.divergent = False  # a result of this member's own is another than one that was heard

    def call(self) -> None:
        if not lib.wc_law_full(self.law):
            seq = self.law.called + 1
            assert lib.wc_law_start(self.law, fingerprint(seq)) == seq
            self.running.append(seq)

    def finish(self, which: int, digest: int) -> None:
        if self.running:
            seq = self.running.pop(which % len(self.running))
            equal = bool(lib.wc_law_finish(self.law, seq, digest))
            self.tally.finish(seq, (digest, fingerprint(seq)))
            self.divergent |= not equal
            if not self.left:
                assert equal == (seq not in self.tally.divergent)

    def hear(self, voter: int, vote: Vote) -> None:
        if voter in self.left:
            taken = False
        else:
            told = ffi.new("wc_vote *", (vote.epoch, vote.committed, vote.seq, vote.digest, vote.fingerprint))
            taken = bool(lib.wc_law_hear(self.law, voter, told))
        if not taken:
            self.left.add(voter)
        try:
            if vote.epoch == EPOCH:
                self.tally.hear(voter, vote)
        except ProtocolError:
            assert not taken, "the tally calls it nonsense"
        assert not taken or vote.epoch == EPOCH

    def commit(self) -> None:
        while lib.wc_law_commit(self.law):
            pass
        self.tally.advance(self.tally.prefix())
        assert self.law.committed <= self.tally.committed, "the engine commits what the tally does not"
        if not self.left and not self.divergent:
            assert self.law.committed == self.tally.committed
            assert [self.law.claims[voter] for voter in range(self.law.voters)] == [
                self.tally.claims[voter] for voter in range(self.law.voters)
            ]


ACTIONS = st.one_of(
    st.tuples(st.just("call")),
    st.tuples(st.just("finish"), st.integers(0, 3), st.sampled_from([5, 5, 5, 5, 6])),
    st.tuples(
        st.just("hear"),
        st.integers(0, 3),  # of whom
        st.integers(-1, 4),  # above what is committed here
        st.sampled_from([5, 5, 5, 5, 5, 6]),  # digest
        st.sampled_from([0, 0, 0, 0, 0, 1]),  # added to the fingerprint
        st.sampled_from([0, 0, 0, 0, 0, 0, 1]),  # added to the epoch
        st.integers(0, 3),  # that it says is committed, below what is finished here, or above
    ),
)


@given(others=st.integers(1, 4), base=st.integers(0, 200), actions=st.lists(ACTIONS, max_size=60))
def test_a_yes_of_the_engine_is_a_yes_of_the_tally(others: int, base: int, actions: list[tuple[Any, ...]]) -> None:
    both = Both(others, base)
    for action in actions:
        match action:
            case ("call",):
                both.call()
            case ("finish", which, digest):
                both.finish(which, digest)
            case ("hear", voter, above, digest, wrong, later, claimed):
                seq = max(0, both.law.committed + above)
                committed = max(0, both.law.finished + 1 - claimed)
                vote = Vote("g", voter % others, EPOCH + later, seq, digest, fingerprint(seq) + wrong, committed)
                both.hear(voter % others, vote)
        both.commit()


def test_a_full_run_commits_in_order_whatever_order_votes_come_in() -> None:
    both = Both(2, 0)
    for _ in range(SLOTS + 3):
        both.call()
    assert both.law.called == SLOTS
    for seq in range(SLOTS, 0, -1):
        both.running.remove(seq)
        assert lib.wc_law_finish(both.law, seq, 5)
        both.tally.finish(seq, (5, fingerprint(seq)))
        for voter in (1, 0):
            assert both.law.committed == 0
            both.hear(voter, Vote("g", voter, EPOCH, seq, 5, fingerprint(seq), 0))
    both.commit()
    assert both.law.committed == SLOTS
    assert not both.left


def test_what_is_closed_or_of_another_kind_is_not_judged() -> None:
    both = Both(1, 3)
    both.call()
    good = (EPOCH, 3, 4, 5, fingerprint(4))
    for bad in [(8, 3, 4, 5, 1004), (EPOCH, 4, 4, 5, 1004), (EPOCH, 3, 5, 5, 1005), (EPOCH, 3, 4, 5, 1)]:
        assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", bad))
    assert lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good))
    assert lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good)), "again changes nothing"
    assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", (EPOCH, 3, 4, 6, fingerprint(4)))), "it has voted"
    assert not lib.wc_law_commit(both.law), "not finished here"
    assert not lib.wc_law_finish(both.law, 4, 6), "another result"
    both.law.open = False
    assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good))
    assert not lib.wc_law_commit(both.law)
