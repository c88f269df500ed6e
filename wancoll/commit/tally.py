"""The tally of one epoch: up to where all voters have finished every operation with equal results. Pure.

A vote says that its sender has finished an operation, with which result; it counts for its sender alone. An operation
is committed when every voter of the epoch has voted for it, all votes are equal, and everything below it is committed
or void. Members that collect votes keep a tally each, and vote in it themselves; a master that collects keeps one for
all. What somebody *claims*, "all is committed up to N", is no vote: it passes on the word of the master for the
operations that only the master collects, and says whom to ask.

Where islands have several shards it still takes the votes of all. Results are compared within a column
(wancoll/wire/islands.py), and kinds of calls between columns.

    an operation is   from                                         until
    open              the first vote for it                        all have voted, equally, and all below is settled
    divergent         two votes of a column differ, or two kinds   never: the epoch ends
    collected         collect(): the master counts the votes       the master commits it, or a claim passes that on
    committed         prefix() came to it, and advance()           forgotten

    the tally is      from          until
    open              the epoch     freeze(): from then on nothing is counted or believed, for ever
    frozen            freeze()      the next epoch, which has a tally of its own

Memory: at most *window* open votes of each voter; a vote beyond is nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wancoll.collective import Descriptor, Kind, same_kind
from wancoll.errors import ProtocolError

Result = tuple[int, int]  # digest, fingerprint
UPDATE: Result = 0, Descriptor(Kind.update_membership).fingerprint()  # the vote for it: that its sender stands there


@dataclass(slots=True)
class Count:
    """The votes for one operation.

    Args:
        since: when the first came; seconds on its tally's clock.
    """

    since: float
    first: dict[int, Result] = field(default_factory=dict)  # by column: the result of its first vote
    votes: dict[int, Result] = field(default_factory=dict)  # by voter
    divergent: bool = False

    @property
    def update(self) -> bool:
        """Whether it is an update_membership."""
        return UPDATE in self.first.values()


class Tally:
    """Counts the votes of one epoch.

    Args:
        voters: mids of all members of the epoch.
        base: up to here all is committed.
        voids: seqs that are void in this epoch.
        window: open votes that one voter can have.
        columns: by voter, where islands have several shards.
    """

    def __init__(
        self,
        voters: Collection[int],
        base: int,
        voids: Collection[int],
        window: int,
        columns: Mapping[int, int] | None = None,
    ) -> None:
        self.voters, self.columns = frozenset(voters), columns or {}
        self.committed = base
        self.voids = frozenset(voids)
        self.frozen = False
        self.open: dict[int, Count] = {}  # by seq, above committed
        self.claims = dict.fromkeys(self.voters, base)  # up to here all is committed, each voter says
        self._votes_of = dict.fromkeys(self.voters, 0)  # open ones, by voter
        self._collected: set[int] = set()
        self._window = window

    @property
    def claimed(self) -> int:
        """The most that a voter says is committed."""
        return max(self.claims.values(), default=self.committed)

    @property
    def divergent(self) -> list[int]:
        """Seqs for which votes differ."""
        return sorted(seq for seq, count in self.open.items() if count.divergent)

    def is_full(self, voter: int) -> bool:
        """Whether *voter* has as many open votes as anybody can have."""
        return self._votes_of[voter] >= self._window

    def vote(self, voter: int, seq: int, result: Result, now: float = 0.0) -> bool:
        """Count that *voter* has finished *seq* with *result*; False: it has voted for it before, and that stands.

        Raises:
            ProtocolError: it has more open votes than it can have; nothing has changed.
        """
        count = self.open.get(seq)
        if self.frozen or seq <= self.committed or (count is not None and voter in count.votes):
            return False
        if self._votes_of[voter] >= self._window:
            raise ProtocolError(
                "says that it has finished what it cannot have", who=f"member {voter}",
                expected=f"at most {self._window} operations above {self.committed}", got=f"operation {seq}",
            )  # fmt: skip
        alike = self.alike(voter, seq, result[1])
        if count is None:
            count = self.open[seq] = Count(now)
        if count.first.setdefault(self.columns.get(voter, 0), result) != result or not alike:
            count.divergent = True
        count.votes[voter] = result
        self._votes_of[voter] += 1
        return True

    def alike(self, voter: int, seq: int, fingerprint: int) -> bool:
        """Whether a call of *voter* fits what others have voted for: the same in its column, of one kind elsewhere."""
        first, column = self.open[seq].first if seq in self.open else {}, self.columns.get(voter, 0)
        if column in first:
            return first[column][1] == fingerprint
        return all(same_kind(called, fingerprint) for _, called in first.values())

    def claim(self, voter: int, upto: int) -> None:
        """*voter* says that all is committed up to there."""
        if not self.frozen and upto > self.claims[voter]:
            self.claims[voter] = upto

    def collect(self, seq: int) -> None:
        """The master counts the votes for *seq*: here a claim passes on its word."""
        self._collected.add(seq)

    def prefix(self, ends: Callable[[int], bool] | None = None) -> int:
        """Up to where all is committed.

        Args:
            ends: says of a seq whose votes are complete that it is not committed yet.
        """
        upto = seq = self.committed
        while not self.frozen:
            seq += 1
            if seq in self.voids:
                continue
            if self.agreed(seq) is None and not (seq in self._collected and seq <= self.claimed):
                break
            if ends is not None and ends(seq):
                break
            upto = seq
        return upto

    def agreed(self, seq: int) -> dict[int, Result] | None:
        """The results, by column, for which all voters have voted; None: not all have, or votes differ."""
        count = self.open.get(seq)
        if count is None or count.divergent or len(count.votes) < len(self.voters):
            return None
        return count.first

    def complete(self, seq: int) -> bool:
        """Whether all voters have voted for *seq*, equally or not."""
        count = self.open.get(seq)
        return count is not None and len(count.votes) == len(self.voters)

    def advance(self, upto: int) -> None:
        """All is committed up to there."""
        if upto <= self.committed:
            return
        self.committed = upto
        for seq in [seq for seq in self.open if seq <= upto]:
            for voter in self.open.pop(seq).votes:
                self._votes_of[voter] -= 1
        if self._collected:
            self._collected = {seq for seq in self._collected if seq > upto}

    def freeze(self) -> None:
        """From now on nothing is counted, for ever (C2)."""
        self.frozen = True
