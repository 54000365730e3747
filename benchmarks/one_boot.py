"""One boot of predict.Predictor in this process, as Cog's worker does it; prints one JSON line, a fresh_boot.Boot."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import time
from statistics import median
from typing import Any

from boot_process import describe_machine, synchronize, wait_published
from cog.input import FieldInfo
from fresh_boot import PROMPT, SEED, Boot, Prediction

import compile_cache
from predict import Predictor


def predict(predictor: Predictor, num_inference_steps: int) -> tuple[str, float]:
    """The picture's path, and the seconds it took."""
    inputs = {
        **default_inputs(predictor),
        "prompt": PROMPT,
        "seed": SEED,
        "output_format": "png",
        "num_inference_steps": num_inference_steps,
    }
    synchronize()
    started = time.perf_counter()
    (path,) = predictor.run(**inputs)
    synchronize()
    return str(path), time.perf_counter() - started


def default_inputs(predictor: Predictor) -> dict[str, Any]:
    """The value of every input that a request leaves out, as Cog fills them in."""
    inputs = inspect.signature(predictor.run).parameters.items()
    return {name: input.default.default for name, input in inputs if isinstance(input.default, FieldInfo)}


def predict_first(predictor: Predictor, num_inference_steps: int) -> tuple[Prediction, int | None]:
    """The first prediction after READY, and the most device memory in use meanwhile."""
    import torch
    from picture import identify

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = predictor.boot.counts()
    path, seconds = predict(predictor, num_inference_steps)
    compiled = predictor.boot.counts().since(before)
    first = Prediction(seconds, *identify(path), graphs_compiled=compiled.graphs)
    return first, torch.cuda.max_memory_allocated() if on_gpu else None


def measure_step_ms(predictor: Predictor, steps: tuple[int, int], pairs: int) -> float:
    """Milliseconds a denoising step: the median of `pairs` differences."""
    few, many = steps
    differences_s = []
    for _ in range(pairs):
        (_, few_s), (_, many_s) = predict(predictor, few), predict(predictor, many)
        differences_s.append(many_s - few_s)
    return median(differences_s) / (many - few) * 1e3


def main() -> None:
    """Boot, predict, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager, cold or warm, for the record")
    parser.add_argument("--steps", type=int, nargs=2, default=(4, 12))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for what is published")
    parser.add_argument("--without-preload", action="store_true", help="import torch's compiler when it is needed")
    args = parser.parse_args()
    if args.without_preload:
        compile_cache.Boot.preload = lambda boot: None

    predictor = Predictor()
    predictor.setup()
    first, peak_bytes = predict_first(predictor, args.steps[0])
    wait_published(predictor.boot, args.timeout)
    step_ms = measure_step_ms(predictor, args.steps, args.pairs)
    report = json.loads(predictor.boot.report.to_json())
    boot = Boot(args.kind, report, first, step_ms, prediction_peak_bytes=peak_bytes, machine=describe_machine())
    print(json.dumps(dataclasses.asdict(boot)), flush=True)


if __name__ == "__main__":
    main()
