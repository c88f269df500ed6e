"""The master as a state machine: step(state, now, event, planner) gives what must happen, and in which order. Pure.

ARCHITECTURE.md says which file decides what. All that a master decides is one of three: this is committed; this epoch
is over, and the next one has these members; this member is out. Everything else is what it has to know before it may
say so. A step never waits, so nothing comes between what it reads and what it decides. Work that grows with the square
of the members is not its own: the planner is handed in.

Expected failures are events. Whoever takes a message in raises ProtocolError where it contradicts what is known: its
daemon is told so and cut off, and that is all that nonsense can do. What a member says of an epoch counts in that epoch
alone (R12): late words are dropped here, in one place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from wancoll.errors import ProtocolError
from wancoll.limits import Limits, counted, few
from wancoll.wire import messages as m
from wancoll.wire.islands import parted
from wancoll.wire.kept import counts
from wancoll_master.core import counting, epochs, losses, p2p, rebuilding, reserved
from wancoll_master.core.liveness import (
    blame,
    confirming,
    link_faults,
    name_conflicts,
    operators,
    presence,
    stragglers,
    trainers,
)
from wancoll_master.core.liveness.suspicion import suspected
from wancoll_master.core.may import Refusal, may
from wancoll_master.core.paths import announced, flows, measuring, probing, ways
from wancoll_master.core.ready import (
    WATCHED,
    Disconnected,
    Event,
    Ready,
    Received,
    Returned,
    Send,
    SendStatus,
    SentAway,
    StepDown,
    Used,
    Watched,
)
from wancoll_master.core.state import Daemon, Group, Member, State, Step, clip, described
from wancoll_master.plan.planning import Planner

_JUMP = 1 << 40  # more than all masters of a group's life have counted to


def new_state(
    limits: Limits,
    secret: bytes,
    *,
    term: int = 1,
    floor: int = 0,
    next_mid: int = 1,
    used: dict[str, Used] | None = None,
    now: float = 0.0,
    elected: bool = False,
    elected_by: str = "",
    holds: bool = False,
    lost_journal: bool = False,
    announce: Sequence[str] = (),
    own_relay: bool = False,
) -> State:
    """The state of a master that starts *now*; *floor* (highest epoch used), *next_mid*, *used* are its journal's.

    *holds*: groups may run of which the journal knows nothing, so none forms before rejoin_grace is over.
    *lost_journal*: it lacks what an earlier master told.
    """
    identity = int.from_bytes(hashlib.blake2b(b"identity", key=secret, digest_size=8).digest(), "big") | 1
    return State(
        limits,
        secret,
        term,
        max(term, floor, next_mid) + _JUMP,
        floor,
        next_mid,
        highest_epoch=floor,
        identity=identity,
        used=dict(used or {}),
        inherited=set(used or {}),
        rejoin_until=now + limits.rejoin_grace,
        holds=holds or lost_journal,
        alone={name: now + one.alone for name, one in (used or {}).items() if one.former and one.alone},
        elected=elected,
        elected_by=elected_by,
        lost_journal=lost_journal,
        announce=tuple(announce),
        own_relay=own_relay,
    )


def step(state: State, now: float, event: Event, planner: Planner) -> Ready:
    """Take in one event: change *state* in place, and return what must happen, in which order.

    *now* is seconds on the shell's clock; *planner* makes the plans of epochs that begin. Steps' results are carried
    out in the order of steps.
    """
    this = Step(state, now, planner)
    _take(this, event)
    for waited in name_conflicts.unopposed(state) if state.twins else ():
        _take(this, waited)
    for daemon, join in name_conflicts.decided(this) if state.postponed else ():
        _join(this, daemon, join)
        epochs.settle(this)
    return this.ready


def _take(this: Step, event: Event) -> None:
    state = this.state
    if isinstance(event, Received):
        daemon = state.connections.get(event.conn)
        try:
            if (refusal := may(event.identity, event.message)) is not None:
                _refuse(this, daemon, event, refusal)
            elif daemon is None:
                _first_message(this, event)
            else:
                presence.heard(this, daemon, counts=counts(event.message))
                name_conflicts.first_is_heard(this, daemon)
                handler = _OF_MEMBER.get(type(event.message))
                if handler is not None:
                    _from_member(this, daemon, event.message, handler)
                else:
                    _from_daemon(this, daemon, event)
                if isinstance(event.message, m.Report | m.Frozen):
                    epochs.settle(this)  # it may have been the last one
                    rebuilding.make_room(this, daemon)
        except ProtocolError as nonsense:
            _cut_off(this, event.conn, nonsense)
    elif isinstance(event, Disconnected):
        presence.disconnected(this, event)
    elif isinstance(event, SentAway):
        presence.sent_away(this, event.reasons)
    elif isinstance(event, Returned):
        presence.returned(this, event.conn, event.hello)
    elif isinstance(event, Watched):
        state.watched_until = event.until
    else:
        _tick(this)
    epochs.settle(this)


# ---- connections ------------------------------------------------------------------------------------


def _refuse(step: Step, daemon: Daemon | None, event: Received, why: Refusal) -> None:
    """Answer who may not say it, in the way that it understands; the 1st, 2nd, 4th, 8th, ... of a kind is recorded."""
    message, kind = event.message, type(event.message).__name__
    step.state.refused[kind] += 1
    times = step.state.refused[kind]
    if times & (times - 1) == 0:
        step.record(None, "refused", f"{why.who} {why}; {times} times {kind} so far", kept=False)
    if isinstance(message, m.Join) and daemon is not None:
        step.send(daemon.conn, m.Refused(message.group, message.member, clip(f"{why.who} {why}", 2000)))
    elif isinstance(message, m.Evict | m.AskToLeave):
        step.send(event.conn, m.EvictAnswer(False, why.what, why.expected, why.who, why.hint))
        step.close(event.conn, "")
    else:
        if not isinstance(message, m.Hello) or daemon is not None:
            raise why.error()
        step.close(event.conn, f"this connection {why.error()}", final=True)  # no wait gives it another role or name


def _first_message(step: Step, event: Received) -> None:
    conn, message = event.conn, event.message
    if isinstance(message, m.Hello) and name_conflicts.waits(step.state, conn):
        raise ProtocolError("introduces itself twice", got="Hello")
    if isinstance(message, m.StatusRequest | m.AskElection | m.Evict | m.AskToLeave):
        m.check_protocol(message)
    if isinstance(message, m.StatusRequest):
        _status(step, event)
        step.close(conn, "")
    elif isinstance(message, m.AskElection):
        step.ready.answers.append(Send(conn, presence.welcome(step, None)))
        step.close(conn, "")
    elif isinstance(message, m.Evict):
        operators.evict(step, conn, message)
    elif isinstance(message, m.AskToLeave):
        operators.ask_to_leave(step, conn, message)
    elif isinstance(message, m.Hello):
        try:
            m.check_protocol(message)
            announced.check(message.addresses, event.source, step.state.announce)
            announced.check(message.hints, "")
            _check_relay(step, event, message)
        except ProtocolError as bad:
            newcomer = not (message.master or message.term)  # for it no wait makes that right
            step.close(conn, f"this connection {bad}", final=newcomer)
            step.record(None, "refused", f"daemon {message.daemon}: this connection {bad}", kept=newcomer)
            return
        _hello(step, event, message)
    else:
        raise ProtocolError("did not introduce itself", expected="Hello first", got=type(message).__name__)


def _check_relay(step: Step, event: Received, hello: m.Hello) -> None:
    """Raise ProtocolError where one is too many, or has a relay's token and is none."""
    if event.identity is not None and event.identity.role == "relay" and not hello.relays:
        raise ProtocolError(
            "wants to be a daemon", expected="what its token is for: a relay",
            hint="`wancoll token create --role relay` is for `wancoll relay`, without --role for `wancoll peer`",
        )  # fmt: skip
    others = [one for one in step.state.relays if one.name != hello.daemon]
    if hello.relays and len(others) + step.state.own_relay >= m.MOST_RELAYS:
        raise ProtocolError("is one relay too many for this master", expected=f"at most {m.MOST_RELAYS}")


def _hello(step: Step, event: Received, hello: m.Hello) -> None:
    state, conn = step.state, event.conn
    if hello.master not in (0, state.identity) and state.term <= hello.term <= state.believable:  # the journal was lost
        if state.elected:
            why = f"daemon {hello.daemon} has seen term {hello.term}, this master's is {state.term}"
            step.ready.step_down = StepDown(clip(why), hello.term)
            return
        rebuilding.lose_journal(step, hello.term)
    if hello.daemon not in state.daemons and len(state.daemons) >= step.limits.daemons:
        raise ProtocolError(
            "is one daemon too many for this master", expected=f"at most {step.limits.daemons}",
            hint="its limit on open files (ulimit -n) may allow more",
        )  # fmt: skip
    presence.processes_ended(step, hello.ended)
    if not name_conflicts.admits(step, event, hello):
        return
    epochs.settle(step)  # what an earlier connection of it had comes to its end before this one begins
    daemon = Daemon(
        hello.daemon,
        conn,
        hello.incarnation,
        list(hello.addresses),
        hello.lanes,
        hello.site,
        step.now,
        hello.max_lanes,
        frozenset(hello.congestion_controls),
        hello.measures,
        hello.dial,
        master_grace=hello.master_grace or step.limits.master_grace,
        version=hello.version,
        cores=hello.cores,
        key=event.identity.key if event.identity is not None else b"",
        source=event.source,
        hints=list(hello.hints),
    )
    state.connections[conn] = state.daemons[daemon.name] = daemon
    step.alarm(step.now + step.limits.heartbeat_timeout)
    step.send(conn, presence.welcome(step, daemon))
    ways.comes(step, daemon, is_relay=hello.relays)
    for evicted in losses.tell_fates(step, daemon):
        losses.remember(step, evicted)  # it may report before it hears this
    where = ", ".join(daemon.addresses)
    step.record(None, "daemon", f"daemon {daemon.name} is here, version {hello.version}, lanes at {where}")


def _status(step: Step, event: Received) -> None:
    groups = event.identity.groups if event.identity is not None else ()
    step.ready.answers.append(SendStatus(event.conn, groups))
    step.state.watched_until = max(step.state.watched_until, step.now + WATCHED)  # the next one says what was sent


def _cut_off(step: Step, conn: int, nonsense: ProtocolError) -> None:
    daemon = step.state.connections.get(conn)
    if daemon is None:
        step.close(conn, f"this connection {nonsense}")
    else:
        presence.end(step, {daemon: f"daemon {daemon.name} {nonsense}"}, "evicted", close=True, cause="nonsense")


# ---- messages ---------------------------------------------------------------------------------------


def _from_daemon(step: Step, daemon: Daemon, event: Received) -> None:
    message = event.message
    match message:
        case m.Heartbeat(number):
            trainers.heard(step, daemon, message)
            flows.heard(step, daemon, message)
            watched = step.now < step.state.watched_until
            heard, clock = (daemon.heard, step.now) if number else (0, 0.0)
            pong = Send(daemon.conn, m.Pong(number, step.state.term, heard, watched, clock))
            if number:  # decides nothing: the master is not to seem silent while it writes
                step.ready.answers.append(pong)
            else:
                step.ready.messages.append(pong)
                rebuilding.synced(step, daemon)
        case m.Report():
            rebuilding.take(step, daemon, message)
        case m.Join():
            _join(step, daemon, message)
        case m.AskPlace(mid=mid):
            _tell_what_it_waits_for(step, daemon, mid)
        case m.Leave(left, name, reason, died, committed):
            rebuilding.left(step, daemon, left, name, reason)
            name_conflicts.withdraw(step.state, daemon, left, name)
            for member in list(daemon.members.values()):
                if member.group.name == left and member.name == name:
                    kind = "client died" if died else "evicted" if reason else "left"
                    cause = "daemon" if kind == "evicted" else ""
                    gone = {member: reason or kind}
                    losses.lose(step, gone, kind, tell=False, cause=cause, committed=committed)
        case m.Ended(ended):
            losses.ended(step, daemon, ended)
        case m.Stopping():
            daemon.stopping = True
        case m.ProbeResult(joiner=0):
            confirming.answered(step, daemon, message)
        case m.ProbeResult():
            reconsider = probing.result(step, daemon, message)
            if reconsider is not None:
                step.touch(reconsider)
        case m.LinkReport():
            for group in measuring.take(step, daemon, message):
                step.touch(group)
        case m.StatusRequest():
            m.check_protocol(message)
            _status(step, event)
        case _:
            raise ProtocolError("introduces itself twice", got=type(message).__name__)


def _from_member(step: Step, daemon: Daemon, message: Any, handler: Callable[[Step, Member, Any], None]) -> None:
    """A message about an epoch: dropped if its member or epoch is over."""
    member = step.state.members.get(message.mid)
    if member is None or not member.in_epoch:
        return
    group = member.group
    if member.daemon is not daemon or group.name != message.group:
        raise ProtocolError(
            "speaks for a member that is not its own",
            expected=f"a member of daemon {daemon.name} in group {message.group}",
            got=f"{member.name} of daemon {member.daemon.name} in group {group.name}",
        )
    if message.epoch == group.epoch or (isinstance(message, m.Written) and message.epoch < group.epoch):
        handler(step, member, message)
    elif isinstance(message, m.LinkDown) and message.epoch < group.epoch:
        link_faults.told_late(step, member, message)
    elif isinstance(message, m.Vote | m.Mismatch | m.GiveUp) and message.epoch < group.epoch:
        counting.has_called(step, member, message)
    elif message.epoch > group.epoch:
        raise ProtocolError(
            "names an epoch that has not begun", expected=f"{group.epoch} or earlier", got=str(message.epoch)
        )


_OF_MEMBER: dict[type, Callable[[Step, Member, Any], None]] = {
    m.Vote: counting.vote,
    m.Mismatch: counting.mismatch,
    m.GiveUp: counting.give_up,
    m.CalledWithGrace: counting.called_with_grace,
    m.Frozen: epochs.frozen,
    m.Differs: counting.differs,
    m.Written: counting.written,
    m.LinkDown: link_faults.link_down,
    m.Waits: blame.take,
    m.P2PCall: p2p.call,
    m.P2PDone: p2p.done,
}


# ---- joining ----------------------------------------------------------------------------------------


def _join(step: Step, daemon: Daemon, join: m.Join) -> None:
    group = step.state.groups.get(join.group)
    everyone = group.members + group.joining if group is not None else []
    island = parted(join.member, join.shards)[0]
    old = [one for one in everyone if not one.in_epoch and one.island == island and one.launch != join.launch]
    everyone = [one for one in everyone if one not in old]
    if any((one.was or one.mid) > join.was > 0 for one in old):  # it was away meanwhile: to join again is no new start
        refusal = f"{join.member} of daemon {daemon.name} asked again to join group {join.group}; expected a shard of "
        refusal += f"the newest start of island {island}; got launch {join.launch!r}: start it anew with the others"
        everyone = []  # nobody else speaks against it
    else:
        refusal = _why_not(step, daemon, join, group, everyone)
    silent = [member for member in everyone if suspected(step, member.daemon)] if refusal else []
    if silent and name_conflicts.may_postpone(step.state):
        others = [member for member in everyone if member not in silent]
        if not _why_not(step, daemon, join, group if others else None, others):
            waits = f"{refusal}: it waits, since nothing is heard of who speaks against it"
            name_conflicts.postpone(step, silent[0].daemon, daemon, join, waits)
            return
    if refusal:
        step.send(daemon.conn, m.Refused(join.group, join.member, clip(refusal, 2000)))
        step.record(group, "refused", f"{join.member} of daemon {daemon.name}: {refusal}")
        return
    if old:
        probing.refuse(step, old[0], f"its island {island} was started again: a shard of another launch has come")
    if group is None:
        group = Group(join.group, join.start_world, join.min_world, _group_key(step), step.state.floor)
        group.call_timeout, group.shards = join.call_timeout, join.shards
        step.state.groups[group.name] = group
    rebuilding.raise_mids(step, join.was)
    mid = rebuilding.take_mid(step)
    member = Member(mid, join.member, daemon, group, was=join.was, launch=join.launch)
    step.state.members[mid] = daemon.members[mid] = member
    group.joining.append(member)
    waits = _what_joiners_wait_for(step, group)
    if reserved.held(step, group):
        step.alarm(reserved.held_until(step.state, group.name))
    step.send(daemon.conn, m.Joined(group.name, member.name, mid, waits))
    step.record(group, "joined", f"{member.name} of daemon {daemon.name} as {mid}; {waits}")
    if group.rebuild is not None:
        rebuilding.consider(step, group)
    ways.tell_nearby(step, group, daemon)
    measuring.ask_round_trips(step, group, daemon)
    probing.ensure_probes(step, group)
    step.touch(group)


def _what_joiners_wait_for(step: Step, group: Group) -> str:
    if group.members:
        return (
            f"the group runs with {counted(len(group.members), 'member')} in epoch {group.epoch}; "
            "joiners are admitted where all members call update_membership()"
        )
    here = f"{len(group.joining)} of {reserved.wanted(step, group) * group.shards} members are here to start the group"
    return "; ".join(filter(None, (here, reserved.why_held(step.state, group.name, step.now))))


def _tell_what_it_waits_for(step: Step, daemon: Daemon, mid: int) -> None:
    """Also who is here, so that people see who is missing."""
    member = daemon.members.get(mid)
    if member is None or member.in_epoch:
        return
    group = member.group
    here = [one.name for one in group.members or group.joining]
    waits = f"{_what_joiners_wait_for(step, group)} (here: {few(here)})"
    step.send(daemon.conn, m.Joined(group.name, member.name, mid, clip(waits, 2000)))


def _why_not(step: Step, daemon: Daemon, join: m.Join, group: Group | None, everyone: list[Member]) -> str:
    """Why the join is refused if *everyone* stays in its group, "" if it is not: who, expected, got."""
    who = f"{join.member} of daemon {daemon.name} asked to join group {join.group}"
    limit = step.limits.group_members
    if join.min_world > join.start_world:
        return f"{who} with min_world={join.min_world}; expected at most start_world={join.start_world}"
    if join.start_world > limit // join.shards:
        return f"{who} with start_world={join.start_world}; expected at most {limit // join.shards}"
    if parted(join.member, join.shards)[1] < 0:
        return f"{who} with shards={join.shards}; expected a name ISLAND/SHARD, with a shard below that"
    if len(daemon.members) >= limit:
        return f"{who}; expected at most {limit} members of one daemon"
    if len(step.state.members) >= step.limits.members:
        return f"{who}; expected at most {step.limits.members} members of one master"
    if group is None and len(step.state.groups) >= step.limits.groups:
        return f"{who}, a new one; expected at most {step.limits.groups} groups of one master"
    if group is None:
        return ""
    if join.shards != group.shards:
        return f"{who} with shards={join.shards}; expected the group's shards={group.shards}: all islands have as many"
    if (join.start_world, join.min_world) != (group.start_world, group.min_world):
        return (
            f"{who} with start_world={join.start_world}, min_world={join.min_world}; expected the group's "
            f"start_world={group.start_world}, min_world={group.min_world}: all members must state the same numbers"
        )
    if join.call_timeout != group.call_timeout:
        return (
            f"{who} with call_timeout={join.call_timeout:g}; expected the group's {group.call_timeout:g} "
            "(0: not stated): all members must state the same number"
        )
    for other in everyone:
        if other.name == join.member:
            return f"{who}, but that name is taken by a member of daemon {other.daemon.name}; choose another name"
    if len(everyone) >= limit:
        return f"{who}, which is full with {limit} members"
    nbytes = sum(other.described for other in everyone) + described(daemon, join.member)
    if nbytes > step.limits.message_bytes // 2:
        return f"{who}, but names and addresses of all members would not fit into one message; use shorter ones"
    return ""


def _group_key(step: Step) -> bytes:
    """Fresh for every group, since mids are; nobody without the secret can guess it."""
    return hashlib.blake2b(step.state.next_mid.to_bytes(8, "little"), key=step.state.secret, digest_size=16).digest()


# ---- time -------------------------------------------------------------------------------------------


def _tick(step: Step) -> None:
    now, limits = step.now, step.limits
    slept = now - step.state.deadline  # itself, and it has yet to read what came meanwhile
    for daemon in step.state.daemons.values() if slept > limits.doubt_grace else ():
        if daemon.away:
            daemon.away_since = max(daemon.away_since, now - limits.return_grace / 2)
        if slept > limits.heartbeat_interval:
            daemon.heard_at = max(daemon.heard_at, now - limits.heartbeat_timeout / 2)
    look_again = presence.judge(step)
    for group in list(step.state.groups.values()):
        if group.rebuild is not None:
            rebuilding.consider(step, group)
        for until, act in _TIMERS:
            if until(group) <= now:
                act(step, group)
        if group.joining:  # it may have waited for a round trip
            step.touch(group)
    epochs.settle(step)
    deadlines = [look_again]
    for name, group in step.state.groups.items():
        deadlines += [until(group) for until, _ in _TIMERS]
        if group.rebuild is not None:
            deadlines.append(rebuilding.deadline(step.state, group.rebuild))
        if reserved.held(step, group):
            deadlines.append(reserved.held_until(step.state, name))
        if group.joining and (at := measuring.waits_until(step, group)) > now:
            deadlines.append(at)
    step.state.deadline = min(deadlines)


def _hold_no_longer(step: Step, group: Group) -> None:
    """An update_membership has waited long enough for probes of joiners."""
    group.current.hold_until, group.current.waited = inf, True
    step.touch(group)


# What a group waits for: until when, and what is done then.
_TIMERS: tuple[tuple[Callable[[Group], float], Callable[[Step, Group], None]], ...] = (
    (
        lambda group: group.current.asking.deadline if group.current.asking is not None else inf,
        counting.conclude_asking,
    ),
    (lambda group: closing.until if (closing := group.current.closing) is not None else inf, presence.judge_frozen),
    (lambda group: group.current.claim[1], rebuilding.judge_claim),
    (lambda group: group.current.grace_until, stragglers.look),
    (lambda group: group.current.settle_at, link_faults.settle),
    (probing.deadline, probing.overdue),
    (lambda group: group.current.hold_until, _hold_no_longer),
)
