"""Remembers refused packs on this host, so that later boots do not fetch them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from compile_cache.pack.head import PACK_VERSION
from compile_cache.store.base import StoredObject
from compile_cache.versions.rules import Rules


class RefusedEarlier:
    """One small file in `folder` for each refused pack.

    The record is valid for the object as it was listed, and for the rules: limits, trusted keys and pack format. A
    replaced object is judged again; under other rules every pack is. With `is_read_only`, nothing is written.
    """

    def __init__(self, folder: Path, location: str, rules: Rules, is_read_only: bool = False) -> None:
        self._folder = folder
        self._is_read_only = is_read_only
        self._location = location
        self._rules = f"{PACK_VERSION} {rules.limits} {' '.join(rules.trusted.texts)}"

    def reason(self, entry: StoredObject) -> str | None:
        """Why an earlier boot refused `entry`; None if none did."""
        try:
            record = json.loads(self._path(entry).read_bytes())
            return f"{record['reason']} (found by an earlier boot)"
        except (OSError, ValueError, KeyError, TypeError):
            return None  # no record, or a damaged one: the pack is judged again, and the record written anew

    def remember(self, entry: StoredObject, reason: str) -> None:
        """Record why `entry` was refused. An existing record stays unchanged.

        Raises:
            OSError: the record cannot be written. Then the next boot judges the pack again.
        """
        if self._is_read_only or self.reason(entry) is not None:
            return  # `reason` may come from `self.reason`, and would get longer with every boot
        self._folder.mkdir(exist_ok=True)
        record = {"store": self._location, "name": entry.name, "reason": reason}
        self._path(entry).write_text(json.dumps(record))

    def _path(self, entry: StoredObject) -> Path:
        identity = f"{self._location}\n{entry.name}\n{entry.size_bytes}\n{entry.modified_s}\n{self._rules}"
        return self._folder / (hashlib.sha256(identity.encode()).hexdigest() + ".json")
