"""The compiling process ends with its server, however that ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from boots import python_path
from marked_processes import PATIENCE_S, Marked, shared_memory, wait_for
from namespaces import in_container

SERVER = Path(__file__).with_name("background_server.py")
KILLS = int(os.environ.get("KILLS", "10"))  # `make soak` has more
SIDE_BY_SIDE = 10
# From before the server has imported its modules to after its process is at work, on two busy cores.
LONGEST_LIFE_S = 4.0


def serve(folder: Path, marked: Marked, mode: str, *wrapper: str, life_s: str = "") -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [*wrapper, sys.executable, str(SERVER), str(folder), mode, *filter(None, [life_s])]
    environ = {**marked.environ, "PYTHONPATH": python_path(*filter(None, sys.path))}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_process_ends_with_a_killed_server(tmp_path, marked, number):
    before = shared_memory()
    with serve(tmp_path, marked, "hang") as server, marked:
        assert server.stdout.readline() == "at work 0\n"
        wait_for(lambda: len(marked.pids()) > 3)
        server.send_signal(number)
        wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_process_ends_with_its_server_while_c_code_holds_pythons_lock(tmp_path, marked):
    """No thread of the process can look at its server then: the kernel ends it."""
    with serve(tmp_path, marked, "hold_the_lock") as server, marked:
        server.stdout.readline()
        server.kill()
        wait_for(lambda: not marked.pids())


def test_process_ends_with_its_server_although_a_fork_keeps_its_files_open(tmp_path, marked):
    with serve(tmp_path, marked, "fork") as server, marked:
        fork = int(server.stdout.readline().split()[-1])
        server.kill()
        server.wait()
        wait_for(lambda: marked.pids() <= {fork})
        assert marked.pids() == {fork}
        os.kill(fork, signal.SIGKILL)


def test_nothing_is_left_of_servers_killed_at_any_moment(tmp_path, marked):
    source = random.Random(KILLS)
    before = shared_memory()
    for number in range(0, KILLS, SIDE_BY_SIDE):
        indices = range(number, number + SIDE_BY_SIDE)
        servers = [serve(tmp_path / str(index), marked, "restless") for index in indices]
        lives_s = sorted(source.uniform(0.0, LONGEST_LIFE_S) for _ in servers)
        started = time.monotonic()
        for server, life_s in zip(servers, lives_s, strict=True):
            time.sleep(max(0.0, started + life_s - time.monotonic()))
            if server is servers[-1]:
                wait_for(lambda: any(tmp_path.glob("*/hangs")))  # else none has lived until its process was at work
            server.kill()
        for server in servers:
            server.wait()
            server.stdout.close()
        wait_for(lambda: not marked.pids() and not shared_memory() - before)


def test_nothing_is_left_in_a_container_whose_first_process_lives_on(tmp_path, marked):
    """As when the kernel kills Cog's worker for its memory: tini and Cog's server stay."""
    wrapper = in_container()
    script = """
        "$@" & wait
        touch "$FOLDER/ended"
        while [ ! -e "$FOLDER/looked" ]; do sleep 0.1; done
    """
    before = shared_memory()
    marked_container = Marked()
    for index, life_s in enumerate(random.Random(KILLS).uniform(0.0, LONGEST_LIFE_S) for _ in range(KILLS // 5)):
        folder = tmp_path / str(index)
        # The variable of `marked` is the server's alone, and not that of the processes around it.
        inner = ["env", f"BACKGROUND_TEST={marked.environ['BACKGROUND_TEST']}"]
        shell = ["env", f"FOLDER={folder}", *wrapper, "sh", "-c", script, "sh", *inner]
        server = serve(folder, marked_container, "restless", *shell, life_s=str(life_s))
        try:
            wait_for((folder / "ended").exists)
            wait_for(lambda: not marked.pids() and not shared_memory() - before)
            assert server.poll() is None, "the container ended with its server"
        finally:
            (folder / "looked").touch()
            server.wait(PATIENCE_S)
            server.stdout.close()
            marked_container.kill()
