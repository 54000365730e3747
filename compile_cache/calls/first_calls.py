"""A model's slow first calls, made while its weights load.

CUDA loads each kernel at its first call, and cuDNN plans each shape of an attention or a convolution: 0.5 of the 0.8 s
of an SDXL's warm-up on an H200. So the first boot of a version writes down which calls of operators were slow, in a
file that is stored with the version's code. Later boots make these calls with zeros, on the model's thread, which keeps
cuDNN's plans.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.linalg import vector_norm as norm
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache.importable import find

T = TypeVar("T")

# What is faster takes longer to make beside Python.
_LEAST_S = 0.005


class _NotesOfThread(threading.local):
    """The notes that are taken of this thread's calls, or were until the library's own code began."""

    taken: Notes | None = None
    paused: Notes | None = None


_of_thread = _NotesOfThread()


@torch.inference_mode()
def make(path: Path, is_over: Callable[[], bool]) -> None:
    """Make the calls that an earlier boot has written into a file, with zeros, until it `is_over`. A call that fails
    with zeros (an inverse), or for lack of memory, is left to the model.

    Raises:
        Exception: the file is damaged. It is removed, so that this boot writes it anew.
    """
    try:
        for name, *inputs in json.loads(path.read_text()):
            if not is_over():
                operator = find(f"torch.ops:aten.{name}")
                with contextlib.suppress(RuntimeError):
                    args, kwargs = _made(inputs)
                    operator(*args, **kwargs)
    except Exception:
        path.unlink()
        raise


class Notes(TorchDispatchMode):
    """The calls of operators that keep the host for `least_s` or more, each once.

    They are `paused` while the library's own code runs.
    """

    # torch makes the calls inside a higher-order operator without this mode, so they are not noted.
    supports_higher_order_operators = True

    def __init__(self, least_s: float = _LEAST_S) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_s = least_s
        self._seconds: dict[str, float] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make a call, and note it if it was slow and can be made again."""
        began = time.perf_counter()
        result = operator(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        space, _, name = str(operator).partition(".")
        if seconds >= self._least_s and space == "aten" and not _is_left_out(operator, name):
            with contextlib.suppress(TypeError):  # it has a generator, or another object
                self._seconds.setdefault(json.dumps([name, args, kwargs or {}], default=_described), seconds)
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the caller's own torch.compile compile."""
        return True

    def __enter__(self) -> Notes:
        """Note this thread's calls from now on."""
        super().__enter__()  # type: ignore[no-untyped-call]
        _of_thread.taken = self
        return self

    def __exit__(self, *error: Any) -> None:
        """Note no more of them."""
        _of_thread.taken = None
        super().__exit__(*(error or (None,) * 3))  # type: ignore[no-untyped-call]

    def take(self, work: Callable[[], T]) -> T:
        """What `work` returns. Its calls are noted. Errors of `work` pass through."""
        with self:
            return work()

    def __str__(self) -> str:
        """JSON, slowest first: names, arguments, and of tensors their sizes and strides."""
        return f"[{', '.join(sorted(self._seconds, key=self._seconds.__getitem__, reverse=True))}]"


def _is_left_out(operator: Any, name: str) -> bool:
    """Whether an operator of torch is random or checks values. Attention has the tag of random ones for its dropout,
    which no inference has."""
    is_random = torch.Tag.nondeterministic_seeded in operator.tags and "dot_product" not in name
    return is_random or name.startswith("_assert")


def are_taken() -> bool:
    """Whether this thread's calls are noted now."""
    return _of_thread.taken is not None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While the context lasts, note nothing, because the library's own code runs."""
    notes = _of_thread.taken
    assert notes is not None
    notes.__exit__()
    _of_thread.paused = notes
    try:
        yield
    finally:
        _of_thread.paused = None
        notes.__enter__()


@contextlib.contextmanager
def resumed() -> Iterator[None]:
    """While the context lasts, the model's own code runs: note its calls, if they were noted before."""
    if (notes := _of_thread.paused) is None:
        yield
        return
    _of_thread.paused = None
    try:
        with notes:
            yield
    finally:
        _of_thread.paused = notes


def use_first(device: torch.device) -> None:
    """Call once, in bf16, what diffusion models, language models and comparisons of their answers call.

    Each takes 5 to 100 ms the first time, for libraries and kernels that CUDA loads then.
    """
    with torch.inference_mode(), torch.cuda.device(device):
        tokens = torch.zeros(512, 4096, device=device, dtype=torch.bfloat16)
        exact, heads = tokens.float(), tokens.view(1, 512, 64, 64).transpose(1, 2)
        picture, weight = tokens.view(1, 512, 64, 64), tokens.new_zeros(4096, 4096)
        functional.linear(tokens, weight, weight[0])
        functional.linear(tokens, weight)
        functional.linear(exact[:8], exact)
        functional.embedding(torch.zeros(1, 4, device=device, dtype=torch.long), weight)
        functional.scaled_dot_product_attention(heads, heads, heads)  # cuDNN plans each kind for each thread
        for each in (picture, picture.float()):
            functional.conv2d(each, each.new_zeros(512, 512, 3, 3), padding=1)
        functional.group_norm(picture, 32)
        functional.interpolate(picture, scale_factor=2.0)
        functional.layer_norm(tokens, (4096,))
        functional.gelu(functional.silu(tokens), approximate="tanh").isnan().all()
        exact.softmax(-1).mul(torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
        torch.where(exact > 0, torch.log(exact), torch.min(exact, exact)).reciprocal()
        torch.cat([tokens, tokens]).argmax(-1)
        torch.stack([norm(tokens, dtype=torch.float32), norm(exact - exact)]).tolist()
        noise = torch.Generator(device)  # the default one stays as it is
        torch.randn(4, device=device, dtype=torch.float32, generator=noise).sin().cos().exp().sigmoid().cpu()


def _described(value: Any) -> dict[str, Any]:
    """A plain tensor as JSON: sizes, strides, type, device.

    Raises:
        TypeError: it is another object, or a tensor that zeros do not stand in for: sparse, nested, quantized.
    """
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not is_plain or value.is_nested or value.is_quantized:
        raise TypeError
    dtype, device = str(value.dtype).removeprefix("torch."), value.device.type
    return {"sizes": value.shape, "strides": value.stride(), "dtype": dtype, "device": device}


def _made(value: Any) -> Any:
    """Zeros in place of each description."""
    if isinstance(value, list):
        return [_made(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "strides" not in value:
        return {name: _made(each) for name, each in value.items()}
    sizes, strides = value["sizes"], value["strides"]
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = torch.zeros(max(length, 0), dtype=getattr(torch, value["dtype"]), device=value["device"])
    return memory.as_strided(sizes, strides)
