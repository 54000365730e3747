"""The ledger of a cache directory: which files the store has, and which are new and must be published."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from compile_cache.storage.directory import CacheDirectory, FileStamp, logical_key
from compile_cache.storage.fetch import Fetched
from compile_cache.storage.pack.format import Pack, Source, sha256_of
from compile_cache.storage.selection import PacksOfKey

# The first packs are small, so that the most valuable files are stored even if there is hardly any time.
_SMALLEST_PART_BYTES = 4 << 20
_LARGEST_PART_BYTES = 64 << 20
# torch rewrites these files in place. They have the best configuration that tuning found for a kernel.
_TUNED = ".best_config"


class Ledger:
    """Compares `directory` with the packs that the store has, or had: what was removed there meanwhile is not new."""

    def __init__(self, directory: CacheDirectory, packs: PacksOfKey) -> None:
        self._directory = directory
        self._packs = packs
        # By path: the digest of the stored content, and the file's stamp.
        self._stored: dict[str, tuple[str, FileStamp]] = {}
        # By path: the stamp and the logical key of another version's file.
        self._seeded: dict[str, tuple[FileStamp, str]] = {}
        self._staged: dict[str, FileStamp] = {}  # the stamps from before the files were read into packs

    def install(self, fetched: Fetched) -> int:
        """Move verified files into the cache directory, each atomically. Returns their number.

        Raises:
            OSError: the cache directory cannot be written.
        """
        for path, staged in fetched.files.items():
            target = f"{self._directory.path}/{path}"
            if fetched.seeded_from:
                _mark_unread(staged.local)
            try:
                os.replace(staged.local, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(staged.local, target)
            if fetched.seeded_from:
                self._seeded[path] = (_stamp(target), staged.file.key)
            else:
                self._stored[path] = (staged.file.sha256, _stamp(target))
        return len(fetched.files)

    def is_superseded(self, pack: Pack) -> bool:
        """Whether another container has meanwhile published a part of this staged pack."""
        keys = self._packs.seen
        return any(file.key in keys for file in pack.manifest.files if file.replaces is None)

    def published(self, pack: Pack) -> None:
        """Note that a staged pack was uploaded."""
        for file in pack.manifest.files:
            self._stored[file.path] = (file.sha256, self._staged[file.path])
            self._seeded.pop(file.path, None)

    def unpublished(self, withheld: Collection[str]) -> tuple[list[list[Source]], dict[str, str]]:
        """The files that the store lacks, in parts of a pack each, the most valuable first; and why no boot could
        restore some others, by path."""
        new = sorted(self._new(withheld), key=_by_value)
        refused = self._packs.refusals(new, self._staged)
        return [part for part in _parts(each for each in new if each.path not in refused) if part], refused

    def _new(self, withheld: Collection[str]) -> Iterator[Source]:
        """The files to publish: those with new logical keys, those whose content differs from the stored one, and the
        files of another version that this boot has read."""
        keys = self._packs.seen
        counts_all_read = bool(self._seeded) and not _records_reads(self._directory.inbox)
        siblings: dict[str, list[str]] = {}
        for path in self._stored:
            siblings.setdefault(logical_key(path), []).append(path)
        for path, stamp in self._directory.scan().items():
            local, key = self._directory.path / path, logical_key(path)
            if path in withheld:
                continue
            self._staged[path] = stamp
            if path in self._stored:
                yield from self._changed(local, path, key, stamp)
            elif (seed := self._seeded.get(path)) and seed[0] == stamp:
                if seed[1] not in keys and (counts_all_read or _is_read(local)):
                    yield Source(local, path, seed[1])
            elif key not in keys:
                yield Source(local, path, key)
            elif (more := siblings.get(key)) and (variant := _variant(key, more)) not in keys:
                yield Source(local, path, variant)

    def _changed(self, local: Path, path: str, key: str, stamp: FileStamp) -> Iterator[Source]:
        stored_sha256, stored_stamp = self._stored[path]
        if stored_stamp == stamp:
            return
        sha256 = sha256_of(local)
        if sha256 == stored_sha256:
            self._stored[path] = (sha256, stamp)
            return
        # Any other changed file is damaged. If there are several successors, the first one is used.
        if path.endswith(_TUNED):
            packed = [f for pack in self._packs.known.values() for f in pack.head.manifest.files if f.path == path]
            has_successor = any(file.replaces == stored_sha256 for file in packed)
            if not has_successor and any(file.sha256 == stored_sha256 for file in packed):
                yield Source(local, path, key, replaces=stored_sha256)


def _variant(key: str, siblings: Iterable[str]) -> str:
    """The logical key of a further entry under `key`. Inductor keeps several graphs under one key, with guards on
    sizes, and compiles another one if none of them applies."""
    names = "\n".join(sorted(os.path.basename(path) for path in siblings))
    return f"{key}/after/{hashlib.sha256(names.encode()).hexdigest()[:32]}"


def _stamp(path: str) -> FileStamp:
    stat = os.stat(path)
    return FileStamp(stat.st_size, stat.st_mtime_ns)


def _mark_unread(path: str) -> None:
    """Set a file's access time before its modification time. Then the first read updates it, also under relatime."""
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns))


def _is_read(path: str | Path) -> bool:
    try:
        return os.stat(path).st_atime_ns != 0
    except FileNotFoundError:
        return False


def _records_reads(folder: Path) -> bool:
    """Whether the file system records access times. It does not if it is mounted with `noatime`."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"read")
        probe.flush()
        _mark_unread(probe.name)
        Path(probe.name).read_bytes()
        return _is_read(probe.name)


def _by_value(source: Source) -> tuple[int, str]:
    """The sort key by value: graph entries first, because they save lowering and code generation; then compiled code;
    then the rest."""
    if source.key != source.path:
        return 0, source.path
    return (1 if source.path.endswith((".so", ".cubin", ".hsaco", ".py")) else 2), source.path


def _parts(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """`sources` in order, in parts of limited size. Each limit is twice the one before."""
    part: list[Source] = []
    size_bytes, most_bytes = 0, _SMALLEST_PART_BYTES
    for source in sources:
        # All files of a logical key go into one pack, because a restore takes them from the first pack that has the
        # key.
        if part and size_bytes > most_bytes and source.key != part[-1].key:
            yield part
            part, size_bytes, most_bytes = [], 0, min(2 * most_bytes, _LARGEST_PART_BYTES)
        part.append(source)
        size_bytes += source.local.stat().st_size if source.local.exists() else 0
    yield part
