"""Runs that begin with a part of another run, or with its table."""

import dataclasses
import functools
import pathlib
import tempfile

import jax
import numpy as np
import pytest

from experiments.studies.dpq.starts import FromPart, FromTable
from tests import jitted, tiny
from vqjax import (
  DenseEmbedding,
  DenseHead,
  EncoderQuantizer,
  GuidedEmbedding,
  ProductEmbedding,
  SoftmaxQuantizer,
  convert,
)
from vqjax.convert import part_of
from vqjax.lab.config import FROM_TOKENIZER as V
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.run_folder import load_text
from vqjax.lm.models import Transformer

D = 8


TEXT = functools.cache(lambda: str(tiny.write_text(pathlib.Path(tempfile.mkdtemp(), "text"))))
"""() -> a folder of text for all runs of this module."""


def experiment(embedding, init_from=None, vocab=60):
  return Experiment(
    name="x",
    model=Transformer(embedding, DenseHead(V, D), D, layers=1, heads=2, context=8),
    data=Text(TEXT(), valid_fraction=0.2, test_fraction=0.2),
    tokenizer=WordTokenizer(vocab=vocab),
    loader=Windows(),
    train=Train(steps=2, batch=8, eval_every=2, save_every=2),
    init_from=init_from,
  )


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
  """The folder of a run with a dense embedding."""
  folder = tmp_path_factory.mktemp("dense")
  fit(experiment(DenseEmbedding(V, D)), folder)
  return folder


def table_of(folder):
  return np.asarray(read_run_variables(folder)[0]["params"]["embedding"]["weight"])


@pytest.mark.slow
def test_a_guided_embedding_learns_the_table(dense, tmp_path):
  embedding = GuidedEmbedding(V, D, DenseEmbedding(V, D), weight=100.0)
  start = FromTable(str(dense), convert.Guide())
  run = experiment(embedding, start)
  more = dataclasses.replace(run.train, steps=200, learning_rate=3e-2)
  more = dataclasses.replace(more, eval_every=200, save_every=200)
  fit(dataclasses.replace(run, train=more), tmp_path / "run")
  own = read_run_variables(tmp_path / "run")[0]
  table = table_of(dense)
  np.testing.assert_array_equal(own["guide"]["embedding"]["table"], table)
  far = np.abs(np.asarray(own["params"]["embedding"]["student"]["weight"]) - table).mean()
  assert far < 0.3 * np.abs(table).mean()


@pytest.mark.slow
def test_codes_rebuild_the_table_and_training_keeps_them(dense, tmp_path):
  network = EncoderQuantizer(
    8, 4, D, additive=True, normalize=False, gumbel=1.0, forward_temperature=1.0
  )
  codes = convert.LearnedCodes(network, steps=500)
  embedding = ProductEmbedding(V, D, 8, 4, additive=True)
  start = FromTable(str(dense), codes)
  text, variables, _ = tiny.begun(experiment(embedding, start))
  own, table = text.experiment.model.embedding, table_of(dense)
  found = jitted.apply(own, part_of(variables, "embedding"), method="table")
  assert ((found - table) ** 2).sum() < 0.8 * ((table - table.mean(axis=0)) ** 2).sum()
  fit(experiment(embedding, start), tmp_path / "run")
  trained = read_run_variables(tmp_path / "run")[0]
  kept = variables["codes"]["embedding"]["codes"]
  np.testing.assert_array_equal(trained["codes"]["embedding"]["codes"], kept)


@pytest.mark.slow
def test_an_embedding_that_does_not_fit_its_fill_is_refused(dense):
  network = SoftmaxQuantizer(4, 2, D)
  guide = FromTable(str(dense), convert.Guide())
  for start, embedding, message in (
    (guide, DenseEmbedding(V, D), "must be a GuidedEmbedding; got a DenseEmbedding"),
    (
      FromTable(str(dense), convert.LearnedCodes(network, 1)),
      ProductEmbedding(V, D, 8, 2),
      r"\(4, 2, False, False\); got a ProductEmbedding with \(8, 2, False, False\)",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      tiny.begun(experiment(embedding, start))
  text = load_text(experiment(DenseEmbedding(V, D), guide))
  vocab = text.experiment.model.embedding.vocab
  narrow = GuidedEmbedding(vocab, 4, DenseEmbedding(vocab, 4))
  model = Transformer(narrow, DenseHead(vocab, 4), 4, 1, 2, 8)
  with pytest.raises(ValueError, match=rf"shape \[{vocab}, 4\], .* got \[{vocab}, 8\]"):
    guide(text, model, {"params": {"embedding": {}}})


def test_a_run_may_begin_with_a_part_of_another(dense):
  other = read_run_variables(dense)[0]["params"]
  start = FromPart(str(dense), "blocks")
  text, begun, fresh = tiny.begun(experiment(DenseEmbedding(V, D), start))
  jax.tree.map(np.testing.assert_array_equal, begun["params"]["blocks"], other["blocks"])
  kept = {name: tree for name, tree in begun["params"].items() if name != "blocks"}
  jax.tree.map(np.testing.assert_array_equal, kept, {name: fresh["params"][name] for name in kept})
  with pytest.raises(ValueError, match=r"`part` must be one of .*; got 'encoder'"):
    FromPart(str(dense), "encoder")(text, text.experiment.model, fresh)
