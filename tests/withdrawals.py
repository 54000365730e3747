"""Machines that boot from a store, and withdrawing in it, for the tests of withdrawals."""

from __future__ import annotations

from pathlib import Path

from machines import Machine

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.store.base import ObjectStore, Stores
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.catalog import read_catalog
from compile_cache.versions.directory import CacheDirectory
from compile_cache.versions.rules import Rules
from compile_cache.versions.withdrawing import Withdrawn, plan_withdrawal, withdraw

COLD = {"fxgraph/ab/fone/entry": b"a graph", "ab/kernel.so": b"code" * 100}
MORE = {"cd/more.so": b"more"}


def boot_machine(
    folder: Path, store: ObjectStore, key: CacheKey, environment: Environment, writing: ObjectStore | None = None
) -> Machine:
    """A machine with its cache directory in `folder`."""
    directory = CacheDirectory.claim(folder)
    return Machine(CompileCache(Stores(store, writing or store), key, environment, directory, Rules()), directory)


def take_out(
    store: ObjectStore,
    key: CacheKey,
    *packs: str,
    reason: str = "wrong pictures",
    reading: ObjectStore | None = None,
) -> Withdrawn:
    """Withdraw these packs of `key`; without any, the version."""
    reading = reading or store
    version = next(version for version in read_catalog(reading).versions if version.key == key)
    plan = plan_withdrawal(reading, version, packs or None, Rules())
    return withdraw(reading, store, plan, reason, Rules())


def in_use(store: ObjectStore, key: CacheKey) -> set[str]:
    return {p.name for version in read_catalog(store).versions if version.key == key for p in version.packs}


def contents(store: ObjectStore) -> dict[str, bytes]:
    return {entry.name: store.read(entry.name) for entry in store.list("v1/")}
