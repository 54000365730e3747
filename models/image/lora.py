"""LoRAs, merged in place into a pipeline's weights: compiled code, artifacts and speed stay as they are.

diffusers reads a file and converts its format. A merged weight is the base weight plus scale · alpha / rank · up @ down
(Hu et al., LoRA, 2021), computed in fp32 from the base weight each time. So a combination gives the same weights,
whatever was merged before.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import convert_all_state_dict_to_peft
from safetensors import SafetensorError
from torch import nn

from models.image.lora_files import LoraError

log = logging.getLogger(__name__)

# peft's names of the two factors.
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_SHOWN_NAMES = 5
# What the base weights leave free on the GPU, for predictions and for the second process.
_SPARE_BYTES = 4 << 30


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

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        # None while weights change, so that an error is followed by a complete merge.
        self._merged: tuple[Lora, ...] | None = ()
        # The base weights of all parameters that a LoRA has touched, and those that differ from them now.
        self._base: dict[nn.Parameter, torch.Tensor] = {}
        self._changed: set[nn.Parameter] = set()

    def use(self, loras: Iterable[Lora]) -> None:
        """Merge these LoRAs and no others. Without any, the weights are the base's to the bit.

        Raises:
            LoraError: one cannot be read, or does not fit the pipeline. Nothing has changed.
            torch.OutOfMemoryError: the base weights cannot be kept.
        """
        wanted = tuple(lora for lora in loras if lora.scale)
        if wanted == self._merged:
            return
        started = time.perf_counter()
        updates: dict[nn.Parameter, list[_Update]] = defaultdict(list)
        for lora in wanted:
            for parameter, update in read_lora(self._pipeline, lora):
                updates[parameter].append(update)
        self._keep(updates.keys())
        restored = self._changed - updates.keys()
        self._merged, self._changed = None, self._changed | updates.keys()
        with torch.no_grad():
            for parameter in restored:
                parameter.copy_(self._base[parameter])
            for parameter, parts in updates.items():
                parameter.copy_(_merge(self._base[parameter].to(parameter.device), parts))
        self._merged, self._changed = wanted, set(updates)
        seconds = time.perf_counter() - started
        log.info("lora.merged loras=%d weights=%d seconds=%.2f", len(wanted), len(updates), seconds)

    def _keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the base weights of these parameters, beside them if there is room, else in pinned memory."""
        new = [parameter for parameter in parameters if parameter not in self._base]
        moves = bool(new) and new[0].is_cuda and not _has_room(sum(parameter.nbytes for parameter in new))
        for parameter in new:
            if moves:
                kept = torch.empty_like(parameter, device="cpu", pin_memory=True, requires_grad=False)
                self._base[parameter] = kept.copy_(parameter.detach())
            else:
                self._base[parameter] = parameter.detach().clone()


def read_lora(pipeline: Any, lora: Lora) -> Iterator[tuple[nn.Parameter, _Update]]:
    """What a LoRA adds, for each parameter of the pipeline that it changes.

    Raises:
        LoraError: the file cannot be read, or a part of it does not fit the pipeline.
    """
    state, alphas, metadata = _read_file(pipeline, lora.file)
    unknown = set(state)
    for component in getattr(pipeline, "_lora_loadable_modules", ()):
        prefix = f"{component}."
        part = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        network = getattr(pipeline, component, None)
        if not part or not isinstance(network, nn.Module):
            continue
        unknown -= {f"{prefix}{name}" for name in part}
        options = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
        if options.get("use_dora"):
            raise LoraError("the LoRA is a DoRA, which is not supported")
        layers = dict(network.named_modules())
        for name, factors in _factors(part).items():
            down, up = factors.get("A"), factors.get("B")
            weight = getattr(layers.get(name), "weight", None)
            if down is None or up is None or weight is None:
                unknown.add(f"{prefix}{name}")
                continue
            _check(f"{prefix}{name}", weight, down, up)
            alpha = alphas.get(f"{prefix}{name}.alpha", _alpha(options, name))
            yield weight, _Update(down, up, lora.scale * _factor(alpha, down.shape[0], options))
    if unknown:
        raise LoraError(f"the LoRA does not fit {type(pipeline).__name__}, which has none of these: {_listed(unknown)}")


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
        state, *alphas, metadata = read(str(file.parent), weight_name=file.name, **options)
    except (OSError, SafetensorError) as error:
        raise LoraError(f"the LoRA's file cannot be read: {error}") from error
    except Exception as error:  # diffusers' converters raise whatever they meet
        raise LoraError(f"diffusers cannot convert the LoRA for {type(pipeline).__name__}: {error!r}") from error
    return state, (alphas[0] if alphas else None) or {}, metadata or {}


def _factors(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The factors A (down) and B (up) of each layer; what is neither has none."""
    try:
        converted = convert_all_state_dict_to_peft(dict(state))
    except Exception:  # of an unknown format
        converted = state
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in converted.items():
        if match := _FACTOR.fullmatch(name):
            found[match[1]][match[2]] = tensor
        else:
            found[name] = {}
    return found


def _check(name: str, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> None:
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2:
        raise LoraError(f"{name} is quantized, so no LoRA can be merged into it")
    shapes = tuple(up.shape), tuple(down.shape), tuple(weight.shape)
    fits = min(up.dim(), down.dim()) >= 2 and up.flatten(1).shape == (weight.shape[0], down.shape[0])
    if not fits or down.flatten(1).shape[1] != weight[0].numel():
        raise LoraError(f"the LoRA does not fit: {name} has up {shapes[0]} and down {shapes[1]} for {shapes[2]}")


def _alpha(options: Mapping[str, Any], name: str) -> Any:
    """peft's setting for a layer; None if there is none."""
    for pattern, alpha in (options.get("alpha_pattern") or {}).items():
        if name == pattern or name.endswith(f".{pattern}"):
            return alpha
    return options.get("lora_alpha")


def _factor(alpha: Any, rank: int, options: Mapping[str, Any]) -> float:
    if alpha is None:
        return 1.0
    return float(alpha) / (math.sqrt(rank) if options.get("use_rslora") else rank)


def _merge(base: torch.Tensor, updates: Sequence[_Update]) -> torch.Tensor:
    """The merged weight in fp32."""
    merged = base.to(torch.float32, copy=True).flatten(1)
    for update in updates:
        down, up = (part.flatten(1).to(base.device).float() for part in (update.down, update.up))
        merged.addmm_(up, down, alpha=update.factor)
    return merged.view(base.shape)


def _has_room(nbytes: int) -> bool:
    free, _ = torch.cuda.mem_get_info()
    return free > nbytes + _SPARE_BYTES


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return ", ".join(ordered[:_SHOWN_NAMES]) + more
