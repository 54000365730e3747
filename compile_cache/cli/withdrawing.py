"""`withdraw` and `reinstate`: take a pack or a version out of use for every boot, and bring it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from compile_cache.cli import options as opt
from compile_cache.cli import terminal as out
from compile_cache.store.base import ObjectStore
from compile_cache.store.local import LocalStore
from compile_cache.versions.catalog import Version, read_catalog
from compile_cache.versions.rules import Rules
from compile_cache.versions.withdrawal import WITHDRAWN, Withdrawal
from compile_cache.versions.withdrawing import (
    Reinstated,
    WithdrawalPlan,
    Withdrawn,
    plan_withdrawal,
    reinstate,
    withdraw,
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The beginning of model/version, or of a pack's name.")]


def withdraw_command(
    key: Key,
    store: opt.Store = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="The reason in one line, for people.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Withdraw without asking.")] = False,
    json: opt.Json = False,
) -> None:
    """Take a version's packs, or one pack, out of use for every boot. Nothing is deleted; `reinstate` undoes it."""
    settings = opt.read_settings(store)
    reading, writing = opt.open_reading(settings), opt.open_writing(settings)
    versions = read_catalog(reading).versions
    opt.warn_of_problems(reading)
    version = opt.find_version(versions, key)
    named = _named_packs(version.key.model_name, [pack.name for pack in version.all_packs], key)
    rules = Rules.of(settings)
    Withdrawal("", 0.0, reason)  # refuse an invalid reason before any question
    plan = plan_withdrawal(reading, version, named, rules)
    if not plan.packs:
        _print_withdrawn(writing, plan, Withdrawn(), reason, json)
        return
    size = out.size_text(sum(pack.size_bytes for pack in plan.packs))
    question = f"Withdraw {out.count_text(len(plan.packs), 'pack')}, {size}, of {_text(version)}?"
    if not yes and not typer.confirm(question, err=True):
        raise typer.Exit(1)
    done = withdraw(reading, writing, plan, reason, rules)
    _renew_index(writing)
    _print_withdrawn(writing, plan, done, reason, json)
    if done.left:
        raise typer.Exit(1)


def reinstate_command(key: Key, store: opt.Store = None, json: opt.Json = False) -> None:
    """Bring all withdrawn packs of a version, or one pack, back into use."""
    settings = opt.read_settings(store)
    reading, writing = opt.open_reading(settings), opt.open_writing(settings)
    versions = read_catalog(reading).versions
    opt.warn_of_problems(reading)
    version = opt.find_version(versions, key, withdrawn=True)
    withdrawn = [entry.name.removesuffix(WITHDRAWN) for entry in version.withdrawals]
    named = _named_packs(version.key.model_name, withdrawn, key)
    done = reinstate(reading, writing, version.key, withdrawn if named is None else named)
    _renew_index(writing)
    _print_reinstated(writing, version, done, json)
    if done.withdrawn_elsewhere:
        raise typer.Exit(1)


def _named_packs(model_name: str, packs: Sequence[str], text: str) -> list[str] | None:
    """The pack whose name begins with `text`, as a list; None if `text` names the version.

    Raises:
        Exit: `text` is ambiguous.
    """
    found = [name for name in packs if name.rpartition("/")[2].startswith(text)]
    if not found:
        return None
    if len(found) > 1 or model_name.startswith(text):
        out.print_note(f"error: {text} is ambiguous; use more characters:")
        for name in [model_name] * model_name.startswith(text) + found:
            out.print_note(f"  {name.rpartition('/')[2].removesuffix('.pack')}")
        raise typer.Exit(2)
    return found


def _renew_index(store: ObjectStore) -> None:
    """Renew the index of a folder behind a web server. Otherwise its readers would not see the change."""
    from compile_cache.store.web_index import INDEX, write_index

    if isinstance(store, LocalStore) and Path(store.location, INDEX).is_file():
        write_index(Path(store.location))
        out.print_note(f"renewed {store.location}/{INDEX}")


def _text(version: Version) -> str:
    key = version.key
    return f"{key.model_name}/{out.short_version(key.model_version)} in environment {out.short(key.environment)}"


def _record(store: ObjectStore, version: Version) -> dict[str, Any]:
    key = version.key
    record = {"model": key.model_name, "version": key.model_version, "environment": key.environment}
    return {"store": store.location, **record}


def _print_withdrawn(store: ObjectStore, plan: WithdrawalPlan, done: Withdrawn, reason: str, as_json: bool) -> None:
    for pack in done.left:
        out.print_note(f"still in use, because it was published meanwhile: {pack.name}. Repeat the command.")
    if as_json:
        names = {"withdrawn": [pack.name for pack in done.packs], "left": [pack.name for pack in done.left]}
        shared = [{"name": found.pack, "shared": found.shared, "files": found.files} for found in done.shared]
        out.print_json({**_record(store, plan.version), "reason": reason, **names, "shared": shared})
        return
    for pack in done.packs:
        out.print_line(f"withdrawn {pack.name}")
    if not done.packs:
        out.print_line(f"nothing to withdraw: no such pack of {_text(plan.version)} is in use")
        return
    size = out.size_text(sum(pack.size_bytes for pack in done.packs))
    out.print_line(f"withdrew {out.count_text(len(done.packs), 'pack')}, {size}, in {store.location}")
    for found in done.shared:
        files = f"{found.shared} of {out.count_text(found.files, 'file')}"
        out.print_note(f"in use, with the same bytes in {files}: {found.pack}")


def _print_reinstated(store: ObjectStore, version: Version, done: Reinstated, as_json: bool) -> None:
    for name in done.withdrawn_elsewhere:
        out.print_note(f"still withdrawn by a read-only layer: {name}. Reinstate it in that layer with --store.")
    if as_json:
        names = {"reinstated": done.packs, "missing": done.missing, "withdrawn_elsewhere": done.withdrawn_elsewhere}
        out.print_json({**_record(store, version), **names})
        return
    for name in done.packs:
        out.print_line(f"reinstated {name}")
    for name in done.missing:
        out.print_line(f"no longer withdrawn, but the pack is no longer stored: {name}")
    out.print_line(f"reinstated {out.count_text(len(done.packs), 'pack')} in {store.location}")
