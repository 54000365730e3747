"""Answers in JSON. Before each token, xgrammar says which tokens the schema allows.

For some keywords, xgrammar lets invalid answers pass. So keywords outside a list are refused by name.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

# Say nothing of a value.
_NOTES = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$comment",
    "$defs", "definitions",
}  # fmt: skip
# The type that each of these keywords describes. Without a type, xgrammar ignores them.
_OF_TYPE = {
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
# These must stand alone: xgrammar ignores keywords beside them.
_ALONE = {"enum", "const", "anyOf", "$ref"}
_KEYWORDS = {*_NOTES, *_OF_TYPE, *_ALONE, "type", "properties", "required", "additionalProperties", "items"}
# The types of a value.
_TYPES: dict[type, set[str]] = {
    str: {"string"},
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
# Nothing in xgrammar bounds the time to compile, nor the time for a token. These limits do.
_MOST_CHARACTERS = 16_384
_MOST_LEVELS = 32
_MOST_PARTS = 256
_MOST_COST = 100
# The cost of `?`, `*` and `+`, in characters.
_COST_OF_CHOICE = 6
# In other patterns, xgrammar lets an unescaped quotation mark pass, which ends the text, or it follows only a part.
_ESCAPED = re.compile(r"\\[dw./+*?()\[\]{}|^$-]")
_RANGES = "[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]"
_CLASS = rf"""\[\^?-?(?:{_RANGES}|[^"\\\x00-\x1f\[\]-])+-?\]"""
_TIMES = r"[?*+]|\{\d{1,5}(?:,\d{0,5})?\}"
_PART = re.compile(rf"""{_TIMES}|[()|^$]|(?P<one>{_CLASS}|[^"\\\x00-\x1f\[\]{{}}])""")
# How a pattern's parts are written to count them: one, and one in a repetition.
_ONE, _REPEATED = "_", "~"
# A part with a repetition, or a group in which nothing is left to write out.
_INNERMOST = re.compile(rf"(_(?=[?*+{{])|\(\|*[_~][_~|]*\))({_TIMES})?(?![?*+{{])")
# Elsewhere, edges would be ignored.
_FLAT = re.compile(r"\^?[_~]*\$?(\|\^?[_~]*\$?)*")
# The bytes of a character of UTF-8 behind its first one.
_CONTINUING = range(0x80, 0xC0)
_ORIGIN = r"^\[[\d:]+\] \S+:\d+: "


def checked(schema: Any) -> str:
    """A schema as JSON, in the order of its keys: a text keeps the order in which properties are written.

    What is no schema at all is left to xgrammar, which refuses it.

    Raises:
        ValueError: it has a keyword that no answer could be held to, or is too large.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"json_schema has {len(text)} characters; it may have {_MOST_CHARACTERS}")
    try:
        found = json.loads(text, parse_int=_integer)
        cost = sum(map(_check, _schemas(found)))
        text = json.dumps(found)
    except (TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON schema: {error}") from error
    if cost > _MOST_COST:
        raise ValueError(
            f"json_schema has patterns of more than {_MOST_COST} parts, with repetitions written out; simplify them"
        )
    return text


def _integer(text: str) -> int:
    """An integer that xgrammar does not change."""
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"json_schema has {text}, an integer of more than 64 bits; make it a text")
    return int(text)


def _schemas(schema: Any) -> list[dict[str, Any]]:
    """A schema, and all that are in it."""
    found: list[dict[str, Any]] = []
    levels, level = 0, [schema]
    while level := [part for part in level if isinstance(part, dict)]:
        levels, found = levels + 1, found + level
        if levels > _MOST_LEVELS or len(found) > _MOST_PARTS:
            raise ValueError(
                f"json_schema has more than {_MOST_PARTS} schemas in it, or more than {_MOST_LEVELS} in one another; "
                "simplify it"
            )
        level = [inner for part in level for inner in _inner(part)]
    return found


def _inner(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in ("items", "additionalProperties"):
        yield schema.get(keyword)
    for keyword in ("properties", "$defs", "definitions", "anyOf"):
        several = schema.get(keyword, ())
        yield from several.values() if isinstance(several, dict) else several


def _check(schema: dict[str, Any]) -> int:
    """Check one schema, and write it as xgrammar understands it. Returns the cost of its pattern."""
    said = schema.keys() - _NOTES
    if unknown := sorted(said - _KEYWORDS):
        raise ValueError(f"json_schema has {unknown[0]}, which is not followed here; leave it out")
    if empty := sorted(keyword for keyword in said & {"type", "enum", "anyOf"} if not schema[keyword]):
        raise ValueError(f"json_schema has an empty {empty[0]}, which no value fits; leave it out")
    if negative := sorted(keyword for keyword in said & _COUNTS if schema[keyword] < 0):
        raise ValueError(f"json_schema has a negative {negative[0]}; give a number from 0 on")
    if "type" in said and {"enum", "const"} & said:
        _check_values(schema)
        said -= {"type"}
    if (alone := sorted(said & _ALONE)) and (others := ", ".join(sorted(said - {alone[0]}))):
        raise ValueError(f"json_schema has {others} beside {alone[0]}, which would be ignored; leave one of them out")
    if types := {_OF_TYPE[keyword] for keyword in said & _OF_TYPE.keys()}:
        schema.setdefault("type", sorted(types))
    if said & {"minItems", "maxItems"}:
        schema.setdefault("items", True)  # else xgrammar takes it for none
    if unnamed := sorted({*schema.get("required", ())} - {*schema.get("properties", ())}):
        raise ValueError(f"json_schema requires {unnamed[0]}, which is not in its properties")
    if schema.get("properties") and schema.get("additionalProperties", False) is not False:
        raise ValueError(
            "json_schema has additionalProperties beside properties, whose names could be written again, in escapes; "
            "leave it out"
        )
    if not re.fullmatch(r"#(/(\$defs|definitions)/[^/~%]+)?", reference := schema.get("$ref", "#")):
        raise ValueError(f"json_schema has the $ref {reference}; refer to $defs or definitions, as in #/$defs/name")
    if "pattern" not in said:
        return 0
    cost = None if {"minLength", "maxLength"} & said else _cost(schema["pattern"])
    if cost is None:
        raise ValueError(f"json_schema has the pattern {schema['pattern']}, which cannot be followed; simplify it")
    return cost


def _check_values(schema: dict[str, Any]) -> None:
    """Check that the values of a schema have its type, which xgrammar ignores beside them."""
    types = {schema["type"]} if isinstance(schema["type"], str) else {*schema["type"]}
    for value in schema.get("enum", [schema.get("const")]):
        if not types & _TYPES[type(value)]:
            wrong = f"{json.dumps(value)}, which is not of its type {', '.join(sorted(types))}"
            raise ValueError(f"json_schema has {wrong}; leave it out")


def _cost(pattern: str) -> int | None:
    """The length of a pattern with its repetitions written out; None if it cannot be followed."""
    # Beside other characters than ASCII's, these stand for quotation marks, too.
    wrong = () if pattern.isascii() else (".", "[^")
    if wrong and r"[\^" in pattern:  # it means [^ there
        return None
    text = _ESCAPED.sub(_ONE, pattern).replace("(?:", "(")
    text = _PART.sub(lambda part: _ONE if part["one"] and not part[0].startswith(wrong) else part[0], text)
    for _ in range(_MOST_LEVELS):
        text = _INNERMOST.sub(_written_out, text)
    return text.count(_ONE) + text.count(_REPEATED) if _FLAT.fullmatch(text) else None


def _written_out(found: re.Match[str]) -> str:
    """A part or a group, as often as it may come.

    A counted repetition of repetitions costs the square of its count, because a text can be split among them in many
    ways.
    """
    parts, times = re.sub("[(|)]", "", found[1]), found[2]
    if not times:
        return parts
    *_, last = re.findall(r"\d+", times) or ["1"]
    count = max(1, int(last))
    if not times[-2:-1].isdigit():  # without a largest number
        count *= _COST_OF_CHOICE
    elif _REPEATED in parts:
        count **= 2
    return _REPEATED * min(len(parts) * count, _MOST_COST + 1)


class Schemas:
    """Compiles schemas for a tokenizer. xgrammar is imported for it.

    xgrammar treats a special token as the text of its name, and in texts of a limited length it lets control characters
    and bytes that are no UTF-8 pass. None of these is chosen.
    """

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
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._texts = {number: text for number, text in enumerate(info.decoded_vocab) if number not in special}
        self._texts |= dict.fromkeys(ends, b"")
        self._inner = [number for number, text in self._texts.items() if text and text[0] in _CONTINUING]
        self.vocabulary, self._device = vocabulary, device
        self.places = torch.arange(32, dtype=torch.int32, device=device)  # of the bits of a word
        self._whole = self._mask(b"", self._texts)

    def guide(self, schema: Any) -> Guide:
        """What leads one answer to an instance of `schema`, with a space after each comma and colon.

        Raises:
            ValueError: as `checked`; or xgrammar cannot compile it.
        """
        text = checked(schema)
        try:
            compiled = self._compiler.compile_json_schema(text, any_whitespace=False)
        except RuntimeError as error:  # its text begins with a time, and a place in xgrammar's source
            raise ValueError(f"json_schema cannot be followed: {re.sub(_ORIGIN, '', str(error))}") from error
        return Guide(compiled, self)

    def after(self, begun: bytes) -> torch.Tensor:
        """The tokens that are text after the bytes of a character that has `begun`: bool, of shape [vocabulary]."""
        return self._mask(begun, self._inner) if begun else self._whole

    def rest(self, begun: bytes, token: int) -> bytes:
        """The bytes of an unfinished character after this token, which `after` allows."""
        return _rest(begun + self._texts[token]) or b""

    def _mask(self, begun: bytes, candidates: Iterable[int]) -> torch.Tensor:
        mask = torch.zeros(self.vocabulary, dtype=torch.bool)
        mask[[number for number in candidates if _rest(begun + self._texts[number]) is not None]] = True
        return mask.to(self._device)


def _rest(text: bytes) -> bytes | None:
    """The character that has only begun at the end of a text; None if it is no UTF-8, or has control characters."""
    try:
        whole, length = codecs.utf_8_decode(text, "strict", False)
    except UnicodeDecodeError:
        return None
    rest = text[length:]
    # Python sees a surrogate only once it is whole.
    return None if (whole and min(whole) < " ") or (rest[:1] == b"\xed" and rest[1:] >= b"\xa0") else rest


class Guide:
    """Which tokens may come next in one answer."""

    def __init__(self, compiled: Any, schemas: Schemas) -> None:
        import xgrammar

        self._matcher, self._schemas, self._begun = xgrammar.GrammarMatcher(compiled), schemas, b""
        self._bits = xgrammar.allocate_token_bitmask(1, schemas.vocabulary)

    def allowed(self) -> torch.Tensor:
        """The tokens that may come next: bool, of shape [vocabulary], on the device where they are chosen."""
        self._matcher.fill_next_token_bitmask(self._bits)
        mask = self._schemas.after(self._begun)
        words = self._bits[0].to(mask.device)  # a bit a token is what travels
        return (words[:, None] >> self._schemas.places & 1).bool().flatten()[: len(mask)] & mask

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole, though it might go on."""
        return bool(self._matcher.is_completed())

    def take(self, token: int) -> bool:
        """Go on from a token that was allowed. Whether another one follows.

        Raises:
            ValueError: none is allowed, because the model has no token for what must come.
        """
        if not self._matcher.accept_token(token):
            raise ValueError("json_schema cannot be followed: the model has no token for what must come")
        self._begun = self._schemas.rest(self._begun, token)
        return not self._matcher.is_terminated()
