"""The typed face of native/calls.h: prepared calls, which the engine starts and commits by itself. See engine.md."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from wancoll.commit.begun import Begun, RingCall
from wancoll.native import ffi, lib
from wancoll.native.engine import Engine, Hearers, Prepared

if TYPE_CHECKING:
    from wancoll import _native as c

SLOTS = lib.WC_CALLS
PREPARED = lib.WC_PREPARED  # calls that one client may have prepared
VOTERS = lib.WC_VOTERS  # other members whose votes the engine counts
RING_BYTES = SLOTS * ffi.sizeof("wc_call")


class Known(NamedTuple):
    """What the engine knows of a member whose calls it takes."""

    begun: list[Begun]  # in the order of their seqs, those that it has not told before
    committed: int
    number: int  # of the client's next call
    engine_id: int  # of the next attempt
    claims: dict[int, int]  # by mid: up to where that member has said that all is committed
    oldest: float  # when the oldest that is open began, seconds on the shell's clock; 0: none is


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
        self._voters = list[int]()  # mids, in the order of terms.links

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

    def lend(
        self, epoch: int, committed: int, number: int, engine_id: int, voters: Mapping[int, tuple[int, int]]
    ) -> None:
        """From now on the engine takes calls. *number* and *engine_id* are of the next one.

        *voters*: by mid of each other member, the link to it, and up to where it has said that all is committed.
        """
        terms, self._voters = self._terms, list(voters)
        terms.epoch, terms.committed, terms.number, terms.op = epoch, committed, number, engine_id
        terms.voters = len(voters)
        for index, (link, claim) in enumerate(voters.values()):
            terms.links[index], terms.claims[index] = link, claim
        lib.wc_caller_lend(self._live, terms)

    def hold(self, ahead: float = 0.0) -> Known | None:
        """Take all over; None: it was held. *ahead*: seconds that the shell's clock is ahead of CLOCK_MONOTONIC."""
        return self._known(lib.wc_caller_hold(self._live, self._room(), self._terms), ahead)

    def look(self, ahead: float) -> Known | None:
        """What is committed since the last look, while the engine goes on; None: it is held. *ahead*: see hold()."""
        return self._known(lib.wc_caller_look(self._live, self._room(), self._terms, self._oldest), ahead)

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

    def _known(self, count: int, ahead: float) -> Known | None:
        if count < 0:
            return None
        terms, oldest = self._terms, self._oldest[0]
        begun = [self._begun(self._room()[i], ahead) for i in range(count)]
        claims = {mid: terms.claims[i] for i, mid in enumerate(self._voters)}
        return Known(begun, terms.committed, terms.number, terms.op, claims, 1e-9 * oldest + ahead if oldest else 0.0)

    def _begun(self, record: c.CallRecord, ahead: float) -> Begun:
        call, answer, committed = record.call, record.call.answer, record.state == lib.WC_CALL_COMMITTED
        return Begun(
            _call(call), answer.seq, record.op, 1e-9 * record.began + ahead,
            1e-9 * (record.ended - record.began) if committed else 0.0,
            record.state != lib.WC_CALL_RUNS, committed,
            answer.digest, answer.bytes_sent, answer.bytes_saved, answer.codec_error, answer.bytes_in_memory,
            frozenset(mid for i, mid in enumerate(self._voters) if record.voters >> i & 1), record.digest,
        )  # fmt: skip


def _call(slot: c.Call) -> RingCall:
    return RingCall(slot.posted, slot.prepared, slot.input, slot.result, slot.filled, slot.shown)
