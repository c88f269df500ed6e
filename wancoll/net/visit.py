"""A connection that this end keeps: it dials, hears what comes, and dials again when that is over."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import trio

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import Limits
from wancoll.net.contain import contained
from wancoll.net.dial import DialFailed, dial
from wancoll.net.stream import Stream
from wancoll.net.tls import Tls, TlsFailed
from wancoll.wire.framing import Decoder

_PAUSES = 0.1, 2.0  # seconds before the next dial: first, longest; twice as long each time
_QUEUE_BYTES = 1 << 20  # that wait for the other end


async def visit(
    who: str,
    addresses: Sequence[str],
    expects: Sequence[bytes] | None,
    limits: Limits,
    hear: Callable[[Stream], Awaitable[str]],
    beat: Callable[[Stream], None],
    *,
    every: float,
    near_only: bool = False,
) -> str:
    """Dial *who*, and *hear* it until that returns; returns why it is over.

    *expects*: keys of which it has to prove one; None: in clear. *beat* says *every* so many seconds that this end is
    alive.
    """
    stream, reason, within = None, "it met a bug", limits.connect_timeout

    async def beats(stream: Stream) -> None:
        while True:
            await trio.sleep(every)
            beat(stream)

    try:
        with trio.fail_after(within):
            raw = await dial(addresses, within, near_only=near_only)
            tls = Tls(expects=expects) if expects is not None else None
            stream = Stream(socket.socket(fileno=raw.socket.detach()), who, _QUEUE_BYTES, tls=tls)
            await stream.shake_hands()
        with contained(who, lambda: who):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write_queue)
                nursery.start_soon(beats, stream)
                try:
                    reason = await hear(stream)
                except ProtocolError as bad:
                    reason = str(bad)
                nursery.cancel_scope.cancel()
        return reason
    except (DialFailed, TlsFailed, ConfigError, OSError) as bad:
        return str(bad)
    except trio.TooSlowError:
        return f"no answer within {within:.1f} s"
    finally:
        if stream is not None:
            stream.close()


async def again_and_again(once: Callable[[], Awaitable[bool]]) -> None:
    """Do it *once*, and once more after a pause, as long as it returns True."""
    pause, longest = _PAUSES
    while True:
        since = trio.current_time()
        if not await once():
            return
        pause = min(2 * pause, longest) if trio.current_time() - since < longest else _PAUSES[0]
        await trio.sleep(pause)


async def messages(stream: Stream, kind: Any, most: int, silence: float) -> AsyncIterator[Any]:
    """What comes, of *kind* and up to *most* bytes each, until the stream ends or is silent for so many seconds.

    Raises:
        ProtocolError: something else comes.
    """
    decoder: Decoder[Any] = Decoder(kind, most, stream.who)
    while True:
        data = b""
        with trio.move_on_after(silence):
            data = await stream.receive()
        if not data:
            stream.ended = stream.ended or f"it was silent for {silence:g} s"
            return
        for message in decoder.feed(data):
            yield message
