"""Loads code that torch generated, without importing the compiler.

Generated code, and torch's loader of it, import a few names from inside the compiler: a namespace of matrix products, a
function that rounds up, a hook for tests. These imports bring some five hundred modules, most of the imports of a boot
with precompiled regions. So substitutes provide these names while a thread loads. For any other name, a substitute
imports the real module.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor

from compile_cache.errors import NotPrecompilable

_KERNELS = "torch._inductor.select_algorithm"
# The same as in torch's own namespace (torch/_inductor/kernel/mm.py, bmm.py, conv.py). `check_kernels` compares them.
_PRODUCTS = {name: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}


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
