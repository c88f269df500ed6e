"""Folders for keys: one owner at a time, for one user alone, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from wancoll.errors import ConfigError
from wancoll.local import open_to_others, standing

_LOCK = "lock"
# Files of a master's folder: its keys, their public halves, and the key of whoever is admin on its machine.
MASTER_KEY, MASTER_PUBLIC, ADMIN_KEY = "master.key", "master.pub", "admin.key"
_AGAIN = 0.02  # seconds until a lock is tried again


def own_folder(path: str) -> None:
    """A folder for keys: made, where there is none; nobody else may put others in their place.

    Raises:
        ConfigError: others may write to it.
        OSError: it cannot be made.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.stat(path)
    if open_to_others(found):
        raise ConfigError(
            "is a folder in which others may replace the keys", who=f"--state {path}",
            expected=f"one of user {os.geteuid()} or root, that nobody else may write to",
            got=standing(found),
            hint="choose another, or, if all in it is yours, make it so: chown, chmod 700",
        )  # fmt: skip


@contextlib.contextmanager
def held_folder(path: str, whose: str, owner: str, wait: float = 0.0) -> Iterator[None]:
    """A folder for keys that is one *whose*, "daemon" or "master", for as long; *owner* says which to another one.

    Raises:
        ConfigError: another one has it for *wait* seconds, or others may write to it.
        OSError: it cannot be made, or written to.
    """
    own_folder(path)
    lock = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    ends = time.monotonic() + wait
    try:
        while not _locked(lock):
            if time.monotonic() >= ends:
                other = os.pread(lock, 1000, 0).decode(errors="replace") or "one that starts"
                raise ConfigError(
                    f"is the state folder of another {whose}, which runs", who=path, got=other,
                    expected=f"one of this {whose}'s own",
                    hint=f"give each {whose} its own --state (or WANCOLL_STATE), or none",
                )  # fmt: skip
            time.sleep(_AGAIN)
        os.ftruncate(lock, 0)
        os.write(lock, owner.encode())
        yield
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_secret(path: str, data: bytes) -> None:
    """A file for this user alone, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    new = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)  # what was there may be open elsewhere, or a link
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as bad:
        bad.filename = new  # a full disk's error names none
        raise
    os.replace(new, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # else a machine that loses power may have the file of before
    finally:
        os.close(folder)


def read_secret(path: str, most: int, *, what: str, hint: str, broken: str = "") -> bytes:
    """The first *most* bytes of a file for this user alone, which is *what*, such as "a key".

    *hint*: what to do where others may read it; *broken*: where it cannot be read.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it cannot be read, or others may read or replace it.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # of no pipe
            about, found = os.fstat(file.fileno()), file.read(most) or b""
    except FileNotFoundError:
        raise
    except OSError as bad:
        raise ConfigError(f"{what} cannot be read", who=path, got=bad.strerror or str(bad), hint=broken) from bad
    if open_to_others(about, reads=True):
        raise ConfigError(
            f"is {what} that others may read or replace", who=path, got=standing(about),
            expected=f"-rw------- (mode 0600) of user {os.geteuid()} or root", hint=hint,
        )  # fmt: skip
    return found


def public_keys(folder: str) -> tuple[bytes, ...]:
    """The public keys that a master has left in its state *folder*, the newest last.

    Raises:
        OSError, ValueError: there are none.
    """
    with open(os.path.join(folder, MASTER_PUBLIC), encoding="ascii") as file:
        return tuple(bytes.fromhex(line) for line in file.read().split())


@contextlib.contextmanager
def in_memory(data: bytes) -> Iterator[str]:
    """The path, for as long, of a file with this *data* that is on no disk: `ssl` takes keys from files alone."""
    with open(os.memfd_create("wancoll-key"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
