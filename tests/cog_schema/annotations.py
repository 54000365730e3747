"""Types of inputs and outputs as JSON Schema, by the names that Cog's command knows."""

from __future__ import annotations

import ast
from typing import Any

from cog_schema.errors import SchemaError
from cog_schema.literals import read_literal, text_of
from cog_schema.module import Module

Schema = dict[str, Any]

_PRIMITIVES: dict[str, Schema] = {
    "bool": {"type": "boolean"},
    "float": {"type": "number"},
    "int": {"type": "integer"},
    "str": {"type": "string"},
    "Path": {"type": "string", "format": "uri"},
    "File": {"type": "string", "format": "uri"},
    "Secret": {"type": "string", "format": "password", "writeOnly": True, "x-cog-secret": True},
}
_OBJECTS = ("Any", "dict", "Dict")
_NOT_IN_UNIONS = ("Path", "File", "Secret")
_TYPING = ("typing", "typing_extensions")
_ITERATORS = {
    "Iterator": {"x-cog-array-type": "iterator"},
    "AsyncIterator": {"x-cog-array-type": "iterator"},
    "ConcatenateIterator": {"x-cog-array-type": "iterator", "x-cog-array-display": "concatenate"},
    "AsyncConcatenateIterator": {"x-cog-array-type": "iterator", "x-cog-array-display": "concatenate"},
}


def split(annotation: ast.expr) -> tuple[str, list[ast.expr]]:
    """The name of a type and its arguments; `X | Y` is a Union. A qualified name loses its module."""
    match annotation:
        case ast.Constant(value=str() as text):
            return split(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return "Union", [*_members(left), *_members(right)]
        case ast.Subscript(value=value, slice=ast.Tuple(elts=arguments)):
            return split(value)[0], arguments
        case ast.Subscript(value=value, slice=argument):
            return split(value)[0], [argument]
        case ast.Attribute():
            return ast.unparse(annotation).partition(".")[2], []
    return ast.unparse(annotation), []


def without_none(annotation: ast.expr) -> tuple[list[ast.expr], bool]:
    """The members of an Optional or a Union, or the type itself; and whether it may be None."""
    name, arguments = split(annotation)
    if name == "Optional" and len(arguments) == 1:
        return without_none(arguments[0])[0], True
    if name != "Union":
        return [annotation], False
    members = [member for member in arguments if ast.unparse(member) != "None"]
    return members, len(members) < len(arguments)


def input_schema(annotation: ast.expr) -> Schema:
    """The schema of an input.

    Raises:
        SchemaError: Cog refuses the type.
    """
    members, nullable = without_none(annotation)
    if len(members) < 2:
        schema = _one_input(members[0] if members else annotation)
        return {**schema, "nullable": True} if nullable else schema
    schemas = [_one_input(member) for member in members]
    for member in members:
        name, arguments = split(member)
        if {name, *(split(argument)[0] for argument in arguments)} & {*_NOT_IN_UNIONS}:
            raise SchemaError(f"{ast.unparse(annotation)} is refused; Path and Secret are no members of a Union")
    if nullable:
        return {"anyOf": [{**schema, "nullable": True} for schema in schemas], "nullable": True}
    return {"anyOf": schemas}


def _members(annotation: ast.expr) -> list[ast.expr]:
    return split(annotation)[1] if isinstance(annotation, ast.BinOp) else [annotation]


def _one_input(annotation: ast.expr) -> Schema:
    name, arguments = split(annotation)
    if name in _PRIMITIVES and not arguments:
        return dict(_PRIMITIVES[name])
    if name in _OBJECTS:
        return {"type": "object"}
    if name in ("list", "List") and len(arguments) == 1:
        items = _one_input(arguments[0])
        if items["type"] == "array":
            raise SchemaError(f"{ast.unparse(annotation)} is refused; a list holds no lists")
        return {"type": "array", "items": items}
    if name == "Literal":
        raise SchemaError(f"{ast.unparse(annotation)} is refused; write the type, and choices=[…] in Input()")
    raise SchemaError(
        f"{ast.unparse(annotation)} is refused; write {', '.join(_PRIMITIVES)}, dict, Any, a list or an Optional of one"
    )


def output_schema(annotation: ast.expr, module: Module, inside: tuple[str, ...] = ()) -> Schema:
    """The schema of an output. `inside` are the models around it: one that holds itself is any object there.

    Raises:
        SchemaError: Cog refuses the type.
    """
    name, arguments = split(annotation)
    text = ast.unparse(annotation)
    if name in ("Optional", "Union"):
        raise SchemaError(f"{text} is refused as an output; return one type, and raise where there is no result")
    if name in inside or (name in _OBJECTS and not arguments):
        return {"type": "object"}
    if not arguments and name in module.classes and _is_model(module.classes[name]):
        return _model_schema(module.classes[name], module, (*inside, name))
    if not arguments and name in _PRIMITIVES:
        return dict(_PRIMITIVES[name])
    if name in ("dict", "Dict") and len(arguments) == 2:
        return {"type": "object", "additionalProperties": output_schema(arguments[1], module, inside)}
    if name in ("list", "List"):
        return _list_schema(annotation, arguments, module, inside)
    if name in _ITERATORS and len(arguments) == 1:
        if "Concatenate" in name and ast.unparse(arguments[0]) != "str":
            raise SchemaError(f"{text} is refused; a {name} is of str")
        return {"type": "array", "items": output_schema(arguments[0], module, inside), **_ITERATORS[name]}
    raise SchemaError(f"{text} is refused as an output; write a type that Cog knows, or a BaseModel of {module.path}")


def _list_schema(annotation: ast.expr, arguments: list[ast.expr], module: Module, inside: tuple[str, ...]) -> Schema:
    called = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    match called:
        case ast.Attribute(value=ast.Name(id=qualifier)):
            is_known = any(module.comes_from(qualifier, (name,), name) for name in _TYPING)
        case _:
            name = ast.unparse(called)
            is_known = name == "list" or module.comes_from(name, _TYPING, "List")
    if not is_known:
        raise SchemaError(
            f"{ast.unparse(annotation)} is refused as an output; import List by its name from typing, or write list"
        )
    if len(arguments) > 1:
        raise SchemaError(f"{ast.unparse(annotation)} is refused; a list has one type")
    return {"type": "array", "items": output_schema(arguments[0], module, inside) if arguments else {"type": "object"}}


def _is_model(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] == "BaseModel" for base in node.bases)


def _model_schema(node: ast.ClassDef, module: Module, inside: tuple[str, ...]) -> Schema:
    if len(node.bases) > 1:
        raise SchemaError(f"{node.name} has other parents than BaseModel, whose fields Cog drops; write them out")
    properties: Schema = {}
    required = []
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        members, nullable = without_none(item.annotation)
        if len(members) != 1:
            raise SchemaError(f"{node.name}.{item.target.id}: {ast.unparse(item.annotation)} is refused")
        field = item.target.id
        properties[field] = {**output_schema(members[0], module, inside), "title": title(field)}
        if nullable:
            properties[field]["nullable"] = True
        if item.value is None and not nullable:
            required.append(field)
        if item.value is not None:
            _check_default(node.name, item.target.id, item.value, module)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _check_default(model: str, field: str, value: ast.expr, module: Module) -> None:
    try:
        read_literal(value, module.source)
    except SchemaError as error:
        raise SchemaError(
            f"{model}.{field}: Cog drops the default {text_of(value, module.source)}; write a literal"
        ) from error


def title(name: str) -> str:
    """A name as Cog shows it."""
    return " ".join(part[:1].upper() + part[1:] for part in name.split("_"))
