"""What may be sent only once earlier writes to the store are done: in order, bounded. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class Held:
    """Frames in the order in which they were to be sent.

    Args:
        max_frames: more than that are too many.
        max_bytes: the same in bytes.
    """

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self._frames: deque[tuple[int, int, bytes]] = deque()
        self._bytes = 0

    def add(self, write: int, conn: int, frame: bytes) -> None:
        """Hold *frame* for connection *conn* until *write* is done; writes never go down."""
        self._frames.append((write, conn, frame))
        self._bytes += len(frame)

    @property
    def too_many(self) -> bool:
        """Whether a bound was crossed."""
        return len(self._frames) > self._max_frames or self._bytes > self._max_bytes

    def release(self, written: int) -> Iterator[tuple[int, bytes]]:
        """Take out (conn, frame) of all that waited for writes up to *written*."""
        while self._frames and self._frames[0][0] <= written:
            _, conn, frame = self._frames.popleft()
            self._bytes -= len(frame)
            yield conn, frame

    def clear(self) -> None:
        """Drop all."""
        self._frames.clear()
        self._bytes = 0
