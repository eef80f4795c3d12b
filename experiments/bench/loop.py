"""How much time does the training loop add to the bare step?"""

import statistics
import tempfile
import time
import warnings
from pathlib import Path

import jax
from rich.console import Console

from vqjax.lab.config import load, override
from vqjax.lab.training import fit
from vqjax.lab.training.program import Program
from vqjax.lab.training.provenance import device
from vqjax.lab.training.run import load_text
from vqjax.sharding import make_mesh

CONFIG = Path(__file__).parents[1] / "configs" / "lm_codebook.py"
STEPS = 150


def bare_seconds(experiment) -> float:
  """Time of a step alone, on batches that are already in memory, without reading a metric."""
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


def loop_seconds(experiment) -> float:
  """Time of a step in a real run, with loader, metrics and progress bar."""
  with tempfile.TemporaryDirectory() as folder:
    result = fit(experiment, Path(folder))
  return result["train"]["step_seconds"]


def main() -> None:
  """Prints the median overhead of runs that alternate with the bare step."""
  warnings.simplefilter("ignore")
  # Nothing is evaluated or saved before the end, where the clock has stopped.
  far = [f"train.{name}={10**6}" for name in ("eval_every", "save_every")]
  experiment = override(load(CONFIG), [f"train.steps={STEPS}", *far])
  ratios = []
  for _ in range(5):
    bare, whole = bare_seconds(experiment), loop_seconds(experiment)
    ratios.append(whole / bare)
  step = bare * 1e3
  Console().print(
    f"loop over bare step, median of 5 runs of {STEPS} steps of {step:.1f} ms each:"
    f" {100 * (statistics.median(ratios) - 1):+.1f} % time ({device()})",
    highlight=False,
  )


if __name__ == "__main__":
  main()
