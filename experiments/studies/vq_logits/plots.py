"""What do bytes, codes and speed look like against perplexity?"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter

from experiments.studies.study import Results
from experiments.studies.vq_logits.measured import measured
from experiments.studies.vq_logits.paper import BODIES, PAPER
from experiments.studies.vq_logits.rows import MAIN, Line
from experiments.studies.vq_logits.settings import Setting
from vqjax.lab.report.placing import label_points
from vqjax.lab.report.plots import blank, byte_axis
from vqjax.lab.report.svg import INK, SERIES

_FAMILIES = (
  ("tokens share codes", ("CodebookHead", "LearnedCodebookHead")),
  ("composed rows", ("ProductHead", "LearnedProductHead", "ResidualCodebookHead")),
  ("low rank", ("LowRankHead",)),
  ("full softmax", ("DenseHead", "SampledSoftmaxHead")),
  ("by classes or trees", ("AdaptiveHead", "ClassBasedHead", "HierarchicalHead")),
)


def bytes_against_perplexity(lines: Sequence[Line]) -> Figure | None:
  """A point for each head, numbered as in the table; None where nothing is measured."""
  points = [line for line in lines if line.measured.perplexity]
  if not points:
    return None
  figure, axes = blank(height=6)
  xs = byte_axis(axes, [p.measured.head_bytes for p in points])
  ys = [p.measured.perplexity.mean for p in points]
  for (family, heads), color in zip(_FAMILIES, SERIES, strict=False):
    some = [(x, y) for x, y, p in zip(xs, ys, points, strict=True) if p.measured.head in heads]
    if some:
      axes.plot(*zip(*some, strict=True), "o", markersize=6, color=color, label=family)
  edge = _frontier([(x, y) for x, y, p in zip(xs, ys, points, strict=True) if not p.measured.tied])
  axes.plot(*zip(*edge, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=1)
  axes.set_xlabel("head bytes")
  axes.set_ylabel("test perplexity")
  axes.margins(y=0.08)
  _perplexity(axes, MaxNLocator(8))
  handles, names = axes.get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
  label_points(axes, xs, ys, [p.label.split(".")[0] for p in points])
  return figure


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """Those that no smaller head beats, by rising size."""
  kept: list[tuple[float, float]] = []
  for x, y in sorted(points):
    if not kept or y < kept[-1][1]:
      kept.append((x, y))
  return kept


def _perplexity(axes: Axes, ticks: Locator) -> None:
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticks)
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
  axes.yaxis.set_minor_formatter(NullFormatter())


def codes_against_perplexity(results: Results, settings: Mapping[str, Setting]) -> Figure:
  """Figure 2a for each text: measured, its floor, and what the paper prints."""
  figure = Figure(figsize=(9.6, 3.8), layout="constrained")
  for axes, setting in zip(figure.subplots(1, len(settings)), settings.values(), strict=True):
    _draw_codes(axes, results, setting)
  handles, names = figure.axes[0].get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
  return figure


def _draw_codes(axes: Axes, results: Results, s: Setting) -> None:
  rows = {k: measured(results, f"{s.name}/vq-{k}") for k in s.codes}
  own = {k: m.perplexity.mean for k, m in rows.items() if m.perplexity}
  floor = {k: m.floor for k, m in rows.items() if m.floor}
  published = PAPER[MAIN[s.name]]
  paper = {k: published[f"vq-{k}"].perplexity for k in BODIES[s.name].codes}
  axes.plot(own.keys(), own.values(), "o-", color=SERIES[0], label="measured")
  axes.plot(floor.keys(), floor.values(), "s--", color=SERIES[1], label="floor of these codes")
  axes.plot(paper.keys(), paper.values(), "x:", color=SERIES[2], label="paper")
  full = measured(results, f"{s.name}/full").perplexity
  if full:
    axes.axhline(full.mean, color=SERIES[0], linewidth=0.8, label="full softmax, measured")
  axes.axhline(
    published["full"].perplexity, color=SERIES[2], linewidth=0.8, label="full softmax, paper"
  )
  axes.set_title(f"{s.name} (paper: {BODIES[s.name].text})", fontsize=9, color=INK)
  _perplexity(axes, LogLocator(subs=(1, 2, 5)))
  _dress(axes, "perplexity", BODIES[s.name].codes)


def codes_against_speed(speedup: Mapping[int, float], paper: Mapping[int, float]) -> Figure:
  """Figure 2b: how many times faster than the full softmax's the logits are."""
  figure, axes = blank(height=3.6)
  axes.plot(speedup.keys(), speedup.values(), "o-", color=SERIES[0], label="measured")
  axes.plot(paper.keys(), paper.values(), "x:", color=SERIES[2], label="paper")
  axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  axes.set_yscale("log", base=2)
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
  _dress(axes, "times the full softmax's speed", sorted({*speedup, *paper}))
  return figure


def _dress(axes: Axes, title: str, codes: Sequence[int]) -> None:
  axes.set_xscale("log", base=2)
  axes.set_xticks(codes, [f"{k:,}" for k in codes])
  axes.yaxis.set_minor_formatter(NullFormatter())
  axes.set_xlabel("codes, K", color=INK, fontsize=9)
  axes.set_ylabel(title, color=INK, fontsize=9)
  axes.spines[["top", "right"]].set_visible(False)
  axes.tick_params(colors=INK, labelsize=8)
  axes.grid(color=INK, alpha=0.15, linewidth=0.6)
