"""islands(): a communicator for a rank of a sharded model, whose island dies as one.

A rank that sits in a collective of the inner groups, for example in an all_gather of FSDP2, does not see that another
rank of its island was lost. The hook ends these groups: NCCL's are aborted; of gloo, which has no abort, the sockets to
the other ranks of the island are shut down. What waits there raises, and the next wancoll call raises Evicted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection
from functools import partial
from typing import Any, Unpack

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wancoll.client.communicator import Communicator
from wancoll.client.connect import Connecting, connect
from wancoll.errors import ConfigError, WancollError

log = logging.getLogger("wancoll")

Pair = tuple[Any, Any]  # addresses of a connection's two ends, this one's first


def islands(
    mesh: DeviceMesh, group: str = "default", *, outer: str = "replica", **options: Unpack[Connecting]
) -> Communicator:
    """Join a group as one shard of an island: a rank of *mesh*, which is the island's own.

    A collective of the mesh's ranks, in the default process group, which is the island's, too. When a rank of it is
    lost each of the others is told, wherever it waits: the process groups of the mesh end.

    Args:
        mesh: the ranks of one island. Its places, row by row, are the shards.
        group: as connect's.
        outer: the name of the mesh's dimension that wancoll stands for, which may be left out, and has size 1.
        options: as connect's, island with them, the same on all of its ranks; start_world and min_world count islands.

    Raises:
        ConfigError: a mesh with several replicas, or an option that cannot be used.
        WancollError: as of connect().
    """
    if outer in (names := mesh.mesh_dim_names or ()) and mesh.size(names.index(outer)) != 1:
        raise ConfigError(
            "the mesh has several replicas", who=f"islands(mesh, outer={outer!r})", got=f"a mesh {tuple(mesh.shape)}",
            expected="one: each island has a mesh of its own",
        )  # fmt: skip
    ranks = mesh.mesh.flatten().tolist()
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (os.urandom(8).hex(), [ends[0] for ends in _connections().values()]))
    theirs = {end for rank, (_, said) in enumerate(gathered) if rank != dist.get_rank() for end in said}
    options |= {"shard": ranks.index(dist.get_rank()), "shards": len(ranks), "launch": gathered[0][0]}
    comm = connect(group, **options)
    comm.on_island_lost(partial(_end, groups, theirs))
    return comm


def _connections() -> dict[int, Pair]:
    """This process's TCP connections, by descriptor."""
    found: dict[int, Pair] = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                found[fd] = sock.getsockname()[:2], sock.getpeername()[:2]
    return found


def _end(groups: list[Any], theirs: Collection[Any], why: WancollError) -> None:
    log.warning("the island is lost, and its process groups end: %s", why)
    for each in groups:
        with contextlib.suppress(Exception):  # one that has ended already; gloo's does nothing
            each.abort()
    for fd, (_, other) in _connections().items():
        if other in theirs:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
