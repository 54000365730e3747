"""Modules at random, each served by the library and eager side by side: answers and states must be the same.

    python benchmarks/fuzz_serving.py --seed 0 --modules 100 --calls 20

Modules are made by random_modules.py. Some boots share a store: the first one finds it empty. Each call is made twice,
of a module that the boot serves and of its twin, which is never compiled. Compared are the answer, what the call wrote
into its inputs and its module, and the next numbers of torch's generator. Some calls are cancelled. With `--kills`,
second processes are killed; with `--threads`, calls are made at the same time.

Prints a table by feature, and each difference with the command that shows it again. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import importlib
import json
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from random_modules import FEATURES, WIDTH, RandomModule, make_modules, source_of
from table import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import nn

_PATIENCE_S = 900.0
_SETTINGS = {
    "COLD_START": ("background", "background", "block"),
    "UNSEEN": ("auto", "background", "eager", "block"),
    "DYNAMIC": ("false", "false", "auto"),
}
_CANCELLED = 0.1
# The largest ‖found − expected‖ / ‖expected‖. A state adds the rounding of several calls up.
_TOLERANCE = {"float32": 3e-3, "bfloat16": 1e-1}


@dataclass
class Tally:
    """A module's calls in one boot, or a feature's in all. `wrong` has the first difference of each module."""

    modules: int = 0
    calls: int = 0
    compiled: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


# The process that serves.


class Subject:
    """A module that the boot serves, and its twin."""

    def __init__(self, made: RandomModule, boot: int, device: str) -> None:
        import torch

        self.made, self._boot, self._device = made, boot, device
        self._code = importlib.import_module("fuzzed")
        self.tally = Tally(modules=1)
        self.module, self._twin = (self._build(torch) for _ in range(2))
        self._lock = threading.Lock()

    def _build(self, torch: Any) -> nn.Module:
        torch.manual_seed(self.made.number)
        built: nn.Module = getattr(self._code, self.made.name)()
        return built.eval().to(self._device)

    def call(self, may_cancel: bool = True, compares_draws: bool = True) -> None:
        """One call of both. After a difference, none."""
        import torch

        if self.tally.wrong:
            return
        with self._lock:
            number, self.tally.calls = self.tally.calls, self.tally.calls + 1
        chance = random.Random(f"{self.made.seed} {self.made.number} {self._boot} {number}")
        is_armed = may_cancel and chance.random() < _CANCELLED
        cancels_at, inputs_seed = chance.randint(1, 2), chance.random()
        mode = chance.choice(["no_grad", "enable_grad"]) if "modes" in self.made.features else "inference_mode"
        before = _state(self.module) if is_armed else None
        with getattr(torch, mode)(), self._autocast(torch):
            given = self._inputs(torch, inputs_seed)
            self._code.ARMED.left = cancels_at if is_armed else 0
            torch.manual_seed(number)
            try:
                found = self.module(*given)
            except asyncio.CancelledError:
                found = asyncio.CancelledError
            except Exception as error:
                self.tally.wrong.append(f"call {number} of boot {self._boot}: {type(error).__name__}: {error}")
                return
            finally:
                self._code.ARMED.left = 0
            seen = {
                "answer": found,
                "inputs": given,
                "state": _state(self.module),
                "draws": torch.rand(2, device=self._device),
            }
            given = self._inputs(torch, inputs_seed)
            torch.manual_seed(number)
            if found is asyncio.CancelledError:
                self.tally.cancelled += 1
                right = {"inputs": given, "state": before}
            else:
                right = {"answer": self._twin(*given), "inputs": given, "state": _state(self._twin)}
                right |= {"draws": torch.rand(2, device=self._device)} if compares_draws else {}
        if wrong := [what for what in right if not is_alike(seen[what], right[what])]:
            words = "cancelled " * (found is asyncio.CancelledError)
            self.tally.wrong.append(f"{words}call {number} of boot {self._boot}: {', '.join(wrong)}")

    def _autocast(self, torch: Any) -> Any:
        return torch.autocast(self._device, torch.bfloat16, enabled="autocast" in self.made.features)

    def _inputs(self, torch: Any, seed: float) -> tuple[Any, ...]:
        """The inputs of a call: the same for the same seed."""
        chance = random.Random(seed)
        generator = torch.Generator().manual_seed(chance.getrandbits(32))
        length = chance.randint(3, 12) if "sizes" in self.made.features else 4
        x, y = (torch.randn(2, length, WIDTH, generator=generator).to(self._device) for _ in range(2))
        if "alias" in self.made.features:
            y = chance.choice([x, x[:], x.flip(0)])
        return x, y, chance.choice([0.5, 2.0]) if "number" in self.made.features else 1.0, {"y": y}


def _state(module: nn.Module) -> dict[str, Any]:
    """All that calls may change."""
    kept = {name: value for name, value in vars(module).items() if isinstance(value, int | list)}
    return {**copy.deepcopy(kept), **{name: value.detach().clone() for name, value in module.named_buffers()}}


def is_alike(found: Any, right: Any) -> bool:
    """Whether two nested values are equal, their floats within rounding."""
    from torch.utils import _pytree as pytree

    (some, form), (others, other_form) = pytree.tree_flatten(found), pytree.tree_flatten(right)
    return form == other_form and all(map(_is_near, some, others))


def _is_near(one: Any, other: Any) -> bool:
    if not hasattr(other, "dtype"):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not other.is_floating_point():
        return bool((one == other).all())
    error = (one.float() - other.float()).norm()
    return bool(error <= _TOLERANCE[str(other.dtype).removeprefix("torch.")] * other.float().norm())


def serve(modules: Sequence[RandomModule], arguments: argparse.Namespace) -> list[Tally]:
    """One boot, which serves all modules in turn."""
    import compile_cache

    chance = random.Random(f"{arguments.seed} {arguments.first} {arguments.boot} rounds")
    handler = _Killer(chance)
    if arguments.kills:
        logging.getLogger("compile_cache").addHandler(handler)
    with compile_cache.boot("fuzz/serving@" + "0" * 40, sources=["fuzzed.py"]) as boot:
        subjects = [Subject(made, arguments.boot, arguments.device) for made in modules]
        for subject in subjects:
            boot.compile(subject.module, whole=True)
        boot.warm_up(lambda: [subject.call(may_cancel=False) for subject in subjects])
    prediction = boot.prediction()
    is_alone = arguments.threads == 1
    with ThreadPoolExecutor(arguments.threads) as threads:
        for number in range(arguments.calls):
            if number in (arguments.calls // 4, arguments.calls // 2):
                assert boot.wait_compiled(_PATIENCE_S)
            chance.shuffle(subjects)
            # All threads share one generator, and calls that change a module come one after another.
            calls = [subject for subject in subjects if is_alone or not subject.made.draws]
            calls += [subject for subject in calls if not (is_alone or subject.made.keeps)]
            for done in [threads.submit(subject.call, compares_draws=is_alone) for subject in calls]:
                done.result()
    assert boot.wait_compiled(_PATIENCE_S)
    assert boot.wait_published(_PATIENCE_S)
    served = prediction.served()
    for subject in subjects:
        steps = served.get(subject.made.name, {})
        subject.tally.compiled = sum(count for step, count in steps.items() if step != "eager")
    return [subject.tally for subject in sorted(subjects, key=lambda subject: subject.made.number)]


class _Killer(logging.Handler):
    """Kills every other second process, on average, some seconds after its start."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    def emit(self, record: logging.LogRecord) -> None:
        """Take the process's number from the line that tells of it."""
        is_start = record.msg.startswith("background.started")
        if is_start and isinstance(record.args, tuple) and self._chance.random() < 0.5:
            threading.Timer(self._chance.uniform(0, 40), _kill, record.args).start()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# The campaign.


def fuzz(modules: Sequence[RandomModule], arguments: argparse.Namespace) -> list[list[Tally]]:
    """The tallies of each module in each boot. All boots share a store and their settings."""
    chance = random.Random(f"{modules[0].seed} {modules[0].number} settings")
    settings = {name: chance.choice(values) for name, values in _SETTINGS.items()}
    if arguments.policy:
        settings |= {"COLD_START": arguments.policy, "UNSEEN": "auto"}
    with tempfile.TemporaryDirectory(prefix="fuzz-serving-") as folder:
        Path(folder, "fuzzed.py").write_text(source_of(modules))
        settings |= {"STORE": f"{folder}/store", "DIR": f"{folder}/cache", "SETUP_BUDGET_S": "0"}
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
        environ |= {f"COMPILE_CACHE_{name}": value for name, value in settings.items()}
        return [_boot(folder, number, modules, arguments, environ) for number in range(arguments.boots)]


def _boot(
    folder: str, number: int, modules: Sequence[RandomModule], arguments: argparse.Namespace, environ: dict[str, str]
) -> list[Tally]:
    """Serve the modules in a process of its own, and take its answer."""
    command = [sys.executable, str(Path(__file__).resolve()), *sys_arguments(arguments)]
    command += ["--boot", str(number), "--first", str(modules[0].number), "--modules", str(len(modules))]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        why = f"boot {number} ended with {done.returncode}: {done.stderr[-3000:]}"
        return [Tally(modules=1, wrong=[why]), *(Tally(modules=1) for _ in modules[1:])]
    return [Tally(**told) for told in json.loads(done.stdout.splitlines()[-1])]


def sys_arguments(arguments: argparse.Namespace) -> list[str]:
    """The command line of these arguments, without which modules they are for."""
    kept = {"seed": arguments.seed, "calls": arguments.calls, "device": arguments.device}
    kept |= {"threads": arguments.threads, "boots": arguments.boots}
    named = [text for name, value in kept.items() for text in (f"--{name}", str(value))]
    named += [text for name in arguments.only for text in ("--only", name)]
    named += ["--policy", arguments.policy] if arguments.policy else []
    return [*named, *["--kills"] * arguments.kills]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20, help="of each module in each boot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first module's number")
    parser.add_argument("--batch", type=int, default=10, help="modules of one process")
    parser.add_argument("--boots", type=int, default=2, help="that share a store")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kills", action="store_true", help="kill second processes at random")
    parser.add_argument("--policy", choices=("background", "block"), help="else at random, with other settings")
    parser.add_argument("--only", action="append", default=[], choices=FEATURES, help="modules of this feature alone")
    parser.add_argument("--boot", type=int, help=argparse.SUPPRESS)  # the process that serves
    return parser.parse_args(arguments)


def main() -> int:
    """Run the campaign and print its table, or serve one batch."""
    arguments = parse()
    numbers = range(arguments.first, arguments.first + arguments.modules)
    modules = make_modules(arguments.seed, numbers, arguments.only)
    if arguments.boot is not None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        print(json.dumps([asdict(tally) for tally in serve(modules, arguments)]))
        return 0
    by_feature = {name: Tally() for name in FEATURES}
    total = Tally()
    for start in range(0, len(modules), arguments.batch):
        batch = modules[start : start + arguments.batch]
        for boot, tallies in enumerate(fuzz(batch, arguments)):
            for module, tally in zip(batch, tallies, strict=True):
                tally.modules = int(boot == 0)
                for each in (total, *(by_feature[name] for name in module.features)):
                    each.add(tally)
                for line in tally.wrong:
                    print(f"WRONG {module.name} ({', '.join(module.features)}), {line}", flush=True)
            if any(tally.wrong for tally in tallies):
                again = [*sys_arguments(arguments), "--first", str(batch[0].number), "--modules", str(len(batch))]
                print(f"  again: fuzz_serving.py {shlex.join(again)}", flush=True)
    rows = [(name, *_row(tally)) for name, tally in {**by_feature, "all": total}.items() if tally.modules]
    print(markdown(["feature", "modules", "calls", "served by compiled code", "cancelled", "wrong"], rows))
    return 1 if total.wrong else 0


def _row(tally: Tally) -> tuple[int, ...]:
    return tally.modules, tally.calls, tally.compiled, tally.cancelled, len(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
