"""What do the tests of conversions convert: a tiny dense decoder, trained for some steps?"""

import dataclasses
import os

import pytest

from vqjax import DenseEmbedding, DenseHead
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import Text, Windows, WordTokenizer
from vqjax.models import Transformer
from vqjax.sharding import MeshShape
from vqjax.training import fit


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
  """A dense experiment and the folder of its finished run."""
  root = tmp_path_factory.mktemp("dense")
  folder = root / "text"
  folder.mkdir()
  for i in range(12):
    words = [f"w{(7 * j * j + i * j) % 53}" for j in range(200)]
    (folder / f"{i:02}.txt").write_text(" ".join(words) + ".\n")
  experiment = Experiment(
    name="dense",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16),
      head=DenseHead(FROM_TOKENIZER, 16),
      dim=16,
      layers=1,
      heads=2,
      context=8,
    ),
    data=Text(str(folder), valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(),
    loader=Windows(),
    train=Train(
      steps=40,
      batch=4,
      learning_rate=1e-2,
      warmup=5,
      eval_every=40,
      save_every=40,
      mesh=MeshShape(data=1),
    ),
  )
  before = os.environ.get("VQJAX_CACHE")
  os.environ["VQJAX_CACHE"] = str(root / "cache")
  try:
    fit(experiment, root / "run")
  finally:
    os.environ.pop("VQJAX_CACHE")
    if before is not None:
      os.environ["VQJAX_CACHE"] = before
  return experiment, root / "run"


@pytest.fixture
def short(dense):
  """The settings of a fine-tuning of two steps."""
  return dataclasses.replace(dense[0].train, steps=2, warmup=1, eval_every=2, save_every=2)
