"""Refused packs are remembered: for the object as it was listed and the rules it was judged by, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_packs import OURS, THEIRS

from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import TrustedKeys
from compile_cache.store.base import StoredObject
from compile_cache.versions.refused_earlier import RefusedEarlier
from compile_cache.versions.rules import Rules

ENTRY = StoredObject("v1/environment/model/version/name.pack", 1000, 1_700_000_000.25)
LIMITS = Limits()
NOBODY = TrustedKeys()
REASON = "its frame is damaged"


def refused_earlier(
    folder: Path, location: str = "s3://bucket", limits: Limits = LIMITS, trusted: TrustedKeys = NOBODY
) -> RefusedEarlier:
    """As a later boot makes it."""
    return RefusedEarlier(folder / "refused", location, Rules(limits, trusted))


def record_in(folder: Path) -> Path:
    (record,) = (folder / "refused").iterdir()
    return record


def test_nothing_is_refused_before_it_was_judged(tmp_path):
    assert refused_earlier(tmp_path).reason(ENTRY) is None


def test_a_later_boot_knows_the_reason_and_that_it_is_an_earlier_boots(tmp_path):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    assert refused_earlier(tmp_path).reason(ENTRY) == f"{REASON} (found by an earlier boot)"


def test_what_a_boot_was_told_and_remembers_again_does_not_grow(tmp_path):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    for _ in range(3):
        told = refused_earlier(tmp_path).reason(ENTRY)
        refused_earlier(tmp_path).remember(ENTRY, told)
    assert refused_earlier(tmp_path).reason(ENTRY) == f"{REASON} (found by an earlier boot)"


@pytest.mark.parametrize(
    "other",
    [
        replace(ENTRY, name="v1/environment/model/version/other.pack"),
        replace(ENTRY, size_bytes=1001),
        replace(ENTRY, modified_s=ENTRY.modified_s + 0.5),
    ],
    ids=["name", "size", "time"],
)
def test_another_object_or_a_replaced_one_is_judged_anew(tmp_path, other):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    assert refused_earlier(tmp_path).reason(other) is None


@pytest.mark.parametrize(
    "rules",
    [
        {"location": "s3://another"},
        {"limits": replace(LIMITS, size_bytes=LIMITS.size_bytes + 1)},
        {"limits": replace(LIMITS, files=LIMITS.files + 1)},
        {"trusted": TrustedKeys([OURS.public_key])},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_another_store_or_other_rules_judge_anew(tmp_path, rules):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    assert refused_earlier(tmp_path, **rules).reason(ENTRY) is None


def test_the_same_trusted_keys_in_another_order_are_the_same_rules(tmp_path):
    ours, theirs = OURS.public_key, THEIRS.public_key
    refused_earlier(tmp_path, trusted=TrustedKeys([ours, theirs])).remember(ENTRY, REASON)
    assert refused_earlier(tmp_path, trusted=TrustedKeys([theirs, ours])).reason(ENTRY) is not None


def test_another_pack_format_judges_anew(tmp_path, monkeypatch):
    """A pack that is too new for this version is not too new for the next one."""
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    monkeypatch.setattr("compile_cache.versions.refused_earlier.PACK_VERSION", 2)
    assert refused_earlier(tmp_path).reason(ENTRY) is None


def test_each_object_has_its_own_reason(tmp_path):
    other = replace(ENTRY, size_bytes=1)
    refused_earlier(tmp_path).remember(ENTRY, "one")
    refused_earlier(tmp_path).remember(other, "two")
    assert [refused_earlier(tmp_path).reason(entry).split()[0] for entry in (ENTRY, other)] == ["one", "two"]


def test_a_record_says_to_people_what_it_is_about(tmp_path):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    assert json.loads(record_in(tmp_path).read_text()) == {"store": "s3://bucket", "name": ENTRY.name, "reason": REASON}


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b'{"reason": "its fr', b"[]", b"null", b'"text"', b"{}", b"\xff\xfe"], ids=ascii
)
def test_a_damaged_record_is_ignored_and_written_anew(tmp_path, damaged):
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    record_in(tmp_path).write_bytes(damaged)
    assert refused_earlier(tmp_path).reason(ENTRY) is None
    refused_earlier(tmp_path).remember(ENTRY, REASON)
    assert refused_earlier(tmp_path).reason(ENTRY) == f"{REASON} (found by an earlier boot)"


def test_any_text_can_be_a_reason(tmp_path):
    refused_earlier(tmp_path).remember(ENTRY, "é \ud800 \0 \n")
    assert refused_earlier(tmp_path).reason(ENTRY).startswith("é \ud800 \0 \n")


@pytest.fixture
def closed_folder(tmp_path) -> Path:
    tmp_path.chmod(0o500)
    return tmp_path


def test_a_folder_that_cannot_be_written_is_an_oserror(closed_folder, not_root):
    with pytest.raises(PermissionError, match="refused"):
        refused_earlier(closed_folder).remember(ENTRY, REASON)


def test_a_folder_that_cannot_be_read_has_nothing(tmp_path):
    (tmp_path / "refused").write_text("a file")
    assert refused_earlier(tmp_path).reason(ENTRY) is None
    with pytest.raises(OSError, match="refused"):
        refused_earlier(tmp_path).remember(ENTRY, REASON)
