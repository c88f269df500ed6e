"""connect(): find or start a peer daemon, attach to it, wait for a place in the group."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import socket as sockets
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from wancoll.client.channel import Channel
from wancoll.client.checks import check_seconds, refused, whole_number
from wancoll.client.communicator import Communicator
from wancoll.client.connection import Connection, deadline_after, seconds_left
from wancoll.client.memory.arena import Arena, close_all
from wancoll.client.private import START_SECONDS, PrivateDaemon
from wancoll.client.ring import CallRing
from wancoll.client.work import rebuild
from wancoll.errors import ConfigError, PeerDaemonLost, ProtocolError
from wancoll.limits import DEFAULT, PROTOCOL_VERSION
from wancoll.local import LONGEST_SOCKET, MASTER_PORT, default_socket, join_address, split_addresses
from wancoll.net.unix import check_owner, connect_local, is_served
from wancoll.trust.token import parse
from wancoll.wire import messages as m
from wancoll.wire.framing import HEADER_BYTES, body_length, decode_body, encode
from wancoll.wire.islands import member_name

log = logging.getLogger("wancoll")  # warnings reach stderr where nobody has configured logging

# What must happen to every open connection when this process forks or ends.
_open: weakref.WeakSet[Connection] = weakref.WeakSet()

_NAME_A_MASTER = ("WANCOLL_MASTER", "WANCOLL_JOIN")  # the first counts
_LOOK_SECONDS = 0.05  # between two tries at a daemon that is not there yet
_SAY_SECONDS = 2.0  # from then on somebody who waits is told for what
_ROOM = sockets.CMSG_SPACE(16)  # for up to four descriptors
_LEAST_HANDSHAKE = 1.0  # seconds that a daemon has to answer, however little time is left


class Connecting(TypedDict, total=False):
    """What connect() takes by keyword."""

    start_world: int | None
    min_world: int
    name: str
    socket: str | os.PathLike[str] | None
    master: str | None
    token: str | None
    timeout: float | None
    call_timeout: float | None
    island: str
    shard: int
    shards: int
    launch: str
    lanes: int | None
    peer_options: Sequence[str]


def connect(
    group: str = "default",
    *,
    start_world: int | None = None,
    min_world: int = 1,
    name: str = "",
    socket: str | os.PathLike[str] | None = None,
    master: str | None = None,
    token: str | None = None,
    timeout: float | None = None,
    call_timeout: float | None = None,
    island: str = "",
    shard: int = 0,
    shards: int = 1,
    launch: str = "",
    lanes: int | None = None,
    peer_options: Sequence[str] = (),
) -> Communicator:
    """Join a group through this machine's peer daemon. Blocks until the group's first epoch stands.

    A group starts when start_world members have joined. Who comes later is a joiner: it is admitted where all members
    call update_membership(), and returns from here then.

    Args:
        group: its name. Members of a group reduce together.
        start_world: members, or islands, that make the first epoch; default: min_world. All must state the same.
        min_world: members, or islands, that operations need. All members must state the same.
        name: this member's, unique in its group; empty: made from the daemon's.
        socket: path of the daemon's unix socket. Default: $WANCOLL_SOCKET, else the path that `wancoll peer` uses by
            default. Where WANCOLL_SOCKET is not set, no daemon answers at that path, and $WANCOLL_MASTER or
            $WANCOLL_JOIN, a token, is set: a private daemon of that master.
        master: "host" or "host:port", with standby masters "host,host": start a private daemon, which ends with this
            communicator. Port 7400 where none is said. None: the one that the token names.
        token: start a private daemon, which joins with it, as `wancoll peer --join` does; it is handed over in the
            environment. None: $WANCOLL_JOIN, if that is set.
        timeout: seconds to wait for the daemon and for the group. None: the daemon must be up, and the group is waited
            for as long as it takes.
        call_timeout: seconds after which a member is evicted (Evicted) that has not called what another member has
            called, though it waits in no operation; None: what `wancoll master --call-timeout` says, where the default
            is never. All members must state the same.
        island: name of an island, whose *shards* members hold one shard of a model each, and are admitted and lost
            together; in place of *name*. Calls reduce over the members with the same *shard*; rank and world_size
            count islands.
        shard: which one this member holds, from 0.
        shards: how many each island of the group has.
        launch: what all shards of one start of the island state, and those of another start do not, for example a
            random number: shards of two starts do not mix. Of an island that waits to join, the newest start stays.
        lanes: TCP connections to each other peer, of a private daemon.
        peer_options: a list of more options of `wancoll peer`, of a private daemon.

    Raises:
        ConfigError: an argument that cannot be used, an option that the private daemon or its master refuses, or a
            socket of another user.
        PeerDaemonLost: no daemon answers at the socket (within *timeout*), or the private one did not start.
        TimeoutError: the group did not start, or did not admit this joiner, within *timeout*.
        WancollError: refused, or no master.
    """
    name = _island_member(name, island, shard, shards)
    attach = attachment(group, name, start_world, min_world, call_timeout, shards, launch)
    check_seconds("connect", "timeout", timeout)
    deadline = deadline_after(timeout)
    way = _where(socket, master, token)
    _check_private(lanes, peer_options)
    options = [*(["--lanes", str(lanes)] if lanes is not None else []), *peer_options]
    if options and not way.master:
        raise ConfigError(
            "lanes and peer_options are for a private daemon", who="connect", expected="master= with them",
            got=f"the daemon at {way.path}, which has its own options", hint="give them to `wancoll peer`",
        )  # fmt: skip
    with contextlib.ExitStack() as undo:
        private, path = None, way.path
        if way.master:
            left = seconds_left(deadline)
            most = START_SECONDS if left is None else min(START_SECONDS, left)
            if "WANCOLL_ADVERTISE" in os.environ and not any(each.startswith("--advertise") for each in options):
                log.warning("WANCOLL_ADVERTISE is for `wancoll peer`: give a private daemon connect(peer_options=...)")
            private = PrivateDaemon(way.master, options, most, token or "")
            undo.callback(private.stop)
            path = private.socket
        comm = join(path, attach, private, deadline, way.reason)
        undo.pop_all()
    return comm


def _island_member(name: str, island: Any, shard: Any, shards: Any) -> str:
    """The name of a member of an island, with its shard. Raises ConfigError: they do not fit together."""
    whole_number("connect", "shards", shards, 1, DEFAULT.group_members)
    whole_number("connect", "shard", shard, 0, shards - 1)
    if bool(island) and name:
        raise ConfigError("name and island exclude each other", who="connect", got="both")
    if shards > 1 and not island:
        raise ConfigError("shards are of an island", who="connect", expected="its name, island=", got="none")
    return member_name(island, shard, shards) if isinstance(island, str) and island else island or name


def attachment(
    group: str,
    name: str,
    start_world: int | None,
    min_world: int,
    call_timeout: float | None = None,
    shards: int = 1,
    launch: str = "",
) -> m.Attach:
    """What is said to the daemon. Raises ConfigError: an argument of connect() that cannot be used."""
    start_world = min_world if start_world is None else start_world
    text: Any  # the callers are not all type-checked
    for what, text, shortest in (("group", group, 1), ("name", name, 0), ("launch", launch, 0)):
        if not isinstance(text, str) or not shortest <= len(text) <= DEFAULT.name_chars or not text.isprintable():
            raise refused("connect", what, text, f"{shortest} to {DEFAULT.name_chars} printable characters")
    min_world = whole_number("connect", "min_world", min_world, 1, DEFAULT.group_members)
    start_world = whole_number("connect", "start_world", start_world, 1, DEFAULT.group_members // shards)
    if start_world < min_world:
        raise ConfigError(
            "a group cannot start below min_world", who="connect(start_world=...)",
            expected=f"at least min_world, {min_world}", got=str(start_world),
        )  # fmt: skip
    check_seconds("connect", "call_timeout", call_timeout, zero=False, most=1e9, none="for the master's setting")
    numbers = start_world, min_world, os.getpid(), call_timeout or 0.0, shards
    return m.Attach(PROTOCOL_VERSION, group, name, *numbers, launch)


def join(
    path: str, attach: m.Attach, private: PrivateDaemon | None, deadline: float | None, reason: str,
    look: Callable[[], None] | None = None,
) -> Communicator:  # fmt: skip
    """Attach to the daemon at *path*, and wait for a place until *deadline*, a time.monotonic(); None: without end.

    *private* is the daemon, if it is this communicator's own. *reason* says to the log why it is that daemon. *look* is
    called now and then while it waits for a place; what it raises ends that.

    Raises:
        WancollError: as connect() does.
    """
    connection = _attach_in_time(path, attach, private, deadline)
    try:
        _open.add(connection)
        log.info("group %r: through %s, by %s", attach.group, connection.daemon, reason)
        connection.await_place(deadline, look)
    except BaseException:
        connection.close()
        raise
    return Communicator(connection)


def _check_private(lanes: Any, peer_options: Any) -> None:
    if lanes is not None:
        whole_number("connect", "lanes", lanes, 1, DEFAULT.max_lanes)
    given = isinstance(peer_options, Sequence) and not isinstance(peer_options, str | bytes)
    if not given or not all(isinstance(option, str) for option in peer_options):
        raise refused("connect", "peer_options", peer_options, "a list of strings", 'such as ["--advertise", "HOST"]')


@dataclass(frozen=True, slots=True)
class _Way:
    """Which daemon: the one at *path*, or where there is a *master* a private one; and why that."""

    path: str
    master: str
    reason: str


def _where(socket: str | os.PathLike[str] | None, master: str | None, token: str | None) -> _Way:
    _check_text("socket", socket, (str, os.PathLike), "the path of a daemon's unix socket")
    _check_text("master", master, (str,), '"host" or "host:port", with standby masters "host,host"')
    _check_text("token", token, (str,), "what `wancoll master` or `wancoll token create` printed", shown=False)
    private = "master" if master is not None else "token"
    if socket is not None and (master is not None or token is not None):
        raise ConfigError(
            f"socket and {private} exclude each other", who="connect",
            expected=f"socket= of a running daemon, or {private}= for a private one", got="both",
        )  # fmt: skip
    if socket is not None:
        return _Way(os.fspath(socket), "", "socket=")
    invited = parse(token, what="connect(token=...)").address if token is not None else ""
    if master is not None or token is not None:
        return _Way("", _master(master or invited, f"connect({private}=...)"), f"{private}=")
    path = default_socket()
    if os.environ.get("WANCOLL_SOCKET"):
        return _Way(path, "", "WANCOLL_SOCKET")
    # The variables are also the daemon's own: where one runs, it is what is meant.
    if not any(os.environ.get(each) for each in _NAME_A_MASTER) or _answers(path):
        return _Way(path, "", "the default path")
    found, variable = named_master()
    return _Way("", found, f"{variable}, as no daemon answers at {path}")


def named_master() -> tuple[str, str]:
    """Where the master is that the environment names, with its ports, and the variable that does; none: ("", "").

    Raises:
        ConfigError: the variable cannot be read.
    """
    for variable in _NAME_A_MASTER:
        if said := os.environ.get(variable):
            named = said if variable == "WANCOLL_MASTER" else parse(said, what=variable).address
            return _master(named, variable), variable
    return "", ""


def _check_text(what: str, given: Any, kinds: tuple[type, ...], expected: str, *, shown: bool = True) -> None:
    if given is not None and not (isinstance(given, kinds) and given != ""):
        raise ConfigError(
            f"{what} cannot be used", who=f"connect({what}=...)", expected=expected,
            got=repr(given)[:200] if shown else type(given).__name__,
        )  # fmt: skip


def _master(text: str, what: str) -> str:
    """*text* with its ports."""
    return ",".join(join_address(*each) for each in split_addresses(text, what=what, default_port=MASTER_PORT))


def _answers(path: str) -> bool:
    try:
        return is_served(path, _LEAST_HANDSHAKE)
    except OSError:
        return False


def _attach_in_time(
    path: str, attach: m.Attach, private: PrivateDaemon | None, deadline: float | None
) -> Connection:  # fmt: skip
    """Attach to a daemon that may still be starting; without a *deadline* it must be there."""
    began, said = time.monotonic(), False
    while True:
        left = seconds_left(deadline)
        most = DEFAULT.local_handshake_timeout
        try:
            return _attach(path, attach, private, most if left is None else min(most, max(_LEAST_HANDSHAKE, left)))
        except OSError as bad:
            left, waited = seconds_left(deadline), time.monotonic() - began
            if not left or isinstance(bad, PermissionError) or len(os.fsencode(path)) > LONGEST_SOCKET:
                raise _no_daemon(path, bad, waited if deadline is not None else 0) from bad
            if waited >= _SAY_SECONDS and not said:
                said = True
                log.warning("no peer daemon answers at %s (%s): waiting for %.0f s more", path, bad, left)
            time.sleep(min(left, _LOOK_SECONDS))


def _attach(path: str, attach: m.Attach, private: PrivateDaemon | None, timeout: float) -> Connection:
    """Connect, say what is wanted, take the arena.

    Raises:
        OSError: nobody answers there.
        ConfigError: who answers is another user.
        ProtocolError: what it sends cannot be used.
    """
    sock = connect_local(path, timeout)
    came: list[Any] = []  # what recvmsg() gave: an interruption loses no descriptor
    fds: list[int] = []
    try:
        check_owner(sock, f"connect(socket={path!r})")
        sock.sendall(encode(attach))
        answer = _answer(sock, path, came)
        fds = _descriptors(came)
        who = f"peer daemon {answer.daemon!r} at {path}"
        if len(fds) != 4:
            raise ProtocolError(
                "sent no arena", who=who, expected="four file descriptors: arena, bell, call ring, its socket",
                got=str(len(fds)),
            )  # fmt: skip
        for memory in (fds[0], fds[2]):
            _check_seals(memory, who)  # before the size is looked at
        size = os.fstat(fds[0]).st_size
        if size != answer.arena_bytes:
            raise ProtocolError(
                "sent an arena of another size", who=who, expected=str(answer.arena_bytes), got=str(size)
            )
        sock.setblocking(True)
        channel = Channel(sock, who, DEFAULT.message_bytes, CallRing(fds, who))
        return Connection(attach.group, channel, Arena(fds, size), private, attach.shards)
    except BaseException:
        sock.close()
        close_all(fds or _descriptors(came))
        raise


def _check_seals(fd: int, who: str) -> None:
    """If the file could get shorter, an access to what is mapped of it could end this process (SIGBUS)."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memfd
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(
            "sent an arena that may become smaller while it is used", who=who,
            expected="a memfd sealed against shrinking", got=f"seals {seals:#x}",
            hint="see that `wancoll peer` and this process have the same version of wancoll",
        )  # fmt: skip


def _answer(sock: sockets.socket, path: str, came: list[Any]) -> m.Attached:
    """The daemon's Attached, and not a byte more; all that is read goes to *came*, with the descriptors."""
    who = f"the process at {path}"
    header = _exactly(sock, HEADER_BYTES, came)
    body = _exactly(sock, body_length(header, DEFAULT.message_bytes, who=who), came)
    answer = decode_body(body, m.FromDaemon, who=who)
    if isinstance(answer, m.Failure):
        raise rebuild(answer)
    if not isinstance(answer, m.Attached):
        raise ProtocolError("sent a message out of place", who=who, expected="Attached", got=type(answer).__name__)
    return answer


def _descriptors(came: list[Any]) -> list[int]:
    found = array("i")
    for _, ancillary, _, _ in came:
        for level, kind, data in ancillary:
            if (level, kind) == (sockets.SOL_SOCKET, sockets.SCM_RIGHTS):
                found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
    return found.tolist()


def _exactly(sock: sockets.socket, size: int, came: list[Any]) -> bytes:
    data = b""
    while len(data) < size:
        # One call into C, as in channel.py: what was taken from the socket is in *came* before anything is raised.
        came.extend(map(sock.recvmsg, (size - len(data),), (_ROOM,), (sockets.MSG_CMSG_CLOEXEC,)))
        more = came[-1][0]
        if not more:
            raise ConnectionResetError("it closed the connection during the handshake")
        data += more
    return data


def _no_daemon(path: str, bad: OSError, waited: float) -> PeerDaemonLost | ConfigError:
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        return ConfigError(
            "the path is too long for a unix socket", who="connect(socket=...)",
            expected=f"at most {LONGEST_SOCKET} bytes", got=f"{len(os.fsencode(path))}: {path}",
        )  # fmt: skip
    wrong = isinstance(bad, PermissionError)  # no other try would do better
    return (ConfigError if wrong else PeerDaemonLost)(
        "no peer daemon answers" + (f", {waited:.1f} s long" if waited else ""),
        who=f"connect(socket={path!r})",
        expected="a running `wancoll peer` at that path",
        got=str(bad) or type(bad).__name__,
        hint="start `wancoll master`, and set WANCOLL_MASTER=127.0.0.1 beside it, elsewhere WANCOLL_JOIN=TOKEN: then a "
        f"private daemon is started. Or run `wancoll peer --socket {path}`, with one of them",
    )


def _after_fork() -> None:
    for connection in list(_open):
        connection.disown()
    _open.clear()


def _at_exit() -> None:
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
