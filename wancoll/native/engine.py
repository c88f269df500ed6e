"""The typed face of native/: ops in, events out. It knows no sockets' setup, no trio and no membership."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from msgspec import Struct

from wancoll.collective import Codec, DType, ReduceOp
from wancoll.errors import ConfigError
from wancoll.limits import KIB
from wancoll.native import ffi, lib
from wancoll.native.seal import Sealed
from wancoll.schedule.steps import Buffer, Place, Schedule, Step

if TYPE_CHECKING:
    from wancoll import _native as c

SEGMENT = 512 * KIB
STRIPE = 256 * KIB
NOTE_BYTES = 128
PIPE_HEAD = lib.WC_PIPE_HEAD  # bytes of a lane's shared memory that taken_from_pipe reads
_EVENTS_AT_ONCE = 64


class Done(Struct, frozen=True):
    """Op *op* has finished here."""

    op: int
    digest: int  # of its result, 0 where none was asked for
    bytes_sent: int  # on the wire, headers included
    bytes_saved: int = 0  # what the codec kept off the wire
    codec_error: float = 0.0  # relative L2 error of the measured encodes, 0.0 without any
    voted: bool = False  # the engine has sent its vote, or is about to
    # while traced: when the first of what others sent came, nanoseconds of CLOCK_MONOTONIC; 0: nothing did
    first: int = 0
    last: int = 0  # the same of the last
    bytes_in_memory: int = 0  # of bytes_sent, those that went through memory


class Cancelled(Struct, frozen=True):
    """The engine no longer touches the memory of *op*; *first* and *last* as in Done."""

    op: int
    first: int = 0
    last: int = 0


class LaneDown(Struct, frozen=True):
    """A lane's connection is closed. error: errno, 0 if the other end closed it.

    *goes_on*: what was on it goes over other lanes, and over the next connection, when it is attached; else the link is
    of no use any more: close it.
    """

    link: int
    lane: int
    error: int
    text: str
    connection: int = 1  # its number
    goes_on: bool = False


class Mismatch(Struct, frozen=True):
    """The other end of *link* has another fingerprint for *seq*, the number of my op *op*."""

    link: int
    op: int
    seq: int
    fingerprint: int


class Calls(Struct, frozen=True):
    """Caller *caller* wants a look: calls wait that the engine does not take, or something ended its part."""

    caller: int


Event = Done | Cancelled | LaneDown | Mismatch | Calls


class Note(Struct, frozen=True):
    """The other end of *link* sent this by send_note."""

    link: int
    note: bytes


class LaneStatistics(NamedTuple):
    """A snapshot. Bytes are those on the wire, headers included; dropped frames: of older epochs or cancelled ops."""

    bytes_sent: int
    bytes_received: int
    frames_sent: int
    frames_received: int
    frames_dropped: int
    checksum_failures: int
    parked: bool
    attached: bool


class Hearers:
    """Links over which notes go that the engine sends by itself (see post)."""

    __slots__ = ("_count", "_links")

    def __init__(self, links: Collection[int]) -> None:
        self._links, self._count = ffi.new("uint64_t[]", list(links)), len(links)


class Prepared:
    """An op but for its numbers and addresses, ready to be posted any number of times (see prepare)."""

    __slots__ = ("_op", "_steps")

    def __init__(self, op: c.Op, steps: c.Pointer) -> None:
        self._op, self._steps = op, steps  # the op points to the steps


def prepare(
    schedule: Schedule,
    links: Mapping[int, int],
    *,
    dtype: DType,
    op: ReduceOp,
    input_bytes: int,
    result_bytes: int,
    world_size: int,
    lanes: int,
    lane_groups: int = 1,
    stripe: int = 0,
    turns: bool = True,
    digest: bool = True,
    codec: Codec = Codec.none,
    stochastic: bool = False,
) -> Prepared:
    """Translate a schedule for the engine, with *links* from rank to link id: wc_op in engine.h says what the rest is.

    Raises ConfigError: a rank without a link.
    """
    steps = ffi.new("wc_step[]", max(len(schedule.steps), 1))
    for index, step in enumerate(schedule.steps):
        _translate(step, steps[index], links)
    prepared = ffi.new("wc_op *")
    prepared.bytes = (input_bytes, result_bytes, schedule.scratch)
    prepared.dtype, prepared.op, prepared.codec, prepared.stochastic = int(dtype), int(op), int(codec), int(stochastic)
    prepared.coded = schedule.ends.input << int(Buffer.input) | schedule.ends.result << int(Buffer.result)
    prepared.coded |= schedule.adopts << int(Buffer.scratch)
    prepared.kept = int(schedule.ends.kept)
    prepared.divisor, prepared.lanes, prepared.lane_groups = world_size, lanes, lane_groups
    prepared.stripe, prepared.no_turns = stripe, int(not turns)
    prepared.steps_count, prepared.digest = len(schedule.steps), int(digest)
    prepared.steps = steps
    return Prepared(prepared, steps)


def _translate(step: Step, out: c.Step, links: Mapping[int, int]) -> None:
    if step.peer >= 0:
        if step.peer not in links:
            raise ConfigError("a schedule needs a link that is not there", who=f"rank {step.peer}")
        out.link = links[step.peer]
    out.start, out.length, out.number = step.start, step.length, step.number
    out.direction, out.action = int(step.direction), int(step.action)
    out.result, out.measured = int(step.result), int(step.measured)
    for place, field in ((step.to, out.to), (step.left, out.left), (step.right, out.right)):
        if place is not None:
            _set_place(place, field)
    out.after = (*step.after, -1, -1)[:2]


def _set_place(place: Place, out: c.Place) -> None:
    out.buffer, out.offset, out.encoded = int(place.buffer), place.offset, int(place.encoded)


def taken_from_pipe(memory: mmap.mmap, *, first: bool) -> int:
    """How many bytes the other end of a lane says that it has read, by the first PIPE_HEAD bytes of its memory."""
    return lib.wc_pipe_taken(ffi.from_buffer(memory), int(first))


class Engine:
    """Worker threads that move and reduce bytes over lanes. Calls return at once; events tell what came of them.

    Calls take effect in their order. Epochs: set_epoch for every link of the group, then cancel the old ops, then post
    again: the same memory may be used at once. wc_config in engine.h says what the arguments are; segment and stripe
    are the same on all members.

    Raises ConfigError: an argument out of bounds, or WANCOLL_CPU names what this machine cannot run.
    """

    prepare = staticmethod(prepare)

    def __init__(self, *, workers: int = 1, segment: int = SEGMENT, stripe: int = STRIPE, uplink: int = 0) -> None:
        self._engine: c.Pointer | None = None
        config = ffi.new("wc_config *")
        try:
            config.workers, config.segment, config.stripe, config.uplink = workers, segment, stripe, uplink
            self._engine = lib.wc_engine_new(config) or None
        except OverflowError:
            ffi.errno = errno.EINVAL
        if self._engine is None:
            raise _refusal(
                "the engine does not start",
                f"workers={workers}, segment={segment}, stripe={stripe}",
                "1 to 64 workers, a segment that is a multiple of 65536 up to 16 MiB, a stripe of at least 1",
            )
        self._events = ffi.new("wc_event[]", _EVENTS_AT_ONCE)
        self._notes = ffi.new("wc_note[]", _EVENTS_AT_ONCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers and close every lane. Nothing touches any op's memory afterwards."""
        engine, self._engine = self._engine, None
        if engine is not None:
            lib.wc_engine_free(engine)

    @property
    def _live(self) -> c.Pointer:
        if self._engine is None:
            raise RuntimeError("the engine is closed")
        return self._engine

    @property
    def fd(self) -> int:
        """Readable while events wait. It belongs to the engine."""
        return lib.wc_engine_fd(self._live)

    def open_link(self, link: int, lanes: int, epoch: int, lane_groups: int = 1) -> None:
        """A link with *lanes* lanes, none attached yet, at *epoch*; see wc_link_open for lane_groups."""
        _check(
            lib.wc_link_open(self._live, link, lanes, lane_groups, epoch),
            f"link {link} cannot be opened with {lanes} lanes",
        )

    def attach_lane(self, link: int, lane: int, fd: int, checksums: bool = True, *, connection: int = 1) -> None:
        """Hand over the connected socket *fd*; the engine owns it from here on, also when this raises.

        See wc_lane_attach for checksums, the number of a *connection*, and the lane for notes.
        """
        attached = lib.wc_lane_attach(self._live, link, lane, connection, fd, int(checksums))
        _check(attached, f"lane {lane} of link {link} cannot be attached")

    def attach_sealed(self, link: int, lane: int, sealed: Sealed, *, connection: int = 1) -> None:
        """The same with a sealed connection, whose handshake is over, and its socket. No checksums: TLS has its own."""
        attached = lib.wc_lane_attach_tls(self._live, link, lane, connection, sealed.hand_over(), 0)
        _check(attached, f"lane {lane} of link {link} cannot be attached")

    def attach_pipe(
        self, link: int, lane: int, fd: int, memory: int, *, first: bool, checksums: bool = True, connection: int = 1
    ) -> None:
        """The same with a unix socket and *memory*, a memfd that stays the caller's: see wc_lane_attach_pipe."""
        attached = lib.wc_lane_attach_pipe(self._live, link, lane, connection, fd, memory, int(first), int(checksums))
        _check(attached, f"lane {lane} of link {link} cannot be attached through memory")

    def set_epoch(self, link: int, epoch: int) -> None:
        """From now on *link* is at *epoch*; parts and frames of older ones are dropped."""
        _check(lib.wc_link_epoch(self._live, link, epoch), f"link {link} cannot be set to epoch {epoch}")

    def pace_link(self, link: int, rate: int) -> None:
        """From now on each lane of *link* sends at most *rate* bytes per second; 0: no limit."""
        _check(lib.wc_link_pace(self._live, link, rate), f"link {link} cannot be paced")

    def close_link(self, link: int) -> None:
        """Close the link's lanes, without LaneDown events. Its parts wait until their ops are cancelled."""
        _check(lib.wc_link_close(self._live, link), f"link {link} cannot be closed")

    def post(
        self,
        prepared: Prepared,
        op_id: int,
        epoch: int,
        seq: int,
        fingerprint: int,
        input_address: int,
        result_address: int,
        noise: tuple[int, int, int] = (0, 0, 0),
        *,
        filled_address: int = 0,
        shown_address: int = 0,
        attempt: int = 0,
        vote: bytes = b"",
        vote_digest: int = 0,
        hearers: Hearers | None = None,
    ) -> None:
        """Start an op. The memory at all addresses must stay mapped until Done or Cancelled.

        What differs from call to call: wc_op in engine.h says what it is, and when a bell has to ring (see add_bell).
        An address of 0 is NULL there. The engine sends *vote* to the *hearers* by itself when the op has finished,
        unless withhold_vote or cancel came first: Done.voted says so. A link that takes no notes breaks.
        """
        op = prepared._op
        op.id = op_id
        op.epoch = epoch
        op.seq = seq
        op.fingerprint = fingerprint
        op.noise = noise
        op.input = ffi.cast("void *", input_address)
        op.result = ffi.cast("void *", result_address)
        op.filled = ffi.cast("uint8_t *", filled_address)
        op.shown = ffi.cast("uint32_t *", shown_address)
        op.attempt = attempt
        op.vote_bytes = 0
        if hearers is not None:
            op.vote, op.vote_bytes, op.vote_digest = ffi.from_buffer(vote), len(vote), vote_digest
            op.vote_links, op.vote_links_count = hearers._links, hearers._count
        if lib.wc_post(self._live, op) < 0:
            raise _refusal(f"op {op_id} cannot be posted", f"epoch {epoch}, seq {seq}", _POST_RULES)

    def cancel(self, op_id: int) -> None:
        """Give op *op_id* up; answered by Cancelled, with a Done before it if the op had just finished."""
        _check(lib.wc_cancel(self._live, op_id), f"op {op_id} cannot be cancelled")

    def release(self, op_id: int) -> bool:
        """Keep op *op_id* no more, which has finished. Returns whether its memory may be read until fence() returns."""
        return bool(lib.wc_release(self._live, op_id))

    def fence(self) -> None:
        """Wait, for less than a millisecond, until the workers are through with all that was said before."""
        _check(lib.wc_fence(self._live), "the workers cannot be asked")

    def withhold_vote(self, op_id: int) -> None:
        """From now on op *op_id* sends no vote by itself. Where it was too late the Done that says so waits already."""
        lib.wc_vote_withhold(self._live, op_id)

    def lease(self, until: float) -> None:
        """Until then the engine may commit by itself: seconds since the machine was started, sleep included."""
        lib.wc_lease(self._live, int(max(0.0, min(until, 1e9)) * 1e9))

    def lacks_input(self, op_id: int) -> bool:
        """Whether steps of op *op_id* wait for blocks of an input that is being filled. False for unknown ones."""
        return bool(lib.wc_op_lacks_input(self._live, op_id))

    def add_bell(self, fd: int) -> None:
        """From now on a write to the eventfd *fd* makes the workers look at inputs that are filled: see wc_bell_add."""
        _check(lib.wc_bell_add(self._live, fd), f"bell {fd} cannot be added")

    def remove_bell(self, fd: int) -> None:
        """Writes to it say nothing any more."""
        lib.wc_bell_remove(self._live, fd)

    def tcp_info(self, link: int, lane: int) -> bytes:
        """The newest snapshot of a lane's struct tcp_info, taken while it sends; empty if there is none."""
        room = ffi.new("uint8_t[256]")
        size = lib.wc_lane_tcp_info(self._live, link, lane, room, 256)
        return bytes(ffi.buffer(room, max(size, 0)))

    def events(self) -> list[Event]:
        """Take all events that wait."""
        found: list[Event] = []
        taken = _EVENTS_AT_ONCE
        while taken == _EVENTS_AT_ONCE:
            taken = lib.wc_engine_events(self._live, self._events, _EVENTS_AT_ONCE)
            found += [_event(self._events[i]) for i in range(taken)]  # a generator takes a call for each
        return found

    def trace(self, on: bool) -> None:
        """Whether it notes from now on when bytes come (Done.first)."""
        lib.wc_trace(self._live, on)

    def send_note(self, link: int, note: bytes) -> bool:
        """Send 1 to NOTE_BYTES bytes over the link's note lane, at once and without waiting.

        Notes arrive in order, and are lost only with the note lane's connection, of which LaneDown tells: so are those
        that find none. Returns False if the other end has not taken notes for long.
        """
        if lib.wc_note_send(self._live, link, note, len(note)) == 0 or ffi.errno == errno.ENOTCONN:
            return True
        if ffi.errno == errno.EINVAL:
            raise _refusal("a note cannot be sent", f"{len(note)} bytes for link {link}", _NOTE_RULES)
        return False

    @property
    def notes_fd(self) -> int:
        """Readable while notes wait. It belongs to the engine."""
        return lib.wc_notes_fd(self._live)

    def notes(self) -> list[Note]:
        """Take some of the notes that wait, those of each link in order. For what is left notes_fd stays readable."""
        taken = lib.wc_notes_take(self._live, self._notes, _EVENTS_AT_ONCE)
        notes = self._notes
        return [Note(notes[i].link, bytes(ffi.buffer(notes[i].bytes, notes[i].length))) for i in range(taken)]

    def statistics(self, link: int, lane: int) -> LaneStatistics | None:
        """A snapshot of one lane; None if there is no such lane."""
        s = ffi.new("wc_lane_stats *")
        if lib.wc_lane_statistics(self._live, link, lane, s) < 0:
            return None
        return LaneStatistics(
            s.bytes_sent,
            s.bytes_received,
            s.frames_sent,
            s.frames_received,
            s.frames_dropped,
            s.checksum_failures,
            bool(s.parked),
            bool(s.attached),
        )


_NOTE_RULES = f"an open link, and 1 to {NOTE_BYTES} bytes"
_POST_RULES = (
    "a new op id, a seq above those before, links that are open, at this epoch and with this number of lanes, and "
    "places within the buffers, and a note of 1 to 128 bytes"
)


def _event(e: c.Event) -> Event:
    kind = e.type
    if kind == lib.WC_EV_DONE:
        error = math.sqrt(e.error_squares / e.norm_squares) if e.norm_squares else 0.0
        return Done(e.op, e.value, e.extra, e.saved, error, bool(e.voted), e.first, e.last, e.in_memory)
    if kind == lib.WC_EV_CANCELLED:
        return Cancelled(e.op, e.first, e.last)
    if kind == lib.WC_EV_LANE_DOWN:
        return LaneDown(e.link, e.lane, e.error, ffi.string(e.text).decode(errors="replace"), e.value, e.extra > 0)
    if kind == lib.WC_EV_CALLS:
        return Calls(e.op)
    return Mismatch(e.link, e.op, e.value, e.extra)


def _refusal(what: str, got: str, expected: str) -> Exception:
    code = ffi.errno
    if code == errno.EINVAL:
        return ConfigError(what, expected=expected, got=got)
    if code == errno.ENOSYS:
        return ConfigError(
            "no kernels for this CPU under that name",
            who="WANCOLL_CPU",
            expected="generic, avx2, avx512 or neon, as far as this CPU has them",
            got=os.environ.get("WANCOLL_CPU", ""),
        )
    if code == errno.ENOMEM:
        return MemoryError(what)
    return OSError(code, what)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise _refusal(what, "arguments the engine refuses", "see the method's documentation")


def kernel_name() -> str:
    """Which kernels run: "generic", "avx2", "avx512" or "neon".

    Raises:
        ConfigError: WANCOLL_CPU names what this machine cannot run.
    """
    table = lib.wc_kernels_default()
    if table == ffi.NULL:
        ffi.errno = errno.ENOSYS
        raise _refusal("", "", "")
    return ffi.string(table.name).decode()


def hash_at(address: int, nbytes: int, codec: Codec = Codec.none, count: int = 0) -> int:
    """XXH3-64 of memory, which must stay mapped. Other Python threads run meanwhile.

    With a *codec*: of *count* elements in it; -1 where a block of them is none.
    """
    at = ffi.cast("void *", address)
    return lib.wc_kernels_default().hash64(at, nbytes) if lib.wc_codec_valid(codec, at, count) else -1
