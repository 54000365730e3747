"""The page's stylesheet."""

from __future__ import annotations

from compile_cache.cli.report.colours import DRAWING, SWATCHES, VARIABLES

_PAGE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em }
h2 { font-size: 19px; margin: 44px 0 12px; padding-bottom: 6px; border-bottom: 1px solid var(--line) }
h3 { font-size: 15px; margin: 20px 0 8px }
p { margin: 6px 0 }
a { color: var(--accent) }
code { font: 0.9em ui-monospace, SFMono-Regular, Menlo, 'Liberation Mono', monospace; overflow-wrap: anywhere }
.faint { color: var(--faint) }
.good { color: var(--good) }
.bad { color: var(--bad) }
nav ul, .legend { list-style: none; margin: 12px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px }
.legend { font-size: 12px; color: var(--faint) }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 16px 18px;
  margin: 12px 0 }
.card > :first-child { margin-top: 0 }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(116px, 1fr)); gap: 12px 18px;
  margin: 12px 0 18px }
.figures dt { font-size: 12px; color: var(--faint) }
.figures dd { margin: 0; font-size: 18px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
.scroll { overflow-x: auto; max-width: 100%; margin: 8px 0 }
table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600; font-size: 12px; color: var(--faint); white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
td.fixed { white-space: nowrap }
td.long { min-width: 220px; overflow-wrap: anywhere }
td.gauges { min-width: 150px; white-space: nowrap }
.gauge { display: block; height: 6px; border-radius: 3px; margin-top: 3px; min-width: 2px }
.gauge.cold { background: var(--compile) }
.gauge.warm { background: var(--load) }
.gauge.eager { background: var(--import) }
.badge { display: inline-block; border-radius: 10px; padding: 0 8px; font-size: 12px; line-height: 20px;
  white-space: nowrap; color: var(--text); background: var(--other) }
.badge.cold { background: var(--compile) }
.badge.warm { background: var(--load) }
details { border-bottom: 1px solid var(--line) }
details > summary { cursor: pointer; padding: 10px 0 }
details > summary h3 { display: inline; margin: 0 }
details[open] { padding-bottom: 14px }
ul.plain { margin: 6px 0; padding-left: 20px }
li { overflow-wrap: anywhere }
.timeline { display: block; height: auto }
.narrow { display: none }
@media (max-width: 640px) {
  main { padding: 20px 14px 40px }
  .card { padding: 12px }
  .wide { display: none }
  .narrow { display: block }
}
@media print { .card, table, svg { break-inside: avoid } }
"""
SHEET = VARIABLES + DRAWING + SWATCHES + _PAGE
