"""Families as Prometheus' text, by prometheus_client, in pieces that take about a millisecond each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from wancoll.metrics.core.families import Bins, Family, Labels, Spec

CONTENT_TYPE = CONTENT_TYPE_LATEST
_PIECE = 100  # lines


def pieces(family: Family) -> Iterator[bytes]:
    """The family's text; what is joined is all of it. Without samples only its name, type and help."""
    spec, lines, first = family.spec, 0, True
    metric = _metric(spec)
    for labels, value in family.samples:
        lines += _add(metric, spec, labels, value)
        if lines >= _PIECE:
            yield _text(metric, first)
            metric, lines, first = _metric(spec), 0, False
    if lines or first:
        yield _text(metric, first)


def _metric(spec: Spec) -> Metric:
    return Metric(spec.name.removesuffix("_total") if spec.kind == "counter" else spec.name, spec.help, spec.kind)


def _add(metric: Metric, spec: Spec, values: Labels, value: float | Bins) -> int:
    labels = dict(zip(spec.labels, values, strict=True))
    if not isinstance(value, Bins):
        metric.add_sample(spec.name, labels, value)
        return 1
    bounds = [*map(floatToGoString, spec.buckets), "+Inf"]
    for bound, count in zip(bounds, accumulate(value.counts), strict=True):
        metric.add_sample(f"{spec.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{spec.name}_count", labels, sum(value.counts))
    metric.add_sample(f"{spec.name}_sum", labels, value.total)
    return len(bounds) + 2


def _text(metric: Metric, first: bool) -> bytes:
    text = generate_latest(SimpleNamespace(collect=lambda: [metric]))
    return text if first else text.split(b"\n", 2)[2]  # without HELP and TYPE, which stand once
