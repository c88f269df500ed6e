"""Pinned blocks of the arena: registered with the driver once, then used again.

They are never exchanged, and never given back to the system while they are registered: a device goes on to use the
pages that lay there at first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wancoll.client.cuda.driver import Mark
from wancoll.client.memory.arena import Arena, Block, Lease, Returning, size_class
from wancoll.errors import ArenaFull, DeviceError


class Entry:
    """A pinned block."""

    __slots__ = ("lease", "marks", "returning", "unmarked")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease  # held as long as the block is registered
        self.marks: list[Mark] = []  # the block is free when the device has come to all of them
        self.unmarked = 0  # copies that may be under way without a mark: an error came in between
        self.returning: Returning | None = None  # tells the pool that nobody holds the block any more

    def free(self) -> bool:
        """Whether no copy of a device uses the block."""
        try:
            self.marks = [mark for mark in self.marks if not mark.ready()]
        except DeviceError:
            return False
        return not self.marks and not self.unmarked


class Pinned:
    """Holds a pinned block; the block goes back when the last reference to this is gone."""

    __slots__ = ("__weakref__", "entry")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    @property
    def block(self) -> Block:
        """Where it lies."""
        return self.entry.lease.block


class Pool:
    """The pinned blocks of one *arena*, *most* bytes of them. Not for several threads at the same time.

    *register* pins (address, bytes); *unregister* undoes it for an address.
    """

    def __init__(
        self, arena: Arena, most: int, register: Callable[[int, int], None], unregister: Callable[[int], None]
    ) -> None:
        self._arena, self._most, self._register, self._unregister = arena, most, register, unregister
        self._idle: list[Entry] = []  # the last one was used last
        self._held: set[Entry] = set()
        self._returned: deque[Returning] = deque()
        self.nbytes = 0  # pinned

    def take(self, nbytes: int) -> Pinned | None:
        """A block for *nbytes* bytes, of undefined contents; None: no more may be pinned.

        Raises:
            ArenaFull: so it is.
            DeviceError: the driver does not pin it.
        """
        size = size_class(nbytes)
        self._settle()
        for i in reversed(range(len(self._idle))):
            if self._idle[i].lease.block.nbytes == size and self._idle[i].free():
                return self._hold(self._idle.pop(i))
        if not self._fits(size):
            return None
        try:
            lease = self._arena.take(size, size)
        except ArenaFull:
            if not self._idle:
                raise
            while self._drop_idle():
                pass
            lease = self._arena.take(size, size)
        self._register(lease.block.address, size)
        self.nbytes += size
        return self._hold(Entry(lease))

    def close(self) -> bool:
        """Unpin all; only when no copy is under way. Whether all could be."""
        self._settle()
        entries = [*self._idle, *self._held]
        self._idle.clear()
        self._held.clear()
        return sum(self._unpin(entry) for entry in entries) == len(entries)

    def _hold(self, entry: Entry) -> Pinned:
        held = Pinned(entry)
        entry.returning = Returning(held, self._returned.append)
        entry.returning.lent = entry
        self._held.add(entry)
        return held

    def _settle(self) -> None:
        while self._returned:
            entry: Entry = self._returned.popleft().lent
            if entry in self._held:
                self._held.discard(entry)
                self._idle.append(entry)

    def _fits(self, size: int) -> bool:
        if size > self._most:
            return False
        while self.nbytes + size > self._most:
            if not self._drop_idle():
                return False
        return True

    def _drop_idle(self) -> bool:
        """Unpin the block that was used longest ago; whether there was one."""
        for i, entry in enumerate(self._idle):
            if entry.free():
                del self._idle[i]
                return self._unpin(entry)
        return False

    def _unpin(self, entry: Entry) -> bool:
        try:
            self._unregister(entry.lease.block.address)
        except DeviceError:
            _lost.append(entry)
            return False
        self.nbytes -= entry.lease.block.nbytes
        return True


_lost: list[Entry] = []  # that could not be unpinned: their memory must stay where it is
