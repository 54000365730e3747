"""`fill`: boot the project's predictor once, fill a store with what it compiles, and say what is missing.

The project is the current folder. Its predictor is set up like in Cog's server, and only the predictor imports cog.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from compile_cache.cli import terminal as out
from compile_cache.errors import CompileCacheError
from compile_cache.lifecycle.fill import FilledBoot, Problem, all_problems, fill, prepare_environ
from compile_cache.settings import Settings
from compile_cache.storage.stores.base import open_stores
from compile_cache.storage.stores.local import write_index

CONFIGURATION = "cog.yaml"
# In Cog's own order, for a reference without a class.
_CLASSES = ("Runner", "Predictor")


def fill_store(
    model: str | None, predictor: str | None, store: str | None, to: Path | None, explain: bool, as_json: bool
) -> bool:
    """Fill `store`, the folder `to`, or the configured store, and print the answer. Returns whether nothing is missing.

    Raises:
        CompileCacheError: there is no predictor or no store, the setup failed, or the store cannot be read.
    """
    project = read_project(Path.cwd(), predictor)
    for name, value in project.variables.items():
        os.environ.setdefault(name, value)
    if model is not None:
        os.environ["MODEL"] = model
    if explain:
        os.environ.setdefault("TORCH_LOGS", "graph_breaks,recompiles")
    settings = prepare_environ(os.environ, str(to.absolute()) if to else store)
    boots = _run(project.predictor, settings)
    if to is not None and to.is_dir():
        write_index(to)
    problems = all_problems(boots, model, settings)
    location = open_stores(settings).reading.location
    if as_json:
        out.print_json(_document(project.predictor, location, boots, problems))
    else:
        _print_filled(project.predictor, location, boots)
        _print_end(location, boots, problems)
    return not problems


def _run(reference: str, settings: Settings) -> list[FilledBoot]:
    """Set the predictor up. Its output goes to stderr, because stdout is for the answer.

    This is the border to the predictor's own code: print its traceback, then one line as for all errors.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            predictor = load_predictor(reference, Path.cwd())
            return fill(lambda: set_up(predictor), settings)
    except CompileCacheError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise CompileCacheError(f"{reference} could not be set up, so nothing was published: {error!r}") from error


def _print_filled(predictor: str, location: str, boots: Sequence[FilledBoot]) -> None:
    out.print_line(f"predictor    {predictor}")
    out.print_line(f"store        {location}")
    for filled in boots:
        report = filled.report
        out.print_line(
            f"model        {report.model_name or 'not known'}, version {report.model_version or 'not known'}"
        )
        record = out.environment_text(filled.stored.environment)
        out.print_line(f"environment  {report.environment or 'not known'}: {record}")
        for line in report.lines():
            (out.print_note if line.startswith("warning") else out.print_line)(line)


def _print_end(location: str, boots: Sequence[FilledBoot], problems: Sequence[Problem]) -> None:
    """Print the problems on stderr, and the last line."""
    for problem in problems:
        out.print_note(f"missing: {problem}")
    artifacts = out.count_text(sum(filled.stored.artifacts for filled in boots), "artifact")
    size = out.size_text(sum(filled.stored.stored_bytes for filled in boots))
    filled = "filled" if not problems else f"not filled ({out.count_text(len(problems), 'problem')})"
    out.print_line(f"{filled}: {artifacts}, {size} in {location}{_devices(boots)}")


def _devices(boots: Sequence[FilledBoot]) -> str:
    """The machines that can use the artifacts, in words: a CPU's artifacts are of no use to a GPU."""
    records = [filled.stored.environment for filled in boots if filled.stored.environment]
    names = dict.fromkeys(record.gpu or f"CPUs only ({record.machine}), not for a GPU" for record in records)
    return f", for {' and for '.join(names)}" if names else ""


def _document(
    predictor: str,
    location: str,
    boots: Sequence[FilledBoot],
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """The answer as JSON."""
    known = [filled.stored.environment for filled in boots]
    return {
        "predictor": predictor,
        "store": location,
        "is_complete": not problems,
        "artifacts": sum(filled.stored.artifacts for filled in boots),
        "size_bytes": sum(filled.stored.stored_bytes for filled in boots),
        "problems": [asdict(problem) for problem in problems],
        "environments": [asdict(record) if record else None for record in known],
        "boots": [json.loads(filled.report.to_json()) for filled in boots],
    }


class ProjectError(CompileCacheError):
    """The folder has no Cog project whose predictor can be set up. The message says what to give."""


@dataclass(frozen=True, slots=True)
class Project:
    """`predictor` is a reference such as `predict.py:Predictor`. `variables` are the environment variables of its
    image."""

    predictor: str
    variables: Mapping[str, str]


def read_project(folder: Path, predictor: str | None) -> Project:
    """The project in `folder`. `predictor` replaces the predictor that its cog.yaml names.

    Raises:
        ProjectError: there is no predictor, or cog.yaml cannot be read.
    """
    configuration = _read_configuration(folder / CONFIGURATION)
    named = predictor or configuration.get("run") or configuration.get("predict")
    if not isinstance(named, str):
        raise ProjectError(
            f"{folder / CONFIGURATION} names no predictor. Run this command in the project's folder, or add "
            "--predictor predict.py:Predictor"
        )
    return Project(named, dict(_variable(entry) for entry in configuration.get("environment") or ()))


def _read_configuration(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:  # Cog itself requires it
        raise ProjectError(f"{path} cannot be read without the package pyyaml: pip install pyyaml") from error
    try:
        configuration = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProjectError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(configuration, Mapping):
        raise ProjectError(
            f"{path} is no configuration of Cog. Run this command in another folder, with --predictor "
            "predict.py:Predictor"
        )
    return configuration


def _variable(entry: object) -> tuple[str, str]:
    name, separator, value = str(entry).partition("=")
    if not separator or not name:
        raise ProjectError(f"{CONFIGURATION}: `environment` has {entry!r}; give NAME=value")
    return name, value


def load_predictor(reference: str, folder: Path) -> Any:
    """An instance of the predictor's class, or the function, from a file in `folder`, which is on its import path.

    Raises:
        ProjectError: the file, class or function does not exist.
        Exception: any error of the file's own code.
    """
    path, _, name = reference.partition(":")
    file = folder / path
    if not file.is_file():
        raise ProjectError(
            f"the predictor's file {file} does not exist: give --predictor FILE:CLASS, relative to {folder}"
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = _import_file(file)
    names = (name,) if name else _CLASSES
    predictor = next((found for one in names if (found := getattr(module, one, None)) is not None), None)
    if predictor is None:
        raise ProjectError(f"{file} has no {' or '.join(names)}: give --predictor {path}:CLASS")
    return predictor() if inspect.isclass(predictor) else predictor


def _import_file(file: Path) -> ModuleType:
    """Import a file under its own name, like Cog, so that its pickled objects can be found again."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ProjectError(f"{file} is no Python file")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_up(predictor: Any) -> None:
    """Call `setup()`, with the weights of COG_WEIGHTS if it takes any, and wait for it if it is asynchronous.

    Raises:
        ProjectError: there is no `setup`.
        Exception: any error of `setup`.
    """
    setup = getattr(predictor, "setup", None)
    if setup is None:
        raise ProjectError(f"{predictor!r} has no setup(): add one that calls compile_cache.boot()")
    takes_weights = "weights" in inspect.signature(setup).parameters
    result = setup(weights=os.environ.get("COG_WEIGHTS") or None) if takes_weights else setup()
    if inspect.iscoroutine(result):
        asyncio.run(result)
