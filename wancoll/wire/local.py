"""What a client and its daemon say to each other over the unix socket."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.fields import U64, Count, Message, Name, Rank, World


class Attach(Message, frozen=True):
    """First message of a client. Empty *member*: the daemon makes a name."""

    protocol: int
    group: Name
    member: Annotated[str, Meta(max_length=128)]
    start_world: World
    min_world: World
    pid: Count


class Post(Message, frozen=True):
    """One call. *front* and *back* are byte offsets into the arena; enums and counts as in wancoll.collective.

    root, counts and peer are by the ranks of *epoch*, the one that the client knew when it called. Blocks for or from
    other ranks lie in front in the order of that epoch's ranks; in back, in the order of the contributors.
    """

    id: U64  # counts the client's calls from 1
    kind: Annotated[int, Meta(ge=0, le=11)]
    dtype: Annotated[int, Meta(ge=0, le=8)]
    op: Annotated[int, Meta(ge=0, le=4)]
    count: Count
    front: Count
    back: Count
    epoch: U64
    codec: Annotated[int, Meta(ge=0, le=4)] = 0
    algorithm: Name = "auto"
    on_failure: Name = "retry"
    root: Rank = -1
    counts: Annotated[list[Count], Meta(max_length=1024)] = []
    stochastic: bool = False
    seed: U64 = 0
    peer: Rank = -1  # of send and recv
    tag: U64 = 0


class Detach(Message, frozen=True):
    """The client leaves; the connection closes after this."""


class Arm(Message, frozen=True):
    """Fault injection, only where the daemon or master was started with the same *token* in WANCOLL_FAILPOINTS.

    The first and only message of a connection. action: "kill" or "pause" (at failpoint *name*), "clear"; of a daemon
    also "cut" or "heal" (*name* is the other member's daemon).
    """

    token: Name
    name: Name
    action: Name


class LocalStatusRequest(Message, frozen=True):
    """May be the first message: ask the daemon about itself."""


FromClient = Attach | Post | Detach | Arm | LocalStatusRequest


class Attached(Message, frozen=True):
    """Answer to Attach; the arena's descriptor travels with it (SCM_RIGHTS)."""

    daemon: Name
    arena_bytes: Count


class EpochInfo(Message, frozen=True):
    """The member's place, sent whenever it changes; the first one ends connect()."""

    epoch: int
    rank: int
    member: str
    members: list[str]


class Result(Message, frozen=True):
    """Op *id* is committed."""

    id: int
    seq: int
    epoch: int
    contributors: list[str]
    digest: int
    attempts: int
    algorithm: str
    bytes_sent: int
    seconds: float
    bytes_saved: int
    codec_error: float


class Failure(Message, frozen=True):
    """Op *id* failed (0: the connection as a whole). *error* is a class name of wancoll.errors."""

    id: int
    error: str
    what: str
    who: str
    expected: str
    got: str
    hint: str
    calls: dict[str, str]


class Slow(Message, frozen=True):
    """Op *id* has not ended for a while; *text* says what it, or one before it, waits for."""

    id: int
    text: str


class Ok(Message, frozen=True):
    """Answer to Arm. A master that refuses says Bye."""


class LocalStatus(Message, frozen=True):
    """Answer to LocalStatusRequest: *text* is a JSON object."""

    text: str


FromDaemon = Attached | EpochInfo | Result | Failure | Slow | Ok | LocalStatus
