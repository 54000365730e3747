"""The OpenAPI schema of a predictor, as Cog's command derives it from the signature of `run()` when it builds an image.

Cog's server validates inputs by the file `.cog/openapi_schema.json`, and without it validates nothing. Cog's command
refuses some signatures, and leaves parts of others out without a word; both are errors here. `derived/` has two
documents that Cog's command 0.22.0 made, and the predictors they were made of.
"""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

from cog_schema.annotations import Schema, output_schema
from cog_schema.errors import SchemaError
from cog_schema.module import Module
from cog_schema.parameters import Property, read_parameter

__all__ = ["SchemaError", "openapi_schema"]

_DERIVED = Path(__file__).parent / "derived" / "image.json"
# The components of that document which are about its predictor.
_OF_A_PREDICTOR = ("Input", "Output", "aspect_ratio", "output_format")
_ITERATOR = "x-cog-array-type"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def openapi_schema(predictor: str, project: Path) -> Schema:
    """The document for a predictor such as `predict.py:Predictor`.

    Raises:
        SchemaError: Cog would refuse the signature, or would drop a part of it; a line for each fault.
        OSError: there is no such file.
        SyntaxError: a file of the project is not Python.
    """
    path, _, class_name = predictor.partition(":")
    module, run = Module.load(project, Path(path)).find_run(class_name)
    faults: list[str] = []
    properties = _read_parameters(run, module, faults)
    output: Schema = {}
    streams = False
    try:
        output = _read_output(run, module)
        streams = _read_decorators(run, module, _ITERATOR in output)
    except SchemaError as error:
        faults.append(str(error))
    if faults:
        raise SchemaError("\n".join(f"{module.path}, {class_name}.run(): {fault}" for fault in faults))
    return _document(properties, output, streams)


def _read_parameters(run: Function, module: Module, faults: list[str]) -> dict[str, Property]:
    arguments = [*run.args.posonlyargs, *run.args.args]
    missing = len(arguments) - len(run.args.defaults)
    defaults: list[ast.expr | None] = [*[None] * missing, *run.args.defaults, *run.args.kw_defaults]
    if not arguments or arguments[0].arg != "self" or arguments[0].annotation:
        faults.append("the first parameter is not self")
    faults += [
        f"parameter {rest.arg}: Cog takes no * and no **; write the inputs out"
        for rest in (run.args.vararg, run.args.kwarg)
        if rest is not None
    ]
    properties = {}
    for order, (argument, value) in enumerate(list(zip([*arguments, *run.args.kwonlyargs], defaults, strict=True))[1:]):
        try:
            properties[argument.arg] = read_parameter(argument, value, order, module)
        except SchemaError as error:
            faults.append(f"parameter {argument.arg}: {error}")
    return properties


def _read_output(run: Function, module: Module) -> Schema:
    if run.returns is None:
        raise SchemaError("its output has no type; annotate it")
    return {**output_schema(run.returns, module), "title": "Output"}


def _read_decorators(run: Function, module: Module, is_iterator: bool) -> bool:
    """Whether `run()` streams.

    Raises:
        SchemaError: a decorator is not Cog's, or is not for such a method.
    """
    streams = False
    for decorator in run.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        name = ast.unparse(call.func if call else decorator)
        if _is_cogs(name, "streaming", module):
            if not is_iterator:
                raise SchemaError("@streaming is refused without an Iterator or ConcatenateIterator as the output")
            streams = True
        elif _is_cogs(name, "concurrent", module):
            _check_concurrent(call, isinstance(run, ast.AsyncFunctionDef))
        else:
            raise SchemaError(f"under @{name}, inputs that are left out arrive as FieldInfo; decorate another method")
    return streams


def _is_cogs(name: str, decorator: str, module: Module) -> bool:
    return name == f"cog.{decorator}" or module.comes_from(name, ("cog",), decorator)


def _check_concurrent(call: ast.Call | None, is_async: bool) -> None:
    match call:
        case None | ast.Call(args=[], keywords=[]):
            return
        case ast.Call(args=[], keywords=[ast.keyword("max", ast.Constant(int() as most))]) if most >= 1:
            if most > 1 and not is_async:
                raise SchemaError("@concurrent is refused for a method that is not async")
        case _:
            raise SchemaError(f"@{ast.unparse(call)} is refused; write @concurrent(max=…) with a number from 1")


def _document(properties: dict[str, Property], output: Schema, streams: bool) -> Schema:
    document: dict[str, Any] = copy.deepcopy(json.loads(_DERIVED.read_text()))
    components = document["components"]["schemas"]
    for name in _OF_A_PREDICTOR:
        del components[name]
    required = [name for name, found in properties.items() if found.is_required]
    components["Input"] = {
        "title": "Input",
        "type": "object",
        "properties": {name: found.schema for name, found in properties.items()},
        **({"required": required} if required else {}),
    }
    components["Output"] = output
    components |= {name: found.choices for name, found in properties.items() if found.choices is not None}
    if streams:
        document["paths"]["/predictions"]["post"]["x-cog-streaming"] = True
    return document
