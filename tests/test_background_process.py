"""The compiling process: what it does, how it fails, and that nothing of it outlives its server."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_handlers import job

from compile_cache.background.process import CompilingProcess
from compile_cache.errors import JobFailed, JobTimedOut, ProcessDied, ProcessNotReady

SERVER = Path(__file__).with_name("background_server.py")
PATIENCE_S = 120.0
KILLS = 50
SIDE_BY_SIDE = 10
# From before the server has imported its modules to after its process is at work, on two busy cores.
LONGEST_LIFE_S = 4.0


class Marked:
    """The processes that were started with a variable of the test's own, and all that these have started."""

    def __init__(self) -> None:
        self._entry = f"BACKGROUND_TEST={uuid.uuid4().hex}"
        self.environ = {**os.environ, "BACKGROUND_TEST": self._entry.partition("=")[2]}
        self.environ.pop("PYTHONUNBUFFERED", None)

    def pids(self) -> set[int]:
        return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._is_in(folder)}

    def _is_in(self, folder: Path) -> bool:
        try:
            return self._entry.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            return False

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def describe(process: CompilingProcess) -> dict:
    return json.loads(process.do(job("describe"), PATIENCE_S))


def test_process_does_one_job_after_another(start):
    process = start(setup=b"made of this")
    first, second = describe(process), describe(process)
    assert first["setup"] == "made of this"
    assert first["pid"] == second["pid"] == process.pid
    assert process.is_alive


def test_answers_and_setups_may_be_larger_than_a_channel(start):
    process = start(setup=b"s" * (8 << 20))
    assert len(process.do(job("echo", size=32 << 20), PATIENCE_S)) == 32 << 20
    assert len(describe(process)["setup"]) == 8 << 20


def test_process_has_the_servers_path_and_folder_and_gives_way_to_everybody(start, tmp_path, marked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "no:such:folder"))
    told = describe(start())
    assert told["path"] == sys.path
    assert told["cwd"] == str(tmp_path)
    assert told["environ"].items() >= marked.environ.items()
    assert told["niceness"] == 19
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
    from compile_cache.background.process import CompilingProcess
    process = CompilingProcess.start("handlers_of_predictor:make", b"", Path("log"), {{}})
    print(process.do(b"", {PATIENCE_S}).decode())
    """
    server = [sys.executable, "-P", "-c", textwrap.dedent(program)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(server, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == str(tmp_path / "library" / "compile_cache" / "__init__.py"), done.stderr


def test_process_inherits_no_file_of_the_server(start, tmp_path):
    with (tmp_path / "kept open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        opened = describe(start())["open"]
    assert str(tmp_path / "kept open") not in opened.values()
    assert opened["0"] == "/dev/null"
    assert opened["1"] == opened["2"] == str(tmp_path / "log")


def test_children_of_the_process_inherit_only_its_log(start, tmp_path):
    start().do(job("list_inherited"), PATIENCE_S)
    listing = (tmp_path / "log").read_text()
    assert "-> /dev/null" in listing
    assert "socket:" not in listing
    assert "pipe:" not in listing


def test_whatever_the_process_and_its_children_print_is_in_the_log_alone(start, tmp_path, capfd):
    start().do(job("speak"), PATIENCE_S)
    lines = (tmp_path / "log").read_text().splitlines()
    for line in ("said with print", "said to stderr", "written to 1", "said by a grandchild", "grandchild to stderr"):
        assert line in lines
    assert capfd.readouterr() == ("", "")


def test_log_is_emptied_when_it_has_grown_large(start, tmp_path):
    process = start()
    process.do(job("speak"), PATIENCE_S)
    with (tmp_path / "log").open("ab") as log:
        log.write(b"x" * (9 << 20))
    process.do(job("speak"), PATIENCE_S)
    assert (tmp_path / "log").read_text().startswith("said with print\n")
    assert (tmp_path / "log").stat().st_size < 1 << 10


def test_job_that_raises_fails_and_leaves_the_process_serving(start, tmp_path):
    process = start()
    with pytest.raises(JobFailed, match=r"OSError: \[Errno 28\] disk is full") as raised:
        process.do(job("fail", message="disk is full"), PATIENCE_S)
    assert raised.value.error_type == "OSError"
    assert not raised.value.may_succeed_afresh
    assert "Traceback" in (tmp_path / "log").read_text()
    assert describe(process)["pid"] == process.pid


@pytest.mark.parametrize(
    ("error", "message", "afresh"),
    [
        ("MemoryError", "", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "a shape does not fit", False),
        ("SystemExit", "3", False),
    ],
)
def test_error_that_another_process_may_not_meet_says_so(start, error, message, afresh):
    """Even where a compiler has wrapped it."""
    with pytest.raises(JobFailed, match="ValueError: wrapped") as raised:
        start().do(job("raise", error=error, message=message), PATIENCE_S)
    assert raised.value.may_succeed_afresh == afresh


@pytest.mark.parametrize(
    ("job_name", "arguments", "said"),
    [
        ("exit", {"code": 3}, "ended with exit code 3.*about to exit"),
        ("abort", {}, "was killed by SIGABRT.*about to abort"),
        ("die", {}, "was killed by SIGKILL, as the kernel does when memory runs out.*no last line"),
        ("leave", {"code": 4}, "ended with exit code 4"),
        ("babble", {}, "broke off the exchange"),
    ],
)
def test_death_is_told_in_words_and_takes_the_group_along(start, marked, job_name, arguments, said):
    process = start()
    describe(process)
    with pytest.raises(ProcessDied, match=said) as raised:
        process.do(job(job_name, **arguments), PATIENCE_S)
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
    process.do(job("speak"), PATIENCE_S)
    with pytest.raises(ProcessDied, match="It wrote no last line"):
        process.do(job("die"), PATIENCE_S)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("make_nothing", "could not prepare itself: LookupError: nothing is made from this"),
        ("make_crash", "was killed by SIGABRT.*crashing before the first job"),
        ("no_such_function", "could not prepare itself: AttributeError"),
    ],
)
def test_process_that_is_never_ready_is_told_apart(start, marked, factory, said):
    with pytest.raises(ProcessNotReady, match=said):
        start(factory, b"this").do(b"j" * (4 << 20), PATIENCE_S)
    wait_for(lambda: not marked.pids())


def test_job_past_its_deadline_is_ended_with_all_that_it_started(start, tmp_path, marked):
    process = start()
    describe(process)
    before = shared_memory()
    with pytest.raises(JobTimedOut, match="gave no answer in 3 s"):
        process.do(job("hang", folder=str(tmp_path)), 3.0)
    assert (tmp_path / "hangs").exists()
    wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_process_that_was_stopped_does_no_job(start):
    process = start()
    process.stop()
    process.stop()
    assert not process.is_alive
    with pytest.raises(ProcessDied, match="was stopped"):
        process.do(job("describe"), PATIENCE_S)


def test_stop_ends_a_job_of_another_thread(start, tmp_path, marked):
    process = start()
    errors: list[ProcessDied] = []

    def do() -> None:
        try:
            process.do(job("hang", folder=str(tmp_path)), PATIENCE_S)
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


def serve(folder: Path, marked: Marked, mode: str, *wrapper: str, life_s: str = "") -> subprocess.Popen[str]:
    command = [*wrapper, sys.executable, str(SERVER), str(folder), mode, *filter(None, [life_s])]
    environ = {**marked.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_process_ends_with_a_killed_server(tmp_path, marked, number):
    before = shared_memory()
    with serve(tmp_path, marked, "hang") as server:
        assert server.stdout.readline() == "at work 0\n"
        assert len(marked.pids()) > 3
        server.send_signal(number)
    wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_process_ends_with_a_server_that_exits(tmp_path, marked):
    with serve(tmp_path, marked, "exit") as server:
        said = server.stdout.read()
    assert server.returncode == 0
    assert said == "at work 0\nalive: False\n"
    wait_for(lambda: not marked.pids())


def test_process_ends_with_its_server_while_c_code_holds_pythons_lock(tmp_path, marked):
    """No thread of the process can look at its server then: the kernel ends it."""
    with serve(tmp_path, marked, "hold_the_lock") as server:
        server.stdout.readline()
        server.kill()
    wait_for(lambda: not marked.pids())


def test_process_ends_with_its_server_although_a_fork_keeps_its_files_open(tmp_path, marked):
    with serve(tmp_path, marked, "fork") as server:
        fork = int(server.stdout.readline().split()[-1])
        server.kill()
        server.wait()
        wait_for(lambda: marked.pids() <= {fork})
        assert marked.pids() == {fork}
        os.kill(fork, signal.SIGKILL)


def test_nothing_is_left_of_servers_killed_at_any_moment(tmp_path, marked):
    source = random.Random(KILLS)
    before = shared_memory()
    for number in range(0, KILLS, SIDE_BY_SIDE):
        servers = []
        for index in range(number, number + SIDE_BY_SIDE):
            folder = tmp_path / str(index)
            folder.mkdir()
            servers.append(serve(folder, marked, "restless"))
        lives_s = sorted(source.uniform(0.0, LONGEST_LIFE_S) for _ in servers)
        started = time.monotonic()
        for server, life_s in zip(servers, lives_s, strict=True):
            time.sleep(max(0.0, started + life_s - time.monotonic()))
            server.kill()
        for server in servers:
            server.wait()
            server.stdout.close()
        wait_for(lambda: not marked.pids() and not shared_memory() - before)
    assert any(tmp_path.glob("*/hangs")), "no server lived until its process was at work"


def test_nothing_is_left_in_a_container_whose_first_process_lives_on(tmp_path, marked):
    """As when the kernel kills Cog's worker for its memory: tini and Cog's server stay."""
    wrapper = in_container()
    script = """
        "$@" & wait
        touch "$FOLDER/ended"
        while [ ! -e "$FOLDER/looked" ]; do sleep 0.1; done
    """
    before = shared_memory()
    marked_container = Marked()
    for index, life_s in enumerate(random.Random(KILLS).uniform(0.0, LONGEST_LIFE_S) for _ in range(4)):
        folder = tmp_path / str(index)
        folder.mkdir()
        # The variable of `marked` is the server's alone, and not that of the processes around it.
        inner = ["env", f"BACKGROUND_TEST={marked.environ['BACKGROUND_TEST']}"]
        shell = ["env", f"FOLDER={folder}", *wrapper, "sh", "-c", script, "sh", *inner]
        server = serve(folder, marked_container, "restless", *shell, life_s=str(life_s))
        try:
            wait_for((folder / "ended").exists)
            wait_for(lambda: not marked.pids() and not shared_memory() - before)
            assert server.poll() is None, "the container ended with its server"
        finally:
            (folder / "looked").touch()
            server.wait(PATIENCE_S)
            server.stdout.close()
            marked_container.kill()


def in_container() -> list[str]:
    """The wrapper under which a command runs as in a container: under tini, in a PID namespace."""
    if shutil.which("tini") is None:
        pytest.skip("tini is not installed")
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    return [*command, "tini", "--"]
