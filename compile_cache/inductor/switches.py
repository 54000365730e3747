"""torch's switches and its compiler's options: state that compiled code depends on, and that a call's inputs do not
show.

Importing this module fails with an AttributeError if torch lacks a name that reads a switch. A name that sets a switch
is looked up when it is needed. The module imports torch without its compiler, because a server without one reads
switches.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from compile_cache.calls.spec import autocast_dtype

_precision = torch._C._get_fp32_precision_getter
_priority = torch._C._get_sdp_priority_order

# An artifact's name has the versions of these packages, because they decide how a model is traced.
VERSIONED_PACKAGES = ("diffusers", "transformers", "triton")
# Some options of the first two are names for options of the last.
_CONFIGS = (
    "torch._inductor.config",
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch.fx.experimental._config",
    "torch.compiler.config",
)
# torch and this library set these options while they load or make an artifact. In torch 2.11 options belong to all
# threads, so another thread would take them for the program's.
SET_WHILE_LOADING = ("enable_aot_compile", "enable_autograd_for_aot")
# Options that change how a process compiles, but not the compiled code.
_NOT_OF_CODE = ("compile_threads", "worker_start_method", *SET_WHILE_LOADING)
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
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "warnings of nondeterminism": torch.is_deterministic_algorithms_warn_only_enabled,
    "autocast on CPU": functools.partial(autocast_dtype, "cpu"),
    "autocast on CUDA": functools.partial(autocast_dtype, "cuda"),
    "default dtype": torch.get_default_dtype,
    "function modes": torch._C._len_torch_function_stack,
    "dispatch modes": torch._C._len_torch_dispatch_stack,
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
    "float16 reductions": lambda value: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*value),
    "bfloat16 reductions": lambda value: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*value),
    "deterministic algorithms": lambda value: torch._C._set_deterministic_algorithms(
        value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled()
    ),
    "warnings of nondeterminism": lambda value: torch._C._set_deterministic_algorithms(
        torch.are_deterministic_algorithms_enabled(), warn_only=value
    ),
    "default dtype": lambda value: torch.set_default_dtype(value),
    "threads": lambda value: torch.set_num_threads(value),
}
# Only a context of the calling code turns these on. They cannot be handed to another process. What it may be, in words:
CONTEXTS = {
    "function modes": "torch.set_default_device() or another function mode",
    "dispatch modes": "a dispatch mode",
}
# The devices of autocast, by switch.
AUTOCAST = {"autocast on CPU": "cpu", "autocast on CUDA": "cuda"}

_READERS = tuple(SWITCHES.values())
_READERS_ON_GPU = tuple(read for name, read in SWITCHES.items() if name != "threads")


def switches(on_gpu: bool) -> tuple[Any, ...]:
    """The values of `SWITCHES`, without the number of threads if all tensors of the call are on a GPU."""
    if on_gpu:
        with contextlib.suppress(RuntimeError):  # the memory is full; the next reading tries again
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


@contextlib.contextmanager
def modes_of(described: Any) -> Iterator[None]:
    """The modes of `described`, a result of `describe_switches` that was read from a file: those of which a call has
    guards."""
    modes = described if isinstance(described, Mapping) else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.inference_mode(modes.get("inference mode") == "True"))
        for name, device in AUTOCAST.items():
            stack.callback(set_autocast, device, autocast_dtype(device))
            set_autocast(device, str(modes.get(name) or ""))
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
