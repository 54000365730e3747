"""The time limit of a call: a store that sends or takes a byte a second holds nobody for longer."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import filled_stores
import pytest
import toxic_proxy
from marked_processes import wait_for
from toxic_proxy import ToxicProxy

from compile_cache.errors import StoreUnavailable
from compile_cache.settings import Settings
from compile_cache.storage.pack.format import READ_BYTES
from compile_cache.storage.stores import transfer
from compile_cache.storage.stores.base import ObjectStore, open_url
from compile_cache.storage.stores.cloud import CloudStore
from compile_cache.storage.stores.s3 import S3Store
from compile_cache.storage.stores.transfer import limit_s, within_limit

MIB = 1 << 20
ACTIONS = {**filled_stores.ACTIONS, "put": lambda store: store.put("v3/a", bytes(100))}
CALLS = [*((kind, one) for kind in ("s3", "cloud") for one in ACTIONS), *(("web", one) for one in ("list", "read"))]


@pytest.fixture
def proxy(s3_bucket, s3_client) -> Iterator[ToxicProxy]:
    """Before a bucket that serves as a mirror, too."""
    index = {"objects": [{"name": "v3/a", "size_bytes": 1000, "modified_s": 1}]}
    s3_client.put_object(Bucket=s3_bucket.name, Key="v3/a", Body=bytes(1000), ACL="public-read")
    s3_client.put_object(Bucket=s3_bucket.name, Key="index.json", Body=json.dumps(index).encode(), ACL="public-read")
    with toxic_proxy.toxic_proxy(s3_bucket.endpoint_url) as proxy:
        yield proxy
        proxy.heal()
        wait_for(lambda: not calls_under_way())


@pytest.fixture
def open_store(proxy, s3_bucket, monkeypatch) -> Callable[[str], ObjectStore]:
    def open_kind(kind: str) -> ObjectStore:
        if kind == "s3":
            return S3Store(f"s3://{s3_bucket.name}")
        if kind == "web":
            return open_url(f"{proxy.url}/{s3_bucket.name}")
        from obstore.store import S3Store as Objects

        options = {"allow_http": True, "timeout": "20s"}
        return CloudStore(Objects(s3_bucket.name, client_options=options), "s3://bucket/")

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    return open_kind


def calls_under_way() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "compile-cache-store"]


def be_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every call 0.2 s."""
    monkeypatch.setattr(transfer, "limit_s", lambda size_bytes: 0.2)


@pytest.mark.parametrize("toxin", [toxic_proxy.trickle, toxic_proxy.trickle_the_answer])
@pytest.mark.parametrize(("kind", "action"), CALLS)
def test_a_store_that_drips_is_unavailable_when_the_time_is_up(open_store, proxy, monkeypatch, kind, action, toxin):
    store = open_store(kind)
    ACTIONS[action](store)
    be_impatient(monkeypatch)
    proxy.poison(toxin)
    with pytest.raises(StoreUnavailable, match=r"cannot .* not done within 0 s; the store or the network is too slow"):
        ACTIONS[action](store)
    assert proxy.spoiled


def test_only_32_abandoned_calls_run_and_further_ones_are_not_begun(monkeypatch):
    be_impatient(monkeypatch)
    release, begun = threading.Event(), []

    def hang(number: int) -> None:
        begun.append(number)
        release.wait()

    pool = ThreadPoolExecutor(32)
    for number in range(32):
        pool.submit(within_limit, "ask", 0, functools.partial(hang, number))
    wait_for(lambda: len(begun) == 32)
    for number in range(32, 34):
        with pytest.raises(StoreUnavailable, match="too slow"):
            within_limit("ask", 0, functools.partial(hang, number))
    assert len(calls_under_way()) == len(begun) == 32
    release.set()
    pool.shutdown()
    wait_for(lambda: not calls_under_way())
    monkeypatch.undo()
    assert within_limit("ask", 0, lambda: 7) == 7


def test_a_larger_transfer_has_more_time_and_a_pack_that_drips_leaves_some_for_the_others_of_a_restore():
    assert limit_s(0) < limit_s(4 * MIB) < limit_s(100 * MIB) < 10 * 60
    assert limit_s(READ_BYTES) < Settings().restore_timeout_s


def test_where_no_thread_can_be_started_the_call_is_made_all_the_same():
    """At exit the interpreter starts none any more."""
    refusal = RuntimeError("can't start new thread at interpreter shutdown")
    with mock.patch("threading.Thread.start", side_effect=refusal):
        assert within_limit("ask", 0, lambda: 7) == 7
