"""What do the tests of training train: a tiny decoder on a tiny, repetitive text?"""

import pytest

from vqjax import CodebookHead, DenseEmbedding
from vqjax.config import FROM_TOKENIZER, Experiment, Train
from vqjax.data import Text, Windows, WordTokenizer
from vqjax.models import Transformer
from vqjax.sharding import MeshShape


@pytest.fixture
def text_folder(tmp_path):
  """Twelve documents with about sixty different words."""
  folder = tmp_path / "text"
  folder.mkdir()
  for i in range(12):
    words = [f"w{(7 * j * j + i * j) % 53}" for j in range(200)]
    (folder / f"{i:02}.txt").write_text(" ".join(words) + ".\n")
  return folder


@pytest.fixture
def experiment(text_folder):
  """Forty steps of a codebook decoder that learns in seconds."""
  return Experiment(
    name="tiny",
    model=Transformer(
      embedding=DenseEmbedding(FROM_TOKENIZER, 16),
      head=CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True),
      dim=16,
      layers=1,
      heads=2,
      context=8,
      dropout=0.1,
    ),
    data=Text(str(text_folder), valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(),
    loader=Windows(),
    train=Train(
      steps=40,
      batch=4,
      learning_rate=1e-2,
      warmup=5,
      log_every=1,
      eval_every=20,
      save_every=10,
      keep=2,
      mesh=MeshShape(data=1),
    ),
  )
