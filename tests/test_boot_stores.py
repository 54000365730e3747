"""Boots and what they share: buckets, layers, signatures, other versions, another boot that compiles the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from boots import ONE_CLASS, after, assert_fully_warm, boot_once, settings
from programs import run_program

from compile_cache.storage.catalog import read_catalog
from compile_cache.storage.pack.signing import generate_keys
from compile_cache.storage.prune import apply_prune, plan_prune
from compile_cache.storage.stores.local import LocalStore

DAY_S = 86_400


def one_class(folder: Path, **variables: str) -> dict[str, str]:
    return settings(folder, **variables) | ONE_CLASS


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """A folder whose store a cold boot has filled with signed packs, that boot, and the public key."""
    folder = tmp_path_factory.mktemp("signed")
    private, public = generate_keys()
    return folder, boot_once(one_class(folder, signing_key=private)), public


def test_layer_that_cannot_be_read_is_named_and_the_others_are_used(signed, tmp_path, closed_port):
    source, _, _ = signed
    layers = f"https://127.0.0.1:{closed_port}/mirror,{source / 'store'}"
    booted = boot_once(one_class(tmp_path, dir=str(source / "cache"), layers=layers))
    assert_fully_warm(booted)
    (problem,) = booted.report["restore"]["problems"]
    assert str(closed_port) in problem
    assert booted.report["publish"]["packs"] == 0, "a layer has them"


def test_read_only_fleet_with_the_public_key_is_warm_and_publishes_nothing(signed, tmp_path):
    source, _, public = signed
    layer = {"dir": str(source / "cache"), "layers": str(source / "store")}
    booted = boot_once(one_class(tmp_path, **layer, trusted_keys=public), "--again", "8")
    assert_fully_warm(booted)
    assert booted.report["publish"]["packs"] == 0
    assert booted.report["publish"]["failures"] == []


def test_successor_is_seeded_publishes_what_it_used_and_survives_the_pruning_of_its_predecessor(signed, tmp_path):
    source, first, _ = signed
    successor = after(source, tmp_path, model_version="2") | ONE_CLASS
    store = LocalStore(tmp_path / "store")
    (predecessor,) = read_catalog(store).versions
    seeded = boot_once(successor)
    assert_fully_warm(seeded)
    assert seeded.report["restore"]["outcome"] == "seeded"
    assert seeded.report["restore"]["seeded_from"] == predecessor.key.model_version
    assert seeded.report["publish"]["files"] > 0

    catalog = read_catalog(store)
    in_a_month = max(version.used_s for version in catalog.versions) + 30 * DAY_S
    apply_prune(store, plan_prune(catalog, in_a_month, keep_versions=1))
    assert [version.key.model_version for version in read_catalog(store).versions] == ["2"]

    again = boot_once(successor)
    assert_fully_warm(again)
    assert again.report["restore"]["outcome"] == "hit"
    assert again.output == first.output


def test_miss_in_a_new_environment_is_explained_by_what_differs(signed, tmp_path):
    source, _, _ = signed
    # The explanation is looked for while a boot imports torch.
    booted = boot_once(one_class(tmp_path, layers=str(source / "store")), "--restore-alone", forked=False)
    assert booted.report["restore"]["outcome"] == "miss"
    assert f"cache dir {source / 'cache'}/0 → {tmp_path / 'cache'}/0" in booted.report["restore"]["reason"]


def test_unreachable_store_costs_the_cache_and_not_the_boot(tmp_path, aws_variables, closed_port):
    endpoint = {"AWS_ENDPOINT_URL_S3": f"http://user:SECRET@127.0.0.1:{closed_port}"}
    booted = boot_once(one_class(tmp_path, store="s3://bucket/models") | endpoint)
    assert set(booted.steps.values()) == {"precompiled"}
    assert booted.report["restore"]["outcome"] == "failed"
    assert f"127.0.0.1:{closed_port}" in booted.report["restore"]["reason"]
    assert booted.report["publish"]["packs"] == 0
    assert len(set(booted.report["publish"]["failures"])) == 1
    assert "SECRET" not in f"{booted.log} {booted.report}"


WAITS_PUBLISHED = """
import json, os, sys
import compile_cache
for variables in json.loads(sys.argv[1]):
    environ = {**os.environ, **variables}
    with compile_cache.boot("toy", environ=environ) as boot:
        told = [boot.wait_published(0)]
    print(json.dumps([*told, boot.wait_published(60)]))
"""


def test_wait_published_tells_whether_all_is_stored(tmp_path, aws_variables, closed_port):
    given = [({}, [False, True]), ({"STORE": "s3://bucket"}, [False, False])]
    given += [({"PUBLISH": "false"}, [False, False]), ({"SCOPE": "off"}, [True, True])]
    variables = [{f"COMPILE_CACHE_{name}": value for name, value in each.items()} for each, _ in given]
    environ = {**settings(tmp_path), "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{closed_port}"}
    done = run_program(WAITS_PUBLISHED, json.dumps(variables), **environ)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [told for _, told in given], done.stderr
