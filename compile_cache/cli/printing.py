"""Prints the answers of commands. Results go to stdout, everything else to stderr.

Names, creators and records come from a store that others may write. So escape codes in them are written out.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.filesize import decimal

from compile_cache.key.environment import Environment
from compile_cache.storage.catalog import Version
from compile_cache.storage.rules import VerifiedPack
from compile_cache.storage.stores.base import LayeredStore, ReadableStore, StoredObject

_DIGEST = re.compile(r"[0-9a-f]{32}")
_LONGEST_VALUE = 60
# 28300000 → `28.3 MB`
size_text = decimal


def printable(text: str) -> str:
    """`text`, with unprintable characters (escape codes, line ends) written out as in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def time_text(time_s: float) -> str:
    """A time to the second. Manifests, reports and stores may have impossible ones."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def count_text(count: int, noun: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def packs_text(packs: Sequence[StoredObject]) -> str:
    """`2 packs, 28.3 MB`."""
    return f"{count_text(len(packs), 'pack')}, {size_text(sum(pack.size_bytes for pack in packs))}"


def short(digest: str) -> str:
    """The first digits of an environment's or a pack's name, for people."""
    return digest[:12]


def short_version(version: str) -> str:
    """A version for people: a digest is cut, a chosen name is not."""
    return short(version) if _DIGEST.fullmatch(version) else version


def environment_text(record: Environment | None) -> str:
    """The main points of an environment's record."""
    if record is None:
        return "no readable record"
    device = record.gpu or f"CPU {record.machine}, {count_text(record.threads, 'thread')}"
    parts = (f"torch {record.torch}", device, record.python, record.options)
    return ", ".join(str(part)[:_LONGEST_VALUE] for part in parts if part)


def print_line(text: str = "") -> None:
    """Print a line on stdout."""
    sys.stdout.write(printable(text) + "\n")


def print_note(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(printable(text) + "\n")


def print_json(document: dict[str, Any]) -> None:
    """Print the single document of `--json`: the library's own objects, by their fields. It is ASCII, so it has no
    escape codes."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(document), indent=2) + "\n")


def print_problems(store: LayeredStore) -> None:
    """Name the layers that could not be listed."""
    for problem in store.problems:
        print_note(f"warning: left out: {problem}")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table without lines, and an empty line; nothing without rows. Columns whose names end with `>` are
    aligned to the right."""
    if not rows:
        return
    lines = [[column.rstrip(">") for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, columns, strict=True)
        padded = (text.rjust(width) if name.endswith(">") else text.ljust(width) for text, width, name in cells)
        sys.stdout.write("  ".join(padded).rstrip() + "\n")
    print_line()


def print_versions(versions: Mapping[Version, str]) -> None:
    """Print a table of versions, and why each is in it."""
    rows = [
        (
            version.key.model_name,
            short_version(version.key.model_version),
            short(version.key.environment),
            str(len(version.packs)),
            size_text(version.size_bytes),
            time_text(version.published_s)[:10] if version.packs else "",
            time_text(version.used_s)[:10],
            reason,
        )
        for version, reason in versions.items()
    ]
    why = "why" if any(versions.values()) else ""
    print_table(("model", "version", "environment", "packs>", "size>", "published", "last used", why), rows)


def print_packs(store: ReadableStore, packs: Sequence[VerifiedPack]) -> None:
    """Print a table of packs, and their number in each state."""
    rows = [
        (
            pack.state.value,
            _version_text(pack.entry.name),
            short(pack.entry.name.rpartition("/")[2]),
            size_text(pack.entry.size_bytes),
            _finding(pack),
        )
        for pack in packs
    ]
    print_table(("state", "version", "pack", "size>", ""), rows)
    counts = Counter(pack.state.value for pack in packs)
    states = ", ".join(f"{count} {state}" for state, count in counts.items()) or "nothing to verify"
    print_line(f"{packs_text([pack.entry for pack in packs])}, in {store.location}: {states}")


def print_content(packs: Sequence[VerifiedPack], with_files: bool) -> None:
    """Print what the heads of packs say of their content."""
    for manifest, name in ((pack.head.manifest, pack.entry.name) for pack in packs if pack.head):
        what = f"{count_text(len(manifest.files), 'file')}, {size_text(manifest.size_bytes)} unpacked"
        made = f"made {time_text(manifest.created_s)} by {manifest.creator or 'nobody named'}"
        print_line(f"{name.rpartition('/')[2]}: {what}, {made}")
        if with_files:
            print_table(("    size>", "file"), [(size_text(file.size_bytes), file.path) for file in manifest.files])


def print_removed(store: ReadableStore, removed: Sequence[StoredObject]) -> None:
    """Print the packs that were removed."""
    packs = [entry for entry in removed if entry.name.endswith(".pack")]
    for pack in packs:
        print_line(f"removed {pack.name}")
    print_line(f"removed {packs_text(packs)}, from {store.location}")


def _version_text(name: str) -> str:
    model, version = name.split("/")[2:4]
    return f"{model}/{short_version(version)}"


def _finding(pack: VerifiedPack) -> str:
    if pack.reason:
        return f"{pack.reason} ({pack.entry.name})"
    return f"signed by {pack.signed_by}" if pack.signed_by else "no signature was verified"
