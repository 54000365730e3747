"""Relatives: the calls that a model's other versions, and its artifacts for other environments, were made of."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blocks import Batched, Block
from filled_stores import damage, put_pack, set_age
from precompiling import activated, artifacts, boot, build, tensor, warm_up

from compile_cache.aot.call_inputs import make_call
from compile_cache.aot.describe import signature
from compile_cache.aot.files import read_artifact, write_artifact
from compile_cache.errors import StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import Signer, TrustedKeys, generate_keys
from compile_cache.store.base import StoredObject, Stores
from compile_cache.versions import relatives as relatives_module
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.catalog import catalog_of
from compile_cache.versions.directory import CacheDirectory
from compile_cache.versions.relatives import calls_of_relatives, relatives
from compile_cache.versions.rules import Rules

NOW_S = 1_800_000_000.0
PACK = "a" * 64 + ".pack"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files of a cold boot's artifacts, by path: of a block of 4 and of a batched one."""
    with activated(tmp_path_factory.mktemp("made")) as directory:
        block, batched = build(Block), build(Batched)
        warm_up(boot(directory, block, batched), lambda: [block(tensor(), by=2.0), batched(tensor(1, 4, 16))])
        paths = artifacts(directory)
        yield {path.relative_to(directory.path).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def cache_of(tmp_path, key, environment):
    """A new boot's cache over a store."""

    def make(store, **rules) -> CompileCache:
        directory = CacheDirectory.claim(tmp_path / "machine")
        return CompileCache(Stores(store, store), key, environment, directory, Rules(Limits(), **rules))

    return make


def artifact(made, tmp_path, number, payload=None, class_name="a.Class"):
    """The file of an artifact whose call is `[number]`, by its path."""
    source = next(iter(made))
    local = tmp_path / "sources" / Path(source).name
    local.parent.mkdir(exist_ok=True)
    local.write_bytes(made[source])
    key, record, function = read_artifact(local)
    group = f"precompiled/{number:032x}"
    name = write_artifact(
        tmp_path / "sources" / group, {**key, "class": class_name}, record, payload or function, [number]
    )
    return {f"{group}/{name}": (tmp_path / "sources" / group / name).read_bytes()}


def names_of(calls):
    return [call.call for call in calls]


# Which.


def version(environment, name, used_s, model="org--model"):
    return StoredObject(f"v1/{environment}/{model}/{name}/{PACK}", 10, used_s)


def chosen(*entries):
    key = CacheKey("own", "org--model", "mine")
    return [(v.key.environment, v.key.model_version) for v in relatives(catalog_of(entries), key)]


def test_relatives_are_of_the_same_model_and_not_the_key_itself():
    entries = [version("own", "mine", 5), version("own", "other", 4), version("own", "x", 3, "org--model-2")]
    assert chosen(*entries) == [("own", "other")]


def test_the_relative_that_was_used_last_comes_first():
    use = StoredObject("v1/gpu/org--model/old/used-2026-11-22", 0, 9.0)
    assert chosen(version("own", "new", 5), version("gpu", "old", 1), use) == [("gpu", "old"), ("own", "new")]


def test_of_another_environment_only_the_version_used_last_is_a_relative():
    assert chosen(version("gpu", "1", 1), version("gpu", "mine", 3), version("gpu", "2", 2)) == [("gpu", "mine")]


def test_there_are_at_most_three_other_versions_and_three_other_environments():
    own = [version("own", str(number), number) for number in range(1, 6)]
    foreign = [version(f"gpu{number}", "1", 100 + number) for number in range(1, 6)]
    assert chosen(*own, *foreign) == [
        ("gpu5", "1"),
        ("gpu4", "1"),
        ("gpu3", "1"),
        ("own", "5"),
        ("own", "4"),
        ("own", "3"),
    ]


def test_a_version_without_packs_is_no_relative():
    assert chosen(StoredObject("v1/own/org--model/other/compile.lease", 10, 1.0)) == []


# What they name.


@pytest.mark.parametrize("changed", [{"environment": "0" * 32}, {"model_version": "earlier"}], ids=["gpu", "version"])
def test_a_boot_without_artifacts_learns_the_calls_of_its_relatives(store, key, made, cache_of, changed):
    put_pack(store, replace(key, **changed), {"ab/kernel.so": b"\x7fELF" * 1000, **made})
    cache = cache_of(store)
    calls = {call.class_name: call for call in calls_of_relatives(cache)}
    assert set(calls) == {"blocks.Block", "blocks.Batched"}
    args, kwargs = make_call(calls["blocks.Block"].call)
    assert signature(args, kwargs, True) == signature((tensor(),), {"by": 2.0}, True)
    assert calls["blocks.Block"].switches["inference mode"] == "True"
    assert not list(cache.staging.iterdir()), "what was fetched is removed"


def test_a_store_without_relatives_has_no_calls(store, key, made, cache_of):
    put_pack(store, key, made)
    put_pack(store, replace(key, model_name="another"), made)
    assert calls_of_relatives(cache_of(store)) == []


def test_a_relatives_calls_make_artifacts_that_a_boot_finds(local, key, made, cache_of, tmp_path):
    put_pack(local, replace(key, environment="0" * 32), made)
    (call,) = [call for call in calls_of_relatives(cache_of(local)) if call.class_name == "blocks.Batched"]
    args, kwargs = make_call(call.call)
    with activated(tmp_path / "next") as directory:
        batched = build(Batched)
        warm_up(boot(directory, batched), lambda: batched(*args, **kwargs))
        (path,) = artifacts(directory)
        assert path.relative_to(directory.path).as_posix() in made


def test_each_call_is_there_once_in_the_order_of_the_last_use(local, key, made, cache_of, tmp_path):
    one, two, three = (artifact(made, tmp_path, number) for number in (1, 2, 3))
    for days, (environment, files) in enumerate({"0" * 32: two, "1" * 32: one | two, "2" * 32: three | two}.items(), 1):
        name = put_pack(local, replace(key, environment=environment), files)
        set_age(tmp_path / "store", name, days, NOW_S)
    assert names_of(calls_of_relatives(cache_of(local))) == [[2], [1], [3]]


def test_of_one_version_the_pack_that_was_stored_last_comes_first(local, key, made, cache_of, tmp_path):
    other = replace(key, model_version="earlier")
    for days, number in ((3, 1), (1, 2), (2, 3)):
        name = put_pack(local, other, artifact(made, tmp_path, number))
        set_age(tmp_path / "store", name, days, NOW_S)
    assert names_of(calls_of_relatives(cache_of(local))) == [[2], [3], [1]]


def test_packs_that_nobody_trusted_signed_name_nothing(store, key, made, cache_of, tmp_path):
    (private, public), (strange, _) = generate_keys(), generate_keys()
    other = replace(key, environment="0" * 32)
    put_pack(store, other, artifact(made, tmp_path, 1), Signer(strange))
    put_pack(store, other, artifact(made, tmp_path, 2), Signer(private))
    put_pack(store, other, artifact(made, tmp_path, 3))
    assert names_of(calls_of_relatives(cache_of(store, trusted=TrustedKeys([public])))) == [[2]]


def test_a_damaged_pack_names_nothing_and_costs_no_other(local, key, made, cache_of, tmp_path):
    other = replace(key, environment="0" * 32)
    damage(tmp_path / "store", put_pack(local, other, artifact(made, tmp_path, 1)))
    put_pack(local, other, artifact(made, tmp_path, 2))
    assert names_of(calls_of_relatives(cache_of(local))) == [[2]]


def test_a_damaged_artifact_in_a_sound_pack_is_left_out(local, key, made, cache_of, tmp_path):
    (path,) = artifact(made, tmp_path, 1)
    files = {path: b"damaged", **artifact(made, tmp_path, 2)}
    put_pack(local, replace(key, environment="0" * 32), files)
    assert names_of(calls_of_relatives(cache_of(local))) == [[2]]


def test_only_artifacts_are_read(local, key, made, cache_of, tmp_path):
    (path,), (content,) = artifact(made, tmp_path, 1), artifact(made, tmp_path, 1).values()
    odd = [path.replace("precompiled", "elsewhere"), path + ".txt", f"precompiled/{path}", path.replace("0", "z")]
    put_pack(local, replace(key, environment="0" * 32), dict.fromkeys(odd, content))
    assert calls_of_relatives(cache_of(local)) == []


class Counting:
    """A store that counts the bytes that are read of it."""

    def __init__(self, store) -> None:
        self._store = store
        self.read_bytes = 0
        self.location, self.list = store.location, store.list

    def read(self, name, start=0, size_bytes=None):
        content = self._store.read(name, start, size_bytes)
        self.read_bytes += len(content)
        return content


def test_what_is_no_artifact_is_not_fetched(local, key, made, cache_of, tmp_path):
    kernel = torch.randint(256, (8 << 20,), dtype=torch.uint8).numpy().tobytes()
    put_pack(local, replace(key, environment="0" * 32), {"ab/kernel.so": kernel, **artifact(made, tmp_path, 1)})
    counting = Counting(local)
    assert names_of(calls_of_relatives(cache_of(counting))) == [[1]]
    assert counting.read_bytes < 1 << 20


def test_artifacts_are_bounded_in_number_over_all_relatives(local, key, made, cache_of, tmp_path, monkeypatch):
    monkeypatch.setattr(relatives_module, "MOST_ARTIFACTS", 3)
    for days, environment in enumerate(("0" * 32, "1" * 32), 1):
        files = artifact(made, tmp_path, 2 * days) | artifact(made, tmp_path, 2 * days + 1)
        name = put_pack(local, replace(key, environment=environment), files)
        set_age(tmp_path / "store", name, days, NOW_S)
    assert names_of(calls_of_relatives(cache_of(local))) == [[2], [3], [4]]


def test_artifacts_are_bounded_in_bytes_over_all_relatives(local, key, made, cache_of, tmp_path, monkeypatch):
    monkeypatch.setattr(relatives_module, "MOST_BYTES", 5 << 20)
    for days, environment in enumerate(("0" * 32, "1" * 32, "2" * 32), 1):
        size_bytes = 1 << 20 if days == 3 else 3 << 20
        name = put_pack(local, replace(key, environment=environment), artifact(made, tmp_path, days, b"0" * size_bytes))
        set_age(tmp_path / "store", name, days, NOW_S)
    assert names_of(calls_of_relatives(cache_of(local))) == [[1], [3]]


def test_a_relative_that_cannot_be_read_costs_no_other(local, key, made, cache_of, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "compile_cache")
    for number, environment in ((1, "0" * 32), (2, "1" * 32)):
        put_pack(local, replace(key, environment=environment), artifact(made, tmp_path, number))
    listing = local.list

    def list_but_one(prefix):
        if "0" * 32 in prefix:
            raise StoreError("not this one")
        return listing(prefix)

    monkeypatch.setattr(local, "list", list_but_one)
    assert names_of(calls_of_relatives(cache_of(local))) == [[2]]
    assert "not this one" in caplog.text


def test_a_search_that_is_abandoned_ends(local, key, made, cache_of, tmp_path):
    put_pack(local, replace(key, environment="0" * 32), artifact(made, tmp_path, 1))
    abandoned = threading.Event()
    abandoned.set()
    cache = cache_of(local)
    with pytest.raises(StoreError):
        calls_of_relatives(cache, abandoned)
    assert not list(cache.staging.iterdir())


def test_a_store_that_cannot_be_listed_is_an_error_of_the_store(s3_bucket, cache_of):
    from compile_cache.store.s3 import S3Store

    with pytest.raises(StoreError):
        calls_of_relatives(cache_of(S3Store("no-such-bucket", "", s3_bucket.endpoint_url)))


def test_a_relative_leaves_this_boots_own_restore_as_it_is(local, key, made, cache_of, tmp_path):
    own = artifact(made, tmp_path, 1)
    put_pack(local, key, own)
    put_pack(local, replace(key, environment="0" * 32), artifact(made, tmp_path, 2))
    cache = cache_of(local)
    calls_of_relatives(cache)
    fetched = cache.fetch()
    assert set(fetched.files) == set(own)
