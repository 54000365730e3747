"""Orders the imports of several threads, so that no thread finds a half-made module.

Python locks each module separately. If two threads begin with different modules of one import cycle, they wait for each
other. Python notices, and gives one thread the other's half-made module. torch's compiler is such a cycle.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# These packages import one another, so they count as one.
_TORCH = frozenset({"torch", "functorch", "torchgen", "triton"})
_LONGEST_WAIT_S = 60.0
_POLL_S = 0.01
# CPython's import statement calls these before it takes a module's lock: the first for a missing module, the second for
# a module in the making. They have had these names since Python 3.3.
_HOOKED = ("_find_and_load", "_lock_unlock_module")
_USED = (*_HOOKED, "_get_module_lock", "_module_locks", "_DeadlockError")

_bootstrap: Any = importlib._bootstrap
_installing = threading.Lock()
_users = 0
_originals: dict[str, Callable[..., Any]] = {}


def can_order_imports() -> bool:
    """Whether this Python has the functions that `ordered_imports` replaces."""
    return all(hasattr(_bootstrap, name) for name in _USED)


@contextlib.contextmanager
def ordered_imports() -> Iterator[None]:
    """While the context lasts, let only one thread at a time import from a package. The others wait before they take
    the lock of any module of that package."""
    _install()
    try:
        yield
    finally:
        _uninstall()


def wait_for_begun_imports() -> None:
    """Wait until other threads have finished the imports of torch that they began before `ordered_imports`."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while time.monotonic() < deadline and any(_package(name) == "torch" for name in list(_bootstrap._module_locks)):
        time.sleep(_POLL_S)


def _package(name: str) -> str:
    package = name.partition(".")[0]
    return "torch" if package in _TORCH else package


def _install() -> None:
    global _users
    with _installing:
        _users += 1
        if _users == 1:
            for name in _HOOKED:
                _originals[name] = getattr(_bootstrap, name)
                setattr(_bootstrap, name, _ordered(_originals[name]))


def _uninstall() -> None:
    global _users
    with _installing:
        _users -= 1
        if _users == 0:
            for name in _HOOKED:
                setattr(_bootstrap, name, _originals[name])


def _ordered(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(name: str, *arguments: Any) -> Any:
        with _package_lock(name):
            return original(name, *arguments)

    return call


@contextlib.contextmanager
def _package_lock(name: str) -> Iterator[None]:
    """Hold the lock of the package of `name`. It is a module lock of Python's own kind, so Python notices a deadlock
    between locks of packages and of modules. Then this thread goes on without the lock."""
    lock = _bootstrap._get_module_lock(f"{_package(name)} and all its modules")
    try:
        lock.acquire()
    except _bootstrap._DeadlockError:
        yield
        return
    try:
        yield
    finally:
        lock.release()
