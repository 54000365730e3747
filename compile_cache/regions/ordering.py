"""The orders of one region to the second process, and the code that has arrived.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.background.order import Making, PackedCall
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.counters import count_precompiled
from compile_cache.regions.inputs import kind_of_call
from compile_cache.regions.kinds import Kind, Kinds
from compile_cache.regions.ladder import RegionReport
from compile_cache.regions.stored import StoredFunctions

if TYPE_CHECKING:
    from compile_cache.regions.backlog import Backlog
    from compile_cache.regions.speed import Speed

log = logging.getLogger("compile_cache")


class Ordering:
    """The kinds of calls of one region that met it before their code existed.

    `backlog` returns the queue of orders to the second process, or None if nothing may be compiled ahead of time.
    With `holds`, code that arrives serves only after `swap`.
    """

    def __init__(self, report: RegionReport, stored: StoredFunctions, backlog: Callable[[], Backlog | None]) -> None:
        self.report = report
        self.stored = stored
        self.kinds = Kinds()
        self.holds = False
        self.shares_weights = False
        self._backlog = backlog
        self._arrived = self._swapped = 0
        self._paths: set[str] = set()
        self._is_swapping = False

    @property
    def generation(self) -> int:
        """How often code has arrived that may serve."""
        return self._swapped if self.holds else self._arrived

    def has_arrived(self, path: str) -> bool:
        """Whether this boot's second process made this artifact."""
        return path in self._paths

    def begin_swap(self) -> bool:
        """Let calls look for the code that has arrived; whether there is any, or an earlier swap did not end."""
        arrived = self._arrived
        self._is_swapping |= arrived != self._swapped
        self._swapped = arrived
        return self._is_swapping

    def end_swap(self) -> None:
        """Note that the calls of the swap have looked for the code."""
        self._is_swapping = False

    def is_due(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether code was made for such calls of `module`, and was found or not looked for yet."""
        kind = self.kinds.known(kind_of_call(module, args, kwargs))
        return kind is not None and self.generation >= kind.arrived > kind.looked.get(module, -1)

    def kind(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The kind of a call. If there are too many kinds, others are forgotten, with their artifacts."""
        kind = self.kinds.of(key, args, kwargs)
        for other in self.kinds.let_go():
            for path in other.paths:
                self.stored.let_go(path)
        return kind

    def pack(self, kind: Kind, module: nn.Module, args: Any, kwargs: Any) -> PackedCall | None:
        """The call in bytes, packed before it is served, for `order` afterwards. None if it cannot be handed over, or
        was ordered too often."""
        backlog = self._backlog()
        if backlog is None:
            return None
        if not kind.ask(module):
            self.give_up(kind, kind.refused)
            return None
        call = attempt(backlog.pack, module, args, kwargs, self.shares_weights)
        if isinstance(call, Failure):
            self._refuse(kind, call)
            return None
        return call

    def order(self, kind: Kind, call: PackedCall, may_vary: bool = True) -> None:
        """Order code for a call that this thread has just served eager. If its sizes `may_vary` and several calls
        differ in one size, order one graph for all sizes."""
        backlog = self._backlog()
        assert backlog is not None
        dynamic = self.kinds.varying(kind) if may_vary else ()
        kind.is_open |= bool(dynamic)
        receive = functools.partial(self._receive, kind, bool(dynamic))
        ordered = attempt(backlog.order, f"{self.report.name} {kind.text}", call, dynamic, receive)
        if isinstance(ordered, Failure):
            self._refuse(kind, ordered)
        self.report.wait_for(self.kinds.waiting)

    def _refuse(self, kind: Kind, failure: Failure) -> None:
        """Stop ordering a kind that cannot be handed to the second process. In the warm-up, this process compiles
        it."""
        kind.waiting -= 1
        kind.refused = f"cannot be compiled in a second process: {failure.reason}"
        self.report.explain(f"{kind.text} {kind.refused}")

    def give_up(self, kind: Kind, reason: str) -> None:
        """Serve calls of a kind eager from now on, and stop ordering them."""
        kind.refused = reason
        self.report.explain(f"eager for {kind.text}: {reason}")
        self.report.take_step("eager")

    def _receive(self, kind: Kind, is_dynamic: bool, making: Making) -> None:
        """Take the second process's answer. Another thread calls this."""
        if is_dynamic:
            kind.is_open = bool(making.path)
        if making.path in kind.paths:
            self.give_up(kind, f"code of the second process does not fit in this process: {kind.misfit}")
        elif making.path:
            kind.paths.append(making.path)
            self._paths.add(making.path)
            count_precompiled("made")
            self.report.made += 1
            self.report.precompile_s += making.seconds
            self._note_speed(kind, making.speed)
        elif not is_dynamic:  # a dynamic kind is ordered once more, for its own sizes
            self.give_up(kind, making.reason)
        arrived = self._arrived + 1
        if making.path:
            kind.arrived = arrived
        self._arrived = arrived
        kind.waiting -= 1  # the last step: a kind that neither waits nor finds code would be ordered again
        self.report.wait_for(self.kinds.waiting)

    def _note_speed(self, kind: Kind, speed: Speed | None) -> None:
        if speed is None:
            return
        self.report.note_speed(speed.compiled_ms, speed.eager_ms)
        if speed.compiled_ms > speed.eager_ms:
            log.warning(
                "compile.slower region=%s call=%s compiled_ms=%.3f eager_ms=%.3f Compiled code is slower than eager "
                "here. To leave the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
                self.report.name,
                kind.text,
                speed.compiled_ms,
                speed.eager_ms,
            )
