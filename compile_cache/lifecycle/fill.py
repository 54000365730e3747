"""Fills a store: boots a predictor once, publishes everything that it compiled, and verifies what was published."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile_cache.errors import SettingsError
from compile_cache.key.cache_key import CacheKey, object_name
from compile_cache.key.environment import Environment
from compile_cache.key.model_version import model_name
from compile_cache.lifecycle.boot import Boot, observed_boots
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.catalog import read_catalog, read_record
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, open_stores
from compile_cache.storage.verify import PackState, VerifiedPack, verify_whole

PUBLISH_TIMEOUT_S = 1800.0
_MOST_LISTINGS = 3

# Compile everything before setup() returns, and publish it. Read no layers: files found in a layer would be missing in
# the store afterwards.
_VARIABLES = {
    "COLD_START": "block",
    "UNSEEN": "block",
    "SETUP_BUDGET_S": "86399",
    "PUBLISH": "true",
    "LAYERS": "",
    "EXIT_BUDGET_S": "60",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A thing that is missing in the store after a fill: what, why, and the remedy."""

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class Stored:
    """The store's content for one boot: the verified packs, their files, and the environment's record."""

    packs: tuple[VerifiedPack, ...] = ()
    artifacts: int = 0
    precompiled: int = 0
    environment: Environment | None = None

    @property
    def stored_bytes(self) -> int:
        """The size of the verified packs."""
        return sum(pack.entry.size_bytes for pack in self.packs if pack.state is PackState.SOUND)


@dataclass(frozen=True, slots=True)
class FilledBoot:
    """A boot of the predictor: its report, the store's content for it, and what is missing."""

    report: BootReport
    stored: Stored
    problems: tuple[Problem, ...]


def prepare_environ(environ: MutableMapping[str, str], store: str | None) -> Settings:
    """Set the variables of a boot that fills `store` (by default the configured store), and return its settings.

    Raises:
        SettingsError: a setting is wrong, or this boot would publish nothing.
    """
    environ.update({PREFIX + name: value for name, value in _VARIABLES.items()})
    if store is not None:
        environ[f"{PREFIX}STORE"] = store
    settings = Settings.from_env(environ)
    if not settings.enabled:
        raise SettingsError(f"nothing would be compiled: {PREFIX}SCOPE=off. Unset it.")
    if settings.store == "off":
        raise SettingsError(f"there is no store to fill: set {PREFIX}STORE, or give --store or --to")
    if not settings.may_publish:
        raise SettingsError(
            f"nothing would be published: {PREFIX}TRUSTED_KEYS is set, but there is no key to sign with. "
            f"Set {PREFIX}SIGNING_KEY."
        )
    return settings


def fill(set_up: Callable[[], None], settings: Settings) -> list[FilledBoot]:
    """Run `set_up`, wait until all boots that it began have published, and verify what the store has for each.

    Raises:
        Exception: any error of `set_up`.
        StoreError: the store cannot be listed.
    """
    with observed_boots() as boots:
        set_up()
    store = open_stores(settings).reading
    return [_filled(boot, store, settings) for boot in boots]


def _filled(boot: Boot, store: ObjectStore, settings: Settings) -> FilledBoot:
    is_published = boot.wait_published(PUBLISH_TIMEOUT_S)
    boot.end_publishing()
    report = boot.report
    stored = _read_back(report, store, Rules.of(settings)) if report.environment else Stored()
    problems = [problem for region in report.regions if (problem := _region_problem(region))]
    if not report.regions:
        why = "the predictor gave boot.compile() nothing, or it failed: see the warnings"
        problems.append(Problem("regions", why, "Call boot.compile(module) in setup()."))
    problems += _store_problems(report, stored, is_published)
    return FilledBoot(report, stored, tuple(problems))


def _read_back(report: BootReport, store: ObjectStore, rules: Rules) -> Stored:
    """Verify every pack of the boot's key. If another boot merges packs meanwhile, list the packs again."""
    key = CacheKey(report.environment, report.model_name, report.model_version)
    for _ in range(_MOST_LISTINGS):
        catalog = read_catalog(store, key.environment_prefix)
        entries = next((version.packs for version in catalog.versions if version.key == key), ())
        packs = [pack for entry in entries if (pack := verify_whole(store, entry, rules))]
        if len(packs) == len(entries):
            break
    paths = {file.path for pack in packs if pack.head for file in pack.head.manifest.files}
    precompiled = sum(path.startswith("precompiled/") for path in paths)
    # Heads can be large, and nothing below needs them.
    verified = tuple(replace(pack, head=None) for pack in packs)
    return Stored(verified, len(paths), precompiled, read_record(store, catalog, key.environment))


def _region_problem(region: RegionReport) -> Problem | None:
    what = f"region {region.name}"
    accept = f"or accept it: COMPILE_CACHE_LEAVE_EAGER={region.name}."
    if region.is_left_eager:
        return None
    if region.step == "unused":
        return Problem(what, region.reason, f"Or leave {region.name} out of boot.compile().")
    if region.step == "eager":
        return Problem(f"{what} is served eager", region.reason, f"Correct what the reason names, {accept}")
    if region.not_precompiled or not region.made + region.loaded:
        why = "; ".join(region.not_precompiled) or region.reason or "nothing was compiled ahead of time"
        is_partly = region.made + region.loaded > 0
        what = f"{what} is {'not precompiled for some calls' if is_partly else 'not precompiled'}"
        return Problem(what, why, f"Run fill with --explain for file and line, {accept}")
    return None


def _store_problems(report: BootReport, stored: Stored, is_published: bool) -> list[Problem]:
    again = "Correct this and fill again. Stored artifacts are not compiled again."
    problems = [Problem("publishing", failure, again) for failure in report.publish.failures]
    if not is_published and not problems:
        problems.append(Problem("publishing", f"not all was stored within {PUBLISH_TIMEOUT_S:.0f} s", again))
    if report.restore.outcome in ("failed", "discarded", "off"):
        problems.append(Problem("the store", f"restore {report.restore.outcome}: {report.restore.reason}", again))
    refused = {pack.name: pack.reason for pack in report.restore.refused}
    refused |= {pack.entry.name: pack.reason for pack in stored.packs if pack.state is not PackState.SOUND}
    see = "`compile-cache verify` says more, and with --delete removes damaged packs."
    problems += [Problem(f"pack {name} is refused", reason, see) for name, reason in refused.items()]
    needed = sum(region.made + region.loaded for region in report.regions)
    if stored.precompiled < needed:
        why = f"{needed} were made or loaded, but {stored.precompiled} are stored"
        problems.append(Problem("precompiled functions", why, again))
    if report.cache_dir and Path(report.cache_dir).name != "0":
        why = f"another process on this host owns the first one, so only boots that use {report.cache_dir} hit"
        problems.append(Problem("the cache directory", why, "Stop the other process and fill again."))
    return problems


def all_problems(boots: Sequence[FilledBoot], model: str | None, settings: Settings) -> list[Problem]:
    """Everything that is missing in the store after a fill of `model`, or of any model if that is None."""
    if not boots:
        why = "setup() did not call compile_cache.boot()"
        return [Problem("boot", why, "Adopt the library in the predictor, or name another one with --predictor.")]
    problems = [problem for filled in boots for problem in filled.problems]
    names = {filled.report.model_name for filled in boots if filled.report.model_name}
    if model is not None and names and object_name(settings.model_name or model_name(model)) not in names:
        why = f"the predictor booted {', '.join(sorted(names))}"
        problems.append(Problem(f"model {model}", why, "This predictor takes no model from the variable MODEL."))
    return problems
