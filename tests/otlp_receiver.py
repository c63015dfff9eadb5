"""A receiver of OTLP over HTTP, which keeps the spans that are exported to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Takes what is exported."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.paths: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.paths.add(self.path)
                receiver.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @classmethod
    @contextlib.contextmanager
    def open(cls) -> Iterator[Receiver]:
        receiver = cls()
        thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
        thread.start()
        yield receiver
        receiver.server.shutdown()
        receiver.server.server_close()
        thread.join()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            for attribute in of_resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in of_resource.scope_spans:
                self.spans += scope.spans

    def of(self, trace: str) -> list[Span]:
        """The spans of a trace, in the order of their starts."""
        found = [span for span in self.spans if span.trace_id.hex() == trace]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


def attributes(span: Span) -> dict[str, object]:
    return {
        one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes
    }
