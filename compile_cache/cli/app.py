"""The commands: each reads its options, calls the library, and prints the answer."""

from __future__ import annotations

import logging
import os
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from compile_cache import __version__
from compile_cache.cli import options as opt
from compile_cache.cli import printing
from compile_cache.cli import terminal as out
from compile_cache.cli.report_page import write_report
from compile_cache.errors import CompileCacheError
from compile_cache.settings import Settings
from compile_cache.storage.catalog import read_catalog
from compile_cache.storage.copy import Copied, copy_versions
from compile_cache.storage.explain import explain_boot
from compile_cache.storage.pack.signing import generate_keys
from compile_cache.storage.prune import PrunePolicy, apply_prune, plan_prune, remove_packs
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, address_in, open_stores
from compile_cache.storage.stores.local import INDEX, LocalStore, write_index
from compile_cache.storage.verify import PackState, verify_all, verify_heads


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
            raise typer.Exit(1) from error


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
        raise typer.Exit


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Fill, list, verify, copy, remove and prune stores of compiled artifacts; explain what a boot finds.

    It reads the same settings as a boot. Commands that only read look at the store and all layers, or with `--store` at
    one store alone. Commands that change something change the written store, never a layer. Only `fill` imports torch.

    Results go to stdout, everything else to stderr. `--json` prints one JSON document: `..._bytes` are bytes, `..._s`
    are seconds since 1970.

    The exit code is 0 if all is done, or nothing was to do. It is 1 after an error, and if something is not found, not
    sound, missing or not copied. It is 2 for a wrong option, and for a KEY that several versions begin with.
    """
    # The library also logs its errors. stderr would have them twice.
    logging.getLogger("compile_cache").addHandler(_silent)


@app.command()
def ls(store: opt.Store = None, model: opt.Model = None, json: opt.Json = False) -> None:
    """List the stored versions of models, the last used version first. Uses are recorded by the day."""
    reading = opt.open_reading(opt.read_settings(store))
    catalog = read_catalog(reading)
    opt.warn_of_problems(reading)
    versions = [v for v in catalog.versions if v.packs and opt.Selection(model).takes(v.key)]
    versions.sort(key=lambda version: (-version.used_s, version.key.prefix))
    printing.print_versions(reading, catalog, versions, json)


@app.command()
def show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The beginning of model/version, or of a pack's name.")],
    store: opt.Store = None,
    files: Annotated[bool, typer.Option("--files", help="List each file.")] = False,
    json: opt.Json = False,
) -> None:
    """Show one version: its packs, their creators and signatures, and their content.

    Reads only the heads of packs; `verify` reads them whole. A slash ends a model's name: `show MODEL/`.
    """
    settings = opt.read_settings(store)
    reading = opt.open_reading(settings)
    catalog = read_catalog(reading)
    opt.warn_of_problems(reading)
    version = opt.find_version(catalog.versions, key)
    packs = verify_heads(reading, version.packs, Rules.of(settings))
    printing.print_version(reading, catalog, version, packs, files, json)


@app.command()
def verify(
    store: opt.Store = None,
    model: opt.Model = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete damaged packs in the written store.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    json: opt.Json = False,
) -> None:
    """Read and verify every pack. The exit code is 1 if a pack is not sound, or if there are no packs.

    A boot uses only sound packs. A damaged pack has a wrong byte. A refused pack is not signed by a trusted key, too
    large, of another format, or in the wrong place. An unreadable pack could not be read. `--delete` asks, and reads
    each damaged pack again before it deletes it.
    """
    settings = opt.read_settings(store)
    looked_at = opt.open_writing(settings) if delete else opt.open_reading(settings)
    versions = [v for v in read_catalog(looked_at).versions if opt.Selection(model).takes(v.key)]
    opt.warn_of_problems(looked_at)
    packs = [pack for version in versions for pack in version.packs]
    verified = verify_all(looked_at, packs, Rules.of(settings))
    printing.print_verified(looked_at, verified, json)
    damaged = [pack.entry for pack in verified if pack.state is PackState.DAMAGED]
    if delete and damaged and (yes or typer.confirm(f"Delete the damaged packs ({len(damaged)})?", err=True)):
        # Read again: a pack that was only damaged on its way here is sound in the store.
        for pack in verify_all(looked_at, damaged, Rules.of(settings)):
            if pack.state is PackState.DAMAGED:
                looked_at.delete(pack.entry.name)
                out.print_note(f"deleted {pack.entry.name}")
    if not verified or any(pack.state is not PackState.SOUND for pack in verified):
        raise typer.Exit(1)


@app.command()
def pull(
    to: opt.ToFolder,
    source: opt.From = None,
    model: opt.Model = None,
    version: opt.Version = None,
    environment: opt.Environment = None,
) -> None:
    """Copy verified packs into a folder, to bake it into an image or to serve it with any web server.

    Each pack is verified, also by the trusted keys, before it is stored whole. Packs that are not copied are named. An
    interrupted copy goes on where it stopped. `pull` also writes the index.json that a web server's readers need.
    """
    settings = opt.read_settings(source)
    target = LocalStore(to.absolute())
    selection = opt.Selection(model, version, environment)
    copied = _copy(opt.open_reading(settings), target, settings, selection)
    if to.is_dir():
        write_index(to)
    _end(copied, target)


@app.command()
def push(
    source: opt.FromFolder,
    to: opt.To = None,
    model: opt.Model = None,
    version: opt.Version = None,
    environment: opt.Environment = None,
) -> None:
    """Copy verified packs from a folder into a store, as `pull` does."""
    settings = opt.read_settings(to)
    target = opt.open_writing(settings)
    copied = _copy(LocalStore(source.absolute()), target, settings, opt.Selection(model, version, environment))
    _end(copied, target)


def _copy(source: ObjectStore, target: ObjectStore, settings: Settings, selection: opt.Selection) -> Copied:
    copied = copy_versions(source, target, selection.takes, Rules.of(settings))
    opt.warn_of_problems(source)
    if not copied.versions:
        raise CompileCacheError(f"there is nothing to copy in {source.location}{selection.text}")
    return copied


def _end(copied: Copied, target: ObjectStore) -> None:
    printing.print_copied(copied, target)
    if copied.refused or not copied.versions:
        raise typer.Exit(1)


@app.command()
def prune(
    store: opt.Store = None,
    unused_days: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Remove versions not used for so many days.")
    ] = None,
    keep_versions: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep the N last used versions of each model and environment."),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            parser=out.parse_size,
            metavar="SIZE",
            help="Remove the least recently used versions until all fit: 10GB.",
        ),
    ] = None,
    in_use_days: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Keep versions used in the last days.")
    ] = 2.0,
    apply: Annotated[bool, typer.Option("--apply", help="Remove them. Without this option, only list them.")] = False,
    json: opt.Json = False,
) -> None:
    """Remove unused versions. Without `--apply`, only list what would be removed.

    Each rule removes on its own. `--apply` looks again right before it removes. Objects of other programs stay.
    """
    if (unused_days, keep_versions, max_bytes) == (None, None, None):
        out.print_note("error: give a rule: --unused-days 30, --keep-versions 3 or --max-bytes 10GB")
        raise typer.Exit(2)
    writing = opt.open_writing(opt.read_settings(store))
    policy = PrunePolicy(unused_days, keep_versions, max_bytes, in_use_days)
    plan = plan_prune(read_catalog(writing), policy, time.time())
    printing.print_plan(writing, plan, policy, apply_prune(writing, plan) if apply else None, json)


@app.command()
def rm(
    key: Annotated[str, typer.Argument(metavar="MODEL/VERSION", help="The beginning of model/version.")],
    pack: Annotated[str | None, typer.Argument(metavar="[PACK]", help="The beginning of a pack's name.")] = None,
    store: opt.Store = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    json: opt.Json = False,
) -> None:
    """Delete a version's packs, or one of them. No running container brings them back; a new boot may make them
    anew."""
    writing = opt.open_writing(opt.read_settings(store))
    version = opt.find_version(read_catalog(writing).versions, key)
    names = None if pack is None else {opt.find_pack(version, pack)}
    chosen = [entry for entry in version.packs if names is None or entry.name in names]
    size = out.size_text(sum(entry.size_bytes for entry in chosen))
    model = f"{version.key.model_name}/{out.short_version(version.key.model_version)}"
    where = f"{model} in environment {out.short(version.key.environment)} in {writing.location}"
    _confirm(f"{out.count_text(len(chosen), 'pack')}, {size}, of {where}", yes)
    removed = remove_packs(writing, version, names)
    _renew_index(writing)
    if json:
        out.print_json({"store": writing.location, "removed": [entry.name for entry in removed]})
        return
    for entry in removed:
        out.print_line(f"removed {entry.name}")


def _confirm(what: str, yes: bool) -> None:
    """Ask, unless `yes`.

    Raises:
        CompileCacheError: nobody answers.
        Exit: the answer is no.
    """
    try:
        if not (yes or typer.confirm(f"Delete {what}?", err=True)):
            raise typer.Exit(1)
    except typer.Abort as error:
        raise CompileCacheError("nobody answered, so nothing was deleted. Without a terminal, give --yes.") from error


def _renew_index(store: ObjectStore) -> None:
    """Renew the index of a folder behind a web server. Otherwise its readers would not see the change."""
    if isinstance(store, LocalStore) and Path(store.location, INDEX).is_file():
        write_index(Path(store.location))
        out.print_note(f"renewed {address_in(store.location, INDEX)}")


@app.command()
def explain(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A folder, org/name@revision, or any name."),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="A source that the predictor names; may be repeated."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Explain this boot report instead.")] = None,
    store: opt.Store = None,
    json: opt.Json = False,
) -> None:
    """Say what a boot on this machine would find, or why it would find nothing; or print a boot's report.

    Run it where the boot would run, with the model and the sources that the predictor gives to `compile_cache.boot`. It
    decides as a boot does, but imports no torch, and takes the cache directory of the host's first process.
    """
    if (model is None) == (report is None):
        out.print_note("error: give a MODEL, or a boot's report with --report FILE")
        raise typer.Exit(2)
    if report is not None:
        printing.print_report(report, json)
    elif model is not None:
        settings = opt.read_settings(store)
        stores = open_stores(settings)
        explanation = explain_boot(settings, stores, model, source or (), os.environ)
        opt.warn_of_problems(stores.reading)
        printing.print_explanation(settings, stores.reading, explanation, json)


@app.command()
def report(
    reports: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[REPORTS]...", help="Boot reports: files, or folders with *.json.", show_default=False),
    ] = None,
    store: opt.Store = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")] = Path(
        "report.html"
    ),
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timelines also as a trace, for Perfetto.")
    ] = None,
) -> None:
    """Write one page of HTML: the boots of reports as timelines, their history, and what is stored.

    A boot writes its report to the file that `COMPILE_CACHE_REPORT` names. The page shows the newest 500. It loads
    nothing and runs no script, so it can be mailed. With `COMPILE_CACHE_STORE=off` it has the reports alone.

    The lanes of a timeline: `setup` is the caller's thread, with the wait for the restore (`join`); `regions` is what
    regions do in the warm-up; `preload` loads restored functions; `restore` fetches; `publish` packs and stores;
    `second process` compiles after READY.
    """
    write_report(reports or (), store, output, trace)


@app.command()
def fill(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Set the variable MODEL, which this repository's predictors read."),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(metavar="FILE:CLASS", help="The predictor, such as predict.py:Predictor, instead of cog.yaml's."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Fill this store instead of COMPILE_CACHE_STORE.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", file_okay=False, help="Fill this folder, for an image. It gets index.json too."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say for each region what torch could not compile, and how fast it is.")
    ] = False,
    json: opt.Json = False,
) -> None:
    """Boot this folder's predictor once, and fill a store for this kind of machine. The exit code is 1 if something is
    missing.

    It boots as Cog's server does, compiles all that the warm-up calls, publishes the artifacts, and reads them back.
    Run it in the image and on the kind of GPU that will serve. It reads no layers, so the store is complete by itself.
    A second `fill` of the same version compiles nothing.

    It prints the lines of the setup's log, then a line for each missing part, with its cause and remedy. A region that
    is slower than eager is marked, and not missing.
    """
    from compile_cache.cli.fill import fill_store

    if store is not None and to is not None:
        out.print_note("error: give --store or --to, not both")
        raise typer.Exit(2)
    if not fill_store(model, predictor, store, to, explain, json):
        raise typer.Exit(1)


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the program, in the store.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    also: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The program's own cache folder.")] = None,
) -> None:
    """Run any program that uses `torch.compile` with a cache: ComfyUI, a training job, a notebook, an engine.

    Files that runs with the same NAME have stored are restored before the command starts. New files are published while
    it runs, when none changed for some seconds, and at its end, within COMPILE_CACHE_EXIT_BUDGET_S. The log says so:
    `restore: hit`, `publish.put` for each pack, and `publish.failed` for what was not stored in time. Executable files
    stay executable. Links out of the cache directory are not followed.

    COMMAND is a Python, or a script whose first line names one, such as `vllm`. The packages of this Python are in the
    key. In front of any other program there is no cache: put `compile-cache run` inside, before the Python.

    NAME is only a name: a folder or a hub id is not read. There is one version, `any`, or COMPILE_CACHE_MODEL_VERSION,
    because torch looks code up by a hash of everything that it depends on. The cache directory's path is in the key: a
    second run on the same host has its own.

    `--also FOLDER` is for engines that keep compiled code in a folder of their own, such as vLLM's
    `~/.cache/vllm/torch_compile_cache`. It must be missing or empty, and is a link into the cache directory while the
    command runs, so for one run at a time. The link of a run that was killed is replaced. Its path is in the key.

    The command has its terminal, and gets HUP, INT, QUIT, TERM, USR1 and USR2. The exit code is its own, or 128 and the
    number of the signal that killed it; 127 if it does not exist, 126 if it cannot be executed. If it failed or was
    killed, files of its last 5 s may be half-written, and are not published. If the store or a setting cannot be used,
    the command runs without a cache, and `run.uncached` says why.
    """
    from compile_cache.lifecycle.run import run_program

    logging.basicConfig(format="%(message)s")
    logging.getLogger("compile_cache").setLevel(logging.INFO)
    raise typer.Exit(run_program(name, command, also and also.absolute()))


@app.command()
def keygen(
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", file_okay=False, help="Write two files there instead.")
    ] = None,
) -> None:
    """Make a pair of keys: one to sign packs with, one to trust.

    The first signs the packs of boots: give it only to those who may publish. Only the owner can read its file.
    Existing files are never overwritten.
    """
    private, public = generate_keys()
    if folder is None:
        printing.print_keys(private, public)
        return
    files = {folder / "signing.key": (private, 0o600), folder / "signing.pub": (public, 0o644)}
    if there := [str(path) for path in files if path.exists()]:
        raise CompileCacheError(f"{' and '.join(there)} would be overwritten: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, (content, mode) in files.items():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(content + "\n")
    printing.print_keys(*(f'"$(cat {shlex.quote(str(path))})"' for path in files))
