"""One LoRA at a time, merged into the weights of a pipeline: compiled code fits any LoRA and any scale."""

from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file

PARTS = ["transformer", "text_encoder"]


class FusedLora:
    """The LoRA of a FLUX pipeline. Weights that a LoRA has changed are kept in memory, not on the GPU."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.kept, self.changed = pipe, {}, []

    def use(self, file: Path | None, scale: float) -> None:
        """Merge this LoRA, or none, in place of the one before.

        Raises:
            ValueError: it changes the network's inputs, so it is for another pipeline.
        """
        self.pipe.unload_lora_weights()  # of a request that failed
        for weight in self.changed:
            weight.copy_(self.kept[weight])
        self.changed = []
        if file is None:
            return
        state = load_file(str(file))
        if any("x_embedder" in name for name in state):
            raise ValueError("this is a control LoRA, which needs another pipeline")
        self.pipe.load_lora_weights(state)
        layers = [layer for part in PARTS for layer in getattr(self.pipe, part).modules()]
        self.changed = [layer.get_base_layer().weight for layer in layers if isinstance(layer, BaseTunerLayer)]
        for weight in {*self.changed} - self.kept.keys():
            self.kept[weight] = weight.to("cpu", copy=True)  # going back by subtraction would round
        self.pipe.fuse_lora(PARTS, lora_scale=scale)
        self.pipe.unload_lora_weights()
