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

# Few imports: most calls only copy a file, and pathlib and subprocess would be more than half of what they take.
import fcntl
import hashlib
import os
import sys

_HEADER = "torch/csrc/inductor/cpp_prefix.h"
_KERNELS_WITHOUT_HEADER = 2
_INSTEAD = {"-O3": "-O1", "-g1": "-g0"}
_LARGE_LIBRARIES = ("-ltorch_cpu", "-ltorch_python")


def main() -> int:
    folder, compiler, *arguments = sys.argv[1:]
    output = arguments[arguments.index("-o") + 1]
    sources = [argument for argument in arguments if argument.endswith(".cpp")]
    if len(sources) != 1 or "-shared" not in arguments:
        return _compile(compiler, arguments)
    with open(sources[0], "rb") as file:
        content = file.read()
    options = [argument for argument in arguments if argument not in (sources[0], "-o", output)]
    options = [_INSTEAD.get(option) or _resolved(option) for option in options]
    is_kernel = _HEADER.encode() in content
    kind = f"{folder}/{hashlib.sha256(repr(options).encode()).hexdigest()[:16]}"
    known = f"{kind}.{hashlib.sha256(content).hexdigest()}.{'kernel' if is_kernel else 'other'}"
    if not os.path.exists(known):
        header = _precompiled_header(f"{kind}.h", compiler, options) if is_kernel else []
        made = f"{known}.{os.getpid()}.so"
        linker = ["-fuse-ld=gold"] if os.path.exists(f"{os.path.dirname(compiler)}/ld.gold") else []
        linked = [option for option in options if option not in _LARGE_LIBRARIES]
        command = [*linker, "-Wl,--no-as-needed", *header, sources[0], *linked, "-o", made]
        if failure := _compile(compiler, command):
            return failure
        os.replace(made, known)
    with open(known, "rb") as source, open(output, "wb") as target:
        target.write(source.read())
    os.chmod(output, 0o755)
    return 0


def _compile(compiler: str, arguments: list[str]) -> int:
    return os.spawnv(os.P_WAIT, compiler, [compiler, *arguments])


def _resolved(option: str) -> str:
    """A folder without links: worktrees with a link to the same environment have the same options."""
    return option[:2] + os.path.realpath(option[2:]) if option.startswith(("-I/", "-L/")) else option


def _precompiled_header(header: str, compiler: str, options: list[str]) -> list[str]:
    """The options with which a kernel is compiled on top of the precompiled header; none before the third kernel."""
    made = f"{header}.gch"
    if not os.path.exists(made):
        folder, kind = os.path.split(header.removesuffix("h"))
        kernels = [name for name in os.listdir(folder) if name.startswith(kind) and name.endswith(".kernel")]
        if len(kernels) < _KERNELS_WITHOUT_HEADER:
            return []
        with open(header, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.exists(made):
                _precompile(header, made, compiler, options)
    return ["-include", header] if os.path.exists(made) else []


def _precompile(header: str, made: str, compiler: str, options: list[str]) -> None:
    with open(header, "w") as file:
        file.write(f"#include <{_HEADER}>\n")
    own = [option for option in options if option != "-shared" and not option.startswith(("-l", "-L"))]
    if _compile(compiler, ["-x", "c++-header", header, *own, "-o", f"{made}.partial"]) == 0:
        os.replace(f"{made}.partial", made)


if __name__ == "__main__":
    sys.exit(main())
