"""Daemons: here, away, back, or evicted (R11, R18). Pure.

A daemon is here, or away from when its connection broke until it is back with the same session, or its time is over.

If the master hears nobody, the fault is the master's own network: nobody is evicted for silence until rejoin_grace
after one is heard again. Where all are away, the first one that is back begins the others' return_grace anew.
name_conflicts.py says what waits for a daemon's fate, suspicion.py what silence means before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll_master.core import losses, rebuilding, reserved
from wancoll_master.core.liveness import confirming
from wancoll_master.core.liveness.suspicion import UNHEARD, suspected
from wancoll_master.core.ready import Disconnected, Send
from wancoll_master.core.state import Daemon, Group, State, Step

_ROUND_TRIPS = 8  # to come back where the way is long: three dials with TLS, of which two break again
FREEZES = 2  # times heartbeat_timeout: a member's end may have to find out first that nothing arrives there
_UNSTEADY = 2  # times as long at most, for a daemon that is heard with gaps


def welcome(step: Step, daemon: Daemon | None, *, resumed: bool = False) -> m.Welcome:
    """The answer to the daemon's Hello; None: to somebody who only asks."""
    limits, state = step.limits, step.state
    times = limits.heartbeat_interval, limits.heartbeat_timeout
    session, heard = (daemon.conn, daemon.heard if resumed else 0) if daemon is not None else (0, 0)
    told = PROTOCOL_VERSION, state.term, *times, state.identity, session, resumed, heard
    return m.Welcome(*told, state.elected_by)


def heard(step: Step, daemon: Daemon, *, counts: bool) -> None:
    """The daemon lives. *counts*: it would say this message again over another connection."""
    if suspected(step, daemon):
        daemon.steady_since = step.now
    daemon.heard_at, daemon.broken_since = step.now, inf
    daemon.heard += counts
    hears(step)


# ---- away, and back -----------------------------------------------------------------------------------


def disconnected(step: Step, event: Disconnected) -> None:
    """A connection is gone. Unless that is lasting, a daemon with members has a while to take it up again."""
    step.state.forget_twin(event.conn)
    daemon = step.state.connections.get(event.conn)
    if daemon is None:
        return
    why = f"daemon {daemon.name}: {event.reason}"
    if daemon.stopping:
        end(step, {daemon: f"daemon {daemon.name} has stopped"}, "left", close=daemon.away)
        return
    if event.lasting or not any(member.in_epoch for member in daemon.members.values()):
        end(step, {daemon: why}, "daemon died", close=daemon.away)
        return
    daemon.away_since, daemon.away_why = step.now, why
    daemon.broken_since = min(daemon.broken_since, step.now)
    daemon.round_trip = event.round_trip or daemon.round_trip
    at = due(step, daemon)
    step.alarm(at)
    step.record(None, "away", f"{why}; it may come back within {at - step.now:.3g} s")
    confirming.went_away(step, daemon)


def returning(state: State, hello: m.Hello) -> int | None:
    """The connection that a daemon which says this may go on with; None: it is a new one."""
    daemon = state.daemons.get(hello.daemon)
    if daemon is None or hello.protocol != PROTOCOL_VERSION or hello.dial <= daemon.dial:
        return None
    mine = daemon.incarnation, state.identity, daemon.conn, daemon.addresses
    same = (hello.incarnation, hello.master, hello.session, list(hello.addresses)) == mine
    return daemon.conn if same else None


def returned(step: Step, conn: int, hello: m.Hello) -> None:
    """The daemon has taken its connection up again."""
    daemon = step.state.connections[conn]
    gap = step.now - (daemon.broken_since if daemon.away else daemon.heard_at)
    if all(one.away for one in step.state.daemons.values()):  # nobody could come back until now
        for one in step.state.daemons.values():
            one.away_since = step.now
    daemon.heard_at = daemon.steady_since = step.now
    daemon.away_since, daemon.dial = inf, hello.dial
    confirming.forget(daemon)
    hears(step)
    step.ready.answers.append(Send(conn, welcome(step, daemon, resumed=True)))
    step.record(None, "back", f"daemon {daemon.name} is back after {gap:.1f} s, and goes on")
    for group in daemon.groups:
        step.touch(group)


# ---- the end ------------------------------------------------------------------------------------------


def end(step: Step, ended: Mapping[Daemon, str], kind: str, *, close: bool, cause: str = "") -> None:
    """End daemons, each for its reason. With *close* the master ends their connections and says why.

    *kind* is the event log's: "left", "daemon died", or "evicted" where the master gives up one that may live.
    """
    for daemon in ended:
        rebuilding.drop(step, daemon)
    losses.end_daemons(step, ended, kind, close=close, cause=cause)


def processes_ended(step: Step, incarnations: Collection[int]) -> None:
    """End the daemons with these incarnations: a later daemon of their machine found their process locks free (C8)."""
    over = set(incarnations) - {0}  # 0: not known
    why = "the daemon's process has ended, as a later one of its machine says"
    ended = {one: f"daemon {one.name}: {why}" for one in step.state.daemons.values() if one.incarnation in over}
    for name, used in list(step.state.used.items()) if over else ():
        lost = {mid: one.name for mid, one in used.former.items() if one.daemon in over}
        if lost and lost.keys() == used.former.keys() and name in step.state.inherited:  # the last of a group of before
            step.record(None, "daemon died", f"lost {', '.join(lost.values())}: {why}", once=name)
        reserved.stopped(step, name, lost)
    if ended:
        end(step, ended, "daemon died", close=True)


def sent_away(step: Step, reasons: Mapping[int, str]) -> None:
    """End connections, each for its reason, as an operator wanted: one epoch for all who are out."""
    for conn in reasons:
        step.state.forget_twin(conn)
    here = {step.state.connections[conn]: why for conn, why in reasons.items() if conn in step.state.connections}
    if here:
        ended = {daemon: f"daemon {daemon.name} was sent away: {why}" for daemon, why in here.items()}
        end(step, ended, "evicted", close=False, cause="operator")


def judge(step: Step) -> float:
    """Evict the daemons whose time is over. Returns when to look again.

    Daemons of a site that is cut off fall silent within one heartbeat of each other. So all whose time is about to be
    over are judged with the last of them, but no later than a heartbeat after the first: one epoch, not one for each.
    """
    state, now = step.state, step.now
    over = -inf < state.deaf_until <= now
    if over:
        state.deaf_until = -inf
    ended, look_again = confirming.ended(step)
    ended |= {daemon for at, daemon in _replaced(step) if at <= now}
    others = [daemon for daemon in state.daemons.values() if daemon not in ended]
    until = _all_due(step, others)
    if until <= now:
        if _is_deaf(step, others, over):
            until = state.deaf_until
        else:
            ended |= {daemon for daemon in others if due(step, daemon) <= now}
            until = min((due(step, daemon) for daemon in others if daemon not in ended), default=inf)
    if ended:
        reasons = {daemon: _why(step, daemon) for daemon in state.daemons.values() if daemon in ended}
        silent = any(not daemon.away for daemon in ended)
        end(step, reasons, "evicted" if silent else "daemon died", close=True, cause="silent" if silent else "")
    if state.deaf_until > now:
        until = min(until, state.deaf_until)
    return min([until, look_again, *(at for at, _ in _replaced(step))])


def due(step: Step, daemon: Daemon) -> float:
    """When the daemon is to be evicted, if nothing is heard of it."""
    limits = step.limits
    if daemon.away:
        grace = limits.return_grace + _ROUND_TRIPS * daemon.round_trip
        return min(daemon.away_since + grace, daemon.broken_since + limits.heartbeat_timeout)
    return daemon.heard_at + limits.heartbeat_timeout


def _why(step: Step, daemon: Daemon) -> str:
    return daemon.away_why if daemon.away else f"daemon {daemon.name} was silent for {step.now - daemon.heard_at:.1f} s"


def _replaced(step: Step) -> list[tuple[float, Daemon]]:
    """The daemons whose name a second one waits for, and when it gets the name if they are not heard."""
    named = [step.state.daemons[name] for name in step.state.twins if name in step.state.daemons]
    return [(due(step, daemon), daemon) for daemon in named]


def _all_due(step: Step, daemons: list[Daemon]) -> float:
    """When to judge them, together."""
    timeout, beat = step.limits.heartbeat_timeout, step.limits.heartbeat_interval
    dues = sorted(due(step, daemon) for daemon in daemons)
    if not dues or dues[0] > step.now:
        return dues[0] if dues else inf
    last = max(at for at in dues if at - timeout + min(timeout, 2 * beat) < step.now or at <= step.now)
    return min(last, dues[0] + beat)


def judge_frozen(step: Step, group: Group) -> None:
    """Evict members that were told to stop and do not say what they have finished, though their daemon is heard (C2).

    A daemon that is silent, or was silent for a while, may not have been told; but it is not excused for ever.
    """
    closing = group.current.closing
    if closing is None or closing.until > step.now:
        return
    bound = FREEZES * step.limits.heartbeat_timeout
    bounds = {
        member: min(max(closing.since, member.daemon.steady_since), closing.since + _UNSTEADY * bound) + bound
        for member in group.members
        if member.mid not in closing.reports and not suspected(step, member.daemon)
    }
    later = (at for at in bounds.values() if at > step.now)
    closing.until = min(later, default=step.now + step.limits.heartbeat_interval)
    late = [member for member, at in bounds.items() if at <= step.now]
    why = f"it was told to stop, and did not say within {bound:g} s what it has finished"
    if late:
        losses.lose(step, dict.fromkeys(late, why), "evicted", tell=True, cause="silent")


# ---- a deaf master ------------------------------------------------------------------------------------


def hears(step: Step) -> None:
    """A daemon is heard. If the master heard nobody before, the others have rejoin_grace from now on."""
    if step.state.deaf_until == inf:
        step.state.deaf_until = step.now + step.limits.rejoin_grace
        step.alarm(step.state.deaf_until)


def _is_deaf(step: Step, daemons: list[Daemon], over: bool) -> bool:
    """Whether it is the master that hears nobody, so that no silent daemon may be evicted now.

    *over*: it was deaf, and the daemons that have not come back since have had their time.
    """
    state, now = step.state, step.now
    timeout, beat = step.limits.heartbeat_timeout, step.limits.heartbeat_interval
    since = UNHEARD * beat
    if any(not daemon.away and due(step, daemon) <= now for daemon in daemons):
        since = max(since, timeout - 2 * beat)  # those who fell silent at about the same time
    unheard = sum(daemon.away or now - daemon.heard_at > since for daemon in daemons)
    if state.deaf_until == -inf and not over:
        if 2 * unheard <= len(daemons) or all(due(step, daemon) > now for daemon in daemons):
            return False
        text = f"{unheard} of {len(daemons)} daemons fell silent together, which may be this master's own network"
        grace = f"{step.limits.rejoin_grace:g} s"
        until = f"until {grace} after one is heard again" if unheard == len(daemons) else f"for {grace}"
        step.record(None, "deaf", f"{text}: nobody is evicted {until}")
        state.deaf_until = now + step.limits.rejoin_grace
    if unheard == len(daemons):
        state.deaf_until = inf
    return state.deaf_until > now
