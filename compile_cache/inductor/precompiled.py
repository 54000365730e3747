"""A function compiled ahead of time: how it is made, loaded, and checked against a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from compile_cache.errors import ArtifactError, NotPrecompilable, first_line
from compile_cache.importable import find
from compile_cache.inductor.adapter import compile_function, load_function
from compile_cache.inductor.call_spec import (
    GLOBAL_HOOKS,
    HOOKS,
    Parts,
    call_region,
    on_gpu,
    overlaps_of,
    parts_of,
    why_eager,
)
from compile_cache.inductor.guards import Checks, Recorder
from compile_cache.inductor.record import Record
from compile_cache.inductor.switches import changed_switches, switches


def why_not_ahead(module: nn.Module) -> str:
    """Why no function compiled ahead of time may serve calls of `module` in its present state; empty if one may."""
    if torch.is_grad_enabled():
        return "gradients are recorded; call the model under torch.inference_mode() or torch.no_grad()"
    if any(vars(part).get(hooks) for part in parts_of(module) for hooks in HOOKS):
        return "it has a hook of torch.nn.utils"
    return why_eager(module)


class Precompiled:
    """A loaded compiled function, for all modules and inputs that it fits. `path` is its file."""

    step = "precompiled"

    def __init__(self, path: str, record: Record, payload: bytes) -> None:
        """Unpickle `payload`, which must be verified.

        Raises:
            ArtifactError: the function cannot be loaded, or a global has changed.
        """
        try:
            externals = {name: find(name) for name in record.globals}
            self._loaded = load_function(payload, externals, record.torch_key, record.triton_key)
            self._checks = Checks(record.guards, record.salt)
        except Exception as error:  # any: the payload is damaged, or of another torch
            raise ArtifactError(f"it cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
        self.path = path
        self._function, self._check_guards = self._loaded.function, self._loaded.guards.check
        self._on_gpu = False
        # The switches of the calling thread, which the group's name has. The loading thread may have others.
        self._switches: tuple[Any, ...] | None = None
        self._per_call: Callable[[Mapping[str, Any]], bool] | None = None
        self._forwards: tuple[Any, ...] | None = None
        self._overlaps: tuple[int | str, ...] | None = None
        self._parts: weakref.WeakKeyDictionary[nn.Module, Parts] = weakref.WeakKeyDictionary()
        self._record = record

    def outdated(self) -> str:
        """The first change in the host, the code and the globals, in words; empty if nothing changed."""
        return self._record.difference() or self._checks.difference()

    def misfit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the function does not fit this call, after the full check; empty if it fits."""
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        now = switches(on_gpu(module, args, kwargs))
        if reason := why_not_ahead(module) or changed_switches(self._switches or now, now):
            return reason
        parts = Parts(module)
        if self._forwards not in (None, parts.forwards):
            return "a class has another `forward`"
        if self._overlaps not in (None, overlaps_of(args, kwargs, parts)):
            return "other inputs share memory"
        if difference := self._checks.local_difference(inputs) or self._loaded.failed_guard(inputs):
            return difference
        if self._per_call is None:
            self._on_gpu = on_gpu(module, args, kwargs)
            self._switches = now
            self._forwards = parts.forwards
            self._overlaps = overlaps_of(args, kwargs, parts)
            self._per_call = self._checks.per_call(inputs)  # last: another thread may be asking
        self._parts[module] = parts
        return "" if self.fits(module, args, kwargs) else "a constant or a function was replaced"

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the function fits this call of a module that passed `misfit`. Takes some tens of microseconds."""
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        return (
            self._switches == switches(self._on_gpu)
            and not any(GLOBAL_HOOKS)
            and (parts := self._parts.get(module)) is not None
            and parts.are_unhooked()
            and overlaps_of(args, kwargs, parts) == self._overlaps
            and self._check_guards(inputs)
            and self._constants_hold(inputs)
        )

    def _constants_hold(self, inputs: Mapping[str, Any]) -> bool:
        try:
            return self._per_call is not None and self._per_call(inputs)
        except Exception:  # an object that the expression reads is gone
            return False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits."""
        return self._function(module, args, kwargs)

    try_out = __call__


def compile_ahead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, dynamic: bool | None, salt: str
) -> tuple[Record, bytes]:
    """Compile a call of `module` with these inputs. This traces the call, and runs nothing. `salt` names its group.

    Raises:
        NotPrecompilable: torch refuses, or the compiled code might be wrong in another process.
        MemoryError, torch.OutOfMemoryError: memory ran out; the call is not to blame.
    """
    recorder = Recorder(on_gpu(module, args, kwargs), salt)
    try:
        compilation = compile_function(
            call_region, (module, args, kwargs), mode, dynamic, recorder, recorder.alias_guard
        )
    except NotPrecompilable:
        raise
    except Exception as error:  # torch cannot compile this ahead of time
        if shortage := _shortage(error):
            raise shortage from error
        raise NotPrecompilable(f"torch: {type(error).__name__}: {first_line(error)}") from error
    return Record.of(compilation, recorder.guards(), salt), compilation.payload


def _shortage(error: BaseException | None) -> Exception | None:
    """The memory error that caused an error, which torch has wrapped into others; None if there is none."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return type(error)(str(error))
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
