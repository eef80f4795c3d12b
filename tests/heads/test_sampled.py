"""The sampled softmax head is exact except for its training loss."""

import contextlib
from typing import ClassVar

import jax
import numpy as np
import optax
import pytest

from tests import reference
from tests.contract import HeadContract
from tests.jitted import make_step, random_variables, results
from vqjax import DenseEmbedding, DenseHead, SampledSoftmaxHead
from vqjax.heads.unigram import UnigramProposal
from vqjax.lab.training import init_state
from vqjax.lm.models import Transformer
from vqjax.sharding import MeshShape, make_mesh


class TestSampledSoftmaxHead(HeadContract):
  cases: ClassVar = {
    "sampled": lambda v, d: SampledSoftmaxHead(v, d, samples=5, use_bias=True),
  }

  def reference_logits(self, head, variables, hidden):
    return hidden @ variables["params"]["weight"].T + variables["params"]["bias"]


def problem(head):
  rng = np.random.default_rng(0)
  hidden, tokens = rng.standard_normal((4, 5, 6), np.float32), rng.integers(0, 53, (4, 5))
  return random_variables(head), hidden, tokens


def drawn(head, variables, hidden, tokens, seed=0):
  rngs = {"sample": jax.random.key(seed)}
  return head.apply(variables, hidden, tokens, rngs=rngs, method="loss_terms")


def test_only_the_loss_with_a_random_stream_is_an_estimate():
  head = SampledSoftmaxHead(53, 6, samples=7)

  def everything(variables, hidden, tokens):
    exact = head.apply(variables, hidden, tokens, method="log_prob")
    without = head.apply(variables, hidden, tokens, method="loss_terms")[0]
    return exact, without, [drawn(head, variables, hidden, tokens, seed)[0] for seed in (0, 1, 0)]

  exact, without, (first, second, again) = results(everything, *problem(head))
  np.testing.assert_array_equal(without, exact)
  assert (first != exact).any()
  assert (first != second).any()
  np.testing.assert_array_equal(first, again)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, MeshShape(2, 2, 2), MeshShape(1, 1, 8)])
def test_a_sample_of_the_whole_vocabulary_is_exact_on_any_mesh(shape):
  head = SampledSoftmaxHead(
    53, 6, samples=53, use_bias=True, z_loss=0.1, vocab_axis="model" if shape else None
  )
  variables, hidden, tokens = problem(head)
  dense = DenseHead(53, 6, use_bias=True, z_loss=0.1)

  def loss(params, hidden, head, **rngs):
    log_prob, terms = head.apply({"params": params}, hidden, tokens, rngs=rngs, method="loss_terms")
    return terms["z_loss"] - log_prob.mean()

  of = lambda head, **rngs: results(
    jax.value_and_grad(lambda p, h: loss(p, h, head, **rngs), (0, 1)), variables["params"], hidden
  )
  expected = of(dense)
  with jax.set_mesh(make_mesh(shape)) if shape else contextlib.nullcontext():
    found = of(head, sample=jax.random.key(3))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.slow
def test_the_estimate_on_a_mesh_is_that_of_one_device():
  head = SampledSoftmaxHead(53, 6, samples=11, vocab_axis="model")
  variables, hidden, tokens = problem(head)
  loss = lambda v, h: drawn(head, v, h, tokens)[0].mean()
  both = jax.value_and_grad(loss, (0, 1))
  alone = results(both, variables, hidden)
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    spread = results(both, variables, hidden)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), spread, alone)


def test_a_tied_head_adds_its_gradient_to_the_table():
  head = SampledSoftmaxHead(53, 6, samples=53, embedding=DenseEmbedding(53, 6))
  variables, hidden, tokens = problem(head)
  loss = lambda v: drawn(head, v, hidden, tokens)[0].sum()
  found = results(jax.grad(loss), variables)["params"]["embedding"]["weight"]
  weight, flat = variables["params"]["embedding"]["weight"], hidden.reshape(20, 6)
  _, expected, _ = reference.linear_gradients(flat, weight, tokens.ravel(), np.ones(20))
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_training_steps_draw_new_samples():
  tokens = np.random.default_rng(3).integers(0, 31, (8, 5))
  batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
  model = Transformer(
    embedding=DenseEmbedding(31, 8),
    head=SampledSoftmaxHead(31, 8, samples=9),
    dim=8,
    layers=1,
    heads=2,
    context=4,
  )
  still = optax.sgd(0.0)
  step = make_step(model, still, lambda _: 0.0, jax.random.key(1))
  state, first = step(init_state(model, still, jax.random.key(0)), batch)
  _, second = step(state, batch)
  assert first["loss"] != second["loss"]


def test_a_unigram_proposal_follows_the_counts():
  counts = np.array([1, 0, 97, 2])
  log_q = UnigramProposal(counts)(4)
  np.testing.assert_allclose(np.exp(log_q), np.array([2, 1, 98, 3]) / 104, rtol=1e-5)
