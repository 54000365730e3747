"""The rules by which a stored pack is used or refused: who is trusted, what is too large. Heads are read by them, and
whole packs are verified.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compile_cache.errors import (
    ManifestTooLarge,
    ObjectNotFound,
    PackError,
    PackForbidden,
    SettingsError,
    StoreError,
    TooManyPacks,
)
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.pack.format import Head, parse_header, read_head, runs, unpack_run
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, TrustedKeys
from compile_cache.storage.stores.base import ReadableStore, StoredObject
from compile_cache.storage.stores.transfer import in_daemon_threads, read_exactly, read_pieces

# The first read of a pack, which gets the head of most.
HEAD_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits, the trusted keys (without any, every pack is used), and the signer of new packs.

    A signer without trusted keys trusts only itself. Otherwise a merge would re-sign packs that anybody uploaded.
    """

    limits: Limits = field(default_factory=Limits)
    trusted: TrustedKeys = field(default_factory=TrustedKeys)
    signer: Signer | None = None

    def __post_init__(self) -> None:
        """Let a signer without trusted keys trust itself."""
        if self.signer and not self.trusted:
            object.__setattr__(self, "trusted", TrustedKeys([self.signer.public_key]))

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """The rules of a boot with these settings.

        Raises:
            SettingsError: a key is invalid, the signing key is not trusted, or `cryptography` is needed, but not
                installed. The message names the variable.
        """
        signer = Signer(settings.signing_key) if settings.signing_key else None
        trusted = TrustedKeys(settings.trusted_keys)
        if signer and trusted and signer.public_key not in settings.trusted_keys:
            raise SettingsError(
                f"{PREFIX}SIGNING_KEY is not trusted here, so this boot would refuse its own packs: add "
                f"{signer.public_key} to {PREFIX}TRUSTED_KEYS"
            )
        return cls(trusted=trusted, signer=signer)


@dataclass(frozen=True, slots=True)
class StoredPack:
    """A pack in the store, and its verified head."""

    entry: StoredObject
    head: Head


def room_beside(limits: Limits, heads: Sequence[Head], size_bytes: int = 0) -> Limits:
    """What is left of the limits beside these packs. `size_bytes` is the size of the files chosen from them, if these
    are chosen already: some files are there twice."""
    files = sum(len(head.manifest.files) for head in heads)
    manifest_bytes = sum(head.manifest_bytes for head in heads)
    return Limits(limits.size_bytes - size_bytes, limits.files - files, limits.manifest_bytes - manifest_bytes)


class HeadReader:
    """Reads heads. All heads together may have no more files, and no longer manifests, than the limits allow for one
    pack.

    Several threads may read. They fetch heads in parallel, but unpack and check one at a time. So memory holds one
    unpacked manifest, and the files of the usable packs.
    """

    def __init__(self, store: ReadableStore, rules: Rules, known: Iterable[StoredPack] = ()) -> None:
        """`known` packs count against the limits. `room` is what is left of these."""
        self._store = store
        self._rules = rules
        self.room = room_beside(rules.limits, [pack.head for pack in known])
        self._turn = threading.Lock()

    def read(self, entry: StoredObject) -> StoredPack:
        """The pack with its verified head.

        Raises:
            TooManyPacks: the other heads leave no room for this one.
            PackForbidden: the rules forbid the pack's use, or it lies in another key's place.
            PackError: the pack is damaged. The message says how.
            StoreError: the pack cannot be read.
        """
        limits = self._rules.limits
        if entry.size_bytes > limits.size_bytes:
            raise PackForbidden(f"it has {entry.size_bytes} bytes; {limits.size_bytes} are allowed")
        content = read_exactly(self._store, entry.name, 0, min(HEAD_READ_BYTES, entry.size_bytes))
        end = min(parse_header(content, limits).end, entry.size_bytes)
        if len(content) < end:
            content += read_exactly(self._store, entry.name, len(content), end - len(content))
        folder, _, name = entry.name.rpartition("/")
        with self._turn:
            try:
                head = read_head(content, name, self.room, self._rules.trusted)
            except ManifestTooLarge as error:
                if self.room == limits:
                    raise
                raise TooManyPacks(f"the other packs of its key leave no room for it: {error}") from error
            if head.stored_bytes != entry.size_bytes:
                raise PackError(f"it has {entry.size_bytes} bytes, but its manifest describes {head.stored_bytes}")
            if head.manifest.key.prefix != f"{folder}/":
                raise PackForbidden(f"it is for {head.manifest.key.prefix}, not for {folder}/")
            self.room = room_beside(self.room, [head])
            return StoredPack(entry, head)


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
    """A pack, its state, and the reason if it is not sound. `signed_by` is the trusted key whose signature was
    verified. Without trusted keys, no signature is."""

    entry: StoredObject
    state: PackState
    reason: str = ""
    head: Head | None = None
    signed_by: str | None = None


def verify_pack(store: ReadableStore, entry: StoredObject, rules: Rules) -> Head:
    """Read a whole pack from `store`, verify everything in it, and keep nothing.

    Raises:
        PackError: the pack is damaged or forbidden. The message says why.
        StoreError: the pack cannot be read.
    """
    head = HeadReader(store, rules).read(entry).head
    in_daemon_threads(
        lambda run: unpack_run(read_pieces(store, entry.name, run.start, run.frame_sizes), run, None), runs(head)
    )
    return head


def verify_packs(
    store: ReadableStore, entries: Sequence[StoredObject], rules: Rules, heads_alone: bool = False
) -> list[VerifiedPack]:
    """Verify everything in these packs, one after the other. Packs that no longer exist are left out.

    With `heads_alone`, only the heads of one key's packs are verified, and the result has them.
    """
    reader = HeadReader(store, rules)
    found: list[VerifiedPack] = []
    for entry in entries:
        try:
            head = reader.read(entry).head if heads_alone else verify_pack(store, entry, rules)
            kept = head if heads_alone else None  # the heads of many packs would fill the memory
            signed_by = head.signed_by if rules.trusted else None
            found.append(VerifiedPack(entry, PackState.SOUND, "", kept, signed_by))
        except ObjectNotFound:
            continue
        except PackForbidden as error:
            found.append(VerifiedPack(entry, PackState.REFUSED, str(error)))
        except PackError as error:
            found.append(VerifiedPack(entry, PackState.DAMAGED, str(error)))
        except StoreError as error:
            found.append(VerifiedPack(entry, PackState.UNREADABLE, str(error)))
    return found
