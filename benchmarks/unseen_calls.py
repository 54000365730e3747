"""Requests of kinds that nobody warmed up: does one of them wait for a compiler, and are they precompiled afterwards?

    python benchmarks/pipelines.py --shape z-image --out /tmp/z-image
    python benchmarks/unseen_calls.py --model /tmp/z-image --sizes 1024x1024,768x1024,1024x768 --store /tmp/unseen

Three boots, each a process of its own: an eager one; one with an empty store that compiles in the background; and the
next one from its store. The first two get the same requests in the same order: of all sizes, of which only the first is
warmed up, with the pipeline's own guidance and with 1.0, and prompts of 1 to 200 words. Then, when all is compiled, and
in the next boot, each kind is asked for again. Exits with 1 if a check fails; with --bars, times are checked as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import ROOT, SEED, boot_environment, conclude, new_log, prepare, run_process
from one_unseen import Asked, Part
from served import Answer
from table import markdown, percentile

_LONGEST_PROMPT = 200
# Kinds are asked for again until one round is precompiled as a whole: a length of a prompt may have its code late.
_ROUNDS = 3
# What --bars checks: the 99th percentile over the kind's eager median and over its eager 99th percentile, and the most
# seconds over the median.
_P99 = 1.3
_WORST_S = 1.0


@dataclass(frozen=True, slots=True)
class Mix:
    """The requests. A kind is a size and whether guidance is 1.0; prompts differ from request to request."""

    sizes: tuple[tuple[int, int], ...]
    guidance: tuple[float | None, ...]
    steps: int
    count: int

    def kinds(self) -> list[dict[str, Any]]:
        """The inputs that make a kind."""
        return [
            {"width": width, "height": height, **({} if scale is None else {"guidance_scale": scale})}
            for width, height in self.sizes
            for scale in self.guidance
        ]

    def requests(self) -> tuple[dict[str, Any], ...]:
        """As many of each kind, in an order and with prompts that a seed gives."""
        rng = random.Random(SEED)
        kinds = self.kinds()
        chosen = [kinds[number % len(kinds)] for number in range(self.count)]
        rng.shuffle(chosen)
        return tuple(self._request(kind, rng.randint(1, _LONGEST_PROMPT), rng) for kind in chosen)

    def each_once(self) -> tuple[dict[str, Any], ...]:
        """Each kind, with the shortest prompt, the longest and one between."""
        rng = random.Random(SEED + 1)
        lengths = (1, _LONGEST_PROMPT // 2, _LONGEST_PROMPT)
        return tuple(self._request(kind, words, rng) for kind in self.kinds() for words in lengths)

    def _request(self, kind: Mapping[str, Any], words: int, rng: random.Random) -> dict[str, Any]:
        prompt = " ".join(f"w{rng.randint(2, 999)}" for _ in range(words))
        return {**kind, "prompt": prompt, "seed": SEED, "num_inference_steps": self.steps}


def kind_of(request: Mapping[str, Any]) -> str:
    """`1024x768, guidance 1`."""
    scale = request.get("guidance_scale")
    return f"{request['width']}x{request['height']}" + ("" if scale is None else f", guidance {scale:g}")


@dataclass(frozen=True, slots=True)
class Plan:
    """What all boots have in common."""

    model: str
    mix: Mix
    work: Path
    deadline_s: float

    def run(self, kind: str, parts: Sequence[Part]) -> Asked:
        """One boot and its requests.

        Raises:
            SystemExit: it failed, or the time is up; names its log.
        """
        timeout_s = max(1.0, self.deadline_s - time.monotonic())
        sizes = [f"{width}x{height}" for width, height in self.mix.sizes]
        environ = boot_environment(self.work, kind, self.work / "store")
        environ |= {"MODEL": self.model, "IMAGE_SIZES": ",".join(sizes), "WARM_UP_SIZES": sizes[0]}
        environ["COMPILE_CACHE_COLD_START"] = "background"  # as behind Cog's server
        log = new_log(self.work, kind)
        file = log.with_suffix(".json")
        file.write_text(json.dumps([dataclasses.asdict(part) for part in parts]))
        command = [sys.executable, str(ROOT / "benchmarks" / "one_unseen.py"), kind, str(file)]
        return Asked.from_json(run_process(kind, command, environ, log, timeout_s))


def boots(plan: Plan, patience_s: float) -> Iterator[Asked]:
    """The three boots, as far as the time allows."""
    requests, once = plan.mix.requests(), plan.mix.each_once()
    again = [Part(f"again {number}", once, patience_s) for number in range(1, _ROUNDS + 1)]
    parts = {
        "eager": [Part("unseen", requests)],
        "background": [Part("unseen", requests), *again],
        "next": [Part("again 1", once)],
    }
    for kind, asked in parts.items():
        try:
            found = plan.run(kind, asked)
        except SystemExit as failed:
            print(failed, flush=True)
            return
        waits = ", ".join(
            "not in time" if wait is None else f"{wait:.1f} s" for wait in found.waited_s.values() if wait != 0
        )
        extra = "" if found.extra_bytes is None else f"; {found.extra_bytes / 1e9:.2f} GB outside its torch, over READY"
        print(
            f"{kind}: READY after {found.report['process_s']:.2f} s; "
            f"{sum(map(len, found.parts.values()))} predictions; waited {waits or 'for nothing'}{extra}",
            flush=True,
        )
        yield found


@dataclass(frozen=True, slots=True)
class Excess:
    """The requests of one kind: seconds each, and the eager boot's median and 99th percentile of the same kind."""

    name: str
    seconds: list[float]
    eager_s: float
    eager_p99_s: float

    @property
    def ratios(self) -> list[float]:
        """Over the eager median."""
        return [seconds / self.eager_s for seconds in self.seconds]

    @property
    def p99_ratio(self) -> float:
        """The 99th percentile over the eager boot's. That one has slow requests too: the first of the kind, for one."""
        return percentile(self.seconds, 99) / self.eager_p99_s

    @property
    def worst_s(self) -> float:
        """The most over the eager median."""
        return max(self.seconds) - self.eager_s


def excesses(requests: Sequence[Mapping[str, Any]], answers: Sequence[Answer], eager: Sequence[Answer]) -> list[Excess]:
    """By kind."""
    found = []
    for name in dict.fromkeys(map(kind_of, requests)):
        own = [number for number, request in enumerate(requests) if kind_of(request) == name]
        eager_s = [eager[number].seconds for number in own]
        seconds = [answers[number].seconds for number in own]
        found.append(Excess(name, seconds, median(eager_s), percentile(eager_s, 99)))
    return found


def table(requests: Sequence[Mapping[str, Any]], eager: Asked, background: Asked) -> str:
    """A row for each kind and each of the two boots."""
    rows = []
    for boot in (eager, background):
        every = excesses(requests, boot.parts["unseen"], eager.parts["unseen"])
        for one in every:
            rows.append(
                [boot.kind, one.name, len(one.seconds), f"{one.eager_s * 1e3:.1f}"]
                + [f"{percentile(one.seconds, percent) * 1e3:.1f}" for percent in (50, 99)]
                + [f"{percentile(one.ratios, percent):.3f}" for percent in (50, 99)]
                + [f"{one.p99_ratio:.3f}", f"{one.worst_s * 1e3:.1f}"]
            )
        ratios = [ratio for one in every for ratio in one.ratios]
        row = [
            boot.kind,
            "all",
            len(ratios),
            "–",
            "–",
            "–",
            *(f"{percentile(ratios, percent):.3f}" for percent in (50, 99)),
            f"{max(one.p99_ratio for one in every):.3f}",
        ]
        rows.append([*row, f"{max(one.worst_s for one in every) * 1e3:.1f}"])
    header = (
        "boot",
        "kind",
        "n",
        "eager median, ms",
        "p50, ms",
        "p99, ms",
        "p50 / eager",
        "p99 / eager",
        "p99 / eager p99",
        "worst − eager, ms",
    )
    return markdown(header, rows)


def check(found: Mapping[str, Asked]) -> dict[str, bool]:
    """Every claim that has a yes or no, and no seconds."""
    background, following = found.get("background"), found.get("next")
    results = {"there is an eager boot, one in the background and a next one": len(found) == 3}
    if background:
        every = [answer for part in background.parts.values() for answer in part]
        again = [part for name, part in background.parts.items() if name.startswith("again")]
        of_eager = {answer.sha256 for answer in found["eager"].parts["unseen"]}
        own = {answer.sha256 for answer in background.parts["unseen"] if answer.is_eager}
        results |= {
            "no request compiles, or waits for a compiler": not any(one.compiled_now or one.waited_s for one in every),
            "nothing is compiled before READY": not made_in_setup(background),
            "what is served eager is the eager boot's": own <= of_eager,
            "all is compiled in time": None not in background.waited_s.values(),
            "each kind is precompiled when it is asked for again": all(one.is_precompiled for one in again[-1]),
        }
    if following:
        answers = following.parts["again 1"]
        results |= {
            "the next boot compiles nothing": not made_in_setup(following)
            and not any(one.compiled_now for one in answers),
            "each kind is precompiled in the next boot": all(one.is_precompiled for one in answers),
        }
    return results


def made_in_setup(asked: Asked) -> int:
    """Graphs, lookups that found nothing, kernels and artifacts of a boot until READY."""
    counts = asked.report["counts"]
    lookups = sum(count for name, count in counts.items() if name.endswith(("_misses", "_bypasses")))
    return int(counts["graphs"] + counts["precompiled_made"] + counts["kernels_compiled"] + lookups)


def bars(every: Sequence[Excess]) -> dict[str, bool]:
    """Claims about seconds, for an idle machine."""
    ratios = [ratio for one in every for ratio in one.ratios]
    return {
        f"p99 is at most {_P99:g} times the kind's eager median": percentile(ratios, 99) <= _P99,
        f"each kind's p99 is at most {_P99:g} times its eager p99": max(one.p99_ratio for one in every) <= _P99,
        f"the worst takes at most {_WORST_S:g} s more": max(one.worst_s for one in every) <= _WORST_S,
    }


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """`64x64,96x64` → ((64, 64), (96, 64))."""
    return tuple((int(width), int(height)) for width, height in (size.split("x") for size in text.split(",")))


def main() -> None:
    """Boot, ask, print the table, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/flux-digits", help="a pipeline's folder")
    parser.add_argument("--sizes", type=parse_sizes, default="64x64,96x64,64x96", help="only the first is warmed up")
    parser.add_argument("--without-guidance", action="store_true", help="leave out requests with a guidance of 1.0")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that compiling is waited for")
    parser.add_argument(
        "--store", type=Path, required=True, help="new folder for the store, cache directories and logs"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of everything")
    parser.add_argument("--bars", action="store_true", help="check times too, for an idle machine")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    args = parser.parse_args()
    guidance = (None,) if args.without_guidance else (None, 1.0)
    mix = Mix(args.sizes, guidance, args.steps, args.requests)
    model = str(Path(args.model).resolve())
    plan = Plan(model, mix, prepare(args.store), time.monotonic() + args.limit_s)
    found: dict[str, Asked] = {}
    for asked in boots(plan, args.patience):
        found[asked.kind] = asked
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**dataclasses.asdict(asked), "model": model}) + "\n")
    results = check(found)
    if {"eager", "background"} <= found.keys():
        print(f"\n{table(mix.requests(), found['eager'], found['background'])}\n")
        if args.bars:
            answers = found["background"].parts["unseen"]
            results |= bars(excesses(mix.requests(), answers, found["eager"].parts["unseen"]))
    conclude(results)


if __name__ == "__main__":
    main()
