"""A collector on 127.0.0.1 that takes OTLP over HTTP and keeps the spans; it can also be one that never answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.telemetry.external.conftest import ROOT

SERVER_KIND = 2


class Collector:
    """Context manager. `silent`: connections are taken and no export is ever answered."""

    def __init__(self, *, silent: bool = False) -> None:
        self.spans: list[Any] = []  # opentelemetry.proto.trace.v1.trace_pb2.Span
        self.services: dict[bytes, str] = {}  # span id -> service.name
        self.exports = 0
        self._closing = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.exports += 1
                if silent:
                    collector._closing.wait(60)
                    return
                collector._keep(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def path(self, span: Any) -> list[tuple[str, str]]:
        """(service, span name) from the topmost span of its trace that arrived down to `span`."""
        by_id = {other.span_id: other for other in self.spans}
        found: list[tuple[str, str]] = []
        while span is not None:
            found.insert(0, (self.services[span.span_id], span.name))
            span = by_id.get(span.parent_span_id)
        return found

    def by_trace(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = defaultdict(list)
        for span in self.spans:
            found[span.trace_id.hex()].append(span)
        return dict(found)

    def _keep(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.services[span.span_id] = names.get("service.name", "")
                    self.spans.append(span)


def tracing(endpoint: str) -> str:
    """The BentoML configuration that users copy, sent to `endpoint`."""
    text = (ROOT / "integration/otel/bentoml-tracing.yaml").read_text(encoding="utf-8")
    return text.replace("http://127.0.0.1:4318", endpoint)


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {a.key: plain(a.value) for a in span.attributes}


def traceparent(number: int, *, sampled: bool = True) -> dict[str, str]:
    """The header of a caller whose trace has this number, and whose span has it too."""
    return {"traceparent": f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"}


def seconds(span: Any) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
