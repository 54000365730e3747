"""The server's settings of torch that a call depends on: read in the server, made in the second process.

The name of an artifact depends on torch's switches, the compiler's options and the imported packages, among others. The
server finds an artifact only if the process that made it had the same.

`prepare_with` registers a function that prepares a process to compile a model, such as one that registers an attention
interface. A model family calls it in its own set-up; the second process calls it before it compiles.

This module imports torch, but not its compiler. Importing it fails where importing `inductor/switches.py` fails.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from compile_cache import importable
from compile_cache.errors import NotHandedOver
from compile_cache.inductor.switches import (
    CONTEXTS,
    SETTERS,
    SWITCHES,
    VERSIONED_PACKAGES,
    changed_options,
    describe_switches,
    precisions,
    set_precisions,
    settle_attention_priority,
    switches,
)

# The names of functions that the second process calls first, in order.
_registered: dict[str, None] = {}
# A context variable, as torch's options are: on torch 2.13 an option holds in one thread only.
_RUN: ContextVar[frozenset[str]] = ContextVar("compile_cache_preparations", default=frozenset())
# The compiler imports Triton itself. The server has imported the compiler before it looks for an artifact.
_IMPORTED_BY_COMPILER = ("triton",)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of torch's compiler: its module, such as `torch._inductor.config`, its name and its pickled value."""

    module: str
    name: str
    value: bytes

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of the server that a call depends on. Equal states name the same artifacts.

    `packages` are those of `VERSIONED_PACKAGES` that the server has imported. `device` is the index of the thread's
    CUDA device; None before CUDA is used.
    """

    on_gpu: bool
    switches: tuple[Any, ...]
    precisions: tuple[str, ...]
    options: tuple[Option, ...]
    packages: tuple[str, ...]
    preparations: tuple[str, ...]
    device: int | None

    @classmethod
    def take(cls, on_gpu: bool) -> ServerState:
        """The state of the calling thread. `on_gpu` says that all tensors of the call are on a GPU.

        Call it in the thread and in the contexts of a call, after the call was served: the first attention on a GPU can
        change a switch. Takes 0.02 ms, or 0.25 to 0.45 ms once the compiler is imported. Imports nothing.

        Raises:
            NotHandedOver: another process cannot have this state. The error names the part that it cannot have.
        """
        values = switches(on_gpu)
        by_name = dict(zip(SWITCHES, values, strict=False))
        if entered := [words for name, words in CONTEXTS.items() if by_name[name]]:
            raise NotHandedOver(f"the call is made in {' and '.join(entered)}, which another process cannot enter")
        return cls(
            on_gpu,
            values,
            precisions(),
            _options(),
            tuple(name for name in VERSIONED_PACKAGES if name in sys.modules),
            tuple(_registered),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set the server's state in the calling thread and in this process while the context lasts. Imports the
        compiler.

        Three things stay afterwards: preparations, this library's own settings of torch, and imports.

        Raises:
            NotHandedOver: a part of the state cannot be set here. The error names that part.
        """
        # These options stay for good. Set later, they would be reset together with the options below.
        from compile_cache.inductor.toolchain import configure_torch

        configure_torch()
        for name in self.packages:
            with _making(name):
                importlib.import_module(name)
        _run_once(self.preparations)
        with contextlib.ExitStack() as stack:
            for option in self.options:
                _make_option(option, stack)
            if self.device is not None:
                with _making("the CUDA device"):
                    stack.enter_context(torch.cuda.device(self.device))
                    settle_attention_priority()
            self._make_switches(stack)
            self._check()
            yield

    def _make_switches(self, stack: contextlib.ExitStack) -> None:
        """Set the switches that differ, and let the stack reset them."""
        values = dict(zip(SWITCHES, self.switches, strict=False))
        with _making("gradients and inference mode"):
            stack.enter_context(torch.inference_mode(values["inference mode"]))  # it sets both
            stack.enter_context(torch.set_grad_enabled(values["gradients"]))
        before = precisions()
        with _making("float32 matmul precision"):
            stack.callback(set_precisions, before)
            set_precisions(self.precisions)
        for name, value in values.items():
            old = SWITCHES[name]()
            if name in SETTERS and old != value:
                with _making(name):
                    SETTERS[name](value)
                stack.callback(SETTERS[name], old)

    def _check(self) -> None:
        here = describe_switches(switches(self.on_gpu))
        server = describe_switches(self.switches)
        changed = [name for name in server if here[name] != server[name]]
        different = [f"{name} is {here[name]}, and was {server[name]} in the server" for name in changed]
        said = 0 if self.precisions[0] else 1  # in the server, torch refused to tell the first one
        if (now := precisions()[said:]) != (then := self.precisions[said:]):
            different.append(f"the precisions of float32 operations are {now}, and were {then} in the server")
        own = set(sys.modules).intersection(VERSIONED_PACKAGES).difference(self.packages, _IMPORTED_BY_COMPILER)
        different += [f"{name} is imported, and was not in the server" for name in sorted(own)]
        if different:
            raise NotHandedOver(f"in the compiling process, {'; '.join(different)}")


def _options() -> tuple[Option, ...]:
    try:
        changed = list(changed_options())
    except AttributeError as error:
        raise NotHandedOver(f"torch {torch.__version__} does not tell which options are set: {error}") from error
    return tuple(Option(module, name, _pack(value, f"{module}.{name}")) for module, name, value in changed)


def _make_option(option: Option, stack: contextlib.ExitStack) -> None:
    """Give the option its value in this thread, and let the stack reset it."""
    with _making(str(option)):
        config, value = importlib.import_module(option.module), pickle.loads(option.value)
        if getattr(config, option.name) != value:
            stack.enter_context(config.patch({option.name: value}))
        if (now := getattr(config, option.name)) != value:  # an environment variable can forbid it
            raise NotHandedOver(f"{option} is {now!r}, and was {value!r} in the server")


@contextlib.contextmanager
def _making(name: str) -> Iterator[None]:
    """Turn an error of the context into a `NotHandedOver` that begins with `name`."""
    try:
        yield
    except NotHandedOver:
        raise
    except Exception as error:  # torch refuses a value or lacks a name, or a package cannot be imported
        raise NotHandedOver(f"{name} cannot be set as in the server: {type(error).__name__}: {error}") from error


def prepare_with(function: Callable[[], None]) -> None:
    """Register `function`: the second process calls it once in each thread, before that thread compiles.

    The same function is registered once. This process does not call it.

    Raises:
        NotHandedOver: another process cannot import the function.
    """
    try:
        name = importable.reference(function)
        if reason := importable.why_not(function.__module__):
            raise LookupError(f"{name}: {reason}")
    except LookupError as error:
        raise NotHandedOver(
            f"the compiling process cannot import {error}. Define the function at the top level of a module that can "
            "be imported."
        ) from error
    _registered[name] = None


def _run_once(preparations: Iterable[str]) -> None:
    """Call the functions that this thread has not called yet, in order.

    Raises:
        NotHandedOver: a function cannot be imported here, or fails.
    """
    for name in preparations:
        if name in _RUN.get():
            continue
        try:
            importable.find(name)()
        except Exception as error:  # a model family's own code
            raise NotHandedOver(f"{name} failed: {type(error).__name__}: {error}") from error
        _RUN.set(_RUN.get() | {name})


class _Pickler(pickle.Pickler):
    """Refuses functions and classes that only this process can import. Everything else travels by value: a pass as it
    is now, and not as its module makes it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and (reason := importable.why_not(value.__module__)):
            raise pickle.PicklingError(f"{value!r}: {reason}")
        return NotImplemented


def _pack(value: Any, name: str) -> bytes:
    """`value`, pickled for another process. An error calls it `name`.

    Raises:
        NotHandedOver: `value` cannot be pickled, or another process cannot import a part of it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever a value's own __reduce__ raises
        raise NotHandedOver(
            f"{name} cannot be handed to the compiling process: {error}. Define functions and classes at the top "
            "level of a module that can be imported."
        ) from error
    return buffer.getvalue()
