"""What do the pages of all studies share: plots beside them, and where their numbers come from?"""

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure

from experiments.studies.study import Results
from vqjax.lab import report
from vqjax.lab.report import units


def save(plots: Mapping[str, Figure], docs: pathlib.Path) -> list[pathlib.Path]:
  """Writes the plots to images/, and returns where."""
  paths = [docs / "images" / name for name in plots]
  for figure, path in zip(plots.values(), paths, strict=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    report.save_png(figure, path)
  return paths


def known(results: Results, key: str) -> str:
  """The different values of a field of the results, such as their commits."""
  found = sorted({str(kept["result"][key]) for kept in results.values()})
  return ", ".join(found) or units.MISSING


def failures(results: Results) -> str:
  """A line for each run that failed, with its error."""
  return "".join(
    f"- {name} failed: {kept['result']['error']}\n"
    for name, kept in results.items()
    if kept["result"]["status"] == "failed"
  )
