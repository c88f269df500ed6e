"""Which daemons are there: those that fall silent, whose connection breaks, or that are there twice (R11, R18). Pure.

    a daemon is   from                                      until
    here          Hello; it has taken its connection up     silent for heartbeat_timeout, and not the master's own
                  again                                     fault: put out. Its connection breaks: away
    away          its connection broke                      it takes it up again: here. return_grace is over, or its
                                                            links broke, too, and its host says that it has ended
                                                            (doubts): put out
    a twin        Hello of another process under the name   the first one is heard: sent away. It is put out: here

A killed daemon and a broken connection look the same from here. But with a daemon's process its links break as well,
of which others tell at once: see confirming.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from wancoll.limits import PROTOCOL_VERSION
from wancoll.wire import messages as m
from wancoll_master.core import losses, rebuilding, reserved
from wancoll_master.core.liveness import confirming
from wancoll_master.core.ready import Disconnected, Send
from wancoll_master.core.state import Daemon, Group, State, Step

_UNSTEADY = 2  # times as long at most who is heard with gaps
FREEZES = 2  # times heartbeat_timeout: its end may have to find out first that nothing arrives there
_ROUND_TRIPS = 8  # more to come back, where the way is long: three dials with TLS, of which two break again
_UNHEARD = 1.5  # heartbeat intervals without a word after which a daemon counts as one that the master does not hear


def end(step: Step, ended: Mapping[Daemon, str], kind: str, *, close: bool, cause: str = "") -> None:
    """They are put out, each for its reason. With *close* the master ends the connections and says why.

    *kind* is the event log's: "left", "daemon died", or "evicted" where the master gives up one that may live.
    """
    for daemon in ended:
        rebuilding.drop(step, daemon)
    losses.end_daemons(step, ended, kind, close=close, cause=cause)


def processes_ended(step: Step, incarnations: Collection[int]) -> None:
    """By the word of a later daemon of their machine: they commit nothing any more, and are out (C8, R18)."""
    over = set(incarnations) - {0}  # that stands for who is not known
    why = "the daemon's process has ended, as a later one of its machine says"
    ended = {one: f"daemon {one.name}: {why}" for one in step.state.daemons.values() if one.incarnation in over}
    for name, used in list(step.state.used.items()) if over else ():
        lost = {mid: one.name for mid, one in used.former.items() if one.daemon in over}
        if lost and lost.keys() == used.former.keys() and name in step.state.inherited:  # the last of a group of before
            step.record(None, "daemon died", f"lost {', '.join(lost.values())}: {why}", once=name)
        reserved.stopped(step, name, lost)
    if ended:
        end(step, ended, "daemon died", close=True)


def heard(step: Step, daemon: Daemon, message: m.FromPeer, *, counts: bool) -> None:
    """It lives. *counts*: the message is one that it would say again."""
    if silent(step, daemon):
        daemon.steady_since = step.now
    daemon.heard_at, daemon.broken_since = step.now, inf
    daemon.heard += counts
    _hears(step)
    if daemon.name in step.state.twins:
        conn, hello = step.state.twins.pop(daemon.name)
        where, there = ", ".join(daemon.addresses), ", ".join(hello.addresses)
        why = (
            f"another daemon is named {daemon.name}, and answers: it is at {where}, this one at {there}; "
            "give each daemon a --name of its own"
        )
        # One that was here before may be the one whose name was taken; one at the same address, the same one started
        # anew, while what it had said before was on its way.
        newcomer = not (hello.master or hello.term) and hello.addresses != daemon.addresses
        step.close(conn, why, final=newcomer)
        text = f"a second daemon {daemon.name} at {there}: the one at {where} answers"
        step.record(None, "refused", text, kept=newcomer)


def welcome(step: Step, daemon: Daemon | None, *, resumed: bool = False) -> m.Welcome:
    """The answer to its Hello; None: to somebody who only asks."""
    limits, state = step.limits, step.state
    times = limits.heartbeat_interval, limits.heartbeat_timeout
    session, heard = (daemon.conn, daemon.heard if resumed else 0) if daemon is not None else (0, 0)
    told = PROTOCOL_VERSION, state.term, *times, state.identity, session, resumed, heard
    return m.Welcome(*told, state.elected_by)


# ---- a connection breaks ----------------------------------------------------------------------------


def disconnected(step: Step, event: Disconnected) -> None:
    """A connection is gone. Unless that is lasting, a daemon with members has a while to take it up again."""
    state = step.state
    state.forget_twin(event.conn)
    daemon = state.connections.get(event.conn)
    if daemon is None:
        return
    why = f"daemon {daemon.name}: {event.reason}"
    if daemon.stopping:
        end(step, {daemon: f"daemon {daemon.name} has stopped"}, "left", close=daemon.away)
        return
    has_members = any(member.in_epoch for member in daemon.members.values())
    if event.lasting or not has_members:
        end(step, {daemon: why}, "daemon died", close=daemon.away)
        return
    daemon.away_since, daemon.away_why = step.now, why
    daemon.broken_since = min(daemon.broken_since, step.now)
    daemon.round_trip = event.round_trip or daemon.round_trip
    due = _due(step, daemon)
    step.alarm(due)
    step.record(None, "away", f"{why}; it may come back within {due - step.now:.3g} s")
    if _links_are_lost(step, daemon) or confirming.found(step):
        confirming.doubt(step, daemon)


def sent_away(step: Step, reasons: Mapping[int, str]) -> None:
    """These connections are over, each for its reason, as an operator wanted: one epoch for all who are out."""
    ended: dict[Daemon, str] = {}
    for conn, why in reasons.items():
        step.state.forget_twin(conn)
        daemon = step.state.connections.get(conn)
        if daemon is not None:
            ended[daemon] = f"daemon {daemon.name} was sent away: {why}"
    if ended:
        end(step, ended, "evicted", close=False, cause="operator")


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
    gap = step.now - (daemon.away_since if daemon.away else daemon.heard_at)
    daemon.heard_at = daemon.steady_since = step.now
    daemon.away_since, daemon.dial = inf, hello.dial
    confirming.believe(daemon)
    _hears(step)
    step.ready.answers.append(Send(conn, welcome(step, daemon, resumed=True)))
    step.record(None, "back", f"daemon {daemon.name} is back after {gap:.1f} s, and goes on")
    for group in daemon.groups:
        step.touch(group)


def _links_are_lost(step: Step, daemon: Daemon) -> bool:
    """Whether a ring neighbour has lately lost its link to a member of this daemon."""
    since = step.now - step.limits.return_grace
    for member in daemon.members.values():
        if member.in_epoch:
            ring = member.group.members
            around = confirming.neighbours(ring, ring.index(member))
            told = (member.group.troubles.get((other.name, member.name)) for other in around)
            if any(one is not None and one.lost_at >= since for one in told):
                return True
    return False


# ---- the same name twice ----------------------------------------------------------------------------


def admits(step: Step, conn: int, hello: m.Hello) -> bool:
    """Whether the daemon that says this may be taken in as a new one now."""
    state = step.state
    _hears(step)
    old = state.daemons.get(hello.daemon)
    if old is None:
        return True
    if old.incarnation == hello.incarnation:
        if hello.dial < old.dial:
            step.close(conn, f"a newer connection of daemon {old.name} is here")
            return False
        end(step, {old: f"daemon {old.name} connected again"}, "evicted", close=True)
        return True
    known = state.twins.pop(old.name, None)
    if known is not None:
        step.close(known[0], f"another connection asks for the name {old.name}")
    state.twins[old.name] = conn, hello
    step.alarm(_due(step, old))
    return False


def waits(state: State, conn: int) -> bool:
    """Whether somebody waits for a name over this connection."""
    return any(twin == conn for twin, _ in state.twins.values())


def unopposed(state: State) -> list[tuple[int, m.Hello]]:
    """Twins whose name is free now: to be taken in."""
    free = [name for name in state.twins if name not in state.daemons]
    return [state.twins.pop(name) for name in free]


# ---- joins that only the silent oppose ----------------------------------------------------------------


def silent(step: Step, daemon: Daemon) -> bool:
    """Whether it is yet to be seen if the daemon lives: a job that was killed whole is started again meanwhile."""
    return daemon.away or step.now - daemon.heard_at > _UNHEARD * step.limits.heartbeat_interval


def may_postpone(state: State) -> bool:
    """Whether another join may wait."""
    return sum(map(len, state.postponed.values())) < state.limits.members


def postpone(step: Step, whom: Daemon, daemon: Daemon, join: m.Join, text: str) -> None:
    """The join waits until *whom* is heard or put out."""
    step.state.postponed.setdefault(whom, []).append((daemon, join))
    step.alarm(_due(step, whom))
    step.record(step.state.groups.get(join.group), "postponed", text)


def decided(step: Step) -> list[tuple[Daemon, m.Join]]:
    """Joins that wait no longer."""
    state = step.state
    over = [whom for whom in state.postponed if state.connections.get(whom.conn) is not whom or not silent(step, whom)]
    joins = [one for whom in over for one in state.postponed.pop(whom)]
    return [(daemon, join) for daemon, join in joins if state.connections.get(daemon.conn) is daemon]


def withdraw(state: State, daemon: Daemon, group: str, name: str) -> None:
    """Its client waits no longer."""
    for whom, joins in list(state.postponed.items()):
        left = [(of, join) for of, join in joins if of is not daemon or (join.group, join.member) != (group, name)]
        state.postponed[whom] = left
        if not left:
            del state.postponed[whom]


# ---- judging ----------------------------------------------------------------------------------------


def judge(step: Step) -> float:
    """Put out whom nobody hears any more. Returns when to look again.

    Of a site that is cut off, daemons fall silent within one heartbeat of each other. So where others are about to be
    put out, too, all wait for the last of them, but no longer than a heartbeat: one epoch, not one for each.

    If most daemons are not heard, the fault is the master's own network. It asks before it judges: nobody is put out
    as long as none is heard, and for rejoin_grace from then on, in which they may come back; but for those of whom
    one that is heard has found that they have ended.
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
            ended |= {daemon for daemon in others if _due(step, daemon) <= now}
            until = min((_due(step, daemon) for daemon in others if daemon not in ended), default=inf)
    if ended:
        reasons = {daemon: _why(step, daemon) for daemon in state.daemons.values() if daemon in ended}
        silent = any(not daemon.away for daemon in ended)
        end(step, reasons, "evicted" if silent else "daemon died", close=True, cause="silent" if silent else "")
    if state.deaf_until > now:
        until = min(until, state.deaf_until)
    return min([until, look_again, *(at for at, _ in _replaced(step))])


def judge_frozen(step: Step, group: Group) -> None:
    """Put out whose daemon is heard all the time, and who does not say what it has finished (C2).

    Who is not heard, or was not for a while, may not have been told; but not for ever.
    """
    closing = group.current.closing
    if closing is None or closing.until > step.now:
        return
    bound = FREEZES * step.limits.heartbeat_timeout
    due = {
        member: min(max(closing.since, member.daemon.steady_since), closing.since + _UNSTEADY * bound) + bound
        for member in group.members
        if member.mid not in closing.reports and not silent(step, member.daemon)
    }
    closing.until = min((at for at in due.values() if at > step.now), default=step.now + step.limits.heartbeat_interval)
    late = [member for member, at in due.items() if at <= step.now]
    why = f"it was told to stop, and did not say within {bound:g} s what it has finished"
    if late:
        losses.lose(step, dict.fromkeys(late, why), "evicted", tell=True, cause="silent")


def _replaced(step: Step) -> list[tuple[float, Daemon]]:
    """Those whose name a twin waits for, and when it gets it if they are not heard."""
    named = [step.state.daemons[name] for name in step.state.twins if name in step.state.daemons]
    return [(_due(step, daemon), daemon) for daemon in named]


def _all_due(step: Step, daemons: list[Daemon]) -> float:
    """When to judge them, together."""
    timeout, beat = step.limits.heartbeat_timeout, step.limits.heartbeat_interval
    dues = sorted(_due(step, daemon) for daemon in daemons)
    if not dues or dues[0] > step.now:
        return dues[0] if dues else inf
    last = max(at for at in dues if at - timeout + min(timeout, 2 * beat) < step.now or at <= step.now)
    return min(last, dues[0] + beat)


def _due(step: Step, daemon: Daemon) -> float:
    """When it is to be put out, if nothing is heard of it."""
    limits = step.limits
    if daemon.away:
        grace = limits.return_grace + _ROUND_TRIPS * daemon.round_trip
        return min(daemon.away_since + grace, daemon.broken_since + limits.heartbeat_timeout)
    return daemon.heard_at + limits.heartbeat_timeout


def _is_deaf(step: Step, daemons: list[Daemon], over: bool) -> bool:
    """Whether it is the master that hears nobody, so that who is silent now must not be put out.

    *over*: it was so, and who has not come back since has had its time.
    """
    state, now = step.state, step.now
    timeout, beat = step.limits.heartbeat_timeout, step.limits.heartbeat_interval
    since = _UNHEARD * beat
    if any(not daemon.away and _due(step, daemon) <= now for daemon in daemons):
        since = max(since, timeout - 2 * beat)  # those who fell silent at about the same time
    unheard = sum(daemon.away or now - daemon.heard_at > since for daemon in daemons)
    begins = state.deaf_until == -inf and not over
    if begins:
        overdue = any(_due(step, daemon) <= now for daemon in daemons)
        if 2 * unheard <= len(daemons) or not overdue:
            return False
        text = f"{unheard} of {len(daemons)} daemons fell silent together, which may be this master's own network"
        grace = f"{step.limits.rejoin_grace:g} s"
        until = f"until {grace} after one is heard again" if unheard == len(daemons) else f"for {grace}"
        step.record(None, "deaf", f"{text}: nobody is put out {until}")
        state.deaf_until = now + step.limits.rejoin_grace
    if unheard == len(daemons):
        state.deaf_until = inf
    return state.deaf_until > now


def _hears(step: Step) -> None:
    """The first that is heard again: the others have rejoin_grace from now on."""
    if step.state.deaf_until == inf:
        step.state.deaf_until = step.now + step.limits.rejoin_grace
        step.alarm(step.state.deaf_until)


def _why(step: Step, daemon: Daemon) -> str:
    if daemon.away:
        return daemon.away_why
    return f"daemon {daemon.name} was silent for {step.now - daemon.heard_at:.1f} s"
