"""The close of an epoch counts what members say seq by seq, and as one would who looks at each member anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from wancoll.commit.close import _COMMITTED, Word, _Said, close_epoch
from wancoll.commit.tally import Result


def some_words(chance: random.Random, shards: int) -> dict[int, Word]:
    shared = {seq: (chance.randrange(2), 7) for seq in range(1, 8) if chance.random() < 0.8}
    words = {}
    for mid in range(chance.randint(shards, 7)):
        own = {seq: (chance.randrange(3), 7) for seq in range(1, 8) if chance.random() < 0.6}
        said = chance.choice([shared, own])
        words[mid] = Word(chance.choice([0, 0, 1, 2, 5, 7, 10**9]), said, (), mid % shards)
    return words


def counted(words: dict[int, Word], seq: int) -> tuple[dict[int, Result] | None, set[int], bool]:
    """With which result *seq* is committed, who is wrong, and whether it is a tie, member by member."""
    claim = {mid for mid, each in words.items() if seq <= each.committed}
    if not claim:
        return None, set(), False
    columns = {
        each.column: {mid: one for mid, one in words.items() if one.column == each.column} for each in words.values()
    }
    found = {column: counted_in(those, seq) for column, those in columns.items()}
    won = {column: one for column, (one, _, _) in found.items() if one is not None}
    if len(won) == len(columns):  # each has a majority for it
        return won, {mid for _, wrong, _ in found.values() for mid in wrong}, False
    if any(one is None and not tied for one, _, tied in found.values()):  # one has a majority against it
        wrong = {mid for one, wrong, _ in found.values() if one is None for mid in wrong}
        return None, claim if len(columns) > 1 else wrong, False
    return None, {mid for one, wrong, _ in found.values() if one is None for mid in wrong}, True


def counted_in(words: dict[int, Word], seq: int) -> tuple[Result | None, set[int], bool]:
    """The same within a column, where somebody, perhaps of another one, says that it is committed."""
    said = {mid: each.of(seq) for mid, each in words.items()}
    claimed = [one for mid, one in said.items() if seq <= words[mid].committed]
    bear = Counter(said.values())
    claims = sorted(
        {one for one in claimed if one is not None and one != _COMMITTED}, key=lambda one: (-bear[one], one)
    )
    if not claims and not bear[_COMMITTED]:
        claims = sorted({one for one in said.values() if one is not None}, key=lambda one: (-bear[one], one))
    votes = {one: bear[one] + bear[_COMMITTED] for one in claims}
    if not claims:
        claims, votes = [_COMMITTED], {_COMMITTED: bear[_COMMITTED]}
    for one in claims:
        if 2 * votes[one] > len(words):
            return one, {mid for mid, this in said.items() if this not in (one, _COMMITTED)}, False
    against = [one for one in claims if 2 * votes[one] < len(words)]
    wrong = {mid for mid, this in said.items() if this in against and seq <= words[mid].committed}
    return None, wrong, len(against) < len(claims)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_counts_as_one_would_member_by_member(seed: int, shards: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        words = some_words(chance, shards)
        said = _Said(words)
        while True:
            for seq in range(1, 9):
                won, wrong, tied = said.count(seq)
                assert (won, set(wrong), tied) == counted(words, seq)
            if len(words) == 1:
                break
            gone = chance.choice(list(words))
            words = {mid: each for mid, each in words.items() if mid != gone}
            said.remove([gone])


def islands(*said: tuple[int, int, int], committed: tuple[int, ...] = ()) -> dict[int, Word]:
    """Members of a column, with a digest of operation 1 (0: it lacks that), by mid; who says that it is committed."""
    return {
        mid: Word(int(mid in committed), {1: (digest, 7 + column)} if digest else {}, (), column)
        for mid, column, digest in said
    }


def test_an_operation_is_committed_in_all_columns_or_in_none() -> None:
    """With results of their own; nobody is asked what another column has."""
    whole = islands((1, 0, 5), (2, 1, 6), (3, 0, 5), (4, 1, 6))
    found = close_epoch(whole, whole, 0, lambda _: False, ())
    assert (found.upto, found.results) == (1, [(1, 5, 7, 0), (1, 6, 8, 1)])
    for lacking in (
        islands((1, 0, 5), (2, 1, 6), (3, 0, 5), (4, 1, 0)),
        islands((1, 0, 5), (2, 1, 6), (3, 0, 9), (4, 1, 6)),
    ):
        found = close_epoch(lacking, lacking, 0, lambda _: False, ())
        assert (found.upto, found.out, found.tied) == (0, {}, range(0))


def test_reports_are_counted_column_by_column() -> None:
    """Most of each column bear it: who denies it is out. Most of one deny it: who says so lies. As many: a tie."""
    three = (1, 0, 5), (2, 1, 6), (3, 0, 5), (4, 1, 6), (5, 0, 5)
    found = close_epoch(said := islands(*three, (6, 1, 0), committed=(1,)), said, 0, lambda _: False, ())
    assert (set(found.out), found.tied) == ({6}, range(0))
    found = close_epoch(
        said := islands(*three[:3], (4, 1, 0), (5, 0, 5), (6, 1, 0), committed=(1,)), said, 0, lambda _: False, ()
    )
    assert (set(found.out), found.tied) == ({1}, range(0))
    found = close_epoch(said := islands(*three[:3], (4, 1, 0), committed=(1,)), said, 0, lambda _: False, ())
    assert (found.out, found.tied) == ({}, range(1, 2))


def test_many_reports_of_what_nobody_else_has_cost_as_much_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty members say of many seqs, each of its own, that they have them: no member is looked at for each seq."""
    looks = 0

    def of(self: Word, seq: int) -> Result | None:
        nonlocal looks
        looks += 1
        return self.has.get(seq) or (_COMMITTED if seq <= self.committed else None)

    monkeypatch.setattr(Word, "of", of)
    words = {mid: Word(10**9, {31 * i + mid: (1, 7) for i in range(1, 200)}) for mid in range(30)}
    found = close_epoch(words, words, 0, lambda _: False, ())
    assert (found.upto, found.out, len(found.results)) == (10**9, {}, 30 * 199)
    assert looks == 0
