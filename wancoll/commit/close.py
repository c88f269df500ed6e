"""What has happened in an epoch that ends, by what its members report (R7, C3). Pure.

A loss, a restart of the master and a takeover close an epoch alike.

Whoever has committed an operation knew that everyone had finished it, with the same result. So it is among what all who
are left have, and what all of them have may have been committed: it is. That is so while nobody lies. One member's word
that an operation is committed decides nothing: where a report lacks the operation, or has another result, reports are
counted: column by column (wancoll/wire/islands.py), since only there results are to be equal. What is committed is so
in each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from wancoll.commit.tally import UPDATE, Result, Tally
from wancoll.errors import ProtocolError
from wancoll.wire.messages import EpochReport

_MOST_HAVE = "operation {} is committed, as most have it; this member has another result of it, or none"
_CLAIMS = "it says that operation {} is committed; most have another result of it, or none"
_COMMITTED = -1, -1  # it is committed there, longer ago than the member keeps results


class Word(NamedTuple):
    """What one member says.

    Args:
        committed: up to here all is committed there.
        has: results, also of what is committed.
        only_claimed: seqs of *has* that count only where somebody says that they are committed.
        column: the member's.
    """

    committed: int
    has: dict[int, Result]
    only_claimed: Collection[int] = ()
    column: int = 0

    def of(self, seq: int) -> Result | None:
        """What it says of an operation that somebody says is committed."""
        return self.has.get(seq) or (_COMMITTED if seq <= self.committed else None)


def word(report: EpochReport, column: int, *, restarted: bool = False) -> Word:
    """What a report says; after a restart an earlier master may have committed what it alone collects votes for."""
    has = {seq: (digest, fingerprint) for seq, digest, fingerprint in report.done}
    return Word(report.committed, has, () if restarted else frozenset(report.collected), column)


def check(report: EpochReport) -> None:
    """Refuse a report that contradicts itself.

    Raises:
        ProtocolError: it has an operation twice, or an update_membership with a result.
    """
    seqs = [seq for seq, _, _ in report.done]
    if len(set(seqs)) < len(seqs):
        raise ProtocolError("reports impossible operations", got=f"up to {max(seqs)}, of them some twice")
    for seq, *result in report.done:
        if result[1] == UPDATE[1] and (*result,) != UPDATE:
            raise ProtocolError("stands at an update_membership with a result", got=f"operation {seq}")


class EpochOutcome(NamedTuple):
    """What has happened.

    Args:
        sure: up to here all is committed, and somebody said so.
        upto: up to here all is committed; nothing above has happened, but for *tied*.
        results: of what is committed, as in EpochReport.done, and of which column; update_memberships have none.
        out: of those who go on, who has to be evicted first, by mid, and why: the rest is not decided.
        tied: of these seqs, where they are not void, nobody can say whether they have happened.
    """

    sure: int
    upto: int
    results: list[tuple[int, int, int, int]]
    out: dict[int, str] = {}
    tied: range = range(0)


def close_epoch(
    words: dict[int, Word], stay: Collection[int], base: int, ends: Callable[[int], bool], voids: Collection[int]
) -> EpochOutcome:
    """What has happened above *base*.

    Args:
        words: of all who have reported, by mid, at least one; also of those who are lost.
        stay: those of them who go on.
        base: up to here all is committed.
        ends: says of a seq which nobody says is committed that it has not happened, whoever has finished it.
        voids: seqs that nobody can finish.
    """
    tally, said = _tally({mid: words[mid] for mid in stay}, base, voids), _Said(words)
    sure, upto, results, seq = base, base, list[tuple[int, int, int, int]](), base
    for point in said.points(base, voids):  # all from seq + 1 to point are alike
        if point not in voids:
            won, wrong, tied = said.count(point)
            while wrong:
                if out := {mid: why for mid, why in wrong.items() if mid in stay}:
                    return EpochOutcome(sure, upto, results, out)
                said.remove(wrong)  # they are lost, and count no more
                if not said.words:
                    return EpochOutcome(sure, upto, results)
                won, wrong, tied = said.count(point)
            if point > said.top:  # only those that were wrong said that it is committed
                won = None
            if tied:
                return EpochOutcome(sure, upto, results, tied=range(seq + 1, said.top + 1))
            if won is None:  # nobody who is right says that it is committed
                won = tally.agreed(point)
                if won is None or ends(point):
                    return EpochOutcome(sure, upto, results)
            else:
                sure = point
            upto = point
            results += _told(point, won)
        seq = point
    tally.advance(seq)
    for point in range(seq + 1, tally.prefix(ends) + 1):
        if (won := tally.agreed(point)) is not None:  # else it is void
            upto = point
            results += _told(point, won)
    return EpochOutcome(sure, upto, results)


def _told(seq: int, won: dict[int, Result]) -> list[tuple[int, int, int, int]]:
    return [(seq, *result, column) for column, result in won.items() if result not in (_COMMITTED, UPDATE)]


def _tally(words: dict[int, Word], base: int, voids: Collection[int]) -> Tally:
    """What members that go on have finished, as votes; of those of a column that say the same one votes for all."""
    voters = {(id(each.has), id(each.only_claimed), each.column): mid for mid, each in words.items()}.values()
    most, columns = max((len(words[mid].has) for mid in voters), default=0), {mid: words[mid].column for mid in voters}
    tally = Tally(voters, base, voids, most, columns)
    for mid in voters:
        only_claimed = words[mid].only_claimed
        for seq, result in words[mid].has.items():
            if seq not in only_claimed:
                tally.vote(mid, seq, result)
    return tally


class _Said:
    """What members say, to be counted seq by seq: a seq costs as much as the members that name it.

    Args:
        words: by mid.

    Attributes:
        words: of those that were not removed.
    """

    def __init__(self, words: dict[int, Word]) -> None:
        self.words = dict(words)
        of: dict[int, dict[int, Word]] = {}
        for mid, each in words.items():
            of.setdefault(each.column, {})[mid] = each
        self._columns = {column: _Column(of[column]) for column in sorted(of)}

    @property
    def top(self) -> int:
        """The newest seq that somebody says is committed."""
        return max((column.upto[-1] for column in self._columns.values()), default=0)

    def points(self, base: int, voids: Collection[int]) -> list[int]:
        """Seqs from *base* to the top of which words differ from those about the next one.

        A huge number costs no time.
        """
        columns, top = self._columns.values(), self.top
        marks = set(voids).union(*(column.named for column in columns))
        ends = marks.union((seq - 1 for seq in marks), *(column.upto for column in columns))
        return sorted(seq for seq in ends if base < seq <= max(base, top))

    def remove(self, mids: Collection[int]) -> None:
        """These members count no more."""
        for mid in mids:
            column = self.words.pop(mid).column
            self._columns[column].remove(mid)
            if not self._columns[column].words:
                del self._columns[column]

    def count(self, seq: int) -> tuple[dict[int, Result] | None, dict[int, str], bool]:
        """With which result, by column, *seq* is committed, who is wrong about it, and whether it is a tie."""
        if seq > self.top:
            return None, {}, False
        found = {column: one.count(seq) for column, one in self._columns.items()}
        won = {column: result for column, (result, _, _) in found.items() if result is not None}
        if len(won) == len(found):
            return won, {mid: why for _, those, _ in found.values() for mid, why in those.items()}, False
        lacking = any(result is None and not tied for result, _, tied in found.values())  # most of a column deny it
        wrong = {mid: why for result, those, _ in found.values() if result is None for mid, why in those.items()}
        if lacking and len(found) > 1:
            claim = [mid for mid, each in self.words.items() if seq <= each.committed]
            wrong |= dict.fromkeys(claim, _CLAIMS.format(seq))
        return None, wrong, not lacking


class _Column:
    """What the members of one column say."""

    def __init__(self, words: dict[int, Word]) -> None:
        self.words = words
        # By seq: how many name this result, and say with it whether it is committed.
        self.named: dict[int, dict[tuple[Result, bool], int]] = {}
        self.upto = sorted(each.committed for each in words.values())
        alike = {(each.committed, id(each.has)): each for each in words.values()}
        counts = Counter((each.committed, id(each.has)) for each in words.values())  # a thousand may say the same
        for same, each in alike.items():
            for seq, result in each.has.items():
                named = self.named.setdefault(seq, {})
                named[result, seq <= each.committed] = named.get((result, seq <= each.committed), 0) + counts[same]

    def remove(self, mid: int) -> None:
        each = self.words.pop(mid)
        self.upto.remove(each.committed)
        for seq, result in each.has.items():
            self.named[seq][result, seq <= each.committed] -= 1

    def count(self, seq: int) -> tuple[Result | None, dict[int, str], bool]:
        """The same of this column, where somebody, perhaps of another one, says that *seq* is committed."""
        bear, claims, named = dict[Result, int](), set[Result](), 0
        for (result, claimed), count in self.named.get(seq, {}).items():
            bear[result] = bear.get(result, 0) + count
            if claimed and count:
                claims.add(result)
                named += count
        # Those that say that it is committed, and have forgotten with which result.
        for_any = len(self.upto) - bisect_left(self.upto, seq) - named
        if not claims and not for_any:  # those of other columns say so
            claims.update(result for result, count in bear.items() if count)
        tied, against = False, set[Result]()
        for claim in sorted(claims, key=lambda one: (-bear[one], one)) or [_COMMITTED]:
            votes = bear.get(claim, 0) + for_any
            if votes == len(self.words):
                return claim, {}, False
            if 2 * votes > len(self.words):
                wrong = [mid for mid, each in self.words.items() if each.of(seq) not in (claim, _COMMITTED)]
                return claim, dict.fromkeys(wrong, _MOST_HAVE.format(seq)), False
            if 2 * votes == len(self.words):
                tied = True
            else:
                against.add(claim)
        wrong = [mid for mid, each in self.words.items() if seq <= each.committed and each.of(seq) in against]
        return None, dict.fromkeys(wrong, _CLAIMS.format(seq)), tied
