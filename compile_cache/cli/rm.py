"""`rm`: delete a version's packs, or one of them, from the written store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compile_cache.cli import options as opt
from compile_cache.cli import terminal as out
from compile_cache.errors import CompileCacheError
from compile_cache.storage.catalog import Version, read_catalog
from compile_cache.storage.prune import remove_packs
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.storage.stores.local import LocalStore


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
    names = None if pack is None else {_find_pack(version, pack)}
    chosen = [entry for entry in version.packs if names is None or entry.name in names]
    size = out.size_text(sum(entry.size_bytes for entry in chosen))
    _confirm(f"{out.count_text(len(chosen), 'pack')}, {size}, of {_text(version)} in {writing.location}", yes)
    removed = remove_packs(writing, version, names)
    _renew_index(writing)
    if json:
        out.print_json({"store": writing.location, "removed": [entry.name for entry in removed]})
        return
    for entry in removed:
        out.print_line(f"removed {entry.name}")


def _find_pack(version: Version, text: str) -> str:
    """The name of the only pack of `version` that begins with `text`.

    Raises:
        CompileCacheError: no pack, or several packs, begin so.
    """
    names = [entry.name for entry in version.packs if entry.name.rpartition("/")[2].startswith(text)]
    if len(names) != 1:
        found = "no pack begins" if not names else f"{len(names)} packs begin"
        raise CompileCacheError(f"{found} with {text}: `compile-cache show {version.key.model_name}` lists the packs")
    return names[0]


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
    from compile_cache.storage.stores.local import INDEX, write_index

    if isinstance(store, LocalStore) and Path(store.location, INDEX).is_file():
        write_index(Path(store.location))
        out.print_note(f"renewed {store.location}/{INDEX}")


def _text(version: Version) -> str:
    key = version.key
    return f"{key.model_name}/{out.short_version(key.model_version)} in environment {out.short(key.environment)}"
