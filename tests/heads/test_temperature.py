"""Log-probabilities of heads at the temperature of their draws, in float64 from all logits."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.jitted import abstract_variables, random_variables, results
from vqjax import CodebookHead, DenseHead, GroupedHead
from vqjax.sharding import MeshShape, make_mesh

V, D, T = 101, 12, 0.6
HEADS = {
  "dense": lambda **axis: DenseHead(V, D, use_bias=True, softcap=3.0, **axis),
  "codebook": lambda **axis: CodebookHead(V, D, codes=11, token_bias=True, **axis),
  "grouped": lambda **axis: GroupedHead(V, D, use_bias=True, **axis),
}


HIDDEN = np.random.default_rng(0).standard_normal((3, 5, D), np.float32)
TOKENS = np.arange(15).reshape(3, 5) * 7


@pytest.mark.parametrize("shape", [None, pytest.param((2, 2, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_of_the_distribution_that_is_drawn_from(name, shape):
  head, alone = HEADS[name](**{"vocab_axis": "model"} if shape else {}), HEADS[name]()

  def own(params, hidden):
    log_prob = head.apply(variables | {"params": params}, hidden, TOKENS, T, method="log_prob")
    return log_prob.mean(), log_prob

  def of_logits(params, hidden):
    logits = alone.apply(variables | {"params": params}, hidden)
    log_prob = jax.nn.log_softmax(logits / T)
    return jnp.take_along_axis(log_prob, TOKENS[..., None], axis=-1).mean(), logits

  variables = random_variables(alone)
  run = lambda loss: results(jax.grad(loss, (0, 1), has_aux=True), variables["params"], HIDDEN)
  wanted, logits = run(of_logits)
  with jax.set_mesh(make_mesh(MeshShape(*shape))) if shape else contextlib.nullcontext():
    gradients, found = run(own)
  expected = reference.of_tokens(reference.log_softmax(logits.astype(np.float64) / T), TOKENS)
  # Scores up to 10, divided by 0.6, with some roundings of 6e-8 each, in another order on a mesh.
  near = {"atol": 2e-5 if shape else 1e-5}
  np.testing.assert_allclose(found, expected, **near)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **near), gradients, wanted)


@pytest.mark.parametrize("name", HEADS)
def test_no_array_of_tokens_times_vocabulary_is_made(name):
  n, v = 2053, 4099
  head = HEADS[name]().copy(vocab=v)
  hidden = jax.ShapeDtypeStruct((n, D), jnp.float32)

  def loss(variables, hidden):
    return head.apply(variables, hidden, jnp.zeros(n, jnp.int32), T, method="log_prob").mean()

  gradient = jax.grad(loss, (0, 1), allow_int=True)
  assert reference.largest_value(gradient, abstract_variables(head), hidden) < n * v / 2
