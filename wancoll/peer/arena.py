"""One client's arena: a sparse, sealed memfd that daemon and client both map, and the bell that the client rings."""

from __future__ import annotations

import fcntl
import mmap
import os

from wancoll import resources
from wancoll._native import ffi, lib

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """Shared memory of fixed address range; only touched pages take memory.

    The size is sealed, so no client can make the daemon's own accesses fail (SIGBUS).

    Args:
        nbytes: address range, rounded up to whole pages.

    Attributes:
        bell: an eventfd: whoever fills an input that the engine waits for writes to it.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.nbytes = nbytes
        self.fd = os.memfd_create("wancoll-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED)
            self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            os.close(self.fd)
            raise
        with ffi.from_buffer(self._map, require_writable=True) as view:
            self.address = int(ffi.cast("uintptr_t", view))

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether [offset, offset + nbytes) lies inside."""
        return 0 <= offset and nbytes >= 0 and offset + nbytes <= self.nbytes

    def close(self) -> None:
        """Unmap. The engine must have let go of every op in it."""
        self._map.close()
        os.close(self.fd)
        os.close(self.bell)


class Cover:
    """Memory in which a daemon takes part in an operation for its client: zeros, and the result.

    Zeros that nobody has written take no memory but for page tables. It lives as long as somebody refers to it: the
    operation, which the engine's attempts refer to.

    Args:
        front_bytes: of the zeros.
        back_bytes: of the result.
    """

    def __init__(self, front_bytes: int, back_bytes: int) -> None:
        back_at = -(-front_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, max(1, back_at + back_bytes))  # only ours
        with ffi.from_buffer(self._map, require_writable=True) as view:
            self.front = int(ffi.cast("uintptr_t", view))
        self.back, self._nbytes = self.front + back_at, back_bytes

    def hand_over(self, address: int) -> None:
        """Copy the result to where the client wants it."""
        lib.wc_pages_copy(address, self.back, self._nbytes)


def default_arena_bytes() -> int:
    """As much as this process can ever have."""
    return resources.total_memory()
