"""The folder in which the compiling process writes: beside the cache directory, with a path of the same length.

torch finds compiled kernels by absolute path, and writes that path into its files. Because both paths have the same
length, one can replace the other in any file, pickles included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from compile_cache.files import replacing
from compile_cache.inductor.files import PRECOMPILED, SUFFIX, copy_artifact
from compile_cache.storage.directory import CacheDirectory

_LETTERS = str.maketrans("0123456789", "abcdefghij")
# torch rewrites these files in place.
_REWRITTEN = (".best_config",)


class Workshop:
    """The folder of the compiling process, beside `directory`."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self.path = directory.path.with_name(directory.path.name.translate(_LETTERS))

    def prepare(self) -> None:
        """Empty the folder, and copy the cache directory into it, so that nothing is compiled twice.

        Raises:
            OSError: the folder cannot be written.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        self._copy(self._directory.scan(), self._directory.path, self.path)

    def take(self, paths: Iterable[str]) -> None:
        """Copy finished files into the cache directory: kernels first, then the artifacts that need them.

        Raises:
            ArtifactError: an artifact is damaged.
            OSError: a file is missing, or the cache directory cannot be written.
        """
        self._copy(sorted(paths, key=lambda path: path.startswith(PRECOMPILED)), self.path, self._directory.path)

    def _copy(self, paths: Iterable[str], source: Path, target: Path) -> None:
        old, new = os.fsencode(source), os.fsencode(target)
        assert len(old) == len(new)
        for path in paths:
            if (target / path).exists() and not path.endswith(_REWRITTEN):
                continue
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            if path.endswith(SUFFIX):
                copy_artifact(source / path, target / path, old, new)
                continue
            with replacing(target / path) as file:
                file.write((source / path).read_bytes().replace(old, new))
            shutil.copymode(source / path, target / path)
