"""One boot, and requests in parts; prints one JSON line, an `Asked`. unseen_calls.py starts it where no server is."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from observations import VARIABLE, Observed, Ready
from served import Answer, InProcess, Served

# The compiling process may answer between two looks, and a call that it answers may be asked for again.
_QUIET_SAMPLES = 4
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """Requests, one after another, once nothing has been left to compile for a second; or at once, with a patience of 0
    seconds. One that waits is left out after another that was precompiled as a whole."""

    name: str
    requests: tuple[dict[str, Any], ...]
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One boot. `parts` are the answers by the name of their part, `waited_s` the seconds that a part waited for the
    compiling process, None if that was longer than its patience. `spans` and `reasons` are the report's, without a
    server: a region's reason says why it is not precompiled."""

    kind: str
    ready: Ready
    parts: dict[str, tuple[Answer, ...]]
    waited_s: dict[str, float | None]
    spans: tuple[dict[str, Any], ...] = ()
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, line: str) -> Asked:
        """The inverse of `json.dumps(dataclasses.asdict(asked))`."""
        record = json.loads(line)
        parts = {name: tuple(Answer(**answer) for answer in found) for name, found in record["parts"].items()}
        made = {"ready": Ready(**record["ready"]), "parts": parts, "spans": tuple(record["spans"])}
        return cls(**{**record, **made})


def ask(kind: str, served: Served, observations: Path, parts: Iterable[Part]) -> Asked:
    """Ask a server that is READY.

    Raises:
        RuntimeError: a prediction failed.
    """
    found: dict[str, tuple[Answer, ...]] = {}
    waited_s: dict[str, float | None] = {}
    last: tuple[Answer, ...] = ()
    for part in parts:
        if part.patience_s and last and all(answer.is_precompiled for answer in last):
            break
        waited_s[part.name] = wait_compiled(observations, part.patience_s) if part.patience_s else 0.0
        found[part.name] = tuple(served.answer(**request) for request in part.requests)
        last = found[part.name] if part.patience_s else ()
    return Asked(kind, Observed.read(observations).ready, found, waited_s)


def wait_compiled(observations: Path, patience_s: float) -> float | None:
    """Wait until nothing is left to compile; the seconds, None if that takes longer than `patience_s`."""
    began = time.monotonic()
    while time.monotonic() - began < patience_s:
        last = [sample.waiting for sample in Observed.read(observations).samples if sample.at_s > began]
        if len(last) >= _QUIET_SAMPLES and not any(last[-_QUIET_SAMPLES:]):
            return time.monotonic() - began
        time.sleep(_LOOK_S)
    return None


def parts_from(records: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The inverse of `dataclasses.asdict` for each."""
    return [Part(record["name"], tuple(record["requests"]), record["patience_s"]) for record in records]


def main() -> None:
    """Boot, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager, background or next")
    parser.add_argument("parts", type=Path, help="a file with the JSON of a list of `Part`")
    args = parser.parse_args()

    from observed_predict import Predictor

    predictor = Predictor()
    predictor.setup()
    parts = parts_from(json.loads(args.parts.read_text()))
    asked = ask(args.kind, InProcess(predictor), Path(os.environ[VARIABLE]), parts)
    predictor.boot.wait_published(60)
    report = json.loads(predictor.boot.report.to_json())
    reasons = {region["name"]: region["reason"] for region in report["regions"] if region["reason"]}
    asked = dataclasses.replace(asked, spans=tuple(report["spans"]), reasons=reasons)
    print(json.dumps(dataclasses.asdict(asked)), flush=True)


if __name__ == "__main__":
    main()
