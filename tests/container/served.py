"""A container of the image: started, asked over HTTP, stopped as `docker stop` does, and what its boot reported."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boots import Booted
from cog_server import CogServer, _free_port, files

from container.daemon import docker
from container.image import IMAGE

READY_S = 900.0
REQUEST = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 4, "output_format": "png"}


@dataclass(frozen=True, slots=True)
class Served:
    """One container's life: its boot, the first picture, its end.

    `refusal` is the answer to a request out of range; `facts` is what `docker inspect` said before the end.
    """

    booted: Booted
    refusal: str
    picture: bytes
    metrics: Mapping[str, Any]
    facts: Mapping[str, Any]
    exit_code: int


class Container(CogServer):
    """A container of the image, on the host's network, running the image's command. `options` are of `docker run`."""

    def __init__(self, folder: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> None:
        super().__init__("", folder / "server.log")
        self.folder = folder
        self._name = f"cog-compile-cache-{folder.name}"
        self._variables = {**environ, "COMPILE_CACHE_REPORT": "/report/report.json"}
        self._options = options

    def start(self) -> None:
        """Start it; returns at once."""
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self.folder.chmod(0o777)  # the report's writer is not always root
        variables = {**self._variables, "PORT": str(port)}
        command = ["docker", "run", "--rm", "--name", self._name, "--network", "host", "-v", f"{self.folder}:/report"]
        command += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*command, *self._options, IMAGE], stdout=log, stderr=log)

    def facts(self) -> dict[str, Any]:
        """What `docker inspect` says."""
        return dict(json.loads(docker("inspect", self._name))[0])

    def refusal(self, **inputs: Any) -> str:
        """The status and the body of the answer to refused inputs; empty if they are accepted."""
        try:
            self.predict(**REQUEST, **inputs)
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {error.read().decode()}"
        return ""

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10.0) -> int:
        """`docker stop`, which sends SIGTERM, and SIGKILL after `timeout_s`; the exit code."""
        docker("stop", "--time", f"{timeout_s:.0f}", self._name)
        return self.process.wait(timeout_s)


def serve(folder: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> Served:
    """Boot a container, draw one picture, stop it. Report and log stay in `folder`.

    Raises:
        RuntimeError: it is not READY in time, or the prediction failed.
    """
    folder.mkdir()
    with Container(folder, environ, options) as container:
        container.wait_ready(READY_S)
        prediction = container.predict(**REQUEST)
        if prediction["status"] != "succeeded":
            raise RuntimeError(f"the prediction failed: {prediction}\n{container.log.read_text()[-6000:]}")
        refusal = container.refusal(num_outputs=9)
        facts = container.facts()
        exit_code = container.stop()
    metrics = prediction["metrics"]["compile_cache"]
    report = json.loads((folder / "report.json").read_text())
    booted = Booted(report, [], metrics["compiled_now"], container.log.read_text())
    return Served(booted, refusal, files(prediction)[0], metrics, facts, exit_code)
