"""Text to image: any diffusers pipeline, by folder or hub id."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from models.image.sizes import Size, native_sizes
from models.weights import move, need_no_cast

_WARM_UP_STEPS = 2
# What pipelines call the network that denoises, newest architecture first.
_DENOISERS = ("transformer", "unet", "prior")


def import_pipeline(model: str, revision: str | None) -> None:
    """Import the classes that `model` is made of, which loading it would import: loading then imports next to nothing.

    Raises:
        OSError: there is no such folder or repository.
    """
    config = DiffusionPipeline.load_config(model, revision=revision)
    getattr(diffusers, config["_class_name"], None)


def load_pipeline(model: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """What `DiffusionPipeline.from_pretrained` loads, on `device`; several times as fast if no weight needs a cast.

    Raises:
        OSError: there is no such folder or repository, or a file of it is missing or damaged.
    """
    folder = model if os.path.isdir(model) else DiffusionPipeline.download(model, revision=revision)
    if not need_no_cast(Path(folder), dtype):
        return DiffusionPipeline.from_pretrained(model, revision=revision, dtype=dtype, device_map=device.type)
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipeline.register_to_config(_name_or_path=model)
    move((part for part in pipeline.components.values() if isinstance(part, nn.Module)), device)
    return pipeline


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """One picture to draw. None leaves a value to the pipeline's own default."""

    prompt: str
    size: Size
    seed: int
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None


class DiffusionModel:
    """A loaded pipeline and the sizes it draws."""

    def __init__(self, pipeline: Any, sizes: Sequence[Size] = ()) -> None:
        self._pipeline = pipeline
        self._parameters = frozenset(inspect.signature(pipeline.__call__).parameters)
        self.sizes = tuple(sizes) or native_sizes(self._native_resolution())
        self._check_sizes()

    @classmethod
    def load(cls, model: str, revision: str | None, sizes: Sequence[Size] = ()) -> DiffusionModel:
        """Load a folder or hub id: bf16 straight to the GPU where there is one, else fp32 on the CPU.

        Raises:
            OSError: there is no such folder or repository.
            ValueError: one of `sizes` is not one that the pipeline can draw.
        """
        if torch.cuda.is_available():
            pipeline = load_pipeline(model, revision, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
        else:
            pipeline = DiffusionPipeline.from_pretrained(model, revision=revision, dtype=torch.float32)
        return cls(pipeline, sizes)

    @property
    def denoiser(self) -> nn.Module:
        """The network that is called once a step: what to compile."""
        found = [getattr(self._pipeline, name, None) for name in _DENOISERS]
        return next(network for network in found if network is not None)

    @property
    def takes_negative_prompt(self) -> bool:
        """Whether the pipeline has one."""
        return "negative_prompt" in self._parameters

    def warm_up_inputs(self, sizes: Sequence[Size] = ()) -> list[ImageInputs]:
        """Inputs that make predictions of `sizes` compile nothing; of the first size if none is given.

        A pipeline that runs guidance as a batch of two is warmed up without it as well.

        Raises:
            ValueError: one of `sizes` is not one that this model draws.
        """
        if unknown := [size for size in sizes if size not in self.sizes]:
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}; this model draws {', '.join(map(str, self.sizes))}")
        scales = (None, 1.0) if hasattr(type(self._pipeline), "do_classifier_free_guidance") else (None,)
        return [
            ImageInputs("a warm-up", size, seed=0, num_inference_steps=_WARM_UP_STEPS, guidance_scale=scale)
            for size in sizes or self.sizes[:1]
            for scale in scales
        ]

    def run(self, inputs: ImageInputs) -> Image.Image:
        """Draw one picture. The same inputs give the same picture, on the same kind of machine.

        Sets all the thread-local state it needs: Cog calls it from changing threads, and the warm-up from another.

        Raises:
            ValueError: a negative prompt for a pipeline that has none.
        """
        if inputs.negative_prompt and not self.takes_negative_prompt:
            raise ValueError(f"{type(self._pipeline).__name__} takes no negative_prompt; leave it empty")
        # On the CPU, so that the same seed starts from the same noise on every device.
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        with torch.inference_mode():
            result = self._pipeline(generator=generator, output_type="pil", **self._arguments(inputs))
        return result.images[0]

    def _arguments(self, inputs: ImageInputs) -> dict[str, Any]:
        arguments = {
            "prompt": inputs.prompt,
            "width": inputs.size.width,
            "height": inputs.size.height,
            "num_inference_steps": inputs.num_inference_steps,
            "guidance_scale": inputs.guidance_scale,
        }
        if inputs.negative_prompt:
            arguments["negative_prompt"] = inputs.negative_prompt
            # Pipelines whose guidance_scale is an input of a distilled network steer away from a negative prompt by
            # this one instead, and ignore the prompt unless it is above 1.
            if "true_cfg_scale" in self._parameters:
                arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
                if arguments["true_cfg_scale"] is None:
                    arguments["true_cfg_scale"] = _default(self._pipeline, "guidance_scale")
        return {name: value for name, value in arguments.items() if value is not None and name in self._parameters}

    def _native_resolution(self) -> int:
        """Pixels a side that the model was trained for, as its pipeline or its denoiser states them in latents."""
        config = getattr(self.denoiser, "config", None)
        candidates = (getattr(self._pipeline, "default_sample_size", None), getattr(config, "sample_size", None), 128)
        latents = next(value for value in candidates if isinstance(value, int))
        return latents * self._vae_scale_factor

    @property
    def _vae_scale_factor(self) -> int:
        """Pixels a latent, each way."""
        return int(getattr(self._pipeline, "vae_scale_factor", 8))

    def _check_sizes(self) -> None:
        # Transformers take patches of latents as tokens: as configured, or packed 2 x 2 (FLUX and its kin).
        patch = getattr(getattr(self.denoiser, "config", None), "patch_size", None)
        packed = 2 if hasattr(self._pipeline, "_pack_latents") else 1
        multiple = max(packed, patch if isinstance(patch, int) else 1) * self._vae_scale_factor
        wrong = [size for size in self.sizes if size.width % multiple or size.height % multiple]
        if wrong:
            raise ValueError(f"IMAGE_SIZES has {wrong[0]}; this model draws widths and heights that {multiple} divides")


def _default(pipeline: Any, parameter: str) -> Any:
    return inspect.signature(pipeline.__call__).parameters[parameter].default
