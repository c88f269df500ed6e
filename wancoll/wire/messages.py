"""All typed messages: `from wancoll.wire import messages as m`. Ill-typed fields are refused, by name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from wancoll.collective import Descriptor, Label

# ---- fields ------------------------------------------------------------------------------------------

MOST = 1 << 62  # of all that is counted: ids, epochs, terms, operations, bytes (R19)
Number = Annotated[int, Meta(ge=0, le=MOST)]
Bits = Annotated[int, Meta(ge=0)]  # any 64: digests, identities, tags; they are compared, never counted
Real = Annotated[float, Meta(ge=-1e15, le=1e15)]  # finite; whether it can be is judged by who uses it
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(min_length=3, max_length=300)]  # "host:port", IPv6 in brackets
Addresses = Annotated[list[Address], Meta(min_length=1, max_length=8)]
World = Annotated[int, Meta(ge=1, le=1024)]
Site = Annotated[str, Meta(max_length=128)]  # a label that members close to each other share; "" is nobody's
Rank = Annotated[int, Meta(ge=-1, le=1023)]  # -1: none
Calls = Annotated[dict[Name, Text], Meta(max_length=1024)]  # by member: what it called
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Goodbyes = Annotated[list[Name], Meta(max_length=1024)]  # members of before that left in peace; others gone are lost


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base: a positional msgpack array whose first item is the type's name."""


class First(Message, frozen=True):
    """Base of what is said before anything else: in which version of the *protocol*."""

    protocol: int


# ---- an epoch, as the master announces it ------------------------------------------------------------


class MemberInfo(Message, frozen=True):
    """One member of an epoch."""

    mid: Number
    name: Name
    daemon: Name
    addresses: Addresses
    site: Site


class Plan(Message, frozen=True):
    """What the master decided for an epoch, so that the same call gives the same schedule everywhere."""

    lanes: Annotated[int, Meta(ge=1, le=256)]
    stripe: Annotated[int, Meta(ge=1, le=1 << 31)]  # bytes; steps are not cut into smaller parts
    turns: bool  # whether ops take turns on the lanes, or all start at lane 0
    # By kind (its name): (up to this many bytes of the larger tensor, algorithm), ascending; the last bound is 0, no
    # limit. A kind that is missing takes its default.
    choices: Annotated[dict[Name, Annotated[list[tuple[Number, Name]], Meta(max_length=64)]], Meta(max_length=64)]
    avoid: Annotated[list[tuple[Number, Number]], Meta(max_length=4096)]  # pairs of mids that cannot reach each other
    pacing: Number  # bytes per second of one lane; 0: no limit
    congestion: Annotated[str, Meta(max_length=32)]  # congestion control of the lanes; "": each daemon's setting
    spares: bool = False  # whether links to the members two places away are kept up, who are next to us after a loss
    tracks: Annotated[int, Meta(ge=1, le=256)] = 1  # lanes with the same number modulo this share what is to be sent
    commit: Name = "master"  # who commits: the master, or the "members" among themselves


class Void(Message, frozen=True):
    """Op *seq* was given up for every member. *error* names a class of wancoll.errors; *calls*: who called what."""

    seq: Number
    error: Name
    text: Text
    calls: Calls


class Epoch(Message, frozen=True):
    """A new epoch for member *to*. What lies above *committed_upto* has not happened and runs again, but *voids*."""

    group: Name
    to: Number
    term: Number
    epoch: Number
    members: Annotated[list[MemberInfo], Meta(min_length=1, max_length=1024)]  # in rank order
    plan: Plan
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]  # proves that a lane's dialler is of this group
    min_world: World
    committed_upto: Number
    voids: Annotated[list[Void], Meta(max_length=8192)]
    reason: Text
    passed: bool = False  # update_memberships up to committed_upto have ended in the epoch before, with its members
    goodbyes: Goodbyes = []


class EpochChange(Message, frozen=True):
    """A new epoch for member *to*, told by what changed since the epoch *base*, which the member was told last.

    wancoll.wire.epochs makes it and puts it together again: what is not here is as it was.
    """

    group: Name
    to: Number
    term: Number
    epoch: Number
    base: Number
    left: Annotated[list[Number], Meta(max_length=1024)]  # mids
    joined: Annotated[list[MemberInfo], Meta(max_length=1024)]  # also who is told of otherwise than before
    order: Annotated[list[Rank], Meta(max_length=1024)]  # by rank: place among who stayed, then joined; []: as they are
    plan: Plan | None
    committed_upto: Number
    voids: Annotated[list[Void], Meta(max_length=8192)]  # beside those of base that are above committed_upto
    reason: Text
    passed: bool = False
    goodbyes: Goodbyes = []


# ---- client and daemon, over the unix socket ---------------------------------------------------------


class Attach(First, frozen=True):
    """First message of a client. Empty *member*: the daemon makes a name."""

    group: Name
    member: Annotated[str, Meta(max_length=128)]
    start_world: World
    min_world: World
    pid: Number
    call_timeout: Seconds = 0.0  # as in Join


class Post(Message, frozen=True):
    """One call. *front* and *back* are byte offsets into the arena.

    The call's root and counts, and peer, are by the ranks of *epoch*, the one that the client knew when it called.
    Blocks for or from other ranks lie in front in the order of that epoch's ranks; in back, in the order of the
    contributors.

    *filled* is another offset, a multiple of 64 and apart from front and back: of a byte for each BLOCK of front, 0
    until the block is there. -1: all of it is there. Who sets bytes rings the bell: writes to the eventfd of Attached.

    *ahead*: a recv that only a send which fits it shall meet; others pass it by (R16).

    *shown* is such an offset, too: of a 32-bit word for each BLOCK of back, which becomes the number of the attempt
    (Result.attempts) when the block is final in it. -1: nobody looks.
    """

    id: Number  # counts the client's calls from 1
    call: Descriptor
    front: Number
    back: Number
    epoch: Number
    peer: Rank = -1  # of send and recv
    tag: Bits = 0
    filled: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    ahead: bool = False
    shown: Annotated[int, Meta(ge=-1, le=MOST)] = -1


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
    """Answer to Attach; the descriptors of the arena and of the bell (Post.filled) travel with it (SCM_RIGHTS)."""

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


# ---- the handshake on a data connection: daemon to daemon --------------------------------------------


class LaneHello(First, frozen=True):
    """First frame on a data connection. After LaneWelcome only engine frames follow."""

    group: Name
    key: Annotated[bytes, Meta(min_length=16, max_length=16)]
    sender: Number  # mid of the dialler
    receiver: Number
    channel: Annotated[int, Meta(ge=0, le=1)]  # 0: collectives, 1: send and recv
    plan: Bits  # stands for what the epoch's plan says of lanes; an end that knows another plan waits for the epoch
    lane: Annotated[int, Meta(ge=0, le=256)]  # the one after those of the plan is for notes
    generation: Number  # grows with every dial of the link; the highest wins
    checksums: bool = True  # whether the dialler wants payloads to carry one


class ProbeHello(First, frozen=True):
    """First frame of a connection that only asks who listens here, and how far away.

    After it come *nbytes* of anything; LaneWelcome answers when they have arrived. More ProbeHello may follow. *fill*:
    bytes that the answer shall have, at least: whether so large a packet comes back.
    """

    daemon: Name
    nbytes: Annotated[int, Meta(ge=0, le=1 << 26)] = 0
    fill: Annotated[int, Meta(ge=0, le=1 << 16)] = 0


class LaneWelcome(Message, frozen=True):
    """The lane is open. Its payloads carry *checksums*, both ways, if either end wants it."""

    daemon: Name
    checksums: bool = True
    filler: bytes = b""


class LaneRefused(Message, frozen=True):
    """The lane is not opened; the dialler may try again."""

    reason: Text
    filler: bytes = b""


LaneFirst = LaneHello | ProbeHello


LaneAnswer = LaneWelcome | LaneRefused


# ---- what `wancoll status` asks a master, and the answer ---------------------------------------------


class StatusRequest(First, frozen=True):
    """From `wancoll status`: may be the first and only message of a connection."""


class MemberStatus(Message, frozen=True):
    """A member as `wancoll status` shows it. state: "joining" or "member"."""

    name: str
    mid: int
    daemon: str
    state: str
    rank: int
    addresses: list[str]
    done_upto: int
    silent_for: float


class PlanStatus(Message, frozen=True):
    """What the master decided for a group's epoch, and from what; 0: not known."""

    plan: Plan
    bottleneck: float  # bytes per second of the ring's slowest edge
    round: float  # seconds once around the ring
    alpha: float  # seconds of a message, that the choices were made with
    beta: float  # seconds of a byte


class WaitCause(Message, frozen=True):
    """Whom an operation waits for. With *other* it is the link from *member* to there, in that direction."""

    member: str
    rank: int
    other: str
    other_rank: int  # -1: it is the member, not a link
    why: str
    seconds: float  # that it has been so


class WaitStatus(Message, frozen=True):
    """An operation that has been waiting for longer than Limits.slow_after."""

    op: str  # "group/seq", or what was called of a send or recv
    seq: int  # 0: a send or recv
    epoch: int
    what: str  # "": no member has told yet
    nbytes: int
    seconds: float  # since the first member called it, as far as is known
    done: int  # members that are done with it
    causes: list[WaitCause]  # the first of many; empty: bytes move, or nobody stands out


class PairStatus(Message, frozen=True):
    """One member could not reach another, or lost the link to it. Kept for a while after it is over."""

    source: str
    target: str
    kind: str  # "lost" or "unreachable"
    why: str
    seconds: float  # since it began
    last: float  # seconds since it was last told of
    times: int
    done: str  # what the master did about it, last


class GroupStatus(Message, frozen=True):
    """A group as `wancoll status` shows it."""

    name: str
    phase: str
    epoch: int
    start_world: int
    min_world: int
    lanes: int
    committed_upto: int
    members: list[MemberStatus]
    waiting_for: str
    plan: PlanStatus | None = None  # None: forming
    waits: list[WaitStatus] = []  # oldest first
    pairs: list[PairStatus] = []  # newest first


class LinkStatus(Message, frozen=True):
    """What is known of the path from one daemon to another: LinkMeasure's fields."""

    source: str
    target: str
    rtt: float
    bandwidth: float
    lanes: int
    loss: float


class EventRecord(Message, frozen=True):
    """One line of the event log. time is seconds since 1970."""

    time: float
    group: str
    epoch: int
    kind: str
    text: str


class Evict(First, frozen=True):
    """From `wancoll evict`: the first and only message of a connection. *everyone*: all of the group, no *member*."""

    group: Name
    member: Annotated[str, Meta(max_length=128)]
    everyone: bool
    reason: Annotated[str, Meta(max_length=500)]


class EvictAnswer(Message, frozen=True):
    """What came of it, or of an AskToLeave. Not *done*: *what* is wrong, in the words of an error."""

    done: bool
    what: str
    expected: str = ""
    got: str = ""
    hint: str = ""
    master: Bits = 0  # Welcome.master of the one that passed an AskToLeave on


# ---- who comes in: only to and from a master that listens with TLS, each but Renew the first of a connection ----


PEM_BYTES = 16384
Pem = Annotated[bytes, Meta(max_length=PEM_BYTES)]
Role = Literal["peer", "observer", "chaos", "admin"]


class AskAuthority(First, frozen=True):
    """Who has a token, and knows the hash of the authority's certificate by it, asks for that."""


class AuthorityIs(Message, frozen=True):
    """Answer to AskAuthority: whom to believe, that which signs first. Who has a token believes the one that it names.

    To a daemon after each Welcome, too, and whenever that changes.
    """

    certificates: Pem


class Enroll(First, frozen=True):
    """A token's secret for a certificate; *request* proves that its sender has the key."""

    token: Annotated[str, Meta(max_length=64)]
    secret: Annotated[str, Meta(max_length=128)]
    name: Name
    request: Pem


class Renew(Message, frozen=True):
    """Who has a certificate wants the next one, over the connection that it has by it."""

    request: Pem


class Enrolled(Message, frozen=True):
    """Answer to Enroll and Renew. With *refused*, why there is none, the certificate is empty."""

    certificate: Pem
    refused: Text = ""
    authorities: Pem = b""  # as AuthorityIs has them


class MakeToken(First, frozen=True):
    """From `wancoll token create`; the fields are a Grant's, *seconds* until it expires (0: never)."""

    role: Role
    name: Annotated[str, Meta(max_length=128)]
    groups: Annotated[list[Name], Meta(max_length=64)]
    uses: Number
    seconds: Seconds


class RevokeToken(First, frozen=True):
    """From `wancoll token revoke`."""

    token: Name


class ListTokens(First, frozen=True):
    """From `wancoll token list`."""


class TokenInfo(Message, frozen=True):
    """A token as `wancoll token list` shows it."""

    id: str
    role: str
    name: str
    groups: list[str]
    uses: int  # 0: any number
    used: int  # of those that are counted
    expires: float  # seconds since 1970; 0: never
    revoked: bool
    replaced: bool = False  # the authority that it names is not believed any more


class Tokens(Message, frozen=True):
    """Answer to the three before. *refused*: why it is not done, or not for good; *made*: the text of a new token."""

    tokens: list[TokenInfo] = []
    made: str = ""
    refused: Text = ""


class AskRotation(First, frozen=True):
    """From `wancoll ca show`."""


class Rotate(First, frozen=True):
    """From `wancoll ca rotate`; *seconds* of each phase (0: what is safe), *now*: the old one is dropped at once."""

    seconds: Seconds
    now: bool


class AuthorityInfo(Message, frozen=True):
    """An authority as `wancoll ca show` shows it; times are seconds since 1970."""

    sha256: str
    made: float
    ends: float
    signs: bool


class RotationIs(Message, frozen=True):
    """Answer to the two before. With *refused* nothing was done; *made*: a new token, where no other is good."""

    phase: str = ""
    until: float = 0.0  # seconds since 1970: the next phase; 0.0: none follows
    authorities: list[AuthorityInfo] = []
    made: str = ""
    refused: Text = ""


AboutTrust = AskAuthority | Enroll | Renew | MakeToken | RevokeToken | ListTokens | AskRotation | Rotate


class DaemonStatus(Message, frozen=True):
    """A daemon that is here: where its lanes are dialled, and its version."""

    name: str
    addresses: list[str]
    version: str


class Status(Message, frozen=True):
    """Answer to StatusRequest."""

    term: int
    uptime: float
    version: str
    daemons: list[str]
    groups: list[GroupStatus]
    events: list[EventRecord]  # newest last
    links: list[LinkStatus] = []  # that were measured, by source and target; the first of many
    resources: dict[str, int] = {}  # what the master holds: fds, threads, tasks, connections, memory, ...
    hosts: list[DaemonStatus] = []  # the daemons, by name; the first of many
    clock: float = 0.0  # the master's: seconds since 1970
    master: Bits = 0  # Welcome.master
    rotation: str = ""  # the phase of the authority's, while one is in progress
    rotation_until: float = 0.0  # seconds since 1970: the next phase
    left: list[tuple[str, str]] = []  # group ("": a daemon) and name of who was asked to leave, and has in order
    gone: list[tuple[str, int, str]] = []  # groups of which nobody is here: members, and who did not say that it stops
    elected_by: str = ""  # Welcome's


# ---- what a peer says to the master ------------------------------------------------------------------


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


class AskElection(First, frozen=True):
    """What elects this master? Asked before Hello by a daemon with several addresses. Welcome answers, or StandsBy."""


class Join(Message, frozen=True):
    """A client of this daemon asks to become *member* of *group*."""

    group: Name
    member: Name
    start_world: World
    min_world: World
    was: Number = 0  # the mid that an earlier master gave it; it has not entered an epoch
    call_timeout: Seconds = 0.0  # a member this late with a call that another has made is put out; 0: not stated


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


class Done(OfMember, frozen=True):
    """Op *seq* is finished on this member, with this result; members may finish ops out of order."""

    seq: Number
    digest: Bits
    fingerprint: Bits
    committed_upto: Number = 0  # where members commit: all below is committed or void


class LinkDown(OfMember, frozen=True):
    """The link to member *other* broke ("lost") or could not be dialled within its deadline ("unreachable").

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


class Grace(OfMember, frozen=True):
    """The member has made this *call*, which does not wait for ever for those who have not (R20)."""

    seq: Number
    call: Descriptor
    committed_upto: Number = 0  # where members commit: so much is


class UpdateMembership(OfMember, frozen=True):
    """The member has reached update_membership at *seq*."""

    seq: Number
    committed_upto: Number = 0  # as in Done


class Frozen(OfMember, frozen=True):
    """Answer to Abort where members commit: the member finishes nothing in *epoch* any more, and this is all it has.

    Lists are of what is above *committed_upto*; of *done* also of what was committed here, as in Report.done.
    """

    committed_upto: Number
    done: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)]  # that members commit
    told: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)]  # of which a master was told Done
    updates: Annotated[list[Number], Meta(max_length=8192)]  # at which it stands, as a master was told
    apart: Annotated[list[Number], Meta(max_length=8192)]  # seqs in which another member has said another result
    alone: Annotated[list[Number], Meta(max_length=8192)] = []  # updates that it passes if all others do, too (C11)


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
    members: Annotated[list[Name], Meta(max_length=1024)]  # names, by rank


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
    committed_upto: Number
    voids: Annotated[list[Void], Meta(max_length=8192)]  # of the epoch
    aborted: bool  # the epoch's ops were stopped
    # seq, digest, fingerprint, as in Done; also of what was committed here in the epoch: the newest ops_in_flight and
    # covers of those, update_memberships among them, with digest 0
    done: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)]
    updates: Annotated[list[Number], Meta(max_length=8192)]  # seqs of update_memberships it stands at
    p2p: Annotated[list[OpenP2P], Meta(max_length=8192)]
    heard: Number  # highest order of a send or recv that a master told it
    settled: Annotated[list[tuple[Number, Bits]], Meta(max_length=1024)]  # order, digest of the newest that committed
    failed: Annotated[list[tuple[Number, Number, Name]], Meta(max_length=1024)]  # other's mid and number, the error
    call_timeout: Seconds = 0.0  # as in Join
    updated: UpdateOutcome | None = None  # of its newest update_membership: others may stand at it still


class ProbeResult(Message, frozen=True):
    """Whether *target*'s addresses answered (see Probe)."""

    group: Name
    joiner: Number
    prober: Number
    target: Number
    ok: bool
    reason: Text
    refused: bool = False  # nobody listens there: its process has ended


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


FromPeer = (
    Hello
    | Join
    | AskPlace
    | Leave
    | Ended
    | Stopping
    | Heartbeat
    | Done
    | LinkDown
    | Waits
    | Mismatch
    | GiveUp
    | Grace
    | UpdateMembership
    | Frozen
    | Differs
    | Written
    | P2PCall
    | P2PDone
    | Report
    | ProbeResult
    | LinkReport
    | StatusRequest
    | AskElection
    | Evict
    | AskToLeave
    | Arm
    | AboutTrust
)


# ---- what the master says to a peer ------------------------------------------------------------------


class Welcome(First, frozen=True):
    """Answer to Hello. *term* grows with each master; times are seconds."""

    term: Number
    heartbeat_interval: Annotated[float, Meta(ge=1e-3, le=1e6)]
    heartbeat_timeout: Annotated[float, Meta(ge=1e-3, le=1e6)]
    master: Bits = 0  # random, fresh at each start of a master
    session: Number = 0  # names this connection, should it break
    resumed: bool = False  # Hello.session goes on: both say again what the other has not heard
    heard: Number = 0  # messages that the master took in over it (wire/kept.py)
    elected_by: Text = ""  # an etcd and its prefix; where nothing elects the master, its journal (R6)


class Pong(Message, frozen=True):
    """Answer to Heartbeat."""

    number: Number
    term: Number
    heard: Number = 0  # messages of the daemon that were taken in (wire/kept.py)
    watched: bool = False  # somebody looks at the master's page: heartbeats shall tell what moves
    clock: float = 0.0  # when the heartbeat was taken in, by the master's own clock; in Pong(0) none


class Joined(Message, frozen=True):
    """The Join is noted; *mid* names the member from now on. *reason* says what it waits for. Answers AskPlace, too."""

    group: Name
    member: Name
    mid: Number
    reason: Text


class Refused(Message, frozen=True):
    """The Join is refused, for good."""

    group: Name
    member: Name
    reason: Text
    evicted: bool = False  # nothing is wrong with it: an operator sent the joiner away


class Commit(Message, frozen=True):
    """All ops of *epoch* up to *upto* are committed."""

    group: Name
    epoch: Number
    upto: Number
    term: Number


class ForMember(Message, frozen=True):
    """Base of what is for member *to* alone, in its epoch."""

    group: Name
    to: Number
    epoch: Number


class Resumed(ForMember, frozen=True):
    """Answer to Report: all have reported, *epoch* goes on. Whatever of it is not settled is said (again) now."""

    term: Number


class Updated(Message, frozen=True):
    """After a restart: others were told this *outcome* of the update_membership at which member *to* stands."""

    group: Name
    to: Number
    outcome: UpdateOutcome


class Abort(Message, frozen=True):
    """Stop the ops of *epoch*; the next Epoch follows. With *ask* > 0: answer with Mismatch for seq *ask*.

    Where members commit: answer with Frozen, too.
    """

    group: Name
    epoch: Number
    ask: Number
    reason: Text


class Cover(ForMember, frozen=True):
    """If the client of member *to* has not made this *call* at *seq*, the daemon takes part in it with zeros (R20)."""

    seq: Number
    call: Descriptor


class Matched(ForMember, frozen=True):
    """The send or recv *number* of member *to* has found its other half. Pairs of two members run in their *order*."""

    number: Number
    order: Number  # counts the group's pairs of a send and a recv


class Settled(ForMember, frozen=True):
    """The send or recv *number* of member *to* is committed, or failed with *error*, a class of wancoll.errors."""

    number: Number
    digest: Bits  # of the bytes, as the receiver has them
    error: Annotated[str, Meta(max_length=128)]
    text: Text
    calls: Calls
    other: Number = 0  # number of the other half


class Evicted(Message, frozen=True):
    """Member *mid* is out. Ops up to *committed_upto* had committed, with the digests of all who were done.

    Above it and up to *unknown_upto* ops may have committed with this member, and it was not asked for its results:
    what it has is the result only where it is in *digests*. What lies above both has not happened.
    """

    group: Name
    mid: Number
    reason: Text
    committed_upto: Number
    unknown_upto: Number = 0
    epoch: Number = 0  # that *digests* are of
    digests: Annotated[list[tuple[Number, Bits, Bits]], Meta(max_length=8192)] = []  # as in Report.done


class Waited(ForMember, frozen=True):
    """Answer to Waits: what the group's oldest slow operation waits for, in words; "": not known."""

    seq: Number  # of that operation; 0: none
    text: Text
    parked: Annotated[list[Number], Meta(max_length=1024)]  # mids that hold the member's bytes back for good reason


class Redial(ForMember, frozen=True):
    """Member *to* shall make its links to *others* (empty: all) anew that are up for longer than *older* seconds.

    *sends*: only those for sends and recvs, or (False) only those for collectives; None: both.

    What is on them is lost: the other end has let go of them, or nothing moves and nobody knows why.
    """

    others: Annotated[list[Number], Meta(max_length=1024)]
    older: Real
    reason: Text
    sends: bool | None = None


class Probe(Message, frozen=True):
    """Member *prober* of your daemon: say whether a data port answers at *addresses* (those of *target*)."""

    group: Name
    joiner: Number  # whose admission it is for; 0: of the target's daemon the connection broke, is it there?
    prober: Number
    target: Number
    daemon: Name  # who should answer there
    addresses: Addresses


class MeasureLink(Message, frozen=True):
    """Measure the path to *daemon* at *addresses* with about *nbytes* of data, when nothing else is under way."""

    daemon: Name
    addresses: Addresses
    nbytes: Number


class StandsBy(Message, frozen=True):
    """Instead of Welcome or Status: this master does not lead, *leader* does ("host:port"; "": nobody is known to)."""

    leader: Annotated[str, Meta(max_length=300)]
    term: Number  # of the leader; 0: not known
    elected_by: Text = ""  # Welcome.elected_by of whoever leads; "": not known
    why: Text = ""  # nobody leads, as far as this master knows


class Bye(Message, frozen=True):
    """The master closes this connection, and why."""

    reason: Text
    final: bool = False  # this daemon, a newcomer, must not come back: another one has its name


# For members; all have a group. The rest is for daemons.
ToMember = (
    Joined
    | Refused
    | Epoch
    | EpochChange
    | Commit
    | Resumed
    | Updated
    | Abort
    | Cover
    | Matched
    | Settled
    | Evicted
    | Waited
    | Redial
)


AnswersOfTrust = AuthorityIs | Enrolled | Tokens | RotationIs
FromMaster = (
    Welcome
    | Pong
    | ToMember
    | Probe
    | MeasureLink
    | AskToLeave
    | Status
    | EvictAnswer
    | AnswersOfTrust
    | StandsBy
    | Bye
    | Ok
)
