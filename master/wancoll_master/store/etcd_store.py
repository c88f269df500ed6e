"""The facts in etcd: a Store whose writes are done later, and which only the leader can write. A trio shell.

Keys under the prefix: "leader" (with the leader's lease; its creation revision names one leadership), "facts" (term,
highest epoch, next mid and the number of the write), "groups/NAME" (a mark of this form, newest epoch, what was
committed when it began, for how long its members go on alone, mids; on a second line what was void). Each write
compares the leader key's creation with ours, and the facts' last change with what we know: a deposed leader writes
nothing, and of a write that was tried again nothing comes to pass twice or late.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from wancoll_master.core.ready import Persist, Used
from wancoll_master.store.etcd import Entry, Etcd, EtcdError, created, delete, modified, put
from wancoll_master.store.facts import GROUPS_KEPT, Facts, voids_as_text, voids_from_text

log = structlog.get_logger("wancoll.master")

_GROUPS_PER_WRITE = 32  # etcd takes 128 changes and 1.5 MiB at once
_FORM = "v2"  # of a group's numbers: those of another version are refused, not misread
_RETRY = 0.05  # seconds


class Deposed(Exception):
    """This master must not lead any more, and why."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys' names."""

    prefix: str

    @property
    def leader(self) -> str:
        """Who leads: JSON with "address", "term", "id"."""
        return f"{self.prefix}leader"

    @property
    def facts(self) -> str:
        """Term, epoch, mid and write: JSON."""
        return f"{self.prefix}facts"

    @property
    def groups(self) -> str:
        """Prefix of a key for each group."""
        return f"{self.prefix}groups/"


@dataclass(slots=True)
class Numbers:
    """What the facts' key holds."""

    term: int = 0
    epoch: int = 0
    mid: int = 1
    write: int = 0

    @classmethod
    def read(cls, entry: Entry | None) -> Numbers:
        """From etcd; what is not ours is an error.

        Raises:
            EtcdError: it cannot be read.
        """
        if entry is None:
            return cls()
        try:
            found = json.loads(entry.value)
            return cls(*(int(found[name]) for name in cls.__dataclass_fields__))
        except (ValueError, KeyError, TypeError) as bad:
            raise EtcdError(f"the value of {entry.key} cannot be read by this version: {entry.value[:100]!r}") from bad

    @property
    def text(self) -> str:
        """For etcd."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})


class EtcdStore:
    """The facts, while this master leads.

    Args:
        etcd: where.
        keys: under which names.
        numbers: as they stand there, with this master's term.
        revision: of the transaction that made this master the leader.
        write_timeout: seconds for a write, all tries together.
    """

    def __init__(self, etcd: Etcd, keys: Keys, numbers: Numbers, revision: int, write_timeout: float) -> None:
        self._etcd, self._keys, self._write_timeout = etcd, keys, write_timeout
        self._numbers = numbers
        self._leading_since = self._revision = revision
        self._groups: dict[str, Used] = {}  # to be written
        self._wake = trio.Event()
        self.facts = Facts(numbers.term, numbers.epoch, numbers.mid, {})
        self.asked = self.written = 0

    async def load(self) -> None:
        """Read the groups; forget those with the oldest epochs.

        Raises:
            EtcdError: they cannot be read.
        """
        known: dict[str, Used] = {}
        for entry in await self._etcd.under(self._keys.groups):
            try:
                numbers, _, voids = entry.value.partition("\n")
                form, *rest = numbers.split()
                if form != _FORM:
                    raise ValueError
                epoch, base, alone, *mids = map(int, rest)
                used_there = Used(epoch, frozenset(mids), base, voids_from_text(voids), alone)
            except ValueError as bad:
                what = f"the value of {entry.key} cannot be read by this version"
                raise EtcdError(f"{what}: {entry.value[:100]!r}") from bad
            known[entry.key.removeprefix(self._keys.groups)] = used_there
        used = dict(sorted(known.items(), key=lambda item: item[1].epoch))
        old = list(used)[:-GROUPS_KEPT]
        for i in range(0, len(old), _GROUPS_PER_WRITE):
            changes = [delete(self._keys.groups + name) for name in old[i : i + _GROUPS_PER_WRITE]]
            await self._etcd.txn([created(self._keys.leader, self._leading_since)], changes, [])
        kept = {name: used[name] for name in list(used)[-GROUPS_KEPT:]}
        self.facts = Facts(self.facts.term, self.facts.highest_epoch, self.facts.next_mid, kept)

    def persist(self, what: Persist) -> None:
        """See Store."""
        self._numbers.epoch = max(self._numbers.epoch, what.epoch)
        self._numbers.mid = max(self._numbers.mid, what.next_mid)
        self._groups |= what.groups
        self.asked += 1
        self._wake.set()

    async def write_forever(self, on_written: Callable[[], None]) -> None:
        """Task: write what persist() was told, and call *on_written* after each step.

        Raises:
            Deposed: a write was refused, or not done in time.
        """
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self.written < self.asked:
                asked = self.asked
                names = list(self._groups)[:_GROUPS_PER_WRITE]
                changes = {name: self._groups.pop(name) for name in names}
                rest = bool(self._groups)
                await self._write(changes)
                if not rest:
                    self.written = asked
                    on_written()

    async def _write(self, groups: dict[str, Used]) -> None:
        keys = self._keys
        self._numbers.write += 1
        text = self._numbers.text
        compare = [created(keys.leader, self._leading_since), modified(keys.facts, self._revision)]
        changes = [put(keys.facts, text)]
        for name, used in groups.items():
            numbers = " ".join(map(str, [_FORM, used.epoch, used.base, used.alone, *sorted(used.mids)]))
            changes.append(put(keys.groups + name, "\n".join(filter(None, (numbers, voids_as_text(used.voids))))))
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
            if facts is None or facts.value != text:
                raise Deposed("etcd refused a write: the facts were changed by somebody else")
            self._revision = facts.modified  # an earlier try was carried out, and its answer lost
            return
        raise Deposed(f"etcd did not take a write within {self._write_timeout:g} s: {reason}")
