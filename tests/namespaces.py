"""What root can do in most places, mounts and PID namespaces, where a test is skipped if this user cannot; and what
root must not do."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read and write everywhere: be nobody while the context lasts."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs with the given options on a folder that is not there yet."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def in_container() -> tuple[str, ...]:
    """The wrapper under which a command runs as in a container: under tini, in a PID namespace that ends with it."""
    if shutil.which("tini") is None:
        pytest.skip("tini is not installed")
    command = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    return (*command, "tini", "--")
