"""Mirrors: what a web server's answers and its index mean, and how much of them is believed."""

from __future__ import annotations

import base64
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from web_servers import Served, answer, answering, serving_folder, tls

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.storage.catalog import read_catalog
from compile_cache.storage.stores.base import LayeredStore, StoredObject, open_url
from compile_cache.storage.stores.local import MOST_INDEX_BYTES, Index, LocalStore, index_folder

pytestmark = pytest.mark.usefixtures("no_proxy")

MIB = 1 << 20
OBJECT = {"name": "v1/a.pack", "size_bytes": 1, "modified_s": 1.5}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def served(folder) -> Iterator[Served]:
    """A server of the folder's files, in parts too."""
    with serving_folder(folder, ranges=True) as served:
        yield served


def part(content: bytes, start: int, total: int) -> bytes:
    """An answer with a part of an object."""
    return answer("206 Partial Content", content, Content_Range=f"bytes {start}-{start + len(content) - 1}/{total}")


def with_user(url: str) -> str:
    return url.replace("://", "://user:s%40cret@")


AUTHORIZATION = f"authorization: Basic {base64.b64encode(b'user:s@cret').decode()}"


# Reading


def test_only_the_range_is_sent(folder):
    (folder / "object").write_bytes(b"x" * MIB)
    with serving_folder(folder, ranges=True) as served:
        assert open_url(served.url).read("object", 1000, 5) == b"xxxxx"
    assert served.sent_bytes == 5


@pytest.mark.parametrize("place", [("object", 0, 5), ("object", 1000, 5)])
def test_a_server_without_ranges_is_a_store_error_that_names_it_and_sends_next_to_nothing(folder, place):
    """The sockets' buffers hold some of the rest."""
    with (folder / "object").open("wb") as file:
        file.truncate(256 * MIB)
    with serving_folder(folder, ranges=False) as served, pytest.raises(StoreError) as caught:
        open_url(served.url).read(*place)
    assert str(caught.value).startswith(f"cannot get object from {served.url}/: ")
    assert "; use a web server that answers requests for ranges" in str(caught.value)
    assert served.sent_bytes < 64 * MIB


@pytest.mark.parametrize("name", ["v1/a b.pack", "v1/50%41+?&#.pack", "v1/höhe.pack", "v1/a;b='c'~.pack"])
def test_names_are_quoted(folder, served, name):
    LocalStore(folder).put(name, b"content")
    index_folder(LocalStore(folder))
    store = open_url(served.url)
    assert [entry.name for entry in store.list("")] == [name]
    assert store.read(name, 0, 3) == b"con"


def test_a_folder_below_the_servers_root_is_served_with_or_without_a_slash_at_its_end(folder, served):
    (folder / "some folder").mkdir()
    (folder / "some folder" / "object").write_bytes(b"content")
    for url in (f"{served.url}/some%20folder", f"{served.url}/some%20folder/"):
        assert open_url(url).read("object", 0, 9) == b"content"
        assert open_url(url).location == f"{served.url}/some%20folder/"


@pytest.mark.parametrize(
    ("status", "error", "requests"),
    [
        ("401 Unauthorized", StoreAccessDenied, 1),
        ("403 Forbidden", StoreAccessDenied, 1),
        ("404 Not Found", ObjectNotFound, 1),
        ("408 Timeout", StoreUnavailable, 3),
        ("418 I'm a teapot", StoreError, 1),
        ("429 Too Many Requests", StoreUnavailable, 3),
        ("500 Oops", StoreUnavailable, 3),
        ("503 Busy", StoreUnavailable, 3),
    ],
)
def test_an_answer_without_the_object_is_an_error_by_its_status_and_repeated_if_it_may_pass(status, error, requests):
    with answering(answer(status)) as served, pytest.raises(StoreError) as caught:
        open_url(with_user(served.url)).read("v1/object", 0, 5)
    assert type(caught.value) is error
    assert len(served.requests) == requests
    assert "cret" not in "".join(traceback.format_exception(caught.value))


def test_an_answer_that_is_another_next_time_is_taken():
    with answering(answer("503 Busy"), part(b"01", 0, 10)) as served:
        assert open_url(served.url).read("object", 0, 2) == b"01"


@pytest.mark.parametrize("cut", [part(b"01234", 0, 10).replace(b"h: 5", b"h: 10").replace(b"0-4", b"0-9"), b""])
def test_an_answer_that_is_cut_is_store_unavailable(cut):
    with answering(cut) as served, pytest.raises(StoreUnavailable):
        open_url(served.url).read("object", 0, 10)


@pytest.mark.parametrize("stated", ["bytes 1-10/11", "bytes 0-99/100", "bytes */10", "lines 0-9/10", ""])
def test_an_answer_with_another_range_than_asked_for_is_a_store_error(stated):
    other = answer("206 Partial Content", b"0123456789", Content_Range=stated)
    with answering(other) as served, pytest.raises(StoreError, match="cannot get object from"):
        open_url(served.url).read("object", 0, 10)


# TLS, redirects, users, proxies


@pytest.mark.parametrize(("trusted", "host"), [(False, "127.0.0.1"), (True, "localhost")])
def test_an_untrusted_certificate_is_an_error_that_names_the_variable(folder, certificates, monkeypatch, trusted, host):
    """It is of an unknown authority, or of another host."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority) if trusted else os.devnull)
    monkeypatch.setenv("NO_PROXY", host)
    refusal = pytest.raises(StoreError, match="SSL_CERT_FILE")
    with serving_folder(folder, ranges=True, context=tls(certificates)) as served, refusal:
        open_url(served.url.replace("127.0.0.1", host)).list("")
    assert served.requests == []


def test_a_redirect_is_followed_with_the_range_and_without_user_and_password(folder, served):
    (folder / "object").write_bytes(b"0123456789")
    with answering(answer("302 Found", Location=f"{served.url}/object")) as before:
        assert open_url(with_user(before.url)).read("anything", 3, 2) == b"34"
    assert AUTHORIZATION in before.requests[0]
    assert "authorization" not in served.requests[0].lower()


@pytest.mark.parametrize("scheme", ["http", "HTTP", "ftp", "file"])
def test_a_redirect_from_https_to_another_scheme_is_refused(folder, served, trusted_certificates, scheme):
    (folder / "object").write_bytes(b"content")
    to = answer("302 Found", Location=f"{served.url}/object".replace("http", scheme, 1))
    with answering(to, context=tls(trusted_certificates)) as before, pytest.raises(StoreError):
        open_url(before.url).read("object", 0, 5)
    assert (len(before.requests), served.requests) == (1, [])


@pytest.mark.parametrize("url", ["https://user:secret@", "https://user:secret@host:port"])
def test_what_is_no_url_is_a_store_error_without_its_secrets(url):
    with pytest.raises(StoreError, match="cannot open https:") as caught:
        open_url(url)
    assert "secret" not in str(caught.value)


def test_a_proxy_that_the_environment_names_is_used(monkeypatch):
    with answering(part(b"34", 3, 10)) as proxy:
        monkeypatch.setenv("http_proxy", with_user(proxy.url))
        assert open_url("http://mirror.invalid/folder").read("object", 3, 2) == b"34"
    assert proxy.requests[0].startswith("GET http://mirror.invalid/folder/object ")
    assert f"proxy-{AUTHORIZATION}" in proxy.requests[0]


# The index


def objects_of(index: bytes) -> list[StoredObject]:
    return msgspec.json.decode(index, type=Index).objects


def test_an_index_lists_all_objects_but_itself_and_is_replaced_whole(folder):
    """Readers of the file that was there go on reading it."""
    index_folder(LocalStore(folder))
    with (folder / "index.json").open("rb") as before:
        for name in ("v1/b.pack", "v1/deep/a.pack", "top"):
            LocalStore(folder).put(name, name.encode())
        index_folder(LocalStore(folder))
        assert objects_of(before.read()) == []
    entries = [entry for entry in LocalStore(folder).list("") if entry.name != "index.json"]
    assert objects_of((folder / "index.json").read_bytes()) == entries


def test_a_folder_that_is_not_there_gets_no_index(tmp_path):
    index_folder(LocalStore(tmp_path / "missing"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_index_is_object_not_found_and_says_how_to_make_it(served):
    with pytest.raises(ObjectNotFound, match="compile-cache copy --to"):
        open_url(served.url).list("")


def test_what_an_index_says_of_an_object_beyond_this_is_ignored():
    content = json.dumps({"objects": [OBJECT | {"etag": "x"}], "version": 2}).encode()
    assert objects_of(content) == [StoredObject("v1/a.pack", 1, 1.5)]


def entry(**changes: object) -> str:
    return json.dumps({"objects": [OBJECT | changes]})


BAD_INDEXES = [
    "",
    "not JSON",
    "[]",
    "{}",
    "null",
    '{"objects": {}}',
    '{"objects": null}',
    '{"objects": [null]}',
    '{"objects": ["v1/a"]}',
    '{"objects": [{}]}',
    "[" * 100_000,
    "\xff",
    *(entry(name=name) for name in (None, 1, "v1/\udcff")),
    *(entry(size_bytes=size) for size in (None, -1, 1.5, "1", True, 1 << 63)),
    *(entry(modified_s=time_s) for time_s in (None, "1", False, float("nan"), float("inf"), -1e300, 10**400)),
]


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../../etc/passwd", "v3/a/../m/v", "v3/a/m/./", "v3//m/v", "v3/a\nb"]
)
def test_an_object_of_an_index_with_a_name_that_no_pack_has_is_no_pack(folder, served, name):
    pack = OBJECT | {"name": f"v3/a/m/v/{'a' * 64}.pack"}
    others = [OBJECT | {"name": name}, OBJECT | {"name": f"{name}/{'b' * 64}.pack"}]
    (folder / "index.json").write_text(json.dumps({"objects": [pack, *others, pack]}))
    (version,) = read_catalog(LayeredStore([open_url(served.url)]), "").versions
    assert [entry.name for entry in version.packs] == [pack["name"]], "once, as a boot's layers list it"


@pytest.mark.parametrize("index", BAD_INDEXES, ids=range(len(BAD_INDEXES)))
def test_a_bad_index_is_a_store_error_that_says_where_it_is(folder, served, index):
    (folder / "index.json").write_bytes(index.encode("latin-1"))
    with pytest.raises(StoreError, match=r"http://127.0.0.1:\d+/index.json: .*; make it again"):
        open_url(served.url).list("")
    assert len(served.requests) == 1


def test_an_index_that_is_too_large_is_read_no_further(folder):
    with (folder / "index.json").open("wb") as file:
        file.truncate(4 * MOST_INDEX_BYTES)
    with serving_folder(folder, ranges=True) as served, pytest.raises(StoreError, match="make it again"):
        open_url(served.url).list("")
    assert served.sent_bytes == MOST_INDEX_BYTES


@pytest.mark.parametrize("url", ["https://user:secret@host/packs", "http://user:s/ecret@host/packs/"])
def test_a_mirror_is_shown_without_its_user_and_password(url):
    assert open_url(url).location == f"{url.partition('://')[0]}://host/packs/"
