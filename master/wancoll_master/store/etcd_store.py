"""The facts in etcd: a Store whose writes are done later, and which only the leader can write. A trio shell.

Keys under the prefix: "leader" (with the leader's lease; its creation revision names one leadership), "facts" (term,
highest epoch, next mid and the number of the write), "groups/NAME" (a mark of this form, newest epoch, what was
committed when it began, for how long its members go on alone, mids; on a second line what was void, on a third who may
go on alone). Each write compares the leader key's creation with ours, and the facts' last change with what we know: a
deposed leader writes nothing, and of a write that was tried again nothing comes to pass twice or late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
import trio
from msgspec import Meta

from wancoll.errors import ConfigError
from wancoll.wire import messages as m
from wancoll_master.core.ready import Persist, Used
from wancoll_master.store.etcd import Entry, Etcd, EtcdError, created, delete, modified, put
from wancoll_master.store.facts import (
    GROUPS_KEPT,
    Counted,
    Facts,
    former_as_text,
    used_from,
    voids_as_text,
)

log = structlog.get_logger("wancoll.master")

_GROUPS_PER_WRITE = 32  # etcd takes 128 changes and 1.5 MiB at once
_FORM = "v5"  # of a group's numbers: those of another version are refused, not misread
_KEPT_PER_WRITE, _KEPT_BYTES_PER_WRITE = 64, 256 * 1024
_RETRY = 0.05  # seconds

T = TypeVar("T")


class Deposed(Exception):
    """This master must not lead any more, and why."""


class Keys:
    """The keys' names."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.leader = f"{prefix}leader"  # JSON of a Leader
        self.facts = f"{prefix}facts"  # JSON of Numbers
        self.groups = f"{prefix}groups/"  # prefix of a key for each group

    def elected_by(self, etcd: Etcd) -> str:
        """Welcome.elected_by, once *etcd* has answered."""
        return f"etcd {etcd.cluster} under {self.prefix}"


class Unreadable(EtcdError):
    """What stands in etcd is not what a master of this version writes: nobody leads by it."""

    def __init__(self, entry: Entry, expected: str, bad: Exception) -> None:
        super().__init__(
            str(
                ConfigError(
                    "cannot be read by this version", who=f"{entry.key} in etcd", expected=expected,
                    got=f"{entry.value[:100]!r} ({bad})",
                    hint="run the same version on all masters; if somebody else wrote it, see who can write to etcd, "
                    f"and put back what was there, or `etcdctl del {entry.key}`, as if it had been lost",
                )
            )
        )  # fmt: skip


class Leader(msgspec.Struct, frozen=True):
    """What the leader's key holds. *id*: drawn by the master's process, for people who look."""

    address: m.Address
    term: Counted
    id: m.Text


class Numbers(msgspec.Struct):
    """What the facts' key holds."""

    term: Counted
    epoch: Counted
    mid: Annotated[int, Meta(ge=1, le=m.MOST // 2)]
    write: Counted


def read(entry: Entry, kind: type[T]) -> T:
    """A value that is JSON. Raises Unreadable: it is not of that *kind*."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except (ValueError, RecursionError) as bad:
        raise Unreadable(entry, f"JSON of {kind.__name__}", bad) from bad


def text(value: msgspec.Struct) -> str:
    """The same, to be written."""
    return msgspec.json.encode(value).decode()


class EtcdStore:
    """The facts in etcd, while this master leads, since the transaction of *revision* made it the leader.

    *numbers* are as they stand there, with this master's term. *write_timeout*: seconds for a write, all tries
    together.
    """

    def __init__(self, etcd: Etcd, keys: Keys, numbers: Numbers, revision: int, write_timeout: float) -> None:
        self._etcd, self._keys, self._write_timeout = etcd, keys, write_timeout
        self._numbers = numbers
        self._leading_since = self._revision = revision
        self._groups: dict[str, Used] = {}  # to be written
        self._kept: dict[str, str | None] = {}  # the same, of others; None: to be deleted
        self._whole: list[dict[str, Any]] = []  # the same: all in one transaction, or none of it
        self._wake = trio.Event()
        self.facts = Facts(numbers.term, numbers.epoch, numbers.mid, {}, keys.elected_by(etcd))
        self.asked = self.written = 0

    async def load(self) -> None:
        """Read the groups; forget those with the oldest epochs. Raises EtcdError; Unreadable: no use to try again."""
        known: dict[str, Used] = {}
        for entry in await self._etcd.under(self._keys.groups):
            try:
                name = msgspec.convert(entry.key.removeprefix(self._keys.groups), m.Name)
                numbers, voids, former = (entry.value + "\n\n").split("\n")[:3]
                form, *rest = numbers.split()
                if form != _FORM:
                    raise ValueError(f"of form {form[:20]}")
                known[name] = used_from(rest, voids, former)
            except ValueError as bad:
                raise Unreadable(entry, f"a group of form {_FORM}", bad) from bad
        used = dict(sorted(known.items(), key=lambda item: item[1].epoch))
        old = list(used)[:-GROUPS_KEPT]
        for i in range(0, len(old), _GROUPS_PER_WRITE):
            changes = [delete(self._keys.groups + name) for name in old[i : i + _GROUPS_PER_WRITE]]
            await self._etcd.txn([created(self._keys.leader, self._leading_since)], changes, [])
        kept = {name: used[name] for name in list(used)[-GROUPS_KEPT:]}
        self.facts = replace(self.facts, used=kept)

    def persist(self, what: Persist) -> None:
        """See Store."""
        self._numbers.epoch = max(self._numbers.epoch, what.epoch)
        self._numbers.mid = max(self._numbers.mid, what.next_mid)
        self._groups |= what.groups
        self.asked += 1
        self._wake.set()

    def keep(self, changes: dict[str, str | None]) -> None:
        """Write these keys, too (None: delete), fenced as the facts are, and count as persist() does. Never waits."""
        self._kept |= changes
        self.asked += 1
        self._wake.set()

    def keep_whole(self, changes: list[dict[str, Any]]) -> None:
        """Carry out these few in one transaction, once all is written that was asked for before; else as keep().

        Until it is written nothing else is to be kept.
        """
        self._whole = changes
        self.asked += 1
        self._wake.set()

    async def write_forever(self, on_written: Callable[[], None]) -> None:
        """Task: write what persist() was told, and call *on_written* after each step.

        Raises Deposed: a write was refused, or not done in time.
        """
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self.written < self.asked:
                asked = self.asked
                names = list(self._groups)[:_GROUPS_PER_WRITE]
                changes = {name: self._groups.pop(name) for name in names}
                more = self._some_kept()
                if not more and not self._groups:  # etcd refuses to put and delete a key in one
                    more, self._whole = self._whole, []
                rest = bool(self._groups or self._kept or self._whole)
                await self._write(changes, more)
                if not rest:
                    self.written = asked
                    on_written()

    def _some_kept(self) -> list[dict[str, Any]]:
        """Take out what fits one write."""
        some: list[dict[str, Any]] = []
        nbytes = 0
        for key, value in list(self._kept.items())[:_KEPT_PER_WRITE]:
            nbytes += len(value or "")
            if some and nbytes > _KEPT_BYTES_PER_WRITE:
                break
            del self._kept[key]
            some.append(delete(key) if value is None else put(key, value))
        return some

    async def _write(self, groups: dict[str, Used], more: list[dict[str, Any]]) -> None:
        keys = self._keys
        self._numbers.write += 1
        facts_text = text(self._numbers)
        compare = [created(keys.leader, self._leading_since), modified(keys.facts, self._revision)]
        changes = [put(keys.facts, facts_text)]
        for name, used in groups.items():
            numbers = " ".join(map(str, [_FORM, used.epoch, used.base, used.alone, used.terms, *sorted(used.mids)]))
            lines = numbers, voids_as_text(used.voids), former_as_text(used.former)
            changes.append(put(keys.groups + name, "\n".join(lines).rstrip("\n")))
        changes += more
        reason = "nobody answered"
        with trio.move_on_after(self._write_timeout):
            while True:
                try:
                    answer = await self._etcd.txn(compare, changes, [keys.leader, keys.facts])
                    break
                except EtcdError as bad:
                    reason = str(bad)
                    log.warning("etcd does not take a write; it is tried again", reason=reason)
                    await trio.sleep(_RETRY)
            if answer.succeeded:
                self._revision = answer.revision
                return
            leader, facts = answer.read
            if leader is None or leader.created != self._leading_since:
                raise Deposed("etcd refused a write: another master leads, or the lease ran out")
            if facts is None or facts.value != facts_text:
                raise Deposed("etcd refused a write: the facts were changed by somebody else")
            self._revision = facts.modified  # an earlier try was carried out, and its answer lost
            return
        raise Deposed(f"etcd did not take a write within {self._write_timeout:g} s: {reason}")
