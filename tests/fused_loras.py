"""LoRAs that the example flux-lora/ merges, held against diffusers' own, which merges nothing. Prints a line of JSON.

    fused_loras.py FOLDER

For each LoRA: how far the merged one's answer is from the other's, and from the answer without it; how far the answer
is from that after the LoRA is taken out; and why it was refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny_models
import torch
from diffusers import FluxPipeline
from fused import FusedLora
from safetensors.torch import save_file

BLOCK = "transformer_blocks.0.attn"
LAYERS = [f"{BLOCK}.to_q", f"{BLOCK}.to_k"]


def weights(layers: list[str], width: int = 32, *, bias: bool = False) -> dict[str, torch.Tensor]:
    """Of rank 4."""
    shapes = {"lora_A.weight": (4, width), "lora_B.weight": (width, 4), **({"lora_B.bias": (width,)} if bias else {})}
    return {f"{layer}.{name}": 0.3 * torch.randn(shape) for layer in layers for name, shape in shapes.items()}


def alpha_in_the_header() -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """As diffusers' training scripts write it."""
    config = {"transformer.r": 4, "transformer.lora_alpha": 16, "transformer.target_modules": ["to_q", "to_k"]}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(config)}
    return weights([f"transformer.{layer}" for layer in LAYERS]), header


def dora(layers: list[str], **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """With a magnitude for each row of a weight, or for some layers alone."""
    magnitudes = {f"{layer}.lora_magnitude_vector": 2.0 * torch.rand(32) for layer in layers}
    return weights([f"transformer.{layer}" for layer in LAYERS]) | magnitudes | changes


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    tiny_models.flux(folder / "flux")
    plain, pipe = (FluxPipeline.from_pretrained(folder / "flux") for _ in range(2))
    for each in (plain, pipe):
        each.set_progress_bar_config(disable=True)
    lora, told = FusedLora(pipe), {}

    def draw(pipeline: Any) -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return pipeline("x", height=64, width=64, num_inference_steps=2, generator=noise, output_type="latent").images

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).abs().max())

    def parts() -> list[object]:
        modules = [(name, type(part), part.training) for name, part in pipe.transformer.named_modules()]
        return modules + [(name, weight.data_ptr()) for name, weight in pipe.transformer.named_parameters()]

    transformer = [f"transformer.{layer}" for layer in LAYERS]
    nan = {f"{transformer[0]}.lora_A.weight": torch.full((4, 32), float("nan"))}
    with torch.inference_mode():
        before, parts_before = draw(plain), parts()
        for name, (state, header) in {
            "alpha in the header": alpha_in_the_header(),
            "a bias": (weights(transformer, bias=True), None),
            "a DoRA": (dora(transformer), None),
            "half a DoRA": (dora(transformer[:1]), None),
            "a DoRA by another name": (dora([], **{f"{transformer[0]}.dora_scale": torch.ones(32, 1)}), None),
            "not finite": (dora([], **nan), None),
            "larger layers": (dora([], **{f"{transformer[0]}.lora_A.weight": torch.ones(4, 48)}), None),
            "another model's": (weights(["unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"]), None),
            "control": (weights(["transformer.x_embedder"]), None),
        }.items():
            file = folder / "lora"  # an upload's name may have no suffix
            save_file(state, file, header)
            try:
                lora.use(file, 1.0)
                plain.load_lora_weights(str(file), use_safetensors=True)
                found, right = draw(pipe), draw(plain)
                plain.unload_lora_weights()
                told[name] = {"from diffusers": apart(found, right), "from none": apart(found, before)}
            except ValueError as error:
                told[name] = {"refused": str(error)}
            lora.use(None, 1.0)
            told[name]["is as it was"] = parts() == parts_before
            told[name]["left"] = apart(draw(pipe), before)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
