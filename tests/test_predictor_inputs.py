"""The inputs of both predictors: their bounds in predict.py, and without a schema in front of it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import predict
from models.image import inputs as image
from models.image.inputs import ImageRequest
from models.image.sizes import Size
from models.inputs import Bounds, check_inputs
from models.text import inputs as text
from models.text.inputs import TextInputs

PROJECT = Path(__file__).parent.parent
KINDS = {"str": str, "int": int, "float": float}
# They hold lists or are drawn at random if absent.
DIFFERENT = {"stop_sequences", "seed"}


def declared(predictor: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each input of a predictor's run(): its annotation and the literals in its `Input(...)`, as Cog reads them."""
    (kind,) = [
        node
        for node in ast.parse((PROJECT / "predict.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == predictor
    ]
    (run,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    found = {}
    for argument, default in zip(run.args.args[1:], run.args.defaults, strict=True):
        literals = {keyword.arg: ast.literal_eval(keyword.value) for keyword in default.keywords}
        found[argument.arg] = (ast.unparse(argument.annotation), literals)
    return found


@pytest.mark.parametrize(("predictor", "bounds"), [("Predictor", image.BOUNDS), ("TextPredictor", text.BOUNDS)])
def test_inputs_have_the_bounds_that_cog_reads(predictor, bounds):
    inputs = declared(predictor)
    assert inputs.keys() - {"stop_sequences"} == bounds.keys()
    for name, bound in bounds.items():
        annotation, literals = inputs[name]
        is_optional = annotation.startswith("Optional[")
        assert KINDS[annotation.removeprefix("Optional[").removesuffix("]")] is bound.kind, name
        assert (literals.get("ge"), literals.get("le")) == (bound.least, bound.most), name
        assert tuple(literals.get("choices", ())) == bound.choices, name
        assert is_optional == bound.is_optional or name in DIFFERENT, name
        assert "default" not in literals or bound.allow(literals["default"]) or name in DIFFERENT, name


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prompt": None}, "prompt is None; give a text"),
        ({"aspect_ratio": "1:7"}, "aspect_ratio is '1:7'; give one of 1:1, 16:9"),
        ({"width": 0, "height": 64}, "width is 0; give a whole number from 1"),
        ({"num_outputs": 0}, "num_outputs is 0; give a whole number from 1 to 8"),
        ({"num_outputs": 9}, "num_outputs is 9"),
        ({"num_outputs": True}, "num_outputs is True"),
        ({"num_outputs": None}, "num_outputs is None"),
        ({"num_inference_steps": 0}, "num_inference_steps is 0; give a whole number from 1 to 200"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5"),
        ({"guidance_scale": 1e308}, r"guidance_scale is 1e\+308; give a number from 0 to 50"),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
        ({"seed": -1}, "seed is -1; give a whole number from 0 to 4294967295"),
        ({"output_format": "gif"}, "output_format is 'gif'; give one of png, webp, jpg"),
        ({"output_quality": 101}, "output_quality is 101"),
    ],
)
def test_image_input_out_of_its_bounds_is_refused_by_name(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        ImageRequest(**{"prompt": "a", "seed": 0, **wrong})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; give a whole number from 1"),
        ({"temperature": -1}, "temperature is -1; give a number from 0 to 5"),
        ({"temperature": 1e308}, "temperature is"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1; give a whole number from 0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; give a number from 0.1 to 10"),
        ({"seed": 1 << 32}, "seed is 4294967296"),
        ({"system_prompt": 3}, "system_prompt is 3; give a text"),
        ({"stop_sequences": "ab"}, "stop_sequences is 'ab'; give a list of texts"),
        ({"stop_sequences": ("",)}, "stop_sequences has ''; give texts that are not empty"),
        ({"stop_sequences": (1,)}, "stop_sequences has 1"),
    ],
)
def test_text_input_out_of_its_bounds_is_refused_by_name(wrong, reason):
    with pytest.raises(ValueError, match=reason):
        TextInputs(**{"prompt": "a", **wrong})


def test_all_wrong_inputs_are_in_one_error():
    with pytest.raises(ValueError, match=r"num_outputs is 0.*\n.*seed is -1"):
        ImageRequest(prompt="a", num_outputs=0, seed=-1)


def test_bounds_are_included():
    check_inputs(ImageRequest(prompt="", seed=4294967295, num_outputs=8, guidance_scale=50), {"seed": Bounds(int, 0)})


def test_seeds_of_several_pictures_count_up_and_begin_again():
    pictures = ImageRequest(prompt="a", seed=4294967295, num_outputs=2).pictures([Size(64, 64)])
    assert [picture.seed for picture in pictures] == [4294967295, 0]


PICTURE = {
    "prompt": "a handwritten one",
    "negative_prompt": "",
    "aspect_ratio": None,
    "width": None,
    "height": None,
    "num_outputs": 1,
    "num_inference_steps": 1,
    "guidance_scale": None,
    "seed": 0,
    "output_format": "png",
    "output_quality": 90,
}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    """The demo model, eager, called as Cog calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(PROJECT)
        variables = {"SCOPE": "off", "STORE": "off", "DIR": str(tmp_path_factory.mktemp("boot") / "cache")}
        for name, value in variables.items():
            patch.setenv(f"COMPILE_CACHE_{name}", value)
        patch.setenv("IMAGE_SIZES", "64x64")
        predictor = predict.Predictor()
        predictor.setup()
        yield predictor


@pytest.mark.parametrize("wrong", [{"num_outputs": 0}, {"num_inference_steps": 0}, {"seed": -1}, {"width": 64}])
def test_predictor_without_a_schema_names_the_wrong_input(predictor, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        predictor.run(**{**PICTURE, **wrong})


def test_folders_of_pictures_do_not_pile_up(predictor, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for seed in range(4):
        paths = predictor.run(**{**PICTURE, "num_outputs": 2, "seed": seed})
        assert all(Path(path).stat().st_size for path in paths)
    assert len(list(tmp_path.iterdir())) <= 2
