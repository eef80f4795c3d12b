"""The page of a study: tables, what is missing, a figure, and the same as CSV and LaTeX."""

import collections
import html
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from vqjax.lab.report import units
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.plots import byte_axis, label_points, save_png
from vqjax.lab.study.compressed import Derived
from vqjax.lab.study.declaration import Study
from vqjax.lab.study.seeds import (
  Interval,
  Results,
  Spread,
  failures,
  finished_results,
  origins,
  paired,
  results_by_seed,
)
from vqjax.lab.study.work import Work
from vqjax.lm.pages import SERIES, blank, document, element, html_table, plot
from vqjax.outputs import write_text

__all__ = ["difference", "numbers", "shown_table", "write_pages"]

CAPTION = "Bytes of the vocabulary layer against the loss on the test split. Lower left is better."


def difference(
  study: Study, results: Results, name: str, reference: str | None = None
) -> Interval | None:
  """The difference of a row's test perplexity from another row's, paired by seed.

  A row of one run shares only the number of its seed with another training: its difference is that
  from the mean of the other row's seeds, unless it is derived from that row.

  Args:
    study: the study.
    results: its results.
    name: the row.
    reference: the other row; None: that of the study.
  """
  reference = reference or study.reference
  nats = lambda row: {
    seed: run["test"]["nats_per_token"]
    for seed, run in finished_results(results, f"{row}/run").items()
  }
  own, other = nats(name), nats(reference)
  if name == reference or not other:
    return None
  row = study.row(name)
  if len(own) == 1 and not (isinstance(row, Derived) and row.of == reference):
    (nats_of_one,) = own.values()
    return Interval.of([nats_of_one - statistics.fmean(other.values())])
  return paired(own, other)


def layer_bytes(result: Mapping[str, Any]) -> tuple[int | None, int | None]:
  """Bytes of the head with its table, and of the head and the inputs, a tied table once.

  Of a model without a head both are those of its embedding.
  """
  head, embedding = result.get("head"), result.get("embedding")
  inputs = embedding and embedding["shipped_bytes"]
  if head is None:
    return inputs, inputs
  own = head["state_bytes"] + (inputs if head.get("tied") and inputs else 0)
  both = None if inputs is None else head["state_bytes"] + inputs
  return own, both


def numbers(study: Study, results: Results) -> pd.DataFrame:
  """The rows that have a finished run, the lowest test loss first, as exact numbers."""
  lines = []
  for name in study.rows:
    runs = finished_results(results, f"{name}/run")
    if not runs:
      continue
    one, found = next(iter(runs.values())), difference(study, results, name)
    mean = lambda values: statistics.fmean(found) if (found := [*values]) else None
    steps = [run["train"]["step_seconds"] for run in runs.values() if "train" in run]
    perplexity = Spread.of([run["test"]["perplexity"] for run in runs.values()])
    own, both = layer_bytes(one)
    costs = results.get(f"{name}/costs", {"costs": {}})["costs"]
    rates = [rate for rate in one["test"] if rate.endswith("accuracy")]
    verdict = found and (found.verdict(100 * study.margin) or "undecided")
    lines.append(
      {
        "row": name,
        "seeds": len(runs),
        "test_nats_per_token": mean(run["test"]["nats_per_token"] for run in runs.values()),
        "test_perplexity": perplexity.mean,
        "test_perplexity_deviation": perplexity.deviation,
        **{f"test_{rate}": mean(run["test"][rate] for run in runs.values()) for rate in rates},
        "percent_from_reference": found and found.mean,
        "percent_low": found and found.low,
        "percent_high": found and found.high,
        "verdict": verdict,
        "layer_bytes": own,
        "layer_bytes_with_inputs": both,
        "step_seconds": mean(step for step in steps if step is not None),
        "draw_seconds": costs.get("draw_seconds"),
      }
    )
  frame = pd.DataFrame(lines)
  if not lines:
    return frame
  return frame.sort_values("test_nats_per_token", kind="stable", ignore_index=True)


def shown_table(study: Study, results: Results) -> pd.DataFrame:
  """The table of the page: `numbers` with units and labels."""
  exact = numbers(study, results)
  if exact.empty:
    return exact
  in_units = lambda column, form: [
    None if pd.isna(value) else form(value) for value in exact[column]
  ]
  found = [difference(study, results, name) for name in exact["row"]]
  spreads = [
    Spread(mean, None if pd.isna(deviation) else deviation, seeds).show(2)
    for mean, deviation, seeds in zip(
      exact["test_perplexity"], exact["test_perplexity_deviation"], exact["seeds"]
    )
  ]
  rates = [column for column in exact if column.endswith("accuracy")]
  return pd.DataFrame(
    {
      "row": [study.row(name).label for name in exact["row"]],
      "test perplexity": spreads,
      **{
        column.replace("_", " "): in_units(column, lambda rate: f"{100 * rate:.2f} %")
        for column in rates
      },
      f"% from {study.row(study.reference).label} (95 %)": [one and str(one) for one in found],
      "verdict": exact["verdict"],
      "layer": in_units("layer_bytes", units.size),
      "with inputs": in_units("layer_bytes_with_inputs", units.size),
      "ms a step": in_units("step_seconds", units.milliseconds),
      "ms a draw": in_units("draw_seconds", units.milliseconds),
      "seeds": exact["seeds"],
    }
  ).astype(object)


def tunings(study: Study, results: Results) -> pd.DataFrame:
  """What was tuned: each row's chosen values, and its number of trials and of diverged ones."""
  lines = []
  for name in study.trained:
    kept = results.get(f"{name}/tuning")
    if kept and kept["trials"]:
      won = kept["chosen"] if kept["result"]["status"] == "finished" else {}
      chosen = {field: shown_value(value) for field, value in won.items()}
      diverged = sum(trial["valid"] is None for trial in kept["trials"])
      counts = {"trials": str(len(kept["trials"])), "diverged": str(diverged) if diverged else None}
      lines.append({"row": study.row(name).label, **chosen, **counts})
  return pd.DataFrame(lines)


def shown_value(value: Any) -> str:
  """A value that a tuning tries, as text."""
  return f"{value:g}" if isinstance(value, float) else str(value)


def edges(study: Study, results: Results) -> list[str]:
  """Sentences on values beyond those of the study that were tried, and winners at an edge."""
  lines = []
  for name in study.trained:
    kept = results.get(f"{name}/tuning")
    if not kept or not kept["trials"] or kept["result"]["status"] != "finished":
      continue
    extended = kept.get("extended", {})
    space = study.space(name).extended(extended)
    for field in space.values:
      chosen = kept["chosen"][field]
      edge, beyond = space.edge(field, chosen), extended.get(field, ())
      more = " and ".join(map(shown_value, beyond))
      if beyond and edge is None:
        lines.append(
          f"`{name}` tried {field} = {more} too, beyond an edge of its grid, and chose"
          f" {shown_value(chosen)}."
        )
      elif edge is not None:
        after = f", also after {more}" if beyond else ""
        lines.append(
          f"`{name}` chose {field} = {shown_value(chosen)}, the {edge} value tried{after}: one"
          " beyond it may be better."
        )
  return lines


def missing(study: Study, results: Results) -> list[str]:
  """Sentences on failed jobs, seeds without a run, and code that is not committed."""
  lines = [line.removeprefix("- ") for line in failures(results).splitlines()]
  for name in study.rows:
    kept, count = results_by_seed(results, f"{name}/run"), study.seeds_of(name)
    absent = [str(seed) for seed in range(count) if seed not in kept]
    if absent:
      row = study.row(name)
      owner = row.of if isinstance(row, Derived) else name
      tuning = results.get(f"{study.row(owner).tuned_as or owner}/tuning")
      why = (
        " because its tuning failed" if tuning and tuning["result"]["status"] == "failed" else ""
      )
      seeds = f"seed {absent[0]} is" if len(absent) == 1 else f"seeds {', '.join(absent)} are"
      lines.append(f"`{name}` has {len(kept)} of {count} runs: {seeds} missing{why}.")
  code = {kept["code"] for kept in results.values() if "code" in kept}
  if None in code:
    lines.append("The file of the study is in no git repository.")
  if any(commit and commit.endswith("+") for commit in code):
    lines.append("The code beside the file of the study had changes that are not committed.")
  return lines


def figure(study: Study, results: Results) -> Figure | None:
  """Bytes of the layer against nats a token, with standard deviations; None without a run."""
  exact = numbers(study, results)
  if exact.empty or exact["layer_bytes"].isna().all():
    return None
  exact = exact.dropna(subset="layer_bytes")
  drawn, axes = blank(height=max(3.6, 0.3 * len(exact)))
  xs = byte_axis(axes, [*exact["layer_bytes"]])
  deviations = [
    statistics.stdev(nats) if len(nats) > 1 else 0.0
    for nats in (
      [run["test"]["nats_per_token"] for run in finished_results(results, f"{name}/run").values()]
      for name in exact["row"]
    )
  ]
  nats = [*exact["test_nats_per_token"]]
  axes.errorbar(xs, nats, yerr=deviations, fmt="o", color=SERIES[0], capsize=3)
  axes.set_xlabel("bytes of the layer")
  axes.set_ylabel("test loss, nats a token")
  axes.margins(y=0.2)
  label_points(axes, xs, nats, [study.row(name).label for name in exact["row"]])
  return drawn


def write_pages(work: Work, results: Results) -> list[pathlib.Path]:
  """Write study.md, .html, .csv, .tex and .png into the folder of a study; return the paths."""
  study, folder = work.study, work.folder
  table, drawn = shown_table(study, results), figure(study, results)
  title = f"Study {work.title}"
  sections = [
    ("", _budget(work), table),
    ("What is missing", missing(study, results) or ["Nothing."], None),
    ("Tuning", _tuning_sentences(study) + edges(study, results), tunings(study, results)),
    ("Origin", [origins(results)], None),
  ]
  marked, body = [f"# {title}\n"], []
  for heading, sentences, frame in sections:
    items = len(sentences) > 1 or heading == "What is missing"
    marked += [f"## {heading}\n"] if heading else []
    marked += ["".join(f"- {line}\n" if items else f"{line}\n" for line in sentences)]
    body += [element("h2", heading)] if heading else []
    lines = "".join(element("li" if items else "p", _inline(line)) for line in sentences)
    body.append(element("ul", lines) if items else lines)
    if frame is not None and len(frame):
      marked.append(markdown(frame) + "\n")
      body.append(_html(frame, heading or "Results"))
    if not heading and drawn is not None:
      marked.append(f"![{CAPTION}](study.png)\n")
      body.append(plot(drawn, "bytes", CAPTION))
  paths = {suffix: folder / f"study.{suffix}" for suffix in ("md", "html", "csv", "tex", "png")}
  folder.mkdir(parents=True, exist_ok=True)
  write_text(paths["md"], "\n".join(marked))
  write_text(paths["html"], document(title, "\n".join(body)))
  write_text(paths["csv"], numbers(study, results).to_csv(index=False))
  write_text(paths["tex"], latex(table))
  if drawn is None:
    del paths["png"]
  else:
    save_png(drawn, paths["png"])
  return [*paths.values()]


def latex(frame: pd.DataFrame) -> str:
  """A table for LaTeX, with the rules of its package `booktabs`."""
  texts = frame.dropna(axis="columns", how="all").map(lambda x: "--" if pd.isna(x) else str(x))
  return texts.to_markdown(index=False, disable_numparse=True, tablefmt="latex_booktabs") + "\n"


def _budget(work: Work) -> list[str]:
  """Sentences on what rows have in common, and on the rows that train for longer or less."""
  study, margin = work.study, 100 * work.study.margin
  budgets = collections.defaultdict(list)
  for name in study.trained:
    made = study.experiment(name, scale=work.scale)
    tokens = made.train.batch * made.model.context
    budgets[f"{made.train.steps:,} steps of {tokens:,} tokens"].append(name)
  (usual, _), *others = sorted(budgets.items(), key=lambda each: -len(each[1]))
  scale = "" if work.scale == 1 else f" ({float(work.scale):g} of the study's steps)"
  begun = {name: sources for name in study.trained if (sources := study.begins_from(name))}
  return [
    f"{'A row' if others else 'Every row'} is trained for {usual}{scale}. Differences are of"
    " perplexity, paired by seed, with 95 % intervals of Student's t; one run alone is compared"
    " with the mean of the reference's, without an interval. A row is equal where its whole"
    f" interval is within {margin:g} %, better or worse where it excludes 0, and else undecided."
    " The intervals are not corrected for the number of rows: of 20 rows without a difference, one"
    " is expected to exclude 0. Each run read the test text once, at its end.",
    *(f"{_names(rows)}: {budget}." for budget, rows in others),
    *(f"`{name}` begins from the runs of {_names(sources)}." for name, sources in begun.items()),
  ]


def _names(rows: Sequence[str]) -> str:
  return ", ".join(f"`{row}`" for row in rows)


def _tuning_sentences(study: Study) -> list[str]:
  """Sentences on how rows were tuned, and on the rows of each grid where there are several."""
  grids, untuned = collections.defaultdict(list), []
  for name in study.trained:
    space = study.space(name)
    if study.row(name).tuned_as:
      continue
    if len(space.candidates()) == 1:
      untuned.append(name)
      continue
    tried = (f"{field} {[*map(shown_value, each)]}" for field, each in space.values.items())
    grids[", ".join(tried).replace("'", "")].append(name)
  if not grids:
    return ["Nothing was tuned."]
  is_one = len(grids) == 1 and not untuned
  share = lambda part: "all steps" if part == 1 else f"1/{part} of the steps"
  first, *later = map(share, study.rounds)
  who = "three candidates and more" if later else "every candidate"
  rounds = [f"{who} for {first}", *(f"the best third, but two at least, for {x}" for x in later)]
  beyond = (
    " Where the best lay at an edge of the grid, values beyond it were tried too, at most"
    f" {study.extensions} for each field."
  ) * (study.extensions > 0)
  return [
    f"{'Every' if is_one else 'A tuned'} row tried {next(iter(grids)) if is_one else 'its grid'},"
    f" with a seed of its own: {', then '.join(rounds)}, by the validation loss.{beyond}",
    *(f"{_names(rows)}: {grid}." for grid, rows in grids.items() if not is_one),
    *([f"{_names(untuned)}: not tuned."] if untuned else []),
    *(
      f"`{name}` has the tuning of `{owner}`."
      for name in study.trained
      if (owner := study.row(name).tuned_as)
    ),
  ]


def _inline(text: str) -> str:
  return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))


def _html(frame: pd.DataFrame, label: str) -> str:
  filled = frame.dropna(axis="columns", how="all")
  rows = [
    [
      element("th" if at == 0 else "td", html.escape(units.MISSING if pd.isna(x) else str(x)))
      for at, x in enumerate(row)
    ]
    for row in filled.itertuples(index=False)
  ]
  return html_table(map(str, filled.columns), rows, "runs", label)
