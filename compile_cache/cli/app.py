"""The commands: each reads its options, calls the library, and prints the answer."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Exit, Option
from typer.core import TyperGroup

from compile_cache import __version__
from compile_cache.cli import printing as out
from compile_cache.cli.report_page import write_report
from compile_cache.errors import CompileCacheError, SettingsError, StoreError
from compile_cache.key.cache_key import CacheKey, object_name
from compile_cache.lifecycle.restore import plan_restore
from compile_cache.settings import STORE_SCHEMES, Settings, layer_problem, split_url
from compile_cache.storage.catalog import Catalog, Version, read_catalog, read_record
from compile_cache.storage.copy import copy_versions
from compile_cache.storage.pack.signing import generate_keys
from compile_cache.storage.prune import apply_prune, plan_prune, remove
from compile_cache.storage.rules import PackState, Rules, verify_packs
from compile_cache.storage.stores.base import LayeredStore, ObjectStore, open_stores
from compile_cache.storage.stores.local import index_folder

_Store = Annotated[str | None, Option("--store", metavar="URL", help="Use this store alone, and no layers.")]
_Model = Annotated[str | None, Option("--model", metavar="NAME", help="Only this model: org/name, or a folder's name.")]
_Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
_To = Annotated[
    str | None,
    Option("--to", metavar="URL", help="Write this store, not COMPILE_CACHE_STORE. A folder gets index.json."),
]


class _Commands(TyperGroup):
    """Turns a known error into one line on stderr. Only here."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the output has seen enough: Typer ends quietly
            raise
        except (CompileCacheError, OSError) as error:
            out.print_note(f"error: {error}")
            raise Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,  # private keys may be among them
)
_silent = logging.NullHandler()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print_line(f"cog-compile-cache {__version__}")
        raise Exit


@app.callback()
def _start(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Fill, list, verify, copy, remove and prune stores of compiled artifacts; explain what a boot finds.

    It reads the settings of a boot: the store with all layers, or to change something, the written store alone. Only
    `fill` imports torch.

    Results go to stdout, everything else to stderr. In JSON, `..._bytes` are bytes and `..._s` are seconds since 1970.

    KEY is the beginning of `model/version`, of `environment/model/version` or of a pack's name.

    The exit code is 0 if all is done; 1 after an error, or if something is not found, not sound, missing or not copied;
    2 for a wrong option, or if several names begin with KEY.
    """
    # The library also logs its errors. stderr would have them twice.
    logging.getLogger("compile_cache").addHandler(_silent)


def _open(store: str | None) -> tuple[Settings, LayeredStore]:
    """The settings and the store of a boot. If `store` is given, it replaces the boot's store and layers.

    Raises:
        SettingsError: a setting is wrong, or no store is set.
    """
    settings = Settings.from_env(os.environ)
    if store is not None:
        if problem := layer_problem(store, settings.trusted_keys):
            raise SettingsError(f"the store on the command line: {problem}")
        is_written = split_url(store)[0] in STORE_SCHEMES
        settings = replace(settings, store=store if is_written else "off", layers=() if is_written else (store,))
    if settings.store == "off" and not settings.layers:
        raise SettingsError("there is no store: set COMPILE_CACHE_STORE, or give one on the command line")
    return settings, open_stores(settings)


def _writing(store: LayeredStore) -> ObjectStore:
    if store.writing is None:
        raise StoreError("this store is read-only: set COMPILE_CACHE_STORE, or give a store that can be written")
    return store.writing


def _read(store: LayeredStore) -> Catalog:
    """The store's catalog. Layers that cannot be listed are named on stderr."""
    catalog = read_catalog(store)
    out.print_problems(store)
    return catalog


def _is_wanted(key: CacheKey, model: str | None, version: str | None = None) -> bool:
    """Whether the options select `key`: by default, each."""
    given = ((model, key.model_name), (version, key.model_version))
    return all(option is None or object_name(option) == part for option, part in given)


def _find(catalog: Catalog, text: str) -> Version:
    """The only version, or the only pack (a version that has no other), whose name begins with `text`. A full name
    finds only that one, even if other names begin with it.

    Raises:
        CompileCacheError: `text` names nothing.
        Exit: `text` names several. They are listed on stderr.
    """
    named: list[tuple[str, tuple[str, ...], Version]] = []
    for version in (version for version in catalog.versions if version.packs):
        key = version.key
        name, full = f"{key.model_name}/{key.model_version}", f"{key.environment}/{key.model_name}/{key.model_version}"
        named.append((full, (full, name, key.model_name), version))
        named += [(e.name, (e.name.rpartition("/")[2],), replace(version, packs=(e,), marks=())) for e in version.packs]
    found = [one for one in named if text.rstrip("/") in (one[0], *one[1])]
    found = found or [one for one in named if text and any(name.startswith(text) for name in one[1])]
    if not found:
        raise CompileCacheError(f"nothing stored begins with {text or 'no name'}: `compile-cache ls` lists all")
    if len(found) > 1:
        out.print_note(f"error: {text} is ambiguous; use more characters:")
        for full, _, _ in found:
            out.print_note(f"  {full}")
        raise Exit(2)
    return found[0][2]


@app.command()
def ls(store: _Store = None, model: _Model = None, json: _Json = False) -> None:
    """List the stored versions of models, the last used first. Uses are recorded by the day."""
    _, reading = _open(store)
    catalog = _read(reading)
    versions = [v for v in catalog.versions if v.packs and _is_wanted(v.key, model)]
    versions.sort(key=lambda version: (-version.used_s, version.key.prefix))
    found = dict.fromkeys(version.key.environment for version in versions)
    environments = {digest: read_record(reading, catalog, digest) for digest in found}
    if json:
        out.print_json({"store": reading.location, "versions": versions, "environments": environments})
        return
    out.print_versions(dict.fromkeys(versions, ""))
    summaries = [(out.short(digest), out.environment_text(record)) for digest, record in environments.items()]
    out.print_table(("environment", ""), summaries)
    packs = out.packs_text([pack for version in versions for pack in version.packs])
    out.print_line(f"{out.count_text(len(versions), 'version')}, {packs} in {reading.location}")


@app.command()
def show(
    key: Annotated[str, Argument(metavar="KEY", help="A version, or a pack.")],
    store: _Store = None,
    files: Annotated[bool, Option("--files", help="List each file.")] = False,
    json: _Json = False,
) -> None:
    """Show a version or a pack: creators, signatures, content. It reads only the heads of packs."""
    settings, reading = _open(store)
    catalog = _read(reading)
    version = _find(catalog, key)
    environment = read_record(reading, catalog, version.key.environment)
    packs = verify_packs(reading, version.packs, Rules.of(settings), heads_alone=True)
    if json:
        document = {"store": reading.location, "key": version.key, "environment": environment, "packs": packs}
        out.print_json(document)
        return
    out.print_line(f"{version.key.model_name}/{version.key.model_version}")
    out.print_line(f"environment {version.key.environment}: {out.environment_text(environment)}")
    out.print_content(packs, files)
    out.print_line()
    out.print_packs(reading, packs)


@app.command()
def verify(store: _Store = None, model: _Model = None, json: _Json = False) -> None:
    """Read and verify every pack. The exit code is 1 if one is not sound, or if there are none.

    A boot uses only sound packs. A damaged pack has a wrong byte. A refused one is not signed by a trusted key, too
    large, of another format, or in the wrong place.
    """
    settings, reading = _open(store)
    packs = [p for v in _read(reading).versions if _is_wanted(v.key, model) for p in v.packs]
    verified = verify_packs(reading, packs, Rules.of(settings))
    if json:
        out.print_json({"store": reading.location, "packs": verified})
    else:
        out.print_packs(reading, verified)
    if not verified or any(pack.state is not PackState.SOUND for pack in verified):
        raise Exit(1)


@app.command()
def copy(
    source: Annotated[
        str | None, Option("--from", metavar="URL", help="Copy from this store alone, and from no layers.")
    ] = None,
    to: _To = None,
    model: _Model = None,
    version: Annotated[str | None, Option("--version", metavar="VERSION", help="Only this version.")] = None,
) -> None:
    """Copy sound packs from what a boot reads into a folder, for an image or a web server, or into another store.

    An interrupted copy goes on where it stopped.
    """
    settings, reading = _open(source)
    writing = _writing(_open(to)[1])
    copied = copy_versions(reading, writing, lambda key: _is_wanted(key, model, version), Rules.of(settings))
    out.print_problems(reading)
    index_folder(writing)
    if not (copied.packs or copied.present or copied.refused):
        raise CompileCacheError(f"there is nothing to copy in {reading.location}, or nothing of that name")
    for name, refused in copied.refused.items():
        out.print_note(f"not copied: {name}: {refused.reason}")
    there = f"; {out.count_text(len(copied.present), 'pack')} there already" if copied.present else ""
    out.print_line(f"copied {out.packs_text(list(copied.packs.values()))}, to {writing.location}{there}")
    if copied.refused:
        raise Exit(1)


@app.command()
def prune(
    store: _Store = None,
    unused_days: Annotated[
        float | None, Option(min=0, metavar="DAYS", help="Remove versions not used for so many days.")
    ] = None,
    keep_versions: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Keep the N last used versions of each model and environment."),
    ] = None,
    in_use_days: Annotated[float, Option(min=0, metavar="DAYS", help="Keep versions used in the last days.")] = 2.0,
    apply: Annotated[bool, Option("--apply", help="Remove them. Without it, only list them.")] = False,
) -> None:
    """Remove old versions. Each rule removes on its own. Versions used since the list was made, and objects of other
    programs, stay."""
    if unused_days is None and keep_versions is None:
        out.print_note("error: give a rule: --keep-versions 3 or --unused-days 30")
        raise Exit(2)
    writing = _writing(_open(store)[1])
    plan = plan_prune(read_catalog(writing), time.time(), unused_days, keep_versions, in_use_days)
    removed = apply_prune(writing, plan) if apply else []
    out.print_versions(plan)
    if apply:
        out.print_removed(writing, removed)
    elif plan:
        size = out.size_text(sum(version.size_bytes for version in plan))
        out.print_line(f"would remove {out.count_text(len(plan), 'version')}, {size}, from {writing.location}")
        out.print_line("This was a dry run: nothing was removed. Add --apply to remove them.")
    else:
        out.print_line(f"nothing to remove from {writing.location}")


@app.command()
def rm(
    keys: Annotated[list[str], Argument(metavar="KEY...", help="A version, with all its packs, or a pack.")],
    store: _Store = None,
    yes: Annotated[bool, Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Delete versions or packs. No running container brings them back; a new boot may make them anew."""
    writing = _writing(_open(store)[1])

    def find() -> list[Version]:
        catalog = read_catalog(writing)
        return [_find(catalog, key) for key in keys]

    out.print_versions(dict.fromkeys(find(), ""))
    if not yes:
        typer.confirm(f"Delete them from {writing.location}?", abort=True, err=True)
    due = find()  # again, because containers may have published or merged meanwhile
    out.print_removed(writing, remove(writing, [entry for version in due for entry in version.objects]))


@app.command()
def explain(
    model: Annotated[str, Argument(metavar="MODEL", help="A folder, org/name@revision, or any name.")],
    source: Annotated[
        list[Path] | None,
        Option(metavar="PATH", exists=True, help="A source that the predictor names; may be repeated."),
    ] = None,
    store: _Store = None,
    json: _Json = False,
) -> None:
    """Say what a boot on this machine would find, or why it would find nothing.

    Run it where the boot would run, with the model and the sources of `compile_cache.boot`. It prints the line
    `restore: …` that a boot of the host's first process would log.
    """
    settings, _ = _open(store)
    plan = plan_restore(settings, model, source or (), os.environ)
    if not source and not settings.model_version:
        out.print_note("note: if the predictor names sources, give them with --source: they change the version")
    if not settings.enabled:
        out.print_note("warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing")
    if json:
        out.print_json({"plan": plan})
        return
    out.print_line(f"model {plan.key.model_name}, version {plan.key.model_version}, in {plan.store}")
    out.print_line(f"environment {plan.key.environment}: {out.environment_text(plan.environment)}")
    for line in plan.restore.lines():
        out.print_line(line)


@app.command()
def report(
    reports: Annotated[list[Path], Argument(metavar="REPORTS...", help="Boot reports: files such as reports/*.json.")],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE.html", help="The page.")] = Path("report.html"),
) -> None:
    """Write one page of HTML: the boots of reports as timelines, and their history.

    A boot writes its report to the file that `COMPILE_CACHE_REPORT` names. The page loads nothing and runs no
    script.

    Its lanes: `setup` is the caller's thread, with the wait for the restore (`join`); `regions` is the warm-up's work;
    `preload` loads functions.
    """
    write_report(reports, output)


@app.command()
def fill(
    predictor: Annotated[
        str | None,
        Option(metavar="FILE:CLASS", help="The predictor, such as predict.py:Predictor, instead of cog.yaml's."),
    ] = None,
    to: _To = None,
    json: _Json = False,
) -> None:
    """Boot this folder's predictor once, and fill a store for this kind of machine.

    Run it in the image and on the kind of GPU that will serve. It boots as Cog's server does, compiles all that the
    warm-up calls, publishes it, and verifies it. It reads no layers, so the store is complete by itself. A second
    `fill` of the same version compiles nothing. Each missing part is printed with its cause and remedy.
    """
    from compile_cache.cli.fill_command import fill_store

    if not fill_store(predictor, to, json):
        raise Exit(1)


@app.command()
def run(
    name: Annotated[str, Argument(metavar="NAME", help="A name for the program, in the store.")],
    command: Annotated[list[str], Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    also: Annotated[list[Path] | None, Option(metavar="FOLDER", help="The program's own cache folder.")] = None,
) -> None:
    """Run any program that uses `torch.compile` with a cache: ComfyUI, a training job, a notebook, an engine.

    Files of earlier runs with the same NAME are restored first. New files are published when none changed for some
    seconds, and at the end, within COMPILE_CACHE_EXIT_BUDGET_S. The log has `restore: hit`, `publish.put` for each
    pack, and `publish.failed` for what was not stored. Links out of the cache directory are not followed.

    COMMAND is a Python, or a script whose first line names one, such as `vllm`. Put `compile-cache run` right before
    it: in front of another program there is no cache. The key has NAME, the version `any` or
    COMPILE_CACHE_MODEL_VERSION, the Python's packages, and the cache directory: a second run on the same host has its
    own.

    `--also FOLDER` is for engines that keep compiled code in a folder of their own, such as vLLM's
    `~/.cache/vllm/torch_compile_cache`. The folder must be missing or empty. While COMMAND runs, for one run at a time,
    it is a link into the cache directory. Its path is in the key.

    COMMAND has its terminal, and gets HUP, INT, QUIT, TERM, USR1 and USR2. The exit code is its own, or 128 and the
    number of the signal that killed it; 127 if it does not exist, 126 if it cannot be executed. If it failed or was
    killed, files of its last 5 s are not published. If the store or a setting cannot be used, it runs without a cache,
    and `run.uncached` says why.
    """
    from compile_cache.lifecycle.run import run_program

    if also and len(also) > 1:
        out.print_note("error: give --also once, for one folder")
        raise Exit(2)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("compile_cache").setLevel(logging.INFO)
    code = run_program(name, command, also[0].absolute() if also else None)
    try:
        sys.stderr.flush()
    except OSError:  # its reader is gone; Python would end with 120
        sys.stderr = None
    raise Exit(code)


@app.command()
def keygen() -> None:
    """Make a pair of keys: a secret one to sign packs with, for those who may publish, and one to trust.

    It prints them as lines of a file of variables.
    """
    private, public = generate_keys()
    out.print_line("# A secret. It signs the packs of a boot: give it only to those who may publish.")
    out.print_line(f"COMPILE_CACHE_SIGNING_KEY={private}")
    out.print_line("# Boots use only packs signed with one of these keys. Separate several by commas.")
    out.print_line(f"COMPILE_CACHE_TRUSTED_KEYS={public}")
