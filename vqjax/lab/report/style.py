"""What does the page look like on light and dark screens, on a phone and on paper?"""

from vqjax.lab.report.svg import SERIES

_DARK_SERIES = ("#5db2ec", "#ff9152", "#3ccf9f", "#e38cc3", "#d9b23d", "#a9d4f5")
"""`SERIES` in the same order, light enough for a dark ground."""


def style() -> str:
  """The page's style sheet; figures take their colours from its variables."""
  light, dark = (
    "; ".join(f"--series-{at}: {color}" for at, color in enumerate(colors))
    for colors in (SERIES, _DARK_SERIES)
  )
  query = "@media screen and (prefers-color-scheme: dark)"
  return f":root {{ {light} }}\n{query} {{ :root {{ {dark} }} }}\n{_SHEET}"


_SHEET = """\
:root {
  --ground: #ffffff; --ink: #1b1e23; --quiet: #5a626d; --line: #d7dbe0; --raised: #f5f6f8;
  --failed: #b3261e;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --ground: #14171c; --ink: #e4e7eb; --quiet: #a0a8b3; --line: #363c45; --raised: #1d2128;
    --failed: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p, dd { max-width: 46rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
td { font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; }
thead th { vertical-align: bottom; white-space: normal; color: var(--quiet); font-weight: 600; }
tbody tr { border-top: 1px solid var(--line); }
th:first-child {
  position: sticky; left: 0; text-align: left; background: var(--raised); font-weight: 600;
}
tbody th { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
td.best { font-weight: 700; }
td.failed { color: var(--failed); }
figure { margin: 2rem 0 0; max-width: 52rem; }
.plot { overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 30rem; height: auto; }
figcaption { color: var(--quiet); font-size: .875rem; margin-top: .4rem; }
dt { font-weight: 600; }
dd { margin: 0; }
.meanings dd { margin-bottom: .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .8rem; }
.card { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; }
.card { background: var(--raised); }
.card dl { display: grid; grid-template-columns: auto 1fr; gap: .1rem .8rem; margin: 0; }
.card dl { font-size: .85rem; }
.card dt { color: var(--quiet); font-weight: 400; }
.card dd { overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  tbody th { min-width: 7rem; max-width: 9rem; }
  th, td { padding: .4rem .5rem; }
}
@media print {
  main { max-width: none; padding: 0; }
  .scroll, .plot { overflow: visible; border: 0; }
  figure svg { min-width: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .3rem; }
  tbody th { min-width: 6rem; }
  figure, .card { break-inside: avoid; }
}
"""
