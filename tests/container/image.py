"""The project's image, as Cog builds it: the same steps in the same order, on a base made from Debian.

Two differences from Cog's Dockerfile: pip installs, not uv; and packages come from a folder of wheels that the host has
downloaded, so the build needs no package index.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from cog_server import PROJECT
from validating_server import SCHEMAS

from container.daemon import NoContainerError, docker

MIRROR = "http://deb.debian.org/debian"
RELEASE = "bookworm"
PYTHON = "3.11"  # the release's own
# As in Cog's base image. Inductor compiles C++ against Python's headers.
BASE_PACKAGES = ("build-essential", "ca-certificates", "python3-dev", "python3-pip", "tini")
# As Cog's Dockerfile sets it for `pip install`.
CFLAGS = "-O3 -funroll-loops -fno-strict-aliasing -flto -S"
ENTRYPOINT = 'ENTRYPOINT ["/sbin/tini", "--"]'

_RECIPE = hashlib.sha256(json.dumps([RELEASE, BASE_PACKAGES, ENTRYPOINT]).encode()).hexdigest()[:12]
BASE = f"cog-compile-cache-base:{_RECIPE}"
IMAGE = "cog-compile-cache-test"
SCHEMA = ".cog/openapi_schema.json"


def make_base(folder: Path) -> None:
    """Import a Debian with Python, compilers and tini as the image `BASE`, unless it is there.

    Raises:
        NoContainerError: debootstrap is missing or cannot make it here, or the daemon cannot run it; with the output.
    """
    if not docker("images", "--quiet", BASE):
        _import_base(folder)
    try:
        docker("run", "--rm", "--network", "host", BASE, "true")
    except RuntimeError as error:
        raise NoContainerError(f"the Docker daemon cannot run a container: {error}") from error


def _import_base(folder: Path) -> None:
    if shutil.which("debootstrap") is None:
        raise NoContainerError("the base image is made by debootstrap, which is not installed")
    if os.geteuid() != 0:
        raise NoContainerError("the base image is made by debootstrap, which needs root")
    with _in_memory(folder / "root") as root:
        packages = f"--include={','.join(BASE_PACKAGES)}"
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", packages, RELEASE, root, MIRROR],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoContainerError(f"debootstrap cannot make a base image:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        (root / "usr/sbin/tini").symlink_to("/usr/bin/tini")
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
            subprocess.run(
                ["docker", "import", "--change", ENTRYPOINT, "-", BASE],
                stdin=archive.stdout,
                stdout=subprocess.DEVNULL,
                check=True,
            )


@contextlib.contextmanager
def _in_memory(folder: Path) -> Iterator[Path]:
    """A file system in memory: dpkg syncs each file, which doubles the time on a disk."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "dev,exec,suid", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def build(configuration: Mapping[str, Any], folder: Path, torch: str) -> None:
    """Build the image `IMAGE` from the project, with the `torch` requirement in place of the pinned one.

    Raises:
        RuntimeError: a step failed; with the end of its output.
    """
    wheels, requirements = folder / "wheels", folder / "requirements.txt"
    named = (PROJECT / configuration["build"]["python_requirements"]).read_text().splitlines()
    requirements.write_text("\n".join(torch if line.startswith("torch==") else line for line in named))
    _download(wheels, "--requirement", requirements, _sdk(configuration))
    dockerfile = folder / "Dockerfile"
    dockerfile.write_text(dockerfile_of(configuration, torch))
    with _served(wheels) as url:
        docker(
            *("build", "--network", "host", "--build-arg", f"WHEELS={url}", "--tag", IMAGE),
            *("--file", dockerfile, PROJECT),
            environ={"DOCKER_BUILDKIT": "0"},
        )
    _add_schema(configuration, folder / "schema")


def _add_schema(configuration: Mapping[str, Any], folder: Path) -> None:
    """Build `IMAGE` again with the schema that the server validates by, as Cog does."""
    folder.mkdir(exist_ok=True)
    shutil.copy(SCHEMAS[configuration["run"]], folder / "openapi_schema.json")
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY openapi_schema.json /src/{SCHEMA}\n")
    docker("build", "--tag", IMAGE, folder, environ={"DOCKER_BUILDKIT": "0"})


def dockerfile_of(configuration: Mapping[str, Any], torch: str) -> str:
    """The Dockerfile of a cog.yaml."""
    build = configuration["build"]
    install = (
        "python -m pip install --break-system-packages --no-cache-dir --no-compile --no-index --find-links $WHEELS"
    )
    unmet = [package for package in build["system_packages"] if package not in BASE_PACKAGES]
    return "\n".join(
        [
            f"FROM {BASE}",
            *(f"ENV {variable}" for variable in configuration["environment"]),
            f"RUN apt-get update -qq && apt-get install -qqy --no-install-recommends {' '.join(unmet)}"
            if unmet
            else "",
            "ENV UV_SYSTEM_PYTHON=true",
            "RUN ln -sf /usr/bin/python3 /usr/local/bin/python",
            f"COPY {build['python_requirements']} /tmp/requirements.txt",
            "ARG WHEELS",
            f'ENV CFLAGS="{CFLAGS}"',
            f"RUN sed -i 's/^torch==.*/{torch}/' /tmp/requirements.txt && {install} -r /tmp/requirements.txt",
            "ENV CFLAGS=",
            f"RUN {install} {_sdk(configuration)}",
            *(f"RUN {line}" for line in build["run"]),
            "WORKDIR /src",
            "EXPOSE 5000",
            f"ENV COG_PREDICT_TYPE_STUB={configuration['run']}",
            'CMD ["python", "-m", "cog.server.http"]',
            "COPY . /src",
        ]
    )


def read_configuration() -> dict[str, Any]:
    """The project's cog.yaml."""
    return dict(yaml.safe_load((PROJECT / "cog.yaml").read_text()))


def _sdk(configuration: Mapping[str, Any]) -> str:
    return f"cog=={configuration['build']['sdk_version']}"


def _download(wheels: Path, *requirements: str | Path) -> None:
    """Download wheels for the image's Python into a folder, with this host's configuration of pip."""
    wheels.mkdir(exist_ok=True)
    kind = ("--only-binary", ":all:", "--python-version", PYTHON, "--dest", wheels)
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *kind, *requirements], check=True)


@contextlib.contextmanager
def _served(wheels: Path) -> Iterator[str]:
    """The URL of a folder on the loopback: the classic builder mounts nothing, and a copied folder would be a layer."""
    handler = functools.partial(_QuietHandler, directory=str(wheels))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line."""
