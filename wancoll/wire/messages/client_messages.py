"""Messages between a client and its daemon, over the unix socket."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from wancoll.collective import Descriptor
from wancoll.wire.messages.fields import MOST, Bits, Calls, First, Message, Name, Number, Rank, Real, Seconds, World


class Attach(First, frozen=True):
    """First message of a client. Empty *member*: the daemon makes a name."""

    group: Name
    member: Annotated[str, Meta(max_length=128)]
    start_world: World
    min_world: World
    pid: Number
    call_timeout: Seconds = 0.0  # as in Join
    shards: World = 1  # as in Join
    launch: Annotated[str, Meta(max_length=128)] = ""  # as in Join


class Post(Message, frozen=True):
    """One call. *input_buffer* and *result_buffer* are byte offsets into the arena.

    The call's root and counts, and peer, are by the ranks of *epoch*, the one that the client knew when it called.
    Blocks for or from other ranks lie in the input in the order of that epoch's ranks; in the result, in the order of
    the contributors.

    *filled* is another offset, a multiple of 64 and apart from the input and the result: of a byte for each BLOCK of
    the input's elements, 0 until the block is there. -1: all of it is there. Who sets bytes rings the bell: writes to
    the eventfd of Attached.

    *ahead*: a recv that only a send which fits it shall meet; others pass it by (R16).

    *shown* is such an offset, too: of a 32-bit word for each BLOCK of the result's elements, which becomes the number
    of the attempt (Result.attempts) when the block is final in it. -1: nobody looks.

    *input_coded*, *result_coded*: that buffer holds the elements in the call's codec, in whole blocks. *result_kept*:
    the result's buffer is twice as long; its second half takes the sums that this member encodes (Result.kept).
    """

    id: Number  # counts the client's calls from 1
    call: Descriptor
    input_buffer: Number
    result_buffer: Number
    epoch: Number
    peer: Rank = -1  # of send and recv
    tag: Bits = 0
    filled: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    ahead: bool = False
    shown: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    input_coded: bool = False
    result_coded: bool = False
    result_kept: bool = False


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


class AskToLeave(First, frozen=True):
    """Leave in order, an operator says: member *name* of *group*; with group "" the daemon *name*, which stops then.

    From `wancoll leave` the first and only message of a connection, to a daemon's unix socket ("" names the daemon
    there) or to a master, which says it to the daemon. Who is asked leaves at its next update_membership, or after
    *within* seconds.
    """

    group: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=128)]
    within: Seconds
    reason: Annotated[str, Meta(max_length=500)]


class TraceRequest(Message, frozen=True):
    """May be the first message: trace for so many seconds, then tell in Traced what operations did."""

    seconds: Seconds


FromClient = Attach | Post | Detach | Arm | LocalStatusRequest | AskToLeave | TraceRequest


class Attached(Message, frozen=True):
    """Answer to Attach. Four descriptors come with it (SCM_RIGHTS).

    They are the arena; the bell (Post.filled); the call ring, and the socket over which its two ends wake each other
    (native/calls.h).
    """

    daemon: Name
    arena_bytes: Number


class EpochInfo(Message, frozen=True):
    """The member's place, sent whenever it changes, and why; the first one ends connect().

    Of the members before who are none now, *goodbyes* left in peace, and all others are lost.
    """

    epoch: int
    rank: int
    member: str
    members: list[str]
    reason: str = ""
    goodbyes: list[str] = []


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
    counted: bool = True  # false: the daemon took part with zeros (R20)
    asked_master: bool = True  # false: an update_membership that the members passed without one (C11)
    bytes_in_memory: int = 0  # of bytes_sent
    by_engine: bool = False  # see Receipt; such results come through the ring
    bytes_received: Number = 0
    kept: tuple[Number, Number] = (0, 0)  # see Post: elements of the tensor from and up to which its sums are there
    prepared: Number = 0  # in this epoch the same call may go through the ring, by this number; 0: it may not


class Failure(Message, frozen=True):
    """Op *id* failed (0: the connection as a whole). *error* and *cause* are class names of wancoll.errors.

    The *cause* of an OutcomeUnknown is the error that ended the membership, or the connection. With id 0: calls above
    *taken* never reached the member; all others were answered before, unless the daemon has a bug.
    """

    id: int
    error: str
    what: str
    who: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""
    calls: Calls = {}
    cause: str = ""
    taken: int = MOST


class Slow(Message, frozen=True):
    """Op *id* has not ended for a while; *text* says what it, or one before it, waits for."""

    id: int  # 0: no op, but the place in the group
    text: str


class Ok(Message, frozen=True):
    """Answer to Arm. A master that refuses says Bye."""


class LocalStatus(Message, frozen=True):
    """Answer to LocalStatusRequest: *text* is a JSON object."""

    text: str


class Clock(msgspec.Struct, frozen=True):
    """Seconds that the own clock of *master* (its identity, any text) is ahead of a machine's (since 1970).

    Known to within *uncertain*.
    """

    ahead: Real
    uncertain: Seconds
    master: Name


class Traced(Message, frozen=True):
    """Answer to TraceRequest, in pieces: *rows* is a JSON array of attempts; the *last* one says so.

    Times are seconds since 1970, by the clock of the daemon's machine; *clock* None: no master's is known to compare.
    """

    daemon: Name
    rows: str
    last: bool
    clock: Clock | None = None


FromDaemon = Attached | EpochInfo | Result | Failure | Slow | Ok | LocalStatus | Traced
