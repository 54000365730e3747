"""Calls that are handed over to another process: what is the same there, and what stays as it is here."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from boots import run_boot
from handed_over import SIZE, Codes, Forgetful, description, shapes
from handed_over_calls import CASES, Call, attributed
from hypothesis import given
from hypothesis import strategies as st
from test_quantization import TORCHAO
from torch import nn

from compile_cache.calls.pickling import hand_over, receive
from compile_cache.calls.torch_call import call_region, serve_by
from compile_cache.errors import NotHandedOver

PROJECT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def calls() -> dict[str, Call]:
    return {name: case() for name, case in CASES.items()}


@pytest.fixture(scope="module")
def received(calls, tmp_path_factory) -> dict[str, list[Any]]:
    """What another process found and computed, by the name of the case."""
    folder = tmp_path_factory.mktemp("calls")
    for name, call in calls.items():
        (folder / f"{name}.call").write_bytes(hand_over(call))
    done = run_boot(os.environ, str(folder), program="handed_over")
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in calls}


@pytest.mark.parametrize("name", CASES)
def test_another_process_has_the_same_call_and_can_run_it(calls, received, name):
    """An artifact made there is found here: the structure and the signature are the same."""
    described, found = received[name]
    assert described == description(*calls[name])
    with torch.inference_mode(name.startswith("inference")), torch.no_grad():
        assert found == shapes(call_region(*calls[name])) != []


def tensors_of(call: Call) -> list[torch.Tensor]:
    """Each tensor that a call leads to, with the parts of those that have some."""
    found: list[torch.Tensor] = []

    class Collecting(cloudpickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, Codes):
                found.extend((value.codes, value.scale))
            elif isinstance(value, torch.Tensor):
                found.append(value)
            return "left out" if isinstance(value, torch.Tensor | torch.Generator | torch._ops.OpOverload) else None

    Collecting(io.BytesIO()).dump(call)
    return found


@pytest.mark.parametrize("name", CASES)
def test_handing_over_changes_nothing(calls, name):
    """Not a bit, not an address, and no storage moves to shared memory."""
    tensors = tensors_of(calls[name])
    assert tensors

    def state() -> list[Any]:
        return [(t.data_ptr(), t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]

    before, contents, seeds = state(), [tensor.clone() for tensor in tensors], torch.get_rng_state()
    hand_over(calls[name])
    assert state() == before
    assert all(torch.equal(tensor, content) for tensor, content in zip(tensors, contents, strict=True))
    assert not any(tensor.is_shared() for tensor in tensors)
    assert torch.equal(torch.get_rng_state(), seeds)


def test_no_contents_travel():
    module = nn.Linear(64, 64)
    secret = torch.frombuffer(bytearray(b"secret weights.." * 1024), dtype=torch.uint8)
    module.weight.data.view(torch.uint8).view(-1).copy_(secret)
    assert b"secret" not in hand_over((module, (), {}))
    assert not receive(hand_over((module, (), {})))[0].weight.any()


OF_PROCESS = {
    "lock": threading.Thread,  # it has some
    "TextIOWrapper": partial(open, __file__),  # cloudpickle alone would copy what is in it
    "BufferedReader": partial(open, __file__, "rb"),
    "socket": socket.socket,
}


@pytest.mark.parametrize("kind", OF_PROCESS)
def test_what_belongs_to_this_process_is_refused_by_name(kind):
    module, held = nn.Linear(2, 2), OF_PROCESS[kind]()
    with contextlib.closing(held) if hasattr(held, "close") else contextlib.nullcontext():
        for module.held in (held, [held], lambda: held):
            with pytest.raises(NotHandedOver, match=f"^held: it cannot be pickled: .*{kind}"):
                hand_over((module, (), {}))


def test_what_a_library_says_of_its_objects_holds_whenever_it_is_imported():
    class Native:
        def __reduce_ex__(self, protocol: int) -> Any:
            raise TypeError("only copyreg knows how")

    copyreg.pickle(Native, lambda _: (str, ("made again",)))
    assert receive(hand_over((nn.Identity(), (Native(),), {})))[1] == ("made again",)


def test_what_is_one_object_stays_one_object():
    module, _, kwargs = attributed()
    x = torch.randn(4, SIZE)
    made, args, made_kwargs = receive(hand_over((module, (x, [x, x[1:]]), {"more": module.first.bias, **kwargs})))
    assert made.tied.weight is made.first.weight
    assert made.tied.bias is not made.first.bias
    assert args[0] is args[1][0]
    assert made_kwargs["more"] is made.first.bias
    assert args[1][1].untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
    assert made.method.__self__ is made


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Several tensors in up to three storages, with any shapes, strides, offsets and types."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        memory = torch.ones(draw(st.integers(64, 600)), dtype=torch.uint8)
        for _ in range(draw(st.integers(1, 4))):
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]))
            flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            shape = draw(st.lists(st.integers(0, 3), max_size=3))
            strides = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
            if last < flat.numel():
                offset = draw(st.integers(0, flat.numel() - 1 - max(last, 0)))
                made.append(torch.as_strided(flat, shape, strides, offset))
    return made


@given(views())
def test_views_keep_their_places(tensors):
    """Type, shape, strides, alignment, and which bytes two tensors have in common."""
    _, args, _ = receive(hand_over((nn.Identity(), tuple(tensors), {})))
    for there, here in zip(args, tensors, strict=True):
        assert (there.dtype, there.shape, there.stride()) == (here.dtype, here.shape, here.stride())
        assert (there.data_ptr() - here.data_ptr()) % 64 == 0
        assert not there.any()
    filled = [(here, there) for here, there in zip(tensors, args, strict=True) if here.numel()]
    for (here, there), (here_next, there_next) in pairwise(filled):
        if here.untyped_storage().data_ptr() == here_next.untyped_storage().data_ptr():
            assert there_next.data_ptr() - there.data_ptr() == here_next.data_ptr() - here.data_ptr()
            assert there_next.untyped_storage().data_ptr() == there.untyped_storage().data_ptr()
        else:
            assert there_next.untyped_storage().data_ptr() != there.untyped_storage().data_ptr()


def test_only_the_used_part_of_a_storage_is_allocated():
    memory = torch.zeros(100_000)
    _, (made,), _ = receive(hand_over((nn.Identity(), (memory[50_000:50_100],), {})))
    assert made.untyped_storage().nbytes() < 600


def test_weights_on_a_cpu_take_no_memory_until_they_are_written():
    def resident_mb() -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0]) // 1024

    weight = torch.empty(1 << 30, dtype=torch.uint8)
    before = resident_mb()
    _, (made,), _ = receive(hand_over((nn.Identity(), (weight,), {})))
    assert resident_mb() - before < 200
    assert made[::4096].sum() == 0
    assert resident_mb() - before < 200


def test_flags_of_tensors_are_kept():
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        fast = torch.randn(3)
    for is_inference in (False, True):
        content = hand_over((nn.Identity(), (x, fast, x * 2, nn.Parameter(torch.ones(2).int(), False)), {}))
        with torch.inference_mode(is_inference):
            _, (made, made_fast, computed, integers), _ = receive(content)
        assert [made.is_inference(), made_fast.is_inference()] == [False, True]
        assert [t.requires_grad for t in (made, made_fast, computed, integers)] == [True, False, True, False]
        assert type(integers) is nn.Parameter


def test_attributes_travel_and_the_compiled_call_does_not():
    for module in (nn.Linear(2, 2), Forgetful(2, 2)):
        serve_by(module, lambda module: None)
        module.note = {"kept": [1, 2]}
        made, _, _ = receive(hand_over((module, (), {})))
        assert made._compiled_call_impl is None
        assert made.note == {"kept": [1, 2]}
        assert hasattr(made, "was_pickled") == isinstance(module, Forgetful)


def test_a_buffer_stays_one_that_is_not_saved():
    made, _, _ = receive(hand_over(attributed()))
    assert "table" in dict(made.named_buffers())
    assert "table" not in made.state_dict()


def test_memory_of_a_cpu_is_not_shared():
    module = nn.Linear(4, 4)
    content = hand_over((module, (), {}), shares_weights=True)
    assert not receive(content)[0].weight.any()
    assert module.weight.all()


_TORCHAO = """
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from handed_over import description
from compile_cache.calls.pickling import hand_over, receive
module = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).bfloat16()
quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
call = module, (torch.randn(2, 32, dtype=torch.bfloat16),), {}
made, args, _ = receive(hand_over(call))
print(description(*call) == description(made, args, {}))
print(type(made[0].weight) is type(module[0].weight) is not nn.Parameter, isinstance(made[0].weight, nn.Parameter))
print(made(*args).shape)
"""


@pytest.mark.skipif(not TORCHAO.is_dir(), reason="torchao is not in .venv/quantize: make test puts it there")
def test_weights_that_torchao_has_quantized_travel():
    done = run_boot(os.environ, _TORCHAO, program="run_source", folder=TORCHAO)
    assert done.stdout.splitlines() == ["True", "True True", "torch.Size([2, 32])"], done.stderr


_RECEIVE_SHARED = """
import sys
from compile_cache.calls.pickling import receive
module, (x,), _ = receive(sys.stdin.buffer.read())
print(module.weight.sum().item(), module.bias.sum().item() == 8.0, x.abs().max().item() <= 0.05, x.any().item())
"""


@pytest.mark.gpu
def test_weights_on_a_gpu_can_be_shared_and_the_rest_is_random():
    module = nn.Linear(16, 8, device="cuda")
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 1.0)
    before = module.weight.data_ptr()
    inputs = (torch.ones(2, 16, device="cuda"),)
    content = hand_over((module, inputs, {}), shares_weights=True)
    done = subprocess.run([sys.executable, "-c", _RECEIVE_SHARED], input=content, capture_output=True, cwd=PROJECT)
    assert done.stdout.split() == [b"256.0", b"True", b"True", b"True"], done.stderr
    assert module.weight.data_ptr() == before
    assert module.weight.sum().item() == 256.0


@pytest.mark.gpu
def test_a_call_on_a_gpu_is_the_same_and_draws_from_no_global_generator():
    module = nn.Linear(16, 8, device="cuda", dtype=torch.bfloat16)
    call = module, (torch.ones(3, 17, device="cuda", dtype=torch.bfloat16)[1:, 1:],), {}
    seeds = torch.cuda.get_rng_state()
    made = receive(hand_over(call))
    assert description(*made) == description(*call)
    assert torch.equal(torch.cuda.get_rng_state(), seeds)
    assert 0 < made[0].weight.abs().max().item() <= 0.05
