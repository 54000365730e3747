"""Modules at random, each served by the library and eager side by side: answers and states must be the same.

    python benchmarks/fuzz_serving.py --seed 0 --modules 100 --calls 20
    python benchmarks/fuzz_serving.py --seed 1 --modules 500 --calls 80 --jobs 16 --limit-s 400 --out fuzz.jsonl
    python benchmarks/fuzz_serving.py --sets --modules 63 --policy block
    python benchmarks/fuzz_serving.py fuzz.jsonl others.jsonl

Modules are made by random_modules.py. Some boots share a store: the first one finds it empty. Each call is made twice,
of a module that the boot serves and of its twin, which is never compiled. Compared are the answer, what the call wrote
into its inputs and its module, and the next numbers of torch's generator. Some calls are cancelled or fail. A class
that can be set in some ways has five instances, which are set anew while they serve, and so has one whose instances
differ in what guards may not see; the first boot calls three of them, each later one one more. With `--kills`, second
processes are killed. In the end no case may be left half-way, and each must have gone the ways that its states allow.

Most calls are made in predictions, some of which are generators that are closed half-way. A prediction calls its
modules twice with the same inputs, and must have one code: answers of modules without state are equal to the bit.
With `--threads`, predictions run at the same time. With `--asyncio` they are tasks, some of which are cancelled; in
half of the batches their calls run in threads.

Prints a table, and each difference with its features and the command that shows it again. Exits with 1 on
any.
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
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from random_modules import FEATURES, SETS, WIDTH, RandomModule, make_modules, source_of
from table import markdown

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import nn

    from compile_cache.lifecycle.boot import Boot

_PATIENCE_S = 900.0
_SETTINGS = {
    "COLD_START": ("background", "background", "block"),
    "UNSEEN": ("auto", "background", "eager"),
    "DYNAMIC": ("false", "false", "auto"),
}
_CANCELLED = 0.1
_INSTANCES = 5  # of a module that can be set in some ways, or whose instances differ
_CALLED_FIRST = 3  # of these, in the first boot
_SET_ANEW = 0.3  # before so many calls, in half of which it is set back
_BARE, _CLOSED = 0.2, 0.1  # of predictions
# The largest ‖found − expected‖ / ‖expected‖. A state adds the rounding of several calls up.
_TOLERANCE = {"float32": 3e-3, "bfloat16": 1e-1}
# Of a float32 state that adds up products in bfloat16.
_COARSE = dict.fromkeys(_TOLERANCE, 1e-1)
_EXACT: dict[str, float] = {}


@dataclass
class Tally:
    """A module's calls in one boot, or those of all. `wrong` has the first difference of each module."""

    modules: int = 0
    calls: int = 0
    compiled: int = 0
    cancelled: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Add another tally to this one, of other modules."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


# The process that serves.


class Subject:
    """An instance that the boot serves, and its twin. Instances of a class share the `turn` of calls that change it."""

    # How often instances of a class were set.
    _times_set: ClassVar[Counter[str]] = Counter()

    def __init__(self, made: RandomModule, instance: int, turn: Any, boot: int, device: str) -> None:
        import torch

        self.made, self._instance, self._boot, self._device = made, instance, boot, device
        self._code = importlib.import_module("fuzzed")
        self.tally = Tally()
        self.module, self._twin = (self._build(torch) for _ in range(2))
        self._turn = turn
        self._counting = threading.Lock()
        self._seen_at = 0  # when it was called last
        for ways in made.ways:
            self._set_anew(ways[instance % len(ways)])

    def _build(self, torch: Any) -> nn.Module:
        torch.manual_seed(self.made.number + 1000 * self._instance)
        with torch.device(self._device):  # attributes may be views of buffers, which `to` would leave behind
            built: nn.Module = getattr(self._code, self.made.name)()
        return built.eval()

    def new_number(self) -> int:
        """The next call's number, which its inputs depend on."""
        with self._counting:
            self.tally.calls += 1
            return self.tally.calls - 1

    def _set_anew(self, way: str) -> None:
        for module in (self.module, self._twin):
            exec(way, {**vars(self._code), "fuzzed": self._code}, {"self": module})
        self._times_set[self.made.name] += 1

    def call(self, number: int, may_cancel: bool = True, compares_draws: bool = True) -> Any:
        """The answer of one call; None if it was cancelled. After a difference, there are no further calls."""
        import torch

        with self._turn:
            return None if self.tally.wrong else self._call(torch, number, may_cancel, compares_draws)

    def _call(self, torch: Any, number: int, may_cancel: bool, compares_draws: bool) -> Any:
        chance = random.Random(f"{self.made.seed} {self.made.number} {self._instance} {self._boot} {number}")
        if self.made.ways and chance.random() < _SET_ANEW and number:
            ways = chance.choice(self.made.ways)
            self._set_anew(chance.choice([ways[self._instance % len(ways)], chance.choice(ways)]))
        is_armed = may_cancel and chance.random() < _CANCELLED
        cancels_at, inputs_seed = chance.randint(1, 2), chance.random()
        self._seen_at = self._times_set[self.made.name]
        mode = chance.choice(["no_grad", "enable_grad"]) if "modes" in self.made.features else "inference_mode"
        before = _state(self.module) if is_armed else None
        with getattr(torch, mode)(), self._autocast(torch):
            given = self._inputs(torch, inputs_seed)
            self._code.ARMED.left = cancels_at if is_armed else 0
            self._code.ARMED.error = chance.choice([asyncio.CancelledError, self._code.Failed])
            torch.manual_seed(number)
            try:
                found = self.module(*given)
            except (asyncio.CancelledError, self._code.Failed):
                found = asyncio.CancelledError
            except Exception as error:
                self._add_wrong(number, f"{type(error).__name__}: {error}")
                return None
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
            is_cancelled = found is asyncio.CancelledError
            self.tally.cancelled += is_cancelled
            # A cancel before eager's work leaves all as it was. A later one, in a comparison, leaves its effects.
            if is_cancelled and is_alike(seen["state"], before, _EXACT) and is_alike(seen["inputs"], given):
                right = {}
            elif is_cancelled:
                self._twin(*given)
                right = {"inputs": given, "state": _state(self._twin)}
            else:
                right = {"answer": self._twin(*given), "inputs": given, "state": _state(self._twin)}
                right |= {"draws": torch.rand(2, device=self._device)} if compares_draws else {}
        tolerances = {"state": _COARSE} if {"autocast", "inner autocast"} & {*self.made.features} else {}
        if wrong := [what for what in right if not is_alike(seen[what], right[what], tolerances.get(what, _TOLERANCE))]:
            self._add_wrong(number, "cancelled: " * (found is asyncio.CancelledError) + ", ".join(wrong))
        return None if found is asyncio.CancelledError else found

    def call_again(self, number: int, before: Any, compares_draws: bool) -> None:
        """A call with the inputs of one before in the same prediction, whose answer is the same to the bit."""
        self.new_number()
        seen_at = self._seen_at
        found = self.call(number, compares_draws=compares_draws)
        is_mixed = before is not None and found is not None and not is_alike(found, before, _EXACT)
        is_mixed &= self._seen_at == seen_at
        if is_mixed and not (self.made.keeps or self.made.draws):
            self._add_wrong(number, "a prediction with two codes")

    def _add_wrong(self, number: int, why: str) -> None:
        self.tally.wrong.append(f"call {number} of boot {self._boot}: {why}")

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
    import torch

    kept = {name: value for name, value in vars(module).items() if isinstance(value, int | list | torch.Tensor)}
    tensors = chain(module.named_buffers(), module.named_parameters())
    return {**copy.deepcopy(kept), **{name: value.detach().clone() for name, value in tensors}}


def is_alike(found: Any, right: Any, tolerance: Mapping[str, float] = _TOLERANCE) -> bool:
    """Whether two nested values are equal, their floats within rounding."""
    from torch.utils import _pytree as pytree

    (some, form), (others, other_form) = pytree.tree_flatten(found), pytree.tree_flatten(right)
    return form == other_form and all(_is_near(*pair, tolerance) for pair in zip(some, others, strict=True))


def _is_near(one: Any, other: Any, tolerance: Mapping[str, float]) -> bool:
    if not hasattr(other, "dtype"):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not other.is_floating_point():
        return bool((one == other).all())
    error = (one.float() - other.float()).norm()
    return bool(error <= tolerance.get(str(other.dtype).removeprefix("torch."), 0.0) * other.float().norm())


def serve(modules: Sequence[RandomModule], arguments: argparse.Namespace) -> list[Tally]:
    """One boot, which serves all modules in turn."""
    import compile_cache

    chance = random.Random(f"{arguments.seed} {arguments.first} {arguments.boot} rounds")
    handler = _Killer(chance)
    if arguments.kills:
        logging.getLogger("compile_cache").addHandler(handler)
    with compile_cache.boot("fuzz/serving@" + "0" * 40, sources=["fuzzed.py"]) as boot:
        import torch

        torch.backends.cudnn.allow_tf32 = False  # a state that adds up its rounding is further off than any tolerance
        moves = _watch_moves()
        groups = [_instances(made, arguments) for made in modules]
        for subject in chain(*groups):
            boot.compile(subject.module, whole=True)
        subjects = [subject for group in groups for subject in group[: _CALLED_FIRST + arguments.boot]]
        boot.warm_up(lambda: [subject.call(subject.new_number(), may_cancel=False) for subject in subjects])
    whole = boot.prediction()
    for number in range(arguments.calls):
        if number in (arguments.calls // 4, arguments.calls // 2):
            assert boot.wait_compiled(_PATIENCE_S)
        _play(boot, subjects, arguments, chance)
    assert boot.wait_compiled(_PATIENCE_S)
    assert boot.wait_published(_PATIENCE_S)
    with boot.prediction():
        pass  # takes what has arrived
    served = whole.served()
    tallies = []
    for made, group in zip(modules, groups, strict=True):
        tally = Tally(modules=1)
        for subject in group:
            tally.add(subject.tally)
        tally.compiled = sum(count for step, count in served.get(made.name, {}).items() if step != "eager")
        tally.wrong += [f"boot {arguments.boot}: {what}" for what in _left_halfway(boot, made.name)]
        tallies.append(tally)
    tallies[0].wrong += moves
    return tallies


def _instances(made: RandomModule, arguments: argparse.Namespace) -> list[Subject]:
    # Calls that change a module, or what its class reads, come one after another.
    turn = threading.Lock() if made.keeps or made.ways else contextlib.nullcontext()
    count = _INSTANCES if made.has_instances else 1
    return [Subject(made, number, turn, arguments.boot, arguments.device) for number in range(count)]


def _watch_moves() -> list[str]:
    """A list to which each way is added that a case goes and `MOVES` does not have."""
    from compile_cache.serving.kinds import MOVES, Case

    wrong: list[str] = []
    slot: Any = Case.state

    def move(case: Case, state: Any) -> None:
        with contextlib.suppress(AttributeError):  # its first state
            if state not in MOVES[before := slot.__get__(case)]:
                wrong.append(f"a case went from {before} to {state}")
        slot.__set__(case, state)

    Case.state = property(slot.__get__, move)  # type: ignore[assignment]
    return wrong


def _left_halfway(boot: Boot, name: str) -> list[str]:
    """The cases of a class whose function is still being found or made."""
    from compile_cache.serving.kinds import State

    (kinds,) = (region.supply.kinds for region in boot._regions.by_class.values() if region.report.name == name)
    return [f"a case is left {case.state}" for case in kinds if case.claimant or case.state is State.ORDERED]


class Style(NamedTuple):
    """How predictions are made in a boot. Calls in threads share torch's generator."""

    has_threads: bool
    is_overlapping: bool


def _play(boot: Boot, subjects: Sequence[Subject], arguments: argparse.Namespace, chance: random.Random) -> None:
    """A round of predictions, with one or two of each module."""
    in_threads = arguments.threads > 1 or (arguments.asyncio and arguments.first // arguments.batch % 2 == 1)
    style = Style(in_threads, in_threads or arguments.asyncio)
    order = [subject for subject in subjects if not (in_threads and subject.made.draws)] * (1 + style.is_overlapping)
    chance.shuffle(order)
    groups = []
    while order:
        groups.append([order.pop() for _ in range(min(len(order), chance.randint(1, 4)))])
    if arguments.asyncio:
        asyncio.run(_overlap(boot, groups, style, chance))
        return
    with ThreadPoolExecutor(arguments.threads) as threads:
        for done in [threads.submit(_run, boot, group, style, random.Random(chance.random())) for group in groups]:
            done.result()


def _run(boot: Boot, group: Sequence[Subject], style: Style, chance: random.Random) -> None:
    """A prediction with calls of these modules, from its beginning to its end or half-way, or the calls alone."""
    if chance.random() < _BARE:
        for subject in group:
            subject.call(subject.new_number(), compares_draws=not style.has_threads)
        return
    pieces = _generate(boot, group, style)
    left = chance.randint(1, len(group)) if chance.random() < _CLOSED else 2 * len(group)
    for _ in zip(range(left), pieces, strict=False):
        pass
    pieces.close()


def _generate(boot: Boot, group: Sequence[Subject], style: Style) -> Generator[None]:
    """A prediction that is a generator, as of a predictor that streams."""
    with boot.prediction():
        calls = []
        for subject in group:
            calls.append((subject, number := subject.new_number(), subject.call(number, True, not style.has_threads)))
            yield
        for subject, number, answer in calls:
            # Under overlap, new code may come in the middle.
            subject.call_again(number, None if style.is_overlapping else answer, not style.has_threads)
            yield


async def _overlap(boot: Boot, groups: Sequence[Sequence[Subject]], style: Style, chance: random.Random) -> None:
    """A prediction for each group, all at the same time; a fifth of them are cancelled at random."""
    tasks = [asyncio.ensure_future(_await(boot, group, style)) for group in groups]
    for task in chance.sample(tasks, len(tasks) // 5):
        await asyncio.sleep(chance.choice([0, 0, 0.01]))
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


async def _await(boot: Boot, group: Sequence[Subject], style: Style) -> None:
    """A prediction that lets others go on between its calls, or while they run in threads."""
    with boot.prediction():
        for subject in [*group, *group]:
            if style.has_threads:
                await asyncio.to_thread(subject.call, subject.new_number(), True, False)
            else:
                subject.call(subject.new_number())
                await asyncio.sleep(0)


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


@dataclass
class Batch:
    """Modules of one process, which is booted some times over one store: the tallies of each module in each boot."""

    device: str
    seed: int
    numbers: list[int]
    features: list[list[str]]
    again: str
    seconds: float
    boots: list[list[Tally]]

    @classmethod
    def from_json(cls, line: str) -> Batch:
        """The inverse of `json.dumps(asdict(batch))`."""
        told = json.loads(line)
        boots = [[Tally(**tally) for tally in tallies] for tallies in told["boots"]]
        return cls(**{**told, "boots": boots})

    def lines(self) -> list[str]:
        """Each difference, and the command that shows them again."""
        wrong = [
            f"WRONG Module{number} ({', '.join(features)}), {line}"
            for tallies in self.boots
            for number, features, tally in zip(self.numbers, self.features, tallies, strict=True)
            for line in tally.wrong
        ]
        return [*wrong, f"  again: fuzz_serving.py {self.again}"] if wrong else []


def fuzz(modules: Sequence[RandomModule], arguments: argparse.Namespace) -> Batch:
    """Boot the modules some times, over a store and with settings of their own."""
    chance = random.Random(f"{modules[0].seed} {modules[0].number} settings")
    settings = {name: chance.choice(values) for name, values in _SETTINGS.items()}
    if arguments.policy:
        settings |= {"COLD_START": arguments.policy, "UNSEEN": "auto"}
    began = time.monotonic()
    own = [*sys_arguments(arguments), "--first", str(modules[0].number), "--modules", str(len(modules))]
    with tempfile.TemporaryDirectory(prefix="fuzz-serving-") as folder:
        Path(folder, "fuzzed.py").write_text(source_of(modules))
        settings |= {"STORE": f"{folder}/store", "DIR": f"{folder}/cache", "SETUP_BUDGET_S": "0"}
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}
        if arguments.jobs > 1:
            cores = max(1, (os.cpu_count() or 1) // arguments.jobs)
            environ |= dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(cores))
        environ |= {f"COMPILE_CACHE_{name}": value for name, value in settings.items()}
        boots = [_boot(folder, number, len(modules), own, environ) for number in range(arguments.boots)]
    numbers, features = [module.number for module in modules], [list(module.features) for module in modules]
    seconds = time.monotonic() - began
    return Batch(arguments.device, arguments.seed, numbers, features, shlex.join(own), seconds, boots)


def _boot(folder: str, number: int, count: int, own: Sequence[str], environ: dict[str, str]) -> list[Tally]:
    """Serve the modules in a process of its own, and take its answer."""
    command = [sys.executable, str(Path(__file__).resolve()), *own, "--boot", str(number)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
        if not done.returncode:
            return [Tally(**told) for told in json.loads(done.stdout.splitlines()[-1])]
        why = f"boot {number} ended with {done.returncode}: {done.stderr[-3000:]}"
    except subprocess.TimeoutExpired as error:
        why = f"boot {number} took longer than {_PATIENCE_S:g} s: {str(error.stderr)[-3000:]}"
    return [Tally(modules=1, wrong=[why]), *(Tally(modules=1) for _ in range(count - 1))]


def sys_arguments(arguments: argparse.Namespace) -> list[str]:
    """The command line of these arguments, without which modules they are for."""
    names = ("seed", "calls", "device", "threads", "boots", "batch")
    named = [text for name in names for text in (f"--{name}", str(getattr(arguments, name)))]
    named += ["--sets"] if arguments.sets else [text for name in arguments.only for text in ("--only", name)]
    named += ["--policy", arguments.policy] if arguments.policy else []
    return [*named, *["--kills"] * arguments.kills, *["--asyncio"] * arguments.asyncio]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="of --out: print the table of all, and run nothing")
    parser.add_argument("--modules", type=int, default=100)
    parser.add_argument("--calls", type=int, default=20, help="rounds of calls of each module in each boot")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first module's number")
    parser.add_argument("--batch", type=int, default=10, help="modules of one process")
    parser.add_argument("--boots", type=int, default=2, help="that share a store")
    parser.add_argument("--jobs", type=int, default=1, help="batches at the same time")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no batch after so many seconds")
    parser.add_argument("--out", type=Path, help="file to which each batch is added as a JSON line")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--asyncio", action="store_true", help="predictions are tasks of an event loop")
    parser.add_argument("--kills", action="store_true", help="kill second processes at random")
    parser.add_argument("--policy", choices=("background", "block"), help="else at random, with other settings")
    parser.add_argument("--only", action="append", default=[], choices=FEATURES, help="modules of this feature alone")
    parser.add_argument("--sets", action="store_true", help="modules that can be set in some ways alone")
    parser.add_argument("--boot", type=int, help=argparse.SUPPRESS)  # the process that serves
    parsed = parser.parse_args(arguments)
    parsed.only = [*parsed.only, *(SETS if parsed.sets else ())]
    return parsed


def run(arguments: argparse.Namespace) -> list[Batch]:
    """The campaign's batches, as far as the time allows."""
    numbers = range(arguments.first, arguments.first + arguments.modules)
    modules = make_modules(arguments.seed, numbers, arguments.only)
    deadline = time.monotonic() + arguments.limit_s
    batches = []

    def begin(start: int) -> Batch | None:
        is_late = time.monotonic() > deadline
        return None if is_late else fuzz(modules[start : start + arguments.batch], arguments)

    with ThreadPoolExecutor(arguments.jobs) as threads:
        for done in as_completed([threads.submit(begin, start) for start in range(0, len(modules), arguments.batch)]):
            if batch := done.result():
                batches.append(batch)
                print("\n".join(batch.lines()) or f"{batch.numbers[0]}: {batch.seconds:.0f} s", flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(asdict(batch)) + "\n")
    return batches


def table(batches: Sequence[Batch]) -> str:
    """The sums of all. A module that several batches have counts once for each device."""
    total, modules = Tally(), set[tuple[Any, ...]]()
    for batch in batches:
        modules |= {
            (batch.device, batch.seed, *of) for of in zip(batch.numbers, map(tuple, batch.features), strict=True)
        }
        for tally in chain.from_iterable(batch.boots):
            total.add(tally)
    row = (len(modules), total.calls, total.compiled, total.cancelled, len(total.wrong))
    return markdown(("modules", "calls", "served by compiled code", "cancelled", "wrong"), [row])


def main() -> int:
    """Run the campaign and print its table, or serve one batch."""
    arguments = parse()
    if arguments.boot is not None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        numbers = range(arguments.first, arguments.first + arguments.modules)
        tallies = serve(make_modules(arguments.seed, numbers, arguments.only), arguments)
        print(json.dumps([asdict(tally) for tally in tallies]))
        return 0
    if arguments.files:
        batches = [Batch.from_json(line) for file in arguments.files for line in file.read_text().splitlines()]
        print(*(line for batch in batches for line in batch.lines()), sep="\n")
    else:
        batches = run(arguments)
    print(table(batches))
    return int(any(batch.lines() for batch in batches))


if __name__ == "__main__":
    sys.exit(main())
