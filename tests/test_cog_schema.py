"""The schema that Cog derives from a predictor's signature: what it accepts, refuses and drops."""

from __future__ import annotations

import json
from pathlib import Path

import cog_schema
import pytest
from cog_schema import SchemaError, openapi_schema
from cog_signatures import ACCEPTED, REFUSED, Signature

PROJECT = Path(__file__).parent.parent
DERIVED = Path(cog_schema.__file__).parent / "derived"
# What Cog 0.22.0's own parser, the package pkg/schema of its source, made of each accepted signature.
SIGNATURES = json.loads((DERIVED / "signatures.json").read_text())
OF_NO_PREDICTOR = {"PredictionRequest", "PredictionResponse", "Status", "HTTPValidationError", "ValidationError"}
BASE = """\
from cog import BaseRunner, Input

class Base(BaseRunner):
    def run(self, x: int = Input(default=N, ge=1)) -> str:
        ...

N = 3
"""


def of_the_predictor(document):
    """Its inputs, output and choices; and whether it streams."""
    found = {name: part for name, part in document["components"]["schemas"].items() if name not in OF_NO_PREDICTOR}
    if document["paths"]["/predictions"]["post"].get("x-cog-streaming"):
        found["x-cog-streaming"] = True
    return found


@pytest.mark.parametrize(("name", "predictor"), [("image", "Predictor"), ("text", "TextPredictor")])
def test_the_document_is_that_of_cogs_command(name, predictor):
    document = openapi_schema(f"predict.py:{predictor}", DERIVED)
    assert document == json.loads((DERIVED / f"{name}.json").read_text())
    in_order = json.loads((DERIVED / f"{name}.json").read_text())["components"]["schemas"]["Input"]["properties"]
    assert list(document["components"]["schemas"]["Input"]["properties"]) == list(in_order)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_signature_gives_what_cogs_parser_gives(tmp_path, name):
    document = openapi_schema(ACCEPTED[name].write(tmp_path), tmp_path)
    assert of_the_predictor(document) == SIGNATURES[name]


@pytest.mark.parametrize(("signature", "message"), REFUSED.values(), ids=REFUSED)
def test_a_signature_that_cog_refuses_or_cuts_is_an_error_that_says_what_to_write(tmp_path, signature, message):
    with pytest.raises(SchemaError, match=message):
        openapi_schema(signature.write(tmp_path), tmp_path)


def test_all_faults_of_a_signature_are_in_one_error(tmp_path):
    signature = Signature("y: int, z: set, x: int = Input(le=N)", output="Optional[str]", above="N = 3")
    with pytest.raises(SchemaError, match=r"parameter z: .*\n.*parameter x: .*\n.* as an output") as caught:
        openapi_schema(signature.write(tmp_path), tmp_path)
    assert all(line.startswith("predict.py, Predictor.run(): ") for line in str(caught.value).splitlines())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("predict.py", f"{BASE}\nclass Predictor(Base):\n    pass\n"),
        ("predict.py", "from models.base import Base as B\nclass Predictor(B):\n    pass\n"),
        ("predict.py", "import models.base\nclass Predictor(models.base.Base):\n    pass\n"),
        ("models/predict.py", "from .base import Base\nclass Predictor(Base):\n    pass\n"),
    ],
)
def test_run_may_come_from_the_projects_own_files(tmp_path, path, source):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.py").write_text(BASE)
    (tmp_path / path).write_text(source)
    inputs = openapi_schema(f"{path}:Predictor", tmp_path)["components"]["schemas"]["Input"]
    assert inputs["properties"] == {"x": {"default": 3, "minimum": 1, "title": "X", "type": "integer", "x-order": 0}}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from a_package import Base\nclass Predictor(Base):\n    pass\n", "Predictor has no run"),
        ("class Predictor:\n    def predict(self) -> str: ...\n", "Predictor has no run"),
        ("class Other:\n    def run(self) -> str: ...\n", "no class Predictor at its top level"),
        ("class Predictor:\n    def run(x: str) -> str: ...\n", "the first parameter is not self"),
    ],
)
def test_a_predictor_without_a_run_of_its_own_project_is_an_error(tmp_path, source, message):
    (tmp_path / "predict.py").write_text(source)
    with pytest.raises(SchemaError, match=message):
        openapi_schema("predict.py:Predictor", tmp_path)


@pytest.mark.parametrize(
    "predictor",
    [
        "predict.py:Predictor",
        "predict.py:TextPredictor",
        "tests/toy_predictor.py:Predictor",
    ],
)
def test_cog_drops_nothing_of_the_predictors_here(predictor):
    components = openapi_schema(predictor, PROJECT)["components"]["schemas"]
    assert all("description" in entry for entry in components["Input"]["properties"].values())


def test_no_test_starts_a_server_without_a_schema():
    users = [path.name for path in Path(__file__).parent.glob("*.py") if "CogServer(" in path.read_text()]
    assert users == [Path(__file__).name]
