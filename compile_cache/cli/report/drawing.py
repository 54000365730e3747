"""Drawing a boot's lanes as SVG: for the page, and for the README's picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from compile_cache.cli.report.lanes import KINDS, Bar, Lane, lanes_of, window_s
from compile_cache.cli.report.markup import tag
from compile_cache.lifecycle.report import BootReport

BAR = 20.0
_GAP = 4.0
_LANE_GAP = 8.0
_NAME_HEIGHT = 15.0
_HEAD = 20.0
_AXIS = 14.0
# The width of a character, in the fonts that a reader may have, at 11 px.
_CHARACTER = 6.3
_MOST_ROWS = 6
# A bar that is narrower shares its text with its neighbours.
_SLIVER = 20.0
_STEPS_S = (1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where seconds are drawn: from `left` to `right`, in pixels, for `window_s` seconds. Lanes have their names to
    the left, or above where `is_narrow`."""

    left: float
    right: float
    window_s: float
    is_narrow: bool = False

    def x(self, time_s: float) -> float:
        """The position of a time, within the window."""
        return self.left + (self.right - self.left) * min(max(time_s / self.window_s, 0.0), 1.0)


def draw_boot(report: BootReport, width: float, is_narrow: bool = False) -> Element:
    """One boot's timeline, `width` pixels wide, from its start to a little after READY."""
    lanes = lanes_of(report)
    scale = Scale(0.5 if is_narrow else 108.0, width - 1.0, window_s(report, lanes), is_narrow)
    height = _HEAD + lanes_height(lanes, is_narrow)
    text = f"Timeline of a boot: READY after {report.ready_s:.2f} s"
    return tag(
        "svg",
        draw_lanes(lanes, scale, _HEAD, report.ready_s),
        ready_line(report.ready_s, scale, 13.0, height - _LANE_GAP + 2.0),
        axis(scale, height + 10.0),
        class_="timeline",
        viewBox=f"0 0 {width:g} {height + _AXIS:g}",
        width="100%",
        role="img",
        aria_label=text,
    )


def lanes_height(lanes: Sequence[Lane], is_narrow: bool = False) -> float:
    """The height that `draw_lanes` takes, in pixels."""
    return sum(_lane_height(lane, is_narrow) + _LANE_GAP for lane in lanes)


def _lane_height(lane: Lane, is_narrow: bool) -> float:
    return min(len(lane.rows), _MOST_ROWS) * (BAR + _GAP) - _GAP + (_NAME_HEIGHT if is_narrow else 0.0)


def draw_lanes(lanes: Sequence[Lane], scale: Scale, top: float, ready_s: float) -> Element:
    """The lanes below each other, with their names and the lines of round times."""
    group, y = tag("g", grid(scale, top - 2.0, top + lanes_height(lanes, scale.is_narrow) - _LANE_GAP + 2.0)), top
    for lane in lanes:
        if scale.is_narrow:
            group.append(tag("text", lane.name, x=scale.left, y=y + 10.0, class_="lane"))
        else:
            group.append(tag("text", lane.name, x=scale.left - 10.0, y=y + 14.0, class_="lane", text_anchor="end"))
        row_y = y + (_NAME_HEIGHT if scale.is_narrow else 0.0)
        for row in lane.rows[:_MOST_ROWS]:
            group.extend(list(_draw_row(row, scale, row_y, ready_s)))
            row_y += BAR + _GAP
        y += _lane_height(lane, scale.is_narrow) + _LANE_GAP
    return group


def _draw_row(row: Sequence[Bar], scale: Scale, y: float, ready_s: float) -> Iterator[Element]:
    shown = [bar for bar in row if bar.start_s < scale.window_s]
    if not shown:
        text = f"{_names(row)} after {row[0].start_s:.1f} s →"
        yield tag("text", text, x=scale.right, y=y + 14.0, class_="later", text_anchor="end")
        return
    unnamed: list[Bar] = []
    for bar, after in zip(shown, [*shown[1:], None], strict=True):
        begin, end = _edges(bar, scale)
        shape = _torn(begin, end, y) if bar.end_s > scale.window_s else _rectangle(begin, end, y)
        shape.set("class", f"bar {bar.kind}")
        shape.append(tag("title", f"{bar.name}: {bar.seconds:.3f} s, from {bar.start_s:.3f} s"))
        yield shape
        unnamed = [*unnamed, bar] if end - begin < _SLIVER else [bar]
        if text := _fitting(_texts([bar]), end - begin):
            yield tag("text", text, x=begin + 5.0, y=y + 14.0, class_="label")
            unnamed = []
            continue
        free_to = min(scale.right, _edges(after, scale)[0] if after else scale.right)
        if end <= scale.x(ready_s):  # no text across the line of READY
            free_to = min(free_to, scale.x(ready_s))
        if text := _fitting(_texts(unnamed), free_to - end):
            yield tag("text", text, x=end + 5.0, y=y + 14.0, class_="label")
            unnamed = []


def _edges(bar: Bar, scale: Scale) -> tuple[float, float]:
    """Where a bar begins and ends: it is at least 1.5 pixels wide, so that a short one is seen too."""
    begin = min(scale.x(bar.start_s), scale.right - 1.5)
    return begin, max(scale.x(bar.end_s), begin + 1.5)


def _texts(bars: Sequence[Bar]) -> Sequence[str]:
    """The texts for neighbours that share one, the best first."""
    seconds = seconds_text(sum(bar.seconds for bar in bars))
    whole = f"{bars[0].name} {seconds}" if len(bars) == 1 else ""
    return [text for text in (whole, f"{_names(bars)} {seconds}", _names(bars)) if text]


def _names(bars: Sequence[Bar]) -> str:
    return ", ".join(dict.fromkeys(bar.name.rpartition(": ")[2] for bar in bars))


def _fitting(texts: Sequence[str], width: float) -> str:
    return next((text for text in texts if _text_width(text) + 10.0 <= width), "")


def seconds_text(seconds: float) -> str:
    """`46.3 s`, `4.60 s`, `25 ms`, `< 1 ms`."""
    if seconds < 0.001:
        return "< 1 ms"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.95 else f"{seconds:.1f} s"


def _text_width(text: str) -> float:
    return len(text) * _CHARACTER


def _rectangle(begin: float, end: float, y: float) -> Element:
    return tag("rect", x=begin, y=y, width=end - begin, height=BAR, rx=2.0 if end - begin > 4.0 else 0.0)


def _torn(begin: float, end: float, y: float) -> Element:
    """A bar that goes on beyond the right edge."""
    teeth = " ".join(f"L {end - (4.0 if step % 2 else 0.0):.1f} {y + step * BAR / 6:.1f}" for step in range(7))
    return tag("path", d=f"M {begin:.1f} {y:.1f} {teeth} L {begin:.1f} {y + BAR:.1f} Z")


def ready_line(ready_s: float, scale: Scale, text_y: float, bottom: float) -> Element:
    """A line at READY, with its time above; an arrow to the right where READY is beyond the window."""
    text = f"READY {seconds_text(ready_s)}"
    x = scale.x(ready_s)
    if ready_s > scale.window_s:
        return tag("text", f"{text} →", x=scale.right, y=text_y, class_="ready", text_anchor="end")
    # The text is left of the line where it would not fit to its right.
    anchor, text_x = ("end", x + 4.0) if x + _text_width(text) + 8.0 > scale.right else ("start", x - 4.0)
    return tag(
        "g",
        tag("line", x1=x, x2=x, y1=text_y + 4.0, y2=bottom, class_="ready"),
        tag("text", text, x=text_x, y=text_y, class_="ready", text_anchor=anchor),
    )


def grid(scale: Scale, top: float, bottom: float) -> Element:
    """Lines at round times."""
    xs = [scale.x(time_s) for time_s in _round_times_s(scale)]
    return tag("g", *(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid") for x in xs))


def axis(scale: Scale, y: float) -> Element:
    """The round times, in seconds."""
    group = tag("g")
    for time_s in _round_times_s(scale):
        x = scale.x(time_s)
        anchor = "start" if scale.is_narrow and not time_s else "end" if x > scale.right - 12.0 else "middle"
        group.append(tag("text", f"{time_s:g} s" if time_s else "0", x=x, y=y, class_="tick", text_anchor=anchor))
    return group


def _round_times_s(scale: Scale) -> list[float]:
    step_s = _step_s(scale)
    return [number * step_s for number in range(int(scale.window_s / step_s) + 1)]


def _step_s(scale: Scale) -> float:
    """The round number of seconds that is at least 60 pixels wide."""
    least_s = scale.window_s * 60.0 / (scale.right - scale.left)
    power = 10.0 ** math.floor(math.log10(least_s))
    return next(step * power for step in (*_STEPS_S, 10.0) if step * power >= least_s)


def legend(kinds: Sequence[str]) -> Element:
    """What the colours stand for, as HTML."""
    items = [tag("li", tag("span", class_=f"swatch {kind}"), KINDS[kind]) for kind in KINDS if kind in kinds]
    return tag("ul", *items, class_="legend")


def kinds_of(lanes: Sequence[Lane]) -> list[str]:
    """The kinds of the bars of some lanes that took at least a millisecond."""
    return [bar.kind for lane in lanes for row in lane.rows for bar in row if bar.seconds >= 0.001]
