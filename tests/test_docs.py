"""README.md and docs/: commands that run, names that exist, links that lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
import typer.main
import yaml
from documents import NEEDS, PROJECT, Block, anchors, blocks, codes, guides, links, pages, rows, words
from documents import source_texts as texts
from filled_stores import put_pack, set_age
from huggingface_hub import constants
from machines import write_files
from typer.testing import CliRunner
from web_servers import answer, answering

import compile_cache
from compile_cache.cli.app import app
from compile_cache.key.cache_key import CacheKey
from compile_cache.lifecycle.boot_report import BootReport, RestoreReport
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.stores.local import LocalStore

COMMANDS = typer.main.get_command(app)
TROUBLESHOOTING = PROJECT / "docs" / "troubleshooting.md"
COMMIT = "0" * 40
_VARIABLE = re.compile(rf"{PREFIX}[A-Z0-9_]*[A-Z0-9]")
_COMMAND = re.compile(r"(?:compile-cache|-m compile_cache\.cli) ([^|&;\"'\n`]*)")
_EVENT = re.compile(r"[a-z_]+\.[a-z_]+(?= |$)")

ALL_BLOCKS = [block for page in guides() for block in blocks(page)]
ALL_CODES = [text for page in guides() for text in codes(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language in languages]


# Commands.


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages' commands find it: a project with a store of several versions, a report, a hub's cache."""
    folder = tmp_path_factory.mktemp("filled")
    root = folder / ".compile-cache"
    versions = {"toy--model": ["2026-11-20", "2026-11-21", "9e89d0eeeb93"], "org--model": ["VERSION"]}
    for model, names in versions.items():
        for number, version in enumerate(names):
            key = CacheKey("cef46edd0f8a77c89b66bd3ce5120a0c", model, version)
            # Different content, so that a pack's name stands for one version.
            put_pack(LocalStore(root), key, {"ab/kernel.so": version.encode() * 100})
            set_age(root, key.prefix, 9.0 * number, time.time())
    files = {"predict.py": "# a predictor\n", "hub/models--org--model/refs/<commit>": COMMIT}
    files["report.json"] = BootReport(restore=RestoreReport("hit"), ready_s=1.0).to_json()
    write_files(folder, {path: content.encode() for path, content in files.items()})
    return folder


@pytest.fixture
def project(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, and the working directory."""
    folder = tmp_path / "project"
    shutil.copytree(filled, folder)
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv(f"{PREFIX}DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    return folder


def commands(text: str) -> Iterator[tuple[Mapping[str, str], list[str]]]:
    """Each command with the variables set before it."""
    for line in text.replace("\\\n", " ").splitlines():
        words_of_line = shlex.split(line, comments=True)
        while words_of_line:
            end = words_of_line.index("&&") if "&&" in words_of_line else len(words_of_line)
            command, words_of_line = words_of_line[:end], words_of_line[end + 1 :]
            given: dict[str, str] = {}
            while command and re.fullmatch(r"\w+=.*", command[0]):
                name, _, value = command.pop(0).partition("=")
                given[name] = value
            yield given, command


def run(environ: Mapping[str, str], command: list[str]) -> int:
    """Run a command of a page; its exit code. Those of `make` are only planned."""
    if command[:1] == ["compile-cache"]:
        return CliRunner().invoke(app, command[1:], input="y\n", env=dict(environ), catch_exceptions=False).exit_code
    if command[:1] == ["make"]:
        if shutil.which("make") is None:
            pytest.skip("make is not installed")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run([*command, "--dry-run"], cwd=PROJECT, env=clean, capture_output=True).returncode
    pytest.fail(f"{shlex.join(command)}: no test runs this. Mark the block, such as <!-- needs: docker -->")


@pytest.mark.parametrize("block", [one for one in of_language("sh") if not one.needs], ids=str)
def test_commands_of_the_pages_run(block, project):
    for environ, command in commands(block.text):
        assert run(environ, command) == 0, shlex.join(command)


def test_the_pages_have_commands_that_are_run_and_others_for_known_reasons():
    """Else the test above passes because it finds nothing."""
    assert {bool(block.needs) for block in of_language("sh")} == {True, False}
    assert {reason for block in ALL_BLOCKS for reason in block.needs} <= {*NEEDS}


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_commands_and_options_exist(page):
    """Those of blocks that are not run as well."""
    unknown = []
    for text in codes(page):
        for found in _COMMAND.findall(text.replace("\\\n", " ")):
            given = found.partition(" -- ")[0].split()  # behind it stands another program's command
            if given and not given[0].startswith(("-", "…")) and given[0].isalpha() and given[0].islower():
                command = COMMANDS.commands.get(given[0])
                unknown += [given[0]] if command is None else [one for one in given if not has_option(command, one)]
    assert not unknown


def has_option(command: click.Command, word: str) -> bool:
    names = {name for parameter in command.params for name in parameter.opts}
    return not word.startswith("--") or word in {*names, "--help"}


def test_the_page_of_the_command_is_what_its_script_prints():
    done = subprocess.run(
        [sys.executable, PROJECT / "docs" / "print_cli.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout == (PROJECT / "docs" / "cli.md").read_text(), "run python docs/print_cli.py"


def test_extras_that_pip_shall_install_exist():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [re.findall(r"pip install [^\n]*?\[([a-z0-9,]+)\]", text) for text in ALL_CODES]
    named = [name for groups in found for group in groups for name in group.split(",")]
    assert named
    assert not set(named) - set(extras)


# Configuration and code.


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_yaml_can_be_parsed(block):
    assert list(yaml.safe_load_all(block.text))


def deployment() -> dict:
    """The specification of the pods in docs/kubernetes.md."""
    of_yaml = [block for block in blocks(PROJECT / "docs" / "kubernetes.md") if block.language == "yaml"]
    manifests = [manifest for block in of_yaml for manifest in yaml.safe_load_all(block.text)]
    (found,) = [manifest for manifest in manifests if manifest.get("kind") == "Deployment"]
    return found["spec"]["template"]["spec"]


def test_pods_have_more_time_to_end_than_cog_gives_its_worker():
    """10 s. Else Kubernetes kills the server while it publishes."""
    assert deployment()["terminationGracePeriodSeconds"] > 10


@pytest.mark.parametrize("status", ["STARTING", "READY", "BUSY", "UNHEALTHY", "SETUP_FAILED", "DEFUNCT"])
def test_the_probe_reads_the_answer_of_the_health_check(status):
    """Its HTTP status is 200 in each state."""
    (container,) = deployment()["containers"]
    (script,) = {container[f"{name}Probe"]["exec"]["command"][2] for name in ("startup", "readiness", "liveness")}
    answered = answer("200 OK", f'{{"status": "{status}"}}'.encode())
    with answering(answered) as served, pytest.raises(SystemExit) as ended:
        exec(compile(script.replace("http://127.0.0.1:5000", served.url), "probe", "exec"), {})
    assert int(ended.value.code) == (status not in ("READY", "BUSY"))


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_python_compiles_and_names_what_the_library_has(block):
    compile(block.text, str(block), "exec")
    assert not set(re.findall(r"\bcompile_cache\.(\w+)", block.text)) - set(compile_cache.__all__)


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_methods_of_a_boot_exist(page):
    named = {name for text in codes(page) for name in re.findall(r"(?<![\w/.])(?:self\.)?boot\.(\w+)(?!\w*=)", text)}
    assert not {name for name in named - {"py", "report", "weights"} if not hasattr(compile_cache.Boot, name)}


def test_metrics_exist():
    known = {text for text in texts() if text.startswith("compile_cache.")}
    modules = {path.stem for path in (PROJECT / "compile_cache").iterdir()}
    named = {name for text in ALL_CODES for name in re.findall(r"(?<!-m )compile_cache\.\w+", text)}
    other = {f"compile_cache.{name}" for name in (*compile_cache.__all__, *modules)}
    assert named & known
    assert not named - known - other


# Settings.


def test_the_pages_name_settings_that_exist():
    """The changelog also names those that are gone."""
    known = {PREFIX + name.upper() for name in Settings.__slots__}
    living = [page for page in pages() if page.name != "CHANGELOG.md"]
    named = {name for page in living for name in _VARIABLE.findall(page.read_text())}
    assert named
    assert not named - known


def test_settings_md_has_every_setting_with_its_default():
    defaults = {cells[0].strip("`"): cells[1] for cells in rows(PROJECT / "docs" / "settings.md", "variable")}
    for name in Settings.__slots__:
        text = defaults[PREFIX + name.upper()]
        value = text.strip("`") if text.startswith("`") else ""
        assert getattr(Settings.from_env({PREFIX + name.upper(): value}), name) == getattr(Settings(), name), name


# The log.


def warnings_of_the_source() -> set[str]:
    calls = re.compile(r"log\.warning\(\s*\"([a-z_]+\.[a-z_]+)[ \"]|logging\.WARNING,\s*\"([a-z_]+\.[a-z_]+) ")
    files = (PROJECT / "compile_cache").rglob("*.py")
    return {name for file in files for names in calls.findall(file.read_text()) for name in names if name}


def test_the_pages_have_every_warning_and_no_event_that_is_not_logged():
    symptoms = [cells[0] for header in ("the log says", "you see") for cells in rows(TROUBLESHOOTING, header)]
    named = symptoms + [cells[0] for cells in rows(PROJECT / "docs" / "reference.md", "event")]
    codes = {name for cell in named for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", cell)}
    listed = {name for name in codes if not name.startswith("compile_cache.")}  # those are metrics
    logged = {found[0] for text in texts() if (found := _EVENT.match(text))}
    assert "publish.failed" in warnings_of_the_source()
    assert not warnings_of_the_source() - listed
    assert not listed - logged


@pytest.mark.parametrize("header", ["the log says", "you see"])
def test_lines_quoted_as_symptoms_are_in_the_source(header):
    """Code in the first column is a text of this project; texts of other programs stand in quotation marks."""
    quoted = [text for cells in rows(TROUBLESHOOTING, header) for text in re.findall(r"`([^`]+)`", cells[0])]
    assert quoted
    assert not [text for text in quoted if not is_said(text)]


def test_lines_of_logs_have_the_form_that_the_source_gives_them():
    """Those of the report, and events."""
    line = re.compile(r"(?:restore: |region |precompiled: |lookups: |ready after |(?:background|publish|compile)\.)")
    shown = [one for block in ALL_BLOCKS if block.language == "" for one in block.text.splitlines() if line.match(one)]
    forms = [".*".join(map(re.escape, text.split("\0"))) for text in texts() if line.match(text)]
    assert shown
    assert not [one for one in shown if not any(re.fullmatch(form, one) for form in forms)]


def is_said(text: str) -> bool:
    """Whether one text of the source has all parts of `text`, in their order; `…` and the settings' prefix
    are put in."""
    parts = [re.escape(part.strip()) for part in text.replace(PREFIX, "…").split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(one) for one in texts())


# Links and length.


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(PROJECT).as_posix())
def test_no_link_is_broken(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_of_docs_is_linked_from_another():
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in pages() for link in links(page)}
    assert not set(PROJECT.glob("docs/*.md")) - linked


def test_the_readme_is_read_in_five_minutes():
    assert words(PROJECT / "README.md") <= 900
