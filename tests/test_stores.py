"""Object stores: every kind does the same, and says what to do where it cannot."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from filled_stores import ACTIONS, put_as_newest, set_age
from machines import write_files
from namespaces import as_nobody
from programs import run_program
from web_servers import answer, answering, forwarding, serving_folder, tls

from compile_cache.errors import ObjectNotFound, SettingsError, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.settings import Settings
from compile_cache.storage.stores.base import LayeredStore, ObjectStore, open_stores, open_url
from compile_cache.storage.stores.cloud import CloudStore
from compile_cache.storage.stores.local import LocalStore, index_folder
from compile_cache.storage.stores.s3 import S3Store

BUCKETS = ("s3", "cloud-s3", "cloud-gs")

THREADS = 8
PREFIX = "some/prefix"

# The pattern of compile_cache.publisher: a daemon thread, started long before, which an exit hook lets finish.
PUT_AT_EXIT = """
import atexit, sys, threading
from compile_cache.storage.stores.base import open_url
store = open_url(sys.argv[1])
closing = threading.Event()
def put():
    closing.wait()
    store.put("v1/object", b"put at exit")
    store.delete("v1/stale")
thread = threading.Thread(target=put, daemon=True)
thread.start()
def flush():
    closing.set()
    thread.join(60)
atexit.register(flush)
"""


@dataclass(frozen=True)
class Subject:
    """A store under test, and the store that fills it: itself, unless it is only read."""

    store: ObjectStore
    origin: ObjectStore
    publish: Callable[[], object] = lambda: None

    def fill(self, objects: Mapping[str, bytes]) -> ObjectStore:
        for name, content in objects.items():
            self.origin.put(name, content)
        self.publish()
        return self.store


@pytest.fixture(params=["local", *BUCKETS, "layered", "https"])
def subject(request) -> Subject:
    """An empty store of each kind."""
    return request.getfixturevalue("make_subject")(request.param)


@pytest.fixture(params=["local", *BUCKETS])
def writable(request) -> ObjectStore:
    """An empty store of each kind that can be written."""
    return request.getfixturevalue("make_subject")(request.param).store


# moto does not know Google's x-goog-if-generation-match.


@pytest.fixture
def make_subject(request, tmp_path) -> Callable[[str], Subject]:
    def make(kind: str) -> Subject:
        if kind in BUCKETS:
            store = request.getfixturevalue("open_bucket")(kind, request.getfixturevalue("s3_bucket").name)
            return Subject(store, store)
        origin = LocalStore(tmp_path / "store")
        if kind == "layered":
            return Subject(LayeredStore([LocalStore(tmp_path / "empty"), origin]), origin)
        if kind == "https":
            url = request.getfixturevalue("https_folder")
            index_folder(origin)
            return Subject(open_url(url), origin, lambda: index_folder(origin))
        return Subject(origin, origin)

    return make


@pytest.fixture
def open_bucket(request, s3_variables) -> Callable[[str, str], ObjectStore]:
    """Opens a store of a kind in a bucket of the S3 server."""

    def open_in(kind: str, bucket: str) -> ObjectStore:
        if kind == "cloud-gs":
            request.getfixturevalue("google")
        return open_kind(kind, bucket)

    return open_in


def open_kind(kind: str, bucket: str) -> ObjectStore:
    """At the endpoint that the environment names."""
    if kind != "cloud-s3":
        return open_url(f"{kind.removeprefix('cloud-')}://{bucket}/{PREFIX}")
    from obstore.store import S3Store

    options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 2}}
    return CloudStore(S3Store(bucket, prefix=PREFIX, **options), f"s3://{bucket}/{PREFIX}/")


@pytest.fixture
def google(s3_server, trusted_certificates, monkeypatch) -> Iterator[None]:
    """Google's client talks to the S3 server: their XML APIs differ in nothing that is asked here but conditions."""
    with forwarding(urlsplit(s3_server).port, tls(trusted_certificates)) as served:
        monkeypatch.setenv("GOOGLE_BASE_URL", served.url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
        yield


@pytest.fixture
def https_folder(tmp_path, trusted_certificates) -> Iterator[str]:
    (tmp_path / "store").mkdir()
    with serving_folder(tmp_path / "store", ranges=True, context=tls(trusted_certificates)) as served:
        yield served.url


@pytest.fixture(scope="module")
def big_bucket(s3_client) -> tuple[str, list[str]]:
    """A bucket with more objects than the server lists at a time, and their names."""
    names = [f"v1/{number:04}" for number in range(105)]
    s3_client.create_bucket(Bucket="big")
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda name: s3_client.put_object(Bucket="big", Key=f"{PREFIX}/{name}", Body=b"x"), names))
    return "big", names


def names(store: ObjectStore, prefix: str = "") -> list[str]:
    return [entry.name for entry in store.list(prefix)]


# What every store does.


def test_a_listing_is_empty_at_first_and_then_has_names_and_sizes_and_the_stores_time(subject):
    assert subject.store.location
    assert list(subject.store.list("v1/")) == []
    (entry,) = subject.fill({"v1/object": b"content"}).list("v1/")
    assert (entry.name, entry.size_bytes) == ("v1/object", 7)
    assert abs(entry.modified_s - time.time()) < 60


def test_a_listing_is_oldest_first_and_what_is_of_the_same_time_is_listed_by_name(subject):
    for name in ("v1/b", "v1/a"):
        put_as_newest(subject.origin, name, b"")
    subject.publish()
    assert names(subject.store, "v1/") == ["v1/b", "v1/a"]
    entries = subject.fill({f"v1/{number * 7 % 20:02}": b"" for number in range(20)}).list("v1/")
    assert len(entries) == 22
    assert list(entries) == sorted(entries, key=lambda entry: (entry.modified_s, entry.name))


def test_a_listing_has_only_what_begins_with_the_prefix(subject, tmp_path):
    (tmp_path / "beside").write_text("not in the store")
    every = ("v1/one/a", "v1/one/deep/b", "v1/one-more/c", "v2/d", "top")
    store = subject.fill(dict.fromkeys(every, b""))
    assert sorted(names(store, "v1/one/")) == ["v1/one/a", "v1/one/deep/b"]
    assert sorted(names(store, "v1/one")) == ["v1/one-more/c", "v1/one/a", "v1/one/deep/b"]
    assert names(store, "v1/b/") == names(store, "v3/") == []
    assert set(names(store, "")) - {"index.json"} == set(every)


@pytest.mark.parametrize("kind", BUCKETS)
def test_a_listing_of_a_bucket_is_complete_beyond_one_answer(open_bucket, big_bucket, kind):
    """S3 answers with a thousand objects at a time, this server with 50."""
    bucket, expected = big_bucket
    assert sorted(names(open_bucket(kind, bucket), "v1/")) == expected


PLACES = {
    **{(0, 3): b"012", (4, 3): b"456", (9, 1): b"9", (0, 10): b"0123456789"},
    **{(8, 100): b"89", (0, 100): b"0123456789"},  # cut at the end
    **dict.fromkeys([(10, 5), (100, 5)], b""),
}


def test_what_is_put_is_read_as_a_whole_and_in_parts(subject):
    name = "v1/0a/org--FLUX.1_x/7/environment.json"
    store = subject.fill({name: b"0123456789", "v1/empty": b""})
    assert {place: store.read(name, *place) for place in PLACES} == PLACES
    assert store.read("v1/empty", 0, 5) == b""


def test_reading_what_is_not_there_is_object_not_found_by_name_and_no_reason_to_create_a_bucket(subject):
    store = subject.fill({"v1/a": b""})
    for place in ((0, 5), (3, 5)):
        with pytest.raises(ObjectNotFound, match="v1/missing") as caught:
            store.read("v1/missing", *place)
        assert "create" not in str(caught.value)


# What every store does that can be written.


def test_a_file_is_put_as_bytes_are_and_replaces_what_was_there(writable, tmp_path):
    writable.put("v1/object", b"before")
    for content in (b"content" * 100_000, b""):
        (tmp_path / "file").write_bytes(content)
        writable.put("v1/object", tmp_path / "file")
        assert writable.read("v1/object", 0, 1 << 20) == content
        assert [entry.size_bytes for entry in writable.list("v1/")] == [len(content)]


def test_putting_a_file_that_is_not_there_is_a_store_error_and_stores_nothing(writable, tmp_path):
    with pytest.raises(StoreError, match="v1/object"):
        writable.put("v1/object", tmp_path / "missing")
    assert names(writable, "v1/") == []


def test_threads_that_put_the_same_object_leave_one_of_them_whole_and_readers_get_one_whole(writable):
    contents, barrier = [bytes([number]) * 200_000 for number in range(THREADS)], threading.Barrier(THREADS)
    writable.put("v1/object", contents[0])

    def put_and_read(number: int) -> set[bytes]:
        found = set()
        barrier.wait()
        for _ in range(5):
            writable.put("v1/object", contents[number])
            found.add(writable.read("v1/object", 0, 1 << 20))
        return found

    with ThreadPoolExecutor(THREADS) as threads:
        assert set().union(*threads.map(put_and_read, range(THREADS))) <= set(contents)
    assert names(writable, "v1/") == ["v1/object"]


def test_a_deleted_object_is_gone_and_deleting_it_again_is_no_error(writable):
    writable.put("v1/a", b"")
    writable.put("v1/b", b"")
    for name in ("v1/a", "v1/a", "v1/missing", "v2/missing/deeper"):
        writable.delete(name)
    assert names(writable, "v1/") == ["v1/b"]
    with pytest.raises(ObjectNotFound):
        writable.read("v1/a", 0, 5)


# What every remote store does when it cannot.


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("action", ["list", "read", "put"])
def test_a_missing_bucket_is_object_not_found_and_says_to_create_it(open_bucket, kind, action):
    with pytest.raises(ObjectNotFound, match="check the bucket's name, or create it"):
        ACTIONS[action](open_bucket(kind, "no-such-bucket"))


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        *((kind, action) for kind in BUCKETS for action in ("list", "read", "put", "delete")),
        *((kind, action) for kind in ("https", "http") for action in ("list", "read")),
    ],
)
def test_a_port_that_nothing_listens_on_is_store_unavailable_and_names_what_to_check(
    request, aws_variables, monkeypatch, closed_port, kind, action
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("GOOGLE_BASE_URL", f"https://127.0.0.1:{closed_port}")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token")
    store = open_kind(kind, "bucket") if kind in BUCKETS else open_url(f"{kind}://127.0.0.1:{closed_port}")
    with pytest.raises(StoreUnavailable, match=r"check .*the network") as caught:
        ACTIONS[action](store)
    if action == "list" and kind in BUCKETS:
        named = r"cannot list \w+://bucket/(\w+/)*( at http://127.0.0.1:\d+)?: "
        assert re.match(named, str(caught.value))


# Opening


def test_a_path_opens_a_local_store_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_url("some/folder")
    monkeypatch.chdir("/")
    assert open_url(f"file://{tmp_path}").location == str(tmp_path)
    assert list(open_url(str(tmp_path / "store")).list("v1/")) == list(tmp_path.iterdir()) == []
    store.put("v1/a", b"")
    assert (tmp_path / "some" / "folder" / "v1" / "a").is_file()
    assert store.location == str(tmp_path / "some" / "folder")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_an_s3_or_google_url_opens_a_bucket_and_a_prefix_in_it(s3_bucket, google, s3_server, scheme):
    store = open_url(f"{scheme}://{s3_bucket.name}/a/b/")
    store.put("v1/object", b"content")
    assert names(open_url(f"{scheme}://{s3_bucket.name}")) == ["a/b/v1/object"]
    assert store.location == f"{scheme}://{s3_bucket.name}/a/b/" + (f" at {s3_server}" if scheme == "s3" else "")


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://container", "https://host/folder"])
def test_a_package_that_is_not_installed_is_named_with_the_remedy(monkeypatch, url):
    is_s3 = url.startswith("s3:")
    module, package, extra = ("s3", "boto3", "s3") if is_s3 else ("cloud", "obstore", "clouds")
    monkeypatch.delitem(sys.modules, f"compile_cache.storage.stores.{module}")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError) as caught:
        open_url(url)
    remedy = f"pip install '.[{extra}]' in a checkout of cog-compile-cache"
    assert f"needs the package {package}: {remedy}" in str(caught.value)


def test_layers_are_read_before_the_store_that_is_written_if_any_and_without_both_there_are_no_objects(tmp_path):
    baked, written = str(tmp_path / "baked"), str(tmp_path / "store")
    LocalStore(tmp_path / "baked").put("v1/a", b"baked")
    stores = open_stores(Settings(store=written, layers=(baked,)))
    stores.writing.put("v1/b", b"written")
    assert names(stores, "v1/") == ["v1/a", "v1/b"]
    assert names(stores.writing, "v1/") == ["v1/b"]
    alone, off = open_stores(Settings(store=written)), open_stores(Settings(store="off", layers=(baked,)))
    assert names(alone) == names(alone.writing) == ["v1/b"]
    assert off.writing is None
    assert names(off) == ["v1/a"]
    stores = open_stores(Settings(store="off"))
    assert stores.writing is None
    assert list(stores.list("")) == []
    with pytest.raises(ObjectNotFound):
        stores.read("v1/a", 0, 1 << 20)


# LayeredStore


def test_layers_are_listed_in_turn_each_oldest_first_and_read_from_the_first_that_has_an_object(tmp_path):
    first, second = layers = [LocalStore(tmp_path / name) for name in ("first", "second")]
    second.put("v1/a", b"only here")
    put_as_newest(first, "v1/c", b"first")
    put_as_newest(first, "v1/b", b"")
    second.put("v1/c", b"second!")
    store = LayeredStore(layers)
    assert store.read("v1/a", 1, 3) == b"nly"  # before any listing
    assert [(entry.name, entry.size_bytes) for entry in store.list("")] == [("v1/c", 5), ("v1/b", 0), ("v1/a", 9)]
    assert store.read("v1/c", 0, 1 << 20) == b"first"
    first.delete("v1/c")  # since it was listed
    assert store.read("v1/c", 0, 1 << 20) == b"second!"


def test_a_layer_that_fails_is_left_out_and_named_until_it_works_again_and_if_all_fail_it_is_an_error(tmp_path):
    (tmp_path / "broken").write_text("not a folder")
    broken, layer = LocalStore(tmp_path / "broken"), LocalStore(tmp_path / "layer")
    with pytest.raises(StoreError, match="set COMPILE_CACHE_STORE"):
        LayeredStore([broken, broken]).list("")
    layer.put("v1/a", b"content")
    store = LayeredStore([broken, layer])
    assert store.location == f"{broken.location} + {layer.location}"
    assert store.read("v1/a", 0, 1 << 20) == b"content"
    assert names(store) == ["v1/a"]
    (problem,) = store.problems
    assert broken.location in problem
    layer.delete("v1/a")
    with pytest.raises(ObjectNotFound):  # although another layer fails: whoever reads it lists again then
        store.read("v1/a", 0, 1 << 20)
    with pytest.raises(StoreError) as caught:  # what was never listed may be in the layer that fails
        store.read("v1/b", 0, 1 << 20)
    assert not isinstance(caught.value, ObjectNotFound)
    Path(broken.location).unlink()
    store.list("")
    assert store.problems == ()


# LocalStore


def test_a_local_put_leaves_one_file_for_everyone_to_read_and_one_that_was_killed_is_not_listed(tmp_path):
    store = LocalStore(tmp_path)
    store.put("v1/object", b"content")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["object"]
    assert (tmp_path / "v1" / "object").stat().st_mode & 0o777 == 0o644
    (tmp_path / "v1" / ".tmp-abc").write_bytes(b"half")
    assert names(store, "v1/") == ["v1/object"]


def test_only_regular_files_and_links_to_them_are_local_objects_and_no_other_file_holds_a_reader(tmp_path):
    folder = tmp_path / "v1"
    write_files(folder, {"object": b"content"})
    (folder / "link").symlink_to(folder / "object")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    for name, target in (("loop", "loop"), ("dangling", "/nowhere"), ("device", "/dev/zero")):
        (folder / name).symlink_to(target)
    (folder / "folder").mkdir()
    store = LocalStore(tmp_path)
    assert sorted(names(store, "v1/")) == ["v1/link", "v1/object"]
    assert store.read("v1/link", 3, 2) == b"te"
    for name in ("fifo", "socket", "loop", "dangling", "device", "folder"):
        with pytest.raises(StoreError, match=f"cannot read .*{name}: .*"):
            store.read(f"v1/{name}", 0, 10)


def test_a_local_folder_that_cannot_be_read_is_left_out_of_the_listing_and_named(open_folder, caplog):
    LocalStore(open_folder).put("v1/object", b"content")
    (open_folder / "v1" / "lost+found").mkdir(mode=0)
    with as_nobody(), caplog.at_level(logging.WARNING, "compile_cache"):
        assert names(LocalStore(open_folder)) == ["v1/object"]
        with pytest.raises(StoreAccessDenied, match="give this user access"):
            LocalStore(open_folder).list("v1/lost+found/")
    assert "lost+found" in caplog.text


def test_a_local_store_of_another_user_is_read_and_cannot_be_written(open_folder):
    LocalStore(open_folder).put("v1/object", b"content")
    (open_folder / "v1").chmod(0o555)
    with as_nobody():
        store = LocalStore(open_folder)
        assert names(store, "v1/") == ["v1/object"]
        assert store.read("v1/object", 0, 1 << 20) == b"content"
        with pytest.raises(StoreAccessDenied, match="give this user access"):
            store.put("v1/new", b"")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read; those of pytest are their owner's alone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_put_removes_what_killed_writers_left_in_its_folder_a_day_ago(tmp_path, caplog):
    store = LocalStore(tmp_path)
    for name, days in {"v1/.tmp-old": 2, "v1/.tmp-new": 0.5, "v2/.tmp-elsewhere": 2, "v1/old": 2}.items():
        write_files(tmp_path, {name: b"half"})
        set_age(tmp_path, name, days, time.time())
    with caplog.at_level(logging.INFO, "compile_cache"):
        store.put("v1/object", b"content")
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"v1/object", "v1/.tmp-new", "v2/.tmp-elsewhere", "v1/old"}
    assert str(tmp_path / "v1" / ".tmp-old") in caplog.text


def test_a_local_put_that_fails_names_the_remedy_and_leaves_no_temporary_file(local, tmp_path):
    local.put("v1/object/below", b"")
    with pytest.raises(StoreError, match="set COMPILE_CACHE_STORE to a folder that can be used"):
        local.put("v1/object", b"in the place of a folder")
    with pytest.raises(StoreError, match="set COMPILE_CACHE_STORE to a folder that can be used"):
        LocalStore(tmp_path / "store" / "v1" / "object" / "below").put("v1/object", b"")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["below"]


# S3Store


def test_s3_prefixes_share_a_bucket_without_seeing_each_other(s3_bucket):
    one, other = (S3Store(f"s3://{s3_bucket.name}/{prefix}") for prefix in ("team", "team-2"))
    one.put("v1/a", b"one")
    other.put("v1/a", b"other")
    other.delete("v1/b")
    assert (one.read("v1/a", 0, 9), other.read("v1/a", 0, 9)) == (b"one", b"other")
    assert names(one) == names(other) == ["v1/a"]


def test_s3_without_ranges_is_read_no_further_than_what_is_wanted(aws_variables, tmp_path, monkeypatch):
    """The sockets' buffers hold some of the rest."""
    (tmp_path / "bucket").mkdir()
    with (tmp_path / "bucket" / "object").open("wb") as file:
        file.truncate(256 << 20)
    with serving_folder(tmp_path, ranges=False) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", served.url)
        store = S3Store("s3://bucket")
        assert store.read("object", 0, 4096) == bytes(4096)
        with pytest.raises(StoreUnavailable, match="another range"):
            store.read("object", 1, 4096)
    assert served.sent_bytes < 64 << 20


def test_no_credentials_are_access_denied_and_the_variables_are_named(s3_bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = S3Store(f"s3://{s3_bucket.name}")
    with pytest.raises(StoreAccessDenied, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.list("v1/")


def test_credentials_that_may_not_are_access_denied(s3_bucket, s3_client):
    deny = (
        '{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject",'
        f' "Resource": "arn:aws:s3:::{s3_bucket.name}/*"}}]}}'
    )
    s3_client.put_bucket_policy(Bucket=s3_bucket.name, Policy=deny)
    store = S3Store(f"s3://{s3_bucket.name}")
    with pytest.raises(StoreAccessDenied, match="check the credentials and the bucket's policy"):
        store.put("v1/object", b"")


@pytest.mark.parametrize("endpoint_url", ["127.0.0.1:9000", "not a url"])
def test_an_endpoint_that_is_no_url_is_a_store_error(aws_variables, monkeypatch, endpoint_url):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint_url)
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL_S3"):
        S3Store("s3://bucket")


def test_a_region_or_a_bucket_name_that_cannot_be_is_named(s3_bucket, monkeypatch):
    with pytest.raises(StoreError, match="Not A Bucket"):
        S3Store("s3://Not A Bucket").list("v1/")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "not a region")
    with pytest.raises(StoreError, match="set AWS_DEFAULT_REGION"):
        S3Store("s3://bucket").list("v1/")


@pytest.mark.parametrize("secret", ["user:SECRET", "SECRET", "u:a/SECRET", "u:p@SECRET", "u:a?SECRET", "u:%40SECRET"])
def test_a_password_in_the_endpoint_is_in_no_location_message_nor_cause(
    aws_variables, monkeypatch, closed_port, secret
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{secret}@127.0.0.1:{closed_port}")
    store = open_url("s3://bucket/prefix")
    assert store.location == f"s3://bucket/prefix/ at http://127.0.0.1:{closed_port}"
    for act in ACTIONS.values():
        with pytest.raises(StoreError) as caught:
            act(store)
        assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no s3://bucket/a, no http://host/path?", "no s3://bucket/a, no http://host/path?"),
        ("get https://user:S@host/a b of s3://x/y", "get https://host/a b of s3://x/y"),
        ('at "http://u:S S\'S@host:1/b?list-type=2&sig=S": no', 'at "http://host:1/b": no'),
        ("url: /bucket?X-Amz-Credential=S&X-Amz-Signature=S (Caused", "url: /bucket (Caused"),
        ("az://container/x?sv=2024&sig=S; https://S:S@h/", "az://container/x https://h/"),
    ],
)
def test_an_error_shows_addresses_redacted(text, shown):
    assert str(StoreError(text)) == shown


# Codes of S3, and their messages.
CODES = {
    "InvalidAccessKeyId": "The AWS Access Key Id you provided does not exist in our records.",
    "AuthorizationHeaderMalformed": "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
    "IllegalLocationConstraintException": "The eu-west-1 location constraint is incompatible for the region",
    "PermanentRedirect": "The bucket must be addressed using the specified endpoint.",
    "InvalidRegionName": "The region name 'us-east-1' is not valid.",
}


@pytest.mark.parametrize(("code", "message"), CODES.items())
def test_a_wrong_key_or_region_has_a_remedy(aws_variables, monkeypatch, code, message):
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    status = "301 Moved Permanently" if "Redirect" in code else "400 Bad Request"
    remedy = "check the credentials" if "Key" in code else "set AWS_DEFAULT_REGION to the bucket's region"
    with answering(answer(status, body)) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", served.url)
        with pytest.raises(StoreError, match=f"; {remedy}"):
            S3Store("s3://bucket").list("v1/")


# While the interpreter exits


@pytest.mark.parametrize("kind", ["local", "s3", "cloud-gs"])
def test_a_daemon_thread_puts_into_a_store_while_the_interpreter_exits(make_subject, kind):
    store = make_subject(kind).store
    done = run_program(PUT_AT_EXIT, store.location.partition(" at ")[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert store.read("v1/object", 0, 1 << 20) == b"put at exit"
