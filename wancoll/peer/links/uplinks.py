"""Lanes that went over another uplink than theirs, since that one failed: back to it once it carries again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

import trio

from wancoll.net.dial import DialFailed
from wancoll.peer.links.connections import Connector, WatchedSocket

_LOOK_SECONDS = 0.5  # between looks
_ANSWER_SECONDS = 1.0  # for an answer over an uplink that failed
_LONGEST_PAUSE = 60.0  # seconds between two moves of one link's lanes, where the uplink fails again and again

# Link's number, addresses at its other end, lane, connection, whether the other end has dialled that.
Dialled = tuple[int, Sequence[str], int, WatchedSocket, bool]


async def bring_home(connector: Connector, dialled: Callable[[], Iterable[Dialled]]) -> None:
    """Task: cut lanes that are over another uplink than theirs, so that they are dialled again over theirs.

    First somebody has to answer over that one: a lane that is lost costs bytes (R17), and only where that helps.
    *dialled*: the lanes over TCP of links that this daemon has dialled; the other end may have dialled some again.
    """
    moved: dict[tuple[int, str], tuple[float, float]] = {}  # by link and uplink: when, and the pause after it

    async def try_uplink(key: tuple[int, str], addresses: Sequence[str], lanes: list[WatchedSocket]) -> None:
        try:
            stream = await connector.open(addresses, 2 * _ANSWER_SECONDS, key[1:])
        except DialFailed:
            return
        await stream.aclose()
        _, pause = moved.get(key, (-inf, 0.0))
        moved[key] = trio.current_time(), min(max(2 * pause, _ANSWER_SECONDS), _LONGEST_PAUSE)
        for lane in lanes:
            lane.cut()

    while True:
        await trio.sleep(_LOOK_SECONDS)
        strays: dict[tuple[int, str], tuple[Sequence[str], list[WatchedSocket]]] = {}
        for number, addresses, lane, connection, theirs in dialled():
            own = connector.turn(lane)[0]
            if theirs or connection.uplink() not in ("", own):
                strays.setdefault((number, own), (addresses, []))[1].append(connection)
        now = trio.current_time()
        moved = {key: seen for key, seen in moved.items() if now - seen[0] < _LONGEST_PAUSE}
        async with trio.open_nursery() as nursery:
            for key, (addresses, lanes) in strays.items():
                last, pause = moved.get(key, (-inf, 0.0))
                if now >= last + pause:
                    nursery.start_soon(try_uplink, key, addresses, lanes)
