"""The typed face of native/calls.h: prepared calls, which the engine starts and commits by itself. See engine.md."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from wancoll.native import ffi, lib
from wancoll.native.engine import Engine, Hearers, Prepared

if TYPE_CHECKING:
    from wancoll import _native as c

SLOTS = lib.WC_CALLS
PREPARED = lib.WC_PREPARED  # calls that one client may have prepared
VOTERS = lib.WC_VOTERS  # other members whose votes the engine counts
RING_BYTES = SLOTS * ffi.sizeof("wc_call")


class RingCall(NamedTuple):
    """A call as the client has put it into a slot."""

    number: int  # the client's own
    prepared: int
    input_buffer: int
    result_buffer: int
    filled: int
    shown: int


class Started(NamedTuple):
    """A call that the engine has started, and how far it has come."""

    call: RingCall
    seq: int
    op: int  # id of its attempt
    began: float  # seconds of CLOCK_MONOTONIC
    seconds: float  # that it took, where it is committed
    done: bool  # it is finished here, and voted for
    committed: bool
    digest: int
    bytes_sent: int
    bytes_saved: int
    codec_error: float
    bytes_in_memory: int
    voters: tuple[int, ...]  # links over which votes for it have come
    heard_digest: int  # that these say


class Known(NamedTuple):
    """What the engine knows of a member whose calls it takes."""

    started: list[Started]  # in the order of their seqs, those that it has not told before
    committed: int
    called: int
    number: int  # of the client's next call
    op: int  # id of the next attempt
    claims: dict[int, int]  # by link: up to where its other end has said that all is committed
    oldest: float  # when the oldest that is open began, seconds of CLOCK_MONOTONIC; 0: none is


class Caller:
    """A client of the engine: its ring, in memory that it shares, and what the engine has prepared of its calls.

    Held at first: then all is the daemon's. *number* is told by Calls events; *arena*: address and bytes; *wake*: the
    engine's end of the socket, which stays the caller's.
    """

    def __init__(self, engine: Engine, number: int, ring: mmap.mmap, arena: tuple[int, int], wake: int) -> None:
        self._ring, self._kept = ffi.from_buffer(ring, require_writable=True), list[object]()
        address, nbytes = arena
        slots = ffi.cast("wc_call *", self._ring)
        caller = lib.wc_caller_new(engine._live, number, slots, ffi.cast("void *", address), nbytes, wake)
        if not caller:
            raise OSError(ffi.errno, os.strerror(ffi.errno))
        self._caller: c.Pointer | None = caller
        self._terms, self._oldest = ffi.new("wc_terms *"), ffi.new("uint64_t *")
        self._records: c.Array[c.CallRecord] | None = None  # made when they are needed
        self._slot = ffi.new("wc_call *")

    @property
    def _live(self) -> c.Pointer:
        if self._caller is None:
            raise RuntimeError("the caller is closed")
        return self._caller

    def prepare(
        self, number: int, prepared: Prepared, epoch: int, fingerprint: int, vote: bytes, digest_at: int,
        hearers: Hearers, sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        """Prepare a call under *number*; *sizes*: bytes of the client's input and result. See Engine.post for the rest.

        Held callers only.
        """
        op = ffi.new("wc_op *", prepared._op[0])
        op.epoch, op.fingerprint = epoch, fingerprint
        op.vote, op.vote_bytes, op.vote_digest = ffi.from_buffer(vote), len(vote), digest_at
        op.vote_links, op.vote_links_count = hearers._links, hearers._count
        self._kept.append((prepared, vote, hearers))  # the engine reads them at each start
        lib.wc_caller_prepare(self._live, number, op, *sizes)

    def clear(self) -> None:
        """Forget what is prepared. Held callers only."""
        lib.wc_caller_clear(self._live)
        self._kept.clear()

    def lend(self, epoch: int, committed: int, number: int, op: int, claims: dict[int, int]) -> None:
        """From now on the engine takes calls. *number* and *op* are of the next one; *claims* by link of each voter."""
        terms = self._terms
        terms.epoch, terms.committed, terms.number, terms.op, terms.voters = epoch, committed, number, op, len(claims)
        for index, (link, claim) in enumerate(claims.items()):
            terms.links[index], terms.claims[index] = link, claim
        lib.wc_caller_lend(self._live, terms)

    def hold(self) -> Known | None:
        """Take all over; None: it was held."""
        return self._known(lib.wc_caller_hold(self._live, self._room(), self._terms))

    def look(self) -> Known | None:
        """What is committed since the last look, while the engine goes on; None: it is held."""
        return self._known(lib.wc_caller_look(self._live, self._room(), self._terms, self._oldest))

    def next(self, number: int) -> RingCall | None:
        """Take call *number* out of the ring of a held client, if it is there."""
        return _call(self._slot) if lib.wc_caller_next(self._live, number, self._slot) else None

    def close(self) -> None:
        """The engine forgets the client, whose attempts must have ended. Safe to call again."""
        caller, self._caller = self._caller, None
        if caller is not None:
            lib.wc_caller_free(caller)

    def _room(self) -> c.Array[c.CallRecord]:
        if self._records is None:
            self._records = ffi.new("wc_call_record[]", lib.WC_RECORDS)
        return self._records

    def _known(self, count: int) -> Known | None:
        if count < 0:
            return None
        terms, oldest = self._terms, self._oldest[0]
        links = [terms.links[i] for i in range(terms.voters)]
        started = [_started(self._room()[i], links) for i in range(count)]
        claims = {link: terms.claims[i] for i, link in enumerate(links)}
        return Known(started, terms.committed, terms.called, terms.number, terms.op, claims, 1e-9 * oldest)


def _call(slot: c.Call) -> RingCall:
    return RingCall(slot.posted, slot.prepared, slot.input, slot.result, slot.filled, slot.shown)


def _started(record: c.CallRecord, links: Collection[int]) -> Started:
    call, state, began = record.call, record.state, 1e-9 * record.began
    committed = state == lib.WC_CALL_COMMITTED
    voters = tuple(link for i, link in enumerate(links) if record.voters >> i & 1)
    return Started(
        _call(call), call.seq, record.op, began, 1e-9 * record.ended - began if committed else 0.0,
        state != lib.WC_CALL_RUNS, committed, call.digest, call.bytes_sent, call.bytes_saved, call.codec_error,
        call.bytes_in_memory, voters, record.digest,
    )  # fmt: skip
