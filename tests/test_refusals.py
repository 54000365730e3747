"""Refusals: a kind of call that is served eager is remembered with its code, travels in packs, and is shown."""

from __future__ import annotations

import importlib
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from blocks import Batched, Block
from commands import Output, Run
from filled_stores import damage, put_pack, put_record
from precompiling import activated, all_refusals, boot, build, loaded, tensor
from torch import nn

from compile_cache.aot.files import digest
from compile_cache.aot.refusals import code_digest_of, read_refusals, write_refusal
from compile_cache.errors import NotPrecompilable
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import Signer, TrustedKeys, generate_keys
from compile_cache.store.base import Stores
from compile_cache.store.local import LocalStore
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.packs import PacksOfKey
from compile_cache.versions.refused_earlier import RefusedEarlier
from compile_cache.versions.rules import Rules
from compile_cache.versions.stored_refusals import stored_refusals

REASON = "differs from eager by 0.5, and 0.1 is allowed"
CODE = "c" * 32
KEY = {"class": "blocks.Block", "inputs": ["spec", [["tensor", 0, ["torch.Tensor", "torch.float32", "cpu"]]]]}
MODEL = "org/model@" + "0" * 40


def today():
    return datetime.now(UTC).date().isoformat()


def group_of(key):
    return f"precompiled/{digest(key)}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    with activated(tmp_path_factory.mktemp("refusals")) as directory:
        yield directory


@pytest.fixture
def empty(tmp_path):
    with activated(tmp_path) as directory:
        yield directory


def refuse(directory, module, *args, reason=REASON, **kwargs):
    with torch.inference_mode():
        return loaded(directory).refuse(module, args, kwargs, reason)


def refusal(directory, module, *args, **kwargs):
    with torch.inference_mode():
        return loaded(directory).refusal(module, args, kwargs)


# In a boot.


def test_a_refused_call_is_refused_in_the_next_boot(empty):
    path = refuse(empty, build(Block), tensor())
    assert (empty.path / path).is_file()
    assert refusal(empty, build(Block, seed=5), tensor(seed=7)) == REASON


@pytest.mark.parametrize(
    ("module", "inputs"),
    [(Batched, (1, 4, 16)), (Block, (5, 16))],
    ids=["another class", "another size"],
)
def test_another_call_is_not_refused(empty, module, inputs):
    refuse(empty, build(Block), tensor())
    assert refusal(empty, build(module), tensor(*inputs)) == ""


def test_a_call_is_refused_at_once_in_the_boot_that_refused_it(empty):
    artifacts, block = loaded(empty), build(Block)
    with torch.inference_mode():
        assert artifacts.refusal(block, (tensor(),), {}) == ""
        artifacts.refuse(block, (tensor(),), {}, REASON)
        assert artifacts.refusal(block, (tensor(),), {}) == REASON


def test_a_refusal_is_no_artifact_and_prevents_none(empty):
    refuse(empty, build(Block), tensor())
    artifacts, block = loaded(empty), build(Block)
    with torch.inference_mode():
        assert artifacts.prefetch() == 0
        assert artifacts.find(block, (tensor(),), {}) == "none is stored for these inputs"
        made = artifacts.make(block, (tensor(),), {})
    assert (empty.path / made.path).is_file()


def test_what_a_boot_refused_or_found_refused_is_among_what_it_uses(empty):
    """What belongs to no call of this boot is not published."""
    path = refuse(empty, build(Block), tensor())
    compiler = boot(empty, build(Block))
    assert path in compiler.unread_files()
    with torch.inference_mode():
        compiler._precompiled.forget_options()
        assert compiler._precompiled.refusal(build(Block), (tensor(),), {}) == REASON
    assert path not in compiler.unread_files()


def test_a_call_that_cannot_be_named_is_not_remembered(empty):
    class HereAlone(nn.Module):
        pass

    HereAlone.__module__ = "a_module_without_a_file"
    sys.modules["a_module_without_a_file"] = type(sys)("a_module_without_a_file")
    try:
        assert refuse(empty, HereAlone(), tensor()) == ""
        assert refuse(empty, build(Block), {object(): 1}) == ""
    finally:
        del sys.modules["a_module_without_a_file"]
    assert all_refusals(empty.path) == []


# Code.

SOURCE = """
from torch import nn
class Base(nn.Module):
    pass
class Derived(Base):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Imports a module with this source, as a new process would."""
    monkeypatch.syspath_prepend(tmp_path)
    names = iter(range(100))

    def load(source, name=None):
        name = name or f"written_module_{next(names)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return load


def test_a_refusal_holds_as_long_as_the_code_is_the_same(directory):
    block = build(Block)
    write_refusal(directory.path, group_of(KEY), KEY, code_digest_of(block), REASON)
    write_refusal(directory.path, group_of(KEY), KEY, CODE, REASON)
    found = {one.code: one.holds(build(Block)) for one in read_refusals(directory.path, group_of(KEY))}
    assert found == {code_digest_of(block): True, CODE: False}


def test_other_code_is_tried_again(empty):
    block = build(Block)
    path = refuse(empty, block, tensor())
    record = json.loads((empty.path / path).read_bytes())
    (empty.path / path).unlink()
    write_refusal(empty.path, group_of(record["key"]), record["key"], CODE, REASON)
    assert refusal(empty, block, tensor()) == ""


def test_code_is_that_of_all_classes_but_torchs_and_of_their_bases(written):
    plain = written(SOURCE)
    with_part = nn.Sequential(nn.Linear(2, 2), plain.Base())
    assert code_digest_of(nn.Sequential(nn.Linear(2, 2))) == code_digest_of(nn.ReLU())
    assert code_digest_of(with_part) == code_digest_of(plain.Derived()) != code_digest_of(nn.ReLU())
    below = written(f"from {plain.__name__} import Base\nclass Other(Base):\n    pass\n")
    assert code_digest_of(below.Other()) != code_digest_of(plain.Base())


def test_a_changed_source_is_other_code(written, tmp_path):
    names = ("first", "second")
    digests = []
    for source in (SOURCE, SOURCE + "# changed\n"):
        name = f"changing_{names[len(digests)]}"
        digests.append(code_digest_of(written(source, name).Derived()))
    assert len(set(digests)) == 2


def test_code_without_a_source_has_no_digest():
    namespace: dict[str, type] = {"__name__": "builtins_of_nobody"}
    sys.modules["builtins_of_nobody"] = type(sys)("builtins_of_nobody")
    try:
        exec("from torch import nn\nclass Own(nn.Module):\n    pass", namespace)
        with pytest.raises(NotPrecompilable):
            code_digest_of(namespace["Own"]())
    finally:
        del sys.modules["builtins_of_nobody"]


# Files.


def test_a_refusal_has_class_inputs_reason_and_day(empty):
    before = today()
    refuse(empty, build(Block), tensor(), by=2.0, reason="two\nlines \x1b[2J" + "x" * 2000)
    (found,) = all_refusals(empty.path)
    assert found.class_name == "Block"
    assert found.inputs == "float32[4, 16] on cpu, 2.0"
    assert found.reason.startswith("two lines  [2Jxxx")
    assert len(found.reason) == 1000
    assert found.created in (before, today())


def test_two_boots_write_one_path_whatever_the_reason(tmp_path):
    paths = {write_refusal(tmp_path, group_of(KEY), KEY, CODE, reason) for reason in ("one", "other")}
    assert len(paths) == 1
    assert [one.reason for one in all_refusals(tmp_path)] == ["other"]


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["spec", []], "no inputs"),
        (
            ["spec", [["tensor", 0, ["T", "torch.bfloat16", "cuda:0", "torch.strided", 3, [0] * 4]]]],
            "bfloat16[3d] on cuda:0",
        ),
        (["spec", [["object", "a.module.Cache"], ["int", "3"], ["str", "'x'"]]], "Cache, 3, 'x'"),
        (["spec", [["int", "1"]] * 10], ", ".join(["1"] * 8) + ", 2 more"),
        (None, "unreadable inputs"),
        (["spec", [5]], "unreadable inputs"),
        (["spec", [["tensor"]]], "unreadable inputs"),
        (["spec", [["tensor", 0, ["T", "d", "c", "s", "x", []]]]], "unreadable inputs"),
        ({"a": 1}, "unreadable inputs"),
    ],
)
def test_inputs_are_shown_in_short_words(tmp_path, inputs, text):
    key = {"class": "a.B", "inputs": inputs}
    write_refusal(tmp_path, group_of(key), key, CODE, REASON)
    (found,) = all_refusals(tmp_path)
    assert found.inputs == text


def record(**changed):
    return {"key": KEY, "code": CODE, "reason": REASON, "created": "2026-11-22", **changed}


HOSTILE = {
    "nothing": b"",
    "cut": json.dumps(record()).encode()[:-5],
    "depth": b"[" * 100_000,
    "a deep key": json.dumps(record()).replace('"spec"', "[" * 900 + "]" * 900).encode(),
    "a list": b"[]",
    "no text": b"\xff\xfe",
    "too long": json.dumps(record()).encode() + b" " * (2 << 20),
    "an integer without end": json.dumps(record()).replace('"spec"', "9" * 10_000).encode(),
    "another key": json.dumps(record(key={})).encode(),
    "a key that is a list": json.dumps(record(key=[])).encode(),
    "another code": json.dumps(record(code="d" * 32)).encode(),
    "no reason": json.dumps(record(reason=None)).encode(),
    "a reason with escapes": json.dumps(record(reason="\x1b[2J")).encode(),
    "a long reason": json.dumps(record(reason="x" * 1001)).encode(),
    "no date": json.dumps(record(created="yesterday")).encode(),
    "a date that is a number": json.dumps(record(created=5)).encode(),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_damaged_refusal_is_ignored_with_a_line_in_the_log(tmp_path, caplog, what):
    caplog.set_level("INFO", "compile_cache")
    other = {**KEY, "class": "blocks.Other"}
    path = tmp_path / write_refusal(tmp_path, group_of(KEY), KEY, CODE, REASON)
    write_refusal(tmp_path, group_of(other), other, CODE, REASON)
    path.write_bytes(HOSTILE[what])
    assert [one.class_name for one in all_refusals(tmp_path)] == ["Other"]
    assert read_refusals(tmp_path, group_of(KEY)) == []
    assert f"refusal.not_read file={path}" in caplog.text


def test_a_code_that_is_no_digest_is_damaged(tmp_path):
    write_refusal(tmp_path, group_of(KEY), KEY, "no digest", REASON)
    assert all_refusals(tmp_path) == []


def test_a_refusal_in_another_group_is_ignored(tmp_path):
    path = tmp_path / write_refusal(tmp_path, group_of(KEY), KEY, CODE, REASON)
    elsewhere = tmp_path / "precompiled" / ("0" * 32)
    elsewhere.mkdir()
    path.rename(elsewhere / path.name)
    assert all_refusals(tmp_path) == []


# In packs.


def packs_of(store, key, rules=None):
    rules = rules or Rules()
    earlier = RefusedEarlier(Path("/nonexistent"), store.location, rules, is_read_only=True)
    return PacksOfKey(store, key, rules, earlier)


def test_a_refusal_travels_in_a_pack(store, key, environment, empty, tmp_path):
    path = refuse(empty, build(Block), tensor())
    stores = Stores(store, store)
    publishing = CompileCache(stores, key, environment, empty, Rules())
    for pack in publishing.stage((), "the test"):
        publishing.publish(pack)
    (found,) = stored_refusals(packs_of(store, key))
    assert (found.path, found.class_name, found.reason) == (path, "Block", REASON)
    with activated(tmp_path / "next") as directory:
        restoring = CompileCache(stores, key, environment, directory, Rules())
        restoring.install(restoring.fetch())
        assert refusal(directory, build(Block), tensor()) == REASON


def refusal_files(tmp_path, *classes):
    folder = tmp_path / "written"
    for name in classes:
        key = {**KEY, "class": f"blocks.{name}"}
        write_refusal(folder, group_of(key), key, CODE, f"{name} is wrong")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.refused")}


def test_only_the_refusals_of_trusted_packs_are_shown(store, key, tmp_path):
    (private, public), (other, _) = generate_keys(), generate_keys()
    put_pack(store, key, refusal_files(tmp_path / "1", "Mine"), Signer(private))
    put_pack(store, key, refusal_files(tmp_path / "2", "Yours"), Signer(other))
    put_pack(store, key, refusal_files(tmp_path / "3", "Nobodys"))
    found = stored_refusals(packs_of(store, key, Rules(Limits(), TrustedKeys([public]))))
    assert [one.class_name for one in found] == ["Mine"]


def test_a_refusal_in_a_damaged_pack_is_not_shown(tmp_path, key):
    local = LocalStore(tmp_path / "store")
    name = put_pack(local, key, refusal_files(tmp_path, "Block"))
    damage(tmp_path / "store", name)
    assert stored_refusals(packs_of(local, key)) == ()


# In the command.


@pytest.fixture
def run(run: Run) -> Run:
    """Runs a command that succeeds."""

    def succeed(*arguments: str) -> Output:
        output: Output = run(*arguments)
        assert output.code == 0, output.err
        return output

    return succeed


LINE = "Block(unreadable inputs): Block is wrong, since "


def test_show_prints_the_refusals_of_a_version(run, local, key, environment, tmp_path):
    put_pack(local, key, {"ab/k.so": b"4", **refusal_files(tmp_path, "Block")})
    put_record(local, environment)
    (line,) = [line for line in run("show", "org--model").lines if LINE in line]
    assert line.startswith("  eager         Block(")
    (record,) = run("show", "org--model", "--json").json["refusals"]
    assert (record["class"], record["reason"]) == ("Block", "Block is wrong")


def test_show_of_a_version_without_refusals_prints_none(run, local, key):
    put_pack(local, key)
    assert "eager" not in run("show", "org--model").out
    assert run("show", "org--model", "--json").json["refusals"] == []


def test_explain_prints_the_refusals_that_a_boot_would_find(run, local, tmp_path):
    key = CacheKey(**run("explain", MODEL, "--json").json["key"])
    put_pack(local, key, refusal_files(tmp_path, "Block"))
    (line,) = [line for line in run("explain", MODEL).lines if LINE in line]
    assert line.startswith("eager        Block(")
    (record,) = run("explain", MODEL, "--json").json["refusals"]
    assert set(record) == {"class", "inputs", "reason", "created"}
    assert not (tmp_path / "cache").exists(), "explaining claims no cache directory"
