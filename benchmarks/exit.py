"""A container that is stopped at once: seconds from SIGTERM, sent the moment a cold boot is READY, until all is gone.

The server runs under tini in a PID namespace, as in a container, and publishes to a real S3 protocol server (moto).
After each stop another boot shows what the first one left: it must be fully cached. Needs Linux, root and tini.
Exits with 1 if a boot after a stop compiles anything, or a stop takes longer than `cog run` allows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from table import markdown, spread

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer  # noqa: E402

BAR_S = 3.0  # what `cog run` gives a container that it stops
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "tini", "--")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server(host: str = "127.0.0.1") -> Iterator[str]:
    """The URL of an S3 server that lasts as long as the context."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).with_name("moto_server"), "-H", host, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None:
                with socket.socket() as probe:
                    if probe.connect_ex((host, port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://{host}:{port}"
        finally:
            server.kill()


def settings(bucket: str, endpoint_url: str, folder: Path) -> dict[str, str]:
    """The demo model, published to `bucket`."""
    return {
        **CREDENTIALS,
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "64x64",
        "HF_HUB_OFFLINE": "1",
        "COMPILE_CACHE_STORE": f"s3://{bucket}/cache",
        "COMPILE_CACHE_S3_ENDPOINT_URL": endpoint_url,
        "COMPILE_CACHE_DIR": str(folder / "cache"),
        "COMPILE_CACHE_REPORT": str(folder / "report.json"),
        "COMPILE_CACHE_COLD_START": "block",
    }


def stop_at_ready(environ: dict[str, str], folder: Path) -> float:
    """Boot, send SIGTERM at READY; seconds until the namespace is gone."""
    with CogServer("predict.py:Predictor", folder / "server.log", environ, wrapper=NAMESPACE) as server:
        server.wait_ready()
        started = time.perf_counter()
        server.stop(signal.SIGTERM)
        return time.perf_counter() - started


def main() -> int:
    """Stop, look, print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    os.environ.update(CREDENTIALS)
    import boto3

    cold_s, warm_s, stored_bytes, cached = [], [], [], 0
    with s3_server() as endpoint_url:
        client = boto3.client("s3", endpoint_url=endpoint_url)
        for number in range(rounds):
            client.create_bucket(Bucket=f"round-{number}")
            with tempfile.TemporaryDirectory() as folder:
                environ = settings(f"round-{number}", endpoint_url, Path(folder))
                cold_s.append(stop_at_ready(environ, Path(folder)))
                warm_s.append(stop_at_ready(environ, Path(folder)))
                report = json.loads(Path(folder, "report.json").read_text())
            stored_bytes.append(report["restore"]["stored_bytes"])
            cached += report["fully_cached"]
    header = ("n", "SIGTERM to gone, cold boot, s", "the same, warm boot, s", "published, kB", "next boot fully cached")
    sizes = spread([size / 1e3 for size in stored_bytes], 0)
    print(markdown(header, [(rounds, spread(cold_s), spread(warm_s), sizes, f"{cached} of {rounds}")]))
    return 0 if cached == rounds and max(cold_s) <= BAR_S else 1


if __name__ == "__main__":
    sys.exit(main())
