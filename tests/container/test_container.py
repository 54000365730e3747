"""The image that Cog builds, in containers: cold, warm from a store on the host, and under limits of runtimes.

    make container

It needs debootstrap, and a Docker daemon, or root and dockerd to start one; else it skips. CONTAINER_FOLDER names a
folder that keeps the daemon's images for the next run; TORCH replaces the requirement torch==2.13.0.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from boots import assert_fully_warm
from build_context import sent
from cog_server import PROJECT

from container.daemon import NoContainerError, daemon, docker
from container.image import BASE, IMAGE, SCHEMA, build, make_base, read_configuration
from container.served import Served, serve

TORCH = os.environ.get("TORCH") or "torch==2.13.0"
pytestmark = pytest.mark.timeout(1800)

# Options of `docker run`, and what HostConfig then has: Docker drops limits that the kernel lacks.
RUNTIMES = {
    "a user without a name": (("--user", "1000:1000"), {}),
    "a read-only root, and a tmpfs": (("--read-only", "--tmpfs", "/tmp:rw,exec"), {"ReadonlyRootfs": True}),
    "the default /dev/shm": ((), {"ShmSize": 64 << 20}),
    "1.5 GB of memory": (("--memory", "1500m", "--memory-swap", "1500m"), {"Memory": 1500 << 20}),
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the daemon and the builds work. Short: the path of a socket has 108 characters."""
    if kept := os.environ.get("CONTAINER_FOLDER"):
        path = Path(kept).resolve()
        path.mkdir(parents=True, exist_ok=True)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="container-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def image(folder) -> Iterator[str]:
    """The project's image; it is removed at the end."""
    try:
        with daemon(folder):
            make_base(folder)
            build(read_configuration(), folder, TORCH)
            yield IMAGE
            docker("rmi", "--force", IMAGE)
            if "CONTAINER_FOLDER" not in os.environ:
                docker("rmi", BASE)
    except NoContainerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def environ(s3_server, s3_client) -> dict[str, str]:
    """The settings of every container: a store on the host's loopback, which the host's network reaches."""
    s3_client.create_bucket(Bucket="container")
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "COMPILE_CACHE_STORE": "s3://container/packs",
        "AWS_ENDPOINT_URL_S3": s3_server,
        "COMPILE_CACHE_MODEL_NAME": "flux-digits",
        "COMPILE_CACHE_COLD_START": "block",
        # A busy machine may take longer than the default, and the container after it would compile the rest.
        "COMPILE_CACHE_SETUP_BUDGET_S": "600",
    }


@pytest.fixture(scope="module")
def cold(image, environ, tmp_path_factory) -> Served:
    """The first container, which compiles and fills the store."""
    return serve(tmp_path_factory.mktemp("containers") / "cold", environ)


def test_the_image_is_the_build_context_and_the_schema(image):
    listed = docker("run", "--rm", "--network", "none", image, "find", "/src", "-type", "f")
    assert {line.removeprefix("/src/") for line in listed.splitlines()} == sent(PROJECT) | {SCHEMA}


def test_the_server_refuses_an_input_out_of_range_and_names_it(cold):
    assert cold.refusal.startswith("422 ")
    assert "num_outputs" in cold.refusal


def test_the_first_container_compiles_publishes_and_stops_in_order(cold):
    report = cold.booted.report
    assert report["restore"]["outcome"] == "miss"
    assert set(cold.booted.steps.values()) == {"precompiled"}
    assert report["publish"]["packs"] > 0
    assert report["publish"]["failures"] == []
    assert cold.exit_code == 0


@pytest.mark.parametrize(("options", "imposed"), RUNTIMES.values(), ids=list(RUNTIMES))
def test_the_next_container_boots_with_a_hit_and_compiles_nothing_under(options, imposed, cold, environ, tmp_path):
    warm = serve(tmp_path / "warm", environ, options)
    assert warm.booted.report["restore"]["outcome"] == "hit"
    assert_fully_warm(warm.booted)
    assert set(warm.metrics["served"].values()) == {"precompiled"}
    assert warm.picture == cold.picture
    assert imposed.items() <= warm.facts["HostConfig"].items()
    assert not warm.facts["State"]["OOMKilled"]
    assert warm.exit_code == 0


@pytest.mark.parametrize(("quota", "cpus"), [("1.5", "1"), ("2", "2")])
def test_the_second_process_counts_a_quota_of_cpus(quota, cpus, image):
    program = "from compile_cache.background.child_main import CGROUP, quota_cpus; print(quota_cpus(CGROUP))"
    assert docker("run", "--rm", "--network", "none", "--cpus", quota, image, "python", "-c", program) == cpus


def test_a_tmpfs_without_exec_serves_eager_and_says_what_to_do(cold, environ, tmp_path):
    eager = serve(tmp_path / "noexec", environ, ("--read-only", "--tmpfs", "/tmp"))
    assert eager.booted.report["regions"] == []
    assert eager.booted.compiled_now == 0
    assert "/tmp/compile-cache/0 is mounted noexec" in eager.booted.log
    assert "Set COMPILE_CACHE_DIR to a folder on another mount, or mount it with exec." in eager.booted.log
    assert eager.exit_code == 0
