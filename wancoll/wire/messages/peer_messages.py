"""Messages from a peer to the master."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from wancoll.collective import Descriptor, Label
from wancoll.wire.messages.client_messages import Arm, AskToLeave
from wancoll.wire.messages.epoch_messages import Plan, Void
from wancoll.wire.messages.fields import (
    Address,
    Addresses,
    Bits,
    First,
    Message,
    Name,
    Number,
    Real,
    Seconds,
    Site,
    Text,
    World,
)
from wancoll.wire.messages.relay_messages import AtRelay, Way
from wancoll.wire.messages.status_messages import Evict, StatusRequest
from wancoll.wire.messages.trust_messages import AboutTrust, Signed


class Hello(First, frozen=True):
    """First message on a control connection. incarnation is fresh at each daemon start."""

    daemon: Name
    incarnation: Bits
    addresses: Addresses  # where this daemon's lanes can be dialled
    lanes: Annotated[int, Meta(ge=1, le=256)]
    site: Site
    version: Name
    max_lanes: Annotated[int, Meta(ge=0, le=256)] = 0  # up to which the master may raise lanes; 0: not at all
    congestion_controls: Annotated[list[Name], Meta(max_length=64)] = []  # that its lanes may be told to use
    measures: bool = False  # whether it answers MeasureLink
    term: Number = 0  # highest that this daemon has seen
    master: Bits = 0  # identity of the master that welcomed it last
    dial: Number = 0  # counts this daemon's dials: of two connections the newer counts
    session: Number = 0  # Welcome.session of the connection that broke and shall go on; 0: none
    heard: Number = 0  # messages that it took in over that one (wire/kept.py)
    master_grace: Seconds = 0.0  # for so long its members go on without a master (C8); 0: as long as the master's own
    ended: Annotated[list[Bits], Meta(max_length=256)] = []  # incarnations whose processes have ended, on its machine
    cores: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # of processors that it may use; 0: not stated
    hints: Annotated[list[Address], Meta(max_length=8)] = []  # its local addresses, for daemons behind the same NAT
    relays: bool = False  # it is a relay, and has no clients


class AskElection(First, frozen=True):
    """What elects this master? Asked before Hello by a daemon with several addresses. Welcome answers, or StandsBy."""


class Join(Message, frozen=True):
    """A client of this daemon asks to become *member* of *group*."""

    group: Name
    member: Name
    start_world: World
    min_world: World
    was: Number = 0  # the mid that an earlier master gave it; it has not entered an epoch
    call_timeout: Seconds = 0.0  # a member this late with a call that another has made is evicted; 0: not stated
    shards: World = 1  # members of an island: with several *member* is ISLAND/SHARD
    launch: Annotated[str, Meta(max_length=128)] = ""  # of which start of the island: shards of two do not mix


class AskPlace(Message, frozen=True):
    """The member *mid* has waited for its place for a while: what for, now? Joined answers."""

    group: Name
    mid: Number


class Leave(Message, frozen=True):
    """The member is out: its client has said goodbye or died, or its daemon has put it out."""

    group: Name
    member: Name
    reason: Annotated[str, Meta(max_length=1024)] = ""  # empty: goodbye was said
    died: bool = False  # its client is gone without a goodbye
    committed: Number = 0  # up to here all is committed at a member of an island that says goodbye


class Ended(Message, frozen=True):
    """Members of this daemon, by group and mid, that are out: they commit nothing any more (C8).

    Said where an Evicted was heard, and to each master that does not know this daemon, before its Heartbeat(0).
    """

    members: Annotated[list[tuple[Name, Number]], Meta(max_length=1024)]


class Stopping(Message, frozen=True):
    """This daemon ends in order: that its connection closes next is no failure."""


class Heartbeat(Message, frozen=True):
    """I am alive; *number* counts up and comes back in the Pong."""

    number: Number
    # Of each member in an epoch: mid, epoch, the highest seq that its client has called, inputs and all, and, where
    # members commit, up to where it has.
    called: Annotated[list[tuple[Number, Number, Number, Number]], Meta(max_length=1024)] = []
    # Of each member whose client's process stands still: mid, since how many seconds, and "stopped" or "dead".
    still: Annotated[list[tuple[Number, Seconds, Name]], Meta(max_length=1024)] = []
    heard: Number = 0  # messages of the master that were taken in (wire/kept.py)
    # Only after a Pong that says watched. Of daemons to which links moved bytes lately: name, and since this one
    # began to count: bytes sent to it, TCP segments with data, and how many of those were sent again.
    moved: Annotated[list[tuple[Name, Number, Number, Number]], Meta(max_length=64)] = []
    # Of each member that lost others, likewise: mid, epoch, and how long it took to go on without them.
    recovered: Annotated[list[tuple[Number, Number, Seconds]], Meta(max_length=1024)] = []


class OfMember(Message, frozen=True):
    """Base of what member *mid* of this daemon says of its epoch."""

    group: Name
    mid: Number
    epoch: Number


class Vote(OfMember, frozen=True):
    """The member has finished op *seq*, with this result; it may finish ops out of order.

    It stands at an update_membership where digest is 0 and fingerprint that of an update_membership. To the master, or
    to the other members (wire/note.py). 0 as *seq*: no vote, only what is committed.
    """

    seq: Number = 0
    digest: Bits = 0  # 0 where results differ by rank
    fingerprint: Bits = 0  # of the call
    committed: Number = 0  # where members collect votes: all below is committed or void at the sender


class LinkDown(OfMember, frozen=True):
    """The link to member *other* could not be dialled within its deadline ("unreachable"), or is "lost" with its bytes.

    "broken": it has lost all its lanes, and goes on if they come up again. "up": it was "unreachable", and is up.

    *sends*: it is the pair's link for sends and recvs, not the one for collectives.
    """

    other: Number
    kind: Name
    reason: Text
    sends: bool = False


class OpWait(Message, frozen=True):
    """An operation that has not ended at a member for longer than Limits.slow_after.

    stage: "links": it waits for links; "moving": the engine has it; "input": it has it, and the member's own client
    has not filled all of the input; "done": it is finished here; of a send or recv also "alone": the other half has not
    been called.
    """

    seq: Number  # 0: a send or recv
    what: Text
    nbytes: Number
    stage: Name
    age: Real  # seconds since it was called
    still: Real  # seconds since the last byte moved on a link that it needs
    other: Number = 0  # mid, of a send or recv


class LinkWait(Message, frozen=True):
    """What a member sees of a link that its operations need, or that holds bytes for it. Times are seconds.

    state: "down"; "dead": what was sent is not acknowledged; "blocked": the other end takes no more; "busy": bytes wait
    here and move; "parked": bytes of an operation came that does not run here yet; "idle".
    """

    other: Number  # mid
    p2p: bool  # the link for sends and recvs
    state: Name
    since: Real  # in that state
    heard: Real  # since a packet came
    backlog: Number  # bytes in the sockets that are not acknowledged, about
    reason: Annotated[str, Meta(max_length=256)] = ""


class Waits(OfMember, frozen=True):
    """What the member's slow operations wait for, as seen here. Said with each heartbeat while there is something."""

    ops: Annotated[list[OpWait], Meta(max_length=16)]  # oldest first
    links: Annotated[list[LinkWait], Meta(max_length=128)]


class Mismatch(OfMember, frozen=True):
    """A neighbour called something else at *seq*, or the answer to an Abort that asks; *call* is my descriptor."""

    seq: Number
    call: Text
    fingerprint: Bits = 0  # of my descriptor


class GiveUp(OfMember, frozen=True):
    """*seqs* cannot or shall not run in this epoch; the master voids them for all.

    reason "": a member was lost and the caller asked for it (on_failure="raise"); else why, for example a lost root.
    """

    seqs: Annotated[list[Number], Meta(max_length=1024)]
    reason: Text


class CalledWithGrace(OfMember, frozen=True):
    """The member has made this *call*, which does not wait for ever for those who have not (R20)."""

    seq: Number
    call: Descriptor
    committed: Number = 0  # as in Vote


class EpochReport(Message, frozen=True):
    """What a member has finished in its epoch.

    *done* has seq, digest and fingerprint, as in Vote, of what is finished above *committed*, and of what was committed
    here in the epoch: the newest ops_in_flight and zero_contributions of those.
    """

    committed: Number  # all below is committed or void here
    done: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)]
    collected: Annotated[list[Number], Meta(max_length=8192)]  # of *done*: for what only the master collects votes
    divergent: Annotated[list[Number], Meta(max_length=8192)]  # seqs in which another member has another result


class Frozen(OfMember, frozen=True):
    """Answer to Abort where members collect votes: the member finishes nothing in *epoch* any more.

    What it has finished but told nobody is not in the report, and has not happened.
    """

    finished: EpochReport


class Differs(OfMember, frozen=True):
    """Where members commit: the member finished *seq* with *digest*, and member *other* with *theirs*."""

    seq: Number
    digest: Bits
    other: Number
    theirs: Bits


class Written(OfMember, frozen=True):
    """The member's own client has written to the input of *call* while it ran: two looks at it found other bytes."""

    call: Text


class P2PCall(OfMember, frozen=True):
    """The member called send or recv, its *number*-th such call. Said again in each epoch until it is settled."""

    number: Number
    other: Number  # mid of the receiver, or of the sender
    tag: Bits
    sends: bool
    dtype: Annotated[int, Meta(ge=0, le=8)]
    count: Number
    label: Label = ""
    ahead: bool = False  # as in Post


class P2PDone(OfMember, frozen=True):
    """The bytes of the pair *order* have left, or are here with this *digest* (0 at the sender).

    With *error*, why this end cannot move them, both halves end.
    """

    order: Number
    digest: Bits
    error: Text = ""


class OpenP2P(Message, frozen=True):
    """A send or recv that is not settled, in a Report."""

    number: Number
    other: Number  # mid
    sends: bool
    order: Number  # that a master gave it last; 0: none yet
    moving: bool  # matched in the reported epoch
    done: bool  # the engine has moved its bytes there
    digest: Bits


class UpdateOutcome(Message, frozen=True):
    """What the client was told of an update_membership: it has ended in *epoch*, with *members*."""

    seq: Number
    epoch: Number
    members: Annotated[list[Name], Meta(max_length=1024)]  # names, by rank; where islands have several shards theirs


class Report(OfMember, frozen=True):
    """What member *mid* knows of its epoch: to a master that was started after the one that it knows.

    Between this and Resumed or the next Epoch the member says nothing else of the epoch.
    """

    members: Annotated[
        list[tuple[Number, Name, Name]], Meta(min_length=1, max_length=1024)
    ]  # by rank: mid, name, daemon
    plan: Plan
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    start_world: World
    min_world: World
    reason: Text  # why the epoch began
    base: Number  # committed when the epoch began
    voids: Annotated[list[Void], Meta(max_length=8192)]  # of the epoch
    aborted: bool  # the epoch's ops were stopped
    finished: EpochReport  # all of it, whoever was told; update_memberships at which it stands, too
    p2p: Annotated[list[OpenP2P], Meta(max_length=8192)]
    heard: Number  # highest order of a send or recv that a master told it
    settled: Annotated[list[tuple[Number, Bits]], Meta(max_length=1024)]  # order, digest of the newest that committed
    failed: Annotated[list[tuple[Number, Number, Name]], Meta(max_length=1024)]  # other's mid and number, the error
    call_timeout: Seconds = 0.0  # as in Join
    updated: UpdateOutcome | None = None  # of its newest update_membership: others may stand at it still
    shards: World = 1  # as in Join


class ProbeResult(Message, frozen=True):
    """Whether *target*'s addresses answered (see Probe)."""

    group: Name
    joiner: Number
    prober: Number
    target: Number
    ok: bool
    reason: Text
    refused: bool = False  # nobody listens there: its process has ended
    way: Way = Way.direct  # as in Probe


class LinkMeasure(Message, frozen=True):
    """What this daemon knows of its path to *daemon*. Seconds, bytes per second; 0: not known."""

    daemon: Name
    rtt: Real  # smallest round trip
    bandwidth: Real  # from here to there, of all lanes together
    lanes: Annotated[int, Meta(ge=0, le=256)]  # that were busy when bandwidth was seen; 0: an active probe
    loss: Real  # share of segments sent again


class LinkReport(Message, frozen=True):
    """New measurements: from operations, and answers to MeasureLink."""

    links: Annotated[list[LinkMeasure], Meta(max_length=1024)]
    uplink: Real = 0.0  # bytes per second that left this daemon for all others together; 0: not known
    lanes: Annotated[int, Meta(ge=0, le=256)] = 0  # busy ones per link when uplink was seen


_OfDaemon = Hello | Stopping | Heartbeat | Ended | LinkReport | ProbeResult
_OfPlace = Join | AskPlace | Leave | Report
_OfEpoch = (
    Vote | LinkDown | Waits | Mismatch | GiveUp | CalledWithGrace | Frozen | Differs | Written | P2PCall | P2PDone
)
_Asked = StatusRequest | AskElection | Evict | AskToLeave | Arm | AboutTrust | AtRelay
FromPeer = _OfEpoch | _OfDaemon | _OfPlace | _Asked
SaidToMaster = FromPeer | Signed  # over TLS Signed comes first, and alone
