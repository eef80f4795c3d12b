"""The page of the grouped head, from the kept results of its three studies and the paper's numbers.

python -m experiments.studies.grouped.page
"""

import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.studies import study_page
from experiments.studies.grouped import shapes
from experiments.studies.study_page import DOCS
from vqjax.lab.report.frames import markdown
from vqjax.lab.study import Study
from vqjax.lab.study.seeds import Results
from vqjax.lm.pages import INK, SERIES

NAMES = "language", "sizes", "pictures"
"""The studies."""

works = functools.partial(study_page.works, "grouped", NAMES)

PAPER = study_page.read_paper(pathlib.Path(__file__).with_name("paper.csv"))

WIDTHS = {"128": "8.1 M", "256": "19.3 M", "1024": "152 M", "2048": "659 M"}
"""Width of Tables 2 and 3 -> the model's parameters as the paper prints them."""

SHOWN_WIDTHS = {"memory": ("128 ", "2048 "), "speed": ("128 ",)}
"""The widths of Tables 2 and 3 that the page shows; the CSV files have all."""

CONTROLS = dict.fromkeys(("tuned", "tuned-frequency", "tuned-distilled"), "gpt-2-more")
CONTROLS |= dict.fromkeys(("shuffled", "frequency", "clusters", "unshared", "distilled"), "grouped")
"""Language model -> the one that has read as many tokens, to compare the loss with."""

SQRT = 224
"""floor(sqrt V) of GPT-2's vocabulary."""

Column = Callable[[Mapping[str, Any]], str | None]
"""Measurements of a row -> its cell; None if it is missing."""


def number(form: str, *path: str, unit: float = 1) -> Column:
  """The column of the numbers at a path; "failed" where an error is in place of one."""

  def cell(node):
    for key in path:
      if key not in (node or {}):
        return "failed" if "error" in (node or {}) else None
      node = node[key]
    return form.format(node if unit == 1 else node / unit)

  return cell


COLUMNS = {
  "language": {
    "nats": number("{:.3f}", "result", "test", "nats_per_token"),
    "- GPT-2": number("{:+.3f}", "over dense"),
    "- its control": number("{:+.3f}", "over control"),
  },
  "groups": {"loss": number("{:.3f}", "result", "valid", "nats_per_token")},
  "pictures": {
    "accuracy, %": number("{:.1f}", "result", "test", "accuracy", unit=0.01),
    "of the group, %": number("{:.1f}", "result", "test", "group_accuracy", unit=0.01),
    "nats": number("{:.3f}", "result", "test", "nats_per_token"),
    "parameters": number("{:.2f} M", "result", "model", "params", unit=1e6),
    "paper's parameters": number("{}", "printed", "parameters"),
  },
  "top": {
    "groups": number("{}", "groups"),
    "visited": number("{:g}", "visited"),
    "most visited": number("{}", "visited_most"),
    "probability of the 50": number("{:.2f}", "mass"),
    "all groups, ms": number("{:.2f}", "seconds_all", unit=1e-3),
    "best-first, ms": number("{:.2f}", "seconds", unit=1e-3),
  },
  "loss": {
    "ms": number("{:.1f}", "seconds", unit=1e-3),
    "faster than materialised": number("{:.1f}×", "faster_than_materialised"),
    "temporaries, MiB": number("{:,.1f}", "temp_bytes", unit=2**20),
  },
  "least": {
    "least at": number("{:,}", "size"),
    "within 2 %": number("{0[0]:,} to {0[1]:,}", "near"),
  },
}
"""Table -> title -> column."""

QUANTITIES = {
  "memory": {
    "GB, recomputing": number("{:.2f}", "ours", "peak_bytes", unit=1e9),
    "GB, as compiled": number("{:.2f}", "ours", "without_remat", "peak_bytes", unit=1e9),
    "GB, paper": number("{}", "2", "GB"),
  },
  "speed": {
    "tokens/s": number("{:,.0f}", "ours", "tokens_per_s"),
    "tokens/s, paper": number("{}", "3", "tokens/s"),
    "GMAC": number("{:.2f}", "ours", "macs", "weights", unit=1e9),
    "GFLOPs, paper": number("{}", "3", "GFLOPs"),
  },
}
"""Table -> title -> column whose numbers stand in a line, since the models are the columns."""

MODELS = {
  "gpt-2": "GPT-2",
  "gpt-neo": "GPT-Neo",
  "tiled": "GPT-2, loss in tiles",
  "grouped": "grouped",
  "codebook": "codebook",
}
"""Model of the bench's steps -> its label."""

LOSSES = {"materialised": "dense, logits materialised", "tiled": "dense, in tiles"}
LOSSES |= {"unshared": "one linear a group"}
"""Loss of the bench -> its label, if it is not its name."""

MEMORY = {
  "step": "training step",
  "head": "head's loss and gradient",
  "untiled": "head's loss and gradient, [N, S] arrays whole",
}
"""What the bench compiles for groups of each size -> its label."""


def tables(kept: study_page.Kept, docs: pathlib.Path = DOCS) -> dict[str, pd.DataFrame]:
  """The tables by the names of their blocks."""
  loss, sizes = (study_page.bench(docs, f"grouped-{name}") for name in ("loss", "sizes"))
  tops = [one["top"] for one in kept["language"][1].values() if "top" in one]
  measured = {
    "language": ("model", language_lines(*kept["language"])),
    "groups": ("groups", {f"{n:,}": one for n, one in _by_groups(*kept["sizes"]).items()}),
    "pictures": ("model", _pictures(*kept["pictures"])),
    "top": ("V", {f"{top['vocab']:,}": top for top in tops}),
    "loss": ("head", {LOSSES.get(name, name): row for name, row in loss["rows"].items()}),
    "least": ("memory of", {label: sizes["least"][name] for name, label in MEMORY.items()}),
  }
  frames = {
    name: pd.DataFrame(
      {first: label} | {title: cell(row) for title, cell in COLUMNS[name].items()}
      for label, row in lines.items()
    )
    for name, (first, lines) in measured.items()
  }
  steps = study_page.bench(docs, "grouped-steps")
  return frames | {name: _by_width(steps, quantities) for name, quantities in QUANTITIES.items()}


def update(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, the figures and CSV files of the page; return their paths."""
  kept = study_page.current(works())
  frames = tables(kept, docs)
  whole = {f"grouped-{name}.csv": frames[name] for name in ("groups", "memory", "speed")}
  for name, widths in SHOWN_WIDTHS.items():
    frames[name] = frames[name][frames[name]["width"].str.startswith(widths)]
  loss = frames["groups"]["loss"].astype(float)
  frames["groups"] = frames["groups"].loc[sorted({0, loss.argmax(), len(loss) - 1})]
  blocks = {name: markdown(frame) for name, frame in frames.items()}
  blocks["drawing"] = _drawing(study_page.bench(docs, "grouped-images"))
  blocks["language"] += f"\n\n{not_run(*kept['language'])}"
  figures = {
    "grouped-losses.png": losses_figure(*kept["language"]),
    "grouped-pictures.png": pictures_figure(kept["pictures"][1]),
    "grouped-shapes.png": shapes_figure(),
    "grouped-sizes.png": sizes_figure(
      _by_groups(*kept["sizes"]), study_page.bench(docs, "grouped-sizes")
    ),
  }
  return study_page.publish_page(docs, "grouped", kept, blocks, figures, whole)


def language_lines(study: Study, results: Results) -> dict[str, Any]:
  """Label of a language model -> its result and the differences from others in nats."""
  tests = {name: results.get(f"{name}/run", {"result": {}})["result"] for name in study.rows}
  nats = {name: one["test"]["nats_per_token"] for name, one in tests.items() if "test" in one}
  lines = {}
  for name in study.rows:
    if f"{name}/run" in results:
      line = lines[label := study.row(name).label] = dict(results[f"{name}/run"])
      setting = label.partition(":")[0]
      control = CONTROLS.get(name.removeprefix(f"{setting}-"))
      for title, other in {"over dense": "gpt-2", "over control": control}.items():
        if {name, reference := f"{setting}-{other}"} <= nats.keys():
          line[title] = nats[name] - nats[reference]
  return lines


def not_run(study: Study, results: Results) -> str:
  """A sentence on the rows without a result, with their names for `--only`."""
  names = [name for name in study.rows if f"{name}/run" not in results]
  missing = [f"{study.row(name).label} (`{name}`)" for name in names]
  return f"Not run: {'; '.join(missing)}." if missing else "All rows of this table were run."


def _by_groups(study: Study, results: Results) -> dict[int, Any]:
  """Number of groups -> the result of the model that was trained with it."""
  numbers = {name: int(name.removeprefix("groups-")) for name in study.rows}
  return {n: results[f"{name}/run"] for name, n in numbers.items() if f"{name}/run" in results}


def _pictures(study: Study, results: Results) -> dict[str, Any]:
  return {
    study.row(name).label: {**results.get(f"{name}/run", {}), "printed": cells}
    for name, cells in PAPER["pictures"].items()
  }


def _by_width(steps: Mapping[str, Any], quantities: Mapping[str, Column]) -> pd.DataFrame:
  """A line for each width and quantity with a number, a column for each model."""
  lines = []
  for dim, size in WIDTHS.items():
    measured = {
      label: {table: PAPER[table].get(f"{dim}/{name}") for table in ("2", "3")}
      | {"ours": steps.get(dim, {}).get(name)}
      for name, label in MODELS.items()
    }
    for title, cell in quantities.items():
      cells = {label: cell(measurements) for label, measurements in measured.items()}
      lines += [{"width": f"{dim} ({size}): {title}"} | cells] if any(cells.values()) else []
  return pd.DataFrame(lines)


def _drawing(images: Mapping[str, Any]) -> str:
  """What drawing the pictures of a step costs."""
  draw, step = (1e3 * images["seconds"][name] for name in ("draw", "step"))
  return (
    f"Pictures are drawn inside the training step: {draw:.1f} ms for {images['batch']} of all"
    f" {images['classes']:,} classes, {100 * images['draw_of_step']:.1f} % of a step of"
    f" {step:.0f} ms."
  )


Lines = Mapping[str, Iterable[tuple[float, float]]]
"""Label -> points; a line without points has a colour, but is not drawn."""


def _figure(
  panels: Iterable[tuple[str, str, Lines]],
  size: tuple[float, float],
  across: str,
  at: float | None = None,
  **style: Any,
) -> Figure:
  """A figure of lines.

  Args:
    panels: title, label of the vertical axis, and lines of each panel.
    size: width and height in inches.
    across: label of the horizontal axis.
    at: the square root of the vocabulary on a logarithmic axis.
    style: style of the lines.
  """
  figure, panels = Figure(figsize=size, layout="constrained"), list(panels)
  same_axis = len({up for _, up, _ in panels}) == 1
  grid = figure.subplots(1, len(panels), sharey=same_axis)
  for axes, (title, up, lines) in zip(grid, panels, strict=True):
    for number, (label, points) in enumerate(lines.items()):
      if points:
        dash, color = "-" if number < len(SERIES) else "--", SERIES[number % len(SERIES)]
        axes.plot(*zip(*points, strict=True), dash, color=color, label=label, **style)
    if at is not None:
      axes.axvline(at, color=INK, linewidth=0.8, linestyle=":", label="sqrt(V) groups")
      axes.set_xscale("log")
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlabel(across, fontsize=9, color=INK)
    axes.set_ylabel(up, fontsize=9, color=INK)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, labelcolor=INK)
  return figure


def _curve(results: Results, row: str, name: str) -> list[tuple[float, float]]:
  return results.get(f"{row}/run", {}).get("curves", {}).get(name, [])


def losses_figure(study: Study, results: Results) -> Figure:
  """Training loss of the models from scratch, a panel for each width."""
  scratch = [name for name in study.trained if not study.begins_from(name)]
  panels = []
  for width in ("lm-128", "lm-64"):
    names = {study.row(name).label: name for name in scratch if name.startswith(width)}
    lines = {
      label.partition(": ")[2]: _curve(results, name, "train") for label, name in names.items()
    }
    panels.append((width, "nats per token", lines))
  return _figure(panels, (9.6, 3.6), "step", linewidth=1.2)


def pictures_figure(results: Results) -> Figure:
  """Training loss, accuracy of the class, and accuracy of the group over steps."""
  lines = lambda key: {row: _curve(results, row, key) for row in ("dense", "grouped")}
  titles = {
    "train": "training loss, nats",
    "accuracy": "validation accuracy",
    "group_accuracy": "validation accuracy of the group",
  }
  return _figure([("", up, lines(key)) for key, up in titles.items()], (10.5, 3.2), "step")


def sizes_figure(by_groups: Mapping[int, Any], cost: Mapping[str, Any]) -> Figure:
  """Memory by the compiler's account, and validation loss, by number of groups."""
  keys = {
    "training step": "peak_bytes",
    "head": "head_temp_bytes",
    "head, [N, S] arrays whole": "untiled_temp_bytes",
  }
  of = lambda key: sorted((row["groups"], row[key] / 1e9) for row in cost["sizes"])
  memory = {label: of(key) for label, key in keys.items()}
  loss = [(n, kept["result"]["valid"]["nats_per_token"]) for n, kept in by_groups.items()]
  panels = [
    ("", "GB, by the compiler's account", memory),
    ("", "validation loss, nats per token", {"trained models": loss}),
  ]
  return _figure(panels, (9, 3.4), "groups", SQRT, marker="o", markersize=3, linewidth=1)


def shapes_figure() -> Figure:
  """Figure 1: a cross of some class with one attribute changed, a row for each attribute."""
  base = 7, 1, 1, 5, 3, 0, 3, 0  # each rotation of a cross looks different
  rows, columns, side = len(shapes.RADIX), max(shapes.RADIX), shapes.SIDE
  digits = np.tile(base, (rows, columns, 1))
  digits[range(rows), :, range(rows)] = np.arange(columns)
  classes = np.ravel_multi_index(digits.reshape(-1, rows).T, shapes.RADIX, mode="clip")
  images = jax.jit(shapes.draw)(np.stack([classes, np.arange(len(classes))], axis=1))
  sheet = np.array(images).reshape(rows, columns, side, side, 3)
  sheet[np.arange(columns) >= np.reshape(shapes.RADIX, (-1, 1))] = 1
  figure = Figure(figsize=(7.2, 4.2), layout="constrained")
  axes = figure.add_subplot()
  axes.imshow(sheet.swapaxes(1, 2).reshape(rows * side, -1, 3), interpolation="nearest")
  axes.set_yticks(side * (np.arange(rows) + 0.5), list(shapes.NAMES), fontsize=8, color=INK)
  axes.set_xticks([])
  axes.spines[:].set_visible(False)
  return figure


if __name__ == "__main__":
  for path in update():
    print(f"wrote {path}")
