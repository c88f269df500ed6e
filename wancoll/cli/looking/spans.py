"""What daemons traced as OpenTelemetry spans: one for each operation, below it one for each phase of its attempts.

They go by OTLP over HTTP; where to, and with which headers, is said by OpenTelemetry's own variables,
OTEL_EXPORTER_OTLP_... and OTEL_SERVICE_NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from wancoll.cli.looking.timeline import OPEN, Row, phases
from wancoll.errors import WancollError, without_package

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
except ImportError as missing:
    raise without_package("--otel", "traces", missing) from missing

_AT_ONCE = 512  # spans
_TOLD = ("group", "member", "epoch", "seq", "op", "algorithm", "codec", "bytes", "contributors", "outcome")


def send(traced: Mapping[str, Sequence[Row]]) -> int:
    """Make spans, and send them; returns how many. *traced*: see timeline.timeline.

    Raises:
        WancollError: they are not taken.
    """
    exporter = OTLPSpanExporter()
    sender = _Sender(exporter)
    try:
        for daemon, rows in traced.items():
            ours = Resource.create({"service.name": "wancoll"}).merge(OTELResourceDetector().detect())
            ours = ours.merge(Resource({"service.instance.id": daemon}))
            provider = TracerProvider(resource=ours, shutdown_on_exit=False)
            provider.add_span_processor(sender)
            for attempts in operations(rows):
                _make(provider.get_tracer("wancoll"), attempts)
        sender.flush()
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
    return sender.count


def _make(tracer: Tracer, attempts: Sequence[Row]) -> None:
    """The spans of an operation."""
    last = attempts[-1]
    told = {**{f"wancoll.{name}": last[name] for name in _TOLD}, "wancoll.attempts": last["attempt"]}
    began = _nanos(attempts[0]["at"]["posted"])
    whole = tracer.start_span(last["op"], Context(), attributes=told, start_time=began)
    if last["outcome"] != "committed" and last["outcome"] not in OPEN:
        whole.set_status(Status(StatusCode.ERROR, last["outcome"]))
    within = set_span_in_context(whole)
    for row in attempts:
        told = {"wancoll.attempt": row["attempt"], "wancoll.epoch": row["epoch"]}
        for phase, since, until in phases(row):
            tracer.start_span(phase, within, attributes=told, start_time=_nanos(since)).end(_nanos(until))
    whole.end(_nanos(max(last["at"].values())))


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


class _Sender(SpanProcessor):
    """Hands over what has ended, some at a time. The SDK's own would drop what comes faster than it is sent."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter, self._ended = exporter, list[ReadableSpan]()
        self.count = 0

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.append(span)
        if len(self._ended) >= _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send the rest."""
        spans, self._ended = self._ended, []
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise WancollError(
                "spans were not taken", who="OpenTelemetry's receiver", got=f"{self.count} sent before",
                hint="does one listen where OTEL_EXPORTER_OTLP_ENDPOINT says (http://localhost:4318)? The trace's file "
                "is written",
            )  # fmt: skip
        self.count += len(spans)
