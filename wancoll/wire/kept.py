"""What was said over a control connection that may break: kept until the other end has it, to be said again. Pure.

If the connection breaks, the daemon may dial again within the master's return_grace (R18): each says how many messages
it has taken in, and the other one says again what came after those. The state machines on both sides do not notice.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from wancoll.limits import DEFAULT
from wancoll.wire import messages as m

T = TypeVar("T")


def counts(message: Any) -> bool:
    """Whether *message* is one of those that are kept. The others belong to one connection only."""
    if isinstance(message, m.Heartbeat | m.Pong):
        return message.number == 0
    proof = m.Challenge | m.Signed | m.Admitted  # the last is said after each Welcome
    asked = m.Status | m.StatusRequest | m.Evict | m.EvictAnswer | m.Ok | m.Arm | m.AboutTrust | m.AnswersOfTrust
    return not isinstance(message, m.Hello | m.Welcome | m.StandsBy | m.Bye | proof | asked)


class Kept(Generic[T]):
    """One direction of a conversation: what one end has said, and the other has not confirmed."""

    def __init__(self) -> None:
        self._confirmed = 0
        self._frames: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self.lost = False  # more was said than is kept: it cannot be said again

    def add(self, frame: T, nbytes: int, room: int = DEFAULT.unconfirmed_bytes) -> None:
        """*frame* is said, or would be if there were a connection. Up to *room* bytes are kept in all."""
        if self.lost:
            return
        self._frames.append((frame, nbytes))
        self._bytes += nbytes
        if len(self._frames) > DEFAULT.unconfirmed_messages or self._bytes > room:
            self.lost = True
            self._frames.clear()
            self._bytes = 0

    def confirmed(self, count: int) -> None:
        """The other end has taken in *count* messages in all."""
        while self._frames and self._confirmed < count:
            self._bytes -= self._frames.popleft()[1]
            self._confirmed += 1

    def again(self, count: int) -> list[T] | None:
        """What to say to an end that has taken in *count* messages; None: that is not known any more, or never was."""
        if self.lost or not self._confirmed <= count <= self._confirmed + len(self._frames):
            return None
        self.confirmed(count)
        return [frame for frame, _ in self._frames]
