"""Tables and the figure of the comparison of heads."""

import collections
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.studies import study_page
from experiments.studies.comparison.rows import (
  SCALES,
  ComparisonRow,
  ComparisonSetting,
  deployed,
  rows,
)
from experiments.studies.study_page import DOCS
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points
from vqjax.lab.study import seeds
from vqjax.lab.study.seeds import Interval, Results, Spread, finished_results
from vqjax.lm.pages import SERIES, blank

EQUIVALENCE = 1.0
"""Per cent of perplexity within which two heads count as equal."""

OFF_PAGE = "tied-memory", "dense-contexts-memory", "tied-distilled-memory"
"""Compressed forms of other rows, which only the CSV file has."""

AT_RANDOM = "dense"
"""The row of the untied full softmax that begins at random."""


def paired(results: Results, row: str, reference: str) -> Interval | None:
  """The difference of two rows' test perplexities, over the seeds that both have."""
  return seeds.paired(_nats(results, row), _nats(results, reference))


def from_reference(results: Results, row: str, reference: str) -> Interval | None:
  """The difference from the reference: paired, and of a row of one seed from the mean.

  Trained rows of one seed share no more than its number, and the mean is less noisy.
  """
  own, other = _nats(results, row), _nats(results, reference)
  if len(own) != 1 or not other:
    return paired(results, row, reference)
  (nats,) = own.values()
  return Interval.of([nats - statistics.fmean(other.values())])


def _nats(results: Results, row: str) -> dict[int, float]:
  runs = finished_results(results, row)
  return {seed: run["test"]["nats_per_token"] for seed, run in runs.items()}


def head_bytes(row: ComparisonRow, result: Mapping[str, Any], s: ComparisonSetting) -> int:
  """Bytes of the head that inference needs, a tied table included.

  Args:
    row: the row.
    result: result of one of its runs.
    s: the setting.
  """
  head = row.head()
  if row.is_tied and row.source is None:
    return result["head"]["state_bytes"] + result["embedding"]["state_bytes"]
  if deployed(head) is head:
    return result["head"]["state_bytes"]
  vocab = result["embedding"]["params"] // s.dim
  return deployed(head).clone(vocab=vocab).size().state_bytes


def comparison_table(
  results: Results, s: ComparisonSetting, costs: Mapping[str, Any]
) -> pd.DataFrame:
  """The heads that were run, by test perplexity, with what they cost.

  Args:
    results: the results.
    s: the setting.
    costs: figures of the benchmark "compared" for the setting; {} without.
  """
  reference = s.rows[0]
  of_reference = finished_results(results, f"{s.name}/{reference}")
  shown = []
  for row, runs in _ranked(results, s):
    one = next(iter(runs.values()))
    size = head_bytes(row, one, s)
    difference = None
    if row.name != reference:
      difference = from_reference(results, f"{s.name}/{row.name}", f"{s.name}/{reference}")
    line = {
      "head": row.label,
      "test perplexity": _perplexity(runs).show(1),
      "% from the reference": difference and str(difference),
      "verdict": difference and difference.verdict(EQUIVALENCE),
    }
    if of_reference:
      parts = next(iter(of_reference.values()))
      line["bytes, of the reference"] = units.ratio(size / head_bytes(rows(s)[0], parts, s))
      inputs = parts["embedding"]["state_bytes"]
      line["MiB with the inputs"] = f"{(size + (0 if row.is_tied else inputs)) / 2**20:.2f}"
    if costs:
      own = costs.get(row.name, {})
      times = {"training": own.get("step"), "sample": own.get("sample")}
      line |= {title: None if t is None else units.ratio(t) for title, t in times.items()}
    shown.append(line)
  return _with_gaps(shown)


def runs_table(results: Results, s: ComparisonSetting) -> pd.DataFrame:
  """The rows' names, in the order of their ranks, with their second reference and their start."""
  at_start = results.get(f"{s.name}/starts", {"nats": {}})["nats"]
  shown = []
  for row, runs in _ranked(results, s):
    own, start = f"{s.name}/{row.name}", at_start.get(row.name)
    of_source = row.source and paired(results, own, f"{s.name}/{row.source.name}")
    is_second = AT_RANDOM not in (row.name, s.rows[0])
    of_random = from_reference(results, own, f"{s.name}/{AT_RANDOM}") if is_second else None
    shown.append(
      {
        "row": f"`{row.name}`",
        "% from its source": of_source and str(of_source),
        "% from the full softmax at random": of_random and str(of_random),
        "nats at the start": None if start is None else f"{start:.2f}",
        "on": ", ".join(sorted({_processor(run["device"]) for run in runs.values()})),
      }
    )
  return _with_gaps(shown)


def _ranked(
  results: Results, s: ComparisonSetting
) -> list[tuple[ComparisonRow, dict[int, dict[str, Any]]]]:
  """The rows that were run and their runs by seed, the lowest mean perplexity first."""
  every = [(row, finished_results(results, f"{s.name}/{row.name}")) for row in rows(s)]
  return sorted([one for one in every if one[1]], key=lambda one: _perplexity(one[1]).mean)


def _perplexity(runs: Mapping[int, Mapping[str, Any]]) -> Spread:
  return Spread.of([run["test"]["perplexity"] for run in runs.values()])


def _with_gaps(lines: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """The lines as a table whose missing values are None; columns without any value are left out."""
  frame = pd.DataFrame(lines).dropna(axis=1, how="all")
  return frame.astype(object).where(frame.notna(), None)


def _processor(device: str) -> str:
  """ "GPU" or "CPU", of a result's device."""
  return "GPU" if "gpu" in device else "CPU"


def summary(results: Results, s: ComparisonSetting) -> str:
  """A sentence on the hours of a setting's runs, and on the rows without a result."""
  spent = collections.Counter()
  for name, kept in results.items():
    if name.startswith(f"{s.name}/"):
      seconds = kept.get("seconds") or kept["result"].get("train", {}).get("seconds") or 0.0
      spent[_processor(kept["result"]["device"])] += seconds / 3600
  missing = [f"`{row.name}`" for row in rows(s) if not finished_results(results, _job(s, row))]
  parts = [f"{of:.1f} hours on {name}s" for name, of in sorted(spent.items())]
  took = f"{s.name}: {' and '.join(parts) or units.MISSING}"
  return took + (f"; not run: {', '.join(missing)}." if missing else ".")


def _job(s: ComparisonSetting, row: ComparisonRow) -> str:
  return f"{s.name}/{row.name}"


def tunings(results: Results, s: ComparisonSetting) -> pd.DataFrame:
  """The chosen values and the rows whose tuning chose them."""
  chosen = collections.defaultdict(list)
  for row in rows(s):
    kept = results.get(f"{_job(s, row)}-tuning")
    if kept and kept["trials"]:
      values = ", ".join(f"{value:g}" for value in kept["chosen"].values())
      chosen[values].append(f"`{row.name}`")
  shown = {"text": s.name, "learning rate": list(chosen)}
  shown["chosen by"] = [", ".join(names) for names in chosen.values()]
  return pd.DataFrame(shown)


def tuning_sentence(chosen: pd.DataFrame) -> str:
  """What the tunings of a setting chose: the usual value, and the rows of the others."""
  first, *others = sorted(
    chosen.itertuples(index=False), key=lambda line: -len(line[2].split(", "))
  )
  apart = "".join(f", but {value} for {names}" for _, value, names in others)
  return f"{first[0]}: {first[1]} ({len(first[2].split(', '))} tunings){apart}."


def compared_bytes_figure(results: Results, s: ComparisonSetting) -> Figure | None:
  """Bytes of the head against test perplexity, by name."""
  points = []
  for row in rows(s):
    runs = finished_results(results, f"{s.name}/{row.name}").values()
    if runs and (size := head_bytes(row, next(iter(runs)), s)):
      perplexity = statistics.fmean(run["test"]["perplexity"] for run in runs)
      points.append((size, perplexity, row.name))
  if not points:
    return None
  sizes, perplexities, names = zip(*points)
  # Rows of about one size are named above each other.
  figure, axes = blank(height=max(4.2, 0.3 * len(points)))
  xs = byte_axis(axes, sizes)
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
  axes.yaxis.set_major_formatter("{x:g}")
  axes.minorticks_off()
  axes.plot(xs, perplexities, "o", color=SERIES[0])
  axes.set_xlabel("bytes of the head", fontsize=9)
  axes.set_ylabel("test perplexity", fontsize=9)
  axes.margins(y=0.15)
  label_points(axes, xs, perplexities, names)
  return figure


def _tables(results: Results, s: ComparisonSetting, docs: pathlib.Path) -> dict[str, pd.DataFrame]:
  costs = (study_page.bench(docs, "compared") or {}).get(s.name, {})
  return {
    "heads": comparison_table(results, s, costs),
    "runs": runs_table(results, s),
    "tunings": tunings(results, s),
  }


def shown_tables(results: Results, scale: str) -> dict[str, pd.DataFrame]:
  """The tables of the terminal by their titles."""
  every = {
    f"{s.name}: {title}": frame
    for s in SCALES[scale]
    for title, frame in _tables(results, s, DOCS).items()
  }
  return {title: frame for title, frame in every.items() if len(frame)}


def whole_table(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
  """All columns of a setting's rows, their names first."""
  named = tables["runs"].set_index("row").rename(index=lambda name: name.strip("`"))
  return pd.concat([tables["heads"].set_axis(named.index), named], axis=1).reset_index()


def update(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, figures and CSV files of the page; return their paths."""
  blocks, figures, whole, tuned, took = {}, {}, {}, [], []
  for s in SCALES["cpu"]:
    tables = _tables(results, s, docs)
    is_shown = ~tables["runs"]["row"].str.strip("`").isin(OFF_PAGE)
    shown = tables["heads"][is_shown].drop(columns="verdict", errors="ignore")
    blocks[f"{s.name}-heads"] = markdown(shown) if len(shown) else units.MISSING
    whole[f"comparison-{s.name}.csv"] = whole_table(tables)
    figures[f"comparison-{s.name}.png"] = compared_bytes_figure(results, s)
    took.append(summary(results, s))
    if len(tables["tunings"]):
      tuned.append(tuning_sentence(tables["tunings"]))
  blocks["tunings"] = "\n".join(tuned)
  blocks["hours"] = "\n".join(took)
  return study_page.publish_page(docs, "comparison", results, blocks, figures, whole)
