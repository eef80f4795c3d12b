"""Every token is counted once, in the stated units."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.training import evaluate, make_scorer
from vqjax.lm.models import Transformer


@pytest.mark.slow
def test_absent_targets_do_not_count_and_the_units_agree():
  model = Transformer(DenseEmbedding(11, 8), DenseHead(11, 8), 8, layers=1, heads=2, context=4)
  tokens = np.asarray(jax.random.randint(jax.random.key(3), (5, 5), 0, 11), np.int32)
  inputs, targets = tokens[:, :-1], tokens[:, 1:]
  both = jnp.asarray(inputs), jnp.asarray(targets)
  variables = model.init(jax.random.key(0), *both, method="loss_terms")
  log_prob = np.asarray(model.apply(variables, *both, method="log_prob"), np.float64)
  mask = np.ones((6, 4), bool)
  mask[4, 2:] = mask[5] = False
  padded = [np.concatenate([x, np.zeros((1, 4), np.int32)]) for x in (inputs, targets)]
  padded[1] = np.where(mask, padded[1], -1)
  batches = [{"inputs": padded[0][i : i + 2], "targets": padded[1][i : i + 2]} for i in (0, 2, 4)]
  score = evaluate(make_scorer(model), variables, batches, text_bytes=77)
  nats = -log_prob[mask[:5]]
  assert score.tokens == 18
  assert score.text_bytes == 77
  assert score.rates == {}
  np.testing.assert_allclose(score.nats_per_token, nats.mean(), rtol=1e-6)
  np.testing.assert_allclose(score.perplexity, math.exp(nats.mean()), rtol=1e-5)
  np.testing.assert_allclose(score.bits_per_byte, nats.sum() / math.log(2) / 77, rtol=1e-6)


def test_a_split_without_tokens_has_no_score():
  with pytest.raises(ValueError, match="got no batch"):
    evaluate(lambda variables, batch: ({}, {}), {}, [], 0)


@pytest.mark.slow
def test_a_split_without_targets_has_no_score():
  nothing = {"nats": np.float32(0), "targets": np.int32(0)}
  with pytest.raises(ValueError, match="must have targets; got none"):
    evaluate(lambda variables, batch: (nothing, {}), {}, [{}, {}], 0)
