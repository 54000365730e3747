"""Imports run downwards: predict → models, warmup, lifecycle → … → storage → key → settings, errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the bottom up. Rooms in one row may import each other.
ROWS = (
    ("errors", "files", "importable", "timeline", "torch_threads"),
    ("settings",),
    ("key",),
    ("calls",),
    ("storage.pack",),
    ("storage.stores",),
    ("storage",),
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
    """The modules of the library that a file imports, lazily or not."""
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
