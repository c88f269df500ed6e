"""What has happened in an epoch that ends, by what its members report (R7, C3). Pure.

A loss, a restart of the master and a takeover close an epoch alike.

Whoever has committed an operation knew that everyone had finished it, with the same result. So it is among what all who
are left have, and what all of them have may have been committed: it is. That is so while nobody lies. One member's word
that an operation is committed decides nothing: where a report lacks the operation, or has another result, reports are
counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

from wancoll.commit.tally import UPDATE, Result, Tally
from wancoll.errors import ProtocolError
from wancoll.wire.messages import EpochReport

_COMMITTED = -1, -1  # it is committed there, longer ago than the member keeps results


class Word(NamedTuple):
    """What one member says.

    Args:
        committed: up to here all is committed there.
        has: results, also of what is committed.
        only_claimed: seqs of *has* that count only where somebody says that they are committed.
    """

    committed: int
    has: dict[int, Result]
    only_claimed: Collection[int] = ()

    def of(self, seq: int) -> Result | None:
        """What it says of an operation that somebody says is committed."""
        return self.has.get(seq) or (_COMMITTED if seq <= self.committed else None)


def word(report: EpochReport, *, restarted: bool = False) -> Word:
    """What a report says; after a restart an earlier master may have committed what it alone collects votes for."""
    has = {seq: (digest, fingerprint) for seq, digest, fingerprint in report.done}
    return Word(report.committed, has, () if restarted else frozenset(report.collected))


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
        results: of what is committed, as in EpochReport.done, but for update_memberships, which have none.
        out: of those who go on, who has to be evicted first, by mid, and why: the rest is not decided.
        tied: of these seqs, where they are not void, nobody can say whether they have happened.
    """

    sure: int
    upto: int
    results: list[tuple[int, int, int]]
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
    tally = _tally({mid: words[mid] for mid in stay}, base, voids)
    top = max([base, *(each.committed for each in words.values())])
    alike = _alike(words)
    sure, upto, results, seq = base, base, list[tuple[int, int, int]](), base
    for point in _points(words.values(), base, top, voids):  # all from seq + 1 to point are alike
        if point not in voids:
            while True:
                said = {each.of(point) for each in alike}
                won, wrong, tied = _count(words, point) if len(said) > 1 else (said.pop(), {}, False)
                if out := {mid: why for mid, why in wrong.items() if mid in stay}:
                    return EpochOutcome(sure, upto, results, out)
                if not wrong:
                    break
                # Those are lost, and count no more.
                words = {mid: each for mid, each in words.items() if mid not in wrong}
                if not words:
                    return EpochOutcome(sure, upto, results)
                alike = _alike(words)
                top = max(each.committed for each in alike)
            if point > top:  # only those that were wrong said that it is committed
                won = None
            if tied:
                return EpochOutcome(sure, upto, results, tied=range(seq + 1, top + 1))
            if won is None:  # nobody who is right says that it is committed
                won = tally.agreed(point)
                if won is None or ends(point):
                    return EpochOutcome(sure, upto, results)
            else:
                sure = point
            upto = point
            results += [(point, *won)] if won not in (_COMMITTED, UPDATE) else []
        seq = point
    tally.advance(seq)
    for point in range(seq + 1, tally.prefix(ends) + 1):
        if (won := tally.agreed(point)) is not None:  # else it is void
            upto = point
            results += [(point, *won)] if won != UPDATE else []
    return EpochOutcome(sure, upto, results)


def _tally(words: dict[int, Word], base: int, voids: Collection[int]) -> Tally:
    """What members that go on have finished, as votes; of those that say the same one votes for all."""
    voters = {(id(each.has), id(each.only_claimed)): mid for mid, each in words.items()}.values()
    tally = Tally(voters, base, voids, window=max((len(words[mid].has) for mid in voters), default=0))
    for mid in voters:
        only_claimed = words[mid].only_claimed
        for seq, result in words[mid].has.items():
            if seq not in only_claimed:
                tally.vote(mid, seq, result)
    return tally


def _alike(words: dict[int, Word]) -> Collection[Word]:
    """One of those that say the same: a thousand may."""
    return {(each.committed, id(each.has)): each for each in words.values()}.values()


def _points(words: Collection[Word], base: int, top: int, voids: Collection[int]) -> list[int]:
    """Seqs up to *top* of which words differ from those about the next one; a huge number costs no time."""
    marks = {seq for each in words for seq in each.has}.union(voids)
    return sorted(
        seq for seq in marks.union((seq - 1 for seq in marks), (each.committed for each in words)) if base < seq <= top
    )


def _count(words: dict[int, Word], seq: int) -> tuple[Result | None, dict[int, str], bool]:
    """With which result *seq*, which somebody says is committed, is so; who is wrong about it; whether it is a tie."""
    said = {mid: each.of(seq) for mid, each in words.items()}
    claims = {said[mid] for mid, each in words.items() if seq <= each.committed}
    bear = Counter(said.values())
    for_any = bear.pop(_COMMITTED, 0)  # they have forgotten with which result
    against, tied = set[Result | None](), False
    for claim in (claims - {_COMMITTED}) or claims:
        votes = 2 * (bear[claim] + for_any)
        if votes > len(words):
            why = f"operation {seq} is committed, as most have it; this member has another result of it, or none"
            return claim, {mid: why for mid, one in said.items() if one not in (claim, _COMMITTED)}, False
        tied = tied or votes == len(words)
        if votes < len(words):
            against.add(claim)
    why = f"it says that operation {seq} is committed; most have another result of it, or none"
    return None, {mid: why for mid, one in said.items() if one in against and seq <= words[mid].committed}, tied
