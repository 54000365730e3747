"""The model's name and version, from its files. Reads no whole weights, and imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from compile_cache.errors import WeightsError
from compile_cache.key.environment import installed_version
from compile_cache.key.managed_weights import ManagedWeights, managed_weights

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx"})
_LARGEST_READ_BYTES = 16 << 20  # tokenizers are smaller; larger files are weights
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Names of folders in many projects, and of snapshots in the hub's cache, which are named after their commit.
_COMMON_NAME = re.compile(r"(models?|weights|checkpoints?|ckpt|src|[0-9a-f]{40})", re.IGNORECASE)
# The content of a path that is no file: a broken link, or a folder that was read under another name before.
_NO_FILE = b"\0no file"
# Code of these packages is traced into the compiled graphs. torch and Triton are in the environment.
_TRACED_PACKAGES = ("diffusers", "transformers", "accelerate", "peft")
_LARGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit


def split_revision(model: str) -> tuple[str, str | None]:
    """`org/name@revision` → (`org/name`, `revision`); a folder's path is never split."""
    if os.path.isdir(model):
        return model, None
    name, _, revision = model.partition("@")
    return name, revision or None


def model_name(model: str) -> str:
    """The hub id, or the folder's own name."""
    name, _ = split_revision(model)
    return os.path.basename(os.path.abspath(name)) if os.path.isdir(name) else name


def has_common_name(model: str) -> bool:
    """Whether `model` is a folder with a name that other projects use too, such as `weights`."""
    return os.path.isdir(model) and _COMMON_NAME.fullmatch(model_name(model)) is not None


def model_version(model: str, sources: Sequence[str | Path]) -> str:
    """A digest (32 hexadecimal digits) of everything from which a compiled graph of this model is made.

    | model | ingredients |
    | --- | --- |
    | folder of Cog's managed weights | the digest of their set, and its place there: no file is read |
    | folder | its small files, and each weight file's name, size and safetensors header |
    | hub id (`org/name`) | its commit; its revision, if that is not downloaded |
    | any other name | the name |
    | all | the project's own `sources` (files, or folders of Python files, all there), and the traced packages |
    """
    digest = hashlib.sha256()
    for name, content in _ingredients(model, sources):
        digest.update(json.dumps([name, hashlib.sha256(content).hexdigest()]).encode())
    return digest.hexdigest()[:32]


def _ingredients(model: str, sources: Sequence[str | Path]) -> Iterator[tuple[str, bytes]]:
    name, revision = split_revision(model)
    managed: ManagedWeights | None = None
    with contextlib.suppress(WeightsError):  # the boot warns of it
        managed = managed_weights(model)
    if managed is not None:
        yield managed.place, managed.set_digest.encode()
    elif os.path.isdir(name):
        for path in _paths(Path(name)):
            yield path.relative_to(name).as_posix(), _model_content(path)
    elif _HUB_ID.fullmatch(name):
        # If it is not downloaded, torch's own keys tell graphs of different commits apart.
        folder = hub_folder(name, revision)
        yield name, (folder.name if folder else revision or "main").encode()
    else:
        yield name, (revision or "").encode()
    for source in [Path(source).absolute() for source in sources]:  # `.` has a name, too
        for path in [source] if source.is_file() else _paths(source, ".py"):
            yield path.relative_to(source.parent).as_posix(), path.read_bytes() if path.is_file() else _NO_FILE
    for package in _TRACED_PACKAGES:
        if version := installed_version(package):
            yield package, version.encode()


def _model_content(path: Path) -> bytes:
    if not path.is_file():
        return _NO_FILE
    is_weights = path.suffix in _WEIGHT_SUFFIXES or path.stat().st_size > _LARGEST_READ_BYTES
    return _weights_identity(path) if is_weights else path.read_bytes()


def _weights_identity(path: Path) -> bytes:
    """Size and, for safetensors, the header, which names every tensor with its dtype and shape
    (https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON)."""
    size_bytes = path.stat().st_size
    header = b""
    if path.suffix == ".safetensors" and size_bytes >= 8:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), _LARGEST_HEADER_BYTES))
    return f"{size_bytes}\n".encode() + header


def _paths(folder: Path, suffix: str = "") -> list[Path]:
    """The visible files below `folder`, sorted, without `__pycache__`. Links are followed. A folder that several links
    lead to is read once. The other links count as paths themselves."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            found.append(Path(parent))
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [Path(parent, name) for name in names if not name.startswith(".") and name.endswith(suffix)]
    return sorted(found)


def hub_folder(name: str, revision: str | None, cache: Path | None = None) -> Path | None:
    """The snapshot of a hub repository in the local hub cache, or in the folder `cache`, named after its commit. None
    if there is none, or without the hub's library."""
    if not _HUB_ID.fullmatch(name):
        return None
    if cache is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE  # imported alone, it takes milliseconds
        except ImportError:
            return None
        cache = Path(HF_HUB_CACHE)
    repository, commit = cache / f"models--{name.replace('/', '--')}", revision or "main"
    with contextlib.suppress(OSError, ValueError):  # it is a commit, is not downloaded, or is no text
        commit = (repository / "refs" / commit).read_text().strip()
    folder = repository / "snapshots" / commit
    return folder if re.fullmatch(r"[\w-]+", commit) and os.path.isdir(folder) else None
