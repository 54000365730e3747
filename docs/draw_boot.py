"""Draw boot.svg, the README's picture, from the reports of three boots in the folder boot/.

python docs/draw_boot.py                             # draw it again
python docs/draw_boot.py demo/output/text-to-image   # take over the reports of `make demo` first
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from compile_cache.cli.report_page import MEANINGS, kind_of, lanes_of, read_report, seconds_text

DOCS = Path(__file__).resolve().parent
TITLES = {
    "eager": "Eager: nothing is compiled",
    "cold": "Cold: the store is empty; after READY, a second process compiles",
    "restored": "Restored: another boot finds the compiled code in the store",
}
COLOURS = {"import": "#ced6df", "weights": "#a9cdf5", "warm-up": "#ddd2f5", "load": "#9edbb1", "compile": "#f5ab77"}
COLOURS |= {"publish": "#9fd9dc", "wait": "#f3df8b", "other": "#e3e6ea"}
TEXT, FAINT, LINE, GREEN = "#1f2328", "#59636e", "#d1d9e0", "#1a7f37"
STYLE = {"svg.hashsalt": "boot", "svg.fonttype": "none", "font.size": 8.5, "text.color": TEXT, "axes.edgecolor": LINE}
STYLE |= {"xtick.color": FAINT, "ytick.color": FAINT, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"font.family": ["DejaVu Sans", "sans-serif"], "axes.spines.left": False, "axes.axisbelow": True}


def take_over(folder: Path) -> None:
    """Copy the reports of three boots of the demo, with relative paths."""
    for name in TITLES:
        text = (folder / name / "report.json").read_text().replace(f"{folder.resolve()}/", "")
        (DOCS / "boot" / f"{name}.json").write_text(json.dumps(json.loads(text), indent=2) + "\n")


@matplotlib.rc_context(STYLE)
def draw(picture: Path) -> None:
    """Draw READY of all boots, and below it each boot's lanes, on one scale that ends after the second longest boot."""
    reports = {name: read_report(DOCS / "boot" / f"{name}.json") for name in TITLES}
    lanes = {name: lanes_of(report.spans) for name, report in reports.items()}
    window_s = 1.12 * sorted(report.ready_s for report in reports.values())[-2]
    heights = [2.0, *map(len, lanes.values())]
    figure = Figure(figsize=(9.0, 0.27 * sum(heights) + 2.2), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    overview, *plots = figure.subplots(len(heights), height_ratios=heights)
    times_s = [report.ready_s for report in reports.values()]
    bars = overview.barh(list(reports), times_s, 0.7, color=[COLOURS[kind] for kind in ("import", "compile", "load")])
    overview.bar_label(bars, [seconds_text(time_s) for time_s in times_s], padding=4, color=GREEN, weight="bold")
    overview.set_title("Seconds until READY", loc="left", weight="bold")
    overview.set(xticks=[], xlim=(0, 1.08 * max(times_s)), ylim=(2.6, -0.6))
    overview.tick_params(length=0)
    overview.spines.bottom.set_visible(False)
    for plot, (name, report) in zip(plots, reports.items(), strict=True):
        for y, rows in enumerate(lanes[name].values()):
            for span in (span for row in rows for span in row):
                plot.barh(y, max(span.seconds, 0.006), 0.8, span.start_s, color=COLOURS[kind_of(span)])
                label = f"{span.name.rpartition(': ')[2]} {seconds_text(span.seconds)}"
                room_s = min(span.seconds, window_s - span.start_s)
                if len(label) * 0.008 * window_s < room_s:
                    plot.text(span.start_s + 0.03, y, label, va="center")
        plot.set_title(TITLES[name], loc="left", weight="bold")
        arrow = " →" if report.ready_s > window_s else ""
        plot.set_title(f"READY {seconds_text(report.ready_s)}{arrow}", loc="right", color=GREEN, weight="bold")
        plot.axvline(report.ready_s, color=GREEN)
        plot.set(xlim=(0, window_s), ylim=(len(lanes[name]) - 0.5, -0.5), yticks=range(len(lanes[name])))
        plot.set_yticklabels(list(lanes[name]))
        plot.tick_params(length=0, labelbottom=plot is plots[-1])
        plot.grid(axis="x", color=LINE)
    plots[-1].set_xlabel("seconds since the boot began; the cold boot goes on to the right", color=FAINT)
    spans = [span for found in lanes.values() for rows in found.values() for row in rows for span in row]
    drawn = {kind_of(span) for span in spans if span.start_s < window_s and span.seconds >= 0.001}
    patches = [Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in COLOURS if kind in drawn]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    draw(DOCS / "boot.svg")
