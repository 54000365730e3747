"""Answers in JSON. Before each token, xgrammar says which tokens the schema allows.

For some keywords, xgrammar lets invalid answers pass. So keywords outside a list are refused by name.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
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
_KEYWORDS = {*_NOTES, *_OF_TYPE}
_KEYWORDS |= {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref"}
# These must stand alone: xgrammar ignores keywords beside them.
_ALONE = ("enum", "const", "anyOf", "$ref")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
# In other patterns, xgrammar lets an unescaped quotation mark pass, which ends the text, or it follows only a part.
_ESCAPED = r"\\[dw./+*?()\[\]{}|^$-]"
_RANGES = "[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]"
_CLASS = rf"""\[\^?-?(?:{_ESCAPED}|{_RANGES}|[^"\\\x00-\x1f\[\]-])+-?\]"""
_PART = re.compile(
    rf"""(?P<group>\((?:\?:)?(?!\?))|(?P<end>\))|(?P<bar>\|)|(?P<edge>[\^$])|(?P<times>[?*+]|\{{\d{{1,5}}(?:,\d{{0,5}})?\}})|"""
    rf"""{_ESCAPED}|{_CLASS}|[^"\\\x00-\x1f\[\]{{}}]"""
)
# Nothing in xgrammar bounds the time to compile, nor the time for a token. These limits do.
_MOST_CHARACTERS = 16_384
_MOST_COUNT = 10_000
_MOST_LEVELS = 64
_MOST_PARTS = 256
_MOST_COST = 100
# The cost of `?`, `*` and `+`, in characters.
_COST_OF_CHOICE = 6
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
# The bytes of a character of UTF-8 behind its first one.
_CONTINUING = range(0x80, 0xC0)
_ORIGIN = r"^\[[\d:]+\] \S+:\d+: "


def checked(schema: Any) -> str:
    """A schema as JSON, in the order of its keys: a text keeps the order in which properties are written.

    Raises:
        ValueError: it is no schema, has a keyword that no answer could be held to, or is too large.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found = json.loads(text) if len(text) <= _MOST_CHARACTERS else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"json_schema has {len(text)} characters; it may have {_MOST_CHARACTERS}")
    if not isinstance(found, dict):
        raise ValueError("json_schema must be an object")
    if (levels := _levels(found)) > _MOST_LEVELS:
        raise ValueError(f"json_schema is {levels} levels deep; it may be {_MOST_LEVELS}")
    try:
        parts = list(_schemas(found))
        cost = sum(_check(part, found) for part in parts)
    except (TypeError, AttributeError) as error:  # such as a number in place of a list
        raise ValueError(f"json_schema is no JSON schema: {error}") from error
    if len(parts) > _MOST_PARTS:
        raise ValueError(f"json_schema has {len(parts)} schemas in it; it may have {_MOST_PARTS}")
    if cost > _MOST_COST:
        raise ValueError(f"json_schema has patterns that cost {cost}; simplify them, to {_MOST_COST} together")
    return json.dumps(found)


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
    inner = [schema[keyword] for keyword in ("items", "additionalProperties") if keyword in schema]
    for keyword in ("properties", "$defs", "definitions"):
        if not isinstance(named := schema.get(keyword, {}), dict):
            raise ValueError(f"json_schema: {keyword} must be an object")
        inner += named.values()
    if not (alternatives := schema.get("anyOf", [True])):
        raise ValueError("json_schema has an anyOf without a schema")
    for part in (*inner, *alternatives):
        yield from _schemas(part)


def _check(schema: dict[str, Any], root: dict[str, Any]) -> int:
    """Check one schema, and write it as xgrammar understands it. Returns the cost of its pattern."""
    if unknown := sorted(schema.keys() - _KEYWORDS):
        raise ValueError(f"json_schema has {unknown[0]}, which is not followed here; leave it out")
    types = schema.get("type", [*_TYPES])
    types = [types] if isinstance(types, str) else types
    if not types or (wrong := [each for each in types if each not in _TYPES]):
        raise ValueError(f"json_schema has the type {wrong[0] if types else types}; give one of {', '.join(_TYPES)}")
    for values in (schema.get("enum", []), [schema["const"]] if "const" in schema else []):
        for value in values:
            _check_value(value, types)
        if values:  # each has one of the types, as it is seen now
            schema.pop("type", None)
    said = schema.keys() - _NOTES
    if len(said) > 1 and (alone := [keyword for keyword in _ALONE if keyword in said]):
        others = ", ".join(sorted(said - {alone[0]}))
        raise ValueError(f"json_schema has {others} beside {alone[0]}, which would be ignored; leave one of them out")
    if "type" not in schema and (untyped := sorted(said & _OF_TYPE.keys())):
        raise ValueError(f"json_schema has {untyped[0]} without a type; add the type {_OF_TYPE[untyped[0]]}")
    if unnamed := sorted({*schema.get("required", ())} - {*schema.get("properties", {})}):
        raise ValueError(f"json_schema requires {unnamed[0]}, which is not in its properties")
    for keyword in _COUNTS:
        if not (type(count := schema.get(keyword, 0)) is int and 0 <= count <= _MOST_COUNT):
            raise ValueError(f"json_schema: {keyword} must be from 0 to {_MOST_COUNT}")
    if {"minItems", "maxItems"} & said:
        schema.setdefault("items", True)  # else xgrammar takes it for none
    if (reference := schema.get("$ref", "#")) != "#" and _target(reference, root) is None:
        raise ValueError(f"json_schema has the $ref {reference}, which it does not define in $defs or definitions")
    if "pattern" not in schema:
        return 0
    cost = None if {"minLength", "maxLength"} & said else _cost(schema["pattern"])
    if cost is None:
        raise ValueError(f"json_schema has the pattern {schema['pattern']}, which cannot be followed; simplify it")
    return cost


def _check_value(value: Any, types: Sequence[str]) -> None:
    """Check that a value of an enum has one of the types, and no number in it that xgrammar changes."""
    kinds = {kind for name in types for kind in _TYPES[name]}
    if type(value) not in kinds:
        raise ValueError(f"json_schema has {json.dumps(value)}, which is not of its type {', '.join(types)}")
    found = [value]
    while found:
        one = found.pop()
        if type(one) is int and not -(2**63) <= one < 2**63:
            raise ValueError(f"json_schema has {one}, an integer of more than 64 bits; make it a text")
        found += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _cost(pattern: Any) -> int | None:
    """The length of a pattern with its repetitions written out; None if it cannot be followed.

    A counted repetition of repetitions costs the square of its count, because a text can be split among them in many
    ways.
    """
    if not isinstance(pattern, str):
        return None
    # For each open group, its cost so far, and whether it has a repetition; the last part's. And what that part is.
    open_groups, repeated, is_nested, previous, place = [(0, False)], 0, False, "bar", 0
    while place < len(pattern):
        if (part := _PART.match(pattern, place)) is None:
            return None
        place, kind = part.end(), part.lastgroup or "one"
        cost, has_repetition = open_groups[-1]
        if kind == "edge":  # elsewhere, it would be ignored
            is_last = part[0] == "$" and pattern[place : place + 1] in ("", "|")
            if len(open_groups) > 1 or not (is_last or (part[0] == "^" and previous == "bar")):
                return None
        elif kind == "group":
            open_groups.append((0, False))
        elif kind == "end":
            if len(open_groups) == 1:
                return None
            repeated, is_nested = open_groups.pop()
            cost, has_repetition = open_groups[-1]
            open_groups[-1] = cost + repeated, has_repetition or is_nested
        elif kind == "times":
            if previous not in ("one", "end") or not repeated:
                return None
            least, comma, most = part[0].strip("{}").partition(",")
            is_counted = (most if comma else least).isdigit()
            count = max(1, int((most if is_counted else least).strip("?*+") or least.strip("?*+") or 1))
            times = count if is_counted else count * _COST_OF_CHOICE
            open_groups[-1] = cost + repeated * ((times**2 if is_nested and is_counted else times) - 1), True
        elif kind == "one":
            # Beside other characters than ASCII's, these stand for quotation marks, too.
            if not pattern.isascii() and part[0].startswith((".", "[^")):
                return None
            repeated, is_nested = 1, False
            open_groups[-1] = cost + 1, has_repetition
        previous = kind
    return open_groups[0][0] if len(open_groups) == 1 else None


def _target(reference: Any, root: dict[str, Any]) -> Any:
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(reference))
    return root.get(found[1], {}).get(found[2]) if found else None


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

    def take(self, token: int) -> bool:
        """Go on from a token that was allowed. Whether another one follows.

        Raises:
            ValueError: none is allowed, because the model has no token for what must come.
        """
        if not self._matcher.accept_token(token):
            raise ValueError("json_schema cannot be followed: the model has no token for what must come")
        self._begun = self._schemas.rest(self._begun, token)
        return not self._matcher.is_terminated()
