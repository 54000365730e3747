"""What keeps a call from being handed over to another process, and how it is named."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from boots import run_boot, settings
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
    "lock": (threading.Lock, "it cannot be pickled: .*_thread.lock.*"),
    "generator": (lambda: (number for number in ()), "it cannot be pickled: .*generator.*"),
    "weak reference": (lambda: weakref.ref(Late), "it cannot be pickled: .*weakref.*"),
    "loaded class": (lambda: type("Late", (), {"__module__": "made_here"}), ".* made_here was made in this process.*"),
    "stream": (lambda: torch.Stream(device="cpu"), "a torch.Stream cannot be handed over"),
    "storage": (lambda: torch.zeros(2).untyped_storage(), "a torch.storage.UntypedStorage cannot be handed over"),
    "sparse": (lambda: torch.eye(2).to_sparse(), "a tensor of the layout torch.sparse_coo cannot be handed over"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "a nested tensor cannot be handed over"),
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
        hand_over(with_attribute(make_it()))
    assert re.fullmatch(rf"1\.held: {reason}", str(caught.value)), caught.value


@pytest.mark.parametrize(
    "hold", [lambda lock: lock, lambda lock: {"by": [1, (2, lock)]}, lambda lock: Held(Held(lock))]
)
def test_an_attribute_or_input_that_holds_it_is_named(hold):
    """An input, as the caller named it."""
    lock, words = hold(threading.Lock()), "it cannot be pickled: TypeError: cannot pickle '_thread.lock' object"
    calls = {"1.held": with_attribute(lock), "input 1": (nn.Identity(), (1, lock), {})}
    for name, call in {**calls, "input mask": (nn.Identity(), (1,), {"mask": lock})}.items():
        with pytest.raises(NotHandedOver, match=rf"^{name}: {words}$"):
            hand_over(call)


def test_what_cannot_be_imported_there_is_an_error_of_the_call(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Late: pass\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(tmp_path)
        content = hand_over(with_attribute(importlib.import_module("only_here").Late()))
    del sys.modules["only_here"]
    with pytest.raises(NotHandedOver, match="cannot be rebuilt: ModuleNotFoundError: No module named 'only_here'"):
        receive(content)


MAIN_PROGRAM = """
import functools, threading
import compile_cache

with compile_cache.boot("org/model") as boot:
    import torch
    from torch import nn

    GAIN = 2.0

    def scaled(by):
        return lambda x: torch.mm(x, x.T) * by * GAIN

    class OfMain(nn.Module):
        def __init__(self, act=scaled(3.0)):
            super().__init__()
            self.weight, self.act = nn.Parameter(torch.eye(16)), act

        def forward(self, x):
            return self.act(torch.mm(x, self.weight))

    class Closure(OfMain): ...
    class Lambda(OfMain): ...
    class Partial(OfMain): ...
    class Locked(OfMain): ...

    def local():
        class Local(OfMain): ...
        return Local()

    locked, modules = Locked(), [OfMain(), Closure(scaled(5.0)), Lambda(lambda x: x.exp()), local()]
    locked.lock = threading.Lock()
    modules += [Partial(functools.partial(lambda y, x: x + y, 1.0)), locked]
    for module in modules:
        boot.compile(module.eval(), whole=True)
    x = torch.eye(16)[:4]
    boot.warm_up(torch.inference_mode()(lambda: [module(x) for module in modules]))
print({region.name: (region.step, region.made, region.loaded) for region in boot.report.regions})
boot.wait_published(60)
"""


def test_what_a_function_or_the_main_program_made_is_compiled(tmp_path):
    """The second boot, which starts no process, is a fork."""
    (tmp_path / "program.py").write_text(MAIN_PROGRAM)
    command, environ = [sys.executable, tmp_path / "program.py"], settings(tmp_path)
    printed = [subprocess.check_output(command, env=environ, text=True)]
    as_main = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    printed.append(run_boot(environ, as_main, str(tmp_path / "program.py"), program="run_source").stdout)
    steps = list(map(ast.literal_eval, printed))
    names = ("OfMain", "Closure", "Lambda", "Partial")
    others = {"Local": ("graphs", 0, 0), "Locked": ("eager", 0, 0)}
    assert steps[0] == dict.fromkeys(names, ("precompiled", 1, 0)) | others
    assert steps[1] == dict.fromkeys(names, ("precompiled", 0, 1)) | others
