"""A receiver of OpenTelemetry's spans on loopback: OTLP over HTTP, decoded by OpenTelemetry's own description of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """As it came; times in nanoseconds since 1970."""

    id: bytes
    parent: bytes
    trace: bytes
    name: str
    began: int
    ended: int
    failed: str  # the status' text, "" unless it is an error
    resource: dict[str, Any]
    told: dict[str, Any]


@dataclass
class Receiver:
    """Where it listens, and what came, with a request's number of spans each; *status* is what it answers."""

    port: int = 0
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Listens while the block runs."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            found = [span for one in request.resource_spans for span in _spans(one)]
            if got.status == 200:
                got.spans += found
                got.sizes.append(len(found))
                got.headers.append(dict(self.headers))
            self.send_response(got.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        got.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join(30)


def _spans(one: Any) -> Iterator[Span]:
    for scope in one.scope_spans:
        for span in scope.spans:
            failed = span.status.message if span.status.code == 2 else ""
            names = span.span_id, span.parent_span_id, span.trace_id, span.name
            times = span.start_time_unix_nano, span.end_time_unix_nano
            yield Span(*names, *times, failed, _attributes(one.resource), _attributes(span))


def _attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}
