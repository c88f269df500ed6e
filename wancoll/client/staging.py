"""Where stripes of a state are received, and how they are put in place: all of them together, or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from wancoll._native import lib
from wancoll.client.memory import EXCHANGE_BYTES, Arena, Block, Lease
from wancoll.client.state_tensors import Tensor
from wancoll.limits import MIB
from wancoll.sync.election import Goal

_SLAB = 64 * MIB  # stripes that will be copied lie in blocks of this size
_ALIGN = 64
_PIECE = 4 * MIB


class Staging:
    """Arena memory for the stripes that a member lacks, held as long as this and the thread that touches it live.

    A tensor that lacks all of its stripes and is a whole block of the arena gets its pages exchanged in the end; the
    others are copied.

    Args:
        arena: of the connection.
        goal: what there is to move.
        missing: numbers of the stripes that this member lacks.
        tensors: its tensors, in the order of the goal's entries.

    Raises:
        ArenaFull: so it is.
    """

    def __init__(self, arena: Arena, goal: Goal, missing: frozenset[int], tensors: Sequence[Tensor]) -> None:
        self._arena = arena
        self._leases: list[Lease] = []
        self._exchanges: list[tuple[Block, Block, int, int, int]] = []  # target, staged, its offset; address and size
        self._copies: list[tuple[int, int, int]] = []  # to, from, bytes
        self._places: dict[int, int] = {}  # address of each stripe
        of_tensor: dict[int, list[int]] = {}
        for number in sorted(missing):
            of_tensor.setdefault(goal.stripes[number].entry, []).append(number)
        loose: list[int] = []
        for entry, numbers in of_tensor.items():
            block = self._exchangeable(tensors[entry]) if goal.nbytes(numbers) == goal.entries[entry].nbytes else None
            if block is None:
                loose += numbers
                continue
            nbytes = goal.entries[entry].nbytes
            lease = arena.take(nbytes, block.nbytes)
            self._leases.append(lease)
            self._exchanges.append((block, lease.block, lease.block.offset, block.address, nbytes))
            for number in numbers:
                self._places[number] = lease.block.address + goal.stripes[number].offset
        self._lay(goal, loose, tensors)
        # Beside the transfers: the daemon, which writes there first, is busy enough with the bytes.
        self._toucher = threading.Thread(
            target=_touch, args=(arena, tuple(self._leases)), name="wancoll-staging", daemon=True
        )
        self._toucher.start()

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return sum(lease.block.nbytes for lease in self._leases)

    def address(self, stripe: int) -> int | None:
        """Where a stripe is received; None: it was not missing."""
        return self._places.get(stripe)

    def install(self) -> None:
        """Put everything in place. An interruption shows when it is done."""
        try:
            self._install()
        except BaseException:
            self._install()  # doing it again is harmless
            raise

    def _install(self) -> None:
        self._toucher.join()
        for target, staged, offset, address, nbytes in self._exchanges:
            if not self._arena.exchange(target, staged, offset):
                lib.wc_pages_copy(address, staged.address, nbytes)
        for to, source, nbytes in self._copies:
            lib.wc_pages_copy(to, source, nbytes)

    def _exchangeable(self, tensor: Tensor) -> Block | None:
        memory = tensor.memory
        if memory.nbytes < EXCHANGE_BYTES:
            return None
        block = self._arena.find(memory.address, memory.nbytes)
        whole = block is not None and block.address == memory.address and block.used == memory.nbytes
        return block if whole else None

    def _lay(self, goal: Goal, numbers: list[int], tensors: Sequence[Tensor]) -> None:
        """Give each of these stripes a place in a slab."""
        slab: list[int] = []
        used = 0
        for number in numbers:
            nbytes = goal.stripes[number].nbytes
            if slab and used + nbytes > _SLAB:
                self._fill(goal, slab, used, tensors)
                slab, used = [], 0
            slab.append(number)
            used += nbytes + -nbytes % _ALIGN
        if slab:
            self._fill(goal, slab, used, tensors)

    def _fill(self, goal: Goal, slab: list[int], used: int, tensors: Sequence[Tensor]) -> None:
        lease = self._arena.take(used)
        self._leases.append(lease)
        at = lease.block.address
        for number in slab:
            stripe = goal.stripes[number]
            self._places[number] = at
            self._copies.append((tensors[stripe.entry].memory.address + stripe.offset, at, stripe.nbytes))
            at += stripe.nbytes + -stripe.nbytes % _ALIGN


def _touch(arena: Arena, leases: Sequence[Lease]) -> None:
    """Get memory for these blocks, in pieces, so that the system's locks on the file are short."""
    with contextlib.suppress(OSError):  # then the first write finds out
        for lease in leases:
            for start in range(0, lease.block.used, _PIECE):
                arena.touch(lease.block, start, min(_PIECE, lease.block.used - start))
