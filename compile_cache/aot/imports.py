"""Loading code that torch has generated, without the compiler that generated it.

What loads generated code, and that code itself, imports a few names from the depths of the compiler: a namespace of
matrix products, a function that rounds up, a hook for tests. With them come some five hundred modules, most of what a
boot with precompiled regions would import. Meanwhile, substitutes have these names, for the thread that loads, and
import the real module for anything else.
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
# As torch's own namespace has them (torch/_inductor/kernel/mm.py, bmm.py, conv.py): `check_kernels`.
_PRODUCTS = {name: getattr(torch, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}


class _ExternKernels:
    """The products that generated code calls most; any other is looked up in torch's own namespace when it is first
    called."""

    def __init__(self) -> None:
        vars(self).update(_PRODUCTS)

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(importlib.import_module(_KERNELS).extern_kernels, name)
        setattr(self, name, kernel)
        return kernel


class _GraphLowering:
    """The class that lowers graphs, as far as loading asks for it."""

    @staticmethod
    def save_output_code(code: str) -> None:
        """Nothing, as the real one: torch's tests patch it."""


def _select_decomp_table() -> Any:
    """The real one, called when somebody calls it: graphs are stored with a reference to it."""
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
    """Stands in `sys.modules` for a module that is not imported yet. It has `content` for the thread that made it; to
    any other thread, and for anything else, it is the real module, which is imported then."""

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
    """`torch._inductor.debug` as every call of generated code looks at it: calls are not recorded."""

    RECORD_GRAPH_EXECUTION = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def _give_debug() -> None:
    """Set the attribute that generated code looks at. Importing the module itself then takes its place."""
    if not hasattr(torch._inductor, "debug"):
        torch._inductor.debug = _Debug("torch._inductor.debug")


def _remove(substitute: types.ModuleType) -> None:
    if sys.modules.get(substitute.__name__) is substitute:
        del sys.modules[substitute.__name__]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """While the context lasts, loading finds what it imports, in this thread; modules that are there already stay."""
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
    """Compare the products with those of this torch, where the compiler is imported anyway.

    Raises:
        NotPrecompilable: one is another.
    """
    kernels = importlib.import_module(_KERNELS).extern_kernels
    if wrong := [name for name, product in _PRODUCTS.items() if getattr(kernels, name, None) is not product]:
        raise NotPrecompilable(f"generated code of this torch calls another {', '.join(wrong)}")
