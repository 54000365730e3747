"""Warm boots of two checkouts of this project in turn: is one slower than the other, and does it compute the same?

    python benchmarks/two_checkouts.py --against ../before --model /tmp/flux1 --sizes 1024x1024 --store /tmp/two
    python benchmarks/two_checkouts.py --against ../before --model /tmp/llama --text --store /tmp/two

Each checkout has a store of its own, filled by one cold boot. Then, in turn, this checkout boots eager and both boot
warm, each in a fresh process of its own code. Prints medians, the ratio pair by pair, and the digests of pictures or
logits. Exits with 1 if a warm boot compiles something.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from boot import conclude
from fresh_boot import ROOT, boot_environment, new_log, prepare, run_process
from text_boot import SIZES


@dataclass(frozen=True)
class Checkout:
    """One checkout, with a store and a cache directory of its own below `work`."""

    name: str
    root: Path
    work: Path

    def boot(self, kind: str, args: Any) -> dict[str, Any]:
        """One boot in a process of this checkout's code: what it printed."""
        script = self.root / "benchmarks" / ("one_llama_boot.py" if args.text else "one_boot.py")
        command = [sys.executable, str(script), kind]
        if args.text:
            command += ["--model", args.model, "--prompt", "128", "--tokens", str(args.tokens)]
        else:
            command += ["--steps", *map(str, args.steps)]
        environ = boot_environment(self.work, kind, self.work / "store", "regional")
        sizes = SIZES if args.text else {"IMAGE_SIZES": args.sizes, "WARM_UP_SIZES": args.sizes}
        path = os.pathsep.join(filter(None, [str(self.root), os.environ.get("PYTHONPATH")]))
        environ |= {**sizes, "MODEL": args.model, "PYTHONPATH": path}
        record = json.loads(run_process(kind, command, environ, new_log(self.work, kind), args.timeout))
        record["checkout"] = self.name
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        report = record["report"]
        print(f"{self.name} {kind}: READY after {report['process_s']:.2f} s, {figure(record):.3f} ms", flush=True)
        return record


def figure(boot: dict[str, Any]) -> float:
    """Milliseconds of a denoising step, or of a token."""
    return float(boot["token_ms"] if "token_ms" in boot else boot["step_ms"])


def import_s(boot: dict[str, Any]) -> float:
    """Seconds of the caller's imports: how fast the host is."""
    return float(boot["report"]["phases"]["import"])


def over_eager(boots: list[dict[str, Any]], eager: list[dict[str, Any]]) -> str:
    """The median of the differences of pairs, with all of them. Imports vary by seconds from boot to boot."""

    def own_s(boot: dict[str, Any]) -> float:
        return float(boot["report"]["process_s"]) - import_s(boot)

    differences = [own_s(one) - own_s(other) for one, other in zip(boots, eager, strict=False)]
    return f"{median(differences):.2f} ({', '.join(f'{difference:.2f}' for difference in differences)})"


def digest(boot: dict[str, Any]) -> str:
    """Of the first picture's pixels, or of the logits after the last token."""
    return str(boot["logits_sha256"] if "token_ms" in boot else boot["first"]["sha256"])[:12]


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each figure: both medians and the ratios of pairs."""
    values = {"step or token, ms": figure, "READY, s": lambda boot: boot["report"]["process_s"], "imports, s": import_s}
    for name, value in values.items():
        pairs = [(value(one), value(other)) for one, other in zip(ours, theirs, strict=False)]
        ratios = [one / other for one, other in pairs]
        yield (
            f"{name}: {median(one for one, _ in pairs):.3f} against {median(other for _, other in pairs):.3f}, "
            f"ratio {median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}), n = {len(ratios)}"
        )
    yield f"digests: {sorted(set(map(digest, ours)))} against {sorted(set(map(digest, theirs)))}"


def main() -> None:
    """Boot both in turn, compare, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--model", required=True, help="a model's folder")
    parser.add_argument("--text", action="store_true", help="it is a language model")
    parser.add_argument("--sizes", default="64x64", help="of pictures, as 1024x1024")
    parser.add_argument("--steps", type=int, nargs=2, default=(4, 12), help="a step takes their difference")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directories and logs")
    parser.add_argument("--warm", type=int, default=4, help="warm boots of each checkout")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one boot and its predictions")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    args = parser.parse_args()
    work = prepare(args.store)
    args.model = str(Path(args.model).resolve())
    checkouts = [Checkout("this", ROOT, work / "this"), Checkout("other", args.against.resolve(), work / "other")]
    for checkout in checkouts:
        checkout.work.mkdir()
        checkout.boot("cold", args)
    eager, ours, theirs = [], [], []
    for _ in range(args.warm):
        eager.append(checkouts[0].boot("eager", args))
        for found, checkout in zip((ours, theirs), checkouts, strict=True):
            found.append(checkout.boot("warm", args))
    for name, boots in (("this", ours), ("the other", theirs)):
        print(f"{name}, READY over eager, imports left out, s: {over_eager(boots, eager)}")
    for line in compare(ours, theirs):
        print(line)
    conclude(
        {
            "every warm boot of this checkout is fully precompiled": all(
                b["report"]["fully_precompiled"] for b in ours
            ),
            "every warm boot of the other is fully precompiled": all(b["report"]["fully_precompiled"] for b in theirs),
        }
    )


if __name__ == "__main__":
    main()
