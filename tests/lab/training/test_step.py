"""A step equals its definition at any number of micro-batches, and repeats itself bitwise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.jitted import make_step
from vqjax import (
  CentroidQuantizer,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  DPQEmbedding,
  GroupedHead,
)
from vqjax.lab.training import (
  evaluate,
  init_state,
  make_scorer,
)
from vqjax.lm.models import Transformer


def decoder(dropout=0.0):
  return Transformer(
    embedding=DenseEmbedding(11, 8),
    head=GroupedHead(11, 8, use_bias=True),
    dim=8,
    layers=1,
    heads=2,
    context=4,
    dropout=dropout,
  )


@pytest.fixture
def batch():
  tokens = np.random.default_rng(3).integers(0, 11, (6, 5)).astype(np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.slow
def test_a_step_repeats_itself_bitwise_and_differs_from_the_next(batch):
  model, transform = decoder(dropout=0.5), optax.sgd(0.0)
  step = make_step(model, transform, lambda _: 0.0, jax.random.key(1))
  losses = []
  for _ in range(2):
    state = init_state(model, transform, jax.random.key(0))
    state, first = step(state, batch)
    _, second = step(state, batch)
    losses.append((float(first["loss"]), float(second["loss"])))
  assert losses[0] == losses[1]
  assert losses[0][0] != losses[0][1]


@pytest.mark.slow
def test_auxiliary_terms_join_the_loss_and_the_metrics(batch):
  class Penalised(DenseHead):
    def _loss_terms(self, arrays, hidden, token, known, counted):
      log_prob, terms = super()._loss_terms(arrays, hidden, token, known, counted)
      return log_prob, terms | {"penalty": 3.0 * (hidden**2).mean()}

  model = decoder().clone(head=Penalised(11, 8))
  plain = decoder().clone(head=DenseHead(11, 8))
  norms = {}
  for name, m in (("with", model), ("without", plain)):
    state = init_state(m, optax.sgd(1.0), jax.random.key(0))
    _, metrics = make_step(m, optax.sgd(1.0), lambda _: 1.0, jax.random.key(1))(state, batch)
    norms[name] = metrics
  # The final LayerNorm makes the mean square of hidden 1, but for its epsilon.
  np.testing.assert_allclose(norms["with"]["head/penalty"], 3.0, rtol=1e-2)
  np.testing.assert_allclose(norms["with"]["loss"], norms["without"]["loss"], rtol=1e-6)
  assert norms["with"]["grad_norm"] != norms["without"]["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_sown_values_are_metrics_and_not_part_of_the_loss(batch, accumulate):
  """The perplexity of the codes in each subspace: the mean and the least."""
  quantizer = CentroidQuantizer(4, 2, normalize=False, weight=0.0)
  model = decoder().clone(embedding=DPQEmbedding(11, 8, quantizer))
  transform = optax.sgd(0.0)
  state = init_state(model, transform, jax.random.key(0))
  assert "metrics" not in state.model_state
  embedding, own = model.embedding, {"params": state.params["embedding"]}
  codes = np.asarray(embedding.apply(own, jnp.asarray(batch["inputs"]), method="codes_of"))
  expected = []
  for part in range(accumulate):
    rows = codes[part::accumulate].reshape(-1, 2)
    share = np.stack([np.bincount(rows[:, m], minlength=4) for m in range(2)]) / len(rows)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(axis=1)
    expected.append(np.exp(entropy))
  step = make_step(model, transform, lambda _: 0.0, jax.random.key(1), accumulate)
  state, metrics = step(state, batch)
  sown = {name: x for name, x in metrics.items() if "perplexity" in name}
  assert 0 < metrics["embedding/quantizer/code_usage"] <= 1
  mean = np.mean([perplexity.mean() for perplexity in expected])
  least = np.mean([perplexity.min() for perplexity in expected])
  assert sown == {
    "embedding/quantizer/code_perplexity": pytest.approx(mean, rel=1e-5),
    "embedding/quantizer/code_perplexity_least": pytest.approx(least, rel=1e-5),
  }
  assert metrics["loss"] < np.log(11) + 1


@pytest.mark.slow
def test_micro_batches_with_different_numbers_of_targets_add_up_to_the_batch(batch):
  targets = np.array(batch["targets"])
  targets[1::2] = -1
  targets[0, 1:] = -1
  model, transform = decoder(), optax.sgd(0.1)
  found = []
  for accumulate in (1, 2, 3, 6):
    state = init_state(model, transform, jax.random.key(0))
    step = make_step(model, transform, lambda _: 0.1, jax.random.key(1), accumulate)
    state, metrics = step(state, batch | {"targets": targets})
    found.append((state.params, metrics["loss"], metrics["grad_norm"]))
  # Sums over six rows of float32 in another order.
  near = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-5)
  for parts in found[1:]:
    jax.tree.map(near, found[0], parts)


class Counting(CodebookHead):
  """Counts the passes of training, and the tokens in them, in the collection `counts`."""

  def setup(self):
    super().setup()
    self.passes = self.variable("counts", "passes", lambda: jnp.int32(0))
    self.seen = self.variable("counts", "seen", jnp.zeros, (self.vocab,))

  def loss_terms(self, hidden, tokens):
    if not self.is_initializing():
      self.passes.value += 1
      self.seen.value = self.seen.value.at[tokens].add(1.0)
    return super().loss_terms(hidden, tokens)

  def logical_axes(self):
    return super().logical_axes() | {"counts": {"passes": (), "seen": ("vocab",)}}


def counting_model():
  head = Counting(16, 16, codes=8)
  fields = {"dim": 16, "layers": 1, "heads": 2, "context": 8}
  return Transformer(embedding=DenseEmbedding(16, 16), head=head, **fields)


def text_batch():
  tokens = np.random.default_rng(0).integers(0, 16, (8, 9)).astype(np.int32)
  return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
def test_variables_that_the_model_writes_pass_through_micro_batches_and_steps(accumulate):
  state = init_state(counting_model(), optax.sgd(0.1), jax.random.key(0))
  assert int(state.model_state["counts"]["head"]["passes"]) == 0
  codes = np.array(state.model_state["codes"]["head"]["assignment"])
  where = state.model_state["codes"]["head"]["assignment"].unsafe_buffer_pointer()
  step = make_step(counting_model(), optax.sgd(0.1), lambda _: 0.1, jax.random.key(1), accumulate)
  for _ in range(3):
    state, metrics = step(state, text_batch())
  counts = state.model_state["counts"]["head"]
  assert int(counts["passes"]) == 3 * accumulate
  np.testing.assert_array_equal(
    counts["seen"], 3 * np.bincount(text_batch()["targets"].ravel(), None, 16)
  )
  # Variables that the model does not write are not copied.
  np.testing.assert_array_equal(state.model_state["codes"]["head"]["assignment"], codes)
  assert state.model_state["codes"]["head"]["assignment"].unsafe_buffer_pointer() == where
  assert jnp.isfinite(metrics["loss"])


def test_an_evaluation_writes_nothing():
  variables = init_state(counting_model(), optax.sgd(0.1), jax.random.key(0)).variables
  before = jax.device_get(variables)
  score = evaluate(make_scorer(counting_model()), variables, [text_batch()], 100)
  assert score.tokens == 64
  jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(variables))
