"""The page of the comparison of heads, from the kept results of its six studies.

python -m experiments.studies.comparison.page
"""

import collections
import functools
import operator
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.studies import study_page
from experiments.studies.study_page import DOCS
from vqjax import Head, heads
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points
from vqjax.lab.starting_points import Distilled
from vqjax.lab.study import Derived, Study
from vqjax.lab.study.page import difference
from vqjax.lab.study.seeds import Results, Spread, finished_results
from vqjax.lab.training.optimizer import optimizer
from vqjax.lab.training.step import state_maker
from vqjax.lm.pages import SERIES, blank

NAMES = "ptb", "dropout", "manuals", "equal_bytes", "stories"
"""The studies of heads."""

TRAINED = "small_tables"
"""The study of tables that are small while they train."""

works = functools.partial(study_page.works, "comparison", (*NAMES, TRAINED))

OFF_PAGE = "tied-memory", "dense-contexts-memory", "tied-distilled-memory"
"""Compressed forms of other rows, which only the CSV file has."""

AT_RANDOM = "dense"
"""The row of the untied full softmax that begins at random."""


def head_of(study: Study, name: str) -> Head:
  """The head of a row; of a derived one that of its source."""
  row = study.row(name)
  model = study.experiment(row.of if isinstance(row, Derived) else name).model
  return (model.student if isinstance(model, Distilled) else model).head


def deployed(head: Head) -> Head:
  """The head of inference: one with fixed codes in place of learned ones."""
  if not isinstance(head, heads.LearnedProductHead):
    return head
  shape = head.vocab, head.dim, head.codes, head.subspaces
  return heads.ProductHead(*shape, token_bias=head.token_bias)


def is_tied(study: Study, name: str) -> bool:
  """Whether the rows of the head are the input vectors."""
  return getattr(head_of(study, name), "embedding", None) is not None


def head_bytes(study: Study, name: str, result: Mapping[str, Any], *, narrow: bool = False) -> int:
  """Bytes of the head that inference needs, a tied table included.

  Args:
    study: the study.
    name: the row.
    result: result of one of its runs.
    narrow: count two bytes for each parameter of a trained head, in place of the four of float32. A
      compressed table has its own formats.
  """
  head, own = head_of(study, name), result["head"]
  if isinstance(study.row(name), Derived):
    return own["state_bytes"]
  size, params = own["state_bytes"], own["params"]
  if is_tied(study, name):
    size += result["embedding"]["state_bytes"]
    params += result["embedding"]["params"]
  elif deployed(head) is not head:
    vocab = result["embedding"]["params"] // head.dim
    params, size = deployed(head).clone(vocab=vocab).size()[:2]
  return size - 2 * params * narrow


def comparison_table(study: Study, results: Results, costs: Mapping[str, Any]) -> pd.DataFrame:
  """The heads that were run, by test perplexity, with what they cost, by the names of their rows.

  Args:
    study: the study.
    results: its results.
    costs: figures of the benchmark "compared" for it; {} without.
  """
  first = next(iter(finished_results(results, f"{study.reference}/run").values()), None)
  shown = []
  for name, runs in _ranked(study, results):
    row, one, found = study.row(name), next(iter(runs.values())), difference(study, results, name)
    size = head_bytes(study, name, one)
    line = {
      "row": name,
      "head": row.label,
      "test perplexity": _perplexity(runs).show(1),
      "% from the reference": found and str(found),
      "verdict": found and found.verdict(100 * study.margin),
    }
    if first:
      whole = head_bytes(study, study.reference, first)
      line["bytes, of the reference"] = units.ratio(size / whole)
      both = (head_bytes(study, *of, narrow=True) for of in ((name, one), (study.reference, first)))
      line["with 16-bit floats"] = units.ratio(operator.truediv(*both))
      inputs = 0 if is_tied(study, name) else first["embedding"]["state_bytes"]
      line["MiB with the inputs"] = f"{(size + inputs) / 2**20:.2f}"
    own = costs.get(name, {})
    for title, time in (("training", "step"), ("sample", "sample")):
      line[title] = units.ratio(own[time]) if own.get(time) else None
    of_source = isinstance(row, Derived) and difference(study, results, name, row.of)
    line["% from its source"] = str(of_source) if of_source else None
    if AT_RANDOM in study.rows and study.reference != AT_RANDOM:
      of_random = difference(study, results, name, AT_RANDOM)
      line["% from the full softmax at random"] = of_random and str(of_random)
    line["on"] = ", ".join(sorted({_processor(run["device"]) for run in runs.values()}))
    shown.append(line)
  frame = pd.DataFrame(shown).dropna(axis=1, how="all")
  return frame.astype(object).where(frame.notna(), None)


def training_table(study: Study, results: Results) -> pd.DataFrame:
  """The tables of `TRAINED` that were run, by test perplexity, with their bytes in training.

  These are of the table, its biases and their moments, without gradients, where they were largest.
  """
  lines = []
  for name, runs in _ranked(study, results):
    source = name.removesuffix("-on")
    found, one = difference(study, results, name), finished_results(results, f"{source}/run")[0]
    size = one["head"]["state_bytes"] + one["embedding"].get("state_bytes", 0)
    row = study.row(source)
    held = training_bytes(study, row.of if isinstance(row, Derived) else source)
    costs, of_adamw = results.get(f"{name}/costs"), difference(study, results, name, "adamw")
    lines.append(
      {
        "row": name,
        "table": study.row(name).label,
        "nats a token": Spread.of([run["test"]["nats_per_token"] for run in runs.values()]).show(3),
        "perplexity, %": found and str(found),
        "% from AdamW": of_adamw and str(of_adamw),
        "KiB": f"{size / 1024:,.0f}",
        "KiB in training": f"{held / 1024:,.0f}",
        "ms a step": f"{1000 * costs['costs']['step_seconds']:.0f}" if costs else None,
      }
    )
  return pd.DataFrame(lines)


def training_bytes(study: Study, name: str) -> int:
  """Bytes of a row's tied table, its biases and their moments."""
  experiment = study.experiment(name)
  vocab = experiment.tokenizer.vocab
  embedding = experiment.model.embedding.clone(vocab=vocab)
  model = experiment.model.clone(
    embedding=embedding, head=experiment.model.head.clone(vocab=vocab, embedding=embedding)
  )
  row = jax.ShapeDtypeStruct((1, 8), jnp.int32)
  make = state_maker(model, optimizer(experiment.train), {"inputs": row, "targets": row})
  state = jax.eval_shape(make, jax.random.key(0))
  parts = jax.tree.leaves_with_path((state.params, state.model_state, state.opt_state))
  of_table = lambda path: {"embedding", "head"} & {getattr(key, "key", None) for key in path}
  return sum(x.size * x.dtype.itemsize for path, x in parts if of_table(path))


def _ranked(study: Study, results: Results) -> list[tuple[str, dict[int, Any]]]:
  """The rows that were run and their runs by seed, the lowest mean perplexity first."""
  every = [(name, finished_results(results, f"{name}/run")) for name in study.rows]
  return sorted([one for one in every if one[1]], key=lambda one: _perplexity(one[1]).mean)


def _perplexity(runs: Mapping[int, Mapping[str, Any]]) -> Spread:
  return Spread.of([run["test"]["perplexity"] for run in runs.values()])


def _processor(device: str) -> str:
  """ "GPU" or "CPU", of a result's device."""
  return "GPU" if "gpu" in device else "CPU"


def summary(name: str, study: Study, results: Results) -> str:
  """A sentence on the hours of a study's runs, and on the rows without a result."""
  spent = collections.Counter()
  for kept in results.values():
    seconds = kept.get("seconds") or kept["result"].get("train", {}).get("seconds") or 0.0
    spent[_processor(kept["result"]["device"])] += seconds / 3600
  ran = {row for row, _ in _ranked(study, results)}
  missing = [f"`{row}`" for row in study.rows if row not in ran]
  parts = [f"{of:.1f} hours on {kind}s" for kind, of in sorted(spent.items())]
  took = f"{name}: {' and '.join(parts) or units.MISSING}"
  return took + (f"; not run: {', '.join(missing)}." if missing else ".")


def tuning_sentence(name: str, study: Study, results: Results) -> str | None:
  """What the tunings of a study chose: the usual value, and the rows of the others."""
  chosen = collections.defaultdict(list)
  for row in study.rows:
    kept = results.get(f"{row}/tuning")
    if kept and kept["trials"]:
      chosen[", ".join(f"{value:g}" for value in kept["chosen"].values())].append(f"`{row}`")
  if not chosen:
    return None
  (usual, most), *others = sorted(chosen.items(), key=lambda each: -len(each[1]))
  apart = "".join(f", but {value} for {', '.join(rows)}" for value, rows in others)
  return f"{name}: {usual} ({len(most)} tunings){apart}."


def compared_bytes_figure(study: Study, results: Results) -> Figure | None:
  """Bytes of the head against test perplexity, by name; None where the table says as much."""
  points = []
  for name, runs in _ranked(study, results):
    if size := head_bytes(study, name, next(iter(runs.values()))):
      points.append((size, _perplexity(runs).mean, name))
  if len(points) <= 3:
    return None
  order = {name: at for at, name in enumerate(study.rows)}
  sizes, perplexities, names = zip(*sorted(points, key=lambda point: order[point[2]]))
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


def update(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks, figures and CSV files of the page; return their paths."""
  blocks, figures, whole, tuned, took = {}, {}, {}, [], []
  kept = study_page.current(works())
  for name in NAMES:
    study, results = kept[name]
    costs = (study_page.bench(docs, "compared") or {}).get(name, {})
    table = comparison_table(study, results, costs)
    csv_only = "verdict", "row", "% from its source", "% from the full softmax at random", "on"
    shown = table[~table["row"].isin(OFF_PAGE)].drop(columns=[*csv_only], errors="ignore")
    blocks[f"{name}-heads"] = markdown(shown) if len(shown) else units.MISSING
    whole[f"comparison-{name}.csv"] = table
    figures[f"comparison-{name}.png"] = compared_bytes_figure(study, results)
  table = training_table(*kept[TRAINED])
  blocks[TRAINED] = markdown(table.drop(columns=["row", "% from AdamW"]))
  whole[f"comparison-{TRAINED}.csv"] = table
  for name, (study, results) in kept.items():
    took.append(summary(name, study, results))
    tuned.append(tuning_sentence(name, study, results))
  blocks["tunings"] = "\n".join(filter(None, tuned))
  blocks["hours"] = "\n".join(took)
  return study_page.publish_page(docs, "comparison", kept, blocks, figures, whole)


if __name__ == "__main__":
  for path in update():
    print(f"wrote {path}")
