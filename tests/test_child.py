"""The compiling process: what it does, and how it fails."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_handlers import order
from marked_processes import PATIENCE_S, open_files, shared_memory, wait_for

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import OrderFailed, ProcessDied, ProcessNotReady


@pytest.fixture
def start(tmp_path, marked) -> Iterator[Callable[..., CompilingProcess]]:
    """Starts processes that log into `tmp_path / "log"`."""
    started: list[CompilingProcess] = []

    def start(factory: str = "make", setup: bytes = b"") -> CompilingProcess:
        handler = f"background_handlers:{factory}"
        started.append(CompilingProcess(handler, setup, tmp_path / "log", marked.environ))
        return started[-1]

    yield start
    for process in started:
        process.stop()


# A server that asks its process once.
ASKS = """
import sys
sys.path[:0] = {path}
from pathlib import Path
from compile_cache.background.child import CompilingProcess
answer = CompilingProcess("{handlers}:make", b"", Path("log"), {{}}).answer(b"", 120.0).decode()
{told}
"""


def run_server(folder: Path, program: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", program]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)


def describe(process: CompilingProcess) -> dict:
    return json.loads(process.answer(order("describe"), PATIENCE_S))


def test_process_has_the_servers_path_and_folder_and_gives_way_to_everybody(start, tmp_path, marked, monkeypatch):
    """It has none of the server's files, and a crash of it leaves no core file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "no:such:folder"))
    monkeypatch.setenv("BACKGROUND_SECRET", "of the server alone")
    marked.environ["KEEPS_PRIORITY"] = "yes"
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    try:
        with (tmp_path / "kept open").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            process = start(setup=b"made of this")
            told = describe(process)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert (told["setup"], told["path"], told["cwd"]) == ("made of this", sys.path, str(tmp_path))
    assert told["environ"].items() >= marked.environ.items()
    assert "BACKGROUND_SECRET" not in told["environ"]
    assert told["niceness"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert told["group"] == told["pid"] == process.pid != os.getpgrp()
    assert (told["arguments"], told["has_torch"], told["core_limit"]) == ([], False, 0)
    assert str(tmp_path / "kept open") not in told["open"].values()
    assert [told["open"][number] for number in "012"] == ["/dev/null", *[str(tmp_path / "log")] * 2]
    again = describe(process)
    assert again["pid"] == process.pid  # it answers one order after another
    assert (again["collects"], again["garbage"]) == (False, 0)  # garbage is collected after each
    assert process.is_alive


def test_nothing_is_left_that_would_end_a_process_that_has_answered(start):
    before = {*threading.enumerate()}
    describe(start())
    timers = [thread for thread in {*threading.enumerate()} - before if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(PATIENCE_S)
    assert not any(timer.is_alive() for timer in timers)


def test_answers_may_be_larger_than_a_channel(start):
    process = start()
    assert len(process.answer(order("echo", size=32 << 20), PATIENCE_S)) == 32 << 20


def test_process_finds_the_library_and_handlers_that_are_on_the_servers_path_alone(tmp_path):
    """Neither is in a folder that a new Python would look into, and a module of the working directory is not taken."""
    library = Path(__file__).parents[1] / "compile_cache"
    shutil.copytree(library, tmp_path / "library" / "compile_cache")
    handlers = tmp_path / "predictor" / "handlers_of_predictor.py"
    handlers.parent.mkdir()
    handlers.write_text("import compile_cache\nmake = lambda _: lambda _: compile_cache.__file__.encode()\n")
    (tmp_path / "json.py").write_text("raise ImportError('not this one')\n")
    asks = ASKS.format(path=["library", str(handlers.parent)], handlers="handlers_of_predictor", told="print(answer)")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run_server(tmp_path, asks, "-P", **environ)
    assert done.stdout.strip() == str(tmp_path / "library" / "compile_cache" / "__init__.py"), done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        *("-O", "-OO -B -b", "-E -s", "-I -q", "-W error::BytesWarning -W ignore:a:UserWarning", "-X dev -X utf8=0"),
        *("-X int_max_str_digits=9000 -X no_debug_ranges", "-X pycache_prefix=pycache -X faulthandler -Wdefault -bb"),
    ],
)
def test_process_has_the_servers_interpreter_flags(tmp_path, flags):
    own = "[[getattr(sys.flags, name) for name in names], sys.warnoptions, sys._xoptions]"
    names = [name for name in dir(sys.flags) if name[0] != "_" and isinstance(getattr(sys.flags, name), int)]
    told = f"import json, sys; names = {sorted({*names} - {'safe_path', 'n_fields', 'n_sequence_fields'})}"
    (tmp_path / "flags_of_process.py").write_text(f"{told}\nmake = lambda _: lambda _: json.dumps({own}).encode()\n")
    path = [str(tmp_path), str(Path(__file__).parents[1])]
    told = f"{told}\nprint(json.dumps([{own}, json.loads(answer)]))"
    done = run_server(tmp_path, ASKS.format(path=path, handlers="flags_of_process", told=told), *flags.split())
    ours, its = json.loads(done.stdout)
    assert its == ours, done.stderr


def test_whatever_the_process_and_its_children_print_is_in_the_log_alone(start, tmp_path, capfd):
    """A child inherits nothing else. A log that has grown large is emptied."""
    process, log = start(), tmp_path / "log"
    process.answer(order("speak"), PATIENCE_S)
    process.answer(order("list_inherited"), PATIENCE_S)
    text = log.read_text()
    for line in ("said with print", "said to stderr", "written to 1", "said by a grandchild", "grandchild to stderr"):
        assert line in text.splitlines()
    assert "-> /dev/null" in text
    assert "socket:" not in text
    assert "pipe:" not in text
    assert capfd.readouterr() == ("", "")
    with log.open("ab") as file:
        file.write(b"x" * (9 << 20))
    process.answer(order("speak"), PATIENCE_S)
    assert log.read_text().startswith("said with print\n")
    assert log.stat().st_size < 1 << 10


def test_order_that_raises_fails_and_leaves_the_process_serving(start, tmp_path):
    """`may_succeed_afresh`: another process may not meet the error, even where a compiler has wrapped it."""
    process = start()
    with pytest.raises(OrderFailed, match=r"OSError: \[Errno 28\] disk is full, as often$") as raised:  # in one line
        process.answer(order("fail", message="disk is full,\n  as often"), PATIENCE_S)
    assert not raised.value.may_succeed_afresh
    assert "Traceback" in (tmp_path / "log").read_text()
    for error, message, afresh in (
        ("MemoryError", "", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError", "CUDA driver error: operation not supported", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "a shape does not fit", False),
        ("SystemExit", "3", False),
    ):
        with pytest.raises(OrderFailed, match="ValueError: wrapped") as raised:
            process.answer(order("raise", error=error, message=message), PATIENCE_S)
        assert raised.value.may_succeed_afresh == afresh, message
    assert describe(process)["pid"] == process.pid


@pytest.mark.parametrize(
    ("order_name", "arguments", "said"),
    [
        ("exit", {"code": 3}, "ended with exit code 3.*about to exit"),
        ("abort", {}, "was killed by SIGABRT.*about to abort"),
        ("die", {}, "was killed by SIGKILL, as the kernel does when memory runs out.*no last line"),
        ("leave", {"code": 4}, "ended with exit code 4"),
        ("babble", {}, "broke off the exchange"),
    ],
)
def test_death_is_told_in_words_and_takes_the_group_along(start, marked, order_name, arguments, said):
    """The last line is of the order that died, not of one before."""
    process = start()
    process.answer(order("speak"), PATIENCE_S)
    with pytest.raises(ProcessDied, match=said) as raised:
        process.answer(order(order_name, **arguments), PATIENCE_S)
    assert not isinstance(raised.value, ProcessNotReady)
    assert not process.is_alive
    wait_for(lambda: not marked.pids())


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("make_nothing", "could not prepare itself: LookupError: nothing is made from this"),
        ("make_crash", "was killed by SIGABRT.*crashing before the first order"),
        ("no_such_function", "could not prepare itself: AttributeError"),
    ],
)
def test_process_that_is_never_ready_is_told_apart(start, marked, factory, said):
    with pytest.raises(ProcessNotReady, match=said):
        start(factory, b"this").answer(b"j" * (4 << 20), PATIENCE_S)
    wait_for(lambda: not marked.pids())


def test_order_past_its_deadline_is_ended_with_all_that_it_started(start, tmp_path, marked):
    process = start()
    describe(process)
    before = shared_memory()
    with pytest.raises(ProcessDied, match="gave no answer in 3 s"):
        process.answer(order("hang", folder=str(tmp_path)), 3.0)
    assert (tmp_path / "hangs").exists()
    wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_stop_ends_an_order_of_another_thread_and_leaves_no_file_open(start, tmp_path, marked):
    describe(start())
    before = open_files()
    process = start()
    errors: list[ProcessDied] = []

    def answer() -> None:
        try:
            process.answer(order("hang", folder=str(tmp_path)), PATIENCE_S)
        except ProcessDied as error:
            errors.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    wait_for((tmp_path / "hangs").exists)
    process.stop()
    process.stop()
    thread.join(PATIENCE_S)
    assert not process.is_alive
    with pytest.raises(ProcessDied, match="was stopped"):
        process.answer(order("describe"), PATIENCE_S)
    assert [str(error) for error in errors] == ["The compiling process was stopped."]
    assert not open_files() - before
    wait_for(lambda: len(marked.pids()) == 1)  # the first one


def test_process_that_cannot_be_started_leaves_no_file_open(tmp_path, monkeypatch):
    before = open_files()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(FileNotFoundError):
        CompilingProcess("background_handlers:make", b"", tmp_path / "log", {})
    assert not open_files() - before


def test_process_outlives_the_thread_that_started_it_and_a_fork_of_the_server(start):
    processes: list[CompilingProcess] = []
    thread = threading.Thread(target=lambda: processes.append(start()))
    thread.start()
    thread.join()
    (process,) = processes
    pid = describe(process)["pid"]
    fork = os.fork()
    if fork == 0:
        process.stop()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    time.sleep(1.5)  # three looks of the process at its server
    assert describe(process)["pid"] == pid
