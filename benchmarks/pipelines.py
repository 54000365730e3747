"""Write a text-to-image pipeline with the shapes of a published one and random weights: what a boot, a compile and a
step cost depends on shapes alone.

    python benchmarks/pipelines.py --shape flux1 --out /tmp/flux1
    python benchmarks/pipelines.py --shape z-image --few-blocks --out /tmp/z-image

flux1 has the shapes of FLUX.1-dev: 11.9 B transformer parameters, 4.8 B of T5-XXL, about 33.7 GB of bf16. sdxl is
SDXL-base 1.0, about 6.9 GB. z-image has the widths of Z-Image-Turbo, and eight blocks: its prompts differ in length,
while the others pad them to one. --few-blocks writes eight blocks of flux1, and eleven of sdxl, the fewest with its
three widths. Weights are made on the GPU where there is one, in bf16 from the start: no fp32 copy of them exists.
"""

from __future__ import annotations

import argparse
import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from llama import build_tokenizer
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

_SEED = 0
_VOCABULARY = 1000
_CHAT = "{% for message in messages %}user {{ message['content'] }}{% endfor %} assistant"


@dataclass(frozen=True, slots=True)
class Shape:
    """The configuration of each part, where it differs from its class's defaults.

    `few` is what `network` and `encoder` have with few blocks. `checked_size` is the width and height in pixels of the
    picture that is drawn before the pipeline is saved.
    """

    build: Callable[[Shape, Path], DiffusionPipeline]
    network: dict[str, Any]
    encoder: dict[str, Any]
    vae: dict[str, Any]
    clip: dict[str, Any]
    few: Sequence[dict[str, Any]] = ({}, {})
    max_shard_size: str = "5GB"
    checked_size: int = 256

    def with_few_blocks(self) -> Shape:
        """The same widths."""
        network, encoder = self.few
        return replace(self, network={**self.network, **network}, encoder={**self.encoder, **encoder})


def build_flux(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """64 input channels: 16 latent ones of 2 x 2 pixels. The class's defaults are FLUX.1's own sizes."""
    t5 = T5Config(feed_forward_proj="gated-gelu", is_encoder_decoder=False, **shape.encoder)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        tokenizer_2=T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2"),
        transformer=FluxTransformer2DModel(in_channels=64, **shape.network),
        text_encoder=CLIPTextModel(clip_config(shape.clip, "quick_gelu")),
        text_encoder_2=T5EncoderModel(t5),
        vae=build_vae(shape, 16, scaling_factor=0.3611, shift_factor=0.1159, **_NO_CONVOLUTIONS),
    )


def build_sdxl(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """No transformer blocks at the first width. `attention_head_dim` is, in spite of its name, the number of heads; the
    added input is the pooled vector and six numbers of `addition_time_embed_dim` each (size, crop, target size)."""
    with torch.device("cpu"):  # it makes arrays of its tensors
        scheduler = EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            timestep_spacing="leading",
            steps_offset=1,
        )
    return StableDiffusionXLPipeline(
        scheduler=scheduler,
        # Both encoders read the same vocabulary; SDXL's two tokenizers differ in the padding alone.
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        tokenizer_2=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        unet=UNet2DConditionModel(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            use_linear_projection=True,
            addition_embed_type="text_time",
            **shape.network,
        ),
        text_encoder=CLIPTextModel(clip_config(shape.clip, "quick_gelu")),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(shape.encoder, "gelu")),
        vae=build_vae(shape, 4, scaling_factor=0.13025, force_upcast=True),
        add_watermarker=False,
    )


def build_sd3(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """Both encoders' vectors side by side are as wide as T5's."""
    encoders = [CLIPTextModelWithProjection(clip_config(sizes, "gelu")) for sizes in (shape.clip, shape.clip)]
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(in_channels=16, out_channels=16, **shape.network),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(shape, 16, scaling_factor=1.5305, shift_factor=0.0609, **_NO_CONVOLUTIONS),
        text_encoder=encoders[0],
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        text_encoder_2=encoders[1],
        tokenizer_2=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        text_encoder_3=T5EncoderModel(
            T5Config(feed_forward_proj="gated-gelu", is_encoder_decoder=False, **shape.encoder)
        ),
        tokenizer_3=T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2"),
    )


def build_z_image(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """Two blocks that refine the noise, two for the caption, and four for both. Each word of a prompt is a token."""
    network = ZImageTransformer2DModel(**shape.network)
    qwen = Qwen3Config(**{"vocab_size": _VOCABULARY, **shape.encoder}, pad_token_id=0, bos_token_id=None)
    # The class leaves these two as they are in memory.
    nn.init.normal_(network.x_pad_token, std=0.02)
    nn.init.normal_(network.cap_pad_token, std=0.02)
    tokenizer = build_tokenizer(_VOCABULARY)
    # Words that it does not know are `w0`, and padding is `w1`, which a prompt of words does not have.
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template = "w1", "right", _CHAT
    tokenizer.model_max_length = 512
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=build_vae(shape, 16, scaling_factor=0.3611, shift_factor=0.1159, **_NO_CONVOLUTIONS),
        text_encoder=Qwen3Model(qwen),
        tokenizer=tokenizer,
        transformer=network,
    )


_NO_CONVOLUTIONS = {"use_quant_conv": False, "use_post_quant_conv": False}


def build_vae(shape: Shape, channels: int, **others: Any) -> AutoencoderKL:
    """So many latent channels, an eighth of the picture's width and height."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        **shape.vae,
        **others,
    )


def clip_config(sizes: dict[str, Any], activation: str) -> CLIPTextConfig:
    """With this `eos_token_id` CLIP pools at the largest token id, which is the end of the text in the published
    vocabulary and in the demo model's."""
    return CLIPTextConfig(
        vocab_size=49408, bos_token_id=0, eos_token_id=2, pad_token_id=1, hidden_act=activation, **sizes
    )


_BUILDERS = {"flux": build_flux, "sdxl": build_sdxl, "sd3": build_sd3, "z_image": build_z_image}


def read_shapes() -> dict[str, Shape]:
    """Those of shapes.toml, by name."""
    found = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())["pipelines"]
    return {name: Shape(_BUILDERS[parts.pop("build")], **parts) for name, parts in found.items()}


SHAPES = read_shapes()


def build_pipeline(
    shape: Shape, tokenizers: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> DiffusionPipeline:
    """All parts with the random weights that their classes begin with, made on `device`."""
    with random_weights(device, dtype):
        pipeline = shape.build(shape, tokenizers)
    for network in networks(pipeline).values():
        network.eval()
    return pipeline


@contextlib.contextmanager
def random_weights(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """In it, modules are made on `device`, the same each time."""
    torch.manual_seed(_SEED)
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def networks(pipeline: DiffusionPipeline) -> dict[str, nn.Module]:
    """The parts of a pipeline that have weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def check_picture(pipeline: DiffusionPipeline, size: int) -> float:
    """The standard deviation of a picture's pixels (0 to 1) after two steps.

    Raises:
        ValueError: the latents or the pixels are not finite, or the picture is one flat colour.
    """
    pipeline.set_progress_bar_config(disable=True)
    arguments = {"prompt": "a check", "width": size, "height": size, "num_inference_steps": 2}
    with torch.inference_mode():
        latents = pipeline(output_type="latent", **arguments).images
        # [1, 3, size, size]
        pixels = pipeline(output_type="pt", **arguments).images
    deviation = pixels.float().std().item()
    if not (latents.isfinite().all() and pixels.isfinite().all() and deviation > 0):
        raise ValueError(f"random weights give no usable picture: latents {latents.std()}, pixels {deviation}")
    return deviation


def save(pipeline: DiffusionPipeline, folder: Path, max_shard_size: str) -> None:
    """Write the folder as `save_pretrained` does, but its models at the same time."""
    models = networks(pipeline)
    for name, part in pipeline.components.items():
        if part is not None and name not in models:
            part.save_pretrained(folder / name)
    with ThreadPoolExecutor(len(models)) as threads:
        jobs = [
            threads.submit(model.save_pretrained, folder / name, max_shard_size=max_shard_size)
            for name, model in models.items()
        ]
        for job in jobs:
            job.result()
    pipeline.save_config(folder)  # last: a folder that has it is complete


def main() -> None:
    """Build, check and write the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--few-blocks", action="store_true")
    parser.add_argument("--tokenizers", type=Path, default=Path("demo/flux-digits"), help="folder to take them from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    shape, device = SHAPES[args.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape.with_few_blocks() if args.few_blocks else shape
    pipeline = build_pipeline(shape, args.tokenizers, device)
    deviation = check_picture(pipeline, shape.checked_size)
    save(pipeline, args.out, shape.max_shard_size)
    for name, model in networks(pipeline).items():
        print(f"{name}: {sum(parameter.numel() for parameter in model.parameters()) / 1e9:.3f} B parameters")
    size_bytes = sum(path.stat().st_size for path in args.out.rglob("*.safetensors"))
    print(f"{size_bytes / 1e9:.2f} GB in {args.out}, built on {device}; pixels deviate by {deviation:.3f}")


if __name__ == "__main__":
    main()
