"""The signatures in predict.py agree with the documents in `cog_schema/`, which Cog's own command derived from them.

Other descriptions change nothing. After another change of a signature, take the document that `cog build` writes to
`.cog/openapi_schema.json`.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from validating_server import SCHEMAS

from models.image.sizes import ASPECT_RATIOS

PREDICTORS = ast.parse((Path(__file__).parent.parent / "predict.py").read_text()).body
TYPES = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "Path": {"type": "string", "format": "uri"},
    "Secret": {"type": "string", "format": "password", "writeOnly": True, "x-cog-secret": True},
    "List[str]": {"type": "array", "items": {"type": "string"}},
    "List[dict]": {"type": "array", "items": {"type": "object"}},
    "dict": {"type": "object"},
    "Union[str, dict]": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    "Union[str, List[str]]": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
}
# What Cog calls the arguments of an Input.
NAMES = {"default": "default", "ge": "minimum", "le": "maximum", "choices": "enum", "accept": "x-cog-accept"}


def declared(predictor: str) -> dict[str, dict[str, Any]]:
    """Each input of a predictor's run(), as Cog describes it. Its arguments are literals, as Cog needs them."""
    (kind,) = [node for node in PREDICTORS if isinstance(node, ast.ClassDef) and node.name == predictor]
    (run,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    found = {}
    for argument, call in zip(run.args.args[1:], run.args.defaults, strict=True):
        assert isinstance(call, ast.Call)
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        assert values.pop("description")
        annotation = ast.unparse(argument.annotation)
        is_optional = annotation.startswith("Optional[")
        kind_of_value = TYPES[annotation.removeprefix("Optional[").removesuffix("]") if is_optional else annotation]
        found[argument.arg] = {**kind_of_value, **{NAMES[name]: value for name, value in values.items()}}
        if is_optional:
            found[argument.arg]["nullable"] = True
    return found


def derived(predictor: str) -> dict[str, dict[str, Any]]:
    """Each input in the document, in order; its choices are in its place."""
    parts = json.loads(SCHEMAS[f"predict.py:{predictor}"].read_text())["components"]["schemas"]
    found = {}
    for name, entry in sorted(parts["Input"]["properties"].items(), key=lambda item: item[1]["x-order"]):
        choices = {part: parts[name][part] for part in ("enum", "type")} if "allOf" in entry else {}
        ignored = ("title", "description", "x-order", "allOf")
        found[name] = {**choices, **{part: value for part, value in entry.items() if part not in ignored}}
    return found


@pytest.mark.parametrize("predictor", ["Predictor", "TextPredictor"])
def test_the_signature_is_the_one_that_cog_read(predictor):
    assert declared(predictor) == derived(predictor)
    assert list(declared(predictor)) == list(derived(predictor))


def test_the_predictor_offers_the_aspect_ratios_that_sizes_know():
    assert tuple(declared("Predictor")["aspect_ratio"]["enum"]) == ASPECT_RATIOS


# Inputs of replicate/cog-flux (its source of July 2025): the default, the least and the most. None is the model's own.
COG_FLUX: dict[str, tuple[Any, Any, Any]] = {
    "num_outputs": (1, 1, 4),
    "num_inference_steps": (None, 1, 50),
    "guidance_scale": (None, 0, 10),
    "prompt_strength": (0.8, 0, 1),
    "lora_scale": (1.0, -1, 3),
    "extra_lora_scale": (1.0, -1, 3),
    "output_quality": (80, 0, 100),
    "output_format": ("webp", None, None),
    # There, go_fast is on unless a request says otherwise. Here, it is wherever GO_FAST allows it.
    **dict.fromkeys(("image", "mask", "seed", "lora_weights", "extra_lora", "go_fast"), (None, None, None)),
    **dict.fromkeys(("hf_api_token", "civitai_api_token"), (None, None, None)),
}


@pytest.mark.parametrize("name", COG_FLUX)
def test_what_a_request_to_cog_flux_may_say_means_the_same_here(name):
    (default, least, most), ours = COG_FLUX[name], declared("Predictor")[name]
    assert ours["default"] == default
    assert least is None or ours["minimum"] <= least <= most <= ours["maximum"]
    assert {"1", "0.25", "match_input"} == {*declared("Predictor")["megapixels"]["enum"]}
