"""Every structure that grows in a master and a daemon, and what bounds it: a new one fails here until it is listed."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = (
    "master/wancoll_master/core",
    "master/wancoll_master/core/liveness",
    "master/wancoll_master/core/paths",
    "master/wancoll_master/core/views",
    "master/wancoll_master/plan",
    "master/wancoll_master/store",
    "master/wancoll_master",
    "wancoll/peer/core",
    "wancoll/peer/core/liveness",
    "wancoll/peer/core/paths",
    "wancoll/peer/links",
    "wancoll/peer/watch",
    "wancoll/commit",
    "wancoll/peer",
    "wancoll/metrics",
    "wancoll/metrics/core",
    "wancoll/net",
    "wancoll/relay",
    "wancoll/trust",
)
_GROW = {"dict", "list", "set", "deque", "bytearray", "Pairs", "WeakSet", "Counter", "defaultdict"}


def _name(node: ast.expr | None) -> str:
    """The type's or function's own name, without its arguments."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _grows(annotation: ast.expr | None, value: ast.expr | None) -> bool:
    literal = isinstance(value, ast.Dict | ast.List | ast.Set)
    made = _name(value) if isinstance(value, ast.Call) else ""
    factory = value.keywords if isinstance(value, ast.Call) and made == "field" else []
    made_by = any(one.arg == "default_factory" and _name(one.value) in _GROW for one in factory)
    return literal or made in _GROW or made_by or (annotation is not None and _name(annotation) in _GROW)


def _found(path: Path) -> set[str]:
    """Attributes of the file's classes that begin as something that grows, as "Class.attribute"."""
    found = set()
    for one in ast.walk(ast.parse(path.read_text())):
        if not isinstance(one, ast.ClassDef):
            continue
        fields = [(of.target, of.annotation, of.value) for of in one.body if isinstance(of, ast.AnnAssign)]
        init = [of for of in one.body if isinstance(of, ast.FunctionDef) and of.name == "__init__"]
        for of in (inner for function in init for inner in ast.walk(function)):
            if isinstance(of, ast.AnnAssign):
                fields.append((of.target, of.annotation, of.value))
            elif isinstance(of, ast.Assign) and len(of.targets) == 1:
                fields.append((of.targets[0], None, of.value))
        for target, annotation, value in fields:
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if name and value is not None and _grows(annotation, value):
                found.add(f"{one.name}.{name}")
    return found


# What bounds it: a field of `limits`, a constant of its file, or what it is a part of.
BOUNDS = {
    "wancoll/commit/close.py: EpochOutcome.out": "members that have reported",
    "wancoll/commit/close.py: _Column.counts": "members that have reported",
    "wancoll/commit/close.py: _Column.named": "what they have reported (report_bytes)",
    "wancoll/commit/close.py: _Said.of": "members that have reported",
    "wancoll/commit/close.py: _Said.words": "members that have reported",
    "wancoll/commit/tally.py: Count.first": "shards",
    "wancoll/commit/tally.py: Count.votes": "group_members",
    "wancoll/commit/tally.py: Tally.open": "group_members, of each four times ops_in_flight, and zero_contributions",
    "wancoll/commit/tally.py: Tally._collected": "ops_in_flight, zero_contributions",
    "master/wancoll_master/core/state.py: Reported.finished": "group_members",
    "master/wancoll_master/core/leadership.py: StandbyResponder._waiting": "pending_connections",
    "wancoll/net/http.py: Request.headers": "_HEAD_BYTES",
    "wancoll/net/http.py: Answer.headers": "a few",
    "master/wancoll_master/page.py: Page._sections": "a few of each of MOST_GROUPS groups",
    "master/wancoll_master/core/views/page.py: GroupTimeline._lost_at": "_MOST_GROUPS_KNOWN",
    "master/wancoll_master/core/views/page.py: GroupTimeline._throughput": "MOST_GROUPS",
    "master/wancoll_master/core/views/page.py: GroupTimeline.epochs": "_EPOCHS",
    "master/wancoll_master/core/views/page.py: GroupTimeline.events": "EVENTS",
    "master/wancoll_master/core/views/page.py: _Throughput.samples": "_SAMPLES",
    "master/wancoll_master/core/ready.py: Held._waiting": "_HELD_FRAMES: the leader steps down beyond",
    "master/wancoll_master/core/ready.py: Persist.groups": "one step: groups",
    "master/wancoll_master/core/ready.py: Ready.answers": "one step",
    "master/wancoll_master/core/ready.py: Ready.closes": "one step: daemons",
    "master/wancoll_master/core/ready.py: Ready.log": "one step",
    "master/wancoll_master/core/ready.py: Ready.messages": "one step",
    "master/wancoll_master/core/ready.py: Used.former": "members that commit among themselves (32)",
    "master/wancoll_master/core/ready.py: Used.voids": "voids",
    "master/wancoll_master/core/state.py: Asking.calls": "group_members",
    "master/wancoll_master/core/state.py: Asking.fingerprints": "group_members",
    "master/wancoll_master/core/state.py: Closing.results": "what a report has, as often as somebody is evicted",
    "master/wancoll_master/core/state.py: Closing.able": "group_members",
    "master/wancoll_master/core/state.py: Current.ends": "group_members",
    "master/wancoll_master/core/state.py: Closing.reports": "group_members, report_bytes",
    "master/wancoll_master/core/state.py: Closing.of": "group_members",
    "master/wancoll_master/core/state.py: Closing.held": "report_bytes: each that has any",
    "master/wancoll_master/core/state.py: Rebuild.held": "report_bytes: each that has any",
    "master/wancoll_master/server.py: Server._lookups": "_LOOKUPS that are busy",
    "master/wancoll_master/core/state.py: Step.touched": "groups",
    "master/wancoll_master/core/state.py: Current.voids": "the first message that ends the epoch",
    "master/wancoll_master/core/state.py: Current.out": "group_members",
    "master/wancoll_master/core/state.py: Current.complaints": "bad_pairs",
    "master/wancoll_master/core/state.py: Current.straggler_deadlines": "WINDOW_FACTOR times ops_in_flight",
    "master/wancoll_master/core/state.py: Current.parks": "group_members, squared at worst",
    "master/wancoll_master/core/state.py: Daemon.witnesses": "daemons",
    "master/wancoll_master/core/state.py: Daemon.flows": "MOST of flows.py",
    "master/wancoll_master/core/state.py: Daemon.members": "group_members",
    "master/wancoll_master/core/state.py: Daemon.reported": "group_members",
    "master/wancoll_master/core/state.py: StragglerDeadline.calls": "group_members",
    "master/wancoll_master/core/state.py: StragglerDeadline.counts": "group_members",
    "master/wancoll_master/core/state.py: Group.awaited": "paths that the master asks about: a few of each daemon",
    "master/wancoll_master/core/state.py: Group.bad_pairs": "bad_pairs",
    "master/wancoll_master/core/state.py: Group.digest_failures": "WINDOW_FACTOR times ops_in_flight",
    "master/wancoll_master/core/state.py: Group.goodbyes": "group_members",
    "master/wancoll_master/core/state.py: Group.joining": "group_members",
    "master/wancoll_master/core/state.py: Group.members": "group_members",
    "master/wancoll_master/core/state.py: Group.losses": "bad_pairs",
    "master/wancoll_master/core/state.py: Group.stalls": "WINDOW_FACTOR times ops_in_flight",
    "master/wancoll_master/core/state.py: Group.troubles": "troubles",
    "master/wancoll_master/core/state.py: Group.voids": "voids",
    "master/wancoll_master/core/state.py: Member.gave_up": "voids",
    "master/wancoll_master/core/state.py: Member.probes": "group_members",
    "master/wancoll_master/core/state.py: P2PCalls.alone": "CALLS_PER_MEMBER for each member",
    "master/wancoll_master/core/state.py: P2PCalls.newest": "group_members",
    "master/wancoll_master/core/state.py: P2PCalls.open": "group_members",
    "master/wancoll_master/core/state.py: P2PCalls.running": "CALLS_PER_MEMBER for each member",
    "master/wancoll_master/core/state.py: P2PCalls.waiting": "CALLS_PER_MEMBER for each member",
    "master/wancoll_master/core/state.py: ProbePair.failed": "the two of the pair",
    "master/wancoll_master/core/state.py: Rebuild.lost": "group_members, report_bytes",
    "master/wancoll_master/core/state.py: Reported.goodbyes": "group_members",
    "master/wancoll_master/core/state.py: Rebuild.epochs": "group_members: epochs that somebody has reported",
    "master/wancoll_master/core/state.py: Rebuild.reports": "group_members, report_bytes",
    "master/wancoll_master/core/state.py: Daemon.hints": "8",
    "master/wancoll_master/core/state.py: State.reached": "MAX_PATHS",
    "master/wancoll_master/core/state.py: State.failed": "MAX_PATHS",
    "master/wancoll_master/core/state.py: State.relays": "MOST_RELAYS",
    "master/wancoll_master/core/state.py: State.asked": "paths that the master asks about: a few of each daemon",
    "master/wancoll_master/core/state.py: State.connections": "daemons",
    "master/wancoll_master/core/state.py: State.daemons": "daemons",
    "master/wancoll_master/core/state.py: State.alone": "groups_known",
    "master/wancoll_master/core/state.py: State.gone": "daemons_gone, each with group_members",
    "master/wancoll_master/core/state.py: State.groups": "groups",
    "master/wancoll_master/core/state.py: State.inherited": "GROUPS_KEPT of a store, and only fewer",
    "master/wancoll_master/core/state.py: State.leaves": "MOST_ASKED",
    "master/wancoll_master/core/state.py: State.members": "members",
    "master/wancoll_master/core/state.py: State.missing": "members_missing",
    "master/wancoll_master/core/state.py: State.refused": "kinds of messages",
    "master/wancoll_master/core/state.py: State.postponed": "members, in all",
    "master/wancoll_master/core/state.py: State.twins": "daemons: one for each name",
    "master/wancoll_master/core/state.py: State.used": "groups_known",
    "master/wancoll_master/plan/measures.py: Measures.paths": "MAX_PATHS",
    "master/wancoll_master/plan/measures.py: Measures.uplinks": "daemons, MAX_LANE_COUNTS of each",
    "master/wancoll_master/plan/measures.py: Pairs._of": "that of the pairs",
    "master/wancoll_master/plan/planning.py: Planned.tried": "max_lanes",
    "master/wancoll_master/store/etcd_store.py: EtcdStore._groups": "groups_known",
    "master/wancoll_master/store/etcd_store.py: EtcdStore._kept": "a key for each: MOST_TOKENS and MOST_NAMES",
    "master/wancoll_master/store/etcd_store.py: EtcdStore._whole": "replaced, not added to: an authority, a token",
    "master/wancoll_master/control_connections.py: Connections._kept": "daemons; unconfirmed_bytes",
    "master/wancoll_master/control_connections.py: Connections._streams": "daemons, pending_connections",
    "master/wancoll_master/control_connections.py: Connections._unsent": "connections",
    "master/wancoll_master/control_connections.py: Connections._went_on_as": "connections",
    "master/wancoll_master/control_connections.py: Connections.closing": "connections",
    "master/wancoll_master/server.py: Server._identities": "connections",
    "master/wancoll_master/server.py: Server._of_kinds": "kinds of events",
    "master/wancoll_master/server.py: Server._strangers": "connections",
    "master/wancoll_master/server.py: Server._telling": "two names",
    "master/wancoll_master/statuses.py: Statuses._newest": "_KEPT",
    "master/wancoll_master/server.py: Server._unknown": "connections of a standby",
    "master/wancoll_master/gate.py: Gate._unwritten": "rows of the registry",
    "wancoll/net/stream.py: Queues._of": "connections",
    "wancoll/peer/core/op_table.py: Attempts.ops": "ops_in_flight",
    "wancoll/peer/core/op_table.py: OpTable.open": "ops_in_flight",
    "wancoll/peer/core/calls.py: RepeatedCalls._calls": "_CALLS_KEPT",
    "wancoll/peer/core/calls.py: RepeatedCalls._worlds": "_WORLDS_KEPT",
    "wancoll/peer/core/collectives.py: Collectives._answered": "members of the epoch",
    "wancoll/peer/core/collectives.py: Collectives._kept": "ops_in_flight, zero_contributions",
    "wancoll/peer/core/collectives.py: Collectives._ahead": "group_members, each with ops_in_flight and zeros",
    "wancoll/peer/core/collectives.py: Collectives._early": "the last update_membership",
    "wancoll/peer/core/collectives.py: Collectives._alone": "ops_in_flight",
    "wancoll/peer/core/collectives.py: Collectives._complained": "operations of an epoch that the master ends",
    "wancoll/peer/core/collectives.py: Collectives._late": "zero_contributions, zero_contribution_bytes",
    "wancoll/peer/core/collectives.py: Collectives._said": "ops_in_flight, zero_contributions",
    "wancoll/peer/core/collectives.py: Collectives._leaving": "attempts in the engine",
    "wancoll/peer/core/collectives.py: Collectives._up": "group_members",
    "wancoll/peer/core/collectives.py: Collectives._voids": "voids",
    "wancoll/peer/core/links.py: Link.attached": "max_lanes",
    "wancoll/peer/core/links.py: Link.came": "max_lanes",
    "wancoll/peer/core/links.py: Link.connections": "max_lanes",
    "wancoll/peer/core/links.py: Link.dialled_again": "max_lanes",
    "wancoll/peer/core/links.py: Link.lost": "max_lanes",
    "wancoll/peer/core/links.py: Link.restored": "max_lanes",
    "wancoll/peer/core/links.py: Link.welcomed": "max_lanes",
    "wancoll/peer/core/links.py: Links._cut": "daemons that fault injection names",
    "wancoll/peer/core/links.py: Links._knocks": "pending_connections",
    "wancoll/peer/core/links.py: Links._open": "two for each pair of this daemon's members and theirs",
    "wancoll/peer/core/links.py: Links.members": "clients",
    "wancoll/peer/core/links.py: MemberLinks.links": "two for each member of the epoch",
    "wancoll/peer/core/links.py: MemberLinks.needed": "two for each member of the epoch",
    "wancoll/peer/core/liveness/masters.py: Masters.addresses": "the option's",
    "wancoll/peer/core/liveness/masters.py: Masters.met": "the option's, and leaders of the same origin",
    "wancoll/peer/core/op.py: Op.live": "attempts in the engine",
    "wancoll/peer/core/p2p.py: P2P._asked": "group_members",
    "wancoll/peer/core/p2p.py: P2P._up": "group_members",
    "wancoll/peer/core/p2p.py: P2P.failed": "_KEPT",
    "wancoll/peer/core/p2p.py: P2P.settlements": "_KEPT",
    "wancoll/peer/core/paths/pacing.py: Pacer._links": "links that are open",
    "wancoll/peer/core/paths/pacing.py: _Link.told": "max_lanes",
    "wancoll/peer/core/liveness/stalls.py: Stalls._links": "links that are open",
    "wancoll/peer/core/liveness/stalls.py: _Link.lanes": "max_lanes",
    "wancoll/peer/core/liveness/master_session.py: MasterSession.said": "_SAID_KEPT",
    "wancoll/peer/core/paths/tcpinfo.py: Observer._before": "links that are open",
    "wancoll/peer/core/paths/tcpinfo.py: Observer._paths": "daemons at the other ends of open links",
    "wancoll/peer/core/paths/tcpinfo.py: _Rates._rates": "_WINDOWS",
    "wancoll/peer/core/liveness/commit_lease.py: CommitLease._asked": "heartbeats of one heartbeat_timeout",
    "wancoll/peer/links/connections.py: Connector.nearby": "_MOST_NEARBY of daemon.py",
    "wancoll/peer/links/relays.py: Relays._relays": "MOST_RELAYS",
    "wancoll/peer/links/relays.py: _Relay.answers": "lanes that are dialled, probes",
    "wancoll/relay/switch.py: Switch._here": "daemons",
    "wancoll/relay/switch.py: Switch._spliced": "one for each name that has asked: the registry's",
    "wancoll/relay/switch.py: Switch._tickets": "_MOST_TICKETS",
    "wancoll/peer/core/links.py: MemberLinks.ways": "4096, in a Plan",
    "wancoll/peer/links/hub.py: LinkHub._answers": "pending_connections, and lanes that are just welcome",
    "wancoll/peer/links/hub.py: LinkHub._dials": "links that are open, max_lanes of each",
    "wancoll/peer/links/hub.py: LinkHub._leads_to": "links that are open",
    "wancoll/peer/links/traffic.py: Traffic.totals": "MOST",
    "wancoll/peer/links/traffic.py: Traffic._last": "links that are open",
    "wancoll/metrics/core/operations.py: _Row.counts": "buckets",
    "wancoll/metrics/core/operations.py: Operations._rows": "MOST_ROWS, and one for each kind",
    "wancoll/metrics/core/operations.py: Operations._recoveries": "MOST_ROWS, and one",
    "wancoll/metrics/core/operations.py: LabelCounts._of": "MOST_ROWS, and what the labels after the first may be",
    "wancoll/peer/links/hub.py: LinkHub._looks": "links that are up, max_lanes of each",
    "wancoll/peer/links/hub.py: LinkHub._tell": "clients",
    "wancoll/peer/links/hub.py: LinkHub._watched": "links that are open, max_lanes of each",
    "wancoll/peer/watch/watcher.py: Watcher._known_at": "links that are up",
    "wancoll/peer/watch/watcher.py: Watcher._watched": "clients",
    "wancoll/peer/control.py: Control.addresses": "the option's",
    "wancoll/peer/control.py: Control._others": "the option's addresses",
    "wancoll/peer/control.py: Control.clocks": "_CLOCKS",
    "wancoll/peer/daemon.py: Daemon._by_engine_id": "ops_in_flight of each client",
    "wancoll/peer/daemon.py: Daemon._by_caller": "clients",
    "wancoll/peer/daemon.py: Daemon._ended": "_MOST_ENDED",
    "wancoll/peer/daemon.py: Daemon.sessions": "clients",
    "wancoll/peer/daemon.py: Daemon.touched": "clients",
    "wancoll/peer/core/tracing.py: Attempt.at": "five phases",
    "wancoll/peer/core/tracing.py: Recorder._again": "ops_in_flight and zero_contributions, of each client",
    "wancoll/peer/core/tracing.py: Recorder._done": "ops_in_flight and zero_contributions, of each client",
    "wancoll/peer/core/tracing.py: Recorder._running": "attempts in the engine",
    "wancoll/peer/core/tracing.py: Recorder.rows": "ROWS",
    "wancoll/peer/session.py: Session._by_number": "PREPARED of an epoch that the client knows, and of the one before",
    "wancoll/peer/session.py: Session._offered": "PREPARED",
    "wancoll/peer/session.py: Session._unprepared": "PREPARED",
    "wancoll/peer/session.py: Session._in_engine": "ops_in_flight",
    "wancoll/peer/session.py: Session._kept": "ops_in_flight, and as many that are told to nobody (zeros)",
    "wancoll/peer/session.py: Session._behind": "ops_in_flight, and what is said while they are copied",
    "wancoll/peer/session.py: Session._prepared": "_SHAPES_KEPT",
    "wancoll/peer/session.py: Session._hearers": "one for each link that was lost since links came up last",
    "wancoll/trust/registry.py: Registry._changed": "all rows of the registry, until they are taken",
    "wancoll/trust/registry.py: Registry.revoked": "MOST_NAMES",
    "wancoll/net/listen.py: Handshakes._known": "the newest _KNOWN",
    "wancoll/trust/registry.py: Registry.grants": "MOST_TOKENS, each with MOST_USES keys",
    "wancoll/trust/registry.py: Registry.holders": "MOST_NAMES",
    "wancoll/net/listen.py: _Room._busy": "addresses with more than a share, fewer than _SHARES",
    "wancoll/net/listen.py: _Room._open": "pending_connections",
    "wancoll/net/listen.py: _Room._since": "pending_connections",
    "wancoll/net/tls.py: Tls._came": "a stream's _READ_BYTES: it reads where there is no more",
    "wancoll/net/stream.py: Stream._batch": "its max_bytes",
    "wancoll/net/stream.py: Stream._queue": "its max_bytes and max_messages",
}


def test_every_structure_that_grows_says_what_bounds_it() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for room in ROOMS
        for path in (ROOT / room).glob("*.py")
        for name in _found(path)
    }
    assert found == set(BOUNDS)
