"""A study whose runs end at once, with losses that a test chooses."""

import dataclasses
import math
import pathlib

import pytest

from tests import tiny
from vqjax import DenseHead
from vqjax.lab.config import FROM_TOKENIZER, config_hash
from vqjax.lab.run_files import read_result
from vqjax.lab.study import jobs, tuning, work
from vqjax.lab.training import NotFiniteError
from vqjax.lm import records

COSTS = {
  "start_seconds": 4.0,
  "step_seconds": 0.5,
  "valid_seconds": 2.0,
  "test_seconds": 1.0,
  "draw_seconds": 0.001,
}

FILE = """\
import pathlib

from tests import tiny
from vqjax import CodebookHead, DenseHead
from vqjax.lab.study import Row, Study


def study():
  base = tiny.experiment(pathlib.Path("text"), DenseHead(0, 16))
  return Study(
    base=base,
    rows={
      "dense": {},
      "codebook": {"model.head": lambda base: CodebookHead(0, base.model.dim, 8)},
      "wild": Row(label="too fast", tune={"train.learning_rate": (1e3, 1e4)}),
    },
    tune={"train.learning_rate": (1e-3, 2e-3, 4e-3)},
    seeds=3,
  )
"""


@dataclasses.dataclass
class Fitted:
  """Fake trainings.

  Attributes:
    nats: experiment -> test loss, or None where it diverges.
    runs: (name, seed, steps, whether the test text was read) of each training.
  """

  nats: object
  runs: list


@pytest.fixture
def base(tmp_path):
  """A tiny experiment, which no test trains."""
  return tiny.experiment(tmp_path / "text", DenseHead(FROM_TOKENIZER, 16))


@pytest.fixture
def fitted(tmp_path, monkeypatch):
  """The trainings of a study in the file study.py of the current folder."""
  monkeypatch.chdir(tmp_path)
  pathlib.Path("study.py").write_text(FILE)
  # The rate 2e-3 is the best, and a codebook is 0.1 nats worse.
  rate = lambda run: abs(math.log(run.train.learning_rate / 2e-3))
  worse = lambda run: {"dense": 0.0, "codebook": 0.1}.get(run.name)
  made = Fitted(lambda run: None if worse(run) is None else 3 + worse(run) + rate(run), [])

  def fit(run, folder, test=True, source=None, identified=None):
    folder = pathlib.Path(folder)
    kept = read_result(folder)
    if kept and kept["status"] == "finished":
      return
    made.runs.append((run.name, run.seed, run.train.steps, test))
    folder.mkdir(parents=True, exist_ok=True)
    nats = made.nats(run)
    identity = {"config_hash": config_hash(identified or run), "seed": run.seed}
    identity |= {"commit": "c0ffee"}
    identity |= {"date": "2026-01-01T00:00:00", "device": "a CPU", "versions": {"jax": "0.10"}}
    if nats is None:
      result = {"status": "failed", "error": "the loss is nan", **identity}
      records.write(folder / "result.json", result)
      raise NotFiniteError("the loss is nan")
    score = {"nats_per_token": nats, "perplexity": math.exp(nats)}
    size = 100 if run.name == "dense" else 10
    result = {
      "status": "finished",
      **identity,
      "valid": score,
      "test": score if test else None,
      "head": {"state_bytes": size, "tied": False},
      "embedding": {"state_bytes": 1000, "shipped_bytes": 1000},
      "train": {"step_seconds": 0.25, "seconds": 10.0},
    }
    records.write(folder / "result.json", result)

  monkeypatch.setattr(jobs, "fit", fit)
  monkeypatch.setattr(tuning, "fit", fit)
  monkeypatch.setattr(work, "measure_costs", lambda run: COSTS)
  return made
