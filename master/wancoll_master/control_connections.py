"""The master's control connections: what is sent over each, and what is kept to be sent again when one breaks.

A connection has the number it was accepted with. A daemon that takes up its broken connection arrives with a new
number and goes on as the old one, so the state machine knows it by the old number: conn_of() translates.
"""

from __future__ import annotations

from collections.abc import Iterator

from wancoll.limits import Limits
from wancoll.net.stream import Queues, Stream
from wancoll.wire.kept import Kept

_LEAST_KEPT_BYTES = 128 * 1024  # of a connection that breaks among very many: more than an Epoch of a thousand members


class Connections:
    """All control connections of one master, by the number that the state machine knows."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.queues = Queues(limits.send_queue_bytes)
        self.closing: set[int] = set()  # these end once the store has written what they wait for
        self._streams: dict[int, Stream] = {}
        self._kept: dict[int, Kept[bytes]] = {}  # what daemons were told and have not confirmed
        self._went_on_as: dict[int, int] = {}  # accepted number -> the broken connection that it goes on as
        self._unsent: dict[int, Stream] = {}  # streams with a batch for flush()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, conn: int) -> bool:
        return conn in self._streams

    def conn_of(self, number: int) -> int:
        """The number by which the state machine knows the connection that was accepted as *number*."""
        return self._went_on_as.get(number, number)

    def get(self, number: int) -> Stream | None:
        """The stream of the connection that was accepted as *number*; None: it is over."""
        return self._streams.get(self.conn_of(number))

    def add(self, number: int, stream: Stream) -> None:
        """A connection was accepted."""
        self._streams[number] = stream

    # ---- what is said --------------------------------------------------------------------------------

    def put(self, conn: int, frame: bytes) -> None:
        """Send *frame* with the next flush(), if the connection still stands."""
        stream = self._streams.get(conn)
        if stream is not None:
            stream.add(frame)
            self._unsent[conn] = stream

    def unsent(self) -> Iterator[Stream]:
        """Streams with a batch that has to be flushed; each is handed out once."""
        unsent, self._unsent = self._unsent, {}
        yield from unsent.values()

    def close(self, conn: int, last: bytes) -> None:
        """Send what may be sent, and *last*; then end the connection."""
        stream = self._streams.pop(conn, None)
        self.closing.discard(conn)
        self._kept.pop(conn, None)
        if stream is not None:
            self._unsent.pop(conn, None)
            stream.send(last)
            stream.end()

    def close_all(self, last: bytes) -> None:
        """Drop what was not sent and end all connections with *last*."""
        streams, self._streams = self._streams, {}
        self.closing.clear()
        self._unsent.clear()
        self._kept.clear()
        for stream in streams.values():
            stream.drop_batch()
            stream.add(last)
            stream.flush_batch()
            stream.end()

    # ---- what is kept --------------------------------------------------------------------------------

    def keep_from_now(self, conn: int) -> None:
        """A daemon was welcomed: keep what it is told until it confirms that."""
        if conn in self._streams:  # else the Welcome was held for the store, and is never heard
            self._kept[conn] = Kept()

    def keep(self, conn: int, frame: bytes) -> None:
        """Keep *frame*, if a daemon was welcomed on the connection."""
        if conn in self._kept:
            room = max(self._limits.unconfirmed_bytes // len(self._kept), _LEAST_KEPT_BYTES)
            self._kept[conn].add(frame, len(frame), room)

    def confirmed(self, conn: int, count: int) -> None:
        """The daemon has taken in *count* messages."""
        if conn in self._kept:
            self._kept[conn].confirmed(count)

    def is_lost(self, conn: int) -> bool:
        """Whether nothing can be said again over this connection."""
        return conn not in self._kept or self._kept[conn].lost

    def forget_kept(self, conn: int) -> None:
        """The daemon does not come back over this connection."""
        self._kept.pop(conn, None)

    def take_up(self, number: int, conn: int, heard: int) -> list[bytes] | None:
        """The connection accepted as *number* goes on as the broken *conn*, whose daemon has taken in *heard* messages.

        Returns what has to be sent again; None: it cannot go on.
        """
        again = self._kept[conn].again(heard) if conn in self._kept else None
        if again is None or number not in self._streams:
            return None
        broken, stream = self._streams.pop(conn, None), self._streams.pop(number)
        if broken is not None:
            broken.drop_batch()
            broken.end()
        self._unsent.pop(number, None)
        self._streams[conn], self._went_on_as[number] = stream, conn
        return again

    # ---- the end -------------------------------------------------------------------------------------

    def end(self, number: int, stream: Stream) -> bool:
        """Forget a connection that is over; False: it is forgotten already, or another stream goes on as it."""
        conn = self.conn_of(number)
        if self._streams.get(conn) is not stream:
            return False
        del self._streams[conn]
        self.closing.discard(conn)
        return True

    def forget(self, number: int) -> None:
        """The task of the connection accepted as *number* ends."""
        self._went_on_as.pop(number, None)
