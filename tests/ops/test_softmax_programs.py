"""Tests of the tiled softmax's programs: products, temporaries, transfers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import reference
from tests.ops.exact import normals
from vqjax.lab.plan import collectives, hlo, loops
from vqjax.ops.softmax import linear_cross_entropy, linear_log_prob, linear_softmax

N, D, V, TILE = 24, 6, 101, (4, 10)


def operands():
  """hidden, weight, bias and tokens."""
  return *normals(0, (N, D), (V, D), (V,)), np.random.default_rng(1).integers(0, V, N)


def loss(hidden, weight, bias, tokens):
  return -linear_log_prob(hidden, weight, tokens, bias, tile=TILE).mean()


def close(found, expected):
  # float32 sums of a hundred terms in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, expected)


def tile_products(function, *args):
  """Matrix products of a tile's scores, or with them; each is in a loop, and written once."""
  return [shape for shape in reference.products_of(function, *args) if set(shape) & set(TILE)]


@pytest.mark.slow
def test_a_gradient_takes_four_products_of_a_tile():
  args = operands()
  assert len(tile_products(loss, *args)) == 1
  assert len(tile_products(jax.grad(loss, (0, 1, 2)), *args)) == 4


def test_the_compiler_removes_gradients_that_are_not_used():
  n, d, v = 512, 128, 1280
  shapes = (n, d), (v, d), (v,)
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  tokens = jax.ShapeDtypeStruct((n,), jnp.int32)
  # A given tile keeps no scores.
  value = lambda h, w, b, t: linear_log_prob(h, w, t, b, tile=(n, v)).mean()

  def products(wanted, *frozen):
    freeze = lambda *args: (
      jax.lax.stop_gradient(x) if i in frozen else x for i, x in enumerate(args)
    )
    gradient = jax.grad(lambda *args: value(*freeze(*args)), wanted)
    compiled = jax.jit(gradient).lower(*args, tokens).compile()
    # All is one tile here: the rest, some operations for each score, is below half a product.
    return round(compiled.cost_analysis()["flops"] / (2 * n * d * v))

  assert products((0, 1, 2)) == 4
  assert products(0) == products((0, 1, 2), 1, 2) == 3
  assert products(1) == products(1, 0) == 3
  assert products(2) == 2


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_smoothing_makes_no_second_pass_over_the_vocabulary(softcap):
  hidden, weight, bias, tokens = operands()

  def products(smoothing):
    options = {"label_smoothing": smoothing, "softcap": softcap, "tile": TILE}
    total = lambda h, w, b: linear_cross_entropy(h, w, tokens, b, **options).sum()
    return tile_products(jax.grad(total, (0, 1, 2)), hidden, weight, bias)

  assert products(0.1) == products(0.0)


@pytest.mark.slow
def test_inside_of_a_shard_map_over_tokens_loss_and_gradients_are_those_of_all_tokens():
  hidden, weight, bias, tokens = operands()
  mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

  def mean(h, w, b, t):
    return jax.lax.pmean(loss(h, w, b, t), "data")

  specs = P("data"), P(), P(), P("data")
  outside = jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P())
  expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(hidden, weight, bias, tokens)
  close(jax.jit(jax.value_and_grad(outside, (0, 1, 2)))(hidden, weight, bias, tokens), expected)
  # The gradient of what is the same on all devices is their sum, taken once.
  inside = jax.shard_map(
    jax.value_and_grad(mean, (0, 1, 2)),
    mesh=mesh,
    in_specs=specs,
    out_specs=(P(), (P("data"), P(), P())),
  )
  close(jax.jit(inside)(hidden, weight, bias, tokens), expected)


@pytest.mark.slow
def test_all_outputs_inside_of_a_shard_map_over_tokens_equal_those_outside():
  mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
  outputs = {"entropy": True, "mean": True, "top_k": 5, "softcap": 3.0, "tile": TILE}
  outputs |= {"collision": True, "rank": True}
  all_of = lambda h, w, b, t: linear_softmax(h, w, t, b, **outputs)
  specs = P("data"), P(), P(), P("data")
  spread = jax.shard_map(all_of, mesh=mesh, in_specs=specs, out_specs=P("data"))
  close(jax.jit(spread)(*operands()), jax.jit(all_of)(*operands()))


@pytest.mark.slow
def test_loss_and_gradients_are_the_same_under_vmap_remat_and_scan():
  hidden, weight, bias, tokens = operands()
  expected = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands())
  close(jax.jit(jax.value_and_grad(jax.remat(loss), (0, 1, 2)))(*operands()), expected)
  parts = hidden.reshape(3, 8, D), tokens.reshape(3, 8)

  def mapped(h, w, b):
    return jax.vmap(loss, (0, None, None, 0))(h, w, b, parts[1]).mean()

  def scanned(h, w, b):
    add = lambda total, part: (total + loss(part[0], w, b, part[1]), None)
    return jax.lax.scan(jax.remat(add), 0.0, (h, parts[1]))[0] / 3

  for function in (mapped, scanned):
    value, (d_hidden, *rest) = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(
      parts[0], weight, bias
    )
    close((value, (d_hidden.reshape(N, D), *rest)), expected)


def test_each_member_of_a_vmap_may_have_its_own_weight():
  hidden, _, _, tokens = operands()
  (weights,) = normals(7, (3, V, D))
  value = lambda w: linear_log_prob(hidden, w, tokens, tile=TILE).sum()
  found = jax.jit(jax.vmap(jax.value_and_grad(value)))(weights)
  one = jax.jit(jax.value_and_grad(value))
  expected = jax.tree.map(lambda *x: np.stack(x), *[one(w) for w in weights])
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def temporaries(n, d, v, mesh=None):
  """Bytes that a device needs for loss and gradients beside arguments and results."""

  def loss(h, w, t):
    return -linear_log_prob(h, w, t, vocab_axis="model").mean()

  value_and_grad = jax.value_and_grad(loss, (0, 1))
  shapes = [((n, d), jnp.float32), ((v, d), jnp.float32), ((n,), jnp.int32)]
  if mesh is None:
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    compiled = jax.jit(value_and_grad).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes
  shardings = [NamedSharding(mesh, P(*axes)) for axes in [(), ("model",), ()]]
  args = [jax.ShapeDtypeStruct(*shape, sharding=s) for shape, s in zip(shapes, shardings)]
  outs = shardings[2], tuple(shardings[:2])
  with jax.set_mesh(mesh):
    compiled = jax.jit(value_and_grad, out_shardings=outs).lower(*args).compile()
  return compiled.memory_analysis().temp_size_in_bytes


# The compiler's own account, which differs between machines. All scores take 250 MiB and 16 GiB.
@pytest.mark.parametrize(
  ("n", "d", "v", "mebibytes"),
  [(2048, 256, 32_000, 12), (2048, 256, 32_003, 16), (16384, 1024, 256_000, 48)],
)
def test_temporaries_are_a_tile_and_no_more_at_any_size(n, d, v, mebibytes):
  assert temporaries(n, d, v) <= mebibytes * 2**20


def test_a_device_of_eight_needs_an_eighth_of_the_temporaries():
  n, d, v = 2048, 256, 262_144
  mesh = jax.make_mesh((8,), ("model",), (AxisType.Auto,))
  assert temporaries(n, d, v, mesh) <= temporaries(n, d, v) / 8 + 4 * 2**20


def test_the_search_for_the_best_sends_no_tile_of_scores_between_devices():
  mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
  shardings = [NamedSharding(mesh, P(axis)) for axis in ("data", "model", "data")]
  shapes = [((256, 8), jnp.float32), ((512, 8), jnp.float32), ((256,), jnp.int32)]
  args = [jax.ShapeDtypeStruct(*shape, sharding=s) for shape, s in zip(shapes, shardings)]
  best = lambda h, w, t: linear_softmax(h, w, t, top_k=5, vocab_axis="model").top_tokens
  with jax.set_mesh(mesh):
    compiled = jax.jit(best, out_shardings=shardings[0]).lower(*args).compile()
  program = hlo.parse_hlo(compiled.as_text())
  sent = collectives.collectives(program, loops.runs(program), dict(mesh.shape))
  # A device's own scores are 64 x 256 numbers.
  assert max(x.bytes for x in sent) < 4 * 64 * 256


def test_the_gradient_of_the_best_stays_on_the_devices_of_its_tokens():
  mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
  shardings = [NamedSharding(mesh, P(axis)) for axis in ("data", "model", "data")]
  shapes = [((256, 8), jnp.float32), ((512, 8), jnp.float32), ((256,), jnp.int32)]
  args = [jax.ShapeDtypeStruct(*shape, sharding=s) for shape, s in zip(shapes, shardings)]
  options = {"top_k": 5, "tile": (32, 128), "vocab_axis": "model"}
  loss = lambda h, w, t: linear_softmax(h, w, t, **options).top_log_probs.sum()
  with jax.set_mesh(mesh):
    gradient = jax.jit(jax.grad(loss, (0, 1)), out_shardings=tuple(shardings[:2]))
    program = hlo.parse_hlo(gradient.lower(*args).compile().as_text())
  sent = collectives.collectives(program, loops.runs(program), dict(mesh.shape))
  # Indices and cotangents of the best would be gathered at each tile by one scatter for all shards.
  assert {x.kind for x in sent} == {"all-reduce"}
