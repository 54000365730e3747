"""What a call depends on besides itself, taken in the server and made in the compiling process.

Artifacts are named by torch's switches, the compiler's options and the packages that are imported, among other things.
The server finds an artifact only if all of these were the same in the process that made it.

This module imports torch, and not its compiler. Importing it fails where `aot/switches.py` does.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compile_cache.aot.options import TRACED_PACKAGES, changed_options
from compile_cache.aot.switches import (
    CONTEXTS,
    SETTERS,
    SWITCHES,
    describe_switches,
    precisions,
    set_precisions,
    settle_attention_priority,
    switches,
)
from compile_cache.background.portable import pack, unpack
from compile_cache.background.prepare import Preparation, registered, run_once
from compile_cache.errors import StateNotMade, StateNotTaken

# The compiler imports Triton itself. By the time that the server looks for an artifact, it has done the same.
_IMPORTED_BY_COMPILER = ("triton",)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of torch's compiler: the module of its name, as `torch._inductor.config`, and its pickled value."""

    module: str
    name: str
    value: bytes

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a call in the server depends on besides itself. Equal states name the same artifacts.

    `switches` and `precisions` are as `aot/switches.py` reads them. `packages` are those that the server has imported.
    `device` is the index of the thread's CUDA device; None before CUDA is used.
    """

    on_gpu: bool
    switches: tuple[Any, ...]
    precisions: tuple[str, ...]
    options: tuple[Option, ...]
    packages: tuple[str, ...]
    preparations: tuple[Preparation, ...]
    device: int | None

    @classmethod
    def take(cls, on_gpu: bool) -> ServerState:
        """The state of the calling thread. `on_gpu` says that all tensors of the call are on a GPU.

        Take it in the thread and in the contexts of a call, after the call was served: a process's first attention on a
        GPU can change a switch. Takes 0.02 ms, and 0.25 to 0.45 ms once the compiler is imported. Imports nothing.

        Raises:
            StateNotTaken: another process cannot have this state; the error names what it cannot have.
        """
        values = switches(on_gpu)
        by_name = dict(zip(SWITCHES, values, strict=False))
        if entered := [name for name in CONTEXTS if by_name[name]]:
            raise StateNotTaken(f"another process cannot enter the contexts of this call: {', '.join(entered)}")
        return cls(
            on_gpu,
            values,
            precisions(),
            _options(),
            tuple(name for name in TRACED_PACKAGES if name in sys.modules),
            registered(),
            _device(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Make the server's state in the calling thread and in this process, and set it back after the context. Imports
        the compiler.

        Three things stay: preparations, this library's own settings of torch, and imports.

        Raises:
            StateNotMade: something cannot be made as it was in the server; the error names it.
        """
        # It sets options for good, and would be undone with the options that are set below.
        from compile_cache.regions.torch_settings import configure_torch

        configure_torch()
        self._import_packages()
        run_once(self.preparations)
        with contextlib.ExitStack() as stack:
            for option in self.options:
                stack.enter_context(_option_made(option))
            self._make_device(stack)
            self._make_switches(stack)
            self._check()
            yield

    def _import_packages(self) -> None:
        for name in self.packages:
            with _making(name):
                importlib.import_module(name)

    def _make_device(self, stack: contextlib.ExitStack) -> None:
        if self.device is not None:
            with _making("the CUDA device"):
                stack.enter_context(torch.cuda.device(self.device))
                settle_attention_priority()

    def _make_switches(self, stack: contextlib.ExitStack) -> None:
        """Set the switches that differ, and have the stack set them back."""
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
        said = 0 if self.precisions[0] else 1  # torch refused to say the first one in the server
        if (now := precisions()[said:]) != (then := self.precisions[said:]):
            different.append(f"the precisions of float32 operations are {now}, and were {then} in the server")
        own = set(sys.modules).intersection(TRACED_PACKAGES).difference(self.packages, _IMPORTED_BY_COMPILER)
        different += [f"{name} is imported, and was not in the server" for name in sorted(own)]
        if different:
            raise StateNotMade(f"in the compiling process, {'; '.join(different)}")


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _options() -> tuple[Option, ...]:
    try:
        changed = list(changed_options())
    except AttributeError as error:
        raise StateNotTaken(f"torch {torch.__version__} does not say which options are set: {error}") from error
    return tuple(Option(module, name, pack(value, f"{module}.{name}")) for module, name, value in changed)


@contextlib.contextmanager
def _option_made(option: Option) -> Iterator[None]:
    """The option's value in this thread, while the context lasts."""
    with contextlib.ExitStack() as stack:
        with _making(str(option)):
            config, value = importlib.import_module(option.module), unpack(option.value)
            if getattr(config, option.name) != value:
                stack.enter_context(config.patch({option.name: value}))
            if (now := getattr(config, option.name)) != value:  # an environment variable can forbid it
                raise StateNotMade(f"{option} is {now!r}, and was {value!r} in the server")
        yield


@contextlib.contextmanager
def _making(name: str) -> Iterator[None]:
    """Name what could not be made."""
    try:
        yield
    except StateNotMade:
        raise
    except Exception as error:  # torch refuses a value, or lacks a name; or a package fails to import
        raise StateNotMade(f"{name} cannot be made as in the server: {type(error).__name__}: {error}") from error
