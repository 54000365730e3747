"""The catalog: what a listing says, whatever somebody has put into the store, and why a boot found nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import pytest
from filled_stores import put_pack, put_record
from machines import Watched

from compile_cache.errors import StoreAccessDenied
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.catalog import Catalog, catalog_of, explain_miss, read_catalog, read_record
from compile_cache.storage.stores.base import StoredObject

PACK = "a" * 64 + ".pack"
OTHER_PACK = "b" * 64 + ".pack"
FOLDER = "v3/0a/org--model/1/"


def listing(*names: str) -> Catalog:
    return catalog_of([StoredObject(name, 10, float(number)) for number, name in enumerate(names, 1)])


# Names.


def test_a_version_is_its_packs_and_its_marks():
    catalog = listing(FOLDER + PACK, FOLDER + OTHER_PACK, FOLDER + "used-2026-11-20", FOLDER + "notes.txt")
    (version,) = catalog.versions
    assert version.key == CacheKey("0a", "org--model", "1")
    assert [pack.name for pack in version.packs] == [FOLDER + PACK, FOLDER + OTHER_PACK]
    assert [mark.name for mark in version.marks] == [FOLDER + "used-2026-11-20"]
    assert version.size_bytes == 20


@pytest.mark.parametrize(
    ("names", "published_s", "used_s"),
    [
        ([PACK, OTHER_PACK], 2, 2),
        ([PACK, "used-2026-11-20"], 1, 2),
        ([PACK, "notes.txt"], 1, 1),
        (["used-2026-11-20"], 0, 1),
    ],
)
def test_a_version_is_as_new_as_its_newest_pack_and_was_used_when_it_was_marked(names, published_s, used_s):
    (version,) = listing(*(FOLDER + name for name in names)).versions
    assert (version.published_s, version.used_s, bool(version.packs)) == (published_s, used_s, published_s > 0)


@pytest.mark.parametrize(
    "name",
    [
        "v3/readme.txt",
        "v3/0a/notes.json",
        "v3/0a/environment-json",
        "v3/0a/org--model/1/notes.txt",
        "v3/0a/org--model/1/a.pack",
        "v3/0a/org--model/1/" + PACK + ".part",
        "v3/0a/org--model/1/deeper/" + PACK,
        "v1/0a/org--model/1/" + PACK,
        "index.json",
        "v3/0a/../1/" + PACK,
        "v3/0a/.hidden/1/" + PACK,
        "v3/0a/org model/1/" + PACK,
        "v3/0a/\x1b[31mred/1/" + PACK,
        "v3/0a/two\nlines/1/" + PACK,
        "v3/\x1b]0;title\x07/environment.json",
        "v3/0a/org--model/1/\x1b[2J.pack",
        f"v3/0a/{'m' * 129}/1/{PACK}",
    ],
)
def test_what_no_boot_would_have_named_is_left_out(name):
    catalog = listing(name)
    assert catalog.versions == ()
    assert catalog.records == {}


# Records.


def with_value(environment: Environment, **values: object) -> bytes:
    return json.dumps({**asdict(environment), **values}).encode()


def test_an_environment_without_a_record_or_with_that_of_another_digest_has_none(local, environment):
    assert read_record(local, read_catalog(local), "0a") is None
    local.put("v3/0a/environment.json", environment.to_json().encode())
    assert read_record(local, read_catalog(local), "0a") is None


@pytest.mark.parametrize(
    "content",
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
        *(b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 60_000, b'{"torch": 1e999}', b'{"torch": ' + b"9" * 5_000),
    ],
    ids=lambda content: str(content)[:60],
)
def test_a_record_that_is_none_or_cannot_be_shown_to_people_or_is_too_large_is_none(local, environment, content):
    """An attacker has given it the right name."""
    content = content if isinstance(content, bytes) else with_value(environment, **content)
    digest = hashlib.sha256(content).hexdigest()[:32]
    local.put(f"v3/{digest}/environment.json", content)
    assert read_record(local, read_catalog(local), digest) is None


def test_a_record_that_the_store_does_not_give_is_none(tmp_path, local, environment):
    def fail(*_: object) -> None:
        raise StoreAccessDenied("403")

    local.put(f"v3/{environment.digest}/environment.json", environment.to_json().encode())
    assert read_record(local, read_catalog(local), environment.digest) == environment
    assert read_record(Watched(local.location, read=fail), read_catalog(local), environment.digest) is None


# Why nothing was found.


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ([], "no version of org--model is stored"),
        ([{"model_name": "b"}, {"model_name": "a"}], "no version of org--model is stored, only a, b"),
        ([{"model_version": "2"}], "version version-1 of org--model is not stored"),
        ([{}], "none of the packs stored for version version-1 of org--model can be used"),
        (
            [{"torch": "2.13.0+cu130", "triton": "3.8.0"}],
            "stored for another environment: torch 2.13.0+cu130 → 2.11.0+cu130, triton 3.8.0 → 3.6.0",
        ),
        # Of several environments, the one with this very version explains.
        (
            [{"gpu": "Exact"}, {"gpu": "Other", "model_version": "newer"}],
            "stored for another environment: gpu Exact → NVIDIA H100 80GB HBM3",
        ),
    ],
)
def test_a_miss_is_explained_by_the_nearest_that_is_stored(local, key, environment, stored, said):
    for values in stored:
        names = {name: value for name, value in values.items() if name.startswith("model_")}
        record = replace(environment, **{name: value for name, value in values.items() if name not in names})
        put_pack(local, replace(key, environment=record.digest, **names))
        put_record(local, record)
    assert explain_miss(local, key, environment) == said


def test_a_forged_record_explains_nothing_and_is_not_shown(local, key, environment):
    elsewhere = replace(environment, gpu="")
    put_pack(local, replace(key, environment=elsewhere.digest))
    local.put(f"v3/{elsewhere.digest}/environment.json", with_value(environment, gpu="\x1b[31m"))
    line = explain_miss(local, key, environment)
    assert line == "org--model is stored for another environment, whose record cannot be read"
