"""Machines that boot from one store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import Fetched
from compile_cache.storage.pack.format import Pack
from compile_cache.storage.publish import CompileCache


@dataclass(frozen=True)
class Machine:
    """One boot on one machine: a cache directory of its own, and a cache over a store that others use too."""

    cache: CompileCache
    directory: CacheDirectory

    def write(self, files: dict[str, bytes]) -> None:
        write_files(self.directory.path, files)

    def files(self) -> dict[str, bytes]:
        return read_files(self.directory.path)

    def restore(self) -> Fetched:
        fetched = self.cache.fetch()
        self.cache.install(fetched)
        return fetched

    def restored(self) -> dict[str, bytes]:
        """The directory's files, after a restore."""
        self.restore()
        return self.files()

    def publish(self, withheld: Collection[str] = ()) -> tuple[Pack, ...]:
        packs = self.cache.stage(withheld, "the test")
        for pack in packs:
            self.cache.publish(pack)
        return packs

    def publish_after_a_look(self) -> list[str]:
        """Publish what is new after another look at the store, as the publisher does; the packs' names."""
        self.cache.refresh()
        return [self.cache.key.prefix + pack.name for pack in self.publish()]


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
