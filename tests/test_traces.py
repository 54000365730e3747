"""A boot's steps as spans of Cog's own traces, in a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from boots import python_path, settings
from cog_server import PROJECT, CogServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PREDICTOR = """
import sys
import compile_cache
from cog import BaseRunner

class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot("org/model") as self.boot:
            while (path := self.boot.kept_file("mine.json")) is None:
                with self.boot.importing():  # takes nothing before the restore has ended
                    pass
            path.write_text("{}")
            self.boot.warm_up(dict)

    def run(self) -> str:
        return f"{self.boot.wait_published(60)} {any(name.startswith('opentelemetry') for name in sys.modules)}"
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


def serve(folder: Any, **variables: str) -> str:
    """The answer of a Cog server with these variables, which has ended."""
    (folder / "predict.py").write_text(PREDICTOR)
    environ = settings(folder) | {"PYTHONPATH": python_path(PROJECT)} | variables
    with CogServer("predict.py:Predictor", folder / "server.log", environ, folder) as server:
        server.wait_ready()
        return str(server.predict()["output"])


def test_a_boots_steps_are_spans_of_cogs_setup_and_what_outlives_it_is_a_root(tmp_path):
    with collector() as (address, spans):
        traced = {"COG_TRACE_CONFIGURED": "true", "OTEL_TRACES_SAMPLER": "parentbased_always_on"}
        assert serve(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=address, **traced) == "True True"
    found = {span.name: span for span in spans}
    setup = found["cog.setup.predictor"]
    assert setup.parent_span_id == found["cog.setup"].span_id
    for name in ("restore: key", "restore: fetch", "setup: import", "setup: warm_up"):
        assert found[name].parent_span_id == setup.span_id
        assert setup.start_time_unix_nano <= found[name].start_time_unix_nano <= found[name].end_time_unix_nano
        assert found[name].end_time_unix_nano <= setup.end_time_unix_nano
    assert not found["publish: put"].parent_span_id
    assert found["publish: put"].trace_id != setup.trace_id


def test_without_traces_nothing_of_opentelemetry_is_imported(tmp_path):
    assert serve(tmp_path) == "True False"
