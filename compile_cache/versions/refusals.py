"""Refused packs, remembered on this host: what failed once is not fetched again by its later boots."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from compile_cache.pack.format import PACK_VERSION
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import TrustedKeys
from compile_cache.store.base import StoredObject


class Refusals:
    """One small file in `folder` for each refused pack.

    It holds for the object as it was listed, and for the rules it was judged by: limits, trusted keys and pack format.
    An object that is replaced, or other rules, and it is looked at again.
    """

    def __init__(self, folder: Path, location: str, limits: Limits, trusted: TrustedKeys) -> None:
        self._folder = folder
        self._location = location
        self._rules = f"{PACK_VERSION} {limits} {' '.join(trusted.texts)}"

    def reason(self, entry: StoredObject) -> str | None:
        """Why `entry` was refused before; None if it was not."""
        try:
            record = json.loads(self._path(entry).read_bytes())
            return f"{record['reason']} (found by an earlier boot)"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # a record cut short: the pack is judged again, and the record written anew

    def remember(self, entry: StoredObject, reason: str) -> None:
        """Record why `entry` was refused; what is remembered already stays as it was.

        Raises:
            OSError: it cannot be written; then the pack is judged again at the next boot.
        """
        if self.reason(entry) is not None:
            return  # `reason` may be what `self.reason` said, which would grow with every boot
        self._folder.mkdir(exist_ok=True)
        record = {"store": self._location, "name": entry.name, "reason": reason}
        self._path(entry).write_text(json.dumps(record))

    def _path(self, entry: StoredObject) -> Path:
        identity = f"{self._location}\n{entry.name}\n{entry.size_bytes}\n{entry.modified_s}\n{self._rules}"
        return self._folder / (hashlib.sha256(identity.encode()).hexdigest() + ".json")
