"""Suspicion: from which silence on a daemon may be dead, and what waits for its next word meanwhile. Pure.

    silent for                     decided on the suspicion
    UNHEARD heartbeat intervals    joins that only its members oppose wait (name_conflicts.py); it counts as one that
                                   the master does not hear, where the master may be deaf (presence.py)
    UNPROBED heartbeat intervals   a probe of it that fails does not refuse the joiner yet (probing.py)
    BLAMED heartbeat intervals     slow operations wait for it (blame.py)
    heartbeat_timeout              it is evicted (presence.py)

A daemon whose connection is broken is suspected at once.
"""

from __future__ import annotations

from wancoll_master.core.state import Daemon, Step

UNHEARD = 1.5
UNPROBED = 2.0
BLAMED = 2.5


def suspected(step: Step, daemon: Daemon, intervals: float = UNHEARD) -> bool:
    """Whether it is yet to be seen if the daemon lives."""
    return daemon.away or step.now - daemon.heard_at > intervals * step.limits.heartbeat_interval
