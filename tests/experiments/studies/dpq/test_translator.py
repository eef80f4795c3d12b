"""The translator: causal, blind to padding, and able to learn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.studies.dpq.models.translator import Translator, sinusoids
from experiments.studies.dpq.translation import translate
from tests.jitted import apply, init, make_step
from vqjax import DenseEmbedding, DenseHead, DPQEmbedding, SoftmaxQuantizer
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.training.step import state_maker

V, D, T, EOS = 17, 16, 7, 0


def translator(**options):
  fields = {
    "embedding": DenseEmbedding(V, D),
    "head": DenseHead(V, D),
    "dim": D,
    "layers": 2,
    "heads": 2,
    "context": T,
    "hidden": 32,
  }
  return Translator(**(fields | options))


@pytest.fixture
def inputs():
  source, target = np.random.default_rng(1).integers(1, V, (2, 3, T)).astype(np.int32)
  source[1, 4:] = source[2, 1:] = target[1, 5:] = NONE
  target[:, 0] = EOS
  return {"source": source, "target": target}


def initialised(model, inputs):
  return init(model, jax.random.key(0), inputs, inputs["target"], method="loss_terms")


@pytest.mark.slow
def test_a_position_depends_on_earlier_tokens_of_its_target_and_on_no_padding(inputs):
  model = translator()
  variables = initialised(model, inputs)
  hidden = lambda inputs: apply(model, variables, inputs, method="hidden_and_terms")[0]
  before, later = hidden(inputs), {**inputs, "target": inputs["target"].copy()}
  later["target"][0, 4] = 9
  after = hidden(later)
  np.testing.assert_array_equal(before[0, :4], after[0, :4])
  assert (np.asarray(before[0, 4:]) != np.asarray(after[0, 4:])).any(axis=-1).all()
  short = {"source": inputs["source"][1:2, :4], "target": inputs["target"][1:2]}
  np.testing.assert_allclose(before[1, :5], hidden(short)[0, :5], atol=1e-5)
  changed = {**inputs, "source": inputs["source"].copy()}
  changed["source"][0, 6] = 3
  assert np.any(hidden(changed)[0] != before[0])


@pytest.mark.slow
def test_it_learns_to_reverse_and_beam_search_finds_the_reversed_source():
  quantized = DPQEmbedding(V, D, SoftmaxQuantizer(8, 4, D))
  head = DenseHead(V, D, label_smoothing=0.05)
  model = translator(embedding=quantized, head=head, layers=1, heads=4, hidden=64)
  rule = optax.adam(5e-3)
  row = jax.ShapeDtypeStruct((32, T), jnp.int32)
  shapes = {"inputs": {"source": row, "target": row}, "targets": row}
  state = state_maker(model, rule, shapes)(jax.random.key(0))
  step = make_step(model, rule, lambda count: 5e-3, jax.random.key(1))
  draw = np.random.default_rng(0)
  for _ in range(300):
    state, metrics = step(state, reversed_pairs(draw, 32))
  assert metrics["loss"] < 0.3
  batch = reversed_pairs(draw, 20)
  search = jax.jit(lambda v, source: translate(model, v, source, EOS, beams=3))
  found = np.asarray(search(state.variables, batch["inputs"]["source"]))
  wanted = np.where(batch["targets"] == EOS, NONE, batch["targets"])
  assert (found == wanted).all(axis=1).mean() > 0.8


def reversed_pairs(draw, rows):
  source = np.full((rows, T), NONE, np.int32)
  target, targets = source.copy(), source.copy()
  for row in range(rows):
    words = draw.integers(1, V, draw.integers(1, 4))
    n = len(words)
    source[row, : n + 1] = [*words, EOS]
    targets[row, : n + 1] = [*words[::-1], EOS]
    target[row, : n + 1] = [EOS, *words[::-1]]
  return {"inputs": {"source": source, "target": target}, "targets": targets}


def test_positions_are_those_of_the_paper():
  table = sinusoids(5, 6)
  np.testing.assert_allclose(table[3, 0], np.sin(3.0), rtol=1e-6)
  np.testing.assert_allclose(table[3, 5], np.cos(3.0 / 10_000), rtol=1e-6)
  assert sinusoids(4, 5).shape == (4, 5)


def test_fields_that_do_not_fit_are_named(inputs):
  for options, message in (
    ({"heads": 3}, "`heads` must divide dim 16; got 3"),
    ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\); got 1.0"),
    ({"head": DenseHead(V, 8)}, "`head` must have the model's dim 16; got 8"),
  ):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(functools.partial(initialised, translator(**options)), inputs)
