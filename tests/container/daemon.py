"""A Docker daemon: the running one, or one that is started for as long as it is needed."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_START_S = 60.0
_STOP_S = 60.0
# Containers share the host's network, so the daemon needs no bridge of its own and leaves the firewall alone.
_OPTIONS = ("--storage-driver", "overlay2", "--bridge", "none", "--iptables=false")


class NoContainerError(Exception):
    """No container can run here. The message says what is missing."""


def docker(*arguments: str | Path, environ: Mapping[str, str] | None = None) -> str:
    """The output of a `docker` command.

    Raises:
        RuntimeError: it failed; with its output.
    """
    done = subprocess.run(
        ["docker", *arguments],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"docker {arguments[0]} failed:\n{done.stdout[-6000:]}")
    return done.stdout.strip()


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[None]:
    """A daemon that `docker` reaches: the running one, or a new one that keeps everything in `folder`.

    Raises:
        NoContainerError: there is none, and none can be started.
    """
    if shutil.which("docker") is None:
        raise NoContainerError("the command docker is not installed (Debian: docker.io)")
    if _answers():
        yield
        return
    if os.geteuid() != 0:
        raise NoContainerError("no Docker daemon answers, and only root can start one")
    if shutil.which("dockerd") is None:
        raise NoContainerError("no Docker daemon answers, and dockerd is not installed (Debian: docker.io)")
    with _started(folder):
        yield


def _answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[None]:
    socket, log = f"unix://{folder}/docker.sock", folder / "dockerd.log"
    places = ("--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "dockerd.pid")
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = socket
    with log.open("wb") as output:
        process = subprocess.Popen(["dockerd", "--host", socket, *places, *_OPTIONS], stdout=output, stderr=output)
    try:
        _wait_for(process, log)
        yield
    finally:
        process.terminate()
        process.wait(_STOP_S)
        _unmount_below(folder)
        os.environ.pop("DOCKER_HOST")
        if before is not None:
            os.environ["DOCKER_HOST"] = before


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not _answers():
        if process.poll() is not None or time.monotonic() > deadline:
            raise NoContainerError(f"dockerd does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def _unmount_below(folder: Path) -> None:
    """Unmount what the daemon leaves: the network namespace of `--network host`."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if place.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", place], check=True)
