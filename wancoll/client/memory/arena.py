"""The client's side of the arena: blocks of shared memory, who holds them, and which file pages they show.

A block is a range of addresses bound to an equally long range of the arena's file, which is what the daemon
knows. A commit in place swaps the ranges of two blocks. Blocks that nobody holds stay bound and warm for the
next of their size, up to a bound; what is beyond gives its memory back.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from typing import Any

from wancoll import resources
from wancoll.errors import ArenaFull, ConfigError, DeviceError
from wancoll.limits import MIB, format_size
from wancoll.native import ffi, lib

PAGE = os.sysconf("SC_PAGE_SIZE")
LARGE = 2 * MIB  # from here on aligned such that page tables move as a whole
SWAP_BYTES = 1 * MIB  # below, copying is as fast as swapping pages (both about 20 us; 64 MiB: 3000 us against 80)
IDLE_BYTES = 256 * MIB  # kept warm at least, if it was ever used
ASK_BYTES = 16 * MIB  # of new blocks, until the system is asked for its free memory again (which takes 0.1 to 3 ms)
_RESERVE = 32  # this share of the free memory stays free
_UNASKED = 64  # or this share of what was free beyond what is promised, if that is more


def size_class(nbytes: int) -> int:
    """Size of the block that holds *nbytes*: a power of two, from LARGE on four sizes for each doubling.

    Only touched pages take memory, so the rounding costs address space alone.
    """
    if nbytes <= LARGE:
        return max(PAGE, 1 << max(0, nbytes - 1).bit_length())
    step = max(LARGE, 1 << ((nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


class Block:
    """Addresses that show a part of the arena's file: *nbytes* from *address* on, for good."""

    __slots__ = ("address", "nbytes", "pages", "returning", "stamp", "used")

    def __init__(self, address: int, offset: int, nbytes: int) -> None:
        self.pages = ffi.new("wc_block *", (address, offset, nbytes))  # its offset changes when pages are swapped
        self.address, self.nbytes = address, nbytes
        self.used = 0  # bytes that the holder asked for
        self.stamp = 0  # when it was last given back; counts up. 0: never, so it is as cold as its holder left it
        self.returning: Returning | None = None  # gives it back when its lease dies

    @property
    def offset(self) -> int:
        """Where in the arena's file the block's first byte is now."""
        return int(self.pages.offset)


class Lease:
    """Holds a block; the block goes back when the last reference to this is gone."""

    __slots__ = ("__weakref__", "arena", "block")

    def __init__(self, arena: Arena, block: Block) -> None:
        self.arena, self.block = arena, block


class Returning(weakref.ref[Any]):
    """Tells whoever lent *lent* that what held it died.

    Its callback is a deque's own append, and not a __del__: no Python code runs while memory is collected, at whatever
    moment and in whatever thread that happens, so nothing there can deadlock or swallow a Ctrl-C.
    """

    __slots__ = ("lent",)
    lent: Any


class ArrayMemory:
    """The base of an array over so many bytes from *address* on: numpy holds it, and it holds *keep*."""

    __slots__ = ("__array_interface__", "_keep")

    def __init__(self, keep: object, address: int, nbytes: int, *, writable: bool = True) -> None:
        self._keep = keep
        self.__array_interface__: dict[str, Any] = {
            "data": (address, not writable),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Ranges:
    """Which parts of [0, size) are free: hands out the first that fits, merges what comes back."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), sorted, never adjacent

    def take(self, size: int, align: int) -> int | None:
        """The start of *size* free bytes that is a multiple of *align*, or None."""
        for i, (start, end) in enumerate(self._free):
            first = -(-start // align) * align
            if first + size <= end:
                rest = [(start, first)] if start < first else []
                if first + size < end:
                    rest.append((first + size, end))
                self._free[i : i + 1] = rest
                return first
        return None

    def give(self, start: int, size: int) -> None:
        """Take back what take() handed out."""
        end = start + size
        at = bisect_left(self._free, (start, end))
        before = after = at
        if at and self._free[at - 1][1] == start:
            before, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            after, end = at + 1, self._free[at][1]
        self._free[before:after] = [(start, end)]

    @property
    def free(self) -> int:
        """Free bytes."""
        return sum(end - start for start, end in self._free)


class Arena:
    """One connection's arena.

    Args:
        fds: the arena's file, and an eventfd that is rung when something of an input was filled, see Post.filled. They
            are closed with the arena, by this very list: whoever made it may close them before (close_all()).
        nbytes: its size.

    Raises:
        ConfigError: the process may not have that much address space.
    """

    _base, _fds, _holed = 0, list[int](), False  # where an interruption leaves it half made

    def __init__(self, fds: list[int], nbytes: int) -> None:
        self._fds, self.nbytes = fds, nbytes
        self._fd, self.bell = fds
        address = ffi.new("uint64_t *")
        # The second half is the spare room that swapping needs for a moment.
        error = lib.wc_pages_reserve(2 * nbytes, address)
        if error:
            close_all(fds)
            raise ConfigError(
                "the arena cannot be mapped",
                who="wancoll client",
                expected=f"{format_size(2 * nbytes)} of address space",
                got=os.strerror(-error),
                hint="raise `ulimit -v`, or start the daemon with a smaller --arena-bytes",
            )
        self._base = int(address[0])
        self._spare = self._base + nbytes
        self._addresses, self._offsets = Ranges(nbytes), Ranges(nbytes)
        self._starts: list[int] = []  # addresses of all blocks, sorted
        self._blocks: dict[int, Block] = {}  # address -> block
        self._idle: dict[int, dict[Block, None]] = {}  # size -> blocks nobody holds, the last one is the warmest
        self._returned: deque[Returning] = deque()  # their leases died, not in _idle yet
        self._lock, self._swapping = threading.Lock(), threading.Lock()
        self._holed = False  # part of the address space may be somebody else's: no swaps, and it stays mapped
        self._stamp = 0
        self._leased = self._peak = 0  # bytes of blocks that are held; their recent maximum
        self._promised = 0  # bytes that have been asked for in blocks that are bound
        self._unasked = 0  # bytes of them since the system was asked
        self._ask_at = ASK_BYTES  # how many there may be until it is asked again
        self._closed = False

    # ---- taking and giving back ----------------------------------------------------------------------

    def take(self, nbytes: int, size: int | None = None) -> Lease:
        """A block for *nbytes* bytes, with undefined contents; of exactly *size* bytes, from size_class(), if given.

        Raises ArenaFull.
        """
        size = size or size_class(nbytes)
        with self._lock:
            self._settle()
            warm = self._idle.get(size)
            block = next(reversed(warm)) if warm else self._bind(size, nbytes)
            # First the lease, then the removal: whatever is interrupted in between gives the block back.
            lease = Lease(self, block)
            returning = Returning(lease, self._returned.append)
            returning.lent = block
            block.returning = returning
            self._promised += nbytes - block.used
            block.used = nbytes
            if warm:
                del warm[block]
            self._leased += size
            self._peak = max(self._leased, self._peak - self._peak // 1024)
        return lease

    def find(self, address: int, nbytes: int) -> Block | None:
        """The block that holds these bytes, if they lie in the arena."""
        if not self._base <= address < self._spare:
            return None
        with self._lock:  # other threads bind and unbind blocks
            at = bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[at]] if at >= 0 else None
        if block is None or not block.address <= address <= address + nbytes <= block.address + block.nbytes:
            return None
        return block

    def swappable(self, address: int, nbytes: int) -> Block | None:
        """The block that a result for these bytes may be swapped with; None: copy it.

        Only whole arrays: a block then always shows one contiguous part of the file.
        """
        block = self.find(address, nbytes) if nbytes >= SWAP_BYTES else None
        return block if block is not None and block.address == address and block.used == nbytes else None

    def fill(self, block: Block, start: int, nbytes: int) -> None:
        """Get memory for a part of *block*, unless it is warm: else who writes first stops at every page.

        In huge pages if *start* is a multiple of LARGE; one costs a tenth of the small ones. Where there is no memory
        the first write finds out.
        """
        if not block.stamp and block.nbytes >= LARGE:
            lib.wc_pages_fill(block.pages, start, nbytes, self._fd)

    def cool(self, nbytes: int) -> None:
        """Held blocks of *nbytes* bytes in all were needed once: when they come back, as many need not stay warm."""
        with self._lock:
            self._peak = max(0, self._peak - nbytes)

    def _settle(self) -> None:
        returned = self._returned
        if not returned or self._closed:
            return
        while returned:
            block: Block = returned[0].lent
            self._stamp += 1
            block.stamp = self._stamp
            if self._blocks.get(block.address) is block:  # else it was abandoned
                self._idle.setdefault(block.nbytes, {})[block] = None
            returned.popleft()  # last: whoever is interrupted before this does it again
            self._leased -= block.nbytes
        keep = max(IDLE_BYTES, self._peak - self._leased)
        if self.idle_bytes > keep:
            self._trim(keep)

    def _trim(self, keep: int) -> None:
        """Give idle blocks back to the system, the coldest first, until *keep* bytes are left."""
        idle = self.idle_bytes
        for block in sorted((b for blocks in self._idle.values() for b in blocks), key=lambda b: b.stamp):
            if idle <= keep:
                break
            self._unbind(block)
            idle -= block.nbytes

    # ---- memory, address space and file space --------------------------------------------------------

    def _ask(self, nbytes: int) -> None:
        """Refuse memory that is not there: the system would only find out when it is used, and end a process for it."""
        self._unasked += nbytes
        if self._unasked < self._ask_at:
            return
        for attempt in (1, 2):
            promised = max(0, self._promised - self.resident_bytes())  # to others, who have not touched it yet
            free = resources.free_memory()
            if nbytes + promised <= free - free // _RESERVE:
                self._unasked, self._ask_at = 0, max(ASK_BYTES, (free - nbytes - promised) // _UNASKED)
                return
            if attempt == 1:
                self._trim(0)
        self._ask_at = ASK_BYTES
        others = f", {format_size(promised)} of it for others that have not been written yet" if promised else ""
        raise ArenaFull(
            "there is not enough memory", who=f"a block for {format_size(nbytes)}",
            expected=f"{format_size(nbytes + promised)}{others}", got=f"{format_size(free)} free",
            hint="drop tensors, or use smaller ones: an operation needs twice its tensor in shared memory",
        )  # fmt: skip

    def _bind(self, size: int, nbytes: int) -> Block:
        self._ask(nbytes)
        align = LARGE if size >= LARGE else PAGE
        for attempt in (1, 2):
            address, offset = self._addresses.take(size, align), self._offsets.take(size, align)
            if address is not None and offset is not None:
                block = Block(self._base + address, offset, size)
                error = lib.wc_pages_bind(block.pages, self._fd)
                if not error:
                    self._blocks[block.address] = block
                    insort(self._starts, block.address)
                    return block
                got = os.strerror(-error)
            else:
                free = format_size(self._offsets.free)
                got = f"{free} free" + (", in pieces" if self._offsets.free >= size else "")
            if address is not None:
                self._addresses.give(address, size)
            if offset is not None:
                self._offsets.give(offset, size)
            if attempt == 1:
                self._trim(0)
        hint = "drop arrays from empty(), wait for pending calls, or start the daemon with a larger --arena-bytes"
        if size > self.nbytes:  # nothing that is dropped makes room
            hint = f"start the daemon with --arena-bytes={2 * size} or more: an operation needs twice its tensor"
        raise ArenaFull(
            "the arena has no room",
            who=f"a block for {format_size(nbytes)}",
            expected=f"{format_size(size)} free of the arena's {format_size(self.nbytes)}",
            got=got,
            hint=hint,
        )

    def _unbind(self, block: Block) -> None:
        del self._idle[block.nbytes][block]
        del self._blocks[block.address]
        self._starts.remove(block.address)
        self._promised -= block.used
        lib.wc_pages_discard(block.pages, self._fd)
        self._addresses.give(block.address - self._base, block.nbytes)
        self._offsets.give(block.offset, block.nbytes)

    def swap(self, a: Block, b: Block, wanted: int) -> bool:
        """Let *a* show what *b* shows, the file from offset *wanted* on, and the other way round; again is harmless.

        Returns:
            False if the system refused: nothing has changed then.

        Raises:
            DeviceError: the system refused when it had taken away what *a* showed.
        """
        with self._swapping:  # there is one spare room
            if self._holed:
                return a.offset == wanted
            status = lib.wc_pages_exchange(a.pages, b.pages, wanted, self._spare, self._fd)
            self._holed = status > 0
        if status == 2:
            self._abandon(a)
            raise DeviceError(
                "the system took a tensor's memory away while a committed result was put there", got="it refused",
                who=f"the tensor at {a.address:#x}", expected="that it maps memory again which was mapped before",
                hint="end this process without touching the tensor: reading it is a segmentation fault; give it more "
                "memory, address space (ulimit -v) and mappings (vm.max_map_count)",
            )  # fmt: skip
        if status == 1:
            self._abandon(b)
        return status in (0, 1)

    def _abandon(self, block: Block) -> None:
        """*block* shows what another one owns: never use its addresses again, nor its part of the file."""
        with self._lock:
            if self._blocks.pop(block.address, None) is not None:
                self._starts.remove(block.address)

    # ---- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """No block will be handed out or reused again; arrays stay readable. Safe to call again."""
        with self._lock:
            self._settle()
            self._closed = True
            for blocks in self._idle.values():
                for block in blocks:
                    lib.wc_pages_discard(block.pages, self._fd)
            self._idle.clear()

    def disown(self) -> None:
        """In a forked child: the file is the parent's; never change it, also where arrays are written to."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        for block in self._blocks.values():
            lib.wc_pages_disown(block.pages, self._fd)
        self._closed = True
        close_all(self._fds)
        self._fd = -1

    @property
    def idle_bytes(self) -> int:
        """Size of the blocks that wait for their next use."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    @property
    def leased_bytes(self) -> int:
        """Size of the blocks that are held."""
        return self._leased

    def resident_bytes(self) -> int:
        """Memory that the arena's file takes."""
        return os.fstat(self._fd).st_blocks * 512

    def __del__(self) -> None:
        if self._base and not self._holed:
            lib.wc_pages_release(self._base, 2 * self.nbytes)
        close_all(self._fds)


def close_all(fds: list[int]) -> None:
    """Close these descriptors, and forget their numbers."""
    while fds:
        os.close(fds.pop())
