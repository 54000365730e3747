"""A boot in a process of its own: its environment, its log, what is asked of it, and the file of what came of it.

Imports no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "a handwritten three"
SEED = 0
_STEPS = 4
# Of large language models; the caller's own variables come first.
_TEXT_SIZES = {"CACHE_TOKENS": "2304", "PROMPT_BUCKETS": "128,2048"}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """What `Model.of` reads."""
    parser.add_argument("--model", type=Path, help="a model's folder; a demo model if not given, which a CPU can boot")
    parser.add_argument("--text", action="store_true", help="it is a language model")
    parser.add_argument("--sizes", default="64x64", help="as 1024x1024,768x1024; all are warmed up, the first is drawn")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt of random words")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")


@dataclass(frozen=True, slots=True)
class Model:
    """What is booted: its folder, the variables that give its sizes, and the inputs of a request."""

    folder: Path
    is_text: bool
    variables: Mapping[str, str]
    inputs: dict[str, Any]

    @classmethod
    def of(cls, args: Any) -> Model:
        """From a command line with `add_model_options`."""
        if args.text:
            return cls.of_text(args.model, args.prompt, args.tokens)
        return cls.of_pictures(args.model, args.sizes)

    @classmethod
    def of_pictures(cls, folder: Path | None, sizes: str) -> Model:
        """`sizes` as 1024x1024,768x1024: the first is drawn."""
        width, height = map(int, sizes.partition(",")[0].split("x"))
        inputs = {"prompt": PROMPT, "num_inference_steps": _STEPS, "seed": SEED, "width": width, "height": height}
        folder = (folder or ROOT / "demo/flux-digits").resolve()
        return cls(folder, False, {"IMAGE_SIZES": sizes, "WARM_UP_SIZES": sizes}, inputs)

    @classmethod
    def of_text(cls, folder: Path | None, prompt: int, tokens: int) -> Model:
        """A greedy answer of `tokens` to `prompt` tokens. A small model has its own sizes."""
        folder = (folder or ROOT / "demo/llama-adder").resolve()
        config = json.loads((folder / "config.json").read_text())
        positions = config["max_position_embeddings"]
        is_small = positions < int(_TEXT_SIZES["CACHE_TOKENS"])
        sizes = {"CACHE_TOKENS": str(positions), "PROMPT_BUCKETS": str(positions // 2)} if is_small else _TEXT_SIZES
        text = "123+456=" if is_small else made_up_text(config["vocab_size"], prompt)
        variables = {name: os.environ.get(name, value) for name, value in sizes.items()}
        inputs = {"prompt": text, "max_new_tokens": tokens, "temperature": 0.0, "seed": SEED}
        return cls(folder, True, variables, inputs)


def made_up_text(vocabulary: int, tokens: int) -> str:
    """Random words of the tokenizer that llama.py writes, a token each: the same on every machine."""
    source = random.Random(SEED)
    return " ".join(f"w{source.randrange(vocabulary)}" for _ in range(tokens))


def boot_environment(work: Path, kind: str, store: Path | str, root: Path = ROOT) -> dict[str, str]:
    """This process's variables, and those of a benchmark's boots: in the folder `work`, with the code in `root`."""
    return {
        **os.environ,
        "COMPILE_CACHE_STORE": str(store),
        "COMPILE_CACHE_DIR": str(work / "directory"),
        "COMPILE_CACHE_SCOPE": "off" if kind == "eager" else "regional",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
    }


def new_log(work: Path, kind: str) -> Path:
    """A new file for what a boot writes to stderr."""
    return work / f"{time.strftime('%H%M%S')}-{kind}-{time.monotonic_ns() % 10**6}.log"


def prepare(work: Path) -> Path:
    """The absolute path of a benchmark's folder, made if it is not there.

    Raises:
        SystemExit: it has something in it, so that a cold boot might not be cold.
    """
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        raise SystemExit(f"{work} is not empty; give --store a new folder")
    return work.resolve()


def run_process(kind: str, command: Sequence[str], environ: Mapping[str, str], log: Path, timeout_s: float) -> str:
    """Run a boot in a process of its own, with stderr in `log`; the last line that it prints.

    Raises:
        SystemExit: the boot failed or took longer than `timeout_s`; names its log.
    """
    with log.open("w") as stderr:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the {kind} boot took more than {timeout_s:g} s; see {log}") from None
        finally:
            end(child)
    lines = output.splitlines()
    if child.returncode or not lines:
        raise SystemExit(f"the {kind} boot ended with {child.returncode}; {log} ends with:\n{log.read_text()[-3000:]}")
    return lines[-1]


def end(child: subprocess.Popen[Any]) -> None:
    """Kill the process and those that it started, if it still runs."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def within(steps: Sequence[T], limit_s: float) -> Iterator[T]:
    """The steps, as long as the next one ends within `limit_s` if it takes as long as the longest before it."""
    begun, longest_s = time.monotonic(), 0.0
    for step in steps:
        started = time.monotonic()
        if started + longest_s > begun + limit_s:
            print(f"no further boot: {limit_s:g} s are nearly over", flush=True)
            return
        yield step
        longest_s = max(longest_s, time.monotonic() - started)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The JSON of each line; none if the file is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_line(file: Path | None, record: Mapping[str, Any]) -> None:
    """Add a line of JSON to the file, if there is one."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def conclude(results: Mapping[str, bool]) -> None:
    """Print each claim of a benchmark and whether it holds.

    Raises:
        SystemExit: one does not.
    """
    for claim, holds in results.items():
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    if not all(results.values()):
        raise SystemExit(1)
