"""Tables, figures and generated blocks of the page of DPQ."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.studies import study_page
from experiments.studies.dpq.rows import rows
from experiments.studies.dpq.settings import SCALES, STAND_INS, CodeSize, DPQSetting
from experiments.studies.study_page import DOCS
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.study.seeds import Results, Spread, finished_results, results_by_seed
from vqjax.lm.pages import INK, SERIES

PRINTED = pd.read_csv(pathlib.Path(__file__).with_name("paper.csv"))
"""The scores and compression ratios that the paper prints: table, "setting/row", column, value."""

TABLES = {
  "Table 3": "DPQ against the full embedding",
  "Table 4": "Penn Treebank, language models of three sizes",
  "Table 9": "Penn Treebank, other ways to compress",
  "Table 10": "text classification, other ways to compress",
  "Table 11": "translation, tables reconstructed after training",
  "Table 12": "keys and values tied or not",
  "Table 13": "BERT, a pair and a span task",
}

ON_PAGE = "Table 3", "Table 9", "Table 12"
"""The tables of the page; the others have no measured row that is not in Table 3."""

TITLES = {
  "ptb-small": "PTB, small",
  "ptb-short": "PTB, small, 3 epochs",
  "ptb-medium": "PTB, medium",
  "ptb-medium-smaller": "PTB, medium",
  "ptb-medium-tied": "PTB, medium",
  "ptb-large": "PTB, large",
  "wikitext-medium": "WikiText-2, medium",
  "iwslt-en-vi": "IWSLT15, En-Vi",
  "iwslt-vi-en": "IWSLT15, Vi-En",
  "wmt": "WMT19, En-De",
  "multi30k": "Multi30k, En-De",
  "mnli": "BERT, MNLI",
  "squad": "BERT, SQuAD 1.1, exact match",
  "bert-pairs": "BERT, continuations",
  "bert-spans": "BERT, stretches of another text",
  "ag-news": "AG News",
  "yahoo": "Yahoo! Answers",
  "dbpedia": "DBpedia",
  "yelp-polarity": "Yelp, polarity",
  "yelp-full": "Yelp, full",
}
"""Setting -> its name in tables."""

KINDS = {"sx": "DPQ-SX", "vq": "DPQ-VQ"}
WORDS_OF = "ptb-small"
"""The setting whose neighbours and codes the page shows."""
SHOWN_WORD, SHOWN_SUBSPACES = "`toronto`", "x130"
"""What the page shows of the tables of neighbours and of steps; the CSV files have all."""


def scores_by_seed(results: Results, name: str) -> dict[int, float]:
  """Score on the test split by seed: BLEU, accuracy in per cent or perplexity."""
  kept, by_seed = results_by_seed(results, name), {}
  for seed, result in finished_results(results, name).items():
    if "bleu" in kept[seed]:
      by_seed[seed] = kept[seed]["bleu"]["score"]
    elif "accuracy" in result["test"]:
      by_seed[seed] = 100 * result["test"]["accuracy"]
    else:
      by_seed[seed] = result["test"]["perplexity"]
  return by_seed


def compression_ratio(results: Results, name: str) -> float | None:
  """Bytes of the float32 table over those of a row's inference form, or None."""
  size = lambda row: next(
    (one["embedding"]["shipped_bytes"] for one in finished_results(results, row).values()),
    None,
  )
  full, own = size(f"{name.split('/')[0]}/full"), size(name)
  return full / own if full and own else None


def formula_ratio(vocab: int, dim: int, codes: CodeSize) -> float:
  """The paper's compression ratio of a product code, in bits (Section 3)."""
  k, m, shared = codes
  values = 32 * k * dim / (m if shared else 1)
  return 32 * vocab * dim / (vocab * m * math.log2(k) + values)


def dpq_table(results: Results, scale: str, name: str) -> pd.DataFrame:
  """The measured rows of one of the paper's tables at a scale, beside the paper's numbers.

  A setting with a dagger stands in for the paper's.
  """
  lines = []
  for row, printed in PRINTED[PRINTED.table == name].groupby("row", sort=False):
    theirs, kind = row.split("/")
    ours = STAND_INS[scale].get((name, theirs), theirs)
    setting = SCALES[scale].get(ours)
    label = {own.name: own.label for own in rows(setting)}.get(kind) if setting else None
    if label is None or not results_by_seed(results, f"{ours}/{kind}"):
      continue
    published = dict(zip(printed.column, printed.value, strict=True))
    title = TITLES[ours] + ("" if ours == theirs else " †")
    lines.append(
      {
        "run": f"{title}: {label}",
        "paper": f"{published['score']:g}",
        "paper's ratio": _show(published.get("ratio"), "{:,.1f}"),
        **_measured(results, f"{ours}/{kind}"),
      }
    )
  return pd.DataFrame(lines)


def _measured(results: Results, name: str) -> dict[str, str | None]:
  kept, result = results_by_seed(results, name), finished_results(results, name)
  score, full = scores_by_seed(results, name), scores_by_seed(results, f"{name.split('/')[0]}/full")
  # Paired by seed, since the seed also orders the training data.
  difference = Spread.of([score[seed] - full[seed] for seed in sorted(score.keys() & full)])
  lost = next((one["embedding"].get("lost") for one in result.values()), None)
  mean = Spread.of(list(score.values()))
  failed = f"{len(kept) - len(result)} failed" if len(kept) > len(result) else None
  return {
    "measured": ", ".join(filter(None, (mean and mean.show(2), failed))),
    "- full": difference and difference.show(2, "+"),
    "lost, %": None if lost is None else f"{100 * lost:.1f}",
    "ratio": _show(compression_ratio(results, name), "{:,.1f}"),
  }


def _show(value: float | None, form: str) -> str | None:
  return None if pd.isna(value) else form.format(value)


def training_cost(cost: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
  """Time of a training step over that of the full embedding."""
  sizes = dict.fromkeys(name.split()[1] for name in cost)
  times = {
    kind: [f"{cost[f'{kind} {size}']['time']:.2f}" for size in sizes] for kind in ("SX", "VQ")
  }
  return pd.DataFrame({"K x M": list(sizes)} | times)


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
    label: results.get(f"{WORDS_OF}/{kind}", {}).get("neighbours", {})
    for kind, label in (("full", "Full"), *KINDS.items())
  }
  return pd.DataFrame(
    [
      {"word": f"`{word}`", "embedding": label}
      | {"nearest": ", ".join(f"`{other}`" for other, _ in nearest[word][:4])}
      for word in kept["Full"]
      for label, nearest in kept.items()
      if word in nearest
    ],
    columns=["word", "embedding", "nearest"],
  )


def corrected_ratios() -> pd.DataFrame:
  """Compression ratios that the paper prints beside those of its formula."""
  ptb, wmt = (10_000, 650), (32_000, 512)
  cases = [
    ("Table 3", "DPQ-SX, PTB, medium", 163.2, ptb, CodeSize(32, 25, shared=True)),
    *(
      ("Table 9", f"product quantisation, K = {k}", printed, ptb, CodeSize(k, 650 // 2))
      for k, printed in ((64, 8.3), (128, 6.7), (256, 5.3))
    ),
    ("Table 11", "reconstruction, K = 32", 25.0, wmt, CodeSize(32, 128)),
    ("Table 11", "reconstruction, K = 128, printed as 32", 17.0, wmt, CodeSize(128, 128)),
  ]
  lines = []
  for name, row, printed, (vocab, dim), codes in cases:
    ratio = formula_ratio(vocab, dim, codes)
    cells = {"table": name, "row": f"{row} ({codes})", "printed": f"{printed:g}"}
    cells |= {"formula": f"{ratio:.2f}", "formula · (d + 1)/d": f"{ratio * (dim + 1) / dim:.2f}"}
    lines.append(cells)
  return pd.DataFrame(lines)


def shown_tables(results: Results, scale: str) -> dict[str, pd.DataFrame]:
  """The tables of the terminal by their titles."""
  every = {f"{name}: {title}": dpq_table(results, scale, name) for name, title in TABLES.items()}
  # All rows of a table may run elsewhere.
  return {title: frame for title, frame in every.items() if len(frame)}


def _without_setting(frame: pd.DataFrame) -> pd.DataFrame:
  """The rows of a table without the setting in their labels, where all have the same."""
  settings = frame["run"].str.partition(": ")[0]
  return frame.assign(run=frame["run"].str.partition(": ")[2]) if settings.nunique() == 1 else frame


def update(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, the figures and CSV files of the page; return their paths."""
  cost = study_page.bench(docs, "dpq")
  training = training_cost(cost["training"]) if cost else pd.DataFrame(columns=["K x M"])
  nearest = neighbours(results)
  tables = {name: dpq_table(results, "cpu", name) for name in ON_PAGE}
  frames = {
    **{name.lower().replace(" ", "-"): _without_setting(f) for name, f in tables.items()},
    "neighbours": nearest[nearest["word"] == SHOWN_WORD],
    "training-cost": training[training["K x M"].str.endswith(SHOWN_SUBSPACES)],
    "inference-cost": inference_cost(cost) if cost else pd.DataFrame(),
  }
  blocks = {
    name: markdown(frame, 3 if name == "neighbours" else 1) if len(frame) else "Not run."
    for name, frame in frames.items()
  }
  whole = {"neighbours": nearest, "ratios": corrected_ratios(), "steps": training}
  grid, changes = SCALES["cpu"]["ag-news-grid"], SCALES["cpu"]["ag-news-changes"]
  with matplotlib.rc_context(STYLE):
    figures = {
      "dpq-cost.png": cost_figure(cost["training"]) if cost else None,
      "dpq-heat.png": heat_figure(results, grid),
      "dpq-trade.png": trade_figure(results, grid),
      "dpq-codes.png": usage_figure(results, WORDS_OF),
      "dpq-changes.png": changes_figure(results, changes),
    }
  named = {f"dpq-{name}.csv": frame for name, frame in whole.items()}
  return study_page.publish_page(docs, "dpq", results, blocks, figures, named)


STYLE = {
  "font.size": 8,
  "axes.titlesize": 9,
  "axes.prop_cycle": matplotlib.cycler(color=SERIES),
  "axes.spines.top": False,
  "axes.spines.right": False,
  "legend.frameon": False,
  "figure.constrained_layout.use": True,
} | dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK)


def _grid(results: Results, s: DPQSetting, kind: str, shared: bool) -> np.ndarray:
  """Score and ratio of a setting's grid, [K, M, 2]; nan where it was not measured."""
  values = np.full((len(s.grid[0]), len(s.grid[1]), 2), np.nan)
  for i, j in np.ndindex(values.shape[:2]):
    name = f"{s.name}/{kind}-{CodeSize(s.grid[0][i], s.grid[1][j], shared)}"
    score, ratio = scores_by_seed(results, name), compression_ratio(results, name)
    if score and ratio:
      values[i, j] = np.mean(list(score.values())), ratio
  return values


def heat_figure(results: Results, s: DPQSetting) -> Figure | None:
  """Figures 3 and 7: score and ratio over K and M, with separate codebooks."""
  grids = {kind: _grid(results, s, kind, shared=False) for kind in KINDS}
  if all(np.isnan(grid).all() for grid in grids.values()):
    return None
  panels = {f"{label}: accuracy, %": grids[kind][..., 0] for kind, label in KINDS.items()}
  panels["compression ratio"] = grids["sx"][..., 1]
  figure = Figure(figsize=(9.6, 3.2))
  for axes, (title, values) in zip(figure.subplots(1, 3), panels.items(), strict=True):
    axes.imshow(values, cmap="Blues", aspect="auto")
    axes.set(title=title, xlabel="subspaces, M", ylabel="codes, K")
    axes.set_xticks(range(len(s.grid[1])), s.grid[1])
    axes.set_yticks(range(len(s.grid[0])), s.grid[0])
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (i, j), value in np.ndenumerate(values):
      text = units.MISSING if np.isnan(value) else f"{value:.1f}"
      axes.text(j, i, text, ha="center", va="center", color="white" if value > middle else INK)
  return figure


def trade_figure(results: Results, s: DPQSetting) -> Figure | None:
  """Figure 8: score against ratio, with a line through the best scores."""
  figure = Figure(figsize=(7.2, 4.2))
  axes = figure.add_subplot()
  for color, (kind, label) in zip(SERIES, KINDS.items(), strict=False):
    for shared, name, fill, line in (
      (False, label, color, "-"),
      (True, f"{label}, shared", "white", "--"),
    ):
      points = _grid(results, s, kind, shared).reshape(-1, 2)
      points = points[~np.isnan(points).any(axis=1)]
      if len(points):
        style = {"markeredgecolor": color, "markerfacecolor": fill, "markersize": 5}
        axes.plot(points[:, 1], points[:, 0], "o", label=name, **style)
        best = -np.array(study_page.frontier((-points[:, ::-1]).tolist()))
        axes.plot(*best.T, line, color=color, linewidth=1)
  full = list(scores_by_seed(results, f"{s.name}/full").values())
  if not axes.lines:
    return None
  if full:
    axes.axhline(np.mean(full), color=INK, linewidth=0.8, label="full")
  axes.set(xscale="log", xlabel="compression ratio of the embedding", ylabel="accuracy, %")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_formatter("")
  axes.legend()
  return figure


def usage_figure(results: Results, setting: str) -> Figure | None:
  """Figure 5: the number of words on each code of each subspace."""
  kept = {label: results.get(f"{setting}/{kind}", {}) for kind, label in KINDS.items()}
  counts = {label: row["codes"]["counts"] for label, row in kept.items() if "codes" in row}
  if not counts:
    return None
  figure = Figure(figsize=(3.6 * len(counts), 3.6))
  panels = figure.subplots(1, len(counts), squeeze=False)[0]
  for axes, (label, counts_MK) in zip(panels, counts.items(), strict=True):
    figure.colorbar(axes.imshow(counts_MK, cmap="Blues", aspect="auto"), ax=axes)
    axes.set(title=label, xlabel="code", ylabel="subspace")
  return figure


def changes_figure(results: Results, s: DPQSetting) -> Figure | None:
  """Figure 6: percentage of codes that changed since the last checkpoint."""
  figure = Figure(figsize=(8, 3.2))
  panels = figure.subplots(1, 2, sharey=True)
  for axes, (kind, label) in zip(panels, KINDS.items(), strict=True):
    for k in s.grid[0]:
      changed = results.get(f"{s.name}/{kind}-{CodeSize(k, s.grid[1][0])}", {}).get("changes")
      if changed:
        axes.plot(*zip(*changed, strict=True), label=f"K = {k}")
    axes.set(title=label, xlabel="step", ylabel="codes that changed, %", ylim=(0, None))
    if axes.lines:
      axes.legend()
  return figure if any(axes.lines for axes in panels) else None


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
