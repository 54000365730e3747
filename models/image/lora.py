"""LoRAs, merged in place into a pipeline's weights: compiled code, artifacts and speed stay as they are.

diffusers reads a file and converts its format. A merged weight is the base weight plus scale · alpha / rank · up @ down
(Hu et al., LoRA, 2021), computed in fp32 from the base weight each time. So a combination gives the same weights,
whatever was merged before.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from safetensors import SafetensorError, safe_open
from torch import nn

from models.image.lora_files import LoraError
from models.weights import gpu_has_room

log = logging.getLogger(__name__)

# peft's names of the two factors.
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
# What follows a layer's name in the names of alphas, once they are converted as weights are.
_ALPHA = re.compile(r"(\.lora_A\.weight|\.lora\.down\.weight)?\.alpha$")
# Parts of a file that diffusers leaves out with a warning.
_LEFT_OUT = ("dora_scale", "lora_magnitude_vector")
_SHOWN_NAMES = 5
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA's safetensors file, and how strongly it is applied."""

    file: Path
    scale: float


@dataclass(frozen=True, slots=True)
class _Update:
    """What is added to a weight of shape (out, …): ``factor · up @ down``, with up (out, rank) and down (rank, …)."""

    down: torch.Tensor
    up: torch.Tensor
    factor: float


class Loras:
    """The LoRAs that are merged into a pipeline's weights."""

    def __init__(self, pipeline: Any, on_change: Callable[[nn.Parameter], None] = lambda _: None) -> None:
        """`on_change` is called with each weight that has changed."""
        self._pipeline = pipeline
        self._on_change = on_change
        # None while weights change, so that an error is followed by a complete merge.
        self._merged: tuple[tuple[Lora, int, int], ...] | None = ()
        # The base weights of all parameters that a LoRA has touched, and those that differ from them now.
        self._base: dict[nn.Parameter, torch.Tensor] = {}
        self._changed: set[nn.Parameter] = set()

    def use(self, loras: Iterable[Lora]) -> None:
        """Merge these LoRAs and no others. Without any, the weights are the base's to the bit.

        Raises:
            LoraError: one cannot be read, or does not fit the pipeline. Nothing has changed.
            torch.OutOfMemoryError: the base weights cannot be kept.
        """
        wanted = tuple(_identified(lora) for lora in loras if lora.scale)
        if wanted == self._merged:
            return
        started = time.perf_counter()
        updates: dict[nn.Parameter, list[_Update]] = defaultdict(list)
        for lora, *_ in wanted:
            for parameter, update in read_lora(self._pipeline, lora):
                updates[parameter].append(update)
        self._keep(updates.keys())
        restored = self._changed - updates.keys()
        self._merged, self._changed = None, self._changed | updates.keys()
        with torch.no_grad():
            for parameter in restored:
                parameter.copy_(self._base[parameter])
                self._on_change(parameter)
            for parameter, parts in updates.items():
                parameter.copy_(_merge(self._base[parameter].to(parameter.device), parts))
                self._on_change(parameter)
        self._merged, self._changed = wanted, set(updates)
        seconds = time.perf_counter() - started
        log.info("lora.merged loras=%d weights=%d seconds=%.2f", len(wanted), len(updates), seconds)

    def _keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the base weights of these parameters, beside them if there is room, else in pinned memory."""
        new = [parameter for parameter in parameters if parameter not in self._base]
        moves = bool(new) and new[0].is_cuda and not gpu_has_room(sum(parameter.nbytes for parameter in new))
        for parameter in new:
            if moves:
                kept = torch.empty_like(parameter, device="cpu", pin_memory=True, requires_grad=False)
                self._base[parameter] = kept.copy_(parameter.detach())
            else:
                self._base[parameter] = parameter.detach().clone()


def _identified(lora: Lora) -> tuple[Lora, int, int]:
    """A LoRA with what tells its file from another one of the same path."""
    try:
        stat = lora.file.stat()
    except OSError as error:
        raise LoraError(f"the LoRA's file cannot be read: {error.strerror}") from error
    return lora, stat.st_ino, stat.st_size


def read_lora(pipeline: Any, lora: Lora) -> Iterator[tuple[nn.Parameter, _Update]]:
    """What a LoRA adds, for each parameter of the pipeline that it changes.

    Raises:
        LoraError: the file cannot be read, or a part of it does not fit the pipeline.
    """
    state, alphas, settings = _read_file(pipeline, lora.file)
    unknown = {*state, *alphas}
    for component in getattr(pipeline, "_lora_loadable_modules", ()):
        network = getattr(pipeline, component, None)
        parts = [_below(component, values) for values in (state, alphas, settings)]
        if not parts[0] or not isinstance(network, nn.Module):
            continue
        unknown -= {f"{component}.{name}" for part in parts for name in part}
        own_alphas = {_ALPHA.sub("", name): alpha for name, alpha in _converted(network, parts[1]).items()}
        layers = dict(network.named_modules())
        for name, factors in _factors(_converted(network, parts[0])).items():
            down, up, weight = factors.get("A"), factors.get("B"), getattr(layers.get(name), "weight", None)
            if down is None or up is None or weight is None:
                unknown.add(f"{component}.{name}")
                continue
            _check(f"{component}.{name}", weight, down, up)
            yield weight, _Update(down, up, lora.scale * _factor(name, down.shape[0], own_alphas, parts[2]))
            own_alphas.pop(name, None)
        unknown |= {f"{component}.{name}.alpha" for name in own_alphas}
    if unknown:
        raise LoraError(f"the LoRA does not fit {type(pipeline).__name__}, which has none of these: {_listed(unknown)}")


def _below(component: str, values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _read_file(pipeline: Any, file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, Any], Mapping[str, Any]]:
    """A file's tensors by diffusers' names, the alphas that it has as tensors, and its trainer's settings."""
    read = getattr(type(pipeline), "lora_state_dict", None)
    if read is None:
        raise LoraError(f"{type(pipeline).__name__} takes no LoRA: diffusers has no loader for it")
    options: dict[str, Any] = {"return_lora_metadata": True, "use_safetensors": True, "local_files_only": True}
    if "return_alphas" in inspect.signature(read).parameters:
        options["return_alphas"] = True
    if hasattr(pipeline, "unet"):
        options["unet_config"] = pipeline.unet.config
    try:
        with safe_open(file, "pt") as opened:
            if left_out := [name for name in opened.keys() if name.rpartition(".")[2] in _LEFT_OUT]:  # noqa: SIM118
                raise LoraError(f"the LoRA is a DoRA, which is not supported: it has {_listed(left_out)}")
        state, *alphas, metadata = read(str(file.parent), weight_name=file.name, **options)
    except LoraError:
        raise
    except (OSError, SafetensorError) as error:
        raise LoraError(f"the LoRA's file cannot be read: {_shortened(str(error))}") from error
    except Exception as error:  # diffusers' converters raise whatever they meet
        raise LoraError(
            f"diffusers cannot convert the LoRA for {type(pipeline).__name__}: {_shortened(repr(error))}"
        ) from error
    return state, (alphas[0] if alphas else None) or {}, metadata if isinstance(metadata, dict) else {}


def _converted(network: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Values by peft's names, as diffusers converts them: those of a network of its own, and of a text encoder."""
    if isinstance(network, ModelMixin):
        return dict(convert_unet_state_dict_to_peft(values))
    for convert in (convert_state_dict_to_diffusers, convert_state_dict_to_peft):
        with contextlib.suppress(ValueError):  # they have this format already
            values = convert(values)
    if not hasattr(network, "text_model"):  # as transformers' text encoders since version 5
        values = {name.removeprefix("text_model."): value for name, value in values.items()}
    return values


def _factors(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The factors A (down) and B (up) of each layer; what is neither has none."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if match := _FACTOR.fullmatch(name):
            found[match[1]][match[2]] = tensor
        else:
            found[name] = {}
    return found


def _check(name: str, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> None:
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2:
        raise LoraError(f"{name} is quantized, so no LoRA can be merged into it. GO_FAST=only does so: set GO_FAST=on")
    if not all(factor.is_floating_point() and factor.isfinite().all() for factor in (down, up)):
        raise LoraError(f"{name} has factors that are not finite numbers")
    shapes = tuple(up.shape), tuple(down.shape), tuple(weight.shape)
    fits = min(up.dim(), down.dim()) >= 2 and up.flatten(1).shape == (weight.shape[0], down.shape[0])
    if not fits or down.flatten(1).shape[1] != weight[0].numel():
        raise LoraError(f"the LoRA does not fit: {name} has up {shapes[0]} and down {shapes[1]} for {shapes[2]}")


def _factor(name: str, rank: int, alphas: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    """alpha / rank of a layer, from the file's own alphas, or from peft's settings."""
    if settings.get("use_dora"):
        raise LoraError("the LoRA is a DoRA, which is not supported")
    try:
        alpha = alphas.get(name, settings.get("lora_alpha"))
        for pattern, other in (settings.get("alpha_pattern") or {}).items():
            path = pattern.removeprefix("^").replace("\\.", ".")
            if not re.fullmatch(r"[\w.]+", path):  # a file's own expression is not run
                raise LoraError(f"the LoRA's alpha_pattern is an expression: {_shortened(pattern)}")
            if name not in alphas and f".{name}".endswith(f".{path}"):
                alpha = other
        factor = 1.0 if alpha is None else float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, LoraError):
            raise
        raise LoraError(f"the LoRA's settings are wrong: {_shortened(repr(error))}") from error
    if not math.isfinite(factor):
        raise LoraError("the LoRA's settings are wrong: an alpha is not finite")
    return factor


def _merge(base: torch.Tensor, updates: Sequence[_Update]) -> torch.Tensor:
    """The merged weight in fp32."""
    merged = base.to(torch.float32, copy=True).flatten(1)
    for update in updates:
        down, up = (part.flatten(1).to(base.device).float() for part in (update.down, update.up))
        merged.addmm_(up, down, alpha=update.factor)
    return merged.view(base.shape)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(map(_shortened, ordered[:_SHOWN_NAMES])) + more


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
