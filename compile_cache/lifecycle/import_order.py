"""Imports from two threads at once, in an order in which neither finds a half-made module.

Python locks each module by itself. Two threads that begin with different modules of one cycle then wait for each other;
Python notices, and gives one of them the other's module as far as it is made. torch's compiler is such a cycle.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# These import one another, and count as one package.
_TORCH = frozenset({"torch", "functorch", "torchgen", "triton"})
_LONGEST_WAIT_S = 60.0
_POLL_S = 0.01
# What CPython's import statement calls before it takes a module's lock: for a module that is not there, and for one
# that is being made. They have been the same from Python 3.3 on.
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
    """While the context lasts, one thread at a time imports from a package; the others wait, each before it takes the
    lock of any module of that package."""
    _install()
    try:
        yield
    finally:
        _uninstall()


def wait_for_begun_imports() -> None:
    """Wait until no other thread is in the middle of an import of torch that it began before `ordered_imports`."""
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
    """The lock of the package of `name`. It is one of Python's own module locks, so that Python notices where threads
    that hold locks of packages and of modules wait for one another: then this one goes on without."""
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
