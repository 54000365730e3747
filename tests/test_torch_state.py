"""The server's state: taken in the server, and made in a second process."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from dataclasses import replace

import passes
import pytest
import torch
from blocks import Block
from precompiling import build, find, products, tensor, told
from state_process import StateProcess, environment, facts
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_cache.calls.spec import autocast_dtype
from compile_cache.errors import NotHandedOver
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.toolchain import configure_torch
from compile_cache.inductor.torch_state import (
    CONTEXTS,
    SWITCHES,
    ServerState,
    describe_switches,
    modes_of,
    options_digest,
    prepare_with,
    settle_attention_priority,
    switches,
)
from models.text.steps import prepare_process


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    """What both processes set before they compile. A preparation of one test stays for no other."""
    configure_torch()
    monkeypatch.setattr("compile_cache.inductor.torch_state._registered", {})


@pytest.fixture(scope="module")
def process():
    with StateProcess() as process:
        yield process


def reductions(kind):
    setter = getattr(torch._C, f"_set_cublas_allow_{kind}_reduced_precision_reduction")
    return told(lambda value: setter(*value), (False, False), (True, True))


def order(value):
    return told(torch._C._set_sdp_priority_order, value, torch._C._get_sdp_priority_order())


def determinism(value, warn_only):
    return told(
        lambda each: torch.use_deterministic_algorithms(each[0], warn_only=each[1]), (value, warn_only), (False, False)
    )


def threads():
    now = torch.get_num_threads()
    return told(torch.set_num_threads, now + 1, now)


def assert_set_back(answer):
    """Packages that were imported stay imported."""
    before, after = ({**answer[when], "versions": None} for when in ("before", "after"))
    assert before == after


# By switch: how a server comes to have another value than a new process.
CHANGES = {
    "autocast on CPU": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast on CUDA": lambda: told(lambda value: torch.set_autocast_enabled("cuda", value), True, False),
    "gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "flash attention": lambda: told(torch.backends.cuda.enable_flash_sdp, False, True),
    "memory-efficient attention": lambda: told(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "math attention": lambda: told(torch.backends.cuda.enable_math_sdp, False, True),
    "cuDNN attention": lambda: told(torch.backends.cuda.enable_cudnn_sdp, False, True),
    "attention priority": lambda: order([3, 1, 2, 0, 4]),
    "float32 matmul precision": lambda: products(lambda: torch.set_float32_matmul_precision("medium")),
    "float16 reductions": lambda: reductions("fp16"),
    "bfloat16 reductions": lambda: reductions("bf16"),
    "deterministic algorithms": lambda: determinism(True, False),
    "default dtype": lambda: told(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "threads": threads,
}


def test_every_switch_is_made_or_refused():
    assert {*CHANGES, *CONTEXTS} == set(SWITCHES)


def test_threads_of_a_call_on_a_gpu_are_left_alone(process):
    with threads():
        answer = process.ask("make_state", ServerState.read(on_gpu=True))
    assert answer["within"]["switches"] == answer["before"]["switches"]


# Each in one of torch's two ways of setting them, or in both.
PRECISIONS = {
    "products on CUDA, the older way": lambda: torch._C._set_cublas_allow_tf32(True),
    "products on CUDA": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "products on the CPU": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "everything": lambda: torch._C._set_fp32_precision_setter("generic", "all", "tf32"),
    "everything on CUDA": lambda: torch._C._set_fp32_precision_setter("cuda", "all", "ieee"),
    "convolutions": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "set, and set back": lambda: [torch.set_float32_matmul_precision(each) for each in ("high", "highest")],
    "both ways": lambda: [
        torch.set_float32_matmul_precision("high"),
        setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
}


OPTIONS = {
    "torch._inductor.config": [
        {"epilogue_fusion": False},
        {"max_autotune": True, "coordinate_descent_tuning": True},
        {"triton.unique_kernel_names": False, "cpp.simdlen": 128},
        {"post_grad_custom_pre_pass": passes.Versioned("second")},
        {"joint_custom_pre_pass": passes.leave, "pre_grad_custom_pass": passes.leave},
    ],
    "torch._dynamo.config": [{"assume_static_by_default": False, "recompile_limit": 65}],
    "torch._functorch.config": [{"activation_memory_budget": 0.5}],
    "torch.compiler.config": [{"cache_key_tag": "of the program"}],
}
WAYS = {
    **CHANGES,
    "warnings of nondeterminism": lambda: determinism(True, True),
    **{name: lambda tell=tell: products(tell) for name, tell in PRECISIONS.items()},
    **{
        "+".join(options): lambda module=module, options=options: sys.modules[module].patch(options)
        for module, cases in OPTIONS.items()
        for options in cases
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_switch_precision_or_option_of_the_server_is_made_however_it_was_set_and_set_back(process, way):
    with WAYS[way]():
        state, server = ServerState.read(on_gpu=False), facts()
    answer = process.ask("make_state", state)
    before = answer["before"]
    assert answer["within"] == server
    assert before["precisions"] != server["precisions"] if way in PRECISIONS else before != server
    assert way not in CHANGES or before["switches"][way] != server["switches"][way]
    assert_set_back(answer)


def test_options_that_decide_nothing_of_the_code_are_no_part_of_an_artifacts_name():
    before = options_digest()
    for name in ("trace.enabled", "fx_graph_cache", "autotune_local_cache"):
        with config.patch({name: not config._config[name].default}):
            assert options_digest() == before
    with config.patch({"epilogue_fusion": False}):
        assert options_digest() != before


REFUSED = {"function modes": lambda: torch.device("cpu"), "dispatch modes": FakeTensorMode}


@pytest.mark.parametrize("context", REFUSED)
def test_context_that_no_other_process_can_enter_is_named(context):
    with REFUSED[context](), pytest.raises(NotHandedOver, match=context.removesuffix("s")):
        ServerState.read(on_gpu=False)


def test_switch_that_cannot_be_made_is_named_with_both_values(process):
    state = ServerState.read(on_gpu=False)
    values = dict(zip(SWITCHES, state.switches, strict=True)) | {"function modes": 2, "math attention": False}
    answer = process.ask("make_state", replace(state, switches=tuple(values.values())))
    assert answer["refused"] == "in the compiling process, function modes 2 → 0"
    assert_set_back(answer)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"precisions": ("lowest", *["none"] * 9)}, "the precisions of float32 operations are ('highest'"),
        ({"options": (("torch._inductor.config", "no_such_option", pickle.dumps(1)),)}, "config.no_such_option"),
        ({"options": (("torch._inductor.config", "max_autotune", b"damaged"),)}, "config.max_autotune"),
        ({"preparations": ("passes:fail",)}, "passes:fail failed: LookupError"),
        ({"preparations": ("passes:no_such",)}, "passes:no_such"),
    ],
)
def test_what_cannot_be_made_is_named_and_nothing_stays(process, change, name):
    answer = process.ask("make_state", replace(ServerState.read(on_gpu=False), **change))
    assert name in answer["refused"]
    assert_set_back(answer)


def test_a_process_gets_the_import_path_that_the_server_has_by_then(monkeypatch):
    with monkeypatch.context() as server:
        server.setattr(sys, "path", ["of the server", *sys.path])
        state = ServerState.read(on_gpu=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    state.place()
    assert sys.path[0] == "of the server"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpu_that_is_not_there_is_named(process):
    answer = process.ask("make_state", replace(ServerState.read(on_gpu=True), device=0))
    assert "the CUDA device" in answer["refused"]


@pytest.mark.gpu
def test_order_of_attentions_holds_although_torch_sets_its_own_first(process):
    torch.zeros(1, device="cuda")
    index = torch.cuda.device_count() - 1
    with torch.cuda.device(index), order([2, 1, 0, 3, 4]):
        state, server = ServerState.read(on_gpu=True), facts(on_gpu=True)
        answer = process.ask("make_state", state)
    assert answer["within"] == server
    assert answer["device"] == index


def test_a_module_of_options_that_another_thread_imports_has_its_defaults(monkeypatch):
    before = ServerState.read(on_gpu=False)
    spec = importlib.util.spec_from_loader("torch._functorch.config", None)
    spec._initializing = True
    half_imported = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch._functorch.config", half_imported)
    assert ServerState.read(on_gpu=False) == before


def test_options_of_a_thread_that_loads_an_artifact_and_each_process_s_own_compile_workers_are_not_the_server_s():
    before = ServerState.read(on_gpu=False)
    of_inductor = config.patch(enable_autograd_for_aot=True, compile_threads=3)
    with torch._dynamo.config.patch(enable_aot_compile=True), of_inductor:
        assert ServerState.read(on_gpu=False) == before


def test_pass_that_no_other_process_can_import_is_refused_by_the_name_of_its_option():
    refusal = r"^torch\._inductor\.config\.post_grad_custom_post_pass cannot be handed"
    with (
        torch._inductor.config.patch(post_grad_custom_post_pass=lambda graph: None),
        pytest.raises(NotHandedOver, match=refusal),
    ):
        ServerState.read(on_gpu=False)


SERVER = """
import pickle, sys, torch
from compile_cache.inductor.torch_state import ServerState
torch.backends.cuda.enable_flash_sdp(False)
torch.set_float32_matmul_precision("high")
with torch.inference_mode():
    state = ServerState.read(on_gpu=False)
    compilers = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))]
    from compile_cache.inductor.toolchain import configure_torch
    from state_process import facts
    configure_torch()
    pickle.dump((state, compilers, facts()), sys.stdout.buffer)
"""


def test_server_without_a_compiler_imports_none_and_gets_what_it_will_look_for(process):
    done = subprocess.run([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=environment(), check=True)
    state, compilers, server = pickle.loads(done.stdout)
    assert compilers == []
    assert server["versions"]["diffusers"]
    assert process.ask("make_state", state)["within"] == server


def test_artifact_that_the_second_process_makes_is_found_by_the_server_alone_that_has_its_state(process, directory):
    with (
        torch.inference_mode(),
        determinism(True, True),
        order([3, 1, 2, 0, 4]),
        torch._inductor.config.patch(post_grad_custom_pre_pass=passes.Versioned("the server's"), epilogue_fusion=False),
    ):
        state = ServerState.read(on_gpu=False)
        path = process.ask("make_artifact", state, directory.path)
        found = find(directory, build(Block), tensor())
        assert isinstance(found, Precompiled), found
        assert found.path == path
    assert isinstance(find(directory, build(Block), tensor()), str)


def test_name_that_torch_no_longer_has_costs_the_second_process_alone(monkeypatch):
    with order([3, 1, 2, 0, 4]):
        state = ServerState.read(on_gpu=False)
    monkeypatch.delattr(torch._C, "_set_sdp_priority_order")
    with pytest.raises(NotHandedOver, match=r"priority cannot be set .*_set_sdp_priority_order"), state.applied():
        raise AssertionError("the state was made")


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """As if there were a GPU, for which torch has chosen no attention yet; what it chooses lasts as long as a test."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.zeros", lambda *_, **__: torch.ones(1))
    settle_attention_priority.cache_clear()
    with order(torch._C._get_sdp_priority_order()):
        yield
    settle_attention_priority.cache_clear()


def test_the_first_call_of_a_process_is_described_as_the_same_call_later(monkeypatch, beside_a_gpu):
    """On some GPUs torch changes its order of attentions when it first chooses one, as this does."""
    first, *others = torch._C._get_sdp_priority_order()
    monkeypatch.setattr("torch._fused_sdp_choice", lambda *_: torch._C._set_sdp_priority_order([*others, first]))
    assert switches(on_gpu=True) == switches(on_gpu=True)
    assert torch._C._get_sdp_priority_order() == [*others, first]


def test_a_full_memory_is_tried_again_and_named_where_it_counts(monkeypatch, beside_a_gpu):
    failures = [torch.OutOfMemoryError("no memory")] * 2

    def choose(*_: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr("torch._fused_sdp_choice", choose)
    assert switches(on_gpu=True)
    with pytest.raises(torch.OutOfMemoryError):
        settle_attention_priority()
    settle_attention_priority()
    assert not failures


def test_a_pass_that_is_a_global_object_travels_as_it_is_now(monkeypatch):
    """And not as its module makes it."""
    monkeypatch.setattr(passes, "SHARED", armed := passes.Versioned("as imported"), raising=False)
    armed.version = "armed by the setup"
    with torch._inductor.config.patch(post_grad_custom_post_pass=armed):
        (option,) = [each for each in ServerState.read(False).options if each[1] == "post_grad_custom_post_pass"]
    found = pickle.loads(option[2])
    assert found is not armed
    assert found.version == "armed by the setup"


# Functions that a model family has the compiling process call first.


def test_preparations_are_called_once_in_order_and_what_they_set_stays(process):
    """In a process that no later test asks."""
    before = ServerState.read(on_gpu=False).preparations
    for _ in range(2):
        prepare_with(passes.register)
    prepare_with(passes.set_pass)
    state = ServerState.read(on_gpu=False)
    assert state.preparations == (*before, "passes:register", "passes:set_pass")
    first, second = (process.ask("make_state", state) for _ in range(2))
    assert second["registered"] == ["registered"]
    with torch._inductor.config.patch(joint_custom_post_pass=passes.Versioned("of the family")):
        assert facts()["digest"] == first["within"]["digest"] == second["before"]["digest"]
    assert first["before"]["digest"] == facts()["digest"] != first["within"]["digest"]


@pytest.mark.parametrize("function", [lambda: None, passes.Versioned("first").method, len.__call__])
def test_preparation_that_no_other_process_can_import_is_refused(function):
    before = ServerState.read(on_gpu=False).preparations
    with pytest.raises(NotHandedOver, match="the compiling process cannot import"):
        prepare_with(function)
    assert ServerState.read(on_gpu=False).preparations == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="operators are joined on a GPU")
def test_preparing_the_compiling_process_leaves_options_as_the_servers_are_on_a_cpu():
    """Artifacts are found by their options: with another pass over graphs, the server would never find one."""
    prepare_process()
    assert config.post_grad_custom_pre_pass is None


def test_a_thread_has_its_own_autocast_again_after_a_load_with_another_one():
    """To leave inference mode resets whether autocast is on, and not its type."""
    with torch.autocast("cpu", torch.float16):
        with modes_of({**describe_switches(switches(on_gpu=False)), "autocast on CPU": "bfloat16"}):
            assert autocast_dtype("cpu") == "bfloat16"
        assert autocast_dtype("cpu") == "float16"
