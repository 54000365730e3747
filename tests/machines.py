"""Machines that boot from one store, and a store that is watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import Fetched, PacksOfKey, fetch, install
from compile_cache.storage.pack.format import Pack
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, StoredObject
from compile_cache.storage.stores.local import LocalStore

RULES = Rules()


@dataclass(frozen=True)
class Machine:
    """One boot on one machine: a cache directory of its own, and a store that others use too."""

    publication: Publication

    @classmethod
    def at(
        cls, root: Path, store: ObjectStore, key: CacheKey, environment: Environment | None = None, rules: Rules = RULES
    ) -> Machine:
        """The machine whose cache directory is below `root`."""
        packs = PacksOfKey(store, key, rules)
        return cls(Publication(store, packs, environment, CacheDirectory.claim(root)))

    @property
    def directory(self) -> CacheDirectory:
        return self.publication.directory

    @property
    def packs(self) -> PacksOfKey:
        return self.publication.packs

    def write(self, files: dict[str, bytes]) -> None:
        write_files(self.directory.path, files)

    def files(self) -> dict[str, bytes]:
        return read_files(self.directory.path)

    def fetch(self, directory: CacheDirectory | None = None) -> Fetched:
        return fetch(self.packs, (directory or self.directory).inbox)

    def restore(self) -> Fetched:
        fetched = self.fetch()
        install(fetched, self.directory)
        return fetched

    def restored(self) -> dict[str, bytes]:
        """The directory's files, after a restore."""
        self.restore()
        return self.files()

    def stage(self) -> tuple[Pack, ...]:
        """Packs of everything that no restore brought."""
        ledger = self.directory.ledger
        ledger.hand_over(ledger.appeared())
        return self.publication.stage(ledger.ready(), "the test")

    def publish(self) -> tuple[Pack, ...]:
        packs = self.stage()
        for pack in packs:
            self.publication.publish(pack)
        return packs


class Watched(LocalStore):
    """A store in a folder. Something happens before a call of the method with this name; or after it, with `after_`
    before its name."""

    def __init__(self, root: Path | str, **happens: Callable[..., object]) -> None:
        super().__init__(Path(root))
        self._happens = defaultdict[str, Callable[..., object]](lambda: lambda *_: None, happens)

    def list(self, prefix: str) -> Sequence[StoredObject]:
        self._happens["list"](prefix)
        found = super().list(prefix)
        self._happens["after_list"](found)
        return found

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        self._happens["read"](name, start, size_bytes)
        return super().read(name, start, size_bytes)

    def put(self, name: str, content: Path | bytes) -> None:
        self._happens["put"](name)
        super().put(name, content)
        self._happens["after_put"](name)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
