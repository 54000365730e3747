"""Groups of artifacts: a class, its structure, a kind of inputs, and everything else that is known before a call.

Importing this module fails if importing `adapter.py` fails.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.inductor.adapter import inductor_options
from compile_cache.inductor.describe import (
    Description,
    NotDescribedError,
    class_name,
    describe,
    signature,
    structure,
    structure_digest,
)
from compile_cache.inductor.files import PRECOMPILED, digest
from compile_cache.inductor.options import VERSIONED_PACKAGES
from compile_cache.inductor.spec import on_gpu
from compile_cache.inductor.switches import describe_switches, switches
from compile_cache.settings import Settings

if TYPE_CHECKING:
    from compile_cache.inductor.precompiled import Precompiled

# The program's own passes over a graph. torch leaves them out of the options that it lists.
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


@dataclass(slots=True)
class Group:
    """The artifacts of one group in this process. `refused` says why the other artifacts are not used."""

    path: str
    key: dict[str, Description]
    loaded: dict[str, Precompiled] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    is_read: bool = False
    not_precompilable: str = ""


class Groups:
    """The groups that this process has met."""

    def __init__(self, settings: Settings) -> None:
        self._mode = settings.mode
        self._dynamic = settings.dynamic
        self._groups: dict[str, Group] = {}
        self._options: str | None = None

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def forget_options(self) -> None:
        """Read Inductor's options again at the next call, in that call's thread."""
        self._options = None

    def of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool | None) -> Group:
        """The group of a call. `dynamic` has torch.compile's meaning: with False, the group has the tensors' sizes.

        Raises:
            NotDescribedError: the inputs or the options cannot be described.
        """
        key = {
            **self._fixed_key(dynamic),
            "options": self._noted_options(),
            "class": class_name(type(module)),
            "structure": structure_digest(structure(module)),
            "inputs": signature(args, kwargs, with_sizes=dynamic is False),
            "switches": describe_switches(switches(on_gpu(module, args, kwargs))),
        }
        name = digest(key)
        if name not in self._groups:
            self._groups[name] = Group(f"{PRECOMPILED}/{name}", key)
        return self._groups[name]

    def _fixed_key(self, dynamic: bool | None) -> dict[str, Description]:
        return {"mode": self._mode, "dynamic": str(dynamic), "versions": _versions()}

    def _noted_options(self) -> str:
        if self._options is None:
            try:
                self._options = _options_digest()
            except Exception as error:  # a custom pass whose `uuid` raises
                raise NotDescribedError(f"Inductor's options: {type(error).__name__}: {error}") from error
        return self._options

    def may_hold(self, key: Mapping[str, Any]) -> bool:
        """Whether a stored artifact with this key can belong to a group of this process."""
        return any(key.items() >= self._fixed_key(dynamic).items() for dynamic in (self._dynamic, None))


def _versions() -> Mapping[str, str]:
    """The versions of everything that decides how a model is traced and compiled."""
    packages = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in VERSIONED_PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {**packages, "torch": str(torch.__version__), "python": python}


def _options_digest() -> str:
    """The digest of Inductor's options that the program set. Options from the environment are in the environment's
    key."""
    return digest(sorted([name, _option(value)] for name, value in inductor_options(_PASSES).items()))


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
