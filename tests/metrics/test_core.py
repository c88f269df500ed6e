"""What is counted of operations, recoveries and links, and the text that it becomes."""

from __future__ import annotations

import itertools

import pytest

from tests.metrics.support import Scrape, documented
from wancoll.cli.perf.values import COLLECTIVES
from wancoll.collective import LIBRARY_TAGS, Codec, Kind
from wancoll.metrics import text
from wancoll.metrics.core import families as f
from wancoll.metrics.core.operations import MORE, MOST_ROWS, Histogram, LabelCounts, Operations, Recovery, bus_factor
from wancoll.native.engine import LaneStatistics
from wancoll.peer.core.paths.tcpinfo import TcpInfo
from wancoll.peer.links import traffic
from wancoll.peer.links.traffic import Now, Traffic

USUAL = {"algorithm": "ring", "seconds": 0.002, "attempts": 1, "sent": 100, "saved": 0}


def told(operations: Operations) -> Scrape:
    return Scrape(b"".join(piece for one in operations.families() for piece in text.pieces(one)).decode())


def test_the_list_in_the_documents_is_what_there_is() -> None:
    assert documented() == [(one.name, one.kind, one.labels, one.help) for one in f.FAMILIES.values()]


def test_names_keep_prometheus_conventions() -> None:
    for one in f.FAMILIES.values():
        assert one.name.startswith("wancoll_")
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert not one.name.endswith(("_ms", "_milliseconds", "_kib", "_percent"))
        assert list(one.buckets) == sorted(set(one.buckets))
        assert "le" not in one.labels


def test_an_operation_is_counted_once_in_each_family() -> None:
    operations = Operations()
    operations.committed("g", Kind.all_reduce, Codec.none, 4096, 4, **USUAL)
    operations.committed("g", Kind.all_reduce, Codec.int8, 4097, 4, **USUAL | {"saved": 70, "attempts": 3})
    operations.committed("g", Kind.barrier, Codec.none, 0, 4, **USUAL | {"algorithm": "none", "sent": 0})
    operations.failed("g", Kind.all_reduce, "WorldTooSmall")
    found = told(operations)
    assert found.all("wancoll_operations_total") == {
        ("g", "all_reduce", "committed"): 2,
        ("g", "barrier", "committed"): 1,
        ("g", "all_reduce", "WorldTooSmall"): 1,
    }
    assert found.all("wancoll_operation_seconds_count") == {
        ("ring", "none", "g", "all_reduce", "4KiB"): 1,
        ("ring", "int8", "g", "all_reduce", "64KiB"): 1,
        ("none", "none", "g", "barrier", "4KiB"): 1,
    }
    row = {"algorithm": "ring", "codec": "none", "group": "g", "kind": "all_reduce", "size": "4KiB"}
    buckets = [found.value("wancoll_operation_seconds_bucket", le=le, **row) for le in ("0.001", "0.0025", "+Inf")]
    assert buckets == [0, 1, 1]
    assert found.value("wancoll_operation_seconds_sum", **row) == 0.002
    assert found.all("wancoll_operation_retries_total") == {("g", "all_reduce"): 2, ("g", "barrier"): 0}
    assert found.value("wancoll_operation_bytes_total", group="g", kind="all_reduce") == 8193
    assert found.value("wancoll_operation_bus_bytes_total", group="g", kind="all_reduce") == 8193 * 1.5
    assert found.all("wancoll_sent_bytes_total") == {("none", "g"): 100, ("int8", "g"): 100}
    assert found.all("wancoll_saved_bytes_total") == {("none", "g"): 0, ("int8", "g"): 70}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name in COLLECTIVES])
def test_bus_bandwidth_is_that_of_the_command_that_measures(kind: Kind) -> None:
    assert bus_factor(kind, 4) * 1e-9 == pytest.approx(COLLECTIVES[kind.name].busbw(1, 1.0, 4))


def test_what_sync_state_moves_is_told_by_direction() -> None:
    operations = Operations()
    for kind, tag, nbytes in ((Kind.send, LIBRARY_TAGS | 7, 10), (Kind.recv, LIBRARY_TAGS, 5), (Kind.recv, 3, 1)):
        operations.committed("g", kind, Codec.none, nbytes, 2, **USUAL, tag=tag)
    assert told(operations).all("wancoll_sync_state_bytes_total") == {("sent", "g"): 10, ("received", "g"): 5}


def test_groups_that_clients_think_up_do_not_fill_memory() -> None:
    operations = Operations()
    for i in range(3 * MOST_ROWS):
        operations.committed(f"g{i}", Kind.all_reduce, Codec.none, 1, 2, **USUAL)
        operations.failed(f"g{i}", Kind.all_reduce, "Evicted")
        operations.recovered(f"g{i}", 1.0)
        operations.epochs.add((f"g{i}",))
    found = told(operations)
    assert sum(found.all("wancoll_operation_seconds_count").values()) == 3 * MOST_ROWS
    assert found.value("wancoll_operation_seconds_count", algorithm="", codec="none", group=MORE, kind="all_reduce",
                       size="4KiB") == 2 * MOST_ROWS  # fmt: skip
    for name in ("wancoll_operation_seconds_count", "wancoll_recovery_seconds_count", "wancoll_epochs_total"):
        assert len(found.all(name)) <= MOST_ROWS + 1
    assert len(found.all("wancoll_operations_total")) <= 2 * MOST_ROWS + 2


def test_a_recovery_lasts_from_the_first_sign_to_the_next_commit() -> None:
    one = Recovery()
    one.noticed(1.0)
    one.noticed(1.5)
    assert one.entered(2.0, lost=True, waits=True) is None
    assert one.committed(3.0) == 2.0
    assert one.committed(4.0) is None
    assert one.entered(5.0, lost=True, waits=False) == 0.0  # nobody waits, and nothing was noticed before
    one.noticed(6.0)  # a link that is up again
    assert one.committed(7.0) is None
    assert one.entered(8.0, lost=True, waits=False) == 0.0
    one.noticed(9.0)
    assert one.entered(10.0, lost=False, waits=True) is None  # somebody joined
    assert one.committed(11.0) is None
    one.noticed(12.0)
    assert one.entered(13.0, lost=True, waits=True) is None  # two losses are one recovery
    assert one.entered(14.0, lost=True, waits=True) is None
    assert one.committed(15.0) == 3.0


def lane(sent: int, received: int, resent: int = 0, rtt: float = 0.0) -> tuple[LaneStatistics, TcpInfo]:
    kernel = TcpInfo(0.5, rtt, 0, False, 0, 2 * sent, resent, 0, 0)
    return LaneStatistics(sent, received, 0, 0, 0, 0, False, True), kernel


def test_what_went_over_links_never_falls_whenever_they_close() -> None:
    links = Traffic()
    assert links.look(1, "d", [lane(10, 20, 1, 0.2), lane(1, 2, 0, 0.1)]) == Now(2, 0.1)
    assert links.look(1, "d", [lane(15, 20, 1, 0.2), lane(1, 2, 0, 0.1)]) == Now(2, 0.1)
    assert links.totals["d"] == (16, 22, 32, 1, 0)
    links.closed(1)
    assert links.look(2, "d", [lane(3, 4)]) == Now(1, 0.5)
    assert links.look(3, "d", [(None, None)]) == Now()
    assert links.totals["d"] == (19, 26, 38, 1, 0)
    links.look(2, "d", [])  # its lanes are gone before it is
    assert links.totals["d"] == (19, 26, 38, 1, 0)
    for i in range(2 * traffic.MOST):
        links.look(4 + i, f"d{i}", [lane(1, 1)])
        links.closed(4 + i)
    assert len(links.totals) == traffic.MOST


def test_long_families_come_in_pieces_that_join_to_one() -> None:
    tally = LabelCounts()
    for i in range(1000):
        tally.add((f'"a\\\n{i}', "x"))
    pieces = list(text.pieces(tally.family(f.EVENTS)))
    assert len(pieces) == 10
    whole = b"".join(pieces).decode()
    assert whole.count("# TYPE") == whole.count("# HELP") == 1
    found = Scrape(whole).all("wancoll_master_events_total")
    assert found == {(f'"a\\\n{i}', "x"): 1 for i in range(1000)}


def test_a_family_without_samples_says_what_it_is() -> None:
    assert Scrape(b"".join(text.pieces(f.Family(f.LAG, []))).decode()).types == {f.LAG.name: "histogram"}


def test_bounds_of_buckets_are_inside_them() -> None:
    one = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        one.add(value)
    assert list(itertools.accumulate(one.bins.counts)) == [2, 4, 5]
    assert one.bins.total == pytest.approx(6.6)
