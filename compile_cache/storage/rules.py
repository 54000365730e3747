"""The rules by which a stored pack is used or refused: who is trusted, what is too large. Heads are read by them, and
whole packs are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from compile_cache.errors import ObjectNotFound, PackError, PackForbidden, SettingsError, StoreError
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.pack.format import Head, read_head, runs, unpack
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, trusted_keys
from compile_cache.storage.stores.base import ReadableStore, StoredObject
from compile_cache.storage.stores.transfer import in_daemon_threads, open_part

# The first read of a pack, which gets the head of most.
HEAD_READ_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits, the trusted keys (without any, every pack is used), and the signer of new packs.

    A signer without trusted keys trusts only itself. Otherwise a merge would re-sign packs that anybody uploaded.
    """

    limits: Limits = field(default_factory=Limits)
    trusted: frozenset[str] = frozenset()
    signer: Signer | None = None

    def __post_init__(self) -> None:
        """Let a signer without trusted keys trust itself."""
        if self.signer and not self.trusted:
            object.__setattr__(self, "trusted", frozenset([self.signer.public_key]))

    @classmethod
    def of(cls, settings: Settings) -> Rules:
        """The rules of a boot with these settings.

        Raises:
            SettingsError: a key is invalid, the signing key is not trusted, or `cryptography` is needed, but not
                installed. The message names the variable.
        """
        signer = Signer(settings.signing_key) if settings.signing_key else None
        trusted = trusted_keys(settings.trusted_keys)
        if signer and trusted and signer.public_key not in trusted:
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


def read_stored_head(store: ReadableStore, entry: StoredObject, rules: Rules) -> Head:
    """Read and verify the head of a pack in `store`.

    Raises:
        PackForbidden: the rules forbid the pack's use, or it lies in another key's place.
        PackError: the pack is damaged. The message says how.
        StoreError: the pack cannot be read.
    """
    folder, _, name = entry.name.rpartition("/")
    stored = open_part(store, entry.name, 0, entry.size_bytes, HEAD_READ_BYTES)
    head = read_head(stored, name, rules.limits, rules.trusted)
    if head.stored_bytes != entry.size_bytes:
        raise PackError(f"it has {entry.size_bytes} bytes, but its manifest describes {head.stored_bytes}")
    if head.manifest.key.prefix != f"{folder}/":
        raise PackForbidden(f"it is for {head.manifest.key.prefix}, not for {folder}/")
    return head


def too_many(limits: Limits) -> str:
    """Why a further pack of a key that has as many as `limits` allow is not used, and what to do."""
    return f"its version has {limits.packs} packs already, and a boot uses no more: delete some with `compile-cache rm`"


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
    """Read a whole pack from `store`, verify everything in it, and keep nothing. Each frame is read alone, because a
    boot may want any of them.

    Raises:
        PackError: the pack is damaged or forbidden. The message says why.
        StoreError: the pack cannot be read.
    """
    head = read_stored_head(store, entry, rules)
    in_daemon_threads(
        lambda run: unpack(open_part(store, entry.name, run.start, run.end), run.files, None), runs(head, most_bytes=0)
    )
    return head


def verify_packs(
    store: ReadableStore, entries: Sequence[StoredObject], rules: Rules, heads_alone: bool = False
) -> list[VerifiedPack]:
    """Verify everything in these packs, one after the other. Packs that no longer exist are left out.

    With `heads_alone`, only the heads of one key's packs are verified, and the result has them.
    """
    found: list[VerifiedPack] = []
    for entry in entries:
        try:
            if heads_alone and sum(pack.head is not None for pack in found) >= rules.limits.packs:
                raise PackForbidden(too_many(rules.limits))
            head = read_stored_head(store, entry, rules) if heads_alone else verify_pack(store, entry, rules)
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
