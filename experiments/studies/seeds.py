"""What do the kept results of a row say over its seeds?"""

import dataclasses
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.studies.study import Results


@dataclasses.dataclass(frozen=True)
class Spread:
  """A number over seeds.

  Attributes:
    mean: over the seeds that there are.
    deviation: of the sample; None for one seed.
    seeds: how many there are.
  """

  mean: float
  deviation: float | None
  seeds: int

  @classmethod
  def of(cls, values: Sequence[float]) -> "Spread | None":
    """None for no value."""
    if not values:
      return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return cls(statistics.fmean(values), deviation, len(values))

  def show(self, digits: int, sign: str = "") -> str:
    """As "158.2 ± 0.4"."""
    mean = f"{self.mean:{sign},.{digits}f}"
    return mean if self.deviation is None else f"{mean} ± {self.deviation:,.{digits}f}"


def seeds(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """What is kept of a row "ptb/full", by seed."""
  form = re.compile(re.escape(name) + r"(?:-s(\d+))?")
  matches = ((form.fullmatch(run), kept) for run, kept in results.items())
  return {int(match[1] or 0): kept for match, kept in matches if match}


def finished(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The results of a row's finished runs, by seed."""
  found = {seed: kept["result"] for seed, kept in seeds(results, name).items()}
  return {seed: row for seed, row in found.items() if row["status"] == "finished"}
