"""Copies a model's weights to the GPU while Python still imports.

`from_pretrained` maps the files into memory and reads almost nothing. Which weight is which is told by its place: the
file and the offset that its memory is mapped from. What has no copy is left to the caller. No file may be cut short
meanwhile, as for any mapping of it, or be written through another mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import re
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_cache.errors import log
from compile_cache.weights.weight_files import StoredTensor, Weights, find_files, read_header

if TYPE_CHECKING:
    import torch

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
_LARGE_BYTES = 1 << 20
# A private mapping of a file in proc_pid_smaps(5) that nobody has written to: addresses, offset and path.
_MAPPING = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) ..[-x]p ([0-9a-f]+) \S+ \d+ +(/[^\\\n]*)\n"
    rb"(?:\w+:.*\n)*?Anonymous: +0 kB\n(?:\w+:.*\n)*?Swap: +0 kB\n",
    re.MULTILINE,
)
_DELETED = b" (deleted)"


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
        if targets[0].is_cuda:
            error = _cudart().cudaHostRegister(self._address, self._size, _READ_ONLY)
            self._is_registered = not int(error)
            with contextlib.suppress(RuntimeError):  # else through the driver's memory, which takes longer
                memory = memory if self._is_registered else memory.pin_memory()
        sizes, end = list[int](), self._begin
        for _, _, offset, count in self.pieces:  # what lies between them is not copied
            sizes += [offset - end, count]
            end = offset + count
        torch._foreach_copy_(targets, list(memory.split_with_sizes(sizes)[1::2]), non_blocking=True)
        if targets[0].is_cuda:
            self._copied = torch.cuda.current_stream(targets[0].device).record_event()
        return self._is_registered

    def close(self) -> None:
        """Release the memory, once the copying has ended."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()
        if self._is_registered:
            _cudart().cudaHostUnregister(self._address)
            self._is_registered = False
        if self._address:
            _libc().munmap(self._address, self._size)
            self._address = 0


def _cudart() -> Any:
    import torch

    cudart: Any = torch.cuda.cudart
    return cudart()


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return libc


class EarlyWeights:
    """The weights of files on their way to the GPU, until `drop` frees what is left of them.

    If something stands in its way, it copies nothing, says so in the log, and the caller loads as ever.
    """

    def __init__(self, model: str, weights: Weights, chunk_bytes: int = _CHUNK_BYTES) -> None:
        """Begin to read the files that `find_files` finds. If there are none yet, `begin` looks again."""
        self._model, self._weights, self._chunk_bytes = model, weights, chunk_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._device: torch.device | None = None
        self._files: dict[str, tuple[int, ...]] = {}
        # In the order of their places. The copy of each, once there is one, and how many of its bytes no weight has.
        self._tensors: dict[_Place, StoredTensor] = {}
        self._copies: dict[_Place, torch.Tensor] = {}
        self._left_bytes: dict[_Place, int] = {}
        self._all_bytes = self._copied_bytes = self._taken_bytes = 0
        self._why_not = "boot(weights=…) names no safetensors files that from_pretrained loads as they are"
        self._chunks: list[_Chunk] = []
        self._reading: dict[int, Future[None]] = {}  # by chunk
        self._readers = ThreadPoolExecutor(_READERS, "read weights")
        self._plan()

    def _plan(self) -> None:
        """Find the files and their chunks, and begin to read."""
        with self._degrading("plan early copies of weights"):
            chunks = self._chunks_of(find_files(self._model, self._weights))
            if chunks:
                # It takes up to 1 s, in which torch lets no other thread run. It reads CUDA's variables.
                os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does
                self._readers.submit(lambda: ctypes.CDLL("libcuda.so.1").cuInit(0))
            self._chunks = chunks
            for number in range(_AHEAD):
                self._read_ahead(number)

    def _chunks_of(self, paths: list[Path]) -> list[_Chunk]:
        """The chunks of these files, with the tensors that are loaded as they are there."""
        headers = {os.path.realpath(path): read_header(path) for path in paths}
        chunks: list[_Chunk] = []
        files, planned = {path: _identity(os.stat(path)) for path in headers}, dict[_Place, StoredTensor]()
        for path, tensors in headers.items():
            pieces: list[_Piece] = []
            for tensor in filter(lambda each: each.is_kept, tensors):
                for begin in range(0, tensor.size_bytes, self._chunk_bytes):
                    count = min(self._chunk_bytes, tensor.size_bytes - begin)
                    piece = (len(planned), begin, tensor.offset + begin, count)
                    if pieces and piece[2] + piece[3] - pieces[0][2] > self._chunk_bytes:
                        chunks.append(_Chunk(path, pieces))
                        pieces = []
                    pieces.append(piece)
                planned[path, tensor.offset] = tensor
            if pieces:
                chunks.append(_Chunk(path, pieces))
        self._files, self._tensors = files, planned
        if chunks:
            self._why_not = "boot.warm_up() or boot.weights.drop() was called before"
        self._all_bytes = sum(tensor.size_bytes for tensors in headers.values() for tensor in tensors)
        return chunks

    def _read_ahead(self, number: int) -> None:
        if number < len(self._chunks):
            self._reading[number] = self._readers.submit(self._chunks[number].read, self._stop)

    def begin(self, device: torch.device | None = None) -> None:
        """Copy on a thread to `device`, or to this thread's GPU, if it has room for all weights and 4 GiB more. Imports
        torch. What models use first is loaded, too."""
        if not self._weights or self._thread is not None or self._stop.is_set():
            return
        if device is None and not has_gpu():
            self._why_not = "there is no GPU"
            return
        if not self._chunks and self._why_not:  # else it failed
            self._plan()
        if self._reading:
            with self._degrading("copy weights early"):
                device = device or _current_gpu()
                copy = self._degrading("copy weights early")(self._copy)
                thread = threading.Thread(target=copy, args=(device,), name="early weights")
                thread.start()
                self._thread, self._device = thread, device

    @property
    def has_copies(self) -> bool:
        """Whether copies are there, or on their way. Otherwise the caller had better load to the device at once."""
        is_copying = self._thread is not None and self._thread.is_alive()  # asked first: it may end meanwhile
        return is_copying or bool(self._copies)

    def _copy(self, device: torch.device) -> None:
        """Copy all chunks, while the next ones are read, and at most two at a time."""
        import torch

        began = time.perf_counter()
        sizes = [tensor.size_bytes for tensor in self._tensors.values()]
        if on_gpu := device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        if on_gpu and not gpu_has_room(sum(sizes)):
            self._why_not = f"the GPU has no room for {sum(sizes) / 1e9:.1f} GB and 4 GiB beside them"
            return
        if sum(sizes) < self._all_bytes * _LEAST_TAKEN:
            log.info(
                "weights.cast Only %.3f of %.3f GB are copied early: from_pretrained casts weights in fp32, and merges "
                "those of experts. Save the model in the dtype that you load.",
                sum(sizes) / 1e9,
                self._all_bytes / 1e9,
            )
        # torch's allocator splits up this one large block. One call, instead of thousands that wait for the thread that
        # imports, makes all tensors, each with memory of its own.
        torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if on_gpu:  # nobody waits for it; after the last copy, it would take its time from the warm-up
            from compile_cache.calls.first_calls import use_first

            threading.Thread(target=self._degrading("load libraries early")(use_first), args=(device,)).start()
        one_byte = torch.empty(1, dtype=torch.uint8, device=device)
        split: Any = torch.split_with_sizes_copy
        copies: list[torch.Tensor] = split(one_byte.expand(sum(sizes)), sizes)
        copying: deque[_Chunk] = deque()
        try:
            for number, chunk in enumerate(self._chunks):
                self._reading.pop(number).result()
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
        self._copies = dict(zip(self._tensors, copies, strict=True))
        self._left_bytes = dict(zip(self._tensors, sizes, strict=True))
        self._copied_bytes, self._why_not = sum(sizes), ""
        seconds = time.perf_counter() - began
        log.info("weights.early gb=%.1f seconds=%.2f pinned=%s", sum(sizes) / 1e9, seconds, is_pinned)

    def give(self, modules: Iterable[Any]) -> None:
        """Let each unchanged weight of `modules` that is mapped from a file take its copy; the others stay on the CPU.
        Each large one of these frees one copy with as many numbers, because it may be a cast of that."""
        self._finish()
        if self._why_not:
            log.info("weights.not_early No copies were made early: %s.", self._why_not)
            self._why_not = ""
        if self._copies:
            with self._degrading("use early copies of weights"):
                return self._give(modules)
            self._copies.clear()  # it failed: the caller moves the weights

    def _give(self, modules: Iterable[Any]) -> None:
        """Let weights take their copies, and free those that the other weights may come from.

        Raises:
            OSError: a file has changed.
            RuntimeError: the copies are on another GPU.
        """
        import torch

        on_gpu = self._device is not None and self._device.type == "cuda"
        if on_gpu and self._device != _current_gpu():
            raise RuntimeError(f"they are on {self._device}, and this thread uses another GPU")
        found = [module for module in modules if isinstance(module, torch.nn.Module)]
        weights = {id(weight): weight for one in found for weight in chain(one.parameters(), one.buffers())}
        for path, identity in self._files.items():
            if _identity(os.stat(path)) != identity:
                raise OSError(f"{path} has changed")
        place_of, places, uncopied, uncopied_bytes = _mappings(), sorted(self._copies), Counter[int](), 0
        for weight in weights.values():
            size_bytes = weight.nbytes if weight.layout is torch.strided else 0  # a sparse one has none
            place = place_of(weight.data_ptr(), size_bytes) if is_plain(weight) else None
            if (copy := self._taken(places, place, size_bytes)) is not None:
                weight.data = copy.view(weight.dtype).as_strided(weight.shape, weight.stride())  # `.to` keeps strides
                self._taken_bytes += size_bytes
            elif weight.is_cpu and size_bytes >= _LARGE_BYTES:
                uncopied[weight.numel()] += 1
                uncopied_bytes += size_bytes
        for place in [*self._copies]:
            if uncopied[numel := self._tensors[place].numel] > 0:
                uncopied[numel] -= 1
                del self._copies[place]
        if on_gpu and self._copies and not gpu_has_room(uncopied_bytes):
            self._copies.clear()  # what moves now may be what became of them

    def _taken(self, places: list[_Place], place: _Place | None, size_bytes: int) -> torch.Tensor | None:
        """The copy of the bytes at a place, which may be a part of a tensor; None if there is none."""
        number = bisect_right(places, place) - 1 if place is not None else -1
        if place is None or number < 0 or (copy := self._copies.get(of := places[number])) is None:
            return None
        begin = place[1] - of[1]
        if of[0] != place[0] or begin + size_bytes > copy.nbytes:
            return None
        self._left_bytes[of] -= size_bytes
        if self._left_bytes[of] <= 0:
            del self._copies[of]
        return copy if size_bytes == copy.nbytes else copy[begin : begin + size_bytes].clone()

    def drop(self) -> None:
        """Stop the copying, and free the copies that no weight has taken: what loads next takes none."""
        self._stop.set()
        self._finish()
        self._copies.clear()
        self._copied_bytes = 0

    def end(self) -> None:
        """Free what is left, once all weights are on the GPU. Warn if many copies were of no use."""
        if self._taken_bytes < self._copied_bytes * _LEAST_TAKEN:
            log.warning(
                "weights.early_unused Only %.3f of %.3f GB that were copied to the GPU early were used. The other "
                "weights did not go through boot.to_gpu(), or were cast: load them in the dtype of their files.",
                self._taken_bytes / 1e9,
                self._copied_bytes / 1e9,
            )
        self.drop()

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
        except Exception as error:
            # The first line only: torch adds many, and a record would keep all copies alive.
            self._why_not = ""
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            log.info("weights.early_failed Could not %s, so they load later. %s", what, reason)


def has_gpu() -> bool:
    """Whether torch, which is imported for this, can use a GPU."""
    import torch

    return torch.cuda.is_available()


def _current_gpu() -> torch.device:
    """This thread's GPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def gpu_has_room(size_bytes: int) -> bool:
    """Whether the GPU has room for copies of weights, and 4 GiB beside them."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes > size_bytes + _SPARE_BYTES


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
    kept = [
        (int(begin, 16), int(end, 16), int(offset, 16), os.fsdecode(path))
        for begin, end, offset, path in found
        if path[-10:] != _DELETED
    ]
    kept.sort()

    def place_of(address: int, count: int) -> _Place | None:
        number = bisect_right(kept, (address, sys.maxsize)) - 1
        if number < 0:
            return None
        begin, end, offset, path = kept[number]
        return (path, offset + address - begin) if address + count <= end else None

    return place_of
