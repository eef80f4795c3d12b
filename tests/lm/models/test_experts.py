"""A layer with experts is the sum of each token's experts, in values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import results
from tests.lm.checkpoints.families import CONFIGS, small
from vqjax.lm.sources.families import decoder_of


def dense(mlp, params, x_ND):
  """All experts of all tokens, of which the weights of those that were not chosen are 0."""

  def product(name, x, axes):
    out = jnp.einsum(axes, x, params[name]["kernel"])
    return out + params[name].get("bias", 0)

  score_NE = product("router", x_ND, "nd,de->ne")
  least_N1 = jnp.sort(score_NE, axis=-1)[:, -mlp.experts.chosen, None]
  weight_NE = jax.nn.softmax(score_NE) * (score_NE >= least_N1)
  if mlp.experts.normalized:
    weight_NE /= weight_NE.sum(-1, keepdims=True)
  gate, inner = (product(name, x_ND, "nd,edf->nef") for name in ("mlp_gate", "mlp_in"))
  if mlp.limit is not None:
    gate, inner = jnp.minimum(gate, mlp.limit), jnp.clip(inner, -mlp.limit, mlp.limit) + 1
  out_NED = product("mlp_out", inner * mlp.activation(gate), "nef,efd->ned")
  return jnp.einsum("ned,ne->nd", out_NED, weight_NE)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_values_and_gradients_are_those_of_all_experts(name):
  model, variables = small(name)
  attention = dataclasses.replace(model.attention, out_bias=False)
  block = model.clone(pre_norms=False, attention=attention).block()
  params = jax.tree.map(lambda x: np.asarray(x)[0], variables["params"]["blocks"])
  # 37 tokens of all experts, and as many of the same few.
  x_BTD = np.random.default_rng(0).standard_normal((2, 37, 32)).astype(np.float32)
  x_BTD[1] = x_BTD[1, 0]
  nothing = np.zeros((2, 37, 4, 12), np.float32)

  def sparse(params, x_BTD):
    return block.apply({"params": params}, x_BTD, nothing, True, method="feed_forward") - x_BTD

  def with_gradients(function):
    weighted = lambda *given: (function(*given) * np.cos(np.arange(32))).sum()
    return lambda *given: (function(*given), jax.grad(weighted, argnums=(0, 1))(*given))

  every = lambda params, x: dense(model.mlp, params, x.reshape(-1, 32)).reshape(x.shape)
  found, expected = (results(with_gradients(f), params, x_BTD) for f in (sparse, every))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), found, expected)


def test_experts_that_no_token_can_have_are_refused():
  config = CONFIGS["qwen3_moe"]
  with pytest.raises(
    ValueError, match="`num_experts_per_tok` must be at most the 7 experts; got 9"
  ):
    decoder_of(config | {"num_experts_per_tok": 9})
  with pytest.raises(ValueError, match=r"`mlp_only_layers` must be empty; got \[1\]"):
    decoder_of(config | {"mlp_only_layers": [1]})
