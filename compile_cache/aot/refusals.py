"""Refusals: kinds of calls that are served eager, because compiling them failed or gave another result.

A refusal is a file in the folder of the group's artifacts: `precompiled/<group>/<digest>.refused`. So signed packs
carry it like artifacts. It is valid as long as the model's code stays the same. This module imports no torch.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_cache.aot.files import PRECOMPILED, digest
from compile_cache.aot.options import RECOMPILE_LIMIT
from compile_cache.aot.sources import file_digest
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.files import replacing

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("compile_cache")

SUFFIX = ".refused"
# A reason that begins so forbids only compiling ahead of time: torch.compile may still serve the call.
NOT_AHEAD = "not compiled ahead of time: "

_LARGEST_BYTES = 1 << 20
_REASON_CHARACTERS = 1000
_MOST_SHOWN_INPUTS = 8
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A stored refusal: its path inside the cache directory, its group's key, the digest of the model's code, the
    reason in words, and the day it was written (YYYY-MM-DD, UTC)."""

    path: str
    key: Mapping[str, Any]
    code: str
    reason: str
    created: str

    def holds(self, module: nn.Module) -> bool:
        """Whether `module` still has the refused code."""
        try:
            return code_digest_of(module) == self.code
        except NotPrecompilable:
            return False

    @property
    def class_name(self) -> str:
        """The region's class, without its module."""
        return str(self.key.get("class", "")).rpartition(".")[2] or "unknown"

    @property
    def inputs(self) -> str:
        """The inputs in short words: `float32[4, 16] on cpu, 0.5`."""
        try:
            words = [_leaf_text(leaf) for leaf in self.key["inputs"][1]]
        except (KeyError, IndexError, TypeError, ValueError):
            return "unreadable inputs"
        more = len(words) - _MOST_SHOWN_INPUTS
        return ", ".join([*words[:_MOST_SHOWN_INPUTS], *([f"{more} more"] if more > 0 else [])]) or "no inputs"


def _leaf_text(leaf: Any) -> str:
    """The words for one input of a signature (describe.py). The input is a constant with its value, an object's class,
    or `["tensor", number, [class, dtype, device, layout, dimensions, ...]]`."""
    if leaf[0] != "tensor":
        return str(leaf[-1]).rpartition(".")[2] if leaf[0] == "object" else str(leaf[-1])[:40]
    _, dtype, device, _, dimensions, *sizes = leaf[2]
    shape = list(map(int, sizes[0])) if len(sizes) > 1 else f"{int(dimensions)}d"
    text = f"{str(dtype).removeprefix('torch.')}{shape if isinstance(shape, list) else f'[{shape}]'}"
    return f"{text} on {device}"


def write_refusal(directory: Path, group: str, key: Mapping[str, Any], code: str, reason: str) -> str:
    """Write a refusal into the folder `group` of the cache directory, and return its path inside that directory. Two
    boots that refuse the same call of the same code write the same path.

    Raises:
        OSError: the refusal cannot be written.
    """
    path = f"{group}/{_name(key, code)}"
    text = "".join(char if char.isprintable() else " " for char in reason)[:_REASON_CHARACTERS]
    created = datetime.now(UTC).date().isoformat()
    record = {"key": key, "code": code, "reason": text, "created": created}
    with replacing(directory / path) as file:
        file.write(json.dumps(record, sort_keys=True).encode())
    return path


def read_refusals(directory: Path, group: str) -> list[Refusal]:
    """The refusals in the folder `group` of a cache directory. Damaged refusals are skipped and logged."""
    paths = sorted((directory / group).glob(f"*{SUFFIX}"))
    refusals = []
    for path in paths[:RECOMPILE_LIMIT]:
        try:
            refusals.append(read_refusal(path, path.relative_to(directory).as_posix()))
        except (ArtifactError, OSError) as error:
            log.info("refusal.not_read file=%s error=%r", path, error)
    return refusals


def read_refusal(local: Path, path: str) -> Refusal:
    """The refusal in the file `local`, whose path inside a cache directory is `path`.

    Raises:
        ArtifactError: the refusal is damaged, or its content does not match `path`.
        OSError: the file cannot be read.
    """
    with local.open("rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise ArtifactError(f"it has more than {_LARGEST_BYTES} bytes")
    try:
        record = json.loads(content)
        key, code, reason, created = (record[name] for name in ("key", "code", "reason", "created"))
        if not isinstance(key, dict) or path != f"{PRECOMPILED}/{digest(key)}/{_name(key, code)}":
            raise ArtifactError("its name does not match its content")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError("it is damaged: it is no refusal") from error
    is_refusal = _matches(_DIGEST, code) and _matches(_DATE, created) and isinstance(reason, str)
    if not is_refusal or len(reason) > _REASON_CHARACTERS or not reason.isprintable():
        raise ArtifactError("it is damaged: it is no refusal")
    return Refusal(path, key, code, reason, created)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _name(key: Mapping[str, Any], code: str) -> str:
    return digest([key, code]) + SUFFIX


def code_digest_of(module: nn.Module) -> str:
    """32 hexadecimal digits: the digest of the source files of all classes in a module's tree and of their bases,
    without torch's and Python's.

    Raises:
        NotPrecompilable: a class has no source file.
    """
    return _code_digest(frozenset(type(part) for part in module.modules()))


@functools.lru_cache(maxsize=256)
def _code_digest(classes: frozenset[type]) -> str:
    modules = {base.__module__ for kind in classes for base in kind.__mro__}
    own = {name for name in modules if name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}}
    return digest({name: file_digest(name) for name in own})
