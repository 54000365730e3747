"""What is printed of a store's content, for people and as JSON: by `ls`, `show` and `verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from compile_cache.cli import printing as out
from compile_cache.store.base import ObjectStore
from compile_cache.versions.catalog import Catalog, Version, read_record
from compile_cache.versions.inspection import Inspected, Verdict


def print_versions(store: ObjectStore, catalog: Catalog, versions: Sequence[Version], as_json: bool) -> None:
    """What `ls` prints."""
    environments = {version.key.environment: None for version in versions}  # ordered
    records = {digest: read_record(store, catalog, digest) for digest in environments}
    size_bytes = sum(version.size_bytes for version in versions)
    if as_json:
        known = {digest: asdict(record) if record else None for digest, record in records.items()}
        document = {"store": store.location, "versions": [version_record(v) for v in versions], "environments": known}
        out.print_json({**document, "size_bytes": size_bytes})
        return
    rows = [
        (
            version.key.model_name,
            out.short_version(version.key.model_version),
            out.short(version.key.environment),
            str(len(version.packs)),
            out.size_text(version.size_bytes),
            out.age_text(version.published_s),
            out.age_text(version.used_s),
        )
        for version in versions
    ]
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
    store: ObjectStore, catalog: Catalog, version: Version, packs: Sequence[Inspected], with_files: bool, as_json: bool
) -> None:
    """What `show` prints."""
    record = read_record(store, catalog, version.key.environment)
    kinds = Counter(
        _kind(key) for key in {file.key for pack in packs if pack.head for file in pack.head.manifest.files}
    )
    if as_json:
        environment = asdict(record) if record else None
        shown = [_pack_record(pack, with_files) for pack in packs]
        keys = dict(sorted(kinds.items()))
        out.print_json({**version_record(version), "record": environment, "packs": shown, "logical_keys": keys})
        return
    out.print_line(f"{version.key.model_name}/{version.key.model_version}")
    out.print_line(f"  environment   {version.key.environment}: {out.environment_text(record)}")
    out.print_line(f"  published     {out.age_text(version.published_s)}, last used {out.age_text(version.used_s)}")
    out.print_line(f"  logical keys  {', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds)) or 'none'}")
    for pack in packs:
        out.print_line()
        out.print_line(f"pack {pack.entry.name.rpartition('/')[2].removesuffix('.pack')}")
        out.print_line(
            f"  {_signature(pack) if pack.verdict is Verdict.SOUND else f'{pack.verdict.value}: {pack.reason}'}"
        )
        if pack.head:
            manifest = pack.head.manifest
            sizes = f"{out.size_text(pack.entry.size_bytes)} stored, {out.size_text(manifest.size_bytes)} unpacked"
            created = f"{_time(manifest.created_s)}, {out.age_text(manifest.created_s)}"
            out.print_line(f"  {out.count_text(len(manifest.files), 'file')}, {sizes}")
            out.print_line(f"  created {created}, by {manifest.creator or 'nobody named'}")
            if with_files:
                out.print_table(("    size>", "file"), [(out.size_text(f.size_bytes), f.path) for f in manifest.files])


def _pack_record(pack: Inspected, with_files: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": pack.entry.name,
        "verdict": pack.verdict.value,
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
            record["files"] = [asdict(file) for file in manifest.files]
    return record


def _kind(key: str) -> str:
    """A logical key's kind: its folder, or the suffix of a file in a folder of two letters, which is code."""
    folder, _, name = key.partition("/")
    if len(folder) > 2 and name:
        return folder
    return name.rpartition(".")[2] if "." in name else "other"


def _version_text(name: str) -> str:
    model, version = name.split("/")[2:4]
    return f"{model}/{out.short_version(version)}"


def _signature(pack: Inspected) -> str:
    if pack.signed_by:
        return f"signed by {pack.signed_by}"
    if pack.head and pack.head.signed_by:
        return f"says it is signed by {pack.head.signed_by}, which was not checked: cryptography is not installed"
    return "not signed"


def _time(time_s: float) -> str:
    """A manifest may claim any time."""
    try:
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):
        return f"{time_s:g} s after 1970"


def print_inspected(store: ObjectStore, packs: Sequence[Inspected], as_json: bool) -> None:
    """What `verify` prints."""
    if as_json:
        out.print_json({"store": store.location, "packs": [_pack_record(pack, False) for pack in packs]})
        return
    rows = [
        (
            pack.verdict.value,
            _version_text(pack.entry.name),
            out.short(pack.entry.name.rpartition("/")[2]),
            out.size_text(pack.entry.size_bytes),
            _signature(pack) if pack.verdict is Verdict.SOUND else f"{pack.reason} ({pack.entry.name})",
        )
        for pack in packs
    ]
    if rows:
        out.print_table(("verdict", "version", "pack", "size>", ""), rows)
        out.print_line()
    counts = Counter(pack.verdict.value for pack in packs)
    size_text = out.size_text(sum(pack.entry.size_bytes for pack in packs))
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing to verify"
    out.print_line(f"{out.count_text(len(packs), 'pack')}, {size_text}, in {store.location}: {verdicts}")
