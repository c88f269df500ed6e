"""One client's arena: a sparse, sealed memfd that daemon and client both map, and the bell that the client rings."""

from __future__ import annotations

import fcntl
import mmap
import os

from wancoll import resources
from wancoll._native import ffi

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


def default_arena_bytes() -> int:
    """As much as this process can ever have."""
    return resources.total_memory()
