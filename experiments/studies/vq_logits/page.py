"""The page of VQ-Logits, from the kept results of its three studies and the paper's numbers.

python -m experiments.studies.vq_logits.page
"""

import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator

from experiments.studies import study_page
from experiments.studies.study_page import DOCS
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points
from vqjax.lab.study import Study
from vqjax.lab.study.seeds import Results, Spread, finished_results, results_by_seed
from vqjax.lm.pages import INK, SERIES, blank

MAIN = {"ptb": "Table 10", "wikitext": "Table 1", "web": "Table 9"}
"""Study -> the table that has all of its methods."""

works = functools.partial(study_page.works, "vq_logits", MAIN)

BASELINES = "dense", "full", "full-scratch", "adaptive", "low-rank"
"""Rows of such a table before its codebooks."""

ABLATIONS = "Table 2", "Table 6", "Table 7"
"""Tables of the study of WikiText that vary the codebook."""

FAMILIES = {
  "tokens share codes": ("CodebookHead", "LearnedCodebookHead"),
  "composed rows": ("ProductHead", "LearnedProductHead", "ResidualCodebookHead"),
  "low rank": ("LowRankHead",),
  "full softmax": ("DenseHead",),
}
"""Series of the figure of bytes -> classes of heads."""

FIXED = {"gumbel-1024": "weighted-bias-1024", "product-learned": "product"}
"""Row of a head that learns its codes -> row of the head of fixed codes that it becomes."""

OFF_PAGE = "weighted-1024", "alone-1024", "commitment-1024", "product-distilled", "vq-512", "vq-256"
"""Conversions that only the CSV file has: near others, or in Table 10."""

PRINTED = pathlib.Path(__file__).with_name("paper.csv")
PAPER = study_page.read_paper(PRINTED)
PERPLEXITY = pd.read_csv(PRINTED, dtype=str).query("column == 'perplexity'").set_index("row")
"""The `table` and the `value` of each row of the paper that has a perplexity."""


def codes_of(rows: Iterable[str]) -> list[int]:
  """The sizes of the codebooks among the rows of a study that are made as the paper's."""
  return [int(of) for row in rows if (of := row.removeprefix("vq-")) != row and of.isdigit()]


def measurements(study: Study, results: Results) -> pd.DataFrame:
  """The rows of a study by their names, measured over their seeds; None for missing numbers.

  The columns are the row's `label`, `converted` (whether it starts from the dense run), `head` (the
  head's class), and

  - `perplexity`: a Spread, on the test text.
  - `over_full`: a Spread, per cent above the full softmax of the same seed and number of steps.
  - `head_bytes`: parameters and codes of the head; a head that learns its codes counts as the head
    of fixed codes that it becomes.
  - `of_full`: `head_bytes` relative to the full softmax.
  - `uniform` and `bias`: least test perplexity of any decoder with these codes, with tokens uniform
    in each code, and with a token bias.
  """
  finished = lambda name: finished_results(results, f"{name}/run")
  test = lambda name: {seed: one["test"]["perplexity"] for seed, one in finished(name).items()}
  head = lambda name, key: next((one["head"][key] for one in finished(name).values()), None)
  lines, full_bytes = {}, head("full", "state_bytes")
  for name in study.rows:
    is_converted = bool(study.begins_from(name))
    own, size = test(name), head(FIXED.get(name, name), "state_bytes")
    full = test("full" if is_converted or name == "dense" else "full-scratch")
    kept = results_by_seed(results, f"{name}/run").values()
    floors = [one["floors"] for one in kept if one.get("floors")]
    lines[name] = {
      "label": study.row(name).label,
      "converted": is_converted,
      "head": head(name, "class"),
      "perplexity": Spread.of(list(own.values())),
      "over_full": Spread.of([100 * (own[s] / full[s] - 1) for s in sorted(own.keys() & full)]),
      "head_bytes": size,
      "of_full": size / full_bytes if size and full_bytes else None,
      **pd.DataFrame(floors, columns=["uniform", "bias"]).mean(),
    }
  return pd.DataFrame.from_dict(lines, orient="index", dtype=object)


def vq_logits_table(
  measured: pd.DataFrame, printed: pd.DataFrame = PERPLEXITY[:0], full: str = "nan"
) -> pd.DataFrame:
  """Measured rows as text, beside rows of `PERPLEXITY` and the paper's full softmax."""
  theirs = printed["value"].reindex(measured.index)
  over = 100 * (theirs.astype(float) / float(full) - 1)
  shown = lambda values, show: [None if pd.isna(x) else show(x) for x in values]
  return pd.DataFrame(
    {
      "run": measured["label"],
      "paper": theirs,
      "paper, % over full": shown(over, "{:+.1f}".format),
      "measured": shown(measured["perplexity"], lambda spread: spread.show(1)),
      "% over full": shown(measured["over_full"], lambda spread: spread.show(1, "+")),
      "of full": shown(measured["of_full"], units.ratio),
      "floor": shown(measured["uniform"], units.fixed(1)),
      "floor, best bias": shown(measured["bias"], units.fixed(1)),
    }
  )


def conversions(measured: pd.DataFrame) -> pd.DataFrame:
  """The measured rows that start from one trained model, numbered by perplexity."""
  chosen = measured[measured["converted"]]
  by_mean = lambda column: column.map(lambda spread: spread.mean if spread else float("inf"))
  ordered = chosen.sort_values("perplexity", key=by_mean, kind="stable")
  labels = [f"{number}. {label}" for number, label in enumerate(ordered["label"], start=1)]
  return ordered.assign(label=labels)


def shown_tables(measured: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
  """The tables of the page by their names, of the `measurements` of each study."""
  full = {name: PAPER[title]["full"]["perplexity"] for name, title in MAIN.items()}
  frames = {}
  for name, title in MAIN.items():
    own = measured[name].loc[[*BASELINES, *(f"vq-{k}" for k in codes_of(measured[name].index))]]
    frame = vq_logits_table(own, PERPLEXITY[PERPLEXITY["table"] == title], full[name])
    # Without rows that are neither the paper's nor run.
    known = frame["paper"].notna() | frame["measured"].notna()
    frames[title.lower().replace(" ", "-")] = frame[known]
  varied = PERPLEXITY[PERPLEXITY["table"].isin(ABLATIONS)]
  # The full softmax is in Table 1, and all of these heads have its codebook's bytes.
  varied = varied[~varied.index.duplicated()].drop("full")
  frame = vq_logits_table(measured["wikitext"].loc[varied.index], varied, full["wikitext"])
  frame["table"] = varied["table"].str.removeprefix("Table ")
  frames["ablations"] = frame.drop(columns="of full")
  frames["conversions"] = vq_logits_table(conversions(measured["ptb"]).drop([*OFF_PAGE]))
  return {name: f.drop(columns=["paper", "floor, best bias"]) for name, f in frames.items()}


def speed_table(speed: Mapping[str, Any]) -> pd.DataFrame:
  """Times and temporaries of the benchmark `codebook`, beside the paper's speed."""
  theirs = {
    f"codebook K={row.removeprefix('vq-')}": f"{float(cells['speedup']):.1f}×"
    for row, cells in PAPER["Table 1"].items()
  }
  names = list(speed["forward"])
  columns = {"run": names, "paper, times faster": [theirs.get(name) for name in names]}
  for kind, key in {"log-probabilities": "forward", "loss and gradient": "training"}.items():
    cells = [speed[key][name] for name in names]
    columns[f"{kind}, ms"] = [units.milliseconds(cell["seconds"]) for cell in cells]
    columns[f"{kind}, times faster"] = [units.ratio(cell["times_faster"]) for cell in cells]
    columns[f"{kind}, MiB"] = [f"{cell['temp_bytes'] / 2**20:,.1f}" for cell in cells]
  return pd.DataFrame(columns)


def whole_table(models: Mapping[str, Any]) -> pd.DataFrame:
  """Parameters and speed of whole models, of the benchmark `whole-models`, beside the paper's.

  "at most" is what a head that takes no time could gain, by multiply-accumulates: the parameters of
  the body and of the full softmax over the body's.
  """
  lines = []
  for name, title in MAIN.items():
    measured, theirs = models[title.removeprefix("Table ")], PAPER[title]
    body, shape = measured["full"]["body_params"], measured["full"]["head_params"]
    lines += [
      {
        "model": f"{name}, {row}",
        "paper, M": theirs[row]["total_M"],
        "M": f"{one['params'] / 1e6:.1f}",
        "paper, times faster": theirs[row]["overall"],
        "times faster": f"{one['times_faster']:.2f}",
        "at most": f"{(body + shape) / body:.2f}",
      }
      for row, one in measured.items()
    ]
  return pd.DataFrame(lines)


def kmeans_table(rows: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
  """The numbers that the benchmark `kmeans` writes."""
  return pd.DataFrame(
    {
      "run": name,
      "seconds": f"{row['seconds']:,.0f}",
      "processor seconds": f"{row['cpu_seconds']:,.0f}",
      "memory": units.size(row["memory_bytes"]),
      "inertia": f"{row['inertia']:,.0f}",
    }
    for name, row in rows.items()
  )


def bytes_figure(points: pd.DataFrame) -> Figure:
  """Head bytes against test perplexity, points numbered as in the table."""
  figure, axes = blank(height=8)
  xs = byte_axis(axes, list(points["head_bytes"]))
  ys = [spread.mean for spread in points["perplexity"]]
  for (family, classes), color in zip(FAMILIES.items(), SERIES, strict=False):
    of_family = [at for at, head in enumerate(points["head"]) if head in classes]
    own = [xs[at] for at in of_family], [ys[at] for at in of_family]
    axes.plot(*own, "o", markersize=6, color=color, label=family)
  best = study_page.frontier(zip(xs, ys, strict=True))
  axes.plot(*zip(*best, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=1)
  axes.set_xlabel("head bytes")
  axes.set_ylabel("test perplexity")
  axes.margins(y=0.08)
  _perplexity_axis(axes, MaxNLocator(8))
  _legend_below(figure, axes)
  label_points(axes, xs, ys, [label.split(".")[0] for label in points["label"]])
  return figure


def codes_figure(measured: Mapping[str, pd.DataFrame]) -> Figure:
  """Figure 2a for each text: perplexity, floor and the paper's, by codebook size."""
  figure = Figure(figsize=(9.6, 3.8), layout="constrained")
  panels = figure.subplots(1, len(measured))
  for axes, name in zip(panels, MAIN, strict=True):
    codes, printed = codes_of(measured[name].index), PAPER[MAIN[name]]
    rows = ["full", *(f"vq-{k}" for k in codes)]
    own = [spread.mean if spread else math.nan for spread in measured[name]["perplexity"][rows]]
    theirs = [float(printed[row]["perplexity"]) if row in printed else math.nan for row in rows]
    floors = measured[name]["uniform"][rows[1:]]
    axes.plot(codes, own[1:], "o-", color=SERIES[0], label="measured")
    axes.plot(codes, floors, "s--", color=SERIES[1], label="floor of these codes")
    axes.plot(codes, theirs[1:], "x:", color=SERIES[2], label="paper")
    axes.axhline(own[0], color=SERIES[0], linewidth=0.8, label="full softmax, measured")
    axes.axhline(theirs[0], color=SERIES[2], linewidth=0.8, label="full softmax, paper")
    axes.set_title(f"{name} (paper: {PAPER['Setup'][name]['text']})", fontsize=9, color=INK)
    axes.set_xlabel("codes, K", fontsize=9, color=INK)
    axes.set_ylabel("perplexity", fontsize=9, color=INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(codes, [f"{k:,}" for k in codes])
    _perplexity_axis(axes, LogLocator(subs=(1, 2, 5)))
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
  _legend_below(figure, figure.axes[0])
  return figure


def _perplexity_axis(axes: Axes, ticks: Locator) -> None:
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticks)
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter("")


def _legend_below(figure: Figure, axes: Axes) -> None:
  handles, names = axes.get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def update(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, figures and the CSV file of the page; return their paths."""
  kept = study_page.current(works())
  measured = {name: measurements(*one) for name, one in kept.items()}
  converted = conversions(measured["ptb"])
  speed = study_page.bench(docs, "codebook")
  frames = {
    **shown_tables(measured),
    "table-3": speed_table(speed),
    "whole-models": whole_table(study_page.bench(docs, "whole-models")),
    "kmeans": kmeans_table(study_page.bench(docs, "kmeans")["data"]["mixture"]["rows"]),
  }
  blocks = {name: markdown(frame) for name, frame in frames.items()}
  shape, origin = speed["sizes"]["shape"], speed["provenance"]
  blocks["table-3"] += (
    f"\n\n{origin['device']}, float32, {shape['tokens']:,} tokens in slices of"
    f" {speed['slice']:,}, D = {shape['dim']:,}, V = {shape['vocab']:,}; commit {origin['commit']}."
  )
  figures = {
    "vq-bytes.png": bytes_figure(converted[converted["perplexity"].notna()]),
    "vq-codes.png": codes_figure(measured),
  }
  whole = {"vq_logits-conversions.csv": vq_logits_table(converted)}
  return study_page.publish_page(docs, "vq_logits", kept, blocks, figures, whole)


if __name__ == "__main__":
  for path in update():
    print(f"wrote {path}")
