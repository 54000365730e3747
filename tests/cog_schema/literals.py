"""Literals as Cog's command reads them: from their text, which is not always the value that Python gives them."""

from __future__ import annotations

import ast
import re
from typing import Any

from cog_schema.errors import SchemaError

_DECIMAL = re.compile(r"[+-]?[\d._]+([eE][+-]?\d+)?")
_NUMBER = re.compile(rf"{_DECIMAL.pattern}|[+-]?0[xob][\da-f_]+", re.IGNORECASE)
_QUOTES = ('"""', "'''", '"', "'", 'r"', "r'")
_INTEGERS = range(-(2**63), 2**63)


def text_of(node: ast.expr, source: str) -> str:
    """The source of an expression, in parentheses if it has some around it."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # offsets count bytes
    assert node.end_lineno is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    text = ast.get_source_segment(source, node) or ""
    return f"({text})" if before.rstrip().endswith(b"(") and after.lstrip().startswith(b")") else text


def read_literal(node: ast.expr, source: str) -> Any:
    """The value of a literal: None, a bool, a number, a string; a list, a tuple or a dictionary of them.

    Raises:
        SchemaError: it is no literal, or Cog reads another value.
    """
    text = text_of(node, source)
    match node:
        case ast.Tuple():
            return [read_literal(item, source) for item in node.elts]
        case _ if text.startswith("("):
            raise SchemaError(f"{text} is in parentheses")
        case ast.Constant(value=None | bool() as value):
            return value
        case ast.Constant(value=str()):
            return read_string(node, source)
        case ast.Constant(value=int() | float()) | ast.UnaryOp():
            return _read_number(text, _NUMBER)
        case ast.List():
            return [read_literal(item, source) for item in node.elts]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            names = [read_literal(key, source) for key in keys if key is not None]
            return dict(zip(names, (read_literal(value, source) for value in values), strict=True))
    raise SchemaError(f"{text} is no literal")


def read_string(node: ast.expr, source: str) -> str:
    """The value of a string.

    Raises:
        SchemaError: it is no string, or Cog reads another value: it knows no escapes and joins no parts.
    """
    text = text_of(node, source)
    quotes = next((known for known in _QUOTES if text.startswith(known)), None)
    if quotes is None or not isinstance(node, ast.Constant):
        raise SchemaError(f"{text} is no plain string")
    read = text[len(quotes) : -len(quotes.lstrip("r"))]
    if read != node.value:
        raise SchemaError(f"{text} has escapes or several parts, so Cog reads {read!r}")
    return read


def read_bound(node: ast.expr, source: str) -> int | float:
    """The value of a decimal number.

    Raises:
        SchemaError: it is none.
    """
    return _read_number(text_of(node, source), _DECIMAL)


def read_length(node: ast.expr, source: str) -> int:
    """The value of a number of characters.

    Raises:
        SchemaError: it is none.
    """
    return int(_read_number(text_of(node, source), re.compile(r"[\d_]+")))


def read_flag(node: ast.expr, source: str) -> bool:
    """The value of True or False.

    Raises:
        SchemaError: it is neither.
    """
    text = text_of(node, source)
    if text not in ("True", "False"):
        raise SchemaError(f"{text} is neither True nor False")
    return text == "True"


def _read_number(text: str, form: re.Pattern[str]) -> int | float:
    if not form.fullmatch(text):
        raise SchemaError(f"{text} is no literal number")
    value: int | float = ast.literal_eval(text)
    if isinstance(value, int) and value not in _INTEGERS:
        raise SchemaError(f"{text} has more than 64 bits")
    return value
