"""Losers of autotuning: what of Triton's cache is left out, told with torch's own records of a compile.

There is no Triton on a CPU, so the autotuners are stand-ins.
"""

from __future__ import annotations

import types

import pytest
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics
from torch._inductor.triton_bundler import TritonBundle, TritonKernelArtifact, TritonKernelArtifacts

from compile_cache.inductor import toolchain as autotuner

PARTS = ("cubin", "ptx", "ttir", "ttgir", "llir", "source", "json")


class Autotuner:
    """What toolchain.py asks of torch's."""

    def __init__(self, name: str, results: list[str], winners: list[str], is_static: bool = True) -> None:
        self.fn = types.SimpleNamespace(__name__=name)
        kernels = [types.SimpleNamespace(hash=folder) for folder in results]
        self.compile_results = [types.SimpleNamespace(kernel=kernel) for kernel in kernels]
        self.launchers = [types.SimpleNamespace(cache_hash=folder) for folder in winners]
        self._is_static = is_static

    def is_statically_launchable(self) -> bool:
        return self._is_static


@pytest.fixture
def loaded(monkeypatch):
    """Makes the autotuners given those of the code that is loaded."""
    monkeypatch.setattr(triton_heuristics, "CachingAutotuner", Autotuner)
    monkeypatch.setattr("torch._inductor.runtime.runtime_utils.triton_hash_to_path_key", lambda text: text)
    monkeypatch.setattr(autotuner, "_bundled", set())

    def load(*autotuners: Autotuner) -> None:
        module = types.ModuleType("generated")
        vars(module).update({f"kernel_{number}": autotuner for number, autotuner in enumerate(autotuners)})
        monkeypatch.setattr(PyCodeCache, "modules", [module])

    return load


def folder(name: str, kernel: str) -> set[str]:
    return {f"triton/{name}/{kernel}.{part}" for part in PARTS} | {f"triton/{name}/__grp__{kernel}.json"}


def binary(name: str, kernel: str) -> str:
    return f"triton/{name}/{kernel}.cubin"


def test_of_a_kernel_launched_from_its_binary_the_binaries_of_all_first_candidates_are_kept(loaded):
    loaded(Autotuner("poi", ["WON", "LOST"], ["WON"]))
    files = folder("WON", "poi") | folder("LOST", "poi")
    assert files - autotuner.unread_files(files) == {binary("WON", "poi"), binary("LOST", "poi")}


def test_of_what_coordinate_descent_tried_only_the_winner_is_kept_and_whole(loaded):
    loaded(Autotuner("red", ["FIRST"], ["FOUND"]))
    files = folder("FIRST", "red") | folder("FOUND", "red") | folder("TRIED", "red")
    assert files - autotuner.unread_files(files) == {binary("FIRST", "red")} | folder("FOUND", "red")


def test_matrix_templates_that_were_only_benchmarked_are_left_out(loaded, monkeypatch):
    from torch._inductor.select_algorithm import TritonTemplate

    monkeypatch.setattr(TritonTemplate, "all_templates", {"mm": object()})
    loaded(Autotuner("triton_tem_fused_mm_1", ["WON"], ["WON"]))
    files = folder("WON", "triton_tem_fused_mm_1") | folder("TRIED", "triton_mm") | folder("FUSION", "triton_")
    assert files - autotuner.unread_files(files) == {binary("WON", "triton_tem_fused_mm_1")}


def test_kernels_that_nobody_knows_are_kept(loaded):
    """Such as those that a library wrote by hand and launches itself, and Triton's launchers."""
    loaded(Autotuner("poi", ["WON"], ["WON"]))
    files = folder("THEIRS", "flash_attention") | {"triton/LAUNCHER/cuda_utils.so", "ab/kernel.py", "fxgraph/a/b/c"}
    assert autotuner.unread_files(files) == set()


def test_kernels_that_never_ran_are_kept_whole(loaded):
    loaded(Autotuner("poi", ["ONE", "OTHER"], []))
    files = folder("ONE", "poi") | folder("OTHER", "poi")
    assert autotuner.unread_files(files) == set()


def test_kernels_that_are_not_launched_from_their_binary_are_kept_whole(loaded):
    loaded(Autotuner("poi", ["WON", "LOST"], ["WON"], is_static=False))
    files = folder("WON", "poi") | folder("LOST", "poi")
    assert files - autotuner.unread_files(files) == folder("WON", "poi")


def test_another_torch_than_is_known_has_everything_kept(loaded, monkeypatch):
    loaded(Autotuner("poi", ["WON", "LOST"], ["WON"]))
    monkeypatch.delattr("torch._inductor.codecache.PyCodeCache.modules")
    assert autotuner.unread_files(folder("LOST", "poi")) == set()


def artifacts(name: str, kernel: str) -> TritonKernelArtifacts:
    return TritonKernelArtifacts(name, 0, [TritonKernelArtifact(f"{kernel}.{part}", b"") for part in PARTS])


def test_a_graph_entry_carries_the_binaries_alone_of_what_it_launches_and_no_benchmarked_kernel(loaded):
    loaded()
    static = types.SimpleNamespace(kernel=Autotuner("poi", ["WON", "LOST"], ["WON"]))
    bundled = [artifacts("WON", "poi"), artifacts("LOST", "poi"), artifacts("FUSION", "triton_")]
    bundle = TritonBundle([*bundled, artifacts("THEIRS", "flash_attention")], [static])
    trimmed = autotuner._trimmed(bundle)
    kept = {entry.kernel_hash: [part.filename for part in entry.artifacts] for entry in trimmed.kernel_artifacts}
    assert kept == {"WON": ["poi.cubin"], "LOST": ["poi.cubin"], "THEIRS": [f"flash_attention.{one}" for one in PARTS]}
    assert trimmed.static_autotuners == [static]
    # A lookup asks for those binaries: they are kept as files as well, whatever else becomes of the kernel.
    assert binary("LOST", "poi") not in autotuner.unread_files(folder("LOST", "poi"))
