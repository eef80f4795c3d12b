"""Tables, figures and generated blocks of the page of DPQ."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.studies import page
from experiments.studies.dpq.rows import LABELS, rows
from experiments.studies.dpq.settings import SCALES, STAND_INS, Codes, Setting
from experiments.studies.study import Results
from vqjax.lab.report import INK, SERIES, units
from vqjax.lab.training.run import read_json

PAPER = pd.read_csv(pathlib.Path(__file__).with_name("paper.csv"))
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
"""The setting whose words, neighbours and codes the page shows."""


def scores(results: Results, name: str) -> dict[int, float]:
  """Score on the test split by seed: BLEU, accuracy in per cent or perplexity."""
  by_seed = {}
  for seed, result in page.finished(results, name).items():
    kept, test = page.seeds(results, name)[seed], result["test"]
    if "bleu" in kept:
      by_seed[seed] = kept["bleu"]["score"]
    else:
      by_seed[seed] = 100 * test["accuracy"] if "accuracy" in test else test["perplexity"]
  return by_seed


def compression_ratio(results: Results, name: str) -> float | None:
  """Bytes of the full float32 table over those of a row's inference form; None if not known."""
  full = page.finished(results, f"{name.split('/')[0]}/full")
  sizes = [
    result["embedding"]["shipped_bytes"]
    for finished in (full, page.finished(results, name))
    for result in list(finished.values())[:1]
  ]
  return sizes[0] / sizes[1] if len(sizes) == 2 else None


def formula_ratio(vocab: int, dim: int, codes: Codes) -> float:
  """The paper's compression ratio of a product code, in bits (Section 3)."""
  k, m, shared = codes
  values = 32 * k * dim / (m if shared else 1)
  return 32 * vocab * dim / (vocab * m * math.log2(k) + values)


def table(results: Results, scale: str, name: str) -> pd.DataFrame:
  """One of the paper's tables; a row that was not run has only the paper's numbers.

  A setting with a dagger stands in for the paper's.
  """
  lines = []
  for row, printed in PAPER[PAPER.table == name].groupby("row", sort=False):
    theirs, kind = row.split("/")
    published = dict(zip(printed.column, printed.value, strict=True))
    ours = STAND_INS[scale].get((name, theirs), theirs)
    setting = SCALES[scale].get(ours)
    title = TITLES[ours] + ("" if ours == theirs else " †")
    labels = {own.name: own.label for own in rows(setting)} if setting else {}
    lines.append(
      {
        "run": f"{title}: {labels.get(kind, LABELS[kind])}",
        "paper": f"{published['score']:g}",
        "paper's ratio": _show(published.get("ratio"), "{:,.1f}"),
        **_measured(results if setting else {}, f"{ours}/{kind}"),
      }
    )
  return pd.DataFrame(lines)


def _measured(results: Results, name: str) -> dict[str, str | None]:
  kept, result = page.seeds(results, name), page.finished(results, name)
  score, full = scores(results, name), scores(results, f"{name.split('/')[0]}/full")
  failed = len(kept) - len(result)
  # Paired by seed, since the seed also orders the training data.
  difference = page.Spread.of([score[seed] - full[seed] for seed in sorted(score.keys() & full)])
  embedding = next((one["embedding"] for one in result.values()), {})
  compact = next((one["compact"] for one in kept.values() if "compact" in one), {})
  lost, size = embedding.get("lost"), compact.get("file_bytes", embedding.get("shipped_bytes"))
  mean = page.Spread.of(list(score.values()))
  return {
    "measured": mean.show(2) if mean else "failed" if failed else units.MISSING,
    "seeds": f"{len(score)}" + (f", {failed} failed" if failed else ""),
    "- full": difference and difference.show(2, "+"),
    "lost": None if lost is None else f"{100 * lost:.1f} %",
    "ratio": _show(compression_ratio(results, name), "{:,.1f}"),
    "formula": _show(compact.get("formula"), "{:,.1f}"),
    "bytes": size and units.size(size),
  }


def _show(value: float | None, form: str) -> str | None:
  return None if pd.isna(value) else form.format(value)


def stand_ins(scale: str) -> pd.DataFrame:
  """The settings that stand in for the paper's."""
  return pd.DataFrame(
    [
      {"table": name, "paper": TITLES[theirs], "here": TITLES[ours]}
      for (name, theirs), ours in STAND_INS[scale].items()
    ]
  )


def training_cost(cost: Mapping[str, Mapping[str, float]]) -> pd.DataFrame:
  """Time and temporary memory of a training step over those of the full embedding."""
  sizes = dict.fromkeys(name.split()[1] for name in cost)
  return pd.DataFrame(
    [
      {"K x M": size}
      | {
        f"{kind} {title}": f"{cost[f'{kind} {size}'][key]:.2f}"
        for kind in ("SX", "VQ")
        for key, title in (("time", "time"), ("temp", "memory"))
      }
      for size in sizes
    ]
  )


def inference_cost(cost: Mapping[str, Any]) -> pd.DataFrame:
  """Look-up, export and file of a large compact embedding."""
  export, opened = cost["export"]["export"], cost["export"]["open and look up"]
  peak = export["memory_bytes"]
  cells = {
    "look-up of 16,384 tokens, time over a dense gather's": f"{cost['look_up']['time']:.2f}",
    "file, bytes": f"{export['file_bytes']:,}",
    "codes and values in it, bytes": f"{export['formula_bytes']:,}",
    "compression ratio by the paper's formula": f"{export['formula_ratio']:.2f}",
    "compression ratio of the file": f"{export['file_ratio']:.2f}",
    "export, s": f"{export['seconds']:.0f}",
    "export, peak memory beyond the trained table": None if peak is None else units.size(peak),
    "opening by memory map and look-up of 100 tokens, ms": f"{1e3 * opened['seconds']:.1f}",
    "device": cost["provenance"]["device"],
  }
  return pd.DataFrame(cells.items(), columns=["quantity", "value"])


def neighbours(results: Results) -> pd.DataFrame:
  """Tables 5 to 7: the nearest words of some words and their cosines."""
  kept = {
    label: results.get(f"{WORDS_OF}/{kind}", {}).get("neighbours", {})
    for kind, label in (("full", "Full"), *KINDS.items())
  }
  return pd.DataFrame(
    [
      {"word": f"`{word}`", "embedding": label}
      | {"nearest": ", ".join(f"`{other}` {cosine:.2f}" for other, cosine in nearest[word])}
      for word in kept["Full"]
      for label, nearest in kept.items()
      if word in nearest
    ],
    columns=["word", "embedding", "nearest"],
  )


def word_codes(results: Results) -> pd.DataFrame:
  """Table 8: the first codes of related words."""
  codes = {
    label: results.get(f"{WORDS_OF}/{kind}", {}).get("codes", {}).get("words", {})
    for kind, label in KINDS.items()
  }
  shown = {
    label: {f"`{word}`": " ".join(map(str, code)) for word, code in words.items()}
    for label, words in codes.items()
  }
  return pd.DataFrame(shown).rename_axis("word").reset_index()


def corrected_ratios() -> pd.DataFrame:
  """Compression ratios that the paper prints beside those of its formula."""
  ptb, wmt = (10_000, 650), (32_000, 512)
  cases = [
    ("Table 3", "DPQ-SX, PTB, medium", 163.2, ptb, Codes(32, 25, shared=True)),
    *(
      ("Table 9", f"product quantisation, K = {k}", printed, ptb, Codes(k, 650 // 2))
      for k, printed in ((64, 8.3), (128, 6.7), (256, 5.3))
    ),
    ("Table 11", "reconstruction, K = 32", 25.0, wmt, Codes(32, 128)),
    ("Table 11", "reconstruction, K = 128, printed as 32", 17.0, wmt, Codes(128, 128)),
  ]
  lines = []
  for name, row, printed, (vocab, dim), codes in cases:
    ratio = formula_ratio(vocab, dim, codes)
    cells = {"table": name, "row": f"{row} ({codes})", "printed": f"{printed:g}"}
    cells |= {"formula": f"{ratio:.2f}", "formula · (d + 1)/d": f"{ratio * (dim + 1) / dim:.2f}"}
    lines.append(cells)
  return pd.DataFrame(lines)


def blocks(results: Results, docs: pathlib.Path) -> tuple[dict[str, str], dict[str, Figure]]:
  """The generated blocks of the page by their names, and its figures by their files."""
  cost = read_json(docs / "results" / "dpq" / "cost.json")
  frames = {name.lower().replace(" ", "-"): table(results, "cpu", name) for name in TABLES}
  frames |= {
    "stand-ins": stand_ins("cpu"),
    "neighbours": neighbours(results),
    "word-codes": word_codes(results),
    "corrected-ratios": corrected_ratios(),
  }
  if cost is not None:
    frames["training-cost"] = training_cost(cost["training"])
    frames["inference-cost"] = inference_cost(cost)
  grid, changes = SCALES["cpu"]["ag-news-grid"], SCALES["cpu"]["ag-news-changes"]
  figures = {
    "cost": None if cost is None else cost_figure(cost["training"]),
    "heat": heat_figure(results, grid),
    "trade": trade_figure(results, grid),
    "codes": usage_figure(results, WORDS_OF),
    "changes": changes_figure(results, changes),
  }
  files = {f"dpq-{name}.png": figure for name, figure in figures.items() if figure is not None}
  text_columns = {"stand-ins": 3, "neighbours": 3, "word-codes": 3, "corrected-ratios": 2}
  generated = {
    **dict.fromkeys(("training-cost", "inference-cost"), "Not measured."),
    **{
      name: page.markdown(frame, text_columns.get(name, 1)) if len(frame) else "Not run."
      for name, frame in frames.items()
    },
    **{f"figure-{name}": "Not run." for name in figures},
    **{f"figure-{name}": _image(name) for name, figure in figures.items() if figure is not None},
    "origins": page.origins(results) + "\n\n" + page.failures(results),
  }
  return generated, files


_CAPTIONS = {
  "cost": "Time and memory of a training step over those of the full embedding",
  "heat": "Accuracy and compression ratio over K and M, AG News",
  "trade": "Accuracy against compression ratio, AG News",
  "codes": "Words of the vocabulary on each code, Penn Treebank",
  "changes": "Codes that changed since the checkpoint 50 steps before, AG News",
}


def _image(name: str) -> str:
  return f"![{_CAPTIONS[name]}](../images/dpq-{name}.png)"


def _style(axes: Axes, x: str, y: str, title: str = "") -> None:
  axes.set_title(title, fontsize=9, color=INK)
  axes.set_xlabel(x, fontsize=8, color=INK)
  axes.set_ylabel(y, fontsize=8, color=INK)
  axes.tick_params(labelsize=8)


def _grid(results: Results, s: Setting, kind: str, shared: bool) -> np.ndarray:
  """[K, M, (score, ratio)] of a setting's grid; nan where nothing was measured."""
  values = np.full((len(s.grid[0]), len(s.grid[1]), 2), np.nan)
  for i, k in enumerate(s.grid[0]):
    for j, m in enumerate(s.grid[1]):
      name = f"{s.name}/{kind}-{Codes(k, m, shared)}"
      score, ratio = scores(results, name), compression_ratio(results, name)
      if score and ratio:
        values[i, j] = np.mean(list(score.values())), ratio
  return values


def heat_figure(results: Results, s: Setting) -> Figure | None:
  """Figures 3 and 7: score and ratio over K and M, every subspace with its own codebook."""
  grids = {kind: _grid(results, s, kind, shared=False) for kind in KINDS}
  if all(np.isnan(grid).all() for grid in grids.values()):
    return None
  figure = Figure(figsize=(9.6, 3.2), layout="constrained")
  panels = [(grids[kind][..., 0], f"{label}: accuracy, %") for kind, label in KINDS.items()]
  panels.append((grids["sx"][..., 1], "compression ratio"))
  for axes, (values, title) in zip(figure.subplots(1, 3), panels, strict=True):
    axes.imshow(values, cmap="Blues", aspect="auto")
    _style(axes, "subspaces, M", "codes, K", title)
    axes.set_xticks(range(len(s.grid[1])), [str(m) for m in s.grid[1]])
    axes.set_yticks(range(len(s.grid[0])), [str(k) for k in s.grid[0]])
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (i, j), value in np.ndenumerate(values):
      text = units.MISSING if np.isnan(value) else f"{value:.1f}"
      color = "white" if value > middle else INK
      axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
  return figure


def trade_figure(results: Results, s: Setting) -> Figure | None:
  """Figure 8: score against ratio, with the best score at each ratio joined by a line."""
  figure = Figure(figsize=(7.2, 4.2), layout="constrained")
  axes = figure.add_subplot()
  for color, kind in zip(SERIES, KINDS, strict=False):
    for shared in (False, True):
      points = _grid(results, s, kind, shared).reshape(-1, 2)
      points = points[~np.isnan(points).any(axis=1)]
      if len(points):
        label = f"{KINDS[kind]}{', shared' if shared else ''}"
        fill = {"markerfacecolor": "white"} if shared else {}
        axes.plot(points[:, 1], points[:, 0], "o", color=color, markersize=5, label=label, **fill)
        best = frontier(points[:, ::-1].tolist())
        axes.plot(*zip(*best, strict=True), "--" if shared else "-", color=color, linewidth=1)
  if not axes.lines:
    return None
  full = scores(results, f"{s.name}/full")
  if full:
    axes.axhline(np.mean(list(full.values())), color=INK, linewidth=0.8, label="full")
  axes.set_xscale("log")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter("{x:g}")
  axes.xaxis.set_minor_formatter("")
  _style(axes, "compression ratio of the embedding", "accuracy, %")
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure


def frontier(points: Sequence[Sequence[float]]) -> list[Sequence[float]]:
  """The points (ratio, score) with no better score at a higher ratio, by falling ratio."""
  best: list[Sequence[float]] = []
  for ratio, score in sorted(points, reverse=True):
    if not best or score > best[-1][1]:
      best.append((ratio, score))
  return best


def usage_figure(results: Results, setting: str) -> Figure | None:
  """Figure 5: the number of words on each code of each subspace."""
  counts = {
    label: np.array(results[f"{setting}/{kind}"]["codes"]["counts"])
    for kind, label in KINDS.items()
    if "codes" in results.get(f"{setting}/{kind}", {})
  }
  if not counts:
    return None
  figure = Figure(figsize=(3.6 * len(counts), 3.6), layout="constrained")
  for axes, (label, counts_MK) in zip(np.ravel(figure.subplots(1, len(counts))), counts.items()):
    figure.colorbar(axes.imshow(counts_MK, cmap="Blues", aspect="auto"), ax=axes)
    _style(axes, "code", "subspace", label)
  return figure


def changes_figure(results: Results, s: Setting) -> Figure | None:
  """Figure 6: percentage of codes that changed since the checkpoint before, for each K."""
  figure = Figure(figsize=(8, 3.2), layout="constrained")
  panels = figure.subplots(1, 2, sharey=True)
  for axes, (kind, label) in zip(panels, KINDS.items(), strict=True):
    for color, k in zip(SERIES, s.grid[0], strict=False):
      changed = results.get(f"{s.name}/{kind}-{Codes(k, s.grid[1][0])}", {}).get("changes")
      if changed:
        axes.plot(*zip(*changed, strict=True), color=color, label=f"K = {k}")
    _style(axes, "step", "codes that changed, %", label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
      axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  return figure if any(axes.lines for axes in panels) else None


def cost_figure(cost: Mapping[str, Mapping[str, float]]) -> Figure:
  """Figure 4: time and temporary memory of a step over the full embedding's, over K."""
  figure = Figure(figsize=(8, 3.2), layout="constrained")
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
    axes.set_xticks(codes, [str(k) for k in codes])
    _style(axes, "codes, K", f"{title}, times the full embedding's")
    axes.spines[["top", "right"]].set_visible(False)
  lines, labels = axes.get_legend_handles_labels()
  where = {"loc": "outside right upper", "handlelength": 3, "frameon": False}
  figure.legend(lines, labels, fontsize=7, labelcolor=INK, **where)
  return figure
