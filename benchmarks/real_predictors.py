"""Public Cog predictors with random weights, in Cog's server: untouched, and three boots with a patch of ours.

    git clone https://github.com/lucataco/cog-SigLip checkouts/lucataco/cog-SigLip
    python benchmarks/real_predictors.py --checkouts checkouts --work /tmp/real --only siglip --out real.jsonl
    python benchmarks/real_predictors.py --out real.jsonl
    python benchmarks/real_predictors.py --full --checkouts checkouts --work /tmp/full --only z-image --out full.jsonl

A predictor's files are read from its checkout at the commit that predictors.toml names. They are changed so that they
run on a CPU. `patches` has what an adopter changes. All boots use one cache directory, empty at first. The patched
boots share a store, and the first one waits until all is compiled and published. The second command prints the table
of all lines in `real.jsonl`.

--full needs a GPU. It serves some predictors with weights of their published shapes and two patched boots, and reports
the seconds of their requests.

Exits with 1 if an answer differs from the untouched predictor's, if a boot is READY late, if a request waits for a
compiler, if the last boot makes anything, or if patches are long.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
import wave
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from fresh_boot import ROOT, add_line, boot_environment, conclude, new_log, prepare, read_lines
from PIL import Image
from servers import MARK, wait_gone, with_tini
from table import markdown

BENCHMARKS = ROOT / "benchmarks"
PREDICTORS: dict[str, dict[str, Any]] = tomllib.loads((BENCHMARKS / "predictors.toml").read_text())
BOOTS = ("untouched", "first", "second", "third")
_READY_S = 200.0
_EXIT_S = 15.0
# What could not be compared is published 60 s after it arrived.
_PUBLISHED_S = 90.0
_PAUSE_S = 0.5
_COMPILING_PAUSE_S = 4.0  # what predictions leave to the second process, which has the lowest priority
_ROUNDS = 3  # after all is compiled: new code is compared in one, and serves from the next on
_STEADY = 2  # the last of them, which are timed
_MADE = re.compile(r'background\.done .*reason=([^"\n]*)')
_LATE, _LATE_S = 1.1, 2.0
_MOST_LINES = 12
_TOLERANCE = 1e-2
_ON_CPU = [['"cuda"', '"cpu"'], ["'cuda'", "'cpu'"], ["torch.float16", "torch.float32"], ['variant="fp16",', ""]]


@dataclass(frozen=True, slots=True)
class Public:
    """A public predictor, tiny or of full size: as predictors.toml says, with inputs in place of words for files."""

    replaced: list[list[str]]
    requests: list[dict[str, Any]]
    weights: dict[str, Any]

    @classmethod
    def of(cls, name: str, is_full: bool) -> Public:
        """By its name."""
        known = PREDICTORS[name]
        replaced, requests = known.get("replace", []), known["requests"]
        weights = {"device": "cpu", "dtype": "float32", "sizes": known.get("sizes", {})}
        if is_full:
            full = known["full"]
            weights = {"device": "cuda", "dtype": full["dtype"], "sizes": full.get("sizes", {})}
            requests = [{**requests[0], **each} for each in full["requests"]]
            replaced = [*replaced, *full.get("replace", [])]
        else:
            replaced = [*_ON_CPU, *replaced, *known.get("small", [])]
        inputs = [{key: file_for(value) for key, value in each.items()} for each in requests]
        return cls(replaced, inputs, weights)

    def text(self, source: str) -> str:
        """A file of it as it is served."""
        for old, new in self.replaced:
            source = source.replace(old, new)
        return source

    @property
    def steps(self) -> tuple[int, ...]:
        """The denoising steps of each request; 0 if it does not say."""
        return tuple(inputs.get("num_inference_steps", inputs.get("steps", 0)) for inputs in self.requests)


def file_for(value: Any) -> Any:
    """The data URL of noise for `picture 64 80` or `sound 2`; what else it is, it stays."""
    kind, *sizes = str(value).split()
    noise, file = numpy.random.default_rng(0), io.BytesIO()
    if kind == "picture":
        width, height = map(int, sizes)
        pixels = noise.integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(file, "png")
        return data_url("image/png", file)
    if kind == "sound":
        with wave.open(file, "wb") as writer:
            writer.setparams((1, 2, 16000, 0, "NONE", ""))
            samples = noise.integers(-9000, 9000, 16000 * int(sizes[0]), dtype=numpy.int16)
            writer.writeframes(samples.tobytes())
        return data_url("audio/wav", file)
    return value


def data_url(kind: str, file: io.BytesIO) -> str:
    """What is in the file, as an input of Cog's server."""
    return f"data:{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot. `served` has the steps of its last predictions. `made` and `failed` count the jobs of the second
    process by whether they made code. `waited` counts predictions that compiled or waited for it. `error` is the
    largest. `import_s` of `ready_s` imported the predictor's file, with torch. `rounds` are the seconds of each
    request, as often as all were asked."""

    ready_s: float
    import_s: float = 0.0
    cached_s: float = 0.0
    served: tuple[str, ...] = ()
    made: int = 0
    failed: int = 0
    waited: int = 0
    is_settled: bool = True
    error: float = 0.0
    rounds: tuple[tuple[float, ...], ...] = ()

    @property
    def steady(self) -> list[float]:
        """The seconds of each request in the end."""
        return [median(seconds) for seconds in zip(*self.rounds[-_STEADY:], strict=True)]


@dataclass(frozen=True, slots=True)
class Result:
    """All boots of a predictor. `added` and `removed` count the patch's lines but for changes of white space. `steps`
    are those of each request."""

    name: str
    added: int
    removed: int
    boots: dict[str, Boot]
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any]) -> Result:
        """From a line of the file of results."""
        return cls(**{**record, "boots": {kind: Boot(**boot) for kind, boot in record["boots"].items()}})


def numbers(output: Any) -> Any:
    """The numbers of an answer: a picture's pixels, an array, or those in a text. A text without numbers is itself."""
    if isinstance(output, list) and output and isinstance(output[0], str):
        found = [numbers(part) for part in output]
        is_text = any(isinstance(part, str) for part in found)
        return "".join(map(str, found)) if is_text else numpy.concatenate([part.ravel() for part in found])
    if isinstance(output, dict):
        return numpy.array(next(iter(output.values())), dtype=float)
    if not output.startswith("data:"):
        return numpy.array(json.loads(output), dtype=float) if output.startswith("[") else output
    content = base64.b64decode(output.partition(",")[2])
    if content.startswith(b"\x93NUMPY"):
        return numpy.load(io.BytesIO(content)).astype(float)
    with Image.open(io.BytesIO(content)) as image:
        return numpy.asarray(image, dtype=float)


def apart(found: Any, right: Any) -> float:
    """‖found − right‖ / ‖right‖; of texts 0 or infinite."""
    if isinstance(found, str) or isinstance(right, str):
        return 0.0 if isinstance(found, type(right)) and found == right else math.inf
    if found.shape != right.shape:
        return math.inf
    return float(numpy.linalg.norm(found - right) / numpy.linalg.norm(right))


def write_predictor(name: str, checkouts: Path, work: Path, is_full: bool) -> tuple[int, int]:
    """Write the untouched and the patched predictor, with their weights; the patch's lines, added and removed.

    Raises:
        CalledProcessError: the checkout lacks the commit, or the patch does not fit.
    """
    import predictor_models

    known, public = PREDICTORS[name], Public.of(name, is_full)
    files = known.get("files", ["predict.py"])
    plain, patched, original, changed = (work / part for part in ("untouched", "patched", "original", "changed"))
    for folder in (plain, original):
        folder.mkdir()
    for file in files:
        shown = f"{known['commit']}:{Path(known.get('folder', ''), file)}"
        command = ["git", "-C", str(checkouts / known["repository"]), "show", shown]
        (original / file).write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        (plain / file).write_text(public.text((original / file).read_text()))
    for stub in (*known.get("stubs", ()), "observed.py"):
        shutil.copy(BENCHMARKS / "stubs" / stub, plain / stub)
    predictor_models.build(name, plain, **public.weights)
    shutil.copytree(plain, patched, copy_function=os.link)
    shutil.copytree(original, changed)
    patch = str(BENCHMARKS / "patches" / f"{name}.patch")
    subprocess.run(["git", "apply", "--unidiff-zero", patch], cwd=changed, check=True)
    for file in files:
        prefix = "import observed\n" if file == "predict.py" else ""
        (patched / file).unlink()
        (patched / file).write_text(prefix + public.text((changed / file).read_text()))
    return count_lines(original, changed)


def count_lines(before: Path, after: Path) -> tuple[int, int]:
    """Lines that `git diff -w` adds and removes."""
    command = ["git", "diff", "--no-index", "-w", "--numstat", str(before), str(after)]
    told = subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines()
    return sum(int(line.split()[0]) for line in told), sum(int(line.split()[1]) for line in told)


def boot(name: str, kind: str, work: Path, requests: Sequence[dict[str, Any]], answers: list[Any], args: Any) -> Boot:
    """Boot a predictor in Cog's server and ask it. The untouched one's answers go into `answers`.

    Raises:
        RuntimeError: it is not READY, or a prediction fails.
    """
    is_plain = kind == "untouched"
    shutil.rmtree(work / "directory", ignore_errors=True)
    log = new_log(work, kind)
    metrics = Path(f"{log}.metrics")
    metrics.touch()
    environ = boot_environment(work, kind, work / "store") | {
        "OBSERVED_METRICS": str(metrics),
        MARK: str(log),
    }
    environ |= {"COMPILE_CACHE_COLD_START": "background", "COMPILE_CACHE_REPORT": f"{log}.json"}
    began = time.monotonic()
    with with_tini("predict.py:Predictor", log, environ, work / ("untouched" if is_plain else "patched")) as server:
        server.wait_ready(_READY_S)
        ready_s = time.monotonic() - began
        at_ready = [] if is_plain else json.loads(Path(f"{log}.json").read_text())["regions"]
        skipped = len(metrics.read_text().splitlines())
        error, left = 0.0, _ROUNDS
        found, rounds = list[dict[str, Any]](), list[tuple[float, ...]]()
        while left and time.monotonic() < began + args.limit_s:
            seconds = ()
            for number, inputs in enumerate(requests):
                asked = time.monotonic()
                answer = server.predict(**inputs)
                seconds += (time.monotonic() - asked,)
                if answer["status"] != "succeeded":
                    raise RuntimeError(f"{name}, {kind}: {answer.get('error')}; see {log}")
                output = numbers(answer["output"])
                if len(answers) == number:
                    answers.append(output)
                error = max(error, apart(output, answers[number]))
            rounds.append(seconds)
            found = [json.loads(line) for line in metrics.read_text().splitlines()[skipped:]]
            is_idle = all(one["compile_cache.compiling"] == 0 for one in found[-len(requests) :])
            left -= is_idle
            time.sleep(_PAUSE_S if is_idle else _COMPILING_PAUSE_S)
        if not is_plain:
            wait_published(log)
        server.stop(signal.SIGTERM)
        wait_gone(str(log), _EXIT_S)  # the worker publishes in its exit, and may outlive the server
    if is_plain:
        return Boot(ready_s, import_seconds(log), error=error, rounds=tuple(rounds))
    made, failed = jobs(log)
    served = {
        f"{region}: {steps}" for one in found[-len(requests) :] for region, steps in one["compile_cache.served"].items()
    }
    return Boot(
        ready_s,
        import_seconds(log),
        sum(float(region["compare_s"]) for region in at_ready if region["step"] == "graphs"),
        tuple(sorted(served)),
        made,
        failed,
        sum(bool(one["compile_cache.compiled_now"]) for one in found),
        not left,
        error,
        tuple(rounds),
    )


def jobs(log: Path) -> tuple[int, int]:
    """How many jobs of the second process made code, and how many did not."""
    reasons = _MADE.findall(log.read_text())
    made = sum(reason == "-" or "the next boot" in reason for reason in reasons)
    return made, len(reasons) - made


def wait_published(log: Path) -> None:
    """Wait until a pack was put after the last job, for a while."""
    deadline = time.monotonic() + _PUBLISHED_S
    while (told := log.read_text()).rfind("publish.put") < told.rfind("background.done"):
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)


def import_seconds(log: Path) -> float:
    """How long Cog's worker imported the predictor's file."""
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"timestamp"'))
    told = {line["fields"]["message"]: line["timestamp"] for line in lines}
    began, ended = (datetime.fromisoformat(told[message]) for message in ("Loading predictor", "Running setup"))
    return (ended - began).total_seconds()


def check(results: Sequence[Result]) -> dict[str, bool]:
    """What must hold. READY leaves out the import of the predictor's file. That differs from boot to boot, and a
    patched one calls `boot()` in it."""
    claims = dict[str, bool]()
    for result in results:
        plain, *patched = result.boots.values()
        limit_s = _LATE * plain.ready_s + _LATE_S - plain.import_s
        name, first, last = result.name, patched[0], patched[-1]
        tolerance = PREDICTORS[name].get("tolerance", _TOLERANCE)
        claims |= {
            f"{name}: answers are the untouched predictor's to {tolerance:g}": all(
                found.error <= tolerance for found in patched
            ),
            f"{name}: no request waits for a compiler": not any(found.waited for found in patched),
            f"{name}: READY at most {_LATE:g} × untouched + {_LATE_S:g} s, and what graphs took": all(
                found.ready_s - found.import_s <= limit_s + found.cached_s for found in patched
            ),
            f"{name}: the last boot makes nothing": not last.made and last.failed <= first.failed,
            f"{name}: all was compiled in time": all(found.is_settled for found in patched),
        }
    lines = median(result.added + result.removed for result in results)
    return claims | {f"the median patch has at most {_MOST_LINES} lines": lines <= _MOST_LINES}


def row(result: Result) -> list[str]:
    """One line of the table."""
    plain, *patched = (result.boots[kind] for kind in BOOTS)
    seconds = [f"{plain.ready_s - plain.import_s:.2f}"]
    seconds += [f"{found.ready_s - found.import_s - plain.ready_s + plain.import_s:+.2f}" for found in patched]
    made = ", ".join(f"{found.made}/{found.failed}" for found in patched)
    error = max(found.error for found in patched)
    kind, repository = (PREDICTORS[result.name][key] for key in ("kind", "repository"))
    lines = f"+{result.added} −{result.removed}"
    return [kind, repository, lines, *seconds, "<br>".join(patched[-1].served), made, f"{error:.0e}"]


def timed_rows(result: Result) -> list[list[str]]:
    """A line for each boot of the table with --full. A step is the difference of two requests."""
    rows = []
    for kind, found in result.boots.items():
        first, steady, steps = found.rounds[0], found.steady, result.steps
        step = f"{1e3 * (steady[1] - steady[0]) / (steps[1] - steps[0]):.1f}" if len(steps) > 1 else ""
        ready = (f"{found.ready_s:.2f}", f"{found.ready_s - found.import_s:.2f}")
        seconds = (" / ".join(f"{one:.2f}" for one in each) for each in (first, steady))
        made = f"{found.made}/{found.failed}"
        rows.append([result.name, kind, *ready, *seconds, step, f"{found.error:.0e}", "<br>".join(found.served), made])
    return rows


def main() -> None:
    """Boot the predictors, or print the table of what was booted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, help="folder of clones, each in owner/name; without it, only prints")
    parser.add_argument("--work", type=Path, help="new folder for predictors, weights, stores and logs")
    parser.add_argument("--only", action="append", choices=PREDICTORS, help="these predictors alone")
    parser.add_argument("--out", type=Path, required=True, help="file of results, a line each")
    parser.add_argument("--full", action="store_true", help="full-size weights, on a GPU")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds of a boot in which all is to be compiled")
    args = parser.parse_args()
    if args.checkouts is not None:
        serve(args)
    last = {result.name: result for result in map(Result.of, read_lines(args.out))}
    results = [result for name, result in last.items() if not args.only or name in args.only]
    if args.full:
        header = ("predictor", "boot", "READY, s", "but imports", "first requests, s", "last", "step, ms")
        rows = [line for result in results for line in timed_rows(result)]
        print(f"\n{markdown((*header, 'error', 'served by', 'made/failed'), rows)}\n")
    else:
        header = ("kind", "predictor", "lines", "setup, s", "first", "second", "third")
        print(f"\n{markdown((*header, 'served by', 'made/failed', 'error'), map(row, results))}\n")
    conclude(check(results))


def serve(args: Any) -> None:
    """Boot each predictor, and add its result to the file."""
    folder = prepare(args.work)
    for name in args.only or [name for name in PREDICTORS if not args.full or "full" in PREDICTORS[name]]:
        public, work, answers, boots = Public.of(name, args.full), folder / name, list[Any](), dict[str, Boot]()
        work.mkdir()
        with ProcessPoolExecutor(1, get_context("spawn")) as builder:  # it leaves the GPU's memory
            lines = builder.submit(write_predictor, name, args.checkouts.resolve(), work, args.full).result()
        for kind in BOOTS[:3] if args.full else BOOTS:
            boots[kind] = boot(name, kind, work, public.requests, answers, args)
            print(name, kind, boots[kind], flush=True)
        add_line(args.out, asdict(Result(name, *lines, boots, public.steps)))


if __name__ == "__main__":
    main()
