"""The codebook head's loss equals the paper's gather and softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract_on_meshes import as_float64
from tests.jitted import random_variables, results
from vqjax import CodebookHead
from vqjax.ops.codes import code_softmax
from vqjax.sharding import MeshShape, make_mesh

V, D, K, N = 103, 8, 11, 64


def gathered_loss(params, table, hidden, tokens, z_loss, smoothing):
  """Eq. 2-5 as the paper writes them, in the precision of the arrays."""
  scores_NK = hidden @ params["codebook"].T
  logits_NV = scores_NK[:, table] + params.get("token_bias", 0.0)
  log_z_N = jax.nn.logsumexp(logits_NV, axis=-1)
  log_prob_NV = logits_NV - log_z_N[:, None]
  own_N = jnp.take_along_axis(log_prob_NV, tokens[:, None], -1)[:, 0]
  smooth_N = (1 - smoothing) * own_N + smoothing * log_prob_NV.mean(-1)
  return -smooth_N.mean() + z_loss * (log_z_N**2).mean()


def inputs():
  rng = np.random.default_rng(0)
  return rng.standard_normal((N, D), np.float32), rng.integers(0, V, N).astype(np.int32)


# All at once with a bias; without one, each term of the loss.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
  ("bias", "z_loss", "smoothing"), [(True, 1e-2, 0.1), (False, 0.0, 0.1), (False, 1e-2, 0.0)]
)
def test_loss_and_gradients_equal_gather_and_softmax_in_float64(bias, z_loss, smoothing):
  head = CodebookHead(V, D, K, token_bias=bias, z_loss=z_loss, label_smoothing=smoothing)
  (hidden, tokens), variables = inputs(), random_variables(head)

  def loss(params, hidden):
    log_prob, terms = head.apply(
      variables | {"params": params}, hidden, tokens, method="loss_terms"
    )
    return sum(terms.values(), -log_prob.mean())

  params = variables["params"]
  found, gradients = results(jax.value_and_grad(loss, (0, 1)), params, hidden)
  with jax.enable_x64(True):
    table = variables["codes"]["assignment"]
    gathered = lambda p, h: gathered_loss(p, table, h, tokens, z_loss, smoothing)
    expected, reference = results(
      jax.value_and_grad(gathered, (0, 1)), *as_float64((params, hidden))
    )
  np.testing.assert_allclose(found, expected, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, reference)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)])
def test_the_mean_over_the_vocabulary_is_the_same_on_a_mesh(shape):
  (hidden, tokens), rng = inputs(), np.random.default_rng(1)
  codebook, bias = (rng.standard_normal(size, np.float32) for size in ((K, D), V))
  bias[5] = -np.inf
  run = lambda axis: results(
    lambda h, w, b: code_softmax(h, w, jnp.arange(V) % K, tokens, b, mean=True, vocab_axis=axis),
    *(hidden, codebook, bias),
  )
  alone = run(None)
  with jax.set_mesh(make_mesh(MeshShape(*shape))):
    spread = run("model")
  np.testing.assert_allclose(spread.mean_log_prob, alone.mean_log_prob, atol=2e-6)
  np.testing.assert_allclose(spread.log_z, alone.log_z, atol=2e-6)
