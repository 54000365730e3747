"""`compile-cache run`, from outside: a plain program finds its compiled code again, and notices nothing else."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from machines import write_files
from marked_processes import Marked, wait_for
from web_servers import answer, answering

COMPILES = """
import json, os, time, torch
from torch._dynamo.utils import counters
torch.compile(lambda x: torch.nn.functional.gelu(x @ x).sum(-1))(torch.ones(32, 32))
found = counters["inductor"] + counters["aot_autograd"]
hits, misses = (found[f"fxgraph_cache_{k}"] + found[f"autograd_cache_{k}"] for k in ("hit", "miss"))
parent = open(f"/proc/{os.getppid()}/maps").read()
print(json.dumps({"hits": hits, "misses": misses, "parent_has_torch": "libtorch" in parent}), flush=True)
"""
WRITES = "import os; open(os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/kernel.so', 'w').write('code')\n"
WAITS = "print('ready', flush=True); import time; time.sleep(60)\n"
# The command, for which a file stands still after half a second, and which waits for no other containers.
IMPATIENT = """
from compile_cache.cli import main
from compile_cache.lifecycle import publisher, run
run._STILL_S, publisher._QUIET_S, publisher._SPREAD_S = 0.5, 0.1, 0.1
main()
"""
COUNTS_INTERRUPTS = """
import signal, time
came = []
signal.signal(signal.SIGINT, lambda *_: came.append(1))
print("ready", flush=True)
while not came: time.sleep(0.01)
time.sleep(0.5)
print(len(came), "interrupts", flush=True)
"""


@pytest.fixture
def marked(variables, marked):
    """Nothing that a test has started is left."""
    yield marked
    wait_for(lambda: not marked.pids())


def command(*arguments: str | Path, program: tuple[str, str] = ("-m", "compile_cache.cli")) -> list[str]:
    return [sys.executable, *program, "run", "toy", *map(str, arguments)]


def start(marked: Marked, *arguments: str | Path, **program: tuple[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*arguments, **program), env=marked.environ, stdout=pipe, stderr=pipe, text=True)


def run(marked: Marked, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    with start(marked, *arguments) as running:
        out, err = running.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, running.returncode, out, err)


def write_program(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o755)


def python(source: str) -> tuple[str, ...]:
    return "--", sys.executable, "-c", source


def test_the_second_run_on_an_empty_machine_compiles_nothing(marked, tmp_path):
    first = run(marked, *python(COMPILES))
    assert json.loads(first.stdout)["misses"] > 0, first.stderr
    assert "restore: miss" in first.stderr
    (tmp_path / "cache").rename(tmp_path / "gone")
    second = run(marked, *python(COMPILES))
    found = json.loads(second.stdout)
    assert found["hits"] > 0, second.stderr
    assert (found["misses"], found["parent_has_torch"], second.returncode) == (0, False, 0)
    assert second.stderr.startswith("restore: hit")
    assert "publish" not in second.stderr


def test_the_exit_code_is_the_commands_own(marked):
    given = [python("import os; os.kill(os.getpid(), 9)"), (), ("--", "no-such-command")]
    given += [("--", os.devnull), ("--", "sh", "-c", "exit 4")]
    assert [run(marked, *arguments).returncode for arguments in given] == [137, 2, 127, 126, 4]


def test_the_exit_code_is_the_commands_own_if_nobody_reads_the_log(marked):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command(*python("raise SystemExit(3)")), env=marked.environ, stderr=write_end, timeout=120)
    os.close(write_end)
    assert done.returncode == 3


UNEXECUTABLE = {
    "no first line": ("program", b"echo 1\n"),
    "a damaged ELF": ("python3", b"\x7fELF" + bytes(100)),
    "no Python": ("program", b"#!/no/such/python3\n"),
    "an interpreter that is none": ("program", b"#!/dev/null\n"),
}


@pytest.mark.parametrize(("name", "content"), UNEXECUTABLE.values(), ids=UNEXECUTABLE)
def test_a_command_that_cannot_be_executed_ends_with_126(marked, tmp_path, name, content):
    program, folder = tmp_path / name, tmp_path / "own"
    write_program(program, content)
    done = run(marked, "--also", folder, "--", program)
    assert (done.returncode, done.stdout) == (126, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: {program} cannot be executed: ")
    assert "Traceback" not in done.stderr
    assert not folder.is_symlink()


@pytest.mark.parametrize("body", ["exit 0", "echo no JSON", "echo '{}'", "echo broken >&2; exit 1", "kill -9 $$"])
def test_a_python_that_cannot_say_its_environment_runs_without_a_cache(marked, tmp_path, body):
    other = tmp_path / "python3"
    write_program(other, f'#!/bin/sh\n[ "$1" = -c ] && exit 5\n{body}\n')
    done = run(marked, "--", other, "-c", "")
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"run.uncached error={other} cannot say its environment: "), line
    assert "broken" in line or "broken" not in body


def test_the_link_of_a_run_that_was_killed_is_replaced_and_any_other_stays(marked, tmp_path):
    folder, other = tmp_path / "own", tmp_path / "other"
    free, own = tmp_path / "cache" / "7" / "also", tmp_path / "cache" / "0" / "also"
    writes = python(f"open('{folder}/plan', 'w').write('plan')")
    for target in (free, own, tmp_path / "gone" / "3" / "also"):
        folder.symlink_to(target)
        assert "run.uncached" not in run(marked, "--also", folder, *writes).stderr
        assert not os.path.lexists(folder)
    (other / "own").mkdir(parents=True)
    folders = [folder] * 3 + [other]
    contents = (lambda: folder.symlink_to(other), lambda: folder.symlink_to("gone"), folder.touch, list)
    for given, content in zip(folders, contents, strict=True):
        content()
        refused = run(marked, "--also", given, *python("print(4)"))
        assert refused.stdout == "4\n"
        assert f"run.uncached error=--also {given} must be missing or an empty folder" in refused.stderr
        assert "Errno" not in refused.stderr
        folder.unlink(missing_ok=True)
    assert [path.name for path in other.iterdir()] == ["own"]


def test_a_folder_that_a_run_uses_is_refused_to_another(marked, tmp_path):
    folder = tmp_path / "own"
    with start(marked, "--also", folder, *python(WAITS)) as running:
        assert running.stdout.readline() == "ready\n"
        refused = run(marked, "--also", folder, *python(""))
        assert "another run uses it" in refused.stderr
        assert folder.readlink() == tmp_path / "cache" / "0" / "also"
        running.terminate()
    assert not folder.is_symlink()


def test_a_folder_of_the_programs_own_comes_back_and_files_that_could_be_executed_still_can(marked, tmp_path):
    folder = tmp_path / "engine" / "torch_compile_cache"
    looks = f"import os; p = '{folder}/tool'; print(os.path.exists(p) and os.access(p, os.X_OK))\n"
    writes = "open(p, 'w').write('#!/bin/sh'); open(p + '.txt', 'w').write('text'); os.chmod(p, 0o755)"
    assert run(marked, "--also", folder, *python(looks + writes)).stdout == "False\n"
    assert run(marked, "--also", folder, *python(looks)).stdout == "True\n"
    assert not folder.is_symlink()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "cache" / "0" / "also").iterdir()}
    assert modes == {"tool": 0o755, "tool.txt": 0o644}


@pytest.mark.parametrize(
    "replaced", [["cache/0"], ["cache"], ["cache/0/folder", "cache/0/file"], ["cache/0.outbox"]], ids=" ".join
)
def test_links_out_of_the_cache_directory_are_never_followed(marked, tmp_path, replaced):
    victim, links = tmp_path / "victim", [tmp_path / name for name in replaced]
    write_files(victim, dict.fromkeys(("passwd", "0/passwd"), b"SECRET"))
    code = ""
    for link in links:
        target = victim / "passwd" if link.name == "file" else victim
        code += f"if os.path.exists('{link}'): os.rename('{link}', '{link}-gone')\nos.symlink('{target}', '{link}')\n"
    assert "Traceback" not in run(marked, *python(WRITES + code)).stderr
    packs = [path.read_bytes() for path in (tmp_path / "store").rglob("*.pack")]
    assert not [pack for pack in packs if b"passwd" in zstandard.ZstdDecompressor().stream_reader(pack).read(1 << 20)]
    assert [path.read_text() for path in victim.rglob("passwd")] == ["SECRET"] * 2
    for link in links:
        link.unlink()
    run(marked, *python(WRITES))
    assert "restore: hit" in run(marked, *python("")).stderr


def test_what_the_exit_budget_is_too_short_for_is_one_line(marked, aws_variables):
    with answering(answer("403 Forbidden"), None) as silent:  # once the restore has failed
        marked.environ |= {"COMPILE_CACHE_STORE": "s3://bucket", "AWS_ENDPOINT_URL_S3": silent.url}
        marked.environ |= {"COMPILE_CACHE_EXIT_BUDGET_S": "1"}
        marked.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        done = run(marked, *python(WRITES))
    assert (done.returncode, done.stderr.count("publish.failed")) == (0, 1), done.stderr
    assert "COMPILE_CACHE_EXIT_BUDGET_S=1 is over" in done.stderr


def test_a_second_also_is_a_usage_error(marked):
    done = run(marked, "--also", "one", "--also", "two", *python(""))
    assert (done.returncode, done.stderr) == (2, "error: give --also once, for one folder\n")


def test_arguments_and_stdin_reach_the_command_unchanged(marked):
    source = "import sys; print(sys.argv[1:], sys.stdin.read())"
    given = command(*python(source), "--also", "x", "--", "-v", "--help")
    done = subprocess.run(given, env=marked.environ, input="typed", capture_output=True, text=True, timeout=60)
    assert done.stdout == "['--also', 'x', '--', '-v', '--help'] typed\n"


def test_a_program_that_is_ended_has_published_what_stood_still(marked, tmp_path):
    """Already while it ran, and without the youngest file, which may be half-written."""
    young = WRITES.replace("kernel", "young")
    stays_young = "os.utime(os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/young.so', (time.time() + 3600,) * 2)\n"
    until_stored = f"""
import pathlib, time
while not [*pathlib.Path("{tmp_path}/store").rglob("*.pack")]: time.sleep(0.1)
"""
    program = python(f"{WRITES}{until_stored}{young}{stays_young}{WAITS}")
    with start(marked, *program, program=("-c", IMPATIENT)) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
    assert running.returncode == 143
    assert "restore: hit, 1 files" in run(marked, *python("")).stderr


def test_ctrl_c_in_a_terminal_comes_once(marked):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command(*python(COUNTS_INTERRUPTS)), marked.environ)
    said = b""
    while b"interrupts" not in said:
        said += os.read(terminal, 1000)
        if said.rstrip().endswith(b"ready"):
            os.write(terminal, b"\x03")
            said = b"told"
    os.close(terminal)
    assert b"1 interrupts" in said
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_program_whose_run_is_killed_keeps_its_directory(marked, tmp_path):
    with start(marked, *python(WRITES + WAITS)) as running:
        assert running.stdout.readline() == "ready\n"
        child = int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text())
        running.kill()
    beside = run(marked, *python("import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"))
    assert beside.stdout == f"{tmp_path / 'cache' / '1'}\n"
    assert (tmp_path / "cache" / "0" / "kernel.so").exists()
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: not marked.pids())


def test_the_key_has_the_packages_of_the_commands_own_python(marked, tmp_path):
    packages = tmp_path / "packages" / "torch"
    write_files(packages, {"__init__.py": b"", "version.py": b"__version__ = '9.9.9+other'\n"})
    other, script = tmp_path / "python3", tmp_path / "serve"
    write_program(other, f'#!/bin/sh\nPYTHONPATH={packages.parent} exec {sys.executable} "$@"\n')
    write_program(script, f"#!{other}\n{WRITES}")
    assert run(marked, "--", script).returncode == 0
    (record,) = (tmp_path / "store").rglob("environment.json")
    assert json.loads(record.read_text())["torch"] == "9.9.9+other"
    assert "restore: hit" in run(marked, "--", other, "-c", "").stderr
    assert "restore: miss" in run(marked, *python("")).stderr
    assert "names no Python" in run(marked, "--", "sh", "-c", "true").stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("STORE", "s3://bucket/x", "restore: failed"), ("STORE", "off", "run.uncached"), ("STOER", "x", "run.uncached")],
)
def test_without_a_cache_the_command_runs(marked, aws_variables, closed_port, name, value, said):
    marked.environ |= {f"COMPILE_CACHE_{name}": value, "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{closed_port}"}
    marked.environ |= {"COMPILE_CACHE_EXIT_BUDGET_S": "1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    done = run(marked, *python("raise SystemExit(3)"))
    assert done.returncode == 3
    assert said in done.stderr
    assert "Traceback" not in done.stderr
