"""How peers keep what they compiled: what their users would write, over a local folder. Imports no torch on its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol


class Keeper(Protocol):
    """Between the store, a folder, and the cache directory of torch."""

    def restore(self) -> None:
        """Take what the store has; nothing if it is empty. Called before anything is compiled."""

    def save(self) -> None:
        """Store what was compiled. Called after the warm-up."""


class Nothing:
    """Keeps nothing."""

    def restore(self) -> None:
        """Nothing to take."""

    def save(self) -> None:
        """Nothing to store."""


class Zipped:
    """The directory as one zip, stored again if it has other file names: fal's way, which compares names as well."""

    def __init__(self, store: Path) -> None:
        self._zip = store / "cache.zip"
        self._directory = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        self._restored: frozenset[str] = frozenset()

    def restore(self) -> None:
        """Unpack the zip into the directory."""
        if self._zip.exists():
            shutil.unpack_archive(self._zip, self._directory)
        self._restored = self._names()

    def save(self) -> None:
        """Replace the zip at once, so that no other boot reads a part of it."""
        if self._names() != self._restored:
            made = shutil.make_archive(str(self._zip.with_name("new")), "zip", self._directory)
            os.replace(made, self._zip)

    def _names(self) -> frozenset[str]:
        return frozenset(str(path) for path in self._directory.rglob("*") if path.is_file())


class MegaCache:
    """torch's own archive of its caches in one file. `is_saved` is False for a container that only loads a file which a
    build step made."""

    def __init__(self, store: Path, is_saved: bool) -> None:
        self._file = store / "cache.ptcache"
        self._is_saved = is_saved

    def restore(self) -> None:
        """Load the file into the directory.

        Raises:
            RuntimeError: torch does not take it.
        """
        if self._file.exists():
            import torch

            if torch.compiler.load_cache_artifacts(self._file.read_bytes()) is None:
                raise RuntimeError(f"load_cache_artifacts takes nothing from {self._file.name}")

    def save(self) -> None:
        """Write the file, with what was loaded and what was compiled.

        Raises:
            RuntimeError: torch has nothing to store.
        """
        if self._is_saved:
            import torch

            artifacts = torch.compiler.save_cache_artifacts()
            if artifacts is None:
                raise RuntimeError("save_cache_artifacts has nothing to store")
            new = self._file.with_name("new")
            new.write_bytes(artifacts[0])
            os.replace(new, self._file)


def make_keeper(keeps: str, store: Path, is_build_step: bool) -> Keeper:
    """The keeper of a way, by its name."""
    store.mkdir(parents=True, exist_ok=True)
    if keeps == "zip":
        return Zipped(store)
    if keeps in ("mega", "committed"):
        return MegaCache(store, is_saved=keeps == "mega" or is_build_step)
    return Nothing()
