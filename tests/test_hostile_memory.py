"""What a store holds decides neither how much memory a boot takes nor whether it survives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
from hostile_packs import OURS, assemble, digest, name_of

from compile_cache.key.cache_key import CacheKey
from compile_cache.store.local import LocalStore

MB = 1_000_000
MANIFEST_BYTES = 32 << 20

LOOK_AND_MEASURE = """
import sys
from pathlib import Path
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.signing import TrustedKeys
from compile_cache.store.base import Stores
from compile_cache.store.local import LocalStore
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.directory import CacheDirectory
from compile_cache.versions.rules import Rules

def peak_bytes():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) << 10

folder, *key = sys.argv[1:5]
store, directory = LocalStore(Path(folder, "store")), CacheDirectory.claim(Path(folder, "cache"))
rules = Rules(trusted=TrustedKeys(sys.argv[5:]))
def look(key):
    cache = CompileCache(Stores(store, store), key, None, directory, rules)
    cache.refresh()
    selection = cache.packs.select()
    if not selection.files:
        cache.fetch()
    return len(selection.files), len(selection.refused)
look(CacheKey("nothing", "is", "stored"))
before = peak_bytes()
print(*look(CacheKey(*key)), peak_bytes() - before)
"""


def look_and_measure(folder: Path, key: CacheKey, *trusted: str) -> tuple[int, int, int]:
    """Files that a process of its own would restore, packs that it refuses, and by how many bytes its memory grows at
    most. Where there is anything to restore, it is not written, because of the test's time."""
    command = [sys.executable, "-c", LOOK_AND_MEASURE, folder, *asdict(key).values(), *trusted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    files, refused, more_bytes = map(int, done.stdout.split())
    print(f"{files} files, {refused} refused, {more_bytes / MB:.1f} MB")
    return files, refused, more_bytes


def put(folder: Path, key: CacheKey, manifests: Iterable[bytes], signature: bytes = b"") -> None:
    store = LocalStore(folder / "store")
    for manifest in manifests:
        store.put(key.prefix + name_of(manifest), assemble(manifest, signature=signature))


def manifest_of(key: CacheKey, files: bytes, creator: str = "") -> bytes:
    record = {"key": asdict(key), "frames": [], "creator": creator, "created_s": 1.0, "files": "THE FILES"}
    return json.dumps(record).encode().replace(b'"THE FILES"', b"[" + files + b"]")


def wide(key: CacheKey, number: int) -> bytes:
    """As long as a manifest may be, of one letter, behind a character for which Python takes four bytes a letter."""
    manifest = manifest_of(key, b"", f"{number}" + "\N{GRINNING FACE}")
    return manifest.replace(b'\\ud83d\\ude00"', b"\\ud83d\\ude00" + b"a" * (MANIFEST_BYTES - len(manifest)) + b'"')


def empty_files(key: CacheKey, number: int, count: int, path: str = "") -> bytes:
    nothing = digest(b"")
    lines = (
        b'{"path":"%d/%d%s","key":"%d/%d","size_bytes":0,"sha256":"%s"}'
        % (number, line, path.encode(), number, line, nothing.encode())
        for line in range(count)
    )
    return manifest_of(key, b",".join(lines))


def incompressible(key: CacheKey, number: int) -> bytes:
    """A manifest that is as long in the store as it is in memory."""
    import random

    return manifest_of(key, b'"' + random.Random(number).randbytes(MANIFEST_BYTES // 2 - 200).hex().encode() + b'"')


@pytest.mark.parametrize("signature", [b"", OURS.sign(b"another")], ids=["unsigned", "with a borrowed signature"])
def test_with_keys_required_wide_manifests_cost_little_memory(tmp_path, key, signature):
    put(tmp_path, key, (wide(key, number) for number in range(16)), signature)
    files, refused, more_bytes = look_and_measure(tmp_path, key, OURS.public_key)
    assert (files, refused) == (0, 16)
    assert more_bytes < 64 * MB


def test_with_keys_required_manifests_that_are_long_in_the_store_cost_little_memory(tmp_path, key):
    put(tmp_path, key, (incompressible(key, number) for number in range(3)), OURS.sign(b"another"))
    files, refused, more_bytes = look_and_measure(tmp_path, key, OURS.public_key)
    assert (files, refused) == (0, 3)
    assert more_bytes < 64 * MB


def test_without_keys_wide_manifests_cost_a_bounded_amount_of_memory(tmp_path, key):
    put(tmp_path, key, (wide(key, number) for number in range(16)))
    files, refused, more_bytes = look_and_measure(tmp_path, key)
    assert (files, refused) == (0, 16)
    assert more_bytes < 256 * MB


def test_without_keys_the_files_of_all_packs_of_a_key_together_are_limited(tmp_path, key):
    put(tmp_path, key, (empty_files(key, number, 99_000) for number in range(3)))
    files, refused, more_bytes = look_and_measure(tmp_path, key)
    assert (files, refused) == (99_000, 2)
    assert more_bytes < 256 * MB


def test_without_keys_long_paths_cost_a_bounded_amount_of_memory(tmp_path, key):
    path = "/" + "/".join(["x" * 200] * 4)
    put(tmp_path, key, (empty_files(key, number, 8_000, path) for number in range(9)))
    _, refused, more_bytes = look_and_measure(tmp_path, key)
    assert refused > 0
    assert more_bytes < 256 * MB
