"""The kinds of calls from which stored artifacts were made. A boot without its own artifacts should compile them.

This module reads only headers, unpickles nothing, and imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compile_cache.aot.files import PRECOMPILED, SUFFIX, digest, read_header
from compile_cache.errors import ArtifactError

log = logging.getLogger("compile_cache")

_MOST_CALLS = 4096
_MOST_CHARACTERS = 1024
_DYNAMIC = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class KnownCall:
    """A kind of call of the region `class_name` (`module.qualified.name`) with this `structure` (a digest).

    `call` describes the inputs; `call_inputs.make_call` checks it and makes them. `switches` has torch's switches by
    name. `mode` and `dynamic` are the settings with which the artifact was made.
    """

    class_name: str
    structure: str
    call: Any
    switches: Mapping[str, str]
    mode: str
    dynamic: bool | None

    @property
    def name(self) -> str:
        """32 hexadecimal digits. Equal calls have equal names."""
        return digest(asdict(self))


def known_calls(directory: Path) -> list[KnownCall]:
    """The calls of all artifacts in a cache directory, each once, the newest artifact's first."""
    paths = [(path.stat().st_mtime_ns, path) for path in directory.glob(f"{PRECOMPILED}/*/*{SUFFIX}")]
    newest_first = sorted(paths, key=lambda pair: (-pair[0], pair[1]))
    return read_calls(path for _, path in newest_first[:_MOST_CALLS])


def read_calls(paths: Iterable[Path]) -> list[KnownCall]:
    """The calls of these artifacts, in order, each once. Artifacts without a call are skipped; damaged artifacts are
    skipped and logged."""
    found: dict[str, KnownCall] = {}
    for path in paths:
        try:
            if call := _read_call(path):
                found.setdefault(call.name, call)
        except (ArtifactError, OSError, RecursionError) as error:
            log.info("plan.not_read artifact=%s error=%r", path, error)
    return list(found.values())


def _read_call(path: Path) -> KnownCall | None:
    header = read_header(path)
    if header.call is None:
        return None
    key = header.key
    switches = key.get("switches")
    texts = [key.get(name) for name in ("class", "structure", "mode", "dynamic")]
    if not isinstance(switches, dict) or not all(map(_is_text, [*texts, *switches.values()])):
        raise ArtifactError("its key is not the key of a call")
    class_name, structure, mode, dynamic = map(str, texts)
    if dynamic not in _DYNAMIC:
        raise ArtifactError("its key is not the key of a call")
    return KnownCall(class_name, structure, header.call, switches, mode, _DYNAMIC[dynamic])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _MOST_CHARACTERS
