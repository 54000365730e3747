"""The examples: complete, and the cheapest of them booted. `make examples` boots all."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import yaml
from boots import run_boot
from run_examples import CASES, EXAMPLES, main
from tiny_models import MODELS

from compile_cache.settings import VERSION, Settings

FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/cog.yaml"))
CONFIGURATIONS = sorted(EXAMPLES.glob("*/cog*.yaml"))


def test_every_example_is_booted():
    assert {folder.name for folder in FOLDERS} == set(CASES)
    assert {case.model for cases in CASES.values() for case in cases} == set(MODELS)


@pytest.mark.parametrize("file", CONFIGURATIONS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_configuration_names_its_predictor_and_settings_that_can_be(file: Path):
    configuration = yaml.safe_load(file.read_text())
    environ = dict(variable.split("=", 1) for variable in configuration["environment"])
    Settings.from_env(environ)
    served = configuration.get("run") or configuration["predict"]  # the old name
    source = (file.parent / served.partition(":")[0]).read_text()
    assert environ["MODEL"] == re.search(r'"MODEL", "(.+?)"', source)[1]
    requirements = (file.parent / configuration["build"]["python_requirements"]).read_text()
    assert requirements.startswith(f"./cog_compile_cache-{VERSION}-py3-none-any.whl\n")


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/*.py")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_file_takes_the_library_alone(file: Path):
    text = file.read_text()
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
    assert not imported & {"models", "warmup", "demo", "benchmarks"}


def test_the_cheapest_example_boots_precompiled_and_answers_as_without_the_library(tmp_path):
    main(["embeddings/siglip", "--work", str(tmp_path)])


REFUSED = """
import sys
sys.path.insert(0, "examples/embeddings")
from {0} import Predictor
predictor = Predictor()
predictor.setup()
try:
    predictor.run(texts=["a", "b" * {1}])
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(("predictor", "model", "most"), [("predict", "e5", 320), ("pictures", "siglip", 64)])
def test_a_text_with_more_characters_than_its_tokens_can_have_is_refused(tmp_path, predictor, model, most):
    """64 tokens as long as [PAD], and 16 as </s>."""
    MODELS[model](tmp_path / model)
    given = {"MODEL": str(tmp_path / model), "LENGTHS": "64", "BATCHES": "2", "COMPILE_CACHE_SCOPE": "off"}
    program = REFUSED.format(predictor, most + 1)
    done = run_boot(os.environ | given, program, program="run_source", folder=EXAMPLES.parent)
    assert done.stdout.startswith(f"a text has {most + 1} characters; it may have {most}"), done.stderr


def test_a_merged_lora_is_diffusers_own_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "flux-lora")
    done = run_boot(os.environ, str(tmp_path), program="fused_loras", folder=Path(sys.prefix, "lora"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in ("alpha in the header", "a bias"):
        assert told[name]["from diffusers"] < 1e-4 < 1e-3 < told[name]["from none"], told
    assert "for another pipeline" in told["another model's"]["refused"]
    assert "control" in told["control"]["refused"]
    assert {each["left"] for each in told.values()} == {0.0}
