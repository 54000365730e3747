"""The colours of the picture and of the page, light and dark, as variables of CSS."""

from __future__ import annotations

_LIGHT = {
    "paper": "#ffffff",
    "card": "#f6f8fa",
    "text": "#1f2328",
    "faint": "#59636e",
    "line": "#d1d9e0",
    "accent": "#0969da",
    "good": "#1a7f37",
    "bad": "#b42318",
    "import": "#ced6df",
    "weights": "#a9cdf5",
    "warm-up": "#ddd2f5",
    "load": "#9edbb1",
    "compile": "#f5ab77",
    "ahead": "#fad9b4",
    "publish": "#9fd9dc",
    "wait": "#f3df8b",
    "other": "#e3e6ea",
}
_DARK = {
    "paper": "#0d1117",
    "card": "#161b22",
    "text": "#e6edf3",
    "faint": "#9aa6b2",
    "line": "#343c46",
    "accent": "#6cb0ff",
    "good": "#57c26e",
    "bad": "#ff8a80",
    "import": "#46515e",
    "weights": "#245387",
    "warm-up": "#51437d",
    "load": "#206a3c",
    "compile": "#a34e12",
    "ahead": "#6f4a1d",
    "publish": "#1c666a",
    "wait": "#6d5c12",
    "other": "#3a424c",
}
_KINDS = ("import", "weights", "warm-up", "load", "compile", "ahead", "publish", "wait", "other")

VARIABLES = (
    f":root {{ color-scheme: light dark; {'; '.join(f'--{name}: {value}' for name, value in _LIGHT.items())} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ "
    f"{'; '.join(f'--{name}: {value}' for name, value in _DARK.items())} }} }}\n"
)
DRAWING = (
    "svg text { font: 11px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; "
    "fill: var(--text) }\n"
    "svg text.lane, svg text.tick, svg text.later { fill: var(--faint) }\n"
    "svg text.ready { font-weight: 600; fill: var(--good) }\n"
    "svg text.label { pointer-events: none }\n"
    "svg line.grid { stroke: var(--line) }\n"
    "svg line.ready { stroke: var(--good); stroke-width: 1.5 }\n"
    + "".join(f"svg .{kind} {{ fill: var(--{kind}) }}\n" for kind in _KINDS)
)
SWATCHES = "".join(f".swatch.{kind} {{ background: var(--{kind}) }}\n" for kind in _KINDS)
