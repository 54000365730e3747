"""Running the scenes of background_boot.py, and reading what they told."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boots import run_boot, settings

# Beside other tests, a process that stands back would wait for minutes.
BACKGROUND = {"cold_start": "background"}


@dataclass(frozen=True)
class Told:
    """What a scene returned, and its log."""

    told: dict[str, Any]
    log: str

    def __getitem__(self, name: str) -> Any:
        return self.told[name]

    @property
    def processes(self) -> int:
        """How many processes were started to compile."""
        return self.log.count("background.started")

    @property
    def done(self) -> list[str]:
        """The calls that were compiled, or given up, in this order."""
        lines = [line for line in self.log.splitlines() if "background.done" in line]
        return [line.partition("call=")[2].partition(" seconds=")[0] for line in lines]


def play(
    folder: Path,
    scene: str,
    *arguments: str,
    after: Path | None = None,
    forked: bool = True,
    program: str = "background_boot",
    **variables: str,
) -> Told:
    """Play a scene in a process of its own; fails with the log if the process fails. `variables` in capitals are set as
    they are, others are settings of the boot. `after` is the folder of another boot: its store is copied, and its cache
    directory, whose path is part of an environment, is used again."""
    if after is not None:
        if (after / "store").exists():  # a boot that published nothing has none
            shutil.copytree(after / "store", folder / "store")
        variables.setdefault("dir", str(after / "cache"))
    ours = {name: value for name, value in variables.items() if name.isupper()}
    chosen = {name: value for name, value in variables.items() if not name.isupper()}
    environ = {**settings(folder, **{**BACKGROUND, **chosen}), **ours}
    done = run_boot(environ, scene, *arguments, forked=forked, program=program)
    assert done.returncode == 0, done.stderr
    return Told(json.loads(done.stdout.splitlines()[-1]), done.stderr)
