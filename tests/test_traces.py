"""A boot's steps as spans, in a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from boots import run_boot, settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

BOOT = """
import sys, compile_cache
if "traced" in sys.argv:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    setup = trace.get_tracer("cog").start_as_current_span("cog.setup.predictor")
else:
    import contextlib
    setup = contextlib.nullcontext()
with setup, compile_cache.boot("org/model") as boot:
    while (path := boot.kept_file("mine.json")) is None:
        with boot.importing():  # takes nothing before the restore has ended
            pass
    path.write_text("{}")
    boot.warm_up(dict)
print(boot.wait_published(60), any(name.startswith("opentelemetry") for name in sys.modules))
"""


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


def test_a_boots_steps_are_spans_of_the_setup_and_what_outlives_it_is_a_root(tmp_path):
    with collector() as (address, spans):
        environ = {**settings(tmp_path), "OTEL_EXPORTER_OTLP_ENDPOINT": address}
        done = run_boot(environ, BOOT, "traced", program="run_source")
    assert done.stdout == "True True\n", done.stderr
    found = {span.name: span for span in spans}
    setup = found["cog.setup.predictor"]
    for name in ("restore: key", "restore: fetch", "setup: import", "setup: warm_up"):
        assert found[name].parent_span_id == setup.span_id
        assert setup.start_time_unix_nano <= found[name].start_time_unix_nano <= found[name].end_time_unix_nano
        assert found[name].end_time_unix_nano <= setup.end_time_unix_nano
    assert not found["publish: put"].parent_span_id
    assert found["publish: put"].trace_id != setup.trace_id


def test_a_program_without_opentelemetry_imports_none(tmp_path):
    done = run_boot(settings(tmp_path), BOOT, program="run_source")
    assert done.stdout == "True False\n", done.stderr
