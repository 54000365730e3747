"""Makes code for a kind of call: the graphs of `torch.compile`, and a function compiled ahead of time.

`make` is the one maker, and the second process alone calls it. The server traces graphs out of stored files.

The first call imports torch's compiler. This module does not, because the server reads every `Answer`. It needs
none of the private names that functions compiled ahead of time need.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest import mock  # torch has imported it

import torch
from torch import nn

from compile_cache.calls.overlaps import writes_where_tensors_overlap
from compile_cache.calls.spec import on_gpu
from compile_cache.calls.torch_call import Call, call_by_graph, call_region, pytree
from compile_cache.errors import ArtifactError, CompileCacheError, Failure, GraphNotStored, attempt, first_line
from compile_cache.inductor.counters import CompileCounts, read_counts
from compile_cache.inductor.function_file import SUFFIX
from compile_cache.inductor.toolchain import configure_torch

if TYPE_CHECKING:
    import torch._dynamo.utils

    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.stored_functions import Artifacts

# (tensor, dimension) pairs: code for a call leaves the sizes of these dimensions open.
Dimensions = tuple[tuple[int, int], ...]


# Words of Dynamo's errors where a branch depends on the values of tensors.
_ON_DATA = re.compile(r"data[- ]dependent|\.item\b|\.tolist\b|dynamic control flow", re.IGNORECASE)
# The classes of which torch has made or found graphs.
_with_graphs: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()
# Held while `out_of_stored_files` has replaced a function of torch.
_looking_up = threading.RLock()
# About 5 ms on a GPU, in which the host queues a whole call. So the events do not measure the host's pace.
_HEAD_START_CYCLES = 10_000_000


@dataclass(frozen=True, slots=True)
class Traced:
    """The graphs of one call, and their `answer`: whether a branch depends on the values of tensors, the seconds that
    they took, and torch's counts meanwhile. `tracing_s` is about what they take once they are stored. `broken_by` says
    what broke the graph; it is empty if the graph is whole."""

    answer: Any
    depends_on_data: bool
    seconds: float
    tracing_s: float
    counts: CompileCounts
    broken_by: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the second process made of a kind of call. `path` is its record's file, empty if there is none.

    With a function, `compiled_ms` and `eager_ms` are its times; they are 0 if they could not be measured. Without, a
    `path` is of a record of graphs, which are in Inductor's files, and `reason` says why there is no function. The
    server loads the `function`.

    `files` are new in the second process's folder, `seconds` are those that the order took, and `has_found` says
    whether graphs were found in stored files.
    """

    path: str = ""
    reason: str = ""
    compiled_ms: float = 0.0
    eager_ms: float = 0.0
    function: Precompiled | None = None
    files: tuple[str, ...] = ()
    seconds: float = 0.0
    has_found: bool = False

    @property
    def is_precompiled(self) -> bool:
        """Whether a function was made, which may not be loaded yet."""
        return self.path.endswith(SUFFIX)


def import_compiler() -> None:
    """Import what `make` needs of torch, which takes seconds."""
    importlib.import_module("torch._inductor.compile_fx")


@contextlib.contextmanager
def _ending_compilers() -> Iterator[None]:
    """After an error, wait for the C++ compilers that torch has left at work. They would write among the files of later
    calls, and an exit waits for them before its first hook."""
    try:
        yield
    except Exception:
        pools: Any = importlib.import_module("torch._inductor.async_compile").AsyncCompile
        if pools.pool.cache_info().currsize:
            pool = pools.pool()
            pools.pool.cache_clear()  # other threads' compiles get a new one
            pool.shutdown()
        raise


class Graphs:
    """The calls of one class that `torch.compile` compiled in this process."""

    def __init__(self, name: str, mode: str, dynamic: bool | None) -> None:
        self.given = name, mode, dynamic
        # By whether they are whole, and whether they may compile.
        self._functions: dict[tuple[bool, bool], Callable[..., Any]] = {}

    def run(self, is_whole: bool, call: Call, compiles: bool = True) -> Any:
        """Run a call with a graph that exists, or compile a new one, if it `compiles`. Unless it `is_whole`, it may
        take several graphs.

        Raises:
            NoGraph: there is none, or another thread traces.
            Exception: the model's own, or the compiler's.
        """
        configure_torch()
        if (is_whole, compiles) not in self._functions:
            name, mode, dynamic = self.given
            # Dynamo keeps a function's graphs and limits with its code object. So each class, and each way, has a copy.
            name = f"call_{name}" if is_whole else f"call_{name}_in_parts"
            function = types.FunctionType(call_by_graph.__code__.replace(co_name=name), call_by_graph.__globals__)
            compiled = torch.compile(function, fullgraph=is_whole, mode=mode, dynamic=dynamic)
            self._functions[is_whole, True] = compiled
            self._functions[is_whole, False] = torch._dynamo.run(compiled)
        return self._functions[is_whole, compiles](*call)


@_ending_compilers()
def make(
    artifacts: Artifacts,
    graphs: Graphs,
    copies: Callable[[], Call],
    dynamic: Dimensions = (),
    pause: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    record: str = "",
) -> Answer:
    """Run a call once under `torch.compile`, which fills Inductor's caches and records tuning; then compile it ahead of
    time. If torch refuses the second step, its graphs are recorded, if they can be taken out of stored files.

    Args:
        artifacts: where the record is written.
        copies: a new copy of the call, because runs may change it.
        dynamic: the sizes that the code leaves open.
        pause: a context around measurements on the GPU.
        record: the record of graphs for such calls to which these are added, if there is one.

    Raises:
        CompileCacheError: no code may be made for this call.
        Exception: the model's, or the compiler's.
    """
    if writes_where_tensors_overlap(copies()):
        raise ArtifactError("it writes into memory that two of its tensors share; give it a copy of one")
    traced = trace(graphs, lambda: _left_open(dynamic, copies()))
    gc.collect()  # of the copy: nothing else collects it in the second process
    has_found = traced.counts.hits > 0
    try:
        function = artifacts.make(_left_open(dynamic, copies()))
        if misfit := function.misfit(copies()):
            raise ArtifactError(f"it does not fit its own call: {misfit}")
    except CompileCacheError as error:
        reason = str(error)
        if traced.depends_on_data:
            reason += "; a branch depends on the values of tensors, which the second process does not know"
        if traced.depends_on_data or dynamic:
            raise ArtifactError(reason) from error
        return replace(_graphs_made(artifacts, graphs, copies, reason, record), has_found=has_found)
    with pause():
        times = attempt(compare_speed, function, copies)
    compiled_ms, eager_ms = (0.0, 0.0) if isinstance(times, Failure) else times
    return Answer(function.path, "", compiled_ms, eager_ms, has_found=has_found)


def _graphs_made(artifacts: Artifacts, graphs: Graphs, copies: Callable[[], Call], reason: str, record: str) -> Answer:
    """A call of which graphs alone were made. Its record is written if they are found now: Inductor stores not every
    graph."""
    forget_graphs()
    try:
        with out_of_stored_files():
            traced = trace(Graphs(*graphs.given), copies)
        return Answer(record or artifacts.write_graphs(copies(), traced.tracing_s, reason), reason)
    except GraphNotStored:
        return Answer(reason=f"{reason}; torch does not store its graphs")
    except ArtifactError as error:
        return Answer(reason=f"{reason}; {error}")


def forget_graphs() -> None:
    """Forget all graphs, in a process that serves no calls."""
    torch.compiler.reset()
    _with_graphs.clear()


def trace(graphs: Graphs, copies: Callable[[], Call]) -> Traced:
    """Run a copy of a call by one graph, or by several if something breaks it.

    Raises:
        ArtifactError: torch makes no graph of it.
        Exception: the model's own, or the compiler's.
    """
    counters, broken_by = torch._dynamo.utils.counters["graph_break"], ""
    before, counted, dynamo_s, started = set(counters), read_counts(), _dynamo_s(), time.perf_counter()
    call = copies()
    try:
        answer = graphs.run(True, call)
    # The model's code breaks the graph, or raises an error itself. A data-dependent branch is a `UserError` on torch
    # 2.13, and `Unsupported` on 2.11.
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        broken_by = first_line(error)
        answer = graphs.run(False, copies())
    seconds, counts = time.perf_counter() - started, read_counts().since(counted)
    kind = type(call[0])
    if counts.graphs or counts.hits:
        _with_graphs.add(kind)
    elif kind not in _with_graphs:  # else by a graph of another call
        raise ArtifactError(f"torch makes no graph of it: {broken_by}")
    depends = any(_ON_DATA.search(str(reason)) for reason in (broken_by, *(set(counters) - before)))
    # To look a graph up takes about as long as to trace it.
    return Traced(answer, depends, seconds, 2 * (_dynamo_s() - dynamo_s), counts, broken_by)


def _dynamo_s() -> float:
    """The seconds that Dynamo took in this process so far, without its back ends."""
    spent = torch._dynamo.utils.calculate_time_spent()
    return spent.get("entire_frame_compile", 0.0) - spent.get("backend_compile", 0.0)


@contextlib.contextmanager
def out_of_stored_files() -> Iterator[None]:
    """Let torch take graphs out of stored files alone: in this thread, it compiles none that is missing. torch has no
    option for it: it looks a graph up and compiles it in one function.

    Raises:
        GraphNotStored: one is missing.
    """
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    thread, is_missing, failed = threading.get_ident(), False, None

    def refuse(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_missing
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        is_missing = True
        raise GraphNotStored("it is not stored")

    with _looking_up:
        original = compile_fx.fx_codegen_and_compile
        with mock.patch.object(compile_fx, "fx_codegen_and_compile", refuse):
            try:
                yield
            except Exception as error:
                failed = error
    if is_missing:  # whoever called torch may have caught the error
        raise GraphNotStored("a stored graph was not found") from failed
    if failed is not None:
        raise failed


def _left_open(dynamic: Dimensions, call: Call) -> Call:
    """The call with marks on the dimensions whose size is left open.

    Marks stay on a tensor, and code for marked tensors does not fit others. So the marked tensors are aliases.
    """
    if not dynamic:
        return call
    leaves, spec = pytree.tree_flatten(call[1:])
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for number, dimension in dynamic:
        place = tensors[number]
        leaves[place] = leaves[place].detach()
        torch._dynamo.mark_dynamic(leaves[place], dimension)
    return call[0], *pytree.tree_unflatten(leaves, spec)


def compare_speed(compiled: Callable[..., Any], copies: Callable[[], Call]) -> tuple[float, float]:
    """The milliseconds of `compiled(module, args, kwargs)` and of the same call eager: device time on a GPU, wall-clock
    time on a CPU. Each run has its own copy of the call. One run, which loads kernels, is not measured; of two that are
    the least counts, because other load only adds.

    Raises:
        Exception: the copies do not fit into memory, or a call fails.
    """
    _time_ms(compiled, copies())
    rounds = [(_time_ms(compiled, copies()), _time_ms(call_region, copies())) for _ in range(2)]
    return min(compiled_ms for compiled_ms, _ in rounds), min(eager_ms for _, eager_ms in rounds)


def _time_ms(function: Callable[..., Any], call: Call) -> float:
    if not on_gpu(call):
        started = time.perf_counter()
        function(*call)
        return (time.perf_counter() - started) * 1e3
    cuda: Any = torch.cuda  # these functions are not annotated
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    function(*call)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
