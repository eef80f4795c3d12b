"""What a run costs: a measured step, evaluation and draw, and the seconds of the jobs left."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from vqjax.lab.config import Experiment
from vqjax.lab.study.tuning import rounds_of
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

__all__ = ["measure_costs", "run_seconds", "tuning_seconds"]

STEPS = 5
"""Steps whose median is taken."""


def measure_costs(experiment: Experiment) -> dict[str, float | None]:
  """Seconds of the parts of a run.

  Returns:
    `start_seconds` (until the first step has ended: text, compilation), `step_seconds`,
    `valid_seconds` and `test_seconds` (an evaluation of the split; of the test split nothing is
    read but its length) and `draw_seconds` (a token at batch 1 from a hidden state; None for a
    model without a head).
  """
  began = time.perf_counter()
  text = load_text(experiment)
  run = text.experiment
  program = Program(run, make_mesh(run.train.mesh))
  size = {"batch": run.train.batch, "context": run.model.context}
  init_key, draw_key = keys(run.seed)
  state = program.init(init_key)
  if run.init_from is not None:
    state = program.begin(run.init_from(text, run.model, state.variables))
  batches = run.loader.batches(text.splits["train"], seed=run.seed, rows=program.rows, **size)
  state, metrics = program.step(state, program.place(next(batches)))
  jax.block_until_ready(metrics)
  start, steps = time.perf_counter() - began, []
  for batch in itertools.islice(batches, STEPS):
    began = time.perf_counter()
    state, metrics = program.step(state, program.place(batch))
    jax.block_until_ready((state, metrics))
    steps.append(time.perf_counter() - began)
  micro = {**size, "batch": program.micro}
  count = lambda split: sum(1 for _ in run.loader.whole(text.splits[split], **micro))
  first = program.place_whole(next(iter(run.loader.whole(text.splits["valid"], **micro))))
  evaluation = _median_seconds(lambda: program.scorer(state.variables, first))
  return {
    "start_seconds": start,
    "step_seconds": statistics.median(steps),
    "valid_seconds": evaluation * count("valid"),
    "test_seconds": evaluation * count("test"),
    "draw_seconds": _draw_seconds(program.model, state.variables, draw_key),
  }


def _draw_seconds(model: Any, variables: Mapping[str, Any], key: jax.Array) -> float | None:
  head = getattr(model, "head", None)
  if head is None:
    return None
  hidden = jax.random.normal(key, (1, head.dim))
  draw = jax.jit(
    lambda variables, hidden: model.apply(
      variables, hidden, key, method=lambda model, *given: model.head.sample(*given)
    )
  )
  return _median_seconds(lambda: draw(variables, hidden))


def _median_seconds(call: Callable[[], Any], repeats: int = 5) -> float:
  """The median time of a call, after a first one that compiles."""
  jax.block_until_ready(call())
  times = []
  for _ in range(repeats):
    began = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - began)
  return statistics.median(times)


def run_seconds(costs: Mapping[str, float], steps: int, evaluations: int = 1) -> float:
  """Seconds of a run of so many steps, which scores the test split at its end."""
  evaluated = (evaluations + 1) * costs["valid_seconds"] + costs["test_seconds"]
  return costs["start_seconds"] + steps * costs["step_seconds"] + evaluated


def tuning_seconds(
  costs: Mapping[str, float], steps: int, candidates: int, rounds: Sequence[int], further: int = 0
) -> float:
  """Seconds of a tuning of so many candidates, and `further` ones, for runs of so many steps."""
  trial = lambda part: run_seconds({**costs, "test_seconds": 0.0}, max(1, steps // part))
  trained = [*rounds_of(candidates, rounds), (rounds[-1], further)]
  return sum(count * trial(part) for part, count in trained)
