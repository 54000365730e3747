"""One boot with an empty store, and what its server does until everything is compiled; prints one JSON line, a
`Measured`.

Without Cog's server it is the process of the server; cold_start.py starts it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from observations import VARIABLE, Observed, Ready, Sample
from served import Answer, InProcess, Served

# So many predictions after the last compile, what is served eager stays so. Modules take turns at being compared with
# eager, which takes eight of their calls.
_SETTLED = 10
# The last predictions of a text model, which give the time of a token.
_LAST = 3


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked of a server. `inputs` are those of every prediction.

    An eager server predicts `eager` times. The other one predicts until all is precompiled, for `patience_s` at most,
    and `after` times more; with a patience of 0 it predicts `eager` times. `steps` are two numbers of denoising steps,
    whose difference gives the time of a step, and `pairs` how often. `end_s` is how long the end of the compiling
    process is waited for. `pause_s` is between two predictions until all is precompiled: on few cores, a server that is
    never idle leaves nothing to the compiling process.
    """

    is_text: bool
    inputs: dict[str, Any]
    eager: int
    after: int
    steps: tuple[int, int]
    pairs: int
    patience_s: float
    end_s: float
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One boot, of the pair with this number. `http_ready_s` counts from the start of Cog's server until it says READY.

    `compiled_s` counts from READY to the begin of the first prediction that was precompiled as a whole; None if there
    was none. `step_ms` is a denoising step or a token, after that. `has_ended` says whether the compiling process was
    seen to end.
    """

    kind: str
    ready: Ready
    samples: tuple[Sample, ...]
    answers: tuple[Answer, ...]
    compiled_s: float | None
    step_ms: float | None
    has_ended: bool
    http_ready_s: float | None = None
    pair: int = 0

    @classmethod
    def from_json(cls, line: str) -> Measured:
        """The inverse of `json.dumps(dataclasses.asdict(measured))`."""
        record = json.loads(line)
        record["ready"] = Ready(**record["ready"])
        record["samples"] = tuple(Sample(**sample) for sample in record["samples"])
        record["answers"] = tuple(Answer(**answer) for answer in record["answers"])
        return cls(**record)

    @property
    def meanwhile(self) -> list[Answer]:
        """The predictions before the first one that was precompiled as a whole, without the very first."""
        return [answer for answer in self.answers[1:] if not answer.is_precompiled]

    @property
    def precompiled(self) -> list[Answer]:
        """The predictions that were."""
        return [answer for answer in self.answers if answer.is_precompiled]


def measure(kind: str, served: Served, observations: Path, requests: Requests) -> Measured:
    """Ask a server that is READY.

    Raises:
        RuntimeError: a prediction failed.
    """
    answers = predict(kind, served, requests)
    step_ms = token_ms(answers[-_LAST:]) if requests.is_text else measure_step_ms(served, requests)
    observed = Observed.read(observations)
    has_ended = bool(requests.end_s) and observed.wait_ended(observations, requests.end_s)
    observed = Observed.read(observations)
    compiled = [answer.begun_s for answer in answers if answer.is_precompiled]
    compiled_s = compiled[0] - observed.ready.at_s if compiled else None
    return Measured(kind, observed.ready, observed.samples, tuple(answers), compiled_s, step_ms, has_ended)


def predict(kind: str, served: Served, requests: Requests) -> list[Answer]:
    """A fixed number of predictions; or until all is precompiled, or nothing changes any more."""
    if kind == "eager" or not requests.patience_s:
        return [served.answer(**requests.inputs) for _ in range(requests.eager)]
    answers: list[Answer] = []
    deadline = time.monotonic() + requests.patience_s
    settled = 0
    while settled < _SETTLED and time.monotonic() < deadline:
        answers.append(served.answer(**requests.inputs))
        if answers[-1].is_precompiled:
            return answers + [served.answer(**requests.inputs) for _ in range(requests.after)]
        settled = 0 if answers[-1].compiling else settled + 1
        time.sleep(requests.pause_s)
    return answers


def measure_step_ms(served: Served, requests: Requests) -> float | None:
    """Milliseconds of a denoising step: the median difference of pairs of predictions; None without pairs."""
    if not requests.pairs:
        return None
    few, many = requests.steps
    differences_s = []
    for _ in range(requests.pairs):
        few_s, many_s = (
            served.answer(**{**requests.inputs, "num_inference_steps": steps}).seconds for steps in (few, many)
        )
        differences_s.append(many_s - few_s)
    return median(differences_s) / (many - few) * 1e3


def token_ms(answers: list[Answer]) -> float:
    """Milliseconds between two pieces of text: the median of all gaps."""
    return median(gap_s for answer in answers for gap_s in answer.gaps_s) * 1e3


def main() -> None:
    """Boot, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager or background")
    parser.add_argument("requests", help="JSON of `Requests`")
    args = parser.parse_args()
    requests = Requests(**json.loads(args.requests))

    from observed_predict import Predictor, TextPredictor

    predictor = TextPredictor() if requests.is_text else Predictor()
    predictor.setup()
    measured = measure(args.kind, InProcess(predictor), Path(os.environ[VARIABLE]), requests)
    print(json.dumps(dataclasses.asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
