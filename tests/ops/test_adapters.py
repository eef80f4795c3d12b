"""Tests of the adapters against the formulas of the originals, from all logits in float64."""

import functools
import inspect
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import reference
from tests.ops.exact import compare, normals
from vqjax.ops import adapters
from vqjax.sharding import MeshShape, make_mesh

B, T, D, V = 3, 5, 6, 101
# Sums of a hundred terms of scores up to 10: some hundred roundings of 6e-8 each.
NEAR = {"atol": 5e-5, "rtol": 1e-5}


def operands():
  labels = np.random.default_rng(1).integers(0, V, (B, T))
  return *normals(0, (B, T, D), (D, V)), labels


WHERE = np.arange(15).reshape(B, T) % 3 != 1


@pytest.mark.parametrize("where", [None, WHERE, WHERE[..., None]], ids=["no", "labels", "classes"])
def test_optax_integer_labels(where):
  hidden, kernel, labels = operands()

  def original(hidden, kernel):
    options = {} if where is None else {"where": where}
    return (optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, labels, **options),)

  run = adapters.softmax_cross_entropy_with_integer_labels
  compare(lambda h, k: (run(h, k, labels, where=where),), original, (hidden, kernel), **NEAR)


def test_labels_that_optax_would_leave_out_may_hold_anything():
  hidden, kernel, labels = operands()
  broken, odd = np.where(WHERE[..., None], hidden, np.nan), np.where(WHERE, labels, -100)
  run = adapters.softmax_cross_entropy_with_integer_labels
  loss = lambda h, k: run(h, k, odd, where=WHERE).sum()
  d_hidden, d_kernel = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(broken, kernel))
  assert np.isfinite(d_kernel).all()
  assert not d_hidden[~WHERE].any()
  assert np.isfinite(d_hidden).all()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_tokamax_linear_softmax_cross_entropy_loss(reduction):
  hidden, kernel, labels = operands()
  labels = labels.reshape(-1)

  def original(x, weights):
    losses = -jnp.take_along_axis(jax.nn.log_softmax(x @ weights), labels[:, None], axis=1)[:, 0]
    return ({"sum": losses.sum(), "mean": losses.mean(), "none": losses}[reduction],)

  options = {"reduction": reduction, "precision": None, "implementation": "chunked_xla"}
  ours = lambda x, w: (adapters.linear_softmax_cross_entropy_loss(x, labels, w, **options),)
  compare(ours, original, (hidden.reshape(-1, D), kernel), **NEAR)


def test_the_arguments_are_those_of_the_originals():
  names = lambda function: list(inspect.signature(function).parameters)
  original = names(optax.softmax_cross_entropy_with_integer_labels)
  ours = names(adapters.softmax_cross_entropy_with_integer_labels)
  assert ours == ["hidden", "kernel", *original[1:], "options"]
  # tokamax 0.0.17, MaxText e591f30cbbf2 and tunix c7d8950f12a9, as read.
  assert names(adapters.linear_softmax_cross_entropy_loss)[:-1] == [
    *("x", "labels", "weights", "reduction", "precision", "implementation")
  ]
  assert names(adapters.vocab_tiling_nnx_loss)[:-1] == [
    *("model", "hidden_states", "data", "config", "is_train")
  ]
  assert names(adapters.compute_chunked_logps)[:-1] == [
    *("model", "hidden_states", "target_ids", "temperature", "chunk_size", "return_entropy")
  ]


class MaxText:
  """What the vocabulary tiling of MaxText reads of a model, and its head by that code's formula."""

  def __init__(self, kernel, config):
    self.config = config
    self.token_embedder = types.SimpleNamespace(embedding=kernel.T)
    self.decoder = types.SimpleNamespace(
      decoder_norm=lambda x: x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True)),
      dropout=lambda x, deterministic: x if deterministic else x * 0.5,
      logits_dense=types.SimpleNamespace(kernel=kernel),
    )

  def logits(self, hidden, deterministic):
    hidden = self.decoder.dropout(self.decoder.decoder_norm(hidden), deterministic=deterministic)
    if not self.config.logits_via_embedding:
      return hidden @ self.decoder.logits_dense.kernel
    logits = hidden @ self.token_embedder.embedding.T
    if self.config.normalize_embedding_logits:
      logits = logits / jnp.sqrt(hidden.shape[-1])
    cap = self.config.final_logits_soft_cap
    return jnp.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize(
  "options",
  [
    {"logits_via_embedding": False},
    {"normalize_embedding_logits": True, "final_logits_soft_cap": 2.0, "enable_dropout": True},
  ],
)
def test_maxtext_vocabulary_tiling(options):
  defaults = {
    "logits_via_embedding": True,
    "normalize_embedding_logits": False,
    "final_logits_soft_cap": 0.0,
    "enable_dropout": False,
    "logits_dot_in_fp32": False,
    "z_loss_multiplier": 1e-2,
    "dtype": None,
  }
  config = types.SimpleNamespace(**defaults | options)
  hidden, kernel, labels = operands()
  segmentation = (np.arange(15).reshape(B, T) % 4 != 3).astype(np.int32)
  data = {"targets": labels, "targets_segmentation": segmentation}

  def original(hidden, kernel):
    logits = MaxText(kernel, config).logits(hidden, deterministic=not config.enable_dropout)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    own = (jax.nn.one_hot(labels, V) * logits).sum(-1)
    z_loss = config.z_loss_multiplier * log_z**2
    total = lambda x: (x * (segmentation != 0)).sum()
    return total(log_z - own + z_loss), total(z_loss)

  def ours(hidden, kernel):
    model = MaxText(kernel, config)
    return adapters.vocab_tiling_nnx_loss(model, hidden, data, config, True)

  values, _ = compare(ours, original, (hidden, kernel), **NEAR)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"))):
    found = jax.device_get(jax.jit(ours)(hidden, kernel))
  chex.assert_trees_all_close(found, values, **NEAR)


@pytest.mark.parametrize(("kind", "temperature"), [("tied", 0.0), ("untied", 0.7), ("gemma", 0.7)])
def test_tunix_per_token_log_probabilities(kind, temperature):
  hidden, kernel, target_ids = operands()
  cap = 3.0 if kind == "gemma" else None

  def model(kernel):
    config = {"use_tied_embedding": kind == "tied", "dtype": None}
    if kind == "gemma":
      config = {"final_logit_softcap": cap}
    parts = {"embedder": types.SimpleNamespace(input_embedding=kernel.T)}
    if kind == "untied":
      parts = {"lm_head": types.SimpleNamespace(w=kernel)}
    return types.SimpleNamespace(config=types.SimpleNamespace(**config), **parts)

  def original(hidden, kernel):
    logits = hidden @ kernel
    logits = jnp.tanh(logits / cap) * cap if cap else logits
    logits = logits / temperature if temperature not in (0.0, 1.0) else logits
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(log_probs, target_ids[..., None], axis=-1)[..., 0]
    return own, -(jnp.exp(log_probs) * log_probs).sum(-1)

  run = lambda h, k, entropy: adapters.compute_chunked_logps(
    model(k), h, target_ids, temperature, 2, return_entropy=entropy
  )
  both, _ = compare(lambda h, k: run(h, k, True), original, (hidden, kernel), **NEAR)
  alone = jax.jit(lambda h, k: run(h, k, False))(hidden, kernel)
  np.testing.assert_allclose(alone, both[0], atol=NEAR["atol"])


def test_the_options_of_the_tiled_loss_pass_through_and_no_logits_exist():
  run = functools.partial(
    adapters.softmax_cross_entropy_with_integer_labels, vocab_axis="model", tile=(2, 10)
  )
  losses = jax.jit(run)(*operands())
  with jax.set_mesh(make_mesh(MeshShape(2, 1, 4))):
    found = jax.jit(run)(*operands())
    np.testing.assert_allclose(jax.device_get(found), losses, atol=NEAR["atol"])
  n, v = 2053, 4099
  shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((n, D), (D, v))]
  loss = lambda x, w: adapters.linear_softmax_cross_entropy_loss(x, np.zeros(n, np.int32), w)
  assert reference.largest_value(jax.grad(loss, (0, 1)), *shapes) < n * v / 4


@pytest.mark.parametrize(
  ("change", "error", "message"),
  [
    ({"axis": 0}, ValueError, "`axis` must be the last one"),
    ({"where": np.ones((B, T, V), bool)}, ValueError, r"`where` must be bool of shape \(3, 5\)"),
    ({"where": np.ones((B, T), np.float32)}, ValueError, "`where` must be bool .* got float32"),
  ],
)
def test_what_optax_allows_beyond_labels_is_refused(change, error, message):
  with pytest.raises(error, match=message):
    inspect.unwrap(adapters.softmax_cross_entropy_with_integer_labels)(*operands(), **change)


def test_what_tokamax_refuses_is_refused():
  hidden, kernel, labels = operands()
  arrays = hidden.reshape(-1, D), labels.reshape(-1), kernel
  loss = inspect.unwrap(adapters.linear_softmax_cross_entropy_loss)
  with pytest.raises(NotImplementedError, match="`precision` must be None"):
    loss(*arrays, precision="highest")
  with pytest.raises(ValueError, match=r'`reduction` must be "none", "sum" or "mean"; got .max'):
    loss(*arrays, reduction="max")
