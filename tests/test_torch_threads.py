"""The exit waits for threads that call torch, but not for long. test_background_faults.py has those of a boot."""

from __future__ import annotations

import subprocess

from programs import run_program

ENDING = """
import logging, threading, time
from compile_cache import torch_threads
logging.basicConfig(level=logging.INFO)
torch_threads._LONGEST_WAIT_S = {wait_s}
stopped = threading.Event()
def work():
    stopped.wait()
    time.sleep({more_s})
    print("ended", flush=True)
thread = threading.Thread(target=work, name="worker", daemon=True)
torch_threads.end_at_exit(thread, stopped.set)
thread.start()
"""


def end(wait_s: float, more_s: float) -> subprocess.CompletedProcess[str]:
    return run_program(ENDING.format(wait_s=wait_s, more_s=more_s))


def test_the_exit_stops_a_thread_and_waits_until_it_has_ended():
    done = end(wait_s=50, more_s=0.1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_the_exit_does_not_wait_longer_and_names_the_thread():
    done = end(wait_s=0.1, more_s=50)
    assert (done.returncode, done.stdout) == (0, "")
    assert "exit.thread_left name=worker" in done.stderr
