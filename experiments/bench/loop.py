"""Benchmark of the training loop against its bare step."""

import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from experiments.bench import measure
from vqjax.lab.config import Experiment, load_config, override
from vqjax.lab.training import fit
from vqjax.lab.training.program import Program
from vqjax.lab.training.provenance import device
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import make_mesh

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "lm_codebook.py"


def run(quick: bool) -> Iterator[dict[str, Any]]:
  """Print the median overhead of runs that alternate with the bare step."""
  steps, rounds = (2, 1) if quick else (150, 5)
  # Nothing is evaluated or saved before the end, where the clock has stopped.
  fields = [f"train.steps={steps}", f"train.eval_every={10**6}", f"train.save_every={10**6}"]
  if quick:
    fields += ["data.valid_fraction=0.001", "data.test_fraction=0.001", "model.layers=1"]
  experiment = override(load_config(CONFIG), fields)
  pairs = []
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _ in range(rounds):
      pairs.append((bare_seconds(experiment), loop_seconds(experiment)))
  overhead = statistics.median(loop / bare for bare, loop in pairs) - 1
  measure.say(
    f"loop over bare step, median of {rounds} runs of {steps} steps of {pairs[-1][0] * 1e3:.1f} ms:"
    f" {100 * overhead:+.1f} % time ({device()})"
  )
  yield {"steps": steps, "seconds": pairs, "overhead": overhead}


def bare_seconds(experiment: Experiment) -> float:
  """Seconds of a step on batches in memory, without reading a metric."""
  text = load_text(experiment)
  experiment, train = text.experiment, text.experiment.train
  program = Program(experiment, make_mesh(train.mesh))
  state = program.init(jax.random.key(0))
  loader = experiment.loader.batches(
    text.splits["train"], batch=train.batch, context=experiment.model.context, seed=0
  )
  batches = [program.place(next(loader)) for _ in range(8)]
  state, _ = jax.block_until_ready(program.step(state, batches[0]))
  start = time.perf_counter()
  for index in range(train.steps):
    state, _ = program.step(state, batches[index % 8])
  jax.block_until_ready(state)
  return (time.perf_counter() - start) / train.steps


def loop_seconds(experiment: Experiment) -> float:
  """Seconds of a step in a run with its loader, metrics and progress bar."""
  with tempfile.TemporaryDirectory() as folder:
    return fit(experiment, pathlib.Path(folder))["train"]["step_seconds"]
