"""The page of memories of n-grams, from the kept results of its study.

python -m experiments.studies.ngrams.page
"""

import pathlib
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.studies import study_page
from experiments.studies.study_page import DOCS, Kept
from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis
from vqjax.lab.study import Study
from vqjax.lab.study.page import difference
from vqjax.lab.study.seeds import Interval, Results, Spread, results_by_seed
from vqjax.lab.study.work import Work
from vqjax.lm.pages import SERIES, blank

FIRST = "wikitext"
"""The study whose rows are tuned, and of which the page says the most."""

OTHERS = {"ptb": "Penn Treebank", "stories": "TinyStories"}
"""Studies of further texts -> the texts."""

FORMED = "65536", "262144"
"""Rows whose forms the page shows, and around whose tables the decoder is trained again."""

OF_OTHERS = {
  "at 1.5 bits, %": "steps by counts and gradients, 1.5 bits",
  "at 0.8 bits, %": "steps by counts and gradients, 0.8 bits",
  "int2, %": "int2, a scale a row",
}
"""Columns of the table of further texts -> forms."""

SHOWN = {"by counts and gradients": "steps by counts and", "int8 to int2": "int"}
"""Series of the figure -> what the names of their forms begin with."""


def works() -> dict[str, Work]:
  """The studies with their kept results."""
  of_texts = study_page.works("ngrams", OTHERS, file="texts.py")
  return study_page.works("ngrams", (FIRST,)) | of_texts


def memories_table(study: Study, results: Results) -> pd.DataFrame:
  """The rows that were run, by loss on the test text."""
  lines = []
  for name in study.rows:
    runs = _finished(results, name)
    if not runs or study.begins_from(name):
      continue
    of = lambda key, runs=runs: Spread.of([kept["result"]["test"][key] for kept in runs.values()])
    costs = results.get(f"{name}/costs")
    memory = study.experiment(name).model.memories
    lines.append(
      {
        "memory": study.row(name).label,
        "numbers": f"{memory[0].lookup.size().params:,}" if memory else "0",
        "nats a token": of("nats_per_token").show(3),
        "bits a byte": of("bits_per_byte").show(3),
        "perplexity, %": _text(difference(study, results, name)),
        "ms a step": f"{1000 * costs['costs']['step_seconds']:.0f}" if costs else None,
        "_": of("nats_per_token").mean,
      }
    )
  frame = pd.DataFrame(lines)
  return frame.sort_values("_").drop(columns="_") if len(frame) else frame


def forms_table(study: Study, results: Results, name: str) -> pd.DataFrame:
  """The forms of a row's table: bits a number, and what they add to the loss, paired by seed."""
  runs, lines = _finished(results, name), []
  every = dict.fromkeys(form for kept in runs.values() for form in kept["forms"])
  for form in every:
    own = [(kept["forms"][form], kept["result"]["test"]) for kept in runs.values()]
    bits = [one["bits"] for one, _ in own]
    more = [100 * (one["bits_per_byte"] / dense["bits_per_byte"] - 1) for one, dense in own]
    nats = [one["nats_per_token"] - dense["nats_per_token"] for one, dense in own]
    lines.append(
      {
        "form": form,
        "bits a number": f"{sum(bits) / len(bits):.2f}",
        "bits a byte, %": Spread.of(more).show(2, "+"),
        "perplexity, %": str(Interval.of(nats)),
      }
    )
  return pd.DataFrame(lines)


def again_table(study: Study, results: Results) -> pd.DataFrame:
  """What 150 steps on text that the table has read do to the decoder around it."""
  lines = []
  for source in ("none", *FORMED):
    dense = _finished(results, source)
    for bits in (None, 0.8, 0.3):
      again = _finished(results, f"{source}-around-{bits or 'dense'}")
      seeds = sorted(dense.keys() & again.keys())
      if not seeds:
        continue
      form = f"steps by counts and gradients, {bits} bits"
      before = [dense[s]["forms"][form] if bits else dense[s]["result"]["test"] for s in seeds]
      after = [again[seed]["result"]["test"] for seed in seeds]
      spread = lambda scores: Spread.of([one["nats_per_token"] for one in scores]).show(3)
      columns = {"nats before": spread(before), "nats after": spread(after)}
      table = "as trained" if bits is None else f"rounded to {bits} bits"
      table = table if source in FORMED else units.MISSING
      lines.append({"memory": study.row(source).label, "its table": table, **columns})
  return pd.DataFrame(lines)


def others_table(kept: Kept) -> pd.DataFrame:
  """What tables and their forms do to the perplexity of the further texts."""
  lines = []
  for study_name, text in OTHERS.items():
    study, results = kept[study_name]
    for name in study.rows:
      runs = _finished(results, name).values()
      if not runs:
        continue
      tests = [own["result"]["test"]["nats_per_token"] for own in runs]
      line = {"text": text, "memory": study.row(name).label}
      line["nats a token"] = Spread.of(tests).show(3)
      line["perplexity, %"] = _text(difference(study, results, name))
      for title, form in OF_OTHERS.items():
        scores = [own["forms"][form]["nats_per_token"] for own in runs if own.get("forms")]
        more = [score - dense for score, dense in zip(scores, tests)]
        line[title] = str(Interval.of(more)) if more else None
      lines.append(line)
  return pd.DataFrame(lines)


def bytes_figure(study: Study, results: Results) -> Figure | None:
  """Bytes of the table's forms against bits a byte, for each size of it."""
  sizes, series = [], {}
  for name in study.rows:
    runs = _finished(results, name)
    formed = [kept for kept in runs.values() if kept.get("forms")]
    if not formed:
      continue
    count = study.experiment(name).model.memories[0].lookup.size().params
    for kind, begins in SHOWN.items():
      points = [
        (form["bits"] * count / 8, form["bits_per_byte"])
        for kept in formed[:1]
        for title, form in kept["forms"].items()
        if title.startswith(begins)
      ]
      series[f"{study.row(name).label}, {kind}"] = sorted(points)
      sizes += [x for x, _ in points]
  if not sizes:
    return None
  figure, axes = blank(height=5)
  at = dict(zip(sizes, byte_axis(axes, sizes)))
  for number, (label, points) in enumerate(series.items()):
    style = "o-" if number % 2 == 0 else "s:"
    color = SERIES[number // 2 % len(SERIES)]
    axes.plot([at[x] for x, _ in points], [y for _, y in points], style, color=color, label=label)
  axes.set_xlabel("bytes of the table", fontsize=9)
  axes.set_ylabel("bits a byte of the test text", fontsize=9)
  axes.legend(fontsize=8)
  return figure


def _finished(results: Results, name: str) -> dict[int, Any]:
  kept = results_by_seed(results, f"{name}/run")
  return {seed: one for seed, one in kept.items() if one["result"]["status"] == "finished"}


def _text(interval: Interval | None) -> str | None:
  return None if interval is None else str(interval)


def update(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Rewrite the generated blocks and figures of the page; return their paths."""
  kept = study_page.current(works())
  study, results = kept[FIRST]
  tables = {f"{FIRST}-memories": memories_table(study, results)}
  tables[f"{FIRST}-again"] = again_table(study, results)
  tables |= {f"{FIRST}-forms-{row}": forms_table(study, results, row) for row in FORMED}
  tables["others"] = others_table(kept)
  blocks = {title: markdown(own) if len(own) else units.MISSING for title, own in tables.items()}
  figures = {f"ngrams-{FIRST}.png": bytes_figure(study, results)}
  return study_page.publish_page(docs, "ngrams", kept, blocks, figures)


if __name__ == "__main__":
  for path in update():
    print(f"wrote {path}")
