"""Where things are on this machine, and how addresses are written."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable

from wancoll.errors import ConfigError

MASTER_PORT = 7400
_SHARED = "/tmp"
LONGEST_SOCKET = 107  # bytes of a unix socket's path
_LONGEST_FOLDER = 80  # bytes of $TMPDIR, which leave room for a socket in a folder there
_HELD = "held"  # a file in a folder for a while: locked as long as the process lives that made the folder
_HELD_SAYS = b"wancoll\n"  # what is in that file
_STATE = "a folder that can be written in, at $XDG_STATE_HOME or ~/.local/state"
_ELSEWHERE = "set WANCOLL_SOCKET, or XDG_RUNTIME_DIR, to a place of your own; daemon and training process need the same"


def default_socket() -> str:
    """Path of the daemon's client socket: $WANCOLL_SOCKET, else under the user's runtime directory.

    Raises:
        ConfigError: there is none, and what stands in for it under /tmp is not for this user alone.
    """
    named = os.environ.get("WANCOLL_SOCKET")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = os.path.join(runtime, "wancoll", "peer.sock") if runtime else ""
    if path and len(os.fsencode(path)) <= LONGEST_SOCKET:
        return path
    return os.path.join(_own_folder(f"{_SHARED}/wancoll-{os.geteuid()}"), "peer.sock")


class OwnFolder:
    """A new folder for sockets, logs and keys: under $TMPDIR, or under /tmp where that is too long for sockets.

    close() removes it. If this process ends without that, the next process that makes such a folder does. Raises
    ConfigError: it cannot be made.
    """

    def __init__(self) -> None:
        try:
            base = tempfile.gettempdir()
            base = base if len(os.fsencode(base)) <= _LONGEST_FOLDER else _SHARED
            for held in glob.glob(os.path.join(glob.escape(base), f"wancoll-{8 * '?'}", _HELD)):
                _remove_left_over(held)
            self.path = tempfile.mkdtemp(prefix="wancoll-", dir=base)
            new = os.path.join(self.path, f".{_HELD}")
            self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, _HELD_SAYS + os.fsencode(self.path))
            os.rename(new, os.path.join(self.path, _HELD))
        except OSError as bad:
            raise ConfigError(
                "no folder can be made for sockets and logs", who=f"TMPDIR={os.environ.get('TMPDIR', '')}",
                expected="a folder with space, in which this user can write", got=str(bad),
                hint="set TMPDIR to another folder",
            ) from bad  # fmt: skip

    def close(self) -> None:
        """Remove it. Safe to call again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_left_over(held: str) -> None:
    """Remove the folder of *held* if it is an OwnFolder of this user, and the process that locked *held* has ended."""
    folder = os.path.dirname(held)
    with contextlib.suppress(OSError):
        if os.lstat(folder).st_uid == os.geteuid():
            with open(os.open(held, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                says = _HELD_SAYS + os.fsencode(folder)  # others may call a folder so, or it is a user's copy
                if file.read(len(says) + 1) == says:
                    shutil.rmtree(folder, ignore_errors=True)


def _own_folder(path: str) -> str:
    """*path*, made if it was not there. In a folder for everyone anybody may have made it first, and wait in it."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700)
        found = os.lstat(path)
    except OSError as bad:
        raise ConfigError("cannot be made", who=path, got=str(bad), hint=_ELSEWHERE) from bad
    if not stat.S_ISDIR(found.st_mode) or open_to_others(found, reads=True):
        raise ConfigError(
            "is not for this user alone, so anybody could answer there", who=path,
            expected=f"a folder of user {os.geteuid()} with mode 700", got=standing(found), hint=_ELSEWHERE,
        )  # fmt: skip
    return path


def open_to_others(found: os.stat_result, *, reads: bool = False, sticky: bool = False) -> bool:
    """Whether somebody but this user and root may change a file, or what is in a folder; with *reads* or read it.

    *sticky*: who may only add to a folder, as to /tmp, changes nothing.
    """
    if found.st_uid not in (0, os.geteuid()):
        return True
    return bool(found.st_mode & (0o077 if reads else 0o022)) and not (sticky and found.st_mode & stat.S_ISVTX)


def standing(found: os.stat_result) -> str:
    """Mode and owner, for who has to change them."""
    return f"{stat.filemode(found.st_mode)} of user {found.st_uid}"


def default_journal(port: int) -> str:
    """Path of the journal of a master at *port*, in the user's state folder, which is made.

    Raises:
        ConfigError: it cannot be made.
    """
    return _in_state_folder(f"master-{port}.sqlite", "the journal", "choose a path with --journal, or --journal none")


def default_state(name: str) -> str:
    """Path of a folder for the keys of *name*, "master-PORT" or a daemon, in the user's state folder, which is made.

    Raises:
        ConfigError: it cannot be made.
    """
    return _in_state_folder(name, "keys", "choose a folder with --state")


def _in_state_folder(name: str, what: str, hint: str) -> str:
    try:
        return os.path.join(state_folder(), name)
    except OSError as bad:
        raise ConfigError(f"there is no place for {what}", expected=_STATE, got=str(bad), hint=hint) from bad


def state_folder(name: str = "") -> str:
    """The user's state folder, or *name* in it, which is made. Raises OSError: it cannot be made."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    folder = os.path.join(base, "wancoll", name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def split_address(text: str, *, what: str = "address", default_port: int | None = None) -> tuple[str, int]:
    """Split "host:port" into (host, port); IPv6 hosts stand in brackets. Raises ConfigError: not of that form."""
    if text.isascii() and text.isdigit():  # a host to getaddrinfo: 7600 is 0.0.29.176
        raise ConfigError(
            f"{what} cannot be read", expected="host:port", got=f"{text!r}, a port alone",
            hint=f"write 127.0.0.1:{text}, or another host before it; to listen on all interfaces :{text}",
        )  # fmt: skip
    host, separator, port = text.rpartition(":")
    if text.endswith("]") or not separator:
        host, port = text, ""
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not port and default_port is not None and not bare_ipv6:
        port = str(default_port)
    if bare_ipv6 or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(
            f"{what} cannot be read", got=repr(text),
            expected="host:port with a port from 0 to 65535, IPv6 in brackets: [::1]:7400",
        )  # fmt: skip
    return host.removeprefix("[").removesuffix("]"), int(port)


def split_addresses(text: str, *, what: str = "addresses", default_port: int | None = None) -> list[tuple[str, int]]:
    """Split "host:port,host:port" into [(host, port)], each one once. Raises ConfigError: not of that form, or none."""
    found = dict.fromkeys(split_address(one.strip(), what=what, default_port=default_port) for one in text.split(","))
    if not all(host for host, _ in found):
        raise ConfigError(f"{what} cannot be read", expected="host:port, with a host to dial in each", got=repr(text))
    return list(found)


def hosts_of(addresses: Iterable[str]) -> set[str]:
    """The hosts of "host:port" addresses."""
    return {split_address(address)[0] for address in addresses}


def join_address(host: str, port: int) -> str:
    """(host, port) to "host:port", IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
