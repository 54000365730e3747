"""The files that `docker build` sends from a folder, by its .dockerignore."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path


def sent(folder: Path) -> set[str]:
    """The paths of the files in `folder` that go into an image with `COPY . /src`."""
    patterns = read_patterns(folder / ".dockerignore")
    names: set[str] = set()
    for place, folders, files in os.walk(folder):
        above = Path(place).relative_to(folder).parts
        folders[:] = [name for name in folders if not _is_closed((*above, name), patterns)]
        names |= {"/".join((*above, name)) for name in files}
    return {name for name in names if not is_left_out(name, patterns)}


def read_patterns(file: Path) -> list[str]:
    """The patterns of a .dockerignore, in their order."""
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def is_left_out(path: str, patterns: Iterable[str]) -> bool:
    """Whether `path` is left out: the last pattern that matches it or a folder above it decides."""
    parts = path.split("/")
    left_out = False
    for pattern in patterns:
        wanted = pattern.removeprefix("!").split("/")
        if any(_matches(parts[:length], wanted) for length in range(1, len(parts) + 1)):
            left_out = not pattern.startswith("!")
    return left_out


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a path is what a pattern says, component by component; `**` stands for any number of them."""
    if not wanted:
        return not parts
    if wanted[0] == "**":
        return any(_matches(parts[skipped:], wanted[1:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])


def _is_closed(parts: tuple[str, ...], patterns: Sequence[str]) -> bool:
    """Whether nothing in this folder can be sent: it is left out, and no exception begins with its path."""
    path = "/".join(parts)
    return is_left_out(path, patterns) and not any(pattern.startswith(f"!{path}/") for pattern in patterns)
