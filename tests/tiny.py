"""A tiny decoder on a tiny, repetitive text, for the tests that need a run."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from vqjax import DenseEmbedding, Head
from vqjax.embeddings import table_file
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lab.training import Interrupted, fit, loop
from vqjax.lab.training.program import Program
from vqjax.lab.training.run_folder import load_text
from vqjax.lm import records
from vqjax.lm.models import Transformer
from vqjax.sharding import MeshShape, make_mesh


def write_text(folder: pathlib.Path) -> pathlib.Path:
  """Writes twelve documents with about sixty different words into a new folder."""
  folder.mkdir()
  for i in range(12):
    words = [f"w{(7 * j * j + i * j) % 53}" for j in range(200)]
    (folder / f"{i:02}.txt").write_text(" ".join(words) + ".\n")
  return folder


def experiment(text: pathlib.Path, head: Head, dropout: float = 0.1, **train) -> Experiment:
  """Returns forty steps of a decoder of width 16, which learns in seconds."""
  settings = Train(
    steps=40,
    batch=4,
    learning_rate=1e-2,
    warmup=5,
    log_every=1,
    eval_every=20,
    save_every=10,
    keep=2,
    mesh=MeshShape(data=1),
  )
  return Experiment(
    name="tiny",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16),
      head=head,
      dim=16,
      layers=1,
      heads=2,
      context=8,
      dropout=dropout,
    ),
    data=Text(str(text), valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(),
    loader=Windows(),
    train=dataclasses.replace(settings, **train),
  )


def begun(run: Experiment) -> tuple:
  """Returns the text of a run, what `init_from` makes of random variables, and these."""
  text, draw = load_text(run), np.random.default_rng(0)
  shapes = Program(text.experiment, make_mesh(MeshShape(data=1))).abstract_state.variables

  def fresh(x):
    numbers = 0.1 * draw.normal(size=x.shape)
    return numbers.astype(x.dtype) if x.dtype == np.float32 else np.zeros(x.shape, x.dtype)

  variables = jax.tree.map(fresh, shapes)
  return text, run.init_from(text, text.experiment.model, variables), variables


@contextlib.contextmanager
def own_cache(folder: pathlib.Path):
  """Puts the token cache into a folder, for fixtures that outlive a test."""
  before = os.environ.get("VQJAX_CACHE")
  os.environ["VQJAX_CACHE"] = str(folder)
  try:
    yield
  finally:
    os.environ.pop("VQJAX_CACHE")
    if before is not None:
      os.environ["VQJAX_CACHE"] = before


def rows(folder: pathlib.Path) -> list[dict]:
  """Returns the rows of a run's metrics."""
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_rows(folder: pathlib.Path, rows: list[dict]) -> None:
  """Writes the metrics of a run as a run does."""
  lines, last = [], ""
  for row in rows:
    row = records.sealed(row, last)
    last = row[records.CHECKSUM]
    lines.append(records.dumps(row))
  (folder / "metrics.jsonl").write_text("".join(lines))


def fit_and_interrupt(run: Experiment, folder: pathlib.Path, steps: int) -> str:
  """Trains `steps` further steps, then stops as SIGINT would; returns the message."""
  steps_done = itertools.count(1)
  received = lambda: signal.SIGINT if next(steps_done) == steps else None
  handler = lambda: contextlib.nullcontext(received)
  with mock.patch.object(loop, "deferred_signals", handler), pytest.raises(Interrupted) as stop:
    fit(run, folder)
  return str(stop.value)


def with_new_checksum(path):
  """Gives a changed file the checksum that it would be saved with."""
  whole = path.read_bytes()
  before = whole[: whole.index(b'"checksum":"') + 12]
  after = whole[len(before) + 8 :]
  path.write_bytes(before + table_file.table_checksum(path).encode() + after)
