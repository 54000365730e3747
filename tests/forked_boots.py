"""Fork a process for each boot that a line of stdin asks for; boots.py starts this and writes the lines.

To import torch and its compiler, and to compile for the first time, takes longer than everything else in a boot of the
toy model. Both are done here, without anything of compile_cache. A boot still has a process of its own: its
environment, its locks, its exit hooks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import socket
import sys
import threading
from typing import Any

import second_processes


def requested_boot() -> dict[str, Any]:
    """Return in each forked process, with its request; in the parent, answer with the exit status of each boot."""
    second_processes.use_compiler()
    second_processes.fork_parent(socket.socket(fileno=int(sys.argv.pop())))
    gc.freeze()  # else each child's collections copy the memory of all imported modules
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            return json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Take the environment, the folder, the arguments and the output files of `request`."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    sys.path[:] = [request["folder"], *request["path"]]
    sys.argv[1:] = request["arguments"]
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    request = requested_boot()
    become(request)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    second_processes.fork_parent(theirs, ours)
    importlib.import_module("compile_cache.child_process")._spawn = second_processes.fork
    publisher = importlib.import_module("compile_cache.lifecycle.publisher")
    publisher._QUIET_S = publisher._SPREAD_S = 0.1  # a boot that waits until all is stored waits for nobody else
    importlib.import_module(request["program"]).main()
    # An exit waits for threads and calls its hooks. Then it takes torch apart, for 0.3 seconds in a fork. That is left
    # out, unless there are threads that it could disturb.
    threading._shutdown(), atexit._run_exitfuncs(), sys.stdout.flush(), sys.stderr.flush()
    if threading.active_count() == 1:
        os._exit(0)
