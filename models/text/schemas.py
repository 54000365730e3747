"""Answers in JSON: a schema says before each token which ones may come, by xgrammar's automaton.

xgrammar lets answers pass that are invalid for some keywords, so keywords outside a list are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

# Say nothing of a value.
_NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "$defs", "definitions"}
_KEYWORDS = _NOTES | {
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "enum", "const", "anyOf", "$ref",
}  # fmt: skip
# Each is all that a schema says: what stands beside it would be ignored.
_ALONE = ("enum", "const", "anyOf", "$ref")
# Of other patterns, xgrammar lets quotation marks, backslashes and control characters pass as they are, which ends the
# text, or it knows no more than a part.
_ESCAPED = r"\\[dw./+*?()\[\]{}|^$-]"
_RANGES = "[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]"
_CLASS = rf"""\[\^?-?(?:{_ESCAPED}|{_RANGES}|[^"\\\x00-\x1f\[\]-])+-?\]"""
_PATTERN = re.compile(rf"""(?:\((?:\?:)?(?!\?)|{_ESCAPED}|{_CLASS}|[^"\\\x00-\x1f\[\](])*""")
# For the same reason, a length becomes a pattern: of all characters that stand for themselves in JSON.
_OF_LENGTH = "^[ !#-\\[\\]-~\u00a1-\ud7ff\ue000-\uffff\U00010000-\U0010ffff]{%s,%s}$"
# The time to compile has no limit of its own.
_MOST_CHARACTERS = 16_384
_MOST_COUNT = 10_000
_MOST_LEVELS = 64
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


def checked(schema: Any) -> str:
    """A schema as JSON, in the order of its keys: a text keeps the order in which properties are written.

    Raises:
        ValueError: it is no schema, has a keyword that no answer could be held to, or is too large.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"json_schema has {len(text)} characters; it may have {_MOST_CHARACTERS}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("json_schema must be an object")
    if (levels := _levels(found)) > _MOST_LEVELS:
        raise ValueError(f"json_schema is {levels} levels deep; it may be {_MOST_LEVELS}")
    try:
        for part in _schemas(found):
            _check(part, found)
            if "minLength" in part or "maxLength" in part:
                part["pattern"] = _OF_LENGTH % (part.pop("minLength", 0), part.pop("maxLength", ""))
        return json.dumps(found)
    except (TypeError, AttributeError) as error:  # such as a number in place of a list
        raise ValueError(f"json_schema is no JSON schema: {error}") from error


def _levels(value: Any) -> int:
    """How deep objects and lists lie in one another, found without recursion."""
    levels, found = 0, [value]
    while found := [part for part in found if isinstance(part, (dict, list))]:
        levels += 1
        found = [inner for part in found for inner in (part.values() if isinstance(part, dict) else part)]
    return levels


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema, and all that are in it."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema has {json.dumps(schema)} in place of a schema")
    yield schema
    for keyword in ("properties", "$defs", "definitions"):
        if not isinstance(named := schema.get(keyword, {}), dict):
            raise ValueError(f"json_schema: {keyword} must be an object")
        for name, part in named.items():
            if not name.isprintable():
                raise ValueError(f"json_schema: {keyword} has {json.dumps(name)}, a name that cannot be printed")
            yield from _schemas(part)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from _schemas(schema[keyword])
    for part in schema.get("anyOf", ()):
        yield from _schemas(part)


def _check(schema: dict[str, Any], root: dict[str, Any]) -> None:
    if unknown := sorted(schema.keys() - _KEYWORDS):
        raise ValueError(f"json_schema has {unknown[0]}, which is not followed here; leave it out")
    said = schema.keys() - _NOTES
    if len(said) > 1 and (alone := [keyword for keyword in _ALONE if keyword in said]):
        others = ", ".join(sorted(said - {alone[0]}))
        raise ValueError(f"json_schema has {others} beside {alone[0]}, which would be ignored; leave one of them out")
    if unnamed := sorted({*schema.get("required", ())} - {*schema.get("properties", {})}):
        raise ValueError(f"json_schema requires {unnamed[0]}, which is not in its properties")
    for keyword in _COUNTS:
        if not (isinstance(count := schema.get(keyword, 0), int) and 0 <= count <= _MOST_COUNT):
            raise ValueError(f"json_schema: {keyword} must be from 0 to {_MOST_COUNT}")
    if "pattern" in schema and ({"minLength", "maxLength"} & said or not _PATTERN.fullmatch(str(schema["pattern"]))):
        raise ValueError(f"json_schema has the pattern {schema['pattern']}, which cannot be followed; simplify it")
    if (reference := schema.get("$ref", "#")) != "#" and _target(reference, root) is None:
        raise ValueError(f"json_schema has the $ref {reference}, which it does not define in $defs or definitions")


def _target(reference: Any, root: dict[str, Any]) -> Any:
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(reference))
    return root.get(found[1], {}).get(found[2]) if found else None


class Schemas:
    """Compiles schemas for a tokenizer. xgrammar is imported for it."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int], device: torch.device) -> None:
        """Read the tokenizer's vocabulary. Tokens are chosen on `device`.

        Raises:
            ValueError: xgrammar is not installed, or no token ends an answer.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("json_schema needs xgrammar; add it to requirements.txt") from error
        if not ends:
            raise ValueError("json_schema needs a model that has an end token")
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[*ends])
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        # xgrammar takes other special tokens for their names, which are no text of an answer.
        added = tokenizer.added_tokens_decoder.items()
        self._is_text = torch.ones(vocabulary, dtype=torch.bool)
        self._is_text[[number for number, token in added if token.special and number not in ends]] = False
        self._is_text = self._is_text.to(device)

    def guide(self, schema: Any) -> Guide:
        """What leads one answer to an instance of `schema`, with a space after each comma and colon.

        Raises:
            ValueError: as `checked`; or xgrammar cannot compile it.
        """
        text = checked(schema)
        try:
            compiled = self._compiler.compile_json_schema(text, any_whitespace=False)
        except RuntimeError as error:
            raise ValueError(f"json_schema cannot be followed: {error}") from error
        return Guide(compiled, self._is_text)


class Guide:
    """Which tokens may come next in one answer: of those that `is_text` has, a bool of shape [vocabulary]."""

    def __init__(self, compiled: Any, is_text: torch.Tensor) -> None:
        import xgrammar

        self._matcher, self._is_text = xgrammar.GrammarMatcher(compiled), is_text
        self._bits = xgrammar.allocate_token_bitmask(1, len(is_text))
        self._places = torch.arange(32, dtype=torch.int32, device=is_text.device)

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next: bool, of shape [vocabulary], on the device of `is_text`."""
        self._matcher.fill_next_token_bitmask(self._bits)
        words = self._bits[0].to(self._is_text.device)  # a bit a token is what travels
        return (words[:, None] >> self._places & 1).bool().flatten()[: len(self._is_text)] & self._is_text

    def take(self, token: int) -> bool:
        """Go on from a token that was allowed. Whether another one follows."""
        self._matcher.accept_token(token)
        return not self._matcher.is_terminated()
