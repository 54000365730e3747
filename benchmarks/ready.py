"""From a server's start to READY, as users have it: under Cog, in turn with what people write.

    python benchmarks/ready.py --model /tmp/flux1 --sizes 1024x1024 --rounds 5 --store /tmp/ready
    python benchmarks/ready.py --model /tmp/llama --text --rounds 5 --store /tmp/ready-llama
    python benchmarks/ready.py --model /tmp/flux1 --sizes 1024x1024 --kinds plain_to,warm --drop-pages --store /tmp/cold
    python benchmarks/ready.py --model /tmp/flux1 --project examples/flux-lora --kinds twin,eager,warm --store /tmp/lora

Each boot is a new server. `plain_to`, `plain_device_map` and `plain_parallel` are benchmarks/plain with `.to("cuda")`,
`device_map="cuda"`, and the libraries' own parallel loading; `eager` and `warm` are predict.py without and with
restored code, after a cold boot that fills the store. `run` is a first `cog run`: in a mount, with nothing stored.
`--project` boots the predictor in another folder instead; `twin` is that one with benchmarks/twin in place of the
library. `--against` allows `eager_other` and `warm_other`, those of an older checkout; `--url` allows `warm_url`,
restored from that store. Three requests follow each boot of predict.py, and of a `--project` with `--inputs`. With
--drop-pages, the weights leave the page cache before each boot, and eight threads that only read them
are timed first. After the table come the means of differences in pairs, with 90 % intervals. Each boot is added to
--out as a JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import ROOT, Model, add_line, add_model_options, boot_environment, new_log, within
from table import interval, markdown, spread

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer

_POLL_S = 0.01
_READ_BYTES = 32 << 20
_WAYS = {"plain_to": {}, "plain_device_map": {}, "plain_parallel": {"HF_ENABLE_PARALLEL_LOADING": "YES"}}
KINDS = (*_WAYS, "eager", "warm")
_COPIED = 'mount -t tmpfs none "$0" && cp -R *.py models "$0" && cd "$0" && exec "$@"'
_IN_MOUNT = ("unshare", "--mount", "--fork", "sh", "-c", _COPIED)
_REQUESTS = 3
# A boot as a JSON line.
Boot = dict[str, Any]


def boot(kind: str, model: Model, args: Any) -> Boot:
    """One server until READY. A cold one also answers once, and stores what it made."""
    root = args.against.resolve() if kind.endswith("_other") else ROOT
    new = f"run-{time.monotonic_ns()}"
    work = args.store / (new if kind == "run" else "other" if root != ROOT else "this")
    mount = work / "mount"
    mount.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(work / "directory", ignore_errors=True)  # as in a new container
    log, report = new_log(work, kind), work / "report.json"
    report.unlink(missing_ok=True)
    of = "eager" if kind.startswith("eager") else "warm"
    environ = boot_environment(work, of, args.url if kind.endswith("_url") else work / "store", root)
    environ |= {"MODEL": str(model.folder), **model.variables}
    if kind == "twin":
        environ["PYTHONPATH"] = f"{ROOT / 'benchmarks' / 'twin'}{os.pathsep}{environ['PYTHONPATH']}"
    if kind.startswith("cold"):
        environ["COMPILE_CACHE_COLD_START"] = "block"
    environ |= {"COMPILE_CACHE_REPORT": str(report), "PLAIN": kind.removeprefix("plain_"), **_WAYS.get(kind, {})}
    if args.drop_pages:
        drop_pages(model.folder)
    project = ROOT / "benchmarks" / "plain" if kind in _WAYS else args.project or root
    predictor = args.predictor or f"predict.py:{'TextPredictor' if model.is_text else 'Predictor'}"
    server = CogServer(predictor, log, environ, project, (*_IN_MOUNT, str(mount)) if kind == "run" else ())
    began = time.monotonic()
    with server:
        while (status := server.health().get("status")) != "READY":
            if status in ("SETUP_FAILED", "DEFUNCT") or server.process.poll() is not None:
                raise SystemExit(f"the {kind} boot is {status}; {log} ends with:\n{log.read_text()[-3000:]}")
            if time.monotonic() > began + args.timeout:
                raise SystemExit(f"the {kind} boot took more than {args.timeout:g} s; see {log}")
            time.sleep(_POLL_S)
        ready_s, requests = time.monotonic() - began, list[float]()
        for _ in range(0 if kind in _WAYS or not model.inputs else _REQUESTS):
            asked = time.monotonic()
            answer = server.predict(**model.inputs)
            if answer["status"] != "succeeded":
                raise SystemExit(f"a request of the {kind} boot failed: {answer}")
            requests.append(round(time.monotonic() - asked, 3))
        server.stop(signal.SIGTERM, 120)
    line: Boot = {"kind": kind, "ready_s": ready_s, "requests": requests}
    line["cores"] = len(os.sched_getaffinity(0))
    if report.exists():
        found = json.loads(report.read_text())
        line |= {"phases": found["phases"], "memory": found.get("device_peak_bytes"), "spans": found.get("spans")}
        line["regions"] = [region["settled"] for region in found["regions"]]
    told = ("plain:", "twin:", "weights.", "warning")
    line["lines"] = [text for text in log.read_text().splitlines() if any(part in text for part in told)]
    return line


def drop_pages(folder: Path) -> None:
    """Take the weights out of the page cache.

    Raises:
        SystemExit: they are still there.
    """
    for path in folder.rglob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for offset in range(0, path.stat().st_size, 64 << 20):
                with contextlib.suppress(BlockingIOError):
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
                    raise SystemExit(f"{path} is still in the page cache")


def read_seconds(folder: Path) -> float:
    """How long eight threads take to read the weights from the disk."""
    drop_pages(folder)

    def read(path: Path, begin: int) -> None:
        buffer = mmap.mmap(-1, _READ_BYTES)
        with path.open("rb", buffering=0) as file:
            for offset in range(begin, begin + 8 * _READ_BYTES, _READ_BYTES):
                os.preadv(file.fileno(), [buffer], offset)

    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        for path in folder.rglob("*.safetensors"):
            for begin in range(0, path.stat().st_size, 8 * _READ_BYTES):
                threads.submit(read, path, begin)
    return time.monotonic() - began


def row(kind: str, boots: Sequence[Boot], plain_s: float | None) -> list[str]:
    """One line of the table: medians, with their range."""
    ready = [one["ready_s"] for one in boots]

    def phase(name: str) -> str:
        return spread([one["phases"].get(name) for one in boots if "phases" in one], 2)

    ratio = f"{median(ready) / plain_s:.2f}" if plain_s else "–"
    return [kind, str(len(boots)), spread(ready, 2), ratio, phase("import"), phase("weights"), phase("warm_up")]


def pairs(ours: Sequence[Boot], theirs: Sequence[Boot], value: Callable[[Boot], float]) -> list[tuple[float, float]]:
    """The values of two boots of one round each."""
    of_round = {boot["round"]: value(boot) for boot in theirs}
    return [(value(boot), of_round[boot["round"]]) for boot in ours if boot["round"] in of_round]


def comparisons(by_kind: Mapping[str, Sequence[Boot]]) -> Iterator[str]:
    """Differences in pairs of one round: restored against eager, and this checkout against the other."""
    values: dict[str, Callable[[Boot], float]] = {
        "READY": lambda boot: boot["ready_s"],
        "without imports": lambda boot: boot["ready_s"] - boot["phases"].get("import", 0.0),
    }
    for one, other in (("warm", "eager"), ("warm", "warm_other"), ("eager", "eager_other")):
        for name, value in values.items():
            if found := pairs(by_kind.get(one, ()), by_kind.get(other, ()), value):
                yield f"{one} − {other}, {name}, s: {interval([ours - theirs for ours, theirs in found], 2)}"


def main() -> None:
    """Boot in turn, print the table, and compare in pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--project", type=Path, help="the folder of another predictor, which reads MODEL")
    parser.add_argument("--predictor", help="its class, such as predict.py:Predictor")
    parser.add_argument("--inputs", type=Path, help="a JSON file with the inputs of each request, if any is to be sent")
    parser.add_argument("--against", type=Path, help="an older checkout")
    parser.add_argument("--url", help="a store, such as s3://bucket/folder")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drop-pages", action="store_true")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    args, begun = parser.parse_args(), time.monotonic()
    args.store = args.store.resolve()
    kinds = args.kinds.split(",")
    if args.project:
        args.project = args.project.resolve()
        model = Model(args.model.resolve(), False, {}, json.loads(args.inputs.read_text()) if args.inputs else {})
    else:
        model = Model.of(args)
    for kind in {kind.replace("warm", "cold") for kind in kinds if kind.startswith("warm")}:
        if not (args.store / kind).exists():
            print(boot(kind, model, args), flush=True)
            (args.store / kind).touch()
    if args.drop_pages:
        print(f"only reading the weights takes {read_seconds(model.folder):.1f} s", flush=True)
    steps = []
    for number in range(1, args.rounds + 1):
        shift = number % len(kinds)
        steps += [(kind, number) for kind in kinds[shift:] + kinds[:shift]]
    boots: list[Boot] = []
    for kind, number in within(steps, args.limit_s - (time.monotonic() - begun)):
        found = {"model": model.folder.name, "round": number, **boot(kind, model, args)}
        print({key: value for key, value in found.items() if key != "spans"}, flush=True)
        add_line(args.out, found)
        boots.append(found)
    by_kind = {kind: [one for one in boots if one["kind"] == kind] for kind in kinds}
    plain = [
        median(one["ready_s"] for one in by_kind[kind]) for kind in kinds if kind in (*_WAYS, "twin") and by_kind[kind]
    ]
    rows = [row(kind, found, min(plain, default=None)) for kind, found in by_kind.items() if found]
    columns = ("boot", "n", "READY, s", "over the fastest plain", "import, s", "weights, s", "warm-up, s")
    print(f"\n{markdown(columns, rows)}\n")
    for line in comparisons(by_kind):
        print(line)


if __name__ == "__main__":
    main()
