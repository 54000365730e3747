"""Weights of a call that was handed over: together they take less memory there, and the code made there fits here."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from precompiling import build, eager, find, loaded, tensor
from torch import nn

from compile_cache.calls import tensors
from compile_cache.calls.pickling import hand_over, receive
from compile_cache.calls.tensors import StorageLayout

SIZE = 16
LAYERS = 6
WEIGHT_BYTES = SIZE * SIZE * 4
TOLERANCE = 1e-5


class Layers(nn.Module):
    """More bytes of weights than these tests allow. Its calls also read and write a buffer of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))
        self.gain = nn.Parameter(torch.randn(SIZE).half())
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x * self.gain


class Writing(Layers):
    """Writes a weight in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[0].weight.data.mul_(0.5)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def buffer_bytes(monkeypatch) -> int:
    """A buffer for two and a half of the weights."""
    monkeypatch.setattr(tensors, "_WEIGHTS_BYTES", 5 * WEIGHT_BYTES // 2)
    return tensors._WEIGHTS_BYTES


def handed(module: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    """The module and input that another process makes."""
    with torch.inference_mode():
        made, (there,), _ = receive(hand_over((module, (x,), {})))
    return made, there


def ends(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a contiguous tensor's first byte and of the one after its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def span_bytes(*found: torch.Tensor) -> int:
    """From the first byte of all to the last."""
    return max(ends(one)[1] for one in found) - min(ends(one)[0] for one in found)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return ends(one)[0] < ends(other)[1] and ends(other)[0] < ends(one)[1]


def test_weights_take_no_more_than_the_buffer_and_all_else_has_its_own_memory(buffer_bytes):
    module = build(Layers)
    made, x = handed(module, tensor())
    weights = [layer.weight for layer in made.layers]

    assert span_bytes(*weights) <= buffer_bytes < LAYERS * WEIGHT_BYTES
    assert len({weight.untyped_storage()._cdata for weight in weights}) == LAYERS, "torch sees views of one storage"
    for one, other in combinations((weights[0], made.gain, made.calls, x), 2):
        assert not overlap(one, other)
    for here, there in zip(module.parameters(), made.parameters(), strict=True):
        assert (there.shape, there.stride(), there.dtype) == (here.shape, here.stride(), here.dtype)
        assert (there.data_ptr() - here.data_ptr()) % 64 == 0
    assert not any(overlap(one, following) for one, following in pairwise(weights))


def test_weights_that_fit_into_the_buffer_do_not_overlap(monkeypatch):
    monkeypatch.setattr(tensors, "_WEIGHTS_BYTES", 100 * WEIGHT_BYTES)
    made, _ = handed(build(Layers), tensor())
    assert not any(overlap(one, other) for one, other in combinations(made.parameters(), 2))


def test_integers_do_not_overlap():
    """A call may write one that is an index of another."""
    module = build(Layers)
    tables = (nn.Parameter(torch.zeros(WEIGHT_BYTES, dtype=torch.int8), requires_grad=False) for _ in range(LAYERS))
    module.tables = nn.ParameterList(tables)
    made, _ = handed(module, tensor())
    assert not any(overlap(one, other) for one, other in combinations(made.tables, 2))


def test_weights_that_are_mapped_take_no_room(monkeypatch):
    """Only some weights could be shared: the others do not get a buffer for all."""
    own = StorageLayout("cpu", 0, WEIGHT_BYTES, 0, torch.float32, None, True)
    shared = StorageLayout("cpu", 0, 1 << 40, 0, torch.float32, ("a handle",), True)
    storage = torch.zeros(1).untyped_storage()
    monkeypatch.setattr(tensors, "mapped", lambda handle: storage)
    made, mapping = tensors.allocate([own, shared])
    assert made.storage.nbytes() == WEIGHT_BYTES
    assert mapping.storage is storage


def test_a_weight_that_is_larger_than_the_buffer_fits(monkeypatch):
    monkeypatch.setattr(tensors, "_WEIGHTS_BYTES", 64)
    made, _ = handed(build(Layers), tensor())
    assert span_bytes(*(layer.weight for layer in made.layers)) < 2 * WEIGHT_BYTES


def test_tied_weights_and_weights_that_are_views_stay_so():
    module = build(Layers)
    module.layers[1].weight = module.layers[0].weight
    module.layers[3].weight = nn.Parameter(module.layers[2].weight.data[:8])
    made, _ = handed(module, tensor())
    assert made.layers[1].weight is made.layers[0].weight
    assert made.layers[3].weight.data_ptr() == made.layers[2].weight.data_ptr()


@pytest.mark.parametrize(
    ("kind", "device"), [(Layers, "cpu"), (Writing, "cpu"), pytest.param(Layers, "cuda", marks=pytest.mark.gpu)]
)
def test_code_made_there_serves_the_module_here(kind, device, buffer_bytes, directory: Path):
    module, x = build(kind).to(device), tensor().to(device)
    made, there = handed(module, x)
    weights = [layer.weight for layer in made.layers]
    assert span_bytes(*weights) <= buffer_bytes
    assert device == "cpu" or all(0 < weight.std() < 1 for weight in weights), "tuning needs random bits"
    with torch.inference_mode():
        assert not isinstance(made_there := loaded(directory).make((made, (there,), {})), str), made_there
    function = find(directory, module, x)
    assert not isinstance(function, str), function
    with torch.inference_mode():
        found = function(module, (x,), {})

    assert (found - eager(build(kind).to(device), x)).abs().max() < TOLERANCE
