"""Files of precompiled regions: how each that is damaged, foreign or wrong is refused, and what serves instead."""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pickle
import re
import shutil
import sys
import threading
import time
import types
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import blocks
import msgspec
import pytest
import torch
from blocks import Batched, Block, Breaking, Cheating, ReadsGlobalTensor
from passes import Versioned
from precompiling import artifacts, boot, build, eager, find, loaded, only_report, tensor, told, warm_up, warmed

from compile_cache.calls.spec import CallSpec
from compile_cache.errors import ArtifactError
from compile_cache.inductor import aot
from compile_cache.inductor import function as precompiled
from compile_cache.inductor import stored_functions as stored_artifacts
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.function_file import read_artifact, write_artifact
from compile_cache.inductor.lean_loading import PRODUCTS
from compile_cache.inductor.make import import_compiler
from compile_cache.inductor.stored_functions import Artifacts
from compile_cache.key.environment import instruction_flags
from compile_cache.settings import Settings

close = torch.testing.assert_close


@pytest.fixture(scope="module")
def made(shared):
    """A cache directory in which a cold boot has made two artifacts. Tests leave it as it is."""
    block, batched = build(Block), build(Batched)
    compiler = boot(shared, block, batched)
    warm_up(compiler, lambda: [block(tensor()), batched(tensor(1, 4, 16))])
    assert len(artifacts(shared)) == 2
    return shared


def answers_right(directory, module_class, settings=None):
    """The compiler of a boot after a warm-up of a module that answers as in eager."""
    module = build(module_class)
    compiler = boot(directory, module, settings=settings)
    close(warm_up(compiler, lambda: module(tensor())), eager(build(module_class), tensor()))
    return compiler


def artifact_of(directory, module_class):
    """The one artifact of a class."""
    (path,) = [path for path in artifacts(directory) if module_class.__qualname__ in read_artifact(path)[0]["class"]]
    return path


def payload_start(content: bytes) -> int:
    return content.index(msgspec.msgpack.decode(content)["payload"])


def with_payload(content: bytes, payload: bytes) -> bytes:
    """The same artifact with other content, and its true checksum."""
    changed = {"payload": payload, "sha256": hashlib.sha256(payload).hexdigest()}
    return msgspec.msgpack.encode(msgspec.msgpack.decode(content) | changed)


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:40],
    "cut in the payload": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "another kind of message": lambda content: flipped(content, 0),
    "a flipped bit in the record": lambda content: flipped(content, payload_start(content) // 2),
    "a flipped bit in the payload": lambda content: flipped(content, payload_start(content) + 100),
    "a message that is no object": lambda content: msgspec.msgpack.encode([]),
    "no key": lambda content: msgspec.msgpack.encode({}),
}
FOREIGN = {
    "garbage that its checksum covers": lambda content: with_payload(content, b"garbage"),
    "a pickle of something else": lambda content: with_payload(content, pickle.dumps({"not": "a function"})),
}


@pytest.mark.parametrize("damage", DAMAGES | FOREIGN)
def test_artifact_that_is_damaged_or_that_torch_cannot_read_is_refused(restart, damage):
    path = artifact_of(restart, Block)
    path.write_bytes((DAMAGES | FOREIGN)[damage](path.read_bytes()))
    reason = find(restart, build(Block), tensor())
    assert isinstance(reason, str)
    assert re.search("cannot be loaded" if damage in FOREIGN else "damaged|its name does not match its content", reason)


class Executed:
    """Unpickled, it leaves a trace."""

    traces: ClassVar[list[str]] = []

    def __reduce__(self):
        return Executed.traces.append, ("executed",)


def test_damaged_artifact_is_not_unpickled(restart):
    path = artifact_of(restart, Block)
    content = path.read_bytes()
    path.write_bytes(msgspec.msgpack.encode(msgspec.msgpack.decode(content) | {"payload": pickle.dumps(Executed())}))
    Executed.traces.clear()
    find(restart, build(Block), tensor())
    assert Executed.traces == []


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"instructions": "avx9"}, "for a host with instructions 'avx9'"),
        ({"threads": "77"}, "for a host with threads '77'"),
        ({}, ""),
    ],
)
def test_artifact_with_kernels_for_another_host_is_refused_alone(restart, other, reason):
    path = artifact_of(restart, Block)
    key, record, payload = read_artifact(path)
    assert record["host"] == {}, "it calls torch's own kernels only"
    path.unlink()
    host = {"instructions": instruction_flags(), "threads": str(torch.get_num_threads()), **other}
    write_artifact(path.parent, key, {**record, "host": host}, payload)
    found = find(restart, build(Block), tensor())
    assert reason in found if reason else isinstance(found, Precompiled)
    assert isinstance(find(restart, build(Batched), tensor(1, 4, 16)), Precompiled)


def test_artifact_of_a_call_on_a_gpu_serves_with_another_number_of_threads(directory, monkeypatch):
    """There is no GPU here: the call is said to be on one."""
    for module in (stored_artifacts, precompiled):
        monkeypatch.setattr(module, "on_gpu", lambda *_: True)
    block, other, threads = build(Block), build(Block), torch.get_num_threads()
    with torch.inference_mode():
        path = Artifacts(Settings(), directory.path).make((block, (tensor(),), {})).path
        assert "threads" not in read_artifact(directory.path / path)[0]["switches"]
        with told(torch.set_num_threads, threads + 1, threads):
            found = find(directory, other, tensor())
        assert isinstance(found, Precompiled), found
        assert not found.misfit((block, (tensor(),), {}))
        with torch.autocast("cpu", torch.bfloat16):
            assert not found.fits((block, (tensor(),), {}))


def test_artifact_under_another_name_is_refused_and_a_missing_one_is_no_error(restart):
    path = artifact_of(restart, Block)
    path = path.rename(path.with_name("0" * 32 + ".aot"))
    assert find(restart, build(Block), tensor()) == "its name does not match its content"
    path.unlink()
    assert find(restart, build(Block), tensor()) == "none is stored for these inputs and this code"


def test_artifact_in_another_group_is_refused(restart):
    block, batched = artifact_of(restart, Block), artifact_of(restart, Batched)
    shutil.move(block, batched.parent / block.name)
    found = find(restart, build(Batched), tensor(1, 4, 16))
    assert found.path.endswith(batched.name)
    batched.unlink()
    assert find(restart, build(Batched), tensor(1, 4, 16)) == "it belongs to another group"


def test_damaged_artifact_is_made_anew(restart):
    path = artifact_of(restart, Block)
    path.write_bytes(path.read_bytes()[:-1])
    for counts in ((0, 1), (1, 0)):
        report = only_report(answers_right(restart, Block))
        assert (report.step, report.loaded, report.made) == ("precompiled", *counts)


def test_a_rejected_function_is_loaded_again_only_once_it_was_made_anew(restart):
    """The thread that loads late functions may come after the comparison that rejected one."""
    known, path = Artifacts(Settings(), restart.path), str(artifact_of(restart, Block).relative_to(restart.path))
    assert isinstance(known.load(path), Precompiled)
    known.reject(path, "its answer differs from eager")
    assert known.load(path) == "its answer differs from eager"
    assert isinstance(known.arrive(path), Precompiled)
    assert isinstance(known.load(path), Precompiled)


def test_a_function_that_another_checkout_pickled_is_not_found(restart):
    path = artifact_of(restart, Block)
    key, record, payload = read_artifact(path)
    path.unlink()
    write_artifact(path.parent, key, {**record, "files": {**record["files"], aot.__name__: "another"}}, payload)
    assert "aot has changed" in find(restart, build(Block), tensor())


def test_two_classes_of_one_name_and_file_are_told_apart_by_their_methods():
    one, other = (type("Made", (torch.nn.Module,), {"forward": kind.forward}) for kind in (Block, Batched))
    assert precompiled.sources_digest(one()) != precompiled.sources_digest(other())


VERSIONS = stored_artifacts.versions()


def of_version(package: str) -> Any:
    """Another version of a package is installed."""
    return mock.patch.object(stored_artifacts, "versions", return_value={**VERSIONS, package: "0.0.0"})


# What is patched meanwhile, the settings, and the inputs.
OTHERS = {
    **{name: (of_version(name), Settings(), tensor()) for name in ("diffusers", "transformers")},
    "an option of Inductor's": (torch._inductor.config.patch(epilogue_fusion=False), Settings(), tensor()),
    "dynamic shapes": (nullcontext(), Settings(dynamic=True), tensor()),
    "shapes that may become dynamic": (nullcontext(), Settings(dynamic=None), tensor()),
    "mode": (nullcontext(), Settings(mode="max-autotune-no-cudagraphs"), tensor()),
    "shape": (nullcontext(), Settings(), tensor(5, 16)),
    "dtype": (nullcontext(), Settings(), tensor().double()),
    "strides": (nullcontext(), Settings(), tensor(4, 32)[:, ::2]),
    "dimensions": (nullcontext(), Settings(), tensor(1, 4, 16)),
}


@pytest.mark.parametrize(("patch", "settings", "inputs"), OTHERS.values(), ids=OTHERS)
def test_artifact_of_another_version_option_setting_or_input_is_not_served(made, patch, settings, inputs):
    with patch, torch.inference_mode():
        found = find(loaded(made, settings), build(Block), inputs)
    assert found == "none is stored for these inputs and this code"


def test_an_artifact_is_found_while_another_thread_loads_one(made):
    # In torch 2.11 options belong to all threads, and torch sets this option while it loads.
    with torch._inductor.config.patch(enable_autograd_for_aot=True):
        assert isinstance(find(made, build(Block), tensor()), Precompiled)


@pytest.mark.parametrize("name", ["post_grad_custom_pre_pass", "joint_custom_post_pass"])
def test_artifact_of_another_graph_pass_is_not_served(name, directory):
    module = build(Block)
    with torch._inductor.config.patch({name: Versioned("first")}):
        warmed(directory, module)
        assert isinstance(find(directory, build(Block), tensor()), Precompiled)
    with torch._inductor.config.patch({name: Versioned("second")}):
        assert isinstance(find(directory, build(Block), tensor()), str)
    assert isinstance(find(directory, build(Block), tensor()), str)


def test_artifact_that_computes_something_else_serves_nothing_and_is_withheld(restart, monkeypatch):
    module = build(Cheating)
    monkeypatch.setitem(blocks.CHEATS, "now", True)
    with torch.inference_mode():
        wrong = loaded(restart).make((module, (tensor(),), {}))
    monkeypatch.setitem(blocks.CHEATS, "now", False)
    compiler = boot(restart, module)
    expected = eager(build(Cheating), tensor())
    close(warm_up(compiler, lambda: module(tensor())), expected)
    assert wrong.path not in compiler.supply.directory.ledger.ready(is_ending=True)
    assert "differs from eager by" in only_report(compiler).reason
    close(warm_up(compiler, lambda: module(tensor())), expected)
    with torch.inference_mode():
        close(module(tensor()), expected)
    assert only_report(compiler).step == "eager"


def test_class_that_computes_something_else_when_compiled_leaves_no_artifact_to_publish(made, restart, monkeypatch):
    monkeypatch.setenv("BLOCK_CHEATS", "in the second process")
    compiler = answers_right(restart, Cheating)
    assert only_report(compiler).step == "eager"
    new = {path.relative_to(restart.path).as_posix() for path in artifacts(restart)}
    old = {path.relative_to(made.path).as_posix() for path in artifacts(made)}
    assert new - old <= compiler.supply.directory.ledger.withheld


@pytest.mark.parametrize(
    ("module_class", "reason"),
    [
        (Breaking, "with graph breaks"),
        (ReadsGlobalTensor, "it reads tensors from global variables or a closure"),
    ],
)
def test_region_that_cannot_be_precompiled_is_served_by_graphs_in_each_boot(restart, module_class, reason):
    before = len(artifacts(restart))
    for _ in range(2):
        report = only_report(answers_right(restart, module_class))
        assert report.step == "graphs"
        assert reason in report.reason
    assert len(artifacts(restart)) == before


def prefetched(directory) -> Artifacts:
    artifacts = loaded(directory)
    artifacts.prefetch()
    assert [*map(type, artifacts._known.values())] == [Precompiled, Precompiled]
    return artifacts


@pytest.mark.parametrize("name", ["combine", "GAIN"])
def test_an_artifact_that_was_loaded_ahead_serves_unless_something_was_replaced(made, monkeypatch, name):
    ahead, block = prefetched(made), build(Block)
    with torch.inference_mode():
        found = find(ahead, block, tensor())
        close(found(block, (tensor(),), {}), eager(build(Block), tensor()))
    ahead = prefetched(made)
    monkeypatch.setattr(blocks, name, blocks.combine_otherwise if name == "combine" else 7.0)
    with torch.inference_mode():
        assert isinstance(find(ahead, block, tensor()), str)


def test_artifact_of_other_weights_serves(made):
    found, other = find(made, build(Block, seed=5), tensor()), build(Block, seed=5)
    with torch.inference_mode():
        close(found(other, (tensor(),), {}), eager(build(Block, seed=5), tensor()))


def test_two_boots_write_the_same_names_whatever_they_have_compiled_before(made, directory):
    batched, block = build(Batched), build(Block)
    warm_up(boot(directory, batched, block), lambda: [batched(tensor(1, 4, 16)), block(tensor())])
    assert [path.name for path in artifacts(directory)] == [path.name for path in artifacts(made)]


def test_graphs_that_are_others_in_each_boot_are_recorded_eight_times_and_traced_seven_times(directory):
    """Each record is written because the one before it did not hold."""
    found = []
    call = build(Breaking), (tensor(),), {}
    for number in range(8):
        artifacts = Artifacts(Settings(), directory.path)
        path = artifacts.write_graphs(call, 1.5, f"reason {number}")
        if record := artifacts.graphs(CallSpec.of(call), call):
            found.append((record.path == path, record.reason))
            artifacts.reject(path, "a stored graph was not found")
            assert artifacts.graphs(CallSpec.of(call), call) is None
    with pytest.raises(ArtifactError, match="others in each boot"):
        artifacts.write_graphs(call, 1.5, "again")
    assert found == [(True, f"reason {number}") for number in range(7)]


def test_with_freezing_nothing_is_made_or_stored_and_the_option_is_named(directory):
    """The values of the weights would be constants of the code. Each boot is eager, as nothing stored would fit."""
    with torch._inductor.config.patch(freezing=True):
        for cold_start in ("block", "background"):
            report = only_report(answers_right(directory, Block, Settings(cold_start=cold_start)))
            assert report.step == "eager"
            assert "torch._inductor.config.freezing" in report.reason
            assert not directory.scan()


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_parametrized_module_is_eager_and_the_reason_is_one_line(directory, name):
    block = build(Block)
    getattr(torch.nn.utils.parametrizations, name)(block, "second")
    warm_up(compiler := boot(directory, block), lambda: block(tensor()))
    report = only_report(compiler)
    assert report.step == "eager"
    assert "a ParametrizedBlock cannot be handed over. Remove its parametrizations" in report.reason
    assert "\n" not in report.reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_a_call_with_nested_tensors_is_eager_and_says_so(directory):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    encoder = build(torch.nn.TransformerEncoder, layer, 2).requires_grad_(False)
    mask = torch.tensor([[False, False, True]])
    compiler = boot(directory, encoder)
    answer = warm_up(compiler, lambda: encoder(tensor(1, 3, 16), src_key_padding_mask=mask))
    close(answer, eager(encoder, tensor(1, 3, 16), src_key_padding_mask=mask))
    assert only_report(compiler).step == "eager"
    assert "a nested tensor cannot be handed over" in only_report(compiler).reason


def test_a_setup_traces_no_longer_than_its_time_allows(restart, monkeypatch):
    modules = build(Breaking), build(ReadsGlobalTensor)
    warmed(restart, *modules)
    graphs = Artifacts.graphs
    monkeypatch.setattr(Artifacts, "graphs", lambda *call: replace(graphs(*call), seconds=7.0))
    compiler = warmed(restart, *modules, settings=Settings(cold_start="background", unseen="background"))
    assert [report.step for report in compiler.reports] == ["graphs", "eager"]
    assert "its graphs take 7 s to trace in the setup" in compiler.reports[1].reason


# The adapter to the private names of torch.


@pytest.fixture
def not_imported(monkeypatch):
    """As if nothing of the package had been imported yet."""
    for name in [name for name in sys.modules if name.startswith(("compile_cache.inductor.", "compile_cache.calls."))]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu140", "3.0.0.dev1"])
@pytest.mark.usefixtures("not_imported")
def test_torch_that_was_not_tested_is_refused_by_the_import(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=r"is not a tested release \(2\.11 to 2\.15\)"):
        importlib.import_module("compile_cache.inductor.stored_functions")


def test_a_weak_dictionary_beside_guards_forgets_its_keys_in_silence():
    """torch stores no references, so not the one by which the dictionary's own function finds it."""
    stored = io.BytesIO()
    aot.guards.GuardsStatePickler({}, {}, {}, stored).dump(weakref.WeakKeyDictionary({aot: 1}))
    made = pickle.loads(aot._without_secrets(stored.getvalue()))
    made[types.ModuleType("gone")] = 1


def test_generated_code_calls_the_products_that_a_load_gives_it():
    import_compiler()
    kernels = importlib.import_module("torch._inductor.select_algorithm").extern_kernels
    assert all(getattr(kernels, name) is product for name, product in PRODUCTS.items())


def test_a_fork_waits_until_no_thread_loads_a_function():
    """Else torch stays changed in the child, which can load nothing more."""
    loading = threading.Event()

    def load() -> None:
        with aot._alone:
            loading.set()
            time.sleep(0.2)

    thread = threading.Thread(target=load)
    thread.start()
    assert loading.wait(60)
    if (child := os.fork()) == 0:
        os._exit(not aot._alone.acquire(timeout=60))
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
