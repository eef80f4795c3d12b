"""The learned codebook head keeps the contract, draws codes, anneals and freezes."""

from typing import ClassVar

import jax
import numpy as np

from tests.contract import HeadContract
from tests.jitted import initial_variables, results
from vqjax import CodebookHead, LearnedCodebookHead
from vqjax.convert import frozen
from vqjax.heads.learned_codebook import spread_candidates


class TestLearnedCodebookHead(HeadContract):
  cases: ClassVar = {
    "bias": lambda v, d: LearnedCodebookHead(v, d, 17, 3, token_bias=True),
  }

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    best = params["choice"].argmax(-1)
    code = variables["codes"]["candidates"][np.arange(len(best)), best]
    return hidden @ params["codebook"][code].T + params.get("token_bias", 0.0)

  def test_gradients_equal_those_of_a_float64_dense_reference(
    self, run, head, variables, hidden, tokens, cotangent
  ):
    """The choice has no gradient in `log_prob`, where the assignment is fixed."""
    found = run.core(hidden, tokens, cotangent)[2][0]
    assert (found["choice"] == 0).all()
    fixed = CodebookHead(head.vocab, head.dim, head.codes, token_bias=head.token_bias)
    score = lambda v: (fixed.apply(v, hidden, tokens, method="log_prob") * cotangent).sum()
    expected = results(jax.grad(score, allow_int=True), frozen(variables))["params"]
    for name, value in expected.items():
      np.testing.assert_allclose(found[name], value, atol=3e-5)


HEAD = LearnedCodebookHead(20, 6, 5, 3, token_bias=True, anneal=4)
HIDDEN, TOKENS = np.random.default_rng(0).standard_normal((8, 6), np.float32), np.arange(8) * 2


def training_loss(head, hidden, tokens, variables, params, key):
  (log_prob, _), written = head.apply(
    variables | {"params": params},
    *(hidden, tokens),
    rngs={"sample": key},
    mutable=["codes", "schedule"],
    method="loss_terms",
  )
  return -log_prob.mean(), written


def test_training_draws_codes_with_a_gradient_for_the_choice_until_it_is_annealed():
  @jax.jit
  def step(variables, at):
    loss = lambda p: training_loss(HEAD, HIDDEN, TOKENS, variables, p, jax.random.key(at))
    (loss, written), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    fixed = -HEAD.apply(variables, HIDDEN, TOKENS, method="log_prob").mean()
    return loss, fixed, variables | written, gradient["choice"]

  losses, state = [], initial_variables(HEAD)
  for at in range(6):
    loss, fixed, state, choice = jax.device_get(step(state, at))
    losses.append(float(loss))
    assert (choice != 0).any() == (at < 4)
  assert int(state["schedule"]["steps"]) == 6
  assert len(set(losses[:4])) == 4  # noise
  np.testing.assert_allclose(loss, fixed, rtol=1e-6)


def test_evaluation_has_no_noise_and_changes_nothing():
  def both(variables):
    rngs = {"sample": jax.random.key(0)}
    log_prob, _ = HEAD.apply(variables, HIDDEN, TOKENS, rngs=rngs, method="loss_terms")
    return log_prob, HEAD.apply(variables, HIDDEN, TOKENS, method="log_prob")

  np.testing.assert_array_equal(*results(both, initial_variables(HEAD)))


def test_the_choice_learns_the_better_code():
  head = LearnedCodebookHead(4, 2, 2, 2, anneal=200)
  codebook = np.float32([[4, 0], [0, 4]])
  hidden = np.float32([[1, 0], [1, 0], [0, 1], [0, 1]])

  def step(at, variables):
    loss = lambda p: training_loss(
      head, hidden, np.array([3, 1, 0, 2]), variables, p, jax.random.key(at)
    )
    params = variables["params"]
    gradient, written = jax.grad(loss, has_aux=True)(params)
    params = params | {"choice": params["choice"] - 2.0 * gradient["choice"]}
    return variables | written | {"params": params}

  variables = initial_variables(head)
  variables["params"]["codebook"] = codebook
  trained = results(lambda v: jax.lax.fori_loop(0, 150, step, v), variables)
  assert frozen(trained)["codes"]["assignment"].tolist() == [1, 0, 1, 0]


def test_candidates_are_different_codes_and_begin_with_that_of_contiguous_blocks():
  table = spread_candidates(101, 17, 5)
  assert all(len(set(row)) == 5 for row in table.tolist())
  np.testing.assert_array_equal(table[:, 0], np.arange(101) * 17 // 101)
