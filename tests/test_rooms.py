"""Imports run downwards: predict → models, warmup, lifecycle → … → storage → key → settings, errors.

The table of torch's private names is the code's: none is missing, none is too many, and this torch has them.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.private_names import PRIVATE_NAMES

ROOT = Path(__file__).parents[1]
# From the bottom up. Rooms in one row may import each other.
ROWS = (
    ("child_process", "errors", "files", "importable", "of_each", "timeline", "torch_threads"),
    ("settings",),
    ("key",),
    ("calls",),
    ("storage.pack",),
    ("storage.stores",),
    ("storage",),
    ("weights",),
    ("inductor",),
    ("background",),
    ("serving",),
    ("lifecycle",),
    ("cli",),
)
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}


def room(module: str) -> str | None:
    """The longest room that `module` lies in; None for the package itself, which only names the public functions."""
    parts = module.removeprefix("compile_cache").strip(".").split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in ROW), None)


def imported(path: Path) -> Iterator[str]:
    """The names that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", ROW)
def test_a_room_imports_nothing_from_above(name):
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in modules("compile_cache")
        if room(".".join(path.relative_to(ROOT).with_suffix("").parts)) == name
        for module in imported(path)
        if module.startswith("compile_cache.") and (to := room(module)) and ROW[to] > ROW[name]
    ]
    assert not found


def test_no_files_import_each_other_in_a_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules("compile_cache")}
    graph = {
        name: {file for each in imported(path) for file in (each, each.rpartition(".")[0]) if file in files}
        for name, path in files.items()
    }
    assert "compile_cache.serving.kinds" in graph["compile_cache.serving.region"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_every_module_of_the_library_lies_in_a_room():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules("compile_cache")}
    assert [str(path) for path, name in names.items() if path.name != "__init__.py" and room(name) is None] == []


@pytest.mark.parametrize(("package", "owners"), [("cog", ["predict.py"]), ("boto3", ["s3.py"])])
def test_a_package_is_imported_by_one_file(package, owners):
    files = [*modules("compile_cache"), *modules("models"), ROOT / "predict.py", ROOT / "warmup.py"]
    importers = [path.name for path in files if any(name.partition(".")[0] == package for name in imported(path))]
    assert importers == owners


@pytest.mark.parametrize("folder", ["compile_cache/storage", "compile_cache/cli", "compile_cache/settings.py"])
def test_torch_is_not_imported_by(folder):
    files = modules(folder) or [ROOT / folder]
    assert [path for path in files if any(name.partition(".")[0] == "torch" for name in imported(path))] == []


# Torch's private names.

FILES = [*ROOT.glob("compile_cache/**/*.py"), *ROOT.glob("models/**/*.py")]
ROOMS = ("compile_cache/inductor", "compile_cache/calls", "models/kernels", "compile_cache/weights")
TABLE = {path for names in PRIVATE_NAMES for path in names.paths}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """`torch._C.name` of an expression; empty if it is no name."""
    if isinstance(node, ast.Attribute):
        return f"{parent}.{node.attr}" if (parent := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def used(path: Path) -> Iterator[str]:
    """The names that a file has: imported, read, or in a text."""
    yield from imported(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield dotted(node)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield str(node.value)


def of_torch(path: Path) -> set[str]:
    return {name for name in used(path) if name.startswith("torch.") and is_private(name)}


def test_private_names_are_used_in_few_rooms_alone():
    outside = {
        path.relative_to(ROOT).as_posix(): names
        for path in FILES
        if not any(path.is_relative_to(ROOT / room) for room in ROOMS) and (names := of_torch(path))
    }
    assert outside == {}


def test_the_table_has_every_private_name_that_the_code_uses():
    found = {name for path in FILES for name in of_torch(path)}

    def is_known(name: str) -> bool:
        """In the table, or a part or the place of a name that is."""
        return any(name == path or name.startswith(f"{path}.") or path.startswith(f"{name}.") for path in TABLE)

    assert {name for name in found if not is_known(name)} == set()


def test_the_code_uses_every_name_of_the_table():
    texts = "\n".join(path.read_text() for path in FILES)
    assert {path for path in TABLE if not re.search(rf"\b{path.rpartition('.')[2]}\b", texts)} == set()


@pytest.mark.parametrize("names", PRIVATE_NAMES, ids=lambda names: f"{names.place}: {names.names.split()[0]}")
def test_this_torch_has_the_names(names):
    first, last = (tuple(map(int, release.split("."))) for release in names.releases.split("–"))
    if (now := tuple(map(int, torch.__version__.split(".")[:2]))) < first:
        pytest.skip(f"torch has them since {names.releases.partition('–')[0]}")
    assert now <= last
    for path in names.paths:
        if path.rpartition(".")[2] not in OF_INSTANCES:
            resolve(path)


# Set by `__init__`, or by torch's C++ part.
OF_INSTANCES = {"_parameters", "_buffers", "_modules", "_artifacts", "_config", "_is_default", "_cdata"}


def resolve(path: str) -> Any:
    """The object with this name, whose modules are imported."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(path)
