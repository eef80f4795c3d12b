"""The codebook head's loss equals the paper's gather and softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_gather_and_softmax_in_float64(bias, z_loss, smoothing):
  head = CodebookHead(V, D, K, token_bias=bias, z_loss=z_loss, label_smoothing=smoothing)
  hidden = jax.random.normal(jax.random.key(0), (N, D))
  tokens = jax.random.randint(jax.random.key(1), (N,), 0, V)
  variables = head.init(jax.random.key(2), hidden)
  params = variables["params"]
  if bias:
    params = params | {"token_bias": jax.random.normal(jax.random.key(3), (V,))}

  def loss(params, hidden):
    log_prob, terms = head.apply(
      variables | {"params": params}, hidden, tokens, method="loss_terms"
    )
    return sum(terms.values(), -log_prob.mean())

  found, gradients = jax.value_and_grad(loss, (0, 1))(params, hidden)
  with jax.enable_x64(True):
    exact = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)
    table = jnp.asarray(np.asarray(variables["codes"]["assignment"]))
    expected, reference = jax.value_and_grad(gathered_loss, (0, 2))(
      *(exact(params), table, exact(hidden), jnp.asarray(np.asarray(tokens)), z_loss, smoothing)
    )
    expected, reference = jax.device_get((expected, reference))
  np.testing.assert_allclose(found, expected, atol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, reference)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 2)])
def test_the_mean_over_the_vocabulary_is_the_same_on_a_mesh(shape):
  hidden = jax.random.normal(jax.random.key(0), (N, D))
  tokens = jax.random.randint(jax.random.key(1), (N,), 0, V)
  codebook = jax.random.normal(jax.random.key(2), (K, D))
  bias = jax.random.normal(jax.random.key(3), (V,)).at[5].set(-jnp.inf)
  table = jnp.arange(V) % K
  run = jax.jit(
    lambda axis: code_softmax(hidden, codebook, table, tokens, bias, mean=True, vocab_axis=axis),
    static_argnums=0,
  )
  alone = run(None)
  with jax.set_mesh(make_mesh(MeshShape(*shape))):
    spread = jax.device_get(run("model"))
  np.testing.assert_allclose(spread.mean_log_prob, alone.mean_log_prob, atol=2e-6)
  np.testing.assert_allclose(spread.log_z, alone.log_z, atol=2e-6)
