"""Boots in this process that make precompiled regions or load them, for the tests of those."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blocks
import pytest
import second_processes
import torch
from torch import nn

from compile_cache import child_process
from compile_cache.calls.spec import CallSpec
from compile_cache.inductor.counters import repeated
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.stored_functions import Artifacts
from compile_cache.inductor.torch_state import precisions, set_precisions
from compile_cache.lifecycle.host import resolve_cold_start
from compile_cache.serving.moment import Moment
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.ledger import Ledger

# The boots of an `activated` context, which ends with it.
_BOOTED: list[Regions] = []


def build(module_class: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """A module with the same weights every time."""
    torch.manual_seed(seed)
    return module_class(*args, **kwargs).eval()


def tensor(*shape: int, seed: int = 1) -> torch.Tensor:
    """An input, as a model makes it: inside inference mode, with the same numbers every time."""
    with torch.inference_mode():
        return torch.randn(*(shape or (4, blocks.SIZE)), generator=torch.Generator().manual_seed(seed))


def boot(directory: CacheDirectory, *modules: nn.Module, settings: Settings | None = None) -> Regions:
    """A boot's compiler, as in a new process, whose regions are `modules`."""
    torch._dynamo.reset()
    directory.ledger = Ledger(directory.scan)
    directory.ledger.expect(directory.scan())  # they were restored
    compiler = Regions(resolve_cold_start(settings or Settings()), directory)
    _BOOTED.append(compiler)
    for module in modules:
        compiler.compile(module)
    return compiler


def warm_up(
    compiler: Regions,
    call: Callable[[], Any],
    until_s: float = math.inf,
    mode: Callable[[], Any] = torch.inference_mode,
) -> Any:
    """The last answer to a call in the warm-up, which waits for compiles that begin before `until_s`."""
    answers: list[Any] = []
    with mode():
        repeated(lambda: compiler.warm_up(lambda: answers.append(call()), until_s))
    return answers[-1]


def warmed(directory: CacheDirectory, *modules: nn.Module, settings: Settings | None = None, times: int = 1) -> Regions:
    """A boot's compiler after a warm-up that calls each module so many times, with `tensor()`."""
    compiler = boot(directory, *modules, settings=settings)
    warm_up(compiler, lambda: [module(tensor()) for module in modules for _ in range(times)])
    return compiler


def built(directory: CacheDirectory, kind: Callable[..., nn.Module], *args: Any, **options: Any) -> tuple[Any, Regions]:
    """A module of this class, and the compiler of its boot after such a warm-up."""
    module = build(kind, *args)
    return module, warmed(directory, module, **options)


def finish(compiler: Regions) -> None:
    """Begin what waits for READY, and wait for all of it."""
    compiler.supply.release()
    assert compiler.supply.wait(600)


class Token:
    """A prediction, as a `Moment` knows it."""


FIRST, SECOND = Token(), Token()


@contextlib.contextmanager
def prediction(moment: Moment, is_whole: bool = True) -> Iterator[bool]:
    """A prediction, which ends whole or is broken off. Whether it has new code."""
    token = Token()
    yield moment.begin(token)
    moment.end(token, is_whole)


def only_report(compiler: Regions) -> RegionReport:
    (region,) = compiler.by_class.values()
    return region.report


def find(where: CacheDirectory | Artifacts, module: nn.Module, *args: Any, **kwargs: Any) -> Precompiled | str:
    """What a next boot, or one with these artifacts, finds for a call: an artifact, or why it has none."""
    with torch.inference_mode():
        artifacts = where if isinstance(where, Artifacts) else loaded(where)
        return artifacts.find(CallSpec.of((module, args, kwargs)), (module, args, kwargs))


def loaded(directory: CacheDirectory, settings: Settings | None = None) -> Artifacts:
    """The artifacts of a next boot."""
    compiler = Regions(resolve_cold_start(settings or Settings()), directory)
    compiler.supply.open()
    assert isinstance(compiler.supply.artifacts, Artifacts)
    return compiler.supply.artifacts


def eager(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        return module(*args, **kwargs)


def artifacts(directory: CacheDirectory) -> list[Path]:
    return sorted(directory.path.glob("precompiled/*/*.aot"))


@contextlib.contextmanager
def told(tell: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    """Have torch told something while the context lasts."""
    tell(value)
    try:
        yield
    finally:
        tell(before)


@contextlib.contextmanager
def products(tell: Callable[[], Any]) -> Iterator[None]:
    """Have torch told of a precision while the context lasts."""
    before = precisions()
    tell()
    try:
        yield
    finally:
        set_precisions(("highest", *before[1:]))


@contextlib.contextmanager
def activated(root: Path) -> Iterator[CacheDirectory]:
    """An empty cache directory that Inductor writes while the context lasts."""
    directory = CacheDirectory.claim(root)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            patch.setenv(name, "")
        patch.setattr(child_process, "_spawn", second_processes.fork)
        directory.activate(os.environ)
        yield directory
        while _BOOTED:
            if not isinstance(backlog := _BOOTED.pop().supply.orders, str):
                backlog.queue.close()  # else its thread and its process last until this process ends
        torch._dynamo.reset()


@contextlib.contextmanager
def copied(source: CacheDirectory, root: Path) -> Iterator[CacheDirectory]:
    """A cache directory with everything that `source` has, as a restored boot's."""
    with activated(root) as directory:
        shutil.copytree(source.path, directory.path, dirs_exist_ok=True)
        yield directory
