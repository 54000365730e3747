"""Stores behind a web server: what its answers and its index mean, and how much of them is believed."""

from __future__ import annotations

import base64
import json
import logging
import os
import traceback
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_servers import answer, answering, serving_folder, tls

from compile_cache.errors import ObjectNotFound, SettingsError, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store import web
from compile_cache.store.base import StoredObject
from compile_cache.store.local import LocalStore
from compile_cache.store.web import WebStore
from compile_cache.store.web_index import MOST_INDEX_BYTES, parse_index, write_index

MIB = 1 << 20
OBJECT = {"name": "v1/a.pack", "size_bytes": 1, "modified_s": 1.5}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def part(content: bytes, start: int, total: int | str) -> bytes:
    """An answer with a part of an object."""
    return answer("206 Partial Content", content, Content_Range=f"bytes {start}-{start + len(content) - 1}/{total}")


# Reading


def test_only_the_range_is_sent(folder):
    (folder / "object").write_bytes(b"x" * MIB)
    with serving_folder(folder, ranges=True) as served:
        assert WebStore(served.url).read("object", 1000, 5) == b"xxxxx"
    assert "Range: bytes=1000-1004" in served.requests[0]
    assert served.sent_bytes == 5


def test_the_reads_of_a_thread_share_a_connection(folder):
    (folder / "object").write_bytes(b"0123456789" * MIB)
    with serving_folder(folder, ranges=True) as served:
        store = WebStore(served.url)
        for start in range(0, 5 * MIB, MIB):
            store.read("object", start, MIB)
    assert (len(served.requests), served.connections) == (5, 1)


def test_a_server_without_ranges_sends_no_more_than_what_is_wanted_of_it(folder):
    """What is on its way when the client hangs up does not count: the sockets' buffers."""
    with (folder / "object").open("wb") as file:
        file.truncate(256 * MIB)
    with serving_folder(folder, ranges=False) as served:
        assert WebStore(served.url).read("object", 1000, 5) == bytes(5)
    assert served.sent_bytes < 64 * MIB


def test_what_is_before_the_range_is_never_in_memory_whole(folder):
    with (folder / "object").open("wb") as file:
        file.truncate(32 * MIB)
    with serving_folder(folder, ranges=False) as served:
        store = WebStore(served.url)
        tracemalloc.start()
        try:
            assert store.read("object", 30 * MIB, 5) == bytes(5)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 8 * MIB


def test_a_server_without_ranges_is_named_once(folder, caplog):
    (folder / "object").write_bytes(b"0123456789")
    with serving_folder(folder, ranges=False) as served, caplog.at_level(logging.WARNING, "compile_cache"):
        store = WebStore(served.url)
        assert [store.read("object", start, 2) for start in (0, 4, 8)] == [b"01", b"45", b"89"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["mirror.no_ranges url=http"]


@pytest.mark.parametrize("name", ["v1/a b.pack", "v1/50%41+?&#.pack", "v1/höhe.pack", "v1/a;b='c'~.pack"])
def test_names_are_quoted(folder, name):
    LocalStore(folder).put(name, b"content")
    write_index(folder)
    with serving_folder(folder, ranges=True) as served:
        store = WebStore(served.url)
        assert [entry.name for entry in store.list("")] == [name]
        assert store.read(name, 0, 3) == b"con"


def test_a_folder_below_the_servers_root_is_served_with_or_without_a_slash_at_its_end(folder):
    LocalStore(folder).put("some%20folder/x", b"")
    (folder / "some folder").mkdir()
    (folder / "some folder" / "object").write_bytes(b"content")
    with serving_folder(folder, ranges=True) as served:
        for url in (f"{served.url}/some%20folder", f"{served.url}/some%20folder/"):
            assert WebStore(url).read("object") == b"content"
            assert WebStore(url).location == f"{served.url}/some%20folder/"


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_an_answer_that_one_may_not_is_access_denied(status):
    with answering(answer(status)) as served, pytest.raises(StoreAccessDenied, match="user and password"):
        WebStore(served.url).read("object")
    assert len(served.requests) == 1


@pytest.mark.parametrize("status", ["404 Not Found", "410 Gone"])
def test_an_answer_that_it_is_not_there_is_object_not_found(status):
    with answering(answer(status)) as served, pytest.raises(ObjectNotFound, match=r"/object: it is not there$"):
        WebStore(served.url).read("object")
    assert len(served.requests) == 1


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad Gateway", "503 Busy", "429 Too Many", "408 Slow"])
def test_an_answer_that_may_be_another_next_time_is_asked_for_three_times(status):
    with answering(answer(status)) as served, pytest.raises(StoreUnavailable, match=f"answered {status[:3]}"):
        WebStore(served.url).read("object")
    assert len(served.requests) == 3


def test_an_answer_that_is_another_next_time_is_taken():
    with answering(answer("503 Busy"), part(b"01", 0, 10)[:-1], part(b"01", 0, 10)) as served:
        assert WebStore(served.url).read("object", 0, 2) == b"01"


def test_any_other_answer_is_a_store_error():
    with answering(answer("418 I'm a teapot")) as served, pytest.raises(StoreError, match="answered 418"):
        WebStore(served.url).read("object")
    assert len(served.requests) == 1


@pytest.mark.parametrize(
    "cut",
    [
        answer("200 OK", b"01234", Content_Length="10"),
        answer("206 Partial Content", b"01234", Content_Length="10", Content_Range="bytes 0-9/10"),
        answer("206 Partial Content", b"01234", Content_Range="bytes 0-9/10"),
        answer("206 Partial Content", b"01234", Content_Range="bytes 0-4/10"),
        answer("200 OK", b"", Transfer_Encoding="chunked") + b"5\r\n01234\r\n",
        b"",
    ],
)
def test_an_answer_that_is_cut_is_store_unavailable(cut):
    with answering(cut.replace(b"Content-Length: 0\r\n", b"")) as served, pytest.raises(StoreUnavailable):
        WebStore(served.url).read("object", 0, 10)


@pytest.mark.parametrize("stated", ["bytes 1-10/11", "bytes */10", "bytes 0-/10", "lines 0-9/10", "", "bytes 0-9/10,"])
def test_an_answer_with_another_range_than_asked_for_is_a_store_error(stated):
    with (
        answering(answer("206 Partial Content", b"0123456789", Content_Range=stated)) as served,
        pytest.raises(StoreError, match="asked for bytes from 0 on"),
    ):
        WebStore(served.url).read("object", 0, 10)


def test_an_answer_with_more_than_was_asked_for_is_cut():
    with answering(part(b"3456789", 3, 10)) as served:
        assert WebStore(served.url).read("object", 3, 2) == b"34"


def test_an_answer_of_unknown_total_length_is_taken():
    with answering(part(b"34567", 3, "*")) as served:
        assert WebStore(served.url).read("object", 3, 100) == b"34567"


def test_a_chunked_answer_is_taken():
    head = answer("200 OK", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    with answering(head + b"5\r\n01234\r\n5\r\n56789\r\n0\r\n\r\n") as served:
        assert WebStore(served.url).read("object", 3, 4) == b"3456"


def test_no_encoding_is_asked_for_and_none_is_undone(folder):
    """A pack that is stored as it is, by whatever name, is what the digest is of."""
    with answering(answer("200 OK", b"as it is", Content_Encoding="gzip")) as served:
        assert WebStore(served.url).read("object") == b"as it is"
    assert "Accept-Encoding: identity" in served.requests[0]


def test_a_server_that_does_not_answer_is_store_unavailable(monkeypatch):
    monkeypatch.setattr(web, "_READ_TIMEOUT_S", 0.1)
    with answering(None) as served, pytest.raises(StoreUnavailable, match="check the network and the server"):
        WebStore(served.url).read("object")
    assert len(served.requests) == 3


def test_a_host_that_is_not_found_is_store_unavailable():
    with pytest.raises(StoreUnavailable, match="check the network"):
        WebStore("http://mirror.invalid").read("object")


# TLS, redirects, users, proxies


def test_a_certificate_that_nobody_trusts_is_a_store_error_that_names_the_variable(folder, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    with (
        serving_folder(folder, ranges=True, context=tls(certificates)) as served,
        pytest.raises(StoreError, match=r"CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"),
    ):
        WebStore(served.url).list("")
    assert served.requests == []


def test_a_certificate_of_another_host_is_a_store_error(folder, trusted_certificates, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "localhost")
    with (
        serving_folder(folder, ranges=True, context=tls(trusted_certificates)) as served,
        pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        WebStore(served.url.replace("127.0.0.1", "localhost")).list("")
    assert served.requests == []


def test_a_server_that_speaks_no_tls_is_store_unavailable(folder):
    with serving_folder(folder, ranges=True) as served, pytest.raises(StoreUnavailable):
        WebStore(served.url.replace("http:", "https:")).list("")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_a_redirect_is_followed_with_the_range(folder, status):
    (folder / "object").write_bytes(b"0123456789")
    with (
        serving_folder(folder, ranges=True) as served,
        answering(answer(status, Location=f"{served.url}/object")) as before,
    ):
        assert WebStore(before.url).read("anything", 3, 2) == b"34"


def test_the_body_of_a_redirect_is_not_read(folder):
    (folder / "object").write_bytes(b"content")
    long = bytes(64 * MIB)
    with (
        serving_folder(folder, ranges=True) as served,
        answering(answer("302 Found", long, Location=f"{served.url}/object")) as before,
    ):
        tracemalloc.start()
        try:
            assert WebStore(before.url).read("object") == b"content"
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 8 * MIB


def test_a_relative_redirect_is_followed():
    with answering(answer("302 Found", Location="elsewhere?token=1"), part(b"34", 3, 10)) as served:
        assert WebStore(f"{served.url}/folder").read("object", 3, 2) == b"34"
    assert [request.split()[1] for request in served.requests] == ["/folder/object", "/folder/elsewhere?token=1"]


@pytest.mark.parametrize("scheme", ["http", "HTTP", "ftp", "file"])
def test_a_redirect_from_https_to_another_scheme_is_refused(folder, trusted_certificates, scheme):
    (folder / "object").write_bytes(b"content")
    with (
        serving_folder(folder, ranges=True) as unsafe,
        answering(
            answer("302 Found", Location=f"{unsafe.url}/object".replace("http", scheme, 1)),
            context=tls(trusted_certificates),
        ) as served,
        pytest.raises(StoreError, match="from https:// to another scheme"),
    ):
        WebStore(served.url).read("object")
    assert unsafe.requests == []


def test_a_redirect_that_never_ends_is_a_store_error():
    with (
        answering(answer("302 Found", Location="again")) as served,
        pytest.raises(StoreError, match="more than 3 times"),
    ):
        WebStore(served.url).read("object")
    assert len(served.requests) == 4


@pytest.mark.parametrize("location", ["http://[", "ftp://127.0.0.1/object", "http://127.0.0.1:99999/"])
def test_a_redirect_to_nowhere_is_a_store_error(location):
    with answering(answer("302 Found", Location=location)) as served, pytest.raises(StoreError):
        WebStore(served.url).read("object")


def test_user_and_password_are_sent_to_the_mirror_alone(folder):
    (folder / "object").write_bytes(b"content")
    with (
        serving_folder(folder, ranges=True) as elsewhere,
        answering(answer("302 Found", Location=f"{elsewhere.url}/object")) as served,
    ):
        store = WebStore(served.url.replace("://", "://user:p%40ss@"))
        assert store.read("object") == b"content"
    authorization = base64.b64encode(b"user:p@ss").decode()
    assert f"authorization: Basic {authorization}".lower() in served.requests[0].lower()
    assert "authorization" not in elsewhere.requests[0].lower()


@pytest.mark.parametrize("status", ["401 No", "404 No", "418 No", "503 No"])
def test_user_and_password_are_in_no_message(status):
    with answering(answer(status)) as served:
        store = WebStore(served.url.replace("://", "://user:secret@"))
        with pytest.raises(StoreError) as caught:
            store.list("")
    assert "secret" not in store.location + str(caught.value)


@pytest.mark.parametrize(
    "url", ["https://", "https://user:secret@", "https://host:port", "https://host/?sig=secret", "https://host/#secret"]
)
def test_what_is_no_url_of_a_folder_is_refused_without_its_secrets(url):
    with pytest.raises(SettingsError, match="give https://host/path") as caught:
        WebStore(url)
    assert "secret" not in str(caught.value)


def test_a_proxy_that_the_environment_names_is_used(monkeypatch):
    with answering(part(b"34", 3, 10)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("://", "://user:secret@"))
        assert WebStore("http://mirror.invalid/folder").read("object", 3, 2) == b"34"
    assert proxy.requests[0].startswith("GET http://mirror.invalid/folder/object ")
    assert base64.b64encode(b"user:secret").decode() in proxy.requests[0]


def test_a_proxy_is_asked_for_a_tunnel_to_what_is_https(monkeypatch):
    with answering(answer("403 Forbidden")) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        with pytest.raises(StoreUnavailable, match="403 Forbidden"):
            WebStore("https://mirror.invalid/folder").read("object")
    assert proxy.requests[0].startswith("CONNECT mirror.invalid:443 ")


@pytest.mark.parametrize("proxy", ["gopher://127.0.0.1:70", "http://user:secret@host:port"])
def test_what_is_no_proxy_is_refused_by_the_name_of_its_variable(monkeypatch, proxy):
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(StoreError, match="http_proxy") as caught:
        WebStore("http://mirror.invalid/folder").list("")
    assert "secret" not in "".join(traceback.format_exception(caught.value))


# The index


def test_an_index_lists_all_objects_but_itself(folder):
    for name in ("v1/b.pack", "v1/deep/a.pack", "top"):
        LocalStore(folder).put(name, name.encode())
    assert write_index(folder) == 3
    assert write_index(folder) == 3
    entries = [entry for entry in LocalStore(folder).list("") if entry.name != "index.json"]
    assert parse_index((folder / "index.json").read_bytes()) == entries


def test_an_index_of_an_empty_folder_lists_nothing(folder):
    assert write_index(folder) == 0
    assert parse_index((folder / "index.json").read_bytes()) == []


def test_an_index_of_a_folder_that_is_not_there_is_object_not_found_and_makes_none(tmp_path):
    with pytest.raises(ObjectNotFound, match="is not there"):
        write_index(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []


def test_an_index_is_replaced_whole(folder):
    """Readers of the file that was there go on reading it."""
    write_index(folder)
    with (folder / "index.json").open("rb") as before:
        LocalStore(folder).put("v1/a.pack", b"")
        write_index(folder)
        assert parse_index(before.read()) == []
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["index.json"]


def test_a_missing_index_is_object_not_found_and_says_how_to_make_it(folder):
    with serving_folder(folder, ranges=True) as served, pytest.raises(ObjectNotFound, match="write_index"):
        WebStore(served.url).list("")


def test_what_an_index_says_of_an_object_beyond_this_is_ignored():
    content = json.dumps({"objects": [OBJECT | {"etag": "x"}], "version": 2}).encode()
    assert parse_index(content) == [StoredObject("v1/a.pack", 1, 1.5)]


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
    entry(name=None),
    entry(name=1),
    entry(name=""),
    entry(name="/etc/passwd"),
    entry(name="../../etc/passwd"),
    entry(name="v1/../../a"),
    entry(name="v1/.."),
    entry(name="v1/./a"),
    entry(name="v1//a"),
    entry(name="v1/"),
    entry(name="v1/a\nb"),
    entry(name="v1/a\x00b"),
    entry(name="v1/a\x7fb"),
    entry(name="v1/\udcff"),
    entry(size_bytes=None),
    entry(size_bytes=-1),
    entry(size_bytes=1.0),
    entry(size_bytes="1"),
    entry(size_bytes=True),
    entry(size_bytes=1 << 63),
    entry(modified_s=None),
    entry(modified_s="1"),
    entry(modified_s=False),
    entry(modified_s=float("nan")),
    entry(modified_s=float("inf")),
    entry(modified_s=-1e300),
    entry(modified_s=10**400),
    json.dumps({"objects": [OBJECT, OBJECT]}),
]


@pytest.mark.parametrize("index", BAD_INDEXES, ids=range(len(BAD_INDEXES)))
def test_a_bad_index_is_a_store_error_that_says_where_it_is(index):
    with (
        answering(answer("200 OK", index.encode("latin-1"))) as served,
        pytest.raises(StoreError, match=r"http://127.0.0.1:\d+/index.json: .*; make it again"),
    ):
        WebStore(served.url).list("")
    assert len(served.requests) == 1


def test_an_index_that_is_too_large_is_read_no_further(folder):
    with (folder / "index.json").open("wb") as file:
        file.truncate(4 * MOST_INDEX_BYTES)
    with (
        serving_folder(folder, ranges=True) as served,
        pytest.raises(StoreError, match=f"more than {MOST_INDEX_BYTES}"),
    ):
        WebStore(served.url).list("")
    assert served.sent_bytes < 2 * MOST_INDEX_BYTES


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*OBJECT, "objects"]) | st.text(), inner),
)


@given(
    _ANYTHING | st.fixed_dictionaries({"objects": st.lists(st.fixed_dictionaries(dict.fromkeys(OBJECT, _ANYTHING)))})
)
def test_any_json_is_an_index_or_a_value_error(value):
    try:
        found = parse_index(json.dumps(value).encode())
    except ValueError:
        return
    for entry in found:
        assert not entry.name.startswith("/")
        assert ".." not in entry.name.split("/")
        assert abs(entry.modified_s) < float("inf")


def test_an_object_of_a_mirror_that_is_gone_is_object_not_found(folder):
    LocalStore(folder).put("v1/a.pack", b"content")
    write_index(folder)
    LocalStore(folder).delete("v1/a.pack")
    with serving_folder(folder, ranges=True) as served:
        store = WebStore(served.url)
        assert len(store.list("v1/")) == 1
        with pytest.raises(ObjectNotFound):
            store.read("v1/a.pack")
