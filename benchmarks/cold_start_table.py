"""Tables and checks of cold_start.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import median, quantiles

from one_cold_start import Measured, Sample
from served import Answer
from table import markdown, spread

# What --bars checks.
_ADDED_S = 0.2
_COMPILED_S = 40.0
_SLOWER = 1.1
_EXTRA_BYTES = 2e9
_LEFT_BYTES = 0.1e9


def phase_s(measured: Measured, *names: str) -> float:
    """Seconds of these phases of a boot, 0 for one that it had not."""
    return sum(float(measured.ready.report["phases"].get(name, 0.0)) for name in names)


def process_s(measured: Measured) -> float:
    """Seconds from the start of the process to READY."""
    return float(measured.ready.report["process_s"])


def import_s(measured: Measured) -> float:
    """Seconds of the predictor's own imports, which vary by seconds from boot to boot."""
    return phase_s(measured, "import")


def own_s(measured: Measured) -> float:
    """Seconds of the phases that compiling may change."""
    return phase_s(measured, "join", "compile_setup", "warm_up", "record")


_TIMES: dict[str, Callable[[Measured], float | None]] = {
    "process start to READY": process_s,
    "that, without imports": lambda measured: process_s(measured) - import_s(measured),
    "join, compile_setup, warm-up and record": own_s,
    "start of Cog's server to READY": lambda measured: measured.http_ready_s,
}


def in_pairs(eager: Sequence[Measured], background: Sequence[Measured]) -> list[tuple[Measured, Measured]]:
    """The boots of each pair that is whole."""
    firsts = {measured.pair: measured for measured in eager}
    return [(firsts[second.pair], second) for second in background if second.pair in firsts]


def differences(pairs: Sequence[tuple[Measured, Measured]], value: Callable[[Measured], float | None]) -> list[float]:
    """The second boot's value less the first one's, pair by pair, where both have one."""
    both = [(value(eager), value(background)) for eager, background in pairs]
    return [second - first for first, second in both if first is not None and second is not None]


def tables(eager: Sequence[Measured], background: Sequence[Measured]) -> str:
    """Everything in markdown."""
    pairs = in_pairs(eager, background)
    rows = [
        [
            name,
            spread(map(value, eager)),
            spread(map(value, background)),
            spread(differences(pairs, value)),
            ", ".join(f"{seconds:.2f}" for seconds in differences(pairs, value)),
        ]
        for name, value in _TIMES.items()
    ]
    watched = [measured for measured in background if measured.meanwhile and measured.step_ms is not None]
    parts = [
        markdown(("s", f"eager, n = {len(eager)}", f"background, n = {len(background)}", "in pairs", "each"), rows),
        f"from READY until all is precompiled, s: {spread(measured.compiled_s for measured in background)}",
        predictions(eager, background),
        memory(eager, watched),
    ]
    if any(answer.gaps_s for measured in background for answer in measured.answers):
        parts += ["\n".join(answers(measured)) for measured in background]
    return "\n\n".join(parts)


def predictions(eager: Sequence[Measured], background: Sequence[Measured]) -> str:
    """How long predictions took, and steps or tokens; the first prediction of each server is left out."""
    found = {
        "eager server": ([answer for one in eager for answer in one.answers[1:]], eager),
        "meanwhile": ([answer for one in background for answer in one.meanwhile], ()),
        "precompiled, the first": ([one.precompiled[0] for one in background if one.precompiled], ()),
        "precompiled, later": ([answer for one in background for answer in one.precompiled[1:]], background),
    }
    rows = []
    for name, (of_kind, boots) in found.items():
        gaps = [gap_s for answer in of_kind for gap_s in answer.gaps_s]
        rows.append([name, len(of_kind), *_figures(of_kind), *_of_gaps(gaps), spread(one.step_ms for one in boots)])
    header = ("predictions", "n", "median, ms", "p90, ms", "worst, ms", "token, ms", "token's p90, ms", "step, ms")
    ratio = spread(slower(eager, background), 3)
    return f"{markdown(header, rows)}\n\nmedian meanwhile / eager, in pairs: {ratio}"


def slower(eager: Sequence[Measured], background: Sequence[Measured]) -> list[float]:
    """In each pair, the median of the predictions meanwhile over that of the eager server's."""
    return [
        median(answer.seconds for answer in second.meanwhile) / median(answer.seconds for answer in first.answers[1:])
        for first, second in in_pairs(eager, background)
        if second.meanwhile and first.answers[1:]
    ]


def _figures(found: Sequence[Answer]) -> list[str]:
    seconds = [answer.seconds for answer in found]
    return (
        [f"{value * 1e3:.1f}" for value in (median(seconds), percentile(seconds, 90), max(seconds))]
        if found
        else ["–"] * 3
    )


def _of_gaps(gaps: Sequence[float]) -> list[str]:
    return [f"{median(gaps) * 1e3:.3f}", f"{percentile(gaps, 90) * 1e3:.3f}"] if gaps else ["–"] * 2


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not pass."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]


def outside_bytes(sample: Sample) -> int | None:
    """Memory of the GPU in use but for what torch has in the server."""
    if sample.device_bytes is None or sample.reserved_bytes is None:
        return None
    return sample.device_bytes - sample.reserved_bytes


def extra_bytes(measured: Measured) -> int | None:
    """The most that was in use outside the server's own torch, over what was in use at READY; None without a GPU."""
    found = [size for sample in measured.samples if (size := outside_bytes(sample)) is not None]
    return max(found) - found[0] if found else None


def left_bytes(measured: Measured) -> int | None:
    """What of that is left when the compiling process has ended; None where its end was not seen."""
    found = [size for sample in measured.samples if (size := outside_bytes(sample)) is not None]
    return found[-1] - found[0] if found and measured.has_ended else None


def over_eager(pairs: Sequence[tuple[Measured, Measured]], value: Callable[[Measured], int | None]) -> list[int]:
    """`value` of the second boot of each pair, less what the first one's eager server takes in its predictions: CUDA
    loads a kernel when it is first used."""
    both = [(extra_bytes(eager), value(background)) for eager, background in pairs]
    return [size - own for own, size in both if own is not None and size is not None]


def memory(eager: Sequence[Measured], watched: Sequence[Measured]) -> str:
    """The memory of the GPU, in GB; dashes without one."""

    def gigabytes(size_bytes: float | None) -> float | None:
        return None if size_bytes is None else size_bytes / 1e9

    rows = [
        [
            name,
            spread((gigabytes(extra_bytes(one)) for one in boots), 3),
            spread((gigabytes(left_bytes(one)) for one in boots), 3),
            spread((gigabytes(most_reserved(one)) for one in boots), 3),
        ]
        for name, boots in (("eager", eager), ("background", watched))
    ]
    header = ("memory, GB", "most outside the server's torch, over READY", "left after the end", "server's torch, most")
    pairs = in_pairs(eager, watched)
    most, left = (spread((size / 1e9 for size in over_eager(pairs, each)), 3) for each in (extra_bytes, left_bytes))
    return f"{markdown(header, rows)}\n\nGB over the eager server of the pair: most {most}, left after {left}"


def most_reserved(measured: Measured) -> int | None:
    """The most memory of the GPU that torch had in the server."""
    return max((sample.reserved_bytes for sample in measured.samples if sample.reserved_bytes), default=None)


def answers(measured: Measured) -> Iterator[str]:
    """A line for each run of text answers that are the same and were served by the same."""
    yield f"answers of pair {measured.pair}, in order:"
    for (sha256, state), run in groupby(measured.answers, lambda answer: (answer.sha256, state_of(answer))):
        same = list(run)
        gaps = [gap_s for answer in same for gap_s in answer.gaps_s]
        token = f"{median(gaps) * 1e3:.3f} ms a token" if gaps else "one piece"
        yield f"- {len(same)} × {sha256[:12]}, {state}: {token}"


def state_of(answer: Answer) -> str:
    """What an answer names as serving it: `prefill precompiled, decode eager`."""
    return ", ".join(f"{name} {step}" for name, step in answer.regions.items()) or "eager"


def check(eager: Sequence[Measured], background: Sequence[Measured], pairs: int, watched: int) -> dict[str, bool]:
    """Every claim that has a yes or no, and no seconds."""
    of_eager = {answer.sha256 for one in eager for answer in one.answers}
    every = [answer for one in background for answer in one.answers]
    by_state = {state_of(answer): set[str]() for answer in every}
    for answer in every:
        by_state[state_of(answer)].add(answer.sha256)
    is_text = any(answer.arrivals_s for answer in every)
    # Two servers may have tuned otherwise.
    precompiled = [{answer.sha256 for answer in one.answers if answer.is_precompiled} for one in background]
    results = {
        f"there are {pairs} pairs": len(in_pairs(eager, background)) == pairs,
        "no more of the compiler is imported at READY than by an eager boot": not compiler_modules(eager, background),
        "nothing is compiled before READY that an eager boot does not compile": not any(
            made_in_setup(one, max(other.ready.kernels for other in eager)) for one in background
        ),
        f"{watched} servers serve everything precompiled": sum(one.compiled_s is not None for one in background)
        >= watched,
        "no request compiles, or waits for a compiler": not any(one.compiled_now or one.waited_s for one in every),
        "eager boots give the same answer": len(of_eager) == 1,
        "answers served eager are those of an eager boot": {one.sha256 for one in every if one.is_eager} <= of_eager,
        "precompiled answers of a server are the same": all(len(found) <= 1 for found in precompiled),
        "no boot warns": not any(one.ready.report["warnings"] for one in (*eager, *background)),
    }
    if is_text:
        results["answers that were served alike are the same"] = all(len(found) == 1 for found in by_state.values())
    return results


def compiler_modules(eager: Sequence[Measured], background: Sequence[Measured]) -> set[str]:
    """Modules of torch's compiler that a boot in the background imports and an eager one does not."""
    known = {name for one in eager for name in one.ready.compiler}
    return {name for one in background for name in one.ready.compiler} - known


def made_in_setup(measured: Measured, eager_kernels: int = 0) -> int:
    """Graphs, lookups that found nothing, kernels and artifacts of a boot until READY, without the kernels that an
    eager boot compiles."""
    counts = measured.ready.report["counts"]
    lookups = sum(count for name, count in counts.items() if name.endswith(("_misses", "_bypasses")))
    kernels = max(0, counts["kernels_compiled"] - eager_kernels)
    return int(counts["graphs"] + counts["precompiled_made"] + kernels + lookups)


def bars(eager: Sequence[Measured], background: Sequence[Measured]) -> dict[str, bool]:
    """Claims about seconds and memory, for an idle machine."""
    added = differences(in_pairs(eager, background), own_s)
    compiled = [one.compiled_s for one in background if one.compiled_s is not None]
    pairs = in_pairs(eager, background)
    return {
        f"READY waits {_ADDED_S:g} s longer at most (median)": bool(added) and median(added) <= _ADDED_S,
        f"all is precompiled after {_COMPILED_S:g} s at most": bool(compiled) and max(compiled) <= _COMPILED_S,
        f"predictions meanwhile take {_SLOWER:g} times as long at most": bool(slower(eager, background))
        and median(slower(eager, background)) <= _SLOWER,
        f"compiling takes {_EXTRA_BYTES / 1e9:g} GB at most": max(over_eager(pairs, extra_bytes), default=0)
        <= _EXTRA_BYTES,
        "none of it is left after": max(over_eager(pairs, left_bytes), default=0) <= _LEFT_BYTES,
    }
