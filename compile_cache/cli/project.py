"""A Cog project in the current folder: sets up the predictor that cog.yaml names, like Cog's server.

Only the predictor imports cog.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from compile_cache.errors import CompileCacheError

CONFIGURATION = "cog.yaml"
# In Cog's own order, for a reference without a class.
_CLASSES = ("Runner", "Predictor")


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
