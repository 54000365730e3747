"""Text to image: any pipeline of diffusers that draws from a prompt alone, by folder or hub id. Where diffusers has
pipelines for its components that start from a picture, these draw from a picture, or fill a masked part of it.

A pipeline's signature and configuration decide what it takes, and which inputs it ignores. There is no list of
pipelines.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import diffusers
import numpy
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import nn

from compile_cache import Boot
from models import leave_out_foreign_lines, load_to_device
from models.image.inputs import ImageInputs
from models.image.lora import Loras
from models.image.pictures import fit
from models.image.settings import ImageSettings
from models.image.sizes import Size, nearest_size, offered_sizes

_WARM_UP_STEPS = 2
# What a request may ask for. A small strength runs one of the most steps. Tokenizers cut a long prompt, but first take
# half a kilobyte for each of its characters.
_MOST_STEPS, _MOST_CHARACTERS = 200, 20_000
# The names that pipelines give the network that denoises, newest architecture first.
_DENOISERS = ("transformer", "unet", "prior")
# What a pipeline may start from: its parameter, and a part of the pipeline's name.
_STARTS = {"prompt": ("prompt", ""), "image": ("image", "Img2Img"), "mask": ("mask_image", "Inpaint")}
# Only pipelines that start from a picture have these parameters. `strength` says how far the result may differ from it.
_OF_PICTURES = ("mask_image", "control_image", "strength")
# Defaults that pipelines for pictures have of their own.
_DEFAULTS = ("guidance_scale", "num_inference_steps", "max_sequence_length")
# In parameters. CLIP is smaller, and takes little of a picture's time.
_LARGE_ENCODER = 1_000_000_000

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


def load_pipeline(model: str, revision: str | None, boot: Boot | None = None) -> Any:
    """Load a pipeline in bf16 to the GPU, or in fp32 without one, as `DiffusionPipeline.from_pretrained` does.

    Raises:
        OSError: there is no such folder or repository, or a file is missing or damaged.
    """
    return load_to_device(partial(DiffusionPipeline.from_pretrained, model, revision=revision), boot)


class DiffusionModel:
    """A loaded pipeline and the sizes that it draws."""

    def __init__(self, pipeline: Any, sizes: Sequence[Size] = (), go_fast: str = "off", images: int = 1) -> None:
        """Check that the pipeline draws pictures of these sizes from a prompt; log which inputs it ignores.

        go_fast: `on` makes a second network with products in float8, `only` replaces the first.
        images: the most that a request may give.

        Raises:
            ValueError: it does not, it has no network to compile, the network cannot be made fast, or the pipeline
                itself takes no image where `images` is 2.
        """
        check_pipeline(type(pipeline))
        self._pipeline = pipeline
        self._name = type(pipeline).__name__
        self._parameters = inspect.signature(pipeline.__call__).parameters
        # Whether the pipeline itself takes images, and edits them as the prompt says.
        self.is_editing = "image" in self._parameters
        self._images = images
        if images > 1 and not self.is_editing:
            raise ValueError(f"IMAGES is {images}, but {self._name} itself takes no image; set IMAGES=1")
        self._needs_image = False
        self._defaults = {name: self._parameters[name].default for name in _DEFAULTS if name in self._parameters}
        self._go_fast = go_fast
        # By what they start from, and whether they are fast; made when first asked for. They share all components but
        # the denoiser.
        self._pipelines = {("prompt", go_fast == "only"): pipeline}
        self._denoiser_name, self.denoiser = find_denoiser(pipeline)
        # The networks that are called once a step, by whether they are fast.
        self.denoisers = {go_fast == "only": self.denoiser}
        fast_layers = None
        if go_fast != "off":  # its operators take 0.03 s to import
            from models.image.go_fast import fast_copy, make_fast

            if go_fast == "on":
                self.denoisers[True], fast_layers = fast_copy(self.denoiser)
            else:
                make_fast(self.denoiser)
        self.loras = Loras(pipeline, fast_layers)
        # Pixels of one latent, along each side.
        self._vae_scale_factor = int(getattr(pipeline, "vae_scale_factor", 8))
        self.sizes = tuple(sizes) or offered_sizes(self._native_resolution())
        self._wrong_sizes: set[Size] = set()
        self._check_sizes()
        for ignored in ignored_inputs(pipeline, self.denoiser):
            log.info(ignored)

    @classmethod
    def load(
        cls, model: str, revision: str | None, settings: ImageSettings, boot: Boot | None = None
    ) -> DiffusionModel:
        """Load a folder or hub id: bf16 on the GPU where there is one, else fp32 on the CPU.

        Raises:
            OSError: there is no such folder or repository.
            ValueError: the pipeline cannot draw as the settings say, or not from a prompt.
        """
        pipeline = load_pipeline(model, revision, boot)
        return cls(pipeline, settings.image_sizes, settings.go_fast, settings.images)

    def networks(self) -> Iterator[tuple[nn.Module, Mapping[str, bool]]]:
        """The networks to compile, and the options of `Boot.compile`: the denoisers; on a GPU also the VAE's decoder,
        and large text encoders without a cache. On a CPU these take minutes to compile, and little of a picture's time.
        """
        for denoiser in self.denoisers.values():
            yield denoiser, {}
        if not torch.cuda.is_available():
            return
        decoder = getattr(getattr(self._pipeline, "vae", None), "decoder", None)
        if isinstance(decoder, nn.Module):
            yield decoder, {"whole": True, "after_ready": True}
        for name, part in self._pipeline.components.items():
            if not (name.startswith("text_encoder") and isinstance(part, nn.Module)):
                continue
            is_large = sum(parameter.numel() for parameter in part.parameters()) >= _LARGE_ENCODER
            if is_large and "past_key_values" not in inspect.signature(type(part).forward).parameters:
                yield part, {"after_ready": True}

    def chooses_fast(self, asked: bool | None) -> bool:
        """Whether to draw fast: as asked, else wherever `GO_FAST` allows it.

        Raises:
            ValueError: `GO_FAST` does not allow what is asked.
        """
        if asked is None:
            return True in self.denoisers
        if asked not in self.denoisers:
            raise ValueError(
                f"go_fast={str(asked).lower()} is not available: this model runs with GO_FAST={self._go_fast}"
            )
        return asked

    def warm_up_inputs(self, sizes: Sequence[Size] = (), in_background: bool = False) -> list[ImageInputs]:
        """Inputs that compile everything for `sizes`; without `sizes`, for the first size.

        A pipeline that runs guidance as a batch of two is also warmed up without guidance, unless what is left out is
        compiled `in_background`: few requests have none, and to draw it takes a third of a restored SDXL's warm-up. One
        that takes images is warmed up with each number of them. With `GO_FAST=on`, both networks are warmed up.

        Raises:
            ValueError: the model does not draw one of `sizes`.
        """
        if unknown := [size for size in sizes if size not in self.sizes]:
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}; the model draws {', '.join(map(str, self.sizes))}")
        has_guidance = hasattr(type(self._pipeline), "do_classifier_free_guidance")
        return [
            ImageInputs(
                "a warm-up",
                size,
                seed=0,
                num_inference_steps=_WARM_UP_STEPS,
                guidance_scale=scale,
                image=_plain_picture(size) if images else None,
                image_2=_plain_picture(size) if images > 1 else None,
                go_fast=go_fast,
                shows_progress=False,
            )
            for go_fast in self.denoisers
            for size in sizes or self.sizes[:1]
            for scale in ((None, 1.0) if has_guidance and not in_background else (None,))
            for images in range(self._images + 1 if self.is_editing else 1)
        ]

    def try_out(self, inputs: ImageInputs) -> None:
        """Draw a picture of the warm-up, which shows what no signature tells: whether the pipeline needs an image, and
        whether it takes two.

        Raises:
            ValueError: it does not take two.
        """
        if inputs.image is None and self._needs_image:
            return
        try:
            self.run(inputs)
        except Exception as error:
            if inputs.image_2 is not None:
                raise ValueError(
                    f"IMAGES is 2, but {self._name} failed with two images; set IMAGES=1 ({error})"
                ) from error
            is_of_machine = not isinstance(error, AttributeError | TypeError | ValueError)  # such as no memory
            if inputs.image is not None or not self.is_editing or is_of_machine:
                raise
            # Several pipelines of diffusers have an `image` that is optional in their signature alone.
            self._needs_image = True
            log.info("%s failed without an image; every request has to give one (%s)", self._name, error)

    def run(self, inputs: ImageInputs) -> Image.Image:
        """Draw one picture. On the same kind of machine, the same inputs give the same picture.

        It sets the thread-local state that it needs, because Cog calls it from changing threads.

        Raises:
            ValueError: the pipeline takes no negative prompt or no picture, or does not draw from a prompt alone.
        """
        pipeline = self.pipeline_for(inputs)
        # On the CPU, so that the same seed starts from the same noise on every device.
        generator = torch.Generator("cpu").manual_seed(inputs.seed)
        pipeline.set_progress_bar_config(disable=not inputs.shows_progress)
        arguments = self._arguments(inputs, inspect.signature(pipeline.__call__).parameters)
        with torch.inference_mode():
            result = pipeline(generator=generator, output_type="np", **arguments)
        if not hasattr(result, "images"):
            raise ValueError(
                f"{self._name} gives {', '.join(result)}, and no images: set MODEL to a text-to-image pipeline"
            )
        if len(result.images) > 1:
            raise ValueError(f"{self._name} drew {len(result.images)} pictures: it takes two images for two prompts")
        picture: Any = result.images[0]
        if isinstance(picture, numpy.ndarray):
            if not numpy.isfinite(picture).all():  # it would be black there
                raise ValueError(f"{self._name} drew what are no numbers; give a smaller lora_scale or guidance_scale")
            (picture,) = pipeline.numpy_to_pil(picture)
        self._compare_sizes(inputs.size, Size(*picture.size))
        if inputs.image is not None and inputs.mask is not None:  # what is black stays, to the bit
            size = Size(*picture.size)
            picture = Image.composite(picture, fit(inputs.image, size), fit(inputs.mask, size, inputs.image.size))
        return picture

    def pipeline_for(self, inputs: ImageInputs) -> Any:
        """The pipeline that starts from what the inputs have: a prompt, a picture, or a picture and a mask.

        Raises:
            ValueError: the model cannot draw from these inputs.
        """
        if inputs.negative_prompt and "negative_prompt" not in self._parameters:
            raise ValueError(f"{self._name} takes no negative_prompt; leave it empty")
        if max(len(inputs.prompt), len(inputs.negative_prompt or "")) > _MOST_CHARACTERS:
            raise ValueError(f"a prompt has more than {_MOST_CHARACTERS} characters; give a shorter one")
        if inputs.image is None and inputs.mask is not None:
            raise ValueError("a mask needs an image to fill")
        if inputs.image is None and self._needs_image:
            raise ValueError(f"{self._name} edits an image; give one")
        if inputs.image_2 is not None and (self._images < 2 or inputs.image is None or inputs.mask is not None):
            raise ValueError("image_2 needs an image and no mask, and a model that runs with IMAGES=2")
        start = "prompt" if inputs.image is None else "image" if inputs.mask is None else "mask"
        if (start, inputs.go_fast) not in self._pipelines:
            self._pipelines[start, inputs.go_fast] = self._made_for(start, inputs.go_fast)
        pipeline = self._pipelines[start, inputs.go_fast]
        self._schedule(inputs, inspect.signature(pipeline.__call__).parameters)
        return pipeline

    def _made_for(self, start: str, go_fast: bool) -> Any:
        """A pipeline that starts from `prompt`, `image` or `mask`. Not made by `from_pipe`, which casts all weights."""
        kind = find_pipeline(type(self._pipeline), start)
        if kind is None:
            raise ValueError(f"diffusers has no pipeline that takes {start} and has the parts of {self._name}")
        network = {self._denoiser_name: self.denoisers[go_fast]}
        parts = {**self._pipeline.config, **self._pipeline.components, **network}
        names = inspect.signature(kind.__init__).parameters
        return kind(**{name: parts[name] for name in names if name in parts})

    def _compare_sizes(self, asked: Size, drawn: Size) -> None:
        if asked != drawn and asked not in self._wrong_sizes:
            self._wrong_sizes.add(asked)
            log.warning(
                "%s drew %s where %s was asked for: it chooses its own sizes; set IMAGE_SIZES to sizes that it draws",
                self._name,
                drawn,
                asked,
            )

    def _arguments(self, inputs: ImageInputs, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        arguments = {
            "prompt": inputs.prompt,
            "width": inputs.size.width,
            "height": inputs.size.height,
            "num_inference_steps": inputs.num_inference_steps,
            "guidance_scale": inputs.guidance_scale,
        }
        if inputs.image is not None:  # what the inputs leave open is as without a picture
            steps, strength = self._schedule(inputs, parameters)
            given = {name: value for name, value in arguments.items() if value is not None}
            arguments = {
                **self._defaults,
                **given,
                "num_inference_steps": steps,
                "strength": strength,
                "image": self._fitted(inputs, inputs.image),
                "mask_image": None if inputs.mask is None else fit(inputs.mask, inputs.size, inputs.image.size),
            }
        if inputs.negative_prompt:
            arguments["negative_prompt"] = inputs.negative_prompt
            # Where guidance_scale is an input of a distilled network, true_cfg_scale applies a negative prompt, if it
            # is above 1.
            if "true_cfg_scale" in parameters:
                asked = arguments.pop("guidance_scale")
                arguments["true_cfg_scale"] = self._defaults.get("guidance_scale") if asked is None else asked
        return {name: value for name, value in arguments.items() if value is not None and name in parameters}

    def _fitted(self, inputs: ImageInputs, image: Image.Image) -> Image.Image | list[Image.Image]:
        """The images in the drawn size, or, if the pipeline edits them, each in the size of its own shape."""
        if not self.is_editing or inputs.mask is not None:
            return fit(image, inputs.size)
        images = [image] if inputs.image_2 is None else [image, inputs.image_2]
        fitted = [fit(one, nearest_size(self.sizes, *one.size)) for one in images]
        return fitted if len(fitted) > 1 else fitted[0]

    def _schedule(self, inputs: ImageInputs, parameters: Mapping[str, Any]) -> tuple[int | None, float | None]:
        """The steps, and the share of them that is run on the picture: below 1, all but one at most, and at least one.

        diffusers leaves out `steps - steps * strength` of them, rounded down, or up for Stable Diffusion. Where that is
        none, it starts from noise alone.

        Raises:
            ValueError: the picture would not change, or not count.
        """
        steps, strength = inputs.num_inference_steps or self._defaults.get("num_inference_steps"), inputs.strength
        if inputs.image is None or strength in (None, 1) or not steps or "strength" not in parameters:
            return steps, strength
        if steps == 1 or not 0 < strength < 1:
            raise ValueError("prompt_strength 0 would keep all of the image, num_inference_steps 1 nothing; give more")
        strength = max(strength, 1 / _MOST_STEPS)
        while steps * strength < 1:
            steps += 1
        return steps, min(strength, 1 - 1 / steps)

    def _native_resolution(self) -> int:
        """The side, in pixels, of the pictures that the model was trained for."""
        config = getattr(self.denoiser, "config", None)
        candidates = (getattr(self._pipeline, "default_sample_size", None), getattr(config, "sample_size", None), 128)
        latents = next(value for value in candidates if isinstance(value, int))
        return latents * self._vae_scale_factor

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


def _plain_picture(size: Size) -> Image.Image:
    return Image.new("RGB", (size.width, size.height), "gray")


def check_pipeline(pipeline: type[Any]) -> None:
    """Check that a class of pipelines draws from a prompt alone.

    Raises:
        ValueError: it does not. The message names the class and the inputs that it needs.
    """
    parameters = inspect.signature(pipeline.__call__).parameters
    if "prompt" not in parameters:
        raise ValueError(f"{pipeline.__name__} takes no prompt: set MODEL to a text-to-image pipeline")
    needed = [
        name
        for name, parameter in parameters.items()
        if name in _OF_PICTURES
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty)
    ]
    if missing := [name for name in needed if name not in ("self", "prompt")]:
        raise ValueError(
            f"{pipeline.__name__} needs more than a prompt ({', '.join(missing)}): "
            "set MODEL to a text-to-image pipeline"
        )


def find_pipeline(pipeline: type[Any], start: str) -> Any:
    """diffusers' pipeline that has the same parts and starts from a `prompt`, an `image` or a `mask`, if there is one.

    diffusers names it after the one that draws from a prompt. Some of these take an image themselves.
    """
    parameter, name = _STARTS[start]
    if parameter in inspect.signature(pipeline.__call__).parameters:
        return pipeline
    return getattr(diffusers, f"{pipeline.__name__.removesuffix('Pipeline')}{name}Pipeline", None)


def find_denoiser(pipeline: Any) -> tuple[str, nn.Module]:
    """The network that a pipeline calls once a step, and its name there.

    Raises:
        ValueError: there is none. The message names the pipeline's class and its parts.
    """
    for name in _DENOISERS:
        network = getattr(pipeline, name, None)
        if network is not None:
            return name, network
    parts = ", ".join(sorted(name for name, part in pipeline.components.items() if part is not None))
    raise ValueError(
        f"{type(pipeline).__name__} has no {', '.join(_DENOISERS[:-1])} or {_DENOISERS[-1]} to compile; it has {parts}"
    )


def ignored_inputs(pipeline: Any, denoiser: nn.Module) -> list[str]:
    """One sentence for each input that the pipeline ignores."""
    parameters = inspect.signature(pipeline.__call__).parameters
    name = type(pipeline).__name__
    found = []
    if "true_cfg_scale" in parameters:
        # In these pipelines, guidance_scale is an input of the network, if that was trained with it. Qwen-Image's was
        # not.
        is_taken = getattr(getattr(denoiser, "config", None), "guidance_embeds", False)
        if "guidance_scale" not in parameters or not is_taken:
            found.append(f"{name} ignores guidance_scale without a negative_prompt: its network takes no guidance")
    elif "guidance_scale" not in parameters:
        found.append(f"{name} ignores guidance_scale: it has no such parameter")
    if "image" in parameters and "strength" not in parameters:
        found.append(f"{name} ignores prompt_strength: it edits an image as the prompt says")
    return found
