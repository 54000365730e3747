"""The types of a call; `CallSpec`, the one description of a kind of call; what keeps a call from being compiled; and
torch's own call.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn
from torch.utils import _pytree

from compile_cache.calls.description import ADDRESS, Description, NotDescribedError, class_name, describe, structure
from compile_cache.calls.overlaps import OF_MODULE, OWN_TENSORS, overlaps, own_tensors
from compile_cache.errors import NoGraph

# The arguments of a call, and the call: module, args and kwargs.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[nn.Module, Args, Kwargs]
# How many dispatch modes there are in this thread.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether `torch.jit.trace` records this thread.
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# torch's own walk over nested containers, which Dynamo uses too.
pytree = _pytree
# So many kinds of calls, and graphs of one function, are kept. Dynamo's own limit is 8; a class compiled for several
# image sizes and input strides needs more.
RECOMPILE_LIMIT = 64
# Every kind of hook that a call of a module runs. Other attributes with `hooks` in their names are options of these.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Those of all modules (torch/nn/modules/module.py, _call_impl).
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(getattr(module_hooks, f"_global{kind}", {}) for kind in HOOKS)
_DICTS = operator.itemgetter("_modules", *HOOKS)
# Of a class. torch's code does not see that it was replaced.
_FORWARD = operator.attrgetter("forward")
# Where a module keeps its compiled call.
COMPILED_CALL = "_compiled_call_impl"
_MOST_SIZES_SHOWN = 6
_NUMBERS = (int, float, complex)
# What calls are told apart by as it is.
_PLAIN = frozenset({*_NUMBERS, bool, str, bytes, type(None)})


class TensorSpec(NamedTuple):
    """A tensor without its values. `strides` leaves out dimensions of size 1, where no address depends on them. `first`
    is the number of the first leaf that is the same object."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: type
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    flags: tuple[bool, ...]
    first: int

    @property
    def without_sizes(self) -> TensorSpec:
        """The same with the number of dimensions in place of sizes and strides."""
        return self._replace(shape=(len(self.shape),), strides=())


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A kind of call of a class: the nesting of its inputs, its tensors without values, its other inputs, the tensors
    that overlap among these and the module's own, the module's `structure`, and the modes of torch.

    `numbers` has the call's numbers as text, because NaN is not equal to itself, and 1 is equal to 1.0 and True. They
    are no part of the kind: each call may have others. `open` has the (tensor, dimension) pairs whose sizes code for
    the kind leaves open; it is no part of the kind either.

    The modes that matter in another process are parts of an artifact's name: see `Artifacts`.
    """

    nesting: str
    leaves: tuple[TensorSpec | str, ...]
    overlaps: tuple[tuple[int, int], ...]
    structure: tuple[Any, ...]
    modes: tuple[Hashable, ...]
    numbers: tuple[str, ...] = field(compare=False)
    open: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, call: Call) -> CallSpec:
        """The kind of this call. Takes some tens of microseconds, and some for each part of the module."""
        module = call[0]
        leaves, spec = pytree.tree_flatten(call[1:])
        first: dict[int, int] = {}
        described = tuple(_described(leaf, first.setdefault(id(leaf), number)) for number, leaf in enumerate(leaves))
        numbers = tuple(repr(leaf) for leaf in leaves if isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool))
        overlapping = overlaps([*leaves, *own_tensors(parts_of(module))])
        return cls(str(spec), described, overlapping, structure(module), modes(), numbers)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of all tensors."""
        return tuple(leaf.shape for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def without_sizes(self) -> CallSpec:
        """The same with the numbers of dimensions in place of sizes and strides of tensors."""
        leaves = (leaf.without_sizes if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    @property
    def stored(self) -> Description:
        """The inputs in JSON's types, equal in all processes.

        Raises:
            NotDescribedError: only this process can tell a dictionary's key from others.
        """
        if ADDRESS.search(self.nesting):
            raise NotDescribedError("a dictionary with keys that cannot be described")
        return [self.nesting, [str(leaf) for leaf in self.leaves], [list(pair) for pair in self.overlaps]]

    def __str__(self) -> str:
        """The sizes in words: `4x16, scalar`."""
        shown = ["x".join(map(str, size)) or "scalar" for size in self.sizes[:_MOST_SIZES_SHOWN]]
        return ", ".join(shown + ["…"] * (len(self.sizes) > _MOST_SIZES_SHOWN)) or "inputs without sizes"


def modes() -> tuple[Hashable, ...]:
    """The modes of torch in this thread that a model's code may enter."""
    autocast = autocast_dtype("cpu"), autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, torch.get_default_dtype()


def autocast_dtype(device: str) -> str:
    """The type that autocast computes with; empty if it is off."""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


def _described(leaf: Any, first: int) -> TensorSpec | str:
    """A tensor without values; a number's class; a constant, a function or a class; the class of any other object."""
    if isinstance(leaf, Tensor) and not leaf.is_nested:
        shape = tuple(leaf.shape)
        strides = leaf.stride() if leaf.layout == torch.strided else ()
        strides = tuple([stride for size, stride in zip(shape, strides, strict=False) if size != 1])
        flags = leaf.requires_grad, leaf.is_inference(), leaf.is_conj(), leaf.is_neg()
        return TensorSpec(shape, strides, type(leaf), leaf.dtype, leaf.device, leaf.layout, flags, first)
    if type(leaf) in _NUMBERS:
        return class_name(type(leaf))
    try:
        return str(describe(leaf))
    except NotDescribedError:
        return f"object {class_name(type(leaf))}"


def likeness(values: Iterable[Any]) -> tuple[Any, ...]:
    """What two calls of a module have in common that are served alike: each tensor's class, type, shape, strides and
    device, nested ones too; numbers, texts and flags; other objects by identity. Takes about a microsecond a tensor."""
    return tuple([_like(value) for value in values])


def _like(value: Any) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value) if kind in (float, complex) else value  # 0.0 is equal to -0.0
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        flags = value.requires_grad, value.is_inference()
        return kind, value.dtype, value.shape, value.stride(), value.device, flags
    if isinstance(value, list | tuple):
        return kind, likeness(value)
    if isinstance(value, dict):
        return kind, likeness(value), likeness(value.values())
    return kind, id(value)


def top_sizes(args: Args, kwargs: Kwargs) -> tuple[torch.Size, ...]:
    """The sizes of the tensors that are inputs themselves. Takes about a microsecond."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return tuple([tensor.shape for tensor in tensors if not tensor.is_nested])


def growth(args: Args, kwargs: Kwargs) -> Hashable:
    """What calls have in common that make one cache larger: the size of the first input, and all inputs' classes. None
    if the first input is no tensor of torch's own."""
    values = (*args, *kwargs.values())
    if not values or type(values[0]) not in OWN_TENSORS or values[0].is_nested:
        return None
    return values[0].shape, *map(type, values)


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


def parts_of(module: nn.Module) -> list[nn.Module]:
    """A module and all modules in it, each once. Several times as fast as `module.modules()`."""
    parts = {module: None}
    found = [module]
    for part in found:  # which grows meanwhile
        new = [child for child in part._modules.values() if child is not None and child not in parts]
        parts.update(dict.fromkeys(new))
        found += dict.fromkeys(new)
    return found


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
            if name not in OF_MODULE and isinstance(value, Tensor)
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
            and self._have_their_forwards()
        )

    def are_unhooked_still(self) -> bool:
        """The same for parts that were looked at in this prediction, in a third of the time: a part, or a dictionary of
        hooks, that was replaced since is not seen."""
        return not any(self._hook_dicts) and self._have_their_forwards()

    def _have_their_forwards(self) -> bool:
        return all(map(operator.is_, map(_FORWARD, self._classes), self.forwards))


def _name(module: nn.Module, part: nn.Module) -> str:
    return next((name for name, other in module.named_modules() if other is part), "") or "it"


def _is_own(forward: Any, part: nn.Module) -> bool:
    """Whether this is the method of the module's class."""
    is_bound = getattr(forward, "__self__", None) is part
    return is_bound and getattr(forward, "__func__", None) is getattr(type(part), "forward", None)


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.nn.utils.")


def with_plain_strides(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The same arguments; in dimensions of size 1, tensors have the strides of a contiguous tensor.

    No address depends on these strides, but torch would compile and guard each variant separately. A slice of a batch
    of one is such a variant. While gradients are recorded nothing changes, because torch would record the view. What
    was one tensor stays one, and a tensor with attributes stays as it is.
    """
    if torch.is_grad_enabled():
        return args, kwargs
    values = (*args, *kwargs.values())
    strided = [_plain(value) for value in values]
    if all(map(operator.is_, strided, values)):
        return args, kwargs
    plain = dict(zip(map(id, values), strided, strict=True))
    return tuple(plain[id(value)] for value in args), {name: plain[id(value)] for name, value in kwargs.items()}


def _plain(value: Any) -> Any:
    if type(value) is not Tensor or value.is_nested or value.layout != torch.strided:
        return value
    # Of more dimensions, strides tell whether a picture is stored channels first or last.
    if 1 not in value.shape or value.dim() > 3 or vars(value):
        return value
    strides, plain = value.stride(), []
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        plain.append(step if size == 1 else stride)
        step = size * plain[-1]
    plain.reverse()
    return value if tuple(plain) == strides else value.as_strided(value.shape, plain)


def on_gpu(call: Call) -> bool:
    """Whether a call has tensors, none of them on the CPU. Then the host's processor does not matter."""
    own = [tensors for part in parts_of(call[0]) for tensors in (part._parameters, part._buffers)]
    leaves = [*pytree.tree_leaves(call[1:]), *(tensor for tensors in own for tensor in tensors.values())]
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return bool(devices) and "cpu" not in devices


class _CompiledCall(functools.partial[Any]):
    """A module's compiled call. It is pickled as None, also where a custom `__getstate__` includes it.

    It does not keep its module, which has it: what is kept of a module's parts shall not keep the module.
    """

    def __reduce__(self) -> Any:
        return type(None), ()


def serve_by(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(weakref.ref(module), *args, **kwargs)` answer calls of `module`: the hook of `module.compile()`."""
    module._compiled_call_impl = _CompiledCall(call, weakref.ref(module))


def call_region(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """torch's own call of a module that is not compiled, hooks included.

    This is a function of a module, because torch can store neither a method nor a decorated `forward`, and Dynamo skips
    the methods of torch's own classes.
    """
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_by_graph(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`call_region` for `torch.compile`. Where no graph fits, torch runs this function as it is.

    Raises:
        NoGraph: it does.
    """
    if not torch.compiler.is_dynamo_compiling():  # in a graph this is a constant
        raise NoGraph("torch.compile has no graph of the call. Is TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE set?")
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
