"""One boot, and requests in parts; prints one JSON line, an `Asked`. unseen_calls.py starts it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import Answer, InProcess

# The second process may answer between two looks, and a call that it answers may be asked for again.
_QUIET_S = 1.0
_LOOK_S = 0.25
# Some peaks of memory last a twentieth of a second.
_MEMORY_LOOK_S = 0.025


@dataclass(frozen=True, slots=True)
class Part:
    """Requests, one after another, once nothing has been left to compile for a second; or at once, with a patience of 0
    seconds. One that waits is left out after another that was precompiled as a whole."""

    name: str
    requests: tuple[dict[str, Any], ...]
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One boot. `report` is the BootReport's JSON at READY, `parts` the answers by the name of their part, `waited_s`
    the seconds that a part waited for the second process, None if that was longer than its patience. `extra_bytes` is
    the most memory of the GPU in use outside this process's torch, over that at READY; None without a GPU."""

    kind: str
    report: dict[str, Any]
    parts: dict[str, tuple[Answer, ...]]
    waited_s: dict[str, float | None]
    extra_bytes: int | None = None

    @classmethod
    def from_json(cls, line: str) -> Asked:
        """The inverse of `json.dumps(dataclasses.asdict(asked))`."""
        record = json.loads(line)
        parts = {name: tuple(Answer(**answer) for answer in found) for name, found in record["parts"].items()}
        return cls(**{**record, "parts": parts})


def ask(kind: str, predictor: Any, parts: Sequence[Part]) -> Asked:
    """Ask a predictor that is READY."""
    report = json.loads(predictor.boot.report.to_json())
    served = InProcess(predictor)
    outside: list[int] = []
    is_over = threading.Event()
    looking = threading.Thread(target=look_at_memory, args=(outside, is_over), daemon=True)
    looking.start()
    found: dict[str, tuple[Answer, ...]] = {}
    waited_s: dict[str, float | None] = {}
    last: tuple[Answer, ...] = ()
    for part in parts:
        if part.patience_s and last and all(answer.is_precompiled for answer in last):
            break
        waited_s[part.name] = wait_compiled(predictor.boot, part.patience_s) if part.patience_s else 0.0
        found[part.name] = tuple(served.answer(**request) for request in part.requests)
        last = found[part.name] if part.patience_s else ()
    is_over.set()
    looking.join()  # a process that ends while a thread asks CUDA is aborted
    return Asked(kind, report, found, waited_s, max(outside) - outside[0] if outside else None)


def look_at_memory(outside: list[int], is_over: threading.Event) -> None:
    """Add the bytes in use on the GPU outside this process's torch, again and again; nothing without a GPU."""
    import torch

    while torch.cuda.is_available() and not is_over.wait(_MEMORY_LOOK_S):
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        outside.append(all_bytes - free_bytes - torch.cuda.memory_reserved())


def wait_compiled(boot: Any, patience_s: float) -> float | None:
    """Wait until nothing has been left to compile for a while; the seconds, None if that takes longer."""
    began = busy = time.monotonic()
    while (now := time.monotonic()) - began < patience_s:
        if boot.waiting:
            busy = now
        elif now - busy > _QUIET_S:
            return now - began
        time.sleep(_LOOK_S)
    return None


def main() -> None:
    """Boot, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager, background or next")
    parser.add_argument("parts", type=Path, help="a file with the JSON of a list of `Part`")
    args = parser.parse_args()

    from predict import Predictor

    predictor = Predictor()
    predictor.setup()
    asked = ask(args.kind, predictor, [Part(**record) for record in json.loads(args.parts.read_text())])
    predictor.boot.wait_published(60)
    print(json.dumps(dataclasses.asdict(asked)), flush=True)


if __name__ == "__main__":
    main()
