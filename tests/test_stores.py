"""Object stores: every kind does the same, and says what to do where it cannot."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_cache.errors import (
    ObjectNotFound,
    SettingsError,
    StoreAccessDenied,
    StoreError,
    StoreUnavailable,
)
from compile_cache.settings import Settings
from compile_cache.store import ObjectStore, open_store
from compile_cache.store.local import LocalStore
from compile_cache.store.s3 import S3Store

# The pattern of compile_cache.publisher: a daemon thread, started long before, which an exit hook lets finish.
PUT_AT_EXIT = """
import atexit, sys, threading
from compile_cache.settings import Settings
from compile_cache.store import open_store
store = open_store(Settings(store=sys.argv[1], s3_endpoint_url=sys.argv[2] or None))
closing = threading.Event()
def put():
    closing.wait()
    store.put("v1/object", b"put at exit")
thread = threading.Thread(target=put, daemon=True)
thread.start()
def flush():
    closing.set()
    thread.join(60)
atexit.register(flush)
"""


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.list(prefix)]


def put_as_newest(store: ObjectStore, name: str, content: bytes) -> None:
    """Put an object again and again, until the store's own clock says that it is newer than all others."""
    others = [entry.modified_s for entry in store.list("v1/") if entry.name != name]
    while True:
        store.put(name, content)
        (entry,) = (entry for entry in store.list("v1/") if entry.name == name)
        if all(entry.modified_s > other for other in others):
            return
        time.sleep(0.02)


# What every store does.


def test_what_is_put_is_read(store):
    store.put("v1/object", b"content")
    assert store.read("v1/object") == b"content"


def test_a_file_is_put_as_bytes_are(store, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content" * 100_000)
    store.put("v1/object", file)
    assert store.read("v1/object") == file.read_bytes()


def test_a_new_store_is_empty(store):
    assert list(store.list("v1/")) == []


def test_a_listing_has_names_and_sizes_and_the_stores_time(store):
    store.put("v1/object", b"content")
    (entry,) = store.list("v1/")
    assert (entry.name, entry.size_bytes) == ("v1/object", 7)
    assert abs(entry.modified_s - time.time()) < 60


def test_a_listing_is_oldest_first(store):
    for name in ("v1/b", "v1/c", "v1/a"):
        put_as_newest(store, name, b"")
    assert names(store, "v1/") == ["v1/b", "v1/c", "v1/a"]


def test_a_listing_has_only_what_begins_with_the_prefix(store):
    for name in ("v1/one/a", "v1/one/deep/b", "v1/one-more/c", "v2/d"):
        store.put(name, b"")
    assert sorted(names(store, "v1/one/")) == ["v1/one/a", "v1/one/deep/b"]


def test_a_prefix_may_end_inside_a_name(store):
    for name in ("v1/one/a", "v1/one-more/c", "v1/two/d"):
        store.put(name, b"")
    assert sorted(names(store, "v1/one")) == ["v1/one-more/c", "v1/one/a"]


def test_the_empty_prefix_lists_everything_and_nothing_beside_the_store(store, tmp_path):
    (tmp_path / "beside").write_text("not in the store")
    for name in ("top", "v1/a"):
        store.put(name, b"")
    assert sorted(names(store, "")) == ["top", "v1/a"]


def test_a_prefix_that_nothing_has_lists_nothing(store):
    store.put("v1/a", b"")
    assert names(store, "v1/b/") == names(store, "v3/") == []


@pytest.mark.parametrize(
    ("start", "size_bytes", "content"),
    [
        (0, 3, b"012"),
        (4, 3, b"456"),
        (4, None, b"456789"),
        (8, 100, b"89"),
        (0, 10, b"0123456789"),
        (9, 1, b"9"),
        (3, 0, b""),
        (0, 0, b""),
        (10, None, b""),
        (10, 5, b""),
        (100, 5, b""),
    ],
)
def test_a_range_is_read_alone(store, start, size_bytes, content):
    store.put("v1/object", b"0123456789")
    assert store.read("v1/object", start, size_bytes) == content


def test_an_empty_object_is_read(store):
    store.put("v1/object", b"")
    assert store.read("v1/object") == b""


def test_an_object_that_is_put_again_is_replaced(store):
    store.put("v1/object", b"before")
    store.put("v1/object", b"and after")
    assert store.read("v1/object") == b"and after"
    assert [entry.size_bytes for entry in store.list("v1/")] == [9]


def test_a_deleted_object_is_gone(store):
    store.put("v1/a", b"")
    store.put("v1/b", b"")
    store.delete("v1/a")
    assert names(store, "v1/") == ["v1/b"]


def test_deleting_what_is_not_there_is_no_error(store):
    store.put("v1/a", b"")
    store.delete("v1/missing")
    store.delete("v2/missing/deeper")


def test_reading_what_is_not_there_is_object_not_found_by_name(store):
    store.put("v1/a", b"")
    with pytest.raises(ObjectNotFound, match="v1/missing"):
        store.read("v1/missing")


def test_putting_a_file_that_is_not_there_is_a_store_error_and_stores_nothing(store, tmp_path):
    with pytest.raises(StoreError):
        store.put("v1/object", tmp_path / "missing")
    assert names(store, "v1/") == []


def test_a_listing_is_complete_beyond_a_thousand_objects(store):
    """S3 answers with a thousand at a time."""
    expected = [f"v1/{number:04}" for number in range(1005)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: store.put(name, b"x"), expected))
    assert sorted(names(store, "v1/")) == expected


def test_many_threads_put_and_read_at_once(store):
    def put_and_read(number: int) -> bool:
        content = bytes([number]) * 100_000
        store.put(f"v1/{number}", content)
        return store.read(f"v1/{number}") == content

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(put_and_read, range(32)))
    assert len(store.list("v1/")) == 32


def test_threads_that_put_the_same_object_leave_one_of_them_whole(store):
    contents = [bytes([number]) * 200_000 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: store.put("v1/object", content), contents))
    assert store.read("v1/object") in contents
    assert names(store, "v1/") == ["v1/object"]


def test_names_with_what_names_may_have(store):
    name = "v1/0a/org--FLUX.1_x/7/environment.json"
    store.put(name, b"content")
    assert names(store, "v1/") == [name]
    assert store.read(name) == b"content"


# open_store


def test_a_path_opens_a_local_store_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store(Settings(store="some/folder"))
    monkeypatch.chdir("/")
    store.put("v1/a", b"")
    assert (tmp_path / "some" / "folder" / "v1" / "a").is_file()
    assert store.location == str(tmp_path / "some" / "folder")


def test_a_file_url_opens_a_local_store(tmp_path):
    assert open_store(Settings(store=f"file://{tmp_path}")).location == str(tmp_path)


def test_opening_a_local_store_writes_nothing(tmp_path):
    open_store(Settings(store=str(tmp_path / "store"))).list("v1/")
    assert list(tmp_path.iterdir()) == []


def test_an_s3_url_opens_a_bucket_and_a_prefix_in_it(s3_bucket):
    store = open_store(Settings(store=f"s3://{s3_bucket.name}/a/b/", s3_endpoint_url=s3_bucket.endpoint_url))
    store.put("v1/object", b"content")
    whole = open_store(Settings(store=f"s3://{s3_bucket.name}", s3_endpoint_url=s3_bucket.endpoint_url))
    assert names(whole, "") == ["a/b/v1/object"]
    assert store.location == f"s3://{s3_bucket.name}/a/b/ at {s3_bucket.endpoint_url}"


def test_an_unknown_scheme_is_refused_by_the_name_of_the_setting():
    with pytest.raises(SettingsError, match=r"COMPILE_CACHE_STORE='gs://bucket': give a local folder, s3://"):
        open_store(Settings(store="gs://bucket"))


# LocalStore


def test_local_stores_leave_no_temporary_files(tmp_path):
    LocalStore(tmp_path / "store").put("v1/object", b"content")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["object"]


def test_a_local_put_that_was_killed_is_not_listed(tmp_path):
    store = LocalStore(tmp_path)
    store.put("v1/object", b"content")
    (tmp_path / "v1" / ".tmp-abc").write_bytes(b"half")
    assert names(store, "v1/") == ["v1/object"]


def test_local_objects_are_readable_by_everyone(tmp_path):
    store = LocalStore(tmp_path)
    store.put("v1/object", b"content")
    assert (tmp_path / "v1" / "object").stat().st_mode & 0o777 == 0o644


def test_a_local_object_that_vanishes_during_a_listing_is_left_out(tmp_path):
    """As a dangling link: it is seen by the walk and gone when its size is asked for."""
    store = LocalStore(tmp_path)
    store.put("v1/object", b"content")
    (tmp_path / "v1" / "gone").symlink_to(tmp_path / "nowhere")
    assert names(store, "v1/") == ["v1/object"]


def test_a_local_store_that_cannot_be_written_names_the_remedy(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = LocalStore(tmp_path / "file")
    with pytest.raises(StoreError, match="set COMPILE_CACHE_STORE to a folder that can be used"):
        store.put("v1/object", b"")


def test_a_local_store_without_access_is_access_denied(read_only, not_root):
    with pytest.raises(StoreAccessDenied, match="give this user access"):
        LocalStore(read_only).put("v1/object", b"")


@pytest.fixture
def read_only(tmp_path) -> Path:
    (tmp_path / "store").mkdir(mode=0o500)
    return tmp_path / "store"


# S3Store


def test_s3_prefixes_share_a_bucket_without_seeing_each_other(s3_bucket):
    one, other = (S3Store(s3_bucket.name, prefix, s3_bucket.endpoint_url) for prefix in ("team", "team-2"))
    one.put("v1/a", b"one")
    other.put("v1/a", b"other")
    other.delete("v1/b")
    assert (one.read("v1/a"), other.read("v1/a")) == (b"one", b"other")
    assert names(one) == names(other) == ["v1/a"]


@pytest.mark.parametrize("action", ["list", "read", "put"])
def test_a_missing_bucket_is_object_not_found_and_says_to_create_it(s3_bucket, action):
    store = S3Store("no-such-bucket", "", s3_bucket.endpoint_url)
    calls = {"list": lambda: store.list("v1/"), "read": lambda: store.read("a"), "put": lambda: store.put("a", b"")}
    with pytest.raises(ObjectNotFound, match="NoSuchBucket; check the bucket's name, or create it"):
        calls[action]()


def test_an_endpoint_that_does_not_answer_is_store_unavailable_and_names_its_setting(aws_variables, closed_port):
    store = S3Store("bucket", "", f"http://127.0.0.1:{closed_port}")
    with pytest.raises(StoreUnavailable, match="check COMPILE_CACHE_S3_ENDPOINT_URL and the network"):
        store.list("v1/")


def test_no_credentials_are_access_denied_and_the_variables_are_named(s3_bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = S3Store(s3_bucket.name, "", s3_bucket.endpoint_url)
    with pytest.raises(StoreAccessDenied, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.list("v1/")


def test_credentials_that_may_not_are_access_denied(s3_bucket, s3_client):
    deny = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject",'
        f' "Resource": "arn:aws:s3:::{s3_bucket.name}/*"}}]}}'
    )
    s3_client.put_bucket_policy(Bucket=s3_bucket.name, Policy=deny)
    store = S3Store(s3_bucket.name, "", s3_bucket.endpoint_url)
    with pytest.raises(StoreAccessDenied, match="check the credentials and the bucket's policy"):
        store.put("v1/object", b"")


@pytest.mark.parametrize("endpoint_url", ["127.0.0.1:9000", "not a url"])
def test_an_endpoint_that_is_no_url_is_a_store_error(aws_variables, endpoint_url):
    with pytest.raises(StoreError, match="COMPILE_CACHE_S3_ENDPOINT_URL"):
        S3Store("bucket", "", endpoint_url)


def test_a_bucket_name_that_cannot_be_is_a_store_error(s3_bucket):
    with pytest.raises(StoreError, match="Not A Bucket"):
        S3Store("Not A Bucket", "", s3_bucket.endpoint_url).list("v1/")


# While the interpreter exits


def test_a_daemon_thread_puts_into_a_local_store_while_the_interpreter_exits(tmp_path):
    run_put_at_exit(str(tmp_path), "")
    assert LocalStore(tmp_path).read("v1/object") == b"put at exit"


def test_a_daemon_thread_puts_into_s3_while_the_interpreter_exits(s3_bucket):
    run_put_at_exit(f"s3://{s3_bucket.name}/prefix", s3_bucket.endpoint_url)
    assert S3Store(s3_bucket.name, "prefix", s3_bucket.endpoint_url).read("v1/object") == b"put at exit"


def run_put_at_exit(store: str, endpoint_url: str) -> None:
    command = [Path(sys.executable), "-c", PUT_AT_EXIT, store, endpoint_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
