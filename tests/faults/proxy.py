"""A relay between peers whose connections can be made to take nothing, one by one: zero windows without a dead host."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from dataclasses import dataclass, field
from typing import Self


@dataclass(eq=False)
class Relayed:
    """One connection through the relay; *frozen*: nothing is read any more from who dialled, or from who answered."""

    dialler: socket.socket
    answerer: socket.socket
    bytes_up: int = 0  # from the dialler
    frozen: bool = False
    pending: dict[socket.socket, bytes] = field(default_factory=dict)


class Relay:
    """Listens on loopback and passes on to an address that is set later. A context manager."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wake, self._woken = socket.socketpair()
        self.target = ("", 0)
        self.connections: list[Relayed] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._wake.send(b"x")
        self._thread.join(10)
        for one in (self._listener, self._wake, self._woken):
            one.close()
        for each in self.connections:
            each.dialler.close()
            each.answerer.close()

    @property
    def address(self) -> str:
        """host:port to dial."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def freeze(self, count: int) -> int:
        """Read nothing any more from *count* of the connections that are there and have carried the most."""
        chosen = sorted(self.connections, key=lambda one: -one.bytes_up)[:count]
        for one in chosen:
            one.frozen = True
        self._wake.send(b"x")
        return len(chosen)

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended:
            readers: dict[socket.socket, tuple[Relayed, socket.socket]] = {}
            writers: dict[socket.socket, Relayed] = {}
            for one in self.connections:
                if one.frozen:
                    continue
                for source, sink in ((one.dialler, one.answerer), (one.answerer, one.dialler)):
                    if one.pending.get(sink):
                        writers[sink] = one
                    elif source.fileno() >= 0:
                        readers[source] = one, sink
            ready, writable, _ = select.select([self._listener, self._woken, *readers], list(writers), [], 1.0)
            for each in writable:
                self._write(writers[each], each)
            for each in ready:
                if each is self._listener:
                    self._accept()
                elif each is self._woken:
                    self._woken.recv(100)
                else:
                    self._pass_on(*readers[each], each)

    def _accept(self) -> None:
        dialler, _ = self._listener.accept()
        try:
            answerer = socket.create_connection(self.target, 5)
        except OSError:
            dialler.close()
            return
        for each in (dialler, answerer):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections.append(Relayed(dialler, answerer))

    def _pass_on(self, one: Relayed, sink: socket.socket, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            return
        if source is one.dialler:
            one.bytes_up += len(data)
        one.pending[sink] = data
        self._write(one, sink)

    def _write(self, one: Relayed, sink: socket.socket) -> None:
        try:
            sent = sink.send(one.pending[sink])
        except BlockingIOError:
            return
        except OSError:
            self._drop(one)
            return
        one.pending[sink] = one.pending[sink][sent:]

    def _drop(self, one: Relayed) -> None:
        for each in (one.dialler, one.answerer):
            with contextlib.suppress(OSError):
                each.close()
        if one in self.connections:
            self.connections.remove(one)
