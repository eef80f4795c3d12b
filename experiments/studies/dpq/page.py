"""How does the page of the DPQ tables read?"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.studies.dpq import notes as dpq_notes
from experiments.studies.dpq import plots as dpq_plots
from experiments.studies.dpq.paper import TEXTS
from experiments.studies.dpq.report import COLUMNS, tables
from experiments.studies.dpq.settings import SCALES, STAND_INS
from experiments.studies.page import failures, known, save
from experiments.studies.study import DOCS, Results
from vqjax.lab.report import units
from vqjax.lab.report.page import write_whole
from vqjax.lab.training.run import read_json

_INTRODUCTION = """\
# DPQ: the paper's tables, measured

Each row is an embedding in the same model, text and budget; only the embedding differs.
`python -m experiments.studies.dpq.run --scale cpu` runs what is here and `--scale paper` has the paper's
own settings. Rows without a number were not run here.
"""


def write(results: Results, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
  """Writes results/dpq.md and its plots under images/; returns what was written."""
  cost = read_json(docs / "results" / "dpq" / "cost.json")
  plots = dpq_plots.figures(results, SCALES["cpu"], cost)
  page = docs / "results" / "dpq.md"
  write_whole(page, "\n".join(_page(results, cost, plots)))
  return [page, *save(plots, docs)]


def _page(
  results: Results, cost: Mapping[str, Any] | None, plots: Mapping[str, Figure]
) -> Iterator[str]:
  """The sections, in their order."""
  yield _INTRODUCTION
  yield _stand_ins()
  yield "## The columns\n"
  yield "".join(f"- {column.title}: {column.meaning}\n" for column in COLUMNS)
  for table in tables(results):
    yield f"## {table.title}\n\n{table.markdown()}"
  for name in plots:
    caption = dpq_plots.CAPTIONS[name]
    yield f"## {caption}\n\n![{caption}](../images/{name})\n"
  yield _costs(cost)
  yield _words(results)
  yield dpq_notes.notes()
  yield _origin(results)


def _costs(cost: Mapping[str, Any] | None) -> str:
  """What a look-up and an export cost."""
  title = "## What ships: look-up and export\n\n"
  if cost is None:
    return f"{title}`python -m experiments.bench.quantized_embedding` has not been run.\n"
  export, opened = cost["export"]["export"], cost["export"]["open and look up"]
  peak = export["memory_bytes"]
  look_up = cost["look_up"]["time"]
  lines = (
    f"V = 267,735, d = 768, K = 256, M = 96 ({cost['provenance']['device']}):\n",
    f"- A jitted look-up of 16,384 tokens from packed codes takes {look_up:.2f} times the time",
    "of a gather from the dense table.",
    f"- The file has {export['file_bytes']:,} bytes, {export['formula_bytes']:,} of them codes and",
    f"values. The dense table has {export['formula_ratio']:.2f} times the bits by the paper's",
    f"formula, {export['file_ratio']:.2f} times the bytes of the file.",
    f"- To export it takes {export['seconds']:.0f} s and, beyond the trained table, at most",
    f"{units.MISSING if peak is None else units.size(peak)}; to open it and look up 100 tokens, in",
    f"NumPy by memory map, {1e3 * opened['seconds']:.1f} ms.",
  )
  return title + "\n".join(lines) + "\n"


_WORDS_OF = "ptb-small"


def _words(results: Results) -> str:
  """Tables 5 to 8: neighbours of words and their codes."""
  found = ["## Tables 5 to 8: words, their neighbours and codes\n"]
  kinds = {"full": "full", "sx": "DPQ-SX", "vq": "DPQ-VQ"}
  kept = {kind: results.get(f"{_WORDS_OF}/{kind}", {}) for kind in kinds}
  for word in kept["full"].get("neighbours", {}):
    found.append(f"Nearest to `{word}` by the cosine of their vectors, Penn Treebank:\n")
    for kind, said in kinds.items():
      near = kept[kind].get("neighbours", {}).get(word, [])
      found.append(f"- {said}: " + ", ".join(f"`{w}` {c:.2f}" for w, c in near[1:]))
    found.append("")
  for kind in ("sx", "vq"):
    words = kept[kind].get("codes", {}).get("words", {})
    if words:
      found.append(f"The first twelve codes of words, {kinds[kind]}:\n\n```")
      found += [
        f"{word:>10} " + " ".join(f"{c:2d}" for c in code[:12]) for word, code in words.items()
      ]
      found.append("```\n")
  return "\n".join(found) if len(found) > 1 else f"{found[0]}\n{units.MISSING}\n"


def _origin(results: Results) -> str:
  """Where the numbers come from, and what failed."""
  device, commits = known(results, "device"), known(results, "commit")
  return (
    f"## Where the numbers come from\n\n{len(results)} results on {device}; each with its"
    " config, seed, versions and commit in results/dpq/cpu/. Commits (+: with changes):"
    f" {commits}.\n\n" + failures(results)
  )


def _stand_ins() -> str:
  """Which of our settings stand in for the paper's."""
  lines = [
    f"- {table}: {TEXTS[ours]} in place of {TEXTS[theirs]}\n"
    for (table, theirs), ours in STAND_INS["cpu"].items()
  ]
  return (
    "On two cores, smaller settings stand in for some of the paper's, and AG News and DBpedia train"
    " on the part of their texts that is at hand. The models over K and M (Figures 3, 7 and 8) are"
    f" {SCALES['cpu']['ag-news-grid'].dim} wide and train a few hundred steps, so that their scores"
    " are below Table 3's:\n\n" + "".join(lines)
  )
