"""Other processes of this Python: their command, and whether they find an object by the name of its module and its own.
This module imports no torch.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from typing import Any

# This sets the import path first, because compile_cache itself may be on this process's path only.
_PROGRAM = """\
import importlib, json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
importlib.import_module(sys.argv.pop(1)).main()
"""

# Modules that are missing in another process, or are others there.
OWN_MODULES = ("__main__", "__mp_main__")
# Nobody compares these by identity, or they have a name of their own.
_BY_VALUE = (str, int, float, complex, bytes, type(None), tuple, type, types.FunctionType, types.ModuleType)
# Of classes whose objects are equal only to themselves.
_IDENTITY: Any = object.__eq__


def own_python(module: str, *arguments: str) -> list[str]:
    """The command of a Python like this one that calls `main()` of a module, with these arguments."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    # With other flags, such as -OO, other code is compiled. subprocess knows all flags, but not all options of -X.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    # -P keeps modules of the working directory out of the imports. -u saves the last line before a crash.
    return [sys.executable, *flags, "-P", "-u", "-c", _PROGRAM, path, module, *arguments]


def find(reference: str) -> Any:
    """The object of `module:qualified.name`, or the module of `module:`.

    A module's name may have any characters: transformers and diffusers name folders of code from the hub after commits.

    Raises:
        Exception: any, if the module cannot be imported or has no such name.
    """
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found


def look_up(reference: str) -> Any:
    """The same; None if there is none."""
    try:
        return find(reference)
    except (ImportError, AttributeError, ValueError, TypeError):  # odd names of modules, too
        return None


def reference(value: Any) -> str:
    """The name under which `find` gives the same object: `module:qualified.name`, or `module:`.

    Raises:
        LookupError: the object has no such name.
    """
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (module and name) or look_up(f"{module}:{name}") is not value:
        raise LookupError(f"{name or f'a {type(value).__qualname__}'} cannot be imported")
    return f"{module}:{name}"


def named_objects(module: str) -> dict[int, str]:
    """The objects that a module or one of its classes has under a name, by identity, with this name.

    Only objects that are compared by identity: no class, function or plain value. torch's own modules have none.
    """
    named: dict[int, str] = {}
    if module.partition(".")[0] in ("builtins", "torch") or module not in sys.modules:
        return named
    for name, value in list(vars(sys.modules[module]).items()):
        if isinstance(value, type):
            own = vars(value).items() if value.__module__ == module else ()
            named |= {id(part): f"{module}:{name}.{key}" for key, part in own if type(part) is value}
        elif not isinstance(value, _BY_VALUE) and type(value).__eq__ is _IDENTITY:
            named[id(value)] = f"{module}:{name}"
    return named


def why_not(module: str) -> str:
    """Why another process cannot import a module; empty if it can. This process may have made it itself."""
    if module in OWN_MODULES:
        return "it belongs to the main program and cannot be imported"
    parent = module.rpartition(".")[0]
    if parent and (reason := why_not(parent)):
        return reason
    path = getattr(sys.modules.get(parent), "__path__", None)
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    if all(find_spec(module, path) is None for find_spec in finders):
        return f"the module {module} was made in this process and cannot be imported"
    return ""
