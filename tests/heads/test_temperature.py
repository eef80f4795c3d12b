"""Log-probabilities of heads at the temperature of their draws, in float64 from all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax import CodebookHead, DenseHead, GroupedHead
from vqjax.sharding import MeshShape, make_mesh

V, D, T = 101, 12, 0.6
HEADS = {
  "dense": lambda **axis: DenseHead(V, D, use_bias=True, softcap=3.0, **axis),
  "codebook": lambda **axis: CodebookHead(V, D, codes=11, token_bias=True, **axis),
  "grouped": lambda **axis: GroupedHead(V, D, use_bias=True, **axis),
}


def operands(head):
  keys = jax.random.split(jax.random.key(0), 3)
  hidden = jax.random.normal(keys[0], (3, 5, D))
  variables = head.init(keys[1], hidden)
  leaves, tree = jax.tree.flatten(variables["params"])
  noise = [jax.random.normal(k, x.shape) for k, x in zip(jax.random.split(keys[2], 9), leaves)]
  params = jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise)])
  return variables | {"params": params}, hidden, jnp.arange(15).reshape(3, 5) * 7


def value_and_gradients(head, variables, hidden, tokens):
  def loss(params, hidden):
    log_prob = head.apply(variables | {"params": params}, hidden, tokens, T, method="log_prob")
    return log_prob.mean(), log_prob

  return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables["params"], hidden)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_of_the_distribution_that_is_drawn_from(name):
  head = HEADS[name]()
  variables, hidden, tokens = operands(head)
  (_, found), gradients = value_and_gradients(head, variables, hidden, tokens)

  @jax.jit
  def of_logits(params, hidden):
    logits = head.apply(variables | {"params": params}, hidden)
    log_prob = jax.nn.log_softmax(logits / T)
    return jnp.take_along_axis(log_prob, tokens[..., None], axis=-1).mean()

  logits = np.asarray(head.apply(variables, hidden), np.float64)
  expected = np.take_along_axis(
    reference.log_softmax(logits / T), np.asarray(tokens)[..., None], -1
  )
  # Scores up to 10, divided by 0.6, with some roundings of 6e-8 each.
  np.testing.assert_allclose(found, expected[..., 0], atol=1e-5)
  wanted = jax.grad(of_logits, (0, 1))(variables["params"], hidden)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_mesh_changes_neither_values_nor_gradients(name):
  head = HEADS[name](vocab_axis="model")
  variables, hidden, tokens = operands(HEADS[name]())
  wanted = value_and_gradients(head, variables, hidden, tokens)
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    found = jax.device_get(value_and_gradients(head, variables, hidden, tokens))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, wanted)


@pytest.mark.parametrize("name", HEADS)
def test_no_array_of_tokens_times_vocabulary_is_made(name):
  n, v = 2053, 4099
  head = HEADS[name]().copy(vocab=v)
  hidden = jax.ShapeDtypeStruct((n, D), jnp.float32)
  variables = jax.eval_shape(head.init, jax.random.key(0), jnp.zeros((1, D)))
  tokens = jnp.zeros(n, jnp.int32)

  def loss(params, rest, hidden):
    given = rest | {"params": params}
    return head.apply(given, hidden, tokens, T, method="log_prob").mean()

  rest = {name: tree for name, tree in variables.items() if name != "params"}
  gradient = jax.grad(loss, (0, 2))
  assert reference.largest_value(gradient, variables["params"], rest, hidden) < n * v / 2


@pytest.mark.parametrize("name", HEADS)
def test_a_temperature_that_is_not_positive_is_refused(name):
  head = HEADS[name]()
  variables, hidden, tokens = operands(head)
  with pytest.raises(ValueError, match=r"`temperature` must be positive .* got 0"):
    head.apply(variables, hidden, tokens, 0, method="log_prob")
