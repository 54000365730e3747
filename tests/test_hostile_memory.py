"""What a store holds decides neither how much memory a boot takes nor whether it survives."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
from hostile_packs import KEY, OURS, assemble, digest, encode, name_of
from programs import run_program

from compile_cache.errors import PackError
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.fetch import PacksOfKey, choose, fetch
from compile_cache.storage.pack.manifest import Frame, Limits, Manifest, PackFile, check_paths, parse_manifest
from compile_cache.storage.stores.local import LocalStore

MB = 1_000_000
MANIFEST_BYTES = 4 << 20
PACKS = 8
NOTHING = digest(b"").encode()
# Runs one of this module's functions with each of some arguments, each time in a process of its own, and prints by how
# many bytes its memory grew at most.
MEASURE = """
import json, os, sys
import test_hostile_memory
name, *cases = sys.argv[1:]
for case in cases:
    if os.fork() == 0:
        print(json.dumps([case, getattr(test_hostile_memory, name)(*json.loads(case))]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, case
"""


def run_alone(function: Callable[..., list[int]], cases: Mapping[str, Sequence[object]]) -> dict[str, list[int]]:
    """What `function` returns of the arguments of each case, in processes that have done nothing else."""
    arguments = {name: json.dumps(case) for name, case in cases.items()}
    done = run_program(MEASURE, function.__name__, *arguments.values(), folder=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = dict(map(json.loads, done.stdout.splitlines()))
    return {name: found[case] for name, case in arguments.items()}


def begin_measuring() -> int:
    """The memory in use. Where the peak cannot be set back to it, the test measures too much."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets VmHWM to VmRSS
    return memory_bytes("VmRSS")


def memory_bytes(name: str = "VmHWM") -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def manifest_of(key: CacheKey, files: bytes = b"", frames: bytes | None = None, creator: bytes = b'"x"') -> bytes:
    frames = b'{"stored_bytes":0,"files":[%b]}' % files if frames is None else frames
    return b'{"key":' + encode(asdict(key)) + b',"frames":[%b],"creator":%b,"created_s":1.0}' % (frames, creator)


def empty_files(count: int, number: int = 0, path: bytes = b"") -> bytes:
    file = b'{"path":"%d/%d%b","key":"%d/%d","size_bytes":0,"sha256":"%b"}'
    return b",".join(file % (number, line, path, number, line, NOTHING) for line in range(count))


def many(one: bytes) -> bytes:
    return b",".join([one] * (MANIFEST_BYTES // (len(one) + 1) - 50))


# What a manifest may cost beside its own text. A signature is checked before: only where no keys are required, and all
# code is trusted, does a stranger's manifest get so far.

HOSTILE: dict[str, Callable[[], bytes]] = {
    "a long text": lambda: manifest_of(KEY, creator=b'"' + b"a" * MANIFEST_BYTES + b'"'),
    "wide texts": lambda: manifest_of(KEY, creator=b'"\\ud83d\\ude00' + b"a" * (MANIFEST_BYTES // 4) + b'"'),
    "texts of quotes": lambda: manifest_of(KEY, creator=b'"' + b'\\"' * (MANIFEST_BYTES // 8) + b'"'),
    "digits": lambda: manifest_of(KEY, creator=b"9" * MANIFEST_BYTES),
    "nested lists": lambda: manifest_of(KEY, creator=b"[" * MANIFEST_BYTES),
    "nested objects": lambda: manifest_of(KEY, creator=b'{"a":' * (MANIFEST_BYTES // 5)),
    **{f"files of {one}": lambda one=one: manifest_of(KEY, many(one)) for one in (b"[]", b"{}", b'{"":0}', b'"a"')},
    "a wrong file behind many": lambda: manifest_of(KEY, empty_files(30_000) + b",[]"),
    "frames of []": lambda: manifest_of(KEY, frames=many(b"[]")),
}


def parse_and_measure(name: str) -> list[int]:
    text = bytearray(HOSTILE[name]())
    assert len(text) < MANIFEST_BYTES + MB / 8
    before = begin_measuring()
    with pytest.raises(PackError):
        parse_manifest(text, Limits())
    return [memory_bytes() - before]


def test_a_hostile_manifest_costs_a_few_times_the_memory_of_its_text():
    grown = run_alone(parse_and_measure, {name: [name] for name in HOSTILE})
    assert {name: found for name, (found,) in grown.items() if found >= 20 * MB} == {}


def use_deep_paths(use: str) -> list[int]:
    paths = [f"{number:05}/" + "x" * 31 + "/" + ("d" * 31 + "/") * 29 + "f" for number in range(30_000)]
    packs = [Manifest(KEY, (Frame(0, tuple(PackFile(path, path, 0, "") for path in paths)),), "", 0.0)]
    before = begin_measuring()
    if use == "check":
        check_paths(paths)
    else:
        assert sum(map(len, choose(packs))) == len(paths)
    return [memory_bytes() - before]


def test_deep_paths_cost_no_more_memory_than_they_are_long():
    """30,000 paths of 30 MB are in folders whose paths together have 450 MB."""
    grown = run_alone(use_deep_paths, {use: [use] for use in ("check", "choose")})
    assert {use: found for use, (found,) in grown.items() if found >= 128 * MB} == {}


# What all packs of a key may cost.


def look_and_measure(folder: str, *trusted: str) -> list[int]:
    """Files that would be restored, packs that are refused, and the memory. The files are not written, because of the
    test's time."""
    from compile_cache.storage.directory import CacheDirectory
    from compile_cache.storage.pack.signing import trusted_keys
    from compile_cache.storage.rules import Rules

    store, directory = LocalStore(Path(folder, "store")), CacheDirectory.claim(Path(folder, "cache"))

    def look(key: CacheKey) -> tuple[int, int]:
        packs = PacksOfKey(store, key, Rules(Limits(packs=PACKS), trusted_keys(trusted)))
        packs.refresh()
        needed = packs.select()
        if not needed:
            fetch(packs, directory.inbox)
        return sum(len(chosen) for _, chosen in needed), len(packs.refused)

    look(CacheKey("nothing", "is", "stored"))
    before = begin_measuring()
    return [*look(KEY), memory_bytes() - before]


def unsigned(content: bytes) -> bytes:
    return b""


def borrowed(content: bytes) -> bytes:
    return OURS.sign(b"another")


def put(folder: Path, manifests: Iterable[bytes], sign: Callable[[bytes], bytes] = unsigned) -> None:
    store = LocalStore(folder / "store")
    for manifest in manifests:
        pack = assemble(manifest, sign=sign)
        store.put(KEY.prefix + name_of(pack), pack)


def wide(number: int) -> bytes:
    """As long as a manifest may be, of one letter, behind a character for which Python takes four bytes a letter."""
    creator = b'"%d\\ud83d\\ude00' % number
    return manifest_of(KEY, creator=creator + b"a" * (MANIFEST_BYTES - 300) + b'"')


def incompressible(number: int) -> bytes:
    """A manifest that is as long in the store as it is in memory."""
    return manifest_of(KEY, b'"' + Random(number).randbytes(MANIFEST_BYTES // 2 - 200).hex().encode() + b'"')


def wide_paths(number: int) -> bytes:
    """Of all manifests that can be used, these take the most memory: 32 of them take 1.04 GB."""
    path = "/".join(["\N{GRINNING FACE}" + "a" * 26] * 30).encode()
    return manifest_of(KEY, empty_files(3_850, number, b"/" + path))


def many_files(number: int) -> bytes:
    return manifest_of(KEY, empty_files(31_000, number))


# Manifests and their number, whether keys are required, files that are restored, packs that are refused, megabytes.
COSTS = {
    "wide": (wide, PACKS, unsigned, False, 0, PACKS, 256),
    "wide, unsigned": (wide, PACKS, unsigned, True, 0, PACKS, 64),
    "wide, with another's signature": (wide, PACKS, borrowed, True, 0, PACKS, 64),
    "long in the store": (incompressible, 5 * PACKS, borrowed, True, 0, 5 * PACKS, 64),
    "many files": (many_files, PACKS + 1, unsigned, False, PACKS * 31_000, 1, 256),
    "wide paths": (wide_paths, PACKS + 1, unsigned, False, PACKS * 3_850, 1, 500),
}


def test_the_packs_of_a_key_cost_a_bounded_amount_of_memory_with_keys_required_and_without(tmp_path):
    cases = {}
    for name, (make, count, sign, are_keys_required, *_) in COSTS.items():
        put(tmp_path / name, map(make, range(count)), sign)
        cases[name] = [str(tmp_path / name), *([OURS.public_key] if are_keys_required else [])]
    for name, (restored, refused, grown) in run_alone(look_and_measure, cases).items():
        *_, files, packs, most_mb = COSTS[name]
        assert (restored, refused) == (files, packs), name
        assert grown < most_mb * MB, name
