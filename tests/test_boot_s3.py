"""Boots over a real S3 protocol server, working and refusing."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from boots import ONE_CLASS, TESTS, Booted, boot_once, settings
from programs import run_program


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
