"""Text to image: any pipeline of diffusers, by folder or hub id."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from models.image.inputs import ImageInputs
from models.image.sizes import Size, native_sizes
from models.image.supported import check_pipeline, find_denoiser, ignored_inputs
from models.setup_log import leave_out_foreign_lines
from models.weights import move, need_no_cast

_WARM_UP_STEPS = 2

log = logging.getLogger(__name__)


def import_pipeline(model: str, revision: str | None) -> None:
    """Import the classes of `model`, so that loading it imports next to nothing, and logs no progress.

    Raises:
        OSError: there is no such folder or repository.
        ValueError: the pipeline does not draw from a prompt alone.
    """
    leave_out_foreign_lines()
    diffusers.utils.logging.disable_progress_bar()
    config = DiffusionPipeline.load_config(model, revision=revision)
    pipeline = getattr(diffusers, config["_class_name"], None)
    if pipeline is not None:  # otherwise the repository has code of its own
        check_pipeline(pipeline)


def load_pipeline(model: str, revision: str | None, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a pipeline to `device` as `DiffusionPipeline.from_pretrained` does.

    It is several times as fast if no weight needs a cast.

    Raises:
        OSError: there is no such folder or repository, or a file is missing or damaged.
    """
    folder = model if os.path.isdir(model) else DiffusionPipeline.download(model, revision=revision)
    if not need_no_cast(Path(folder), dtype):
        return DiffusionPipeline.from_pretrained(model, revision=revision, dtype=dtype, device_map=device.type)
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipeline.register_to_config(_name_or_path=model)
    move((part for part in pipeline.components.values() if isinstance(part, nn.Module)), device)
    return pipeline


class DiffusionModel:
    """A loaded pipeline and the sizes that it draws."""

    def __init__(self, pipeline: Any, sizes: Sequence[Size] = ()) -> None:
        """Check that the pipeline draws pictures of these sizes from a prompt; log which inputs it ignores.

        Raises:
            ValueError: it does not, or it has no network to compile.
        """
        check_pipeline(type(pipeline))
        self._pipeline = pipeline
        self._name = type(pipeline).__name__
        self._parameters = inspect.signature(pipeline.__call__).parameters
        # The network that is called once a step: the one to compile.
        self.denoiser = find_denoiser(pipeline)
        self.sizes = tuple(sizes) or native_sizes(self._native_resolution())
        self._wrong_sizes: set[Size] = set()
        self._check_sizes()
        for ignored in ignored_inputs(pipeline, self.denoiser):
            log.info(ignored)

    @classmethod
    def load(cls, model: str, revision: str | None, sizes: Sequence[Size] = ()) -> DiffusionModel:
        """Load a folder or hub id: bf16 straight to the GPU where there is one, else fp32 on the CPU.

        Raises:
            OSError: there is no such folder or repository.
            ValueError: the pipeline cannot draw one of `sizes`, or not from a prompt alone.
        """
        if torch.cuda.is_available():
            pipeline = load_pipeline(model, revision, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
        else:
            pipeline = DiffusionPipeline.from_pretrained(model, revision=revision, dtype=torch.float32)
        return cls(pipeline, sizes)

    @property
    def takes_negative_prompt(self) -> bool:
        """Whether the pipeline has such an input."""
        return "negative_prompt" in self._parameters

    def warm_up_inputs(self, sizes: Sequence[Size] = ()) -> list[ImageInputs]:
        """Inputs that compile everything for `sizes`; without `sizes`, for the first size.

        A pipeline that runs guidance as a batch of two is also warmed up without guidance.

        Raises:
            ValueError: the model does not draw one of `sizes`.
        """
        if unknown := [size for size in sizes if size not in self.sizes]:
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}; the model draws {', '.join(map(str, self.sizes))}")
        scales = (None, 1.0) if hasattr(type(self._pipeline), "do_classifier_free_guidance") else (None,)
        return [
            ImageInputs(
                "a warm-up",
                size,
                seed=0,
                num_inference_steps=_WARM_UP_STEPS,
                guidance_scale=scale,
                shows_progress=False,
            )
            for size in sizes or self.sizes[:1]
            for scale in scales
        ]

    def run(self, inputs: ImageInputs) -> Image.Image:
        """Draw one picture. On the same kind of machine, the same inputs give the same picture.

        It sets the thread-local state that it needs, because Cog calls it from changing threads.

        Raises:
            ValueError: the pipeline takes no negative prompt, or does not draw pictures from a prompt alone.
        """
        if inputs.negative_prompt and not self.takes_negative_prompt:
            raise ValueError(f"{self._name} takes no negative_prompt; leave it empty")
        # On the CPU, so that the same seed starts from the same noise on every device.
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        self._pipeline.set_progress_bar_config(disable=not inputs.shows_progress)
        with torch.inference_mode():
            result = self._call(generator=generator, output_type="pil", **self._arguments(inputs))
        if not hasattr(result, "images"):
            raise ValueError(
                f"{self._name} gives {', '.join(result)}, and no images: set MODEL to a text-to-image pipeline"
            )
        picture: Image.Image = result.images[0]
        self._compare_sizes(inputs.size, Size(*picture.size))
        return picture

    def _call(self, **arguments: Any) -> Any:
        try:
            return self._pipeline(**arguments)
        except (AttributeError, TypeError, ValueError) as error:
            if "image" not in self._parameters:
                raise
            # Several pipelines of diffusers have an `image` that is optional in their signature alone.
            raise ValueError(f"{self._name} failed without an image; it may need one ({error})") from error

    def _compare_sizes(self, asked: Size, drawn: Size) -> None:
        if asked != drawn and asked not in self._wrong_sizes:
            self._wrong_sizes.add(asked)
            log.warning(
                "%s drew %s where %s was asked for: it chooses its own sizes; set IMAGE_SIZES to sizes that it draws",
                self._name,
                drawn,
                asked,
            )

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
            # Where guidance_scale is an input of a distilled network, true_cfg_scale applies a negative prompt, if it
            # is above 1.
            if "true_cfg_scale" in self._parameters:
                asked = arguments.pop("guidance_scale")
                arguments["true_cfg_scale"] = self._default_guidance if asked is None else asked
        return {name: value for name, value in arguments.items() if value is not None and name in self._parameters}

    @property
    def _default_guidance(self) -> Any:
        return self._parameters["guidance_scale"].default if "guidance_scale" in self._parameters else None

    def _native_resolution(self) -> int:
        """The side, in pixels, of the pictures that the model was trained for."""
        config = getattr(self.denoiser, "config", None)
        candidates = (getattr(self._pipeline, "default_sample_size", None), getattr(config, "sample_size", None), 128)
        latents = next(value for value in candidates if isinstance(value, int))
        return latents * self._vae_scale_factor

    @property
    def _vae_scale_factor(self) -> int:
        """Pixels of one latent, along each side."""
        return int(getattr(self._pipeline, "vae_scale_factor", 8))

    def _check_sizes(self) -> None:
        # A token of a transformer is a patch of latents, of the configured size or packed 2 x 2 (FLUX).
        patch = getattr(getattr(self.denoiser, "config", None), "patch_size", None)
        packed = 2 if hasattr(self._pipeline, "_pack_latents") else 1
        multiple = max(packed, patch if isinstance(patch, int) else 1) * self._vae_scale_factor
        wrong = [size for size in self.sizes if size.width % multiple or size.height % multiple]
        if wrong:
            raise ValueError(
                f"IMAGE_SIZES has {wrong[0]}; width and height must be multiples of {multiple} for this model"
            )
