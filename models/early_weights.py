"""Copies a model's weights to the GPU while Python still imports. It needs torch and safetensors: copy the file.

    with EarlyWeights(folder) as early:       # before torch is imported: reads what is not in memory yet
        import torch
        early.begin(torch.device("cuda", 0))  # a thread copies while the rest is imported
        from diffusers import FluxPipeline
        pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
        early.give(pipe.components.values())  # each weight takes its copy
        pipe.to("cuda")                       # the rest

`from_pretrained` maps the files into memory and reads almost nothing. Which weight is which is told by its place: the
file and the offset that its memory is mapped from. What has no copy is left to the caller. No file may be cut short
meanwhile, as for any mapping of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import mmap
import os
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_METADATA = "__metadata__"  # a file's only entry that is no tensor
# Two chunks are pinned at a time, and few are read ahead, so that a limit of memory below the weights' size works. A
# disk reads about 24 while torch is imported.
_CHUNK_BYTES = 256 << 20
_AHEAD = 24
_READERS = 8
_READ_BYTES = 32 << 20
# What copies of weights leave free on the GPU, for predictions and for the second process.
_SPARE_BYTES = 4 << 30
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_LEAST_TAKEN = 0.9
# A private mapping of a file in proc_pid_smaps(5) that nobody has written to: addresses, offset and path.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..[-x]p ([0-9a-f]+) \S+ \d+ +(/[^\\\n]*)\n"
    rb"(?:\w+:.*\n)*?Anonymous: +0 kB\n(?:\w+:.*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)
_DELETED = b" (deleted)"


def read_header(path: Path) -> dict[str, tuple[str, int, int]]:
    """The tensors of a safetensors file by name: type, first byte and number of bytes in the file.

    https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON, then the tensors without gaps.

    Raises:
        OSError: there is no such file.
        ValueError: it is cut short or damaged.
    """
    try:
        with safe_open(path, framework="numpy"):  # checks the whole header, and that it fits the file's size
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); download it again") from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
    places = {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in entries.items() if name != _METADATA}
    return {name: (dtype, start + begin, end - begin) for name, (dtype, begin, end) in places.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained` reads of a model's or pipeline's folder, if each part has one file
    or one index, and the files are there; else none. It quantizes or unpickles others, on the CPU and in memory."""
    found: list[Path] = []
    for part in _parts(folder):
        single = [part / name for name in _SINGLE_FILES if (part / name).is_file()]
        indexes = list(part.glob("*.safetensors.index.json"))
        is_quantized = "quantization_config" in json.loads((part / "config.json").read_text())
        if is_quantized or len(single) + len(indexes) != 1:
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
    named = [name for name, value in json.loads(index.read_text()).items() if isinstance(value, list) and any(value)]
    return [folder / name for name in named if (folder / name / "config.json").is_file()]


def local_folder(model: str, revision: str | None) -> Path | None:
    """A folder, or the hub's local copy of `model`, if there is one."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub.constants import HF_HUB_CACHE  # imported alone, it takes milliseconds

    cached, commit = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}"), revision or "main"
    with contextlib.suppress(OSError, ValueError):
        commit = (cached / "refs" / commit).read_text().strip()
    folder = cached / "snapshots" / commit
    return folder if re.fullmatch(r"[\w-]+", commit) and os.path.isdir(folder) else None


# Real path and offset of a tensor's first byte.
_Place = tuple[str, int]
# Number of a tensor, its byte where the piece begins, the same in the file, and how many bytes.
_Piece = tuple[int, int, int, int]


class _Chunk:
    """Consecutive pieces of a file, mapped for the time of their copying."""

    def __init__(self, path: str, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self._path = path
        self._begin = pieces[0][2] // mmap.PAGESIZE * mmap.PAGESIZE
        self._size = pieces[-1][2] + pieces[-1][3] - self._begin
        self._address = 0
        self._is_registered = False
        self._copied: torch.cuda.Event | None = None

    def read(self, is_stopped: threading.Event) -> None:
        """Map the pieces. Read them, if they are not all in memory.

        Raises:
            OSError: the file cannot be read or mapped.
        """
        if is_stopped.is_set():
            return
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            address = _libc().mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, file, self._begin)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap failed", self._path)
            self._address = address
            if self._is_in_memory():
                return
            buffer = mmap.mmap(-1, _READ_BYTES)  # a bytearray would be filled while imports wait
            for offset in range(self._begin, self._begin + self._size, _READ_BYTES):
                if not is_stopped.is_set():
                    os.preadv(file, [buffer], offset)
        finally:
            os.close(file)

    def _is_in_memory(self) -> bool:
        """For a file that others own, mincore always says so."""
        pages = ctypes.create_string_buffer(-(-self._size // mmap.PAGESIZE))
        is_told = os.access(self._path, os.W_OK) and _libc().mincore(self._address, self._size, pages) == 0
        return is_told and b"\0" not in pages.raw

    def copy(self, targets: list[torch.Tensor]) -> bool:
        """Begin to copy the pieces into `targets`, which hold bytes. Returns whether the file's memory was pinned. If a
        sandbox refuses that, they go through pinned memory that torch keeps, about 1 GB, and take the CPU's time."""
        import torch

        memory = torch.frombuffer((ctypes.c_uint8 * self._size).from_address(self._address), dtype=torch.uint8)
        memory = memory[self.pieces[0][2] - self._begin :]
        if targets[0].is_cuda:
            error = torch.cuda.cudart().cudaHostRegister(self._address, self._size, _READ_ONLY)
            self._is_registered = not int(error)
            with contextlib.suppress(RuntimeError):  # else through the driver's memory, which takes longer
                memory = memory if self._is_registered else memory.pin_memory()
        sources = memory.split_with_sizes([count for *_, count in self.pieces])
        torch._foreach_copy_(targets, list(sources), non_blocking=True)
        if targets[0].is_cuda:
            self._copied = torch.cuda.current_stream(targets[0].device).record_event()
        return self._is_registered

    def close(self) -> None:
        """Release the memory, once the copying has ended."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()
        if self._is_registered:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_registered = False
        if self._address:
            _libc().munmap(self._address, self._size)
            self._address = 0


@functools.cache
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

    def __init__(self, folder: Path | None, dtype: str = "bfloat16", chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Begin to read files that are not in memory.

        folder: None, or one that needs a cast to `dtype` (such as "float16"), or whose weights transformers makes into
            others: no copies.
        """
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._files: dict[str, tuple[int, ...]] = {}
        # Place and number of bytes of each tensor, and its copy once there is one.
        self._tensors: list[tuple[_Place, int]] = []
        self._copies: dict[_Place, torch.Tensor] = {}
        self._chunks: list[_Chunk] = []
        self._reading: deque[Future[None]] = deque()
        self._readers = ThreadPoolExecutor(_READERS, "read weights")
        with self._degrading("plan early copies of weights"):
            self._chunks = self._plan(weight_files(folder), _DTYPE_NAMES[dtype], chunk_bytes) if folder else []
            if self._chunks:
                # It takes up to 1 s, in which torch lets no other thread run. It reads CUDA's variables.
                os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
                self._readers.submit(lambda: ctypes.CDLL("libcuda.so.1").cuInit(0))
            for number in range(_AHEAD):
                self._read_ahead(number)

    def __enter__(self) -> EarlyWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def _plan(self, paths: list[Path], dtype: str, chunk_bytes: int) -> list[_Chunk]:
        """The chunks of these files; none if a weight is cast, or if transformers makes one of all experts' weights."""
        headers = {os.path.realpath(path): read_header(path) for path in paths}
        for header in headers.values():
            for name, (kind, _, _) in header.items():
                if ".experts." in name or ("F" in kind and kind != dtype):
                    return []
        chunks = []
        for path, header in headers.items():
            self._files[path] = _identity(os.stat(path))
            pieces: list[_Piece] = []
            for offset, count in sorted((offset, count) for _, offset, count in header.values() if count):
                for begin in range(0, count, chunk_bytes):
                    piece = (len(self._tensors), begin, offset + begin, min(chunk_bytes, count - begin))
                    if pieces and piece[2] + piece[3] - pieces[0][2] > chunk_bytes:
                        chunks.append(_Chunk(path, pieces))
                        pieces = []
                    pieces.append(piece)
                self._tensors.append(((path, offset), count))
            if pieces:
                chunks.append(_Chunk(path, pieces))
        return chunks

    def _read_ahead(self, number: int) -> None:
        if number < len(self._chunks):
            self._reading.append(self._readers.submit(self._chunks[number].read, self._stop))

    def begin(self, device: torch.device) -> None:
        """Copy on a thread, if `device` has room for all weights and 4 GiB more, and load what models use first.

        Call it once torch is imported.
        """
        if self._reading and self._thread is None:
            with self._degrading("copy weights early"):
                thread = threading.Thread(target=self._run, args=(device,), name="early weights")
                thread.start()
                self._thread = thread

    @property
    def has_copies(self) -> bool:
        """Whether copies are there, or on their way. Otherwise the caller had better load to the device at once."""
        is_copying = self._thread is not None and self._thread.is_alive()  # asked first: it may end meanwhile
        return is_copying or bool(self._copies)

    def _run(self, device: torch.device) -> None:
        import torch

        with self._degrading("copy weights early"):
            if device.type != "cuda":
                self._copy(device)
            elif torch.cuda.is_available():
                with torch.cuda.device(device):
                    self._copy(device)

    def _copy(self, device: torch.device) -> None:
        """Copy all chunks, while the next ones are read, and at most two at a time."""
        import torch

        began = time.perf_counter()
        sizes = [count for _, count in self._tensors]
        on_gpu = device.type == "cuda"
        if on_gpu and not gpu_has_room(sum(sizes)):
            return
        # torch's allocator splits up this one large block. One call, instead of thousands that wait for the thread that
        # imports, makes all tensors, each with memory of its own.
        torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if on_gpu:  # nobody waits for it; after the last copy, it would take its time from the warm-up
            threading.Thread(target=self._degrading("load libraries early")(use_first), args=(device,)).start()
        one_byte = torch.empty(1, dtype=torch.uint8, device=device)
        copies = torch.split_with_sizes_copy(one_byte.expand(sum(sizes)), sizes)
        copying: deque[_Chunk] = deque()
        try:
            for number, chunk in enumerate(self._chunks):
                self._reading.popleft().result()
                if self._stop.is_set():
                    return
                targets = [
                    copies[tensor] if count == sizes[tensor] else copies[tensor][begin : begin + count]
                    for tensor, begin, _, count in chunk.pieces
                ]
                is_pinned = chunk.copy(targets)
                copying.append(chunk)
                if len(copying) > 1:
                    copying.popleft().close()
                self._read_ahead(number + _AHEAD)
        finally:
            for chunk in copying:
                chunk.close()
        self._copies = {place: copy for (place, _), copy in zip(self._tensors, copies, strict=True)}
        seconds = time.perf_counter() - began
        log.info("weights.early gb=%.1f seconds=%.2f pinned=%s", sum(sizes) / 1e9, seconds, is_pinned)

    def give(self, modules: Iterable[Any]) -> None:
        """Let each weight of `modules` that is mapped from a file and was not changed since take its copy; free the
        other copies. Weights without one stay on the CPU."""
        import torch

        self._finish()
        with self._degrading("use early copies of weights"):
            found = [module for module in modules if isinstance(module, torch.nn.Module)]
            weights = {id(weight): weight for one in found for weight in chain(one.parameters(), one.buffers())}
            for path, identity in self._files.items():
                if self._copies and _identity(os.stat(path)) != identity:
                    raise OSError(f"{path} has changed")
            taken_bytes, all_bytes = 0, sum(copy.nbytes for copy in self._copies.values())
            place_of = _mappings() if self._copies else lambda address, count: None
            for weight in filter(is_plain, weights.values()):
                place = place_of(weight.data_ptr(), weight.nbytes)
                if place in self._copies and self._copies[place].nbytes == weight.nbytes:
                    weight.data = self._copies.pop(place).view(weight.dtype).view(weight.shape)
                    taken_bytes += weight.nbytes
            if taken_bytes < all_bytes * _LEAST_TAKEN:
                log.warning(
                    "weights.early_unused Only %.3f of %.3f GB that were copied to the GPU early were used: the model "
                    "has other weights than its files.",
                    taken_bytes / 1e9,
                    all_bytes / 1e9,
                )
        self._copies.clear()

    def drop(self) -> None:
        """Stop the copying, and free the copies that no weight has taken."""
        self._stop.set()
        self._finish()
        self._copies.clear()

    def _finish(self) -> None:
        """Wait for the copying, and end all reading."""
        if self._thread is not None:
            self._thread.join()
        self._stop.set()
        self._readers.shutdown()
        for chunk in self._chunks:
            chunk.close()

    @contextlib.contextmanager
    def _degrading(self, what: str) -> Iterator[None]:
        """A failure costs only speed."""
        try:
            yield
        except Exception as error:  # the first line only: torch adds many, and a record would keep all copies alive
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            log.info("weights.early_failed Could not %s, so they load later. %s", what, reason)


def gpu_has_room(size_bytes: int) -> bool:
    """Whether the GPU has room for copies of weights, and 4 GiB beside them."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes > size_bytes + _SPARE_BYTES


def use_first(device: torch.device) -> None:
    """Call once, in bf16, what diffusion models, language models and comparisons of their answers call.

    Each takes 5 to 100 ms the first time, for libraries and kernels that CUDA loads then.
    """
    import torch
    from torch.linalg import vector_norm as norm
    from torch.nn import functional

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


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a tensor on the CPU is its memory's bytes and nothing else."""
    import torch

    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or not weight.is_cpu:
        return False
    is_odd = weight.is_quantized or weight.is_nested or weight.is_conj() or weight.is_neg()
    return weight.layout is torch.strided and not is_odd and weight.is_contiguous()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _mappings() -> Callable[[int, int], _Place | None]:
    """A function of an address and a number of bytes: the file and offset that they are mapped from and unchanged."""
    found = _MAPPING.findall(Path("/proc/self/smaps").read_bytes())
    kept = [(*(int(part, 16) for part in parts), os.fsdecode(path)) for *parts, path in found if path[-10:] != _DELETED]
    kept.sort()

    def place_of(address: int, count: int) -> _Place | None:
        number = bisect_right(kept, (address, sys.maxsize)) - 1
        if number < 0:
            return None
        begin, end, offset, path = kept[number]
        return (path, offset + address - begin) if address + count <= end else None

    return place_of
