"""Ops on a mesh whose axes are explicit, and inside of a `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests import reference
from tests.ops.exact import normals
from vqjax.ops import codes, softmax
from vqjax.ops.distillation import linear_divergence
from vqjax.ops.linear_decoding import linear_sample, linear_top_k
from vqjax.ops.row_factory import columns
from vqjax.ops.scores import ScoreOptions
from vqjax.ops.sparse_targets import linear_sparse_target_loss

V, D = 64, 16


@pytest.fixture
def operands():
  hidden, weight = normals(0, (8, 3, D), (V, D))
  return hidden, weight, np.arange(24).reshape(8, 3)


@pytest.fixture
def mesh():
  return jax.make_mesh((2, 4), ("data", "model"))  # JAX's default: explicit axes


@pytest.mark.parametrize("vocab_axis", [None, "model"])
@pytest.mark.parametrize(
  "rows", [P("model"), P(None, "data"), P("model", "data"), P(), P(("model", "data"))]
)
def test_results_and_gradients_are_equal_and_typed_by_the_tokens(operands, mesh, rows, vocab_axis):
  def loss(hidden, weight, tokens, vocab_axis=None):
    log_prob = softmax.linear_log_prob(hidden, weight, tokens, vocab_axis=vocab_axis)
    return log_prob.sum(), log_prob

  both = jax.value_and_grad(loss, (0, 1), has_aux=True)
  hidden, weight, tokens = operands
  expected = jax.jit(both)(hidden, weight, tokens)
  with jax.set_mesh(mesh):
    hidden, tokens = (jax.device_put(x, P("data")) for x in (hidden, tokens))
    weight = jax.device_put(weight, rows)
    found = jax.jit(both, static_argnums=3)(hidden, weight, tokens, vocab_axis)
    (_, log_prob), (d_hidden, d_weight) = found
    assert jax.typeof(log_prob).sharding.spec == P("data", None)
    assert jax.typeof(d_hidden).sharding == jax.typeof(hidden).sharding
    assert jax.typeof(d_weight).sharding == jax.typeof(weight).sharding
    found = jax.device_get(found)
  # Sums of 100 terms of order one in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)


def test_a_loss_runs_eagerly_on_explicit_axes(operands, mesh):
  hidden, weight, tokens = operands
  with jax.set_mesh(mesh):
    placed = (jax.device_put(x, P(axis)) for x, axis in zip(operands, ("data", "model", "data")))
    found = softmax.linear_log_prob(*placed, vocab_axis="model")
  np.testing.assert_allclose(found, reference.linear_log_prob(hidden, weight, tokens), atol=2e-5)


def test_vectors_are_gathered_eagerly_on_explicit_axes(operands, mesh):
  _, weight, tokens = operands
  assignment = np.arange(V) % 7
  with jax.set_mesh(mesh):
    given = jax.device_put(weight[:7]), jax.device_put(assignment)
    gathered = codes.code_vectors(*given, jax.device_put(tokens, P("data")))
    assert jax.typeof(gathered).sharding.spec == P("data", None, None)
  np.testing.assert_array_equal(gathered, weight[assignment[tokens]])


def distillation_losses(hidden, weight, tokens, vocab_axis=None):
  """A divergence, and a loss against two tokens, of a student from a teacher twice as sharp."""
  options = {"options": ScoreOptions(temperature=0.7, vocab_axis=vocab_axis)}
  divergence = linear_divergence(hidden, weight, 2 * hidden, weight, mixture=0.4, **options)
  two = jnp.stack([tokens, (tokens + 1) % V], axis=-1)
  probs = jnp.broadcast_to(jnp.array([0.6, 0.3], hidden.dtype), two.shape)
  return divergence, linear_sparse_target_loss(
    hidden, weight, two, probs, rest="bucket", **options
  ).kl


@pytest.mark.slow
def test_distillation_losses_are_equal_on_explicit_axes_and_inside_of_a_shard_map(operands, mesh):
  def loss(hidden, weight, tokens, vocab_axis=None):
    each = distillation_losses(hidden, weight, tokens, vocab_axis)
    return sum(x.sum() for x in each), each

  both = jax.value_and_grad(loss, (0, 1), has_aux=True)
  hidden, weight, tokens = operands
  expected = jax.jit(both)(hidden, weight, tokens)
  with jax.set_mesh(mesh):
    placed = (jax.device_put(x, P(axis)) for x, axis in zip(operands, ("data", "model", "data")))
    found = jax.jit(both, static_argnums=3)(*placed, "model")
    for each in found[0][1]:
      assert jax.typeof(each).sharding.spec == P("data", None)
    found = jax.device_get(found)
  # Sums of 100 terms of order one in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)):
    inside = lambda *a: distillation_losses(*a, vocab_axis="model")
    specs = P("data"), P("model"), P("data")
    run = jax.jit(jax.shard_map(inside, in_specs=specs, out_specs=P("data")))
    found = jax.device_get(run(hidden, weight, tokens))
    for ours, wanted in zip(found, expected[0][1]):
      np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.parametrize(
  "wrapped", [jax.jit, pytest.param(lambda run: run, marks=pytest.mark.slow, id="no jit")]
)
def test_the_loss_runs_inside_of_a_shard_map(operands, wrapped):
  hidden, weight, tokens = operands
  run = lambda *operands: softmax.linear_log_prob(*operands, vocab_axis="model")
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2)):
    specs = P("data"), P("model"), P("data")
    mapped = jax.shard_map(run, in_specs=specs, out_specs=P("data"))
    found = wrapped(mapped)(hidden, weight, tokens)
  np.testing.assert_allclose(found, reference.linear_log_prob(hidden, weight, tokens), atol=2e-5)


def test_gradients_of_arrays_without_a_mesh_pass_a_transposition(operands, mesh):
  hidden, weight, tokens = operands

  def loss(weight, vocab_axis=None):
    kernel = columns(jnp.transpose(weight))
    return softmax.linear_log_prob(hidden, kernel, tokens, vocab_axis=vocab_axis).sum()

  expected = jax.jit(jax.grad(loss))(weight)
  with jax.set_mesh(mesh):
    found = jax.device_get(jax.jit(jax.grad(lambda w: loss(w, "model")))(weight))
  np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)


CODES = np.arange(V) % 7
OPS = {
  "linear_log_prob": lambda h, w, t: softmax.linear_log_prob(tokens=t, weight=w, hidden=h),
  "linear_cross_entropy": lambda h, w, t: softmax.linear_cross_entropy(
    weight=w, tokens=t, hidden=h, label_smoothing=0.1
  ),
  "linear_divergence": lambda h, w, t: linear_divergence(
    teacher_weight=w, teacher_hidden=2 * h, weight=w, hidden=h
  ),
  "linear_top_k": lambda h, w, t: linear_top_k(k=3, weight=w, hidden=h)[1],
  "linear_sample": lambda h, w, t: linear_sample(key=jax.random.key(0), weight=w, hidden=h),
  "code_softmax": lambda h, w, t: (
    codes.code_softmax(tokens=t, assignment=CODES, codebook=w[:7], hidden=h).log_prob
  ),
  "code_vectors": lambda h, w, t: codes.code_vectors(assignment=CODES, codebook=w[:7], tokens=t),
}


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", OPS)
def test_ops_take_numpy_arrays_and_arguments_by_name_on_any_mesh(name, axes):
  rng = np.random.default_rng(0)
  hidden, weight = (rng.normal(size=(*n, D)).astype(np.float32) for n in ((8, 3), (V,)))
  tokens = rng.integers(0, V, (8, 3))
  expected = jax.jit(lambda: OPS[name](hidden, weight, tokens))()
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (axes,) * 2)):
    found = jax.jit(lambda: OPS[name](hidden, weight, tokens))()
    np.testing.assert_allclose(jax.device_get(found), expected, atol=2e-5)
    placed = jax.device_put(hidden, P("data")), weight, jax.device_put(tokens, P("data"))
    found = jax.jit(OPS[name])(*placed)
    if axes == AxisType.Explicit:
      assert jax.typeof(found).sharding.spec[0] == "data"
    np.testing.assert_allclose(jax.device_get(found), expected, atol=2e-5)
