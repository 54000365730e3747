"""Every private name of torch that this project uses, and what is lost without it.

A test compares them with the code, and looks them up in the installed torch.
Private names are used in `compile_cache/inductor/`, `compile_cache/calls/`, `compile_cache/weights/` and
`models/kernels/` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

_TESTED = "2.11–2.15"


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """Names of one place in torch, its tested releases that have them, and what is lost if one is gone."""

    place: str
    names: str
    lost: str
    releases: str = _TESTED

    @property
    def paths(self) -> tuple[str, ...]:
        """The full names."""
        return tuple(f"{self.place}.{name}" for name in self.names.split())


NO_CALL = "everything: the model stays eager"
NO_FUNCTION = "functions compiled ahead of time"
NO_BACKGROUND = "compiling in the background"
NO_COMPILER = "compiling, and graphs"
SLOWER_BOOT = "0.1 to 1 s of a boot"
NO_MODES = "calls on a `ModelThread`"
TUNED_AGAIN = "the filter of stored kernels; warm boots may tune again"

PRIVATE_NAMES = (
    PrivateNames("torch.nn.Module", "_call_impl _compiled_call_impl _parameters _buffers _modules", NO_CALL),
    PrivateNames("torch.utils", "_pytree _python_dispatch", NO_CALL),
    PrivateNames("torch._C", "_len_torch_dispatch_stack", NO_CALL),
    PrivateNames("torch.UntypedStorage", "_cdata _share_cuda_ _new_shared_cuda", "comparisons, so all compiled code"),
    PrivateNames("torch", "Tensor._make_subclass _neg_view", NO_BACKGROUND),
    PrivateNames(
        "torch._C",
        "_get_fp32_precision_getter _get_sdp_priority_order _get_cublas_allow_fp16_reduced_precision_reduction "
        "_get_cublas_allow_bf16_reduced_precision_reduction _len_torch_function_stack",
        NO_FUNCTION,
    ),
    PrivateNames("torch", "_fused_sdp_choice", NO_FUNCTION),
    PrivateNames(
        "torch._C",
        "_set_fp32_precision_setter _set_sdp_priority_order",
        "compiling in the background where the server's switch is not torch's default",
    ),
    PrivateNames("torch._dynamo", "config mark_dynamic utils exc run", NO_COMPILER),
    PrivateNames("torch._dynamo.guards", "CheckFunctionManager GuardsStatePickler _get_closure_vars", NO_FUNCTION),
    PrivateNames("torch._dynamo.variables", "builder", NO_FUNCTION),
    PrivateNames("torch", "_subclasses.FakeTensorMode _C.DispatchKeySet", NO_FUNCTION),
    PrivateNames("torch._functorch._aot_autograd", "aot_autograd_result.BundledAOTAutogradResult", NO_FUNCTION),
    PrivateNames("torch.utils", "_traceback.CapturedTraceback", NO_FUNCTION),
    PrivateNames("torch._dynamo.aot_compile", "AOTCompiledFunction._artifacts", NO_FUNCTION),
    PrivateNames("torch._dynamo.config", "_config _is_default", NO_FUNCTION),
    PrivateNames("torch._inductor", "config", NO_COMPILER),
    PrivateNames("torch._inductor", "list_mode_options codecache.torch_key", NO_FUNCTION),
    PrivateNames("torch._inductor", "select_algorithm decomposition graph debug", NO_FUNCTION),
    PrivateNames("torch._inductor", "codegen.memory_planning utils._align", NO_FUNCTION),
    PrivateNames("torch._inductor", "async_compile hooks", SLOWER_BOOT),
    PrivateNames("torch._inductor.runtime", "triton_compat", SLOWER_BOOT),
    PrivateNames("torch._functorch._aot_autograd", "subclass_codegen", SLOWER_BOOT, "2.12–2.15"),
    PrivateNames("torch", "_functorch.config fx.experimental._config", NO_BACKGROUND),
    PrivateNames(
        "torch._inductor",
        "cpu_vec_isa.VecISA.check_build codecache.cache_dir",
        "0.5 to 10 s of a boot on a CPU: torch tests its instructions again",
    ),
    PrivateNames("torch._inductor.compile_fx", "fx_codegen_and_compile", "graphs out of stored files: they are eager"),
    PrivateNames("torch._inductor.async_compile", "AsyncCompile.pool", "an exit soon after a compile that failed"),
    PrivateNames("torch._inductor.codecache", "PyCodeCache", TUNED_AGAIN),
    PrivateNames("torch._inductor.triton_bundler", "TritonBundler", TUNED_AGAIN),
    PrivateNames("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", TUNED_AGAIN),
    PrivateNames("torch._inductor.runtime.triton_heuristics.CachingAutotuner", "_precompile_config", TUNED_AGAIN),
    PrivateNames("torch._inductor.runtime.autotune_cache", "AutotuneCache _load_cached_autotuning", TUNED_AGAIN),
    PrivateNames("torch._inductor.runtime.autotune_cache.AutotuneCache", "_read", TUNED_AGAIN),
    PrivateNames(
        "torch._inductor.runtime.runtime_utils", "triton_config_to_hashable triton_hash_to_path_key", TUNED_AGAIN
    ),
    PrivateNames("torch._inductor.select_algorithm", "TritonTemplate", TUNED_AGAIN),
    PrivateNames("torch._inductor.runtime", "benchmarking", "pauses while tuning: predictions are slower meanwhile"),
    PrivateNames("torch.overrides", "_get_current_function_mode_stack _push_mode _pop_mode", NO_MODES),
    PrivateNames("torch", "_scaled_mm", "`go_fast`"),
    PrivateNames("torch", "_foreach_copy_", "weights beside imports"),
    PrivateNames("torch.cuda", "_sleep", "`speedup`"),
    PrivateNames(
        "torch._inductor.custom_graph_pass",
        "CustomGraphPass get_hash_for_files",
        "language models on a GPU",
    ),
)
