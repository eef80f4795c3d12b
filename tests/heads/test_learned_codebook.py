"""The learned codebook head keeps the contract, draws codes, anneals and freezes."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import HeadContract
from vqjax import CodebookHead, LearnedCodebookHead
from vqjax.convert import frozen
from vqjax.heads.learned_codebook import spread


class TestLearnedCodebookHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: LearnedCodebookHead(v, d, 17, 3, token_bias=True),
  }

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    candidates = np.asarray(variables["codes"]["candidates"])
    best = params["choice"].argmax(-1)
    code = candidates[np.arange(len(best)), best]
    return hidden @ params["codebook"][code].T + params.get("token_bias", 0.0)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, head, variables, hidden, tokens
  ):
    """The choice has no gradient in `log_prob`, where the assignment is fixed."""
    loss = lambda p: head.apply(variables | {"params": p}, hidden, tokens, method="log_prob").sum()
    gradient = jax.grad(loss)(variables["params"])
    assert (gradient["choice"] == 0).all()
    found = frozen(variables)
    fixed = CodebookHead(head.vocab, head.dim, head.codes, token_bias=head.token_bias)
    rest = {"codes": found["codes"]}
    loss = lambda p: fixed.apply(rest | {"params": p}, hidden, tokens, method="log_prob").sum()
    expected = jax.grad(loss)(found["params"])
    for name, value in expected.items():
      np.testing.assert_allclose(gradient[name], value, atol=3e-5)


def small(**options):
  head = LearnedCodebookHead(20, 6, 5, 3, token_bias=True, anneal=4, **options)
  hidden = jax.random.normal(jax.random.key(0), (8, 6))
  return head, hidden, jnp.arange(8) * 2, head.init(jax.random.key(1), hidden)


def training_loss(head, hidden, tokens, variables, params, key):
  (log_prob, _), written = head.apply(
    variables | {"params": params},
    *(hidden, tokens),
    rngs={"sample": key},
    mutable=["codes", "schedule"],
    method="loss_terms",
  )
  return -log_prob.mean(), written


@pytest.mark.slow
def test_training_draws_codes_with_a_gradient_for_the_choice_until_it_is_annealed():
  head, hidden, tokens, variables = small()
  run = lambda v, key: jax.value_and_grad(
    lambda p: training_loss(head, hidden, tokens, v, p, key), has_aux=True
  )(variables["params"])
  losses = []
  state = variables
  for step in range(5):
    (loss, written), gradient = run(state, jax.random.key(step))
    losses.append(float(loss))
    state = state | written
    assert (gradient["choice"] != 0).any() == (step < 4)
  assert int(state["schedule"]["steps"]) == 5
  assert len(set(losses[:4])) == 4  # noise
  (loss, _), _ = run(state, jax.random.key(99))
  fixed = -head.apply(state, hidden, tokens, method="log_prob").mean()
  np.testing.assert_allclose(loss, fixed, rtol=1e-6)


def test_evaluation_has_no_noise_and_changes_nothing():
  head, hidden, tokens, variables = small()
  log_prob, _ = head.apply(
    variables, hidden, tokens, rngs={"sample": jax.random.key(0)}, method="loss_terms"
  )
  np.testing.assert_array_equal(log_prob, head.apply(variables, hidden, tokens, method="log_prob"))


def test_the_choice_learns_the_better_code():
  head = LearnedCodebookHead(4, 2, 2, 2, anneal=200)
  variables = head.init(jax.random.key(0), jnp.zeros((1, 2)))
  codebook = jnp.array([[4.0, 0.0], [0.0, 4.0]])
  hidden = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
  tokens, params = jnp.array([3, 1, 0, 2]), variables["params"] | {"codebook": codebook}
  step = jax.jit(
    jax.grad(lambda p, v, k: training_loss(head, hidden, tokens, v, p, k), has_aux=True)
  )
  for at in range(150):
    gradient, written = step(params, variables, jax.random.key(at))
    params = params | {"choice": params["choice"] - 2.0 * gradient["choice"]}
    variables = variables | written
  assert frozen(variables | {"params": params})["codes"]["assignment"].tolist() == [1, 0, 1, 0]


def test_candidates_are_different_codes_and_begin_with_that_of_contiguous_blocks():
  table = spread(101, 17, 5)
  assert all(len(set(row)) == 5 for row in table.tolist())
  np.testing.assert_array_equal(table[:, 0], np.arange(101) * 17 // 101)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"candidates": 6}, "`candidates` .*6 for codes 5"),
    ({"candidates": 2, "anneal": 0}, "anneal 0"),
    ({"candidates": 2, "final_temperature": 2.0}, "final_temperature 2.0"),
  ],
)
def test_numbers_outside_their_range_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    LearnedCodebookHead(20, 6, 5, **options).init(jax.random.key(0), jnp.ones((1, 6)))
