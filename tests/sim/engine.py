"""The engine as a model: real schedules on tensors of a few Python integers, frames over links, done when all is.

Mirrors native/engine/lanes/match.c (which frame is taken, parked, drained or a mismatch), lost.c (what follows when a
lane's connection is lost), engine.c (cancel) and op.c (settle(): DONE unless given up, then CANCELLED; whether the vote
goes out is decided then, and it goes a little later). One part to a step, all on lane 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from tests.sim.clock import Process
from tests.sim.network import End
from wancoll.schedule.steps import Action, Buffer, Direction, Place, Schedule, Step
from wancoll.wire.messages import Vote
from wancoll.wire.note import ROUND_BITS, pack, unpack

ITEM = 8  # bytes of an element; its value may be as large as it likes


@dataclass(frozen=True, slots=True)
class Frame:
    """One step's bytes."""

    epoch: int
    seq: int
    number: int
    fingerprint: int
    start: int
    length: int
    values: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Work:
    """An op in the engine."""

    id: int
    epoch: int
    seq: int
    fingerprint: int
    schedule: Schedule
    links: dict[int, EngineLink]  # by rank
    input_buffer: list[int]
    result_buffer: list[int]
    scratch: list[int]
    done: list[bool]
    left: int
    digests: bool
    compared: bool  # with the other members' digests
    vote: bytes = b""  # sent when it is done, unless it was withheld
    hearers: tuple[int, ...] = ()  # links
    mismatched: bool = False
    sent: int = 0


@dataclass(eq=False, slots=True)
class EngineLink:
    """One end of a link: *sends* and *recvs* are steps in order, *socket* are frames that came and wait on lane 0."""

    id: int
    epoch: int
    ends: dict[int, End] = field(default_factory=dict)  # by lane
    sends: deque[tuple[Work, int]] = field(default_factory=deque)
    recvs: deque[tuple[Work, int]] = field(default_factory=deque)
    socket: deque[Frame] = field(default_factory=deque)
    next_seq: int = 0
    connections: dict[int, int] = field(default_factory=dict)  # by lane: the newest
    said: dict[int, int] = field(default_factory=dict)  # the newest that is lost as far as the other end was told
    owed: dict[int, int] = field(default_factory=dict)  # lost ones of which the other end has yet to say so
    log: list[Frame] = field(default_factory=list)  # what lane 0's connection, or the one that is owed, was given
    again: deque[Frame] = field(default_factory=deque)  # what is to be sent again, before anything new
    taken: int = 0  # frames of lane 0's connection
    took: tuple[int, int] = 0, 0  # its last lost connection of which frames were taken, and how many

    @property
    def notes(self) -> End | None:
        """The last lane, which comes with the others."""
        return self.ends.get(max(self.connections))


@dataclass(frozen=True, slots=True)
class Lost:
    """Over the lane for notes: this end has lost a connection, and has taken so many of its frames."""

    lane: int
    connection: int
    taken: int
    asks: bool  # it is owed the same word


class Engine:
    """See the module.

    Args:
        process: the daemon.
        slow: () -> seconds that an event takes to reach the daemon.
        on_done: (engine id, digest, bytes sent, whether its vote goes out)
        on_cancelled: (engine id)
        on_mismatch: (engine id, seq)
        on_down: (link id, why, lane, its connection, whether the link goes on without it)
        on_note: (link id, note)
        on_saying: (engine id, note), once it is decided
        copies: () -> how many of a note arrive
        on_finished: (engine id, digest, bytes sent, whether others have the same) -> whether the daemon need not hear;
            None: it has to, and the vote is not said
        on_told: (engine id), once it is decided what becomes of the vote of one of which the daemon need not hear
    """

    def __init__(
        self,
        process: Process,
        slow: Callable[[], float],
        on_done: Callable[[int, int, int, bool], None],
        on_cancelled: Callable[[int], None],
        on_mismatch: Callable[[int, int], None],
        on_down: Callable[[int, str, int, int, bool], None],
        on_note: Callable[[int, bytes], None] = lambda link, note: None,
        on_saying: Callable[[int, bytes], None] = lambda number, note: None,
        copies: Callable[[], int] = lambda: 1,
        on_finished: Callable[[int, int, int, bool], bool | None] = lambda number, digest, sent, compared: False,
        on_told: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._process, self._slow = process, slow
        self._on_done, self._on_cancelled, self._on_mismatch, self._on_down = (
            on_done,
            on_cancelled,
            on_mismatch,
            on_down,
        )
        self._on_note, self._on_saying, self._copies, self._on_finished = on_note, on_saying, copies, on_finished
        self._on_told = on_told
        self.works: dict[int, Work] = {}
        self.links: dict[int, EngineLink] = {}
        self._events: deque[tuple[Callable[[], None], bool]] = deque()  # to the daemon, in order; whether it is a note
        self.flip = 0  # ops to come whose result is not what it should be
        self.flipped: dict[int, tuple[int, int]] = {}  # those that came, by number: epoch, seq

    # ---- links ---------------------------------------------------------------------------------------

    def open_link(self, number: int, epoch: int) -> None:
        self.links[number] = EngineLink(number, epoch)

    def attach(self, number: int, lane: int, connection: int, end: End) -> None:
        link = self.links[number]
        assert connection > link.connections.get(lane, 0)
        self._lose(link, lane, "another connection takes its place")
        link.ends[lane], link.connections[lane] = end, connection
        if lane == 0:
            link.taken = 0
        end.on_message = lambda frame: self._arrived(link, frame)
        end.on_close = lambda reason: self._lose(link, lane, reason)
        if connection <= link.said.get(lane, 0):
            self._lose(link, lane, "the other end has lost it")
        if end is link.notes:
            for owed in link.owed.items():
                self._say_lost(link, *owed)
            for silent in [one for one in link.said.items() if one[0] not in link.ends]:
                self._say_lost(link, *silent)
        self._send(link)

    def _lose(self, link: EngineLink, lane: int, reason: str) -> None:
        end, connection = link.ends.get(lane), link.connections.get(lane, 0)
        if end is None:
            return
        end.on_message = end.on_close = lambda message: None
        end.close("it is lost at the other end")
        notes = end is link.notes
        del link.ends[lane]
        if not notes:
            if lane == 0 and link.taken:
                link.took = connection, link.taken
            if lane == 0 and link.log:
                link.owed.setdefault(lane, connection)
            self._say_lost(link, lane, connection)
            if lane == 0:
                link.socket.clear()
        self._on_down(link.id, reason, lane, connection, True)

    def _say_lost(self, link: EngineLink, lane: int, connection: int) -> None:
        link.said[lane] = max(connection, link.said.get(lane, 0))
        if link.notes is not None:
            taken = link.took[1] if lane == 0 and link.took[0] == connection else 0
            link.notes.send(Lost(lane, connection, taken, link.owed.get(lane) == connection))

    def _hear_lost(self, link: EngineLink, lost: Lost) -> None:
        here = lost.lane in link.ends and lost.connection == link.connections[lost.lane]
        if here:
            self._lose(link, lost.lane, "the other end has lost it")
        news = lost.connection > link.said.get(lost.lane, 0)
        self._hear_taken(link, lost)
        if news or (lost.asks and not here):
            self._say_lost(link, lost.lane, lost.connection)

    def _hear_taken(self, link: EngineLink, lost: Lost) -> None:
        if link.owed.get(lost.lane) == lost.connection:
            del link.owed[lost.lane]
            link.again.extendleft(reversed(link.log[lost.taken :]))
            link.log.clear()
            self._send(link)

    def close_link(self, number: int) -> None:
        link = self.links.pop(number)
        for end in link.ends.values():
            end.on_message = end.on_close = lambda message: None
            end.close("the link was closed")
        link.ends.clear()

    def set_epoch(self, number: int, epoch: int) -> None:
        link = self.links[number]
        link.epoch, link.next_seq = epoch, 0
        link.again = deque(frame for frame in link.again if frame.epoch >= epoch)
        self._receive(link)

    def send_note(self, number: int, note: bytes) -> None:
        """On the last lane; nothing that is on the lanes holds it up at the other end."""
        notes = self.links[number].notes
        if notes is not None:
            notes.send(note)

    # ---- ops -----------------------------------------------------------------------------------------

    def post(
        self,
        number: int,
        epoch: int,
        seq: int,
        fingerprint: int,
        schedule: Schedule,
        links: dict[int, int],
        input_buffer: list[int],
        result_buffer: list[int],
        digests: bool,
        compared: bool,
        note: bytes = b"",
        hearers: tuple[int, ...] = (),
    ) -> None:
        assert number not in self.works
        steps = schedule.steps
        ends = {rank: self.links[link] for rank, link in links.items()}
        scratch = [-1] * (schedule.scratch // ITEM)
        head = (number, epoch, seq, fingerprint, schedule, ends)
        work = Work(
            *head,
            input_buffer,
            result_buffer,
            scratch,
            [False] * len(steps),
            len(steps),
            digests,
            compared,
            note,
            hearers,
        )
        self.works[number] = work
        used = {}
        for index, step in enumerate(steps):
            if step.direction is not Direction.local:
                link = ends[step.peer]
                used[link.id] = link
                (link.sends if step.direction is Direction.send else link.recvs).append((work, index))
                link.next_seq = seq + 1
        self._local(work)
        for link in used.values():
            self._send(link)
            self._receive(link)
        if not work.left and number in self.works:
            self._settle(work)

    def cancel(self, number: int) -> None:
        work = self.works.pop(number, None)
        if work is not None:
            for link in self.links.values():
                link.sends = deque(item for item in link.sends if item[0] is not work)
                link.recvs = deque(item for item in link.recvs if item[0] is not work)
        self._event(lambda: self._on_cancelled(number))
        if work is not None:
            for link in work.links.values():
                self._send(link)
                self._receive(link)

    def withhold(self, number: int) -> None:
        """Its vote is not sent any more."""
        if number in self.works:
            self.works[number].vote = b""

    def take_events(self) -> None:
        """All but notes, now."""
        waiting, self._events = self._events, deque(item for item in self._events if item[1])
        for call, note in waiting:
            if not note:
                call()

    def _event(self, call: Callable[[], None], *, note: bool = False) -> None:
        self._events.append((call, note))
        self._process.after(self._slow(), self._next_event)

    def _next_event(self) -> None:
        if self._events:  # else it was taken before
            self._events.popleft()[0]()

    def _settle(self, work: Work) -> None:
        del self.works[work.id]
        if self.flip and work.result_buffer and work.compared and work.links:
            self.flip -= 1
            self.flipped[work.id] = work.epoch >> ROUND_BITS, work.seq
            work.result_buffer[0] ^= work.id + crc32(self._process.host.encode())  # no two members' alike
        digest = crc32(repr(work.result_buffer).encode()) if work.digests else 0
        taken = self._on_finished(work.id, digest, work.sent, work.compared)
        voted = bool(work.vote) and taken is not None
        if not taken:
            self._event(lambda: self._on_done(work.id, digest, work.sent, voted))
        if voted:
            said = unpack(work.vote, "", 0)
            assert isinstance(said, Vote)
            note = pack(msgspec.structs.replace(said, digest=digest if work.compared else 0))
            self._on_saying(work.id, note)
            self._process.after(self._slow(), lambda: self._say(work.hearers, note))
        if taken:
            self._on_told(work.id)

    def _say(self, hearers: tuple[int, ...], note: bytes) -> None:
        for number in hearers:
            if number in self.links and self.links[number].ends:
                for _ in range(self._copies()):
                    self.send_note(number, note)

    # ---- steps ---------------------------------------------------------------------------------------

    def _ended(self, work: Work, index: int) -> None:
        work.done[index] = True
        work.left -= 1

    def _local(self, work: Work) -> None:
        """Whatever can happen here, in the order of the steps."""
        done = work.done
        for index, step in enumerate(work.schedule.steps):
            if step.direction is Direction.local and not done[index] and all(done[before] for before in step.after):
                left = _read(work, step.left, step)
                if step.action is not Action.copy:
                    left = [a + b for a, b in zip(left, _read(work, step.right, step), strict=True)]
                _write(work, step, left)
                self._ended(work, index)

    def _progress(self, work: Work) -> None:
        self._local(work)
        for link in work.links.values():
            self._send(link)
        if not work.left and work.id in self.works:
            self._settle(work)

    def _give(self, link: EngineLink, frame: Frame) -> None:
        link.log.append(frame)
        link.ends[0].send(frame)

    def _send(self, link: EngineLink) -> None:
        if 0 in link.owed:
            return
        while link.again and 0 in link.ends:
            self._give(link, link.again.popleft())
        while link.sends and 0 in link.ends:
            work, index = link.sends[0]
            step = work.schedule.steps[index]
            if not all(work.done[before] for before in step.after):
                return
            link.sends.popleft()
            values = tuple(_read(work, step.left, step))
            frame = Frame(work.epoch, work.seq, step.number, work.fingerprint, step.start, step.length, values)
            self._give(link, frame)
            work.sent += step.length
            self._ended(work, index)
            if not work.left:
                self._settle(work)

    def _arrived(self, link: EngineLink, frame: Frame | Lost | bytes) -> None:
        if isinstance(frame, Lost):
            self._hear_lost(link, frame)
            return
        if isinstance(frame, bytes):
            self._event(lambda: self._on_note(link.id, frame) if link.id in self.links else None, note=True)
            return
        link.socket.append(frame)
        self._receive(link)

    def _take(self, link: EngineLink) -> None:
        link.socket.popleft()
        link.taken += 1

    def _receive(self, link: EngineLink) -> None:
        while link.socket and 0 in link.ends:
            frame = link.socket[0]
            if frame.epoch > link.epoch:
                return
            if frame.epoch < link.epoch:
                self._take(link)
                continue
            if not link.recvs:
                if frame.seq >= link.next_seq:
                    return
                self._take(link)
                continue
            work, index = link.recvs[0]
            if frame.seq != work.seq:
                if frame.seq > work.seq:
                    return
                self._take(link)
                continue
            if frame.fingerprint != work.fingerprint:
                if not work.mismatched:
                    work.mismatched = True
                    self._event(lambda work=work: self._on_mismatch(work.id, work.seq))
                return
            step = work.schedule.steps[index]
            if (frame.number, frame.start, frame.length) != (step.number, step.start, step.length):
                why = f"protocol: frame {frame.number} of seq {frame.seq}, expected {step.number}"
                self._on_down(link.id, why, 0, link.connections[0], False)
                return
            self._take(link)
            link.recvs.popleft()
            values = list(frame.values)
            if step.action is not Action.copy:
                values = [a + b for a, b in zip(_read(work, step.left, step), values, strict=True)]
            _write(work, step, values)
            self._ended(work, index)
            self._progress(work)


def _memory(work: Work, place: Place) -> list[int]:
    return (work.input_buffer, work.result_buffer, work.scratch)[place.buffer]


def _read(work: Work, place: Place | None, step: Step) -> list[int]:
    assert place is not None
    begin, size = place.offset // ITEM, step.length // ITEM
    found = _memory(work, place)[begin : begin + size]
    assert len(found) == size, f"{step} reads beyond the end"
    return found


def _write(work: Work, step: Step, values: list[Any]) -> None:
    place = step.to
    assert place is not None
    assert place.buffer is not Buffer.input, "the caller's bytes are not written"
    begin = place.offset // ITEM
    memory = _memory(work, place)
    assert begin + len(values) <= len(memory), f"{step} writes beyond the end"
    memory[begin : begin + len(values)] = values
