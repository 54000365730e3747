"""Verifies stored packs whole, or their heads alone, and says what is wrong with each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from compile_cache.errors import ObjectNotFound, PackError, PackForbidden, SettingsError, StoreError
from compile_cache.storage.pack.format import Head, runs, unpack_run
from compile_cache.storage.pack.signing import TrustedKeys
from compile_cache.storage.rules import HeadReader, Rules
from compile_cache.storage.stores.base import ReadableStore, StoredObject
from compile_cache.storage.stores.transfer import in_daemon_threads, read_pieces


class PackState(StrEnum):
    """The state of a stored pack.

    `REFUSED` packs may be intact, but the trusted keys, the limits, the pack format or their place forbid their use.
    Only their heads were read.
    """

    SOUND = "sound"
    DAMAGED = "damaged"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class VerifiedPack:
    """A pack, its state, and the reason if it is not sound. `signed_by` is the public key whose signature was
    verified."""

    entry: StoredObject
    state: PackState
    reason: str = ""
    head: Head | None = None
    signed_by: str | None = None


def verify_pack(store: ReadableStore, name: str, size_bytes: int, rules: Rules) -> Head:
    """Read a whole pack from `store`, verify everything in it, and keep nothing.

    Raises:
        PackError: the pack is damaged or forbidden. The message says why.
        StoreError: the pack cannot be read.
    """
    head = HeadReader(store, rules).read(StoredObject(name, size_bytes, 0.0)).head
    in_daemon_threads(
        lambda run: unpack_run(read_pieces(store, name, run.start, run.frame_sizes), run, None),
        runs(head),
    )
    return head


def verify_all(store: ReadableStore, entries: Sequence[StoredObject], rules: Rules) -> list[VerifiedPack]:
    """Verify everything in these packs, one after the other. Packs that no longer exist are left out."""
    found = (
        _verify(store, entry, rules, functools.partial(verify_pack, store, entry.name, entry.size_bytes, rules))
        for entry in entries
    )
    return [replace(pack, head=None) for pack in found if pack]  # the heads of many packs would fill the memory


def verify_heads(store: ReadableStore, entries: Sequence[StoredObject], rules: Rules) -> list[VerifiedPack]:
    """Verify the heads of one key's packs, several at a time, and return them in order. Packs that no longer exist are
    left out."""
    found: dict[str, VerifiedPack | None] = {}
    reader = HeadReader(store, rules)

    def look(entry: StoredObject) -> None:
        found[entry.name] = _verify(store, entry, rules, lambda: reader.read(entry).head)

    in_daemon_threads(look, entries)
    return [pack for entry in entries if (pack := found[entry.name])]


def _verify(store: ReadableStore, entry: StoredObject, rules: Rules, read: Callable[[], Head]) -> VerifiedPack | None:
    try:
        head = read()
        sound = VerifiedPack(entry, PackState.SOUND, "", head, head.signed_by)
        return sound if rules.trusted or head.signed_by is None else _verify_own_signature(store, sound, rules)
    except ObjectNotFound:
        return None
    except PackForbidden as error:
        return VerifiedPack(entry, PackState.REFUSED, str(error))
    except PackError as error:
        return VerifiedPack(entry, PackState.DAMAGED, str(error))
    except StoreError as error:
        return VerifiedPack(entry, PackState.UNREADABLE, str(error))


def _verify_own_signature(store: ReadableStore, sound: VerifiedPack, rules: Rules) -> VerifiedPack:
    """Verify a signature with the key that it names. Needed without trusted keys, when signatures are not verified."""
    try:
        named = Rules(rules.limits, TrustedKeys([str(sound.signed_by)]))
        HeadReader(store, named).read(sound.entry)
    except SettingsError:  # cryptography is not installed
        return replace(sound, signed_by=None)
    return sound
