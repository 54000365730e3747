"""A part of a key's files: the files of one kind, the newest first, as many as the limits allow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from compile_cache.aot.files import PRECOMPILED
from compile_cache.pack.format import Run, runs
from compile_cache.versions.choose import Choice
from compile_cache.versions.packs import Selection


@dataclass(frozen=True, slots=True)
class Portion:
    """At most `files` files `precompiled/<group>/<name><suffix>`, and at most `size_bytes` of unpacked frames."""

    suffix: str
    files: int
    size_bytes: int

    def of(self, selection: Selection) -> Selection:
        """The same packs with only this portion of their files chosen, those of the newest pack first."""
        files: dict[str, Choice] = {}
        left_bytes = self.size_bytes
        for run, wanted in self._runs(selection):
            run_bytes = sum(frame.size_bytes for frame in run.frames)
            if run_bytes <= left_bytes and len(files) < self.files:
                left_bytes -= run_bytes
                files |= dict(list(wanted.items())[: self.files - len(files)])
        return replace(selection, files=files)

    def _runs(self, selection: Selection) -> Iterator[tuple[Run, dict[str, Choice]]]:
        """Each run with some of the files, and these files."""
        pattern = re.compile(rf"{PRECOMPILED}/[0-9a-f]{{32}}/[0-9a-f]{{32}}{re.escape(self.suffix)}")
        paths = {path for path in selection.files if pattern.fullmatch(path)}
        with_files = {selection.files[path].pack for path in paths}
        for number in sorted(with_files, reverse=True):
            for run in runs(selection.packs[number].head):
                names = [file.path for file in run.files if file.path in paths]
                if wanted := {name: selection.files[name] for name in names if selection.files[name].pack == number}:
                    yield run, wanted
