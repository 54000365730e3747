"""What is printed of what a command did or found out, for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from compile_cache.cli import printing as out
from compile_cache.cli.documents import version_record
from compile_cache.lifecycle.report import BootReport
from compile_cache.settings import Settings
from compile_cache.store.base import ObjectStore
from compile_cache.versions.copy import Copied
from compile_cache.versions.explanation import Explanation
from compile_cache.versions.prune import Pruned, PrunePlan, PrunePolicy


def print_copied(copied: Copied, target: ObjectStore) -> None:
    """What `pull` and `push` print."""
    for refused in copied.refused:
        out.print_note(f"not copied: {refused.name}: {refused.reason}")
    what = f"{out.count_text(copied.packs, 'pack')}, {out.size_text(copied.stored_bytes)}"
    there = f"; {out.count_text(copied.present_packs, 'pack')} there already" if copied.present_packs else ""
    out.print_line(f"copied {what}, to {target.location}{there}")


def print_plan(store: ObjectStore, plan: PrunePlan, policy: PrunePolicy, pruned: Pruned | None, as_json: bool) -> None:
    """What `prune` prints; `pruned` is None in a dry run."""
    if as_json:
        removals = [{**version_record(r.version), "reason": r.reason} for r in plan.removals]
        leftovers = [version.key.prefix for version in plan.leftovers]
        document = {"store": store.location, "removals": removals, "leftovers": leftovers}
        sizes = {"freed_bytes": plan.freed_bytes, "kept_bytes": plan.kept_bytes}
        out.print_json({**document, **sizes, "environments": plan.environments, "applied": _pruned_record(pruned)})
        return
    rows = [
        (
            removal.version.key.model_name,
            out.short_version(removal.version.key.model_version),
            out.short(removal.version.key.environment),
            str(len(removal.version.packs)),
            out.size_text(removal.version.size_bytes),
            out.age_text(removal.version.used_s),
            removal.reason,
        )
        for removal in plan.removals
    ]
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
        out.print_note(f"warning: what is in use has {out.size_text(plan.kept_bytes)}, more than --max-bytes")


def _print_dry_run(store: ObjectStore, plan: PrunePlan) -> None:
    if plan.is_empty:
        out.print_line(f"nothing to remove from {store.location}: {out.size_text(plan.kept_bytes)} stay")
        return
    what = f"{out.count_text(len(plan.removals), 'version')}, {out.size_text(plan.freed_bytes)}"
    out.print_line(f"would remove {what}, from {store.location}, and keep {out.size_text(plan.kept_bytes)}")
    out.print_line("This was a dry run: nothing was removed. Add --apply to do it.")


def _pruned_record(pruned: Pruned | None) -> dict[str, Any] | None:
    return None if pruned is None else {**asdict(pruned), "skipped": [key.prefix for key in pruned.skipped]}


def print_explanation(settings: Settings, store: ObjectStore, found: Explanation, as_json: bool) -> None:
    """What `explain MODEL` prints."""
    if as_json:
        out.print_json({"store": store.location, **asdict(found)})
        return
    out.print_line(f"model        {found.key.model_name}")
    out.print_line(f"version      {found.key.model_version}")
    out.print_line(f"environment  {found.key.environment}: {out.environment_text(found.environment)}")
    out.print_line(f"store        {store.location}")
    for refused in found.refused:
        out.print_line(f"refused      {refused.name}: {refused.reason}")
    usable = f"{out.count_text(found.packs, 'pack')}, {out.size_text(found.stored_bytes)}"
    said = {"hit": usable, "seeded": f"from version {found.seeded_from}, {usable}; {found.reason}"}
    out.print_line(f"{found.outcome}: {said.get(found.outcome, found.reason)}")
    if not settings.enabled:
        out.print_note("warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing")


def print_report(report: BootReport, as_json: bool) -> None:
    """What `explain --report` prints."""
    if as_json:
        out.print_json(json.loads(report.to_json()))
        return
    out.print_line(f"model {report.model_name}, version {report.model_version}, environment {report.environment}")
    for line in report.lines():
        out.print_line(line)
    for failure in report.publish.failures:
        out.print_line(f"not published: {failure}")
    out.print_line("nothing was compiled anew" if report.fully_cached else "not all of it came from the cache")


def print_keys(private: str, public: str) -> None:
    """What `keygen` prints: lines of a file of variables."""
    out.print_line("# Signs what this boot publishes. A secret: for nobody who should not publish.")
    out.print_line(f"COMPILE_CACHE_SIGNING_KEY={private}")
    out.print_line("# Only packs signed with one of these, separated by commas, are used.")
    out.print_line(f"COMPILE_CACHE_TRUSTED_KEYS={public}")
