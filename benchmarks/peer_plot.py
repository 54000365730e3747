"""The plot of peers.py: seconds from process start to READY of each way, cold and warm, a panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from peer_records import COLD, WARM, Record
from peer_table import boots_of, compiled_later
from peer_ways import EAGER, WAYS, Way

_COLOURS = {COLD: "#b9c4ce", WARM: "#0b6e99", "ours": "#b4540a", "range": "#1f2328", "eager": "#59636e"}
_BAR = 0.36  # of the height of a row

# The same records give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif"})


def plot(records: Sequence[Record], file: Path) -> None:
    """Write the picture; its suffix says whether as SVG or PNG."""
    models = list(dict.fromkeys(record.model for record in records))
    ways = {model: [way for way in WAYS if _is_shown(way, model, records)] for model in models}
    heights = [len(ways[model]) for model in models]
    figure = Figure(figsize=(9, 0.9 + 0.48 * sum(heights) + 0.6 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for model, panel in zip(models, panels, strict=True):
        _draw(panel, model, ways[model], [record for record in records if record.model == model])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _is_shown(way: Way, model: str, records: Sequence[Record]) -> bool:
    return any(record.boot and record.kind in (COLD, WARM) for record in records if _is_of(record, way, model))


def _is_of(record: Record, way: Way, model: str) -> bool:
    return (record.model, record.way) == (model, way.name)


def _draw(panel: Axes, model: str, ways: Sequence[Way], records: Sequence[Record]) -> None:
    for row, way in enumerate(ways):
        mine = [record for record in records if record.way == way.name]
        for place, kind in ((row - _BAR / 2, WARM), (row + _BAR / 2, COLD)):
            if ready := [boot.ready_s for boot in boots_of(mine, kind)]:
                _bar(panel, way, kind, place, ready, compiled_later(mine) if kind == COLD else [])
    if eager := [boot.ready_s for boot in boots_of((r for r in records if r.way == EAGER), WARM)]:
        panel.axvline(median(eager), color=_COLOURS["eager"], linewidth=1, linestyle="--", label="eager, median")
    panel.set_yticks(range(len(ways)), [way.title.replace("`", "") for way in ways])
    panel.invert_yaxis()
    panel.margins(x=0.2, y=0.02)
    panel.set_xlim(left=0)
    panel.set_title(f"{model}: process start to READY, s", loc="left", fontsize=11, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)


def _bar(panel: Axes, way: Way, kind: str, place: float, ready: Sequence[float], later: Sequence[float]) -> None:
    """A bar with its range, and in words its median, its number of boots and when a second process had compiled."""
    middle = median(ready)
    colour = _COLOURS["ours" if way.is_ours and kind == WARM else kind]
    label = None if colour == _COLOURS["ours"] else {COLD: "cold, nothing stored", WARM: "warm"}[kind]
    seen = panel.get_legend_handles_labels()[1]
    panel.barh(place, middle, _BAR, color=colour, label=None if label in seen else label)
    panel.hlines(place, min(ready), max(ready), color=_COLOURS["range"], linewidth=1)
    after = f", compiled {median(later):.0f} s later" if later else ""
    words = f"{middle:.1f} (n = {len(ready)}){after}"
    panel.annotate(words, (max(ready), place), (5, 0), textcoords="offset points", va="center", fontsize=9)
