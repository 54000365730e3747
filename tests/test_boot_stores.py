"""Boots and what they share: buckets, layers, signatures, other versions, another boot that compiles the same."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest
from boots import ONE_CLASS, TESTS, Booted, assert_fully_warm, boot_once, settings
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


# A real S3 protocol server, working and refusing.


def s3_settings(folder: Path, bucket: str) -> dict[str, str]:
    return settings(folder, store=f"s3://{bucket}/models")


def assert_cold_with_one_reason(environ: dict[str, str], *words: str) -> Booted:
    """The boot succeeds cold, and one line of its report says what was wrong with the store."""
    booted = boot_once(environ | ONE_CLASS)
    assert set(booted.steps.values()) == {"cold"}
    assert booted.report["restore"]["outcome"] == "failed"
    for word in words:
        assert word in booted.report["restore"]["reason"]
    assert booted.report["publish"]["packs"] == 0
    assert len(set(booted.report["publish"]["failures"])) == 1
    return booted


def test_unreachable_store_costs_the_cache_and_not_the_boot(tmp_path, aws_variables, closed_port):
    environ = {**s3_settings(tmp_path, "bucket"), "AWS_ENDPOINT_URL_S3": f"http://user:SECRET@127.0.0.1:{closed_port}"}
    booted = assert_cold_with_one_reason(environ, "AWS_ENDPOINT_URL_S3", str(closed_port))
    assert "SECRET" not in f"{booted.log} {booted.report}"


@pytest.fixture
def checking_credentials(s3_server):
    """The S3 server checks credentials while the test lasts."""

    def check(after_requests: str) -> None:
        url = f"{s3_server}/moto-api/reset-auth"
        request = urllib.request.Request(url, after_requests.encode(), {"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()

    check("0")
    yield
    check("inf")


def test_wrong_credentials_cost_the_cache_and_not_the_boot(tmp_path, s3_bucket, checking_credentials):
    environ = s3_settings(tmp_path, s3_bucket.name)
    assert_cold_with_one_reason(environ, "InvalidAccessKeyId", "check the credentials")


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


def test_boto3_is_imported_only_where_the_store_is_s3(tmp_path):
    code = (
        "import compile_cache, json, sys\n"
        "with compile_cache.boot('toy') as boot: pass\n"
        "print(json.dumps([name in sys.modules for name in ('boto3', 'torch._dynamo')]))"
    )
    done = run_program(code, folder=TESTS.parent, **settings(tmp_path))
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False], done.stderr
