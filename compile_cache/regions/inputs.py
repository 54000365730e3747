"""The inputs of a call: their strides, copies of them from before the call, and the kind of the call.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compile_cache.aot.traced import call_region
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.check import Answer, Check, compare, measured
from compile_cache.regions.ladder import RegionReport


def with_plain_strides(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments; in dimensions of size 1, tensors have the strides of a contiguous tensor.

    No address depends on these strides, but torch would compile and guard each variant separately. A slice of a batch
    of one is such a variant. While gradients are recorded nothing changes, because torch would record the view.
    """
    if torch.is_grad_enabled():
        return args, kwargs
    return tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}


def _plain(value: Any) -> Any:
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_nested or 1 not in value.shape:
        return value
    if value.dim() > 3:  # here strides tell whether a picture is stored channels first or last
        return value
    strides, plain = value.stride(), []
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        plain.append(step if size == 1 else stride)
        step = size * plain[-1]
    plain.reverse()
    return value if tuple(plain) == strides else value.as_strided(value.shape, plain)


def kind_of_call(module: nn.Module, args: Any, kwargs: Any) -> Hashable:
    """The kind of a call: its tensors without values, its flags and texts, and the modes of torch and of the module's
    parts. Numbers do not count, because each call may have another number."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    training = tuple(part.training for part in module.modules())
    return str(spec), tuple(map(_kind, leaves)), training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout == torch.strided else ()
        flags = leaf.requires_grad, leaf.is_inference()
        return type(leaf), leaf.dtype, leaf.device, tuple(leaf.shape), strides, flags
    return type(leaf), leaf if isinstance(leaf, bool | str) else None


class Kept:
    """Copies of a call's inputs from before the call, with the same strides and the same shared tensors.

    Each copy knows its original. So a call on the copies can replace the call itself.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy them.

        Raises:
            Exception: the copies do not fit into memory, or an object cannot be copied.
        """
        self._module = module
        self._answer: Answer | None = None
        # An input may refer to the model, such as a cache or a processor.
        memo: dict[int, Any] = {id(part): part for part in module.modules()}
        # torch refuses to copy the result of a recorded computation.
        computed = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_computed(leaf)]
        memo.update((id(tensor), tensor.clone()) for tensor in computed)
        self.args, self.kwargs = copy.deepcopy((args, kwargs), memo)
        # `deepcopy` keeps the originals under the memo's own id.
        originals = [*computed, *memo.get(id(memo), ())]
        self._pairs = [(original, memo[id(original)]) for original in originals if id(original) in memo]
        self._original_of = {id(duplicate): original for original, duplicate in self._pairs}

    @property
    def is_used(self) -> bool:
        """Whether eager has run on the copies, and may have changed them."""
        return self._answer is not None

    def eager(self) -> Answer:
        """Eager's answer on the copies. It runs once.

        Raises:
            Exception: the model's own error.
        """
        if self._answer is None:
            self._answer = measured(call_region, self._module, self.args, self.kwargs)
        return self._answer

    def give_back(self, output: Any) -> Any:
        """Write the copies' current contents into the inputs. Returns `output` with inputs in place of their copies."""
        for original, duplicate in self._pairs:
            self._give(duplicate, original)
        return pytree.tree_map(self._original, output, is_leaf=lambda value: id(value) in self._original_of)

    def _original(self, value: Any) -> Any:
        return self._original_of.get(id(value), value)

    def _give(self, source: Any, target: Any) -> None:
        if isinstance(target, torch.Tensor):
            _give_contents(source, target)
            return
        if isinstance(target, list):
            target[:] = map(self._original, source)
        elif isinstance(target, dict):
            self._give_items(source, target)
        elif isinstance(target, set):
            values = set(map(self._original, source))
            target.clear()
            target.update(values)
        if hasattr(target, "__dict__"):
            self._give_items(vars(source), vars(target))
        for name in copyreg._slotnames(type(target)):  # type: ignore[attr-defined]
            if hasattr(source, name):
                object.__setattr__(target, name, self._original(getattr(source, name)))

    def _give_items(self, source: dict[Any, Any], target: dict[Any, Any]) -> None:
        items = [(self._original(key), self._original(value)) for key, value in source.items()]
        target.clear()
        target.update(items)


def keep(report: RegionReport, module: nn.Module, args: Any, kwargs: Any) -> Kept | None:
    """Copies of the inputs; None if they cannot be copied: then the call is not checked."""
    kept = attempt(Kept, module, args, kwargs)
    if isinstance(kept, Failure):
        report.explain(f"not checked against eager, because its inputs cannot be copied: {kept.reason}")
        return None
    return kept


def check_against_eager(report: RegionReport, answer: Answer, kept: Kept) -> Check | None:
    """The error of an answer against eager; None if eager fails, mostly for lack of memory."""
    check = attempt(lambda: compare(answer.output, kept.eager().output))
    if isinstance(check, Failure):
        report.explain(f"not checked against eager: {check.reason}")
        return None
    report.note_error(check.error, check.tolerance)
    report.note_peaks(answer.peak_bytes, kept.eager().peak_bytes)
    return check


def _is_computed(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_leaf


def _give_contents(source: torch.Tensor, target: torch.Tensor) -> None:
    # An unchanged tensor may be read-only in effect, such as an expanded one.
    if source.shape == target.shape and not torch.equal(source, target):
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(source)
