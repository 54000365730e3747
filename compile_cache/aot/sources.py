"""Checksums of source files. This module imports no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib

from compile_cache.errors import NotPrecompilable


@functools.cache
def file_digest(module: str) -> str:
    """SHA-256 of the file that a module was made from, as it is on disk when this is first asked.

    Raises:
        NotPrecompilable: it has none.
    """
    file = getattr(importlib.import_module(module), "__file__", None)
    try:
        with open(file or "", "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError as error:
        raise NotPrecompilable(f"the source of {module} is not at hand") from error
