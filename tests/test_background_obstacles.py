"""What keeps a call from being handed over to another process, and how it is named."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from handed_over_calls import Call
from torch import nn
from torch._subclasses import FakeTensorMode

from compile_cache.calls.pickling import hand_over, receive
from compile_cache.errors import NotHandedOver


def with_attribute(value: Any) -> Call:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module[1].held = value
    return module, (), {}


class Late: ...


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2)


NOT_HANDED_OVER: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, "a _thread.lock cannot be pickled"),
    "generator": (lambda: (number for number in ()), "a generator cannot be pickled"),
    "weak reference": (lambda: weakref.ref(Late), "a weakref.* cannot be pickled"),
    "lambda": (lambda: lambda: None, "a lambda cannot be handed over: .*"),
    "local class": (lambda: type("Local", (), {"__qualname__": "f.<locals>.C"}), "the class .* made in a function.*"),
    "main's class": (lambda: type("Late", (), {"__module__": "__main__"}), "the class Late .* the main program .*"),
    "loaded class": (lambda: type("Late", (), {"__module__": "made_here"}), ".* made_here was made in this process.*"),
    "shadowed class": (lambda: type("Late", (), {}), "it cannot be pickled: PicklingError: .*"),
    "stream": (lambda: torch.Stream(device="cpu"), "a torch.Stream cannot be handed over"),
    "storage": (lambda: torch.zeros(2).untyped_storage(), "a torch.storage.UntypedStorage cannot be handed over"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "a tensor of the layout torch.sparse_coo cannot be handed over"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor cannot be handed over: .*"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "a nested tensor cannot be handed over",
    ),
    "meta": (lambda: torch.zeros(2, device="meta"), "a tensor on the device meta cannot be handed over: .*"),
    "fake": (fake, "a FakeTensor cannot be handed over: .*"),
    "lazy": (lambda: nn.UninitializedParameter(), "a UninitializedParameter cannot be handed over: .*"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("kind", NOT_HANDED_OVER)
def test_what_belongs_to_this_process_is_named_and_refused(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    make_it, reason = NOT_HANDED_OVER[kind]
    with pytest.raises(NotHandedOver) as caught:
        hand_over(*with_attribute(make_it()))
    assert re.fullmatch(rf"1\.held: {reason}", str(caught.value)), caught.value


def test_an_open_file_is_refused(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(NotHandedOver, match=r"1\.held: a (_io\.)?TextIOWrapper"):
        hand_over(*with_attribute(file))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda lock: {"by": [1, (2, lock)]}, r"1.held['by'][1][1]"),
        (lambda lock: Held({"x": Held(lock)}), r"1.held.value['x'].value"),
        (lambda lock: nn.ModuleDict({"part": with_attribute(lock)[0]}), r"1.held.part.1.held"),
    ],
)
def test_the_way_to_it_is_named(value, path):
    with pytest.raises(NotHandedOver) as caught:
        hand_over(*with_attribute(value(threading.Lock())))
    assert str(caught.value) == f"{path}: a _thread.lock cannot be pickled"


def test_inputs_are_named_as_the_caller_named_them():
    with pytest.raises(NotHandedOver, match=r"^input 1\[0\]: a _thread.lock cannot be pickled$"):
        hand_over(nn.Identity(), (1, [threading.Lock()]), {})
    with pytest.raises(NotHandedOver, match=r"^input mask: a _thread.lock cannot be pickled$"):
        hand_over(nn.Identity(), (1,), {"mask": threading.Lock()})


def test_what_cannot_be_imported_there_is_an_error_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Late: pass\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        content = hand_over(*with_attribute(importlib.import_module("only_here").Late()))
    del sys.modules["only_here"]
    with pytest.raises(NotHandedOver, match="cannot be rebuilt: ModuleNotFoundError: No module named 'only_here'"):
        receive(content)
