"""Watches links and operations: makes stuck links anew, tells the master and the log what waits. A trio shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import trio

from wancoll.peer.core.grid import next_on_grid
from wancoll.peer.core.links import P2P, Broken, MemberLinks
from wancoll.peer.core.liveness import slow_ops
from wancoll.peer.core.liveness.slow_ops import WaitLog
from wancoll.peer.core.liveness.stalls import LinkView, Stalls
from wancoll.peer.session import Host, Session
from wancoll.wire import messages as m

log = structlog.get_logger("wancoll.wait")

_LOOK = 0.25  # seconds between looks at the lanes
_SHARE = 0.05  # of a processor that looks may take, where there are very many lanes
_SETTLED = 3  # heartbeats until the other end's word has come here by way of the master
_ASK_PLACE = 2.0  # seconds without a place in the group until the master is asked what for, and again and again
_LESS_OFTEN = 1.25  # times as long as when the client was told last
_CLIENT_TOLD = 32  # times that a client is told of one call


@dataclass(slots=True)
class _Watched:
    """What is known of a session's slow operations."""

    waits: m.Waits | None = None
    verdict: m.Waited | None = None
    log: WaitLog = field(default_factory=WaitLog)
    told: tuple[int, str] = (0, "")  # the client: which call, what
    answered: float = 0.0  # seconds that the call had waited when it was told without the master
    times: int = 0
    asked_at: float = 0.0  # what it waits for, before it has a place


class Watcher:
    """Watches links and operations of a daemon."""

    def __init__(self, daemon: Host) -> None:
        self._daemon, self._limits = daemon, daemon.config.limits
        self._stalls = Stalls()
        self._known_at: dict[int, float] = {}  # by engine id of a link: when the master last said who holds bytes back
        self._watched: dict[Session, _Watched] = {}

    async def run(self) -> None:
        """Task: look at the lanes, and report with every heartbeat."""
        report_at, ready_at = trio.current_time(), trio.current_time()
        while True:
            await trio.sleep_until(next_on_grid(ready_at, _LOOK))
            now = trio.current_time()
            self._look(now)
            ready_at = now + (trio.current_time() - now) / _SHARE
            if now >= report_at:
                report_at = next_on_grid(now, self._daemon.control.interval)
                self._report(now)

    def _look(self, now: float) -> None:
        self._stalls.look(now, self._daemon.links.looks())
        settled = self._limits.slow_after + _SETTLED * self._daemon.control.interval
        for stuck in self._stalls.stuck(now, self._limits.lane_timeout, settled, self._known_at):
            if not (stuck.alone and self._daemon.links.cut_lane(stuck.link, stuck.lane, stuck.reason)):
                self._daemon.links.step(Broken(stuck.link, stuck.reason))

    def _report(self, now: float) -> None:
        sessions = self._daemon.sessions
        self._watched = {session: self._watched.get(session) or _Watched() for session in sessions}
        live = {number for session in sessions for number, _ in _numbers(session.links)}
        self._known_at = {number: at for number, at in self._known_at.items() if number in live}
        for session, watched in self._watched.items():
            member = session.peek  # what the engine has to itself is young
            watched.waits = None
            if not member.over:
                watched.waits = self._waits_of(session, now)
            if watched.waits is not None and not member.master_session.reporting:
                self._daemon.control.send(watched.waits)
            self._note(session, watched, now)
            self._answer(session, watched)
            if member.view is None and member.mid and not member.over:
                self._ask_place(session, watched, now)

    def _waits_of(self, session: Session, now: float) -> m.Waits | None:
        links = self._seen(session.links, now)
        return slow_ops.report(session.peek, links, now, self._limits.slow_after, session.lacks_input)

    def _ask_place(self, session: Session, watched: _Watched, now: float) -> None:
        if now >= max(watched.asked_at, session.attached_at) + _ASK_PLACE:
            watched.asked_at = now
            self._daemon.control.send(m.AskPlace(session.member.group, session.member.mid))

    def _seen(self, links: MemberLinks, now: float) -> list[slow_ops.Seen]:
        found = []
        for link in list(links.links.values()):
            if link.up:
                view, reason = self._stalls.view(link.number, now), ""
            else:
                down = now - link.changed_at
                view, reason = LinkView("down", down, down, 0, down), link.reason
            found.append(slow_ops.Seen(link.other.mid, link.channel == P2P, view, reason))
        return found

    def _note(self, session: Session, watched: _Watched, now: float) -> None:
        """Log that a wait has begun, once the master had time to say whose fault it is, or that it has ended."""
        oldest = watched.waits.ops[0] if watched.waits is not None and watched.waits.ops else None
        key = (oldest.seq, oldest.what) if oldest is not None else None
        if took := watched.log.ended(key, now):
            log.info("operation waits no more", member=session.member.name, seconds=round(took, 1))
        if oldest is None or watched.waits is None:
            watched.verdict = None
        elif oldest.age >= self._limits.slow_after + 2 * self._daemon.control.interval and watched.log.begins(
            key, now - oldest.age, now
        ):
            local = self._seen_here(session, watched.waits, oldest)
            text = watched.verdict.text if watched.verdict is not None else ""
            log.info("operation waits", member=session.member.name, here=local, text=text)

    def _seen_here(self, session: Session, report: m.Waits, oldest: m.OpWait) -> str:
        unheard = session.member.collectives.unheard(oldest.seq)
        return slow_ops.local_words(report, self._namer(session), unheard, self._daemon.master_away())

    def _answer(self, session: Session, watched: _Watched) -> None:
        """There is no master to say what the client's call waits for: say it, less and less often; take it back."""
        report = watched.waits
        if report is None or not report.ops:
            watched.answered = 0.0
            return
        oldest = report.ops[0]
        away = bool(self._daemon.master_away())
        if oldest.age < watched.answered:
            watched.answered = 0.0  # another one
        if (away and oldest.age >= _LESS_OFTEN * watched.answered) or (not away and watched.answered):
            watched.answered = oldest.age if away else 0.0
            self._tell_client(session, watched, self._seen_here(session, report, oldest))

    # ---- what the master says ------------------------------------------------------------------------

    def waited(self, session: Session, message: m.Waited) -> None:
        """The master's answer to a report: whose fault it is, and who holds bytes back for good reason."""
        watched = self._watched.get(session)
        if watched is None or message.epoch != session.member.epoch_number:
            return
        now = trio.current_time()
        watched.verdict = message
        for number, other in _numbers(session.links):
            self._known_at[number] = now
            if other in message.parked:
                self._stalls.excuse(number, now)
        if message.text:
            self._tell_client(session, watched, message.text)

    def _tell_client(self, session: Session, watched: _Watched, text: str) -> None:
        """Once for each change, and not too often, since it may not read."""
        call = session.member.oldest_call
        if call != watched.told[0]:
            watched.times = 0
        if call and (call, text) != watched.told and watched.times < _CLIENT_TOLD:
            watched.told = call, text
            watched.times += 1
            session.tell(m.Slow(call, text))

    # ---- status --------------------------------------------------------------------------------------

    def status(self, session: Session) -> dict[str, object]:
        """What the session's member waits for, for the daemon's status."""
        watched, now = self._watched.get(session) or _Watched(), trio.current_time()
        text = watched.verdict.text if watched.verdict is not None else ""
        return {**slow_ops.plain(self._waits_of(session, now), self._namer(session)), "master_says": text}

    def _namer(self, session: Session) -> Callable[[int], str]:
        epoch = session.member.epoch
        names = {one.mid: one.name for one in epoch.members} if epoch is not None else {}
        return lambda mid: names.get(mid, f"member {mid}")


def _numbers(links: MemberLinks) -> list[tuple[int, int]]:
    """Engine id and the other's mid, of the links that are up."""
    return [(link.number, link.other.mid) for link in links.links.values() if link.up]
