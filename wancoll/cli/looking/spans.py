"""What daemons traced as OpenTelemetry spans: one for each operation, below it one for each phase of its attempts.

They go by OTLP over HTTP; where to, and with which headers, is said by OpenTelemetry's own variables,
OTEL_EXPORTER_OTLP_... and OTEL_SERVICE_NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from wancoll.cli.looking.timeline import OPEN, Row, phases
from wancoll.errors import WancollError, without_package

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
except ImportError as missing:
    raise without_package("--otel", "traces", missing) from missing

_AT_ONCE = 512  # spans
_TOLD = ("group", "member", "epoch", "seq", "op", "algorithm", "codec", "bytes", "contributors", "outcome")
_IDS = RandomIdGenerator()


def send(traced: Mapping[str, Sequence[Row]]) -> int:
    """Make spans, and send them; returns how many. *traced*: see timeline.timeline.

    Raises:
        WancollError: they are not taken.
    """
    exporter, count = OTLPSpanExporter(), 0
    spans = (span for daemon, rows in traced.items() for span in _of_daemon(daemon, rows))
    try:
        while some := list(islice(spans, _AT_ONCE)):
            if exporter.export(some) is not SpanExportResult.SUCCESS:
                raise WancollError(
                    "spans were not taken", who="OpenTelemetry's receiver", got=f"{count} sent before",
                    hint="does one listen where OTEL_EXPORTER_OTLP_ENDPOINT says (http://localhost:4318)? The trace's "
                    "file is written",
                )  # fmt: skip
            count += len(some)
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return count


def _of_daemon(daemon: str, rows: Sequence[Row]) -> Iterator[ReadableSpan]:
    ours = Resource.create({"service.name": "wancoll"}).merge(OTELResourceDetector().detect())
    ours = ours.merge(Resource({"service.instance.id": daemon}))
    for attempts in operations(rows):
        yield from _of_operation(ours, attempts)


def _of_operation(resource: Resource, attempts: Sequence[Row]) -> Iterator[ReadableSpan]:
    last, trace, scope = attempts[-1], _IDS.generate_trace_id(), InstrumentationScope("wancoll")

    def context() -> SpanContext:
        return SpanContext(trace, _IDS.generate_span_id(), False, TraceFlags(TraceFlags.SAMPLED))

    told = {**{f"wancoll.{name}": last[name] for name in _TOLD}, "wancoll.attempts": last["attempt"]}
    failed = last["outcome"] != "committed" and last["outcome"] not in OPEN
    began, ended, whole = _nanos(attempts[0]["at"]["posted"]), _nanos(max(last["at"].values())), context()
    yield ReadableSpan(
        last["op"], whole, None, resource, told, start_time=began, end_time=ended, instrumentation_scope=scope,
        status=Status(StatusCode.ERROR, last["outcome"]) if failed else Status(),
    )  # fmt: skip
    for row in attempts:
        told = {"wancoll.attempt": row["attempt"], "wancoll.epoch": row["epoch"]}
        for phase, since, until in phases(row):
            yield ReadableSpan(
                phase, context(), whole, resource, told, start_time=_nanos(since), end_time=_nanos(until),
                instrumentation_scope=scope,
            )  # fmt: skip


def operations(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The attempts of each operation, in order."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["at"]["posted"]):
        key = row["group"], row["member"], row["seq"]
        if row["attempt"] == 1 and key in found:  # the group has begun to count anew
            yield found.pop(key)
        found.setdefault(key, []).append(row)
    yield from found.values()


def _nanos(seconds: float) -> int:
    return round(1e9 * seconds)
