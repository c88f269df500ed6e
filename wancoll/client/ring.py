"""The client's end of the call ring: calls that the engine takes, starts and commits by itself.

A call that was committed once may go through the ring as long as its epoch lasts: the daemon says so with its result
(Result.prepared). All calls are numbered in one order, whichever way they go, and the daemon takes them in that order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from wancoll.collective import Descriptor
from wancoll.errors import ProtocolError
from wancoll.native import ffi, lib
from wancoll.wire import messages as m

if TYPE_CHECKING:
    from wancoll.client.work import Work

SLOTS = lib.WC_CALLS
_BYTES = 64  # of wake-ups that are read at once


class CallRing:
    """Slots in memory that the daemon's engine has mapped, and the socket over which both wake each other.

    *fds* as the daemon has sent them: the last two of four are taken out, and belong to the ring. One thread at a time
    may post, one may take answers.

    Raises:
        ProtocolError: the memory has another size.
    """

    def __init__(self, fds: list[int], who: str) -> None:
        self.socket = socket.socket(fileno=fds.pop())
        memory = fds.pop()
        try:
            size, least = os.fstat(memory).st_size, SLOTS * ffi.sizeof("wc_call")
            if size < least:
                raise ProtocolError("sent a call ring of another size", who=who, expected=str(least), got=str(size))
            self._map = mmap.mmap(memory, size)
        except BaseException:
            self.socket.close()
            raise
        finally:
            os.close(memory)
        slots = ffi.cast("wc_call *", ffi.from_buffer(self._map))
        self._slots = [slots + slot for slot in range(SLOTS)]
        self._out = ffi.new("wc_call *")
        self._wake, self._recv = self.socket.fileno(), self.socket.recv
        self.posted = ffi.new("wc_posted *")  # how many calls, and which; C says so, and no signal comes between
        self._ended = 0  # how many of these have an answer
        self._calls: dict[int, tuple[int, m.Result]] = {}  # by slot: number, and how it is answered but for its figures
        self._known: dict[Descriptor, m.Result] = {}  # of the newest epoch: the first result of each

    def learn(self, call: Descriptor, first: m.Result) -> None:
        """The daemon has committed *call*, and says whether it may go through the ring from now on."""
        if self._known and next(iter(self._known.values())).epoch != first.epoch:
            self._known.clear()
        if first.prepared:
            self._known[call] = first

    def way(self, call: Descriptor, epoch: int) -> m.Result | None:
        """Whether *call*, made in *epoch*, can go this way now: then its first result, else None."""
        known = self._known.get(call)
        free = self.posted.count - self._ended < SLOTS
        return known if free and known is not None and known.epoch == epoch else None

    def post(self, number: int, first: m.Result, regions: tuple[int, int, int, int]) -> None:
        """Post a call that can go this way; *posted* says whether it went out, whatever is raised.

        *regions* as in Post: input, result, filled, shown.
        """
        self._calls[self.posted.count % SLOTS] = (
            number,
            first,
        )  # before it goes: another thread may see the answer at once
        lib.wc_call_post(self._slots[0], self.posted, self._wake, number, first.prepared, *regions)

    def answers(self, handle: Callable[[m.Result], None], pending: Mapping[int, Work]) -> bool:
        """Call *handle* with the results of *pending* calls that are there; returns whether there was one.

        *handle* may see a result a second time if it was interrupted by an exception.
        """
        found = False
        while self._ended < self.posted.count:
            slot = self._ended % SLOTS
            number, first = self._calls[slot]
            work = pending.get(number)
            if work is not None:  # else the daemon has answered it over the other socket
                if not lib.wc_call_committed(self._slots[slot], number, self._out):
                    break
                out = self._out.answer
                handle(
                    replace(
                        first, id=number, seq=out.seq, digest=out.digest, bytes_sent=out.bytes_sent, attempts=1,
                        bytes_in_memory=out.bytes_in_memory, bytes_saved=out.bytes_saved, codec_error=out.codec_error,
                        by_engine=True, seconds=time.monotonic() - work.posted_at,
                    )
                )  # fmt: skip
                found = True
            self._ended += 1
        return found

    def drain(self) -> None:
        """Forget wake-ups: the answers are looked for after this."""
        with contextlib.suppress(OSError):  # there is none; or the daemon is gone, which the other socket says
            self._recv(_BYTES, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Close the socket. Nobody may be using it."""
        self.socket.close()
