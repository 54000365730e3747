"""Predictions of a server, over HTTP or in this process: how long each took, and what served it."""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fresh_boot import ROOT
from picture import identify

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, files

# After an answer it takes a moment until Cog's server takes the next request, which is no part of that one.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """One prediction. `begun_s` is of `time.monotonic`; `arrivals_s` are the seconds from there to each piece of text.

    `sha256` is of the picture's pixels or of the text. `regions` are the steps of the boot's regions when it ended,
    `served` the steps that served this prediction alone; CUDA graphs that are replayed are in `regions` only.
    """

    begun_s: float
    seconds: float
    sha256: str
    regions: dict[str, str]
    served: dict[str, str]
    compiling: int
    compiled_now: int
    waited_s: float
    arrivals_s: tuple[float, ...] = ()

    @property
    def is_precompiled(self) -> bool:
        """Whether nothing is left to compile, and precompiled code served all of it."""
        steps = {*self.regions.values(), *self.served.values()}
        return bool(self.regions) and steps == {"precompiled"} and not self.compiling

    @property
    def is_eager(self) -> bool:
        """Whether no precompiled or compiled code served any of it."""
        return not {"precompiled", "compiled"} & {
            step for steps in (*self.served.values(), *self.regions.values()) for step in steps.split(", ")
        }

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces of text."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


class Served(Protocol):
    """A server that is READY."""

    def answer(self, **inputs: Any) -> Answer:
        """One prediction; inputs that are left out have their defaults.

        Raises:
            RuntimeError: it failed.
        """


@dataclass(frozen=True, slots=True)
class OverHttp:
    """Cog's server. Text has to be streamed: its project is a `streaming_project`."""

    server: CogServer
    is_text: bool

    def answer(self, **inputs: Any) -> Answer:
        """Over HTTP: the time is from the request to the whole answer."""
        time.sleep(_PAUSE_S)
        begun_s = time.monotonic()
        if self.is_text:
            return self._streamed(begun_s, inputs)
        answered = self.server.predict(output_format="png", **inputs)
        seconds = time.monotonic() - begun_s
        if answered["status"] != "succeeded":
            raise RuntimeError(f"the prediction {answered['status']}: {answered.get('error')}")
        digest, _ = identify(io.BytesIO(files(answered)[0]))
        return _answer(begun_s, seconds, digest, answered["metrics"])

    def _streamed(self, begun_s: float, inputs: Mapping[str, Any]) -> Answer:
        kind, data, pieces, arrivals_s = "", dict[str, Any](), list[str](), list[float]()
        for kind, data in self.server.stream(**inputs):
            if kind == "output":
                pieces.append(data["chunk"])
                arrivals_s.append(time.monotonic() - begun_s)
        seconds = time.monotonic() - begun_s
        if kind != "completed" or data["status"] != "succeeded":
            raise RuntimeError(f"the answer ended with {kind or 'nothing'}: {data}")
        return _answer(begun_s, seconds, _digest(pieces), data["metrics"], tuple(arrivals_s))


class InProcess:
    """A predictor of this process, after its setup."""

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor
        self._metrics: dict[str, Any] = {}
        predictor.record_metric = self._metrics.__setitem__

    def answer(self, **inputs: Any) -> Answer:
        """As Cog's worker calls it."""
        self._metrics.clear()
        begun_s = time.monotonic()
        output = self._predictor.run(**{**self._defaults(), **inputs})
        if not isinstance(output, list):
            return self._iterated(begun_s, output)
        seconds = time.monotonic() - begun_s
        digest, _ = identify(str(output[0]))
        return _answer(begun_s, seconds, digest, _nested(self._metrics))

    def _iterated(self, begun_s: float, output: Iterator[str]) -> Answer:
        pieces, arrivals_s = list[str](), list[float]()
        for piece in output:
            pieces.append(piece)
            arrivals_s.append(time.monotonic() - begun_s)
        seconds = time.monotonic() - begun_s
        return _answer(begun_s, seconds, _digest(pieces), _nested(self._metrics), tuple(arrivals_s))

    def _defaults(self) -> dict[str, Any]:
        """The value of every input that a request leaves out, as Cog fills them in."""
        from cog.input import FieldInfo

        inputs = inspect.signature(self._predictor.run).parameters.items()
        given = {name: input.default.default for name, input in inputs if isinstance(input.default, FieldInfo)}
        return {**given, "output_format": "png"} if "output_format" in given else given


def _digest(pieces: list[str]) -> str:
    return hashlib.sha256("".join(pieces).encode()).hexdigest()


def _nested(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics whose names have dots, as Cog's server gives them: a dictionary for each part of a name."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _answer(
    begun_s: float, seconds: float, sha256: str, metrics: Mapping[str, Any], arrivals_s: tuple[float, ...] = ()
) -> Answer:
    ours = metrics["compile_cache"]
    return Answer(
        begun_s=begun_s,
        seconds=seconds,
        sha256=sha256,
        regions=ours.get("regions") or {},
        served=ours.get("served") or {},
        compiling=ours["compiling"],
        compiled_now=ours["compiled_now"],
        waited_s=ours["waited_s"],
        arrivals_s=arrivals_s,
    )
