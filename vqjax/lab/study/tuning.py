"""Tuning of a row by successive halving on validation, as jobs of a study.

Every candidate trains for an eighth of the row's steps; the best third of them, at least two, train
again, from the start, for a quarter of the steps; the lowest validation loss of that round chooses.
Two candidates train for the quarter alone. A study may have other rounds.
A shortened run has a whole schedule, so that candidates are compared at the end of their learning
rates. Where the winner lies at an edge of a field's values, the next value beyond it is tried for
the steps of the last round too, at most twice a field.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from vqjax.lab.config import Experiment, Train, config_hash, with_fields
from vqjax.lab.run_files import read_result
from vqjax.lab.study.jobs import StudyJob, origin, values_identity
from vqjax.lab.training import SGD, NotFiniteError, fit

__all__ = [
  "EXTENSIONS",
  "ROUNDS",
  "SearchSpace",
  "Tuning",
  "rounds_of",
  "shortened",
  "stretched",
]

ROUNDS = 8, 4
"""The usual rounds: each trains for one over its number of the row's steps. It keeps a third of its
candidates, and two at least."""

EXTENSIONS = 2
"""Values beyond those of a field that a tuning tries at most."""


@dataclasses.dataclass(frozen=True)
class SearchSpace:
  """The values that a tuning tries.

  Attributes:
    values: dotted field of the experiment -> its candidates; all combinations are tried.
  """

  values: Mapping[str, tuple[float, ...]]

  def candidates(self) -> list[dict[str, float]]:
    """All combinations, as fields and values."""
    return [dict(zip(self.values, one)) for one in itertools.product(*self.values.values())]

  def extended(self, further: Mapping[str, Iterable[float]]) -> "SearchSpace":
    """The space with further values of some fields."""
    return SearchSpace({name: (*vs, *further.get(name, ())) for name, vs in self.values.items()})

  def edged(self) -> list[str]:
    """The fields that have edges: those of several numbers."""
    return [field for field in self.values if len(self._numbers(field)) > 1]

  def _numbers(self, field: str) -> list[float]:
    return sorted({v for v in self.values[field] if type(v) in (int, float)})

  def edge(self, field: str, value: Any) -> str | None:
    """Name the edge, "smallest" or "largest", where a value is; None within or of one number.

    The smallest dropout, 0, is no edge: there is none beyond it.
    """
    tried = self._numbers(field)
    if len(tried) < 2 or value not in (tried[0], tried[-1]) or value == 0 == tried[0]:
      return None
    return "smallest" if value == tried[0] else "largest"

  def beyond(self, field: str, edge: str) -> float | None:
    """The value one step beyond an edge; None where there can be none.

    Steps are as the last one of the values: a ratio of positive numbers, such as learning rates; a
    difference for dropout, which stays in [0, 1), and for values with a 0.
    """
    tried = self._numbers(field)
    last, other = tried[:2] if edge == "smallest" else tried[:-3:-1]
    is_dropout = field.endswith("dropout")
    is_rate = tried[0] > 0 and not is_dropout
    value = last * last / other if is_rate else 2 * last - other
    value = max(value, 0.0) if tried[0] >= 0 else value
    if isinstance(last, int) and isinstance(other, int):
      value = round(value)
    else:
      value = float(f"{value:.6g}")  # 0.1 + 0.2 is 0.3
    is_outside = (is_dropout and value >= 1) or (is_rate and value == 0)
    return None if value in tried or is_outside else value


def stretched(train: Train, by: Fraction) -> Train:
  """The training with `by` times the steps, and a schedule as long."""
  times = lambda steps: max(1, int(steps * by))
  optimizer = train.optimizer
  if isinstance(optimizer, SGD):
    hold, every = int(optimizer.hold * by), times(optimizer.every)
    optimizer = dataclasses.replace(optimizer, hold=hold, every=every)
  return dataclasses.replace(
    train,
    steps=times(train.steps),
    warmup=int(train.warmup * by),
    optimizer=optimizer,
    eval_every=times(train.eval_every),
    save_every=times(train.save_every),
  )


def shortened(experiment: Experiment, part: int) -> Experiment:
  """The experiment with a `part`-th of its steps and schedule, evaluated and kept at the end."""
  train = stretched(experiment.train, Fraction(1, part))
  own = dataclasses.replace(train, eval_every=train.steps, save_every=train.steps, keep=1)
  return dataclasses.replace(experiment, train=own)


@dataclasses.dataclass(frozen=True)
class Tuning:
  """The choice of an experiment's fields on its validation split.

  Attributes:
    name: name of its job.
    label: the job's label in lists.
    experiment: the row's experiment, with its full number of steps.
    space: what is tried, of several candidates.
    folder: folder of the trials' runs, one for each candidate and round; their checkpoints are
      removed once they have a result.
    extensions: values beyond those of a field that are tried at most.
    rounds: as `Study.rounds`.
    identified: the experiment that identifies the tuning and its trials, as in `fit`; None:
      `experiment`.
  """

  name: str
  label: str
  experiment: Experiment
  space: SearchSpace
  folder: pathlib.Path
  extensions: int = 0
  rounds: Sequence[int] = ROUNDS
  identified: Experiment | None = None

  def job(self) -> StudyJob:
    """Return the job that makes every trial that is missing, and chooses.

    Its result holds `chosen` (field -> value), `trials` (one for each run: its fields, steps and
    validation loss in nats a token; None where it diverged), `extended` (field -> values beyond
    those of the space that were tried) and the `seconds` of all trials. Where every candidate
    diverges its status is "failed".
    """
    return StudyJob(self.name, self.label, self._identity, self._choose)

  def trials(self) -> list[StudyJob]:
    """Return a job for each trial of the rounds, for several processes; `job` finds their runs."""
    jobs: list[StudyJob] = []
    before: tuple[str, ...] = ()
    for at, (part, count) in enumerate(self._rounds):
      names = tuple(f"{self.name}-{part}-{place}" for place in range(count))
      for place, name in enumerate(names):
        trial = functools.partial(self._trial_of_round, at, place)
        jobs.append(StudyJob(name, "trial", str, trial, before))
      before = names
    return jobs

  def _trial_of_round(self, at: int, place: int) -> dict[str, Any]:
    left = self.space.candidates()
    for part, _ in self._rounds[:at]:
      left = _best(left, [_loss(self._trial(fields, part)) for fields in left])
    return self._trial(left[place], self._rounds[at][0])

  def _choose(self) -> dict[str, Any]:
    trials: list[dict[str, Any]] = []

    def loss(fields: Mapping[str, Any], part: int) -> float:
      trials.append(self._trial(fields, part))
      return _loss(trials[-1])

    left, best = self.space.candidates(), math.inf
    for part, _ in self._rounds:
      scores = [loss(fields, part) for fields in left]
      best, left = min(scores), _best(left, scores)
    chosen, extended, result = left[0], {}, origin(self._identity())
    if best < math.inf:
      chosen, extended = self._extended(chosen, best, lambda fields: loss(fields, self.rounds[-1]))
    else:
      error = "every candidate diverged. Give lower values"
      print(f"{self.name} failed: {error}", file=sys.stderr)
      result |= {"status": "failed", "error": error}
    seconds = sum(trial["seconds"] for trial in trials)
    beyond = {"extended": extended} if extended else {}
    return {"result": result, "chosen": chosen, "trials": trials, "seconds": seconds, **beyond}

  @property
  def _rounds(self) -> list[tuple[int, int]]:
    return rounds_of(len(self.space.candidates()), self.rounds)

  def _identity(self) -> str:
    tried = {field: list(values) for field, values in self.space.values.items()}
    further = [self.extensions] if self.extensions else []
    identified = config_hash(self.identified or self.experiment)
    return values_identity([identified, tried, tuple(self.rounds), *further])

  def _extended(
    self, chosen: dict[str, Any], best: float, measure: Callable[[Mapping[str, Any]], float]
  ) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The winner after values beyond the edges, and these values by their fields.

    Args:
      chosen: the winner of the space.
      best: its loss.
      measure: fields -> loss.
    """
    extended: dict[str, list[float]] = {}
    for field in self.space.values:
      for _ in range(self.extensions):
        now = self.space.extended(extended)
        edge = now.edge(field, chosen[field])
        value = None if edge is None else now.beyond(field, edge)
        if value is None or not _is_possible(self.experiment, fields := {**chosen, field: value}):
          break
        extended.setdefault(field, []).append(value)
        if (found := measure(fields)) < best:
          chosen, best = fields, found
    return chosen, extended

  def _trial(self, fields: Mapping[str, Any], part: int) -> dict[str, Any]:
    """Train a candidate for a part of the steps, unless it has a result; return what is kept."""
    of_trial = lambda experiment: with_fields(shortened(experiment, part), fields)
    experiment, identified = map(of_trial, (self.experiment, self.identified or self.experiment))
    run = self.folder / config_hash(identified)
    # A tuning that was stopped repeats no trial that has ended, nor do others beside it.
    if read_result(run) is None:
      try:
        fit(experiment, run, test=False, identified=identified)
      except NotFiniteError as error:
        print(f"{run.name} diverged: {error}", file=sys.stderr)
    result = read_result(run)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    valid = result["valid"]["nats_per_token"] if result["status"] == "finished" else None
    seconds = result.get("train", {}).get("seconds") or 0.0
    steps = experiment.train.steps
    return {"fields": dict(fields), "steps": steps, "valid": valid, "seconds": seconds}


def _loss(trial: Mapping[str, Any]) -> float:
  return math.inf if trial["valid"] is None else trial["valid"]


def _best(candidates: Sequence[dict[str, Any]], losses: Sequence[float]) -> list[dict[str, Any]]:
  """The candidates that a round keeps, the best first."""
  order = sorted(range(len(candidates)), key=losses.__getitem__)
  return [candidates[i] for i in order[: _kept(len(candidates))]]


def _is_possible(experiment: Experiment, fields: Mapping[str, Any]) -> bool:
  try:
    with_fields(experiment, fields)
  except ValueError:
    return False
  return True


def rounds_of(count: int, rounds: Sequence[int]) -> list[tuple[int, int]]:
  """The part of the row's steps, and the number of candidates, of each round for `count` of them.

  A round that would drop none is left out, but the last one.
  """
  found = []
  for part in rounds[:-1]:
    if (kept := _kept(count)) < count:
      found.append((part, count))
      count = kept
  return [*found, (rounds[-1], count)]


def _kept(count: int) -> int:
  """Candidates that a round keeps of `count`: two at least, or the next would choose nothing."""
  return max(2, count // 3)
