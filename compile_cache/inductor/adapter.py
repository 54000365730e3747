"""The adapter to the private names of torch that functions compiled ahead of time need.

Importing this module fails with an ImportError if this torch is not a tested release, and with an AttributeError or an
ImportError if it lacks a name. Then no function is compiled or loaded ahead of time, and the next step of the ladder
serves every call. `switches.py` has the names for torch's switches, for a process without a compiler.

torch marks `aot_compile` and `load_compiled_function` as experimental.

Generated code, and torch's loader of it, import a few names from inside the compiler: a namespace of matrix products, a
function that rounds up, a hook for tests. These imports bring some five hundred modules, most of the imports of a boot
with precompiled regions. So substitutes provide these names while a thread loads. For any other name, a substitute
imports the real module.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import importlib.util
import io
import pickle
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock  # torch has imported it

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.codecache
import torch._inductor.config
from torch import nn
from torch._dynamo import guards as _guards
from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch._dynamo.types import GuardFilterEntry as GuardFilterEntry
from torch._subclasses import fake_tensor

from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.importable import reference
from compile_cache.inductor.describe import NotDescribedError, class_name, describe
from compile_cache.inductor.format import digest
from compile_cache.inductor.switches import SET_WHILE_LOADING

# The first and the last tested release.
TESTED_TORCH = ((2, 11), (2, 15))

if not TESTED_TORCH[0] <= tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) <= TESTED_TORCH[1]:
    first, last = (".".join(map(str, release)) for release in TESTED_TORCH)
    raise ImportError(f"torch {torch.__version__} is not a tested release ({first} to {last})")

# The kinds of guards that torch cannot store.
NOT_STORED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
# The names in a guard's expression besides the call's inputs and the globals.
guard_scope: Callable[[], dict[str, Any]] = _get_closure_vars

_mode_options: Any = torch._inductor.list_mode_options
_options: Any = torch._inductor.config.save_config_portable
_load: Any = torch.compiler.load_compiled_function
_torch_key: Any = torch._inductor.codecache.torch_key
guards: Any = _guards
# The packages of the objects that make guards up, besides the model's own.
_OF_GUARDS = ("builtins", "functools", "numpy", "sympy", "torch")

# Where Triton's digest of its own files is looked up: by Triton itself, and by torch.
_TRITON_KEY = ("triton.runtime.cache", "triton.runtime.autotuner", "torch._inductor.runtime.triton_compat")
_KERNELS = "torch._inductor.select_algorithm"
# The same as in torch's own namespace (torch/_inductor/kernel/mm.py, bmm.py, conv.py). `check_kernels` compares them.
_PRODUCTS = {name: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}


# The imports of loading a precompiled region, and those of generated code.
_LOADER = (
    "torch._dynamo.aot_compile",
    "torch._functorch._aot_autograd.aot_autograd_result",
    "torch._functorch._aot_autograd.subclass_codegen",  # not in torch 2.11
    "torch._inductor.output_code",
    "torch._inductor.async_compile",
    "torch._inductor.hooks",
    "torch._inductor.runtime.triton_heuristics",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.fx.experimental.validator",
)

# The program's own passes over a graph. torch leaves them out of the options that it lists.
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
# Held while a thread loads or makes an artifact: its contexts replace names in torch, and put them back.
_alone = threading.Lock()


def options_digest() -> str:
    """The digest of Inductor's options that the program set. Options from the environment are in the environment's
    key."""
    options = {name: value for name, value in _options().items() if name not in SET_WHILE_LOADING}
    options |= {name: getattr(torch._inductor.config, name, None) for name in _PASSES}
    return digest(sorted([name, _option(value)] for name, value in options.items()))


def _option(value: Any) -> str:
    if callable(uuid := getattr(value, "uuid", None)):  # torch._inductor.custom_graph_pass
        return f"{class_name(type(value))} {uuid()!r}"
    if isinstance(value, set | frozenset):
        return repr(sorted(value, key=repr))
    if isinstance(value, Sequence | Mapping | int | float | None):
        return repr(value)
    try:
        return str(describe(value))  # a custom pass
    except NotDescribedError:
        return class_name(type(value))


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled function: torch's stored form, and the facts about it.

    `traced` has the module and the first line of each traced function. `modules` has the names of the modules in the
    compiled function's global scope. `externals` has the names, for `find`, of what else the function reads there.
    """

    payload: bytes
    traced: frozenset[tuple[str, int]]
    modules: frozenset[str]
    externals: list[str]


def compile_function(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    mode: str,
    dynamic: bool | None,
    guard_filter: Callable[..., Any],
    alias_guard: Callable[..., Any],
) -> Compilation:
    """Trace and compile `function` with `inputs`. Runs nothing. `alias_guard` gets torch's function that makes a guard
    on an object which it meets twice, and the object's two sources.

    Raises:
        NotPrecompilable: the function uses an object that another process cannot find.
        Exception: any, if torch refuses.
    """
    check_kernels()
    options = {**_mode_options(mode, dynamic), "guard_filter_fn": guard_filter}
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    for name, value in vars(builtins).items():  # torch 2.11 looks for them among the function's globals alone
        function.__globals__.setdefault(name, value)
    with (
        _alone,
        _configured(),
        mock.patch.object(guards, "GuardsStatePickler", _Pickler),
        mock.patch.object(builder, "make_dupe_guard", functools.partial(alias_guard, builder.make_dupe_guard)),
    ):
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)
        compiled = compiled.aot_compile((inputs, {}))
        artifacts, environment = compiled._artifacts, compiled._artifacts.runtime_env
        traced = frozenset((each.module, each.firstlineno) for each in compiled.source_info().inlined_sources)
        provided = {artifacts.backend_id, *environment.import_sources, *vars(builtins)}
        try:  # in the code, torch's names for these have numbers of this process
            names = {name: reference(compiled.fn.__globals__[name]) for name in environment.external_refs - provided}
        except LookupError as error:
            raise NotPrecompilable(f"the compiled function uses what cannot be imported: {error}") from error
        if environment.closure or environment.used_globals.keys() - vars(builtins).keys():
            raise NotPrecompilable("it reads tensors from global variables or a closure")
        code = environment.bytecode
        artifacts.runtime_env = dataclasses.replace(
            environment,
            bytecode=code.replace(co_names=tuple(names.get(name, name) for name in code.co_names)),
            used_globals={},
            external_refs=set(names.values()),
        )
        # This drops the text of whole source files.
        artifacts.source_info = dataclasses.replace(artifacts.source_info, inlined_sources=set())
        return Compilation(
            type(compiled).serialize(compiled).serialized_data,
            traced,
            frozenset(environment.import_sources.values()),
            sorted(names.values()),
        )


class _Pickler(guards.GuardsStatePickler):  # type: ignore[misc]
    """torch's pickler of guards, without the texts that the model has: one may be a secret."""

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` again."""
        reduced, is_module = super().reducer_override(value), isinstance(value, nn.Module)
        is_of_guards = type(value).__module__.partition(".")[0] in _OF_GUARDS and not is_module
        if is_of_guards or isinstance(value, type):
            return reduced
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduced is NotImplemented else reduced
        if isinstance(reduced, str):
            return reduced
        made, arguments, state, listed, items = (*reduced, None, None, None)[:5]
        arguments = without_texts(arguments) if is_module else arguments
        state = state if isinstance(state, bytes) else without_texts(state)  # an extension module's own form
        listed, items = without_texts(list(listed or ())), without_texts(dict(items or ()))
        return made, arguments, state, iter(listed), iter(items.items())


def without_texts(value: Any) -> Any:
    """The value with an empty text in place of each text in it; what is no plain container stays as it is."""
    if type(value) in (str, bytes):
        return type(value)()
    if type(value) is dict:
        return {key: without_texts(part) for key, part in value.items()}
    return type(value)(map(without_texts, value)) if type(value) in (list, tuple, set, frozenset) else value


@dataclass(frozen=True, slots=True)
class Loaded:
    """A compiled function, and the guards that torch stored with it."""

    function: Callable[..., Any]
    guards: Any

    def failed_guard(self, inputs: Mapping[str, Any]) -> str:
        """The guard that refuses a call, in words; empty if none does."""
        if self.guards.check(inputs):
            return ""
        failed = self.guards.check_verbose(inputs).verbose_code_parts
        return f"guard failed: {str(failed[0]).partition('#')[0].strip()[:200]}" if failed else "a guard failed"


def load_function(payload: bytes, externals: dict[str, Any], torch_key: str, triton_key: str) -> Loaded:
    """Unpickle a compiled function, which must be verified. The keys are those of the process that compiled it.

    Raises:
        Exception: any, if `payload` is damaged or of another torch.
    """
    _set_torch_key(torch_key)
    _set_triton_key(triton_key)
    with _alone, _configured(), _no_workers(), without_compiler(), _without_waste():
        loaded = _load(io.BytesIO(payload), f_globals=externals)
    return Loaded(loaded.fn, loaded._artifacts.guard_manager)


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """Turn ahead-of-time compilation on, which is off in torch 2.11, and guards on hooks, which torch omits for speed.

    Both are needed to make guards and to load them. A call checks the hooks of its own module's parts, but the code may
    call any module.
    """
    settings = {"enable_aot_compile": True, "skip_nnmodule_hook_guards": False}
    with torch._dynamo.config.patch(settings):
        yield


@contextlib.contextmanager
def _without_waste() -> Iterator[None]:
    """Leave out what torch makes while it loads a function, and nothing here reads: for each guard the line of code
    that explains it, for each tensor in a guard a stack trace, and a copy of the function to store it again."""

    def code_alone(code_parts: str | list[str], guard: Any, recompile_hint: str | None = None) -> list[str]:
        return [code_parts] if isinstance(code_parts, str) else code_parts

    results = importlib.import_module("torch._functorch._aot_autograd.aot_autograd_result")
    result = getattr(results, "BundledAOTAutogradResult", types.SimpleNamespace())
    stacks = types.SimpleNamespace(**{**vars(traceback), "extract_stack": list})
    with (
        mock.patch.object(guards, "get_verbose_code_parts", code_alone, create=True),
        mock.patch.object(fake_tensor, "traceback", stacks, create=True),
        mock.patch.object(result, "__deepcopy__", lambda self, memo: self, create=True),
    ):
        yield


def _no_workers() -> contextlib.AbstractContextManager[Any]:
    """Start no worker processes. Generated code asks for them before it finds that its kernels exist."""
    patched: contextlib.AbstractContextManager[Any] = torch._inductor.config.patch(compile_threads=1)
    return patched


def torch_key() -> str:
    """torch's digest of its own sources, which every graph's name has."""
    return str(_torch_key().hex())


def _set_torch_key(recorded: str) -> None:
    """Give torch the recorded digest, as torch does in its worker processes. To compute it, torch reads all its
    sources, which takes 0.4 s of a warm FLUX.1 boot. The environment's key has torch's version and build.

    Raises:
        ArtifactError: torch has computed another digest.
    """
    with contextlib.suppress(AssertionError, RuntimeError, AttributeError):  # torch has it already
        _torch_key.set(bytes.fromhex(recorded))
    if torch_key() != recorded:
        raise ArtifactError("torch's own sources have changed")


def triton_key() -> str:
    """Triton's digest of its own files, which the name of each of its kernels has; empty without Triton."""
    key = getattr(sys.modules.get(_TRITON_KEY[0]), "triton_key", None)
    return str(key()) if key else ""


def _set_triton_key(recorded: str) -> None:
    """Give Triton the recorded digest. To compute it, Triton reads all its files, which takes a second. The
    environment's key has Triton's version.

    Raises:
        ArtifactError: Triton has computed another digest.
    """
    for module in filter(None, map(sys.modules.get, _TRITON_KEY if recorded else ())):
        known: Any = getattr(module, "triton_key", None)
        if hasattr(known, "cache_info") and known.cache_info().currsize and known() != recorded:
            raise ArtifactError("Triton's own files have changed")
        vars(module)["triton_key"] = functools.cache(lambda: recorded)


def import_loader() -> None:
    """Import what loading a function needs, so that another thread may load one and import nothing.

    Raises:
        ImportError: this torch has other modules.
    """
    for name in _LOADER:
        if importlib.util.find_spec(name):
            importlib.import_module(name)


class _ExternKernels:
    """The products that generated code calls most. Any other product is looked up in torch's own namespace at its first
    call."""

    def __init__(self) -> None:
        vars(self).update(_PRODUCTS)

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(importlib.import_module(_KERNELS).extern_kernels, name)
        setattr(self, name, kernel)
        return kernel


class _GraphLowering:
    """The part of torch's class for lowering graphs that loading needs."""

    @staticmethod
    def save_output_code(code: str) -> None:
        """Do nothing, like the original, which torch's tests patch."""


def _select_decomp_table() -> Any:
    """Call the original. Stored graphs refer to it, but loading does not call it."""
    return importlib.import_module("torch._inductor.decomposition").select_decomp_table()


def _contents() -> dict[str, dict[str, Any]]:
    from torch._inductor.utils import _align

    return {
        _KERNELS: {"extern_kernels": _ExternKernels()},
        "torch._inductor.codegen.memory_planning": {"_align": _align},
        "torch._inductor.graph": {"GraphLowering": _GraphLowering},
        "torch._inductor.decomposition": {"select_decomp_table": _select_decomp_table},
    }


class _Substitute(types.ModuleType):
    """A substitute in `sys.modules` for a module that is not imported yet.

    The thread that made it gets `content`. Any other thread, and any other name, gets the real module, which is
    imported then.
    """

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(_content=content, _thread=threading.get_ident())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._content and threading.get_ident() == self._thread:
            return self._content[name]
        _remove(self)
        return getattr(importlib.import_module(self.__name__), name)


class _Debug(types.ModuleType):
    """The part of `torch._inductor.debug` that each call of generated code reads: calls are not recorded."""

    RECORD_GRAPH_EXECUTION = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _give_debug() -> None:
    """Set the attribute that generated code reads. An import of the real module replaces it."""
    if not hasattr(torch._inductor, "debug"):
        torch._inductor.debug = _Debug("torch._inductor.debug")


def _remove(substitute: types.ModuleType) -> None:
    if sys.modules.get(substitute.__name__) is substitute:
        del sys.modules[substitute.__name__]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Provide the substitutes to this thread while the context lasts. Modules that are imported already stay."""
    _give_debug()
    missing = [(name, content) for name, content in _contents().items() if name not in sys.modules]
    substitutes = [_Substitute(name, content) for name, content in missing]
    sys.modules.update({substitute.__name__: substitute for substitute in substitutes})
    try:
        yield
    finally:
        for substitute in substitutes:
            _remove(substitute)


def check_kernels() -> None:
    """Compare the products with this torch's, in a process that imports the compiler anyway.

    Raises:
        NotPrecompilable: a product differs.
    """
    kernels = importlib.import_module(_KERNELS).extern_kernels
    if wrong := [name for name, product in _PRODUCTS.items() if getattr(kernels, name, None) is not product]:
        raise NotPrecompilable(f"this torch's generated code calls other functions for {', '.join(wrong)}")
