"""What the process of one boot needs besides the boot itself."""

from __future__ import annotations

import sys
from importlib.metadata import version

import compile_cache


def wait_published(boot: compile_cache.Boot, timeout_s: float) -> None:
    """Wait until what was compiled is in the store.

    Raises:
        SystemExit: it is not.
    """
    if not boot.wait_published(timeout_s):
        raise SystemExit(f"not published within {timeout_s:g} s")
    if failures := boot.report.publish.failures:
        raise SystemExit(f"not published: {failures}")


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def describe_machine() -> dict[str, str]:
    """Hardware and versions."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else f"none, {torch.get_num_threads()} CPU threads",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version("triton") if on_gpu else "",
        "diffusers": version("diffusers"),
        "transformers": version("transformers"),
    }
