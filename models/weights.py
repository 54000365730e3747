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
from torch import nn
from transformers.utils.logging import set_tqdm_hook

from models.early_weights import SPARE_BYTES, is_plain

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


def move(modules: Iterable[nn.Module], device: torch.device, piece_bytes: int = _PIECE_BYTES) -> None:
    """Move modules like `module.to(device)`, but several times as fast for large weights on the CPU.

    Weights are copied in pieces of at most `piece_bytes`.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    modules = list(modules)
    weights = {id(weight): weight for module in modules for weight in chain(module.parameters(), module.buffers())}
    plain = [weight for weight in weights.values() if is_plain(weight)]
    # torch's allocator splits up this one large block. Otherwise it would call cudaMalloc for every weight.
    torch.empty(sum(weight.nbytes for weight in plain), dtype=torch.uint8, device=device)
    there = [torch.empty_like(weight, device=device, requires_grad=False) for weight in plain]
    _copy([(_bytes(weight), _bytes(target)) for weight, target in zip(plain, there, strict=True)], device, piece_bytes)
    for weight, target in zip(plain, there, strict=True):
        weight.data = target
    for module in modules:
        module.to(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device, piece_bytes: int) -> None:
    """Copy each first tensor, on the CPU, to the second, on `device`. Both hold bytes."""
    pieces = [piece for pair in pairs for piece in zip(*(side.split(piece_bytes) for side in pair), strict=True)]
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    with ThreadPoolExecutor(_THREADS, "weights") as executor:
        shares = [pieces[first::_THREADS] for first in range(_THREADS)]
        for worker in [executor.submit(_copy_pieces, share, device, stream, piece_bytes) for share in shares]:
            worker.result()


def _copy_pieces(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    callers: torch.cuda.Stream | None,
    piece_bytes: int,
) -> None:
    """Copy pieces behind the work of the caller's stream, through pinned memory. Reading and copying release the GIL.
    While the GPU copies a piece of one thread, others read."""
    stream = None
    if callers is not None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(callers)
    memory = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=stream is not None)
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
