"""The dense head keeps the contract, tied and untied."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType

from tests import reference
from tests.contract_of_representatives import RepresentativeContract
from tests.jitted import abstract_variables, random_variables, results
from tests.ops.exact import normals
from tests.ops.test_softmax_options import Counted
from vqjax import DenseEmbedding, DenseHead, SigSoftmax, linear_cross_entropy
from vqjax.ops import device


class TestDenseHead(RepresentativeContract):
  cases: ClassVar = {
    "plain": DenseHead,
    "bias": lambda v, d: DenseHead(v, d, use_bias=True),
    "sigsoftmax": lambda v, d: DenseHead(v, d, use_bias=True, output=SigSoftmax()),
    "tied": lambda v, d: DenseHead(v, d, use_bias=True, embedding=DenseEmbedding(v, d)),
  }
  mesh_cases: ClassVar = ("tied", "sigsoftmax")

  def reference_logits(self, head, variables, hidden):
    params = variables["params"]
    weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
    scores = hidden @ weight.T + params.get("bias", 0.0)
    # sigmoid(x) = 1 / (1 + exp(-x))
    return scores if head.output is None else scores - np.log1p(np.exp(-scores))


def test_tying_shares_one_table_and_its_gradient_has_both_parts():
  class Model(nn.Module):
    embedding: nn.Module
    head: nn.Module

    def __call__(self, tokens, targets):
      return self.head.log_prob(self.embedding(tokens), targets)

  embedding = DenseEmbedding(7, 4)
  model = Model(embedding, DenseHead(7, 4, embedding=embedding))
  tokens, targets = jnp.array([1, 2]), jnp.array([3, 3])

  def program():
    variables = model.init(jax.random.key(0), tokens, targets)
    return variables, jax.grad(lambda v: model.apply(v, tokens, targets).sum())(variables)

  variables, gradient = results(program)
  assert jax.tree.map(jnp.shape, variables) == {"params": {"embedding": {"weight": (7, 4)}}}
  loss = lambda table: reference.log_softmax(table[[1, 2]] @ table.T)[:, 3].sum()
  weight, found = (tree["params"]["embedding"]["weight"] for tree in (variables, gradient))
  reference.check_slopes((found,), loss, weight.astype(np.float64), atol=1e-5)


def test_no_probability_depends_on_the_mean_of_the_rows():
  head, (hidden, weight) = DenseHead(31, 4), normals(0, (5, 4), (31, 4))
  weight += 3  # a mean that scores notice
  run = jax.jit(lambda w: (
    head.apply({"params": {"weight": w}}, hidden, np.arange(5), method="log_prob"),
    head.apply({"params": {"weight": w - w.mean(axis=0)}}, hidden, np.arange(5), method="log_prob"),
  ))  # fmt: skip
  np.testing.assert_allclose(*run(weight), atol=2e-5)


def test_the_initialiser_may_be_partitioned():
  init = nn.with_partitioning(nn.initializers.normal(0.02), ("model", None))
  variables = abstract_variables(DenseHead(7, 4, weight_init=init))
  assert variables["params"]["weight"].names == ("model", None)


@pytest.mark.slow
def test_each_token_may_have_its_own_cap_and_temperature():
  head = DenseHead(31, 8, softcap=1.0)
  (hidden,), tokens = normals(0, (5, 8)), np.arange(5)
  cap, temperature = np.linspace(0.5, 3, 5, dtype=np.float32), np.float32([0.5, 1, 2, 1, 0.7])
  variables = head.init(jax.random.key(0), hidden)
  weight = np.asarray(variables["params"]["weight"], np.float64)

  @jax.jit
  def log_prob(cap, temperature):
    own = hidden / cap[:, None], tokens, temperature / cap
    return head.apply(variables, *own, method="log_prob")

  scores = cap[:, None] * np.tanh(hidden @ weight.T / cap[:, None]) / temperature[:, None]
  expected = scores[tokens, tokens] - np.log(np.exp(scores).sum(-1))
  np.testing.assert_allclose(log_prob(cap, temperature), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_one_program_on_a_mesh_may_draw_search_and_score(options):
  # With a vocabulary that no device count divides: in one program XLA takes two paddings of an
  # array for one, whatever they fill in.
  head = DenseHead(53, 8, use_bias=True, vocab_axis="model", **options)
  hidden = np.random.default_rng(0).standard_normal((6, 8), np.float32)
  variables = random_variables(head)

  def all_at_once(variables, hidden):
    call = lambda method, *args: head.apply(variables, hidden, *args, method=method)
    drawn = call("sample", jax.random.key(2))
    return drawn, call("log_prob", drawn), call("top_k", 4), call("loss_terms", drawn)[0]

  with jax.set_mesh(jax.make_mesh((8,), ("model",), (AxisType.Auto,))):
    drawn, log_prob, (best, _), again = results(all_at_once, variables, hidden)
  expected = reference.log_softmax(results(head.apply, variables, hidden))
  for found in (log_prob, again):
    np.testing.assert_allclose(found, expected[np.arange(6), drawn], atol=2e-5)
  np.testing.assert_allclose(best, np.sort(expected)[:, ::-1][:, :4], atol=2e-5)


def test_the_terms_of_the_loss_are_those_of_the_cross_entropy():
  head = DenseHead(31, 8, softcap=2.0, z_loss=1e-2, label_smoothing=0.1)
  hidden, tokens = np.random.default_rng(0).standard_normal((5, 8), np.float32), np.arange(5)

  def program(variables, hidden):
    options = {"softcap": 2.0, "z_loss": 1e-2, "label_smoothing": 0.1}
    weight, own = variables["params"]["weight"], head.bind(variables)
    expected = linear_cross_entropy(hidden, weight, jnp.arange(5), **options)
    return own.loss_terms(hidden, tokens), expected

  (log_prob, terms), expected = results(program, random_variables(head), hidden)
  np.testing.assert_allclose(-log_prob.mean() + sum(terms.values()), expected.mean(), rtol=1e-6)


@pytest.mark.parametrize("method", ["log_prob", "loss_terms"])
def test_tokens_that_are_left_out_are_not_scored(method):
  n, v, function = 256, 32, Counted()
  head = DenseHead(v, 6, output=function)
  hidden, mask = np.ones((n, 6), np.float32), np.arange(n) % 16 == 0
  variables = {"params": {"weight": np.ones((v, 6), np.float32)}}

  def loss(variables):
    found = head.apply(variables, hidden, np.zeros(n, int), mask=mask, method=method)
    return (found if method == "log_prob" else found[0]).sum()

  with device.using(device.current()._replace(tokens=64, vocab=v, kept=0)):
    value, _ = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(variables))
  jax.effects_barrier()
  # One tile of 64 tokens by all rows, forward and backward, where all tokens have four.
  assert function.tiles == 2
  np.testing.assert_allclose(value, -mask.sum() * np.log(v), rtol=1e-6)
