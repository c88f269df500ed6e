"""Two uplinks of one host: joining so that it dials over both, and a loss of all that goes over one."""

from __future__ import annotations

from tests.wan.network import DEVICE, SECOND, Wan
from wancoll import Communicator
from wancoll.chaos import Cluster, in_threads

_QUICK = {"WANCOLL_LANE_TIMEOUT": "2"}
ENV = {0: _QUICK, 1: {"WANCOLL_UPLINK": f"{DEVICE} {SECOND}", **_QUICK}}  # of peers 0 and 1


def join_last(cluster: Cluster) -> list[Communicator]:
    """Peer 1 joins peer 0, so that it dials, over both of its uplinks."""
    elder = cluster.connect(0, start_world=1)

    def join(i: int) -> Communicator:
        if i == 1:
            return cluster.connect(1, start_world=1)
        while elder.world_size < 2:
            elder.update_membership()
        return elder

    return in_threads(join, 2)


def lose(wan: Wan, port: int, ratio: float) -> None:
    """Lose this ratio of all packets between *port* and peer 0 or the master."""
    for host in (0, "master"):
        wan.change_path(port, host, loss=ratio)
        wan.change_path(host, port, loss=ratio)
