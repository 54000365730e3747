"""Second processes that are forked from one that has torch's compiler, and has used it: 4 seconds less for each.

A process that starts second processes has a parent for them, which is a fork of forked_boots.py or of a boot, and has
one thread. It forks one for each request. The tests of the start itself, and of kills, start second processes as the
library does.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping
from unittest import mock

from boots import forking_process, read_by_imports

# What the library gives each second process; of the other variables that imports read, the parent has the same.
_OWN = {"TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"}
_MOST_BYTES = 1 << 18
_PR_SET_CHILD_SUBREAPER = 36
_ASKING = threading.Lock()
_PARENT: list[socket.socket] = []


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A second process that was forked: a child of this process, as a started one is."""

    def __init__(self, pid: int) -> None:
        self.args, self.pid, self.returncode = "a second process", pid, None
        self.stdin = self.stdout = self.stderr = None
        self._child_created, self._waitpid_lock = True, threading.Lock()


def fork(target: str, own: tuple[int, int], output: int, environ: Mapping[str, str], passed: object = ()) -> Forked:
    """What `_spawn` of compile_cache/child_process.py does for second processes."""
    assert target.startswith("compile_cache.background.")
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # Each second process imports those that its server has, in 0.7 seconds.
    packages = [name for name in ("diffusers", "transformers") if name in sys.modules]
    request = json.dumps({"server": os.getpid(), "path": path, "environ": dict(environ), "packages": packages})
    adopt = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_CHILD_SUBREAPER)
    with _ASKING:
        channel = _PARENT[0] if _PARENT else forking_process()[1]
        adopt(1)  # the new process's own parent ends at once
        socket.send_fds(channel, [request.encode()], [*own, output])
        pid = int(channel.recv(_MOST_BYTES))
        adopt(0)
    return Forked(pid)


def fork_parent(theirs: socket.socket, ours: socket.socket | None = None) -> None:
    """Let the parent be a fork of this process, which has one thread and the compiler. It ends with the other end of
    `theirs`: `ours`, if it is this process that asks."""
    if os.fork() == 0:
        if ours is not None:
            ours.close()
        serve(theirs)
    theirs.close()
    if ours is not None:
        _PARENT.append(ours)


def use_compiler() -> None:
    """Compile a function. It takes a second, mostly for what a process makes once, and its forks then have. It has no
    C++: a process keeps libraries that all kernels share, and a fork would not put them into its own cache directory.
    What compiling C++, and the library, import of other packages is imported here too.
    """
    import torch.utils.cpp_extension
    from torch._dynamo.utils import counters
    from tqdm import tqdm

    list(map(importlib.import_module, ("msgspec", "sympy.physics.units", "sympy.tensor.tensor", "zstandard")))
    tqdm.monitor_interval = 0  # else it starts a thread
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # it writes a cache full for a figure of a log
    names = torch._dynamo.funcname_cache  # it tokenizes whole files for a header of a log
    names._add_file = lambda file: names.cache.setdefault(file, {})
    for finalizer in weakref.finalize._registry:  # of torch's libraries, whose end no process needs
        finalizer.atexit = False
    x = torch.ones(4, 4)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        with torch._inductor.config.patch(compile_threads=1), torch.inference_mode():
            torch.compile(lambda x: torch.mm(x, x))(x)
        torch._dynamo.reset()
    counters.clear()
    assert torch.get_num_threads() == threading.active_count() == 1, "threads do not survive a fork"


def serve(channel: socket.socket) -> None:
    """Fork for each request, until nobody can send one. What the server has imported is imported here, once."""
    while True:
        content, passed, _, _ = socket.recv_fds(channel, _MOST_BYTES, 3)
        if not content:
            os._exit(0)
        request = json.loads(content)
        sys.path[:] = request["path"]
        for name in request["packages"]:
            importlib.import_module(name)
        gc.freeze()  # else each child's collections copy the memory of all imported modules
        if pid := _fork_twice():
            channel.send(str(pid).encode())
            for number in passed:
                os.close(number)
        else:
            channel.close()
            _become(request, *passed)


def _fork_twice() -> int:
    """The new process's number; 0 in it, once its parent is the process that asked for it."""
    read, write = os.pipe()
    if os.fork():
        os.close(write)
        os.wait()
        with open(read) as file:
            return int(file.read())
    between = os.getpid()
    if pid := os.fork():
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(read)
    os.close(write)
    while os.getppid() == between:
        time.sleep(0.001)
    return 0


def _become(request: dict, channel: int, watched: int, output: int) -> None:
    """Go on as the program that `_spawn` starts."""
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    assert not (changed := read_by_imports(request["environ"]) - _OWN), f"a forked process does not see {changed}"
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    target = "compile_cache.background.child_main:serve"
    sys.argv[:] = ["-c", target, str(request["server"]), str(channel), str(watched)]
    sys.modules["__main__"] = types.ModuleType("__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    child = importlib.import_module("compile_cache.background.child_main")
    child._give_way = lambda hurries: None  # beside other tests, a process of low priority waits for minutes
    importlib.import_module("compile_cache.child_process").main()
