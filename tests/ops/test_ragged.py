"""Tests of unshared groups, by the loop of a CPU and by ragged products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.ops.exact import normals
from vqjax.ops import ragged, vocab_parallel
from vqjax.ops.ragged import unshared_slot_log_prob

N, D, S = 61, 5, 7
SIZES = (7, 1, 4, 6, 3)
# The third group has no token, the fourth more than three blocks of the loop.
COUNTS = (3, 2, 0, 53, 3)


@pytest.fixture(params=["gpu", "tpu"])
def path(request, monkeypatch):
  """The loop, and the ragged product of TPUs, which a CPU can do too."""
  monkeypatch.setattr(vocab_parallel, "platform", lambda: request.param)
  return request.param


def operands(counts=COUNTS, sizes=SIZES, n=N):
  rng, sizes = np.random.default_rng(1), np.array(sizes)
  group = rng.permutation(np.repeat(np.arange(len(sizes)), counts))
  hidden, weight, bias, cotangent = normals(0, (n, D), (len(sizes), S, D), (len(sizes), S), (n,))
  return hidden, weight, bias, sizes, group, rng.integers(0, sizes[group]), cotangent


def reference(hidden, weight, bias, sizes, group, slot, cotangent):
  """Log-probabilities and the gradients in hidden, weight and bias, token by token in float64."""
  hidden, weight, bias = (np.asarray(x, np.float64) for x in (hidden, weight, bias))
  log_prob, d_hidden = np.zeros(len(hidden)), np.zeros_like(hidden)
  d_weight, d_bias = np.zeros_like(weight), np.zeros_like(bias)
  for n, (g, s, c) in enumerate(zip(group, slot, cotangent)):
    own = weight[g, : sizes[g]]
    score = own @ hidden[n] + bias[g, : sizes[g]]
    p = np.exp(score - score.max())
    p /= p.sum()
    log_prob[n] = np.log(p[s])
    d = -c * p
    d[s] += c
    d_hidden[n] = d @ own
    d_weight[g, : sizes[g]] += np.outer(d, hidden[n])
    d_bias[g, : sizes[g]] += d
  return log_prob, d_hidden, d_weight, d_bias


def value_and_gradients(hidden, weight, bias, sizes, group, slot, cotangent, **options):
  run = lambda h, w, b: unshared_slot_log_prob(h, w, b, sizes, group, slot, **options)
  log_prob, pull = jax.vjp(run, hidden, weight, bias)
  return log_prob, *pull(cotangent)


def check(found, expected, atol=2e-5):
  # float32 sums of up to 53 terms of order ten: some roundings of 6e-7.
  for a, b in zip(found, expected, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


def compiled(function):
  """Compiled anew: what is compiled for one path is not that of the other."""
  return jax.jit(lambda *args: function(*args))


@functools.cache
def of_path(path):
  """`value_and_gradients`, compiled once for all tests of a path."""
  del path
  return compiled(value_and_gradients)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [COUNTS, (0, 0, N, 0, 0)])
def test_value_and_gradients_are_those_of_float64(path, counts):
  args = operands(counts)
  check(of_path(path)(*args), reference(*args))


@pytest.mark.slow
def test_only_tpus_are_given_a_ragged_product(path):
  program = str(jax.make_jaxpr(lambda *args: value_and_gradients(*args))(*operands()))
  assert ("ragged_dot" in program) == (path == "tpu")
  assert ("while" in program) == (path == "gpu")


def test_without_a_bias_it_is_zero(path):
  hidden, weight, bias, *rest = operands()
  loss = lambda h, w, *rest: unshared_slot_log_prob(h, w, None, *rest[:3]) @ rest[-1]
  expected = reference(hidden, weight, np.zeros_like(bias), *rest)
  check(compiled(jax.grad(loss, (0, 1)))(hidden, weight, *rest), expected[1:3])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tokens_have_any_shape(path, shape):
  hidden, weight, bias, sizes, group, slot, cotangent = operands()
  n = int(np.prod(shape))
  some = [x[:n].reshape((*shape, *x.shape[1:])) for x in (hidden, group, slot, cotangent)]
  found = compiled(value_and_gradients)(some[0], weight, bias, sizes, *some[1:])
  expected = reference(hidden[:n], weight, bias, sizes, group[:n], slot[:n], cotangent[:n])
  assert found[0].shape == shape
  check([x.reshape(y.shape) for x, y in zip(found, expected)], expected)


def test_temporaries_are_rows_of_the_tokens_and_never_a_weight_for_each():
  n, d, groups, slots = 4096, 256, 224, 225
  shapes = [(n, d), (groups, slots, d), (groups, slots)]
  floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  ints = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (groups, n, n)]
  loss = lambda *args: unshared_slot_log_prob(*args).mean()
  program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*floats, *ints).compile()
  # A few arrays of [N, D] and of [N, S]; the weight is 49 MiB, and one for each token 900.
  assert program.memory_analysis().temp_size_in_bytes < 4 * 4 * n * (d + slots)


@pytest.mark.slow
def test_vmap_is_a_loop_over_its_elements(path):
  hidden, weight, bias, sizes, group, slot, cotangent = operands()
  tokens = [x[:60].reshape(3, 20, *x.shape[1:]) for x in (hidden, group, slot, cotangent)]
  rows = jnp.asarray(bias), jnp.asarray(sizes)

  def gradients(h, g, s, c):
    return value_and_gradients(h, weight, *rows, g, s, c)

  found = compiled(jax.vmap(gradients))(*tokens)
  parts = [reference(h, weight, bias, sizes, g, s, c) for h, g, s, c in zip(*tokens)]
  check(found, [np.stack(x) for x in zip(*parts)])

  def loss(weight):
    own = lambda h, g, s: unshared_slot_log_prob(h, weight, *rows, g, s)
    return (jax.vmap(own)(*tokens[:3]) * tokens[3]).sum()

  check([compiled(jax.grad(loss))(weight)], [sum(part[2] for part in parts)])


def test_bfloat16_operands_are_summed_in_float32(path):
  hidden, weight, bias, *rest = operands()
  narrow_operands = functools.partial(value_and_gradients, dtype=jnp.bfloat16)
  found = compiled(narrow_operands)(hidden, weight, bias, *rest)
  rounded = [x.astype(jnp.bfloat16).astype(np.float32) for x in (hidden, weight)]
  expected = reference(*rounded, bias, *rest)
  check(found[:1], expected[:1])
  # The cotangent of each score, of up to 3, is rounded to 2^-9 of itself before it is summed over
  # slots or tokens, whose factors are up to 4.
  check(found[1:], expected[1:], atol=0.1)
  narrow = [x.astype(jnp.bfloat16) for x in (hidden, weight, bias)]
  kinds = [x.dtype for x in jax.eval_shape(value_and_gradients, *narrow, *rest)]
  assert kinds == [jnp.float32, *[jnp.bfloat16] * 3]


def test_a_slot_that_its_group_lacks_has_no_probability_and_no_gradient(path):
  hidden, weight, bias, sizes, group, _, cotangent = operands()
  args = hidden, weight, bias, sizes, group, sizes[group], cotangent
  log_prob, *gradients = of_path(path)(*args)
  # The last slot of the largest group is the last column: there is none beyond.
  lacking = sizes[group] < S
  assert np.isneginf(np.asarray(log_prob)[lacking]).all()
  assert all(np.isfinite(x).all() for x in gradients)
  lacks = np.arange(S) >= sizes[:, None]
  np.testing.assert_array_equal(np.asarray(gradients[1])[lacks], 0)


def test_a_vector_that_is_no_number_stays_in_its_group(path):
  hidden, *rest = operands()
  hidden[np.argmax(rest[3] == 3)] = np.nan
  log_prob, _, d_weight, d_bias = jax.device_get(of_path(path)(hidden, *rest))
  assert np.isnan(log_prob).sum() == 1
  for gradient in (d_weight, d_bias):
    assert np.isfinite(np.delete(gradient, 3, axis=0)).all()


@pytest.mark.slow
def test_on_a_mesh_each_device_has_its_groups_and_its_tokens(path):
  model, data = 4, 2  # the fourth part has nothing but groups that fill it up
  hidden, weight, bias, sizes, *rest = operands()
  groups = len(SIZES)
  # Groups of size 0 and of any numbers fill up what the devices do not divide.
  fill = -groups % model
  filled = lambda x, value: np.concatenate([x, np.full((fill, *x.shape[1:]), value, x.dtype)])
  tables = filled(weight, 0), filled(bias, -np.inf), filled(sizes, 0)
  group, slot, cotangent = map(jnp.asarray, rest)
  mesh = jax.make_mesh(
    (model, data), ("model", "data"), (AxisType.Auto,) * 2, devices=jax.devices()[: model * data]
  )

  def spread(hidden, weight, bias):
    body = lambda h, w, b, sizes: unshared_slot_log_prob(
      h, w, b, sizes, group, slot, vocab_axis="model"
    )
    own = P("model")
    run = jax.shard_map(body, in_specs=(P(), own, own, own), out_specs=P(), axis_names={"model"})
    return run(hidden, weight, bias, tables[2])

  def everything(*args):
    log_prob, pull = jax.vjp(spread, *args)
    return log_prob, *pull(cotangent)

  with jax.set_mesh(mesh):
    log_prob, d_hidden, *d_tables = jax.device_get(compiled(everything)(hidden, *tables[:2]))
    narrow = [x.astype(jnp.bfloat16) for x in (hidden, *tables[:2])]
    d_narrow = jax.device_get(compiled(everything)(*narrow))[1:]
  assert all(np.isfinite(x).all() for x in d_tables)
  for found, exact in zip(d_narrow, (d_hidden, *d_tables)):
    # Operands and cotangents, of up to 10 together, are rounded to 2^-9 of themselves.
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=0.1)
  expected = reference(hidden, weight, bias, sizes, *rest)
  check((log_prob, d_hidden, *[x[:groups] for x in d_tables]), expected)


def test_in_a_shard_map_over_tokens_the_gradient_is_that_of_all_devices(path):
  hidden, weight, bias, sizes, group, slot, cotangent = (
    x[:60] if x.shape[0] == N else x for x in operands()
  )
  mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
  where = P("data")

  def everything(*args):
    def run(h, w, b):
      body = lambda h, w, b, g, s: unshared_slot_log_prob(h, w, b, jnp.asarray(sizes), g, s)
      specs = (where, P(), P(), where, where)
      return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=where)(h, w, b, group, slot)

    log_prob, pull = jax.vjp(run, *args)
    return log_prob, *pull(cotangent)

  found = compiled(everything)(hidden, weight, bias)
  check(found, reference(hidden, weight, bias, sizes, group, slot, cotangent))


def test_parts_of_the_tokens_add_up(path, monkeypatch):
  args = operands()
  # Parts of ten tokens, the last of which is padded.
  monkeypatch.setattr(ragged, "_SCORES", 10 * S)
  check(compiled(value_and_gradients)(*args), reference(*args))
