"""What has happened in an epoch, by what those who are left have finished (R7, C3). Pure.

Whoever has committed an operation knew that everyone had finished it. So it is among what all who are left have, and
what all of them have may have been committed: it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from wancoll.wire import messages as m

Result = tuple[int, int]  # digest, fingerprint
_STANDS = 0, 0  # at an update_membership, which has no result


class Word(NamedTuple):
    """What one member has: all up to *committed*, and above it what it is *done* with."""

    committed: int
    done: dict[int, Result]


def word(committed: int, *done: Iterable[tuple[int, int, int]], updates: Iterable[int] = ()) -> Word:
    """From a member's message; *updates*: those at which it stands, if they count."""
    found = {seq: (digest, fingerprint) for each in done for seq, digest, fingerprint in each}
    return Word(committed, found | dict.fromkeys(updates, _STANDS))


def reach(
    words: list[Word], base: int, ends: Callable[[int], bool], voids: dict[int, m.Void]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Up to where all have finished all, equally, and with which digests, as in Report.done.

    Args:
        words: of all who are left, at least one.
        base: up to here all is committed.
        ends: says of a seq that it has not happened, whoever has finished it.
        voids: seqs that nobody can finish.
    """
    found: list[tuple[int, int, int]] = []
    upto = seq = max(base, min(each.committed for each in words))
    while True:
        seq += 1
        if ends(seq):
            return upto, found
        if seq in voids:
            continue
        results = {each.done.get(seq) for each in words if each.committed < seq}
        if len(results) > 1 or None in results:
            return upto, found
        found += [(seq, *result) for result in results if result is not None and result != _STANDS]
        upto = seq
