"""A lease: one container works, and the others wait. It is advisory: losing it costs double work, never an artifact.

The lease is an object that its holder keeps rewriting. Another container takes the holder for dead if the object does
not change for the time that it states. No two clocks are compared.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from compile_cache.errors import ObjectNotFound, StoreError
from compile_cache.store.base import ObjectStore

log = logging.getLogger("compile_cache")

EXPIRY_S = 6.0
_LONGEST_EXPIRY_S = 300.0
_MOST_BYTES = 4096


class Lease:
    """The lease `name` in `store`, as this process sees it. For one thread at a time."""

    def __init__(self, store: ObjectStore, name: str, expiry_s: float = EXPIRY_S) -> None:
        self._store = store
        self._name = name
        self._expiry_s = expiry_s
        self._holder = uuid.uuid4().hex
        self._writes = 0
        self._ended: threading.Event | None = None
        self._renewal: threading.Thread | None = None
        self._seen: bytes | None = None
        self._seen_at = 0.0

    @property
    def is_held(self) -> bool:
        """Whether this process has the lease, as far as it knows."""
        return self._ended is not None and not self._ended.is_set()

    def acquire(self) -> bool:
        """Try once to get the lease. A thread renews it until `release`, `give_up` or the end of the process.

        Raises:
            StoreError: the store cannot be read or written.
        """
        if self.is_held:
            return True
        for _ in range(2):
            seen = self._read()
            if seen is None:  # of a thousand containers most find a lease, and a read costs less than a refused PUT
                # The object that exists afterwards decides. Some stores accept the condition but ignore it. And a PUT
                # that is repeated after a lost answer fails on the object that it stored itself.
                self._store.put_if_absent(self._name, self._content())
                seen = self._read()
            if seen is not None and _stated(seen).get("holder") == self._holder:
                self._keep()
                return True
            if seen is not None and not self._is_dead(seen):
                return False
            if seen is not None:
                log.info("lease.expired name=%s", self._name)
                self._store.delete(self._name)
        return False

    def give_up(self) -> None:
        """Stop renewing the lease, without waiting. The renewing thread removes it, if the store permits."""
        if self._ended is not None:
            self._ended.set()

    def release(self) -> None:
        """Give the lease up, and wait until it is removed, so that the next container gets it at once."""
        if self._ended is None:
            return
        self.give_up()
        if self._renewal is None:
            self._remove()
        else:
            # The renewing thread removes the lease: a renewal under way would bring back a lease that was removed here.
            self._renewal.join(self._expiry_s)
            if self._renewal.is_alive():
                log.info("lease.not_released name=%s error=the store does not answer", self._name)
        self._ended = None

    def _content(self) -> bytes:
        """The next content. It differs each time, because unchanged content means that the holder died."""
        self._writes += 1
        return json.dumps({"holder": self._holder, "writes": self._writes, "expiry_s": self._expiry_s}).encode()

    def _read(self) -> bytes | None:
        try:
            return self._store.read(self._name, 0, _MOST_BYTES)
        except ObjectNotFound:
            return None

    def _is_ours(self) -> bool:
        return _stated(self._read() or b"").get("holder") == self._holder

    def _is_dead(self, seen: bytes) -> bool:
        """Whether the lease has been unchanged for the expiry that it states, or for ours if it states none."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
            return False
        return now - self._seen_at > _stated_expiry_s(seen, self._expiry_s)

    def _keep(self) -> None:
        self._ended = threading.Event()
        self._renewal = threading.Thread(
            target=self._renew, args=(self._ended,), name="compile-cache-lease", daemon=True
        )
        try:
            self._renewal.start()
        except RuntimeError:  # an exiting interpreter starts no threads: the lease lasts for its expiry
            self._renewal = None

    def _renew(self, ended: threading.Event) -> None:
        while not ended.wait(self._expiry_s / 3):
            try:
                if not self._is_ours():
                    log.info("lease.lost name=%s", self._name)
                    ended.set()
                    return
                self._store.put(self._name, self._content())
            except StoreError as error:
                log.info("lease.not_renewed name=%s error=%s", self._name, error)
        if self._ended is ended:  # else the lease was released and acquired again while a renewal hung
            self._remove()

    def _remove(self) -> None:
        try:
            if self._is_ours():
                self._store.delete(self._name)
        except StoreError as error:
            log.info("lease.not_released name=%s error=%s", self._name, error)


def _stated(content: bytes) -> Mapping[str, Any]:
    """The fields of a lease; none if it cannot be parsed."""
    try:
        stated = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return stated if isinstance(stated, dict) else {}


def _stated_expiry_s(content: bytes, otherwise_s: float) -> float:
    try:
        return min(max(0.0, float(_stated(content)["expiry_s"])), _LONGEST_EXPIRY_S)
    except (KeyError, TypeError, ValueError, OverflowError):
        return otherwise_s
