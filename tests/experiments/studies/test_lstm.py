"""The LSTM equals the equations of its paper, and continues a text across batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit

from experiments.studies.lstm import LSTM
from tests import reference
from tests.jitted import apply, init
from vqjax import CodebookHead, DenseEmbedding, DenseHead
from vqjax.lab.data import EvaluationBatches, EvaluationStreams, TokenSplit
from vqjax.lab.training import evaluate, make_scorer

V, D, B, T = 23, 6, 3, 10


def model(**changes):
  fields = {"embedding": DenseEmbedding(V, D), "head": DenseHead(V, D), "dim": D, "context": T}
  return LSTM(**fields | changes)


TOKENS = np.random.default_rng(1).integers(0, V, (B, T)).astype(np.int32)


def initialised(lstm):
  start = np.zeros((B, 4), np.int32)
  return init(lstm, jax.random.key(0), start, start, method="loss_terms")


def by_hand(variables, tokens):
  """Equations of Section 3 of Zaremba et al., one token after another, in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables["params"])
  layers = len(p["bias"])
  cell, out = np.zeros((layers, len(tokens), D)), np.zeros((layers, len(tokens), D))
  hidden = []
  for t in range(tokens.shape[1]):
    x = p["embedding"]["weight"][tokens[:, t]]
    for layer in range(layers):
      gates = x @ p["kernel_in"][layer] + out[layer] @ p["kernel_back"][layer] + p["bias"][layer]
      i, j, f, o = np.split(gates, 4, axis=-1)
      cell[layer] = expit(f) * cell[layer] + expit(i) * np.tanh(j)
      out[layer] = expit(o) * np.tanh(cell[layer])
      x = out[layer]
    hidden.append(x.copy())
  return np.stack(hidden, axis=1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("layers", [1, 3])
def test_hidden_vectors_without_a_carry_are_those_of_the_equations(layers):
  lstm = model(layers=layers)
  variables = initialised(lstm)
  both = lambda params: (
    lstm.apply({"params": params}, TOKENS, method="hidden"),
    lstm.apply({"params": params}, TOKENS, TOKENS, method="log_prob"),
  )
  hidden, log_prob = jax.jit(both)(variables["params"])
  exact = by_hand(variables, TOKENS)
  # Outputs are below 1, and their errors add up over 10 times with gates of 12 products.
  np.testing.assert_allclose(hidden, exact, atol=10 * 12 * 2**-24)
  weight = np.asarray(variables["params"]["head"]["weight"], np.float64)
  expected = reference.log_softmax(exact @ weight.T)
  expected = np.take_along_axis(expected, TOKENS[..., None], -1)[..., 0]
  np.testing.assert_allclose(log_prob, expected, atol=1e-5)


@pytest.mark.slow
def test_a_text_in_pieces_has_the_hidden_vectors_of_the_whole_text():
  lstm = model()
  variables = initialised(lstm)
  alone, carry, parts = {"params": variables["params"]}, {"carry": variables["carry"]}, []
  whole = apply(lstm, alone, TOKENS, method="hidden")
  for first, last in ((0, 4), (4, 5), (5, 10)):
    own = TOKENS[:, first:last]
    part, carry = apply(lstm, alone | carry, own, method="hidden", mutable="carry")
    parts.append(part)
  np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=10 * 12 * 2**-24)


@pytest.mark.slow
def test_a_batch_of_padding_has_zero_loss_and_gradient():
  lstm, padding = model(), np.full((B, T), -1)
  variables = initialised(lstm)

  def loss(params):
    own = variables | {"params": params}
    log_prob, _ = lstm.apply(own, padding, padding, method="loss_terms")
    return -jnp.where(padding >= 0, log_prob, 0.0).sum()

  value, gradient = jax.jit(jax.value_and_grad(loss))(variables["params"])
  assert value == 0
  assert not any(np.any(x) for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_evaluation_reads_each_stream_as_one_text_and_each_window_anew():
  lstm = model()
  variables = initialised(lstm)
  split = TokenSplit(np.resize(TOKENS, 57), eos=0, text_bytes=100, documents=1)
  inputs = np.concatenate([[0], split.tokens[:-1]])
  for batches, length in ((EvaluationStreams, 19), (EvaluationBatches, 4)):
    score = evaluate(make_scorer(lstm), variables, batches(split, B, 4), 100)
    assert score.tokens == 57
    nats = 0.0
    for first in range(0, 57, length):
      own = [x[None, first : first + length] for x in (inputs, split.tokens)]
      nats -= float(apply(lstm, {"params": variables["params"]}, *own, method="log_prob").sum())
    # Sums of 57 float32 numbers in another order.
    np.testing.assert_allclose(score.nats_per_token, nats / 57, rtol=57 * 2**-24)


@pytest.mark.parametrize("total", [1, 2, 5, 6, 19, 57, 60])
@pytest.mark.parametrize(("batch", "context"), [(1, 7), (3, 4), (5, 1)])
def test_streams_have_every_token_as_a_target_once(total, batch, context):
  split = TokenSplit(np.arange(1, total + 1), eos=0, text_bytes=1, documents=1)
  streams = EvaluationStreams(split, batch, context)
  got = list(streams)
  assert len(got) == len(streams)
  targets, inputs = (np.stack([one[name] for one in got]) for name in ("targets", "inputs"))
  mask = targets != -1
  assert sorted(targets[mask]) == list(range(1, total + 1))
  np.testing.assert_array_equal(inputs[mask], targets[mask] - 1)
  assert got[0]["reset"].all()
  assert not any(one["reset"].any() for one in got[1:])


def test_dropout_zeroes_outputs_of_layers_and_no_recurrent_state():
  lstm = model(dropout=0.5)
  variables = initialised(lstm)
  rngs = {"dropout": jax.random.key(0)}
  run = lambda v: lstm.apply(v, TOKENS, False, method="hidden", mutable="carry", rngs=rngs)
  hidden, written = jax.jit(run)(variables)
  assert (np.asarray(hidden) == 0).mean() > 0.3
  assert (np.asarray(written["carry"]["state"]) != 0).all()


def test_wrong_layers_and_another_number_of_rows_are_named():
  shapes = lambda lstm: jax.eval_shape(lambda: initialised(lstm))
  with pytest.raises(ValueError, match="`head` must have the model's dim 6; got 5"):
    shapes(model(head=CodebookHead(V, 5, 4)))
  with pytest.raises(ValueError, match=r"`dropout` must be in \[0, 1\); got 1\.0"):
    shapes(model(dropout=1.0))
  run = lambda v: model().apply(v, TOKENS[:2], method="hidden", mutable="carry")
  with pytest.raises(ValueError, match="`tokens` must have 3 rows, as the carry; got 2"):
    jax.eval_shape(run, shapes(model()))
