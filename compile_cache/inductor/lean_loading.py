"""What a boot leaves out when it loads compiled functions: imports, and digests of sources.

All of it is speed: without it, `aot.load_function` loads the same functions.

Generated code, and torch's loader of it, import a few names from inside the compiler: a namespace of matrix products, a
function that rounds up, a hook for tests. These imports bring most of the modules of a boot with precompiled regions.
So substitutes provide these names while a thread loads. For any other name, a substitute imports the real module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config

from compile_cache.errors import ArtifactError

# Where Triton's digest of its own files is looked up: by Triton itself, and by torch.
_TRITON_KEY = ("triton.runtime.cache", "triton.runtime.autotuner", "torch._inductor.runtime.triton_compat")
_KERNELS = "torch._inductor.select_algorithm"
# The same as in torch's own namespace (torch/_inductor/kernel/mm.py, bmm.py, conv.py), in all tested releases.
PRODUCTS = {name: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}
# The imports of loading a precompiled region, and those of generated code.
_LOADER = (
    "torch._dynamo.aot_compile",
    "torch._functorch._aot_autograd.subclass_codegen",  # not in torch 2.11
    "torch._inductor.async_compile",
    "torch._inductor.hooks",
    "torch._inductor.runtime.triton_heuristics",
    "torch.fx.experimental.validator",
)


def torch_key() -> str:
    """torch's digest of its own sources, which every graph's name has."""
    return str(_torch_key().hex())


def triton_key() -> str:
    """Triton's digest of its own files, which the name of each of its kernels has; empty without Triton."""
    key = getattr(sys.modules.get(_TRITON_KEY[0]), "triton_key", None)
    return str(key()) if key else ""


def give_keys(recorded_torch: str, recorded_triton: str) -> None:
    """Give torch and Triton the digests of their sources that a verified record has. To compute them, torch reads all
    its sources and Triton its library, which takes 0.4 s and 0.3 to 0.9 s. The environment's key has both versions.

    torch takes its digest, as in its worker processes. Triton has no way to take one, and computes it whenever a kernel
    is looked up, so its function is replaced for good.

    Raises:
        ArtifactError: one of them has computed another digest.
    """
    with contextlib.suppress(AssertionError, RuntimeError, AttributeError):  # torch has it already
        _torch_key.set(bytes.fromhex(recorded_torch))
    if torch_key() != recorded_torch:
        raise ArtifactError("torch's own sources have changed")
    for module in filter(None, map(sys.modules.get, _TRITON_KEY if recorded_triton else ())):
        known: Any = getattr(module, "triton_key", None)
        if hasattr(known, "cache_info") and known.cache_info().currsize and known() != recorded_triton:
            raise ArtifactError("Triton's own files have changed")
        vars(module)["triton_key"] = functools.cache(lambda: recorded_triton)


def import_loader() -> None:
    """Import what loading a function needs, so that another thread may load one and import nothing.

    Raises:
        ImportError: this torch has other modules.
    """
    for name in _LOADER:
        if importlib.util.find_spec(name):
            importlib.import_module(name)


class _ExternKernels(types.SimpleNamespace):
    """The products that generated code calls most. Any other product is looked up in torch's own namespace at its first
    call."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(importlib.import_module(_KERNELS).extern_kernels, name)
        setattr(self, name, kernel)
        return kernel


def _select_decomp_table() -> Any:
    """Call the original. Stored graphs refer to it, but loading does not call it."""
    return importlib.import_module("torch._inductor.decomposition").select_decomp_table()


def _contents() -> dict[str, dict[str, Any]]:
    from torch._inductor.utils import _align

    return {
        _KERNELS: {"extern_kernels": _ExternKernels(**PRODUCTS)},
        "torch._inductor.codegen.memory_planning": {"_align": _align},
        # A function for torch's tests, which is called with the generated code; None means none.
        "torch._inductor.graph": {"GraphLowering": types.SimpleNamespace(save_output_code=None)},
        "torch._inductor.decomposition": {"select_decomp_table": _select_decomp_table},
    }


class _Substitute(types.ModuleType):
    """A substitute for a module that is not imported yet.

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


def _remove(substitute: types.ModuleType) -> None:
    if sys.modules.get(substitute.__name__) is substitute:
        del sys.modules[substitute.__name__]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Provide the substitutes to this thread while the context lasts. Modules that are imported already stay.

    torch has no option for this: generated code and its loader name these modules in their own text. Without the
    substitutes, a boot that loads two functions imports 450 modules more, for 0.8 s of CPU time (median of 4 pairs).
    """
    if not hasattr(torch._inductor, "debug"):
        # Each call of generated code reads this attribute. An import of the real module replaces it.
        torch._inductor.debug = _Substitute("torch._inductor.debug", {})
        vars(torch._inductor.debug)["RECORD_GRAPH_EXECUTION"] = False
    substitutes = [_Substitute(name, content) for name, content in _contents().items() if name not in sys.modules]
    sys.modules.update({substitute.__name__: substitute for substitute in substitutes})
    try:
        yield
    finally:
        for substitute in substitutes:
            _remove(substitute)


_torch_key: Any = importlib.import_module("torch._inductor.codecache").torch_key
StoredCode: Any = importlib.import_module("torch._functorch._aot_autograd.aot_autograd_result").BundledAOTAutogradResult
