"""Answers by a JSON schema: those that end by themselves are valid, and keywords that could not be held to are refused.

The model is one random layer, whose tokens are bytes: without a guide, it says nothing that is JSON.
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from cog_server import PROJECT
from random_texts import write_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from models.text.model import TextInputs, TextModel
from models.text.schemas import Schemas, checked
from models.text.settings import TextSettings

XGRAMMAR = PROJECT / ".venv" / "schemas"
pytestmark = pytest.mark.skipif(
    not XGRAMMAR.is_dir(), reason="xgrammar is not in .venv/schemas: make test puts it there"
)
COUNT, PART = 300, 60


@pytest.fixture(scope="module", autouse=True)
def xgrammar():
    sys.path.append(str(XGRAMMAR))
    yield
    sys.path.remove(str(XGRAMMAR))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> TextModel:
    folder = write_llama(tmp_path_factory.mktemp("llama"))
    return TextModel.load(str(folder), None, TextSettings(prompt_buckets=(16,)))


def answer(model: TextModel, schema: Any, seed: int = 0, **inputs: Any) -> tuple[str, str]:
    found = model.answer(TextInputs("x", json_schema=schema, temperature=1.0, seed=seed, max_tokens=250, **inputs))
    return "".join(found), found.finish_reason


NAMES = ["a", "é中", "name", "x y", 'q"uote', "back\\slash", "🎈", "\u3000", "z\u200dj", "l\u2028", "c\x07", "\x7f"]


def made_up(source: random.Random, depth: int = 0) -> Any:
    """A schema of the keywords that are followed."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += [] if depth == 3 else ["object", "object", "array", "anyOf", "$ref"]
    kind = source.choice(kinds) if depth else "object"
    if kind == "object":
        names = source.sample(NAMES, source.randint(1, 3))
        schema = {"type": "object", "properties": {name: made_up(source, depth + 1) for name in names}}
        schema["required"] = source.sample(names, source.randint(0, len(names)))
        return schema | source.choice([{}, {"additionalProperties": False}, {"title": "T", "description": "x"}])
    if kind == "array":
        least = source.randint(0, 2)
        items = {"items": made_up(source, depth + 1)} if source.random() < 0.9 else {}
        most = {"maxItems": least + source.randint(0, 2)}
        return {"type": "array", **items, **most, **({"minItems": least} if least else {})}
    if kind == "anyOf":
        return {"anyOf": [made_up(source, depth + 1) for _ in range(2)]}
    if kind == "$ref":
        return {"$ref": source.choice(["#/$defs/one", "#/$defs/two"])}
    return {
        "string": source.choice(
            [
                {},
                {"maxLength": 5},
                {"minLength": 2, "maxLength": 4},
                {"pattern": "^[a-c]{1,3}x?$"},
                {"pattern": "é[ü-]*"},
            ]
        ),
        "integer": source.choice([{}, {"minimum": 3, "maximum": 120}, {"exclusiveMinimum": -5, "exclusiveMaximum": 5}]),
        "number": source.choice([{}, {"minimum": 0.5, "maximum": 2.25}]),
    }.get(kind, {}) | (
        {"enum": source.sample([1, "a", None, True, "é", 2.5, "n\nl\t", 'q"', [1, {"a": []}]], 3)}
        if kind == "enum"
        else {"const": source.choice(["fixed", 7, None, False])}
        if kind == "const"
        else {"type": kind}
    )


@pytest.mark.parametrize("part", range(COUNT // PART))
def test_answers_that_end_by_themselves_are_valid_and_others_begin_a_valid_one(model, part):
    ended = 0
    for number in range(part * PART, (part + 1) * PART):
        source = random.Random(number)
        definitions = {"one": {"type": "boolean"}, "two": {"type": "array", "items": {"type": "null"}, "maxItems": 2}}
        schema = {**made_up(source), "$defs": definitions}
        text, reason = answer(model, source.choice([schema, json.dumps(schema)]), number)
        if reason == "schema":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
        else:
            assert reason == "length"
            assert model._schemas.guide(schema)._matcher.accept_string(text.removesuffix("\N{REPLACEMENT CHARACTER}"))
    assert ended >= PART * 2 / 3


def test_a_text_keeps_the_order_of_its_properties_and_an_object_has_them_as_cog_gives_them(model):
    text = '{"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}'
    assert answer(model, text)[0] == '{"b": 1, "a": 2}'
    assert answer(model, json.loads(text))[0] == '{"b": 1, "a": 2}'


def test_a_schema_may_refer_to_itself(model):
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    ended = 0
    for seed in range(10):
        text, reason = answer(model, schema, seed)
        if reason == "schema":
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended


KEYWORDS: dict[str, Any] = {
    "uniqueItems": True,
    "not": {},
    "oneOf": [{}],
    "allOf": [{}],
    "if": {},
    "then": {},
    "else": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "format": "date",
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "prefixItems": [],
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "patternProperties": {},
    "propertyNames": {},
    "minProperties": 1,
    "maxProperties": 1,
    "multipleOf": 3,
    "contentEncoding": "base64",
    "contentMediaType": "x",
    "$anchor": "x",
    "$dynamicRef": "#x",
    "$id": "x",
    "$vocabulary": {},
    "unknown": 1,
}
LONG = "patterns of more than 100 parts"
REFUSED: list[tuple[str, Any]] = [
    *((f"has {keyword}, which is not", {"type": "object", keyword: value}) for keyword, value in KEYWORDS.items()),
    ("the pattern a,", {"type": "string", "pattern": "a", "minLength": 2}),
    ("1, which is not of its type string", {"type": "string", "enum": ["a", 1]}),
    ("true, which is not of its type integer", {"type": "integer", "const": True}),
    *((f"an empty {keyword}", {"items": {keyword: []}}) for keyword in ("type", "enum", "anyOf")),
    ("a negative maxLength", {"type": "string", "maxLength": -1}),
    ("minLength beside enum", {"minLength": 1, "enum": ["a"]}),
    ("minimum beside const", {"minimum": 1, "const": 1}),
    ("18446744073709551615, an integer of more than 64 bits", {"const": {"ids": [2**64 - 1]}}),
    ("-9223372036854775809, an integer of more than", {"enum": ["a", -(2**63) - 1]}),
    (f"1{'0' * 5000}, an integer of more than", '{"const": 1' + "0" * 5000 + "}"),
    (LONG, {"type": "string", "pattern": "^" + ".?" * 100 + "$"}),
    (LONG, {"type": "string", "pattern": "^" + "(" * 4 + "a" + "){1,}" * 4 + "$"}),
    (LONG, {"type": "string", "pattern": "^(.{0,5}){0,5}$"}),
    (LONG, {"anyOf": [{"type": "string", "pattern": f"^a{{{most}}}$"} for most in (50, 51)]}),
    ("more than 256 schemas in it", {"anyOf": [{}] * 256}),
    ("more than 32 in one another", '{"items":' * 32 + "{}" + "}" * 32),
    ("type beside anyOf", {"type": "object", "anyOf": [{}]}),
    ("minimum beside $ref", {"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 1}),
    ("the $ref https://x", {"$ref": "https://x"}),
    ("the $ref #/default", {"$ref": "#/default", "default": {"not": {}}}),
    ("requires b", {"type": "object", "properties": {"a": {}}, "required": ["b"]}),
    # A name could be one of the properties', written with escapes: "\\u0061" for "a".
    *(
        ("additionalProperties beside properties", {"properties": {"a": {}}, "additionalProperties": more})
        for more in (True, {}, {"type": "null"})
    ),
    *(
        ("is no JSON schema", wrong)
        for wrong in (
            '{"type": ',
            '{"const":' + "[" * 16_000,
            {"type": "object", "required": 3},
            {"type": "object", "required": [{}]},
            {"anyOf": 3},
            {"type": "string", "pattern": 5},
        )
    ),
    (" characters; it may have 16384", {"const": "x" * 20_000}),
]
REFUSED_BY_XGRAMMAR: list[tuple[str, Any]] = [
    ("text", {"type": "text"}),
    ("maxLength must be", {"type": "string", "maxLength": False}),
    ("must not exceed 2147483647", {"type": "array", "minItems": 2**31}),
    ("minItems is greater than maxItems", {"type": "array", "minItems": 2, "maxItems": 1}),
    ("#/$defs/b", {"$ref": "#/$defs/b", "$defs": {"a": {}}}),
    ("Circular $ref", {"$ref": "#"}),
    ("a boolean or an object", {"type": "array", "items": 3}),
    ("properties must be an object", {"type": "object", "properties": []}),
    ("an object or bool, but got [1]", "[1]"),
]


PATTERNS = ["^[a-c]{1,3}x?$", "b|d+", r"^\d{1,2}\.\d$", r"^[\w.]+@\w+$", "^(?:ab|(cd)){2}$", "^.{3}$", "^[^a]{1,4}$"]


@pytest.mark.parametrize("pattern", [*PATTERNS, r"^\$\{x\}$", "^[A-Z0-9_-]{2}$", "^[-+]?[0-9]{1,3}$", r"^[\]\[]\/$"])
def test_texts_follow_patterns(model, pattern):
    schema = {"type": "string", "pattern": pattern}
    for seed in range(10):
        text, reason = answer(model, schema, seed)
        if reason == "schema":
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)a", "(?!a)a", "(?<!a)a", "(?i)a", "(?P<a>b)", r"(a)\1", r"\bx", r"\p{L}", r"\s", r"\S", r"\W"),
        *('a"', r"\\", r"\t", r"\x22", r"\u0022", "[ -~]", "[!-z]", "\n", "[a", "]", r"[^\S]"),
        *(
            r"a\|^b",
            "a{999999}",
            "a^b",
            "a$b",
            "x(^a)",
            "(a$)x",
            "a**",
            "a{1,2}{3}",
            "*",
            "(a",
            "a)",
            "^[^é]{5}$",
            "é.",
            "[^“”]*",
            r"^é[\^a]$",
        ),
    ],
)
def test_a_pattern_that_cannot_be_followed_is_refused(pattern):
    with pytest.raises(ValueError, match="has the pattern"):
        checked({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(("named", "schema"), REFUSED)
def test_what_an_answer_could_not_be_held_to_is_refused_by_name(named, schema):
    for nested in (schema, {"type": "object", "properties": {"p": schema}}) if isinstance(schema, dict) else (schema,):
        with pytest.raises(ValueError, match="json_schema") as caught:
            checked(nested)
        assert named in str(caught.value)


@pytest.mark.parametrize(("named", "schema"), REFUSED_BY_XGRAMMAR)
def test_what_is_no_schema_is_refused_by_name(model, named, schema):
    with pytest.raises(ValueError, match=f"^json_schema cannot be followed: .*{re.escape(named)}"):
        answer(model, schema)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "enum": ["x"], "title": "T"}, '"x"'),  # as Pydantic writes a Literal
        ({"type": ["integer", "null"], "const": 7}, "7"),
        ({"type": "array", "minItems": 1, "maxItems": 1}, "["),
        ({"maxItems": 0}, "[]"),
        ({"maxLength": 0}, '""'),
        ({"minimum": 3, "exclusiveMaximum": 4}, "3"),
        ({"properties": {}, "additionalProperties": {"const": 1}}, "{"),
        ({"const": {"a": [1, 2**63 - 1]}}, '{"a":[1,9223372036854775807]}'),
        ({"const": -(2**63)}, "-9223372036854775808"),
        ({"type": "string", "pattern": r"^é\.$"}, '"é."'),
    ],
)
def test_what_is_said_twice_or_left_out_is_followed(model, schema, expected):
    assert answer(model, {**schema, "deprecated": False})[0].startswith(expected)


def test_a_model_without_a_token_for_what_must_come_is_named():
    words = WordLevel({"<s>": 0, "</s>": 1, '"': 2}, unk_token="<s>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>")
    guide = Schemas(tokenizer, 3, {1}, torch.device("cpu")).guide({"const": "A"})
    assert guide.allowed().tolist() == [False, False, True]
    assert guide.take(2)
    assert not guide.allowed().any()
    with pytest.raises(ValueError, match="the model has no token for what must come"):
        guide.take(0)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"max_tokens": 4}, ('"ab"', "schema")),
        ({"max_tokens": 3}, ('"ab', "length")),
        ({"max_tokens": 4, "stop_sequences": ['"']}, ("", "stop")),
        ({"stop_sequences": ["b"]}, ('"a', "stop")),
    ],
)
def test_an_answer_that_is_whole_ends_by_its_schema_also_at_the_last_token(model, inputs, expected):
    found = model.answer(TextInputs("x", json_schema={"const": "ab"}, **inputs))
    assert ("".join(found), found.finish_reason) == expected


def test_the_least_number_of_tokens_is_refused_with_a_schema(model):
    with pytest.raises(ValueError, match="min_tokens cannot be given with json_schema"):
        answer(model, {"type": "null"}, min_tokens=3)


def test_an_answer_without_a_schema_is_the_same_after_one_with_it(model):
    plain = "".join(model.answer(TextInputs("x", temperature=1.0, seed=3, max_tokens=20)))
    answer(model, {"type": "array"})
    assert "".join(model.answer(TextInputs("x", temperature=1.0, seed=3, max_tokens=20))) == plain


def test_without_xgrammar_the_answer_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(model.__dict__, "_schemas", raising=False)
    with pytest.raises(ValueError, match="json_schema needs xgrammar; add it"):
        answer(model, {"type": "null"})
