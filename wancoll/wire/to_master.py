"""What a peer says to the master."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.wire.epoch import Plan, Void
from wancoll.wire.fields import U64, Addresses, Count, Message, Name, Site, Text, World
from wancoll.wire.local import Arm
from wancoll.wire.status import StatusRequest


class Hello(Message, frozen=True):
    """First message on a control connection. incarnation is fresh at each daemon start."""

    protocol: int
    daemon: Name
    incarnation: U64
    addresses: Addresses  # where this daemon's lanes can be dialled
    lanes: Annotated[int, Meta(ge=1, le=256)]
    site: Site
    version: Name
    max_lanes: Annotated[int, Meta(ge=0, le=256)] = 0  # up to which the master may raise lanes; 0: not at all
    congestion_controls: Annotated[list[Name], Meta(max_length=64)] = []  # that its lanes may be told to use
    measures: bool = False  # whether it answers MeasureLink
    term: U64 = 0  # highest that this daemon has seen
    master: U64 = 0  # identity of the master that welcomed it last


class Join(Message, frozen=True):
    """A client of this daemon asks to become *member* of *group*."""

    group: Name
    member: Name
    start_world: World
    min_world: World
    was: U64 = 0  # the mid that an earlier master gave it; it has not entered an epoch


class Leave(Message, frozen=True):
    """The member leaves (its client detached or died)."""

    group: Name
    member: Name


class Heartbeat(Message, frozen=True):
    """I am alive; *number* counts up and comes back in the Pong."""

    number: U64
    # Of each member in an epoch: mid, epoch, and the highest seq that its client has called.
    called: Annotated[list[tuple[U64, U64, U64]], Meta(max_length=1024)] = []


class Done(Message, frozen=True):
    """Op *seq* is finished on this member, with this result; members may finish ops out of order."""

    group: Name
    mid: U64
    epoch: U64
    seq: U64
    digest: U64
    fingerprint: U64


class LinkDown(Message, frozen=True):
    """The link to member *other* broke ("lost") or could not be dialled within its deadline ("unreachable")."""

    group: Name
    mid: U64
    epoch: U64
    other: U64
    kind: Name
    reason: Text


class OpWait(Message, frozen=True):
    """An operation that has not ended at a member for longer than Limits.slow_after.

    stage: "links": it waits for links; "moving": the engine has it; "done": it is finished here; of a send or recv
    also "alone": the other half has not been called.
    """

    seq: U64  # 0: a send or recv
    what: Text
    nbytes: Count
    stage: Name
    age: float  # seconds since it was called
    still: float  # seconds since the last byte moved on a link that it needs
    other: U64 = 0  # mid, of a send or recv


class LinkWait(Message, frozen=True):
    """What a member sees of a link that its operations need, or that holds bytes for it. Times are seconds.

    state: "down"; "dead": what was sent is not acknowledged; "blocked": the other end takes no more; "busy": bytes wait
    here and move; "parked": bytes of an operation came that does not run here yet; "idle".
    """

    other: U64  # mid
    exchanges: bool  # the link for sends and recvs
    state: Name
    since: float  # in that state
    heard: float  # since a packet came
    backlog: Count  # bytes in the sockets that are not acknowledged, about
    reason: Annotated[str, Meta(max_length=256)] = ""


class Waits(Message, frozen=True):
    """What the member's slow operations wait for, as seen here. Said with each heartbeat while there is something."""

    group: Name
    mid: U64
    epoch: U64
    ops: Annotated[list[OpWait], Meta(max_length=16)]  # oldest first
    links: Annotated[list[LinkWait], Meta(max_length=128)]


class Mismatch(Message, frozen=True):
    """A neighbour called something else at *seq*, or the answer to an Abort that asks; *call* is my descriptor."""

    group: Name
    mid: U64
    epoch: U64
    seq: U64
    call: Text


class GiveUp(Message, frozen=True):
    """*seqs* cannot or shall not run in this epoch; the master voids them for all.

    reason "": the caller asked for it (on_failure="raise" after an abort); else why, for example a lost root.
    """

    group: Name
    mid: U64
    epoch: U64
    seqs: Annotated[list[U64], Meta(max_length=1024)]
    reason: Text


class UpdateMembership(Message, frozen=True):
    """The member has reached update_membership at *seq*."""

    group: Name
    mid: U64
    epoch: U64
    seq: U64


class Exchange(Message, frozen=True):
    """The member called send or recv, its *number*-th such call. Said again in each epoch until it is settled."""

    group: Name
    mid: U64
    epoch: U64
    number: U64
    other: U64  # mid of the receiver, or of the sender
    tag: U64
    sends: bool
    dtype: Annotated[int, Meta(ge=0, le=8)]
    count: Count


class ExchangeDone(Message, frozen=True):
    """The bytes of the exchange *order* have left, or are here with this *digest* (0 at the sender)."""

    group: Name
    mid: U64
    epoch: U64
    order: U64
    digest: U64


class OpenExchange(Message, frozen=True):
    """A send or recv that is not settled, in a Report."""

    number: U64
    other: U64  # mid
    sends: bool
    order: U64  # that a master gave it last; 0: none yet
    moving: bool  # matched in the reported epoch
    done: bool  # the engine has moved its bytes there
    digest: U64


class Report(Message, frozen=True):
    """What member *mid* knows of its epoch: to a master that was started after the one that it knows.

    Between this and Resumed or the next Epoch the member says nothing else of the epoch.
    """

    group: Name
    mid: U64
    epoch: U64
    members: Annotated[list[tuple[U64, Name, Name]], Meta(min_length=1, max_length=1024)]  # mid, name, daemon, by rank
    plan: Plan
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    start_world: World
    min_world: World
    reason: Text  # why the epoch began
    base: U64  # committed when the epoch began
    committed_upto: U64
    voids: list[Void]  # above committed_upto
    aborted: bool  # the epoch's ops were stopped
    done: Annotated[list[tuple[U64, U64, U64]], Meta(max_length=8192)]  # seq, digest, fingerprint, as in Done
    updates: Annotated[list[U64], Meta(max_length=8192)]  # seqs of update_memberships it stands at
    exchanges: Annotated[list[OpenExchange], Meta(max_length=8192)]
    heard: U64  # highest order of a send or recv that a master told it
    settled: Annotated[list[tuple[U64, U64]], Meta(max_length=1024)]  # order, digest of the newest that committed
    failed: Annotated[list[tuple[U64, U64]], Meta(max_length=1024)]  # other's mid and number, of those that did not fit


class ProbeResult(Message, frozen=True):
    """Whether *target*'s addresses answered (see Probe)."""

    group: Name
    joiner: U64
    prober: U64
    target: U64
    ok: bool
    reason: Text


class LinkMeasure(Message, frozen=True):
    """What this daemon knows of its path to *daemon*. Seconds, bytes per second; 0: not known."""

    daemon: Name
    rtt: float  # smallest round trip
    bandwidth: float  # from here to there, of all lanes together
    lanes: Annotated[int, Meta(ge=0, le=256)]  # that were busy when bandwidth was seen; 0: an active probe
    loss: float  # share of segments sent again


class LinkReport(Message, frozen=True):
    """New measurements: from operations, and answers to MeasureLink."""

    links: Annotated[list[LinkMeasure], Meta(max_length=1024)]
    uplink: float = 0.0  # bytes per second that left this daemon for all others together; 0: not known
    lanes: Annotated[int, Meta(ge=0, le=256)] = 0  # busy ones per link when uplink was seen


FromPeer = (
    Hello
    | Join
    | Leave
    | Heartbeat
    | Done
    | LinkDown
    | Waits
    | Mismatch
    | GiveUp
    | UpdateMembership
    | Exchange
    | ExchangeDone
    | Report
    | ProbeResult
    | LinkReport
    | StatusRequest
    | Arm
)
