"""One parameter of `run()` as a property of the schema."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from cog_schema.annotations import Schema, input_schema, title
from cog_schema.errors import SchemaError
from cog_schema.literals import read_bound, read_flag, read_length, read_literal, read_string, text_of
from cog_schema.module import Module

# What Cog calls an argument of Input(), and how it reads its value.
_ARGUMENTS = {
    "description": ("description", read_string),
    "ge": ("minimum", read_bound),
    "le": ("maximum", read_bound),
    "min_length": ("minLength", read_length),
    "max_length": ("maxLength", read_length),
    "regex": ("pattern", read_string),
    "accept": ("x-cog-accept", read_string),
    "deprecated": ("deprecated", read_flag),
}
_LIMITS = {"minimum", "maximum", "minLength", "maxLength", "pattern"}
_WITH_CHOICES = ("string", "integer", "number", "boolean")


@dataclass(frozen=True, slots=True)
class Property:
    """A parameter's part of the schema. Its choices are a component of their own."""

    schema: Schema
    is_required: bool
    choices: Schema | None


def read_parameter(argument: ast.arg, value: ast.expr | None, order: int, module: Module) -> Property:
    """Read a parameter and its default, which is `Input(…)` or a plain value.

    Raises:
        SchemaError: Cog would refuse it, or would drop a part of it.
    """
    if argument.annotation is None:
        raise SchemaError("it has no type; annotate it")
    type_schema = input_schema(argument.annotation)
    given = _read_default(value, module)
    choices = given.pop("choices", None)
    _check(ast.unparse(argument.annotation), type_schema, given, choices)
    has_default = "default" in given
    # Of all types, a Secret alone becomes nullable by its default.
    nullable = type_schema.pop("nullable", False) or (has_default and given["default"] is None)
    schema = {"x-order": order, **given, **({"nullable": True} if nullable else {})}
    # A Union without a default is required, even where it has a None.
    is_required = not has_default and (not nullable or "anyOf" in type_schema)
    if choices is None:
        return Property({"title": title(argument.arg), **type_schema, **schema}, is_required, None)
    component = {"title": argument.arg, "description": "An enumeration.", "enum": choices, "type": type_schema["type"]}
    return Property({"allOf": [{"$ref": f"#/components/schemas/{argument.arg}"}], **schema}, is_required, component)


def _read_default(value: ast.expr | None, module: Module) -> dict[str, Any]:
    """What a default says: that of each argument of `Input(…)`, or the plain value."""
    if value is None:
        return {}
    if not (isinstance(value, ast.Call) and _is_input(ast.unparse(value.func), module)):
        return {"default": _constant("the default ", value, module)}
    if value.args:
        raise SchemaError(f"Cog drops {ast.unparse(value.args[0])} in Input(); name the argument")
    return dict(entry for keyword in value.keywords for entry in _read_argument(keyword, module))


def _is_input(name: str, module: Module) -> bool:
    return name == "Input" or module.comes_from(name, ("cog",), "Input")


def _read_argument(keyword: ast.keyword, module: Module) -> list[tuple[str, Any]]:
    name, value = keyword.arg, keyword.value
    text = text_of(value, module.source)
    if name == "default":
        return [(name, _constant("default=", value, module))]
    if name == "choices":
        return [(name, _choices(value, module))]
    if name not in _ARGUMENTS:
        raise SchemaError(f"Cog does not read {f'{name}=' if name else '**'}{text} in Input(); leave it out")
    key, read = _ARGUMENTS[name]
    if name == "description" and isinstance(value, ast.Name) and isinstance(module.constants.get(value.id), str):
        return [(key, module.constants[value.id])]
    try:
        found = read(value, module.source)
    except SchemaError as error:
        raise SchemaError(f"Cog drops or changes {name}={text}: {error}; write the value as one literal") from error
    return [] if found is False else [(key, found)]


def _constant(what: str, value: ast.expr, module: Module) -> Any:
    """A literal, or the name of one at the file's top level."""
    if isinstance(value, ast.Name) and value.id in module.constants:
        return module.constants[value.id]
    try:
        return read_literal(value, module.source)
    except SchemaError as error:
        raise SchemaError(
            f"Cog drops or refuses {what}{text_of(value, module.source)}: {error}; "
            f"write a literal, or the name of a literal at the top level of {module.path}"
        ) from error


def _choices(value: ast.expr, module: Module) -> list[Any]:
    """A list, the name of one, `list(TABLE.keys())` or `list(TABLE.values())`, or a sum of them."""
    match value:
        case ast.List(elts=[_, *_]):
            return list(_constant("choices=", value, module))
        case ast.Name(id=name) if module.constants.get(name) and isinstance(module.constants[name], list):
            return list(module.constants[name])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _choices(left, module) + _choices(right, module)
        case ast.Call(
            func=ast.Name("list"), args=[ast.Call(func=ast.Attribute(ast.Name(name), "keys" | "values" as of))]
        ):
            table = module.constants.get(name)
            if table and isinstance(table, dict):
                return list(table if of == "keys" else table.values())
    raise SchemaError(
        f"Cog refuses or drops choices={text_of(value, module.source)}; "
        f"write a list of literals, here or at the top level of {module.path}"
    )


def _check(annotation: str, type_schema: Schema, given: dict[str, Any], choices: list[Any] | None) -> None:
    """What Cog refuses or drops by the type of the input.

    Raises:
        SchemaError: there is such an argument.
    """
    if "anyOf" in type_schema and (choices or _LIMITS & given.keys()):
        raise SchemaError(f"{annotation} takes no choices and no limits; write one type")
    if choices and type_schema["type"] not in _WITH_CHOICES:
        raise SchemaError(f"{annotation} becomes a single value by its choices; leave them out")
    inner = type_schema.get("items", type_schema)
    if "x-cog-accept" in given and inner.get("format") != "uri":
        raise SchemaError(f"accept is refused for {annotation}; it is for Path")
    is_nullable = type_schema.get("nullable") or type_schema.get("x-cog-secret")
    if "default" in given and given["default"] is None and not is_nullable:
        raise SchemaError(f"Cog drops default=None, as {annotation} is never None; write Optional[{annotation}]")
