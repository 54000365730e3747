"""Any program with a cache: restore a key's files, run a command, and publish what it compiles. Imports no torch.

torch's caches look compiled code up by a hash of code and inputs. So a program has one version, and its key is its name
and the environment of the Python that runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from compile_cache.errors import CompileCacheError, log
from compile_cache.key import environment
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory, is_claimed

_PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_CAUGHT = {*_PASSED_ON, signal.SIGCHLD}
# sigaction(2): the kernel has sent the signal, for a key of the terminal. The command got it, too.
_SI_KERNEL = 0x80
_PYTHON = re.compile(r"python[\d.]*t?")
# The first line of a script. pip writes the second form if the interpreter's path is long, or has spaces.
_SHEBANG = re.compile(rf"""#!\s*(?:\S*/env (?:-S )?|/bin/sh\n'''exec' ["']?)?([^\n]*?{_PYTHON.pattern})["'\s]""")
_STILL_S = 5.0


def run_program(name: str, command: list[str], also: Path | None = None) -> int:
    """Run `command` with the cache `name`, and with the folder `also` inside the cache directory. Returns its exit code
    as a shell counts it. A failure of the cache costs only speed. `also` is an absolute path.

    The command is in this process group, and has its terminal. Other signals are passed on. Signals stay blocked
    afterwards: the process should end.
    """
    path = shutil.which(command[0])
    if path is None:
        log.error("error: %s does not exist or is not executable", command[0])
        return 126 if os.path.exists(command[0]) else 127
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, nobody learns the exit code
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _CAUGHT)
    environ, program = dict(os.environ), None
    try:
        program = Program(name, path, also, environ)
    except Exception as error:
        log.warning("run.uncached error=%s", error, exc_info=not isinstance(error, CompileCacheError | OSError))
    try:  # Python ignores the last two signals
        pid = os.posix_spawn(path, command, environ, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
    except OSError as error:  # it has no first line, is damaged, or its interpreter is missing
        log.error("error: %s cannot be executed: %s", path, error.strerror)
        if program is not None:
            program.end(126)
        return 126
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        came = signal.sigtimedwait(_CAUGHT, _STILL_S)
        if came is None and program is not None:
            program.look()
        elif came is not None and came.si_signo != signal.SIGCHLD and came.si_code != _SI_KERNEL:
            os.kill(pid, came.si_signo)
    code = os.waitstatus_to_exitcode(ended[1])
    if program is not None:
        program.end(code)
    return code if code >= 0 else 128 - code


class Program:
    """The cache of a command. Restores it, and publishes what is new until `end`.

    Raises:
        CompileCacheError, OSError: the cache cannot be used. `environ` is unchanged then.
        SystemExit: a signal came.
    """

    def __init__(self, name: str, path: str, also: Path | None, environ: dict[str, str]) -> None:
        settings, started = Settings.from_env(environ), time.monotonic()
        settings = replace(settings, model_name=name, model_version=settings.model_version or "any")
        self._directory = directory = CacheDirectory.claim(Path(settings.dir))
        found = _environment_of(path, str(directory.path), f"run also={also or ''}")
        restore = Restore(settings, directory, name, (), dict(environ), found)
        while not restore.has_ended and time.monotonic() < started + settings.restore_timeout_s:
            if came := signal.sigtimedwait(_PASSED_ON, 0.02):
                raise SystemExit(128 + came.si_signo)
        report, publication = restore.join()
        if publication is None or not (settings.may_publish or report.files):
            raise CompileCacheError(f"nothing can be restored or published: {report.reason}")
        report.waited_s = time.monotonic() - started
        log.info("\n".join(report.lines()))
        self._also = also and _link(also, directory.path / "also")
        directory.activate(environ)
        os.set_inheritable(directory.lock_fd, True)  # the command owns the directory if this process is killed
        self._publisher = Publisher(publication, BootReport(), settings)
        self._publisher.start()

    def look(self, code: int | None = None) -> None:
        """Let new files be published if none changed for 5 s, or after the end. Younger ones may be half-written (g++
        writes libraries in place), but not after the exit code 0."""
        finished_ns = time.time_ns() - (0 if code == 0 else int(_STILL_S * 1e9))
        if code is not None or all(changed_ns <= finished_ns for changed_ns in self._directory.scan().values()):
            ledger = self._directory.ledger
            ledger.hand_over(ledger.appeared(finished_ns))

    def end(self, code: int) -> None:
        """Publish the rest."""
        if self._also is not None and self._also.is_symlink():
            self._also.unlink()
        self.look(code)
        self._publisher.flush()


def _environment_of(path: str, *arguments: str) -> environment.Environment:
    """The environment of the Python at `path`, or of the one that the first line of the script at `path` names.

    Raises:
        CompileCacheError: there is another program at `path`, or the Python cannot say it.
        OSError: the Python cannot be executed.
    """
    if not _PYTHON.fullmatch(os.path.basename(path)):
        named = _SHEBANG.match(Path(path).read_text(errors="surrogateescape"))
        if named is None:
            raise CompileCacheError(f"{path} names no Python. Put `compile-cache run` inside, before the Python")
        path = named[1]
    try:
        asked = [path, environment.__file__, *arguments]
        answer = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
        return msgspec.json.decode(answer.splitlines()[-1], type=environment.Environment)
    except (subprocess.CalledProcessError, LookupError, msgspec.DecodeError) as error:
        said = (getattr(error, "stderr", b"") or repr(error).encode()).decode(errors="replace")
        raise CompileCacheError(f"{path} cannot say its environment: {said.strip().rpartition(chr(10))[2]}") from error


def _link(folder: Path, target: Path) -> Path:
    """Make `folder` a link to `target`, and return it.

    Raises:
        CompileCacheError: `folder` is neither missing nor empty, or another run uses it.
    """
    refused = f"--also {folder} must be missing or an empty folder"
    try:
        target.mkdir(exist_ok=True)
        if folder.is_symlink() and re.fullmatch(r".*/\d+/also", left := str(folder.readlink())):
            if Path(left) != target and is_claimed(Path(left).parent):
                raise CompileCacheError(f"{refused}, but another run uses it")
            folder.unlink()  # of a run that was killed
        folder.mkdir(parents=True, exist_ok=True)
        folder.rmdir()
        folder.symlink_to(target)
    except OSError as error:
        raise CompileCacheError(f"{refused}: {error.strerror}") from error
    return folder
