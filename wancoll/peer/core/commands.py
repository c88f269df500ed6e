"""What a member tells its shell to do, and the shell carries out in order and without waiting. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from wancoll.peer.core.op import Op
from wancoll.wire import messages as m


class ToMaster(Struct, frozen=True):
    """Send to the master."""

    message: m.FromPeer


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send to the client; *of*: the op whose outcome it is."""

    message: m.FromDaemon
    of: Op | None = field(default=None, compare=False)


class EnterEpoch(Struct, frozen=True):
    """Bring the links to this epoch: drop those to former members, dial those to *neighbours*, then say links_ready.

    Those to *spares* are kept up, too, but nothing waits for them.
    """

    epoch: m.Epoch
    neighbours: frozenset[int]  # mids
    spares: frozenset[int] = frozenset()
    round: int = 0  # of the epoch


class BeginRound(Struct, frozen=True):
    """What the epoch's frames of collectives have carried until now counts no more: bring the links to this round."""

    number: int


class NeedLinks(Struct, frozen=True):
    """See that the links to these members (mids) come up in this epoch, too, then say links_ready.

    With *p2p* those for sends and recvs are meant, and p2p_links is what to say then.
    """

    mids: frozenset[int]
    p2p: bool = False


class LetGo(Struct, frozen=True):
    """Nothing waits any more for the link for sends and recvs to member *mid*."""

    mid: int


class Redial(Struct, frozen=True):
    """Make the links to *others* (mids; empty: all) anew that are up for longer than *older* seconds.

    *sends*: only those for sends and recvs, or (False) only those for collectives; None: both.
    """

    others: tuple[int, ...]
    older: float
    reason: str
    sends: bool | None = None


class SendNote(Struct, frozen=True):
    """Send the note to these members (mids), perhaps *again*; dropped where the link to one is not up."""

    mids: tuple[int, ...]
    note: bytes
    again: bool = False


class StartOp(Struct, frozen=True):
    """Hand the op to the engine under op.engine_id, as op.meaning says; answered by op_finished or op_cancelled.

    If it has op.hearers the engine may say op.note to them, with the digest, the moment it has finished: op_finished
    tells whether it has.

    *beside*: it is finished here, and runs for others' sake: its result goes to memory of its own (op.beside).
    """

    op: Op
    beside: bool = False


class HandOver(Struct, frozen=True):
    """The late client has called what its daemon took part in: copy the result from op.memory to the client's back."""

    op: Op


class CancelOp(Struct, frozen=True):
    """Take an attempt out of the engine; answered by op_cancelled."""

    engine_id: int


class Over(Struct, frozen=True):
    """The member has left the group; no command follows but those that end its ops."""


ToLinks = EnterEpoch | BeginRound | NeedLinks | LetGo | Redial | SendNote
Command = ToMaster | ToClient | ToLinks | StartOp | HandOver | CancelOp | Over
