"""Numbers over the seeds of a row: their spread, paired differences, and what is missing."""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import scipy.stats

__all__ = [
  "Interval",
  "Results",
  "Spread",
  "failures",
  "finished_results",
  "origins",
  "paired",
  "results_by_seed",
]

Results = Mapping[str, Mapping[str, Any]]
"""Name of a job -> its kept result and the measurements beside it."""


@dataclasses.dataclass(frozen=True)
class Spread:
  """A number over seeds.

  Attributes:
    mean: mean over the seeds.
    deviation: sample standard deviation over the seeds; None for one seed.
    seeds: number of seeds.
  """

  mean: float
  deviation: float | None
  seeds: int

  @classmethod
  def of(cls, values: Sequence[float]) -> "Spread | None":
    """The spread of `values`; None if they are empty."""
    if not values:
      return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return cls(statistics.fmean(values), deviation, len(values))

  def show(self, digits: int, sign: str = "") -> str:
    """Text such as "158.2 ± 0.4"."""
    show = lambda x, sign="": f"{x:{sign},.{digits}f}" if abs(x) < 1e9 else f"{x:{sign}.1e}"
    mean = show(self.mean, sign)
    return mean if self.deviation is None else f"{mean} ± {show(self.deviation)}"


class Interval(NamedTuple):
  """A paired difference of perplexities in per cent, with its 95 % interval.

  Attributes:
    mean: exp of the mean difference in nats, minus 1.
    low: lower end of the interval of Student's t over the seeds; None for one seed.
    high: upper end; None for one seed.
  """

  mean: float
  low: float | None = None
  high: float | None = None

  @classmethod
  def of(cls, nats: Sequence[float]) -> "Interval | None":
    """The interval of differences in nats a token over the seeds; None without any."""
    if not nats:
      return None
    # exp(710) is infinite; the losses of a row that has all but diverged may differ by more.
    per_cent = lambda x: 100 * math.expm1(min(x, 700.0))
    mean = statistics.fmean(nats)
    if len(nats) == 1:
      return cls(per_cent(mean))
    error = statistics.stdev(nats) / math.sqrt(len(nats))
    half = error * scipy.stats.t.ppf(0.975, len(nats) - 1)
    return cls(per_cent(mean), per_cent(mean - half), per_cent(mean + half))

  def verdict(self, margin: float) -> str | None:
    """ "equal", "better" or "worse" if the interval shows it; None otherwise.

    Args:
      margin: per cent of perplexity within which two rows count as equal.
    """
    if self.low is None:
      return None
    if self.low >= -margin and self.high <= margin:
      return "equal"
    if self.high < 0:
      return "better"
    return "worse" if self.low > 0 else None

  def __str__(self) -> str:
    # Not the hundreds of digits of a row that has all but diverged.
    show = lambda x: f"{x:+.1f}" if abs(x) < 1e6 else f"{x:+.1e}"
    ends = "" if self.low is None else f" ({show(self.low)} to {show(self.high)})"
    return f"{show(self.mean)}{ends}"


def paired(own: Mapping[int, float], other: Mapping[int, float]) -> Interval | None:
  """The difference of two rows in nats a token by seed, over the seeds that both have."""
  return Interval.of([own[seed] - other[seed] for seed in sorted(own.keys() & other)])


def results_by_seed(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The kept results of a job "dense/run", by seed; "dense/run-s1" is that of seed 1."""
  form = re.compile(re.escape(name) + r"(?:-s(\d+))?")
  matches = ((form.fullmatch(job), kept) for job, kept in results.items())
  return {int(match[1] or 0): kept for match, kept in matches if match}


def finished_results(results: Results, name: str) -> dict[int, Mapping[str, Any]]:
  """The "result" of a row's finished runs, by seed."""
  rows = {seed: kept["result"] for seed, kept in results_by_seed(results, name).items()}
  return {seed: row for seed, row in rows.items() if row["status"] == "finished"}


def origins(results: Results) -> str:
  """Sentences on the number, days, devices and commits of the results; their lines have each."""
  kept = [row["result"] for row in results.values()]
  if not kept:
    return "No results."
  distinct = lambda values: ", ".join(sorted(set(values)))
  days = sorted(row["date"][:10] for row in kept)
  commits = {commit.removesuffix("+") for row in kept if (commit := row["commit"])}
  made = f"{len(commits)} commit{'s' * (len(commits) > 1)}" if commits else "an installed vqjax"
  jax = distinct(row["versions"]["jax"] for row in kept if "versions" in row)
  uncommitted = sum((row["commit"] or "").endswith("+") for row in kept)
  days = " to ".join(dict.fromkeys((days[0], days[-1])))
  devices = " and ".join(sorted({row["device"] for row in kept}))
  return (
    f"{len(kept)} results of {made}, {days}, on {devices}, with jax {jax};"
    " results.jsonl has each commit"
    + (f", with a + after the {uncommitted} of uncommitted changes." if uncommitted else ".")
  )


def failures(results: Results) -> str:
  """A list of the failed runs with their errors; empty if none failed."""
  failed = (kept for kept in results.values() if kept["result"]["status"] == "failed")
  return "".join(f"- {kept['name']} failed: {kept['result']['error']}\n" for kept in failed)
