"""What one member knows in one epoch of who has finished what: it commits without asking the master. Pure.

A member that has finished an operation which proves that everyone took part says so to all others in a note. It takes
the operation for committed when it knows that every member of the epoch has finished it with the same digest and
fingerprint, and everything below is committed or void. Other kinds are committed by the master; here they are only
places that the word of the master, or of a member that has heard it, passes. An update_membership is finished where
its member says that it goes on without a master.

    an operation is   from                                          until
    unknown           the epoch begins                              finished here, or a note about it came
    finished here     finish(): a note goes to everyone             all others' notes are equal, all below is settled
    passed            pass_by(): the master was told Done           the master commits it, or a note says that it has
    apart             two notes differ                              never: the epoch ends
    committed         reach() came to it                            forgotten; whoever says committed >= it has it, too

    the ballot is     from          until
    open              the epoch     freeze(): from then on it finishes nothing and believes nothing, for ever
    frozen            freeze()      the next epoch, which has a ballot of its own

A note says up to where its sender has committed, and that is true for everyone. So what is committed here need not be
kept: a member whose link was lost is told that number again, and the notes above it.

Memory: a member is at most `ops_in_flight` operations above what it has committed, and an operation is finished nowhere
before everyone has called it. So notes are of operations that are near what is committed here, whatever the master has
heard; more than *window* of one member are nonsense.
"""

from __future__ import annotations

from collections.abc import Collection

from wancoll.errors import ProtocolError
from wancoll.wire.note import Note

Result = tuple[int, int]  # digest, fingerprint


class Ballot:
    """See the module.

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
        self._known = base  # up to here all is committed by somebody's word
        self._last = base  # the highest seq that was finished here, or passed
        self._mine: dict[int, Result | None] = {}  # above committed; None: the master commits it
        self._theirs: dict[int, dict[int, Result]] = {mid: {} for mid in others}  # above committed
        self._apart: set[int] = set()  # seqs in which somebody's note differs from what was finished here

    @property
    def waits(self) -> bool:
        """Whether something was finished here of which the others have to hear."""
        return any(result is not None for result in self._mine.values())

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

    def pass_by(self, seq: int) -> None:
        """The master was told that it is done here, and commits it."""
        self._mine[seq] = None
        self._last = max(self._last, seq)

    def hear(self, sender: int, note: Note) -> None:
        """A member of this epoch says what it knows.

        Raises:
            ProtocolError: more than it can know; nothing has changed.
        """
        theirs = self._theirs.get(sender)
        if self.frozen or theirs is None or note.epoch != self.epoch:
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
        if note.committed > self._known:
            self._known = note.committed

    def reach(self) -> int:
        """Up to where all is committed, as far as is known here."""
        upto = seq = self.committed
        while not self.frozen:
            seq += 1
            if seq in self.voids:
                continue
            if seq not in self._mine or not (seq <= self._known or self._is_equal(seq)):
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

    def again(self) -> list[Note]:
        """For a member that may have lost what was said: all that it may not know."""
        mine = [Note(self.epoch, self.committed, seq, *result) for seq, result in self._mine.items() if result]
        return [self.committed_so_far(), *mine]

    def committed_so_far(self) -> Note:
        """What is committed here, and no more."""
        return Note(self.epoch, self.committed)

    def differing(self, seq: int) -> list[tuple[int, Result]]:
        """Who has another result of *seq* than this member."""
        mine = self._mine.get(seq)
        return [(mid, told[seq]) for mid, told in self._theirs.items() if mine and told.get(seq, mine) != mine]

    def unheard(self, seq: int) -> frozenset[int]:
        """Who has not said that *seq* is finished there."""
        return frozenset(mid for mid, told in self._theirs.items() if seq > self._known and seq not in told)

    def freeze(self) -> None:
        """From now on nothing is finished here, for ever (C2)."""
        self.frozen = True

    def _is_equal(self, seq: int) -> bool:
        mine = self._mine[seq]
        if mine is None:
            return False
        for theirs in self._theirs.values():  # noqa: SIM110 - at each note, and a generator takes twice as long
            if theirs.get(seq) != mine:
                return False
        return True
