"""What passes between a member and its shell: ops with their states, and the commands to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from wancoll.collective import Descriptor
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
        descriptor: what was called.
        fingerprint: of the descriptor.
        front: offset of the caller's bytes in the arena.
        back: offset of the result in the arena.
        posted_at: seconds on the shell's clock.
    """

    seq: int
    client_id: int
    descriptor: Descriptor
    fingerprint: int
    front: int
    back: int
    posted_at: float
    state: OpState = OpState.waiting
    attempts: int = 0
    engine_id: int = 0  # of the current attempt
    live: set[int] = field(default_factory=set)  # attempts whose memory the engine may still touch
    finished: bool = False  # the current attempt came to its end in the engine
    digest: int = 0
    bytes_sent: int = 0
    outcome: m.Result | m.Failure | None = None


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
    """Bring the links to this epoch: drop those to former members, dial what is missing, then say links_ready."""

    epoch: m.Epoch
    rank: int


@dataclass(frozen=True, slots=True)
class StartOp:
    """Hand the op to the engine under op.engine_id."""

    op: Op


@dataclass(frozen=True, slots=True)
class CancelOp:
    """Take an attempt out of the engine; answered by op_cancelled."""

    engine_id: int


@dataclass(frozen=True, slots=True)
class Over:
    """The member has left the group; no command follows but those that end its ops."""


Command = ToMaster | ToClient | EnterEpoch | StartOp | CancelOp | Over


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
