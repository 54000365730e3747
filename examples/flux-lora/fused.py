"""One LoRA at a time, merged into the weights of a pipeline: compiled code fits any LoRA and any scale."""

from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open


class FusedLora:
    """The LoRA of a pipeline. Weights that a LoRA has changed are kept in memory, not on the GPU."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.kept, self.changed = pipe, {}, []

    def use(self, file: Path | None, scale: float) -> None:
        """Merge this LoRA, or none, in place of the one before.

        Raises:
            ValueError: it is for another pipeline: it changes the network's inputs, or no layer.
        """
        self.pipe.unload_lora_weights()  # of a request that failed
        for weight in self.changed:
            weight.copy_(self.kept[weight])
        self.changed = []
        if file is None:
            return
        with safe_open(str(file), "pt") as tensors:
            if any("x_embedder" in name for name in tensors.keys()):  # noqa: SIM118  it is no dictionary
                raise ValueError("this is a control LoRA, which needs another pipeline")
        # The file, not its tensors alone: its header may have alpha.
        self.pipe.load_lora_weights(str(file), use_safetensors=True)
        parts = list(self.pipe.get_list_adapters())
        if not parts:
            raise ValueError("this LoRA changes nothing here: it is for another pipeline")
        layers = [layer for part in parts for layer in getattr(self.pipe, part).modules()]
        merged = [layer.get_base_layer() for layer in layers if isinstance(layer, BaseTunerLayer)]
        self.changed = [weight for layer in merged for weight in layer.parameters()]
        for weight in {*self.changed} - self.kept.keys():
            self.kept[weight] = weight.to("cpu", copy=True)  # going back by subtraction would round
        self.pipe.fuse_lora(parts, lora_scale=scale)
        self.pipe.unload_lora_weights()
