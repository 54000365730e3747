"""Hostile packs by the ten thousand, each put through what a restore does with a pack in a store.

Every one of them must be refused with a reason, or give exactly what an honest pack gives; and whatever it is, it must
write nowhere but into its folder, raise nothing but `PackError`, and take little memory and time.
Prints a table by kind. Exits with 1 on any violation, and keeps the packs that did it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from table import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile_packs import KINDS, LIMITS, Case, Corpus, digest, fingerprint, make_case, read_tree, restore  # noqa: E402

from compile_cache.errors import PackError  # noqa: E402
from compile_cache.storage.pack.signing import TrustedKeys  # noqa: E402

MIB = 1 << 20
MOST_MEMORY_BYTES = 64 * MIB
MOST_ADDRESSES_BYTES = 512 * MIB  # what a pack that takes far too much runs into, before the machine does
HANGS_AFTER_S = 60
MOST_REASON_CHARACTERS = 500


@dataclass(frozen=True)
class Outcome:
    """What became of one case: a refusal's reason, or the fingerprint of what came out. `violations` should be none."""

    reason: str = ""
    gave: str = ""
    violations: tuple[str, ...] = ()


class Jail:
    """A folder to unpack into, and around it what must stay as it is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "jail" / "inbox" / "pack"
        for name in ("canary", "jail/canary", "jail/inbox/canary"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(name)
        self._before = self._around()

    def try_case(self, case: Case, restore_pack: Callable[..., object] = restore) -> Outcome:
        """Restore one pack into the folder, and judge all that can be seen of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        reason, gave, violations = "", "", []
        try:
            restore_pack(case.name, case.content, self.folder, LIMITS, TrustedKeys(case.trusted))
        except PackError as error:
            reason = str(error)
            if not (reason and reason.isprintable() and len(reason) <= MOST_REASON_CHARACTERS):
                violations.append(f"a reason that is no short line of text: {ascii(reason)[:100]}")
        except BaseException as error:
            reason = type(error).__name__
            violations.append(f"not refused but failed: {ascii(error)[:200]}")
        else:
            violations += self._strange_files()
            gave = fingerprint({path: digest(content) for path, content in read_tree(self.folder).items()})
            if gave not in case.may_give:
                violations.append("accepted, and it gave what no honest pack gives")
        if (around := self._around()) != self._before:
            changed = sorted(path for path, _ in around.items() ^ self._before.items())
            violations.append(f"outside of its folder: {ascii(changed)[:200]}")
            self._before = around
        violations += self._strange_files()
        return Outcome(reason, gave, tuple(violations))

    def _around(self) -> dict[str, tuple[int, ...]]:
        """Everything below the root but the pack's folder, with what changes when it is written."""
        found = {}
        for parent, folders, files in os.walk(self.root):
            for name in [*folders, *files]:
                path = Path(parent, name)
                if path == self.folder and name in folders:
                    folders.remove(name)
                elif path != self.folder.parent:  # whose own times change with the pack's folder
                    status = path.lstat()
                    found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
        return found

    def _strange_files(self) -> list[str]:
        """What is neither a file of one name nor a folder."""
        return [
            f"neither file nor folder: {ascii(path.name)[:100]}"
            for path in self.folder.rglob("*")
            if not stat.S_ISDIR(mode := (status := path.lstat()).st_mode)
            and not (stat.S_ISREG(mode) and status.st_nlink == 1)
        ]


# The campaign.


@dataclass
class Tally:
    """One kind's results."""

    cases: int = 0
    refused: int = 0
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    violations: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


def run_kind(
    kind: str, seed: int, cases: int, jail: Jail, corpus: Corpus, most_bytes: int = MOST_MEMORY_BYTES
) -> Tally:
    """Make and try `cases` of one kind; each violation is printed, and the pack behind it kept."""
    tally = Tally(cases)
    started = time.perf_counter()
    for number in range(cases):
        case = make_case(kind, seed, number, corpus)
        kept = jail.root.parent / f"{kind.replace(' ', '-')}-{number}.pack"
        kept.write_bytes(case.content)  # it stays there if this process hangs or crashes
        before_bytes = _begin_measuring()
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True, file=sys.__stderr__)
        outcome = jail.try_case(case)
        faulthandler.cancel_dump_traceback_later()
        more_bytes = _memory_bytes("VmHWM") - before_bytes
        tally.refused += bool(outcome.reason)
        tally.accepted += bool(outcome.gave)
        tally.reasons[_sort_of(outcome.reason)] += 1
        tally.peak_bytes = max(tally.peak_bytes, more_bytes)
        violations = outcome.violations
        if more_bytes > most_bytes:
            violations += (f"{more_bytes / MIB:.0f} MiB of memory",)
        if violations:
            tally.violations += 1
            print(f"VIOLATION {kind!r}, seed {seed}, stored as {case.name!a}: {'; '.join(violations)} ({kept})")
        else:
            kept.unlink()
    tally.seconds = time.perf_counter() - started
    return tally


def _begin_measuring() -> int:
    """The memory in use, to which the peak is set back. Where it cannot be, too much is measured."""
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before could be taken without being seen
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): sets VmHWM to VmRSS
    return _memory_bytes("VmRSS")


def _memory_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def run(cases: int, seed: int, folder: Path, kinds: Mapping[str, object] = KINDS) -> dict[str, Tally]:
    """Try so many cases, shared out among the kinds."""
    tallies: dict[str, Tally] = {}
    jail, corpus = Jail(folder / "jail"), Corpus()
    for draft in corpus.drafts:
        outcome = jail.try_case(Case.of(draft))
        assert outcome.gave, f"a sound pack was refused: {outcome.reason}"
    resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes("VmSize") + MOST_ADDRESSES_BYTES,) * 2)
    for number, kind in enumerate(kinds):
        share = cases // len(kinds) + (number < cases % len(kinds))
        tallies[kind] = run_kind(kind, seed, share, jail, corpus)
    return tallies


def _sort_of(reason: str) -> str:
    """A reason without its particulars."""
    return re.sub(r"'.*'|\".*\"", "…", re.sub(r"\d+", "N", reason))[:60] or "(accepted)"


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="only one kind")
    arguments = parser.parse_args()
    kinds = {arguments.kind: KINDS[arguments.kind]} if arguments.kind else KINDS
    folder = Path(tempfile.mkdtemp(prefix="hostile-packs-"))
    tallies = run(arguments.cases, arguments.seed, folder, kinds)
    print(_table(tallies))
    violations = sum(tally.violations for tally in tallies.values())
    print(f"\n{violations} violations in {sum(tally.cases for tally in tallies.values())} cases")
    if not violations:
        shutil.rmtree(folder)
    return 1 if violations else 0


def _table(tallies: Mapping[str, Tally]) -> str:
    header = ["kind", "cases", "refused", "accepted, identical", "most common reasons", "seconds", "peak memory, MiB"]
    rows = [
        [
            kind,
            tally.cases,
            tally.refused,
            tally.accepted,
            "; ".join(f"{reason} ({count})" for reason, count in tally.reasons.most_common(3)),
            f"{tally.seconds:.0f}",
            f"{tally.peak_bytes / MIB:.1f}",
        ]
        for kind, tally in tallies.items()
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    sys.exit(main())
