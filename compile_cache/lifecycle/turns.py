"""Turns: which of the boots that start together compiles for a key, and which publishes. A lease holds each turn."""

from __future__ import annotations

import logging
import random
import threading
import time

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.lease import Lease

log = logging.getLogger("compile_cache")

# Compiling may block the process's other threads for seconds, so the lease lasts longer than a renewal takes.
_COMPILE_EXPIRY_S = 20.0
_PEER_POLL_S = 1.0
# On an overloaded store a renewal may take several seconds, and nobody is in a hurry.
_PUBLISH_EXPIRY_S = 30.0
# The longest pause between two looks while another container publishes. A thousand waiting containers must not overload
# the store. Nothing is lost meanwhile: at its exit each publishes without waiting.
_LONGEST_LOOK_S = 15.0
# After this time a container publishes beside another. After a shorter time, all waiting containers would do so at
# once.
_LONGEST_WAIT_S = 600.0


class CompileTurn:
    """The turn to compile for a key. From `wait` until `pass_on` or `release`, it owns the lease that other boots wait
    for. `pass_on` and `release` are thread-safe, and may be repeated."""

    def __init__(self, longest_wait_s: float) -> None:
        self._longest_wait_s = longest_wait_s
        self._lease: Lease | None = None
        self._waited_s = 0.0
        self._pausing_since: float | None = None

    @property
    def waited_s(self) -> float:
        """The seconds spent waiting for another boot so far, without requests to the store."""
        since = self._pausing_since
        return self._waited_s + (time.monotonic() - since if since is not None else 0.0)

    def wait(self, cache: CompileCache, abandoned: threading.Event) -> None:
        """Wait while another boot has the turn, at most `longest_wait_s`. Take the turn when it is free."""
        self.pass_on()
        self._lease = Lease(cache.writing, cache.key.prefix + "compile.lease", _COMPILE_EXPIRY_S)
        try:
            while not self._lease.acquire() and self.waited_s < self._longest_wait_s and not abandoned.is_set():
                self._pause(abandoned)
        except StoreError as error:  # the lease is advisory: without it, two boots compile the same
            log.info("restore.no_lease error=%s", error)

    def _pause(self, abandoned: threading.Event) -> None:
        self._pausing_since = time.monotonic()
        left_s = self._longest_wait_s - self._waited_s
        abandoned.wait(min(left_s, _PEER_POLL_S * random.uniform(0.5, 1.5)))
        self._waited_s += time.monotonic() - self._pausing_since
        self._pausing_since = None

    def pass_on(self) -> None:
        """Give the turn up, without waiting for the store."""
        if self._lease is not None:
            self._lease.give_up()

    def release(self) -> None:
        """Give the turn up, and return when the store has it."""
        if self._lease is not None:
            self._lease.release()


class PublishTurn:
    """The turn to publish or compact for a key, one container at a time. For one thread."""

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._lease: Lease | None = None
        self._waiting_since: float | None = None
        self._looks = 0

    @property
    def is_held(self) -> bool:
        """Whether this container has the turn, as far as it knows."""
        return self._lease is not None and self._lease.is_held

    def take(self) -> bool:
        """Take the turn, if no other container has it. Returns whether it is held."""
        if self._lease is None:
            self._lease = Lease(self._cache.writing, self._cache.key.prefix + "publish.lease", _PUBLISH_EXPIRY_S)
        try:
            return self._lease.acquire()
        except StoreUnavailable as error:  # under the load of a thousand containers, not all may publish now
            log.info("publish.no_lease error=%s", error)
            return False
        except StoreError as error:  # the lease is advisory: the upload itself reports the error
            log.info("publish.no_lease error=%s", error)
            return True

    def take_or_wait_no_longer(self) -> bool:
        """Take the turn if every listed pack is known and no other container has it, or after the longest wait."""
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        is_free = self._cache.is_fully_known and self.take()
        self._looks += 1
        return is_free or now - self._waiting_since > _LONGEST_WAIT_S

    def release(self) -> None:
        """Give the turn up."""
        if self._lease is not None:
            self._lease.release()

    def next_look_s(self) -> float:
        """The seconds until the next look. They grow with each look."""
        return min(_LONGEST_LOOK_S, 0.5 * 2.0 ** min(self._looks, 10)) * random.uniform(0.5, 1.0)

    def begin_anew(self) -> None:
        """Reset the wait and the looks, because everything is published."""
        self._waiting_since, self._looks = None, 0
