"""Stores with real packs of any age, for tests of what reads and tidies stores."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.pack.format import Source, write_pack
from compile_cache.storage.pack.signing import Signer
from compile_cache.storage.stores.base import ObjectStore

DAY_S = 86_400.0
ACTIONS: Mapping[str, Callable[[ObjectStore], object]] = {
    "list": lambda store: store.list("v3/"),
    "read": lambda store: store.read("v3/a", 0, 5),
    "put": lambda store: store.put("v3/a", b""),
    "delete": lambda store: store.delete("v3/a"),
}
GRAPH = {"fxgraph/ab/fgraph/one": b"a graph", "ab/kernel.so": b"\x7fELF" * 100}


def put_pack(
    store: ObjectStore,
    key: CacheKey,
    files: Mapping[str, bytes] = GRAPH,
    signer: Signer | None = None,
    creator: str = "the test",
) -> str:
    """Store a real pack under `key`; its name."""
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, (path, content) in enumerate(files.items()):
            local = Path(folder, str(number))
            local.write_bytes(content)
            sources.append(Source(local, path, path.rpartition("/")[0] if path.startswith("fxgraph/") else path))
        pack = write_pack(Path(folder), key, sources, creator, signer)
        store.put(key.prefix + pack.name, pack.local)
    return key.prefix + pack.name


def put_as_newest(store: ObjectStore, name: str, content: bytes) -> None:
    """Put an object again and again, until the store's own clock says that it is newer than all others: S3's has whole
    seconds."""
    others = [entry.modified_s for entry in store.list("") if entry.name != name]
    while True:
        store.put(name, content)
        (entry,) = store.list(name)
        if all(entry.modified_s > other for other in others):
            return
        time.sleep(0.02)


def put_record(store: ObjectStore, environment: Environment) -> None:
    """Store an environment's record where a boot puts it."""
    store.put(f"v3/{environment.digest}/environment.json", environment.to_json().encode())


def set_age(root: Path, name: str, days: float, now_s: float) -> None:
    """Make a local store's object, or all objects whose name begins with `name`, that old."""
    for path in root.rglob("*"):
        if path.is_file() and path.relative_to(root).as_posix().startswith(name):
            os.utime(path, (now_s - days * DAY_S,) * 2)


def flip_last(pack: bytes) -> bytes:
    """With another bit in its last frame, not in what is signed. The last bytes may be of a block that is empty."""
    return pack[:-8] + bytes([pack[-8] ^ 1]) + pack[-7:]


def damage(root: Path, name: str) -> None:
    """Change a bit of a local store's pack, as a bad disk does."""
    (root / name).write_bytes(flip_last((root / name).read_bytes()))
