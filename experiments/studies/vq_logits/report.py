"""Tables and figures of the VQ-Logits study, beside the paper's numbers."""

import dataclasses
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter

from experiments.studies import study_page
from experiments.studies.study_page import DOCS
from experiments.studies.vq_logits.rows import VQLogitsRow, paper_rows, rows
from experiments.studies.vq_logits.settings import SCALES, VQLogitsSetting
from vqjax import CodebookHead, LearnedCodebookHead, LearnedProductHead, ProductHead
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points
from vqjax.lab.study.seeds import Results, Spread, finished_results, results_by_seed
from vqjax.lm.pages import INK, SERIES, blank

MAIN = {"ptb": "Table 10", "wikitext": "Table 1", "web": "Table 9"}
"""Setting -> the table that has all of its methods."""

ABLATIONS = "Table 2", "Table 6", "Table 7", "Section 6"
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


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A row of a setting, measured over its seeds; None for missing numbers.

  Attributes:
    row: the measured row.
    failed: number of seeds whose run failed.
    head: class, size and tying of the head, as the run's result has them; empty without a run.
    perplexity: on the test text.
    over_full: per cent of perplexity above the full softmax of the same seed and number of steps.
    head_bytes: parameters and codes of the head; a head that learns its codes counts as the head
      of fixed codes that it becomes.
    of_full: `head_bytes` relative to the full softmax.
    floor: least test perplexity of any decoder with these codes, tokens uniform in each code.
    floor_bias: least test perplexity of any decoder with these codes and a token bias.
  """

  row: VQLogitsRow
  failed: int
  head: Mapping[str, Any]
  perplexity: Spread | None
  over_full: Spread | None
  head_bytes: int | None
  of_full: float | None
  floor: float | None
  floor_bias: float | None


def measurement(results: Results, setting: VQLogitsSetting, row: VQLogitsRow) -> Measurement:
  """The measurement of a row beside the full softmax that was trained as it was."""
  of = lambda name: finished_results(results, f"{setting.name}/{name}")
  done = of(row.name)
  from_scratch = not row.needs and row.name != "dense"
  full = of("full-scratch" if from_scratch else "full")
  test = lambda result: result["test"]["perplexity"]
  over = [100 * (test(done[seed]) / test(full[seed]) - 1) for seed in sorted(done.keys() & full)]
  head = done[min(done)]["head"] if done else {}
  sizes = [result["head"]["state_bytes"] for result in (of("full") | of("full-scratch")).values()]
  head_bytes, vocab = head.get("state_bytes"), vocab_size(results, setting)
  if head_bytes and vocab and isinstance(row.head, (LearnedCodebookHead, LearnedProductHead)):
    own, bias = row.head, row.head.token_bias
    if isinstance(own, LearnedCodebookHead):
      fixed = CodebookHead(vocab, own.dim, own.codes, token_bias=bias)
    else:
      fixed = ProductHead(vocab, own.dim, own.codes, own.subspaces, token_bias=bias)
    head_bytes = fixed.size().state_bytes
  every = results_by_seed(results, f"{setting.name}/{row.name}").values()
  floors = [kept["floors"] for kept in every if kept.get("floors")]
  mean = lambda key: statistics.fmean(each[key] for each in floors) if floors else None
  return Measurement(
    row=row,
    failed=sum(kept["result"]["status"] == "failed" for kept in every),
    head=head,
    perplexity=Spread.of([test(result) for result in done.values()]),
    over_full=Spread.of(over),
    head_bytes=head_bytes,
    of_full=head_bytes / sizes[0] if head_bytes and sizes else None,
    floor=mean("uniform"),
    floor_bias=mean("bias"),
  )


def vocab_size(results: Results, setting: VQLogitsSetting) -> int | None:
  """V, from the number of parameters of a full softmax without bias."""
  for name in ("full", "dense"):
    for result in finished_results(results, f"{setting.name}/{name}").values():
      return result["head"]["params"] // setting.dim
  return None


def vq_logits_table(
  measured: Sequence[Measurement],
  paper: Mapping[str, Mapping[str, str]] | None = None,
  full: Mapping[str, str] | None = None,
) -> pd.DataFrame:
  """The rows as text, beside the paper's numbers by row name and its full softmax."""
  shown = lambda show, value: None if value is None else show(value)
  lines = []
  for m in measured:
    perplexity = (paper or {}).get(m.row.name, {}).get("perplexity")
    own = m.perplexity and m.perplexity.show(1)
    failed = f"{m.failed} failed" if m.failed else None
    lines.append(
      {
        "run": m.row.label,
        "paper": perplexity,
        "paper, % over full": perplexity and _over(perplexity, full),
        "measured": ", ".join(filter(None, (own, failed))) or None,
        "% over full": m.over_full and m.over_full.show(1, "+"),
        "of full": shown(units.ratio, m.of_full),
        "floor": shown(units.fixed(1), m.floor),
        "floor, best bias": shown(units.fixed(1), m.floor_bias),
      }
    )
  return pd.DataFrame(lines)


def _over(perplexity: str, full: Mapping[str, str]) -> str:
  """Per cent above the paper's full softmax."""
  return f"{100 * (float(perplexity) / float(full['perplexity']) - 1):+.1f}"


def paper_table(results: Results, setting: VQLogitsSetting, name: str) -> pd.DataFrame:
  """A table of the paper: all methods of a main table, or an ablation's rows."""
  # At another scale, codebooks have other sizes; the first of the paper's stands for our first.
  theirs = map(int, PAPER["Setup"][setting.name]["codes"].split())
  sizes = dict(zip(theirs, setting.codes, strict=True))
  local = lambda row: re.sub(r"(?<=^vq-)\d+", lambda match: str(sizes[int(match[0])]), row)
  printed = {local(row): numbers for row, numbers in PAPER[name].items()}
  by_name = {row.name: row for row in paper_rows(setting)}
  methods = [row for row in by_name if not re.match(r"vq-\d+-", row)]
  names = methods if name == MAIN[setting.name] else printed
  measured = [measurement(results, setting, by_name[row]) for row in names]
  table = vq_logits_table(measured, printed, PAPER[MAIN[setting.name]]["full"])
  return table.drop(columns="floor, best bias")


def conversions(results: Results, setting: VQLogitsSetting) -> list[Measurement]:
  """The rows that start from one trained model, numbered by perplexity."""
  measured = [measurement(results, setting, row) for row in rows(setting) if row.needs]
  measured.sort(key=lambda m: m.perplexity.mean if m.perplexity else float("inf"))
  return [
    dataclasses.replace(m, row=dataclasses.replace(m.row, label=f"{number}. {m.row.label}"))
    for number, m in enumerate(measured, start=1)
  ]


def setups(results: Results, settings: Mapping[str, VQLogitsSetting]) -> pd.DataFrame:
  """Text, vocabulary and steps of each setting, and the paper's text."""
  return pd.DataFrame(
    {
      "setting": name,
      "text": TEXTS[name],
      "V": (vocab := vocab_size(results, s)) and f"{vocab:,}",
      "steps": f"{s.dense.train.steps:,} + {s.fine_tune.steps:,}",
      "paper's text": PAPER["Setup"][name]["text"],
      "paper's V": f"{int(PAPER['Setup'][name]['vocab']):,}",
    }
    for name, s in settings.items()
  )


def ablations(results: Results, setting: VQLogitsSetting) -> pd.DataFrame:
  """The rows of Tables 2, 6 and 7, which all vary one codebook; each once."""
  # No row of Section 6 was run.
  tables = {name: paper_table(results, setting, name) for name in ABLATIONS[:-1]}
  joined = pd.concat(
    [frame.assign(table=name.removeprefix("Table ")) for name, frame in tables.items()]
  )
  # The full softmax is in Table 1, and all of these heads have its codebook's bytes.
  varied = joined[joined["run"] != "Full softmax"].drop_duplicates("run")
  return varied.drop(columns="of full")


def speed_table(speed: Mapping[str, Any] | None) -> pd.DataFrame:
  """Times and temporaries of the benchmark `codebook`; empty if it was not run."""
  kinds = {"log-probabilities": "forward", "loss and gradient": "training"}
  printed = PAPER["Table 3"]
  times = {
    f"codebook K={name.removeprefix('vq-')}": float(printed["full"]["ms"]) / float(cells["ms"])
    for name, cells in printed.items()
  }
  return pd.DataFrame(
    {"run": name, "paper, times faster": f"{times[name]:.1f}×" if name in times else None}
    | {
      title: cell
      for kind, key in kinds.items()
      for title, cell in (
        (f"{kind}, ms", units.milliseconds(speed[key][name]["seconds"])),
        (f"{kind}, times faster", units.ratio(speed[key][name]["times_faster"])),
        (f"{kind}, MiB", f"{speed[key][name]['temp_bytes'] / 2**20:,.1f}"),
      )
    }
    for name in (speed or {"forward": ()})["forward"]
  )


def kmeans_table(figures: Mapping[str, Any] | None) -> pd.DataFrame:
  """The numbers that the benchmark `kmeans` writes; empty if it was not run."""
  return pd.DataFrame(
    {
      "run": name,
      "seconds": f"{row['seconds']:,.0f}",
      "processor seconds": f"{row['cpu_seconds']:,.0f}",
      "memory": units.size(row["memory_bytes"]),
      "inertia": f"{row['inertia']:,.0f}",
    }
    for data in (figures or {"data": {}})["data"].values()
    for name, row in data["rows"].items()
  )


def bytes_figure(measured: Sequence[Measurement]) -> Figure | None:
  """Head bytes against test perplexity, points numbered as in the table, or None."""
  points = [m for m in measured if m.perplexity]
  if not points:
    return None
  figure, axes = blank(height=8)
  xs = byte_axis(axes, [m.head_bytes for m in points])
  ys = [m.perplexity.mean for m in points]
  for (family, classes), color in zip(FAMILIES.items(), SERIES, strict=False):
    members = [at for at, m in enumerate(points) if m.head["class"] in classes]
    if members:
      own = [xs[at] for at in members], [ys[at] for at in members]
      axes.plot(*own, "o", markersize=6, color=color, label=family)
  best = study_page.frontier(zip(xs, ys, strict=True))
  axes.plot(*zip(*best, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=1)
  axes.set_xlabel("head bytes")
  axes.set_ylabel("test perplexity")
  axes.margins(y=0.08)
  _perplexity_axis(axes, MaxNLocator(8))
  _legend_below(figure, axes)
  label_points(axes, xs, ys, [m.row.label.split(".")[0] for m in points])
  return figure


def codes_figure(results: Results, settings: Mapping[str, VQLogitsSetting]) -> Figure:
  """Figure 2a for each text: perplexity, floor and the paper's, by codebook size."""
  figure = Figure(figsize=(9.6, 3.8), layout="constrained")
  for axes, (name, setting) in zip(
    figure.subplots(1, len(settings)), settings.items(), strict=True
  ):
    by_name = {row.name: measurement(results, setting, row) for row in paper_rows(setting)}
    own = {k: by_name[f"vq-{k}"] for k in setting.codes}
    measured = {k: m.perplexity.mean for k, m in own.items() if m.perplexity}
    floor = {k: m.floor for k, m in own.items() if m.floor}
    setup, printed = PAPER["Setup"][name], PAPER[MAIN[name]]
    theirs = {int(k): float(printed[f"vq-{k}"]["perplexity"]) for k in setup["codes"].split()}
    axes.plot(measured.keys(), measured.values(), "o-", color=SERIES[0], label="measured")
    axes.plot(floor.keys(), floor.values(), "s--", color=SERIES[1], label="floor of these codes")
    axes.plot(theirs.keys(), theirs.values(), "x:", color=SERIES[2], label="paper")
    full = by_name["full"].perplexity
    if full:
      axes.axhline(full.mean, color=SERIES[0], linewidth=0.8, label="full softmax, measured")
    paper_full = float(printed["full"]["perplexity"])
    axes.axhline(paper_full, color=SERIES[2], linewidth=0.8, label="full softmax, paper")
    axes.set_title(f"{name} (paper: {setup['text']})", fontsize=9, color=INK)
    axes.set_ylabel("perplexity", fontsize=9, color=INK)
    _perplexity_axis(axes, LogLocator(subs=(1, 2, 5)))
    _codes_axis(axes, sorted({*measured, *theirs}))
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
  _legend_below(figure, figure.axes[0])
  return figure


def speed_figure(speed: Mapping[str, Any]) -> Figure:
  """Figure 2b: speed of the log-probabilities relative to the full softmax."""
  forms = ((re.fullmatch(r"codebook K=(\d+)", name), row) for name, row in speed["forward"].items())
  measured = {int(form[1]): row["times_faster"] for form, row in forms if form}
  printed = PAPER["Table 1"].items()
  paper = {int(row[3:]): float(cells["speedup"]) for row, cells in printed if row[:3] == "vq-"}
  figure, axes = blank(height=3.6)
  axes.plot(measured.keys(), measured.values(), "o-", color=SERIES[0], label="measured")
  axes.plot(paper.keys(), paper.values(), "x:", color=SERIES[2], label="paper")
  axes.legend(fontsize=8, frameon=False, labelcolor=INK)
  axes.set_ylabel("times the full softmax's speed", fontsize=9)
  axes.set_yscale("log", base=2)
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}×"))
  axes.yaxis.set_minor_formatter(NullFormatter())
  _codes_axis(axes, sorted({*measured, *paper}))
  return figure


def _perplexity_axis(axes: Axes, ticks: Locator) -> None:
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticks)
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
  axes.yaxis.set_minor_formatter(NullFormatter())


def _codes_axis(axes: Axes, codes: Sequence[int]) -> None:
  axes.set_xscale("log", base=2)
  axes.set_xticks(codes, [f"{k:,}" for k in codes])
  axes.set_xlabel("codes, K", fontsize=9, color=INK)


def _legend_below(figure: Figure, axes: Axes) -> None:
  handles, names = axes.get_legend_handles_labels()
  figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8, frameon=False)


def update(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, figures and the CSV file of the page; return their paths."""
  settings = SCALES["cpu"]
  speed = study_page.bench(docs, "codebook")
  converted = conversions(results, settings["ptb"])
  mains = {
    _slug(table): paper_table(results, settings[name], table) for name, table in MAIN.items()
  }
  chosen = [m for m in converted if m.row.name not in OFF_PAGE]
  frames = {
    "settings": setups(results, settings),
    # Without rows that are neither the paper's nor run.
    **{
      name: f[f["paper"].notna() | f["measured"].notna()].drop(columns="paper")
      for name, f in mains.items()
    },
    "ablations": ablations(results, settings["wikitext"]).drop(columns="paper"),
    "conversions": vq_logits_table(chosen).drop(columns="floor, best bias"),
    "table-3": speed_table(speed),
    "kmeans": kmeans_table(study_page.bench(docs, "kmeans")),
  }
  blocks = {name: markdown(f) if len(f) else units.MISSING for name, f in frames.items()}
  if speed:
    shape, origin = speed["sizes"]["shape"], speed["provenance"]
    blocks["table-3"] += (
      f"\n\n{origin['device']}, float32, {shape['tokens']:,} tokens in slices of"
      f" {speed['slice']:,}, D = {shape['dim']:,}, V = {shape['vocab']:,}; commit"
      f" {origin['commit']}."
    )
  figures = {
    "vq-bytes.png": bytes_figure(converted),
    "vq-codes.png": codes_figure(results, settings),
    "vq-speed.png": speed_figure(speed) if speed else None,
  }
  whole = {"vq_logits-conversions.csv": vq_logits_table(converted)}
  return study_page.publish_page(docs, "vq_logits", results, blocks, figures, whole)


def _slug(table: str) -> str:
  return table.lower().replace(" ", "-")


def shown_tables(results: Results, scale: str) -> dict[str, pd.DataFrame]:
  """The tables of the terminal by their titles."""
  settings = SCALES[scale]
  tables = {
    title: paper_table(results, settings[name], title)
    for name, main in MAIN.items()
    for title in (main, *(ABLATIONS if name == "wikitext" else ()))
  }
  return tables | {"Conversions": vq_logits_table(conversions(results, settings["ptb"]))}
