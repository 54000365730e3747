"""Real Cog servers of the demo model, and the pictures that they should draw."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy
from fresh_boot import ROOT, boot_environment, end
from PIL import Image
from processes import MARK

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, files

# Width and height. The first is warmed up.
SIZES = ((64, 64), (96, 64), (64, 96))
SEEDS = 3
READY_S = 180.0
ANSWER_S = 60.0
_RETRY_S = 0.002


def start(work: Path, is_eager: bool, store: Path, mark: str) -> CogServer:
    """A server of the demo model, not READY yet."""
    log = work / f"{time.monotonic_ns()}.log"
    sizes = [f"{width}x{height}" for width, height in SIZES]
    environ = boot_environment(work, "eager" if is_eager else "cold", store)
    environ |= {"MODEL": "demo/flux-digits", "IMAGE_SIZES": ",".join(sizes), "WARM_UP_SIZES": sizes[0]}
    environ |= {"COMPILE_CACHE_COLD_START": "background", MARK: mark}
    server = with_tini("predict.py:Predictor", log, environ)
    server.start()
    return server


def with_tini(predictor: str, log: Path, environ: Mapping[str, str], project: Path = ROOT) -> CogServer:
    """A server as it runs in a container, under tini where that is installed; not started. It dies with tini."""
    wrapper = ("tini", "-s", "-p", "SIGKILL", "--") if shutil.which("tini") else ()
    return CogServer(predictor, log, environ, project, wrapper)


def ask(server: CogServer, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """The answer to a request for a picture. After an answer, the server says for some milliseconds that it is busy.

    Raises:
        RuntimeError: it failed, or the server stays busy.
        OSError: the server does not answer.
    """
    body = json.dumps({"input": _inputs(size, seed)}).encode()
    request = urllib.request.Request(f"{server.url}/predictions", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                found = dict(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            time.sleep(_RETRY_S)
            continue
        if found["status"] != "succeeded":
            raise RuntimeError(f"the prediction {found['status']}: {found.get('error')}")
        return found
    raise RuntimeError(f"the server was busy for {ANSWER_S:g} s")


def begin(server: CogServer, size: tuple[int, int], is_left: bool) -> Callable[[], None]:
    """Begin a prediction. What breaks it off: its client hangs up if `is_left`, or cancels it.

    Raises:
        RuntimeError: the server stays busy.
    """
    server.wait_ready(ANSWER_S)
    if is_left:
        connection = HTTPConnection(server.url.removeprefix("http://"))
        body = json.dumps({"input": _inputs(size, 0)})
        connection.request("POST", "/predictions", body, {"Content-Type": "application/json"})
        return connection.close
    identity = server.predict_later(**_inputs(size, 0))["id"]

    def cancel() -> None:
        with suppress(urllib.error.HTTPError):  # it has ended
            server.cancel(identity)

    return cancel


def _inputs(size: tuple[int, int], seed: int) -> dict[str, Any]:
    picture = {"prompt": "a handwritten three", "num_inference_steps": 2, "output_format": "png"}
    return {**picture, "width": size[0], "height": size[1], "seed": seed}


def pixels(answer: dict[str, Any]) -> Any:
    """The picture of an answer: [height, width, 3], from 0 to 255."""
    with Image.open(io.BytesIO(files(answer)[0])) as image:
        return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def difference(one: Any, other: Any) -> int:
    """The largest of any pixel; 255 if the sizes differ."""
    return int(abs(one - other).max()) if one.shape == other.shape else 255


def make_references(folder: Path) -> dict[tuple[int, int, int], Any]:
    """What an eager server draws, by width, height and seed."""
    folder.mkdir(parents=True)
    server = start(folder, True, folder / "no-store", f"{os.getpid()}-eager")
    try:
        server.wait_ready(READY_S)
        return {(*size, seed): pixels(ask(server, size, seed)) for size in SIZES for seed in range(SEEDS)}
    finally:
        end(server.process)
