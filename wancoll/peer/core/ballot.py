"""What one member knows in one epoch of who has finished what: it commits without asking the master. Pure.

A member that has finished an operation which proves that everyone took part says so to all others in a note: its vote.
It takes the operation for committed when it has an equal vote (digest and fingerprint) from each other member of the
epoch, heard from that member itself, and everything below is committed or void. Nobody commits on another member's
word: "committed up to N" is a reason to ask for votes, or to say one's own again. Other kinds are committed by the
master; here they are only places that the word of the master, or of a member that has heard it, passes. An
update_membership is finished where its member says that it goes on without a master.

    an operation is   from                                          until
    unknown           the epoch begins                              finished here, or a note about it came
    finished here     finish(): a note goes to everyone             all others' notes are equal, all below is settled
    passed            pass_by(): the master was told Done           the master commits it, or a note says that it has
    apart             two notes differ                              never: the epoch ends
    committed         reach() came to it                            forgotten; its member keeps the vote (Collectives)

    the ballot is     from          until
    open              the epoch     freeze(): from then on it finishes nothing and believes nothing, for ever
    frozen            freeze()      the next epoch, which has a ballot of its own

A note says up to where its sender has committed. Votes up to there the sender does not need again.

Memory: a member is at most `ops_in_flight` operations above what it has committed, and an operation is finished nowhere
before everyone has called it. So notes are of operations that are near what is committed here, whatever the master has
heard; more than *window* of one member are nonsense.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from wancoll.errors import ProtocolError
from wancoll.wire.note import Note

Result = tuple[int, int]  # digest, fingerprint


class Ballot:
    """What one member knows in one epoch of the operations that each member has finished.

    Args:
        epoch: its number.
        others: mids of the other members.
        base: up to here all is committed.
        voids: seqs that are void in this epoch.
        window: operations above the last commit that one member can have finished.
    """

    def __init__(self, epoch: int, others: frozenset[int], base: int, voids: Collection[int], window: int) -> None:
        self.epoch, self.others = epoch, others
        self.committed = base
        self.frozen = False
        self.voids = frozenset(voids)
        self._window = window
        self._claims = dict.fromkeys(others, base)  # up to here all is committed, each of them says
        self._last = base  # the highest seq that was finished here, or passed
        self._mine: dict[int, Result | None] = {}  # above committed; None: the master commits it
        self._theirs: dict[int, dict[int, Result]] = {mid: {} for mid in others}  # above committed
        self._apart: set[int] = set()  # seqs in which somebody's note differs from what was finished here

    @property
    def waits(self) -> bool:
        """Whether something was finished here of which the others have to hear."""
        return any(result is not None for result in self._mine.values())

    @property
    def claimed(self) -> int:
        """The most that another member says is committed."""
        return max(self._claims.values(), default=self.committed)

    @property
    def apart(self) -> list[int]:
        """Seqs in which somebody has another result."""
        return sorted(self._apart)

    def is_apart(self, seq: int) -> bool:
        """Whether somebody has another result of *seq*."""
        return seq in self._apart

    def finish(self, seq: int, digest: int, fingerprint: int) -> Note:
        """It is finished here; what to tell everyone."""
        assert not self.frozen, "a frozen member finishes nothing"
        mine = self._mine[seq] = digest, fingerprint
        self._last = max(self._last, seq)
        for theirs in self._theirs.values():
            if theirs.get(seq, mine) != mine:
                self._apart.add(seq)
        return Note(self.epoch, self.committed, seq, digest, fingerprint)

    def pass_by(self, seq: int, *, relayed: bool = True) -> None:
        """The master was told that it is done here, and commits it; *relayed*: who has heard that may pass it on."""
        self._last = max(self._last, seq)
        if relayed:
            self._mine[seq] = None

    def hear(self, sender: int, note: Note) -> None:
        """A member of this epoch says what it knows of it.

        Raises:
            ProtocolError: more than it can know; nothing has changed.
        """
        theirs = self._theirs.get(sender)
        if self.frozen or theirs is None:
            return
        if (
            note.committed > self._last and note.committed > self.committed
        ):  # nobody commits what this one has not finished (C3)
            raise ProtocolError(
                "says that it has committed what it cannot have", who=f"member {sender}",
                expected=f"up to {max(self._last, self.committed)}, which is finished here", got=str(note.committed),
            )  # fmt: skip
        if note.seq > self.committed and note.seq not in theirs:
            if len(theirs) >= self._window:
                raise ProtocolError(
                    "says that it has finished what it cannot have", who=f"member {sender}",
                    expected=f"at most {self._window} operations above {self.committed}", got=f"operation {note.seq}",
                )  # fmt: skip
            result = theirs[note.seq] = note.digest, note.fingerprint
            if (self._mine.get(note.seq) or result) != result:
                self._apart.add(note.seq)
        if note.committed > self._claims[sender]:
            self._claims[sender] = note.committed

    def reach(self) -> int:
        """Up to where all is committed, as far as is known here."""
        upto = seq = self.committed
        while not self.frozen:
            seq += 1
            if seq in self.voids:
                continue
            if seq not in self._mine or not self._is_settled(seq):
                break
            upto = seq
        return upto

    def advance(self, upto: int) -> None:
        """Up to here all is committed."""
        if upto <= self.committed:
            return
        self.committed = upto
        self._mine = {seq: result for seq, result in self._mine.items() if seq > upto}
        for theirs in self._theirs.values():
            for seq in [seq for seq in theirs if seq <= upto]:
                del theirs[seq]
        if self._apart:
            self._apart = {seq for seq in self._apart if seq > upto}

    def votes(self) -> list[Note]:
        """What is finished here and not committed."""
        return [Note(self.epoch, self.committed, seq, *result) for seq, result in self._mine.items() if result]

    def again(self, mid: int, kept: Iterable[tuple[int, int, int]]) -> list[Note]:
        """All that member *mid* may lack; *kept*: seq, digest, fingerprint of what was committed here of late."""
        needs = self._claims[mid]
        below = [Note(self.epoch, self.committed, *vote) for vote in kept if vote[0] > needs]
        return [self.committed_so_far(), *below, *self.votes()]

    def committed_so_far(self) -> Note:
        """What is committed here, and no more."""
        return Note(self.epoch, self.committed)

    def differing(self, seq: int) -> list[tuple[int, Result]]:
        """The members whose result of *seq* differs from this member's."""
        mine = self._mine.get(seq)
        return [(mid, told[seq]) for mid, told in self._theirs.items() if mine and told.get(seq, mine) != mine]

    def unheard(self, seq: int) -> frozenset[int]:
        """The members that have not said that *seq* is finished there."""
        lack = (mid for mid, told in self._theirs.items() if seq not in told)
        return frozenset(lack if seq > self.claimed else ())

    def freeze(self) -> None:
        """From now on nothing is finished here, for ever (C2)."""
        self.frozen = True

    def _is_settled(self, seq: int) -> bool:
        mine = self._mine[seq]
        if mine is None:
            return seq <= self.claimed
        for theirs in self._theirs.values():  # noqa: SIM110 - at each note, and a generator takes twice as long
            if theirs.get(seq) != mine:
                return False
        return True
