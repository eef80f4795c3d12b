"""Tuning of a row by successive halving on validation, as jobs of a study.

Every candidate trains for an eighth of the row's steps; the best third of them, at least two, train
again, from the start, for a quarter of the steps; the lowest validation loss of that round chooses.
A shortened run has a whole schedule, so that candidates are compared at the end of their learning
rates.
"""

import dataclasses
import itertools
import math
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from vqjax.lab.config import Experiment, Train, config_hash, with_fields
from vqjax.lab.study.jobs import StudyJob, origin, values_identity
from vqjax.lab.training import SGD, NotFiniteError, fit
from vqjax.lab.training.run_folder import read_result

__all__ = ["ROUNDS", "SearchSpace", "kept_candidates", "shortened", "stretched", "tuned", "tuning"]

ROUNDS = 8, 4
"""Parts of the row's steps in the rounds; each round keeps a third of its candidates, and two."""


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


def tuning(
  name: str, label: str, experiment: Experiment, space: SearchSpace, folder: str | pathlib.Path
) -> StudyJob:
  """Job that chooses the fields of an experiment on its validation split.

  The result holds `chosen` (field -> value), `trials` (one for each run: its fields, steps and
  validation loss in nats a token; None where it diverged) and the `seconds` of all of them. Where
  every candidate diverges its status is "failed".

  Args:
    name: name of the job.
    label: its label in lists.
    experiment: the row's experiment, with its full number of steps.
    space: what is tried.
    folder: folder of the trials' runs, one for each candidate and round; their checkpoints are
      removed once they have a result.
  """
  folder = pathlib.Path(folder)

  def make() -> dict[str, Any]:
    left, trials = space.candidates(), []
    # One candidate needs no trial.
    for part in ROUNDS if len(left) > 1 else ():
      scores = []
      for fields in left:
        trial = _trial(with_fields(shortened(experiment, part), fields), folder)
        trials.append({"fields": fields, **trial})
        scores.append(math.inf if trial["valid"] is None else trial["valid"])
      order = sorted(range(len(left)), key=scores.__getitem__)
      left = [left[i] for i in order[: kept_candidates(len(left))]]
    result = origin(identity())
    if trials and min(scores) == math.inf:
      error = "every candidate diverged. Give lower values"
      print(f"{name} failed: {error}", file=sys.stderr)
      result |= {"status": "failed", "error": error}
    seconds = sum(trial["seconds"] for trial in trials)
    return {"result": result, "chosen": left[0], "trials": trials, "seconds": seconds}

  def identity() -> str:
    tried = {field: list(values) for field, values in space.values.items()}
    return values_identity([config_hash(experiment), tried, ROUNDS])

  return StudyJob(name, label, identity, make)


def kept_candidates(count: int) -> int:
  """Candidates that a round keeps of `count`: two at least, or the next would choose nothing."""
  return max(2, count // 3)


def _trial(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  run = folder / config_hash(experiment)
  try:
    fit(experiment, run, test=False)
  except NotFiniteError as error:
    print(f"{run.name} diverged: {error}", file=sys.stderr)
  result = read_result(run)
  # The result stays: a tuning that was stopped does not repeat its trials.
  shutil.rmtree(run / "checkpoints", ignore_errors=True)
  valid = result["valid"]["nats_per_token"] if result["status"] == "finished" else None
  seconds = result.get("train", {}).get("seconds") or 0.0
  return {"steps": experiment.train.steps, "valid": valid, "seconds": seconds}


def tuned(
  job: Callable[[Experiment], StudyJob],
  experiment: Experiment,
  before: StudyJob,
  chosen: Callable[[], Mapping[str, float] | None],
) -> StudyJob:
  """The job of a row whose fields are those that its tuning chose.

  Args:
    job: experiment -> the job of the row.
    experiment: the row's experiment.
    before: the tuning.
    chosen: () -> what it chose; None before it has a result.
  """
  plain = job(experiment)

  def now() -> StudyJob | None:
    fields = chosen()
    return None if fields is None else job(with_fields(experiment, fields))

  def identity() -> str:
    own = now()
    return "" if own is None else own.identity()

  def make() -> dict[str, Any]:
    return now().make()

  return dataclasses.replace(plain, identity=identity, make=make, needs=(*plain.needs, before.name))
