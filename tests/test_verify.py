"""Verifying: damaged packs are told from packs that are only refused here, because damaged packs get deleted."""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from filled_stores import GRAPH, flip_last, put_pack
from machines import Watched
from signing_keys import make_keys

from compile_cache.errors import StoreUnavailable
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, trusted_keys
from compile_cache.storage.rules import PackState, Rules, VerifiedPack, verify_packs
from compile_cache.storage.stores.base import StoredObject
from compile_cache.storage.stores.local import LocalStore

EVERYONE = Rules()
LARGE = {"ab/kernel.so": bytes(range(256)) * 4096}
PRIVATE, PUBLIC = make_keys("one")
STRANGER = make_keys("stranger")[1]


def entry_of(local: LocalStore, name: str) -> StoredObject:
    return next(entry for entry in local.list("") if entry.name == name)


def verify(local: LocalStore, name: str, rules: Rules = EVERYONE, whole: bool = True) -> VerifiedPack:
    (found,) = verify_packs(local, [entry_of(local, name)], rules, heads_alone=not whole)
    return found


def flip_signature(pack: bytes) -> bytes:
    start = pack.index(struct.pack("<II", 0x184D2A51, 96)) + 8 + 32
    return pack[:start] + bytes([pack[start] ^ 1]) + pack[start + 1 :]


@dataclass(frozen=True)
class Row:
    """A stored pack that was changed, the rules here, and what is said of it."""

    state: PackState
    reason: str = ""
    change: Callable[[bytes], bytes] = bytes
    rules: Rules = EVERYONE
    signer: Signer | None = None
    signed_by: str | None = None
    is_large: bool = False
    whole: bool = True


SOUND, DAMAGED, REFUSED = PackState.SOUND, PackState.DAMAGED, PackState.REFUSED
OURS = Rules(trusted=trusted_keys([PUBLIC]))
THEIRS = Rules(trusted=trusted_keys([STRANGER]))
ROWS = {
    "in its place": Row(SOUND),
    "a flipped bit": Row(DAMAGED, r"\w", flip_last),
    "a flipped bit, and only the head is read": Row(SOUND, "", flip_last, is_large=True, whole=False),
    **{f"cut to {size} bytes": Row(DAMAGED, r"\w", lambda pack, size=size: pack[:size]) for size in (0, 5, 60, 300)},
    "no pack": Row(DAMAGED, "does not begin like a pack", lambda pack: b"hello" * 100),
    "a later format": Row(REFUSED, "format 4", lambda pack: pack[:16] + struct.pack("<I", 4) + pack[20:]),
    **{
        f"beyond {limits}": Row(REFUSED, r"\w", rules=Rules(limits), is_large=True)
        for limits in (Limits(size_bytes=1000), Limits(manifest_bytes=100))
    },
    # Damage behind the head is not looked for.
    "refused and damaged": Row(REFUSED, r"\w", flip_last, Rules(Limits(size_bytes=1000)), is_large=True),
    "not signed": Row(REFUSED, "not signed", rules=THEIRS),
    "signed by a stranger": Row(REFUSED, PUBLIC.replace("+", r"\+"), rules=THEIRS, signer=Signer(PRIVATE)),
    "signed by a trusted key": Row(SOUND, rules=OURS, signer=Signer(PRIVATE), signed_by=PUBLIC),
    "signed, and all are trusted": Row(SOUND, signer=Signer(PRIVATE)),
    "another signature": Row(REFUSED, "does not match", flip_signature, OURS, Signer(PRIVATE)),
    # A boot without trusted keys uses it.
    "another signature, and all are trusted": Row(SOUND, "", flip_signature, signer=Signer(PRIVATE)),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_pack_is_sound_damaged_or_refused(local, key, row: Row):
    name = put_pack(local, key, LARGE if row.is_large else GRAPH, signer=row.signer)
    local.put(name, row.change(local.read(name, 0, 8 << 20)))
    found = verify(local, name, row.rules, row.whole)
    assert (found.state, found.signed_by) == (row.state, row.signed_by)
    assert bool(found.reason) == bool(row.reason)
    assert re.search(row.reason, found.reason)


def test_a_pack_in_the_place_of_another_key_is_refused_and_not_damaged(local, key):
    name = put_pack(local, key)
    other = replace(key, model_version="other").prefix + name.rpartition("/")[2]
    local.put(other, local.read(name, 0, 8 << 20))
    found = verify(local, other)
    assert found.state is REFUSED
    assert key.prefix in found.reason


def test_without_trusted_keys_and_cryptography_a_signature_is_told_and_not_vouched_for(local, key, monkeypatch):
    name = put_pack(local, key, signer=Signer(PRIVATE))
    for module in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, module, None)
    found = verify(local, name, whole=False)
    assert (found.state, found.signed_by, found.head.signed_by) == (SOUND, None, PUBLIC)


def test_a_pack_that_was_deleted_meanwhile_is_left_out(local, key):
    entry = entry_of(local, put_pack(local, key))
    local.delete(entry.name)
    assert verify_packs(local, [entry], EVERYONE) == verify_packs(local, [entry], EVERYONE, heads_alone=True) == []


def test_a_pack_that_cannot_be_read_is_not_called_damaged(tmp_path, local, key):
    name = put_pack(local, key)

    def hang(*_: object) -> None:
        raise StoreUnavailable(f"cannot read {name}: it hangs")

    assert verify(Watched(tmp_path / "store", read=hang), name).state is PackState.UNREADABLE


def test_heads_come_in_the_order_of_the_packs_and_tell_their_files(local, key):
    entries = [entry_of(local, put_pack(local, key, {"a": bytes([number])})) for number in range(20)]
    found = verify_packs(local, entries, EVERYONE, heads_alone=True)
    assert [pack.entry for pack in found] == entries
    assert [file.path for pack in found for file in pack.head.manifest.files] == ["a"] * 20


def test_no_more_packs_are_said_to_be_sound_than_a_boot_uses(local, key):
    entries = [entry_of(local, put_pack(local, key, {"a": bytes([number])})) for number in range(3)]
    found = verify_packs(local, entries, Rules(Limits(packs=2)), heads_alone=True)
    assert [(pack.entry, pack.state) for pack in found] == [*zip(entries, [SOUND, SOUND, REFUSED], strict=True)]
