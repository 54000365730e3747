"""Boot each example in Cog's server with tiny random weights: without the library, and three times with it.

    python examples/run_examples.py
    python examples/run_examples.py speech
    python examples/run_examples.py embeddings/e5 --work /tmp/e5

Without `--work`, servers' logs, weights and stores are in a folder that is removed. All boots of a model use one
store, and each begins with an empty cache directory. The first boot compiles before READY, as a fill does, or with
`--background` after it; then it is asked until all is compiled. It ends when all is published.

Exits with 1 if an answer differs from that of the same code with COMPILE_CACHE_SCOPE=off, if the second boot is not
precompiled everywhere, if the third one makes anything, or if a request waits for a compiler.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from fresh_boot import boot_environment, conclude, new_log
from real_predictors import apart, data_url, file_for, jobs, numbers, wait_published
from servers import MARK, wait_gone, with_tini
from table import markdown

EXAMPLES = Path(__file__).resolve().parent
BOOTS = ("off", "first", "second", "third")
_RATE = 16000
_READY_S = 900.0
_COMPILED_S = 1800.0
_EXIT_S = 15.0
_PAUSE_S = 0.5
_COMPILING_PAUSE_S = 4.0  # what requests leave to the second process, which has the lowest priority
_ROUNDS = 3  # after all is compiled: new code is compared in one, and serves from the next on


@dataclass(frozen=True, slots=True)
class Case:
    """One model of an example.

    `model` is its function in tiny_models.py. `requests` makes the inputs of each request, in which `picture 64 80`
    stands for a file. `numbers` makes what is compared of an answer's output. Without a package that it `needs`, it is
    left out.
    """

    model: str
    requests: Callable[[], Sequence[Mapping[str, Any]]]
    numbers: Callable[[Any], Any]
    predictor: str = "predict.py:Predictor"
    environ: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-5
    needs: str = ""


def recording(container: str, codec: str, seconds: int) -> str:
    """The data URL of noise, encoded."""
    import av

    file = io.BytesIO()
    noise = numpy.random.default_rng(0).normal(0.0, 0.2, (1, _RATE * seconds)).astype("f4")
    frame = av.AudioFrame.from_ndarray(noise, "fltp", "mono")
    frame.rate = _RATE
    with av.open(file, "w", container) as writer:
        stream = writer.add_stream(codec, rate=_RATE, layout="mono")
        writer.mux([*stream.encode(frame), *stream.encode(None)])
    return data_url("application/octet-stream", file)


def lora(rank: int) -> str:
    """The data URL of a LoRA for the tiny FLUX.1."""
    noise = numpy.random.default_rng(rank)
    blocks = [f"{kind}transformer_blocks.{number}" for kind in ("", "single_") for number in (0, 1)]
    layers = [f"transformer.{block}.attn.{layer}" for block in blocks for layer in ("to_q", "to_k", "to_v")]
    shapes = {"A": (rank, 32), "B": (32, rank)}
    names = {f"{layer}.lora_{part}.weight": shape for layer in layers for part, shape in shapes.items()}
    file = save({name: noise.normal(0.0, 0.3, shape).astype("f4") for name, shape in names.items()})
    return data_url("application/octet-stream", io.BytesIO(file))


def vectors(output: Sequence[str]) -> Any:
    """[inputs, width], of base64."""
    return numpy.stack([numpy.frombuffer(base64.b64decode(text), "<f4") for text in output])


def heard(output: Mapping[str, Any]) -> str:
    """Words and times."""
    return json.dumps(output)


def frames(output: str) -> Any:
    """[frames, height, width, 3], of an mp4 file."""
    import av

    with av.open(io.BytesIO(base64.b64decode(output.partition(",")[2]))) as video:
        return numpy.stack([one.to_ndarray(format="rgb24") for one in video.decode(video=0)]).astype(float)


_TEXTS = ["query: how a cache is filled", "passage: By the first boot, after READY.", "query: why"]
_LENGTHS = {"LENGTHS": "16,48", "BATCHES": "1,4"}
_ROUNDING = 1e-3  # of pixels of 8 bits
_FEW = {"num_inference_steps": 2, "seed": 1}


def _edits() -> Sequence[Mapping[str, Any]]:
    prompts = ("make it blue", "make the sky over the lighthouse as dark as it is in winter", "more otters, please")
    shapes = ("picture 90 90", "picture 300 150", "picture 64 60")
    return [{"prompt": one, "image": shape, **_FEW} for one, shape in zip(prompts, shapes, strict=True)]


CASES: dict[str, tuple[Case, ...]] = {
    "embeddings": (
        Case("modernbert", lambda: ({"texts": _TEXTS}, {"texts": _TEXTS[2:]}), vectors, environ=_LENGTHS),
        Case("e5", lambda: ({"texts": _TEXTS}, {"texts": ["x" * 45] * 9}), vectors, environ=_LENGTHS),
        Case(
            "siglip",
            lambda: ({"images": ["picture 64 80", "picture 30 20"]}, {"texts": ["a lighthouse"]}),
            vectors,
            "pictures.py:Predictor",
            {"BATCHES": "2"},
        ),
    ),
    "speech": (
        Case(
            "whisper",
            lambda: (
                {"audio": recording("mp3", "mp3", 5)},
                {"audio": recording("ipod", "aac", 70), "language": "en", "task": "translate"},
            ),
            heard,
        ),
    ),
    "flux-lora": (
        Case(
            "flux",
            lambda: (
                {"prompt": "a lighthouse", **_FEW},
                {"prompt": "a lighthouse", "lora": lora(4), "lora_scale": 0.5, "aspect_ratio": "16:9", **_FEW},
                {"prompt": "two otters", "lora": lora(8), **_FEW},
            ),
            numbers,
            environ={"PIXELS": "256"},
            tolerance=_ROUNDING,
            needs="peft",
        ),
    ),
    "edit": (
        Case("kontext", _edits, numbers, environ={"SIZES": "256x256,384x192"}, tolerance=_ROUNDING),
        Case(
            "qwen_edit",
            lambda: _edits()[1:],
            numbers,
            # The requests' prompts have other lengths than the warm-up's.
            environ={"SIZES": "256x256", "COMPILE_CACHE_UNSEEN": "background"},
            tolerance=_ROUNDING,
            needs="torchvision",
        ),
    ),
    "video": tuple(
        Case(
            name,
            lambda: (
                {"prompt": "an otter swims", "guidance_scale": 1.0, "crf": 0, **_FEW},
                {"prompt": "an otter swims, for a long time and far away", "image": "picture 90 70", "crf": 0, **_FEW},
            ),
            frames,
            environ={"VIDEOS": "64x64x9"},
            tolerance=_ROUNDING,
        )
        for name in ("ltx", "wan")
    ),
}


@dataclass(frozen=True, slots=True)
class Boot:
    """What one boot did. `answers` has those of each round of all requests, and `metrics` their metrics."""

    kind: str
    ready_s: float
    report: Mapping[str, Any]
    answers: list[list[Any]]
    metrics: list[list[Mapping[str, Any]]]
    made: int  # functions, by the second process

    @property
    def loaded(self) -> int:
        """Stored functions that were loaded before READY."""
        return int(self.report["counts"]["precompiled_loaded"])

    @property
    def served(self) -> list[str]:
        """Each region, and the steps that served the last round."""
        last = {one for metrics in self.metrics[-1] for one in metrics.get("served", {}).items()}
        return sorted(f"{region}: {steps}" for region, steps in last)

    @property
    def is_precompiled(self) -> bool:
        """Whether each region was at READY, and each call of each request."""
        steps = {step for metrics in self.metrics for one in metrics for step in one["served"].values()}
        return bool(self.report["fully_precompiled"]) and steps == {"precompiled"}

    @property
    def waited(self) -> int:
        """Requests that compiled, or waited for it."""
        return sum(bool(one["compiled_now"]) for metrics in self.metrics for one in metrics)

    def apart(self, right: Sequence[Any]) -> float:
        """The largest difference of an answer, relative."""
        return max(apart(*pair) for answers in self.answers for pair in zip(answers, right, strict=True))


def boot(example: str, case: Case, kind: str, work: Path, cold_start: str) -> Boot:
    """Boot an example in Cog's server, ask it, and stop it.

    Raises:
        RuntimeError: it is not READY, a request fails, or not all is compiled in time.
    """
    shutil.rmtree(work / "directory", ignore_errors=True)
    log = new_log(work, kind)
    environ = {
        **boot_environment(work, "eager" if kind == "off" else kind, work / "store"),
        **case.environ,
        "MODEL": str(work / case.model),
        "COMPILE_CACHE_COLD_START": cold_start if kind == "first" else "background",
        "COMPILE_CACHE_SETUP_BUDGET_S": "0",
        "COMPILE_CACHE_REPORT": f"{log}.json",
        MARK: str(log),
    }
    answers, metrics = [], []
    requests = with_files(case.requests())
    began = time.monotonic()
    with with_tini(case.predictor, log, environ, EXAMPLES / example) as server:
        server.wait_ready(_READY_S)
        ready_s = time.monotonic() - began
        left = 1 if kind == "off" else _ROUNDS
        while left:
            found = [server.predict(**inputs) for inputs in requests]
            if errors := [one["error"] for one in found if one["status"] != "succeeded"]:
                raise RuntimeError(f"{example}, {kind}: {errors[0]}; see {log}")
            answers.append([case.numbers(one["output"]) for one in found])
            metrics.append([one["metrics"]["compile_cache"] for one in found])
            is_idle = not any(one["compiling"] for one in metrics[-1])
            left -= is_idle
            if time.monotonic() > began + _COMPILED_S:
                raise RuntimeError(f"{example}, {kind}: it still compiles; see {log}")
            time.sleep(_PAUSE_S if is_idle else _COMPILING_PAUSE_S)
        if kind != "off":
            wait_published(log)
        report = json.loads(Path(f"{log}.json").read_text())
        server.stop(signal.SIGTERM)
        wait_gone(str(log), _EXIT_S)  # the worker publishes in its exit, and may outlive the server
    return Boot(kind, ready_s, report, answers, metrics, jobs(log)[0])


def with_files(value: Any) -> Any:
    """The inputs of a request, with data URLs in place of words for files."""
    if isinstance(value, Mapping):
        return {name: with_files(part) for name, part in value.items()}
    return [with_files(part) for part in value] if isinstance(value, list | tuple) else file_for(value)


def check(name: str, case: Case, boots: Mapping[str, Boot]) -> dict[str, bool]:
    """What must hold."""
    right = boots["off"].answers[0]
    restored = [boots["second"], boots["third"]]
    return {
        f"{name}: answers as with COMPILE_CACHE_SCOPE=off": all(
            one.apart(right) <= case.tolerance for one in boots.values()
        ),
        f"{name}: precompiled everywhere in the second and third boot": all(one.is_precompiled for one in restored),
        f"{name}: functions are loaded in these, and the third makes none": all(one.loaded for one in restored)
        and not boots["third"].made,
        f"{name}: no request waits for a compiler": not any(one.waited for one in boots.values()),
    }


def serve(example: str, case: Case, work: Path, cold_start: str) -> dict[str, Boot]:
    """Write the weights, and boot four times."""
    work.mkdir(parents=True)
    writer = [sys.executable, str(EXAMPLES / "tiny_models.py"), case.model, str(work / case.model)]
    subprocess.run(writer, check=True)
    boots = {}
    for kind in BOOTS:
        boots[kind] = boot(example, case, kind, work, cold_start)
        print(f"{example}/{case.model}, {kind}: READY after {boots[kind].ready_s:.1f} s", flush=True)
    return boots


def row(name: str, found: Boot, right: Sequence[Any]) -> list[str]:
    """One line of the table."""
    served, difference = "<br>".join(found.served), f"{found.apart(right):.0e}"
    return [name, found.kind, f"{found.ready_s:.1f}", str(found.loaded), str(found.made), served, difference]


def chosen(names: Sequence[str]) -> list[tuple[str, Case]]:
    """Examples as `speech`, or models of them as `embeddings/e5`; all if none is named.

    Raises:
        SystemExit: there is no such example.
    """
    known = [(example, case) for example, cases in CASES.items() for case in cases]
    for name in names:
        if not any(name in (example, f"{example}/{case.model}") for example, case in known):
            raise SystemExit(f"There is no example {name}: {', '.join(CASES)}")
    return [one for one in known if not names or {one[0], f"{one[0]}/{one[1].model}"} & set(names)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Boot examples, print the table, and what holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help="as speech, or embeddings/e5; all if none is named")
    parser.add_argument("--background", action="store_true", help="the first boot compiles after READY")
    parser.add_argument("--work", type=Path, help="a folder that is kept")
    args = parser.parse_args(arguments)
    cold_start = "background" if args.background else "block"
    rows, claims = [], dict[str, bool]()
    with tempfile.TemporaryDirectory(prefix="examples-") as scratch:
        for example, case in chosen(args.examples):
            name = f"{example}/{case.model}"
            if case.needs and not find_spec(case.needs):
                print(f"{name}: left out, as it needs {case.needs}, which is not installed")
                continue
            boots = serve(example, case, (args.work or Path(scratch)).resolve() / name, cold_start)
            rows += [row(name, found, boots["off"].answers[0]) for found in boots.values()]
            claims |= check(name, case, boots)
    header = ("example", "boot", "READY, s", "functions loaded", "made", "served by", "difference")
    print(f"\n{markdown(header, rows)}\n")
    conclude(claims)


if __name__ == "__main__":
    main()
