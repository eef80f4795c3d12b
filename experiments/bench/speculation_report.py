"""Tables and figure of the benchmarks of drafters, on their page of results.

python -m experiments.bench.speculation_report
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.bench.speculation import ADAPTIVE, FREQUENT, PLAIN, SAMPLINGS
from experiments.studies import study_page
from vqjax.lab import exits
from vqjax.lab.report.frames import markdown
from vqjax.lab.report.units import MISSING
from vqjax.lm.pages import INK, SERIES, blank

PAGE = study_page.DOCS / "results" / "drafters.md"
IMAGE = "speculation.png"

Figures = Mapping[str, Any]
"""What a benchmark has written."""


def update(path: pathlib.Path, figures: Figures, of_run: Figures, of_medusa: Figures) -> bool:
  """Rewrite the page's generated blocks and its CSV files; return whether the page changed.

  Args:
    path: the page.
    figures: those of `speculation`.
    of_run: those of `speculation-run`.
    of_medusa: those of `medusa`.
  """
  speed, run_speed = speed_table(figures), speed_table(of_run)
  study_page.save_table(path.with_suffix(".csv"), speed)
  study_page.save_table(path.with_name("drafters-small.csv"), run_speed)
  blocks = {
    "speculation-speed": markdown(_greedy(speed)),
    "speculation-heads": f"{markdown(heads_table(figures))}\n\n{origin(figures)}",
    "speculation-run": f"{markdown(_greedy(run_speed))}\n\n{origin(of_run)}",
    "medusa": f"{markdown(medusa_table(of_medusa))}\n\n{medusa_origin(of_medusa)}",
  }
  return study_page.update_page(path, blocks)


def _greedy(table: pd.DataFrame) -> pd.DataFrame:
  return table[table["tokens"] == "greedy"].drop(columns="tokens")


def domains_of(figures: Figures) -> list[str]:
  """The domains, the drafter's own first."""
  is_domain = lambda name, found: isinstance(found, dict) and "greedy" in found and name != "rounds"
  return [name for name, found in figures.items() if is_domain(name, found)]


def speed_table(figures: Figures) -> pd.DataFrame:
  """Tokens a pass and speed of each way, by domain and sampling."""
  rows = []
  for name, domain in itertools.product(SAMPLINGS, domains_of(figures)):
    if name not in figures[domain]:  # an interrupted run
      continue
    table = figures[domain][name]
    row = {"text": domain, "tokens": name}
    row[f"{PLAIN}, tokens/s"] = f"{table[PLAIN]['tokens_per_second']:.2f}"
    for way, each in table.items():
      if way != PLAIN:
        row[way] = f"{each['tokens_per_pass']:.2f}: {each['speed_ratio']:.2f}×"
        if way == ADAPTIVE:
          row["least"] = f"{each['least_ratio']:.2f}×"
    rows.append(row)
  return pd.DataFrame(rows)


def heads_table(figures: Figures) -> pd.DataFrame:
  """Time and bytes of each head, and its speed on the drafter's domain beside the roofline."""
  greedy = figures[domains_of(figures)[0]]["greedy"]
  plain = greedy[PLAIN]
  rows = []
  for way, row in greedy.items():
    if way == ADAPTIVE:
      continue
    seconds = figures["parts"].get(f"draft head, {way}")
    if way == "whole":
      seconds = figures["parts"]["its head"]
    rows.append(
      {
        "draft head": way,
        "ms of the head": MISSING if seconds is None else f"{1e3 * seconds:.1f}",
        "MB of a draft token": MISSING if way == PLAIN else f"{figures['bytes'][way] / 1e6:.0f}",
        "tokens a pass": f"{row['tokens_per_pass']:.2f}",
        "MB a token": f"{row['bytes_per_token'] / 1e6:.0f}",
        "roofline": f"{row['bound'] / plain['bound']:.2f}×",
        "all tokens": f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}×",
        "median prompt": f"{row['speed_ratio']:.2f}×",
      }
    )
  return pd.DataFrame(rows)


def origin(figures: Figures) -> str:
  """A sentence on the device, the sizes and the commit."""
  made_by, sizes, own = figures["provenance"], figures["sizes"], domains_of(figures)[0]
  agreement = ", ".join(f"{x:.2f}" for x in figures["training"]["agreement"])
  kl = ", ".join(f"{x:.2f}" for x in figures["training"]["kl"])
  rounds = "; ".join(
    f"1 + {each['overhead']:.2f}, and {each['cost']:.2f} a draft token ({name})"
    for name, each in figures["rounds"].items()
  )
  return (
    f"{made_by['device']}, jaxlib {made_by['versions']['jaxlib']}, float32, batch 1; prompts of"
    f" {sizes['prompt']} tokens and {sizes['tokens']} new ones, {sizes['prompts']} of {own} and"
    f" {sizes['foreign']} of each other text; {made_by['date'][:10]}, commit {made_by['commit']}."
    f" The drafter was trained for {sizes['settings']['steps']} steps on"
    f" {sizes['positions'] + sizes['written'] * sizes['width']:,} positions. On held-out {own}"
    f" its tokens, first to last, are the model's best at {agreement} of the positions, with a"
    f" divergence of {kl} nats. In tokens without a drafter, a round takes {rounds}."
    f" Memory is read at {figures['bandwidth'] / 1e9:.1f} GB/s."
  )


def medusa_table(figures: Figures) -> pd.DataFrame:
  """Tokens a pass with Medusa's blocks, by domain and sampling."""
  return pd.DataFrame(
    {"text": domain}
    | {
      f"{shape}, {name}": f"{found:.2f}"
      for name, row in figures[domain].items()
      for shape, found in row.items()
    }
    for domain in domains_of(figures)
  )


def medusa_origin(figures: Figures) -> str:
  """A sentence on the training of the blocks."""
  made_by, sizes, held_out = figures["provenance"], figures["sizes"], figures["held_out"]
  accuracy = ", ".join(f"{100 * x:.0f}" for x in held_out["accuracy"])
  minutes = figures["training_seconds"] / 60
  return (
    f"{made_by['device']}, {made_by['date'][:10]}, commit {made_by['commit']}. The"
    f" {sizes['settings']['blocks']} blocks and their output layer of {sizes['vocab']:,} tokens"
    f" were trained for {sizes['settings']['steps']:,} steps in {minutes:.0f} minutes,"
    f" the hidden vectors of {sizes['rows'] * sizes['width']:,} tokens included. Of"
    f" {held_out['positions']:,} held-out positions {accuracy} % are right, the first block to the"
    f" last. The tree has {len(figures['tree'])} tokens."
  )


def plot(figures: Figures) -> Figure:
  """Speed of greedy decoding with each way, by domain."""
  figure, axes = blank(height=3.4)
  domains = domains_of(figures)
  ways = [way for way in figures[domains[0]]["greedy"] if way != PLAIN]
  # The head that adapts is the same head as one of the others: a ring around its colour.
  colors = dict(zip((way for way in ways if way != ADAPTIVE), SERIES))
  for at, way in enumerate(ways):
    style = {"markersize": 8, "linestyle": "none", "color": colors.get(way, colors[FREQUENT])}
    if way == ADAPTIVE:
      style |= {"markerfacecolor": "none", "markeredgewidth": 1.5}
    ratio = [figures[domain]["greedy"][way]["speed_ratio"] for domain in domains]
    shift = 0.12 * (at - (len(ways) - 1) / 2)
    axes.plot([x + shift for x in range(len(domains))], ratio, "o", label=way, **style)
  axes.axhline(1, color=INK, linewidth=1)
  axes.set_xticks(range(len(domains)), domains)
  axes.set_ylim(bottom=0)
  axes.set_ylabel("speed over decoding\nwithout a drafter")
  axes.legend(frameon=False, fontsize=8, labelcolor=INK, ncols=3, loc="lower left")
  return figure


def main() -> int:
  """Rewrite the page's blocks and its figure."""
  names = "speculation", "speculation-run", "medusa"
  found = [study_page.bench(study_page.DOCS, name) for name in names]
  if None in found:
    raise FileNotFoundError(
      f"docs/results/bench.json must have a full run of {names[found.index(None)]}: run it"
    )
  update(PAGE, *found)
  study_page.save_figures({IMAGE: plot(found[0])}, study_page.DOCS)
  return 0


if __name__ == "__main__":
  exits.run_main(main)
