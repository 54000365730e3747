"""What is asked of one boot of a way, and what came of it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The kinds of boots: with an empty store, killed; with what that one has left; with everything stored.
COLD, NEXT, WARM = "cold", "next", "warm"


@dataclass(frozen=True, slots=True)
class Asked:
    """What one process does. `inputs` are those of every request, `new_inputs` those of a new size.

    `killed_after` is `ready`, `request` (the first), or nothing. `requests` follow the first one. A boot that is
    `is_filling` waits until everything is compiled and stored, and stands for a build step too.
    """

    way: str
    is_text: bool
    inputs: dict[str, Any]
    new_inputs: dict[str, Any] | None = None
    requests: int = 0
    killed_after: str = ""
    is_filling: bool = False


@dataclass(frozen=True, slots=True)
class PeerBoot:
    """What one process measured, in seconds. `ready_s` counts from the start of the process.

    Until READY: `hits` and `misses` are torch's lookups, `precompiled` the artifacts loaded, `kernels_made` the new
    files of machine code. `settled_s` is from READY until a second process has compiled everything. `new_graphs` were
    compiled during the request of a new size.
    """

    ready_s: float
    phases: dict[str, float]
    hits: int
    misses: int
    precompiled: int
    kernels_made: int
    machine: dict[str, str]
    first_s: float | None = None
    first_sha256: str = ""
    later_s: tuple[float, ...] = ()
    settled_s: float | None = None
    new_s: float | None = None
    new_graphs: int | None = None
    new_again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One boot of a run: of which model, way and kind, in which round. `boot` is None where it failed with `error`.

    `found_bytes` were in the store before it, `stored_bytes` after it.
    """

    model: str
    way: str
    kind: str
    round: int
    boot: PeerBoot | None
    error: str = ""
    killed_after: str = ""
    found_bytes: int = 0
    stored_bytes: int = 0
    log: str = field(default="", compare=False)

    @property
    def step(self) -> tuple[str, str, str, int]:
        """Which step of a run it is."""
        return self.model, self.way, self.kind, self.round

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `json.dumps(dataclasses.asdict(record))`."""
        record = json.loads(line)
        if record["boot"] is not None:
            record["boot"] = PeerBoot(**{**record["boot"], "later_s": tuple(record["boot"]["later_s"])})
        return cls(**record)


def read_records(files: Iterable[Path]) -> list[Record]:
    """The records of some files, each step once: a later one replaces an earlier one."""
    lines = (line for file in files if file.exists() for line in file.read_text().splitlines())
    return list({record.step: record for record in map(Record.from_json, lines)}.values())
