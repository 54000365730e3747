"""A Cog HTTP server as a child process: the real one, as a container runs it, without Docker."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_BUSY_S = 30.0


class CogServer:
    """`python -m cog.server.http` on a free port, its output in a log file. A context manager: it ends with SIGTERM.

    `environ` is added to this process's environment; `wrapper` is a command that runs it as its only child, such as
    `unshare` with a PID namespace and tini.
    """

    def __init__(
        self,
        predictor: str,
        log: Path,
        environ: Mapping[str, str] | None = None,
        project: Path = PROJECT,
        wrapper: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._wrapper = wrapper
        self._project = project
        # Cog starts its worker as `python` from PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = {**os.environ, **(environ or {}), "PATH": path, "COG_PREDICT_TYPE_STUB": predictor}

    def __enter__(self) -> CogServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGTERM)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process, or the wrapper's."""
        assert self._process is not None, "the server has not been started"
        return self._process

    @property
    def url(self) -> str:
        """Its address, once it was started."""
        return self._url

    @property
    def pid(self) -> int:
        """The process that a container's runtime would signal: the server, or the wrapper's child."""
        if not self._wrapper:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def start(self) -> None:
        """Start it; returns at once."""
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._wrapper, "python", "-m", "cog.server.http", "--host", "127.0.0.1"],
                cwd=self._project,
                env={**self._environ, "PORT": str(port)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def health(self) -> dict[str, Any]:
        """What `/health-check` says; an empty dictionary while the server does not answer yet."""
        try:
            return self._request("/health-check")
        except (urllib.error.URLError, ConnectionError):
            return {}

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Block until predictions are accepted.

        Raises:
            RuntimeError: setup failed, the server ended, or the time is up; with the end of the log.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.health().get("status")) != "READY":
            if status in ("SETUP_FAILED", "DEFUNCT") or self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is {status}, not READY:\n{self.log.read_text()[-6000:]}")
            time.sleep(_POLL_S)

    def states_until_ready(self) -> set[str]:
        """What the health check says until READY, for 30 s at most: just after an answer it may say BUSY."""
        states: set[str] = set()
        deadline = time.monotonic() + _BUSY_S
        while "READY" not in states and time.monotonic() < deadline:
            states.add(self.health().get("status", "none"))
            time.sleep(_POLL_S)
        return states

    def predict(self, **inputs: Any) -> dict[str, Any]:
        """One prediction, as the server answers it: status, output, metrics, logs."""
        with self._open_when_free(inputs) as answer:
            return dict(json.load(answer))

    def stream(self, **inputs: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """One prediction, as server-sent events: the kind of each, and its data. The project needs a schema."""
        with self._open_when_free(inputs, {"Accept": "text/event-stream"}) as answer:
            kind = ""
            for line in answer:
                field, _, value = line.decode().strip().partition(": ")
                if field == "event":
                    kind = value
                elif field == "data":
                    yield kind, json.loads(value)

    def _open_when_free(self, inputs: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Begin a prediction. Wait while the server says 409: it is not ready for the next request right after an
        answer."""
        deadline = time.monotonic() + _BUSY_S
        while True:
            try:
                return self._open("/predictions", {"input": inputs}, headers)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.CONFLICT or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    def predict_later(self, **inputs: Any) -> dict[str, Any]:
        """Start a prediction and return at once, as `Prefer: respond-async` does."""
        return self._request("/predictions", {"input": inputs}, {"Prefer": "respond-async"})

    def stop(self, number: signal.Signals, timeout_s: float = 30.0) -> int:
        """Send a signal to `pid` and wait until all has ended; the exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end.
        """
        os.kill(self.pid, number)
        return self.process.wait(timeout_s)

    def cancel(self, prediction: str) -> None:
        """Cancel a running prediction by its id."""
        self._request(f"/predictions/{prediction}/cancel", {})

    def _request(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        with self._open(path, body, headers) as answer:
            return dict(json.load(answer))

    def _open(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json", **(headers or {})}
        )
        return urllib.request.urlopen(request, timeout=600)


def files(prediction: Mapping[str, Any]) -> list[bytes]:
    """The content of each file that a prediction put out, from its data URLs."""
    return [base64.b64decode(url.partition(",")[2]) for url in prediction["output"]]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
