"""Verifying: damaged packs are told from packs that are only refused here, because damaged packs get deleted."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import GRAPH, damage, put_pack

from compile_cache.errors import StoreUnavailable
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, TrustedKeys, generate_keys
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import StoredObject
from compile_cache.storage.stores.local import LocalStore
from compile_cache.storage.verify import PackState, VerifiedPack, verify_all, verify_heads, verify_whole

ANYBODY = TrustedKeys()
EVERYONE = Rules()
LIMITS = Limits()
LARGE = {"ab/kernel.so": bytes(range(256)) * 4096}


@pytest.fixture
def local(tmp_path) -> LocalStore:
    return LocalStore(tmp_path)


def entry_of(local: LocalStore, name: str) -> StoredObject:
    return next(entry for entry in local.list("") if entry.name == name)


def verify(
    local: LocalStore, name: str, limits: Limits = LIMITS, trusted: TrustedKeys = ANYBODY, whole: bool = True
) -> VerifiedPack:
    entry, rules = entry_of(local, name), Rules(limits, trusted)
    return verify_whole(local, entry, rules) if whole else verify_heads(local, [entry], rules)[0]


def test_a_pack_in_its_place_is_sound(local, key):
    found = verify(local, put_pack(local, key))
    assert (found.state, found.reason, found.signed_by) == (PackState.SOUND, "", None)
    assert [file.path for file in found.head.manifest.files] == list(GRAPH)


def test_a_byte_that_flipped_is_damage(tmp_path, local, key):
    name = put_pack(local, key)
    damage(tmp_path, name)
    assert verify(local, name).state is PackState.DAMAGED


def test_a_head_alone_does_not_show_damage_further_on(tmp_path, local, key):
    name = put_pack(local, key, LARGE)
    damage(tmp_path, name)
    assert verify(local, name, whole=False).state is PackState.SOUND


@pytest.mark.parametrize("size_bytes", [0, 5, 60, 300])
def test_a_pack_that_was_cut_is_damaged(tmp_path, local, key, size_bytes):
    name = put_pack(local, key)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:size_bytes])
    assert verify(local, name).state is PackState.DAMAGED


def test_what_is_no_pack_but_named_as_one_is_damaged(local, key):
    name = f"{key.prefix}{'a' * 64}.pack"
    local.put(name, b"hello" * 100)
    assert verify(local, name).state is PackState.DAMAGED


def test_a_pack_in_the_place_of_another_key_is_refused_and_not_damaged(tmp_path, local, key):
    name = put_pack(local, key)
    other = replace(key, model_version="other").prefix + name.rpartition("/")[2]
    local.put(other, tmp_path / name)
    found = verify(local, other)
    assert found.state is PackState.REFUSED
    assert key.prefix in found.reason


def test_a_pack_of_a_later_format_is_refused_and_not_damaged(tmp_path, local, key):
    name = put_pack(local, key)
    content = bytearray((tmp_path / name).read_bytes())
    struct.pack_into("<I", content, 16, 2)
    (tmp_path / name).write_bytes(content)
    found = verify(local, name)
    assert found.state is PackState.REFUSED
    assert "format 2" in found.reason


@pytest.mark.parametrize("limits", [Limits(size_bytes=1000), Limits(files=1), Limits(manifest_bytes=100)], ids=str)
def test_a_pack_beyond_the_limits_is_refused_and_not_damaged(local, key, limits):
    assert verify(local, put_pack(local, key, {**LARGE, "b": b"", "c": b""}), limits).state is PackState.REFUSED


def test_a_pack_that_is_refused_is_not_read_beyond_its_head(tmp_path, local, key):
    name = put_pack(local, key, LARGE)
    damage(tmp_path, name)
    assert verify(local, name, Limits(size_bytes=1000)).state is PackState.REFUSED


def test_an_unsigned_pack_and_one_by_a_stranger_who_is_named_are_refused_where_keys_are_trusted(local, key):
    private, public = generate_keys()
    for signer, reason in ((None, "not signed"), (Signer(private), public)):
        found = verify(local, put_pack(local, key, signer=signer), trusted=TrustedKeys([generate_keys()[1]]))
        assert found.state is PackState.REFUSED
        assert reason in found.reason


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_key_that_signed_is_named_whether_it_is_trusted_or_all_are(local, key, is_trusted):
    private, public = generate_keys()
    trusted = TrustedKeys([public]) if is_trusted else ANYBODY
    found = verify(local, put_pack(local, key, signer=Signer(private)), trusted=trusted)
    assert (found.state, found.signed_by) == (PackState.SOUND, public)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_signature_that_does_not_fit_is_refused_and_named_nobodys(tmp_path, local, key, is_trusted):
    private, public = generate_keys()
    name = put_pack(local, key, signer=Signer(private))
    content = (tmp_path / name).read_bytes()
    start = content.index(struct.pack("<II", 0x184D2A51, 96)) + 8 + 32
    (tmp_path / name).write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    found = verify(local, name, trusted=TrustedKeys([public]) if is_trusted else ANYBODY)
    assert (found.state, found.signed_by) == (PackState.REFUSED, None)


def test_without_cryptography_a_signature_is_told_and_not_vouched_for(local, key, monkeypatch):
    private, public = generate_keys()
    name = put_pack(local, key, signer=Signer(private))
    for module in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, module, None)
    found = verify(local, name)
    assert (found.state, found.signed_by, found.head.signed_by) == (PackState.SOUND, None, public)


def test_a_pack_that_was_deleted_meanwhile_is_left_out(local, key):
    entry = entry_of(local, put_pack(local, key))
    local.delete(entry.name)
    assert verify_whole(local, entry, EVERYONE) is None
    assert verify_all(local, [entry], EVERYONE) == verify_heads(local, [entry], EVERYONE) == []


class Failing(LocalStore):
    """A store that lists and does not answer reads."""

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        raise StoreUnavailable(f"cannot read {name}: it hangs")


def test_a_pack_that_cannot_be_read_is_not_called_damaged(tmp_path, local, key):
    entry = entry_of(local, put_pack(local, key))
    found = verify_whole(Failing(Path(tmp_path)), entry, EVERYONE)
    assert (found.state, found.refusal.is_final) == (PackState.UNREADABLE, False)


def test_heads_come_in_the_order_of_the_packs(local, key):
    entries = [entry_of(local, put_pack(local, key, {"a": bytes([number])})) for number in range(20)]
    assert [pack.entry for pack in verify_heads(local, entries, EVERYONE)] == entries
