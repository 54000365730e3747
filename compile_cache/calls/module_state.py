"""What lies in a module: its parts, their hooks and tensors; and what in it keeps its calls from being compiled.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable
from typing import Any

import torch.nn.modules.module as module_hooks
from torch import Tensor, nn

from compile_cache.calls.overlaps import overlaps, reachable_tensors
from compile_cache.calls.torch_call import COMPILED_CALL, Args, Kwargs, pytree

# Every kind of hook that a call of a module runs. Other attributes with `hooks` in their names are options of these.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Those of all modules (torch/nn/modules/module.py, _call_impl).
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(module_hooks, f"_global{kind}", {}) for kind in HOOKS)
_DICTS = operator.itemgetter("_modules", *HOOKS)
# Of a class. torch's code does not see that it was replaced.
_FORWARD = operator.attrgetter("forward")
# The attributes of a module that are torch's own.
_OF_MODULE = frozenset(vars(nn.Module()))
_PLAIN = frozenset({bool, int, float, str, type(None)})


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules in it, each once. Several times as fast as `module.modules()`."""
    parts = {module: None}
    found = [module]
    for part in found:  # which grows meanwhile
        new = [child for child in part._modules.values() if child is not None and child not in parts]
        parts.update(dict.fromkeys(new))
        found += dict.fromkeys(new)
    return found


def own_tensors(parts: Iterable[nn.Module]) -> list[Tensor]:
    """The tensors that the parts of a module have besides parameters: buffers, plain attributes, and what containers
    and objects in these hold."""
    values: list[Any] = []
    for part in parts:
        values += part._buffers.values()
        values += [value for name, value in vars(part).items() if name not in _OF_MODULE and type(value) not in _PLAIN]
    return reachable_tensors(values, nn.Module)


class Parts:
    """The parts of a module that had neither hooks nor a `forward` of their own, and the `forwards` of their classes.
    Every call checks them again.

    torch has guards for each part instead, which take longer to load. Its graphs ignore a hook that is added later, and
    a class's new `forward`.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = parts_of(module)
        children = [(part._modules, name, child) for part in parts for name, child in part._modules.items()]
        self._classes = tuple(dict.fromkeys(map(type, parts)))
        self.forwards = tuple(map(_FORWARD, self._classes))
        self._variables = tuple(map(vars, parts))
        self._dicts = [*map(_DICTS, self._variables)]
        self._holder_of = tuple(holder for holder, _, _ in children)
        self._names = tuple(name for _, name, _ in children)
        self._children = tuple(child for _, _, child in children)
        self._buffered = tuple(part._buffers for part in parts if part._buffers)
        self._tensors = tuple(
            (variables, name)
            for variables in self._variables
            for name, value in variables.items()
            if name not in _OF_MODULE and isinstance(value, Tensor)
        )
        self._hook_dicts = tuple(hooks for _, *all_hooks in self._dicts for hooks in all_hooks)

    def overlaps(self, args: Args, kwargs: Kwargs) -> tuple[tuple[int, int], ...]:
        """The `overlaps` of a call's inputs, and of the buffers and tensors that the parts have as attributes."""
        values = (*args, *kwargs.values())
        is_nested = any(isinstance(value, list | tuple | dict) for value in values)
        inputs = pytree.tree_leaves(values) if is_nested else values
        buffers = [buffer for holder in self._buffered for buffer in holder.values()]
        return overlaps([*inputs, *buffers, *(variables.get(name) for variables, name in self._tensors)])

    def are_unhooked(self) -> bool:
        """Whether all parts exist, none has a hook or a `forward` of its own, and no class of theirs has another
        `forward`."""
        children = map(dict.get, self._holder_of, self._names)
        return (
            not any(self._hook_dicts)
            and [*map(_DICTS, self._variables)] == self._dicts  # else hooks or parts are in other dictionaries
            and not any(map(dict.__contains__, self._variables, itertools.repeat("forward")))
            and all(map(operator.is_, children, self._children))
            and all(map(operator.is_, map(_FORWARD, self._classes), self.forwards))
        )


def why_eager(module: nn.Module) -> str:
    """Why calls of `module` are served eager in its present state; empty if they may be compiled.

    Hooks of `torch.nn.utils`, such as weight_norm's, belong to the module's forward. An instance's `forward` that is
    its class's own is taken away: accelerate and diffusers leave it behind when they remove their hooks, and functions
    that were made without it would not fit.
    """
    if any(GLOBAL_HOOKS):
        return "a hook is registered for all modules"
    if getattr(sys.modules.get("torch._inductor.config"), "freezing", False):
        return "torch._inductor.config.freezing makes the values of its weights a part of the code"
    for part in parts_of(module):
        variables = vars(part)
        for kind in HOOKS:
            if (hooks := variables.get(kind)) and not all(map(_is_of_torch, hooks.values())):
                return f"{_name(module, part)} has a hook"
        if "_hf_hook" in variables:  # accelerate's
            whole = part is module
            remedy = "Compile its blocks, or do not offload it" if whole else "Offload whole models, or nothing"
            return f"accelerate moves the weights of {_name(module, part)} in each call. {remedy}"
        is_compiled = part is not module and variables.get(COMPILED_CALL) is not None
        if is_compiled or hasattr(variables.get("forward"), "_torchdynamo_orig_callable"):
            return f"{_name(module, part)} is compiled by another torch.compile. Take that away"
        if "forward" in variables:
            if not _is_own(variables.get("forward"), part):
                return f"{_name(module, part)} has its own `forward` attribute"
            variables.pop("forward", None)  # another thread may have been first
    return ""


def _name(module: nn.Module, part: nn.Module) -> str:
    return next((name for name, other in module.named_modules() if other is part), "") or "it"


def _is_own(forward: Any, part: nn.Module) -> bool:
    """Whether this is the method of the module's class."""
    is_bound = getattr(forward, "__self__", None) is part
    return is_bound and getattr(forward, "__func__", None) is getattr(type(part), "forward", None)


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils.")
