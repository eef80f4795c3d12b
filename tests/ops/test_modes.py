"""Functions of scores in JAX's own modes, with NumPy's arrays, and in exported programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vqjax
from tests.contract import strict_modes
from tests.jitted import results
from vqjax.ops import codes, forward_mode
from vqjax.ops import sampled_softmax as sampled
from vqjax.ops.kmeans import nearest_centers
from vqjax.ops.row_factory import RowFactory, columns
from vqjax.ops.vocab_parallel import gather
from vqjax.row_updates import update_rows

V, D, K = 101, 12, 7
rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
integers = lambda most, *shape: rng.integers(0, most, shape).astype(np.int32)
weight, teacher, bias, codebook = normal(V, D), normal(V, D), normal(V), normal(K, D)
code = integers(K, V)
candidates = sampled.Candidates(np.arange(20, dtype=np.int32), np.full(20, -1.0, np.float32))


def four(tokens):
  return jnp.stack([(tokens + i) % V for i in range(4)], axis=-1)


LOSSES = {
  "log_prob": lambda h, t, m: vqjax.linear_log_prob(
    h, weight, t, bias, mask=m, temperature=0.7, softcap=3
  ),
  "of a kernel": lambda h, t, m: vqjax.linear_log_prob(h, columns(weight.T), t, bias),
  "of composed rows": lambda h, t, m: vqjax.linear_log_prob(
    h, RowFactory(code, codebook, lambda code, codebook: codebook[code]), t, bias
  ),
  "softmax": lambda h, t, m: vqjax.linear_softmax(
    h, weight, t, bias, mask=m, entropy=True, mean=True, top_k=3
  ),
  "each loss": lambda h, t, m: vqjax.linear_cross_entropy(
    h, weight, t, bias, mask=m, token_weight=jnp.abs(h[..., 0]), label_smoothing=0.1, z_loss=1e-3
  ),
  "sum": lambda h, t, m: vqjax.linear_cross_entropy(
    h, weight, t, bias, mask=m, label_smoothing=0.1, reduction="sum"
  ),
  "mean": lambda h, t, m: vqjax.linear_cross_entropy(
    h, weight, t, bias, ignore_index=7, z_loss=1e-3, reduction="mean"
  ),
  "soft targets": lambda h, t, m: vqjax.linear_soft_target_loss(
    h, weight, h, teacher, bias, bias, mask=m
  ),
  "divergence": lambda h, t, m: vqjax.linear_divergence(h, weight, h, teacher, bias, mask=m),
  "some log-probabilities": lambda h, t, m: vqjax.linear_token_log_probs(h, weight, four(t), bias),
  "sparse targets": lambda h, t, m: vqjax.linear_sparse_target_loss(
    h, weight, four(t), jnp.full((*t.shape, 4), 0.2, jnp.float32), bias, mask=m
  ),
  "sampled": lambda h, t, m: sampled.sampled_softmax(h, weight, t, candidates, bias),
  "codes": lambda h, t, m: codes.code_softmax(h, codebook, code, t, bias, mean=True),
}
OTHERS = {
  "a derivative": lambda h, t, m: forward_mode.linear_log_prob_jvp(
    h, weight, t, bias, tangents=(h, weight, bias)
  ),
  "vectors": lambda h, t, m: codes.code_vectors(codebook, code, t),
  "top_k": lambda h, t, m: vqjax.linear_top_k(h, weight, 5, bias),
  "nearest centers": lambda h, t, m: nearest_centers(h.reshape(-1, D), codebook),
  "updated rows": lambda h, t, m: update_rows(weight, np.zeros(V, np.float32), t, h, 0.1),
  "the best": lambda h, t, m: vqjax.linear_sample(
    h, jax.random.PRNGKey(0), weight, bias, temperature=0, allowed=np.arange(V) > 3
  ),
}


def with_gradient(function):
  """The results of a loss, and the gradient of their sum."""

  def total(hidden, *given):
    leaves = jax.tree.leaves(function(hidden, *given))
    return sum(x.sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

  return lambda *given: (function(*given), jax.grad(total)(*given))


FUNCTIONS = {name: with_gradient(loss) for name, loss in LOSSES.items()} | OTHERS


def inputs(*batch):
  tokens = integers(V, *batch)
  return normal(*batch, D), tokens, tokens > 9


@pytest.mark.parametrize("name", FUNCTIONS)
def test_modes_of_jax_change_no_dtype(name):
  given = inputs(3, 5)
  expected = jax.eval_shape(FUNCTIONS[name], *given)
  with jax.enable_x64(True), strict_modes():
    found = jax.eval_shape(FUNCTIONS[name], *given)
  assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, expected)


def test_rows_of_a_narrow_table_have_a_gradient_in_the_modes_of_jax():
  total = lambda table: gather(table, np.array([3, 1, 3])).sum()
  with strict_modes():  # of float32 sums, outside of the function
    found = np.asarray(jax.jit(jax.grad(total))(np.ones((5, 2), jnp.bfloat16)))
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found[:, 0].astype(np.float32), [0, 1, 0, 2, 0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_is_exported_for_any_number_of_tokens(name):
  # More tokens than a chunk has, of which the last is not full.
  given = inputs(3, 50)
  b, t = jax.export.symbolic_shape("b, t")
  shapes = [jax.ShapeDtypeStruct((b, t, *x.shape[2:]), x.dtype) for x in given]
  exported = jax.export.export(jax.jit(FUNCTIONS[name]))(*shapes)
  with jax.debug_nans(True):
    expected = results(FUNCTIONS[name], *given)
  near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
  jax.tree.map(near, exported.call(*given), expected)


def test_draws_of_an_exported_program_differ_between_chunks():
  (n,) = jax.export.symbolic_shape("n")
  shapes = jax.ShapeDtypeStruct((n, D), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
  # The same scores everywhere: only the noise tells two chunks apart.
  draw = lambda hidden, key: vqjax.linear_sample(hidden, key, np.zeros((V, D), np.float32))
  exported = jax.export.export(jax.jit(draw))(*shapes)
  drawn = exported.call(np.ones((1024, D), np.float32), jax.random.PRNGKey(0))
  assert len({tuple(part) for part in np.asarray(drawn).reshape(4, 256)}) == 4
  assert np.bincount(drawn, minlength=V).max() < 40


def test_the_gradient_of_a_narrow_table_is_summed_over_chunks_in_float32():
  (n,) = jax.export.symbolic_shape("n")
  table = np.ones((3, D)).astype(jnp.bfloat16)

  def loss(table, hidden):
    return vqjax.linear_log_prob(hidden, table, jnp.zeros(hidden.shape[:1], jnp.int32)).sum()

  shapes = jax.ShapeDtypeStruct((3, D), jnp.bfloat16), jax.ShapeDtypeStruct((n, D), jnp.float32)
  exported = jax.export.export(jax.jit(jax.grad(loss)))(*shapes)
  found = exported.call(table, np.ones((64 * 1024, D), np.float32))
  # 65,536 tokens, each of which adds 2 / 3; sums in bfloat16 stop growing.
  np.testing.assert_allclose(found[0].astype(np.float32), 65536 * 2 / 3, rtol=0.01)


def test_a_score_of_inf_or_nan_leaves_no_draw():
  hidden = np.float32([[np.inf, 0], [np.nan, 0], [1, 0]])
  rows = np.float32([[1, 0], [0.5, 0], [0, 1]])

  def program(hidden):
    draw = lambda **options: vqjax.linear_sample(hidden, jax.random.key(0), rows, **options)
    log_prob = vqjax.linear_log_prob(hidden, rows, jnp.zeros(3, int))
    return log_prob, draw(), draw(top_k=2), draw(top_p=0.5)

  log_prob, *draws = results(program, hidden)
  assert np.isnan(log_prob).tolist() == [True, True, False]
  assert [(drawn < 0).tolist() for drawn in draws] == [[True, True, False]] * 3


def test_a_target_that_fills_the_candidates_has_its_own_score():
  """Two tokens of three can be drawn, and the third fills the list without a weight."""
  log_q = np.float32([0, 0, -np.inf])
  rows, hidden = normal(3, D), normal(1, D)

  def program(hidden):
    drawn = sampled.draw_candidates(jax.random.key(0), log_q, 3)
    return sampled.sampled_softmax(hidden, rows, np.int32([2]), drawn).log_prob, drawn.tokens

  (log_prob,), tokens = results(program, hidden)
  assert sorted(tokens) == [0, 1, 2]
  scores = (hidden @ rows.T)[0].astype(np.float64)
  np.testing.assert_allclose(log_prob, scores[2] - np.log(np.exp(scores).sum()), rtol=1e-5)


def test_forward_mode_names_the_function_that_has_one():
  hidden = normal(2, D)
  loss = lambda hidden: vqjax.linear_log_prob(hidden, weight, np.int32([1, 2]))
  with pytest.raises(TypeError) as caught:
    jax.jvp(loss, (hidden,), (hidden,))
  assert "linear_log_prob_jvp" in "".join(caught.value.__notes__)
