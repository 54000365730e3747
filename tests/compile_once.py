"""A C++ compiler that compiles nothing twice: what `g++` is for the tests and all the processes that they start.

    compile_once.py FOLDER COMPILER ARGUMENTS

Two boots compile the same kernels, and each kernel begins with the same megabytes of torch's headers: parsing them is
three quarters of a compile. Results are kept in FOLDER, under digests of the arguments and of the source, and so are
the headers, precompiled, from the third kernel with the same arguments on. conftest.py names FOLDER by all else that a
result depends on, so it serves later runs of the suite too.

No test measures speed or needs a debugger, so kernels are compiled with -O1 and -g0. gold, where it is installed, links
in a third of the time. Most of that is reading the symbols of torch's large libraries: kernels are linked with libtorch
alone, which is empty and needs the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

_HEADER = "torch/csrc/inductor/cpp_prefix.h"
_KERNELS_WITHOUT_HEADER = 2
_INSTEAD = {"-O3": "-O1", "-g1": "-g0"}
_LARGE_LIBRARIES = ("-ltorch_cpu", "-ltorch_python")


def main() -> int:
    folder, compiler, *arguments = sys.argv[1:]
    output = Path(arguments[arguments.index("-o") + 1])
    sources = [argument for argument in arguments if argument.endswith(".cpp")]
    if len(sources) != 1 or "-shared" not in arguments:
        return subprocess.call([compiler, *arguments])
    content = Path(sources[0]).read_bytes()
    options = [argument for argument in arguments if argument not in (sources[0], "-o", str(output))]
    options = [_INSTEAD.get(option) or _resolved(option) for option in options]
    is_kernel = _HEADER.encode() in content
    kind = Path(folder, hashlib.sha256(repr(options).encode()).hexdigest()[:16])
    known = Path(f"{kind}.{hashlib.sha256(content).hexdigest()}.{'kernel' if is_kernel else 'other'}")
    if not known.exists():
        header = _precompiled_header(kind.with_suffix(".h"), compiler, options) if is_kernel else []
        made = known.with_suffix(f".{os.getpid()}.so")
        linker = ["-fuse-ld=gold"] if Path(compiler).with_name("ld.gold").exists() else []
        linked = [option for option in options if option not in _LARGE_LIBRARIES]
        command = [compiler, *linker, "-Wl,--no-as-needed", *header, sources[0], *linked, "-o", str(made)]
        failure = subprocess.call(command)
        if failure:
            return failure
        made.replace(known)
    output.write_bytes(known.read_bytes())
    output.chmod(0o755)
    return 0


def _resolved(option: str) -> str:
    """A folder without links: worktrees with a link to the same environment have the same options."""
    return option[:2] + os.path.realpath(option[2:]) if option.startswith(("-I/", "-L/")) else option


def _precompiled_header(header: Path, compiler: str, options: list[str]) -> list[str]:
    """The options with which a kernel is compiled on top of the precompiled header; none before the third kernel."""
    made = header.with_suffix(".h.gch")
    if not made.exists():
        if len(list(header.parent.glob(f"{header.stem}.*.kernel"))) < _KERNELS_WITHOUT_HEADER:
            return []
        with header.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not made.exists():
                _precompile(header, compiler, options)
    return ["-include", str(header)] if made.exists() else []


def _precompile(header: Path, compiler: str, options: list[str]) -> None:
    header.write_text(f"#include <{_HEADER}>\n")
    made = header.with_suffix(".partial")
    own = [option for option in options if option != "-shared" and not option.startswith(("-l", "-L"))]
    if subprocess.call([compiler, "-x", "c++-header", str(header), *own, "-o", str(made)]) == 0:
        made.replace(header.with_suffix(".h.gch"))


if __name__ == "__main__":
    sys.exit(main())
