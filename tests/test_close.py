"""The close of an epoch counts what members say seq by seq, and as one would who looks at each member anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from wancoll.commit.close import _COMMITTED, Word, _Said, close_epoch
from wancoll.commit.tally import Result


def some_words(chance: random.Random) -> dict[int, Word]:
    shared = {seq: (chance.randrange(2), 7) for seq in range(1, 8) if chance.random() < 0.8}
    words = {}
    for mid in range(chance.randint(1, 7)):
        own = {seq: (chance.randrange(3), 7) for seq in range(1, 8) if chance.random() < 0.6}
        words[mid] = Word(chance.choice([0, 0, 1, 2, 5, 7, 10**9]), chance.choice([shared, own]))
    return words


def counted(words: dict[int, Word], seq: int) -> tuple[Result | None, set[int], bool]:
    """With which result *seq* is committed, who is wrong, and whether it is a tie, member by member."""
    said = {mid: each.of(seq) for mid, each in words.items()}
    claimed = [one for mid, one in said.items() if seq <= words[mid].committed]
    bear = Counter(said.values())
    claims = sorted(
        {one for one in claimed if one is not None and one != _COMMITTED}, key=lambda one: (-bear[one], one)
    )
    votes = {one: bear[one] + bear[_COMMITTED] for one in claims}
    if not claims and bear[_COMMITTED]:
        claims, votes = [_COMMITTED], {_COMMITTED: bear[_COMMITTED]}
    for one in claims:
        if 2 * votes[one] > len(words):
            return one, {mid for mid, this in said.items() if this not in (one, _COMMITTED)}, False
    against = [one for one in claims if 2 * votes[one] < len(words)]
    wrong = {mid for mid, this in said.items() if this in against and seq <= words[mid].committed}
    return None, wrong, len(against) < len(claims)


@pytest.mark.parametrize("seed", range(50))
def test_counts_as_one_would_member_by_member(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(40):
        words = some_words(chance)
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
