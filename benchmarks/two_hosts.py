"""Does a GPU's store serve a host with another processor and half the threads?

    python benchmarks/two_hosts.py --work /tmp/two-hosts --shape flux1

Two boots of a FLUX transformer with two blocks of each kind share one store. The second boot is told that its host has
other instructions, and uses half the threads. All of its regions must be precompiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def boot_once(shape_name: str, is_other: bool, threads: int) -> None:
    """One boot in this process. Prints a line of JSON."""
    import compile_cache
    from compile_cache.key import environment

    if is_other:
        environment.instruction_flags = lambda: "avx of another processor"
    with compile_cache.boot("benchmark/two-hosts@" + "0" * 40) as boot:
        import torch
        from flux_shape import SHAPES, build_transformer

        torch.set_num_threads(threads)
        shape = SHAPES[shape_name]
        shape = dataclasses.replace(shape, transformer={**shape.transformer, "num_layers": 2, "num_single_layers": 2})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model = build_transformer(shape).to(torch.bfloat16).eval()
        inputs = make_inputs(model, {"device": device, "dtype": torch.bfloat16})
        with torch.inference_mode():
            model(**inputs)
            if device == "cpu":
                raise SystemExit("needs a GPU: on a CPU, instructions and threads are part of the key")
            boot.compile(model)
            boot.warm_up(lambda: model(**inputs))
    if not boot.wait_published(300):
        raise SystemExit("not published")
    print(json.dumps(json.loads(boot.report.to_json())))


def make_inputs(model, make: dict) -> dict:
    """64 picture tokens and 16 of text."""
    import torch

    return {
        "hidden_states": torch.randn(1, 64, 64, **make),
        "encoder_hidden_states": torch.randn(1, 16, model.config.joint_attention_dim, **make),
        "pooled_projections": torch.randn(1, model.config.pooled_projection_dim, **make),
        "timestep": torch.ones(1, **make),
        "guidance": torch.ones(1, **make),
        "img_ids": torch.zeros(64, 3, **make),
        "txt_ids": torch.zeros(16, 3, **make),
    }


def run_boot(work: Path, shape: str, threads: int, *other: str) -> dict:
    """A boot in a process of its own; its report."""
    environ = {**os.environ, "COMPILE_CACHE_STORE": str(work / "store"), "COMPILE_CACHE_DIR": str(work / "cache")}
    arguments = ["--work", str(work), "--shape", shape, "--threads", str(threads), "--in-process", *other]
    environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, __file__, *arguments], env=environ, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Boot on this host, then as on another one."""
    parser = argparse.ArgumentParser(description="Does a GPU's store serve a host with another processor?")
    parser.add_argument("--work", type=Path, required=True, help="folder of the store and the cache directory; emptied")
    parser.add_argument("--shape", choices=("tiny", "flux1"), default="tiny")
    parser.add_argument("--threads", type=int, default=max(2, (os.cpu_count() or 2) // 2))
    for hidden in ("--other", "--in-process"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        boot_once(args.shape, args.other, args.threads)
        return
    shutil.rmtree(args.work, ignore_errors=True)
    work = args.work.resolve()
    run_boot(work, args.shape, args.threads)
    other = run_boot(work, args.shape, args.threads // 2, "--other")
    for region in other["regions"]:
        print(f"{region['name']}: {region['step']}, {region['loaded']} loaded {region['reason']}")
    if missed := [region["name"] for region in other["regions"] if region["step"] != "precompiled"]:
        raise SystemExit(f"not precompiled on the other host: {', '.join(missed)}")
    print("all artifacts hit")


if __name__ == "__main__":
    main()
