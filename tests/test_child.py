"""The compiling process: what it does, and how it fails."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_handlers import order
from marked_processes import PATIENCE_S, Marked, shared_memory, wait_for

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import OrderFailed, OrderTimedOut, ProcessDied, ProcessNotReady


@pytest.fixture
def marked() -> Iterator[Marked]:
    marked = Marked()
    yield marked
    marked.kill()


@pytest.fixture
def start(tmp_path, marked) -> Iterator[Callable[..., CompilingProcess]]:
    """Starts processes that log into `tmp_path / "log"`."""
    started: list[CompilingProcess] = []

    def start(factory: str = "make", setup: bytes = b"") -> CompilingProcess:
        handler = f"background_handlers:{factory}"
        started.append(CompilingProcess.start(handler, setup, tmp_path / "log", marked.environ))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def describe(process: CompilingProcess) -> dict:
    return json.loads(process.answer(order("describe"), PATIENCE_S))


def test_process_does_one_job_after_another(start):
    process = start(setup=b"made of this")
    first, second = describe(process), describe(process)
    assert first["setup"] == "made of this"
    assert first["pid"] == second["pid"] == process.pid
    assert process.is_alive


def test_answers_and_setups_may_be_larger_than_a_channel(start):
    process = start(setup=b"s" * (8 << 20))
    assert len(process.answer(order("echo", size=32 << 20), PATIENCE_S)) == 32 << 20
    assert len(describe(process)["setup"]) == 8 << 20


def test_process_has_the_servers_path_and_folder_and_gives_way_to_everybody(start, tmp_path, marked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "no:such:folder"))
    told = describe(start())
    assert told["path"] == sys.path
    assert told["cwd"] == str(tmp_path)
    assert told["environ"].items() >= marked.environ.items()
    assert told["niceness"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert told["group"] == told["pid"] != os.getpgrp()
    assert told["arguments"] == []
    assert not told["has_torch"]


def test_process_sees_only_the_variables_that_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("BACKGROUND_SECRET", "1")
    process = CompilingProcess.start("background_handlers:make", b"", tmp_path / "log", {"ONE": "1"})
    try:
        environ = describe(process)["environ"]
    finally:
        process.stop()
    assert environ["ONE"] == "1"
    assert "BACKGROUND_SECRET" not in environ


def test_process_finds_the_library_and_handlers_that_are_on_the_servers_path_alone(tmp_path):
    """Neither is in a folder that a new Python would look into, and a module of the working directory is not taken."""
    library = Path(__file__).parents[1] / "compile_cache"
    shutil.copytree(library, tmp_path / "library" / "compile_cache")
    handlers = tmp_path / "predictor" / "handlers_of_predictor.py"
    handlers.parent.mkdir()
    handlers.write_text(
        "import compile_cache\ndef make(setup):\n    return lambda job: compile_cache.__file__.encode()\n"
    )
    (tmp_path / "json.py").write_text("raise ImportError('not this one')\n")
    program = f"""
    import sys
    sys.path[:0] = ["library", {str(handlers.parent)!r}]
    from pathlib import Path
    from compile_cache.background.child import CompilingProcess
    process = CompilingProcess.start("handlers_of_predictor:make", b"", Path("log"), {{}})
    print(process.answer(b"", {PATIENCE_S}).decode())
    """
    server = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(server, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
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
    program = f"""
    import sys
    sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parents[1])!r}]
    from pathlib import Path
    from compile_cache.background.child import CompilingProcess
    {told}
    process = CompilingProcess.start("flags_of_process:make", b"", Path("log"), {{}})
    print(json.dumps([{own}, json.loads(process.answer(b"", {PATIENCE_S}))]))
    """
    server = [sys.executable, *flags.split(), "-c", textwrap.dedent(program)]
    done = subprocess.run(server, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=PATIENCE_S)
    ours, its = json.loads(done.stdout)
    assert its == ours, done.stderr


def test_process_inherits_no_file_of_the_server(start, tmp_path):
    with (tmp_path / "kept open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        opened = describe(start())["open"]
    assert str(tmp_path / "kept open") not in opened.values()
    assert opened["0"] == "/dev/null"
    assert opened["1"] == opened["2"] == str(tmp_path / "log")


def test_children_of_the_process_inherit_only_its_log(start, tmp_path):
    start().answer(order("list_inherited"), PATIENCE_S)
    listing = (tmp_path / "log").read_text()
    assert "-> /dev/null" in listing
    assert "socket:" not in listing
    assert "pipe:" not in listing


def test_whatever_the_process_and_its_children_print_is_in_the_log_alone(start, tmp_path, capfd):
    start().answer(order("speak"), PATIENCE_S)
    lines = (tmp_path / "log").read_text().splitlines()
    for line in ("said with print", "said to stderr", "written to 1", "said by a grandchild", "grandchild to stderr"):
        assert line in lines
    assert capfd.readouterr() == ("", "")


def test_log_is_emptied_when_it_has_grown_large(start, tmp_path):
    process = start()
    process.answer(order("speak"), PATIENCE_S)
    with (tmp_path / "log").open("ab") as log:
        log.write(b"x" * (9 << 20))
    process.answer(order("speak"), PATIENCE_S)
    assert (tmp_path / "log").read_text().startswith("said with print\n")
    assert (tmp_path / "log").stat().st_size < 1 << 10


def test_job_that_raises_fails_and_leaves_the_process_serving(start, tmp_path):
    process = start()
    with pytest.raises(OrderFailed, match=r"OSError: \[Errno 28\] disk is full, as often$") as raised:  # in one line
        process.answer(order("fail", message="disk is full,\n  as often"), PATIENCE_S)
    assert raised.value.error_type == "OSError"
    assert not raised.value.may_succeed_afresh
    assert "Traceback" in (tmp_path / "log").read_text()
    assert describe(process)["pid"] == process.pid


@pytest.mark.parametrize(
    ("error", "message", "afresh"),
    [
        ("MemoryError", "", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError", "CUDA driver error: operation not supported", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "a shape does not fit", False),
        ("SystemExit", "3", False),
    ],
)
def test_error_that_another_process_may_not_meet_says_so(start, error, message, afresh):
    """Even where a compiler has wrapped it."""
    with pytest.raises(OrderFailed, match="ValueError: wrapped") as raised:
        start().answer(order("raise", error=error, message=message), PATIENCE_S)
    assert raised.value.may_succeed_afresh == afresh


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
    process = start()
    describe(process)
    with pytest.raises(ProcessDied, match=said) as raised:
        process.answer(order(order_name, **arguments), PATIENCE_S)
    assert not isinstance(raised.value, ProcessNotReady)
    assert not process.is_alive
    wait_for(lambda: not marked.pids())


def test_crash_leaves_no_core_file(start):
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
    try:
        assert describe(start())["core_limit"] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)


def test_last_line_is_of_the_job_that_died_not_of_one_before(start):
    process = start()
    process.answer(order("speak"), PATIENCE_S)
    with pytest.raises(ProcessDied, match="It wrote no last line"):
        process.answer(order("die"), PATIENCE_S)


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


def test_job_past_its_deadline_is_ended_with_all_that_it_started(start, tmp_path, marked):
    process = start()
    describe(process)
    before = shared_memory()
    with pytest.raises(OrderTimedOut, match="gave no answer in 3 s"):
        process.answer(order("hang", folder=str(tmp_path)), 3.0)
    assert (tmp_path / "hangs").exists()
    wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_process_that_was_stopped_does_no_job(start):
    process = start()
    process.stop()
    process.stop()
    assert not process.is_alive
    with pytest.raises(ProcessDied, match="was stopped"):
        process.answer(order("describe"), PATIENCE_S)


def test_stop_ends_a_job_of_another_thread(start, tmp_path, marked):
    process = start()
    errors: list[ProcessDied] = []

    def do() -> None:
        try:
            process.answer(order("hang", folder=str(tmp_path)), PATIENCE_S)
        except ProcessDied as error:
            errors.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    wait_for((tmp_path / "hangs").exists)
    process.stop()
    thread.join(PATIENCE_S)
    assert [str(error) for error in errors] == ["The compiling process was stopped."]
    wait_for(lambda: not marked.pids())


def test_process_that_cannot_be_started_leaves_no_file_open(tmp_path, monkeypatch):
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(FileNotFoundError):
        CompilingProcess.start("background_handlers:make", b"", tmp_path / "log", {})
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_stopped_process_leaves_no_file_open(start):
    describe(start())
    before = len(os.listdir("/proc/self/fd"))
    process = start()
    describe(process)
    process.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_process_outlives_the_thread_that_started_it(start):
    processes: list[CompilingProcess] = []
    thread = threading.Thread(target=lambda: processes.append(start()))
    thread.start()
    thread.join()
    pid = describe(processes[0])["pid"]
    time.sleep(1.5)  # three looks of the process at its server
    assert describe(processes[0])["pid"] == pid


def test_fork_of_the_server_that_ends_leaves_the_process_alone(start):
    process = start()
    describe(process)
    fork = os.fork()
    if fork == 0:
        process.stop()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert describe(process)["pid"] == process.pid
