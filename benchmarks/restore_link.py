"""How fast is a large key restored over a link of limited rate, verification and unpacking included?

    python benchmarks/restore_link.py --rounds 5

A key of 300 MB is restored from a static S3 server through a link of 2 Gbit/s (a network namespace
and tc) into a file system in memory, in turns with plain parallel GETs of the same objects (boto3, as many threads,
ranges of 8 MB, bytes thrown away). Each is a process of its own. Exits with 1 unless each shape but the last is
restored at 80 % of the plain rate at least (medians), and each in no more than 256 MB of memory over what a process
with the same imports has. Needs Linux and root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1]))

from containers import CREDENTIALS, KEY, Artifact, open_cache, packs_in
from link import limited_link, run_inside, static_s3_server
from table import markdown, spread

from compile_cache.storage.pack.format import Source, write_pack
from compile_cache.storage.stores.base import StoredObject, open_url
from compile_cache.storage.stores.local import LocalStore
from compile_cache.storage.stores.transfer import in_daemon_threads

RATE_BAR = 0.8
MEMORY_BAR_MB = 256
_PLAIN_RANGE_BYTES = 8 << 20
_MB = 1_000_000
# A file system in memory, where there is one: what a disk adds depends on the disk, and on what was deleted there last.
_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True, slots=True)
class Shape:
    """How the bytes of a key lie in its packs."""

    name: str
    packs: int  # 0: as a publisher cuts them
    file_bytes: int
    rate_bar: float = RATE_BAR


SHAPES = (
    Shape("one pack", 1, 1 << 20),
    Shape("five packs", 5, 1 << 20),
    Shape("as published", 0, 1 << 20),
    Shape("one pack, small files", 1, 32 << 10, rate_bar=0.0),  # what files cost, whoever writes them
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One process: what it did, how long it took, what it read, and its peak of memory."""

    shape: str
    work: str
    seconds: float
    stored_bytes: int
    unpacked_bytes: int
    files: int
    peak_bytes: int

    @property
    def mb_per_s(self) -> float:
        """As stored."""
        return self.stored_bytes / self.seconds / _MB


def write_shape(shape: Shape, bucket: Path, folder: Path, size_bytes: int) -> None:
    """Packs of this shape, `size_bytes` together as stored, below `bucket`."""
    store = LocalStore(bucket)
    cache = open_cache(store, folder)
    target = bucket / KEY.prefix
    target.mkdir(parents=True)
    noise = _Mixture(random.Random(shape.name))
    number = stored_bytes = 0
    while stored_bytes < size_bytes * 0.99:
        # A publisher stages all at once; a pack of a given size needs a probe or two to be filled.
        share_bytes = (size_bytes - stored_bytes) if shape.packs == 0 else size_bytes // shape.packs
        sources = []
        for _ in range(round(share_bytes * _Mixture.RATIO / shape.file_bytes)):
            key = Artifact(f"{number % 256:02x}/c{number:08d}.so", "", shape.file_bytes).key
            local = cache.directory.path / key
            local.parent.mkdir(exist_ok=True)
            local.write_bytes(noise.take(shape.file_bytes))
            sources.append(Source(local, key, key))
            number += 1
        packs = cache.stage() if shape.packs == 0 else [write_pack(folder, KEY, sources, "benchmark")]
        for pack in packs:
            os.replace(pack.local, target / pack.name)
            stored_bytes += pack.stored_bytes
        for source in sources:
            source.local.unlink()
        if shape.packs == 0:
            break


class _Mixture:
    """Bytes that zstd stores in little more than half the room, as kernels and pickled graphs: noise and words."""

    RATIO = 1.73

    def __init__(self, source: random.Random) -> None:
        words = [source.randbytes(source.randint(2, 9)).hex()[:-1] for _ in range(4000)]
        self._text = " ".join(source.choices(words, k=2_000_000)).encode()
        self._source = source

    def take(self, size_bytes: int) -> bytes:
        """The next bytes: two in five are noise."""
        parts = []
        while size_bytes > 0:
            start = self._source.randrange(len(self._text) - 9830)
            parts += [self._source.randbytes(6554), self._text[start : start + 9830]]
            size_bytes -= 16384
        return b"".join(parts)[: size_bytes or None]


def restore(store_url: str, folder: Path) -> Measured:
    """Fetch and install the key, as a boot does, in this process."""
    store = open_url(store_url)
    cache = open_cache(store, folder)
    started = time.perf_counter()
    fetched = cache.restore()
    seconds = time.perf_counter() - started
    if fetched.refused:
        raise SystemExit(f"refused: {fetched.refused}")
    unpacked_bytes = sum((cache.directory.path / path).stat().st_size for path in cache.directory.scan())
    return Measured("", "restore", seconds, fetched.stored_bytes, unpacked_bytes, len(fetched.files), _peak_bytes())


def get_plainly(store_url: str) -> Measured:
    """List, and get all objects in ranges on as many threads, in this process."""
    store = open_url(store_url)
    started = time.perf_counter()
    entries = packs_in(store)

    def get(part: tuple[StoredObject, int]) -> None:
        entry, start = part
        wanted = min(_PLAIN_RANGE_BYTES, entry.size_bytes - start)
        if len(store.read(entry.name, start, wanted)) != wanted:
            raise SystemExit(f"{entry.name} is cut short")

    in_daemon_threads(get, [(e, start) for e in entries for start in range(0, e.size_bytes, _PLAIN_RANGE_BYTES)])
    seconds = time.perf_counter() - started
    return Measured("", "plain GETs", seconds, sum(entry.size_bytes for entry in entries), 0, 0, _peak_bytes())


def do_nothing(store_url: str) -> Measured:
    """List the store, and no more: the memory that imports and a client take."""
    packs_in(open_url(store_url))
    return Measured("", "nothing", 0.0, 0, 0, 0, _peak_bytes())


def _peak_bytes() -> int:
    """proc(5): VmHWM. Not ru_maxrss, in which a process begins with that of its parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


def measure(work: str, store_url: str) -> Measured:
    """One measurement, in this process."""
    if work == "restore":
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            return restore(store_url, Path(folder))
    return get_plainly(store_url) if work == "plain" else do_nothing(store_url)


def measure_all(shapes: Sequence[Shape], size_bytes: int, rounds: int, rate: str) -> Iterator[Measured]:
    """Each shape in each round: plain GETs, restore, and a process that does neither. The first round is not measured:
    it makes the machine's memory and page cache ready for all the others alike."""
    with tempfile.TemporaryDirectory(dir=_FOLDER) as folder, limited_link(rate) as link:
        for number, shape in enumerate(shapes):
            write_shape(shape, Path(folder, "served", f"shape-{number}"), Path(folder, "made"), size_bytes)
        with static_s3_server(Path(folder, "served"), link.server) as endpoint_url:
            for turn in range(rounds + 1):
                for number, shape in enumerate(shapes):
                    for work in ("plain", "restore", "nothing"):
                        command = [sys.executable, __file__, "--work", work, f"s3://shape-{number}"]
                        environ = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL_S3": endpoint_url}
                        line = run_inside(link, command, environ).splitlines()[-1]
                        if turn:
                            yield Measured(**{**json.loads(line), "shape": shape.name})


def is_good(shape: Shape, measured: Sequence[Measured]) -> bool:
    """Whether one shape met its bars."""
    share, memory_mb = summary([m for m in measured if m.shape == shape.name])
    return share >= shape.rate_bar and memory_mb <= MEMORY_BAR_MB


def summary(measured: Sequence[Measured]) -> tuple[float, float]:
    """Of one shape: the restore's rate as a share of the plain one, and the memory that it took, in MB."""
    rate = {work: median(m.mb_per_s for m in measured if m.work == work) for work in ("restore", "plain GETs")}
    peak = {work: max(m.peak_bytes for m in measured if m.work == work) for work in ("restore", "nothing")}
    return rate["restore"] / rate["plain GETs"], (peak["restore"] - peak["nothing"]) / _MB


def table(shapes: Sequence[Shape], measured: Sequence[Measured]) -> str:
    """A line a shape."""
    header = ["key", "n", "stored, MB", "unpacked, MB", "files", "plain GETs, MB/s", "restore, MB/s", "restore, s"]
    header += ["restore / plain", "bar", "peak memory over baseline, MB", "bar"]
    rows = []
    for shape in shapes:
        of_shape = [m for m in measured if m.shape == shape.name]
        restores = [m for m in of_shape if m.work == "restore"]
        share, memory_mb = summary(of_shape)
        one = restores[0]
        row = [shape.name, len(restores), f"{one.stored_bytes / _MB:.0f}", f"{one.unpacked_bytes / _MB:.0f}", one.files]
        row += [spread([m.mb_per_s for m in of_shape if m.work == "plain GETs"], 0)]
        row += [spread([m.mb_per_s for m in restores], 0), spread([m.seconds for m in restores]), f"{share:.2f}"]
        rows.append([*row, shape.rate_bar or "–", f"{memory_mb:.0f}", MEMORY_BAR_MB])
    return markdown(header, rows)


def main() -> int:
    """Measure, print each process as a line of JSON, and a table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rate", default="2gbit")
    parser.add_argument("--shape", type=int, action="append", choices=range(len(SHAPES)))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(asdict(measure(*arguments.work))))
        return 0
    if os.geteuid() != 0:
        print("restore_link.py makes a network namespace, and needs root for it")
        return 1
    shapes = [SHAPES[number] for number in arguments.shape or range(len(SHAPES))]
    measured = []
    for one in measure_all(shapes, arguments.megabytes * _MB, arguments.rounds, arguments.rate):
        measured.append(one)
        print(json.dumps(asdict(one)), flush=True)
    print(table(shapes, measured))
    return 0 if all(is_good(shape, measured) for shape in shapes) else 1


if __name__ == "__main__":
    sys.exit(main())
