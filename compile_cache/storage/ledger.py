"""The ledger of what may be published: the files of the cache directory that were handed over, finished and right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping


class Ledger:
    """The files of a cache directory that may be published: whoever made a file hands it over, finished and right.

    A file may have an `owner`, with which it is published or withdrawn: the path of a record of what was made, or the
    class of a region. `seeds` are another version's files, with their owners. They may be published once this version
    uses the owner. `withheld` are files of code that failed, and files that no pack can have. `scan` and `kept` find
    files: see `CacheDirectory`.

    Several threads use it. Each change is one operation of a dictionary or a set, so a fork needs no lock.
    """

    def __init__(self, scan: Callable[[float], Mapping[str, int]], kept: Callable[[], dict[str, str]] = dict) -> None:
        self.seeds: dict[str, str] = {}
        self.withheld: set[str] = set()
        self._scan, self._kept = scan, kept
        self._known: set[str] = set()
        # By path: the owner, and the time from which the file may be published, on the clock of `time.monotonic`.
        self._handed_over: dict[str, tuple[str, float]] = {}
        self._doubted: set[str] = set()

    def expect(self, paths: Iterable[str]) -> None:
        """Note files that somebody else is about to write: they do not count as `appeared`."""
        self._known.update(paths)

    def appeared(self, finished_ns: float = math.inf) -> set[str]:
        """The files that nobody has handed over or expects. Files that were changed after `finished_ns` come later."""
        return self._scan(finished_ns).keys() - self._known - self.withheld

    def plant(self, seeds: Mapping[str, str]) -> None:
        """Take the files of another version. Those without an owner may be published: torch looks them up."""
        self.expect(seeds)
        self.seeds |= seeds
        self.use("")

    def hand_over(self, paths: Iterable[str], owner: str = "", wait_s: float = 0.0) -> None:
        """Let files be published, after `wait_s`, or when the process ends."""
        due_s = time.monotonic() + wait_s
        handed_over = {path: (owner, due_s) for path in paths}
        self.expect(handed_over)
        self._handed_over |= handed_over

    def release(self, owner: str) -> None:
        """Let the files of `owner` that wait be published now."""
        self.hand_over(self._handed_over_by(owner), owner)

    def use(self, *owners: str) -> None:
        """Let the seeds of these owners be published."""
        for owner in owners:
            self.hand_over([path for path, other in self.seeds.items() if other == owner], owner)

    def doubt(self, owner: str) -> None:
        """Let the end of the process publish nothing of `owner` that waits: a check of it did not end."""
        self._doubted.add(owner)

    def withdraw(self, owner: str) -> None:
        """Publish nothing more of `owner`."""
        self.withheld |= self._handed_over_by(owner) | ({owner} & self._known)

    def _handed_over_by(self, owner: str) -> set[str]:
        return {path for path, (other, _) in list(self._handed_over.items()) if other == owner}

    def ready(self, is_ending: bool = False) -> dict[str, str]:
        """The files that may be published now, with their owners; kept files with the times of their last changes."""
        now, ready = time.monotonic(), self._kept()
        for path, (owner, due_s) in list(self._handed_over.items()):
            is_due = due_s <= now or (is_ending and owner not in self._doubted)
            if is_due:
                ready[path] = owner
        return {path: owner for path, owner in ready.items() if path not in self.withheld}
