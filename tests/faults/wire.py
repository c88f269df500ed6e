"""A wire to the master that can be cut without a word, or reset: a forwarder of its own for the fault tests."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
_BYTES = 1 << 16


class Wire:
    """Forwards connections on 127.0.0.1 to *target*. While it is cut nothing passes, endings and new ones neither."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._lock = threading.Lock()
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.accepted = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._whole.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(5)

    def cut(self) -> None:
        """From now on nothing passes."""
        self._whole.clear()

    def mend(self) -> None:
        """What was held passes, and all that follows."""
        self._whole.set()

    def reset(self) -> int:
        """Break all connections; returns how many."""
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    end.shutdown(socket.SHUT_RD)  # wakes its reader, who closes it
        return len(pairs)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._join, args=(near,), daemon=True))
            self._threads[-1].start()

    def _join(self, near: socket.socket) -> None:
        self._whole.wait()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        with self._lock:
            self.accepted += 1
            number = self.accepted
            self._pairs[number] = near, far
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = threading.Thread(target=self._pump, args=(near, far), daemon=True)
        other.start()
        self._pump(far, near)
        other.join()
        near.close()
        far.close()
        with self._lock:
            self._pairs.pop(number, None)

    def _pump(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BYTES):
                self._whole.wait()
                to.sendall(data)
        self._whole.wait()
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)
