"""The fuzzer of packs: a part of its campaign, and proof that it would see what it looks for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hostile_packs import KINDS, Case, Corpus, make_case, restore

from compile_cache.errors import PackError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def fuzz(monkeypatch) -> ModuleType:
    """benchmarks/fuzz_packs.py, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fuzz_packs")


@pytest.fixture
def jail(fuzz, tmp_path):
    return fuzz.Jail(tmp_path / "jail")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Made before anything is broken on purpose."""
    return Corpus()


def violations(jail, corpus: Corpus, kind: str, restore_pack=restore, cases: int = 1) -> Iterable[str]:
    """Those of each case in turn."""
    for number in range(cases):
        yield from jail.try_case(make_case(kind, 0, number, corpus), restore_pack).violations


def has(found: Iterable[str], violation: str) -> bool:
    """Whether one of them is found; no case is tried after it."""
    return any(violation in one for one in found)


def test_no_hostile_pack_does_harm():
    """Every kind of `make soak`, in small numbers."""
    command = [sys.executable, ROOT / "benchmarks" / "fuzz_packs.py", "--cases", "300", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 violations in 300 cases" in done.stdout
    assert all(f"| {kind} |" in done.stdout for kind in KINDS)


def test_a_case_is_the_same_for_the_same_seed(corpus):
    """So that what the fuzzer finds can be found again."""
    other = Corpus()
    for kind in KINDS:
        assert make_case(kind, 7, 3, corpus) == make_case(kind, 7, 3, other)


def test_without_checks_of_paths_the_fuzzer_sees_an_escape(jail, corpus, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.pack.manifest.check_paths", lambda paths: None)
    assert has(violations(jail, corpus, "rows of the table", cases=600), "outside of its folder")


def test_without_digests_the_fuzzer_sees_a_forged_content(jail, corpus, monkeypatch):
    class EqualToAll(str):
        def __ne__(self, other: object) -> bool:
            return False

        def __add__(self, suffix: str) -> EqualToAll:
            return self

    blind = SimpleNamespace(update=lambda part: None, hexdigest=EqualToAll)
    monkeypatch.setattr("compile_cache.storage.pack.format.hashlib", SimpleNamespace(sha256=lambda *_: blind))
    assert has(violations(jail, corpus, "frames moved or replaced", cases=200), "gave what no honest pack gives")


def test_without_signatures_the_fuzzer_sees_a_foreign_pack(jail, corpus, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.pack.signing.TrustedKeys.verify", lambda self, manifest, signature: None)
    assert has(violations(jail, corpus, "rows of the table", cases=600), "gave what no honest pack gives")


@pytest.mark.parametrize("error", [ValueError, RecursionError, StopIteration, MemoryError, OSError, KeyboardInterrupt])
def test_any_other_exception_is_a_violation(jail, corpus, error):
    def fail(*_: object) -> None:
        raise error("a bug")

    assert has(violations(jail, corpus, "damaged bytes", fail), f"not refused but failed: {error.__name__}")


@pytest.mark.parametrize("reason", ["", "two\nlines", "\x1b[2J", "\ud800", "x" * 1000], ids=ascii)
def test_a_reason_that_is_no_short_line_is_a_violation(jail, corpus, reason):
    def refuse(*_: object) -> None:
        raise PackError(reason)

    assert has(violations(jail, corpus, "damaged bytes", refuse), "a reason that is no short line")


def test_a_link_is_a_violation_and_so_is_a_file_that_was_changed_outside(jail, corpus):
    def link(name: str, content: bytes, folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "link").symlink_to(jail.root / "canary")
        (folder / "link").write_text("canary")

    found = list(violations(jail, corpus, "damaged bytes", link))
    assert has(found, "neither file nor folder: 'link'")
    assert has(found, "outside of its folder")


def test_too_much_memory_is_a_violation(fuzz, jail, corpus, capsys):
    tally = fuzz.run_kind("damaged bytes", 0, 3, jail, corpus, most_bytes=-1)
    assert tally.violations == 3
    assert "MiB of memory" in capsys.readouterr().out


def test_an_honest_pack_is_no_violation(jail, corpus):
    for draft in corpus.drafts:
        outcome = jail.try_case(Case.of(draft))
        assert (outcome.reason, outcome.violations) == ("", ())
        assert {outcome.gave} == draft.gives()
