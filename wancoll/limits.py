"""Every bound and timeout, in one frozen dataclass. Sizes are bytes, times are seconds; how a size is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

PROTOCOL_VERSION = 21
THREADS = 8  # of a daemon's engine that serve one link, and that it has unless it is told
WINDOW_FACTOR = 4  # times ops_in_flight: how far above what is committed or void a member may be
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
BLOCK = 64 * KIB  # of an operation's input or result: what is filled, and hashed, as one
WITHOUT_END = 1e9  # seconds, of a master_grace
WORD = 4  # what says of a block of a result in which attempt it became final


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds shared by master, peer and client; the commands expose those that users tune."""

    # Control plane.
    message_bytes: int = 1 * MIB  # largest control message accepted from anyone
    handshake_timeout: float = 5.0  # a connection that has not said a valid hello by then is closed
    handshake_least: float = 0.25  # for so long it gives way to nobody, unless its address has too many of them
    handshake_bytes: int = 64 * KIB  # largest first message of a connection to a master, far above any Hello
    strangers: float = 250.0  # a second, over TLS, from addresses that are not known: a quarter of a core
    pending_connections: int = 256  # connections to one listener that may be in their handshake at once
    send_queue_messages: int = 4096  # unsent messages per connection before it is closed
    send_queue_bytes: int = 256 * MIB  # unsent over all of a master's connections before the one with most is closed
    unconfirmed_messages: int = 65536  # said over a control connection that may be taken up again: kept until heard
    unconfirmed_bytes: int = 64 * MIB  # the same in bytes; a master's connections share them
    heartbeat_interval: float = 0.5  # peer to master
    heartbeat_timeout: float = 3.0  # a peer that was silent for this long is evicted
    return_grace: float = 1.0  # a daemon whose connection broke may take it up again for this long
    doubt_grace: float = 0.2  # one that was found to have ended waits as long for word of others: one epoch for all
    master_grace: float = 600.0  # how long a peer looks for its master before ops fail; WITHOUT_END: it goes on
    rejoin_grace: float = 5.0  # how long a restarted master waits for the members of an epoch that it learns of
    connect_timeout: float = 5.0  # one dial of the master or of a lane
    probe_timeout: float = 2.0  # a joiner whose addresses do not answer by then is refused
    punch_timeout: float = 4.0  # the same, where both ends go to the master first
    group_members: int = 1024  # the same for members of one daemon
    restart_with_min_world: bool = False  # a group that ran before starts anew with min_world, not start_world
    voters: int = 32  # members of a group that may collect votes themselves; of a larger one the master does
    daemons: int = 4096  # of a master, or fewer where it may not have as many files open
    groups: int = 4096  # of a master
    members: int = 65536  # of a master, in all groups
    clients: int = 1024  # of a daemon, or fewer where it may not have as many files open
    name_chars: int = 128

    # What a master remembers; beyond, the oldest goes.
    report_bytes: int = 1024 * MIB  # reports after a restart, or at the end of an epoch; an eighth for each daemon
    groups_known: int = 4096  # of earlier and present ones: their newest epochs
    daemons_gone: int = 1024  # whose members' fate is kept for when they come back
    members_missing: int = 4096  # that did not report after a restart: their fate
    bad_pairs: int = 4096  # of a group, that cannot reach each other; as many complaints count in an epoch
    troubles: int = 64  # of a group: pairs of which `wancoll status` tells

    # Links.
    # A link that fails without its peers is noticed within lane_timeout (an end that takes nothing: not before
    # slow_after and four heartbeats, since it may have its reasons) and made anew; one that cannot be is reported
    # within link_timeout, or one dial's connect_timeout if that is longer. A way around is taken at once; a member is
    # evicted half a link_timeout later.
    lane_timeout: float = 10.0  # data that is not acknowledged, or not taken though the other end should take it
    stall_timeout: float = 20.0  # all members run an operation, no link is to blame and nothing moves: links anew
    slow_after: float = 1.0  # from then on an operation is reported with what it waits for
    call_timeout: float = 0.0  # a member that has not called what another has called for this long is evicted; 0: never
    link_timeout: float = 5.0  # a link that cannot be (re)dialled by then is reported unreachable
    link_settle: float = 0.1  # master waits this long for a lost link to turn out to be a lost peer
    redial_interval: float = 0.05  # first pause between dials of a lane; doubles up to 1 s
    mismatch_wait: float = 1.0  # master collects the members' descriptors for this long
    max_lanes: int = 256

    # Operations.
    ops_in_flight: int = 1024  # per member
    pinned_bytes: int = 4 * GIB  # of a client's arena, for copies from and to devices
    early_bytes: int = 256 * MIB  # of each device: results that are on their way to it before they are committed
    scratch_bytes: int = 4 * GIB  # that one operation's schedule may need here beside input and result
    # Operations that a client has not called, and its daemon takes part in, or has done so: results are kept.
    zero_contributions: int = 64
    zero_contribution_bytes: int = 4 * GIB  # memory for these
    drain_timeout: float = 10.0  # SIGTERM: running operations may finish for this long
    local_handshake_timeout: float = 5.0  # a client must say what it wants by then
    voids: int = 2048  # of a group, with no commit in between: one more, and its members are evicted
    digest_retries: int = 2  # runs again this often when digests differ, then ProtocolError


DEFAULT = Limits()


def blocks(nbytes: int) -> int:
    """How many BLOCKs so many bytes lie in; the last one may be shorter."""
    return -(-nbytes // BLOCK)


def format_size(nbytes: float, digits: int = 0) -> str:
    """Such as "64 MiB", "4.20 KiB" or "256 B": whole where it is, else *digits* in all (0: two decimals)."""
    power = min(4, max(0, math.floor(math.log2(nbytes) / 10))) if nbytes >= 1 else 0
    number = nbytes / (1 << 10 * power)
    whole = power == 0 or number == int(number)
    shown = f"{number:.0f}" if whole else f"{number:.{digits}g}" if digits else f"{number:.2f}"
    return f"{shown} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


@cache  # to look it up takes a descriptor
def package_version() -> str:
    """The version of the package that runs, as it is installed."""
    try:
        return version("wancoll")
    except PackageNotFoundError:
        return "unknown"  # it runs from a source tree that is not installed


def counted(number: int, what: str) -> str:
    """Such as "1 member", "2 members"; *what* is singular."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def few(names: Sequence[str], most: int = 8) -> str:
    """The first of them for a reader, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def keep_newest(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Put *value* last into *known*, and drop the first, which is oldest, where there are more than *most*."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
