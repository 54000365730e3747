"""Copies a model's weights to the GPU while Python still imports. It needs torch alone: copy the file to use it.

    with EarlyWeights(folder) as early:       # before torch is imported: reads what is not in memory yet
        import torch
        early.begin(torch.device("cuda", 0))  # a thread copies while the rest is imported
        from diffusers import FluxPipeline
        pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
        early.give(pipe.components.values())  # each weight takes its copy
        pipe.to("cuda")                       # the rest

`from_pretrained` maps the files into memory and reads almost nothing. Which weight is which is told by its place: the
file and the offset that its memory is mapped from. What has no copy is left to the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import re
import struct
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_LARGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Two chunks are pinned at a time, and 16 are read ahead, so that a limit of memory below the weights' size works.
_CHUNK_BYTES = 256 << 20
_AHEAD = 16
_READERS = 8
_READ_BYTES = 32 << 20
# What copies of weights leave free on the GPU, for predictions and for the second process.
SPARE_BYTES = 4 << 30
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_LEAST_TAKEN = 0.9
# Each call of the thread waits for the thread that imports; 5 ms, Python's default, would be half of its time.
_SWITCH_S = 0.0005
# A mapping of a file in proc_pid_smaps(5): addresses, offset, path, and kB that were written to and are no more the
# file's.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(/.*)\n(?:\w+:.*\n)*?Anonymous: +(\d+) kB", re.MULTILINE
)


def read_header(path: Path) -> dict[str, tuple[str, int, int]]:
    """The tensors of a safetensors file by name: type, first byte and number of bytes in the file.

    https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON, then the tensors without gaps.

    Raises:
        OSError: there is no such file.
        ValueError: it is cut short or damaged.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        (length,) = struct.unpack("<Q", first) if len(first) == 8 else (0,)
        if not 0 < length <= min(_LARGEST_HEADER_BYTES, size_bytes):
            raise ValueError(f"{path} is no safetensors file, or cut short; download it again")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = (entry["dtype"], start + begin, end - begin)
    end = max((begin + count for _, begin, count in found.values()), default=start)
    if end != size_bytes:
        raise ValueError(f"{path} has {size_bytes} bytes, and its header names {end}; download it again")
    return found


def need_no_cast(folder: Path, dtype: torch.dtype | str) -> bool:
    """Whether all weights of a model or pipeline are in safetensors files, with floating-point weights of `dtype`.

    `from_pretrained` casts, quantizes or unpickles other weights, on the CPU and in memory.
    """
    is_pipeline = (folder / "model_index.json").is_file()
    configs = folder.glob("*/config.json" if is_pipeline else "config.json")
    name = _DTYPE_NAMES[str(dtype).removeprefix("torch.")]
    try:
        return all(_is_stored_as(config, name) for config in configs)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # from_pretrained has the better message for damaged files


def _is_stored_as(config: Path, dtype_name: str) -> bool:
    files = list(config.parent.glob("*.safetensors"))
    stored = {name for path in files for name, _, _ in read_header(path).values()}
    is_quantized = "quantization_config" in json.loads(config.read_text())
    return bool(files) and not is_quantized and all(name == dtype_name for name in stored if "F" in name)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads of a model's or pipeline's folder, if each part has one file
    or one index, and the files are there; else none."""
    found: list[Path] = []
    for part in _parts(folder):
        single = [part / name for name in _SINGLE_FILES if (part / name).is_file()]
        indexes = list(part.glob("*.safetensors.index.json"))
        if len(single) + len(indexes) != 1:
            return []
        for index in indexes:
            single = [part / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        found += single
    return found if all(path.is_file() for path in found) else []


def _parts(folder: Path) -> list[Path]:
    """The folders of the models of a pipeline that it loads, or the model's own."""
    index = folder / "model_index.json"
    if not index.is_file():
        return [folder] if (folder / "config.json").is_file() else []
    named = [name for name, value in json.loads(index.read_text()).items() if isinstance(value, list) and value[0]]
    return [folder / name for name in named if (folder / name / "config.json").is_file()]


def local_folder(model: str, revision: str | None) -> Path | None:
    """A folder, or the hub's local copy of `model`, if there is one."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub.constants import HF_HUB_CACHE  # imported alone, it takes milliseconds

    cached, commit = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}"), revision or "main"
    with contextlib.suppress(OSError):
        commit = (cached / "refs" / commit).read_text().strip()
    folder = cached / "snapshots" / commit
    return folder if folder.is_dir() else None


# Real path and offset of a tensor's first byte.
_Place = tuple[str, int]
# Number of a tensor, its byte where the piece begins, the same in the file, and how many bytes.
_Piece = tuple[int, int, int, int]


class _Chunk:
    """Consecutive pieces of a file, mapped for the time of their copying."""

    def __init__(self, file: int, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self._file = file
        self._begin = pieces[0][2] // mmap.PAGESIZE * mmap.PAGESIZE
        self._size = pieces[-1][2] + pieces[-1][3] - self._begin
        self._address = 0
        self._is_registered = False
        self.reading: Future[None] | None = None

    def read(self, is_stopped: threading.Event) -> None:
        """Map the pieces. Read them, if they are not all in memory."""
        libc = _libc()
        self._address = libc.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, self._file, self._begin)
        if self._address in (None, ctypes.c_void_p(-1).value):
            self._address = 0
            raise OSError(ctypes.get_errno(), "mmap failed")
        pages = ctypes.create_string_buffer(-(-self._size // mmap.PAGESIZE))
        if libc.mincore(self._address, self._size, pages) == 0 and b"\0" not in pages.raw:
            return
        buffer = mmap.mmap(-1, _READ_BYTES)  # a bytearray would be filled while imports wait
        for offset in range(self._begin, self._begin + self._size, _READ_BYTES):
            if is_stopped.is_set():
                return
            os.preadv(self._file, [buffer], offset)

    def copy(self, targets: list[torch.Tensor]) -> None:
        """Begin to copy the pieces into `targets`, which hold bytes.

        Raises:
            RuntimeError: the memory cannot be pinned.
        """
        import torch

        if targets[0].is_cuda:
            error = torch.cuda.cudart().cudaHostRegister(self._address, self._size, _READ_ONLY)
            if int(error):
                raise RuntimeError(f"mapped files cannot be pinned here (CUDA error {int(error)})")
            self._is_registered = True
        skipped = self.pieces[0][2] - self._begin
        memory = torch.frombuffer((ctypes.c_uint8 * self._size).from_address(self._address), dtype=torch.uint8)
        sources = memory[skipped:].split_with_sizes([count for *_, count in self.pieces])
        torch._foreach_copy_(targets, list(sources), non_blocking=True)

    def close(self) -> None:
        """Release the memory, after the copying has ended."""
        if self._is_registered:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_registered = False
        if self._address:
            _libc().munmap(self._address, self._size)
            self._address = 0


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc


class EarlyWeights:
    """The weights of a folder on their way to the GPU. At the end of the context, what is left of them is freed.

    If something stands in its way, it copies nothing, says so in the log, and the caller loads as ever.
    """

    def __init__(
        self, folder: Path | None, dtype: torch.dtype | str = "bfloat16", chunk_bytes: int = _CHUNK_BYTES
    ) -> None:
        """Begin to read files that are not in memory.

        folder: None, or one that needs a cast to `dtype`, or whose weights transformers makes into others: no copies.
        """
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: dict[str, tuple[int, ...]] = {}
        self._descriptors: list[int] = []
        # Place and number of bytes of each tensor, and its copy once there is one.
        self._tensors: list[tuple[_Place, int]] = []
        self._copies: dict[_Place, torch.Tensor] = {}
        self._chunks: list[_Chunk] = []
        self._readers = ThreadPoolExecutor(_READERS, "read weights")
        with self._degrading("plan early copies of weights"):
            if folder is not None and need_no_cast(folder, dtype):
                self._plan(weight_files(folder), chunk_bytes)
        for chunk in self._chunks[:_AHEAD]:
            chunk.reading = self._readers.submit(chunk.read, self._stop)

    def __enter__(self) -> EarlyWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drop()

    def _plan(self, paths: list[Path], chunk_bytes: int) -> None:
        headers = {os.path.realpath(path): read_header(path) for path in paths}
        if any(".experts." in name for header in headers.values() for name in header):
            return  # transformers makes one weight of all experts'
        for path, header in headers.items():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._descriptors.append(descriptor)
            self._files[path] = _identity(os.fstat(descriptor))
            pieces: list[_Piece] = []
            for offset, count in sorted((offset, count) for _, offset, count in header.values() if count):
                for begin in range(0, count, chunk_bytes):
                    piece = (len(self._tensors), begin, offset + begin, min(chunk_bytes, count - begin))
                    if pieces and piece[2] + piece[3] - pieces[0][2] > chunk_bytes:
                        self._chunks.append(_Chunk(descriptor, pieces))
                        pieces = []
                    pieces.append(piece)
                self._tensors.append(((path, offset), count))
            if pieces:
                self._chunks.append(_Chunk(descriptor, pieces))

    def begin(self, device: torch.device) -> None:
        """Copy on a thread, if `device` has room for all weights and 4 GiB more; then load what models use first.

        Call it once torch is imported.
        """
        if self._chunks and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(device,), name="early weights")
            self._thread.start()

    def _run(self, device: torch.device) -> None:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            with self._degrading("copy weights early"):
                self._copy(device)
            with self._degrading("load the GPU's libraries early"):
                if self._copies and device.type == "cuda":
                    use_first(device)
        finally:
            sys.setswitchinterval(interval)

    def _copy(self, device: torch.device) -> None:
        """Copy all chunks, while the next ones are read, and at most two at a time."""
        import torch

        began = time.perf_counter()
        sizes = [count for _, count in self._tensors]
        on_gpu = device.type == "cuda"
        if on_gpu and not torch.cuda.is_available():
            return
        if on_gpu and torch.cuda.mem_get_info(device)[0] < sum(sizes) + SPARE_BYTES:
            return
        # torch's allocator splits up this one large block. One call makes all tensors, each with memory of its own.
        torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        one_byte = torch.empty(1, dtype=torch.uint8, device=device)
        copies = torch.split_with_sizes_copy(one_byte.expand(sum(sizes)), sizes)
        copying: deque[tuple[_Chunk, torch.cuda.Event | None]] = deque()
        try:
            for number, chunk in enumerate(self._chunks):
                chunk.reading.result()  # type: ignore[union-attr]
                if self._stop.is_set():
                    return
                targets = [
                    copies[tensor] if count == sizes[tensor] else copies[tensor][begin : begin + count]
                    for tensor, begin, _, count in chunk.pieces
                ]
                chunk.copy(targets)
                copying.append((chunk, torch.cuda.current_stream(device).record_event() if on_gpu else None))
                if len(copying) > 1:
                    _end(*copying.popleft())
                if number + _AHEAD < len(self._chunks):
                    later = self._chunks[number + _AHEAD]
                    later.reading = self._readers.submit(later.read, self._stop)
        finally:
            for each in copying:
                _end(*each)
        self._copies = {place: copy for (place, _), copy in zip(self._tensors, copies, strict=True)}
        log.info("weights.early gb=%.1f seconds=%.2f", sum(sizes) / 1e9, time.perf_counter() - began)

    def give(self, modules: Iterable[Any]) -> None:
        """Let each weight of `modules` that is mapped from a file and was not changed since take its copy; free the
        other copies. Weights without one stay on the CPU."""
        self._wait()
        weights = {id(weight): weight for module in modules for weight in chain(module.parameters(), module.buffers())}
        taken_bytes, all_bytes = 0, sum(copy.nbytes for copy in self._copies.values())
        with self._degrading("use early copies of weights"):
            for path, identity in self._files.items():
                if _identity(os.stat(path)) != identity:
                    raise OSError(f"{path} has changed")
            places = _Mappings() if self._copies else None
            for weight in weights.values():
                if places is None or not is_plain(weight):
                    continue
                place = places.place_of(weight.data_ptr())
                copy = self._copies.get(place) if place is not None else None
                if copy is not None and copy.nbytes == weight.nbytes:
                    weight.data = self._copies.pop(place).view(weight.dtype).view(weight.shape)
                    taken_bytes += weight.nbytes
        if taken_bytes < all_bytes * _LEAST_TAKEN:
            log.warning(
                "weights.early_unused Only %.1f of %.1f GB that were copied to the GPU early were used: the model has "
                "other weights than its files.",
                taken_bytes / 1e9,
                all_bytes / 1e9,
            )
        self.drop()

    def drop(self) -> None:
        """Stop the copying, and free the copies that no weight has taken."""
        self._stop.set()
        self._wait()
        self._copies.clear()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._readers.shutdown()
        for chunk in self._chunks:
            chunk.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    @contextlib.contextmanager
    def _degrading(self, what: str) -> Iterator[None]:
        """A failure costs only speed."""
        try:
            yield
        except Exception as error:
            log.info("weights.early_failed Could not %s, so they load later: %s", what, error)


def use_first(device: torch.device) -> None:
    """Call once, in bf16, what diffusion models and language models call: products, attention, convolutions, norms.

    Each takes 5 to 100 ms the first time, for libraries and kernels that CUDA loads then.
    """
    import torch
    from torch.nn import functional

    with torch.inference_mode():
        tokens = torch.zeros(512, 4096, device=device, dtype=torch.bfloat16)
        exact, heads = tokens.float(), tokens.view(1, 512, 64, 64).transpose(1, 2)
        picture = tokens.view(1, 512, 64, 64)
        weight = tokens.new_zeros(4096, 4096)
        functional.linear(tokens, weight, weight[0])
        functional.linear(tokens, weight)
        functional.linear(exact[:8], exact)
        functional.embedding(torch.zeros(1, 4, device=device, dtype=torch.long), weight)
        for mask in (None, tokens.new_zeros(1, 64, 512, 512)):
            functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        for each in (picture, picture.float()):
            functional.conv2d(each, each.new_zeros(512, 512, 3, 3), padding=1)
        functional.group_norm(picture, 32)
        functional.interpolate(picture, scale_factor=2.0)
        functional.layer_norm(tokens, (4096,))
        functional.gelu(functional.silu(tokens), approximate="tanh")
        exact.softmax(-1).mul(torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
        torch.where(exact > 0, torch.log(exact), torch.min(exact, exact)).reciprocal()
        torch.cat([tokens, tokens]).argmax(-1)
        torch.randn(4, device=device).sin().cos().exp().sigmoid().cpu()


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor on the CPU is its memory's bytes and nothing else."""
    import torch

    is_usual = type(weight) in (torch.nn.Parameter, torch.Tensor) and weight.is_cpu and weight.layout is torch.strided
    is_odd = weight.is_quantized or weight.is_nested or weight.is_conj() or weight.is_neg()
    return is_usual and not is_odd and weight.is_contiguous()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _end(chunk: _Chunk, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    chunk.close()


class _Mappings:
    """Which files this process has mapped where, without those that it wrote to in memory."""

    def __init__(self) -> None:
        found = _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
        unchanged = [(begin, end, offset, path) for begin, end, offset, path, changed in found if not int(changed)]
        self._found = sorted((int(b, 16), int(e, 16), int(o, 16), os.fsdecode(path)) for b, e, o, path in unchanged)

    def place_of(self, address: int) -> _Place | None:
        """The file and the offset that are mapped to `address`."""
        number = bisect_right(self._found, (address, sys.maxsize)) - 1
        if number < 0:
            return None
        begin, end, offset, path = self._found[number]
        return (path, offset + address - begin) if address < end else None
