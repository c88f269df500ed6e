"""How the ranks of a process group find one cluster through torch's store, and what of it is this process's to end.

Rank 0 decides what it is: with WANCOLL_SOCKET, WANCOLL_MASTER or WANCOLL_JOIN what runs already, else a master of its
own, which ends by itself when the last daemon is gone. Where ranks may be on several machines the others get a token
for that one through the store: nobody else may be able to read there. Every rank has a daemon of its own, unless
WANCOLL_SOCKET names one.

A store may hold what an earlier run left in it. So nothing is read from it that was not asked for: each rank says hello
under its rank with a word that it made up, and rank 0 answers under that word.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wancoll.client.communicator import Communicator
from wancoll.client.connect import attachment, join, named_master
from wancoll.client.connection import Connection
from wancoll.client.private import PrivateDaemon, PrivateMaster
from wancoll.errors import ConfigError, PeerDaemonLost, ProtocolError, TimeoutError
from wancoll.local import join_address, split_addresses

_LOOK_SECONDS = 0.01  # between two looks at the store
_AGAIN_SECONDS = 0.5  # then a rank says hello once more: an earlier run's rank 0 may have taken the first
_DIAL_SECONDS = 3.0  # for one address of the master to answer
_WORD = 16  # hex digits of the word that a rank makes up
_LEAVE_SECONDS = 3.0  # that rank 0 waits for the others' end before it leaves the master to itself
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Answer(msgspec.Struct):
    """What rank 0 tells the others."""

    run: str  # part of the names of this run's groups
    # addresses of one master, of which any may be the right one here; none: there is a daemon at WANCOLL_SOCKET
    masters: list[str]
    token: str = ""  # to join rank 0's own master with, for this run; "": it needs none, or each rank has WANCOLL_JOIN


class Cluster:
    """This process's way into a master's groups; shared by the process groups of one init_process_group().

    *timeout* seconds is what the ranks have to meet. *bytes_sent*, by this process in all groups, are payload and
    headers of what was committed.

    Raises:
        TimeoutError: not all ranks have met in time.
        ConfigError: the environment of this rank and of rank 0 do not fit together, or an option is wrong.
        PeerDaemonLost: a daemon or master did not start.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._daemon: PrivateDaemon | None = None
        self._master: PrivateMaster | None = None
        self._uses: dict[str, int] = {}
        self.connections: list[Connection] = []
        self.bytes_sent = 0
        deadline = time.monotonic() + timeout
        try:
            if rank == 0:
                self._answer, self._served = self._open(deadline), threading.Event()
                self._server = threading.Thread(target=self._serve, name="wancoll-hello", daemon=True)
                self._server.start()
            else:
                self._answer = self._ask(deadline)
            self.socket = self._find_daemon(deadline)
        except BaseException:
            self.close(wait=False)
            raise

    # ---- meeting -------------------------------------------------------------------------------------

    def _open(self, deadline: float) -> Answer:
        """Rank 0: which cluster it is."""
        run = secrets.token_hex(6)
        if os.environ.get("WANCOLL_SOCKET"):
            return Answer(run, [])
        if named := named_master()[0]:
            return Answer(run, [named])
        host = host_of(self._store)
        local = host in LOOPBACK
        self._master = PrivateMaster("127.0.0.1:0" if local else "*:0", _left(deadline))
        port = self._master.port
        hosts = ["127.0.0.1"] if local else [each for each in dict.fromkeys([host, *own_hosts(), "127.0.0.1"]) if each]
        return Answer(run, [join_address(each, port) for each in hosts], self._master.token)

    def _serve(self) -> None:
        """Rank 0's thread: answer every hello until the first group stands."""
        said = msgspec.json.encode(self._answer).decode()
        with contextlib.suppress(Exception):  # the store is gone: so is the run
            while not self._served.wait(_LOOK_SECONDS):
                for rank in range(1, self._size):
                    key = f"hello/{rank}"
                    if self._store.check([key]) and (word := self._store.get(key)):
                        self._store.set(key, "")
                        if len(word) == _WORD and word.isalnum():  # not what others left there
                            self._store.set(f"answer/{word.decode()}", said)

    def _ask(self, deadline: float) -> Answer:
        word, again = secrets.token_hex(_WORD // 2), 0.0
        while True:
            now = time.monotonic()
            if now >= again:
                self._store.set(f"hello/{self._rank}", word)
                again = now + _AGAIN_SECONDS
            if self._store.check([f"answer/{word}"]):
                return self._understood(self._store.get(f"answer/{word}"))
            if now >= deadline:
                raise TimeoutError(
                    "rank 0 has not answered in time", who=f"init_process_group, rank {self._rank}",
                    expected="a word of rank 0 in torch's store", hint="look whether rank 0 runs, and what it says",
                )  # fmt: skip
            time.sleep(_LOOK_SECONDS)

    def _understood(self, said: bytes) -> Answer:
        try:
            return msgspec.json.decode(said, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as bad:
            raise ProtocolError(
                "rank 0's answer cannot be read", who=f"init_process_group, rank {self._rank}",
                expected="what rank 0 of the same version says in torch's store", got=f"{said[:100]!r}: {bad}",
                hint="run the same wancoll version on all ranks",
            ) from bad  # fmt: skip

    def _find_daemon(self, deadline: float) -> str:
        named = os.environ.get("WANCOLL_SOCKET")
        if bool(named) == bool(self._answer.masters):
            has, lacks = ("this rank", "rank 0") if named else ("rank 0", "this rank")
            raise ConfigError(
                f"{has} has WANCOLL_SOCKET and {lacks} has not", who=f"init_process_group, rank {self._rank}",
                expected="a daemon for all ranks, or for none", hint="set WANCOLL_SOCKET for all ranks, or for none",
                got=f"WANCOLL_SOCKET={named}" if named else "no WANCOLL_SOCKET here",
            )  # fmt: skip
        if named:
            return named
        master = self._reachable(self._answer.masters)
        self._daemon = PrivateDaemon(master, (), _left(deadline), self._answer.token)
        return self._daemon.socket

    def _reachable(self, masters: list[str]) -> str:
        if len(masters) == 1:
            return masters[0]
        for each in masters:
            ((host, port),) = split_addresses(each)
            with contextlib.suppress(OSError), socket.create_connection((host, port), _DIAL_SECONDS):
                return each
        raise PeerDaemonLost(
            "rank 0's master cannot be reached", who=f"init_process_group, rank {self._rank}",
            expected="an answer at one of its addresses", got=f"none at {', '.join(masters)}",
            hint="look at firewalls, or run `wancoll master` and set WANCOLL_MASTER=HOST:PORT on all ranks",
        )  # fmt: skip

    # ---- groups --------------------------------------------------------------------------------------

    def join(
        self, group: str, rank: int, size: int, timeout: float, look: Callable[[], None] | None = None
    ) -> Communicator:
        """Become a member of a group, named by rank; its ring order is the master's. Blocks until all have joined.

        Torch's name of a group may come again after the group has ended. *look* is called meanwhile; what it raises
        ends the wait.
        """
        use = self._uses[group] = self._uses.get(group, -1) + 1
        attach = attachment(f"torch-{self._answer.run}-{group}.{use}"[:128], member(rank), size, 1)
        return join(self.socket, attach, None, time.monotonic() + timeout, "torch", look)

    def met(self) -> None:
        """All ranks are there: nobody says hello any more."""
        if self._rank == 0:
            self._served.set()
            self._server.join()

    def close(self, *, wait: bool = True) -> None:
        """End what belongs to this process. Its communicators are closed. Safe to call again.

        Rank 0 may *wait* for the others' end, so that the master can end with it; else that ends by itself.
        """
        if self._rank == 0 and hasattr(self, "_server"):
            self.met()
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None
        if not hasattr(self, "_answer") or not self._answer.masters:
            return
        if wait:
            with contextlib.suppress(Exception):  # the store is gone with rank 0, or another rank's store is
                self._await_others()
        if self._master is not None:
            self._master.leave()
            self._master = None

    def _await_others(self) -> None:
        key = f"left/{self._answer.run}"
        gone, deadline = self._store.add(key, 1), time.monotonic() + _LEAVE_SECONDS
        if self._master is None:
            return
        while gone < self._size and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            gone = self._store.add(key, 0)
        if gone >= self._size:
            self._master.stop()


def member(rank: int) -> str:
    """A rank's name in its group."""
    return f"rank-{rank}"


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def host_of(store: Store) -> str:
    """The host by which all ranks reach rank 0, as far as the store knows; "": it does not."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return inner.host if isinstance(inner, TCPStore) else ""


def own_hosts() -> list[str]:
    """Addresses of this machine by which others may reach it."""
    with contextlib.suppress(OSError):
        return [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return []
