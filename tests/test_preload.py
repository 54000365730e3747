"""Preloading: the thread loads what was restored; the thread that boots does the imports of torch's compiler."""

from __future__ import annotations

import json
import subprocess
import sys

from boots import TESTS, boot_once, settings

# Runs a boot, and names the modules of torch's compiler that each thread has imported.
AUDITED = """
import runpy, sys, threading
imported = {}
def hook(event, args):
    if event == "import" and args[0].startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")):
        imported.setdefault(threading.current_thread().name, []).append(args[0])
sys.addaudithook(hook)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("IMPORTED", imported.get("compile-cache-preload", []), file=sys.stderr)
"""


def test_the_thread_that_loads_imports_nothing_of_torchs_compiler(tmp_path):
    environ = settings(tmp_path)
    boot_once(environ, forked=False)
    command = [sys.executable, "-c", AUDITED, str(TESTS / "boot_once.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED []" in done.stderr, done.stderr[done.stderr.index("IMPORTED") :]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {region["step"] for region in report["regions"]} == {"precompiled"}
    names = [span["name"] for span in report["spans"] if span["lane"] == "preload"]
    assert names == ["import torch's loader", "load"]
