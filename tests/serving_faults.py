"""Modules that a boot may serve wrongly, each in its own way, and scenes of boots that serve them.

serving_faults.py SCENE [ARGUMENT...] plays one, and prints a line of JSON: what the scene returns. Each answer is
compared with the answer of a twin that is never compiled. Both have the same weights, and get the same calls.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import logging
import operator
import os
import sys
import threading
import time
import weakref
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import numpy
import torch
from background_blocks import SIZE, Norm, Wide, inputs  # noqa: F401  a scene names it
from background_scenes import MODEL, PATIENCE_S, report
from torch import nn
from torch._higher_order_ops import while_loop
from torch.utils import _pytree as pytree

import compile_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compile_cache.lifecycle.boot import Boot


class Mode:
    """Told apart by identity, as an enumeration or a sentinel is."""

    def __init__(self) -> None:
        self.name = "default"


DEFAULT = Mode()


class Streaming(Wide):
    """A convolution over a stream, which keeps the end of the chunk before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(2, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.before, x])
        self.before.copy_(x[-2:])
        return torch.mm(x[2:], self.scale) - torch.mm(x[:-2], self.linear.weight)


class Counter(Wide):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Tally(Wide):
    """Counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Noisy(Wide):
    """Draws from torch's own generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn_like(x)


class Frozen(Wide):
    """Counts its calls in a parameter, by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count()
        return super().forward(x)

    def count(self) -> None:
        self.calls.add_(1)


class FrozenData(Frozen):
    """The same below torch's count of versions."""

    def count(self) -> None:
        self.calls.data.add_(1)


class FrozenReplaced(Frozen):
    """The same in memory of its own each time."""

    def count(self) -> None:
        self.calls.data = self.calls.data + 1


class Methodical(Wide):
    """Calls a method that it has as an attribute, as vLLM's CustomOp does, and has objects that only identity tells
    apart, or that pickle makes in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.unset, self.owners = self.scaled, object(), {object(), object()}
        self.tensors, self.name, self.places = (
            {torch.ones(1), torch.zeros(2)},
            operator.attrgetter("a"),
            itertools.count(),
        )
        self.random, self.part = numpy.random.default_rng(0), functools.partial(self.scaled, by=2)

    def scaled(self, x: torch.Tensor, by: int = 1) -> torch.Tensor:
        return super().forward(x) * by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chosen(x)


class Valued(Wide):
    """A plain value in its answer is another one when it is compiled."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().forward(x), 1 if torch.compiler.is_compiling() else 2


class Writing(Wide):
    """What it writes into its input is something else when it is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        x.copy_(torch.mm(y, self.scale) if torch.compiler.is_compiling() else y)
        return y


class Keeping(Wide):
    """What it writes into its buffer is something else when it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.last.copy_(torch.mm(y, self.scale) if torch.compiler.is_compiling() else y)
        return y


class Recognising(Wide):
    """Asks which object its attribute is."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = DEFAULT

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return super().forward(x), "default" if self.mode is DEFAULT else "other"


class Broken(Wide):
    """A graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class Recurrent(nn.Module):
    """torch makes no graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.steps = nn.Linear(SIZE, SIZE), nn.LSTM(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer, _ = self.steps(self.first(x))
        return answer


class Looping(Wide):
    """A graph break, and a loop, whose graph torch does not store."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        start = torch.tensor(0), x
        _, x = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.mm(x, self.scale)), start)
        return x


class Autocast(Wide):
    """Called under `torch.autocast`: see `call`."""


class Pair:
    """A module that a boot serves, and its twin. `wrong` says which calls had another answer or effect than the
    twin's."""

    def __init__(self, kind: type[nn.Module]) -> None:
        torch.manual_seed(0)
        self.module = kind().eval()
        torch.manual_seed(0)
        self.twin = kind().eval()
        self.name = kind.__name__
        self.calls = 0
        self.wrong: list[str] = []
        self.steps: list[str] = []

    def call(self, boot: Boot, rows: int = 4) -> None:
        """Call both, and compare all that can be seen of the calls."""
        self.calls += 1
        seen = boot.prediction()
        expected, found = (self._seen(module, rows) for module in (self.twin, self.module))
        self.steps += seen.served().get(self.name, {})
        self.wrong += [f"call {self.calls}: {name}" for name in expected if not alike(found[name], expected[name])]

    def _seen(self, module: nn.Module, rows: int) -> dict[str, Any]:
        torch.manual_seed(self.calls)
        with torch.inference_mode(), torch.autocast("cpu", enabled=self.name == "Autocast"):
            x = inputs(rows) * self.calls
            answer = module(x)
        kept = {name: value for name, value in vars(module).items() if isinstance(value, int | list)}
        state = {name: value.clone() for name, value in chain(module.named_buffers(), module.named_parameters())}
        return {"answer": answer, "input": x, "attributes": kept, "state": state, "next draw": torch.rand(3)}

    @property
    def told(self) -> dict[str, Any]:
        return {"wrong": self.wrong, "steps": self.steps}


def alike(found: Any, expected: Any) -> bool:
    """Whether two nested values are equal, their floats within what compiled code may round."""
    (some, form), (others, other_form) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    return form == other_form and all(map(_is_close, some, others))


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(other, float):
        one, other = torch.tensor(one), torch.tensor(other)
    if isinstance(other, torch.Tensor):
        tolerance = 2e-2 if other.dtype == torch.bfloat16 else 1e-4
        return one.shape == other.shape and torch.allclose(one, other, tolerance, tolerance)
    return bool(one == other)


def begun(*kinds: str, sources: tuple[str, ...] = ()) -> tuple[Boot, list[Pair]]:
    """A boot of these classes after READY."""
    with compile_cache.boot(MODEL, sources=sources) as boot:
        pairs = [Pair(globals()[kind]) for kind in kinds]
        for pair in pairs:
            boot.compile(pair.module, whole=True)
        boot.warm_up(lambda: [pair.call(boot) for pair in pairs])
    return boot, pairs


def right(*kinds: str, sources: tuple[str, ...] = ()) -> dict[str, Any]:
    """Predictions of a boot, some as soon as it is READY, the others when all code has arrived."""
    boot, pairs = begun(*kinds, sources=sources)
    told: dict[str, Any] = {"ready": report(boot), "waiting": boot.waiting}
    for _ in range(2):
        for _ in range(3):
            for pair in pairs:
                pair.call(boot)
        assert boot.wait_compiled(PATIENCE_S)
    for _ in range(3):
        for pair in pairs:
            pair.call(boot)
    told["published"] = boot.wait_published(PATIENCE_S)
    return told | {"pairs": {pair.name: pair.told for pair in pairs}, "report": report(boot)}


def released(folder: str, names: str, *sources: str) -> dict[str, Any]:
    """The classes of files in this folder."""
    sys.path.insert(0, folder)
    globals().update((name, getattr(importlib.import_module(name.lower()), name)) for name in names.split(","))
    return right(*names.split(","), sources=sources)


class Key:
    """What a number belongs to that no guard sees."""


ONE, OTHER = Key(), Key()
SCALES = weakref.WeakKeyDictionary({ONE: 1.0, OTHER: 7.0})


class Apart(Wide):
    """An instance may have another number, and two plain tensors that share memory."""

    def __init__(self, is_other: bool) -> None:
        super().__init__()
        self.key, self.last = OTHER if is_other else ONE, torch.zeros(4, SIZE)
        self.seen = [self.last[:] if is_other else torch.zeros(4, SIZE)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(super().forward(x))
        return (self.last + self.seen[0]) * SCALES[self.key]


def partly(used: str) -> dict[str, Any]:
    """The first `used` of five instances, of which the last is apart, in a warm-up and two predictions."""
    both, x = [], inputs()
    for _ in range(2):
        torch.manual_seed(0)
        both.append(nn.ModuleList(Apart(number == 4) for number in range(5)).eval())
    blocks, twins = both
    with compile_cache.boot(MODEL) as boot:
        boot.compile(blocks)
        with torch.inference_mode():
            boot.warm_up(lambda: [block(x) for block in blocks[:4]])
    wrong = []
    with torch.inference_mode():
        for _ in range(2):
            with boot.prediction() as prediction:
                answers = [block(x) for block in blocks[: int(used)]]
            expected = [twin(x) for twin in twins[: int(used)]]
            wrong += [number for number, pair in enumerate(zip(answers, expected, strict=True)) if not alike(*pair)]
    return {"wrong": wrong, "served": prediction.served(), "published": boot.wait_published(PATIENCE_S)}


def encoders(folder: str) -> dict[str, Any]:
    """Whole encoders of the transformers in this folder, or of the installed one. Their classes note what a model can
    record in a dictionary that code reads; the second process calls no `__init__`."""
    sys.path[:0] = [folder] if folder else []
    import transformers
    from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

    with compile_cache.boot(MODEL) as boot:
        bert = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        models = [
            BertModel(bert),
            T5EncoderModel(T5Config(vocab_size=9, d_model=8, d_ff=8, d_kv=8, num_layers=1, num_heads=1)),
        ]
        for model in models:
            boot.compile(model.eval(), whole=True)

        def run() -> None:
            with torch.inference_mode(), boot.prediction():
                for model in models:
                    model(input_ids=torch.arange(8)[None])

        boot.warm_up(run)
    for _ in range(3):
        assert boot.wait_compiled(PATIENCE_S)
        run()
    steps = {region.name: region.step for region in boot.report.regions}
    return {"version": transformers.__version__, "steps": steps, "published": boot.wait_published(PATIENCE_S)}


@contextlib.contextmanager
def comparing_beside(boot: Boot) -> Iterator[None]:
    """Another thread is in a prediction meanwhile, and sets the generators of random numbers back."""
    is_there, may_go = threading.Event(), threading.Event()

    def compare() -> None:
        with boot.prediction(), boot._regions.supply.moment.alone():
            is_there.set()
            assert may_go.wait(PATIENCE_S)

    own, thread = os.getpid(), threading.Thread(target=compare)
    thread.start()
    assert is_there.wait(PATIENCE_S)
    yield
    may_go.set()
    if os.getpid() == own:
        thread.join()


def forked() -> dict[str, Any]:
    """Two forks of a server, one before its code has arrived and one after, and a kind of call that is new in both."""
    torch.set_num_threads(1)
    boot, (pair,) = begun("Wide")
    told: dict[str, Any] = {}
    for name in ("early", "late"):
        read, write = os.pipe()
        with comparing_beside(boot):
            child = os.fork()
        if child == 0:
            for _ in range(3):
                with boot.prediction():
                    pair.call(boot)
            pair.call(boot, rows=7)
            answered = boot.wait_compiled(PATIENCE_S)
            (region,) = boot.report.regions
            told = {**pair.told, "waiting": boot.waiting, "answered": answered, "reason": region.reason}
            os.write(write, json.dumps(told).encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as file:
            told[name] = json.loads(file.read())
        told[name]["status"] = os.waitpid(child, 0)[1]
        assert boot.wait_compiled(PATIENCE_S)
        for _ in range(3):
            with boot.prediction():
                pair.call(boot)
    return told | {"parent": pair.told}


def paths_of(pack: Path) -> list[str]:
    """The paths of the files in a pack."""
    from compile_cache.storage.pack.format import read_head
    from compile_cache.storage.pack.manifest import Limits

    with pack.open("rb") as stored:
        return [file.path for file in read_head(stored, pack.name, Limits(), frozenset()).manifest.files]


def unrepeated() -> dict[str, Any]:
    """A server whose requests never repeat the warm-up's call, for longer than its code waits to be compared."""
    from compile_cache.serving import supply

    supply.UNPROVED_S = 2.0
    boot, (pair,) = begun("Wide")
    assert boot.wait_compiled(PATIENCE_S)
    pair.call(boot, rows=5)
    time.sleep(supply.UNPROVED_S)
    return {"published": boot.wait_published(PATIENCE_S), **pair.told}


def brief() -> dict[str, Any]:
    """A server with many instances of a block that ends soon after its code arrived."""
    boot, pairs = begun(*["Wide"] * 6)
    told: dict[str, Any] = {"waiting": boot.waiting}
    assert boot.wait_compiled(PATIENCE_S)
    for pair in pairs:
        pair.call(boot)
    return told | {"published": boot.wait_published(PATIENCE_S), "wrong": [pair.wrong for pair in pairs]}


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    scene, *arguments = sys.argv[1:]
    print(json.dumps(globals()[scene](*arguments)), flush=True)


if __name__ == "__main__":
    # Classes of the main program cannot go to another process.
    import serving_faults

    serving_faults.main()
