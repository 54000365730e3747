"""A Cog server of the observed predictors, for as long as a context lasts."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fresh_boot import ROOT, end
from served import OverHttp

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, streaming_project


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that is READY, `http_ready_s` after it was started."""

    served: OverHttp
    http_ready_s: float


@contextmanager
def served_by_cog(is_text: bool, environ: Mapping[str, str], log: Path, timeout_s: float) -> Iterator[Ready]:
    """Start a server and end it, killed `timeout_s` after its start.

    Raises:
        SystemExit: it did not become READY, an error of a request passed through the context, or it did not end.
    """
    name = "TextPredictor" if is_text else "Predictor"
    with tempfile.TemporaryDirectory() as folder:
        project = streaming_project(Path(folder)) if is_text else ROOT
        server = CogServer(f"benchmarks/observed_predict.py:{name}", log, environ, project)
        started = time.monotonic()
        server.start()
        watchdog = threading.Timer(timeout_s, end, [server.process])
        watchdog.start()
        try:
            server.wait_ready(timeout_s)
            yield Ready(OverHttp(server, is_text), time.monotonic() - started)
            server.stop(signal.SIGTERM)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"the server failed: {error}; see {log}") from error
        finally:
            watchdog.cancel()
            end(server.process)
