"""Tables and figures of the study, in the terminal and on the page docs/results/grouped.md."""

import functools
import io
import json
import pathlib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from PIL import Image
from rich.console import Console

from experiments.studies import page
from experiments.studies.grouped.rows import SCALES, TEACHER, rows
from experiments.studies.study import Results
from vqjax.lab.data import shapes
from vqjax.lab.report import INK, SERIES, units

Cost = Mapping[str, Any]
"""The measurements of `experiments.bench.grouped`."""

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

SQRT = 224
"""floor(sqrt V) of GPT-2's vocabulary."""

TITLES = {
  "language": "Table 1: language models on TinyStories",
  "differences": "Differences of the loss from the control's, nats",
  "groups": "Figure 3: validation loss by the number of groups",
  "pictures": "Section 3.2: classes of pictures",
  "top": "Exact top-50, one token at a time",
  "memory": "Table 2: peak memory of a training step, B = 32, T = 512",
  "speed": "Table 3: throughput and operations",
  "loss": "Loss and gradient, N = 4096, D = 256, V = 50,257",
  "least": "Group sizes of the least memory, tokens a group",
  "drawing": "Drawing the pictures in the training step",
  "origins": "Origin of the bench's measurements",
}


@functools.cache
def paper() -> dict[tuple[str, str, str], str]:
  """(table, row, column) -> the number that the paper prints."""
  frame = pd.read_csv(pathlib.Path(__file__).with_name("paper.csv"), dtype=str)
  return frame.set_index(["table", "row", "column"])["value"].to_dict()


def read_cost(docs: pathlib.Path) -> Cost | None:
  """The bench's measurements without those of `--quick`; None if there are none."""
  path = docs / "results" / "grouped" / "cost.json"
  if not path.exists():
    return None
  cost = json.loads(path.read_text(encoding="utf-8"))
  origins = cost.get("provenance", {})
  quick = {part for part in origins if origins[part].get("quick")}
  if "sizes" in quick:
    quick.add("least")
  kept = {key: value for key, value in cost.items() if key not in quick}
  return kept | {"provenance": {part: of for part, of in origins.items() if part not in quick}}


def tables(results: Results, scale: str, cost: Cost | None) -> dict[str, pd.DataFrame]:
  """Tables by the keys of `TITLES`; those of the bench only if there is a `cost`."""
  frames = {
    "language": _language(results, scale),
    "differences": _differences(results, scale),
    "groups": _groups(results, scale),
    "pictures": _pictures(results),
    "top": _top(results),
  }
  if cost is not None:
    frames |= {"memory": _memory(cost), "speed": _speed(cost), "loss": _loss(cost)}
    frames |= {"least": _least(cost), "drawing": _drawing(cost), "origins": _origins(cost)}
  return {name: frame for name, frame in frames.items() if len(frame)}


def show(console: Console, results: Results, scale: str, docs: pathlib.Path) -> None:
  """Prints all tables."""
  for name, frame in tables(results, scale, read_cost(docs)).items():
    page.show(console, TITLES[name], frame)


def write(results: Results, docs: pathlib.Path) -> list[pathlib.Path]:
  """Updates the generated blocks of the page, and its figures; returns their paths."""
  cost = read_cost(docs)
  blocks = {name: page.markdown(frame) for name, frame in tables(results, "cpu", cost).items()}
  blocks["results"] = f"{page.origins(results)}\n\n{page.failures(results)}"
  path = docs / "results" / "grouped.md"
  page.update(path, blocks)
  figures = {
    "grouped-losses.png": losses(results),
    "grouped-pictures.png": picture_curves(results),
    "grouped-sizes.png": sizes(results, cost or {}),
  }
  return [path, *page.save_figures(figures, docs)]


def _test(results: Results, name: str, key: str) -> float | None:
  """A score of a work on the test split; None if it has none."""
  return results.get(name, {}).get("result", {}).get("test", {}).get(key)


def _maybe(show, *values) -> str | None:
  """`show(*values)`; None if a value is missing."""
  return None if any(value is None for value in values) else show(*values)


def _language(results: Results, scale: str) -> pd.DataFrame:
  models = [(s, row.name, row.label) for s in SCALES[scale].values() if s.rows for row in rows(s)]
  lines = [
    _language_line(results, f"{s.name}/{name}", f"{s.name}: {label}") for s, name, label in models
  ]
  if scale == "cpu":
    printed = dict.fromkeys(row for table, row, _ in paper() if table == "1")
    missing = [row for row in printed if row.split("/")[0] not in SCALES["cpu"]]
    for dim, name in sorted(
      ((row.split("/")[0].removeprefix("lm-"), row.split("/")[1]) for row in missing),
      key=lambda of: list(MODELS).index(of[1]),
    ):
      lines.append(_language_line({}, f"lm-{dim}/{name}", f"paper, {MODELS[name]}, {dim}"))
  return pd.DataFrame(lines)


def _language_line(results: Results, name: str, label: str) -> dict[str, Any]:
  result = results.get(name, {}).get("result", {})
  judged = results.get(f"grades/{name.replace('/', '-')}", {})
  nats, teacher = _test(results, name, "nats_per_token"), f"{name.split('/')[0]}/{TEACHER}"
  # The count of a distilled model includes its teacher.
  params = None if name.endswith("distilled") else _of(result, "model")
  line = {
    "model": label,
    "perplexity": _maybe("{:.2f}".format, _test(results, name, "perplexity")),
    "nats": _maybe("{:.3f}".format, nats),
    "- GPT-2": _maybe(
      lambda a, b: f"{a - b:+.3f}", nats, _test(results, teacher, "nats_per_token")
    ),
    "parameters": _maybe(units.count, params),
    "of the head": _maybe(units.count, _of(result, "head")),
  }
  if result.get("status") == "failed":
    line |= dict.fromkeys(list(line)[1:], "failed")
  for grade in GRADES:
    own, printed = judged.get("grades", {}).get(grade), paper().get(("1", name, grade))
    if own is not None or printed is not None:
      line[grade] = f"{_maybe('{:.2f}'.format, own) or units.MISSING} / {printed or units.MISSING}"
  if judged:
    stories = judged["graded"] + judged["failed"]
    line["graded"] = f"{judged['graded']} of {stories} by {judged['settings']['model']}"
  return line


def _of(result: Mapping[str, Any], part: str) -> int | None:
  return result.get(part, {}).get("params")


def _differences(results: Results, scale: str) -> pd.DataFrame:
  lines = []
  for s in SCALES[scale].values():
    labels = {row.name: row.label for row in rows(s)}
    for row in rows(s):
      own = _test(results, f"{s.name}/{row.name}", "nats_per_token")
      control = _test(results, f"{s.name}/{row.control}", "nats_per_token")
      if own is not None and control is not None:
        line = {"model": f"{s.name}: {row.label}", "control": labels[row.control]}
        lines.append(line | {"difference": f"{own - control:+.3f}"})
  return pd.DataFrame(lines)


def _group_losses(results: Results, scale: str) -> dict[int, float]:
  """Number of groups -> validation loss in nats, of the models that were trained."""
  losses = {
    groups: results.get(f"{s.name}/groups-{groups}", {}).get("result", {}).get("valid", {})
    for s in SCALES[scale].values()
    for groups in s.groups
  }
  return {groups: valid["nats_per_token"] for groups, valid in losses.items() if valid}


def _groups(results: Results, scale: str) -> pd.DataFrame:
  losses = _group_losses(results, scale)
  lines = {"groups": [f"{groups:,}" for groups in losses]}
  return pd.DataFrame(lines | {"validation nats": [f"{loss:.3f}" for loss in losses.values()]})


def _pictures(results: Results) -> pd.DataFrame:
  lines = []
  for name in ("dense", "grouped"):
    work, percent = f"pictures/{name}", lambda rate: f"{100 * rate:.1f}"
    result = results.get(work, {}).get("result", {})
    line = {
      "model": f"CNN, {name}",
      "accuracy, %": _maybe(percent, _test(results, work, "accuracy")),
      "of the group, %": _maybe(percent, _test(results, work, "group_accuracy")),
      "nats": _maybe("{:.3f}".format, _test(results, work, "nats_per_token")),
      "parameters": _maybe(units.count, _of(result, "model")),
    }
    if result.get("status") == "failed":
      line |= dict.fromkeys(list(line)[1:], "failed")
    printed = f"{int(paper()['pictures', work, 'parameters']):,}"
    lines.append(line | {"paper's parameters": printed})
  return pd.DataFrame(lines)


def _top(results: Results) -> pd.DataFrame:
  lines = []
  for top in (kept["top"] for kept in results.values() if "top" in kept):
    lines.append({
      "V": f"{top['vocab']:,}",
      "groups": top["groups"],
      "visited": f"{top['visited']:g}",
      "most visited": top["visited_most"],
      "probability of the 50": f"{top['mass']:.2f}",
      "all groups, ms": f"{1e3 * top['seconds_all']:.2f}",
      "best-first, ms": f"{1e3 * top['seconds']:.2f}",
      "ratio": f"{top['ratio']:.3f}",
      "equal": "yes" if top["same"] else "no",
    })  # fmt: skip
  return pd.DataFrame(lines)


def _steps(cost: Cost) -> Iterable[tuple[int, str, Mapping[str, Any], Mapping[str, Any]]]:
  """(width, model, its measurements, those of GPT-2) of Tables 2 and 3."""
  for dim in WIDTHS:
    measured = cost.get("steps", {}).get(str(dim), {})
    for name in MODELS:
      yield dim, name, measured.get(name, {}), measured.get("gpt-2", {})


def _memory(cost: Cost) -> pd.DataFrame:
  lines = []
  for dim, name, own, dense in _steps(cost):
    plain, dense_plain = own.get("without_remat", {}), dense.get("without_remat", {})
    peaks = {"compiled": plain.get("peak_bytes"), "recomputing": own.get("peak_bytes")}
    theirs = {"compiled": dense_plain.get("peak_bytes"), "recomputing": dense.get("peak_bytes")}
    shown = {key: _maybe("{:.2f}".format, peak and peak / 1e9) for key, peak in peaks.items()}
    # The error is of the first program that the compiler refused.
    if "error" in own:
      shown["compiled" if peaks["recomputing"] else "recomputing"] = "failed"
    times = {
      f"GPT-2 / it, {key}": _maybe(lambda a, b: f"{a / b:.1f}", theirs[key], peaks[key])
      for key in peaks
    }
    part = _maybe(lambda a, b: f"{a / b:.2f}", peaks["recomputing"], theirs["recomputing"])
    printed = paper().get(("2", f"{dim}/{name}", "GB"))
    label = f"{dim} ({WIDTHS[dim]}): {MODELS[name]}"
    lines.append({"model": label, **shown, "of GPT-2": part, **times, "paper, GB": printed})
  return pd.DataFrame(lines)


def _speed(cost: Cost) -> pd.DataFrame:
  times, lines = lambda a, b: f"{a / b:.2f}×", []
  for dim, name, own, dense in _steps(cost):
    printed = lambda name, dim=dim: _maybe(int, paper().get(("3", f"{dim}/{name}", "tokens/s")))
    macs = own.get("macs")
    lines.append({
      "model": f"{dim} ({WIDTHS[dim]}): {MODELS[name]}",
      "tokens/s": _maybe("{:,.0f}".format, own.get("tokens_per_s")),
      "of GPT-2": _maybe(times, own.get("tokens_per_s"), dense.get("tokens_per_s")),
      "paper": _maybe("{:,}".format, printed(name)),
      "of its GPT-2": _maybe(times, printed(name), printed("gpt-2")),
      "GMAC": macs and f"{macs['weights'] / 1e9:.2f}",
      "with attention": macs and f"{sum(macs.values()) / 1e9:.2f}",
      "paper's GFLOPs": paper().get(("3", f"{dim}/{name}", "GFLOPs")),
    })  # fmt: skip
  return pd.DataFrame(lines)


def _loss(cost: Cost) -> pd.DataFrame:
  labels = {"materialised": "dense, logits materialised", "tiled": "dense, in tiles"}
  labels |= {"unshared": "one linear a group"}
  measured = cost.get("loss", {}).get("rows", {})
  return pd.DataFrame([
    {
      "head": labels.get(name, name),
      "ms": f"{1e3 * row['seconds']:.1f}",
      "time / grouped's": f"{row['seconds'] / measured['grouped']['seconds']:.2f}×",
      "faster than materialised": f"{row['faster_than_materialised']:.1f}×",
      "faster than in tiles": f"{row['faster_than_tiled']:.1f}×",
      "temporaries": units.size(row["temp_bytes"]),
      "materialised / it": f"{row['temp_smaller']:.0f}×",
    }
    for name, row in measured.items()
  ])  # fmt: skip


def _least(cost: Cost) -> pd.DataFrame:
  least, lines = cost.get("least", {}), []
  for kind, label in (
    ("step", "training step"),
    ("head", "head's loss and gradient"),
    ("untiled", "head's loss and gradient, [N, S] arrays whole"),
  ):
    if kind in least:
      first, last = least[kind]["near"]
      line = {"memory of": label, "least at": f"{least[kind]['size']:,}"}
      line |= {"within 2 %": f"{first:,} to {last:,}", "sqrt(V)": least["sqrt"]}
      lines.append(line | {"sqrt(V/4)": least.get("corrected")})
  return pd.DataFrame(lines)


def _drawing(cost: Cost) -> pd.DataFrame:
  images = cost.get("images")
  if images is None:
    return pd.DataFrame()
  shown = {f"{name}, ms": f"{1e3 * seconds:.1f}" for name, seconds in images["seconds"].items()}
  part = f"{100 * images['draw_of_step']:.1f}"
  return pd.DataFrame([{"pictures": images["batch"], **shown, "draw / step, %": part}])


def _origins(cost: Cost) -> pd.DataFrame:
  lines = [
    {"part": part, "device": of["device"], "commit": of["commit"], "day": of["date"][:10]}
    for part, of in cost.get("provenance", {}).items()
  ]
  for dim, models in cost.get("steps", {}).items():
    for name, row in models.items():
      if "error" in row:
        lines.append({"part": f"steps, width {dim}, {name}: {row['error']}"})
  return pd.DataFrame(lines)


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
  """Training loss of the models that were trained from scratch, a panel for each width."""
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


def sizes(results: Results, cost: Cost) -> Figure:
  """Memory by the compiler's account, and validation loss, over the number of groups."""
  memory = {
    label: sorted((row["groups"], row[key] / 1e9) for row in cost.get("sizes", []) if key in row)
    for key, label in (
      ("peak_bytes", "training step"),
      ("head_temp_bytes", "head"),
      ("untiled_temp_bytes", "head, [N, S] arrays whole"),
    )
  }
  loss = {"trained models": sorted(_group_losses(results, "cpu").items())}
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


def save_sheet(path: pathlib.Path, seed: int = 0) -> None:
  """Draws a contact sheet of the picture classes: the values of each attribute, and random classes.

  The file is a PNG of 256 colours: the noise of all colours would make it four times as large.
  """
  # A cross, since each of its rotations looks different.
  base = shapes.Attributes(
    shape=7, pattern=1, rotation=1, colour=5, size=3, texture=0, opacity=3, border=0
  )
  width = max(map(len, shapes.NAMES.values()))
  lines: list[list[str]] = []
  for attribute, names in shapes.NAMES.items():
    # Attributes stand side by side in the first line that has room.
    for line in lines:
      if sum(len(shapes.NAMES[other]) for other in line) + len(names) <= width:
        line.append(attribute)
        break
    else:
      lines.append([attribute])
  chosen = np.random.default_rng(seed).integers(0, shapes.NUM_CLASSES, (3, 9))
  heights = [1.1 * len(lines) + 0.3, len(chosen) * (10 / chosen.shape[1] + 0.45) + 0.3]
  figure = Figure(figsize=(10, sum(heights)))
  upper, lower = figure.subfigures(2, 1, height_ratios=heights)

  def draw(part, grid, classes, seed) -> list[Axes]:
    numbers = jnp.arange(len(classes)) + seed * shapes.NUM_CLASSES
    panels = []
    images = shapes.draw(jnp.stack([jnp.asarray(classes), numbers], axis=-1))
    for cell, image in zip(grid, np.asarray(images), strict=True):
      panels.append(part.add_subplot(cell))
      panels[-1].imshow(image)
      panels[-1].axis("off")
    return panels

  title = f"{shapes.caption(int(shapes.class_of(base)))} - and with one attribute changed"
  upper.suptitle(title, size=9, y=0.99, color=INK)
  grid = GridSpec(len(lines), width, upper, 0.01, 0.01, 0.99, 0.88, hspace=0.55, wspace=0.06)
  for at, line in enumerate(lines):
    column = 0
    for attribute in line:
      names = shapes.NAMES[attribute]
      classes = [shapes.class_of(base._replace(**{attribute: i})) for i in range(len(names))]
      cells = [grid[at, column + i] for i in range(len(names))]
      panels = draw(upper, cells, np.array(classes, np.int32), seed)
      for axes, name in zip(panels, names, strict=True):
        axes.set_title(name, size=7, pad=2, color="#5a626d")
      first = panels[0]
      first.text(0, 1.22, attribute, transform=first.transAxes, size=8, weight="bold", color=INK)
      column += len(names)
  lower.suptitle("classes at random", size=9, y=0.99, color=INK)
  grid = GridSpec(*chosen.shape, lower, 0.01, 0.1, 0.99, 0.93, hspace=0.62, wspace=0.16)
  cells = [grid[at] for at in np.ndindex(chosen.shape)]
  for axes, of in zip(draw(lower, cells, chosen.ravel(), seed + 1), chosen.flat, strict=True):
    words = textwrap.fill(shapes.caption(int(of)), 225 // chosen.shape[1])
    axes.text(0.5, -0.04, words, transform=axes.transAxes, ha="center", va="top", size=6)
  buffer = io.BytesIO()
  figure.savefig(buffer, dpi=100)
  path.parent.mkdir(parents=True, exist_ok=True)
  # Of the methods, this one keeps the colours that few pixels have.
  image = Image.open(buffer).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE)
  image.save(path, "PNG", optimize=True)
