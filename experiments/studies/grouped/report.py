"""Tables and figures of the grouped head's study."""

import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.studies import study_page
from experiments.studies.grouped.rows import SCALES, TEACHER, rows
from experiments.studies.study_page import DOCS
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.study.seeds import Results
from vqjax.lm.pages import INK, SERIES

BenchFigures = Mapping[str, Any]
"""The measurements of `python -m experiments.bench`."""

GRADES = ("grammar", "creativity", "consistency", "plot", "age")
MODELS = {
  "gpt-2": "GPT-2",
  "gpt-neo": "GPT-Neo",
  "tiled": "GPT-2, loss in tiles",
  "grouped": "grouped",
  "codebook": "codebook",
}
"""Model of the bench -> its label."""

WIDTHS = {128: "8.1 M", 256: "19.3 M", 1024: "152 M", 2048: "659 M"}
"""Width of Tables 2 and 3 -> the model's parameters as the paper prints them."""

SHOWN_WIDTHS = {"memory": ("128 ", "2048 "), "speed": ("128 ",)}
"""The widths of Tables 2 and 3 that the page shows; the CSV files have all."""

SQRT = 224
"""floor(sqrt V) of GPT-2's vocabulary."""

TITLES = {
  "language": "Table 1: language models on TinyStories",
  "grades": "Table 1: grades of their stories, ours / the paper's",
  "groups": "Figure 3: validation loss by the number of groups",
  "pictures": "Section 3.2: classes of pictures",
  "top": "Exact top-50, one token at a time",
  "memory": "Table 2: peak memory of a training step, B = 32, T = 512",
  "speed": "Table 3: throughput and operations",
  "loss": "Loss and gradient, N = 4096, D = 256, V = 50,257",
  "least": "Group sizes of the least memory, tokens a group",
  "drawing": "Drawing the pictures in the training step",
}


PARTS = "loss", "steps", "sizes", "images"
"""Benchmarks of the grouped head, without the prefix of their names."""


PAPER = study_page.read_paper(pathlib.Path(__file__).with_name("paper.csv"))


def read_cost(docs: pathlib.Path) -> BenchFigures | None:
  """The figures of the grouped benchmarks; None if there are none."""
  parts = {part: study_page.bench(docs, f"grouped-{part}") for part in PARTS}
  parts = {part: figures for part, figures in parts.items() if figures is not None}
  for figures in parts.values():
    del figures["provenance"]
  return parts | parts.get("sizes", {}) if parts else None


def page_tables(results: Results, scale: str, cost: BenchFigures | None) -> dict[str, pd.DataFrame]:
  """Tables by the keys of `TITLES`; those of the bench only if there is a `cost`."""
  frames = {
    "language": _language(results, scale),
    "grades": _grades(results, scale),
    "groups": _groups(results, scale),
    "pictures": _pictures(results),
    "top": _top(results),
  }
  if cost is not None:
    frames |= {"memory": _memory(cost), "speed": _speed(cost), "loss": _loss(cost)}
    frames |= {"least": _least(cost), "drawing": _drawing(cost)}
  return {name: frame for name, frame in frames.items() if len(frame)}


def shown_tables(results: Results, scale: str) -> dict[str, pd.DataFrame]:
  """The tables of the terminal by their titles."""
  frames = page_tables(results, scale, read_cost(DOCS))
  return {TITLES[name]: frame for name, frame in frames.items()}


def update(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, the figures and CSV files of the page; return their paths."""
  cost = read_cost(docs)
  # The page has no grades as long as the only ones are the paper's.
  frames = page_tables(results, "cpu", cost)
  frames.pop("grades", None)
  whole = {f"grouped-{name}.csv": frames[name] for name in ("groups", "memory", "speed")}
  for name in ("memory", "speed"):
    frames[name] = frames[name][frames[name]["width"].str.startswith(SHOWN_WIDTHS[name])]
  loss = frames["groups"]["loss"].astype(float)
  frames["groups"] = frames["groups"].loc[sorted({0, loss.argmax(), len(loss) - 1})]
  frames["language"] = frames["language"].drop(columns="perplexity")
  blocks = {name: markdown(frame) for name, frame in frames.items() if name != "drawing"}
  blocks["drawing"] = _drawing_sentence((cost or {}).get("images"))
  blocks["language"] += f"\n\n{not_run(results, 'cpu')}"
  figures = {
    "grouped-losses.png": losses(results),
    "grouped-pictures.png": picture_curves(results),
    "grouped-sizes.png": sizes_figure(results, cost or {}),
  }
  return study_page.publish_page(docs, "grouped", results, blocks, figures, whole)


def _numbers(source: Mapping[str, Any], names: Iterable[str], *path: str) -> pd.Series:
  """Numbers at a path such as "result", "test" of named entries; NaN if missing."""
  step = lambda entry, key: (entry or {}).get(key)
  return pd.Series([functools.reduce(step, path, source.get(n)) for n in names], dtype=float)


def _text(numbers: pd.Series, form: str | Callable[[float], str]) -> pd.Series:
  show = form.format if isinstance(form, str) else form
  return numbers.map(show, na_action="ignore").astype(object)


def _printed(table: str, names: Iterable[str], column: str) -> pd.Series:
  return pd.Series([PAPER[table].get(name, {}).get(column) for name in names], dtype=object)


def _mark_failed(frame: pd.DataFrame, results: Results, jobs: Iterable[str]) -> None:
  failed = [results.get(w, {}).get("result", {}).get("status") == "failed" for w in jobs]
  frame.loc[failed, frame.columns[1:]] = "failed"


def _labels(scale: str) -> dict[str, str]:
  """Language model of a scale -> its label."""
  settings = [s for s in SCALES[scale].values() if s.rows]
  return {f"{s.name}/{row.name}": f"{s.name}: {row.label}" for s in settings for row in rows(s)}


def _language(results: Results, scale: str) -> pd.DataFrame:
  every = [(s.name, row) for s in SCALES[scale].values() if s.rows for row in rows(s)]
  shown = [(s, row) for s, row in every if f"{s}/{row.name}" in results]
  labels = {job: label for job, label in _labels(scale).items() if job in results}
  numbers = lambda key, jobs: _numbers(results, jobs, "result", "test", key)
  nats = numbers("nats_per_token", labels)
  dense = numbers("nats_per_token", (f"{s}/{TEACHER}" for s, _ in shown))
  control = numbers("nats_per_token", (f"{s}/{row.control}" for s, row in shown))
  is_dense = pd.Series([row.control == TEACHER for _, row in shown], dtype=bool)
  frame = pd.DataFrame({
    "model": list(labels.values()),
    "perplexity": _text(numbers("perplexity", labels), "{:.2f}"),
    "nats": _text(nats, "{:.3f}"),
    "- GPT-2": _text(nats - dense, "{:+.3f}"),
    "- its control": _text((nats - control).mask(is_dense), "{:+.3f}"),
  })  # fmt: skip
  _mark_failed(frame, results, labels)
  return frame


def not_run(results: Results, scale: str) -> str:
  """A sentence on the language models without a result, with their names for `--only`."""
  every = _labels(scale).items()
  missing = [f"{label} (`{job}`)" for job, label in every if job not in results]
  return f"Not run: {'; '.join(missing)}." if missing else "All rows of this table were run."


def _grades(results: Results, scale: str) -> pd.DataFrame:
  """The grades of stories of the language models, ours / the paper's or the paper's alone."""
  judge = lambda job: f"grades/{job.replace('/', '-')}"
  labels = {job: label for job, label in _labels(scale).items() if judge(job) in results}
  for job in PAPER["1"] if scale == "cpu" else ():
    if job not in labels:
      dim, name = job.removeprefix("lm-").split("/")
      labels[job] = f"paper, {MODELS[name]}, {dim}"
  judged = [judge(job) for job in labels]
  frame = pd.DataFrame({"model": list(labels.values())})
  for grade in GRADES:
    own = _text(_numbers(results, judged, "grades", grade), "{:.2f}")
    printed = _printed("1", labels, grade)
    frame[grade] = (own + " / " + printed.fillna(units.MISSING)).where(own.notna(), printed)
  frame["graded"] = [
    f"{kept['graded']} of {kept['graded'] + kept['failed']} by {kept['settings']['model']}"
    if (kept := results.get(name))
    else None
    for name in judged
  ]
  return frame


def _group_losses(results: Results, scale: str) -> pd.Series:
  """Validation loss in nats by the number of groups of the trained models."""
  jobs = {n: f"{s.name}/groups-{n}" for s in SCALES[scale].values() for n in s.groups}
  loss = _numbers(results, jobs.values(), "result", "valid", "nats_per_token")
  return loss.set_axis(list(jobs)).dropna()


def _groups(results: Results, scale: str) -> pd.DataFrame:
  loss = _group_losses(results, scale)
  return pd.DataFrame(
    {"groups": loss.index.map("{:,}".format), "loss": list(_text(loss, "{:.3f}"))}
  )


def _pictures(results: Results) -> pd.DataFrame:
  jobs = ("pictures/dense", "pictures/grouped")
  numbers = functools.partial(_numbers, results, jobs, "result")
  frame = pd.DataFrame({
    "model": ["CNN, dense", "CNN, grouped"],
    "accuracy, %": _text(100 * numbers("test", "accuracy"), "{:.1f}"),
    "of the group, %": _text(100 * numbers("test", "group_accuracy"), "{:.1f}"),
    "nats": _text(numbers("test", "nats_per_token"), "{:.3f}"),
    "parameters": _text(numbers("model", "params"), units.count),
  })  # fmt: skip
  _mark_failed(frame, results, jobs)
  frame["paper's parameters"] = _printed("pictures", jobs, "parameters").map(int).map("{:,}".format)
  return frame


def _top(results: Results) -> pd.DataFrame:
  return pd.DataFrame([
    {
      "V": f"{top['vocab']:,}",
      "groups": top["groups"],
      "visited": f"{top['visited']:g}",
      "most visited": top["visited_most"],
      "probability of the 50": f"{top['mass']:.2f}",
      "all groups, ms": f"{1e3 * top['seconds_all']:.2f}",
      "best-first, ms": f"{1e3 * top['seconds']:.2f}",
      "equal": None if top["same"] else "no",
    }
    for top in (kept["top"] for kept in results.values() if "top" in kept)
  ])  # fmt: skip


STEPS = [f"{dim}/{name}" for dim in WIDTHS for name in MODELS]
"""Training steps of Tables 2 and 3."""


def _by_width(quantities: Mapping[str, pd.Series]) -> pd.DataFrame:
  """A line for each width and quantity of `STEPS` that has a number, a column for each model."""
  lines = []
  for dim, size in WIDTHS.items():
    for title, texts in quantities.items():
      of_step = dict(zip(STEPS, texts, strict=True))
      cells = {label: of_step[f"{dim}/{name}"] for name, label in MODELS.items()}
      if not pd.isna(list(cells.values())).all():
        lines.append({"width": f"{dim} ({size}): {title}"} | cells)
  return pd.DataFrame(lines)


def _steps(cost: BenchFigures) -> dict[str, Mapping[str, Any]]:
  measured = cost.get("steps", {})
  return {f"{dim}/{name}": row for dim, models in measured.items() for name, row in models.items()}


def _memory(cost: BenchFigures) -> pd.DataFrame:
  steps = _steps(cost)
  remat = _text(_numbers(steps, STEPS, "peak_bytes") / 1e9, "{:.2f}")
  plain = _text(_numbers(steps, STEPS, "without_remat", "peak_bytes") / 1e9, "{:.2f}")
  # The step with recomputed blocks is compiled first; an error is of the first that failed.
  failed = pd.Series(["error" in steps.get(step, {}) for step in STEPS])
  plain[failed & remat.notna()] = "failed"
  remat[failed & remat.isna()] = "failed"
  return _by_width(
    {"GB, recomputing": remat, "GB, as compiled": plain, "GB, paper": _printed("2", STEPS, "GB")}
  )


def _speed(cost: BenchFigures) -> pd.DataFrame:
  numbers = functools.partial(_numbers, _steps(cost), STEPS)
  return _by_width({
    "tokens/s": _text(numbers("tokens_per_s"), "{:,.0f}"),
    "tokens/s, paper": _text(_printed("3", STEPS, "tokens/s").astype(float), "{:,.0f}"),
    "GMAC": _text(numbers("macs", "weights") / 1e9, "{:.2f}"),
    "GFLOPs, paper": _printed("3", STEPS, "GFLOPs"),
  })  # fmt: skip


def _loss(cost: BenchFigures) -> pd.DataFrame:
  labels = {"materialised": "dense, logits materialised", "tiled": "dense, in tiles"}
  labels |= {"unshared": "one linear a group"}
  measured = cost.get("loss", {}).get("rows", {})
  numbers = functools.partial(_numbers, measured, measured)
  return pd.DataFrame({
    "head": [labels.get(name, name) for name in measured],
    "ms": _text(1e3 * numbers("seconds"), "{:.1f}"),
    "faster than materialised": _text(numbers("faster_than_materialised"), "{:.1f}×"),
    "temporaries, MiB": _text(numbers("temp_bytes") / 2**20, "{:,.1f}"),
  })  # fmt: skip


def _least(cost: BenchFigures) -> pd.DataFrame:
  least, lines = cost.get("least", {}), []
  labels = {
    "step": "training step",
    "head": "head's loss and gradient",
    "untiled": "head's loss and gradient, [N, S] arrays whole",
  }
  for kind in filter(least.get, labels):
    first, last = least[kind]["near"]
    line = {"memory of": labels[kind], "least at": f"{least[kind]['size']:,}"}
    lines.append(line | {"within 2 %": f"{first:,} to {last:,}"})
  return pd.DataFrame(lines)


def _drawing(cost: BenchFigures) -> pd.DataFrame:
  lines = [cost["images"]] if "images" in cost else []
  return pd.DataFrame([
    {"pictures": images["batch"]}
    | {f"{name}, ms": f"{1e3 * seconds:.1f}" for name, seconds in images["seconds"].items()}
    | {"draw / step, %": f"{100 * images['draw_of_step']:.1f}"}
    for images in lines
  ])  # fmt: skip


def _drawing_sentence(images: Mapping[str, Any] | None) -> str:
  """What drawing the pictures of a step costs."""
  if images is None:
    return units.MISSING
  draw, step = (1e3 * images["seconds"][name] for name in ("draw", "step"))
  return (
    f"Pictures are drawn inside the training step: {draw:.1f} ms for {images['batch']} of all"
    f" {images['classes']:,} classes, {100 * images['draw_of_step']:.1f} % of a step of"
    f" {step:.0f} ms."
  )


def _frame(axes: Axes, across: str, up: str) -> None:
  axes.set_xlabel(across, fontsize=9, color=INK)
  axes.set_ylabel(up, fontsize=9, color=INK)
  axes.tick_params(labelsize=8)
  axes.spines[["top", "right"]].set_visible(False)
  if axes.lines:
    axes.legend(fontsize=7, frameon=False, labelcolor=INK)


def _curve(results: Results, name: str, key: str) -> list[list[float]]:
  return results.get(name, {}).get("curves", {}).get(key, [])


def losses(results: Results) -> Figure:
  """Training loss of the models from scratch, a panel for each width."""
  settings = [SCALES["cpu"][name] for name in ("lm-128", "lm-64")]
  figure = Figure(figsize=(4.8 * len(settings), 3.6), layout="constrained")
  for axes, s in zip(figure.subplots(1, len(settings), sharey=True), settings, strict=True):
    for at, row in enumerate(row for row in rows(s) if row.needs is None):
      curve = _curve(results, f"{s.name}/{row.name}", "train")
      if curve:
        style = {"color": SERIES[at % len(SERIES)], "linestyle": "-" if at < len(SERIES) else "--"}
        axes.plot(*zip(*curve, strict=True), linewidth=1.2, label=row.label, **style)
    axes.set_title(s.name, fontsize=9, color=INK)
    _frame(axes, "step", "nats per token")
  return figure


def picture_curves(results: Results) -> Figure:
  """Training loss, accuracy of the class, and accuracy of the group over steps."""
  figure = Figure(figsize=(10.5, 3.2), layout="constrained")
  panels = {
    "train": "training loss, nats",
    "accuracy": "validation accuracy",
    "group_accuracy": "validation accuracy of the group",
  }
  for axes, (key, label) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
    for name, color in zip(("dense", "grouped"), SERIES, strict=False):
      curve = _curve(results, f"pictures/{name}", key)
      if curve:
        axes.plot(*zip(*curve, strict=True), color=color, label=name)
    _frame(axes, "step", label)
  return figure


def sizes_figure(results: Results, cost: BenchFigures) -> Figure:
  """Memory by the compiler's account, and validation loss, by number of groups."""
  memory = {
    label: sorted((row["groups"], row[key] / 1e9) for row in cost.get("sizes", []) if key in row)
    for key, label in (
      ("peak_bytes", "training step"),
      ("head_temp_bytes", "head"),
      ("untiled_temp_bytes", "head, [N, S] arrays whole"),
    )
  }
  loss = {"trained models": list(_group_losses(results, "cpu").items())}
  figure = Figure(figsize=(9, 3.4), layout="constrained")
  panels = (memory, "GB, by the compiler's account"), (loss, "validation loss, nats per token")
  for axes, (lines, label) in zip(figure.subplots(1, 2), panels, strict=True):
    for color, (name, points) in zip(SERIES, lines.items(), strict=False):
      if points:
        style = {"color": color, "markersize": 3, "linewidth": 1, "label": name}
        axes.plot(*zip(*points, strict=True), "o-", **style)
    axes.axvline(SQRT, color=INK, linewidth=0.8, linestyle=":", label="sqrt(V) groups")
    axes.set_xscale("log")
    _frame(axes, "groups", label)
  return figure
