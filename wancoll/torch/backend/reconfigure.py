"""A process group whose world is made anew while its processes live: torch 2.14's reconfigure, which torchft drives.

Each process gives out a handle: a word of its own, and where a small store of torch's listens in it. Who reconfigures
with a list of handles meets the others in the store of the first one. So nothing of an earlier world has to be left,
not even the process that held torch's first store.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ErrorType, PrefixStore, Store, TCPStore
from torch.distributed import DistError, distributed_c10d

from wancoll.errors import (
    ConfigError,
    Evicted,
    MasterUnreachable,
    OperationAborted,
    OutcomeUnknown,
    PeerDaemonLost,
    TimeoutError,
    WancollError,
    WorldTooSmall,
)
from wancoll.local import join_address, split_addresses
from wancoll.torch.backend.rendezvous import LOOPBACK, Cluster, host_of, own_hosts
from wancoll.torch.backend.torch_errors import raised

_PREFIX = "wancoll"
_DIAL_SECONDS = 3.0  # for one address of a handle to answer
_LOST = (OperationAborted, Evicted, MasterUnreachable, OutcomeUnknown, PeerDaemonLost, WorldTooSmall)


class Door:
    """Where other processes meet this one; *handle* is what they need to know.

    The host of torch's first *store* says by which address this machine is reached.
    """

    def __init__(self, store: Store) -> None:
        hosts = _hosts(host_of(store))
        self.store = TCPStore(hosts[0], 0, is_master=True, wait_for_workers=False)
        where = ",".join(join_address(host, self.store.port) for host in hosts)
        self.handle = f"{_PREFIX}/{secrets.token_hex(8)}/{where}"


class Reconfigurable:
    """What torch asks of a group that can be reconfigured; mixed into the process group."""

    cluster: Cluster | None
    _store: Store
    _rank: int
    _size: int
    _timeout: float
    _owner: bool
    _gone: WancollError | None
    _door: Door | None = None
    _error = ErrorType.SUCCESS
    _aborted = False  # by abort(): what fails then is no loss

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._hooks: dict[int, Callable[[], None]] = {}
        self._used: set[int] = set()

    def _join(self) -> None:
        raise NotImplementedError

    def _leave(self, *, wait: bool) -> None:
        raise NotImplementedError

    def _finished(self, call: str) -> Any:
        raise NotImplementedError

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the world can be made anew: that of the default group."""
        return self._owner

    def get_reconfigure_handle(self) -> str:
        """What others need to reconfigure with this process."""
        self._must_own("get_reconfigure_handle")
        if self._door is None:
            self._door = Door(self._store)
        return self._door.handle

    def reconfigure(self, opts: Any) -> Any:
        """Leave the world and meet those of *opts.handles*, in their order; of a set, in that of their text.

        Blocks until all have come. Afterwards rank and size are those of the new world.

        Args:
            opts: torch's ReconfigureOptions: uuid, handles, timeout.

        Raises:
            ConfigError: the uuid was used before, a handle is none of ours, this process's is not among them, or one is
                there twice.
            TimeoutError: not all have come in time: the group has no world, and can be reconfigured again.
        """
        call = "reconfigure"
        self._must_own(call)
        handles = sorted(opts.handles) if isinstance(opts.handles, set | frozenset) else list(opts.handles)
        mine = self.get_reconfigure_handle()
        if opts.uuid in self._used:
            raise raised(ConfigError(
                f"uuid {opts.uuid} was already used", who=call, expected="another one for each world",
            ), call)  # fmt: skip
        if len(set(handles)) != len(handles) or mine not in handles:
            raise raised(ConfigError(
                "the handles make no world", who=call, expected="this process's, and each once",
                got=f"{len(handles)} handles, {len(set(handles))} different ones, "
                f"this process's {handles.count(mine)} times",
            ), call)  # fmt: skip
        first, *_ = [_addresses(each, call) for each in handles]
        seconds = opts.timeout.total_seconds() if isinstance(opts.timeout, timedelta) else -1.0
        deadline = time.monotonic() + (seconds if seconds > 0 else self._timeout)
        self._used.add(opts.uuid)
        self._leave(wait=False)
        assert self._door is not None
        rank = handles.index(mine)
        try:
            store = self._door.store if rank == 0 else _dial(first, deadline, call)
            left = max(1.0, deadline - time.monotonic())
            met = PrefixStore(f"reconfigure/{opts.uuid}", store)
            self.cluster = Cluster(met, rank, len(handles), left)
            self._rank, self._size = rank, len(handles)
            self._join()
            self._tell_torch(PrefixStore("torch", met))
        except WancollError as bad:
            self._leave(wait=False)
            self._gone = bad
            raise raised(bad, call) from bad
        self._gone, self._error, self._aborted = None, ErrorType.SUCCESS, False
        return self._finished(call)

    def _tell_torch(self, store: Store) -> None:
        """What torch keeps beside its default group: its ranks, the store where new groups meet, and their numbers.

        The processes may have made more or fewer groups before: all count on from the highest number.
        """
        kept: Any = distributed_c10d._world
        if self not in kept.pg_map:  # not made by init_process_group()
            return
        store.set_timeout(timedelta(seconds=self._timeout))
        store.set(f"groups/{self._rank}", str(kept.group_count))
        try:
            kept.group_count = max(int(store.get(f"groups/{rank}")) for rank in range(self._size))
        except DistError as bad:
            raise TimeoutError(
                "not all have said how many groups they have made", who="reconfigure", got=str(bad),
                hint="look which of them has ended, and reconfigure without it",
            ) from bad  # fmt: skip
        backend, _ = kept.pg_map[self]
        kept.pg_map[self] = backend, store
        kept.pg_group_ranks[self] = {rank: rank for rank in range(self._size)}

    def abort(self) -> None:
        """Leave at once: pending operations fail, later ones are refused, until the group is reconfigured."""
        self._aborted = True
        self._gone = OperationAborted(
            "the group was aborted", who="abort", hint="reconfigure it, or destroy it and make it again"
        )
        self._leave(wait=False)
        self._tell_hooks()

    def get_error(self) -> ErrorType:
        """What has happened to this world: SUCCESS, TIMEOUT (an operation took too long), COMM_ERROR (a loss)."""
        return self._error

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call *hook* when the group is aborted, or is found to be useless, by the thread that did or found that."""
        self._hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget a hook."""
        self._hooks.pop(hook_id, None)

    def _note(self, bad: WancollError) -> None:
        """An operation failed with *bad*."""
        if self._aborted and self._error is ErrorType.SUCCESS:
            return
        if isinstance(bad, TimeoutError) and self._error is ErrorType.SUCCESS:
            self._error = ErrorType.TIMEOUT
        elif isinstance(bad, _LOST) and self._error is not ErrorType.COMM_ERROR:
            self._error = ErrorType.COMM_ERROR
            self._tell_hooks()

    def _tell_hooks(self) -> None:
        for hook in list(self._hooks.values()):
            hook()

    def _must_own(self, call: str) -> None:
        if not self._owner:
            raise raised(ConfigError(
                "a group made by new_group() has no world of its own", who=call, expected="the default group",
                hint="reconfigure the default group, then make the others again",
            ), call)  # fmt: skip


def _hosts(host: str) -> list[str]:
    """By which this machine is reached, where *host* is one that all reach."""
    if host in LOOPBACK:
        return ["127.0.0.1"]
    outward = []
    if host:
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                outward.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*outward, *own_hosts()])) or ["127.0.0.1"]


def _addresses(handle: str, call: str) -> list[tuple[str, int]]:
    parts = handle.split("/")
    with contextlib.suppress(ConfigError):
        if len(parts) == 3 and parts[0] == _PREFIX and parts[1]:
            return split_addresses(parts[2])
    raise raised(ConfigError(
        "that is no handle of wancoll", who=call, expected="what get_reconfigure_handle() returned", got=repr(handle)
    ), call)  # fmt: skip


def _dial(addresses: list[tuple[str, int]], deadline: float, call: str) -> TCPStore:
    while True:
        for host, port in addresses:
            with contextlib.suppress(OSError):
                socket.create_connection((host, port), _DIAL_SECONDS).close()
                left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
                return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
        if time.monotonic() >= deadline:
            raise TimeoutError(
                "the first process of the new world cannot be reached", who=call,
                expected="an answer at one of its addresses",
                got="none at " + ", ".join(join_address(*each) for each in addresses),
                hint="look whether it runs, or leave it out",
            )  # fmt: skip
        time.sleep(0.05)
