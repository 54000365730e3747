"""The model's version: it follows what a compiled graph was made from, and nothing else."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import constants
from machines import write_files
from programs import run_program

from compile_cache.key.model_version import has_common_name, model_name, model_version, split_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = json.dumps({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()

PRINT_VERSION = """
from compile_cache.key.model_version import model_version
print(model_version("org/name@some-branch", ()))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model's folder in the layout of a diffusers pipeline."""
    model = tmp_path / "my-model"
    configs = {"model_index.json": b"{}", "transformer/config.json": b'{"layers": 2}'}
    write_files(model, {**configs, "extra.bin": b"weights"})
    write_safetensors(model / "transformer" / "model.safetensors", HEADER, b"\0" * 16)
    return model


@pytest.fixture
def source(tmp_path) -> Path:
    """The project's own code: a package."""
    package = tmp_path / "package"
    write_files(package, {"model.py": b"x = 1\n"})
    return package


def write_safetensors(path: Path, header: bytes, content: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)


def version(folder: Path | str, *sources: Path) -> str:
    return model_version(str(folder), sources)


def bytes_read() -> int:
    """Bytes that this process has read from files so far, page cache included (proc(5), io)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_the_version_is_a_digest_that_stays_wherever_the_folder_is(folder, tmp_path):
    before = version(folder)
    assert len(before) == 32
    assert version(folder) == version(folder.rename(tmp_path / "elsewhere")) == before


CHANGES = {
    "a changed config": lambda folder: (folder / "transformer" / "config.json").write_text('{"layers": 3}'),
    "a new file": lambda folder: (folder / "scheduler.json").write_text("{}"),
    "a renamed file": lambda folder: (folder / "model_index.json").rename(folder / "index.json"),
    "weights of another size": lambda folder: (folder / "extra.bin").write_bytes(b"more weights"),
    "another safetensors header": lambda folder: write_safetensors(
        folder / "transformer" / "model.safetensors", HEADER.replace(b"F32", b"I32"), b"\0" * 16
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_model_is_another_version(folder, change):
    before = version(folder)
    change(folder)
    assert version(folder) != before


def test_other_numbers_in_the_same_tensors_are_the_same_version(folder):
    before = version(folder)
    write_safetensors(folder / "transformer" / "model.safetensors", HEADER, b"\1" * 16)
    (folder / "extra.bin").write_bytes(b"WEIGHTS")
    assert version(folder) == before


def test_of_fifty_gigabytes_of_weights_only_the_header_is_read(folder):
    large = folder / "large.safetensors"
    write_safetensors(large, HEADER, b"")
    os.truncate(large, 50 * 1024**3)
    before = bytes_read()
    version(folder)
    assert bytes_read() - before < 1024**2


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 8, b"version https://git-lfs.github.com/spec/v1\n"])
def test_weights_that_are_not_safetensors_inside_still_have_a_version(folder, content):
    (folder / "odd.safetensors").write_bytes(content)
    os.mkfifo(folder / "pipe.json")  # which is not read
    assert len(version(folder)) == 32


@pytest.mark.parametrize(
    "name",
    [
        *(f"my-model/{name}" for name in (".DS_Store", ".cache/x.json", "__pycache__/x.pyc", "transformer/.git/HEAD")),
        *(f"package/{name}" for name in ("__pycache__/model.cpython-312.pyc", "notes.txt", ".hidden.py")),
    ],
)
def test_hidden_files_and_bytecode_and_other_files_beside_source_do_not_count(folder, source, tmp_path, name):
    before = version(folder, source)
    write_files(tmp_path, {name: b"anything"})
    assert version(folder, source) == before


@pytest.mark.parametrize(("given", "changed"), [("", "model.py"), ("model.py", "model.py"), ("", "deeper/block.py")])
def test_changed_or_new_source_in_a_folder_or_file_is_another_version(folder, source, given, changed):
    before = version(folder, source / given)
    write_files(source, {changed: b"x = 2\n"})
    assert version(folder, source / given) != before


def test_a_source_has_the_same_name_however_its_path_is_written(folder, source, monkeypatch):
    monkeypatch.chdir(source)
    assert version(folder, Path()) == version(folder, source) == version(folder, source.parent / "." / source.name)


def test_another_version_of_a_traced_package_is_another_version(folder, tmp_path, monkeypatch):
    before = version(folder)
    metadata = b"Metadata-Version: 2.1\nName: diffusers\nVersion: 99.0\n"
    write_files(tmp_path / "site", {"diffusers-99.0.dist-info/METADATA": metadata})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert version(folder) != before


def test_a_folder_is_named_by_its_own_name_and_a_hub_id_without_its_revision(folder):
    assert model_name(str(folder)) == model_name(f"{folder}/") == "my-model"
    assert model_name("org/name@main") == "org/name"


def test_a_revision_stands_after_the_at_sign_that_is_not_of_a_folders_name(tmp_path):
    assert split_revision("org/name@v1") == ("org/name", "v1")
    assert split_revision("org/name") == ("org/name", None)
    assert split_revision("org/name@") == ("org/name", None)
    folder = tmp_path / "model@home"
    folder.mkdir()
    assert split_revision(str(folder)) == (str(folder), None)


def test_hub_ids_at_different_commits_are_different_versions():
    ids = (f"org/name@{COMMIT}", f"org/name@{COMMIT[::-1]}", f"org/other@{COMMIT}")
    assert len({version(each) for each in (*ids, *ids)}) == 3


@pytest.fixture
def references(tmp_path, monkeypatch) -> Path:
    """The revisions of `org/name` in the local hub cache, which has the snapshot of a commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--name" / "snapshots" / COMMIT).mkdir(parents=True)
    return tmp_path / "models--org--name" / "refs"


@pytest.mark.parametrize("revision", ["main", "refs/pr/1"])
def test_a_downloaded_revision_is_the_commit_in_the_local_hub_cache(references, revision):
    write_files(references, {revision: COMMIT.encode()})
    assert version(f"org/name@{revision}") == version(f"org/name@{COMMIT}")


def test_the_default_revision_is_main(references):
    write_files(references, {"main": COMMIT.encode()})
    assert version("org/name") == version(f"org/name@{COMMIT}")


@pytest.mark.parametrize("lacking", ["import socket; socket.socket", "import sys; sys.modules['huggingface_hub']"])
def test_a_hub_id_that_is_not_downloaded_stands_for_itself_and_nobody_is_asked(tmp_path, lacking):
    """Also without huggingface_hub: the library requires torch and zstandard only."""
    done = run_program(f"{lacking} = None\n{PRINT_VERSION}", HF_HUB_OFFLINE=None, HF_HOME=str(tmp_path))
    assert done.stdout.strip() == version("org/name@some-branch"), done.stderr


# Links.


def linked(folder: Path, name: str, target: Path) -> Path:
    (folder / name).symlink_to(target)
    return folder


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder outside the model's, as a component that several models share."""
    folder = tmp_path / "elsewhere"
    write_files(folder, {"config.json": b"{}", "block.py": b"x = 1\n"})
    return folder


@pytest.mark.parametrize("changed", ["config.json", "block.py"])
def test_a_linked_component_or_package_of_the_source_is_part_of_the_version(folder, source, elsewhere, changed):
    linked(folder if changed == "config.json" else source, "shared", elsewhere)
    before = version(folder, source)
    (elsewhere / changed).write_text("changed")
    assert version(folder, source) != before


def test_a_link_has_the_version_of_a_copy(folder, elsewhere, tmp_path):
    before = version(linked(folder, "vae", elsewhere))
    (folder / "vae").unlink()
    elsewhere.rename(folder / "vae")
    assert version(folder) == before


def test_links_in_a_loop_are_followed_once(folder, source):
    linked(folder, "again", folder)
    linked(source, "again", source.parent)
    assert version(folder, source) == version(folder, source)


def test_a_second_link_to_a_folder_is_part_of_the_version_by_its_name(folder, elsewhere):
    before = version(linked(folder, "vae", elsewhere))
    assert version(linked(folder, "vae_2", elsewhere)) != before


@pytest.mark.parametrize("name", ["extra.safetensors", "config.json", "block.py", "itself"])
def test_a_link_to_nowhere_counts_by_its_name(folder, source, name):
    before = version(folder, source)
    linked(folder, name, folder / name if name == "itself" else Path("/nowhere"))
    linked(source, name, Path("/nowhere"))
    assert version(folder, source) != before
    (folder / name).unlink()
    (source / name).unlink()
    assert version(folder, source) == before


# Names.


@pytest.mark.parametrize("name", ["my-classifier", "my-classifier@v2", "/nowhere/weights", "a/b/c", "my classifier/v2"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_asked_of_nobody(monkeypatch, source, name):
    hub = Hub("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    before = version(name, source)
    (source / "model.py").write_text("x = 2\n")
    assert version(name, source) != before
    assert hub.asked == []


class Hub(ModuleType):
    """Stands for huggingface_hub, and notes what is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.asked.append(name)
        raise AttributeError(name)


@pytest.mark.parametrize("name", ["weights", "Model", "checkpoints", "src", COMMIT])
def test_a_folder_that_is_called_as_many_are_is_told_apart_and_a_hub_id_is_none(tmp_path, name):
    (tmp_path / name).mkdir()
    assert has_common_name(str(tmp_path / name))
    assert not has_common_name(str(tmp_path))
    assert not has_common_name(f"weights@{COMMIT}")


def test_another_revision_of_a_name_that_is_no_hub_id_is_another_version(source):
    assert len({version(name, source) for name in ("flux", "flux@1", "flux@2")}) == 3
