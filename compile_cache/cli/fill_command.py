"""`fill`: boot the project's predictor once, fill a store with what it compiles, verify it, and say what is missing.

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
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from compile_cache.cli import printing as out
from compile_cache.errors import CompileCacheError, SettingsError
from compile_cache.key.cache_key import CacheKey
from compile_cache.lifecycle.boot import observed_boots
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import PREFIX, Settings, layer_problem
from compile_cache.storage.catalog import read_catalog, read_record
from compile_cache.storage.rules import PackState, Rules, verify_packs
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.stores.local import index_folder

_PUBLISH_TIMEOUT_S = 1800.0
# Compile everything before setup() returns, and publish it. Read no layers: files found in a layer would be missing in
# the store afterwards.
_VARIABLES = {
    "COLD_START": "block",
    "UNSEEN": "eager",
    "SETUP_BUDGET_S": "86399",
    "REQUIRE": "",
    "PUBLISH": "true",
    "LAYERS": "",
    "EXIT_BUDGET_S": "60",
}


def fill_store(predictor: str | None, to: str | None, as_json: bool) -> bool:
    """Fill the store `to`, or the configured one, and print the answer. Returns whether nothing is missing.

    Raises:
        CompileCacheError: there is no predictor or no store, the setup failed, or the store cannot be read.
    """
    reference, variables = read_project(Path.cwd(), predictor)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    settings = _prepare(os.environ, to)
    reports, missing = _boot(reference)
    store = open_url(settings.store)
    catalog = read_catalog(store)
    found = {report.environment: read_record(store, catalog, report.environment) for report in reports}
    keys = {CacheKey(report.environment, report.model_name, report.model_version) for report in reports}
    packs = [pack for version in catalog.versions if version.key in keys for pack in version.packs]
    verified = verify_packs(store, packs, Rules.of(settings))
    index_folder(store)
    missing += [f"pack {p.entry.name} is {p.state}: {p.reason}" for p in verified if p.state is not PackState.SOUND]
    if not verified:
        missing.append("packs: nothing is stored for this predictor. The lines above say why.")
    if as_json:
        boots = [json.loads(report.to_json()) for report in reports]
        document = {"predictor": reference, "store": store.location, "is_complete": not missing, "missing": missing}
        out.print_json({**document, "packs": verified, "environments": found, "boots": boots})
        return not missing
    for report in reports:
        environment = f"{report.environment}: {out.environment_text(found[report.environment])}"
        out.print_line(f"model {report.model_name}, version {report.model_version}, environment {environment}")
        for line in report.lines():
            (out.print_note if line.startswith("warning") else out.print_line)(line)
    out.print_packs(store, verified)
    for line in missing:
        out.print_note(f"missing: {line}")
    names = [record.gpu or f"CPUs only ({record.machine}), not for a GPU" for record in found.values() if record]
    machines = f", for {' and for '.join(dict.fromkeys(names))}" if names else ""
    outcome = "filled" if not missing else f"not filled ({out.count_text(len(missing), 'problem')})"
    out.print_line(f"{outcome}: {reference}, in {store.location}{machines}")
    return not missing


def _prepare(environ: MutableMapping[str, str], to: str | None) -> Settings:
    """Set the variables of a boot that fills the store `to` (by default the configured one), and return its settings.

    Raises:
        SettingsError: a setting is wrong, or this boot would publish nothing.
    """
    environ.update({PREFIX + name: value for name, value in _VARIABLES.items()})
    if to is not None:
        if problem := layer_problem(to, ()):
            raise SettingsError(f"the store on the command line: {problem}")
        environ[f"{PREFIX}STORE"] = to
    settings = Settings.from_env(environ)
    if not settings.enabled:
        raise SettingsError(f"nothing would be compiled: {PREFIX}SCOPE=off. Unset it.")
    if settings.store == "off":
        raise SettingsError(f"there is no store to fill: set {PREFIX}STORE, or give --to")
    if not settings.may_publish:
        raise SettingsError(
            f"nothing would be published: {PREFIX}TRUSTED_KEYS is set, but there is no key to sign with. "
            f"Set {PREFIX}SIGNING_KEY."
        )
    return settings


def _boot(reference: str) -> tuple[list[BootReport], list[str]]:
    """Set the predictor up, and wait until all boots that it began have published. Returns their reports, and what is
    missing.

    The predictor's output goes to stderr, because stdout is for the answer. This is the border to the predictor's own
    code: print its traceback, then one line as for all errors.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), observed_boots() as boots:
            set_up(load_predictor(reference, Path.cwd()))
    except CompileCacheError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise CompileCacheError(f"{reference} could not be set up, so nothing was published: {error!r}") from error
    missing: list[str] = []
    for boot in boots:
        is_published = boot.wait_published(_PUBLISH_TIMEOUT_S)
        boot.end_publishing()
        missing += _missing(boot.report, is_published)
    if not boots:
        missing.append("boot: setup() did not call compile_cache.boot(). Adopt the library in it, or give --predictor.")
    return [boot.report for boot in boots], missing


def _missing(report: BootReport, is_published: bool) -> Iterator[str]:
    """What the next boot will lack: what, why, and the remedy."""
    yield from filter(None, map(_missing_region, report.regions))
    if not report.regions:
        yield "regions: boot.compile() got nothing, or failed: see the warnings. Call it with a module in setup()."
    yield from (f"publishing: {failure}" for failure in report.publish.failures)
    if not is_published and not report.publish.failures:
        yield f"publishing: not all was stored within {_PUBLISH_TIMEOUT_S:.0f} s. Fill again."
    if report.restore.outcome in ("failed", "discarded", "off"):
        yield f"the store: restore {report.restore.outcome}: {report.restore.reason}. Correct this and fill again."
    if report.cache_dir and Path(report.cache_dir).name != "0":
        why = f"another process on this host owns the first one, so only boots that use {report.cache_dir} hit"
        yield f"the cache directory: {why}. Stop the other process and fill again."


def _missing_region(region: RegionReport) -> str:
    """Why the next boot will not load all code of a region; empty if it will, or if the user leaves the class eager."""
    accept = f"or accept it: {PREFIX}LEAVE_EAGER={region.name}."
    if region.is_left_eager:
        return ""
    if region.step == "unused":
        return f"region {region.name}: {region.reason}. Or leave it out of boot.compile()."
    if region.step == "eager":
        return f"region {region.name} is served eager: {region.reason}. Correct what the reason names, {accept}"
    made = region.made + region.loaded
    if made and not region.not_precompiled:
        return ""
    why = "; ".join(region.not_precompiled) or region.reason or "nothing was compiled ahead of time"
    what = "not precompiled for some calls" if made else "not precompiled"
    return f"region {region.name} is {what}: {why}. Set TORCH_LOGS=graph_breaks,recompiles for file and line, {accept}"


def read_project(folder: Path, predictor: str | None) -> tuple[str, Mapping[str, str]]:
    """A reference to the predictor of the project in `folder`, such as `predict.py:Predictor`, and the environment
    variables of the project's image. `predictor` replaces the predictor that its cog.yaml names.

    Raises:
        CompileCacheError: there is no predictor, or cog.yaml cannot be read.
    """
    path = folder / "cog.yaml"
    configuration: dict[str, Any] = {}
    variables: dict[str, str] = {}
    if path.is_file():
        try:
            import yaml  # type: ignore[import-untyped]  # Cog itself requires it

            configuration = dict(yaml.safe_load(path.read_text()))
            variables = dict(entry.split("=", 1) for entry in configuration.get("environment") or ())
        except ModuleNotFoundError as error:
            raise CompileCacheError(f"{path} cannot be read without the package pyyaml: pip install pyyaml") from error
        except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
            raise CompileCacheError(f"{path} is no configuration of Cog with variables NAME=value: {error}") from error
    named = predictor or configuration.get("run") or configuration.get("predict")
    if not isinstance(named, str):
        raise CompileCacheError(
            f"{path} names no predictor. Run this command in the project's folder, or add --predictor "
            "predict.py:Predictor"
        )
    return named, variables


def load_predictor(reference: str, folder: Path) -> Any:
    """An instance of the predictor's class, or the function, from a file in `folder`, which is on its import path. The
    file is imported under its own name, like in Cog, so that its pickled objects can be found again.

    Raises:
        CompileCacheError: the file, class or function does not exist.
        Exception: any error of the file's own code.
    """
    path, _, name = reference.partition(":")
    file = folder / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise CompileCacheError(f"{file} does not exist, or is no Python file: give --predictor FILE:CLASS")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = (name,) if name else ("Runner", "Predictor")  # in Cog's own order
    predictor = next((found for one in names if (found := getattr(module, one, None)) is not None), None)
    if predictor is None:
        raise CompileCacheError(f"{file} has no {' or '.join(names)}: give --predictor {path}:CLASS")
    return predictor() if inspect.isclass(predictor) else predictor


def set_up(predictor: Any) -> None:
    """Call `setup()`, with the weights of COG_WEIGHTS if it takes any, and wait for it if it is asynchronous.

    Raises:
        CompileCacheError: there is no `setup`.
        Exception: any error of `setup`.
    """
    setup = getattr(predictor, "setup", None)
    if setup is None:
        raise CompileCacheError(f"{predictor!r} has no setup(): add one that calls compile_cache.boot()")
    takes_weights = "weights" in inspect.signature(setup).parameters
    result = setup(weights=os.environ.get("COG_WEIGHTS") or None) if takes_weights else setup()
    if inspect.iscoroutine(result):
        asyncio.run(result)
