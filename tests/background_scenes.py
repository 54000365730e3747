"""Scenes of boots that compile in a second process, and what they measure. background_boot.py plays one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import compile_cache

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compile_cache.lifecycle.boot import Boot

MODEL = "background/model@" + "0" * 40
COMPILER = ("torch._inductor.compile_fx", "torch._inductor", "torch._dynamo.convert_frame")
PATIENCE_S = 240.0


def digest(model: nn.Module) -> list[Any]:
    """Where a model's tensors are, and every bit of them."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [[name, tensor.data_ptr(), tensor.detach().flatten().tolist()] for name, tensor in tensors]


def served(boot: Boot, call: Callable[[], torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """What served one prediction, and its answer."""
    with boot.prediction() as prediction:
        output = call()
    metrics = {name.removeprefix("compile_cache."): value for name, value in prediction.metrics().items()}
    names = ("served", "compiled_now", "compiling")
    return {name: metrics[name] for name in names}, output


def served_later(boot: Boot, call: Callable[[], torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """The same, after one prediction in which code that has arrived is compared."""
    served(boot, call)
    return served(boot, call)


def difference(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output - reference).norm() / reference.norm())


def report(boot: Boot) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(boot.report.to_json())
    made["counts"] = json.loads(json.dumps({name: getattr(boot.counts(), name) for name in made["counts"]}))
    return made


def first() -> dict[str, Any]:
    """A server's life: its start, predictions while the second process compiles, and after."""
    with compile_cache.boot(MODEL) as boot:
        from background_blocks import Model, Norm, Wide, inputs, predict

        model = Model(Wide, Norm)
        x = inputs()
        before, x_before = digest(model), [x.data_ptr(), x.tolist()]
        boot.compile(model)
        boot.warm_up(lambda: predict(model))
    told: dict[str, Any] = {"imported": [name for name in COMPILER if name in sys.modules], "ready": report(boot)}
    reference = predict_eager(model)
    meanwhile = []
    while boot.waiting:
        made, output = served(boot, lambda: predict(model))
        meanwhile.append([made, difference(output, reference), digest(model) == before])
        boot.wait_compiled(0.05)
    told["after"], output = served_later(boot, lambda: predict(model))
    told |= {"meanwhile": meanwhile, "difference": difference(output, reference), "unchanged": digest(model) == before}
    told["lengths"] = [length(boot, model, rows) for rows in (5, 6, 7, 8, 9)]
    told["x_unchanged"] = [x.data_ptr(), x.tolist()] == x_before
    told["unchanged_at_the_end"] = digest(model) == before
    told["end"] = report(boot)
    return told


def predict_eager(model: nn.Module, rows: int = 4, *classes: type[nn.Module]) -> torch.Tensor:
    """What the model's own code answers."""
    from background_blocks import predict

    parts = [part for part in model.modules() if part._compiled_call_impl is not None]
    compiled = [part._compiled_call_impl for part in parts]
    for part in parts:
        part._compiled_call_impl = None
    try:
        return predict(model, rows, *classes)
    finally:
        for part, implementation in zip(parts, compiled, strict=True):
            part._compiled_call_impl = implementation


def length(boot: Boot, model: nn.Module, rows: int) -> list[Any]:
    """How a prompt of a length is served at once, and how after the second process is done."""
    from background_blocks import Wide, predict

    at_once, _ = served(boot, lambda: predict(model, rows, Wide))
    assert boot.wait_compiled(PATIENCE_S)
    later, output = served_later(boot, lambda: predict(model, rows, Wide))
    return [at_once, later, difference(output, predict_eager(model, rows, Wide))]


def again(*rows: str) -> dict[str, Any]:
    """The next boot: it predicts prompts of these lengths."""
    with compile_cache.boot(MODEL) as boot:
        from background_blocks import Norm, Wide, predict

        model = begun(boot, (Wide, Norm))
    told: dict[str, Any] = {"ready": report(boot), "steps": []}
    for count in map(int, rows):
        made, output = served(boot, lambda count=count: predict(model, count, Wide))
        told["steps"].append([made, difference(output, predict_eager(model, count, Wide))])
    return told | {"waiting": boot.waiting, "report": report(boot)}


def after_ready() -> dict[str, Any]:
    """A boot that gets a model after READY, and another one in the prediction that needs it."""
    with compile_cache.boot(MODEL) as boot:
        pass
    from background_blocks import Model, Norm, Wide, predict

    boot.compile(Model(Norm))
    model = Model(Wide)

    def load_and_predict() -> torch.Tensor:
        boot.compile(model)
        return predict(model, 4, Wide)

    at_once, _ = served(boot, load_and_predict)
    is_done = boot.wait_compiled(PATIENCE_S)
    later, _ = served_later(boot, lambda: predict(model, 4, Wide))
    return {"at_once": at_once, "is_done": is_done, "later": later}


def begun(boot: Boot, classes: tuple[type[nn.Module], ...]) -> nn.Module:
    """A model of these classes that is warmed up with four rows."""
    from background_blocks import Model, predict

    model = Model(*classes)
    boot.compile(model)
    boot.warm_up(lambda: predict(model))
    return model


def told_of(boot: Boot, model: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[str, Any]:
    """How a call of each class is served, how far it is from eager, and what the report says of it."""
    told: dict[str, Any] = {}
    for kind in classes:
        (step, output), reference = served_alone(boot, model, kind), predict_eager(model, 4, kind)
        told[kind.__name__] = {"step": step["served"].get(kind.__name__), "difference": difference(output, reference)}
    for region in report(boot)["regions"]:
        if region["name"] in told:
            told[region["name"]] |= {"reason": region["reason"], "settled": region["settled"]}
    return told


def served_alone(boot: Boot, model: nn.Module, kind: type[nn.Module]) -> tuple[dict[str, Any], torch.Tensor]:
    from background_blocks import predict

    return served(boot, lambda: predict(model, 4, kind))
