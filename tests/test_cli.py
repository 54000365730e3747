"""The command: what it says of a store, what it changes there, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Output, Run
from filled_stores import damage, put_pack, put_record, set_age
from programs import run_program

from compile_cache.cli import terminal as output
from compile_cache.errors import RefusedPack, StoreUnavailable
from compile_cache.inductor.counters import CompileCounts
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.lifecycle.boot_report import BootReport, RestoreReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings
from compile_cache.storage.pack.signing import Signer, generate_keys
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.stores.local import LocalStore

SCRIPT = Path(sys.executable).with_name("compile-cache")
MODEL = "org/model@" + "0" * 40
ESCAPE = "\x1b"


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "store"


def run_script(*arguments: str | Path, **environ: str) -> Output:
    """Runs the installed command in a process of its own."""
    done = subprocess.run(
        [SCRIPT, *arguments], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )
    return Output(done.returncode, done.stdout, done.stderr)


def digest_of(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".pack")


# ls


def test_ls_lists_what_was_used_last_first_with_totals_and_the_environments_summary(run, root, local, key, environment):
    now_s = time.time()
    old = put_pack(local, replace(key, model_version="old"))
    new = put_pack(local, replace(key, model_version="new"))
    put_record(local, environment)
    local.put(replace(key, model_version="old").prefix + "used-2026-11-20", b"")
    set_age(root, new, 3, now_s)
    set_age(root, old, 40, now_s)
    found = run("ls")
    rows = [line.split() for line in found.lines[1:3]]
    assert [row[1] for row in rows] == ["old", "new"]
    assert found.lines[1].endswith("1 month ago  just now")
    assert found.lines[2].endswith("3 days ago   3 days ago")
    summary = "torch 2.11.0+cu130, NVIDIA H100 80GB HBM3, CPython 3.12.9, regional default dynamic=False"
    assert f"{environment.digest[:12]}  {summary}" in found.lines
    size = output.size_text(sum(len(local.read(name)) for name in (old, new)))
    assert found.lines[-1] == f"2 versions, 2 packs, {size} in {root}"
    assert found.code == 0


def test_ls_as_json_is_one_document_with_the_record(run, root, local, key, environment):
    name = put_pack(local, key)
    put_record(local, environment)
    found = run("ls", "--json")
    size_bytes = len(local.read(name))
    assert found.json["size_bytes"] == size_bytes
    (version,) = found.json["versions"]
    modified_s = (root / name).stat().st_mtime
    assert version == {
        "model": "org--model",
        "version": "version-1",
        "environment": environment.digest,
        "packs": 1,
        "size_bytes": size_bytes,
        "published_s": modified_s,
        "used_s": modified_s,
    }
    assert found.json["environments"][environment.digest]["gpu"] == environment.gpu
    assert found.err == ""


def test_ls_lists_one_model_by_its_hub_id(run, local, key):
    put_pack(local, key)
    put_pack(local, replace(key, model_name="other"))
    assert [version["model"] for version in run("ls", "--model", "org/model", "--json").json["versions"]] == [
        "org--model"
    ]


def test_ls_of_an_empty_store_lists_nothing(run, root):
    assert run("ls").out == f"0 versions, 0 packs, 0 bytes in {root}\n"
    assert run("ls", "--json").json["versions"] == []


def test_ls_reads_all_layers_and_names_one_that_fails(run, variables, tmp_path, local, key, closed_port):
    baked = LocalStore(tmp_path / "baked")
    put_pack(baked, replace(key, model_version="baked"))
    put_pack(local, key)
    variables.setenv("COMPILE_CACHE_LAYERS", f"{tmp_path / 'baked'},s3://bucket/x")
    variables.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed_port}")
    variables.setenv("AWS_ACCESS_KEY_ID", "test")
    variables.setenv("AWS_SECRET_ACCESS_KEY", "test")
    found = run("ls", "--json")
    assert {version["version"] for version in found.json["versions"]} == {"baked", "version-1"}
    assert found.err.startswith("warning: left out: cannot list s3://bucket/x")
    assert len(found.err.splitlines()) == 1


def test_a_store_that_is_given_is_looked_at_alone(run, variables, tmp_path, local, key):
    put_pack(local, key)
    put_pack(LocalStore(tmp_path / "other"), replace(key, model_version="other"))
    variables.setenv("COMPILE_CACHE_LAYERS", str(local.location))
    found = run("ls", "--store", tmp_path / "other", "--json")
    assert [version["version"] for version in found.json["versions"]] == ["other"]


def test_nothing_in_a_store_reaches_the_terminal_as_a_command(run, root, local, key, environment):
    hostile = replace(environment, gpu=f"{ESCAPE}[31mred", torch="[bold]2[/bold]")
    put_pack(local, replace(key, environment=hostile.digest))
    put_record(local, hostile)
    plain = replace(environment, gpu="[link=https://example.com]GPU[/link]")
    name = put_pack(local, replace(key, environment=plain.digest), {"[red]a": b""}, creator="[blink]creator")
    put_record(local, plain)
    local.put(f"v2/{ESCAPE}[2J/m/v/{'a' * 64}.pack", b"")
    for arguments in (["ls"], ["show", digest_of(name), "--files"], ["verify"]):
        found = run(*arguments)
        assert ESCAPE not in found.out + found.err
    assert "[link=https://example.com]GPU[/link]" in run("ls").out
    shown = run("show", digest_of(name), "--files").out
    assert "[red]a" in shown
    assert "[blink]creator" in shown


# show


@pytest.fixture
def filled(local, key, environment) -> Mapping[str, str]:
    """Versions `v1` and `v10` in one environment, and `v2` in two; the packs' names by a name for each."""
    put_record(local, environment)
    keys = {
        "v1": replace(key, model_version="v1"),
        "v10": replace(key, model_version="v10"),
        "v2": replace(key, model_version="v2"),
        "v2 elsewhere": replace(key, model_version="v2", environment="0" * 32),
    }
    return {name: put_pack(local, key, {f"{name}.so": name.encode()}) for name, key in keys.items()}


def test_show_shows_packs_with_files_sizes_creator_and_logical_keys_by_kind(run, local, key, environment):
    files = {"fxgraph/ab/fone/1": b"1", "fxgraph/cd/ftwo/1": b"2", "triton/AAA/k.cubin": b"3", "ab/k.so": b"4" * 1000}
    name = put_pack(local, key, files)
    put_record(local, environment)
    found = run("show", "org--model/version-1")
    assert found.lines[0] == "org--model/version-1"
    assert "  logical keys  2 fxgraph, 1 so, 1 triton" in found.lines
    assert f"pack {digest_of(name)}" in found.lines
    assert f"  4 files, {output.size_text(len(local.read(name)))} stored, 1.0 kB unpacked" in found.lines
    assert found.lines[-1].endswith("by the test")
    assert "k.cubin" not in found.out


def test_show_with_files_lists_each_as_json_too(run, local, key):
    put_pack(local, key, {"ab/k.so": b"4" * 1000, "ab/l.py": b"5"})
    assert [line.split()[-1] for line in run("show", "org", "--files").lines[-2:]] == ["ab/k.so", "ab/l.py"]
    (pack,) = run("show", "org", "--json", "--files").json["packs"]
    assert [(file["path"], file["size_bytes"]) for file in pack["files"]] == [("ab/k.so", 1000), ("ab/l.py", 1)]
    assert run("show", "org", "--json").json["packs"][0]["files"] == 2


@pytest.mark.parametrize(
    "text", ["org--model/v10", "org--model/v1", "v2/{digest}/org--model/v2/", "{digest:.5}/org--model/v1"]
)
def test_a_version_named_in_full_is_shown_though_others_begin_with_its_name(run, filled, environment, text):
    found = run("show", text.format(digest=environment.digest))
    assert found.lines[0] == f"org--model/{text.strip('/').rpartition('/')[2]}"


def test_the_beginning_of_a_version_is_enough(run, local, key):
    put_pack(local, replace(key, model_version="0123456789abcdef" * 2))
    assert run("ls").lines[1].split()[1] == "0123456789ab"
    assert run("show", "org--model/0123456789ab").lines[0] == f"org--model/{'0123456789abcdef' * 2}"


def test_a_packs_name_shows_its_version(run, filled):
    assert f"pack {digest_of(filled['v10'])}" in run("show", digest_of(filled["v10"])[:12]).lines


def test_what_may_be_several_versions_ends_with_2_and_names_them(run, filled, environment):
    found = run("show", "org--model/v2")
    assert found.code == 2
    assert found.out == ""
    candidates = {line.strip() for line in found.err.splitlines()[1:]}
    assert candidates == {f"{environment.digest}/org--model/v2", f"{'0' * 32}/org--model/v2"}
    for candidate in candidates:
        assert run("show", candidate).code == 0


def test_what_is_not_stored_ends_with_1(run, filled):
    found = run("show", "org--model/v3", "--json")
    assert (found.code, found.out) == (1, "")
    assert found.err.startswith("error: nothing stored begins with org--model/v3")


@pytest.mark.parametrize("slashes", ["/", "//"])
def test_a_slash_ends_a_models_name(run, local, key, slashes):
    longer = put_pack(local, replace(key, model_name="org--model-2"))
    assert run("show", f"org--model{slashes}").code == 1
    name = put_pack(local, key)
    assert run("show", f"org--model{slashes}").lines[0] == "org--model/version-1"
    assert run("rm", f"org--model{slashes}", "--yes").lines == [f"removed {name}"]
    assert names(local) >= {longer}


@pytest.mark.parametrize("arguments", [["", "--yes"], ["/", "--yes"], ["v2/", "--yes"], [" ", "--yes"]], ids=str)
def test_an_empty_name_is_refused(run, local, key, arguments):
    name = put_pack(local, key)
    for command in (["rm", *arguments], ["show", *arguments[:1]], ["rm", "org--model", *arguments]):
        found = run(*command)
        assert (found.code, found.out) == (1, ""), found
    assert names(local) == {name}


def test_show_names_the_key_that_signed(run, local, key):
    private, public = generate_keys()
    put_pack(local, key, signer=Signer(private))
    assert f"  signed by {public}" in run("show", "org").lines


def test_show_says_of_a_pack_that_cannot_be_used_why(run, root, local, key):
    damaged, sound = put_pack(local, key, {"a": b""}), put_pack(local, key, {"b": b"2"})
    (root / damaged).write_bytes(b"short")
    found = run("show", "org")
    assert "  damaged: it ends after 5 bytes, inside its header" in found.lines
    assert f"pack {digest_of(sound)}" in found.lines
    assert found.code == 0


# verify


def test_verify_of_a_sound_store_ends_with_0(run, local, key):
    put_pack(local, key)
    found = run("verify")
    assert found.code == 0
    assert found.lines[1].startswith("sound    org--model/version-1")
    assert found.lines[1].endswith("not signed")
    assert found.lines[-1].endswith(": 1 sound")


def test_verify_of_an_empty_store_ends_with_1(run):
    found = run("verify")
    assert found.code == 1
    assert found.lines[-1].endswith("nothing to verify")


def test_verify_names_each_pack_that_fails_with_its_reason_and_ends_with_1(run, root, local, key):
    put_pack(local, key, {"a": b"1" * 100})
    damaged = put_pack(local, key, {"b": b"2" * 100})
    damage(root, damaged)
    sound = put_pack(local, key, {"c": b"3"})
    misplaced = replace(key, model_version="other").prefix + sound.rpartition("/")[2]
    local.put(misplaced, root / sound)
    found = run("verify")
    assert found.code == 1
    assert re.search(rf"^damaged .*its f(ram|il)e .*\({re.escape(damaged)}\)$", found.out, re.MULTILINE)
    assert re.search(rf"^refused .*it is for .*\({re.escape(misplaced)}\)$", found.out, re.MULTILINE)
    assert {pack["verdict"] for pack in run("verify", "--json").json["packs"]} == {"sound", "damaged", "refused"}


def test_verify_says_who_signed_and_refuses_what_is_not_trusted(run, variables, local, key):
    private, public = generate_keys()
    put_pack(local, key, {"a": b"1"}, Signer(private))
    put_pack(local, key, {"b": b"2"})
    assert f"signed by {public}" in run("verify").out
    variables.setenv("COMPILE_CACHE_TRUSTED_KEYS", public)
    found = run("verify")
    assert found.code == 1
    assert f"signed by {public}" in found.out
    assert "it is not signed, but COMPILE_CACHE_TRUSTED_KEYS is set" in found.out


def test_verify_looks_at_one_model(run, root, local, key):
    put_pack(local, key)
    damage(root, put_pack(local, replace(key, model_name="other")))
    assert run("verify", "--model", "org/model").code == 0


def all_kinds(root: Path, local: LocalStore, key: CacheKey, variables: pytest.MonkeyPatch) -> tuple[str, set[str]]:
    """A damaged pack, and packs that fail for anything else."""
    private, public = generate_keys()
    variables.setenv("COMPILE_CACHE_TRUSTED_KEYS", public)
    sound = put_pack(local, key, {"a": b"1"}, Signer(private))
    unsigned = put_pack(local, key, {"b": b"2"})
    misplaced = replace(key, model_version="other").prefix + sound.rpartition("/")[2]
    local.put(misplaced, root / sound)
    damaged = put_pack(local, key, {"c": b"3"}, Signer(private))
    damage(root, damaged)
    return damaged, {sound, unsigned, misplaced}


def test_delete_asks_first_and_deletes_what_is_damaged_and_nothing_else(run, root, local, key, variables):
    damaged, others = all_kinds(root, local, key, variables)
    for answer in ("n\n", ""):
        found = run("verify", "--delete", answer=answer)
        assert "Delete the damaged packs (1)?" in found.err
        assert {entry.name for entry in local.list("")} == {damaged, *others}
    found = run("verify", "--delete", answer="y\n")
    assert {entry.name for entry in local.list("")} == others
    assert found.err.splitlines()[-1].endswith(f"deleted {damaged}")
    assert found.code == 1


def test_delete_spares_a_pack_that_only_could_not_be_read(run, root, local, key, monkeypatch):
    name = put_pack(local, key)
    read = LocalStore.read

    def fail(store: LocalStore, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        if name.endswith(".pack"):
            raise StoreUnavailable("it hangs")
        return read(store, name, start, size_bytes)

    monkeypatch.setattr(LocalStore, "read", fail)
    found = run("verify", "--delete", "--yes")
    assert found.code == 1
    assert "unreadable" in found.out
    assert (root / name).exists()


def test_delete_spares_a_pack_that_is_sound_when_it_is_read_again(run, root, local, key, monkeypatch):
    name = put_pack(local, key)
    read, reads = LocalStore.read, []

    def corrupt_once(store: LocalStore, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        reads.append(name)
        data = read(store, name, start, size_bytes)
        return data if len(reads) > 1 else b"x" + data[1:]

    monkeypatch.setattr(LocalStore, "read", corrupt_once)
    assert "damaged" in run("verify", "--delete", "--yes").out
    assert (root / name).exists()


def test_delete_leaves_layers_alone(run, variables, tmp_path, root, local, key):
    baked = LocalStore(tmp_path / "baked")
    name = put_pack(baked, key)
    damage(tmp_path / "baked", name)
    put_pack(local, replace(key, model_version="mine"))
    variables.setenv("COMPILE_CACHE_LAYERS", str(tmp_path / "baked"))
    assert run("verify", "--delete", "--yes").code == 0
    assert (tmp_path / "baked" / name).exists()


# pull and push


def test_what_is_pulled_can_be_served_and_pushed_and_is_the_same(run, root, local, key, environment, tmp_path):
    put_pack(local, key)
    put_record(local, environment)
    pulled, pushed = tmp_path / "pulled", tmp_path / "pushed"
    assert run("pull", "--to", pulled).code == 0
    index = json.loads((pulled / "index.json").read_text())
    assert {entry["name"] for entry in index["objects"]} == {entry.name for entry in local.list("")}
    assert run("push", "--from", pulled, "--to", pushed).code == 0
    copies = {entry.name: local.read(entry.name) for entry in local.list("")}
    assert {entry.name: LocalStore(pushed).read(entry.name) for entry in LocalStore(pushed).list("")} == copies


def test_a_second_pull_copies_nothing(run, local, key, tmp_path):
    put_pack(local, key)
    run("pull", "--to", tmp_path / "pulled")
    assert run("pull", "--to", tmp_path / "pulled").out == (
        f"copied 0 packs, 0 bytes, to {tmp_path / 'pulled'}; 1 pack there already\n"
    )


@pytest.mark.parametrize(
    ("options", "count"),
    [(["--model", "org/model"], 4), (["--version", "v1"], 1), (["--environment", "0000"], 1), (["--version", "v2"], 2)],
    ids=str,
)
def test_pull_takes_what_is_asked_for(run, filled, tmp_path, options, count):
    run("pull", "--to", tmp_path / "pulled", *options)
    assert len(list((tmp_path / "pulled").rglob("*.pack"))) == count


def test_a_pull_of_what_is_not_there_ends_with_1_and_says_what_was_asked_for(run, filled, tmp_path):
    found = run("pull", "--to", tmp_path / "pulled", "--model", "org/other", "--version", "v1")
    assert (found.code, found.out) == (1, "")
    assert found.err.endswith("of model org/other, version v1\n")
    assert not (tmp_path / "pulled").exists()


def test_a_pull_names_what_it_did_not_copy_and_ends_with_1(run, root, local, key, tmp_path):
    put_pack(local, key, {"a": b"1"})
    damaged = put_pack(local, key, {"b": b"2"})
    damage(root, damaged)
    found = run("pull", "--to", tmp_path / "pulled")
    assert found.code == 1
    assert found.err.startswith(f"not copied: {damaged}: ")
    assert found.out.startswith("copied 1 pack, ")
    assert len(json.loads((tmp_path / "pulled" / "index.json").read_text())["objects"]) == 1


def test_a_push_out_of_a_folder_that_is_not_there_is_a_usage_error(run, tmp_path):
    assert run("push", "--from", tmp_path / "nowhere").code == 2


def test_a_push_needs_a_store_that_can_be_written(run, variables, root, local, key):
    put_pack(local, key)
    variables.setenv("COMPILE_CACHE_STORE", "off")
    variables.setenv("COMPILE_CACHE_LAYERS", str(root))
    found = run("push", "--from", root)
    assert found.code == 1
    assert found.err.startswith("error: this store is read-only: set COMPILE_CACHE_STORE")


# prune


@pytest.fixture
def aged(root, local, key) -> tuple[str, str]:
    """The packs of a version used 40 days ago, and of one used an hour ago."""
    now_s = time.time()
    old, new = put_pack(local, replace(key, model_version="old")), put_pack(local, replace(key, model_version="new"))
    set_age(root, old, 40, now_s)
    set_age(root, new, 1 / 24, now_s)
    return old, new


def names(local: LocalStore) -> set[str]:
    return {entry.name for entry in local.list("")}


# rm


def test_rm_deletes_a_versions_packs_and_no_others(run, local, key):
    names = [put_pack(local, key), put_pack(local, key, {"more.so": b"more"})]
    other = put_pack(local, replace(key, model_version="version-2"))
    found = run("rm", "org--model/version-1", "--yes")
    assert found.code == 0
    assert sorted(found.lines) == sorted(f"removed {name}" for name in names)
    assert [entry.name for entry in local.list("v2/") if entry.name.endswith(".pack")] == [other]


def test_rm_deletes_one_pack_by_the_beginning_of_its_name(run, local, key):
    name, other = put_pack(local, key), put_pack(local, key, {"more.so": b"more"})
    assert run("rm", "org--model/version-1", digest_of(name)[:12], "--yes", "--json").json["removed"] == [name]
    assert [entry.name for entry in local.list("v2/") if entry.name.endswith(".pack")] == [other]
    missing = run("rm", "org--model/version-1", "f00", "--yes")
    assert (missing.code, "no pack begins with f00" in missing.err) == (1, True)


def test_rm_asks_first_and_names_yes_where_nobody_answers(run, local, key):
    name = put_pack(local, key)
    assert "give --yes" in run("rm", "org--model/version-1", answer="").err
    assert run("rm", "org--model/version-1", answer="n\n").code == 1
    assert local.read(name)
    assert run("rm", "org--model/version-1", answer="y\n").lines[-1] == f"removed {name}"


def test_prune_without_apply_says_that_nothing_was_removed_and_removes_nothing(run, root, local, aged):
    found = run("prune", "--unused-days", "30")
    assert found.code == 0
    assert found.lines[1].split()[:2] == ["org--model", "old"]
    assert found.lines[1].endswith("not used for 40 days")
    assert found.lines[-1] == "This was a dry run: nothing was removed. Add --apply to remove them."
    size = output.size_text(len(local.read(aged[0])))
    assert found.lines[-2].startswith(f"would remove 1 version, {size}, from {root}")
    assert names(local) == set(aged)


def test_prune_with_apply_removes_what_the_dry_run_said(run, local, aged):
    planned = run("prune", "--unused-days", "30", "--json").json
    done = run("prune", "--unused-days", "30", "--apply", "--json").json
    assert planned["applied"] is None
    assert done["applied"] == {"versions": 1, "packs": 1, "freed_bytes": planned["freed_bytes"], "skipped": []}
    assert planned["removals"] == done["removals"]
    assert names(local) == {aged[1]}


def test_prune_names_what_was_used_meanwhile(run, local, key, aged, monkeypatch):
    from compile_cache.cli import app as commands

    apply_prune = commands.apply_prune

    def use_first(store: LocalStore, plan: Any) -> Any:
        local.put(replace(key, model_version="old").prefix + "used-2026-11-21", b"")
        return apply_prune(store, plan)

    monkeypatch.setattr(commands, "apply_prune", use_first)
    found = run("prune", "--unused-days", "30", "--apply")
    assert found.err.startswith("kept, because it was used or published meanwhile: ")
    assert set(aged) <= names(local)


def test_prune_that_cannot_fit_because_of_what_is_in_use_says_so(run, local, aged):
    found = run("prune", "--max-bytes", "1B", "--apply")
    assert names(local) == {aged[1]}
    assert found.err.startswith("warning: the versions in use take ")


def test_prune_finds_nothing_to_do(run, root, local, aged):
    assert run("prune", "--keep-versions", "2").out.startswith(f"nothing to remove from {root}")


def test_prune_needs_a_rule(run):
    found = run("prune", "--apply")
    assert found.code == 2
    assert "--unused-days 30, --keep-versions 3 or --max-bytes 10GB" in found.err


@pytest.mark.parametrize(
    "arguments", [["--max-bytes", "ten"], ["--keep-versions", "0"], ["--unused-days", "-1"]], ids=str
)
def test_a_rule_that_makes_no_sense_is_a_usage_error(run, arguments):
    assert run("prune", *arguments).code == 2


# explain


def explained_key(run: Run, *arguments: str | Path) -> CacheKey:
    return CacheKey(**run("explain", MODEL, *arguments, "--json").json["key"])


def test_explain_says_hit_with_packs_and_bytes_where_a_boot_would_hit(run, local):
    name = put_pack(local, explained_key(run))
    found = run("explain", MODEL)
    assert found.code == 0
    assert found.lines[-1] == f"hit: 1 pack, {output.size_text(len(local.read(name)))}"
    assert run("explain", MODEL, "--json").json["outcome"] == "hit"


def test_explain_says_from_which_version_a_boot_would_be_seeded(run, local):
    put_pack(local, replace(explained_key(run), model_version="earlier"))
    assert run("explain", MODEL).lines[-1].startswith("seeded: from version earlier, 1 pack, ")


def test_explain_says_what_differs_where_a_boot_would_miss(run, local):
    found = run("explain", MODEL, "--json").json
    variables = tuple(found["environment"]["variables"])
    environment = Environment(**{**found["environment"], "variables": variables, "torch": "2.0.0"})
    put_pack(local, replace(CacheKey(**found["key"]), environment=environment.digest))
    put_record(local, environment)
    torch = found["environment"]["torch"]
    assert run("explain", MODEL).lines[-1] == f"miss: stored for another environment: torch 2.0.0 → {torch}"


@pytest.mark.parametrize(
    ("setting", "key"), zip(("SIGNING_KEY", "TRUSTED_KEYS"), generate_keys(), strict=True), ids=["private", "public"]
)
def test_explain_and_verify_refuse_what_a_boot_would_refuse(run, local, variables, setting, key):
    """A signer without trusted keys trusts itself alone."""
    name = put_pack(local, explained_key(run))
    variables.setenv(f"COMPILE_CACHE_{setting}", key)
    found = run("explain", MODEL)
    assert any(line.startswith(f"refused      {name}: it is not signed") for line in found.lines)
    assert found.lines[-1].startswith("miss: none of the packs stored")
    assert run("verify").code == 1


def test_explain_says_that_the_version_of_a_predictor_with_sources_is_another_one(run, local, tmp_path):
    (tmp_path / "predict.py").write_text("a = 1")
    sources = ("--source", tmp_path / "predict.py")
    put_pack(local, explained_key(run, *sources))
    found, other = run("explain", MODEL, *sources), run("explain", MODEL)
    version = output.short_version(explained_key(run, *sources).model_version)
    assert found.lines[-1].startswith("hit: ")
    assert not any(line.startswith("sources ") for line in found.lines)
    assert other.lines[-1].startswith("seeded: ")
    assert any(line.startswith("sources      none given: ") for line in other.lines)
    assert f"stored       for this environment: {version}" in other.lines


def test_explain_takes_sources_into_the_version_and_refuses_those_that_are_not_there(run, tmp_path):
    source = tmp_path / "predict.py"
    source.write_text("a = 1")
    before = explained_key(run, "--source", source)
    source.write_text("a = 2")
    assert explained_key(run, "--source", source).model_version != before.model_version
    missing = run("explain", MODEL, "--source", tmp_path / "nowhere.py")
    assert missing.code == 1
    assert "nowhere.py" in missing.err


def test_explain_computes_the_key_that_a_boot_computes(run, variables, root, tmp_path):
    """The boot's restore, without torch, in this process: both know the model, the settings and this machine."""
    from compile_cache.lifecycle.restore import Restore
    from compile_cache.storage.directory import CacheDirectory

    variables.setenv("COMPILE_CACHE_MODE", "max-autotune-no-cudagraphs")
    variables.setenv("TRITON_SOMETHING", "1")
    settings = Settings.from_env(os.environ)
    restore = Restore(settings, CacheDirectory.claim(tmp_path / "cache"), MODEL, (), dict(os.environ))
    restore.start()
    restore._fetching.done.wait(60)
    assert restore._fetching.packs is not None, restore._fetching.failure
    assert explained_key(run) == restore._fetching.packs.key


def test_explain_warns_where_nothing_is_restored(run, variables):
    variables.setenv("COMPILE_CACHE_SCOPE", "off")
    assert run("explain", MODEL).err == "warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing\n"


@pytest.mark.parametrize("arguments", [[], [MODEL, "--report", "report.json"]], ids=str)
def test_explain_explains_either_this_machine_or_a_report(run, arguments):
    assert run("explain", *arguments).code == 2


@pytest.fixture
def report(tmp_path) -> Path:
    written = BootReport(
        model_name="org--model",
        phases={"weights": 1.5},
        restore=RestoreReport("miss", "nothing is stored", refused=[RefusedPack("a.pack", "it is damaged")]),
        counts=CompileCounts(fxgraph_misses=2),
        regions=[
            RegionReport("Block", 12, "cold", relative_error=float("inf")),
            RegionReport("Head", 1, "eager", reason="bug"),
        ],
    )
    written.publish.failures.append("the store is down")
    path = tmp_path / "report.json"
    written.write(path)
    return path


def test_a_report_is_explained_by_outcome_reason_regions_and_refused_packs(run, report):
    found = run("explain", "--report", report)
    assert found.code == 0
    assert any(line.startswith("restore: miss (nothing is stored)") for line in found.lines)
    assert "refused pack a.pack: it is damaged" in found.lines
    assert any(line.startswith("region Block x12: cold") for line in found.lines)
    assert any(line.startswith("region Head x1: eager (bug)") for line in found.lines)
    assert "not published: the store is down" in found.lines
    assert run("explain", "--report", report, "--json").json == json.loads(report.read_text())


def test_explain_refuses_what_report_refuses(run, report):
    report.write_text("{}")
    found = run("explain", "--report", report)
    assert found.code == 1
    assert found.err.startswith(f"error: {report} is no boot report")


# keygen


def test_keygen_prints_a_pair_that_the_settings_take(run):
    lines = [line.split("=", 1) for line in run("keygen").lines if not line.startswith("#")]
    settings = Settings.from_env(dict(lines))
    assert settings.may_publish
    assert settings.trusted_keys == (Signer(settings.signing_key).public_key,)


def test_keygen_writes_a_private_key_that_only_its_owner_reads_and_never_overwrites_it(run, tmp_path):
    folder = tmp_path / "my keys"
    found = run("keygen", "--out", folder)
    private = (folder / "signing.key").read_text()
    assert (folder / "signing.key").stat().st_mode & 0o777 == 0o600
    assert Signer(private.strip()).public_key == (folder / "signing.pub").read_text().strip()
    assert private.strip() not in found.out
    again = run("keygen", "--out", folder)
    assert again.code == 1
    assert (folder / "signing.key").read_text() == private
    shown = "\n".join(line for line in found.lines) + '\nprintf %s "$COMPILE_CACHE_SIGNING_KEY"'
    assert subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout == private.strip()


def test_keygen_with_only_the_public_key_there_writes_neither(run, tmp_path):
    (tmp_path / "signing.pub").write_text("mine")
    assert run("keygen", "--out", tmp_path).code == 1
    assert not (tmp_path / "signing.key").exists()


# How it fails.


@pytest.mark.parametrize(
    "command", [["ls"], ["verify"], ["show", "x"], ["prune", "--unused-days", "1"], ["explain", MODEL]]
)
def test_a_wrong_setting_is_one_line_and_the_exit_code_is_1(run, variables, command):
    variables.setenv("COMPILE_CACHE_STOER", "x")
    found = run(*command)
    assert (found.code, found.out) == (1, "")
    assert found.err == "error: COMPILE_CACHE_STOER is not a setting; did you mean COMPILE_CACHE_STORE?\n"


@pytest.mark.parametrize("url", ["off", "ftp://host/folder", "s3://", "s3://bucket/prefix"])
def test_a_store_that_is_none_or_does_not_answer_is_one_line(run, url, s3_bucket, closed_port, variables):
    variables.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed_port}")
    found = run("ls", "--store", url)
    assert found.code == 1
    assert found.err.startswith("error: " if url != "s3://bucket/prefix" else f"error: cannot list {url}")
    assert len(found.err.splitlines()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/prefix",
        "s3://user:SECRET@bucket",
        "s3://bucket/prefix?X-Amz-Signature=SECRET",
        "az://container/prefix?sv=2024&sig=SECRET",
        "az://container?sig=SECRET",
        "gs://user:a/SECRET@bucket",
        "https://user:SECRET@127.0.0.1:{port}/folder",
        "https://127.0.0.1:{port}/folder?sig=SECRET",
        "ftp://user:SECRET@host",
    ],
)
def test_a_stores_secrets_are_never_printed(run, url, aws_variables, closed_port, variables):
    variables.setenv("AWS_ENDPOINT_URL_S3", f"http://user:SECRET@127.0.0.1:{closed_port}")
    url = url.format(port=closed_port)
    for command in (["ls", "--store", url], ["explain", MODEL, "--store", url, "--json"], ["rm", "x", "--store", url]):
        found = run(*command)
        assert (found.code, found.err.startswith("error: ")) == (1, True), found
        assert "SECRET" not in found.out + found.err
    variables.setenv("COMPILE_CACHE_STORE" if url.startswith("s3") else "COMPILE_CACHE_LAYERS", url)
    done = run_script("run", "toy", "--", sys.executable, "-c", "", COMPILE_CACHE_EXIT_BUDGET_S="0")
    assert "SECRET" not in done.out + done.err
    assert "restore" in done.err or "run.uncached" in done.err


def test_an_unknown_command_is_a_usage_error(run):
    assert run("frobnicate").code == 2


# In S3, through the installed command.


def test_a_bucket_is_filled_listed_verified_and_pruned(variables, s3_bucket, local, key, environment, tmp_path):
    put_pack(local, key)
    put_record(local, environment)
    url = f"s3://{s3_bucket.name}/cache"
    environ = {"COMPILE_CACHE_STORE": url}
    pushed = run_script("push", "--from", local.location, **environ)
    assert (pushed.code, pushed.err) == (0, "")
    listed = run_script("ls", "--json", **environ)
    assert [version["model"] for version in listed.json["versions"]] == ["org--model"]
    verified = run_script("verify", **environ)
    assert (verified.code, verified.err) == (0, "")
    pruned = run_script("prune", "--unused-days", "0", "--in-use-days", "0", "--apply", **environ)
    assert (pruned.code, pruned.err) == (0, "")
    assert open_url(url).list("") == []


def test_the_installed_command_says_its_version(variables):
    assert re.fullmatch(r"cog-compile-cache \d+\.\d+\.\d+\n", run_script("--version").out)


def test_a_reader_that_stops_reading_ends_it_quietly(variables, local, key):
    for number in range(300):
        local.put(f"{replace(key, model_version=str(number)).prefix}{'a' * 64}.pack", b"")
    done = subprocess.run(f"{SCRIPT} ls --json | head -1", shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(
    ("package", "command"), [("typer", ["ls"]), ("jinja2", ["report"]), ("msgspec", ["explain", "--report", "x"])]
)
def test_without_a_package_it_says_how_to_install_it(tmp_path, package, command):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name='{package}')")
    done = run_script(*command, PYTHONPATH=str(tmp_path))
    assert (done.code, done.out) == (1, "")
    remedy = "pip install '.[cli]' in a checkout of cog-compile-cache"
    assert done.err == f"error: compile-cache needs the package {package}: {remedy}\n"


@pytest.mark.parametrize("arguments", [["--version"], ["explain", MODEL], ["report", "--store", "empty"]], ids=str)
def test_commands_import_neither_torch_nor_boto3(variables, arguments):
    program = (
        "import sys; from typer.testing import CliRunner; from compile_cache.cli.app import app\n"
        f"print(CliRunner().invoke(app, {arguments!r}).exit_code, "
        "sorted({'torch', 'boto3', 'obstore'} & set(sys.modules)))"
    )
    done = run_program(program)
    assert done.stdout in ("0 []\n", "1 []\n"), done.stderr


# Sizes and ages.


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("10GB", 10**10), ("1.5 TB", 1.5e12), ("512MiB", 512 << 20), ("2k", 2000), ("7", 7), ("7B", 7)],
)
def test_sizes_are_read_in_the_units_that_people_write(text, size_bytes):
    assert output.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "10 XB", "1e9", "iB", "10GB or so"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="no size"):
        output.parse_size(text)


def test_ages_are_written_in_the_largest_whole_unit_and_what_never_happened_is_never():
    ages_s = [-5, 59, 60, 3 * 3600 + 5, 86_400 * 800]
    texts = ["just now", "just now", "1 minute ago", "3 hours ago", "2 years ago"]
    assert [output.age_text(1e9, 1e9 + age_s) for age_s in ages_s] == texts
    assert output.age_text(0) == "never"


@pytest.mark.parametrize("char", ["\x1b", "\n", "\x9b", "\u202e", "\ud800", "\x00"])
def test_what_a_terminal_obeys_is_written_out_and_text_that_people_read_stays(char):
    assert output.printable(f"a{char}b").isascii()
    assert output.printable(f"a{char}b").isprintable()
    assert output.printable("torch 2.11.0 → 2.13.0, 模型 [bold]") == "torch 2.11.0 → 2.13.0, 模型 [bold]"
