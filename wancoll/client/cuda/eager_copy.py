"""A result on its way to a device before it is committed: to memory of ours there, since the tensor must not change.

    a block is final     the engine writes the attempt's number to the block's word (Post.shown)
    somebody waits       looks at the words; STEPs that are final are copied: result -> our memory
    after the commit     what is of the attempt that committed: our memory -> the tensor; all else: result -> the tensor
    an end without it    our memory goes back, behind the copies

All of it on a stream that is lent, on which nothing waits for the caller before the commit. Memory comes from a pool of
our own, in the order of that stream: no call of the driver waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

from wancoll.client.cuda.driver import TO_DEVICE, WITHIN, Copy, Device
from wancoll.limits import BLOCK, DEFAULT, MIB

STEP = 1 * MIB  # is copied as one, before the commit
LEAST = 4 * MIB  # results from here on are worth it

Queued = Copy | Callable[[Any], None]  # or what queues something else on the stream that it is given
Numbers = np.ndarray[Any, np.dtype[np.uint32]]


class EagerCopy:
    """One tensor's result, on its way to a device, from *start* in the result. Not for several threads.

    Its copies are on *stream* (None: nothing was copied), and go to *memory*. *over*: nothing is copied early any more.
    A word is there for each *block* bytes.
    """

    def __init__(self, device: Device, start: int, nbytes: int, block: int = BLOCK) -> None:
        self.device, self.start, self.nbytes = device, start, nbytes
        self.stream: Any = None
        self.memory = 0
        self.over = False
        at = start + STEP * np.arange(-(-nbytes // STEP))
        self._first = at // block
        self._stop = -(-np.minimum(at + STEP, start + nbytes) // block)
        self._copied = np.zeros(len(at), np.uint32)  # of each step the attempt; 0: it was not copied

    def final(self, words: Numbers) -> tuple[int, list[int]]:
        """The newest attempt, and its steps that are final and were not copied, by the words of all of the result."""
        newest = int(words.max())
        there = np.concatenate(([0], np.cumsum(words == newest)))
        whole = there[self._stop] - there[self._first] == self._stop - self._first
        return newest, np.flatnonzero(whole & (self._copied != newest)).tolist() if newest else []

    def begin(self, words: Numbers, result_buffer: int) -> bool:
        """Queue copies of what is final, and has room, from *result_buffer*; return whether there was anything.

        Raises:
            DeviceError: the driver fails.
        """
        attempt, found = self.final(words)
        if not found:
            return False
        most = self.device.room(DEFAULT.early_bytes) // STEP * STEP
        if self.stream is None and not self._take(min(self.nbytes, most)):
            return False
        for step in found:
            if step < len(self._copied):
                at = STEP * step
                size = min(STEP, self.nbytes - at)
                self.device.queue((TO_DEVICE, self.memory + at, result_buffer + self.start + at, size), self.stream)
                self._copied[step] = attempt
        return True

    def stop(self) -> Any:
        """Nothing more is copied early; the stream on which something was, once."""
        self.over = True
        stream, self.stream = self.stream, None
        return stream

    def copies(self, to: int, result_buffer: int, attempt: int, nbytes: int) -> list[Queued]:
        """What brings the *nbytes* that *attempt* has made, which lie at *result_buffer*, to the address *to*."""
        steps = -(-nbytes // STEP)
        early = [*(self._copied == attempt).tolist(), *([False] * steps)]
        found: list[Queued] = []
        for there, run in groupby(range(steps), key=early.__getitem__):
            numbers = list(run)
            start, stop = STEP * numbers[0], min(STEP * (numbers[-1] + 1), nbytes)
            source = self.memory if there else result_buffer
            found.append((WITHIN if there else TO_DEVICE, to + start, source + start, stop - start))
        return found

    def _take(self, nbytes: int) -> bool:
        """Take memory, for all of it or for its beginning; whether there was some."""
        if not nbytes:
            return False
        stream = self.device.lend()
        self.memory = self.device.take_memory(nbytes, stream, early=True)
        if not self.memory:
            self.over = True
            self.device.give_back(stream)
            return False
        self.stream = stream
        count = -(-nbytes // STEP)
        self._first, self._stop, self._copied = self._first[:count], self._stop[:count], self._copied[:count]
        return True
