"""The master as a state machine: step(state, now, event) gives the commands to carry out, in order. Pure.

    member states: joining -> member -> gone
    joining  Join was accepted; the group forms, or the joiner is being probed and waits for update_membership
    member   has a rank in the group's current epoch
    gone     left, lost with its daemon, or evicted: forgotten here; its mid is never given out again

The shell calls step() for everything that happens, one at a time, and a Tick at next_deadline(). Expected
failures are events; a peer that talks nonsense is told so and cut off, and that is all it can do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import inf
from typing import Any

from wancoll.errors import ConfigError, ProtocolError
from wancoll.limits import PROTOCOL_VERSION, Limits
from wancoll.local import split_address
from wancoll.wire import messages as m
from wancoll_master.core import epochs, links, p2p, probing, rebuilding, waits
from wancoll_master.core.state import (
    Close,
    Command,
    Daemon,
    Disconnected,
    Event,
    Group,
    Member,
    Received,
    Send,
    SendStatus,
    State,
    StepDown,
    Used,
    clip,
)
from wancoll_master.plan import measuring


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
    lost_journal: bool = False,
) -> State:
    """The state of a master that starts *now*; *floor* (highest epoch used), *next_mid*, *used* are its journal's."""
    identity = int.from_bytes(hashlib.blake2b(b"identity", key=secret, digest_size=8).digest(), "big") | 1
    return State(
        limits,
        secret,
        term,
        floor,
        next_mid,
        highest_epoch=floor,
        identity=identity,
        used=dict(used or {}),
        inherited=set(used or {}),
        rejoin_until=now + limits.rejoin_grace,
        elected=elected,
        lost_journal=lost_journal,
    )


def next_deadline(state: State) -> float:
    """When the shell must call step() with a Tick (inf: not at all). May only move earlier between ticks."""
    return state.deadline


def step(state: State, now: float, event: Event) -> list[Command]:
    """Take in one event.

    Args:
        state: changed in place.
        now: seconds on the shell's clock.
        event: what happened.

    Returns:
        Commands, to be carried out in this order before the next step.
    """
    out: list[Command] = []
    state.now, state.out = now, out
    if isinstance(event, Received):
        daemon = state.connections.get(event.conn)
        try:
            if daemon is None:
                _first_message(state, event.conn, event.message)
            else:
                daemon.heard_at = now
                handler = _OF_MEMBER.get(type(event.message))
                if handler is not None:
                    _from_member(state, daemon, event.message, handler)
                else:
                    _from_daemon(state, daemon, event.message)
        except ProtocolError as nonsense:
            _cut_off(state, event.conn, nonsense)
    elif isinstance(event, Disconnected):
        daemon = state.connections.get(event.conn)
        if daemon is not None:
            _end_daemon(state, daemon, f"daemon {daemon.name}: {event.reason}", close=False)
    else:
        _tick(state)
    return out


# ---- connections ------------------------------------------------------------------------------------


def _first_message(state: State, conn: int, message: m.FromPeer) -> None:
    if isinstance(message, m.StatusRequest):
        _status(state, conn, message)
        state.out.append(Close(conn, ""))
    elif isinstance(message, m.Hello):
        _hello(state, conn, message)
    else:
        raise ProtocolError("did not introduce itself", expected="Hello first", got=type(message).__name__)


def _check_protocol(theirs: int) -> None:
    if theirs != PROTOCOL_VERSION:
        raise ProtocolError(
            "speaks another version of the protocol",
            expected=f"version {PROTOCOL_VERSION}",
            got=str(theirs),
            hint="run the same wancoll version everywhere",
        )


def _check_addresses(addresses: list[str]) -> None:
    for address in addresses:
        try:
            host, port = split_address(address)
        except ConfigError:
            host, port = "", 0
        if not host or not port:
            raise ProtocolError(
                "cannot be dialled at its address",
                expected="host:port, IPv6 in brackets: [::1]:7400",
                got=repr(address),
                hint="give its daemon --advertise HOST:PORT",
            )


def _hello(state: State, conn: int, hello: m.Hello) -> None:
    _check_protocol(hello.protocol)
    _check_addresses(hello.addresses)
    old = state.daemons.get(hello.daemon)
    if old is not None:
        same = old.incarnation == hello.incarnation
        cause = "connected again" if same else "was started anew, or two daemons have its name"
        _end_daemon(state, old, f"daemon {old.name} {cause}", close=True)
    if hello.master not in (0, state.identity) and hello.term >= state.term:  # the journal was lost
        if state.elected:
            why = f"daemon {hello.daemon} has seen term {hello.term}, this master's is {state.term}"
            state.out.append(StepDown(clip(why), hello.term))
            return
        state.term, state.lost_journal = hello.term + 1, True
    daemon = Daemon(
        hello.daemon,
        conn,
        hello.incarnation,
        list(hello.addresses),
        hello.lanes,
        hello.site,
        state.now,
        hello.max_lanes,
        frozenset(hello.congestion_controls),
        hello.measures,
    )
    state.connections[conn] = state.daemons[daemon.name] = daemon
    limits = state.limits
    state.alarm(state.now + limits.heartbeat_timeout)
    times = limits.heartbeat_interval, limits.heartbeat_timeout
    welcome = m.Welcome(PROTOCOL_VERSION, state.term, *times, state.identity)
    state.out.append(Send(conn, welcome))
    gone = state.gone.pop(daemon.name, None)
    if gone is not None and gone.incarnation == hello.incarnation:
        for evicted in gone.evicted:
            state.out.append(Send(conn, evicted))
            rebuilding.remember(state, evicted)  # it may report before it hears this
    where = ", ".join(daemon.addresses)
    state.record(None, "daemon", clip(f"daemon {daemon.name} is here, version {hello.version}, lanes at {where}"))


def _status(state: State, conn: int, request: m.StatusRequest) -> None:
    _check_protocol(request.protocol)
    state.out.append(SendStatus(conn))


def _cut_off(state: State, conn: int, nonsense: ProtocolError) -> None:
    daemon = state.connections.get(conn)
    if daemon is None:
        state.out.append(Close(conn, clip(f"this connection {nonsense}")))
    else:
        why = clip(f"daemon {daemon.name} {nonsense}")
        _end_daemon(state, daemon, why, close=True)


def _end_daemon(state: State, daemon: Daemon, why: str, *, close: bool) -> None:
    rebuilding.drop(state, daemon)
    epochs.end_daemon(state, daemon, why, "lost", close=close)


# ---- messages ---------------------------------------------------------------------------------------


def _from_daemon(state: State, daemon: Daemon, message: m.FromPeer) -> None:
    match message:
        case m.Heartbeat(number, called):
            waits.heard(daemon, called, state.now)
            state.out.append(Send(daemon.conn, m.Pong(number, state.term)))
            if not number:
                rebuilding.synced(state, daemon)
        case m.Report():
            rebuilding.take(state, daemon, message)
        case m.Join():
            _join(state, daemon, message)
        case m.Leave(left, name):
            rebuilding.left(state, daemon, left, name)
            for member in list(daemon.members.values()):
                if member.group.name == left and member.name == name:
                    epochs.lose(state, [member], "left", "left", tell=False)
        case m.ProbeResult():
            reconsider = probing.result(state, daemon, message)
            if reconsider is not None:
                epochs.consider_update(state, reconsider)
        case m.LinkReport():
            for group in measuring.take(state, daemon, message):
                epochs.form_if_complete(state, group)
                epochs.consider_update(state, group)
        case m.StatusRequest():
            _status(state, daemon.conn, message)
        case _:
            raise ProtocolError("introduces itself twice", got=type(message).__name__)


def _from_member(state: State, daemon: Daemon, message: Any, handler: Callable[[State, Member, Any], None]) -> None:
    """A message about an epoch: dropped if its member or epoch is over."""
    member = state.members.get(message.mid)
    if member is None or not member.in_epoch:
        return
    group = member.group
    if member.daemon is not daemon or group.name != message.group:
        raise ProtocolError(
            "speaks for a member that is not its own",
            expected=f"a member of daemon {daemon.name} in group {message.group}",
            got=f"{member.name} of daemon {member.daemon.name} in group {group.name}",
        )
    if message.epoch == group.epoch:
        handler(state, member, message)
    elif isinstance(message, m.LinkDown) and message.epoch < group.epoch:
        links.told_late(state, member, message)
    elif message.epoch > group.epoch:
        raise ProtocolError(
            "names an epoch that has not begun", expected=f"{group.epoch} or earlier", got=str(message.epoch)
        )


_OF_MEMBER: dict[type, Callable[[State, Member, Any], None]] = {
    m.Done: epochs.done,
    m.UpdateMembership: epochs.update,
    m.Mismatch: epochs.mismatch,
    m.GiveUp: epochs.give_up,
    m.LinkDown: links.link_down,
    m.Waits: waits.take,
    m.P2PCall: p2p.call,
    m.P2PDone: p2p.done,
}


# ---- joining ----------------------------------------------------------------------------------------


def _join(state: State, daemon: Daemon, join: m.Join) -> None:
    group = state.groups.get(join.group)
    refusal = _why_not(state, daemon, join, group)
    if refusal:
        state.out.append(Send(daemon.conn, m.Refused(join.group, join.member, clip(refusal, 2000))))
        state.record(group, "refused", clip(f"{join.member} of daemon {daemon.name}: {refusal}"))
        return
    if group is None:
        group = Group(join.group, join.start_world, join.min_world, _group_key(state), state.floor)
        state.groups[group.name] = group
    rebuilding.raise_mids(state, join.was)
    mid = rebuilding.take_mid(state)
    member = Member(mid, join.member, daemon, group, was=join.was)
    state.members[mid] = daemon.members[mid] = member
    group.joining.append(member)
    if group.members:
        waits = (
            f"the group runs with {len(group.members)} members in epoch {group.epoch}; "
            "joiners are admitted where all members call update_membership()"
        )
    else:
        waits = f"{len(group.joining)} of {group.start_world} members are here to start the group"
        if epochs.held(state, group):
            state.alarm(state.rejoin_until)
            waits += "; the master has just started, and members of an earlier one may come back"
    state.out.append(Send(daemon.conn, m.Joined(group.name, member.name, mid, waits)))
    state.record(group, "joined", f"{member.name} of daemon {daemon.name} as {mid}; {waits}")
    if group.rebuild is not None:
        rebuilding.consider(state, group)
    measuring.ask_round_trips(state, group, daemon)
    epochs.form_if_complete(state, group)
    probing.ensure_probes(state, group)
    epochs.consider_update(state, group)


def _why_not(state: State, daemon: Daemon, join: m.Join, group: Group | None) -> str:
    """Why the join is refused, "" if it is not: who, expected, got."""
    who = f"{join.member} of daemon {daemon.name} asked to join group {join.group}"
    limit = state.limits.group_members
    if join.min_world > join.start_world:
        return f"{who} with min_world={join.min_world}; expected at most start_world={join.start_world}"
    if join.start_world > limit:
        return f"{who} with start_world={join.start_world}; expected at most {limit}"
    if len(daemon.members) >= limit:
        return f"{who}; expected at most {limit} members of one daemon"
    if group is None:
        return ""
    if (join.start_world, join.min_world) != (group.start_world, group.min_world):
        return (
            f"{who} with start_world={join.start_world}, min_world={join.min_world}; expected the group's "
            f"start_world={group.start_world}, min_world={group.min_world}: all members must state the same numbers"
        )
    everyone = group.members + group.joining
    for other in everyone:
        if other.name == join.member:
            return f"{who}, but that name is taken by a member of daemon {other.daemon.name}; choose another name"
    if len(everyone) >= limit:
        return f"{who}, which is full with {limit} members"
    described = sum(_described(other.daemon, other.name) for other in everyone)
    if described + _described(daemon, join.member) > state.limits.message_bytes // 2:
        return f"{who}, but names and addresses of all members would not fit into one message; use shorter ones"
    return ""


def _group_key(state: State) -> bytes:
    """Fresh for every group, since mids are; nobody without the secret can guess it."""
    return hashlib.blake2b(state.next_mid.to_bytes(8, "little"), key=state.secret, digest_size=16).digest()


def _described(daemon: Daemon, name: str) -> int:
    """Bytes that a member takes in an Epoch, at most."""
    return 32 + 4 * (len(name) + len(daemon.name) + len(daemon.site) + sum(map(len, daemon.addresses)))


# ---- time -------------------------------------------------------------------------------------------


def _tick(state: State) -> None:
    now, limits = state.now, state.limits
    if now - state.deadline > limits.heartbeat_interval:  # the master slept itself and has yet to read what came
        for daemon in state.daemons.values():
            daemon.heard_at = max(daemon.heard_at, now - limits.heartbeat_timeout / 2)
    for daemon in list(state.daemons.values()):
        if daemon.heard_at + limits.heartbeat_timeout <= now:
            why = f"daemon {daemon.name} was silent for {now - daemon.heard_at:.1f} s"
            _end_daemon(state, daemon, why, close=True)
    for group in list(state.groups.values()):
        if group.rebuild is not None:
            rebuilding.consider(state, group)
        if group.asking is not None and group.asking.deadline <= now:
            epochs.conclude_asking(state, group)
        if group.settle_at <= now:
            links.settle(state, group)
        if probing.deadline(group) <= now:
            probing.overdue(state, group)
            epochs.consider_update(state, group)
        if group.hold_until <= now:
            group.hold_until, group.waited = inf, True
            epochs.consider_update(state, group)
        if group.joining:  # it may have waited for a round trip
            epochs.form_if_complete(state, group)
            epochs.consider_update(state, group)
    state.deadline = min(
        [daemon.heard_at + limits.heartbeat_timeout for daemon in state.daemons.values()]
        + [_group_deadline(group) for group in state.groups.values()]
        + [state.rejoin_until for group in state.groups.values() if epochs.held(state, group)]
        + [
            at for group in state.groups.values() if group.joining and (at := measuring.waits_until(state, group)) > now
        ],
        default=inf,
    )


def _group_deadline(group: Group) -> float:
    asking = group.asking.deadline if group.asking is not None else inf
    rebuild = group.rebuild.deadline if group.rebuild is not None else inf
    return min(asking, rebuild, group.settle_at, group.hold_until, probing.deadline(group))
