"""The cache directory: one owner each, empty at first, and what in it is an artifact."""

from __future__ import annotations

import functools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import write_files
from namespaces import as_nobody

from compile_cache.errors import CacheDirectoryError
from compile_cache.storage.directory import CacheDirectory, logical_key

CLAIM_AND_WAIT = """
import sys
from pathlib import Path
from compile_cache.storage.directory import CacheDirectory
print(CacheDirectory.claim(Path(sys.argv[1])).path.name, flush=True)
sys.stdin.read()
"""
CLAIM_AND_LEAVE_A_CHILD = """
import subprocess, sys
from pathlib import Path
from compile_cache.storage.directory import CacheDirectory
directory = CacheDirectory.claim(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], close_fds=False)
print(child.pid, flush=True)
"""


@contextmanager
def running(program: str, *arguments: object, **environ: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs a program until its standard input ends, and the first line that it prints."""
    command, pipes = [sys.executable, "-c", program, *map(str, arguments)], {"text": True, "stdin": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **environ}, stdout=subprocess.PIPE, **pipes) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


owner = functools.partial(running, CLAIM_AND_WAIT)  # a process that owns a directory in a folder, and its name


def test_each_claim_gets_the_next_path_and_leaves_the_others_files_alone(tmp_path):
    with owner(tmp_path) as (_, first), owner(tmp_path) as (_, second):
        assert (first, second) == ("0", "1")
        (tmp_path / "0" / "artifact").write_text("kept")
        claimed = [CacheDirectory.claim(tmp_path), CacheDirectory.claim(tmp_path)]
        assert [directory.path.name for directory in claimed] == ["2", "3"]
        assert (tmp_path / "0" / "artifact").read_text() == "kept"


def test_a_process_that_is_killed_owns_nothing_any_more(tmp_path):
    with owner(tmp_path) as (process, name):
        process.send_signal(signal.SIGKILL)
        process.wait()
        (tmp_path / "0" / "half-written").write_text("x")
        with owner(tmp_path) as (_, next_name):
            assert next_name == name == "0"
            assert list((tmp_path / "0").iterdir()) == []


def test_a_child_that_outlives_the_owner_does_not_own_the_directory(tmp_path):
    with running(CLAIM_AND_LEAVE_A_CHILD, tmp_path) as (process, child):
        assert int(child) > 0
        process.wait()
        assert CacheDirectory.claim(tmp_path).path.name == "0"


def test_the_folders_above_a_claimed_directory_are_made_and_what_was_left_over_is_removed(tmp_path):
    root = tmp_path / "a" / "b"
    write_files(root, {f"{folder}/deep/file": b"left over" for folder in ("0", "0.inbox", "0.outbox")})
    directory = CacheDirectory.claim(root)
    assert directory.path == root / "0"
    assert [list(folder.iterdir()) for folder in (directory.path, directory.inbox, directory.outbox)] == [[]] * 3
    assert CacheDirectory.claim(tmp_path / "c" / "d").path.is_dir()


@pytest.mark.parametrize("in_the_way", ["", "0", "0.inbox", "0.outbox"])
def test_a_file_in_the_way_is_a_cache_directory_error_that_names_the_remedy(tmp_path, in_the_way):
    root = tmp_path / "root"
    file = root / in_the_way
    write_files(root, {in_the_way: b"in the way"})
    with pytest.raises(CacheDirectoryError, match="Set COMPILE_CACHE_DIR to a writable folder") as caught:
        CacheDirectory.claim(root)
    assert str(root) in str(caught.value)
    assert file.read_text() == "in the way"
    file.unlink()
    assert CacheDirectory.claim(root).path.name == "0"  # a claim that failed owns nothing
    with pytest.raises(CacheDirectoryError, match="/proc/compile-cache cannot be used"):
        CacheDirectory.claim(Path("/proc/compile-cache"))  # a file system that cannot be written


def test_a_folder_without_access_is_a_cache_directory_error(tmp_path):
    (tmp_path / "root").mkdir(mode=0o500)
    with as_nobody(), pytest.raises(CacheDirectoryError, match="Set COMPILE_CACHE_DIR to a writable folder"):
        CacheDirectory.claim(tmp_path / "root")


def test_a_link_in_the_way_is_refused_and_what_it_points_to_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_files(elsewhere, {"file": b"not ours"})
    root = tmp_path / "root"
    root.mkdir()
    (root / "0").symlink_to(elsewhere)
    with pytest.raises(CacheDirectoryError):
        CacheDirectory.claim(root)
    assert (elsewhere / "file").read_text() == "not ours"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o700, 0o755, 0o777])
def test_nobody_but_the_owner_may_enter_the_cache_directory(tmp_path, before):
    root = tmp_path / "root"
    tmp_path.chmod(0o1777)  # where everybody may write
    if before is not None:
        root.mkdir()
        root.chmod(before)
    directory = CacheDirectory.claim(root)
    assert {mode(path) for path in (root, directory.path, directory.inbox)} == {0o700}


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")


@as_root
def test_a_folder_of_another_user_is_refused_by_name_with_a_remedy(tmp_path):
    """Its owner could change code that was verified."""
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with pytest.raises(CacheDirectoryError, match=r"root belongs to user 12345.*COMPILE_CACHE_DIR"):
        CacheDirectory.claim(root)
    assert list(root.iterdir()) == []


@as_root
@pytest.mark.parametrize("theirs", ["link", "target"])
def test_a_link_is_followed_only_where_link_and_target_are_ours(tmp_path, theirs):
    paths = {"link": tmp_path / "root", "target": tmp_path / "target"}
    paths["target"].mkdir()
    paths["link"].symlink_to(paths["target"])
    assert CacheDirectory.claim(paths["link"]).path.is_dir()
    os.chown(paths[theirs], 12345, -1, follow_symlinks=False)
    with pytest.raises(CacheDirectoryError, match="belongs to user 12345"):
        CacheDirectory.claim(paths["link"])


@pytest.mark.parametrize("before", [0o755, 0o1777, 0o777, 0o720, 0o770, 0o702], ids=oct)
def test_a_folder_of_other_things_keeps_its_mode_and_is_refused_where_others_can_replace_ours(tmp_path, before):
    """COMPILE_CACHE_DIR=/tmp must not shut everybody else out."""
    root = tmp_path / "root"
    write_files(root, {"notes.txt": b"not ours"})
    root.chmod(before)
    if before not in (0o755, 0o1777):
        with pytest.raises(CacheDirectoryError, match=r"other users can write to the cache directory.*COMPILE_CACHE"):
            CacheDirectory.claim(root)
    else:
        assert mode(CacheDirectory.claim(root).path) == 0o700
    assert mode(root) == before


def test_more_owners_than_directories_is_a_cache_directory_error(tmp_path, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.directory._MOST_DIRECTORIES", 2)
    owners = [CacheDirectory.claim(tmp_path), CacheDirectory.claim(tmp_path)]
    with pytest.raises(CacheDirectoryError, match="2 processes already own"):
        CacheDirectory.claim(tmp_path)
    assert len(owners) == 2


def test_activation_points_inductor_and_triton_into_the_directory(tmp_path):
    directory, environ = CacheDirectory.claim(tmp_path), {"TRITON_CACHE_DIR": "/elsewhere"}
    directory.activate(environ)
    assert environ == {
        "TORCHINDUCTOR_CACHE_DIR": str(directory.path),
        "TRITON_CACHE_DIR": str(directory.path / "triton"),
    }


def test_a_scan_finds_every_artifact_with_its_time_and_no_locks_files_still_being_written_or_links(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write_files(elsewhere, {"file": b"not ours"})
    directory = CacheDirectory.claim(tmp_path / "root")
    assert directory.scan() == {}
    (directory.path / "folder").symlink_to(elsewhere)
    (directory.path / "file").symlink_to(elsewhere / "file")
    artifacts = ["fxgraph/ab/abc/content", "x.so", "triton/ABC/kernel.cubin"]
    locks = ["locks/abc.lock", "deep/locks/abc", "abc.lock", "precompiled/header.h.gch", "server.pid", ".hidden"]
    unfinished = ["ab/abc.tmp", "ab/abc.tmp.pid_1_2", "ab/.1.2.tmp", "triton/tmp.pid_1_2/kernel.cubin"]
    kept = ["c7abc.py", "kernel.so", "a.tmpl", "locksmith", "tmp.txt"]
    write_files(directory.path, dict.fromkeys([*locks, *unfinished, *kept], b""))
    write_files(directory.path, dict.fromkeys(artifacts, b"an artifact"))
    found = directory.scan()
    assert found.keys() == {*artifacts, *kept}
    assert found["x.so"] == (directory.path / "x.so").stat().st_mtime_ns


# What may be published.


def test_what_was_withdrawn_with_its_owner_is_never_ready(tmp_path):
    ledger = CacheDirectory.claim(tmp_path).ledger
    ledger.plant({"seed": "seed", "seed.so": "seed", "other": "other", "nobody's": ""})
    ledger.expect(["restored"])
    ledger.hand_over(["one", "one.so"], "one", 60)
    ledger.use("seed")
    for owner in ("one", "seed", "restored", "Class"):
        ledger.withdraw(owner)
    ledger.release("one")
    assert ledger.ready(is_ending=True) == {"nobody's": ""}
    assert ledger.withheld == {"one", "one.so", "seed", "seed.so", "restored"}


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("fxgraph/ab/fabc/content", "fxgraph/fabc"),
        ("fxgraph/ab/fabc/other", "fxgraph/fabc"),
        ("aotautograd/aabc/content", "aotautograd/aabc"),
        ("aotautograd/aabc/deep/content", "aotautograd/aabc/deep/content"),
        *((path, path) for path in ("fxgraph/ab/file", "ab/cabc.py", "triton/ABC/kernel.cubin", "file", "fxgraph")),
    ],
)
def test_a_graphs_logical_key_is_what_it_is_for_and_any_other_files_is_its_path(path, key):
    assert logical_key(path) == key
