"""Every metric that daemons and masters tell: name, type, labels and help. Names are stable: docs/operations.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Labels = tuple[str, ...]  # values, in the order of Spec.labels


class Bins(NamedTuple):
    """A histogram's state: how many observations in each bucket, the one without a bound last, and their sum."""

    counts: list[int]
    total: float


class Spec(NamedTuple):
    """A metric."""

    name: str  # as it is told, "_total" included
    kind: Literal["counter", "gauge", "histogram"]  # of Prometheus
    help: str  # one sentence
    labels: tuple[str, ...] = ()  # their names
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


class Family(NamedTuple):
    """A metric with what it is now: by labels. Made at once, so that it is of one moment."""

    spec: Spec
    samples: Sequence[tuple[Labels, float | Bins]]


FAMILIES: dict[str, Spec] = {}  # by name, in the order below

SECONDS = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 100.0),
)
LAG_SECONDS = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_OF_CALL = ("group", "kind", "algorithm", "codec", "size")


def _counter(name: str, help: str, *labels: str) -> Spec:
    return _add(Spec(f"wancoll_{name}_total", "counter", help, labels))


def _gauge(name: str, help: str, *labels: str) -> Spec:
    return _add(Spec(f"wancoll_{name}", "gauge", help, labels))


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Spec:
    return _add(Spec(f"wancoll_{name}", "histogram", help, labels, buckets))


def _add(spec: Spec) -> Spec:
    FAMILIES[spec.name] = spec
    return spec


# ---- both -------------------------------------------------------------------------------------------

BUILD = _gauge("build_info", "1, with what runs here.", "role", "version", "protocol", "kernels")
UPTIME = _gauge("uptime_seconds", "Since the process started to serve.")
LAG = _histogram("event_loop_lag_seconds", "How late the event loop woke up, four times a second.", buckets=LAG_SECONDS)
SCRAPES_REFUSED = _counter("scrapes_refused", "Requests to this port that were not answered with what they asked for.")
HANDSHAKES = _gauge("handshakes_pending", "Connections that have not said who they are.", "port")
REFUSED = _counter("connections_refused", "Connections that were refused, or ended unintroduced.", "port")

# ---- a daemon: operations ---------------------------------------------------------------------------

OPERATIONS = _counter(
    "operations", 'Calls that ended here; outcome is "committed" or the error\'s class.', "group", "kind", "outcome"
)
RETRIES = _counter("operation_retries", "Attempts beyond the first of operations that were committed.", "group", "kind")
DURATION = _histogram("operation_seconds", "From a call's reaching its daemon to its commit.", *_OF_CALL)
CALL_BYTES = _counter("operation_bytes", "Size of the larger tensor of committed operations.", "group", "kind")
BUS_BYTES = _counter(
    "operation_bus_bytes", "The same by nccl-tests' factor: its rate is the bus bandwidth.", "group", "kind"
)
SENT = _counter("sent_bytes", "Sent for committed operations, with frame headers.", "group", "codec")
SAVED = _counter("saved_bytes", "Kept off the wire by codecs.", "group", "codec")
SYNCED = _counter("sync_state_bytes", "Stripes of sync_state that were moved and committed.", "group", "direction")
IN_FLIGHT = _gauge("operations_in_flight", "Calls that have not ended.", "group")
OLDEST = _gauge("oldest_operation_seconds", "Age of the oldest call that has not ended; 0: there is none.", "group")

# ---- a daemon: its groups ---------------------------------------------------------------------------

CLIENTS = _gauge("clients", "Training processes that are attached.")
CONNECTED = _gauge("master_connected", "Whether a master answers: 1 or 0.")
EPOCH = _gauge("epoch", "Number of the current epoch; 0: none yet.", "group")
MEMBERS = _gauge("members", "Members of the current epoch.", "group")
EPOCHS = _counter("epochs", "Epochs that members of this daemon entered.", "group")
LOST = _counter("lost_members", "Members that epochs lost which members of this daemon entered.", "group")
ENDED = _counter("ended_memberships", "Members of this daemon that are out, by the error's class.", "group", "error")
RECOVERY = _histogram(
    "recovery_seconds",
    "From the first sign of a loss here to the first commit without the lost; or the new epoch, where nothing waited.",
    "group",
)
ARENA_USED = _gauge("arena_used_bytes", "Memory that clients' arenas take.", "group")
ARENA_SIZE = _gauge("arena_size_bytes", "Address space of clients' arenas.", "group")

# ---- a daemon: links --------------------------------------------------------------------------------

LINK_SENT = _counter("link_sent_bytes", "Given to the links to a daemon, headers included.", "daemon")
LINK_RECEIVED = _counter("link_received_bytes", "Taken from the links to a daemon.", "daemon")
SEGMENTS = _counter("link_segments", "TCP segments with data that were sent to a daemon.", "daemon")
RESENT = _counter("link_retransmitted_segments", "Those of them that were sent again.", "daemon")
CORRUPT = _counter("link_checksum_failures", "Frames from a daemon whose checksum was wrong.", "daemon")
ROUND_TRIP = _gauge("link_round_trip_seconds", "The smallest of the last minutes, as the kernel sees it.", "daemon")
LANES = _gauge("link_lanes", "TCP connections to a daemon that are in use.", "daemon")
QUEUED = _gauge("queued_bytes", 'Waiting to be sent; "to" is master or clients.', "to")

# ---- a master ---------------------------------------------------------------------------------------

LEADS = _gauge(
    "master_leads",
    "Whether this master leads: 1 or 0. One that does tells its term, daemons, groups and refusals, too.",
)
TERM = _gauge("master_term", "Grows with each master that leads.")
DAEMONS = _gauge("master_daemons", "Daemons that are here.")
GROUP_EPOCH = _gauge("master_epoch", "Number of the group's current epoch; 0: it is forming.", "group")
GROUP_MEMBERS = _gauge("master_members", "Members of the group's current epoch.", "group")
JOINING = _gauge("master_joining", "Members that wait to be let in.", "group")
COMMITTED = _gauge("master_committed_operation", "Up to this operation all is known to be committed.", "group")
WAITED_FOR = _gauge(
    "master_waited_for", "Slow operations that wait for this member, or a link of it.", "group", "member"
)
WAITED_SECONDS = _gauge("master_waited_for_seconds", "For how long the oldest of them has done so.", "group", "member")
EVENTS = _counter("master_events", "Lines of the event log, by their kind.", "group", "kind")
EVICTIONS = _counter("master_evictions", "Members that are out without having left, by why.", "group", "reason")
MESSAGES_REFUSED = _counter("master_messages_refused", "Messages from those who may not say them.", "message")
CONNECTIONS = _gauge("master_connections", "Open connections, daemons' and others'.")
MASTER_QUEUED = _gauge("master_queued_bytes", "Waiting to be sent, in all connections.")
HELD = _gauge("master_held_messages", "Waiting for the store to have written what they rest on.")
