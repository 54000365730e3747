"""Libraries are built in place, and a kill leaves them half-written: none of these is taken, stored or built upon."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from background_handlers import build_source
from machines import Machine
from marked_processes import PATIENCE_S, wait_for

from compile_cache.background import orders as orders_module
from compile_cache.background.orders import Order, Orders
from compile_cache.inductor.make import Answer
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

KILLS = 24
# About as long as the compiler and the linker take, and as long as the linker writes.
BUILD_S, WRITE_S = 0.1, 0.01


def order(orders: Orders, name: str) -> None:
    """Order a library. Its files are taken as a boot takes them."""
    made = Order(name, (0,), name.encode())

    def take(answer: Future[Any]) -> None:
        if not answer.cancelled() and not answer.result().reason:
            orders.copy_in(answer.result())
            orders._directory.ledger.hand_over(answer.result().files)

    made.answer.add_done_callback(take)
    orders.queue.put(made)


def kill_at_work(orders: Orders, library: Path, moments: random.Random) -> None:
    """Kill the process with its compiler and linker: while they work, or while the linker writes the library."""
    wait_for(library.with_suffix(".begun").exists)
    if moments.random() < 0.3:
        time.sleep(moments.uniform(0.0, BUILD_S))
    else:
        wait_for(lambda: library.exists() or not orders.queue.waiting)
        time.sleep(moments.uniform(0.0, WRITE_S))
    if (process := orders.queue._process) is not None and process.is_alive:
        os.killpg(process.pid, signal.SIGKILL)
        wait_for(lambda: not process.is_alive)  # it would be given the next order, which has one attempt


def broken(*libraries: Path) -> list[str]:
    """Those that a process cannot load. One that is too short kills it."""
    program = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    command = [sys.executable, "-S", "-c", program, *libraries]
    if not libraries or subprocess.run(command, capture_output=True).returncode == 0:
        return []
    halves = libraries[: len(libraries) // 2], libraries[len(libraries) // 2 :]
    return [libraries[0].name] if len(libraries) == 1 else [*broken(*halves[0]), *broken(*halves[1])]


def test_every_library_loads_after_kills_while_libraries_are_written(tmp_path, monkeypatch, local, key, environment):
    monkeypatch.setattr(orders_module, "_HANDLER", "background_handlers:make_library")
    monkeypatch.setattr(orders_module, "_ATTEMPTS", 1)
    monkeypatch.setenv("BACKGROUND_SOURCE", str(build_source(tmp_path)))

    server, moments, left = Machine.at(tmp_path / "server", local, key, environment), random.Random(KILLS), []
    orders = Orders(Settings(), server.directory)
    orders.queue.release()
    workshop = orders.workshop
    try:
        for number in range(KILLS):
            library = workshop / f"{number // 2}.so"  # the next process is to build a broken one again
            library.with_suffix(".begun").unlink(missing_ok=True)
            order(orders, library.stem)
            kill_at_work(orders, library, moments)
            assert orders.queue.wait(PATIENCE_S)
            left += broken(*filter(Path.exists, [library]))
            if number % 8 == 7:
                server.publish()
        for number in range(KILLS // 2):
            order(orders, str(number))
        assert orders.queue.wait(PATIENCE_S)
    finally:
        orders.queue.close()
    server.publish()
    other = Machine.at(tmp_path / "other", local, key, environment)
    other.restore()
    for here in (server.directory.path, other.directory.path):
        libraries = sorted(here.glob("*.so"))
        assert len(libraries) == KILLS // 2
        assert broken(*libraries) == []
    assert left, "no kill came while a library was written"


def test_an_artifact_comes_after_the_kernels_that_it_needs(tmp_path, monkeypatch):
    directory, found = CacheDirectory.claim(tmp_path), []
    orders = Orders(Settings(), directory)
    kernel, artifact = "zz/kernel.so", "precompiled/group/function.aot"
    (orders.workshop / kernel).parent.mkdir(parents=True)
    (orders.workshop / kernel).touch()
    there = (directory.path / kernel).exists
    monkeypatch.setattr(orders_module, "copy_artifact", lambda *_: found.append(there()))
    orders.copy_in(Answer(files=(artifact, kernel)))
    assert found == [True]


def test_a_file_is_taken_with_the_cache_directorys_path_in_place_of_the_workshops(tmp_path):
    directory = CacheDirectory.claim(tmp_path)
    orders = Orders(Settings(), directory)
    orders.workshop.mkdir()
    (orders.workshop / "kernel.json").write_text(f"{orders.workshop}/kernel.so")
    orders.copy_in(Answer(files=("kernel.json",)))
    assert (directory.path / "kernel.json").read_text() == f"{directory.path}/kernel.so"


def test_a_result_of_tuning_that_torch_has_rewritten_takes_the_place_of_the_old_one(tmp_path):
    directory, path = CacheDirectory.claim(tmp_path), "kernel.best_config"
    orders = Orders(Settings(), directory)
    orders.workshop.mkdir()
    for folder, text in ((directory.path, "old"), (orders.workshop, "new")):
        (folder / path).write_text(text)
    orders.copy_in(Answer(files=(path,)))
    assert (directory.path / path).read_text() == "new"
