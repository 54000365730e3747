"""Prints sizes, ages and tables. Results go to stdout, everything else to stderr.

Names, creators and records come from a store that others may write. So escape codes in them are written out, and rich
does not read them as markup.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from compile_cache.key.environment import Environment

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[kKMGT]?)(?P<binary>i?)B?")
_AGES = (("year", 365 * 86_400), ("month", 30 * 86_400), ("day", 86_400), ("hour", 3_600), ("minute", 60))
_DIGEST = re.compile(r"[0-9a-f]{32}")
_DIGEST_DIGITS = 12
_LONGEST_VALUE = 60
# 28300000 → `28.3 MB`
size_text = decimal
# A pipe has no width, so a table is as wide as its content.
_PIPE_WIDTH = 10_000


def printable(text: str) -> str:
    """`text`, with unprintable characters (escape codes, line ends) written out as in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def parse_size(text: str) -> int:
    """The bytes of `10GB`, `1.5 TB`, `512MiB` or a plain number.

    Raises:
        ValueError: `text` is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: give a size such as 10GB")
    exponent = " KMGT".index(found["unit"].upper() or " ")
    return int(float(found["number"]) * (1024 if found["binary"] else 1000) ** exponent)


def age_text(then_s: float, now_s: float | None = None) -> str:
    """`3 hours ago`; `never` for 0."""
    if not then_s:
        return "never"
    age_s = (time.time() if now_s is None else now_s) - then_s
    for unit, unit_s in _AGES:
        if age_s >= unit_s:
            count = int(age_s // unit_s)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def time_text(time_s: float) -> str:
    """A time to the second. Manifests, reports and stores may have impossible ones."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "an impossible time"


def count_text(count: int, noun: str) -> str:
    """`1 pack`, `2 packs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short(digest: str) -> str:
    """The first digits of an environment's or a pack's name, for people."""
    return digest[:_DIGEST_DIGITS]


def short_version(version: str) -> str:
    """A version for people: a digest is cut, a chosen name is not."""
    return short(version) if _DIGEST.fullmatch(version) else version


def environment_text(record: Environment | None) -> str:
    """The main points of an environment's record."""
    if record is None:
        return "no readable record"
    device = record.gpu or f"CPU {record.machine}, {count_text(record.threads, 'thread')}"
    parts = (f"torch {record.torch}", device, record.python, record.options)
    return ", ".join(printable(str(part))[:_LONGEST_VALUE] for part in parts if part)


def print_line(text: str = "") -> None:
    """Print a line on stdout."""
    sys.stdout.write(printable(text) + "\n")


def print_note(text: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(printable(text) + "\n")


def print_json(document: Any) -> None:
    """Print the single document of `--json`. It is ASCII, so it has no escape codes."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without lines. Columns whose names end with `>` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.rstrip(">"), justify="right" if column.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if sys.stdout.isatty():
        Console(highlight=False).print(table)
        return
    console = Console(width=_PIPE_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(table)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))
