"""A file of the project as Cog's command reads it: its imports, its literals by name, its classes. Nothing is run."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_schema.errors import SchemaError
from cog_schema.literals import read_literal


@dataclass(frozen=True, slots=True)
class Imported:
    """Where a name of a file comes from."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Module:
    """What is at the top level of a file. `constants` are the names that are bound once, to a literal."""

    project: Path
    path: Path
    source: str
    imports: Mapping[str, Imported]
    constants: Mapping[str, Any]
    classes: Mapping[str, ast.ClassDef]

    @classmethod
    def load(cls, project: Path, path: Path) -> Module:
        """Read `path`, which is relative to the project.

        Raises:
            OSError: there is no such file.
            SyntaxError: it is not Python.
        """
        source = (project / path).read_text()
        body = ast.parse(source).body
        return cls(
            project,
            path,
            source,
            dict(_imports(body)),
            dict(_constants(body, source)),
            {node.name: node for node in body if isinstance(node, ast.ClassDef)},
        )

    def comes_from(self, name: str, modules: tuple[str, ...], original: str) -> bool:
        """Whether `name` is `original` of one of `modules`, by an import that names it."""
        found = self.imports.get(name)
        return found is not None and found.module in modules and found.name == original

    def find_run(self, class_name: str) -> tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef]:
        """The method `run` of a class, or of its nearest parent in the project's own files; and its file.

        Raises:
            SchemaError: there is no such class or method.
        """
        if class_name not in self.classes:
            raise SchemaError(f"{self.path} has no class {class_name} at its top level; correct `run:` in cog.yaml")
        if found := self._find_run(class_name):
            return found
        raise SchemaError(
            f"{self.path}: {class_name} has no run(), and Cog reads no installed package; define run() in this project"
        )

    def _find_run(self, class_name: str) -> tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        node = self.classes[class_name]
        methods = [item for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))]
        if own := [method for method in methods if method.name == "run"]:
            return self, own[-1]
        for parent in map(ast.unparse, node.bases):
            module, name = self._parent(parent)
            if module is not None and name in module.classes and (found := module._find_run(name)):
                return found
        return None

    def _parent(self, parent: str) -> tuple[Module | None, str]:
        """The file of a parent class and its name there; no file where it is not the project's."""
        qualifier, _, name = parent.rpartition(".")
        found = self.imports.get(qualifier or name)
        if found is None:
            return (self, name) if name in self.classes else (None, name)
        below = found.module.lstrip(".")
        level = len(found.module) - len(below)
        folder = self.path.parents[level - 1] if level else Path()
        path = folder / f"{below.replace('.', '/')}.py"
        if not (self.project / path).is_file():
            return None, name
        return Module.load(self.project, path), name if qualifier else found.name


def _imports(body: list[ast.stmt]) -> Iterator[tuple[str, Imported]]:
    """Imports at the top level. A star import names nothing, so Cog knows no name of it."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((alias.asname or alias.name, Imported(module, alias.name)) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, Imported(alias.name, alias.name)) for alias in node.names)


def _constants(body: list[ast.stmt], source: str) -> Iterator[tuple[str, Any]]:
    top_level = [node for node in body if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    names = (name for statement in top_level for name in ast.walk(statement) if isinstance(name, ast.Name))
    times_bound = Counter(name.id for name in names if isinstance(name.ctx, ast.Store))
    for node in top_level:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                # Cog would take the last literal, whatever happens to the name afterwards.
                if times_bound[name] > 1:
                    continue
                try:
                    yield name, read_literal(value, source)
                except SchemaError:
                    continue
