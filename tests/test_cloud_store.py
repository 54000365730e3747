"""Stores that obstore speaks to: what its errors mean, and that one request is one request."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import pytest
from filled_stores import ACTIONS
from web_servers import answer, answering

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.storage.stores import cloud
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.stores.cloud import CloudStore

SECRET = "c2VjcmV0"
CLOUD_VARIABLES = ("GOOGLE_", "AZURE_", "GCE_METADATA_")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path, closed_port, no_proxy) -> None:
    """Of this machine there are none: neither variables, nor files, nor a metadata server."""
    for name in [name for name in os.environ if name.startswith(CLOUD_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HOST", "IP", "ROOT"):
        monkeypatch.setenv(f"GCE_METADATA_{name}", f"127.0.0.1:{closed_port}")


def open_at(url: str, bucket: str = "bucket") -> CloudStore:
    """A store with this module's retries, at an endpoint that answers as a test says."""
    from obstore.store import S3Store

    objects = S3Store(
        bucket,
        endpoint=url,
        region="us-east-1",
        access_key_id="key",
        secret_access_key=SECRET,
        client_options={**cloud._READING, "allow_http": True},
        retry_config=cloud._RETRIES,
    )
    return CloudStore(objects, f"s3://{bucket}/")


every_action = pytest.mark.parametrize("action", ACTIONS)


def raised_by(action: str, store: CloudStore) -> StoreError:
    with pytest.raises(StoreError) as caught:
        ACTIONS[action](store)
    return caught.value


@every_action
@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "503 Slow Down"])
def test_an_answer_that_may_be_another_next_time_is_asked_for_three_times_and_access_is_denied_at_once(action, status):
    may_change = status == "503 Slow Down"
    with answering(answer(status)) as served:
        error = raised_by(action, open_at(served.url))
    assert type(error) is (StoreUnavailable if may_change else StoreAccessDenied)
    assert may_change or "check the credentials and what they may do" in str(error)
    assert len(served.requests) == (3 if may_change else 1)


STATED = {"ETag": '"x"', "Last_Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
MORE = answer("206 Partial Content", b"0123456789", Content_Range="bytes 0-4/10", **STATED)


def test_an_answer_with_more_than_was_asked_for_is_cut():
    with answering(MORE) as served:
        assert open_at(served.url).read("v1/a", 0, 5) == b"01234"


def test_a_store_that_does_not_answer_is_store_unavailable(monkeypatch):
    monkeypatch.setitem(cloud._READING, "read_timeout", timedelta(seconds=0.1))
    with answering(None) as served:
        assert type(raised_by("list", open_at(served.url))) is StoreUnavailable
    assert len(served.requests) == 3


def test_an_upload_may_take_longer_than_an_answer():
    """reqwest's read timeout would end it: it runs while a request is sent."""
    assert "read_timeout" not in cloud._UPLOADING
    assert cloud._UPLOADING["timeout"] > cloud._READING["timeout"] > cloud._READING["read_timeout"]


def test_a_message_is_one_line_with_what_was_asked_and_where():
    with answering(answer("503 Slow Down", b"<html>\nbusy\n</html>")) as served:
        message = str(raised_by("read", open_at(served.url)))
    assert message.startswith("cannot get v3/a from s3://bucket/: ")
    assert "\n" not in message
    assert "<" not in message


@pytest.mark.parametrize("name", ["v1/../a", "v1//a", "v1/a\nb", "v1/\0"])
@pytest.mark.parametrize("action", ["read", "put", "delete"])
def test_a_name_that_cannot_be_is_a_store_error(action, name):
    from obstore.store import MemoryStore

    store = CloudStore(MemoryStore(), "memory")
    calls = {"read": (0, 5), "put": (b"",), "delete": ()}
    with pytest.raises(StoreError):
        getattr(store, action)(name, *calls[action])


# One request


@pytest.mark.parametrize("as_file", [True, False])
def test_a_large_object_is_put_in_one_request(s3_bucket, s3_client, tmp_path, as_file):
    """An object of several parts has their number in its ETag."""
    content = bytes(12 << 20)
    (tmp_path / "file").write_bytes(content)
    open_at(s3_bucket.endpoint_url, s3_bucket.name).put("v1/object", tmp_path / "file" if as_file else content)
    head = s3_client.head_object(Bucket=s3_bucket.name, Key="v1/object")
    assert (head["ContentLength"], "-" in head["ETag"]) == (len(content), False)


# Credentials


def test_google_without_credentials_is_access_denied_and_names_the_variable():
    store = open_url("gs://bucket/prefix")
    assert store.location == "gs://bucket/prefix/"
    error = raised_by("list", store)
    assert type(error) is StoreAccessDenied
    assert "set GOOGLE_APPLICATION_CREDENTIALS" in str(error)


def test_credentials_that_are_not_there_are_access_denied_when_the_store_is_opened(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(StoreAccessDenied, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_url("gs://bucket")


def test_credentials_that_cannot_be_read_are_a_store_error_without_them(monkeypatch, tmp_path):
    (tmp_path / "key.json").write_text(f'{{"type": "service_account", "private_key": "{SECRET}", ')
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(StoreError) as caught:
        open_url("gs://bucket")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_azure_without_an_account_is_access_denied_when_the_store_is_opened():
    with pytest.raises(StoreAccessDenied, match=r"set .*AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"):
        open_url("az://container/prefix")


@every_action
def test_azures_signatures_are_neither_in_the_location_nor_in_messages_nor_in_what_caused_them(
    monkeypatch, closed_port, action
):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=2024-01-01&sig={SECRET}")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"https://127.0.0.1:{closed_port}/account")
    azure = open_url("az://container/prefix/")
    assert azure.location == "az://container/prefix/"
    error = raised_by(action, azure)
    assert type(error) is StoreUnavailable
    assert SECRET not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("name", ["org--credential-model", "service account", "NoSuchBucket"])
def test_an_object_with_the_name_of_a_problem_is_only_missing(name):
    with answering(answer("404 Not Found")) as served:
        with pytest.raises(ObjectNotFound) as caught:
            open_at(served.url).read(f"v1/{name}/a", 0, 5)
        assert "; " not in str(caught.value)
    with answering(answer("503 Slow Down")) as served, pytest.raises(StoreUnavailable):
        open_at(served.url).read(f"v1/{name}/a", 0, 5)
