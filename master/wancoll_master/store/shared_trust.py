"""The trust of masters that share an etcd: one key, its tokens and names, each value sealed by their key file.

Under the prefix: "trust/keys" (an id, the key of admins on the masters' machines, and the masters' keys, two while a
rotation is on), "trust/ID/token/TOKEN", "trust/ID/name/NAME" and "trust/ID/key/KEY" (rows of the registry; what was
made under keys that were deleted, or replaced at once, is under another ID, so nothing of it counts). docs/security.md
says who writes what. Standbys look at the keys.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, unquote

import structlog
import trio

from wancoll.errors import ConfigError
from wancoll.trust.keys import Key, keys_of
from wancoll.trust.seal import Seal
from wancoll_master.store.etcd import Entry, Etcd, EtcdError, created, delete_under, put
from wancoll_master.store.etcd_store import EtcdStore

log = structlog.get_logger("wancoll.master")

_PAGE = 512  # rows of one request
_RETRY = 1.0  # seconds
_KEEP = "let masters that run run: the one that led last writes it back; if it has ended, put back what etcd had"


@dataclass(frozen=True, slots=True)
class SharedTrust:
    """The trust of masters that share an etcd."""

    prefix: str  # of all its keys in etcd
    seal: Seal  # opens them
    id: str  # of these keys; where they were replaced at once there is more after a dot, for the next one's rows
    keys: Sequence[Key]  # the same for all masters, as they were when they were read, the newest last
    admin: Key  # by which commands on these masters' machines are admin at all of them
    revision: int = 0  # of etcd, when that was written

    async def newer(self, etcd: Etcd) -> SharedTrust | None:
        """Return the trust as it is now; None: it has not changed.

        Raises:
            EtcdError: it cannot be read, or was changed; or other masters' keys are there.
        """
        try:
            entry = await etcd.get(f"{self.prefix}trust/keys")
            if entry is not None and entry.modified == self.revision:
                return None
            found = _opened(entry, self.prefix, self.seal.path) if entry is not None else None
            if found is None or found._origin != self._origin:
                raise ConfigError(
                    "is not the key that this master was started with", who=f"{self.prefix}trust/keys",
                    expected=f"{self.keys[-1].public.hex()}, or one that it gave way to",
                    got="another" if found else "none", hint=_KEEP,
                )  # fmt: skip
            return found
        except ConfigError as bad:
            raise EtcdError(str(bad)) from bad

    async def rows(self, store: EtcdStore, etcd: Etcd, before: Rows | None) -> Rows:
        """What is known of tokens and names, for who leads; *before*: what it knew, if no other has led since.

        Raises:
            EtcdError: it cannot be read, or was changed; or other masters' keys are there.
        """
        if before is not None and await etcd.get(f"{self.prefix}trust/keys") is None:
            return before.again(store)
        now = await self.newer(etcd) or self
        known: dict[str, dict[str, str]] = {}
        try:
            for kind in ("token", "name", "key"):
                under = now._key(kind, "")
                found = await etcd.under(under, _PAGE)
                known[kind] = {
                    unquote(one.key.removeprefix(under)): self.seal.open(one.key, one.value) for one in found
                }
        except ConfigError as bad:
            raise EtcdError(str(bad)) from bad
        return Rows(now, store, known)

    @property
    def _origin(self) -> str:
        """What all have in common that gave way to each other."""
        return self.id.partition(".")[0]

    def _key(self, kind: str, id: str) -> str:
        return f"{self.prefix}trust/{self.id}/{kind}/{quote(id, safe='')}"


class Rows:
    """Rows of the registry, and the masters' keys, while this master leads."""

    def __init__(self, trust: SharedTrust, store: EtcdStore, known: dict[str, dict[str, str]]) -> None:
        self._trust, self._store, self._known = trust, store, known
        self.keys, self.admin = trust.keys, trust.admin

    def trust(self, kind: str) -> dict[str, str]:
        """Rows of before, by id; *kind*: "token", "name" or "key"."""
        return self._known[kind]

    def keep_trust(self, kind: str, rows: dict[str, str], gone: Collection[str] = ()) -> None:
        """Write these, and forget those that are *gone*, when the store has written all that it was asked for."""
        changes: dict[str, str | None] = {self._trust._key(kind, id): None for id in gone}
        for id in gone:
            self._known[kind].pop(id, None)
        self._known[kind] |= rows
        for id, row in rows.items():
            key = self._trust._key(kind, id)
            changes[key] = self._trust.seal.close(key, row)
        self._store.keep(changes)

    def keep_keys(self, keys: Sequence[Key], *, anew: dict[str, str] | None = None) -> None:
        """Write them; with *anew* these rows of tokens are all that there are from then on, and admin is another."""
        before, seal = self._trust, self._trust.seal
        if anew is not None:
            self.admin = Key.new()
            self._trust = replace(before, id=f"{before._origin}.{secrets.token_hex(8)}", admin=self.admin)
            self._known = {"token": dict(anew), "name": {}, "key": {}}
        self._trust = replace(self._trust, keys=keys)
        rows = {f"{before.prefix}trust/keys": _as_text(self._trust)}
        rows |= {self._trust._key("token", id): row for id, row in (anew or {}).items()}
        changes = [put(key, seal.close(key, row)) for key, row in rows.items()]
        if anew is not None:
            changes.append(delete_under(f"{before.prefix}trust/{before.id}/"))
        self._store.keep_whole(changes)

    def again(self, store: EtcdStore) -> Rows:
        """The same in *store*, written anew: etcd has lost it. The keys, by which the rows count, come last."""
        log.warning("etcd has lost the masters' key and tokens; this master writes back what it knows")
        again, trust = Rows(self._trust, store, self._known), self._trust
        for kind, rows in self._known.items():
            again.keep_trust(kind, rows)
        key = f"{trust.prefix}trust/keys"
        store.keep({key: trust.seal.close(key, _as_text(trust))})
        return again


async def shared(etcd: Etcd, prefix: str, path: str, known: str = "") -> SharedTrust:
    """The masters' trust, which is made where there is none, as is the key file at *path*; waits for etcd.

    *known* is a file that says, if it is there, that there was a key before: then none is made, but waited for.
    Raises ConfigError: the key file is missing, cannot be used, or is another; or what etcd has was changed.
    """
    key, said = f"{prefix}trust/keys", False
    while True:
        try:
            entry = await etcd.get(key)
            if entry is None and os.path.exists(known):  # noqa: ASYNC240 - a moment
                raise EtcdError(
                    f"{key} is lost, whose public half is in {known}; {_KEEP}; to begin anew, with new tokens for "
                    "all daemons, stop all masters and delete that file"
                )
            return _opened(entry, prefix, path) if entry is not None else await _made(etcd, prefix, path)
        except EtcdError as bad:
            if not said:
                log.warning("etcd cannot be asked for the masters' key; it is tried again", reason=str(bad))
            said = True
        await trio.sleep(_RETRY)


async def _made(etcd: Etcd, prefix: str, path: str) -> SharedTrust:
    """A new key, or that of a master which was faster."""
    seal, new = _key_file(path)
    key, made = f"{prefix}trust/keys", SharedTrust(prefix, seal, secrets.token_hex(8), [Key.new()], Key.new())
    answer = await etcd.txn([created(key, 0)], [put(key, seal.close(key, _as_text(made)))], [key])
    if answer.succeeded:
        log.info("a new key, for all masters of this etcd", key=made.keys[-1].public.hex(), key_file=path)
        return replace(made, revision=answer.revision)
    try:
        (entry,) = answer.read
        if entry is None:
            raise EtcdError(f"{key} was there and is gone")
        return _opened(entry, prefix, path)
    except ConfigError:
        if new:  # nothing is sealed with it
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise


def _key_file(path: str) -> tuple[Seal, bool]:
    """The key, and whether it is a new one."""
    with contextlib.suppress(FileNotFoundError):
        return Seal.read(path), False
    try:
        seal = Seal.make(path)
    except FileExistsError:  # another master on this machine has made it meanwhile
        return Seal.read(path), False
    log.warning(
        "a new key file: copy it to the machines of the other masters, mode 0600, before they start", file=path,
        next="to the same path there, or to another one with --seal-key",
    )  # fmt: skip
    return seal, True


def _opened(entry: Entry, prefix: str, path: str) -> SharedTrust:
    try:
        seal = Seal.read(path)
    except FileNotFoundError as missing:
        raise ConfigError(
            "the key file is missing that the masters' key in etcd is sealed with", who=path,
            expected="the file of the master that was started first", got="none",
            hint="copy it from there to this path, mode 0600, or say with --seal-key where it is; where all are lost, "
            f"`etcdctl del {prefix}trust/keys` begins anew, and all daemons need new tokens",
        ) from missing  # fmt: skip
    try:
        id, _, pem = seal.open(entry.key, entry.value).partition("\n")
        admin, *keys = keys_of(pem.encode())
        if not 1 <= len(keys) <= 2:
            raise ValueError(f"{len(keys)} keys of masters")
        return SharedTrust(prefix, seal, id, keys, admin, entry.modified)
    except ValueError as bad:
        raise ConfigError(
            "cannot be read by this version", who=f"{entry.key} in etcd", expected="an id and keys", got=str(bad),
            hint="run the same wancoll version everywhere",
        ) from bad  # fmt: skip


def _as_text(trust: SharedTrust) -> str:
    return "\n".join([trust.id, b"".join(key.pem for key in (trust.admin, *trust.keys)).decode()])
