"""The moment at which new code is taken: between two predictions. So one prediction has one code.

Only under steady overlap, code that has waited for ten seconds is taken in the middle. Code that failed stops at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("compile_cache")

# Under steady overlap no moment comes. Code that has waited so long is taken all the same.
_LONGEST_WAIT_S = 10.0


class Moment:
    """Counts the predictions that are open, and makes changes when none is. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changes: dict[object, Callable[[], bool | None]] = {}
        self._since_s = 0.0
        self._is_new = False
        # How many predictions are open, and how many have begun.
        self.open = 0
        self.begun = 0

    def note(self, subject: object, change: Callable[[], bool | None]) -> None:
        """Make this change at the next moment, in place of an earlier one of the same subject. If `change` returns
        True, it was too early, and is called again at the moment after."""
        with self._lock:
            if not self._changes:
                self._since_s = time.monotonic()
            self._changes[subject] = change

    def begin(self) -> bool:
        """Begin a prediction. Returns whether it uses code that the one before it did not have."""
        with self._lock:
            self.begun += 1
            if self.open == 0:
                self._take()
            elif self._changes and time.monotonic() - self._since_s > _LONGEST_WAIT_S:
                log.warning("serve.mixed open=%d Predictions overlap all the time: these change their code.", self.open)
                self._take()
            self.open += 1
            is_new, self._is_new = self._is_new, False
            return is_new

    def end(self, is_complete: bool, had_new_code: bool) -> None:
        """End a prediction. If it was broken off, the next one has new code in its place."""
        with self._lock:
            self.open -= 1
            self._is_new |= had_new_code and not is_complete

    def pass_by(self) -> None:
        """Note a call. Outside all predictions it is a prediction of its own, so waiting changes are made now."""
        if self.open:
            return
        with self._lock:
            if self.open == 0:
                self.begun += 1
                self._take()

    def _take(self) -> None:
        changes, self._changes, self._since_s = self._changes, {}, time.monotonic()
        for subject, change in changes.items():
            if change():
                self._changes.setdefault(subject, change)
            else:
                self._is_new = True
