"""What several test modules share: an S3 server and buckets on it, stores, commands, an environment and a key."""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from boots import Booted, boot_once, python_path, settings
from commands import Run, run_command
from marked_processes import Marked
from namespaces import as_nobody
from web_servers import Certificates, make_certificates

from compile_cache.files import replacing
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.storage.stores.local import LocalStore

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Kernels have no vector instructions, except in a boot of test_toolchain.py: Inductor would try each set of them with a
# compile of its own, and torch's headers for them are a third of what each kernel's compile takes. Before torch is
# imported, and for the processes that tests start.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# As compile_cache sets it for a boot. compile_once.py shares one header among all of them.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
# The models are tiny, and tests run side by side: threads that wait for one another on busy cores take ten times as
# long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a busy machine, a setup that compiles would run out of its time and leave the rest to the background.
os.environ.setdefault("COMPILE_CACHE_SETUP_BUDGET_S", "0")
# Each graph would cost a collection of garbage.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Else hundreds of processes parse the library anew.
sys.dont_write_bytecode = False

# Half of the time that a process takes to import torch's compiler: see python_start/sitecustomize.py.
os.environ["PYTHONPATH"] = python_path(Path(__file__).with_name("python_start"))
import_module("python_start.sitecustomize")
pytest.register_assert_rewrite("demo_servers")

# The suite tries the same examples in every run: a failure then comes from a change. `make soak` tries other examples
# each time, and many more. How fast an example runs is no property of the code on a machine that does other things.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=50)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("suite")

_LONGEST_FIRST = """
serving_faults text_server function cog_server examples fill readme image_server run first_calls hostile_memory region
unseen settled boot toolchain boot_host background_faults toxic background_obstacles background_compile queue graph_pass
fuzz_serving regions torch_state background_kills stores values publisher
"""

_AWS_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}
_AWS_VARIABLES_UNSET = ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


def pytest_configure(config: pytest.Config) -> None:
    """Put a `g++` into PATH that compiles nothing twice, for this and later runs and all processes that they start.

    Its folder is in the environment, and named by all that a result depends on beside its source and its options.

    Without `-m gpu`, tests see no GPU: some fork a process that has asked torch for a GPU, and CUDA cannot start in the
    fork.
    """
    if not config.option.markexpr.startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    compiler = shutil.which("g++")
    if hasattr(config, "workerinput") or compiler is None:
        return
    program = Path(__file__).with_name("compile_once.py").read_bytes()
    named_by = version("torch").encode(), subprocess.run([compiler, "-v"], capture_output=True).stderr, program
    folder = Path(sys.prefix, "compiled", hashlib.sha256(b"".join(named_by)).hexdigest()[:16])
    own, wrapper = folder / "compile_once.py", folder / "bin" / "g++"
    with replacing(own) as file:
        file.write(program)
    once = shlex.join([sys.executable, "-I", "-S", str(own), str(folder), compiler])
    with replacing(wrapper) as file:
        os.fchmod(file.fileno(), 0o755)
        # Only what has an output: Inductor asks for the version in each process, and a Python takes longer to answer.
        file.write(
            f"""#!/bin/sh
case "$*" in *" -o "*) exec {once} "$@" ;; esac
exec {shlex.quote(compiler)} "$@"
""".encode()
        )
    os.environ["PATH"] = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"


def pytest_xdist_auto_num_workers() -> int:
    """One process more than CPUs: a third of the time, tests wait for servers, stores and second processes."""
    return min(len(os.sched_getaffinity(0)) + 1, 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: each process takes the next file, and no long one is begun last."""
    places = {f"test_{name}": place for place, name in enumerate(_LONGEST_FIRST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    if guards := sys.modules.get("torch._dynamo.guards"):
        # It writes a cache full for a figure of a log.
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    # Else collections of garbage look at all that was imported, again and again.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    # Else pytest listens to it, and torch writes down each graph several times.
    logging.getLogger("torch.__trace").propagate = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked so need a GPU."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU: make test-gpu")


@dataclass(frozen=True)
class S3Bucket:
    name: str
    endpoint_url: str


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[str]:
    """The URL of a real S3 protocol server (moto), which lasts for the session."""
    log = tmp_path_factory.mktemp("s3") / "server.log"
    command = [sys.executable, Path(__file__).with_name("s3_server.py"), "-H", "127.0.0.1", "-p", "0"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            while not (running := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            yield running[0]
        finally:
            server.kill()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of the loopback that nothing listens on, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def no_proxy(monkeypatch) -> None:
    """No proxy of this machine's own."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def aws_variables(monkeypatch) -> None:
    """Credentials from the environment, and nothing else that boto3 could find on this machine."""
    for name in _AWS_VARIABLES_UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in _AWS_VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def s3_client(s3_server) -> Iterator[S3Client]:
    """boto3's own client of the server: to prepare what the code under test then meets."""
    import boto3
    import botocore.session

    # Else each client of each test parses the same megabytes of JSON.
    botocore.session.create_loader = functools.cache(botocore.session.create_loader)
    client = boto3.client(
        "s3", endpoint_url=s3_server, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    yield client
    client.close()


@pytest.fixture
def s3_variables(s3_server, aws_variables, monkeypatch) -> None:
    """What boto3 and child processes need for the S3 server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)


@pytest.fixture
def s3_bucket(s3_server, s3_client, s3_variables) -> S3Bucket:
    """A bucket of the test's own, for this process and its children. Its name has no hyphen: Google's client escapes
    those, and the server does not understand that."""
    bucket = S3Bucket(f"bucket{uuid.uuid4().hex}", s3_server)
    s3_client.create_bucket(Bucket=bucket.name)
    return bucket


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> Certificates:
    """Those of an authority and of a server on 127.0.0.1; nobody trusts them yet."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def trusted_certificates(certificates, monkeypatch) -> Certificates:
    """The same, which this process and its children trust."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return certificates


@pytest.fixture(scope="session")
def cold(tmp_path_factory) -> tuple[Path, Booted]:
    """A folder whose store a cold boot of the toy model has filled, and that boot."""
    folder = tmp_path_factory.mktemp("cold")
    return folder, boot_once(settings(folder))


@pytest.fixture
def directory(tmp_path) -> Iterator[CacheDirectory]:
    """An empty cache directory that Inductor writes while the test lasts."""
    from precompiling import activated

    with activated(tmp_path) as directory:
        yield directory


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[CacheDirectory]:
    """One for the tests of a module that do not look at what was stored, or leave it as it is."""
    from precompiling import activated

    with activated(tmp_path_factory.mktemp("shared")) as directory:
        yield directory


@pytest.fixture
def restart(made, tmp_path) -> Iterator[CacheDirectory]:
    """A copy, of the test's own, of the cache directory that a boot of the module has `made`."""
    from precompiling import copied

    with copied(made, tmp_path) as directory:
        yield directory


@pytest.fixture(params=["local", "s3"])
def store(request, tmp_path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "local":
        return LocalStore(tmp_path / "store")
    from compile_cache.storage.stores.s3 import S3Store

    bucket = request.getfixturevalue("s3_bucket")
    return S3Store(f"s3://{bucket.name}/some/prefix")


@pytest.fixture
def local(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def variables(tmp_path, monkeypatch) -> pytest.MonkeyPatch:
    """The settings that a command finds: the store of `local`, and nothing of this machine's own."""
    for name in list(os.environ):
        if name.startswith("COMPILE_CACHE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COMPILE_CACHE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return monkeypatch


@pytest.fixture
def run(variables) -> Run:
    """Runs a command with these settings."""
    return run_command


@pytest.fixture
def marked() -> Iterator[Marked]:
    """A mark for processes, which end with the test."""
    with Marked() as marked:
        yield marked


@pytest.fixture
def not_root() -> Iterator[None]:
    """Not even for root may this test write everywhere."""
    with as_nobody():
        yield


@pytest.fixture
def environment() -> Environment:
    """One fixed record, of no machine in particular."""
    return Environment(
        torch="2.11.0+cu130",
        triton="3.6.0",
        cuda="13.0",
        hip="",
        gpu="NVIDIA H100 80GB HBM3",
        capability="9.0",
        device_index=0,
        python="CPython 3.12.9",
        glibc="glibc 2.36",
        machine="x86_64",
        instructions="avx avx2",
        threads=0,
        cache_dir="/tmp/compile-cache/0",
        options="regional default dynamic=False",
        variables=("TORCHINDUCTOR_MAX_AUTOTUNE=1",),
    )


@pytest.fixture
def key(environment) -> CacheKey:
    return CacheKey(environment.digest, "org--model", "version-1")


@pytest.fixture(scope="session")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads
