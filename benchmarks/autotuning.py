"""What of a cold boot's artifacts does a warm boot read, and what does leaving out the rest save?

    python benchmarks/autotuning.py --mode max-autotune-no-cudagraphs --rounds 2

Boots two blocks of each of FLUX.1's classes at full width (random weights, 4096 image and 512 text tokens), each boot
in a process of its own: cold, then warm, with losers of autotuning left out (`trimmed`) and with everything as torch
writes it and looks it up (`whole`), in turns. Needs a CUDA GPU; `--tiny` runs anywhere.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from table import markdown

MODES = ("default", "max-autotune-no-cudagraphs")
KINDS = ("trimmed", "whole")


def boot_once(keeps_all: bool, tiny: bool) -> dict[str, Any]:
    """One boot in this process, and what it did."""
    import compile_cache
    from compile_cache.regions import autotuner as kernels

    if keeps_all:
        kernels.configure_autotuner = lambda: None
        kernels.unread_files = lambda paths: set()
    started = time.perf_counter()
    with compile_cache.boot("benchmark/flux-blocks@" + "0" * 40) as boot:
        import torch

        model, inputs = make_blocks(tiny)
        boot.compile(model)
        restored = boot._directory.scan()
        for path in restored:  # the first read then sets the access time
            os.utime(boot._directory.path / path, ns=(0, restored[path].modified_ns))

        def call() -> Any:
            with torch.inference_mode():
                return model(**inputs)[0]

        boot.warm_up(call)
    ready_s = time.perf_counter() - started
    read = [path for path in restored if (boot._directory.path / path).stat().st_atime_ns != 0]
    if not boot.wait_published(120):
        raise SystemExit("not published within 120 s")
    report = json.loads(boot.report.to_json())
    return {
        "ready_s": ready_s,
        "warm_up_s": boot.report.phases["warm_up"],
        "step_ms": step_ms(call),
        "output": hashlib.sha256(call().float().cpu().numpy().tobytes()).hexdigest()[:12],
        "restored_files": len(restored),
        "restored_bytes": sum(stamp.size_bytes for stamp in restored.values()),
        "read_files": len(read),
        "written_files": len(boot._directory.scan().keys() - restored.keys()),
        "stored_bytes": report["publish"]["stored_bytes"] or report["restore"]["stored_bytes"],
        "hits": boot.report.counts.hits,
        "misses": boot.report.counts.misses,
        "kernels": boot.report.counts.kernels_compiled,
        "benchmarks": boot.report.counts.benchmarks,
        "fully_cached": report["fully_cached"],
        "failures": report["publish"]["failures"],
        "steps": sorted({region["step"] for region in report["regions"]}),
    }


def make_blocks(tiny: bool) -> tuple[Any, dict[str, Any]]:
    """A FLUX.1 transformer of two blocks of each class, and its inputs."""
    import torch
    from diffusers import FluxTransformer2DModel

    sizes: dict[str, Any] = {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}
    if tiny:
        sizes |= {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32}
        sizes |= {"pooled_projection_dim": 32, "in_channels": 4, "axes_dims_rope": (4, 6, 6)}
    text_tokens, image_tokens = (16, 64) if tiny else (512, 4096)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = FluxTransformer2DModel(**sizes).to(torch.bfloat16).eval()
    config = model.config

    def noise(*shape: int) -> Any:
        return torch.randn(*shape).to(device, torch.bfloat16)

    return model, {
        "hidden_states": noise(1, image_tokens, config.in_channels),
        "encoder_hidden_states": noise(1, text_tokens, config.joint_attention_dim),
        "pooled_projections": noise(1, config.pooled_projection_dim),
        "timestep": torch.ones(1, device=device, dtype=torch.bfloat16),
        "guidance": torch.ones(1, device=device, dtype=torch.bfloat16),
        "img_ids": torch.zeros(image_tokens, 3, device=device),
        "txt_ids": torch.zeros(text_tokens, 3, device=device),
        "return_dict": False,
    }


def step_ms(call: Any) -> float:
    """Milliseconds a call, over 20 calls."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / 20 * 1e3


def run_boot(kind: str, mode: str, folder: Path, tiny: bool) -> dict[str, Any]:
    """One boot in a process of its own, in the folder's store for its kind."""
    variables = {"STORE": str(folder / kind), "DIR": str(folder / f"cache-{kind}"), "MODE": mode}
    environ = {**os.environ, **{f"COMPILE_CACHE_{name}": value for name, value in variables.items()}}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--once", kind, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Boot, print each boot as a line of JSON, and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--once", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(boot_once(arguments.once == "whole", arguments.tiny)))
        return
    boots: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds + 1):
            for kind in arguments.kinds:
                boot = run_boot(kind, arguments.mode, Path(folder), arguments.tiny)
                boots.setdefault((kind, "warm" if number else "cold"), []).append(boot)
                print(json.dumps({"kind": kind, "mode": arguments.mode, "round": number, **boot}), flush=True)
    columns = ("stored_bytes", "restored_files", "restored_bytes", "read_files", "written_files")
    columns += ("hits", "misses", "kernels", "benchmarks", "warm_up_s", "ready_s", "step_ms")
    rows = [
        [kind, state, *(f"{median(boot[column] for boot in found):.6g}" for column in columns)]
        for (kind, state), found in boots.items()
    ]
    print(markdown(["artifacts", "boot", *columns], rows))
    for name in ("kernels", "benchmarks", "misses") if set(arguments.kinds) == set(KINDS) else ():
        trimmed, whole = (max(boot[name] for boot in boots[kind, "warm"]) for kind in KINDS)
        if trimmed > whole:
            raise SystemExit(f"without the losers a warm boot has more {name}: {trimmed} instead of {whole}")


if __name__ == "__main__":
    main()
