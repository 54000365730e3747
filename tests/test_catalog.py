"""The catalog: what a listing says, whatever somebody has put into the store, and why a boot found nothing."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace

import pytest
from filled_stores import put_pack, put_record, set_age

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.catalog import (
    Catalog,
    Version,
    catalog_of,
    explain_miss,
    predecessors,
    read_catalog,
    read_record,
)
from compile_cache.storage.stores.base import StoredObject
from compile_cache.storage.stores.local import LocalStore

PACK = "a" * 64 + ".pack"
OTHER_PACK = "b" * 64 + ".pack"
FOLDER = "v2/0a/org--model/1/"


def listing(*names: str) -> Catalog:
    return catalog_of([StoredObject(name, 10, float(number)) for number, name in enumerate(names, 1)])


# Names.


def test_a_version_is_its_packs_and_its_other_objects():
    catalog = listing(FOLDER + PACK, FOLDER + OTHER_PACK, FOLDER + "used-2026-11-20", FOLDER + "notes.txt")
    (version,) = catalog.versions
    assert version.key == CacheKey("0a", "org--model", "1")
    assert [pack.name for pack in version.packs] == [FOLDER + PACK, FOLDER + OTHER_PACK]
    assert [other.name for other in version.others] == [FOLDER + "used-2026-11-20", FOLDER + "notes.txt"]
    assert version.size_bytes == catalog.size_bytes == 20


def test_a_version_is_as_new_as_its_newest_pack():
    assert listing(FOLDER + PACK, FOLDER + OTHER_PACK).versions[0].published_s == 2


def test_a_mark_of_use_counts_as_a_use_and_another_object_does_not():
    assert listing(FOLDER + PACK, FOLDER + "used-2026-11-20").versions[0].used_s == 2
    assert listing(FOLDER + PACK, FOLDER + "notes.txt").versions[0].used_s == 1


def test_a_version_without_packs_was_published_never():
    version = listing(FOLDER + "notes.txt").versions[0]
    assert version.packs == ()
    assert version.published_s == 0


def test_a_record_belongs_to_its_environment():
    assert listing("v2/0a/environment.json").records["0a"].name == "v2/0a/environment.json"


@pytest.mark.parametrize(
    "name",
    [
        "v2/readme.txt",
        "v2/0a/notes.json",
        "v2/0a/org--model/1/deeper/" + PACK,
        "v2/0a/org--model/1/" + PACK,
        "index.json",
        "v2/0a/../1/" + PACK,
        "v2/0a/.hidden/1/" + PACK,
        "v2/0a/org model/1/" + PACK,
        "v2/0a/\x1b[31mred/1/" + PACK,
        "v2/0a/two\nlines/1/" + PACK,
        "v2/\x1b]0;title\x07/environment.json",
        "v2/0a/org--model/1/\x1b[2J.pack",
        f"v2/0a/{'m' * 129}/1/{PACK}",
    ],
)
def test_what_no_boot_would_have_named_is_a_stranger(name):
    catalog = listing(name)
    assert [entry.name for entry in catalog.strangers] == [name]
    assert catalog.versions == ()
    assert catalog.records == {}


def test_what_is_no_pack_in_a_version_is_not_counted_as_one():
    (version,) = listing(FOLDER + "a.pack", FOLDER + PACK + ".part").versions
    assert version.packs == ()
    assert len(version.others) == 2


def test_a_store_of_each_kind_is_read_from_its_listing(store, key, environment):
    name = put_pack(store, key)
    put_record(store, environment)
    store.put("v2/readme.txt", b"hello")
    catalog = read_catalog(store)
    assert [(version.key, [pack.name for pack in version.packs]) for version in catalog.versions] == [(key, [name])]
    assert read_record(store, catalog, key.environment) == environment
    assert [entry.name for entry in catalog.strangers] == ["v2/readme.txt"]


def test_an_empty_store_has_nothing(local):
    assert read_catalog(local) == Catalog()
    assert Catalog().size_bytes == Version(CacheKey("e", "m", "v")).size_bytes == 0


# Records.


def record_of(local: LocalStore, content: bytes) -> Environment | None:
    """What is read of a record that an attacker has given the right name."""
    digest = hashlib.sha256(content).hexdigest()[:32]
    local.put(f"v2/{digest}/environment.json", content)
    return read_record(local, read_catalog(local), digest)


def with_value(environment: Environment, **values: object) -> bytes:
    return json.dumps({**asdict(environment), **values}).encode()


def test_a_record_is_read_as_it_was_written(local, environment):
    assert record_of(local, environment.to_json().encode()) == environment


def test_an_environment_without_a_record_or_with_that_of_another_digest_has_none(local, environment):
    assert read_record(local, read_catalog(local), "0a") is None
    local.put("v2/0a/environment.json", environment.to_json().encode())
    assert read_record(local, read_catalog(local), "0a") is None


@pytest.mark.parametrize(
    "values",
    [
        {"gpu": "\x1b[31mred"},
        {"gpu": "two\nlines"},
        {"gpu": "\u202ebackwards"},
        {"gpu": "half \ud800 a character"},
        {"gpu": {"a": "mapping"}},
        {"threads": [1, 2]},
        {"threads": True},
        {"variables": ["TRITON_A=\x1b[2J"]},
        {"variables": [["nested"]]},
        {"variables": 1},
        {"torch": None},
        {"gpu": "a" * (64 << 10)},
    ],
    ids=lambda values: str(values)[:60],
)
def test_a_record_that_cannot_be_shown_to_people_or_is_too_large_is_none(local, environment, values):
    assert record_of(local, with_value(environment, **values)) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 60_000, b'{"torch": 1e999}', b'{"torch": ' + b"9" * 5_000],
)
def test_a_record_that_is_no_record_is_none(local, content):
    assert record_of(local, content) is None


# Predecessors.


def test_predecessors_are_other_versions_newest_pack_first(tmp_path, local, key):
    now_s = time.time()
    for version, days in (("old", 3), ("new", 1), ("middle", 2), ("mine", 0)):
        name = put_pack(local, replace(key, model_version=version))
        set_age(tmp_path / "store", name, days, now_s)
    found = predecessors(local, replace(key, model_version="mine"))
    assert [other.model_version for other in found] == ["new", "middle", "old"]


def test_only_versions_of_this_model_and_environment_precede(local, key):
    put_pack(local, replace(key, model_name=key.model_name + "-2"))
    put_pack(local, replace(key, environment="0" * 32))
    local.put(replace(key, model_version="noted").prefix + "notes.txt", b"{}")
    assert predecessors(local, replace(key, model_version="mine")) == []


# Why nothing was found.


def test_in_an_empty_store_no_version_is_stored(local, key, environment):
    assert explain_miss(local, key, environment) == "no version of org--model is stored"


def test_a_model_that_is_not_there_is_answered_with_those_that_are(local, key, environment):
    for name in ("b", "a"):
        put_pack(local, replace(key, model_name=name))
    assert explain_miss(local, key, environment) == "no version of org--model is stored, only a, b"


def test_a_version_that_is_not_there_is_named(local, key, environment):
    put_pack(local, replace(key, model_version="2"))
    assert explain_miss(local, key, environment) == "version version-1 of org--model is not stored"


def test_packs_of_the_version_that_cannot_be_used_are_not_called_absent(local, key, environment):
    put_pack(local, key)
    line = explain_miss(local, key, environment)
    assert line == "none of the packs stored for version version-1 of org--model can be used"


def test_another_environment_is_explained_by_what_differs(local, key, environment):
    put_pack(local, key)
    put_record(local, environment)
    now = replace(environment, torch="2.13.0+cu130", triton="3.8.0")
    line = explain_miss(local, replace(key, environment=now.digest), now)
    assert line == ("stored for another environment: torch 2.11.0+cu130 → 2.13.0+cu130, Triton 3.6.0 → 3.8.0")


def test_of_several_environments_the_one_with_this_very_version_explains(local, key, environment):
    exact, other = replace(environment, gpu="Exact"), replace(environment, gpu="Other")
    for stored, version in ((exact, key.model_version), (other, "newer")):
        put_pack(local, replace(key, environment=stored.digest, model_version=version))
        put_record(local, stored)
    assert explain_miss(local, key, environment).endswith(": GPU Exact → NVIDIA H100 80GB HBM3")


def test_a_forged_record_explains_nothing_and_is_not_shown(local, key, environment):
    elsewhere = replace(environment, gpu="")
    put_pack(local, replace(key, environment=elsewhere.digest))
    local.put(f"v2/{elsewhere.digest}/environment.json", with_value(environment, gpu="\x1b[31m"))
    line = explain_miss(local, key, environment)
    assert line == "org--model is stored for another environment, whose record cannot be read"
