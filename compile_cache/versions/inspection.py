"""Judging stored packs one by one: sound, damaged, in the wrong place, or only refused by this machine's rules."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from compile_cache.errors import ObjectNotFound, PackError, SettingsError, StoreError
from compile_cache.lifecycle.report import RefusedPack
from compile_cache.pack.format import PACK_VERSION, Head
from compile_cache.pack.manifest import Limits
from compile_cache.pack.reading import in_daemon_threads
from compile_cache.pack.signing import TrustedKeys
from compile_cache.store.base import ObjectStore, StoredObject
from compile_cache.versions.cache import HEAD_READ_BYTES, fetch_head
from compile_cache.versions.compaction import verify_pack

# Identity and format version, where format.py puts them in every format.
_FORMAT = struct.Struct("<8x8sI")
_IDENTITY = b"compcach"

# Called with the bytes read so far and all that are to be read.
Progress = Callable[[int, int], None]


class Verdict(StrEnum):
    """What one pack is found to be. `REFUSED` ones are intact, for all that is known, and not to be used here: by the
    trusted keys, by the limits, or because their format is another version's."""

    SOUND = "sound"
    DAMAGED = "damaged"
    MISPLACED = "misplaced"
    REFUSED = "refused"
    UNREADABLE = "unreadable"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Inspected:
    """A pack, what it is, and why, if it is not sound. `signed_by` is the public key whose signature was verified."""

    entry: StoredObject
    verdict: Verdict
    reason: str = ""
    head: Head | None = None
    signed_by: str | None = None

    @property
    def refusal(self) -> RefusedPack:
        """As a report says it."""
        return RefusedPack(self.entry.name, self.reason, self.verdict is not Verdict.UNREADABLE)


def inspect_pack(
    store: ObjectStore, entry: StoredObject, limits: Limits, trusted: TrustedKeys, whole: bool = True
) -> Inspected:
    """Judge one pack by all of it, or by its head alone: one request, and few bytes. Nothing is kept."""

    def read(rules: Limits, keys: TrustedKeys) -> Head:
        if whole:
            return verify_pack(store, entry.name, entry.size_bytes, rules, keys)
        return fetch_head(store, entry.name, entry.size_bytes, HEAD_READ_BYTES, rules, keys)[0]

    try:
        try:
            found = _placed(entry, read(limits, trusted))
        except PackError as error:
            return Inspected(entry, _verdict_without_rules(store, entry, limits, read), str(error))
        return _check_own_signature(store, found, limits) if not trusted else found
    except ObjectNotFound as error:
        return Inspected(entry, Verdict.GONE, str(error))
    except StoreError as error:
        return Inspected(entry, Verdict.UNREADABLE, str(error))


def inspect_packs(
    store: ObjectStore,
    entries: Sequence[StoredObject],
    limits: Limits,
    trusted: TrustedKeys,
    progress: Progress = lambda done_bytes, total_bytes: None,
) -> list[Inspected]:
    """Judge packs by all of them, one after the other, each in parallel; those that are gone by now are left out."""
    inspected, done_bytes, total_bytes = [], 0, sum(entry.size_bytes for entry in entries)
    for entry in entries:
        inspected.append(inspect_pack(store, entry, limits, trusted))
        done_bytes += entry.size_bytes
        progress(done_bytes, total_bytes)
    return [pack for pack in inspected if pack.verdict is not Verdict.GONE]


def inspect_heads(
    store: ObjectStore, entries: Sequence[StoredObject], limits: Limits, trusted: TrustedKeys
) -> list[Inspected]:
    """Judge packs by their heads alone, several at a time, in their order; those that are gone by now are left out."""
    found: dict[str, Inspected] = {}

    def look(entry: StoredObject) -> None:
        found[entry.name] = inspect_pack(store, entry, limits, trusted, whole=False)

    in_daemon_threads(look, entries)
    inspected = [found[entry.name] for entry in entries]
    return [pack for pack in inspected if pack.verdict is not Verdict.GONE]


def _placed(entry: StoredObject, head: Head) -> Inspected:
    folder = entry.name.rpartition("/")[0] + "/"
    if head.manifest.key.prefix == folder:
        return Inspected(entry, Verdict.SOUND, "", head, head.signed_by)
    return Inspected(entry, Verdict.MISPLACED, f"it is for {head.manifest.key.prefix}, not for {folder}", head)


def _verdict_without_rules(
    store: ObjectStore, entry: StoredObject, limits: Limits, read: Callable[[Limits, TrustedKeys], Head]
) -> Verdict:
    """Whether what was refused is damaged: it is, if it cannot be read by anybody's rules either."""
    generous = Limits(1 << 45, 10 * limits.files, 10 * limits.manifest_bytes)
    try:
        read(generous, TrustedKeys())
    except PackError:
        return Verdict.REFUSED if _is_of_another_format(store, entry) else Verdict.DAMAGED
    return Verdict.REFUSED


def _is_of_another_format(store: ObjectStore, entry: StoredObject) -> bool:
    beginning = store.read(entry.name, 0, _FORMAT.size)
    if len(beginning) < _FORMAT.size:
        return False
    identity, version = _FORMAT.unpack(beginning)
    return bool(identity == _IDENTITY and version != PACK_VERSION)


def _check_own_signature(store: ObjectStore, found: Inspected, limits: Limits) -> Inspected:
    """Where no keys are trusted, a signature was not verified: do so with the key that it names itself."""
    if found.head is None or found.head.signed_by is None:
        return found
    try:
        named = TrustedKeys([found.head.signed_by])
        fetch_head(store, found.entry.name, found.entry.size_bytes, HEAD_READ_BYTES, limits, named)
    except PackError as error:
        return replace(found, verdict=Verdict.REFUSED, reason=str(error), signed_by=None)
    except SettingsError:  # cryptography is not installed
        return replace(found, signed_by=None)
    return found
