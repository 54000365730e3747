"""Moves weights from safetensors files to the GPU, at the speed of the page cache and PCIe, and logs nothing of it.

On the CPU, `from_pretrained` maps the files into memory and reads almost nothing. It decides which weights exist, their
types, and which are tied or computed. Then `move` moves them to the GPU like `nn.Module.to`, but reads and copies many
pieces at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy
import torch
from torch import Tensor, nn
from transformers.utils.logging import set_tqdm_hook

from models.early_weights import SPARE_BYTES, EarlyWeights, is_plain

# 64 MB of pinned memory in all. Fewer threads are slower; more threads, larger pieces or a second piece of each thread
# are no faster.
_THREADS = 8
_PIECE_BYTES = 8 << 20


def leave_out_foreign_lines() -> None:
    """Leave out transformers' bars for the loading of weights, and its warnings that torchvision is not installed.

    A pipeline of diffusers imports image processors that nothing here calls, and transformers warns of each. Bars of
    a download stay: they are those of the hub's library.
    """
    set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    unwanted = "requires torchvision (not installed)"
    imports = logging.getLogger("transformers.utils.import_utils")
    imports.addFilter(lambda record: unwanted not in record.getMessage())


def move(modules: Iterable[nn.Module], device: torch.device, early: EarlyWeights | None = None) -> None:
    """Move modules like `module.to(device)`, but several times as fast for large weights on the CPU. What `early` has
    copied is there.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    modules = list(modules)
    if early is not None:
        early.give(modules)
    weights = {id(weight): weight for module in modules for weight in chain(module.parameters(), module.buffers())}
    plain = [weight for weight in weights.values() if is_plain(weight)]
    # torch's allocator splits up this one large block. Otherwise it would call cudaMalloc for every weight.
    torch.empty(sum(weight.nbytes for weight in plain), dtype=torch.uint8, device=device)
    there = [torch.empty_like(weight, device=device, requires_grad=False) for weight in plain]
    sides = [[piece for tensor in one for piece in _bytes(tensor).split(_PIECE_BYTES)] for one in (plain, there)]
    pieces = list(zip(*sides, strict=True))
    callers = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(_THREADS, "weights") as executor:
        shares = [pieces[first::_THREADS] for first in range(_THREADS)]
        for worker in [executor.submit(_copy, share, device, callers) for share in shares]:
            worker.result()
    for weight, target in zip(plain, there, strict=True):
        weight.data = target
    for module in modules:
        module.to(device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _copy(pieces: Sequence[tuple[Tensor, Tensor]], device: torch.device, callers: torch.cuda.Stream | None) -> None:
    """Copy pieces of the CPU's memory to the device, through pinned memory, behind the work of the caller's stream.

    Reading and copying release the GIL. While the GPU copies a piece of one thread, others read.
    """
    stream = None
    if callers is not None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(callers)
    memory = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=stream is not None)
    with torch.cuda.stream(stream):
        for source, target in pieces:
            part = memory[: source.nbytes]
            numpy.copyto(part.numpy(), source.numpy())  # torch would start more threads
            target.copy_(part, non_blocking=True)
            if stream is not None:
                stream.synchronize()


def gpu_has_room(size_bytes: int) -> bool:
    """Whether the GPU has room for copies of weights, and 4 GiB beside them."""
    free, _ = torch.cuda.mem_get_info()
    return free > size_bytes + SPARE_BYTES
