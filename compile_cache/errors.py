"""Every error this library raises, and its log.

CompileCacheError
├── SettingsError            a setting is unknown or has an invalid value
├── NotRestored              a boot is not restored and precompiled, and COMPILE_CACHE_REQUIRE=hit
├── WeightsError             Cog's managed weights did not arrive, or its file about them is damaged
├── NotAModuleError          the argument of boot.compile() is no torch.nn.Module
├── CacheDirectoryError      the local cache directory cannot be made, locked or written
├── PackError                a pack is damaged, foreign or hostile; it counts as absent
│   └── PackForbidden        a pack may be intact, but the settings or its place forbid its use
├── NotHandedOver            a call, or the server's state in it, that another process cannot have
├── ArtifactError            code of a region cannot be made or compared, is damaged, or does not belong here
├── ProcessDied              the compiling process ended, or was ended, before it answered
│   └── ProcessNotReady      it ended, or took too long, before its first order
├── OrderFailed              the compiling process answered that the order raised an error
├── NoGraph                  no graph of this process fits a call
│   └── GraphNotStored       a graph is missing in the stored files
└── StoreError               a request to the object store failed
    ├── StoreUnavailable     the store did not answer, or not in time
    ├── StoreAccessDenied    the store does not permit the request with these credentials
    └── ObjectNotFound       the object or the bucket does not exist

Each message says what happened, where, and what to do about it. A boot raises only `SettingsError`, because settings
are the user's own input, `NotRestored`, if they ask for it, and `WeightsError`, if there are no weights. Every other
error costs speed, not the boot.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

# The log of the whole library.
log = logging.getLogger("compile_cache")
# The user and the password of an address, and a query, with or without an address before it. A password may have any
# character, so all up to the last @ may belong to it.
_SECRETS = re.compile(r"(?<=://)((?!://).)*@|\?[^\s'\"<>)]*=[^\s'\"<>)]*")


def redacted(text: str) -> str:
    """A text whose addresses have no user, no password and no query: a query may have a signature."""
    return _SECRETS.sub("", text)


class CompileCacheError(Exception):
    """The root of the tree. Its messages have no secrets of addresses, whatever error they quote."""

    def __init__(self, message: str) -> None:
        super().__init__(redacted(message))


class SettingsError(CompileCacheError, ValueError):
    """A setting is unknown or has an invalid value. The message names the variable."""


class NotRestored(CompileCacheError):
    """A boot is not restored and precompiled, and the settings require it. The message says why."""


class WeightsError(CompileCacheError):
    """Cog's managed weights did not arrive, or its file about them is damaged. The message names the folder or file."""


class NotAModuleError(CompileCacheError, TypeError):
    """The argument of `boot.compile()` is no `torch.nn.Module`. The boot serves it eager."""


class CacheDirectoryError(CompileCacheError):
    """The local cache directory cannot be made, locked or written."""


class PackError(CompileCacheError):
    """A pack is damaged, foreign or hostile. No part of it was used."""


class PackForbidden(PackError):
    """A pack may be intact, but the settings or its place in the store forbid its use."""


@dataclass(frozen=True, slots=True)
class RefusedPack:
    """A pack that counts as absent, and the reason. `is_final` is False if it could not be read or its key has too
    many packs: the next look may use it."""

    name: str
    reason: str
    is_final: bool = True

    @classmethod
    def after(cls, name: str, error: PackError | StoreError) -> RefusedPack:
        """The pack whose use failed with `error`."""
        return cls(name, str(error), isinstance(error, PackError))


class NotHandedOver(CompileCacheError):
    """A call, or the server's state in it, cannot be handed over to another process, or cannot be rebuilt there. The
    message names the attribute, the option or the function."""


class ArtifactError(CompileCacheError):
    """Code of a region cannot be made or compared, might be wrong in another process, is damaged, or does not belong
    here. It is not used."""


class ProcessDied(CompileCacheError):
    """The compiling process ended, or did not answer in time and was ended. Its whole process group is gone."""


class ProcessNotReady(ProcessDied):
    """The compiling process ended, or took too long, before its first order. No order is to blame."""


class OrderFailed(CompileCacheError):
    """The order raised an error in the compiling process, which lives on.

    `may_succeed_afresh`: memory ran out, or the GPU's context is broken, so a new process may make the same order.
    """

    def __init__(self, message: str, may_succeed_afresh: bool = False) -> None:
        super().__init__(message)
        self.may_succeed_afresh = may_succeed_afresh  # pickled beside the message


class NoGraph(CompileCacheError):
    """No graph of this process fits a call, or another thread traces: nothing of the call was run."""


class GraphNotStored(NoGraph):
    """A graph is missing in the stored files that a call was to be traced out of."""


class StoreError(CompileCacheError):
    """A request to the object store failed."""


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time."""


class StoreAccessDenied(StoreError):
    """The store does not permit the request with these credentials."""


class ObjectNotFound(StoreError):
    """The object or the bucket does not exist."""


def first_line(error: BaseException) -> str:
    """An error's message in one line of at most 300 characters."""
    lines = [*filter(None, map(str.strip, str(error).splitlines())), type(error).__name__]
    # Dynamo names the back end that failed, and says in the next line how.
    return " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])[:300]


def causes(error: BaseException | None) -> list[BaseException]:
    """The error, and the errors that led to it."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that a step raised."""

    error: BaseException

    @property
    def reason(self) -> str:
        """The error's first line, after its type if that says more."""
        line = first_line(self.error)
        return line if isinstance(self.error, CompileCacheError) else f"{type(self.error).__name__}: {line}"


def attempt(step: Callable[..., _Result], *inputs: Any) -> _Result | Failure:
    """The result of a step that a call does not need, or its `Failure`: no memory, a full disk, an unforeseen input."""
    try:
        return step(*inputs)
    except Exception as error:
        is_known = isinstance(error, CompileCacheError)
        name = getattr(step, "__qualname__", step)
        log.info("region.failed step=%s error=%r", name, error, exc_info=None if is_known else error)
        return Failure(error)
