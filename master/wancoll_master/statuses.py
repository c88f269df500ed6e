"""What a master answers to those who look: Status for commands and daemons, metrics, and the sections of its page.

A Status of a large group takes time to make, so whoever asks over and over gets the newest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf

import trio

from wancoll import resources
from wancoll.limits import keep_newest, package_version
from wancoll.metrics.core import families as f
from wancoll.wire import messages as m
from wancoll.wire.framing import encode
from wancoll_master.core.paths import ways
from wancoll_master.core.ready import SendStatus
from wancoll_master.core.state import State
from wancoll_master.core.views import master_metrics, page, report
from wancoll_master.store.journal import Journal

STATUS_EVENTS = 50
_SHARE = 0.1  # of the time, that may go into making Status
_BURST = 1.0  # seconds of it at once
_KEPT = 64  # answers, of identities that are for different groups


class Statuses:
    """Makes the answers, from the state as it is, the journal's events and *of_shell*, the shell's numbers by name.

    *rotating*: whether two keys of the master are good.
    """

    def __init__(self, journal: Journal, of_shell: Callable[[], dict[str, int]], rotating: Callable[[], bool]) -> None:
        self._journal, self._of_shell, self._rotating = journal, of_shell, rotating
        self.started_at = trio.current_time()
        self._newest: dict[tuple[str, ...], tuple[bytes, float]] = {}  # by groups: the frame, until when new enough
        self._credit, self._spent_at = _BURST, self.started_at  # seconds that may go into making them
        self.counts = master_metrics.Events()  # of what happens
        self.timeline = page.GroupTimeline()  # of what is written down
        for event in journal.events(page.EVENTS):
            self.timeline.note(event)

    def forget(self) -> None:
        """Another state is looked at from now on."""
        self._newest.clear()

    def frame(self, state: State, ask: SendStatus) -> bytes:
        """The answer to *ask*: the state now, with what the question has just changed, if that takes little time.

        An asker that asks over and over, or while much time went into answers lately, gets the newest one.
        """
        began = trio.current_time()
        frame, until = self._newest.get(ask.groups, (b"", -inf))
        self._credit = min(_BURST, self._credit + (began - self._spent_at) * _SHARE)
        self._spent_at = began
        if began >= until or (self._credit > 0 and ask.conn not in state.connections):
            frame = encode(self._status(state, ask.groups))
            took = trio.current_time() - began
            self._credit, until = self._credit - took, began + took / _SHARE
        keep_newest(self._newest, ask.groups, (frame, until), _KEPT)
        return frame

    def _status(self, state: State, only: tuple[str, ...]) -> m.Status:
        """The answer about *only* these groups and their daemons; empty: about all."""
        now = trio.current_time()
        refused = {"messages_refused": sum(state.refused.values())}
        mine = {**resources.of_this_process(), **self._of_shell(), **refused} if not only else {}
        return m.Status(
            term=state.term,
            uptime=now - self.started_at,
            version=package_version(),
            daemons=report.daemons(state, only),
            groups=report.groups(state, now, only),
            events=[event for event in self._journal.events(STATUS_EVENTS) if not only or event.group in only],
            links=report.links(state, only),
            resources=mine,
            hosts=report.hosts(state, only),
            clock=time.time(),
            master=state.identity,
            rotating=self._rotating(),
            left=report.left(state, only),
            gone=report.gone(state, only),
            elected_by=state.elected_by,
            relays=[one.name for one in ways.relays(state)],
        )

    def families(self, state: State | None) -> Iterator[f.Family | None]:
        """Metrics of what has happened and of what is so; None is a pause."""
        yield from self.counts.families()
        if state is not None:
            yield from master_metrics.of(state, trio.current_time())

    def look(self, state: State | None, standing_by: m.StandsBy) -> Iterator[page.Section | None]:
        """What the page shows; None is a pause. *standing_by*: what a master without state says of who leads."""
        now, wall = trio.current_time(), time.time()
        since = round(wall - (now - self.started_at))
        if state is not None:
            yield from self.timeline.look(state, now, wall, since=since)
            return
        leader, why = standing_by.leader, standing_by.why
        line = f"this master stands by: {leader} leads" if leader else f"nobody is known to lead{why and ': ' + why}"
        about = {"version": package_version(), "since": since, "groups": [], "more": 0}
        yield "top", {"well": bool(leader), "line": line, "note": "", **about}
