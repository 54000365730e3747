"""The restore beside the loading of the weights: how long a boot waits for it, and from where it is seeded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from boots import settings
from filled_stores import damage, put_pack
from signing_keys import make_keys

from compile_cache.errors import StoreUnavailable
from compile_cache.key.cache_key import CacheKey, environment_for, key_for
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory, is_claimed
from compile_cache.storage.fetch import PacksOfKey
from compile_cache.storage.pack.signing import Signer
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.stores.local import LocalStore


def prepare(tmp_path: Path, **settings: object) -> tuple[Callable[..., Restore], CacheKey]:
    """What begins a restore, and its key."""
    import torch

    directory = CacheDirectory.claim(tmp_path / "cache")
    told = Settings(dir=str(tmp_path / "cache"), model_name="model", model_version="1", **settings)
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    key = key_for(told, environment_for(told, directory.path, environ), "model", ())
    return lambda at_miss=int: Restore(told, directory, "model", (), environ, at_miss=at_miss), key


def test_a_new_version_is_seeded_from_the_written_store_and_not_from_a_layer(tmp_path):
    """So a new version rolls a read-only layer back."""
    for folder, outcome in (("store", "seeded"), ("layer", "miss")):
        root = tmp_path / folder
        begin, key = prepare(root, store=str(root / "store"), layers=(str(root / "layer"),))
        put_pack(LocalStore(root / folder), replace(key, model_version="0"))
        assert begin().join()[0].outcome == outcome


@pytest.mark.parametrize(
    ("version", "is_damaged", "outcome", "begun"),
    [("1", False, "hit", 0), ("1", True, "miss", 1), ("0", False, "seeded", 0), ("", False, "failed", 1)],
)
def test_the_second_process_begins_early_if_there_are_no_files_that_it_could_copy(
    tmp_path, version, is_damaged, outcome, begun
):
    root, at_miss = tmp_path / "store", mock.Mock()
    begin, key = prepare(tmp_path, store=str(root))
    if version:
        name = put_pack(LocalStore(root), replace(key, model_version=version))
        damage(root, name) if is_damaged else None
    else:
        root.write_text("no folder")
    assert begin(at_miss).join()[0].outcome == outcome
    assert at_miss.call_count == begun


def test_a_refused_pack_is_named_though_the_store_of_other_versions_fails(tmp_path):
    begin, key = prepare(tmp_path, store=str(tmp_path / "store"), layers=(str(tmp_path / "layer"),))
    name = put_pack(LocalStore(tmp_path / "layer"), key)
    damage(tmp_path / "layer", name)
    (tmp_path / "store").write_text("no folder")
    report, _ = begin().join()
    assert report.outcome == "failed"
    assert [refused.name for refused in report.refused] == [name]


def test_a_key_that_is_not_known_in_time_fails_the_restore(tmp_path, monkeypatch):
    over = threading.Event()

    def know(*_: object) -> None:
        over.wait(60)
        raise StoreUnavailable("too late")

    monkeypatch.setattr("compile_cache.lifecycle.restore._know", know)
    begin, _ = prepare(tmp_path, store=str(tmp_path / "store"), restore_timeout_s=0.01)
    report, _ = begin().join()
    over.set()
    assert (report.outcome, "did not deliver the packs within 0.01 s" in report.reason) == ("failed", True)


# Without torch, so that another process restores.
BEGUN = """
import os, socket, sys, threading, time
from pathlib import Path
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

settings = Settings.from_env(os.environ)
sys.executable = os.environ.get("PYTHON", sys.executable)
socket.setdefaulttimeout(0.001)  # as programs do that call other servers
restore = Restore(settings, CacheDirectory.claim(Path(settings.dir)), "model", (), os.environ)
"""


OVER = "[thread.join(60) for thread in threading.enumerate()[1:]]"


def begun(then: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    """A process that begins a restore."""
    return subprocess.Popen([sys.executable, "-c", BEGUN + then], env=environ, stdout=subprocess.PIPE, text=True)


def test_another_process_restores_and_this_one_publishes(tmp_path, s3_bucket):
    private, public = make_keys("own")
    url = f"s3://{s3_bucket.name}/cache"
    environ = settings(tmp_path, store=url, signing_key=private) | {"OMP_NUM_THREADS": "1"}
    told = Settings.from_env(environ)
    key = key_for(told, environment_for(told, tmp_path / "cache" / "0", environ), "model", ())
    put_pack(open_url(url), key, signer=Signer(private))
    then = """
while not restore.has_ended:
    time.sleep(0.01)
print({"torch", "boto3"} & {*sys.modules})
report, publication = restore.join()
print(report.outcome, len(publication.packs.list()), publication.packs.rules.signer.public_key)
"""
    with begun(then, environ) as process:
        assert process.communicate()[0].splitlines() == ["set()", f"hit 1 {public}"]


def test_a_relative_store_is_of_the_folder_in_which_the_boot_began(tmp_path):
    with begun("os.chdir('/')\nrestore._wait()\nprint(restore.location)", settings(tmp_path, store="store")) as process:
        assert process.communicate()[0] == f"{Path('store').absolute()}\n"


@pytest.mark.parametrize(
    ("python", "told"), [("/no/python", "no version of model is stored"), ("/bin/false", "has ended")]
)
def test_what_another_process_cannot_do_this_one_does_but_not_if_that_has_begun(tmp_path, python, told):
    then = f"{OVER}\nprint(restore.explanation or restore.join()[0].reason)"
    with begun(then, {**settings(tmp_path), "PYTHON": python}) as process:
        assert told in process.communicate()[0]


def test_why_the_other_process_cannot_restore_is_said(tmp_path):
    keys = {"signing_key": make_keys("own")[0], "trusted_keys": make_keys("another")[1]}
    with begun("print(restore.join()[0].reason)", settings(tmp_path, store=str(tmp_path / "store"), **keys)) as process:
        assert "SIGNING_KEY is not trusted here" in process.communicate()[0]


def test_a_restore_for_which_the_disk_is_too_small_leaves_no_file(tmp_path, monkeypatch):
    def fill(packs: PacksOfKey, inbox: Path) -> None:
        (inbox / "half").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compile_cache.lifecycle.restore.fetch", fill)
    begin, _ = prepare(tmp_path, store=str(tmp_path / "store"))
    report, _ = begin().join()
    assert (report.outcome, "No space left" in report.reason) == ("failed", True)
    assert [*tmp_path.rglob("half")] == []


def test_what_cannot_be_explained_is_a_miss_all_the_same(tmp_path, monkeypatch):
    explain = mock.Mock(side_effect=StoreUnavailable("not now"))
    monkeypatch.setattr("compile_cache.lifecycle.restore.explain_miss", explain)
    begin, _ = prepare(tmp_path, store=str(tmp_path / "store"))
    assert begin().join()[0].outcome == "miss"


END = f"""
while restore.location == settings.store:
    time.sleep(0.01)
restore.abandon()
{OVER}
print(threading.active_count())
"""


def test_the_other_process_ends_with_this_one_or_once_it_is_not_wanted(tmp_path, aws_variables, no_proxy):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environ = {**settings(tmp_path, store="s3://bucket"), "AWS_ENDPOINT_URL_S3": url}
        with begun("time.sleep(60)", environ) as process:
            silent.accept()[0].close()  # it asks
            process.kill()
        while is_claimed(tmp_path / "cache" / "0"):  # the test has a time limit
            time.sleep(0.02)
        with begun(END, environ) as process:
            assert process.communicate()[0] == "1\n"
