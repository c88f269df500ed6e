"""What goes into a step of the master, and what comes out of it: events, and Ready. Pure.

    event -> step() -> Ready(persist, messages, closes, ...)

Whatever a master says has to stay true when it dies in the middle of saying it (R9). So a Ready isn't a list to be
carried out line by line. Its fields are the order:

    answers, log    decide nothing, and may leave at once
    persist         one write, of all that the step used up
    messages        only once the write is durable, and those of earlier steps have left; in their order
    closes          after the messages

A shell whose store takes its time puts each Ready into Held and sends what release() gives back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from wancoll.trust.identity import Identity
from wancoll.wire import messages as m
from wancoll.wire.epochs import change
from wancoll.wire.framing import HEADER_BYTES, encode
from wancoll_master.core.may import EVERYTHING

# ---- events -----------------------------------------------------------------------------------------


class Received(msgspec.Struct, frozen=True):
    """A message came over connection *conn* (a number that the shell never uses again).

    *identity* is who is at its other end, None: somebody who has not proved it. *source* is the address that it comes
    from, "": of no matter.
    """

    conn: int
    message: m.FromPeer
    identity: Identity | None = EVERYTHING
    source: str = ""


class Disconnected(msgspec.Struct, frozen=True):
    """Connection *conn* is gone: why; *lasting*: it cannot be taken up again. *round_trip*: its path's, if known."""

    conn: int
    reason: str
    lasting: bool = True
    round_trip: float = 0.0


class SentAway(msgspec.Struct, frozen=True):
    """The other ends of these connections have lost the right to be there: why, by connection.

    The shell has told them, and ends the connections.
    """

    reasons: Mapping[int, str]


class Returned(msgspec.Struct, frozen=True):
    """The daemon of connection *conn* has taken it up again: presence.returning() was asked, and all is kept."""

    conn: int
    hello: m.Hello


class Tick(msgspec.Struct, frozen=True):
    """State.deadline has come. A tick that comes late tells the master that it slept itself."""


WATCHED = 5.0  # seconds after a look at the page, or a status, for which daemons go on to tell more


class Watched(msgspec.Struct, frozen=True):
    """Somebody looks at the page: until then daemons shall tell what moves."""

    until: float


Event = Received | Disconnected | SentAway | Returned | Tick | Watched

# ---- messages ---------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send *message* over *conn*."""

    conn: int
    message: m.FromMaster


class Broadcast(msgspec.Struct, frozen=True):
    """Send the same bytes over all of *conns*."""

    conns: tuple[int, ...]
    message: m.FromMaster


class Announce(msgspec.Struct, frozen=True):
    """Send *epoch* to each (conn, mid) of *to*; to members of *base*, who were told that one last, what changed."""

    to: tuple[tuple[int, int], ...]
    epoch: m.Epoch
    base: m.Epoch | None = None


Message = Send | Broadcast | Announce


def frames(message: Message) -> Iterator[tuple[int, bytes]]:
    """(conn, bytes) of one message to one or many members; what they have in common is encoded once."""
    match message:
        case Send(conn, what):
            yield conn, encode(what)
        case Broadcast(conns, what):
            frame = encode(what)
            yield from ((conn, frame) for conn in conns)
        case Announce():
            for told, to in tellings(message):
                packed = encode_for_each(told, [mid for _, mid in to])
                yield from ((conn, frame) for (conn, _), frame in zip(to, packed, strict=True))


Addressees = list[tuple[int, int]]  # (conn, mid)


def tellings(announce: Announce) -> Iterator[tuple[m.Epoch | m.EpochChange, Addressees]]:
    """What is sent, to be addressed to each: the whole, or what changed."""
    base, epoch = announce.base, announce.epoch
    changed = change(base, epoch) if base is not None else None
    known = {member.mid for member in base.members} if base is not None and changed is not None else set()
    whole = [one for one in announce.to if one[1] not in known]
    if whole:
        yield epoch, whole
    if changed is not None and len(whole) < len(announce.to):
        yield changed, [one for one in announce.to if one[1] in known]


def encode_for_each(message: m.Epoch | m.EpochChange, mids: list[int]) -> list[bytes]:
    """Its frames for each of *mids*: all but the field *to* is encoded once, since worlds may be large."""
    pack = msgspec.msgpack.encode
    whole = pack(msgspec.structs.replace(message, to=0))
    at = 1 + len(pack(type(message).__name__)) + len(pack(message.group))  # an array's first byte, tag, group; then to
    head, tail = whole[:at], whole[at + 1 :]
    bodies = (head + pack(mid) + tail for mid in mids)
    return [len(body).to_bytes(HEADER_BYTES, "big") + body for body in bodies]


# ---- the rest of what a step wants done -------------------------------------------------------------


class SendStatus(msgspec.Struct, frozen=True):
    """Send a Status over *conn*; report makes the parts that the state knows. Of *groups* alone, empty: of all."""

    conn: int
    groups: tuple[str, ...] = ()


class Close(msgspec.Struct, frozen=True):
    """Say Bye with *reason* (if there is one), deliver what was sent before, close. Nothing is read from now on."""

    conn: int
    reason: str
    final: bool = False  # the daemon must not come back


@dataclass(frozen=True, slots=True)
class Former:
    """A member that may still run, as far as anybody has said: its name, and its daemon's incarnation."""

    name: str
    daemon: int


@dataclass(frozen=True, slots=True)
class Used:
    """The newest epoch of a group, the mids of its members, up to where all was committed, and what was void above."""

    epoch: int
    mids: frozenset[int]
    base: int
    voids: dict[int, str] = field(default_factory=dict)  # by seq: a class of wancoll.errors
    alone: int = 0  # seconds for which its members may go on without a master (C8); 0: they commit nothing there
    former: dict[int, Former] = field(default_factory=dict)  # by mid: the first 32 members, but who has stopped
    terms: int = 0  # hash of what all its members report alike; 0: not known


JUMP = 1 << 20  # epochs, ids and terms to skip where some may have been told that the store does not know (R9)
MID_BLOCK = 1024  # ids are reserved in the store in blocks, which begin one above its multiples


def jumped(term: int, epoch: int, mid: int) -> tuple[int, int, int]:
    """The same numbers, above all that can have been told by masters up to *term*; *epoch* and *mid* may be lost.

    The term jumps along and takes the others with it, so two losses never give the same numbers.
    """
    mid = max(term, mid) + JUMP
    return term + JUMP, max(term, epoch) + JUMP, mid + (1 - mid) % MID_BLOCK


@dataclass(slots=True)
class Persist:
    """What a later master must know. The numbers never fall: a store keeps the highest that it was given."""

    epoch: int  # highest of any group
    next_mid: int
    term: int = 0  # the master's own, which it raises where it meets a daemon that has seen a higher one
    groups: dict[str, Used] = field(default_factory=dict)  # that begin an epoch


class Record(msgspec.Struct, frozen=True):
    """One line for people: in the log, and where it is *kept* in the event log, too.

    *lost*: so many members of an epoch are out by it, and did not say that they leave; *cause* is of CAUSES.
    """

    group: str
    epoch: int
    kind: str
    text: str
    kept: bool = True
    cause: str = ""
    lost: int = 0


# Why members are evicted, for metrics: their training process died; their daemon did; nothing is heard of it; their
# training process stands still, is late with a call, or writes to what it has handed over; a link cannot be made; an
# operator wants it; their daemon sends nonsense, or contradicts what is known; it gave them up by itself; else.
CAUSES = ("client died", "daemon died", "silent", "trainer", "link", "operator", "nonsense", "daemon", "other")


class StepDown(msgspec.Struct, frozen=True):
    """Stop leading: another elected master leads, or has led, with *term*; the next term is above it."""

    reason: str
    term: int


@dataclass(slots=True)
class Ready:
    """What comes out of a step. With *step_down* there is nothing else."""

    answers: list[Send | SendStatus] = field(default_factory=list)
    log: list[Record] = field(default_factory=list)
    persist: Persist | None = None
    messages: list[Message] = field(default_factory=list)
    closes: list[Close] = field(default_factory=list)
    step_down: StepDown | None = None


class Held:
    """Steps whose messages and closes wait until what was to be persisted is durable: in order, *room* for frames."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: deque[tuple[int, Ready]] = deque()
        self.frames = 0

    def add(self, ready: Ready, asked: int) -> None:
        """Hold it until write number *asked*, its own or the last before it, is done."""
        if ready.messages or ready.closes:
            self._waiting.append((asked, ready))
            self.frames += _frames(ready)

    @property
    def too_many(self) -> bool:
        """Whether the bound is crossed."""
        return self.frames > self._room

    def release(self, written: int) -> Iterator[Ready]:
        """Take out all that waited for writes up to *written*."""
        while self._waiting and self._waiting[0][0] <= written:
            _, ready = self._waiting.popleft()
            self.frames -= _frames(ready)
            yield ready

    def clear(self) -> None:
        """Drop all."""
        self._waiting.clear()
        self.frames = 0


def _frames(ready: Ready) -> int:
    frames = len(ready.closes)
    for one in ready.messages:
        frames += 1 if isinstance(one, Send) else len(one.to if isinstance(one, Announce) else one.conns)
    return frames
