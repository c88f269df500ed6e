"""What passes between a member and its shell: ops with their states, and the commands to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from wancoll.collective import Descriptor, DType, Kind
from wancoll.peer.core.calls import Call, Meaning
from wancoll.schedule.steps import Action, Buffer, Direction, Place, Schedule, Step
from wancoll.wire import messages as m


class OpState(Enum):
    """See the table in operations.py."""

    waiting = auto()
    running = auto()
    done = auto()
    given_up = auto()
    ended = auto()


@dataclass(slots=True)
class Op:
    """One operation of this member.

    Args:
        seq: its number in program order.
        client_id: the client's own number for it.
        call: what was called.
        front: offset of the caller's bytes in the arena.
        back: offset of the result in the arena.
        posted_at: seconds on the shell's clock.
    """

    seq: int
    client_id: int
    call: Call
    front: int
    back: int
    posted_at: float
    state: OpState = OpState.waiting
    attempts: int = 0
    engine_id: int = 0  # of the current attempt
    live: set[int] = field(default_factory=set)  # attempts whose memory the engine may still touch
    finished: bool = False  # the current attempt came to its end in the engine
    meaning: Meaning | None = None  # of the call, in the current attempt's epoch
    digest: int = 0
    bytes_sent: int = 0
    bytes_saved: int = 0
    codec_error: float = 0.0
    outcome: m.Result | m.Failure | None = None

    @property
    def kind(self) -> Kind:
        """What was called."""
        return self.call.posted.kind

    def uses(self, other: int) -> bool:
        """Whether the current attempt may have bytes on the way to or from member *other*."""
        under_way = self.state in (OpState.running, OpState.done)
        return under_way and self.meaning is not None and other in self.meaning.needs


class ExchangeState(Enum):
    """See the table in p2p.py."""

    told = auto()
    matched = auto()
    running = auto()
    done = auto()
    ended = auto()


@dataclass(slots=True, eq=False)
class Exchange:
    """One send or recv of this member.

    Args:
        number: counts this member's sends and recvs from 1.
        post: the client's call.
        other: mid of the other member.
        other_name: its name.
        posted_at: seconds on the shell's clock.
    """

    number: int
    post: m.Post
    other: int
    other_name: str
    posted_at: float
    state: ExchangeState = ExchangeState.told
    order: int = 0  # given by the master, anew in each epoch
    attempts: int = 0
    engine_id: int = 0  # of the current attempt
    live: set[int] = field(default_factory=set)  # attempts whose memory the engine may still touch
    finished: bool = False  # the current attempt came to its end in the engine
    digest: int = 0
    bytes_sent: int = 0
    outcome: m.Result | m.Failure | None = None

    @property
    def sends(self) -> bool:
        """Whether this is the sender's half."""
        return self.post.kind == Kind.send

    @property
    def nbytes(self) -> int:
        """Size of what is sent."""
        return self.post.count * DType(self.post.dtype).itemsize

    @property
    def fingerprint(self) -> int:
        """Of what both halves agree on."""
        return Descriptor(Kind.send, DType(self.post.dtype), count=self.post.count).fingerprint()

    @property
    def schedule(self) -> Schedule:
        """One step; the other member is rank 0."""
        if self.sends:
            step = Step(Direction.send, Action.copy, 0, self.nbytes, 0, left=Place(Buffer.front, 0))
        else:
            step = Step(Direction.recv, Action.copy, 0, self.nbytes, 0, to=Place(Buffer.back, 0), result=True)
        return Schedule((step,))

    def __str__(self) -> str:
        side = "dest" if self.sends else "source"
        what = f"{self.post.count} x {DType(self.post.dtype).name}"
        return f"{Kind(self.post.kind).name}({what}, {side}={self.other_name}, tag={self.post.tag})"


@dataclass(frozen=True, slots=True)
class ToMaster:
    """Send to the master."""

    message: m.FromPeer


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send to the client."""

    message: m.FromDaemon


@dataclass(frozen=True, slots=True)
class EnterEpoch:
    """Bring the links to this epoch: drop those to former members, dial those to *neighbours*, then say links_ready.

    Those to *spares* are kept up, too, but nothing waits for them.
    """

    epoch: m.Epoch
    neighbours: frozenset[int]  # mids
    spares: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NeedLinks:
    """See that the links to these members (mids) come up in this epoch, too, then say links_ready.

    With *p2p* those for sends and recvs are meant, and p2p_links is what to say then.
    """

    mids: frozenset[int]
    p2p: bool = False


@dataclass(frozen=True, slots=True)
class StartOp:
    """Hand the op to the engine under op.engine_id."""

    op: Op
    meaning: Meaning


@dataclass(frozen=True, slots=True)
class StartExchange:
    """Hand the send or recv to the engine under op.engine_id."""

    op: Exchange


@dataclass(frozen=True, slots=True)
class CancelOp:
    """Take an attempt out of the engine; answered by op_cancelled."""

    engine_id: int


@dataclass(frozen=True, slots=True)
class Over:
    """The member has left the group; no command follows but those that end its ops."""


Command = ToMaster | ToClient | EnterEpoch | NeedLinks | StartOp | StartExchange | CancelOp | Over


def failure(
    client_id: int,
    error: str,
    what: str,
    *,
    who: str = "",
    expected: str = "",
    got: str = "",
    hint: str = "",
    calls: dict[str, str] | None = None,
) -> m.Failure:
    """A Failure message; *error* is a class name of wancoll.errors."""
    return m.Failure(client_id, error, what, who, expected, got, hint, calls or {})
