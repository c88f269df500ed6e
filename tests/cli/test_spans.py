"""OpenTelemetry's spans of operations, as a receiver of OTLP gets them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.otlp import Receiver, receiver
from tests.cli.test_timeline import row
from wancoll.errors import WancollError

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

SECOND = 1_000_000_000


@pytest.fixture
def listens(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiver() as got:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{got.port}")
        yield got


def test_an_operation_its_attempts_and_their_phases(listens: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    from wancoll.cli.looking.spans import send

    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    first = row(7, outcome="aborted", posted=1.0, started=1.25, done=1.5)
    second = row(7, attempt=2, epoch=2, posted=1.5, started=2.0, first=2.25, last=2.5, done=2.75, committed=3.0)
    again = row(7, outcome="Evicted", posted=9.0, started=9.5, done=10.0)  # the group counts anew
    hangs = row(8, outcome="running", posted=9.0, seen=9.25, until=11.0)
    assert send({"a": [again, second, first], "b": [row(1, posted=1.0, done=2.0), hangs]}) == 16
    assert [one["authorization"] for one in listens.headers] == ["Basic abc"]
    whole, lost, other, open_still = (one for one in listens.spans if not one.parent)
    assert (whole.name, whole.began, whole.ended, whole.failed) == ("all_reduce", SECOND, 3 * SECOND, "")
    assert whole.told == {
        "wancoll.group": "g", "wancoll.member": "m", "wancoll.epoch": 2, "wancoll.seq": 7, "wancoll.op": "all_reduce",
        "wancoll.algorithm": "ring", "wancoll.codec": "none", "wancoll.bytes": 4, "wancoll.contributors": 2,
        "wancoll.outcome": "committed", "wancoll.attempts": 2,
    }  # fmt: skip
    assert (lost.failed, open_still.failed, open_still.ended) == ("Evicted", "", 11 * SECOND)
    assert [one.resource["service.instance.id"] for one in (whole, lost, other, open_still)] == ["a", "a", "b", "b"]
    assert whole.resource["service.name"] == "training"
    below = [one for one in listens.spans if one.parent == whole.id]
    assert {one.trace for one in below} == {whole.trace}
    assert whole.trace != lost.trace
    phases = [
        (one.name, one.began / SECOND, one.ended / SECOND, one.told["wancoll.attempt"], one.told["wancoll.epoch"])
        for one in below
    ]
    assert phases == [
        ("waits for links", 1.0, 1.25, 1, 1), ("finishes", 1.25, 1.5, 1, 1),
        ("waits for links", 1.5, 2.0, 2, 2), ("waits for others' first bytes", 2.0, 2.25, 2, 2),
        ("bytes move", 2.25, 2.5, 2, 2), ("finishes", 2.5, 2.75, 2, 2), ("waits for the commit", 2.75, 3.0, 2, 2),
    ]  # fmt: skip


def test_many_go_in_pieces_and_none_is_dropped(listens: Receiver) -> None:
    from wancoll.cli.looking.spans import send

    assert send({"a": [row(k, posted=1.0 + k, done=2.0 + k) for k in range(600)]}) == 1200
    assert sum(listens.sizes) == 1200 == len({one.id for one in listens.spans})
    assert max(listens.sizes) <= 512
    assert {one.told["wancoll.seq"] for one in listens.spans if not one.parent} == set(range(600))


def test_who_does_not_take_them(listens: Receiver) -> None:
    from wancoll.cli.looking.spans import send

    listens.status = 400  # not one that is tried again
    with pytest.raises(WancollError, match=r"spans were not taken; got 0 sent before; .*OTEL_EXPORTER_OTLP_ENDPOINT"):
        send({"a": [row(1, posted=1.0, done=2.0)]})
