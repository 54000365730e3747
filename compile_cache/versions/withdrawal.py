"""Withdrawals: a small object beside a pack takes the pack out of use, and nothing stored is deleted.

<pack's name>.withdrawn    {"withdrawn_s": 1.0, "reason": "wrong pictures"}

Every reader sees a withdrawal in its usual listing. Only the name decides; the content informs people. Anybody who may
write to a store could also delete the pack.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeGuard

from compile_cache.errors import SettingsError, StoreError
from compile_cache.pack.format import PACK_NAME
from compile_cache.store.base import ObjectStore, StoredObject

WITHDRAWN = ".withdrawn"
WITHDRAWAL_NAME = re.compile(PACK_NAME.pattern + re.escape(WITHDRAWN))
LONGEST_REASON = 200
_MOST_BYTES = 4096
_LATEST_S = 1 << 33


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A pack out of use, the time of its withdrawal in seconds since 1970, and the reason, which may be empty."""

    pack: str
    since_s: float
    reason: str = ""

    def __post_init__(self) -> None:
        """Raises:
        SettingsError: the reason is not one line of text, or is too long.
        """
        if not _is_reason(self.reason):
            raise SettingsError(f"this reason cannot be stored: give one line of at most {LONGEST_REASON} characters")

    def to_json(self) -> bytes:
        """The content of its object."""
        return json.dumps({"withdrawn_s": self.since_s, "reason": self.reason}).encode()

    @property
    def text(self) -> str:
        """The withdrawal in one line, for people."""
        try:
            since = datetime.fromtimestamp(self.since_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        except (ValueError, OverflowError, OSError):  # a store may list any time
            since = "an invalid time"
        return f"withdrawn since {since}: {self.reason or 'no reason was given'}"


def withdrawals_among(entries: Iterable[StoredObject]) -> dict[str, StoredObject]:
    """The withdrawals in a listing, by the name of the pack. Only exact names count."""
    return {
        entry.name.removesuffix(WITHDRAWN): entry
        for entry in entries
        if WITHDRAWAL_NAME.fullmatch(entry.name.rpartition("/")[2])
    }


def read_withdrawal(store: ObjectStore, entry: StoredObject) -> Withdrawal:
    """The withdrawal listed as `entry`. Anybody may have written it, so invalid fields are ignored: the store's time of
    the object replaces an invalid time. The withdrawal is valid whatever its content."""
    try:
        stated = json.loads(store.read(entry.name, 0, _MOST_BYTES))
    except (StoreError, ValueError, RecursionError):
        stated = None
    stated = stated if isinstance(stated, dict) else {}
    since_s, reason = stated.get("withdrawn_s"), stated.get("reason")
    return Withdrawal(
        entry.name.removesuffix(WITHDRAWN),
        float(since_s) if _is_number(since_s) and 0 <= since_s < _LATEST_S else entry.modified_s,
        reason if isinstance(reason, str) and _is_reason(reason) else "",
    )


def _is_reason(text: str) -> bool:
    return text.isprintable() and len(text) <= LONGEST_REASON


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)
