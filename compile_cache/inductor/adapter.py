"""The adapter to the private names of torch that functions compiled ahead of time need.

Importing this module fails with an ImportError if this torch is not a tested release, and with an AttributeError or an
ImportError if it lacks a name. Then no function is compiled or loaded ahead of time, and the next step of the ladder
serves every call. `switches.py` has the names for torch's switches, for a process without a compiler.

torch marks `aot_compile` and `load_compiled_function` as experimental.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.codecache
import torch._inductor.config
from torch._dynamo import guards as _guards
from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch._dynamo.types import GuardFilterEntry as GuardFilterEntry
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree_module

from compile_cache.errors import ArtifactError
from compile_cache.inductor.imports import check_kernels, without_compiler
from compile_cache.inductor.options import SET_WHILE_LOADING

# The first and the last tested release.
TESTED_TORCH = ((2, 11), (2, 15))

if not TESTED_TORCH[0] <= tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) <= TESTED_TORCH[1]:
    first, last = (".".join(map(str, release)) for release in TESTED_TORCH)
    raise ImportError(f"torch {torch.__version__} is not a tested release ({first} to {last})")

pytree = pytree_module
OPERATORS = (OpOverload, OpOverloadPacket)
# The kinds of guards that torch cannot store.
NOT_STORED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
# The names in a guard's expression besides the call's inputs and the globals.
guard_scope: Callable[[], dict[str, Any]] = _get_closure_vars
# Generated GPU code assumes this alignment of its inputs (torch/_inductor/utils.py).
INPUT_ALIGNMENT_BYTES = 16

_mode_options: Any = torch._inductor.list_mode_options
_options: Any = torch._inductor.config.save_config_portable
_load: Any = torch.compiler.load_compiled_function
_torch_key: Any = torch._inductor.codecache.torch_key
guards: Any = _guards
_verbose_code_parts: Any = guards.get_verbose_code_parts


# Held while a thread loads or makes an artifact: its contexts replace names in torch, and put them back.
_alone = threading.Lock()


def inductor_options(names: tuple[str, ...]) -> dict[str, Any]:
    """Inductor's options in this thread, with the options `names`, which torch does not list."""
    options = {name: value for name, value in _options().items() if name not in SET_WHILE_LOADING}
    return {**options, **{name: getattr(torch._inductor.config, name, None) for name in names}}


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled function: torch's stored form, and the facts about it.

    `traced` has the module and the first line of each traced function. `modules` has the modules in the compiled
    function's global scope by alias. `externals` has the objects in that scope that torch does not provide.
    """

    payload: bytes
    traced: frozenset[tuple[str, int]]
    modules: dict[str, str]
    externals: dict[str, Any]
    reads_globals: bool


def compile_function(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    mode: str,
    dynamic: bool | None,
    guard_filter: Callable[..., Any],
) -> Compilation:
    """Trace and compile `function` with `inputs`. Runs nothing.

    Raises:
        Exception: any, if torch refuses.
    """
    check_kernels()
    options = {**_mode_options(mode, dynamic), "guard_filter_fn": guard_filter}
    with _alone, _configured():
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=dynamic, options=options)
        compiled = compiled.aot_compile((inputs, {}))
        artifacts, environment = compiled._artifacts, compiled._artifacts.runtime_env
        traced = frozenset((each.module, each.firstlineno) for each in compiled.source_info().inlined_sources)
        provided = {artifacts.backend_id, *environment.import_sources}
        scope = compiled.fn.__globals__
        # This drops the text of whole source files.
        artifacts.source_info = dataclasses.replace(artifacts.source_info, inlined_sources=set())
        return Compilation(
            type(compiled).serialize(compiled).serialized_data,
            traced,
            dict(environment.import_sources),
            {name: scope[name] for name in sorted(environment.external_refs - provided) if name in scope},
            bool(environment.used_globals or environment.closure),
        )


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


def load_function(payload: bytes, externals: dict[str, Any], recorded_torch_key: str) -> Loaded:
    """Unpickle a compiled function, which must be verified.

    Raises:
        Exception: any, if `payload` is damaged or of another torch.
    """
    _set_torch_key(recorded_torch_key)
    with _alone, _configured(), _no_workers(), without_compiler(), _without_explanations():
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
def _without_explanations() -> Iterator[None]:
    """Make guards without the line of code that explains each. This saves 0.3 s of a warm FLUX.1 boot."""

    def code_alone(code_parts: str | list[str], guard: Any, recompile_hint: str | None = None) -> list[str]:
        return [code_parts] if isinstance(code_parts, str) else code_parts

    guards.get_verbose_code_parts = code_alone
    try:
        yield
    finally:
        guards.get_verbose_code_parts = _verbose_code_parts


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
