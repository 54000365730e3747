"""The safetensors files of a model, and what is in them. Imports no torch."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from compile_cache.errors import log
from compile_cache.key.model_version import hub_folder, split_revision

# What `boot(weights=…)` takes.
Weights = bool | str | Path | Sequence[str | Path]

# https://huggingface.co/docs/safetensors/metadata_parsing
_METADATA = "__metadata__"  # a file's only entry that is no tensor
# A file of all weights (that of a part of them has -of- in its name), or an index; each of a variant, such as fp16.
_WEIGHTS = re.compile(r"(?:model|diffusion_pytorch_model)(?:\.((?!.*-of-)[^.]+))?\.safetensors")
_INDEX = re.compile(r"(?:model|diffusion_pytorch_model)\.safetensors\.index(?:\.([^.]+))?\.json")
# What `from_pretrained` keeps as it is in the file. Floats of other sizes are cast.
_KEPT = ("BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL")
# transformers makes one weight of all experts'.
_EXPERT = ".experts."


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its first byte there, its bytes and numbers. `is_kept`: `from_pretrained` may load these as
    they are."""

    offset: int
    size_bytes: int
    numel: int
    is_kept: bool


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file that are not empty, in the order of their bytes.

    https://huggingface.co/docs/safetensors: 8 bytes little-endian length, then JSON, then the tensors without gaps.

    Raises:
        OSError: there is no such file.
        ValueError: it is cut short or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):  # checks the whole header, and that it fits the file's size
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); download it again") from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(start - 8))
    found = []
    for name, entry in entries.items():
        if name != _METADATA:
            begin, end = entry["data_offsets"]
            is_kept = entry["dtype"] in _KEPT and _EXPERT not in name
            found.append(StoredTensor(start + begin, end - begin, prod(entry["shape"]), is_kept))
    return sorted((tensor for tensor in found if tensor.size_bytes), key=lambda tensor: tensor.offset)


def find_files(model: str, weights: Weights) -> list[Path]:
    """The files that `weights` names, each once: True is the model itself. A folder that is not there yet has none.

    Raises:
        OSError, ValueError: a config or index cannot be read.
    """
    given = [model] if weights is True else [weights] if isinstance(weights, str | Path) else weights or []
    return list(dict.fromkeys(path for one in given for path in _files_of(str(one), model)))


def _files_of(given: str, model: str) -> list[Path]:
    """The files of a file's path, a model's folder, a cache of the hub that has `model`, or a hub id."""
    if os.path.isfile(given):
        return [Path(given)]
    folder = Path(given) if os.path.isdir(given) else hub_folder(*split_revision(given))
    if folder is not None and any(folder.glob("models--*")):
        folder = hub_folder(*split_revision(model), cache=folder)
    return [path for part in _parts(folder) for path in _files_of_part(part)] if folder is not None else []


def _parts(folder: Path) -> list[Path]:
    """The folders of the models of a pipeline that it loads, or the model's own."""
    index = folder / "model_index.json"
    if not index.is_file():
        return [folder] if (folder / "config.json").is_file() else []
    named = [name for name, value in json.loads(index.read_text()).items() if isinstance(value, list) and any(value)]
    return [folder / name for name in named if (folder / name / "config.json").is_file()]


def _files_of_part(part: Path) -> list[Path]:
    """The files that `from_pretrained` reads of a model's folder, if they are told by their names alone: those of its
    only variant, or of the only one without a cast. Otherwise none, and the log says why."""
    variants: dict[str, list[list[Path]]] = {}
    for path in sorted(part.glob("*model*.safetensors*")):
        if found := _WEIGHTS.fullmatch(path.name):
            variants.setdefault(found[1] or "", []).append([path])
        elif found := _INDEX.fullmatch(path.name):
            names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
            variants.setdefault(found[1] or "", []).append([part / name for name in names])
    sets = [files for found in variants.values() for files in found]
    if len(variants) > 1:
        sets = [files for files in sets if files[0].is_file() and _is_kept(files[0])]
    missing = [path for files in sets for path in files if not path.is_file()]
    if "quantization_config" in json.loads((part / "config.json").read_text()):
        why = "its config has a quantization_config"
    elif len(sets) != 1:
        several = "it has several sets of weights: name their files in boot(weights=[…])"
        why = several if sets else "no variant loads without a cast" if variants else "it has no safetensors"
    elif missing:
        why = f"{missing[0].name} is not there"
    else:
        return sets[0]
    _leave_out(part, why)
    return []


def _is_kept(path: Path) -> bool:
    """Whether most bytes of a file need no cast. Files in fp32 may have integers too."""
    tensors = read_header(path)
    return 2 * sum(each.size_bytes for each in tensors if each.is_kept) > sum(each.size_bytes for each in tensors)


@functools.cache
def _leave_out(part: Path, why: str) -> None:
    """Log it once, though a boot looks for files up to three times."""
    log.info("weights.left_out %s is not copied early: %s", part, why)
