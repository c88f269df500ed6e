"""The tally that a member keeps of its epoch where members collect votes: it votes, and says votes again. Pure.

A member that has finished an operation which proves that everyone took part says so to all others: its vote. Votes are
counted in wancoll/commit/tally.py. Nobody commits on another member's word: "committed up to N" is a reason to ask for
votes, or to say one's own again. Other kinds are committed by the master; here they are only places that the word of
the master, or of a member that has heard it, passes. An update_membership is finished where its member says that it
goes on without a master.

A vote says up to where its sender has committed. Votes up to there the sender does not need again.

A member is at most `ops_in_flight` operations above what it has committed, and an operation is finished nowhere before
everyone has called it. So votes are for operations near what is committed here, whatever the master has heard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from wancoll.collective import same_kind
from wancoll.commit.tally import Result, Tally
from wancoll.errors import ProtocolError
from wancoll.wire.messages import Vote


class OwnTally(Tally):
    """What one member knows in one epoch of the operations that each member has finished.

    Args:
        head: group, mid of this member, number of the epoch.
        others: mids of the other members.
        base: up to here all is committed.
        voids: seqs that are void in this epoch.
        window: operations above the last commit that one member can have finished.
        columns: as in Tally.
    """

    def __init__(
        self, head: tuple[str, int, int], others: frozenset[int], base: int, voids: Collection[int], window: int,
        columns: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__((*others, head[1]), base, voids, window, columns)
        self.head, self.others = head, others
        self._last = base  # the highest seq that was finished here, or that the master was told of

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.head[2]

    @property
    def waits(self) -> bool:
        """Whether something was finished here of which the others have to hear."""
        return any(self.head[1] in count.votes for count in self.open.values())

    def finish(self, seq: int, result: Result) -> Vote:
        """*seq* is finished here; returns the vote that everyone is to hear."""
        assert not self.frozen, "a frozen member finishes nothing"
        self.vote(self.head[1], seq, result)
        self._last = max(self._last, seq)
        return Vote(*self.head, seq, *result, self.committed)

    def told_master(self, seq: int, *, relayed: bool = True) -> None:
        """The master has this member's vote for *seq*, and counts; *relayed*: a claim may pass on what it says."""
        self._last = max(self._last, seq)
        if relayed:
            self.collect(seq)

    def hear(self, sender: int, vote: Vote) -> None:
        """Another member of this epoch votes, or says up to where it has committed (seq 0).

        Raises:
            ProtocolError: more than it can know; nothing has changed.
        """
        if sender not in self.others:
            return
        if vote.committed > max(self._last, self.committed):  # nobody commits what this one has not finished (C3)
            raise ProtocolError(
                "says that it has committed what it cannot have", who=f"member {sender}",
                expected=f"up to {max(self._last, self.committed)}, which is finished here", got=str(vote.committed),
            )  # fmt: skip
        self.vote(sender, vote.seq, (vote.digest, vote.fingerprint))
        self.claim(sender, vote.committed)

    def votes(self) -> list[Vote]:
        """This member's open votes."""
        own = [(seq, count.votes.get(self.head[1])) for seq, count in sorted(self.open.items())]
        return [Vote(*self.head, seq, *result, self.committed) for seq, result in own if result is not None]

    def again(self, mid: int, kept: Iterable[tuple[int, int, int]]) -> list[Vote]:
        """All that member *mid* may lack; *kept*: seq, digest, fingerprint of what was committed here of late."""
        needs = self.claims[mid]
        below = [Vote(*self.head, *vote, self.committed) for vote in kept if vote[0] > needs]
        return [self.committed_so_far(), *below, *self.votes()]

    def committed_so_far(self) -> Vote:
        """What is committed here, and no more."""
        return Vote(*self.head, committed=self.committed)

    def differing(self, seq: int, own: Result) -> list[tuple[int, Result]]:
        """The members that have voted for *seq* with what does not go with this member's *own* result, and with what.

        In its column that is another result, elsewhere a call of another kind.
        """
        count, column = self.open.get(seq), self.columns.get(self.head[1], 0)
        if count is None or (self.head[1] in count.votes and not count.divergent):
            return []
        votes = [(mid, result, self.columns.get(mid, 0) == column) for mid, result in sorted(count.votes.items())]
        return [
            (mid, result)
            for mid, result, near in votes
            if (result != own if near else not same_kind(result[1], own[1]))
        ]

    def unheard(self, seq: int) -> frozenset[int]:
        """The members that have not said that *seq* is finished there."""
        if seq <= self.claimed:
            return frozenset()
        count = self.open.get(seq)
        return self.others.difference(count.votes if count is not None else ())
