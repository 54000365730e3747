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
from hostile_packs import MIB
from programs import run_program

from compile_cache.cli import printing as output
from compile_cache.key.cache_key import CacheKey
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


def run_script(*arguments: str | Path, **environ: str) -> Output:
    """Runs the installed command in a process of its own."""
    given = {**os.environ, **environ}
    done = subprocess.run([SCRIPT, *arguments], env=given, capture_output=True, text=True, timeout=60)
    return Output(done.returncode, done.stdout, done.stderr)


def digest_of(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".pack")


def packs(local: LocalStore) -> set[str]:
    return {entry.name for entry in local.list("v3/") if entry.name.endswith(".pack")}


# ls


def test_ls_lists_what_was_used_last_first_with_totals_and_the_environments_summary(run, root, local, key, environment):
    old = put_pack(local, replace(key, model_version="old"))
    new = put_pack(local, replace(key, model_version="new"))
    put_record(local, environment)
    mark = replace(key, model_version="old").prefix + "used-2026-11-20"
    for other in (mark, "v3/notes.txt"):
        local.put(other, b"")
    for name, days in ((mark, 0), (new, 3), (old, 40)):
        set_age(root, name, days, 1_800_000_000)
    found = run("ls")
    rows = [line.split() for line in found.lines[1:3]]
    assert [row[1] for row in rows] == ["old", "new"]
    assert rows[0][-2:] == ["2026-12-06", "2027-01-15"]
    assert rows[1][-2:] == ["2027-01-12", "2027-01-12"]
    summary = "torch 2.11.0+cu130, NVIDIA H100 80GB HBM3, CPython 3.12.9, regional default dynamic=False"
    assert f"{environment.digest[:12]}  {summary}" in found.lines
    size = output.size_text(sum(len(local.read(name, 0, MIB)) for name in (old, new)))
    assert found.lines[-1] == f"2 versions, 2 packs, {size} in {root}"
    assert (found.code, found.err) == (0, "")


def test_ls_as_json_is_one_document_of_versions_packs_and_records(run, local, key, environment):
    name = put_pack(local, key)
    put_record(local, environment)
    put_pack(local, replace(key, model_name="other"))
    found = run("ls", "--model", "org/model", "--json")
    (version,) = found.json["versions"]
    assert CacheKey(**version["key"]) == key
    assert [(pack["name"], pack["size_bytes"]) for pack in version["packs"]] == [(name, len(local.read(name, 0, MIB)))]
    assert found.json["environments"][environment.digest]["gpu"] == environment.gpu
    assert found.err == ""
    assert run("ls", "--store", "empty").out.startswith("0 versions, 0 packs, 0 bytes in ")


def test_ls_reads_all_layers_and_names_one_that_fails_and_a_store_that_is_given_alone(
    run, variables, tmp_path, local, key, aws_variables, closed_port
):
    put_pack(LocalStore(tmp_path / "baked"), replace(key, model_version="baked"))
    put_pack(local, key)
    variables.setenv("COMPILE_CACHE_LAYERS", f"{tmp_path / 'baked'},s3://bucket/x")
    variables.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed_port}")
    found = run("ls", "--json")
    assert {version["key"]["model_version"] for version in found.json["versions"]} == {"baked", "version-1"}
    assert found.err.startswith("warning: left out: cannot list s3://bucket/x")
    assert len(found.err.splitlines()) == 1
    alone = run("ls", "--store", tmp_path / "baked", "--json")
    assert [version["key"]["model_version"] for version in alone.json["versions"]] == ["baked"]


def test_nothing_in_a_store_reaches_the_terminal_as_a_command(run, local, key, environment):
    hostile = replace(environment, gpu=f"{ESCAPE}[31mred", torch="[bold]2[/bold]")
    put_pack(local, replace(key, environment=hostile.digest))
    put_record(local, hostile)
    plain = replace(environment, gpu="[link=https://example.com]GPU[/link]")
    name = put_pack(local, replace(key, environment=plain.digest), {"[red]a": b""}, creator="[blink]creator")
    put_record(local, plain)
    local.put(f"v3/{ESCAPE}[2J/m/v/{'a' * 64}.pack", b"")
    commands = ["ls"], ["show", digest_of(name), "--files"], ["verify"], ["rm", "org--model", "--yes"]
    said = {command[0]: run(*command) for command in commands}
    assert not [found for found in said.values() if ESCAPE in found.out + found.err]
    assert "[link=https://example.com]GPU[/link]" in said["ls"].out
    assert "[red]a" in said["show"].out
    assert "[blink]creator" in said["show"].out


def test_what_a_terminal_obeys_is_written_out_and_text_that_people_read_stays():
    for char in "\x1b\n\x9b\u202e\ud800\x00":
        assert output.printable(f"a{char}b").isascii()
        assert output.printable(f"a{char}b").isprintable()
    assert output.printable("torch 2.11.0 → 2.13.0, 模型 [bold]") == "torch 2.11.0 → 2.13.0, 模型 [bold]"


# show


def test_show_shows_packs_with_sizes_creator_and_on_demand_files(run, local, key, environment):
    name = put_pack(local, key, {"triton/AAA/k.cubin": b"3", "ab/k.so": b"4" * 1000})
    put_record(local, environment)
    found = run("show", "org--model/version-1")
    assert found.lines[0] == "org--model/version-1"
    assert found.lines[2].startswith(f"{digest_of(name)}.pack: 2 files, 1.0 kB unpacked, made 20")
    assert found.lines[2].endswith(" by the test")
    assert f"sound  org--model/version-1  {digest_of(name)[:12]}" in found.out
    assert "k.cubin" not in found.out
    listed = [line.split() for line in run("show", "org", "--files").lines]
    assert ["1.0", "kB", "ab/k.so"] in listed
    (pack,) = run("show", "org", "--json").json["packs"]
    files = {file["path"]: file["size_bytes"] for file in pack["head"]["manifest"]["frames"][0]["files"]}
    assert files == {"triton/AAA/k.cubin": 1, "ab/k.so": 1000}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("org--model/v10", "v10"),
        ("org--model/v1", "v1"),
        ("{digest}/org--model/v1/", "v1"),
        ("{digest}/org--model/v2", "v2"),
        ("org--model/0123456789ab", "0123456789abcdef" * 2),
        ("{pack:.12}", "v10"),
        ("{pack}.pack", "v10"),
        ("{digest:.5}", None),
        ("org--model", None),
        ("org--model/v2", None),
    ],
)
def test_a_version_is_named_fully_or_by_a_unique_beginning(run, local, key, filled, environment, text, shown):
    put_pack(local, replace(key, model_version="0123456789abcdef" * 2))
    found = run("show", text.format(digest=environment.digest, pack=digest_of(filled["v10"])))
    if shown is not None:
        assert found.lines[0] == f"org--model/{shown}"
        return
    assert (found.code, found.out) == (2, "")
    candidates = {line.strip() for line in found.err.splitlines()[1:]}
    assert f"{environment.digest}/org--model/v2" in candidates
    assert all(run("show", candidate).code == 0 for candidate in candidates)


def test_a_slash_ends_a_models_name(run, local, key):
    longer = put_pack(local, replace(key, model_name="org--model-2"))
    assert run("show", "org--model/").code == 1
    name = put_pack(local, key)
    assert run("show", "org--model/").lines[0] == "org--model/version-1"
    assert f"removed {name}" in run("rm", "org--model/", "--yes").lines
    assert packs(local) == {longer}


@pytest.mark.parametrize("text", ["", "/", "v3/", " ", "org--model/v3", "org--model/version-1/x"])
def test_what_names_nothing_is_refused(run, local, key, text):
    name = put_pack(local, key)
    for command in (["rm", text, "--yes"], ["show", text, "--json"], ["rm", "org--model", text, "--yes"]):
        found = run(*command)
        assert (found.code, found.out) == (1, ""), found
        assert found.err.startswith("error: nothing stored begins with ")
    assert packs(local) == {name}


# verify


def test_verify_says_of_each_pack_its_state_and_why_and_ends_with_1(run, root, local, key, variables):
    private, public = generate_keys()
    variables.setenv("COMPILE_CACHE_TRUSTED_KEYS", public)
    sound = put_pack(local, key, {"a": b"1"}, Signer(private))
    unsigned = put_pack(local, key, {"b": b"2"})
    damaged = put_pack(local, key, {"c": b"3" * 100}, Signer(private))
    damage(root, damaged)
    short = put_pack(local, key, {"d": b"4"}, Signer(private))
    (root / short).write_bytes(b"short")
    kinds = {
        sound: ("sound", f"signed by {public}"),
        unsigned: ("refused", "it is not signed, but COMPILE_CACHE_TRUSTED_KEYS is set"),
        damaged: ("damaged", "its f"),
        short: ("damaged", "it ends after 5 bytes, inside its header"),
    }
    found = run("verify")
    assert found.code == 1
    for name, (state, why) in kinds.items():
        (line,) = [row for row in found.lines if name in row or (state == "sound" and row.startswith("sound"))]
        assert line.startswith(state)
        assert why in line
    states = {name: state for name, (state, _) in kinds.items()}
    assert {p["entry"]["name"]: p["state"] for p in run("verify", "--json").json["packs"]} == states
    shown = run("show", f"{key.environment}/org--model/version-1")
    assert shown.code == 0
    assert "it ends after 5 bytes, inside its header" in shown.out
    assert packs(local) == kinds.keys()


def test_verify_ends_with_0_if_all_is_sound_and_with_1_if_there_is_nothing(run, root, local, key):
    assert run("verify").lines[-1].endswith("nothing to verify")
    assert run("verify").code == 1
    put_pack(local, key)
    put_pack(local, key, {"signed": b""}, Signer(generate_keys()[0]))
    found = run("verify")
    assert found.code == 0
    assert {line.rpartition("  ")[2] for line in found.lines[1:3]} == {"no signature was verified"}
    assert found.lines[-1].endswith(": 2 sound")
    damage(root, put_pack(local, replace(key, model_name="other")))
    assert run("verify", "--model", "org/model").code == 0


# copy


def test_what_is_copied_can_be_served_and_copied_on_and_is_the_same(run, local, key, environment, tmp_path):
    put_pack(local, key)
    put_record(local, environment)
    baked, further = tmp_path / "baked", tmp_path / "further"
    assert run("copy", "--to", baked).out.startswith("copied 1 pack, ")
    index = json.loads((baked / "index.json").read_text())
    assert {entry["name"] for entry in index["objects"]} == {entry.name for entry in local.list("")}
    assert run("copy", "--from", baked, "--to", further).code == 0
    stores = (local, LocalStore(further))
    ours, copies = ({e.name: store.read(e.name, 0, e.size_bytes) for e in store.list("v3/")} for store in stores)
    assert ours == copies
    assert run("copy", "--to", baked).out == f"copied 0 packs, 0 bytes, to {baked}; 1 pack there already\n"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        *((["--model", "org/model"], 4), (["--version", "v1"], 1), (["--version", "v2"], 2)),
        *((["--model", "org/other"], 0), (["--version", "v3"], 0), (["--from", "nowhere"], 0)),
    ],
    ids=str,
)
def test_copy_takes_what_is_asked_for_and_ends_with_1_if_that_is_nothing(run, filled, tmp_path, options, count):
    found = run("copy", "--to", tmp_path / "baked", *options)
    assert len(list(tmp_path.glob("baked/**/*.pack"))) == count
    assert (found.code, (tmp_path / "baked").exists()) == ((0, True) if count else (1, False))
    assert count or found.err.startswith("error: there is nothing to copy in ")


def test_a_copy_names_what_it_did_not_copy_and_ends_with_1(run, root, local, key, tmp_path):
    put_pack(local, key, {"a": b"1"})
    damaged = put_pack(local, key, {"b": b"2"})
    damage(root, damaged)
    found = run("copy", "--to", tmp_path / "baked")
    assert found.code == 1
    assert found.err.startswith(f"not copied: {damaged}: ")
    assert found.out.startswith("copied 1 pack, ")
    assert len(json.loads((tmp_path / "baked" / "index.json").read_text())["objects"]) == 1


@pytest.mark.parametrize(
    "command", [["copy", "--from", "{root}"], ["prune", "--keep-versions", "1", "--apply"], ["rm", "org", "--yes"]]
)
def test_what_changes_a_store_changes_no_layer(run, variables, root, local, key, command):
    name = put_pack(local, key)
    variables.setenv("COMPILE_CACHE_STORE", "off")
    variables.setenv("COMPILE_CACHE_LAYERS", str(root))
    found = run(*(word.format(root=root) for word in command))
    assert found.code == 1
    assert found.err.startswith("error: this store is read-only: set COMPILE_CACHE_STORE")
    assert packs(local) == {name}


# prune and rm


@pytest.fixture
def aged(root, local, key) -> tuple[str, str]:
    """The packs of a version used 40 days ago, and of one used an hour ago."""
    old, new = put_pack(local, replace(key, model_version="old")), put_pack(local, replace(key, model_version="new"))
    set_age(root, old, 40, time.time())
    set_age(root, new, 1 / 24, time.time())
    return old, new


def test_prune_says_what_would_go_and_only_with_apply_removes_it_and_renews_the_index(run, root, local, aged):
    run("copy", "--to", root)
    found = run("prune", "--unused-days", "30")
    assert found.code == 0
    assert found.lines[1].split()[:2] == ["org--model", "old"]
    assert found.lines[1].endswith("not used for 40 days")
    size = output.size_text(len(local.read(aged[0], 0, MIB)))
    assert found.lines[-2].startswith(f"would remove 1 version, {size}, from {root}")
    assert found.lines[-1] == "This was a dry run: nothing was removed. Add --apply to remove them."
    assert run("prune", "--keep-versions", "2").out == f"nothing to remove from {root}\n"
    assert packs(local) == set(aged)
    assert f"removed {aged[0]}" in run("prune", "--keep-versions", "1", "--apply").lines
    assert packs(local) == {aged[1]}
    assert [entry["name"] for entry in json.loads((root / "index.json").read_text())["objects"]] == [aged[1]]


def test_prune_keeps_what_was_used_meanwhile(run, local, key, aged, monkeypatch):
    from compile_cache.cli import app as commands

    apply_prune = commands.apply_prune

    def use_first(store: LocalStore, plan: Any) -> Any:
        local.put(replace(key, model_version="old").prefix + "used-2026-11-21", b"")
        return apply_prune(store, plan)

    monkeypatch.setattr(commands, "apply_prune", use_first)
    found = run("prune", "--unused-days", "30", "--apply")
    assert found.lines[-1].startswith("removed 0 packs, ")
    assert packs(local) == set(aged)


def test_rm_deletes_versions_and_packs_that_are_named_and_no_others(run, local, key):
    first, second = put_pack(local, key), put_pack(local, key, {"more.so": b"more"})
    kept, other = (put_pack(local, replace(key, model_version="version-2"), {name: b""}) for name in "ab")
    local.put(key.prefix + "used-2026-11-20", b"")
    found = run("rm", "org--model/version-1", digest_of(other)[:12], "--yes")
    assert found.code == 0
    assert sorted(found.lines[-4:-1]) == sorted(f"removed {name}" for name in (first, second, other))
    assert {entry.name for entry in local.list("v3/")} == {kept}
    assert f"removed {kept}" in run("rm", digest_of(kept), "--yes").lines


def test_rm_asks_first(run, local, key):
    name = put_pack(local, key)
    for answer in ("", "n\n"):
        found = run("rm", "org--model/version-1", answer=answer)
        assert found.code == 1
        assert "version-1" in found.out
        assert packs(local) == {name}
    assert f"removed {name}" in run("rm", "org--model/version-1", answer="y\n").lines


# explain


def explained_key(run: Run, *arguments: str | Path) -> CacheKey:
    return CacheKey(**run("explain", MODEL, *arguments, "--json").json["plan"]["key"])


def test_explain_says_hit_with_files_and_bytes_where_a_boot_would_hit(run, local):
    name = put_pack(local, explained_key(run), {"a": b"1", "b": b"2"})
    found = run("explain", MODEL)
    assert found.code == 0
    assert found.lines[-1] == f"restore: hit, 2 files, {len(local.read(name, 0, MIB)) / 1e6:.1f} MB"
    restore = run("explain", MODEL, "--json").json["plan"]["restore"]
    assert (restore["outcome"], restore["packs"], restore["stored_bytes"]) == ("hit", 1, len(local.read(name, 0, MIB)))


def test_explain_says_from_which_version_a_boot_would_be_seeded(run, local, variables, root):
    put_pack(local, replace(explained_key(run), model_version="earlier"))
    assert run("explain", MODEL).lines[-1].startswith("restore: seeded from version earlier (nothing in v3/")
    variables.setenv("COMPILE_CACHE_STORE", "off")
    variables.setenv("COMPILE_CACHE_LAYERS", str(root))  # a layer seeds nothing
    assert run("explain", MODEL).lines[-1].startswith("restore: miss (version ")


@pytest.mark.parametrize(
    ("setting", "key"), zip(("SIGNING_KEY", "TRUSTED_KEYS"), generate_keys(), strict=True), ids=["private", "public"]
)
def test_explain_and_verify_refuse_what_a_boot_would_refuse(run, local, variables, setting, key):
    """A signer without trusted keys trusts itself alone."""
    name = put_pack(local, explained_key(run))
    variables.setenv(f"COMPILE_CACHE_{setting}", key)
    found = run("explain", MODEL)
    assert any(line.startswith("restore: miss (none of the packs stored") for line in found.lines)
    assert found.lines[-1].startswith(f"refused pack {name}: it is not signed")
    assert run("verify").code == 1


def test_explain_takes_sources_into_the_version_and_warns_where_nothing_is_restored(run, variables, local, tmp_path):
    source = tmp_path / "predict.py"
    source.write_text("a = 1")
    put_pack(local, explained_key(run, "--source", source))
    found, other = run("explain", MODEL, "--source", source), run("explain", MODEL)
    assert (found.lines[-1].partition(",")[0], found.err) == ("restore: hit", "")
    assert other.lines[-1].startswith("restore: seeded")
    assert other.err.startswith("note: if the predictor names sources, give them with --source")
    source.write_text("a = 2")
    assert run("explain", MODEL, "--source", source).lines[-1].startswith("restore: seeded")
    missing = run("explain", MODEL, "--source", tmp_path / "nowhere.py")
    assert (missing.code, "'--source'" in missing.err) == (2, True)
    variables.setenv("COMPILE_CACHE_SCOPE", "off")
    assert run("explain", MODEL).err.endswith("warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing\n")


def test_explain_computes_the_key_that_a_boot_computes(run, variables, tmp_path):
    """The boot's restore, without torch, in this process: both know the model, the settings and this machine."""
    from compile_cache.lifecycle.restore import Restore
    from compile_cache.storage.directory import CacheDirectory

    variables.setenv("COMPILE_CACHE_MODE", "max-autotune-no-cudagraphs")
    variables.setenv("TRITON_SOMETHING", "1")
    settings = Settings.from_env(os.environ)
    restore = Restore(settings, CacheDirectory.claim(tmp_path / "cache"), MODEL, (), dict(os.environ))
    restore._fetching.done.wait(60)
    assert restore._fetching.found.packs is not None, restore._fetching.found.report.reason
    assert explained_key(run) == restore._fetching.found.packs.key


# keygen


def test_keygen_prints_a_pair_that_the_settings_take(run):
    lines = [line.split("=", 1) for line in run("keygen").lines if not line.startswith("#")]
    settings = Settings.from_env(dict(lines))
    assert settings.may_publish
    assert settings.trusted_keys == (Signer(settings.signing_key).public_key,)


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


@pytest.mark.parametrize("command", ["ls --store", "copy --from", "copy --to", "fill --predictor x:Y --to"])
def test_a_wrong_url_on_the_command_line_is_not_blamed_on_a_variable(run, command):
    found = run(*command.split(), "ftp://x")
    assert (found.code, "COMPILE_CACHE" in found.err) == (1, False)
    assert found.err.startswith("error: the store on the command line: 'ftp://x' is neither a local folder nor ")


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
        assert (found.code, "error: " in found.err) == (1, True), found
        assert "SECRET" not in found.out + found.err
    variables.setenv("COMPILE_CACHE_STORE" if url.startswith("s3") else "COMPILE_CACHE_LAYERS", url)
    done = run_script("run", "toy", "--", sys.executable, "-c", "", COMPILE_CACHE_EXIT_BUDGET_S="0")
    assert "SECRET" not in done.out + done.err
    assert "restore" in done.err or "run.uncached" in done.err


@pytest.mark.parametrize(
    "arguments",
    ["frobnicate", "explain", "report", "copy x", "rm", "prune", "prune --keep-versions 0", "prune --unused-days -1"],
)
def test_what_is_no_command_is_a_usage_error(run, arguments):
    found = run(*arguments.split())
    assert (found.code, found.out) == (2, "")


def test_a_time_that_cannot_be_is_said_to_be_impossible():
    texts = [output.time_text(time_s) for time_s in (0, 1e11, 1e300, float("nan"))]
    assert texts == ["1970-01-01 00:00:00 UTC", "5138-11-16 09:46:40 UTC", *["an impossible time"] * 2]


# The installed command.


def test_the_installed_command_fills_lists_verifies_and_prunes_a_bucket(variables, s3_bucket, local, key, environment):
    """And says its version."""
    put_pack(local, key)
    put_record(local, environment)
    assert re.fullmatch(r"cog-compile-cache \d+\.\d+\.\d+\n", run_script("--version").out)
    url = f"s3://{s3_bucket.name}/cache"
    environ = {"COMPILE_CACHE_STORE": url}
    for command in (
        ["copy", "--from", local.location],
        ["ls"],
        ["verify"],
        ["prune", "--unused-days", "0", "--in-use-days", "0", "--apply"],
    ):
        assert len(open_url(url).list("")) == (0 if command[0] == "copy" else 2)
        done = run_script(*command, **environ)
        assert (done.code, done.err) == (0, ""), done
        assert "org--model" in done.out or command[0] == "copy"
    assert open_url(url).list("") == []


def test_a_reader_that_stops_reading_ends_it_quietly(variables, local, key):
    for number in range(300):
        local.put(f"{replace(key, model_version=str(number)).prefix}{'a' * 64}.pack", b"")
    done = subprocess.run(f"{SCRIPT} ls --json | head -1", shell=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(("package", "command"), [("typer", ["ls"]), ("jinja2", ["report", "r"]), ("msgspec", ["ls"])])
def test_without_a_package_it_says_how_to_install_it(tmp_path, monkeypatch, package, command):
    monkeypatch.chdir(tmp_path)
    Path("r").write_text('{"restore": {}, "regions": [], "phases": {}, "ready_s": 1}')
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module', name='{package}')")
    done = run_script(*command, PYTHONPATH=str(tmp_path))
    assert (done.code, done.out) == (1, "")
    remedy = "pip install '.[cli]' in a checkout of cog-compile-cache"
    assert done.err == f"error: compile-cache needs the package {package}: {remedy}\n"


@pytest.mark.parametrize("arguments", [["--version"], ["explain", MODEL], ["report", "r"]], ids=str)
def test_commands_import_neither_torch_nor_boto3(variables, arguments):
    program = (
        "import sys; from typer.testing import CliRunner; from compile_cache.cli.app import app\n"
        f"print(CliRunner().invoke(app, {arguments!r}).exit_code, "
        "sorted({'torch', 'boto3', 'obstore'} & set(sys.modules)))"
    )
    done = run_program(program)
    assert done.stdout in ("0 []\n", "1 []\n"), done.stderr


def test_what_a_server_answers_is_written_out_in_an_error_too(capsys):
    output.print_note(f"error: cannot list the store: {ESCAPE}[2J")
    assert capsys.readouterr().err == "error: cannot list the store: \\x1b[2J\n"
