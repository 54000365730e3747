"""Prints the answers of commands, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from compile_cache.cli import terminal as out
from compile_cache.cli.report_page import read_report
from compile_cache.settings import Settings
from compile_cache.storage.catalog import Catalog, Version, read_record
from compile_cache.storage.copy import Copied
from compile_cache.storage.explain import Explanation
from compile_cache.storage.prune import Pruned, PrunePlan, PrunePolicy
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.storage.verify import PackState, VerifiedPack

_MOST_VERSIONS = 5


def print_versions(store: ObjectStore, catalog: Catalog, versions: Sequence[Version], as_json: bool) -> None:
    """Print the answer of `ls`."""
    environments = {version.key.environment: None for version in versions}  # ordered
    records = {digest: read_record(store, catalog, digest) for digest in environments}
    size_bytes = sum(version.size_bytes for version in versions)
    if as_json:
        known = {digest: asdict(record) if record else None for digest, record in records.items()}
        document = {"store": store.location, "versions": [version_record(v) for v in versions], "environments": known}
        out.print_json({**document, "size_bytes": size_bytes})
        return
    rows = [(*_cells(v), out.age_text(v.published_s), out.age_text(v.used_s)) for v in versions]
    if rows:
        out.print_table(("model", "version", "environment", "packs>", "size>", "published", "last used"), rows)
        out.print_line()
        out.print_table(
            ("environment", ""), [(out.short(digest), out.environment_text(records[digest])) for digest in environments]
        )
        out.print_line()
    packs = out.count_text(sum(len(version.packs) for version in versions), "pack")
    total = f"{out.count_text(len(versions), 'version')}, {packs}, {out.size_text(size_bytes)}"
    out.print_line(f"{total} in {store.location}")
    if catalog.strangers:
        out.print_note(f"not of compile_cache: {out.count_text(len(catalog.strangers), 'object')}")


def _cells(version: Version) -> tuple[str, ...]:
    """The columns of a version that tables begin with: model, version, environment, packs, size."""
    key, packs = version.key, str(len(version.packs))
    names = (key.model_name, out.short_version(key.model_version), out.short(key.environment))
    return (*names, packs, out.size_text(version.size_bytes))


def version_record(version: Version) -> dict[str, Any]:
    """A version's line, as JSON."""
    return {
        "model": version.key.model_name,
        "version": version.key.model_version,
        "environment": version.key.environment,
        "packs": len(version.packs),
        "size_bytes": version.size_bytes,
        "published_s": version.published_s,
        "used_s": version.used_s,
    }


def print_version(
    store: ObjectStore,
    catalog: Catalog,
    version: Version,
    packs: Sequence[VerifiedPack],
    with_files: bool,
    as_json: bool,
) -> None:
    """Print the answer of `show`."""
    record = read_record(store, catalog, version.key.environment)
    heads = [pack.head for pack in packs if pack.head]
    kinds = Counter(_kind(key) for key in {file.key for head in heads for file in head.manifest.files})
    if as_json:
        environment = asdict(record) if record else None
        shown = [_pack_record(pack, with_files) for pack in packs]
        document = {"store": store.location, **version_record(version), "record": environment, "packs": shown}
        out.print_json({**document, "logical_keys": dict(sorted(kinds.items()))})
        return
    out.print_line(f"{version.key.model_name}/{version.key.model_version}")
    out.print_line(f"  store         {store.location}")
    out.print_line(f"  environment   {version.key.environment}: {out.environment_text(record)}")
    out.print_line(f"  published     {out.age_text(version.published_s)}, last used {out.age_text(version.used_s)}")
    out.print_line(f"  logical keys  {', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds)) or 'none'}")
    for pack in packs:
        _print_pack(pack, with_files)


def _print_pack(pack: VerifiedPack, with_files: bool) -> None:
    out.print_line()
    out.print_line(f"pack {pack.entry.name.rpartition('/')[2].removesuffix('.pack')}")
    out.print_line(f"  {_signature(pack) if pack.state is PackState.SOUND else f'{pack.state.value}: {pack.reason}'}")
    if pack.head is None:
        return
    manifest = pack.head.manifest
    sizes = f"{out.size_text(pack.entry.size_bytes)} stored, {out.size_text(manifest.size_bytes)} unpacked"
    created = f"{out.time_text(manifest.created_s)}, {out.age_text(manifest.created_s)}"
    out.print_line(f"  {out.count_text(len(manifest.files), 'file')}, {sizes}")
    out.print_line(f"  created {created}, by {manifest.creator or 'nobody named'}")
    if with_files:
        out.print_table(("    size>", "file"), [(out.size_text(f.size_bytes), f.path) for f in manifest.files])


def _pack_record(pack: VerifiedPack, with_files: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": pack.entry.name,
        "verdict": pack.state.value,
        "reason": pack.reason,
        "size_bytes": pack.entry.size_bytes,
        "stored_s": pack.entry.modified_s,
        "signed_by": pack.signed_by,
    }
    if pack.head:
        manifest = pack.head.manifest
        record |= {"unpacked_bytes": manifest.size_bytes, "files": len(manifest.files)}
        record |= {"creator": manifest.creator, "created_s": manifest.created_s}
        if with_files:
            record["files"] = [msgspec.structs.asdict(file) for file in manifest.files]
    return record


def _kind(key: str) -> str:
    """A logical key's kind: its folder; for code, which lies in a folder of two letters, the file's suffix."""
    folder, _, name = key.partition("/")
    if len(folder) > 2 and name:
        return folder
    return name.rpartition(".")[2] if "." in name else "other"


def _version_text(name: str) -> str:
    model, version = name.split("/")[2:4]
    return f"{model}/{out.short_version(version)}"


def _signature(pack: VerifiedPack) -> str:
    if pack.signed_by:
        return f"signed by {pack.signed_by}"
    if pack.head and pack.head.signed_by:
        return f"claims to be signed by {pack.head.signed_by}, which was not checked: cryptography is not installed"
    return "not signed"


def print_verified(store: ObjectStore, packs: Sequence[VerifiedPack], as_json: bool) -> None:
    """Print the answer of `verify`."""
    if as_json:
        out.print_json({"store": store.location, "packs": [_pack_record(pack, False) for pack in packs]})
        return
    rows = [
        (
            pack.state.value,
            _version_text(pack.entry.name),
            out.short(pack.entry.name.rpartition("/")[2]),
            out.size_text(pack.entry.size_bytes),
            _signature(pack) if pack.state is PackState.SOUND else f"{pack.reason} ({pack.entry.name})",
        )
        for pack in packs
    ]
    if rows:
        out.print_table(("verdict", "version", "pack", "size>", ""), rows)
        out.print_line()
    counts = Counter(pack.state.value for pack in packs)
    size_text = out.size_text(sum(pack.entry.size_bytes for pack in packs))
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing to verify"
    out.print_line(f"{out.count_text(len(packs), 'pack')}, {size_text}, in {store.location}: {verdicts}")


def print_copied(copied: Copied, target: ObjectStore) -> None:
    """Print the answer of `pull` and `push`."""
    for refused in copied.refused:
        out.print_note(f"not copied: {refused.name}: {refused.reason}")
    what = f"{out.count_text(copied.packs, 'pack')}, {out.size_text(copied.stored_bytes)}"
    there = f"; {out.count_text(copied.present_packs, 'pack')} there already" if copied.present_packs else ""
    out.print_line(f"copied {what}, to {target.location}{there}")


def print_plan(store: ObjectStore, plan: PrunePlan, policy: PrunePolicy, pruned: Pruned | None, as_json: bool) -> None:
    """Print the answer of `prune`. `pruned` is None in a dry run."""
    if as_json:
        applied = pruned and {**asdict(pruned), "skipped": [key.prefix for key in pruned.skipped]}
        removals = [{**version_record(r.version), "reason": r.reason} for r in plan.removals]
        leftovers = [version.key.prefix for version in plan.leftovers]
        document = {"store": store.location, "removals": removals, "leftovers": leftovers}
        sizes = {"freed_bytes": plan.freed_bytes, "kept_bytes": plan.kept_bytes}
        out.print_json({**document, **sizes, "environments": plan.environments, "applied": applied})
        return
    rows = [(*_cells(r.version), out.age_text(r.version.used_s), r.reason) for r in plan.removals]
    if rows:
        out.print_table(("model", "version", "environment", "packs>", "size>", "last used", "why"), rows)
        out.print_line()
    for version in plan.leftovers:
        out.print_line(f"left over, without packs: {version.key.prefix}")
    for digest in plan.environments:
        out.print_line(f"an environment without versions: {digest}")
    if pruned is None:
        _print_dry_run(store, plan)
    else:
        for key in pruned.skipped:
            out.print_note(f"kept, because it was used or published meanwhile: {key.prefix}")
        what = f"{out.count_text(pruned.versions, 'version')}, {out.count_text(pruned.packs, 'pack')}"
        out.print_line(f"removed {what}, {out.size_text(pruned.freed_bytes)}, from {store.location}")
    if policy.most_bytes is not None and plan.kept_bytes > policy.most_bytes:
        out.print_note(f"warning: the versions in use take {out.size_text(plan.kept_bytes)}, more than --max-bytes")


def _print_dry_run(store: ObjectStore, plan: PrunePlan) -> None:
    if plan.is_empty:
        out.print_line(f"nothing to remove from {store.location}: {out.size_text(plan.kept_bytes)} stay")
        return
    what = f"{out.count_text(len(plan.removals), 'version')}, {out.size_text(plan.freed_bytes)}"
    out.print_line(f"would remove {what}, from {store.location}, and keep {out.size_text(plan.kept_bytes)}")
    out.print_line("This was a dry run: nothing was removed. Add --apply to remove them.")


def print_explanation(settings: Settings, store: ObjectStore, found: Explanation, as_json: bool) -> None:
    """Print the answer of `explain MODEL`."""
    if as_json:
        out.print_json({"store": store.location, **asdict(found)})
        return
    out.print_line(f"model        {found.key.model_name}")
    out.print_line(f"version      {found.key.model_version}")
    if found.assumes_no_sources:
        out.print_line(
            "sources      none given: if the predictor names sources, give them with --source, because they change "
            "the version"
        )
    out.print_line(f"environment  {found.key.environment}: {out.environment_text(found.environment)}")
    out.print_line(f"store        {store.location}")
    if versions := [out.short_version(version) for version in found.stored_versions]:
        more = f" and {len(versions) - _MOST_VERSIONS} more" if len(versions) > _MOST_VERSIONS else ""
        out.print_line(f"stored       for this environment: {', '.join(versions[:_MOST_VERSIONS])}{more}")
    for refused in found.refused:
        out.print_line(f"refused      {refused.name}: {refused.reason}")
    usable = f"{out.count_text(found.packs, 'pack')}, {out.size_text(found.stored_bytes)}"
    said = {"hit": usable, "seeded": f"from version {found.seeded_from}, {usable}; {found.reason}"}
    out.print_line(f"{found.outcome}: {said.get(found.outcome, found.reason)}")
    if not settings.enabled:
        out.print_note("warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing")


def print_report(path: Path, as_json: bool) -> None:
    """Print the answer of `explain --report`.

    Raises:
        CompileCacheError: the file cannot be read, or is no report of this version of compile_cache.
    """
    report = read_report(path)
    if as_json:
        out.print_json(json.loads(path.read_bytes()))
        return
    out.print_line(f"model {report.model_name}, version {report.model_version}, environment {report.environment}")
    for line in report.lines():
        out.print_line(line)
    for failure in report.publish.failures:
        out.print_line(f"not published: {failure}")
    out.print_line("nothing was compiled anew" if report.fully_cached else "not all of it came from the cache")


def print_keys(private: str, public: str) -> None:
    """Print the answer of `keygen`: lines of a file of variables."""
    out.print_line("# A secret. It signs the packs of a boot: give it only to those who may publish.")
    out.print_line(f"COMPILE_CACHE_SIGNING_KEY={private}")
    out.print_line("# Boots use only packs signed with one of these keys. Separate several by commas.")
    out.print_line(f"COMPILE_CACHE_TRUSTED_KEYS={public}")
