"""The moment at which new code is taken: between two predictions. So one prediction has one code, but for three cases.

Under steady overlap, once code has waited for ten seconds, all that waits is taken in the middle. Code that an earlier
boot proved is taken at once, unless other predictions are open. Code that failed stops at once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from compile_cache.errors import Failure, attempt, log
from compile_cache.of_each import OfEach

# Under steady overlap no moment comes. Code that has waited so long is taken all the same.
_LONGEST_WAIT_S = 10.0
# The one lock of serving: held while a prediction begins or ends, and while a case changes.
LOCK = threading.RLock()


class Known(dict[Hashable, Any]):
    """What was found out about the calls of a module, by what they have in common. Outside predictions it holds for
    `calls_left` more calls. `functions` has the cases whose functions served calls, the latest first, by the sizes of
    these calls. What lies in a module is looked at before anything is known of it."""

    def __init__(self, calls_left: int = 0) -> None:
        super().__init__()
        self.calls_left = calls_left
        self.functions: dict[Hashable, tuple[Any, ...]] = {}


class Moment:
    """Knows the predictions that are open, and makes changes when none is. Thread-safe, and a cancel at any instruction
    leaves neither a prediction open nor a change out.

    `open` has the predictions that are open, and whether each has new code. One that is gone is no longer open. `known`
    has what was found out about calls, by module, and the cases that were found to grow. An empty one takes its place
    when a prediction begins, and outside predictions when a change is noted or made.
    """

    def __init__(self) -> None:
        # Held while generators of random numbers are set back: no prediction begins meanwhile.
        self._beginning = threading.RLock()
        # By subject, the change, and the time since which it waits.
        self._changes: dict[object, tuple[Callable[[], bool | None], float]] = {}
        # Made when a prediction, or a round of the warm-up, has ended whole: then each instance has made its calls.
        self._endings: dict[object, Callable[[], object]] = {}
        self._is_new = False
        self._begun = 0  # how many predictions
        self.open: OfEach[bool] = OfEach()
        self.known: OfEach[Known] = OfEach()

    def defer(self, subject: object, change: Callable[[], bool | None]) -> None:
        """Make this change at the next moment, in place of an earlier one of the same subject. If `change` returns
        True, it was too early, and is called again at the moment after."""
        with LOCK:
            _, since_s = self._changes.get(subject, (change, time.monotonic()))
            self._changes[subject] = change, since_s
            if not self.open:
                self.known = OfEach()

    def has(self, subject: object) -> bool:
        """Whether a change of this subject waits."""
        return subject in self._changes

    def begin(self, prediction: object) -> bool:
        """Begin a prediction. Returns whether it uses code that the one before it did not have."""
        try:
            with self._beginning, LOCK:
                self._begun += 1
                self.known = OfEach()
                if not self.open:
                    self._endings.clear()
                    self._change()
                elif any(time.monotonic() - since_s > _LONGEST_WAIT_S for _, since_s in self._changes.values()):
                    open_now = len(self.open)
                    log.warning("serve.mixed open=%d Predictions always overlap: these change their code.", open_now)
                    self._change()
                self.open[prediction] = is_new = self._is_new
                self._is_new = False
                return is_new
        except BaseException:
            self.end(prediction, is_complete=False)
            raise

    def end(self, prediction: object, is_complete: bool) -> None:
        """End a prediction. If it was broken off, the next one has new code in its place."""
        with LOCK:
            had_new_code = self.open.pop(prediction, False)
            self._is_new |= had_new_code and not is_complete
        self.conclude(is_complete)

    def at_end(self, subject: object, change: Callable[[], object]) -> None:
        """Make this change if the prediction that is open, or this round of the warm-up, ends whole."""
        with LOCK:
            self._endings[subject] = change

    def conclude(self, is_whole: bool) -> None:
        """Make the changes that wait for the end of a prediction, or of a round of the warm-up. If that was broken off,
        forget them."""
        with LOCK:
            if self.open and is_whole:  # the last one that is open makes them
                return
            endings, self._endings = self._endings, {}
        for change in endings.values() if is_whole else ():
            attempt(change)

    def pass_by(self) -> None:
        """Note a call. Outside all predictions it is a prediction of its own, so waiting changes are made now."""
        if self.open or not self._changes:
            return
        with LOCK:
            if not self.open:
                self._change()

    def holds(self, known: Known) -> bool:
        """Whether what is known about a module's calls holds in this one. Outside predictions, this counts the call."""
        if not self.open:
            known.calls_left -= 1
        return known.calls_left >= 0

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other prediction is open. While the context lasts, none begins."""
        with self._beginning:
            yield len(self.open) <= 1

    def stays_alone(self) -> Callable[[], bool]:
        """A function that says whether, from now on, no other prediction was open."""
        with LOCK:  # not while another one begins
            begun, is_alone = self._begun, len(self.open) <= 1
        return lambda: is_alone and self._begun == begun

    def forget_threads(self) -> None:
        """In a fork: predictions of other threads never end there, and what they hold is never released."""
        self._beginning, self.open = threading.RLock(), OfEach()

    def _change(self) -> None:
        for subject, noted in list(self._changes.items()):
            change, _ = noted
            is_early = attempt(change)
            if self._changes.get(subject) is noted:  # else it was noted anew meanwhile
                if is_early is True:
                    self._changes[subject] = change, time.monotonic()
                else:
                    del self._changes[subject]
            if is_early is not True:
                self.known = OfEach()
                self._is_new |= not isinstance(is_early, Failure)
