"""What outlives a master: its term, each group's newest epoch, the next mid and the newest events, in sqlite."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import structlog

from wancoll.errors import ConfigError
from wancoll.failpoints import Failpoints
from wancoll.wire.messages import MOST, EventRecord
from wancoll_master.core.ready import Persist, Used, jumped
from wancoll_master.store.facts import (
    GROUPS_KEPT,
    Counted,
    Facts,
    former_as_text,
    used_from,
    voids_as_text,
)

log = structlog.get_logger("wancoll.master")

FORMAT = 8
_LOCK_DIGITS = 20  # of each number in the lock
_NOTHING = 0, 0  # stands in the lock
EVENTS_KEPT = 10_000
_TRIM_EVERY = 1000  # events beyond EVENTS_KEPT before the oldest are deleted

_SCHEMA = """
create table if not exists facts (name text primary key, value integer not null);
create table if not exists events (
    id integer primary key, time real not null, grp text not null, epoch integer not null, kind text not null,
    text text not null
);
create table if not exists groups (
    name text primary key, epoch integer not null, mids text not null, base integer not null,
    voids text not null, alone integer not null, former text not null, terms integer not null
);
create table if not exists trust (kind text not null, id text not null, row text not null, primary key (kind, id));
"""


class Journal:
    """One sqlite file, or memory: a Store whose writes are done at once. Calls are short and not from several threads.

    What fences is synced to disk before persist() returns: once in an epoch, never for an operation. A machine that
    loses power may lose the last events, and nothing else. A lock beside the file, since sqlite's would keep readers of
    the events away, says which master uses it, and how new it is (R9).

    The *path* "" or ":memory:" keeps all in memory.

    Raises:
        ConfigError: the file cannot be opened, is no journal of this format, or another master has it.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path) if path and path != ":memory:" else ":memory:"  # one lock for each file
        self.failpoints = Failpoints("")
        self._lock = None if self._path == ":memory:" else _lock(self._path)
        self.asked = self.written = 0
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=1.0)
            try:
                self._db.execute("pragma journal_mode = wal")
                self.begin_term()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError) as bad:
            self._unlock()
            raise _unusable(self._path, str(bad)) from bad

    def begin_term(self) -> None:
        """Take the next term, and read the facts that its master starts from. Raises sqlite3.Error."""
        self._db.execute("pragma synchronous = full")
        with self._db:
            self._db.execute("begin immediate")
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            known = _facts(self._db.execute("select name, value from facts").fetchall())
            if known.setdefault("format", FORMAT) != FORMAT:
                raise sqlite3.DatabaseError(f"format {known['format']}, this version reads {FORMAT}")
            columns = "name, epoch, mids, base, voids, alone, former, terms"
            rows = self._db.execute(f"select {columns} from groups order by epoch").fetchall()
            has = term, self._writes = known.get("term", 0), known.get("writes", 0)
            told = self._told() if self._lock is not None else has
            lost = told > has or (term > 0 and told == _NOTHING)
            if lost:
                known["id"] = secrets.randbits(60)  # it may be a copy, and another master use the other one
                self._db.execute("delete from groups")
                rows = []
            used = dict(map(_group, rows[-GROUPS_KEPT:]))
            self._db.executemany("delete from groups where name = ?", [row[:1] for row in rows[:-GROUPS_KEPT]])
            newest = max(term, told[0]), known.get("highest_epoch", 0), known.get("next_mid", 1)
            term, highest, next_mid = jumped(*newest) if lost else newest
            id = known.setdefault("id", secrets.randbits(60))
            self.facts = Facts(term + 1, highest, next_mid, used, f"journal {id:x}", lost)
            numbers = {"term": self.facts.term, "highest_epoch": highest, "next_mid": next_mid}
            self._write({"format": FORMAT, **numbers})
            self._db.execute("insert or replace into facts values ('id', ?)", (id,))
        if lost:
            log.warning("the journal had missed epochs, or is an older one: it knows no group now", journal=self._path)
        self._missed = False
        self._term = self.facts.term
        self._note()
        self._db.execute("pragma synchronous = normal")
        (self._events,) = self._db.execute("select count(*) from events").fetchone()

    def _told(self) -> tuple[int, int]:
        """The newest term and write, by the lock; _NOTHING: a write was missed, or the lock is not the journal's."""
        assert self._lock is not None
        text = os.pread(self._lock, 2 * _LOCK_DIGITS, 0)
        whole = len(text) == 2 * _LOCK_DIGITS and text.isdigit()
        told = (int(text[:_LOCK_DIGITS]), int(text[_LOCK_DIGITS:])) if whole else _NOTHING
        return told if max(told) <= MOST // 2 else _NOTHING

    def _note(self) -> None:
        """Say in the lock how new the journal is, unless a write of this term was missed."""
        if self._lock is not None and not self._missed:
            # If that fails: a lock older than the journal says nothing against it, an empty one makes it count as lost.
            with contextlib.suppress(OSError):
                os.pwrite(self._lock, b"%0*d%0*d" % (_LOCK_DIGITS, self._term, _LOCK_DIGITS, self._writes), 0)
                os.fsync(self._lock)

    def _write(self, facts: dict[str, int]) -> None:
        self._db.executemany(
            "insert into facts values (?, ?) on conflict (name) do update set value = max(value, excluded.value)",
            list(facts.items()),
        )

    def persist(self, what: Persist) -> None:
        """See Store.

        Raises:
            sqlite3.Error: it could not be written; the next term takes the journal for lost.
            OSError: nor could that be noted: nothing may be told that rests on it.
        """
        rows = [
            (
                name,
                one.epoch,
                " ".join(map(str, sorted(one.mids))),
                one.base,
                voids_as_text(one.voids),
                one.alone,
                former_as_text(one.former),
                one.terms,
            )
            for name, one in what.groups.items()
        ]
        self._term = what.term
        try:
            self.failpoints.hit("store_write")
            with self._counted():
                self._write({"term": what.term, "highest_epoch": what.epoch, "next_mid": what.next_mid})
                self._db.executemany("insert or replace into groups values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        except sqlite3.Error:
            self._missed = True
            if self._lock is not None:
                os.ftruncate(self._lock, 0)
                os.fsync(self._lock)
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Write to the disk at once, and count that in the lock: an older copy of the journal is found to lack it."""
        self._db.execute("pragma synchronous = full")
        try:
            with self._db:
                self._db.execute("begin immediate")
                yield
                self._write({"writes": self._writes + 1})
            self.failpoints.hit("store_sync")
            self._writes += 1
            self._note()
        finally:
            self._db.execute("pragma synchronous = normal")

    def add(self, event: EventRecord) -> None:
        """Append to the event log; the newest EVENTS_KEPT or somewhat more are kept. Raises sqlite3.Error."""
        self._db.execute(
            "insert into events (time, grp, epoch, kind, text) values (?, ?, ?, ?, ?)",
            (event.time, event.group, event.epoch, event.kind, event.text),
        )
        self._events += 1
        if self._events >= EVENTS_KEPT + _TRIM_EVERY:
            self._db.execute("delete from events where id <= (select max(id) from events) - ?", (EVENTS_KEPT,))
            self._events = EVENTS_KEPT

    def events(self, count: int) -> list[EventRecord]:
        """The newest *count* events, newest last."""
        newest = "select time, grp, epoch, kind, text from events order by id desc limit ?"
        found = self._db.execute(newest, (count,)).fetchall()
        return [EventRecord(*row) for row in reversed(found)]

    def trust(self, kind: str) -> dict[str, str]:
        """Rows of the trust's registry, by id; *kind*: "token", "name", "key", or "master", whose keys they are of."""
        return dict(self._db.execute("select id, row from trust where kind = ?", (kind,)))

    def keep_trust(self, kind: str, rows: dict[str, str], gone: Collection[str] = ()) -> None:
        """Write rows of the trust's registry, and forget those that are *gone*. Raises sqlite3.Error."""
        with self._counted():
            self._db.executemany("delete from trust where kind = ? and id = ?", [(kind, id) for id in gone])
            self._db.executemany(
                "insert or replace into trust values (?, ?, ?)", [(kind, *row) for row in rows.items()]
            )

    def close(self) -> None:
        """Close the file, and let another master have it."""
        self._db.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)


def _facts(rows: list[tuple[str, int]]) -> dict[str, int]:
    """Facts by name. Raises sqlite3.DatabaseError: no master wrote them."""
    try:
        return msgspec.convert(dict(rows), dict[str, Counted])
    except ValueError as bad:
        raise sqlite3.DatabaseError(f"facts that cannot be read: {bad}") from bad


def _group(row: tuple[Any, ...]) -> tuple[str, Used]:
    """A group's name, and what was kept of it. Raises sqlite3.DatabaseError: no master wrote it."""
    name, epoch, mids, base, voids, alone, former, terms = row
    try:
        return name, used_from([epoch, base, alone, terms, *str(mids).split()], str(voids), str(former))
    except ValueError as bad:
        raise sqlite3.DatabaseError(f"a group {name!r} that cannot be read: {bad}") from bad


def _lock(path: str) -> int:
    """Take the lock beside the journal, which ends with the process. Raises ConfigError: it cannot be had."""
    name, lock = f"{path}.lock", -1
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise OSError(f"{name} is no plain file")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as bad:
        if lock >= 0:
            os.close(lock)
        if isinstance(bad, BlockingIOError):
            raise ConfigError(
                "the journal is used by another master, which runs", who=path, expected="a journal for each master",
                got=f"{name} is held", hint="stop the other one, or choose another path with --journal",
            ) from bad  # fmt: skip
        raise _unusable(path, str(bad)) from bad
    return lock


def _unusable(path: str, got: str) -> ConfigError:
    return ConfigError(
        "the journal cannot be used", who=path, expected="a writable path, or a file that an earlier master wrote",
        got=got, hint="choose another path with --journal, or --journal none",
    )  # fmt: skip
