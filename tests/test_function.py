"""Precompiled regions: what a next boot serves with them, and all that they must never serve."""

from __future__ import annotations

import contextlib
import json
import operator
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import blocks
import precompiling
import pytest
import torch
import zstandard
from blocks import Adapted, Batched, Beside, Block, Environ, Global, Inner, Layers, Pair, Registered, Tunable
from boots import run_boot, settings
from precompiling import (
    activated,
    boot,
    build,
    built,
    copied,
    eager,
    find,
    loaded,
    only_report,
    tensor,
    told,
    warm_up,
    warmed,
)
from torch import nn
from torch._inductor.runtime import triton_compat
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules import module as module_hooks

from compile_cache.calls.overlaps import writes_where_tensors_overlap
from compile_cache.calls.spec import CallSpec
from compile_cache.errors import ArtifactError
from compile_cache.inductor.counters import read_counts
from compile_cache.inductor.function import Precompiled, Record
from compile_cache.inductor.function_file import read_artifact

close = torch.testing.assert_close
patched = mock.patch.object


def fits(code: Any, module: nn.Module, *args: Any) -> bool:
    """Whether loaded code fits a call."""
    with torch.inference_mode():
        return code.fits((module, args, {}))


@pytest.fixture(scope="module")
def made(shared):
    """A cache directory in which a cold boot has made what is loaded here. Tests leave it as it is."""
    block, layers, batched, pair = build(Block), build(Layers), build(Batched), build(Pair)
    block.first.grad = torch.ones_like(block.first)  # which the blocks that load have not
    compiler = boot(shared, block, layers, batched, pair, build(Global), build(Environ))
    warm_up(compiler, lambda: block(tensor()))
    warm_up(compiler, lambda: layers(tensor(), caches()))
    warm_up(compiler, lambda: [batched(tensor(1, 4, 16)), batched(tensor(2, 4, 16))])
    warm_up(compiler, lambda: pair(tensor(16, 16), tensor(16, 16, seed=2)))
    for module_class in (Global, Environ, Beside, Tunable):
        module = build(module_class)
        compiler.compile(module)
        warm_up(compiler, lambda module=module: module(tensor()))
    steps = {region.report.name: (region.report.step, region.report.made) for region in compiler.by_class.values()}
    singles = ("Block", "Pair", "Global", "Environ", "Beside", "Tunable")
    assert steps == dict.fromkeys(singles, ("precompiled", 1)) | dict.fromkeys(("Layer", "Batched"), ("precompiled", 2))
    return shared


def assert_precompiled_by_the_next_boot(directory: Any, kind: type[nn.Module], *calls: Callable[[Any], Any]) -> None:
    """All of these calls, in both boots, with eager's answers."""
    for _ in range(2):
        module = build(kind)
        compiler = boot(directory, module)
        answers = warm_up(compiler, lambda module=module: [call(module) for call in calls])
        with torch.inference_mode():
            close(answers, [call(build(kind)) for call in calls])
        assert only_report(compiler).step == "precompiled"


def caches() -> list[torch.Tensor]:
    with torch.inference_mode():
        return [torch.zeros(4, blocks.SIZE), torch.zeros(4, blocks.SIZE)]


def test_next_boot_is_precompiled_traces_nothing_and_serves_predictions(restart):
    block = build(Block)
    compiler = boot(restart, block)
    output = warm_up(compiler, lambda: block(tensor()))
    report = only_report(compiler)
    assert (report.step, report.reason) == ("precompiled", "")
    assert (report.graphs, report.loaded, report.made, report.compile_s) == (0, 1, 0, 0.0)
    assert report.relative_error <= report.tolerance
    close(output, eager(build(Block), tensor()))
    before = read_counts()
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        close(block(tensor(seed=3)), eager(build(Block), tensor(seed=3)))
    assert read_counts() == before, "torch.compile was never asked"


def test_a_load_gives_triton_the_digest_of_its_files_that_the_maker_computed(made, monkeypatch):
    """Triton is not installed on a machine without a GPU: a stand-in has its place."""
    triton_cache = types.ModuleType("triton.runtime.cache")
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", triton_cache)
    monkeypatch.setattr(triton_compat, "triton_key", lambda: pytest.fail("computed"))
    _, record, payload = read_artifact(next(made.path.rglob("*.aot")))
    Precompiled("here", Record.from_json({**record, "triton_key": "of the maker"}), payload)
    assert (triton_cache.triton_key(), triton_compat.triton_key()) == ("of the maker", "of the maker")
    with pytest.raises(ArtifactError, match="Triton's own files have changed"):
        Precompiled("here", Record.from_json({**record, "triton_key": "of another build"}), payload)


def test_input_that_was_made_outside_of_inference_mode_is_served_as_well(restart):
    """As a caller's own tensors are."""
    for _ in range(2):
        block = build(Block)
        compiler = boot(restart, block)
        outside = tensor().clone() if torch.is_inference_mode_enabled() else torch.ones(4, blocks.SIZE)
        output = warm_up(compiler, lambda block=block, outside=outside: block(outside))
        close(output, eager(build(Block), outside))
    assert only_report(compiler).step == "precompiled"


# Attributes that make another function of a block, and what changes one in place.
ATTRIBUTES: dict[str, Any] = {
    "flag": False,
    "number": 4,
    "scale": 0.25,
    "name": "longer",
    "missing": 1.0,
    "kind": blocks.Kind.LARGE,
    "dtype": torch.float64,
    "pair": (1.0, 3.0),
    "several": [1.0, 2.0, 2.0],
    "options": {"gain": 3.0},
    "config": SimpleNamespace(gain=5.0),
    "act": blocks.triple,
    "shift": 2.0,
    "extra": 2.0,
    "inner": Inner(eps=0.25).eval(),
}


CHANGED: dict[str, Callable[[Block], Any]] = {
    **{name: lambda block, name=name: setattr(block, name, ATTRIBUTES[name]) for name in ATTRIBUTES},
    "appended to a list": lambda block: block.several.append(5.0),
    "replaced in a list": lambda block: block.several.__setitem__(-1, 5.0),
    "added to a dict": lambda block: block.options.update(more=1.0),
    "replaced in a dict": lambda block: block.options.update(gain=9.0),
    "set in a config": lambda block: setattr(block.config, "gain", 9.0),
    "set in a child": lambda block: setattr(block.inner, "eps", 9.0),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_instance_with_another_attribute_is_not_served_whenever_it_is_set(made, change):
    other, block = build(Block), build(Block)
    change(other)
    assert not torch.equal(eager(other, tensor()), eager(block, tensor())), "it would have been wrong"
    reason, found = find(made, other, tensor()), find(made, block, tensor())
    assert isinstance(reason, str)
    assert reason != "none is stored for these inputs and this code"
    change(block)
    assert not fits(found, block, tensor())


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "nested") for kind in blocks.OBJECTS), ("object", "attribute"), ("object", "list"), ("object", "dict")],
)
def test_which_object_a_module_has_is_checked_in_every_call(directory, kind, place):
    """torch has no guard on it."""
    expected = [eager(build(blocks.Asking, kind, place, number), tensor()) for number in (0, 1)]
    assert not torch.equal(*expected)
    module, _ = built(directory, blocks.Asking, kind, place, 0)
    other = build(blocks.Asking, kind, place, 1)
    found = find(directory, other, tensor())
    assert isinstance(found, str) or torch.equal(found(other, (tensor(),), {}), expected[1])
    for number in (0, 1, 0):
        module.put(number)
        close(eager(module, tensor()), expected[number])


def test_a_function_serves_the_modules_that_have_the_object_of_the_traced_one(directory):
    """The second boot finds the code for the other object, and makes its own."""
    for number in (0, 1):
        module, compiler = built(directory, blocks.Asking, "object", "attribute", number)
        assert (only_report(compiler).step, only_report(compiler).made) == ("precompiled", 1)
        found = [find(directory, build(blocks.Asking, "object", "attribute", each), tensor()) for each in (0, 1)]
        assert not isinstance(found[number], str), found
        assert number == 1 or "has changed" in found[1]
    for each in (0, 1, 0):
        module.put(each)
        close(eager(module, tensor()), eager(build(blocks.Asking, "object", "attribute", each), tensor()))


def test_which_object_an_input_is_is_checked_in_every_call(directory):
    calls = [(), (blocks.SENTINEL_TOO,), (blocks.SENTINEL_TOO, blocks.SENTINEL_TOO), (blocks.SENTINEL, blocks.SENTINEL)]
    module = build(blocks.AskingInputs)
    compiler = boot(directory, module)
    warm_up(compiler, lambda: [module(tensor(), *call) for call in calls])
    for call in calls:
        close(eager(module, tensor(), *call), eager(build(blocks.AskingInputs), tensor(), *call))
    assert only_report(compiler).step == "precompiled"


def times_weight(module: Any, args: Any, output: Any = None) -> Any:
    """A hook, before or after."""
    return torch.mm(args[0] if output is None else output, args[0].T @ args[0])


def otherwise(self: Block, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    """Another forward of a block."""
    return torch.mm(x, self.second)


def squared(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x.T @ x)


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
        # torch leaves the entries of removed hooks here (register_module_forward_hook), and then warns in other tests.
        module_hooks._global_forward_hooks_with_kwargs.clear()


def child(block: Block, child_class: type[Inner]) -> Inner:
    """Another child with the same parameters."""
    child = child_class()
    child.weight = block.inner.weight
    return child.eval()


def child_with_hook(block: Block) -> Inner:
    replaced = child(block, Inner)
    replaced.register_forward_hook(times_weight)
    return replaced


# What changes the answer of a block from outside, as context managers.
CHANGES: dict[str, Callable[[Block], Any]] = {
    "hook": lambda block: hooked(block.register_forward_hook(times_weight)),
    "hook of a child": lambda block: hooked(block.inner.register_forward_hook(times_weight)),
    "forward of its own": lambda block: patched(block, "forward", types.MethodType(otherwise, block)),
    "child's forward of its own": lambda block: patched(block.inner, "forward", squared),
    "adapter": lambda block: patched(block, "inner", child(block, Adapted)),
    "children": lambda block: patched(block, "_modules", {"inner": child_with_hook(block)}),
    "child with a hook": lambda block: patched(block, "inner", child_with_hook(block)),
    "training": lambda block: told(block.train, True, False),
    "class's forward": lambda block: patched(Block, "forward", otherwise),
    "class attribute": lambda block: patched(Block, "shift", 7.0),
    "function": lambda block: patched(blocks, "combine", blocks.combine_otherwise),
    "constant": lambda block: patched(blocks, "GAIN", 7.0),
}
# What torch.compile does not look at between two calls, either.
CHANGES_BEFORE = {
    **CHANGES,
    "child class's forward": lambda block: patched(Inner, "forward", lambda self, x: squared(x)),
    "method": lambda block: patched(Block, "factor", lambda self: 5.0),
}
# Those that are answered as well, which takes a compile.
ANSWERED = ("hook of a child", "adapter", "constant")


def gradient_hook(module: Any, *gradients: Any) -> None:
    """A hook that changes no answer."""


# Every way in which torch can be told to call something beside a module.
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "hook": lambda module: module.register_forward_hook(times_weight),
    "pre-hook": lambda module: module.register_forward_pre_hook(times_weight),
    "hook with keywords": lambda module: module.register_forward_hook(lambda *_: None, with_kwargs=True),
    "hook that is always called": lambda module: module.register_forward_hook(times_weight, always_call=True),
    "hook before others": lambda module: module.register_forward_hook(times_weight, prepend=True),
    "pre-hook with keywords": lambda module: module.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    "gradient hook": lambda module: module.register_full_backward_hook(gradient_hook),
    "gradient pre-hook": lambda module: module.register_full_backward_pre_hook(gradient_hook),
    "global hook": lambda module: module_hooks.register_module_forward_hook(times_weight),
    "global hook with keywords": lambda module: module_hooks.register_module_forward_hook(
        lambda *_: None, with_kwargs=True
    ),
    "global pre-hook": lambda module: module_hooks.register_module_forward_pre_hook(times_weight),
    "global gradient hook": lambda module: module_hooks.register_module_full_backward_hook(gradient_hook),
    "global gradient pre-hook": lambda module: module_hooks.register_module_full_backward_pre_hook(gradient_hook),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_call_with_a_hook_is_never_served_precompiled(made, hook):
    for part in (lambda block: block, lambda block: block.inner):
        block = build(Block)
        found = find(made, block, tensor())
        with hooked(HOOKS[hook](part(block))):
            assert "hook" in find(made, block, tensor())
            assert not fits(found, block, tensor())
        assert fits(found, block, tensor())


@pytest.mark.parametrize("change", CHANGES_BEFORE)
def test_block_that_is_changed_before_or_after_the_load_is_not_served(made, change):
    block, unchanged = build(Block), eager_unchanged()
    found = find(made, block, tensor())
    with CHANGES_BEFORE[change](block):
        assert not torch.allclose(eager(block, tensor()), unchanged), "it would have been wrong"
        assert isinstance(find(made, block, tensor()), str)
        assert change not in CHANGES or not fits(found, block, tensor())
    assert fits(found, block, tensor())


def test_hook_of_a_module_that_is_no_part_is_noticed(made):
    module = build(Beside)
    found = find(made, module, tensor())
    assert not isinstance(found, str), found
    with hooked(module.beside[0].register_forward_hook(times_weight)):
        assert not fits(found, module, tensor())
        other = build(Beside)
        other.beside = module.beside
        assert isinstance(find(made, other, tensor()), str)


@pytest.mark.parametrize("change", ANSWERED)
def test_block_that_is_changed_before_or_after_the_load_answers_as_in_eager(restart, change):
    block, changed = build(Block), build(Block)
    with CHANGES[change](changed):
        expected = eager(changed, tensor())
        compiler = boot(restart, changed)
        close(warm_up(compiler, lambda: changed(tensor())), expected, rtol=1e-3, atol=1e-3)
    assert only_report(compiler).loaded == 0
    compiler = warmed(restart, block)
    assert only_report(compiler).step == "precompiled"
    with CHANGES[change](block):
        close(eager(block, tensor()), expected, rtol=1e-3, atol=1e-3)
    close(eager(block, tensor()), eager_unchanged(), rtol=1e-3, atol=1e-3)


def eager_unchanged() -> torch.Tensor:
    """What the block answers that the artifact was made of."""
    return eager(build(Block), tensor())


GLOBALS: dict[str, Callable[[], Any]] = {
    "number of another type": lambda: patched(blocks, "COUNT", 2.0),
    "list that is no longer empty": lambda: patched(blocks, "ACTIVE", ["adapter"]),
    "value in a dict": lambda: patched(blocks, "OPTIONS", {"gain": 3.0}),
    "key in a dict": lambda: patched(blocks, "OPTIONS", {"gain": 2.0, "more": 1.0}),
    "value in an object": lambda: patched(blocks, "CONFIG", SimpleNamespace(gain=5.0)),
    "list, in place": lambda: told(lambda items: operator.setitem(blocks.ACTIVE, slice(None), items), ["adapter"], []),
    "value in a dict, in place": lambda: mock.patch.dict(blocks.OPTIONS, gain=3.0),
    "key in a dict, in place": lambda: mock.patch.dict(blocks.OPTIONS, more=1.0),
    "value in an object, in place": lambda: patched(blocks.CONFIG, "gain", 5.0),
}


@pytest.mark.parametrize("change", GLOBALS)
def test_block_that_reads_a_global_which_is_changed_before_or_after_the_load_is_not_served(made, change):
    module, expected = build(Global), eager(build(Global), tensor())
    found = find(made, module, tensor())
    with GLOBALS[change]():
        assert not torch.allclose(eager(build(Global), tensor()), expected), "it would have been wrong"
        assert isinstance(find(made, build(Global), tensor()), str)
        assert not fits(found, module, tensor())


def with_part(function: Any, name: str, value: Any) -> contextlib.AbstractContextManager[None]:
    """A function with another part while the context lasts."""
    return told(lambda part: setattr(function, name, part), value, getattr(function, name))


TUNED: dict[str, Callable[[Tunable], Any]] = {
    "closure variable": lambda module: told(blocks.tune, 5.0, 1.5),
    "default": lambda module: with_part(blocks.tunable, "__defaults__", (5.0,)),
    "keyword's default": lambda module: mock.patch.dict(blocks.tunable.__kwdefaults__, more=5.0),
    "code": lambda module: with_part(blocks.tunable, "__code__", blocks.tunable.__code__.replace(co_name="another")),
    "closure variable of its own": lambda module: told(module.tune, 5.0, 1.5),
    "default of its own": lambda module: with_part(module.own, "__defaults__", (5.0,)),
    "keyword's default of its own": lambda module: mock.patch.dict(module.own.__kwdefaults__, more=5.0),
}


# torch 2.11's own compiler does not notice these either.
NOT_GUARDED_BY_2_11 = ("default", "default of its own", "closure variable of its own")


@pytest.mark.parametrize("change", TUNED)
def test_function_that_is_tuned_after_the_load_is_noticed(made, change):
    if torch.__version__ < "2.12" and change in NOT_GUARDED_BY_2_11:
        pytest.skip("torch 2.11 has no guard for it")
    module = build(Tunable)
    found = find(made, module, tensor())
    with TUNED[change](module):
        assert not fits(found, module, tensor())
    assert fits(found, module, tensor())


@pytest.mark.parametrize("change", ["closure variable", "keyword's default"])
def test_function_that_is_tuned_after_the_load_answers_as_in_eager(restart, change):
    module, compiler = precompiling.built(restart, Tunable)
    assert only_report(compiler).step == "precompiled"
    with TUNED[change](module):
        expected = eager(build(Tunable), tensor())
        close(eager(module, tensor()), expected)


def test_block_that_reads_an_environment_variable_is_not_served_with_another_value(made, monkeypatch):
    """As far as it was set before the load: torch.compile itself does not see it set between two calls."""
    monkeypatch.setenv("BLOCK_GAIN", "1")
    assert isinstance(find(made, build(Environ), tensor()), str)


SWITCHES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": lambda: told(torch.use_deterministic_algorithms, True, False),
    "flash attention": lambda: told(torch.backends.cuda.enable_flash_sdp, False, True),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "attention priority": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "float32 matmul precision": lambda: precompiling.products(lambda: torch.set_float32_matmul_precision("medium")),
    "default dtype": lambda: told(torch.set_default_dtype, torch.float64, torch.float32),
    "threads": lambda: told(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "function modes": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_what_torch_is_told_from_outside_is_part_of_what_is_compiled(made, switch):
    block = build(Block)
    found = find(made, block, tensor())
    with torch.inference_mode(), SWITCHES[switch]():
        assert not found.fits((block, (tensor(),), {}))
        assert switch in found.misfit((block, (tensor(),), {}))
    assert fits(found, block, tensor())


def test_gradients_are_recorded_as_in_eager(restart):
    block, _ = precompiling.built(restart, Block)
    with torch.enable_grad():
        block(torch.ones(4, blocks.SIZE)).sum().backward()
    gradient, block.first.grad = block.first.grad, None
    reference = build(Block)
    reference(torch.ones(4, blocks.SIZE)).sum().backward()
    close(gradient, reference.first.grad)


def test_call_that_records_gradients_is_told_what_to_do(made):
    call = build(Block), (torch.ones(4, blocks.SIZE),), {}
    with torch.enable_grad():
        reason = loaded(made).find(CallSpec.of(call), call)
    assert "torch.inference_mode()" in reason


def test_no_grad_and_inference_mode_have_an_artifact_each(restart):
    for made in (1, 0):
        block = build(Block)
        compiler = boot(restart, block)
        answer = warm_up(compiler, lambda block=block: block(torch.ones(4, blocks.SIZE)), mode=torch.no_grad)
        assert not answer.is_inference()
        assert (only_report(compiler).step, only_report(compiler).made) == ("precompiled", made)
    warm_up(compiler, lambda: block(tensor()))
    assert (only_report(compiler).step, only_report(compiler).loaded) == ("precompiled", 2)


def test_numbers_in_arguments_have_an_artifact_each(restart):
    calls = [lambda block: block(tensor()), lambda block: block(tensor(), 2.0), lambda block: block(tensor(), by=3.0)]
    assert_precompiled_by_the_next_boot(restart, Block, *calls)


def test_layers_write_into_their_own_caches_in_the_making_and_in_the_loading_boot(made, tmp_path):
    expected = caches()
    answer = eager(build(Layers), tensor(), expected)
    for context in (activated(tmp_path / "cold"), copied(made, tmp_path / "restart")):
        with context as directory:
            layers, written = build(Layers), caches()
            compiler = boot(directory, layers)
            close(warm_up(compiler, lambda layers=layers, written=written: layers(tensor(), written)), answer)
            close(written, expected)
            assert only_report(compiler).step == "precompiled"
            again = caches()
            with torch.inference_mode():
                close(layers(tensor(), again), answer)
            close(again, expected)
    assert only_report(compiler).loaded == 2


def test_artifact_with_kernels_in_cpp_says_for_which_host(made):
    records = [read_artifact(path)[:2] for path in made.path.rglob("*.aot")]
    hosts = [record["host"] for key, record in records if key["class"] == "blocks.Layer"]
    assert [set(host) for host in hosts] == [{"instructions", "threads"}] * 2
    assert {host["threads"] for host in hosts} == {str(torch.get_num_threads())}


def test_strides_of_a_batch_of_one_need_one_artifact(restart):
    """A slice of a longer batch has other strides in dimensions where no address depends on them."""
    module = build(Batched)
    compiler = boot(restart, module)
    long = tensor(1, 8, 16)
    with torch.inference_mode():
        variants = [tensor(1, 4, 16), long[:, :4], long[:, 4:]]
    outputs = warm_up(compiler, lambda: [module(variant) for variant in variants])
    close(outputs, [eager(build(Batched), variant) for variant in variants])
    report = only_report(compiler)
    assert (report.step, report.loaded, report.graphs) == ("precompiled", 1, 0)


def test_slices_of_a_batch_of_two_are_not_taken_for_contiguous(restart):
    with torch.inference_mode():
        sliced = tensor(2, 8, 16)[:, :4]
    calls = [lambda module: module(tensor(2, 4, 16)), lambda module: module(sliced)]
    assert_precompiled_by_the_next_boot(restart, Batched, *calls)


# Views of one tensor of 24 rows. The first one is written.
OVERLAPPING = {
    "in part": lambda x: (x[:16], x[8:]),
    "whole, and a part is in neither": lambda x: (x[:16], x[:16]),
    "as columns": lambda x: (x.view(16, 24)[:, :16], x.view(16, 24)[:, 8:]),
    "two of three": lambda x: (x[:4], x[:4], x[20:]),
    "another two of three": lambda x: (x[:4], x[20:], x[:4]),
    "rows in pieces, which torch takes for overlapping": lambda x: (x.view(48, 8)[:16, :4], x.view(48, 8)[16:32, :4]),
}


class Several(nn.Module):
    """Several inputs, the first of which it changes before it reads all."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        x.copy_(torch.mm(x, x.T @ x))
        for other in others:
            x = torch.mm(x, other.T @ other)
        return x


class Joined(nn.Module):
    """Several inputs, which it reads."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return sum(torch.sin(x).sum() for x in inputs)


@pytest.mark.parametrize(("name", "mode"), zip(OVERLAPPING, [torch.inference_mode, torch.no_grad] * 3, strict=True))
def test_a_call_that_writes_where_two_inputs_overlap_is_eager(restart, name, mode):
    several, storages = build(Several), list[torch.Tensor]()
    compiler = boot(restart, several)

    def overlapping() -> tuple[torch.Tensor, ...]:
        storages.append(tensor(24, 16).clone())
        return OVERLAPPING[name](storages[-1])

    def apart() -> list[torch.Tensor]:
        return [view.clone() for view in OVERLAPPING[name](tensor(24, 16))]

    def call() -> None:
        close(several(*apart()), build(Several)(*apart()))
        close(several(*overlapping()), answer)

    with mode():
        answer = build(Several)(*overlapping())
        warm_up(compiler, call, mode=mode)
        call()
    close(storages[1:], storages[:1] * 3)
    assert "it writes into memory that two of its tensors share" in only_report(compiler).reason


class Held:
    """Two tensors that overlap, in slots."""

    __slots__ = ("first", "second", "unset")

    def __init__(self) -> None:
        table = tensor(24, 16)
        self.first, self.second = table[:16], table[8:]


class Holding(nn.Module):
    """Writes into what an object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.first.add_(x)
        return self.held.first + self.held.second


def test_a_call_that_writes_where_tensors_of_an_object_overlap_is_eager(restart):
    holding, twin, x = build(Holding), build(Holding), tensor(16, 16)
    compiler = boot(restart, holding)
    warm_up(compiler, lambda: close(holding(x), twin(x)))
    with torch.inference_mode():
        close(holding(x), twin(x))
    assert "it writes into memory that two of its tensors share" in only_report(compiler).reason


class Completed(nn.Linear):
    """Looks at its weight when it is unpickled, as layers do that were stored by older code."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        assert self.weight.shape


class Completing(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Completed(blocks.SIZE, blocks.SIZE), nn.ReLU())


def test_a_module_that_looks_at_its_tensors_when_it_is_unpickled_is_precompiled(directory):
    assert_precompiled_by_the_next_boot(directory, Completing, lambda block: block(tensor()))


class Sparse(nn.Module):
    """Writes into a tensor without a storage."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.to_sparse() * 2).mul_(2).to_dense() + y


class TooLarge(nn.Module):
    """Runs out of memory."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")


class HigherOrder(nn.Module):
    """Has an operator that refuses to be watched."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return flex_attention(x, y, y)


def test_what_is_written_where_tensors_overlap_is_known_or_an_error():
    q, k, _ = torch.randn(1, 4, 16, 96).chunk(3, -1)
    assert not writes_where_tensors_overlap((Sparse(), (q, k), {}))
    with pytest.raises(ArtifactError, match="its tensors share memory, and what it writes is unknown"):
        writes_where_tensors_overlap((HigherOrder(), (q, k), {}))
    with pytest.raises(torch.OutOfMemoryError, match="full"):  # another process may have the memory
        writes_where_tensors_overlap((TooLarge(), (q, k), {}))


@pytest.mark.parametrize("views", [lambda x: (x, x), lambda x: (x[:16], x[16:]), lambda x: (x[0], x[1])])
def test_a_call_that_writes_one_input_twice_or_beside_another_is_precompiled(restart, views):
    def answered(several: Several) -> tuple[torch.Tensor, torch.Tensor]:
        storage = tensor(32, 16)
        if views(storage)[0].dim() == 1:
            storage = storage.view(2, 16, 16)
        return several(*views(storage)), storage

    for _ in range(2):
        several = build(Several)
        compiler = boot(restart, several)
        found = [warm_up(compiler, lambda several=several: answered(several)) for _ in range(2)]
        close(found, [eager(answered, build(Several))] * 2)
        assert only_report(compiler).step == "precompiled"


def test_calls_that_only_read_where_two_inputs_overlap_are_precompiled(restart):
    calls = [lambda joined, views=views: joined(*views(tensor(24, 16))) for views in OVERLAPPING.values()]
    assert_precompiled_by_the_next_boot(restart, Joined, *calls)


def test_input_that_is_changed_ends_as_in_eager(restart):
    pair, expected = build(Pair), tensor(16, 16)
    answer = eager(build(Pair), expected, tensor(16, 16, seed=2))
    compiler = boot(restart, pair)
    for _ in range(2):
        changed = tensor(16, 16)
        close(warm_up(compiler, lambda changed=changed: pair(changed, tensor(16, 16, seed=2))), answer)
        close(changed, expected)
    changed = tensor(16, 16)
    with torch.inference_mode():
        pair(changed, tensor(16, 16, seed=2))
    close(changed, expected)
    assert only_report(compiler).step == "precompiled"


OWN = ("AnswersPair", "AnswersTyped", "AnswersNested", "TakesTyped", "AnswersDataclass", "AnswersModelOutput")
OWN = (*OWN, "AnswersBaseOutput", "AsksForTheType", "Secretive")
SECRETS = {"OWN_SECRET": "do-not-store-me"}


@pytest.fixture(scope="module")
def own_answers(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of two boots in a row with answers of their own classes, and what each told. A variable changes."""
    folder = tmp_path_factory.mktemp("own")
    environ, names = {**settings(folder, cold_start="block"), **SECRETS}, (*OWN, "Choosing")
    boots = [run_boot({**environ, "OWN_CHOICE": choice}, *names, program="own_answers") for choice in ("one", "two")]
    return folder, [{"log": boot.stderr, **json.loads(boot.stdout)} for boot in boots]


@pytest.mark.parametrize("name", OWN)
def test_inputs_and_answers_of_their_own_classes_are_precompiled(own_answers, name):
    _, (cold, restart) = own_answers
    assert cold[name] == restart[name] == ["precompiled", "", [True, True]]


def test_the_store_has_no_text_of_the_environment_nor_of_the_model(own_answers):
    folder, _ = own_answers
    unpacked = b""
    for pack in (folder / "store").rglob("*.pack"):
        with zstandard.ZstdDecompressor().stream_reader(pack.open("rb"), read_across_frames=True) as frames:
            unpacked += frames.read()
    assert b"Secretive" in unpacked
    assert b"OWN_SECRET" in unpacked
    assert SECRETS["OWN_SECRET"].encode() not in unpacked


def test_the_variable_that_changed_is_named(own_answers):
    _, (_, restart) = own_answers
    assert restart["Choosing"] == ["precompiled", "", [True, True]]
    assert "the environment variable OWN_CHOICE has changed" in restart["log"]


def test_a_function_for_inputs_apart_is_not_found_for_inputs_that_overlap(restart):
    several, apart = build(Several), (tensor(16, 16), tensor(16, 16, seed=2))
    warmed_up = boot(restart, several)
    warm_up(warmed_up, lambda: several(*apart))
    assert only_report(warmed_up).made == 1
    artifacts = loaded(restart)  # of a next boot, whose first call is one that overlaps
    assert isinstance(find(artifacts, several, *OVERLAPPING["in part"](tensor(24, 16))), str)
    assert isinstance(find(artifacts, several, *apart), Precompiled)


class IntoOut(nn.Module):
    """Writes into its input by `out=`."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch.sin(x, out=x)
        return x + y


def test_what_is_written_by_out_is_known():
    x, y = OVERLAPPING["in part"](torch.randn(24, 16))
    assert writes_where_tensors_overlap((IntoOut(), (x, y), {}))


@pytest.mark.parametrize("sums", [False, True])
def test_of_a_global_dictionary_what_the_code_reads_is_compared(restart, monkeypatch, sums):
    """Other code may add to a registry, before or behind what this code reads."""
    _, warmed_up = built(restart, Registered, sums)
    assert only_report(warmed_up).made == 1
    for registry, is_as_read in (
        ({"gain": 2.0}, True),
        ({"other": 1.0, "gain": 2.0}, not sums),
        ({"gain": 3.0}, False),
    ):
        monkeypatch.setattr(blocks, "REGISTRY", blocks.Registry(registry))
        found = find(loaded(restart), build(Registered, sums), tensor())
        assert isinstance(found, Precompiled) is is_as_read, found


def test_a_function_whose_global_is_gone_fits_no_call(made, monkeypatch):
    block = build(Global)
    found = find(made, block, tensor())
    assert fits(found, block, tensor())
    monkeypatch.delattr(blocks, "COUNT")
    assert not fits(found, block, tensor())
