"""LoRAs, merged in place into a pipeline's weights: compiled code, artifacts and speed stay as they are.

A file comes from anybody. diffusers converts its format, and leaves out what it does not know. So each tensor of the
file is followed through the conversion: it is merged, or the file is refused.

A merged weight is the base weight plus scale · alpha / rank · up @ down (Hu et al., LoRA, 2021), computed in fp32 from
the base weight each time. So a combination gives the same weights, whatever was merged before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compile_cache.weights.early_weights import gpu_has_room
from models.image.lora_files import Lora, LoraError

log = logging.getLogger(__name__)

# peft's names of the two factors.
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
# The first factor in the formats that have alphas beside their factors.
_DOWN = re.compile(r"(.+)\.lora(?:_A|[_.]down|_linear_layer\.down)(?:\.\w+)?\.weight")
_ALPHA = ".alpha"
# diffusers' converters count up to a block's number, some of them through all tensors each time.
_MOST_TENSORS, _LONG_NUMBER = 20_000, re.compile(r"\d{4}")
# float16's largest number. Weights of trained networks are far below.
_LARGEST_CHANGE = 65504.0
_SHOWN_NAMES = 5
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class _Update:
    """What is added to a weight of shape (out, …): ``factor · up @ down``, with up (out, rank) and down (rank, …)."""

    down: Tensor
    up: Tensor
    factor: float


class _Traced(Tensor):
    """A tensor of a LoRA's file, or one that diffusers computed from such tensors. `sources` are their names."""

    sources: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        sources = _sources(part for given in args for part in (given if isinstance(given, (list, tuple)) else [given]))
        for part in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(part, cls):
                part.sources = sources
        return result


def _sources(values: Iterable[Any]) -> frozenset[str]:
    return frozenset().union(*(value.sources for value in values if isinstance(value, _Traced)))


class Loras:
    """The LoRAs that are merged into a pipeline's weights."""

    def __init__(self, pipeline: Any, fast_layers: Mapping[nn.Parameter, Sequence[Any]] | None = None) -> None:
        """`fast_layers` are made from weights of the pipeline, and take each weight that changes."""
        self._pipeline = pipeline
        self._fast_layers = fast_layers or {}
        # None while weights change, so that an error is followed by a complete merge.
        self._merged: tuple[tuple[Lora, int, int, int], ...] | None = ()
        # The base weights of all parameters that a LoRA has touched, and those that differ from them now.
        self._base: dict[nn.Parameter, Tensor] = {}
        self._changed: set[nn.Parameter] = set()

    def use(self, loras: Iterable[Lora]) -> None:
        """Merge these LoRAs and no others. Without any, the weights are the base's to the bit.

        Raises:
            LoraError: one cannot be read, or does not fit the pipeline. The message names it. Nothing has changed.
            torch.OutOfMemoryError: the base weights cannot be kept.
        """
        wanted = tuple(_identified(lora) for lora in loras if lora.scale)
        if wanted == self._merged:
            return
        started = time.perf_counter()
        updates: dict[nn.Parameter, list[_Update]] = defaultdict(list)
        for lora, *_ in wanted:
            try:
                for parameter, update in read_lora(self._pipeline, lora):
                    updates[parameter].append(update)
            except LoraError as error:
                raise LoraError(f"LoRA {lora.name or lora.file.name}: {error}") from error
        self._keep(updates.keys())
        self._merged, self._changed = None, self._changed | updates.keys()
        with torch.no_grad():
            for parameter in self._changed:
                parts = updates.get(parameter, ())  # without any, the base comes back to the bit
                parameter.copy_(_merge(self._base[parameter].to(parameter.device), parts))
                for layer in self._fast_layers.get(parameter, ()):
                    layer.take(parameter)
        self._merged, self._changed = wanted, set(updates)
        seconds = time.perf_counter() - started
        log.info("lora.merged loras=%d weights=%d seconds=%.2f", len(wanted), len(updates), seconds)

    def _keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the base weights of these parameters, beside them if there is room, else in pinned memory."""
        new = [parameter for parameter in parameters if parameter not in self._base]
        moves = bool(new) and new[0].is_cuda and not gpu_has_room(sum(parameter.nbytes for parameter in new))
        place: Any = {"device": "cpu", "pin_memory": True} if moves else {}
        for parameter in new:
            kept = torch.empty_like(parameter, requires_grad=False, **place)
            self._base[parameter] = kept.copy_(parameter.detach())


def _identified(lora: Lora) -> tuple[Lora, int, int, int]:
    """A LoRA with what tells its file from another one of the same path, and from its own former content."""
    try:
        stat = lora.file.stat()
    except OSError as error:
        raise LoraError(f"LoRA {lora.name or lora.file.name}: its file cannot be read: {error.strerror}") from error
    return lora, stat.st_ino, stat.st_size, stat.st_ctime_ns


def read_lora(pipeline: Any, lora: Lora) -> Iterator[tuple[nn.Parameter, _Update]]:
    """What a LoRA adds, for each parameter of the pipeline that it changes.

    Raises:
        LoraError: the file cannot be read, or a part of it does not fit the pipeline.
    """
    tensors, settings = _read_file(lora.file)
    state = _convert(pipeline, tensors)
    merged: list[Tensor] = []
    unfit: list[Tensor] = []
    for component in getattr(pipeline, "_lora_loadable_modules", ()):
        network = getattr(pipeline, component, None)
        if not isinstance(network, nn.Module):
            continue
        layers, own_settings = dict(network.named_modules()), _below(component, settings)
        for name, factors in _factors(_converted(network, _below(component, state))).items():
            weight = getattr(layers.get(name), "weight", None)
            if weight is None or factors.keys() != {"A", "B"}:
                unfit += factors.values()
                continue
            merged += factors.values()
            down, up = factors["A"], factors["B"]
            factor = lora.scale * _factor(name, down, own_settings)
            _check(f"{component}.{name}", weight, down, up, factor)
            yield weight, _Update(down.as_subclass(Tensor), up.as_subclass(Tensor), factor)
    not_merged = (tensors.keys() - _sources(merged)) | _sources(unfit)
    if left_out := [name for name in not_merged if tensors[name].any()]:
        raise LoraError(
            f"the LoRA does not fit {type(pipeline).__name__}, which has none of these: {_listed(left_out)}. Give a "
            "file without them; DoRA, LoKr, biases and differences of weights are not supported"
        )


def _below(component: str, values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{component}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _read_file(file: Path) -> tuple[dict[str, _Traced], dict[str, Any]]:
    """A file's tensors and its trainer's settings.

    Each first factor is multiplied by alpha / rank, and its alpha is the rank from then on. For diffusers' converters
    double an alpha until it fits, which never ends for a negative one.
    """
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
            settings = dict(json.loads((opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY, "{}")))
    except (OSError, SafetensorError) as error:
        raise LoraError(f"the file cannot be read: {_shortened(str(error))}") from error
    except (RecursionError, TypeError, ValueError) as error:
        raise LoraError(f"the file's {LORA_ADAPTER_METADATA_KEY} is no JSON object") from error
    _check_tensors(tensors)
    traced = {name: tensor.as_subclass(_Traced) for name, tensor in tensors.items()}
    alphas = {name.removesuffix(_ALPHA): name for name in tensors if name.endswith(_ALPHA)}
    for name, tensor in traced.items():
        tensor.sources = frozenset([name])
    for down in filter(None, map(_DOWN.fullmatch, tensors)):
        if alpha := alphas.pop(down[1], None):
            rank = len(tensors[down[0]])
            traced[down[0]] = traced[down[0]].float() * (_positive(alpha, tensors[alpha]) / rank)
            traced[down[0]].sources = frozenset([down[0], alpha])
            traced[alpha] = torch.tensor(float(rank)).as_subclass(_Traced)
    if alphas:
        raise LoraError(f"these have no factors beside them: {_listed(alphas.values())}")
    return traced, settings


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what diffusers' converters or torch cannot take, or would take hours for."""
    if not 0 < len(tensors) <= _MOST_TENSORS:
        raise LoraError(f"the file has {len(tensors)} tensors; give one with 1 to {_MOST_TENSORS}")
    for name, tensor in tensors.items():
        is_fine = name.endswith(_ALPHA) or (tensor.is_floating_point() and tensor.element_size() > 1)
        for fault, is_so in {
            f"is of type {tensor.dtype}; give floating-point numbers of 16 bits or more": not is_fine,
            "has no elements": tensor.numel() == 0,
            "has less than two dimensions": tensor.dim() < 2 and name.endswith(".weight"),
            "has a number of over three digits in its name": _LONG_NUMBER.search(name),
        }.items():
            if is_so:
                raise LoraError(f"{_shortened(name)} {fault}")


def _positive(name: str, value: Any) -> float:
    """An alpha as a number."""
    with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
        if 0 < (number := float(value)) < math.inf:
            return number
    raise LoraError(f"{_shortened(name)} is no positive number")


def _convert(pipeline: Any, tensors: Mapping[str, _Traced]) -> dict[str, _Traced]:
    """A file's tensors by diffusers' names. An error names those that it was converting."""
    read = getattr(type(pipeline), "lora_state_dict", None)
    if read is None:
        raise LoraError(f"{type(pipeline).__name__} takes no LoRA: diffusers has no loader for it")
    options = {"unet_config": pipeline.unet.config} if hasattr(pipeline, "unet") else {}
    try:
        state = read(dict(tensors), **options)
    except Exception as error:  # diffusers' converters raise whatever they meet
        frames = [_sources(frame.f_locals.values()) for frame, _ in traceback.walk_tb(error.__traceback__)]
        at = _listed(next(filter(None, reversed(frames)), ["the file"]))
        raise LoraError(f"diffusers cannot convert {at}: {_shortened(str(error) or 'wrong shape')}") from error
    return state[0] if isinstance(state, tuple) else state


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


def _factors(state: Mapping[str, _Traced]) -> dict[str, dict[str, _Traced]]:
    """The factors A (down) and B (up) of each layer. Other tensors are on their own."""
    found: dict[str, dict[str, _Traced]] = defaultdict(dict)
    for name, tensor in state.items():
        match = _FACTOR.fullmatch(name)
        found[match[1] if match else name][match[2] if match else ""] = tensor
    return found


def _check(name: str, weight: Tensor, down: _Traced, up: _Traced, factor: float) -> None:
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.element_size() < 2:
        raise LoraError(f"{name} is quantized, so no LoRA can be merged into it. GO_FAST=only does so: set GO_FAST=on")
    shapes = tuple(up.shape), tuple(down.shape), tuple(weight.shape)
    fits = min(map(len, shapes)) >= 2 and up.flatten(1).shape == (weight.shape[0], down.shape[0])
    if not fits or down.flatten(1).shape[1] != weight[0].numel():
        raise LoraError(f"the LoRA does not fit: {name} has up {shapes[0]} and down {shapes[1]} for {shapes[2]}")
    change = abs(factor) * down.shape[0] * float(down.abs().max().float()) * float(up.abs().max().float())
    if not change <= _LARGEST_CHANGE:
        raise LoraError(f"{_listed(_sources([down, up]))} change {name} by {change:.3g}: not finite, or too large")


def _factor(name: str, down: _Traced, settings: Mapping[str, Any]) -> float:
    """alpha / rank of a layer from peft's settings; 1 where the file has an alpha of its own."""
    if settings.get("use_dora"):
        raise LoraError("the LoRA is a DoRA, which is not supported")
    patterns, alpha = settings.get("alpha_pattern") or {}, settings.get("lora_alpha")
    if not isinstance(patterns, dict) or len(patterns) > _MOST_TENSORS:
        raise LoraError(f"the file's alpha_pattern is no table of up to {_MOST_TENSORS} layers")
    for pattern in reversed(patterns):  # the first one that fits counts, as peft's `get_pattern_key` finds it
        path = pattern.removeprefix("^").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", path):  # a file's own expression is not run
            raise LoraError(f"the LoRA's alpha_pattern is an expression: {_shortened(pattern)}")
        if name == path or (f".{name}".endswith(f".{path}") and not pattern.startswith("^")):
            alpha = patterns[pattern]
    if alpha is None or any(source.endswith(_ALPHA) for source in down.sources):
        return 1.0
    divisor = math.sqrt(down.shape[0]) if settings.get("use_rslora") else down.shape[0]
    return _positive(f"the alpha of {name} in the file's settings", alpha) / divisor


def _merge(base: Tensor, updates: Sequence[_Update]) -> Tensor:
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
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
