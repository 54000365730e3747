"""Checksums of source files. This module imports no torch."""

from __future__ import annotations

import functools
import hashlib
import importlib

from compile_cache.errors import NotPrecompilable


@functools.cache
def file_digest(module: str) -> str:
    """SHA-256 of a module's source file. It is read from disk once.

    Raises:
        NotPrecompilable: the module has no source file.
    """
    file = getattr(importlib.import_module(module), "__file__", None)
    try:
        with open(file or "", "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError as error:
        raise NotPrecompilable(f"the source file of {module} is missing") from error
