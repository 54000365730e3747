"""`withdraw` and `reinstate`: what they take, ask and print, what the other commands then say, and a boot's answer."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from boots import assert_fully_warm, boot_once, settings
from filled_stores import put_pack, put_record
from web_servers import serving_folder

from compile_cache.key.cache_key import CacheKey
from compile_cache.store.local import LocalStore
from compile_cache.store.opening import open_url
from compile_cache.store.web import WebStore
from compile_cache.versions.catalog import catalog_of, read_catalog

MODEL = "org/model@" + "0" * 40


def digest_of(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".pack")


def names(store: LocalStore) -> set[str]:
    return {entry.name for entry in store.list("")}


# The two commands.


@pytest.mark.parametrize("kind", ["version", "pack"])
def test_what_is_withdrawn_by_its_beginning_is_reinstated_by_it(run, local, key, kind):
    name = put_pack(local, key)
    text = "org--model/vers" if kind == "version" else digest_of(name)[:12]
    done = run("withdraw", text, "--yes", "--reason", "wrong pictures")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"withdrawn {name}\nwithdrew 1 pack, ")
    assert names(local) == {name, name + ".withdrawn"}
    back = run("reinstate", text)
    assert (back.code, back.err) == (0, "")
    assert back.out == f"reinstated {name}\nreinstated 1 pack in {local.location}\n"
    assert names(local) == {name}


def test_a_bucket_is_withdrawn_from_and_reinstated_in(run, s3_bucket, local, key, monkeypatch):
    url = f"s3://{s3_bucket.name}/cache"
    monkeypatch.setenv("COMPILE_CACHE_S3_ENDPOINT_URL", s3_bucket.endpoint_url)
    store = open_url(url, s3_bucket.endpoint_url)
    name = put_pack(store, key)
    assert run("withdraw", "org--model/version-1", "--store", url, "--yes").code == 0
    assert read_catalog(store).versions[0].packs == ()
    assert run("reinstate", "org--model/version-1", "--store", url).code == 0
    assert [pack.name for pack in read_catalog(store).versions[0].packs] == [name]


def test_one_pack_of_several_is_withdrawn_and_then_the_version_is_withdrawn_whole(run, local, key):
    one, other = put_pack(local, key, {"a": b"1"}), put_pack(local, key, {"b": b"2"})
    assert run("withdraw", digest_of(one), "--yes", "--json").json["withdrawn"] == [one]
    assert run("withdraw", "org--model/version-1", "--yes", "--json").json["withdrawn"] == [other]
    again = run("withdraw", "org--model/version-1", "--yes")
    assert (again.code, again.out.startswith("nothing to withdraw: ")) == (0, True)
    assert run("reinstate", digest_of(one), "--json").json["reinstated"] == [one]
    assert names(local) == {one, other, other + ".withdrawn"}


def test_withdraw_asks_first(run, local, key):
    name = put_pack(local, key)
    for answer in ("n\n", ""):
        done = run("withdraw", "org--model/version-1", answer=answer)
        assert done.code == 1
        assert re.search(r"Withdraw 1 pack, .*, of org--model/version-1 in environment [0-9a-f]{12}\?", done.err)
        assert names(local) == {name}
    assert run("withdraw", "org--model/version-1", answer="y\n").code == 0
    assert names(local) == {name, name + ".withdrawn"}


@pytest.mark.parametrize("command", ["withdraw", "reinstate"])
def test_an_ambiguous_key_is_refused_and_changes_nothing(run, local, key, command):
    packs = [put_pack(local, k) for k in (key, replace(key, environment="0" * 32))]
    if command == "reinstate":
        for name in packs:
            local.put(name + ".withdrawn", b"{}")
    before = names(local)
    done = run(command, "org--model/version-1", *(["--yes"] if command == "withdraw" else []))
    assert (done.code, done.out) == (2, "")
    assert {line.strip() for line in done.err.splitlines()[1:]} == {
        f"{environment}/org--model/version-1" for environment in (key.environment, "0" * 32)
    }
    assert names(local) == before


def test_the_beginning_of_two_packs_of_a_version_is_ambiguous(run, local, key):
    for last in "ab":
        local.put(f"{key.prefix}{'0' * 63}{last}.pack", b"")
    before = names(local)
    done = run("withdraw", "0000", "--yes")
    assert done.code == 2
    assert {line.strip() for line in done.err.splitlines()[1:]} == {"0" * 63 + last for last in "ab"}
    assert names(local) == before


@pytest.mark.parametrize("command", ["withdraw", "reinstate"])
def test_what_is_not_there_ends_with_1(run, local, key, command):
    put_pack(local, key)
    done = run(command, "org--model/other")
    assert (done.code, done.out) == (1, "")
    state = {"withdraw": "stored", "reinstate": "withdrawn"}[command]
    assert done.err.startswith(f"error: nothing {state} begins with org--model/other")


def test_a_reason_of_several_lines_is_refused_and_changes_nothing(run, local, key):
    name = put_pack(local, key)
    done = run("withdraw", "org--model/version-1", "--reason", "a\nb", "--yes")
    assert done.code == 1
    assert "give one line of at most 200 characters" in done.err
    assert names(local) == {name}


def test_a_withdrawal_whose_pack_is_gone_can_be_taken_back(run, local, key):
    name = put_pack(local, key)
    run("withdraw", digest_of(name), "--yes")
    local.delete(name)
    assert run("reinstate", digest_of(name), "--json").json["missing"] == [name]
    assert names(local) == set()


def test_a_store_that_is_only_read_is_refused(run, local, key, monkeypatch):
    put_pack(local, key)
    monkeypatch.setenv("COMPILE_CACHE_STORE", "off")
    monkeypatch.setenv("COMPILE_CACHE_LAYERS", str(local.location))
    done = run("withdraw", "org--model/version-1", "--yes")
    assert done.code == 1
    assert done.err.startswith("error: this store is read-only")


def test_a_pack_of_a_layer_is_withdrawn_in_the_written_store(run, tmp_path, local, key, monkeypatch):
    baked = LocalStore(tmp_path / "baked")
    name = put_pack(baked, key)
    monkeypatch.setenv("COMPILE_CACHE_LAYERS", baked.location)
    assert run("withdraw", digest_of(name), "--yes").code == 0
    assert names(baked) == {name}
    assert names(local) == {name + ".withdrawn"}
    assert run("ls", "--json").json["versions"][0]["withdrawn_packs"] == 1


def test_a_withdrawal_in_a_layer_is_not_reinstated_and_the_exit_code_is_1(run, tmp_path, local, key, monkeypatch):
    baked = LocalStore(tmp_path / "baked")
    name = put_pack(local, key)
    baked.put(name + ".withdrawn", b"{}")
    monkeypatch.setenv("COMPILE_CACHE_LAYERS", baked.location)
    done = run("reinstate", digest_of(name))
    assert done.code == 1
    assert done.err.startswith(f"still withdrawn by a read-only layer: {name}. ")


def test_packs_with_the_same_bytes_are_named(run, local, key):
    put_pack(local, key)
    copy = put_pack(local, replace(key, model_version="2"))
    done = run("withdraw", "org--model/version-1", "--yes")
    assert done.err == f"in use, with the same bytes in 2 of 2 files: {copy}\n"


# The other commands.


@pytest.fixture
def withdrawn(run, local, key, environment) -> str:
    """The one withdrawn pack of a version with another pack; its name."""
    put_record(local, environment)
    name = put_pack(local, key, {"fxgraph/ab/fone/1": b"1", "ab/bad.so": b"bad"})
    put_pack(local, key, {"ab/good.so": b"good"})
    assert run("withdraw", digest_of(name), "--reason", "wrong pictures", "--yes").code == 0
    return name


SINCE = r"withdrawn since \d{4}-\d{2}-\d{2} \d{2}:\d{2} UTC: wrong pictures"


def test_ls_and_show_mark_it(run, withdrawn):
    assert run("ls").out.splitlines()[1].endswith("  1 withdrawn")
    assert run("ls", "--json").json["versions"][0]["packs"] == 2
    shown = run("show", "org").out
    assert re.search(rf"^pack {digest_of(withdrawn)}\n  not signed\n  {SINCE}\n", shown, re.MULTILINE)
    assert "  logical keys  1 so\n" in shown
    packs = {pack["name"]: pack for pack in run("show", "org", "--json").json["packs"]}
    assert packs.pop(withdrawn)["withdrawn_because"] == "wrong pictures"
    assert [pack["withdrawn_s"] for pack in packs.values()] == [None]


def test_verify_does_not_read_it_and_says_so(run, tmp_path, local, key, withdrawn):
    (tmp_path / "store" / withdrawn).write_bytes(b"damaged")
    found = run("verify", "--delete", "--yes")
    assert found.code == 0
    assert re.search(rf"^withdrawn .*{SINCE}", found.out, re.MULTILINE)
    assert found.out.endswith(": 1 sound, 1 withdrawn\n")
    assert withdrawn in names(local)


def test_verify_of_a_store_with_nothing_in_use_ends_with_1(run, local, key):
    put_pack(local, key)
    run("withdraw", "org--model/version-1", "--yes")
    assert run("verify").code == 1


def test_pull_and_push_leave_it_and_say_so(run, tmp_path, withdrawn):
    pulled = run("pull", "--to", tmp_path / "pulled")
    assert pulled.code == 0
    assert re.fullmatch(rf"not copied: {re.escape(withdrawn)}: {SINCE}\n", pulled.err)
    assert pulled.out.startswith("copied 1 pack, ")
    pushed = run("push", "--from", tmp_path / "store", "--to", tmp_path / "pushed")
    assert (pushed.code, pushed.err) == (0, pulled.err)
    for folder in ("pulled", "pushed"):
        assert not [name for name in names(LocalStore(tmp_path / folder)) if name.startswith(withdrawn)]


def test_a_pull_of_nothing_but_withdrawn_packs_ends_with_1(run, tmp_path, local, key):
    put_pack(local, key)
    run("withdraw", "org--model/version-1", "--yes")
    found = run("pull", "--to", tmp_path / "pulled")
    assert found.code == 1
    assert found.err.startswith("not copied: ")


def test_explain_says_what_is_withdrawn_since_when_and_why(run, local):
    key = CacheKey(**run("explain", MODEL, "--json").json["key"])
    name = put_pack(local, key)
    run("withdraw", digest_of(name), "--reason", "wrong pictures", "--yes")
    found = run("explain", MODEL).out
    assert re.search(rf"^withdrawn    {re.escape(name)}: {SINCE.removeprefix('withdrawn ')}$", found, re.MULTILINE)
    assert re.search(rf"\nmiss: every pack stored for version .* is withdrawn; the last one is {SINCE}\n$", found)
    assert run("explain", MODEL, "--json").json["withdrawn"][0]["reason"] == "wrong pictures"
    run("reinstate", digest_of(name))
    assert run("explain", MODEL).out.splitlines()[-1].startswith("hit: 1 pack")


# A mirror.


def test_readers_of_a_mirror_see_the_withdrawal_and_the_way_back(run, tmp_path, local, key):
    mirror = tmp_path / "mirror"
    name = put_pack(local, key)
    run("pull", "--to", mirror)

    def in_use(url: str) -> list[str]:
        (version,) = catalog_of(WebStore(url).list(key.prefix)).versions
        return [pack.name for pack in version.packs]

    with serving_folder(mirror, ranges=True) as served:
        assert in_use(served.url) == [name]
        done = run("withdraw", digest_of(name), "--store", mirror, "--yes")
        assert done.err == f"renewed {mirror}/index.json\n"
        assert in_use(served.url) == []
        run("reinstate", digest_of(name), "--store", mirror)
        assert in_use(served.url) == [name]
        run("withdraw", digest_of(name), "--yes")
        run("pull", "--to", mirror)
        assert in_use(served.url) == []


# Boots.


def test_a_boot_does_without_a_withdrawn_version_compiles_publishes_and_hits_it_when_reinstated(run, tmp_path, cold):
    folder, cold = cold
    shutil.copytree(folder / "store", tmp_path / "store")
    environ, store = settings(tmp_path, dir=str(folder / "cache")), LocalStore(tmp_path / "store")
    (version,) = read_catalog(store).versions
    text = f"{version.key.model_name}/{version.key.model_version}"
    assert run("withdraw", text, "--yes", "--reason", "a trial").code == 0
    missed = boot_once(environ)
    assert missed.report["restore"]["outcome"] == "miss"
    assert missed.report["restore"]["reason"].endswith(": a trial")
    assert set(missed.steps.values()) == {"cold"}
    assert missed.report["publish"]["packs"] == cold.report["publish"]["packs"]
    (after,) = read_catalog(store).versions
    assert [pack.name for pack in after.withdrawn] == [pack.name for pack in version.packs]
    assert_fully_warm(boot_once(environ))
    assert run("withdraw", text, "--yes").code == 0
    for pack in version.packs:
        assert run("reinstate", digest_of(pack.name)).code == 0
    again = boot_once(environ)
    assert_fully_warm(again)
    assert again.output == cold.output
