"""One client's arena: a sparse, sealed memfd that daemon and client both map, and the bell that the client rings."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from wancoll.native import ffi, lib
from wancoll.native.calls import RING_BYTES

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PIECE = 16 << 20  # bytes copied at once: what the daemon's end has to wait for


class Arena:
    """Shared memory of fixed address range; only touched pages take memory.

    The size, *nbytes* rounded up to whole pages, is sealed, so no client can make the daemon's own accesses fail
    (SIGBUS).
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.nbytes = nbytes
        self.fd = _sealed("wancoll-arena", nbytes)
        try:
            self.address = _map(self.fd, nbytes)
            # Whoever fills an input that the engine waits for writes to the bell.
            self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            os.close(self.fd)
            raise
        self._map = memoryview(ffi.buffer(ffi.cast("char *", self.address), nbytes))

    def holds(self, offset: int, nbytes: int) -> bool:
        """Whether [offset, offset + nbytes) lies inside."""
        return 0 <= offset and nbytes >= 0 and offset + nbytes <= self.nbytes

    def has_zeros(self, offset: int, nbytes: int) -> bool:
        """Whether a byte of [offset, offset + nbytes) is zero."""
        return b"\0" in bytes(self._map[offset : offset + nbytes])

    @property
    def used(self) -> int:
        """Bytes of memory that it takes."""
        return 512 * os.fstat(self.fd).st_blocks

    def close(self) -> None:
        """Unmap. The engine must have let go of every op in it."""
        self._map.release()
        lib.wc_pages_release(self.address, self.nbytes)
        os.close(self.fd)
        os.close(self.bell)


class RingMemory:
    """Memory in which a client posts prepared calls to the engine, and the two ends over which they wake each other.

    *wake* is the engine's end, *theirs* the client's.
    """

    def __init__(self) -> None:
        size = -(-RING_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = _sealed("wancoll-calls", size)
        try:
            self.map = mmap.mmap(self.fd, size)
            self.wake, self.theirs = (end.detach() for end in socket.socketpair())
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Let go of all. The engine's caller must be closed."""
        self.handed_over()
        os.close(self.wake)
        os.close(self.fd)

    def handed_over(self) -> None:
        """The client has its end, or never will."""
        theirs, self.theirs = self.theirs, -1
        if theirs >= 0:
            os.close(theirs)


def _sealed(name: str, nbytes: int) -> int:
    """A memfd of that size for good."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map(fd: int, nbytes: int) -> int:
    """Address of the file, at a multiple of 2 MiB: only so its huge pages are mapped whole, at a tenth of the cost."""
    address = ffi.new("uint64_t *")
    error = lib.wc_pages_reserve(nbytes, address)
    if not error:
        error = lib.wc_pages_bind(ffi.new("wc_block *", (address[0], 0, nbytes)), fd)
        if error:
            lib.wc_pages_release(address[0], nbytes)
    if error:
        raise OSError(-error, os.strerror(-error))
    return int(address[0])


class ZeroContribution:
    """Memory in which a daemon takes part in an operation for its client: zeros, and the result.

    Zeros that nobody has written take no memory but for page tables. It lives as long as somebody refers to it: the
    operation, which the engine's attempts refer to.
    """

    def __init__(self, input_bytes: int, result_bytes: int) -> None:
        result_at = -(-input_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # private: zeros that are only read are all one page
        self._map = mmap.mmap(-1, max(1, result_at + result_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with ffi.from_buffer(self._map, require_writable=True) as view:
            self.input_buffer = int(ffi.cast("uintptr_t", view))
        self.result_buffer = self.input_buffer + result_at

    def __del__(self) -> None:
        # Giving back GiB takes long, and what refers to this last does so in the event loop.
        with suppress(RuntimeError, AttributeError):  # the process ends; or there was no memory
            threading.Thread(target=self._map.close, name="wancoll-give-back", daemon=True).start()

    def pieces(self, address: int, nbytes: int) -> Iterator[Callable[[], None]]:
        """Steps that copy so much of the result to *address*; each keeps this memory, and is short."""
        for at in range(0, nbytes, _PIECE):
            yield partial(self._copy, address + at, at, min(_PIECE, nbytes - at))

    def _copy(self, address: int, at: int, nbytes: int) -> None:
        lib.wc_pages_copy(address, self.result_buffer + at, nbytes, 1)
