"""What has to be counted as it happens: operations that ended, epochs, recoveries. Plain numbers, cheap to add. Pure.

One row for each (group, kind, algorithm, codec, size class) of committed operations; all that is told of them is summed
up from the rows when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from wancoll.collective import LIBRARY_TAGS, Codec, Kind
from wancoll.limits import GIB, KIB, MIB
from wancoll.metrics.core import families as f

MOST_ROWS = 1024  # groups' names are the clients' choice; what comes after these is counted as one group
MORE = "(more)"  # that one
COMMITTED = "committed"
_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, 4 * GIB)  # upper bounds
SIZE_NAMES = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB", "4GiB", "more")
_MOVED_BUT_OWN = frozenset(
    {Kind.reduce_scatter, Kind.all_gather, Kind.gather, Kind.scatter, Kind.all_to_all}
)  # (n-1)/n

Key = tuple[str, Kind, str, Codec, int]


@dataclass(slots=True)
class _Row:
    counts: list[int] = field(default_factory=lambda: [0] * (len(f.SECONDS) + 1))  # by bucket of its duration
    seconds: float = 0.0
    retries: int = 0
    nbytes: int = 0
    bus: float = 0.0
    sent: int = 0
    saved: int = 0


def bus_factor(kind: Kind, world_size: int) -> float:
    """Bus bandwidth by algorithm bandwidth, as nccl-tests has it."""
    share = (world_size - 1) / world_size if world_size else 0.0
    return 2 * share if kind is Kind.all_reduce else share if kind in _MOVED_BUT_OWN else 1.0


class Histogram:
    """Observations by bucket; *bounds* are the buckets' upper bounds."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def bins(self) -> f.Bins:
        """The counts now."""
        return f.Bins(list(self._counts), self._total)


class LabelCounts:
    """Counts by labels, bounded: the first label is a name that others choose."""

    def __init__(self) -> None:
        self._of: dict[f.Labels, float] = {}

    def add(self, labels: f.Labels, by: float = 1) -> None:
        """Count *by* more."""
        if labels not in self._of and len(self._of) >= MOST_ROWS:
            labels = (MORE, *labels[1:])
        self._of[labels] = self._of.get(labels, 0) + by

    def family(self, spec: f.Spec) -> f.Family:
        """The counts now."""
        return f.Family(spec, list(self._of.items()))


class Operations:
    """What a daemon counts of its operations."""

    def __init__(self) -> None:
        self._rows: dict[Key, _Row] = {}
        self._recoveries: dict[str, Histogram] = {}
        self._failed, self._synced = LabelCounts(), LabelCounts()
        self.epochs, self.lost, self.ended = LabelCounts(), LabelCounts(), LabelCounts()

    def committed(
        self, group: str, kind: Kind, codec: Codec, nbytes: int, world_size: int,
        algorithm: str, seconds: float, attempts: int, sent: int, saved: int, tag: int = 0,
    ) -> None:  # fmt: skip
        """An operation was. *nbytes* is its larger tensor's, *tag* a send's or recv's."""
        key = group, kind, algorithm, codec, bisect_left(_SIZES, nbytes)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MOST_ROWS:
                key = MORE, kind, "", Codec.none, 0
            row = self._rows.setdefault(key, _Row())
        row.counts[bisect_left(f.SECONDS, seconds)] += 1
        row.seconds += seconds
        row.retries += attempts - 1
        row.nbytes += nbytes
        row.bus += nbytes * bus_factor(kind, world_size)
        row.sent += sent
        row.saved += saved
        if tag >= LIBRARY_TAGS:
            self._synced.add((group, "sent" if kind is Kind.send else "received"), nbytes)

    def failed(self, group: str, kind: Kind, error: str) -> None:
        """An operation ended with this error."""
        self._failed.add((group, kind.name, error))

    def recovered(self, group: str, seconds: float) -> None:
        """A member goes on without those that were lost."""
        name = group if group in self._recoveries or len(self._recoveries) < MOST_ROWS else MORE
        self._recoveries.setdefault(name, Histogram(f.SECONDS)).add(seconds)

    def families(self) -> Iterator[f.Family]:
        """All that is known, each of the moment in which it is taken."""
        by_outcome = LabelCounts()
        for (group, kind, *_), row in self._rows.items():
            by_outcome.add((group, kind.name, COMMITTED), sum(row.counts))
        yield f.Family(
            f.OPERATIONS, [*by_outcome.family(f.OPERATIONS).samples, *self._failed.family(f.OPERATIONS).samples]
        )
        yield f.Family(
            f.DURATION,
            [
                ((group, kind.name, algorithm, codec.name, SIZE_NAMES[size]), f.Bins(list(row.counts), row.seconds))
                for (group, kind, algorithm, codec, size), row in self._rows.items()
            ],
        )
        for spec, name in ((f.RETRIES, "retries"), (f.CALL_BYTES, "nbytes"), (f.BUS_BYTES, "bus")):
            by_kind = LabelCounts()
            for (group, kind, *_), row in self._rows.items():
                by_kind.add((group, kind.name), getattr(row, name))
            yield by_kind.family(spec)
        for spec, name in ((f.SENT, "sent"), (f.SAVED, "saved")):
            by_codec = LabelCounts()
            for (group, _, _, codec, _), row in self._rows.items():
                by_codec.add((group, codec.name), getattr(row, name))
            yield by_codec.family(spec)
        yield self._synced.family(f.SYNCED)
        yield self.epochs.family(f.EPOCHS)
        yield self.lost.family(f.LOST)
        yield self.ended.family(f.ENDED)
        yield f.Family(f.RECOVERY, [((group,), one.bins) for group, one in self._recoveries.items()])


class Recovery:
    """One member's way from the first sign of a loss to its next commit."""

    __slots__ = ("_lost", "since")

    def __init__(self) -> None:
        self.since: float | None = None  # when a sign of a loss was noticed; None: none was
        self._lost = False  # an epoch without them has begun

    def noticed(self, now: float) -> None:
        """A link broke, or the master ends the epoch: it may be a loss."""
        if self.since is None:
            self.since = now

    def entered(self, now: float, *, lost: bool, waits: bool) -> float | None:
        """An epoch began that *lost* members; *waits*: calls are open. Seconds, if this was the end of it."""
        self._lost = self._lost or lost
        if not self._lost:
            self.since = None
            return None
        self.noticed(now)
        return None if waits else self.committed(now)

    def committed(self, now: float) -> float | None:
        """A call was. Seconds, if this was the end of a recovery."""
        if self.since is None:
            return None
        took = now - self.since if self._lost else None
        self.since, self._lost = None, False
        return took
