"""One LoRA at a time, merged into the weights of a pipeline: compiled code fits any LoRA and any scale."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import nn


class FusedLora:
    """The LoRA of a pipeline. Weights that a LoRA has changed are kept in memory, not on the GPU."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.kept, self.changed = pipe, {}, []

    def use(self, file: Path | None, scale: float) -> None:
        """Merge this LoRA, or none, in place of the one before.

        Raises:
            ValueError: it cannot be merged into this pipeline. The next call takes back what was merged of it.
        """
        for weight, place in self.changed:
            weight.data = place.copy_(self.kept[weight])
        self.changed = []
        if file is None:
            return
        try:
            with as_it_was(self.pipe) as modules:
                self.merge(file, scale, modules)
        except Exception as error:
            raise ValueError(f"this LoRA cannot be merged: {error}") from error

    def merge(self, file: Path, scale: float, modules: list[nn.Module]) -> None:
        with safe_open(str(file), "pt") as tensors:
            names = " ".join(tensors.keys())
        if "x_embedder" in names:
            raise ValueError("it is a control LoRA, which needs another pipeline")
        if "dora_scale" in names:
            raise ValueError("it is a DoRA in a format that diffusers does not read")
        # The file, not its tensors alone: its header may have alpha.
        self.pipe.load_lora_weights(str(file), use_safetensors=True)
        parts = list(self.pipe.get_list_adapters())
        layers = [layer for part in parts for layer in getattr(self.pipe, part).modules()]
        merged = [layer.get_base_layer() for layer in layers if isinstance(layer, BaseTunerLayer)]
        if not merged or not {*merged} <= {*modules}:  # diffusers puts larger layers in the place of others
            raise ValueError("it is for another pipeline: it changes nothing here, or layers of other sizes")
        self.changed = [(weight, weight.data) for layer in merged for weight in layer.parameters()]
        for weight in dict(self.changed).keys() - self.kept.keys():
            self.kept[weight] = weight.to("cpu", copy=True)  # going back by subtraction would round
        self.pipe.fuse_lora(parts, lora_scale=scale)
        for weight, place in self.changed:
            weight.data = place.copy_(weight)  # a DoRA is merged elsewhere
        if not all(weight.isfinite().all() for weight, _ in self.changed):
            raise ValueError("it makes weights that are not finite")


@contextmanager
def as_it_was(pipe: Any) -> Iterator[list[nn.Module]]:
    """All modules of a pipeline. What is added to them in this context, or takes their place, is taken away again."""
    modules = [each for part in pipe.components.values() if isinstance(part, nn.Module) for each in part.modules()]
    places = [vars(pipe), *map(vars, modules)]
    places += [value for place in places for value in place.values() if isinstance(value, dict)]
    before = [(place, dict(place)) for place in places]
    try:
        yield modules
    finally:
        for place, values in before:
            if [*map(id, place.values())] != [*map(id, values.values())]:
                place.clear()
                place.update(values)
