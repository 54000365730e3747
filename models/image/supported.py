"""Decides whether a pipeline draws a picture from a prompt alone, and which inputs it ignores.

The pipeline's signature and configuration decide. There is no list of pipelines.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

# The names that pipelines give the network that denoises, newest architecture first.
_DENOISERS = ("transformer", "unet", "prior")
# Only pipelines that start from a picture have these parameters. `strength` says how far the result may differ from it.
_OF_PICTURES = ("mask_image", "control_image", "strength")


def check_pipeline(pipeline: type[Any]) -> None:
    """Check that a class of pipelines draws from a prompt alone.

    Raises:
        ValueError: it does not. The message names the class and the inputs that it needs.
    """
    parameters = inspect.signature(pipeline.__call__).parameters
    if "prompt" not in parameters:
        raise ValueError(f"{pipeline.__name__} takes no prompt: set MODEL to a text-to-image pipeline")
    given = {"self", "prompt"}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    ]
    if missing := [name for name in (*needed, *_OF_PICTURES) if name in parameters and name not in given]:
        raise ValueError(
            f"{pipeline.__name__} needs more than a prompt ({', '.join(dict.fromkeys(missing))}): "
            "set MODEL to a text-to-image pipeline"
        )


def find_denoiser(pipeline: Any) -> nn.Module:
    """The network that a pipeline calls once a step.

    Raises:
        ValueError: there is none. The message names the pipeline's class and its parts.
    """
    for name in _DENOISERS:
        network = getattr(pipeline, name, None)
        if network is not None:
            return network  # type: ignore[no-any-return]
    parts = ", ".join(sorted(name for name, part in pipeline.components.items() if part is not None))
    raise ValueError(
        f"{type(pipeline).__name__} has no {', '.join(_DENOISERS[:-1])} or {_DENOISERS[-1]} to compile; it has {parts}"
    )


def ignored_inputs(pipeline: Any, denoiser: nn.Module) -> list[str]:
    """One sentence for each input that the pipeline ignores or changes."""
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
    if "max_area" in parameters:
        area = parameters["max_area"].default
        found.append(f"{name} takes only the aspect ratio from the requested size: it draws about {area} pixels")
    if "use_resolution_binning" in parameters:
        found.append(f"{name} may replace the requested size by a size of its training (use_resolution_binning)")
    return found
