"""The page of DPQ, from the kept results of its studies and the paper's numbers.

python -m experiments.studies.dpq.page
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.studies import study_page
from experiments.studies.dpq.rows import CodeSize
from experiments.studies.dpq.tasks import GRID
from experiments.studies.study_page import DOCS, Kept
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.study.seeds import Results, Spread, finished_results, results_by_seed
from vqjax.lm.pages import INK, SERIES

PRINTED = pd.read_csv(pathlib.Path(__file__).with_name("paper.csv"))
"""The scores and compression ratios that the paper prints: table, "setting/row", column, value."""

TABLES = "Table 3", "Table 9", "Table 12"
"""The tables of the page; the others have no measured row that is not in Table 3."""

TITLES = {
  "ptb_small": "PTB, small",
  "ptb_short": "PTB, small, 3 epochs",
  "multi30k": "Multi30k, En-De",
  "ag_news": "AG News",
  "dbpedia": "DBpedia",
}
"""Study -> its name in tables."""

STAND_INS = {
  ("Table 3", "ptb_medium_smaller"): "ptb_small",
  ("Table 9", "ptb_medium"): "ptb_small",
  ("Table 12", "ptb_medium_tied"): "ptb_short",
  ("Table 3", "wmt"): "multi30k",
}
"""(table, the paper's setting) -> the study that stands in for it."""

works = functools.partial(study_page.works, "dpq", (*TITLES, "ag_news_grid"), "tasks.py")

KINDS = {"sx": "DPQ-SX", "vq": "DPQ-VQ"}
WORDS_OF = "ptb_small"
"""The study whose neighbours and codes the page shows."""
SHOWN_WORD, SHOWN_SUBSPACES = "`toronto`", "x130"
"""What the page shows of the tables of neighbours and of steps; the CSV files have all."""


def scores_by_seed(results: Results, row: str) -> dict[int, float]:
  """Score of a row on the test split by seed: BLEU, accuracy in per cent or perplexity."""
  kept, by_seed = results_by_seed(results, f"{row}/run"), {}
  for seed, result in finished_results(results, f"{row}/run").items():
    if "bleu" in kept[seed]:
      by_seed[seed] = kept[seed]["bleu"]["score"]
    elif "accuracy" in result["test"]:
      by_seed[seed] = 100 * result["test"]["accuracy"]
    else:
      by_seed[seed] = result["test"]["perplexity"]
  return by_seed


def compression_ratio(results: Results, row: str) -> float | None:
  """Bytes of the float32 table over those of a row's inference form, or None."""
  kept = [finished_results(results, f"{name}/run") for name in ("full", row)]
  sizes = [one["embedding"]["shipped_bytes"] for by_seed in kept for one in [*by_seed.values()][:1]]
  return sizes[0] / sizes[1] if len(sizes) == 2 else None


def dpq_table(kept: Kept, name: str) -> pd.DataFrame:
  """The measured rows of one of the paper's tables, beside the paper's numbers.

  A study with a dagger stands in for the paper's setting.
  """
  lines = []
  for printed_row, printed in PRINTED[PRINTED.table == name].groupby("row", sort=False):
    setting, row = printed_row.split("/")
    theirs = setting.replace("-", "_")
    ours = theirs if theirs in kept else STAND_INS.get((name, theirs))
    study, results = kept.get(ours, (None, {}))
    if study is None or not results_by_seed(results, f"{row}/run"):
      continue
    published = dict(zip(printed.column, printed.value, strict=True))
    title = TITLES[ours] + ("" if ours == theirs else " †")
    lines.append(
      {
        "run": f"{title}: {study.row(row).label}",
        "paper": f"{published['score']:g}",
        "paper's ratio": _show(published.get("ratio"), "{:,.1f}"),
        **_measured(results, row),
      }
    )
  return pd.DataFrame(lines)


def _measured(results: Results, row: str) -> dict[str, str | None]:
  every = results_by_seed(results, f"{row}/run")
  finished = finished_results(results, f"{row}/run")
  score, full = scores_by_seed(results, row), scores_by_seed(results, "full")
  # Paired by seed, since the seed also orders the training data.
  difference = Spread.of([score[seed] - full[seed] for seed in sorted(score.keys() & full)])
  lost = next((one["embedding"].get("lost") for one in finished.values()), None)
  mean = Spread.of(list(score.values()))
  failed = f"{len(every) - len(finished)} failed" if len(every) > len(finished) else None
  return {
    "measured": ", ".join(filter(None, (mean and mean.show(2), failed))),
    "- full": difference and difference.show(2, "+"),
    "lost, %": _show(lost and 100 * lost, "{:.1f}"),
    "ratio": _show(compression_ratio(results, row), "{:,.1f}"),
  }


def _show(value: float | None, form: str) -> str | None:
  return None if pd.isna(value) else form.format(value)


def training_cost(cost: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
  """Time of a training step over that of the full embedding."""
  times: dict[str, dict[str, str]] = {}
  for name, row in cost.items():
    kind, size = name.split()
    times.setdefault(size, {"K x M": size})[kind] = f"{row['time']:.2f}"
  return pd.DataFrame(times.values())


def inference_cost(cost: Mapping[str, Any]) -> pd.DataFrame:
  """Lookup, export and file of a large compact embedding."""
  export, opened = cost["export"]["export"], cost["export"]["open and look up"]
  peak = export["memory_bytes"]
  cells = {
    "lookup of 16,384 tokens, time over a dense gather's": f"{cost['look_up']['time']:.2f}",
    "file, bytes": f"{export['file_bytes']:,}",
    "compression ratio of the file": f"{export['file_ratio']:.2f}",
    "export, s": f"{export['seconds']:.0f}",
    "export, peak memory beyond the trained table": None if peak is None else units.size(peak),
    "opening by memory map and lookup of 100 tokens, ms": f"{1e3 * opened['seconds']:.1f}",
    "device": cost["provenance"]["device"],
  }
  return pd.DataFrame(cells.items(), columns=["quantity", "value"])


def neighbours(results: Results) -> pd.DataFrame:
  """Tables 5 to 7: the nearest words of some words."""
  kept = {
    label: results.get(f"{row}/run", {}).get("neighbours", {})
    for row, label in (("full", "Full"), *KINDS.items())
  }
  lines = [
    (f"`{word}`", label, ", ".join(f"`{other}`" for other, _ in nearest[word][:4]))
    for word in kept["Full"]
    for label, nearest in kept.items()
    if word in nearest
  ]
  return pd.DataFrame(lines, columns=["word", "embedding", "nearest"])


def _without_setting(frame: pd.DataFrame) -> pd.DataFrame:
  """The rows of a table without the setting in their labels, where all have the same."""
  parts = frame["run"].str.partition(": ")
  return frame.assign(run=parts[2]) if parts[0].nunique() == 1 else frame


def update(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, the figures and CSV files of the page; return their paths."""
  kept, cost = study_page.current(works()), study_page.bench(docs, "dpq")
  (_, of_grid), (_, of_words) = kept["ag_news_grid"], kept[WORDS_OF]
  training, nearest = training_cost(cost["training"]), neighbours(of_words)
  frames = {
    **{name.lower().replace(" ", "-"): _without_setting(dpq_table(kept, name)) for name in TABLES},
    "neighbours": nearest[nearest["word"] == SHOWN_WORD],
    "training-cost": training[training["K x M"].str.endswith(SHOWN_SUBSPACES)],
    "inference-cost": inference_cost(cost),
  }
  blocks = {
    name: markdown(frame, 3 if name == "neighbours" else 1) for name, frame in frames.items()
  }
  with matplotlib.rc_context(STYLE):
    figures = {
      "dpq-cost.png": cost_figure(cost["training"]),
      "dpq-heat.png": heat_figure(of_grid),
      "dpq-trade.png": trade_figure(of_grid),
      "dpq-codes.png": usage_figure(of_words),
    }
  whole = {"dpq-neighbours.csv": nearest, "dpq-steps.csv": training}
  return study_page.publish_page(docs, "dpq", kept, blocks, figures, whole)


STYLE = {
  "font.size": 8,
  "axes.titlesize": 9,
  "axes.prop_cycle": matplotlib.cycler(color=SERIES),
  "axes.spines.top": False,
  "axes.spines.right": False,
  "legend.frameon": False,
  "figure.constrained_layout.use": True,
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK)


def _grid(results: Results, kind: str, shared: bool) -> np.ndarray:
  """Score and ratio of the grid, [K, M, 2]; nan where it was not measured."""
  values = np.full((len(GRID[0]), len(GRID[1]), 2), np.nan)
  for i, j in np.ndindex(values.shape[:2]):
    row = f"{kind}-{CodeSize(GRID[0][i], GRID[1][j], shared)}"
    if score := scores_by_seed(results, row):
      values[i, j] = np.mean(list(score.values())), compression_ratio(results, row)
  return values


def heat_figure(results: Results) -> Figure:
  """Figures 3 and 7: score and ratio over K and M, with separate codebooks."""
  grids = {kind: _grid(results, kind, shared=False) for kind in KINDS}
  panels = {f"{label}: accuracy, %": grids[kind][..., 0] for kind, label in KINDS.items()}
  panels["compression ratio"] = grids["sx"][..., 1]
  figure = Figure(figsize=(9.6, 3.2))
  for axes, (title, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
    axes.imshow(values, cmap="Blues", aspect="auto")
    axes.set(title=title, xlabel="subspaces, M", ylabel="codes, K")
    axes.set_xticks(range(len(GRID[1])), GRID[1])
    axes.set_yticks(range(len(GRID[0])), GRID[0])
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (i, j), value in np.ndenumerate(values):
      text = units.MISSING if np.isnan(value) else f"{value:.1f}"
      axes.text(j, i, text, ha="center", va="center", color="white" if value > middle else INK)
  return figure


def trade_figure(results: Results) -> Figure:
  """Figure 8: score against ratio, with a line through the best scores."""
  figure = Figure(figsize=(7.2, 4.2))
  axes = figure.add_subplot()
  for color, (kind, label) in zip(SERIES, KINDS.items(), strict=False):
    for shared, name, fill, line in (
      (False, label, color, "-"),
      (True, f"{label}, shared", "white", "--"),
    ):
      points = _grid(results, kind, shared).reshape(-1, 2)
      points = points[~np.isnan(points).any(axis=1)]
      if len(points):
        style = {"markeredgecolor": color, "markerfacecolor": fill, "markersize": 5}
        axes.plot(points[:, 1], points[:, 0], "o", label=name, **style)
        best = -np.array(study_page.frontier((-points[:, ::-1]).tolist()))
        axes.plot(*best.T, line, color=color, linewidth=1)
  full = list(scores_by_seed(results, "full").values())
  axes.axhline(np.mean(full), color=INK, linewidth=0.8, label="full")
  axes.set(xscale="log", xlabel="compression ratio of the embedding", ylabel="accuracy, %")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_formatter("")
  axes.legend()
  return figure


def usage_figure(results: Results) -> Figure:
  """Figure 5: the number of words on each code of each subspace."""
  figure = Figure(figsize=(3.6 * len(KINDS), 3.6))
  for axes, (kind, label) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
    counts_MK = results[f"{kind}/run"]["codes"]["counts"]
    figure.colorbar(axes.imshow(counts_MK, cmap="Blues", aspect="auto"), ax=axes)
    axes.set(title=label, xlabel="code", ylabel="subspace")
  return figure


def cost_figure(cost: Mapping[str, Mapping[str, float]]) -> Figure:
  """Figure 4: time and temporary memory of a step over the full embedding's, over K."""
  figure = Figure(figsize=(8, 3.2))
  sizes = {tuple(map(int, name.split()[1].split("x"))) for name in cost}
  codes, subspaces = (sorted(set(column)) for column in zip(*sizes, strict=True))
  titles = {"time": "time", "temp": "temporary memory"}
  for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
    for color, m in zip(SERIES, subspaces, strict=False):
      for kind, line in (("SX", "o-"), ("VQ", "o--")):
        values = [cost[f"{kind} {k}x{m}"][key] for k in codes]
        axes.plot(codes, values, line, color=color, markersize=4, label=f"{kind}, M = {m}")
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(codes, codes)
    axes.set(xlabel="codes, K", ylabel=f"{title}, times the full embedding's")
  figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", handlelength=3)
  return figure


if __name__ == "__main__":
  for path in update():
    print(f"wrote {path}")
