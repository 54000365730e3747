"""The plot of peers.py: seconds to READY of each way, cold and warm, as SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median

from peer_records import COLD, WARM, Record
from peer_table import boots_of, compiled_later
from peer_ways import EAGER, WAYS, Way

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 250, 80, 58, 46
_BAR = 14
_STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328 } .faint { fill: #59636e } .axis { stroke: #d1d9e0 }
  .eager { stroke: #59636e; stroke-dasharray: 5 4 } .warm { fill: #0b6e99 } .cold { fill: #b9c4ce }
  .ours.warm { fill: #b4540a } .range { stroke: #1f2328 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 } .axis { stroke: #3d444d }
    .eager { stroke: #9198a1 } .warm { fill: #4aa8d8 } .cold { fill: #57606a } .ours.warm { fill: #f0883e }
    .range { stroke: #e6edf3 }
  }
"""


def plot(records: Sequence[Record]) -> str:
    """A group of bars for each model, one below the other."""
    models = list(dict.fromkeys(record.model for record in records))
    parts: list[str] = []
    top = 0.0
    for model in models:
        group, height = _group(model, [record for record in records if record.model == model], top)
        parts += group
        top += height
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top:.0f}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Seconds from process start to READY, by way to boot">'
    )
    return "\n".join(
        [
            head,
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{top:.0f}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _group(model: str, records: Sequence[Record], top: float) -> tuple[list[str], float]:
    """The bars of one model from `top` on, and their height with title and scale."""
    ready = {way.name: (_seconds(way, records, COLD), _seconds(way, records, WARM)) for way in WAYS}
    shown = [way for way in WAYS if any(ready[way.name])]
    most = max((max(values) for way in shown for values in ready[way.name] if values), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(shown) + 14
    parts = [
        f'<text x="16" y="{top + 24:.0f}" font-weight="bold">{escape(model)}: process start to READY, s</text>',
        *_legend(top + 42),
    ]
    bottom = top + height - 14
    if ready[EAGER][1]:
        x = _LEFT + median(ready[EAGER][1]) * scale
        parts.append(f'<line class="eager" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _TOP - 4:.0f}" y2="{bottom:.0f}"/>')
    for number, way in enumerate(shown):
        later = compiled_later(record for record in records if record.way == way.name)
        parts += _bars(way, *ready[way.name], later, top + _TOP + number * _ROW, scale)
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="{top + _TOP - 4:.0f}" y2="{bottom:.0f}"/>')
    return parts, height


def _seconds(way: Way, records: Sequence[Record], kind: str) -> list[float]:
    return [boot.ready_s for boot in boots_of((record for record in records if record.way == way.name), kind)]


def _legend(y: float) -> Iterator[str]:
    for x, kind, words in (
        (_LEFT, "cold", "cold, nothing stored"),
        (_LEFT + 170, "warm", "warm"),
        (_LEFT + 240, "eager", ""),
    ):
        if words:
            yield f'<rect class="{kind}" x="{x}" y="{y - 10:.0f}" width="12" height="12"/>'
            yield f'<text class="faint" x="{x + 18}" y="{y:.0f}">{words}</text>'
        else:
            yield f'<line class="{kind}" x1="{x}" x2="{x + 24}" y1="{y - 4:.0f}" y2="{y - 4:.0f}"/>'
            yield f'<text class="faint" x="{x + 30}" y="{y:.0f}">eager, median</text>'


def _bars(
    way: Way, cold: Sequence[float], warm: Sequence[float], later: Sequence[float], y: float, scale: float
) -> Iterator[str]:
    """The name, and a bar for each kind with its median, range and number of boots; whether it was compiled `later`."""
    title = escape(way.title.replace("`", ""))
    yield f'<text x="{_LEFT - 10}" y="{y + _BAR + 6:.0f}" text-anchor="end">{title}</text>'
    for offset, kind, values in ((0, "warm", warm), (_BAR + 3, "cold", cold)):
        if not values:
            continue
        middle, place = median(values), y + offset
        after = f", compiled {median(later):.0f} s later" if later and kind == "cold" else ""
        name = f"{'ours ' if way.is_ours else ''}{kind}"
        yield f'<rect class="{name}" x="{_LEFT}" y="{place:.0f}" width="{middle * scale:.1f}" height="{_BAR}"/>'
        ends, centre = [_LEFT + value * scale for value in (min(values), max(values))], place + _BAR / 2
        yield f'<line class="range" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{centre:.0f}" y2="{centre:.0f}"/>'
        yield (
            f'<text class="faint" font-size="11" x="{ends[1] + 6:.1f}" y="{place + _BAR - 3:.0f}">'
            f"{middle:.1f} (n = {len(values)}){after}</text>"
        )
