"""torch's state: switches and options that compiled code depends on, and that a call's inputs do not show. It is read
in the server, and set in the second process.

The name of an artifact depends on torch's switches and the compiler's options, among others. The server finds an
artifact only if the process that made it had the same.

`prepare_with` registers a function that prepares a process to compile a model, such as one that registers an attention
interface. A model family calls it in its own set-up; the second process calls it before it compiles.

Importing this module fails with an AttributeError if torch lacks a name that reads a switch. A name that sets a switch
is looked up when it is needed. The module imports torch without its compiler, because a server without one reads
switches.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from compile_cache.calls.description import NotDescribedError, class_name, describe
from compile_cache.calls.spec import autocast_dtype
from compile_cache.calls.torch_call import count_dispatch_modes
from compile_cache.errors import Failure, NotHandedOver
from compile_cache.importable import find, reference, why_not
from compile_cache.key.environment import digest

_precision = torch._C._get_fp32_precision_getter
_priority = torch._C._get_sdp_priority_order
_products = torch.backends.cuda.matmul

# Some options of the first two are names for options of the last.
_CONFIGS = (
    "torch._inductor.config",
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch.compiler.config",
)
# Options that change how a process compiles, but not the compiled code. torch and this library set the last two while
# they load or make an artifact: in torch 2.11 options belong to all threads, so another thread would take them for the
# program's.
_NOT_OF_CODE = ("compile_threads", "worker_start_method", "enable_aot_compile", "enable_autograd_for_aot")
# Options of Inductor's caches and of what it writes for people, which decide nothing of the code either.
_OF_CACHES = ("trace.", "fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache", "autotune_remote_cache")
# The backends and operations for which torch keeps float32 precisions. A "none" takes the value of "all".
_PRECISIONS = (
    ("generic", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("all", "matmul", "conv", "rnn")),
)


# The functions that read the switches. Each takes well under a microsecond, because every call compares all switches.
# The number of threads comes last, because it is left out if all tensors are on a GPU.
SWITCHES: Mapping[str, Callable[[], Any]] = {
    "gradients": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
    "cuDNN attention": torch.backends.cuda.cudnn_sdp_enabled,
    "attention priority": lambda: tuple(_priority()),
    # Set in either of torch's two ways.
    "float32 matmul precision": lambda: (_precision("cuda", "matmul"), _precision("mkldnn", "matmul")),
    "float16 reductions": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "bfloat16 reductions": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "autocast on CPU": functools.partial(autocast_dtype, "cpu"),
    "autocast on CUDA": functools.partial(autocast_dtype, "cuda"),
    "default dtype": torch.get_default_dtype,
    "function modes": torch._C._len_torch_function_stack,
    "dispatch modes": count_dispatch_modes,
    "threads": torch.get_num_threads,
}

# The functions that set the switches in another process. Gradients and inference mode are missing: they are
# contexts of a thread. `set_precisions` sets the precisions of float32 products. Determinism is set without Inductor's
# option, which `torch.use_deterministic_algorithms` sets for the calling thread only.
SETTERS: Mapping[str, Callable[[Any], object]] = {
    "autocast on CPU": lambda value: set_autocast("cpu", value),
    "autocast on CUDA": lambda value: set_autocast("cuda", value),
    "flash attention": torch.backends.cuda.enable_flash_sdp,
    "memory-efficient attention": torch.backends.cuda.enable_mem_efficient_sdp,
    "math attention": torch.backends.cuda.enable_math_sdp,
    "cuDNN attention": torch.backends.cuda.enable_cudnn_sdp,
    "attention priority": lambda value: torch._C._set_sdp_priority_order(list(value)),
    "float16 reductions": functools.partial(setattr, _products, "allow_fp16_reduced_precision_reduction"),
    "bfloat16 reductions": functools.partial(setattr, _products, "allow_bf16_reduced_precision_reduction"),
    "deterministic algorithms": torch.set_deterministic_debug_mode,
    "default dtype": torch.set_default_dtype,
    "threads": torch.set_num_threads,
}
# Only a context of the calling code turns these on. They cannot be handed to another process. What it may be, in words:
CONTEXTS = {
    "function modes": "torch.set_default_device() or another function mode",
    "dispatch modes": "a dispatch mode",
}

_READERS = tuple(SWITCHES.values())
_READERS_ON_GPU = tuple(read for name, read in SWITCHES.items() if name != "threads")


def switches(on_gpu: bool) -> tuple[Any, ...]:
    """The values of `SWITCHES`, without the number of threads if all tensors of the call are on a GPU."""
    if on_gpu:
        with suppress(RuntimeError):  # the memory is full; the next reading tries again
            settle_attention_priority()
    return tuple([read() for read in (_READERS_ON_GPU if on_gpu else _READERS)])


def describe_switches(values: tuple[Any, ...]) -> dict[str, str]:
    """The values of `switches` as text, by name."""
    return {name: str(value) for name, value in zip(SWITCHES, values, strict=False)}


def changed_switches(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """The switches that differ, in words: `gradients False → True`."""
    pairs = zip(SWITCHES, before, now, strict=False)
    return ", ".join(f"{name} {old} → {new}" for name, old, new in pairs if old != new)


def set_autocast(device: str, dtype: str) -> None:
    """Let autocast compute with `dtype`, which comes from `autocast_dtype`."""
    torch.set_autocast_enabled(device, bool(dtype))
    if dtype:
        torch.set_autocast_dtype(device, getattr(torch, dtype))
    torch.clear_autocast_cache()


@contextmanager
def modes_of(described: Mapping[str, str]) -> Iterator[None]:
    """The modes of `described`, a result of `describe_switches` that was read from a file: those of which a call has
    guards."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.inference_mode(described["inference mode"] == "True"))
        for name in ("autocast on CPU", "autocast on CUDA"):
            stack.callback(SETTERS[name], SWITCHES[name]())
            SETTERS[name](described[name])
        yield


def precisions() -> tuple[str, ...]:
    """The precisions of all float32 operations, for `set_precisions`. The first belongs to
    `set_float32_matmul_precision`. It is empty if the program has also set precisions in torch's other way: then torch
    refuses to tell."""
    try:
        of_products = str(torch.get_float32_matmul_precision())
    except RuntimeError:
        of_products = ""
    return of_products, *(str(_precision(*place)) for place in _PRECISIONS)


def set_precisions(values: tuple[str, ...]) -> None:
    """Set the precisions to `values`, which come from `precisions`.

    Raises:
        RuntimeError, AttributeError: torch refuses a value, or lacks a name.
    """
    of_products, *others = values
    if of_products and of_products != precisions()[0]:
        torch.set_float32_matmul_precision(of_products)  # this sets two of the others
    for place, value in zip(_PRECISIONS, others, strict=True):
        if _precision(*place) != value:
            torch._C._set_fp32_precision_setter(*place, value)


@functools.cache
def settle_attention_priority() -> None:
    """Let torch choose an attention. On some GPUs it puts cuDNN first when a process first chooses, whatever was set
    before: a process's first call would have another description than the same call later.

    Raises:
        RuntimeError: the GPU's memory is full.
    """
    if torch.cuda.is_available():
        vectors = torch.zeros(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(vectors, vectors, vectors)


def changed_options() -> Iterator[tuple[str, str, Any]]:
    """The module, name and value of each option that the program or an environment variable changed in this thread.

    Modules that are not imported, or that another thread is importing, have their defaults. Takes under half a
    millisecond once the compiler is imported.

    Raises:
        AttributeError: this torch keeps its options in another way.
    """
    for module in _CONFIGS:
        config: Any = sys.modules.get(module)
        if config is not None and not getattr(config.__spec__, "_initializing", False):
            for name, entry in config._config.items():
                if not config._is_default(name) and name not in _NOT_OF_CODE:
                    value = getattr(config, name)
                    # An option that was set back to its default is unchanged, unless the environment sets it.
                    if value != entry.default or isinstance(entry.env_value_default, bool | str):
                        yield module, name, value


def options_digest() -> str:
    """The digest of the options of Inductor's that were changed, and that the code may depend on.

    Raises:
        NotDescribedError: an option cannot be described.
    """
    try:
        options = [
            [name, _option(value)]
            for module, name, value in changed_options()
            if module == _CONFIGS[0] and not name.startswith(_OF_CACHES)
        ]
    except Exception as error:  # a custom pass whose `uuid` raises
        raise NotDescribedError(f"Inductor's options: {Failure(error).reason}") from error
    return digest(sorted(options))


def _option(value: Any) -> str:
    if callable(uuid := getattr(value, "uuid", None)):  # torch._inductor.custom_graph_pass
        return f"{class_name(type(value))} {uuid()!r}"
    try:
        return str(describe(value))
    except NotDescribedError:
        return repr(value) if isinstance(value, Sequence | Mapping) else class_name(type(value))


# The names of functions that the second process calls first, in order; and, in that process, those that it has called.
_registered: dict[str, None] = {}
_called: set[str] = set()


@dataclass(frozen=True, slots=True)
class ServerState:
    """The state of the server that a call depends on. Equal states name the same artifacts.

    `options` has the module, the name and the pickled value of each of `changed_options`. `path` is the
    server's import path. `device` is the index of the thread's CUDA device; None before CUDA is used.
    """

    on_gpu: bool
    switches: tuple[Any, ...]
    precisions: tuple[str, ...]
    options: tuple[tuple[str, str, bytes], ...]
    path: tuple[str, ...]
    preparations: tuple[str, ...]
    device: int | None

    @classmethod
    def read(cls, on_gpu: bool) -> ServerState:
        """The state of the calling thread. `on_gpu` says that all tensors of the call are on a GPU.

        Call it in the thread and in the contexts of a call, after the call was served: the first attention on a GPU can
        change a switch. Takes 0.02 ms, or 0.25 to 0.45 ms once the compiler is imported. Imports nothing.

        Raises:
            NotHandedOver: another process cannot have this state. The error names the part that it cannot have.
            AttributeError: this torch keeps its options in another way.
        """
        values = switches(on_gpu)
        by_name = dict(zip(SWITCHES, values, strict=False))
        if entered := [words for name, words in CONTEXTS.items() if by_name[name]]:
            raise NotHandedOver(f"the call is made in {' and '.join(entered)}, which another process cannot enter")
        return cls(
            on_gpu,
            values,
            precisions(),
            tuple((module, name, _packed(module, name, value)) for module, name, value in changed_options()),
            tuple(entry for entry in sys.path if isinstance(entry, str)),
            tuple(_registered),
            torch.cuda.current_device() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        )

    def place(self) -> None:
        """Let this process find the server's modules."""
        sys.path[:] = self.path

    @contextmanager
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
        _run_once(self.preparations)
        with ExitStack() as stack:
            for option in self.options:
                _set_option(*option, stack)
            if self.device is not None:
                with _setting("the CUDA device"):
                    stack.enter_context(torch.cuda.device(self.device))
                    settle_attention_priority()
            self._set_switches(stack)
            self._check()
            yield

    def _set_switches(self, stack: ExitStack) -> None:
        """Set the switches that differ, and let the stack reset them."""
        values = dict(zip(SWITCHES, self.switches, strict=False))
        with _setting("gradients and inference mode"):
            stack.enter_context(torch.inference_mode(values["inference mode"]))  # it sets both
            stack.enter_context(torch.set_grad_enabled(values["gradients"]))
        with _setting("float32 matmul precision"):
            stack.callback(set_precisions, precisions())
            set_precisions(self.precisions)
        for name, value in values.items():
            old = SWITCHES[name]()
            if name in SETTERS and old != value:
                with _setting(name):
                    SETTERS[name](value)
                stack.callback(SETTERS[name], old)

    def _check(self) -> None:
        different = [*filter(None, (changed_switches(self.switches, switches(self.on_gpu)),))]
        said = 0 if self.precisions[0] else 1  # in the server, torch refused to tell the first one
        if (now := precisions()[said:]) != (then := self.precisions[said:]):
            different.append(f"the precisions of float32 operations are {now}, and were {then} in the server")
        if different:
            raise NotHandedOver(f"in the compiling process, {'; '.join(different)}")


def _set_option(module: str, name: str, packed: bytes, stack: ExitStack) -> None:
    """Give the option its value in this thread, and let the stack reset it."""
    with _setting(f"{module}.{name}"):
        config, value = importlib.import_module(module), pickle.loads(packed)
        if getattr(config, name) != value:
            stack.enter_context(config.patch({name: value}))
        if getattr(config, name) != value:
            raise NotHandedOver(f"{module}.{name} is not as in the server; an environment variable may fix it")


@contextmanager
def _setting(name: str) -> Iterator[None]:
    """Turn an error of the context into a `NotHandedOver` that begins with `name`."""
    try:
        yield
    except NotHandedOver:
        raise
    except Exception as error:  # torch refuses a value or lacks a name
        raise NotHandedOver(f"{name} cannot be set as in the server: {Failure(error).reason}") from error


def prepare_with(function: Callable[[], None]) -> None:
    """Register `function`: the second process calls it once, before it compiles.

    The same function is registered once. This process does not call it.

    Raises:
        NotHandedOver: another process cannot import the function.
    """
    try:
        name = reference(function)
        if reason := why_not(function.__module__):
            raise LookupError(f"{name}: {reason}")
    except LookupError as error:
        raise NotHandedOver(
            f"the compiling process cannot import {error}. Define the function at the top level of a module that can "
            "be imported."
        ) from error
    _registered[name] = None


def _run_once(preparations: Iterable[str]) -> None:
    """Call the functions that this process has not called yet, in order.

    Raises:
        NotHandedOver: a function cannot be imported here, or fails.
    """
    for name in preparations:
        if name in _called:
            continue
        try:
            find(name)()
        except Exception as error:  # a model family's own code
            raise NotHandedOver(f"{name} failed: {Failure(error).reason}") from error
        _called.add(name)


class _Pickler(pickle.Pickler):
    """Refuses functions and classes that only this process can import. Everything else travels by value: a pass as it
    is now, and not as its module makes it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and (reason := why_not(value.__module__)):
            raise pickle.PicklingError(f"{value!r}: {reason}")
        return NotImplemented


def _packed(module: str, name: str, value: Any) -> bytes:
    """An option's value for another process.

    Raises:
        NotHandedOver: `value` cannot be pickled, or another process cannot import a part of it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever a value's own __reduce__ raises
        raise NotHandedOver(
            f"{module}.{name} cannot be handed to the compiling process: {error}. Define functions and classes at the "
            "top level of a module that can be imported."
        ) from error
    return buffer.getvalue()
