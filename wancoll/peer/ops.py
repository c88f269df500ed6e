"""What passes between a member and its shell: ops with their states, and the commands to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from wancoll.collective import Kind
from wancoll.peer.calls import Call, Meaning
from wancoll.wire import messages as m


class OpState(Enum):
    """See the table in member.py."""

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
    """Bring the links to this epoch: drop those to former members, dial those to *neighbours*, then say links_ready."""

    epoch: m.Epoch
    neighbours: frozenset[int]  # mids


@dataclass(frozen=True, slots=True)
class NeedLinks:
    """See that the links to these members (mids) come up in this epoch, too, then say links_ready."""

    mids: frozenset[int]


@dataclass(frozen=True, slots=True)
class StartOp:
    """Hand the op to the engine under op.engine_id."""

    op: Op
    meaning: Meaning


@dataclass(frozen=True, slots=True)
class CancelOp:
    """Take an attempt out of the engine; answered by op_cancelled."""

    engine_id: int


@dataclass(frozen=True, slots=True)
class Over:
    """The member has left the group; no command follows but those that end its ops."""


Command = ToMaster | ToClient | EnterEpoch | NeedLinks | StartOp | CancelOp | Over


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
