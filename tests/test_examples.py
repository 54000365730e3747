"""The examples: complete, and right about odd requests. `make examples` boots them."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from boots import run_boot
from PIL import ExifTags, Image
from run_examples import CASES, EXAMPLES
from tiny_models import MODELS

from compile_cache.settings import VERSION, Settings
from models.image.pictures import open_picture

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


CUT = {"cut": ("16", None, 15), "cut by its files": ("16,48", 15, 15), "cut by LENGTHS": ("16,48", 64, 47)}
FEW = {"prompt": "an otter", "num_inference_steps": 2.0, "seed": 1.0}
# For each example that is asked without a server: its file, its model, variables, and requests.
ASKED: dict[str, tuple[str, str, dict[str, str], list[dict[str, Any]]]] = {
    "long": ("embeddings/predict.py", "e5", {"LENGTHS": "64"}, [{"texts": ["a", "b" * 321]}]),
    "long beside pictures": ("embeddings/pictures.py", "siglip", {}, [{"texts": ["a", "b" * 65]}]),
    "cut beside pictures": (
        *("embeddings/pictures.py", "siglip", {}),
        [{}, {"texts": ["x" * 16]}, {"texts": ["x", "x" * 17]}],
    ),
    "video": ("video/predict.py", "ltx", {"VIDEOS": "64x64x9"}, [{**FEW, "guidance_scale": 1e38}, FEW]),
    "picture": ("flux-lora/predict.py", "flux", {"PIXELS": "128"}, [{**FEW, "guidance_scale": 1e38}, FEW]),
}
for case, (lengths, _, longest) in CUT.items():
    requests = [{"texts": texts} for texts in ([], ["x" * (longest - 2)], ["x", "x" * (longest - 1)])]
    ASKED[case] = "embeddings/predict.py", "e5", {"LENGTHS": lengths}, requests


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, list[str]]:
    """What an example answers to each request, or why it refuses. One process asks them all."""
    folder, jobs = tmp_path_factory.mktemp("models"), []
    for case, (file, model, variables, requests) in ASKED.items():
        torch.manual_seed(0)
        MODELS[model](folder / case)
        if own := CUT.get(case, [None, None])[1]:
            (folder / case / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": own}))
        jobs.append((str(EXAMPLES / file), {**variables, "MODEL": str(folder / case), "BATCHES": "2"}, requests))
    given = {**os.environ, "COMPILE_CACHE_SCOPE": "off"}
    done = run_boot(given, json.dumps(jobs), program="example_once", folder=Path(sys.prefix, "lora"))
    assert done.returncode == 0, done.stderr
    return dict(zip(ASKED, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("case", "most"), [("long", 320), ("long beside pictures", 64)])
def test_a_text_with_more_characters_than_its_tokens_can_have_is_refused(answers, case, most):
    """64 tokens as long as [PAD], and 16 as </s>."""
    assert answers[case][0].startswith(f"refused: a text has {most + 1} characters; it may have {most}")


@pytest.mark.parametrize("case", CUT)
def test_texts_that_would_be_cut_are_refused(answers, case):
    """Two tokens of each begin and end it."""
    _, _, longest = CUT[case]
    none, whole, long = answers[case]
    assert none.startswith("refused: texts is empty")
    assert whole == "answered"
    assert long == f"refused: text 1 has {longest + 1} tokens, and this server reads {longest}"


def test_texts_beside_pictures_that_would_be_cut_are_refused(answers):
    none, whole, long = answers["cut beside pictures"]
    assert [answer.partition(":")[0] for answer in (none, whole, long)] == ["refused", "answered", "refused"]


def turned() -> Image.Image:
    picture = Image.linear_gradient("L").resize((8, 4)).convert("RGB")
    picture.putpixel((0, 0), (255, 0, 0))
    return picture


ON_ITS_SIDE = Image.Exif()
ON_ITS_SIDE[ExifTags.Base.Orientation] = 6
PICTURES: dict[str, Callable[[Path], Any]] = {
    "turned.jpg": lambda file: turned().save(file, exif=ON_ITS_SIDE),
    "hidden.png": lambda file: Image.new("RGBA", (8, 4), (255, 0, 0, 0)).save(file),
    "half.webp": lambda file: Image.new("RGBA", (8, 4), (255, 0, 0, 128)).save(file, lossless=True),
    "palette.gif": lambda file: turned().quantize(4).save(file, transparency=0),
    "grey.png": lambda file: turned().convert("LA").save(file),
    "printed.jpg": lambda file: turned().convert("CMYK").save(file),
    "bits.png": lambda file: turned().convert("1").save(file),
    "16 bits.png": lambda file: Image.new("I;16", (8, 4), 40_000).save(file),
    "floats.tiff": lambda file: Image.new("F", (8, 4), 0.5).save(file),
    "text.png": lambda file: file.write_text("a text"),
    "cut.png": lambda file: (turned().save(file), file.write_bytes(file.read_bytes()[:-30])),
    "large.png": lambda file: Image.new("1", (10_000, 5_001)).save(file),
    "icon.ico": lambda file: turned().save(file),
}


@pytest.mark.parametrize("name", PICTURES)
def test_examples_read_pictures_as_the_predictor_of_this_project_does(tmp_path, name, monkeypatch):
    found = [file.read_text() for file in EXAMPLES.glob("*/picture_files.py")]
    assert found == found[:1] * 3
    monkeypatch.syspath_prepend(EXAMPLES / "edit")
    read, file = import_module("picture_files").read_picture, tmp_path / name
    PICTURES[name](file)
    try:
        right = open_picture(str(file), "white")
    except ValueError:
        with pytest.raises(ValueError, match="picture"):
            read(file)
    else:
        assert (read(file).size, read(file).tobytes()) == (right.size, right.tobytes())


@pytest.mark.parametrize("sample", ["nan", "inf", "1e38", "-1e38", ""])
def test_a_recording_without_sound_is_refused(tmp_path, monkeypatch, sample):
    monkeypatch.syspath_prepend(EXAMPLES / "speech")
    read, file = import_module("sound").read, tmp_path / "recording.wav"
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, 16000, 64000, 4, 32)  # floats of 32 bits, one channel
    for samples in ([1.5, -3e4], [0.0, float(sample)] if sample else []):
        numbers = numpy.array(samples * 800, "f4").tobytes()
        body = b"WAVE" + form + struct.pack("<4sI", b"data", len(numbers)) + numbers
        file.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
        if 1.5 in samples:
            assert read(file, 16000).shape == (1600,)
    with pytest.raises(ValueError, match="the file"):
        read(file, 16000)


@pytest.mark.parametrize("case", ["video", "picture"])
def test_a_result_that_is_not_finite_is_an_error(answers, case):
    """And 1.0 is an integer, as by Cog's schema."""
    black, drawn = answers[case]
    assert "numbers that are not finite" in black
    assert drawn == "answered"


def test_a_merged_lora_is_diffusers_own_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "flux-lora")
    done = run_boot(os.environ, str(tmp_path), program="fused_loras", folder=Path(sys.prefix, "lora"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in ("alpha in the header", "a bias", "a DoRA"):
        assert told[name]["from diffusers"] < 1e-4 < 1e-3 < told[name]["from none"], told
    assert "for another pipeline" in told["another model's"]["refused"]
    assert "control" in told["control"]["refused"]
    assert "not finite" in told["not finite"]["refused"]
    assert "layers of other sizes" in told["larger layers"]["refused"]
    assert {"refused" in told[name] for name in ("half a DoRA", "a DoRA by another name")} == {True}
    assert {each["is as it was"] for each in told.values()} == {True}
    assert {each["left"] for each in told.values()} == {0.0}
