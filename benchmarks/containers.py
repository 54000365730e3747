"""Simulated containers: what the soaks share. A fake compile, a cache over a store, and a store that counts.

Nothing here imports torch: a publisher stages what is handed over, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import PackError, StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import detect_environment
from compile_cache.storage.directory import CacheDirectory, logical_key
from compile_cache.storage.fetch import Fetched, PacksOfKey, fetch, install
from compile_cache.storage.pack.format import PACK_NAME, Pack
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules, verify_pack
from compile_cache.storage.stores.base import ObjectStore, StoredObject
from compile_cache.storage.stores.local import LocalStore

KEY = CacheKey("environment", "model", "version")
ENVIRONMENT = detect_environment("/tmp/compile-cache/0", "", {})
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server(*buckets: str) -> Iterator[None]:
    """An S3 server with these buckets, which boto3 finds by its variables in this process and in those that it starts;
    it lasts as long as the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{port}")
    import boto3

    command = [Path(sys.executable).with_name("moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            for bucket in buckets:
                boto3.client("s3").create_bucket(Bucket=bucket)
            yield
        finally:
            server.kill()


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a compile writes: its logical key, and its folder where the content names the file."""

    key: str
    folder: str
    size_bytes: int

    def path(self, content: bytes) -> str:
        """Where Inductor or Triton would write `content`."""
        return f"{self.folder}/{hashlib.sha256(content).hexdigest()[:40]}" if self.folder else self.key


def graph(name: str, size_bytes: int) -> tuple[Artifact, ...]:
    """What compiling one graph writes, of `size_bytes` together: its entries, its wrapper and its kernels."""
    key = hashlib.sha256(name.encode()).hexdigest()
    triton = f"triton/{key[:40].upper()}"
    return (
        Artifact(f"fxgraph/f{key}", f"fxgraph/{key[:2]}/f{key}", size_bytes // 2),
        Artifact(f"aotautograd/a{key}", f"aotautograd/a{key}", size_bytes // 8),
        Artifact(f"{key[2:4]}/c{key[:40]}.py", "", size_bytes // 8),
        Artifact(f"{triton}/triton_poi_fused_0.cubin", "", size_bytes // 8),
        Artifact(f"{triton}/triton_red_fused_1.cubin", "", size_bytes // 8),
    )


def compile_missing(folder: Path, artifacts: Iterable[Artifact], seed: int) -> int:
    """Write those artifacts whose logical keys `folder` does not have, with bytes, and so names, of this seed's own;
    how many."""
    there = {logical_key(path) for path in files_in(folder)}
    missing = [artifact for artifact in artifacts if artifact.key not in there]
    source = random.Random(seed)
    for artifact in missing:
        content = make_content(artifact.key, artifact.size_bytes, source)
        file = folder / artifact.path(content)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return len(missing)


def make_content(key: str, size_bytes: int, source: random.Random) -> bytes:
    """Bytes that tell what they are for, and whether they are whole; half noise, so that zstd halves them."""
    noise = source.randbytes(size_bytes // 2)
    text = (key.encode() + b"\n") * (size_bytes // 2 // len(key) + 1)
    content = key.encode() + b"\n" + noise + text[: size_bytes // 2]
    return content + hashlib.sha256(content).digest()


def is_right(path: str, content: bytes) -> bool:
    """Whether `content` is what some compile wrote at `path`: for this logical key, whole, and under its own name."""
    body, digest = content[:-32], content[-32:]
    key = logical_key(path)
    is_whole = hashlib.sha256(body).digest() == digest and body.startswith(key.encode() + b"\n")
    is_named = key == path or path.endswith("/" + hashlib.sha256(content).hexdigest()[:40])
    return is_whole and is_named


def files_in(folder: Path) -> Iterator[str]:
    """Every file below `folder`, by its path inside it."""
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class Cache:
    """A container's own: what it publishes, and its directory."""

    publication: Publication

    @property
    def directory(self) -> CacheDirectory:
        """The cache directory."""
        return self.publication.directory

    def restore(self) -> Fetched:
        """Fetch and install the key."""
        fetched = fetch(self.publication.packs, self.directory.inbox)
        install(fetched, self.directory)
        return fetched

    def hand_over(self) -> None:
        """Let everything be published that was not restored, as if a compiler had just finished it."""
        self.directory.ledger.hand_over(self.directory.ledger.appeared())

    def stage(self) -> Sequence[Pack]:
        """Packs of all that."""
        self.hand_over()
        return self.publication.stage(self.directory.ledger.ready(), "the benchmark")

    def publish(self) -> None:
        """Put them."""
        for pack in self.stage():
            self.publication.publish(pack)


def open_cache(store: ObjectStore, root: Path, key: CacheKey = KEY) -> Cache:
    """A container's cache, with its own directory below `root`."""
    packs = PacksOfKey(store, key, Rules())
    return Cache(Publication(store, packs, ENVIRONMENT, CacheDirectory.claim(root)))


def restored_keys(store: ObjectStore, root: Path, key: CacheKey = KEY) -> tuple[set[str], list[str]]:
    """What the next container restores: its logical keys, and a line for each thing that is not as it should be."""
    cache = open_cache(store, root, key)
    problems = [f"{pack.name} is refused: {pack.reason}" for pack in cache.restore().refused]
    folder = cache.directory.path
    paths = list(files_in(folder))
    problems += [f"{path} is wrong" for path in paths if not is_right(path, (folder / path).read_bytes())]
    return {logical_key(path) for path in paths}, problems


class CountingStore:
    """Another store, and how many bytes were put into it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.uploaded_bytes = 0
        self._lock = threading.Lock()

    @contextmanager
    def watch(self, method: str, name: str, content: Path | bytes = b"") -> Iterator[None]:
        """What surrounds a call: count its bytes when it ends; one that failed may have sent them too."""
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        try:
            yield
        finally:
            with self._lock:
                self.uploaded_bytes += size_bytes

    @property
    def location(self) -> str:
        """The other store's."""
        return self._store.location

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """Watched, as one call: a page holds a thousand objects."""
        with self.watch("list", ""):
            return self._store.list(prefix)

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """Watched."""
        with self.watch("read", name):
            return self._store.read(name, start, size_bytes)

    def put(self, name: str, content: Path | bytes) -> None:
        """Watched."""
        with self.watch("put", name, content):
            self._store.put(name, content)

    def delete(self, name: str) -> None:
        """Watched."""
        with self.watch("delete", name):
            self._store.delete(name)


def damaged(store: ObjectStore, packs: Iterable[StoredObject]) -> list[str]:
    """A line for each pack that does not verify."""
    found = []
    for entry in packs:
        try:
            verify_pack(store, entry, Rules())
        except (PackError, StoreError) as error:
            found.append(f"{entry.name} does not verify: {error}")
    return found


def check_store(folder: Path, promised: set[tuple[str, str]]) -> list[str]:
    """A line for each pack that does not verify, and for each file that is gone: its pack's folder and logical key are
    `promised`, to which those that are there are added."""
    store, found = LocalStore(folder), set[tuple[str, str]]()
    packs = packs_below(store, "")
    problems = damaged(store, packs)
    for entry in packs:
        with suppress(PackError, StoreError):
            manifest = verify_pack(store, entry, Rules()).manifest
            found |= {(entry.name.rpartition("/")[0], file.key) for file in manifest.files}
    problems += [f"{path} was published, and is gone" for _, path in sorted(promised - found)]
    promised |= found
    return problems


def packs_below(store: ObjectStore, prefix: str = KEY.prefix) -> Collection[StoredObject]:
    """The packs listed below a prefix."""
    return [entry for entry in store.list(prefix) if PACK_NAME.fullmatch(entry.name.rpartition("/")[2])]
