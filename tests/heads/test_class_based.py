"""The class-based head keeps the contract and scores each token's own class only."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.contract import HeadContract
from tests.jitted import abstract_variables, random_variables, run
from vqjax import ClassBasedHead
from vqjax.ops import class_softmax as class_ops


def with_empty_classes(vocab, classes):
  """Only every third class has tokens, and the first has most of them."""
  spread = (np.arange(vocab) * 7 % classes) // 3 * 3
  return np.where(np.arange(vocab) % 2, spread, 0)


class TestClassBasedHead(HeadContract):
  cases: ClassVar = {
    "equal": lambda v, d: ClassBasedHead(v, d, 10),
    "empty": lambda v, d: ClassBasedHead(v, d, 17, with_empty_classes),
    "one class": lambda v, d: ClassBasedHead(v, d, 1),
  }
  mesh_cases: ClassVar = ("equal", "empty")

  def reference_logits(self, head, variables, hidden):
    """The log-probabilities, one class at a time."""
    params, table = variables["params"], variables["codes"]["assignment"]
    sizes = np.bincount(table, minlength=head.classes)
    class_scores = np.where(sizes > 0, hidden @ params["class_weight"].T, -np.inf)
    log_prob = hidden @ params["weight"].T
    log_class = reference.log_softmax(class_scores)
    for c in np.flatnonzero(sizes):
      within = reference.log_softmax(log_prob[..., table == c])
      log_prob[..., table == c] = log_class[..., c : c + 1] + within
    return log_prob


def problem(head, rows=23):
  rng = np.random.default_rng(0)
  hidden = rng.standard_normal((rows, head.dim), np.float32)
  return random_variables(head), hidden, rng.integers(0, head.vocab, rows).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 7])
def test_classes_of_many_tiles_and_tokens_of_many_chunks_change_nothing(monkeypatch, tile):
  head = ClassBasedHead(101, 6, 4, with_empty_classes)
  variables, hidden, tokens = problem(head, 301)
  loss = lambda p, h: head.apply(variables | {"params": p}, h, tokens, method="log_prob").sum()
  both = lambda: jax.jit(jax.value_and_grad(loss, (0, 1)))(variables["params"], hidden)
  whole = both()
  monkeypatch.setattr(class_ops, "TILE", tile)
  monkeypatch.setattr(class_ops, "CHUNK", 32)
  # Sums of 301 terms of order one, in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5), both(), whole)


@pytest.mark.slow
def test_no_rows_are_gathered_for_each_token_and_no_product_is_of_the_vocabulary():
  rows, vocab, dim = 257, 4099, 16
  head = ClassBasedHead(vocab, dim, 64)
  variables, hidden, tokens = problem(head, rows)

  def loss(params, hidden, tokens):
    return head.apply(variables | {"params": params}, hidden, tokens, method="log_prob").mean()

  args = variables["params"], hidden, tokens
  assert reference.largest_value(jax.grad(loss, (0, 1)), *args) == vocab * dim < rows * 65 * dim
  products = reference.products_of(jax.grad(loss, (0, 1)), *args)
  # A chunk of 32 tokens with a tile of the 65 rows of a class, and the classes' own.
  assert max(np.prod(shape) for shape in products) <= rows * 64


def test_the_work_of_a_token_is_that_of_its_own_class():
  head = ClassBasedHead(40_000, 8, 200)
  variables, hidden, tokens = problem(head, 4)
  changed = variables["params"]["weight"].copy()
  changed[200:] = np.nan
  broken = variables | {"params": variables["params"] | {"weight": changed}}
  log_prob = jax.jit(lambda v: head.apply(v, hidden, tokens % 200, method="log_prob"))
  found, expected = log_prob(broken), log_prob(variables)
  np.testing.assert_array_equal(found, expected)


def test_a_missing_class_is_nan_and_an_empty_class_has_probability_0():
  head = ClassBasedHead(10, 4, 5)
  variables, hidden, _ = problem(head, 2)
  table = np.array([0, 0, 9, 1, 1, -1, 4, 4, 4, 4])
  both = lambda own, h: (own.log_prob(h, jnp.array([2, 5])), own.logits(h))
  variables = variables | {"codes": {"assignment": table}}
  found, logits = run(head, variables, both, hidden)
  assert np.isnan(found).all()
  assert np.isnan(logits[:, [2, 5]]).all()
  kept = np.delete(np.exp(logits.astype(np.float64)), [2, 5], axis=1)
  np.testing.assert_allclose(kept.sum(axis=1), 1, rtol=1e-5)


def test_a_table_of_another_length_is_refused():
  with pytest.raises(ValueError, match=r"assignment.*\(9,\)"):
    abstract_variables(ClassBasedHead(11, 4, 3, lambda vocab, classes: np.zeros(9, np.int32)))
