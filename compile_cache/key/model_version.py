"""The model's name and version, from its files, without reading whole weights and without torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from compile_cache.errors import SettingsError

log = logging.getLogger("compile_cache")

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx"})
_LARGEST_READ_BYTES = 16 << 20  # tokenizers are smaller, whatever is larger is weights
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
# Their code is traced into the compiled graphs; torch and Triton are in the environment.
_TRACED_PACKAGES = ("diffusers", "transformers", "accelerate", "peft")
_HUB_TIMEOUT_S = 5
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


def model_version(model: str, sources: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """A digest (32 hexadecimal digits) of all that a compiled graph of this model was made from.

    For a folder: its small files, and each weight file's name, size and safetensors header. For a hub id: its commit.
    For both: the project's own `sources` (files, or folders of Python files) and the packages that are traced.

    Raises:
        SettingsError: one of `sources` is not there.
    """
    digest = hashlib.sha256()
    for name, content in _ingredients(model, sources, environ):
        digest.update(json.dumps([name, hashlib.sha256(content).hexdigest()]).encode())
    return digest.hexdigest()[:32]


def _ingredients(model: str, sources: Sequence[str | Path], environ: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    name, revision = split_revision(model)
    if os.path.isdir(name):
        yield from _folder_ingredients(Path(name))
    else:
        yield name, hub_commit(name, revision or "main", environ).encode()
    for source in sources:
        yield from _source_ingredients(Path(source))
    yield from _package_ingredients(_TRACED_PACKAGES)


def _folder_ingredients(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in _files(folder):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.stat().st_size > _LARGEST_READ_BYTES
        content = _weights_identity(path) if is_weights else path.read_bytes()
        yield path.relative_to(folder).as_posix(), content


def _weights_identity(path: Path) -> bytes:
    """Size and, for safetensors, the header, which names every tensor with its dtype and shape
    (https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON)."""
    size_bytes = path.stat().st_size
    header = b""
    if path.suffix == ".safetensors" and size_bytes >= 8:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = file.read(min(header_bytes, _LARGEST_HEADER_BYTES))
    return f"{size_bytes}\n".encode() + header


def _source_ingredients(source: Path) -> Iterator[tuple[str, bytes]]:
    if not source.exists():
        raise SettingsError(f"{source}, named as a source of the model, is not there. Give paths from {Path.cwd()}.")
    paths: Iterable[Path] = [source] if source.is_file() else _files(source, ".py")
    for path in paths:
        yield path.name if source.is_file() else path.relative_to(source.parent).as_posix(), path.read_bytes()


def _package_ingredients(packages: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    from importlib.metadata import PackageNotFoundError, version

    for package in packages:
        try:
            yield package, version(package).encode()
        except PackageNotFoundError:
            continue


def _files(folder: Path, suffix: str = "") -> list[Path]:
    """The visible files below `folder`, sorted; hidden ones and `__pycache__` are left out."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [Path(parent, name) for name in names if not name.startswith(".") and name.endswith(suffix)]
    return sorted(found)


def hub_commit(name: str, revision: str, environ: Mapping[str, str]) -> str:
    """The commit that `revision` of a hub repository stands for: itself, else as the local hub cache has it, else as
    the hub answers. Where neither knows, `revision` itself: what is restored is then checked by torch's own keys."""
    if _COMMIT.match(revision):
        return revision
    home = environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    reference = Path(cache, f"models--{name.replace('/', '--')}", "refs", revision)
    if reference.is_file():
        return reference.read_text().strip()
    return _commit_at_hub(name, revision) or revision


def _commit_at_hub(name: str, revision: str) -> str | None:
    try:
        from huggingface_hub import HfApi

        return HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S).sha
    except Exception as error:  # not installed, offline, not found, or what the HTTP client of its version raises
        log.info("model_version.unresolved model=%s revision=%s error=%s", name, revision, error)
        return None
