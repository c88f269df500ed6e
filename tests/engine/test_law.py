"""The engine's law of commit (native/engine/calls/law.c) says yes only where the tally in Python does.

Both are told one history of a member: calls that begin, results that are finished in any order, votes of the others as
they come, right and wrong. What the engine does not judge it leaves to the daemon, with all that follows from that
member, as it does with notes.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from wancoll.commit.own_tally import OwnTally
from wancoll.errors import ProtocolError
from wancoll.native import ffi, lib
from wancoll.wire.messages import Vote

EPOCH = 7
SLOTS = lib.WC_CALLS
FINGERPRINT = 1000  # a client repeats its calls


class Both:
    """The engine's law and the tally, side by side, of a member with *others*."""

    def __init__(self, others: int, base: int) -> None:
        self.law: Any = ffi.new("wc_law *")
        lib.wc_law_open(self.law, EPOCH, others, base, ffi.new("uint64_t[]", [base] * others))
        self.tally = OwnTally(("g", others, EPOCH), frozenset(range(others)), base, (), 4 * SLOTS)
        self.running: list[int] = []
        self.left = set[int]()  # members whose notes the engine has left to the daemon
        self.divergent = False  # a result of this member's own is another than one that was heard

    def copy(self) -> Both:
        """Another one, in the same state."""
        other = Both(self.law.voters, 0)
        ffi.memmove(other.law, ffi.buffer(self.law)[:], ffi.sizeof("wc_law"))
        other.tally, other.running = deepcopy(self.tally), list(self.running)
        other.left, other.divergent = set(self.left), self.divergent
        return other

    def state(self) -> bytes:
        """What tells it from others."""
        tally = {seq: (count.votes, count.divergent) for seq, count in self.tally.open.items()}
        rest = repr((sorted(self.left), self.divergent, self.running, self.tally.committed, sorted(tally.items())))
        return bytes(ffi.buffer(self.law)) + rest.encode()

    def call(self) -> None:
        if not lib.wc_law_full(self.law):
            seq = self.law.called + 1
            assert lib.wc_law_start(self.law, FINGERPRINT) == seq
            self.running.append(seq)

    def finish(self, which: int, digest: int) -> None:
        if self.running:
            seq = self.running.pop(which % len(self.running))
            equal = bool(lib.wc_law_finish(self.law, seq, digest))
            self.tally.finish(seq, (digest, FINGERPRINT))
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
        assert not taken or self.left or self.divergent or vote.seq not in self.tally.divergent

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


WRONG = ["epoch", "committed", "seq", "digest", "fingerprint"]
ACTIONS = st.one_of(
    st.tuples(st.just("call")),
    st.tuples(st.just("finish"), st.integers(0, 3), st.sampled_from([5] * 6 + [6])),
    # Of whom, above what is committed here, and what is wrong with it; up to where it says that all is committed.
    st.tuples(
        st.just("hear"), st.integers(0, 3), st.integers(0, 3), st.sampled_from([""] * 15 + WRONG), st.integers(1, 3)
    ),
)


@settings(max_examples=500)
@given(others=st.integers(1, 3), base=st.integers(0, 200), actions=st.lists(ACTIONS, min_size=8, max_size=40))
def test_a_yes_of_the_engine_is_a_yes_of_the_tally(others: int, base: int, actions: list[tuple[Any, ...]]) -> None:
    both = Both(others, base)
    for action in actions:
        match action:
            case ("call",):
                both.call()
            case ("finish", which, digest):
                both.finish(which, digest)
            case ("hear", voter, above, wrong, claimed):
                seq = min(both.law.committed + above, both.law.called)
                vote = Vote("g", voter % others, EPOCH, seq, 5, FINGERPRINT, max(0, both.law.finished + 1 - claimed))
                differs = {"epoch": 8, "committed": both.law.finished + 1, "seq": both.law.called + 1, "digest": 6}
                if wrong:
                    vote = replace(vote, **{wrong: differs.get(wrong, 1)})
                both.hear(voter % others, vote)
        both.commit()


@pytest.mark.parametrize(("others", "seqs"), [(1, (1, 2)), (2, (1,)), (3, (1,))])
def test_no_short_history_has_a_yes_too_many(others: int, seqs: tuple[int, ...]) -> None:
    """All of them: each state that can be reached, with each thing that can come next."""
    digests = (5, 6)
    votes = [
        Vote("g", voter, EPOCH, seq, digest, FINGERPRINT, 0)
        for voter in range(others)
        for seq in seqs
        for digest in digests
    ]
    seen, waiting = set[bytes](), [Both(others, 0)]
    commits = 0
    while waiting:
        both = waiting.pop()
        nexts: list[tuple[Any, ...]] = [("call",)] if both.law.called < len(seqs) else []
        nexts += [("finish", which, digest) for which in range(len(both.running)) for digest in digests]
        nexts += [("hear", vote.mid, vote) for vote in votes if vote.seq <= both.law.called]
        for name, *arguments in nexts:
            after = both.copy()
            getattr(after, name)(*arguments)
            after.commit()
            state = after.state()
            if state not in seen:
                seen.add(state)
                waiting.append(after)
                commits += after.law.committed == len(seqs)
    assert len(seen) > 30
    assert commits > 1


def test_a_full_run_commits_in_order_whatever_order_votes_come_in() -> None:
    both = Both(2, 0)
    for _ in range(SLOTS + 3):
        both.call()
    assert both.law.called == SLOTS
    for seq in range(SLOTS, 0, -1):
        both.running.remove(seq)
        assert lib.wc_law_finish(both.law, seq, 5)
        both.tally.finish(seq, (5, FINGERPRINT))
        for voter in (1, 0):
            assert both.law.committed == 0
            both.hear(voter, Vote("g", voter, EPOCH, seq, 5, FINGERPRINT, 0))
    both.commit()
    assert both.law.committed == SLOTS
    assert not both.left
    assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", (EPOCH, 0, SLOTS + 1, 5, FINGERPRINT))), "not begun"


def test_what_is_closed_or_of_another_kind_is_not_judged() -> None:
    both = Both(1, 3)
    both.call()
    good = (EPOCH, 3, 4, 5, FINGERPRINT)
    for bad in [(8, 3, 4, 5, 1000), (EPOCH, 4, 4, 5, 1000), (EPOCH, 3, 5, 5, 1000), (EPOCH, 3, 4, 5, 1)]:
        assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", bad))
    assert lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good))
    assert lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good)), "again changes nothing"
    assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", (EPOCH, 3, 4, 6, FINGERPRINT))), "it has voted"
    assert not lib.wc_law_commit(both.law), "not finished here"
    assert not lib.wc_law_finish(both.law, 4, 6), "another result"
    both.law.open = False
    assert not lib.wc_law_hear(both.law, 0, ffi.new("wc_vote *", good))
    assert not lib.wc_law_commit(both.law)
