"""Tables and figures of the VQ-Logits study, beside the paper's numbers."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator

from experiments.studies import study_page
from experiments.studies.study_page import DOCS
from experiments.studies.vq_logits.rows import main_rows, rows
from experiments.studies.vq_logits.settings import SCALES, WIKITEXT, VQLogitsSetting
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points
from vqjax.lab.study.seeds import Results, Spread, finished_results, results_by_seed
from vqjax.lm.pages import INK, SERIES, blank

MAIN = {"ptb": "Table 10", "wikitext": "Table 1", "web": "Table 9"}
"""Setting -> the table that has all of its methods."""

ABLATIONS = "Table 2", "Table 6", "Table 7"
"""Tables of the setting "wikitext" that vary the codebook."""

TEXTS = {
  "ptb": "Penn Treebank, words",
  "wikitext": "WikiText-2, words",
  "web": "WikiText-2, lines of at least 512 characters, SentencePiece",
}
"""Setting -> the text at the scale "cpu"."""

FAMILIES = {
  "tokens share codes": ("CodebookHead", "LearnedCodebookHead"),
  "composed rows": ("ProductHead", "LearnedProductHead", "ResidualCodebookHead"),
  "low rank": ("LowRankHead",),
  "full softmax": ("DenseHead",),
}
"""Series of the figure of bytes -> classes of heads."""

FIXED = {"gumbel-1024": "weighted-bias-1024", "product-learned": "product"}
"""Row of a head that learns its codes -> row of the head of fixed codes that it becomes."""

OFF_PAGE = (
  "weighted-1024",
  "alone-1024",
  "commitment-1024",
  "product-distilled",
  "vq-512",
  "vq-256",
)
"""Conversions that only the CSV file has: near others, or in Table 10."""

PAPER = study_page.read_paper(pathlib.Path(__file__).with_name("paper.csv"))


def measurements(results: Results, setting: VQLogitsSetting) -> pd.DataFrame:
  """The rows of a setting by their names, measured over their seeds; None for missing numbers.

  The columns are the row's `label`, `converted` (whether it starts from the dense run), `failed`
  (number of failed seeds), `head` (the head's class), and

  - `perplexity`: a Spread, on the test text.
  - `over_full`: a Spread, per cent above the full softmax of the same seed and number of steps.
  - `head_bytes`: parameters and codes of the head; a head that learns its codes counts as the head
    of fixed codes that it becomes.
  - `of_full`: `head_bytes` relative to the full softmax.
  - `uniform` and `bias`: least test perplexity of any decoder with these codes, with tokens uniform
    in each code, and with a token bias.
  """
  finished = lambda name: finished_results(results, f"{setting.name}/{name}")
  test = lambda name: {seed: one["test"]["perplexity"] for seed, one in finished(name).items()}
  head = lambda name, key: next((one["head"][key] for one in finished(name).values()), None)
  lines, full_bytes = {}, head("full", "state_bytes")
  for row in rows(setting):
    own, size = test(row.name), head(FIXED.get(row.name, row.name), "state_bytes")
    full = test("full" if row.needs or row.name == "dense" else "full-scratch")
    kept = results_by_seed(results, f"{setting.name}/{row.name}").values()
    floors = [one["floors"] for one in kept if one.get("floors")]
    mean = lambda key, of=floors: statistics.fmean(one[key] for one in of) if of else None
    lines[row.name] = {
      "label": row.label,
      "converted": bool(row.needs),
      "failed": sum(one["result"]["status"] == "failed" for one in kept),
      "head": head(row.name, "class"),
      "perplexity": Spread.of(list(own.values())),
      "over_full": Spread.of([100 * (own[s] / full[s] - 1) for s in sorted(own.keys() & full)]),
      "head_bytes": size,
      "of_full": size / full_bytes if size and full_bytes else None,
      "uniform": mean("uniform"),
      "bias": mean("bias"),
    }
  return pd.DataFrame.from_dict(lines, orient="index", dtype=object)


def vq_logits_table(
  measured: pd.DataFrame,
  printed: Mapping[str, Mapping[str, str]] | None = None,
  full: str = "nan",
) -> pd.DataFrame:
  """Measured rows as text, beside the paper's numbers by row and its full softmax's perplexity."""
  theirs = [(printed or {}).get(name, {}).get("perplexity") for name in measured.index]
  shown = lambda column, show: [None if pd.isna(x) else show(x) for x in measured[column]]
  own = shown("perplexity", lambda spread: spread.show(1))
  failed = [f"{count} failed" if count else None for count in measured["failed"]]
  return pd.DataFrame(
    {
      "run": measured["label"],
      "paper": theirs,
      "paper, % over full": [x and f"{100 * (float(x) / float(full) - 1):+.1f}" for x in theirs],
      "measured": [", ".join(filter(None, both)) or None for both in zip(own, failed)],
      "% over full": shown("over_full", lambda spread: spread.show(1, "+")),
      "of full": shown("of_full", units.ratio),
      "floor": shown("uniform", units.fixed(1)),
      "floor, best bias": shown("bias", units.fixed(1)),
    }
  )


def conversions(measured: pd.DataFrame) -> pd.DataFrame:
  """The measured rows that start from one trained model, numbered by perplexity."""
  chosen = measured[measured["converted"]]
  by_mean = lambda column: column.map(lambda spread: spread.mean if spread else float("inf"))
  ordered = chosen.sort_values("perplexity", key=by_mean, kind="stable")
  labels = [f"{number}. {label}" for number, label in enumerate(ordered["label"], start=1)]
  return ordered.assign(label=labels)


def page_tables(
  settings: Mapping[str, VQLogitsSetting], measured: Mapping[str, pd.DataFrame]
) -> dict[str, pd.DataFrame]:
  """The tables of measured rows by the names of their blocks of the page."""
  frames = {}
  for name, title in MAIN.items():
    printed, listed = PAPER[title], [row.name for row in main_rows(settings[name])]
    frame = vq_logits_table(measured[name].loc[listed], printed, printed["full"]["perplexity"])
    # Without rows that are neither the paper's nor run.
    known = frame["paper"].notna() | frame["measured"].notna()
    frames[title.lower().replace(" ", "-")] = frame[known]
  # The full softmax is in Table 1, and all of these heads have its codebook's bytes.
  varied = {}
  for title in ABLATIONS:
    for row, cells in PAPER[title].items():
      varied.setdefault(row, {**cells, "table": title.removeprefix("Table ")})
  full = varied.pop("full")["perplexity"]
  frame = vq_logits_table(measured["wikitext"].loc[list(varied)], varied, full)
  tables = [cells["table"] for cells in varied.values()]
  frames["ablations"] = frame.assign(table=tables).drop(columns="of full")
  frames["conversions"] = vq_logits_table(
    conversions(measured["ptb"]).drop([*OFF_PAGE], errors="ignore")
  )
  return {name: f.drop(columns=["paper", "floor, best bias"]) for name, f in frames.items()}


def setups(results: Results, settings: Mapping[str, VQLogitsSetting]) -> pd.DataFrame:
  """Text, vocabulary and steps of each setting, and the paper's text."""
  lines = []
  for name, s in settings.items():
    # A full softmax has V·D parameters.
    dense = finished_results(results, f"{name}/dense").values()
    vocab = next((f"{one['head']['params'] // s.dim:,}" for one in dense), None)
    steps, theirs = f"{s.dense.train.steps:,} + {s.fine_tune.steps:,}", PAPER["Setup"][name]
    own = {"setting": name, "text": TEXTS[name], "V": vocab, "steps": steps}
    lines.append(own | {"paper's text": theirs["text"], "paper's V": f"{int(theirs['vocab']):,}"})
  return pd.DataFrame(lines)


def speed_table(speed: Mapping[str, Any]) -> pd.DataFrame:
  """Times and temporaries of the benchmark `codebook`."""
  printed = {
    f"codebook K={name.removeprefix('vq-')}": float(cells["ms"])
    for name, cells in PAPER["Table 3"].items()
  }
  full = float(PAPER["Table 3"]["full"]["ms"])
  lines = []
  for name, forward in speed["forward"].items():
    times = f"{full / printed[name]:.1f}×" if name in printed else None
    line = {"run": name, "paper, times faster": times}
    for kind, cells in (
      ("log-probabilities", forward),
      ("loss and gradient", speed["training"][name]),
    ):
      line[f"{kind}, ms"] = units.milliseconds(cells["seconds"])
      line[f"{kind}, times faster"] = units.ratio(cells["times_faster"])
      line[f"{kind}, MiB"] = f"{cells['temp_bytes'] / 2**20:,.1f}"
    lines.append(line)
  return pd.DataFrame(lines)


def kmeans_table(figures: Mapping[str, Any]) -> pd.DataFrame:
  """The numbers that the benchmark `kmeans` writes."""
  return pd.DataFrame(
    {
      "run": name,
      "seconds": f"{row['seconds']:,.0f}",
      "processor seconds": f"{row['cpu_seconds']:,.0f}",
      "memory": units.size(row["memory_bytes"]),
      "inertia": f"{row['inertia']:,.0f}",
    }
    for data in figures["data"].values()
    for name, row in data["rows"].items()
  )


def bytes_figure(points: pd.DataFrame) -> Figure:
  """Head bytes against test perplexity, points numbered as in the table."""
  figure, axes = blank(height=8)
  xs = byte_axis(axes, list(points["head_bytes"]))
  ys = [spread.mean for spread in points["perplexity"]]
  for (family, classes), color in zip(FAMILIES.items(), SERIES, strict=False):
    own = points["head"].isin(classes)
    if own.any():
      of_family = pd.DataFrame({"x": xs, "y": ys})[own.to_numpy()]
      axes.plot(of_family["x"], of_family["y"], "o", markersize=6, color=color, label=family)
  best = study_page.frontier(zip(xs, ys, strict=True))
  axes.plot(*zip(*best, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=1)
  axes.set_xlabel("head bytes")
  axes.set_ylabel("test perplexity")
  axes.margins(y=0.08)
  _perplexity_axis(axes, MaxNLocator(8))
  _legend_below(figure, axes)
  label_points(axes, xs, ys, [label.split(".")[0] for label in points["label"]])
  return figure


def codes_figure(
  settings: Mapping[str, VQLogitsSetting], measured: Mapping[str, pd.DataFrame]
) -> Figure:
  """Figure 2a for each text: perplexity, floor and the paper's, by codebook size."""
  figure = Figure(figsize=(9.6, 3.8), layout="constrained")
  mean = lambda spread: spread.mean if spread else float("nan")
  for axes, (name, setting) in zip(
    figure.subplots(1, len(settings)), settings.items(), strict=True
  ):
    codes, names = setting.codes, [f"vq-{k}" for k in setting.codes]
    own, printed = measured[name], PAPER[MAIN[name]]
    theirs = lambda row, of=printed: float(of[row]["perplexity"])
    line = lambda ys, style, at, label, on=axes, xs=codes: on.plot(
      xs, ys, style, color=SERIES[at], label=label
    )
    level = lambda y, at, label, on=axes: on.axhline(
      y, color=SERIES[at], linewidth=0.8, label=label
    )
    line(own.loc[names, "perplexity"].map(mean), "o-", 0, "measured")
    line(own.loc[names, "uniform"], "s--", 1, "floor of these codes")
    line([theirs(row) for row in names], "x:", 2, "paper")
    level(mean(own["perplexity"]["full"]), 0, "full softmax, measured")
    level(theirs("full"), 2, "full softmax, paper")
    axes.set_title(f"{name} (paper: {PAPER['Setup'][name]['text']})", fontsize=9, color=INK)
    axes.set_ylabel("perplexity", fontsize=9, color=INK)
    _perplexity_axis(axes, LogLocator(subs=(1, 2, 5)))
    _codes_axis(axes, codes)
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
  _legend_below(figure, figure.axes[0])
  return figure


def speed_figure(speed: Mapping[str, Any]) -> Figure:
  """Figure 2b: speed of the log-probabilities relative to the full softmax."""
  printed = {row: cells["speedup"] for row, cells in PAPER["Table 1"].items()}
  codes = WIKITEXT.codes
  figure, axes = blank(height=3.6)
  own = [speed["forward"][f"codebook K={k}"]["times_faster"] for k in codes]
  axes.plot(codes, own, "o-", color=SERIES[0], label="measured")
  theirs = [float(printed[f"vq-{k}"]) for k in codes]
  axes.plot(codes, theirs, "x:", color=SERIES[2], label="paper")
  axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  axes.set_ylabel("times the full softmax's speed", fontsize=9)
  axes.set_yscale("log", base=2)
  axes.yaxis.set_major_formatter("{x:g}×")
  axes.yaxis.set_minor_formatter("")
  _codes_axis(axes, codes)
  return figure


def _perplexity_axis(axes: Axes, ticks: Locator) -> None:
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticks)
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter("")


def _codes_axis(axes: Axes, codes: Sequence[int]) -> None:
  axes.set_xscale("log", base=2)
  axes.set_xticks(codes, [f"{k:,}" for k in codes])
  axes.set_xlabel("codes, K", fontsize=9, color=INK)


def _legend_below(figure: Figure, axes: Axes) -> None:
  handles, names = axes.get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def shown_tables(results: Results, scale: str) -> dict[str, pd.DataFrame]:
  """The tables of the terminal by their titles."""
  settings = SCALES[scale]
  return page_tables(settings, {name: measurements(results, s) for name, s in settings.items()})


def update(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, figures and the CSV file of the page; return their paths."""
  settings = SCALES["cpu"]
  measured = {name: measurements(results, s) for name, s in settings.items()}
  converted = conversions(measured["ptb"])
  speed = study_page.bench(docs, "codebook")
  frames = {
    "settings": setups(results, settings),
    **page_tables(settings, measured),
    "table-3": speed_table(speed),
    "kmeans": kmeans_table(study_page.bench(docs, "kmeans")),
  }
  blocks = {name: markdown(frame) for name, frame in frames.items()}
  shape, origin = speed["sizes"]["shape"], speed["provenance"]
  blocks["table-3"] += (
    f"\n\n{origin['device']}, float32, {shape['tokens']:,} tokens in slices of"
    f" {speed['slice']:,}, D = {shape['dim']:,}, V = {shape['vocab']:,}; commit {origin['commit']}."
  )
  figures = {
    "vq-bytes.png": bytes_figure(converted[converted["perplexity"].notna()]),
    "vq-codes.png": codes_figure(settings, measured),
    "vq-speed.png": speed_figure(speed),
  }
  whole = {"vq_logits-conversions.csv": vq_logits_table(converted)}
  return study_page.publish_page(docs, "vq_logits", results, blocks, figures, whole)
