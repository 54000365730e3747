"""Boots in company: layers, signatures, other versions, another boot that compiles the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from boots import ONE_CLASS, assert_fully_warm, boot_once, settings

from compile_cache.storage.catalog import read_catalog
from compile_cache.storage.pack.signing import generate_keys
from compile_cache.storage.prune import PrunePolicy, apply_prune, plan_prune
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


def from_layer(signed, folder: Path, **variables: str) -> dict[str, str]:
    """Settings of a boot that finds the signed packs in a layer, and has the same cache directory."""
    source, _, _ = signed
    return one_class(folder, dir=str(source / "cache"), layers=str(source / "store"), **variables)


def test_boot_restores_from_a_layer_and_publishes_nothing_that_is_there(signed, tmp_path):
    booted = boot_once(from_layer(signed, tmp_path))
    assert_fully_warm(booted)
    assert booted.report["publish"]["packs"] == 0
    assert not list(tmp_path.glob("store/**/*.pack"))


def test_layer_that_cannot_be_read_is_named_and_the_others_are_used(signed, tmp_path, closed_port):
    source, _, _ = signed
    layers = f"https://127.0.0.1:{closed_port}/mirror,{source / 'store'}"
    booted = boot_once(one_class(tmp_path, dir=str(source / "cache"), layers=layers))
    assert_fully_warm(booted)
    (problem,) = booted.report["restore"]["problems"]
    assert str(closed_port) in problem


def test_read_only_fleet_with_the_public_key_is_warm_and_publishes_nothing(signed, tmp_path):
    booted = boot_once(from_layer(signed, tmp_path, trusted_keys=signed[2]), "--again", "8")
    assert_fully_warm(booted)
    assert booted.report["publish"]["packs"] == 0
    assert booted.report["publish"]["failures"] == []


def test_successor_is_seeded_publishes_what_it_used_and_survives_the_pruning_of_its_predecessor(signed, tmp_path):
    source, first, _ = signed
    shutil.copytree(source / "store", tmp_path / "store")
    store = LocalStore(tmp_path / "store")
    (predecessor,) = read_catalog(store).versions
    successor = one_class(tmp_path, dir=str(source / "cache"), model_version="2")
    seeded = boot_once(successor)
    assert_fully_warm(seeded)
    assert seeded.report["restore"]["outcome"] == "seeded"
    assert seeded.report["restore"]["seeded_from"] == predecessor.key.model_version
    assert seeded.report["publish"]["files"] > 0

    catalog = read_catalog(store)
    in_a_month = max(version.used_s for version in catalog.versions) + 30 * DAY_S
    apply_prune(store, plan_prune(catalog, PrunePolicy(keep_versions=1), in_a_month))
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
