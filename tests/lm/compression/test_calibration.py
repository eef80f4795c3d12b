"""Moments are those of the hidden states, the gradients and the distributions of a decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import results
from tests.lm.checkpoints.families import V, small
from vqjax import DenseEmbedding, DenseHead
from vqjax.lm.compression import calibration
from vqjax.lm.models import Transformer
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash, count_rows


@pytest.fixture(scope="module")
def decoder():
  return small("gemma3_text")


def windows(count, length=9):
  return np.random.default_rng(1).integers(0, V, (count, length)).astype(np.int32)


def test_moments_are_means_of_outer_products(decoder):
  model, variables = decoder
  rows = windows(3)
  counts = np.arange(V, dtype=float)
  found = calibration.collect(
    model, variables, rows, counts, hidden_tokens=24, expected_tokens=24, fisher_tokens=24
  )
  both = lambda v, rows: (model.apply(v, rows, method="hidden"), model.apply(v, rows))
  hidden, logits = (x.astype(np.float64)[:, 1:] for x in results(both, variables, rows))
  flat, logits = hidden.reshape(-1, hidden.shape[-1]), logits.reshape(-1, V)
  # Sums of float32 products.
  np.testing.assert_allclose(found.hidden, flat.T @ flat / len(flat), rtol=1e-4, atol=1e-5)
  p = np.exp(logits - logits.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  expected = (counts + counts.sum() * p.mean(axis=0)) / 2
  np.testing.assert_allclose(found.counts, expected, rtol=1e-4)
  assert found.tokens == 24


def test_a_gradient_is_that_of_the_log_probability_of_the_drawn_tokens(decoder):
  model, variables = decoder
  row, key = windows(1), jax.random.key(3)

  def gradient(variables, key):
    vectors = variables["params"]["embedding"]["weight"][row]

    def log_prob(e):
      hidden = model.apply(variables, e, True, method="body")
      of_head = lambda m, h, k: (m.head.logits(h), m.head.sample(jax.lax.stop_gradient(h), k))
      logits, drawn = model.apply(variables, hidden, key, method=of_head)
      return jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], -1).sum()

    return jax.grad(log_prob)(vectors)

  expected = results(gradient, variables, key)
  # The program of the test above, which has windows of this length.
  found = calibration._gradient(variables, row, key, model=model)
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_an_interrupted_call_goes_on(decoder, tmp_path, monkeypatch):
  model, variables = decoder
  options = {"hidden_tokens": 40, "expected_tokens": 16, "fisher_tokens": 16}
  counts = np.ones(V)
  whole = calibration.collect(model, variables, windows(5), counts, **options)
  monkeypatch.setattr(calibration, "EVERY", 0.0)
  seen = []

  def stop(part):
    seen.append(part)
    if len(seen) == 3:
      raise KeyboardInterrupt

  cache = tmp_path / "sums.npz"
  with pytest.raises(KeyboardInterrupt):
    calibration.collect(model, variables, windows(5), counts, cache=cache, progress=stop, **options)
  assert cache.exists()
  seen.clear()
  again = calibration.collect(
    model, variables, windows(5), counts, cache=cache, progress=seen.append, **options
  )
  assert len(seen) == 3
  assert cache.exists()  # it is the caller's, who may not have saved the moments yet
  for name in ("hidden", "inputs", "counts"):
    np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


def test_counts_of_a_memory_are_weighed_by_the_gradients_of_their_heads():
  ngrams = XorHash.qwen4(V, end=0, heads=2, least=2_000)
  table = DenseEmbedding(ngrams.rows, 4)
  memory = NGramMemory(NGramEmbedding(ngrams, table), dim=16)
  embedding = DenseEmbedding(V, 16)
  fields = {"dim": 16, "layers": 1, "heads": 2, "context": 8, "memory_blocks": (0,)}
  model = Transformer(embedding, DenseHead(V, 16), memories=(memory,), **fields)
  rows = windows(2, length=8)
  variables = jax.jit(model.init)(jax.random.key(0), rows)
  counts = count_rows(ngrams, rows.reshape(-1))
  found = calibration.memory_counts(model, variables, rows, counts, seed=7)

  def gradient(variables, row, key):
    drawn = model.apply(variables, row, key, method=lambda m, t, k: m.head.sample(m.hidden(t), k))
    log_prob = lambda v: model.apply(v, row, drawn, method="log_prob").sum()
    return jax.grad(log_prob)(variables)["params"]["memories_0"]["lookup"]["table"]["weight"]

  # No two places of a window read one row, so that a row's gradient is that of a place.
  total = np.zeros(ngrams.rows)
  for i, row in enumerate(rows):
    key = jax.random.fold_in(jax.random.key(7), i)
    total += np.square(results(gradient, variables, row[None], key)).sum(axis=1)
    assert len(np.unique(ngrams(row))) == 8 * ngrams.heads
  heads = np.add.reduceat(total, np.cumsum([0, *ngrams.sizes[:-1]]))
  expected = np.repeat(heads / heads.mean(), ngrams.sizes) * counts
  np.testing.assert_allclose(found, expected, rtol=1e-4)
  with pytest.raises(ValueError, match="`counts` must have a number for each of"):
    calibration.memory_counts(model, variables, rows, counts[1:])
  with pytest.raises(ValueError, match="`number` must be that of one of 1 memories"):
    calibration.memory_counts(model, variables, rows, counts, number=1)
