"""The README's words alone: its blocks are put into a project, which then boots warm from a bucket."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from boots import Booted, assert_fully_warm, python_path
from cog_server import PROJECT, CogServer

from compile_cache.cli.fill_command import read_project
from compile_cache.settings import VERSION, Settings
from models.image.settings import ImageSettings

README = (PROJECT / "README.md").read_text()
# What a reader of the README puts in the place of the README's own model. The demo model is a FLUX pipeline.
MODEL = "black-forest-labs/FLUX.1-schnell@<commit>"
OWN_PREDICTOR = {
    "torch.bfloat16": "torch.float32",
    "height=1024, width=1024": "height=64, width=64",
    "num_inference_steps=4": "num_inference_steps=2",
}
# `cog run` stops after one prediction, so there `auto` is `block`.
COG_RUN = {"COMPILE_CACHE_COLD_START": "block"}


def block(language: str, mark: str) -> str:
    """The one block of the README in this language that has `mark` in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [content for content in blocks if mark in content]
    return found


def replaced(text: str, replacements: dict[str, str]) -> str:
    for old, new in replacements.items():
        assert old in text, f"the README no longer has {old}"
        text = text.replace(old, new)
    return text


def configuration(folder: Path, bucket: str) -> str:
    """The environment of the README's cog.yaml, for the model in `folder`, with a bucket and a cache directory of the
    test's own."""
    return replaced(
        block("yaml", "MODEL="),
        {
            MODEL: "weights",
            "1024x1024,1344x768": "64x64",
            "my-bucket": bucket,
            "/tmp/compile-cache": str(folder / "cache"),
        },
    )


def write_own_predictor(folder: Path, bucket: str) -> None:
    """As the README says: install the library's wheel, and add seven lines to your predict.py."""
    subprocess.run(["make", "-C", PROJECT, "wheel", f"PYTHON={sys.executable}"], check=True)
    wheel = PROJECT / "dist" / f"cog_compile_cache-{VERSION}-py3-none-any.whl"
    install = ["install", "--quiet", "--no-deps", "--target", folder / "site", wheel]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    (folder / "predict.py").write_text(replaced(block("python", "compile_cache.boot"), OWN_PREDICTOR))
    (folder / "cog.yaml").write_text(f'{configuration(folder, bucket)}run: "predict.py:Predictor"\n')


def boot(folder: Path, environ: dict[str, str]) -> Booted:
    """A boot in an empty cache directory, and a prediction."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    predictor, variables = read_project(folder, None)
    report = folder / "report.json"
    given = {"COMPILE_CACHE_REPORT": str(report), "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path(folder / "site")}
    variables = {**variables, **given, **environ}
    with CogServer(predictor, folder / "server.log", variables, folder) as server:
        server.wait_ready()
        prediction = server.predict(prompt="a handwritten seven")
    assert prediction["status"] == "succeeded", prediction
    return Booted(json.loads(report.read_text()), [], 0, (folder / "server.log").read_text())


def test_the_readme_is_enough_to_boot_an_own_predictor_warm_from_a_bucket(tmp_path, s3_bucket):
    shutil.copytree(PROJECT / "demo/flux-digits", tmp_path / "weights")
    write_own_predictor(tmp_path, s3_bucket.name)
    first = boot(tmp_path, COG_RUN)
    assert first.report["restore"]["outcome"] == "miss"
    second = boot(tmp_path, {})
    assert_fully_warm(second)
    assert "restore: hit" in second.log


def test_the_readmes_configuration_is_one_of_this_project(tmp_path):
    """As the README says: copy this project, and set MODEL in cog.yaml."""
    (tmp_path / "cog.yaml").write_text(f'{configuration(tmp_path, "bucket")}run: "predict.py:Predictor"\n')
    _, variables = read_project(tmp_path, None)
    assert Settings.from_env(variables).store == "s3://bucket/compile-cache"
    assert [*map(str, ImageSettings.from_env(variables).warm_up_sizes)] == ["64x64"]
