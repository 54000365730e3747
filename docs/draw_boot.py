"""Draw boot.svg, the README's picture, from the reports of three boots in the folder boot/.

python docs/draw_boot.py                             # draw it again
python docs/draw_boot.py demo/output/text-to-image   # take over the reports of `make demo` first
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element

from compile_cache.cli.report.colours import DRAWING, VARIABLES
from compile_cache.cli.report.drawing import Scale, axis, draw_lanes, lanes_height, ready_line, seconds_text
from compile_cache.cli.report.lanes import lanes_of
from compile_cache.cli.report.markup import style, svg_text, tag
from compile_cache.cli.report.reading import read_report
from compile_cache.lifecycle.report import BootReport

DOCS = Path(__file__).resolve().parent
REPORTS = DOCS / "boot"
PICTURE = DOCS / "boot.svg"
TITLES = {
    "eager": "Eager: nothing is compiled",
    "cold": "Cold: the store is empty, so the boot compiles, and publishes",
    "restored": "Restored: another boot finds the compiled code in the store",
}
CAPTION = "The demo model on 2 CPU cores, one boot each. The cold boot goes on to the right."
WIDTH, PADDING = 900.0, 18.0
LEFT, RIGHT = 96.0, WIDTH - PADDING
CSS = """.paper { fill: var(--card); stroke: var(--line) }
svg text.title { font-size: 13px; font-weight: 600 }
svg text.caption { fill: var(--faint) }
"""


def take_over(folder: Path) -> None:
    """Copy the reports of three boots of the demo, with relative paths."""
    REPORTS.mkdir(exist_ok=True)
    for name in TITLES:
        text = (folder / name / "report.json").read_text().replace(f"{folder.resolve()}/", "")
        (REPORTS / f"{name}.json").write_text(json.dumps(json.loads(text), indent=2) + "\n")


def draw(reports: Mapping[str, BootReport]) -> str:
    """The picture, as SVG: all boots on one scale, which ends after the second longest one."""
    window_s = 1.12 * sorted(report.ready_s for report in reports.values())[-2]
    scale = Scale(LEFT, RIGHT, window_s)
    overview, y = draw_overview(reports, PADDING + 8.0)
    groups, top = [], y + 4.0
    for name, report in reports.items():
        lanes = lanes_of(report)
        bottom = top + 28.0 + lanes_height(lanes)
        groups += [
            tag("text", TITLES[name], x=PADDING, y=top + 14.0, class_="title"),
            draw_lanes(lanes, scale, top + 26.0, report.ready_s),
            ready_line(report.ready_s, scale, top + 14.0, bottom - 6.0),
        ]
        top = bottom + 12.0
    caption = tag("text", CAPTION, x=PADDING, y=top + 28.0, class_="caption")
    return svg_text(_picture([overview, axis(scale, top + 2.0), *groups, caption], top + 44.0))


def draw_overview(reports: Mapping[str, BootReport], top: float) -> tuple[Element, float]:
    """One thin bar a boot, to READY, on a scale that has room for all; and where it ends."""
    group, y = tag("g"), top
    scale = Scale(LEFT, RIGHT - 60.0, max(report.ready_s for report in reports.values()))
    for name, report in reports.items():
        kind = {"cold": "compile", "restored": "load"}.get(name, "import")
        width = scale.x(report.ready_s) - LEFT
        group.append(tag("text", name, x=LEFT - 10.0, y=y + 9.0, class_="lane", text_anchor="end"))
        group.append(tag("rect", x=LEFT, y=y, width=width, height=11.0, rx=2.0, class_=kind))
        group.append(tag("text", seconds_text(report.ready_s), x=LEFT + width + 6.0, y=y + 9.5, class_="ready"))
        y += 17.0
    return group, y + 14.0


def _picture(parts: Sequence[Element], height: float) -> Element:
    """A card with a background of its own: a page may be light where its reader's system is dark."""
    card = tag("rect", x=0.5, y=0.5, width=WIDTH - 1.0, height=height - 1.0, rx=8.0, class_="paper")
    label = "Timelines of three boots, until the server is READY: eager, cold, and restored"
    attributes = {"viewBox": f"0 0 {WIDTH:g} {height:g}", "width": WIDTH, "role": "img", "aria_label": label}
    return tag("svg", style(VARIABLES + DRAWING + CSS), card, *parts, **attributes)


def kept_reports() -> dict[str, BootReport]:
    """The reports beside this script."""
    return {name: read_report(REPORTS / f"{name}.json") for name in TITLES}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        take_over(Path(sys.argv[1]))
    PICTURE.write_text(draw(kept_reports()))
