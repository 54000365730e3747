"""The tables of peers.py: what its records say of each way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from peer_records import COLD, NEXT, WARM, PeerBoot, Record
from peer_ways import EAGER, WAYS, Way
from table import markdown, percentile, spread

_GIVEN = ("way", "given", "stores", "verified before use")
_BOOTS = (
    "way",
    "n, cold / warm",
    "cold READY, s",
    "compiled after READY, s",
    "warm READY, s",
    "− eager, in pairs, s",
    "killed at READY: left, next boot",
    "killed after a request",
    "stored, MB",
)
_REQUESTS = (
    "way",
    "first request, cold / warm, ms",
    "later ones: p50 / p99, ms (n)",
    "new size, s",
    "compiled on it",
    "again, ms",
)
_KILLED = ("ready", "request")


def describe(record: Record) -> str:
    """One line on one boot."""
    name = f"{record.model} {record.way} {record.kind} {record.round}"
    boot = record.boot
    if boot is None:
        return f"{name}: {record.error}; see {record.log}"
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in boot.phases.items())
    found = f"{boot.precompiled} precompiled, {boot.hits} hits, {boot.misses} misses, {boot.kernels_made} kernels made"
    asked = {"first": boot.first_s, "compiled after": boot.settled_s, "new size": boot.new_s, "again": boot.new_again_s}
    shown = "".join(f"; {what} {seconds:.2f} s" for what, seconds in asked.items() if seconds is not None)
    stored = f"{record.found_bytes / 1e6:.2f} → {record.stored_bytes / 1e6:.2f} MB"
    return f"{name}: READY after {boot.ready_s:.2f} s ({phases}); {found}{shown}; stored {stored}"


def tables(records: Sequence[Record]) -> str:
    """Two tables for each model of the records, of boots and of requests, and the errors."""
    parts = []
    for model in dict.fromkeys(record.model for record in records):
        of_model = [record for record in records if record.model == model]
        machine = next((record.boot.machine for record in of_model if record.boot and record.boot.machine), {})
        present = [way for way in WAYS if any(record.way == way.name for record in of_model)]
        boots = markdown(_BOOTS, (boots_row(way, of_model) for way in present))
        requests = markdown(_REQUESTS, (requests_row(way, of_model) for way in present))
        errors = [f"{record.way}, {record.kind} {record.round}: {record.error}" for record in of_model if record.error]
        parts += [f"{model}, {machine}; median (least–greatest)", boots, requests, *errors]
    return "\n\n".join(parts)


def given() -> str:
    """The table of what each way was given, and what it does."""
    return markdown(_GIVEN, ((way.title, way.given, way.stores_at, way.verified) for way in WAYS))


def boots_row(way: Way, records: Sequence[Record]) -> list[str]:
    """One line on the boots of a way. What failed in every boot has its error in place of figures."""
    mine = [record for record in records if record.way == way.name]
    cold, warm = boots_of(mine, COLD), boots_of(mine, WARM)
    row = [way.title, f"{len(cold)} / {len(warm)}"]
    if not cold + warm:
        error = next((record.error for record in mine if record.error), "no boot yet")
        return [*row, error, *["–"] * (len(_BOOTS) - 3)]
    stored = [record.stored_bytes / 1e6 for record in mine if is_filled(record)]
    return [
        *row,
        spread(boot.ready_s for boot in cold),
        spread(compiled_later(mine), 1),
        spread(boot.ready_s for boot in warm),
        "–" if way.name == EAGER else spread(paired(way.name, records)),
        *("; ".join(left_by(mine, killed)) or "–" for killed in _KILLED),
        f"{median(stored):.2f}" if stored else "–" if way.keeps else "0",
    ]


def requests_row(way: Way, records: Sequence[Record]) -> list[str]:
    """One line on the requests of a way: of its warm boots, if it has any."""
    mine = [record for record in records if record.way == way.name]
    cold, warm = boots_of(mine, COLD), boots_of(mine, WARM)
    served = warm or cold  # a way that stores nothing has cold boots alone
    new = [boot for boot in served if boot.new_s is not None]
    return [
        way.title,
        f"{milliseconds(cold, first)} / {milliseconds(warm, first)}",
        percentiles([seconds for boot in served for seconds in boot.later_s]),
        spread(boot.new_s for boot in new),
        ", ".join(dict.fromkeys("yes" if boot.new_graphs else "no" for boot in new)) or "–",
        milliseconds(new, lambda boot: boot.new_again_s),
    ]


def compiled_later(records: Iterable[Record]) -> list[float]:
    """Seconds from READY until a second process had compiled everything, of each boot that found nothing."""
    return [boot.settled_s for boot in boots_of(records, NEXT) if boot.settled_s is not None]


def is_filled(record: Record) -> bool:
    """Whether this boot has left everything stored."""
    return record.kind == NEXT and record.boot is not None


def boots_of(records: Iterable[Record], kind: str) -> list[PeerBoot]:
    """The boots of a kind that did not fail."""
    return [record.boot for record in records if record.kind == kind and record.boot is not None]


def paired(way: str, records: Sequence[Record]) -> list[float]:
    """Seconds to READY of each warm boot, less those of the eager boot of its round. A round without both has none."""
    ready = {
        (record.way, record.round): record.boot.ready_s for record in records if record.kind == WARM and record.boot
    }
    rounds = [number for name, number in ready if name == way and (EAGER, number) in ready]
    return [ready[way, number] - ready[EAGER, number] for number in rounds]


def first(boot: PeerBoot) -> float | None:
    """Seconds of the first request after READY."""
    return boot.first_s


def milliseconds(boots: Sequence[PeerBoot], seconds: Callable[[PeerBoot], float | None]) -> str:
    """A cell of values in ms; None is left out."""
    values = [value for boot in boots if (value := seconds(boot)) is not None]
    return spread((value * 1e3 for value in values), 0)


def percentiles(values: Sequence[float]) -> str:
    """`52 / 61 (100)`: the median and the 99th percentile in ms, and how many there are."""
    if len(values) < 2:
        return "–"
    return f"{median(values) * 1e3:.0f} / {percentile(values, 99) * 1e3:.0f} ({len(values)})"


def left_by(records: Sequence[Record], killed_after: str) -> Iterator[str]:
    """For each boot that was killed then: what was stored, and how the next boot went."""
    after = {record.round: record for record in records if record.kind == NEXT and record.boot}
    for record in records:
        if record.kind == COLD and record.killed_after == killed_after and record.round in after:
            following = after[record.round]
            assert following.boot is not None
            yield f"{describe_left(following)}, {following.boot.ready_s:.2f} s"


def describe_left(following: Record) -> str:
    """What the boot after a killed one found: `all`, `a part`, or `nothing`."""
    boot = following.boot
    if boot is None or not following.found_bytes:
        return "nothing"
    is_all = (boot.hits or boot.precompiled) and not (boot.misses or boot.kernels_made)
    return "all" if is_all else "a part"
