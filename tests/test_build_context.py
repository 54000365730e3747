"""What .dockerignore sends to a build: all that a predictor needs, and nothing else."""

from __future__ import annotations

import subprocess

import pytest
from build_context import is_left_out, read_patterns
from cog_server import PROJECT

PATTERNS = read_patterns(PROJECT / ".dockerignore")

NEEDED = {
    "cog.yaml",
    "cog.text.yaml",
    "compile_cache",
    "demo/flux-digits",
    "demo/llama-adder",
    "LICENSE",
    "models",
    "predict.py",
    "requirements.txt",
    "warmup.py",
}


def tracked() -> set[str]:
    """The paths that git knows."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout of git's")
    return set(done.stdout.split("\0")) - {""}


def is_needed(path: str) -> bool:
    return any(path == needed or path.startswith(f"{needed}/") for needed in NEEDED)


def test_a_checkout_sends_what_the_image_needs_and_nothing_else():
    """A new file in the root is either needed, and named above, or .dockerignore names it."""
    files = tracked()
    assert {path for path in files if not is_left_out(path, PATTERNS)} == {path for path in files if is_needed(path)}


@pytest.mark.parametrize(
    "path",
    [
        ".cog/openapi_schema.json",
        "baked/model/version/a.pack",
        "baked/index.json",
        "weights/FLUX.1-schnell/README.md",  # it counts into the model's version
    ],
)
def test_what_the_image_needs_beside_the_checkout_is_sent(path):
    assert not is_left_out(path, PATTERNS)


@pytest.mark.parametrize(
    "path",
    [
        ".cog/cog.lock",
        ".compile-cache/model/version/a.pack",
        ".env",
        ".git/HEAD",
        ".github/workflows/tests.yaml",
        ".venv/bin/python",
        ".venv-3.13/bin/python",
        "CONTRIBUTING.md",
        "compile_cache/storage/stores/__pycache__/s3.cpython-312.pyc",
        "__pycache__/predict.cpython-312.pyc",
        "cog_compile_cache.egg-info/PKG-INFO",
        "demo/output/text-generation/cold/sums.txt",
        "output.0.webp",
    ],
)
def test_what_git_and_tools_leave_in_a_checkout_is_not_sent(path):
    assert is_left_out(path, PATTERNS)
