"""Row-wise optimisers: dense and sparse steps, of any dtype, on devices and on their hosts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.jitted import results
from vqjax import DenseEmbedding, DenseHead, Int8Embedding, optimizer_labels
from vqjax.lab.plan import collectives, hlo, loops
from vqjax.ngrams import NGramEmbedding
from vqjax.ops.ngrams import XorHash
from vqjax.row_updates import rowwise, update_rows, value_and_grad

V, D, RATE, EPSILON = 41, 5, 0.3, 1e-6
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((V, D), np.float32)
TABLE[7] = -0.0
# Row 3 is read three times in a step; -1 and V are no rows; the last row is read.
STEPS = [np.array(ids) for ids in ([[3, 9, 3], [V - 1, 3, 0]], [[3, 0, -1], [9, 9, V]])]
GRADIENTS = [RNG.standard_normal((2, 3, D)).astype(np.float32) for _ in STEPS]


def reference(decay):
  """The table and the moments after two steps, row by row in float64."""
  table, moment = TABLE.astype(np.float64), np.zeros(V)
  for ids, gradients in zip(STEPS, GRADIENTS):
    for row in set(ids.ravel()) & set(range(V)):
      g = gradients[ids == row].astype(np.float64).sum(0)
      square = (g**2).mean()
      if decay is None:
        moment[row] += square
      else:
        moment[row] = square if moment[row] == 0 else decay * moment[row] + (1 - decay) * square
      table[row] -= RATE * g / (np.sqrt(moment[row]) + EPSILON)
  return table, moment


def dense_gradient(ids, gradients):
  known = (ids >= 0) & (ids < V)
  return jnp.zeros((V, D)).at[ids[known]].add(gradients[known])


def dense(decay, table):
  """Two steps of Optax, whose gradients are those of the whole table."""
  rule = optax.multi_transform(
    {"table": rowwise(RATE, decay, EPSILON), "vector": optax.sgd(1.0)}, optimizer_labels
  )
  params = {"weight": table, "bias": jnp.ones(D)}
  state = rule.init(params)
  for ids, gradients in zip(STEPS, GRADIENTS):
    gradient = {"weight": dense_gradient(ids, gradients), "bias": jnp.ones(D)}
    updates, state = rule.update(gradient, state, params)
    params = optax.apply_updates(params, updates)
  return params, optax.tree_utils.tree_get(state, "moments")["weight"]


def sparse(decay, table, moment, **options):
  for ids, gradients in zip(STEPS, GRADIENTS):
    table, moment = update_rows(
      table, moment, ids, gradients, RATE, decay=decay, epsilon=EPSILON, **options
    )
  return table, moment


@pytest.mark.parametrize("decay", [None, 0.75])
def test_dense_and_sparse_steps_are_those_of_float64_and_leave_other_rows_alone(decay):
  params, of_dense = results(functools.partial(dense, decay), TABLE)
  table, of_sparse = results(functools.partial(sparse, decay), TABLE, np.zeros(V, np.float32))
  expected, moment = reference(decay)
  for found, own in ((params["weight"], of_dense), (table, of_sparse)):
    # Some ten roundings of float32, 6e-8 each, of numbers of order one.
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(own, moment, rtol=2e-6)
    others = moment == 0
    assert 0 < others.sum() < V
    np.testing.assert_array_equal(found[others].view(np.int32), TABLE[others].view(np.int32))
  np.testing.assert_array_equal(params["bias"], -np.ones(D))


def test_a_bfloat16_table_has_float32_moments_and_is_rounded_once_a_step():
  narrow = TABLE.astype(jnp.bfloat16)
  params, of_dense = results(functools.partial(dense, None), narrow)
  table, moment = results(functools.partial(sparse, None), narrow, np.zeros(V, np.float32))
  assert table.dtype == jnp.bfloat16
  assert moment.dtype == of_dense.dtype == np.float32
  np.testing.assert_array_equal(table.view(np.uint16), params["weight"].view(np.uint16))
  # Two roundings of numbers below 4, half of 2^-6 each.
  np.testing.assert_allclose(table.astype(np.float32), reference(None)[0], atol=2**-6 + 2**-7)


def test_a_step_changes_donated_arrays_in_place_in_memory_of_the_rows_that_it_reads():
  rows, width, read = 100_003, 32, 53
  shape = jax.ShapeDtypeStruct
  given = shape((rows, width), np.float32), shape((rows,), np.float32)
  step = shape((read,), np.int32), shape((read, width), np.float32)
  program = jax.jit(update_rows, donate_argnums=(0, 1)).lower(*given, *step, 0.1).compile()
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == 4 * rows * (width + 1)
  assert memory.temp_size_in_bytes < 20 * 4 * read * width


def test_a_table_in_the_memory_of_the_host_stays_there():
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  given = jax.device_put((TABLE, np.zeros(V, np.float32)), where)
  update = jax.jit(functools.partial(sparse, None), donate_argnums=(0, 1), out_shardings=where)
  table, moment = update(*given)
  assert table.sharding.memory_kind == moment.sharding.memory_kind == "pinned_host"
  expected, _ = reference(None)
  np.testing.assert_allclose(table, expected, atol=2e-6)
  layer = DenseEmbedding(V, D)
  lookup = jax.jit(lambda table: layer.apply({"params": {"weight": table}}, np.array([[3, V]])))
  np.testing.assert_array_equal(lookup(table), [[np.asarray(table)[3], np.full(D, np.nan)]])


HASH = XorHash.qwen4(101, 3, heads=2, least=1_000)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["model", ("data", "model")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_lookups_and_steps_of_a_sharded_table_send_rows_and_never_the_table(kind, axis):
  mesh = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2)
  rows, width = HASH.rows + -HASH.rows % 8, 8
  layer = NGramEmbedding(HASH, DenseEmbedding(rows, width))
  tokens = RNG.integers(0, 101, (4, 6))
  table = RNG.standard_normal((rows, width), np.float32)
  target = RNG.standard_normal((4, 6, layer.dim), np.float32)

  def step(table, moment, tokens, target, axis=None):
    spread = layer.clone(table=layer.table.clone(vocab_axis=axis))
    vectors = spread.apply({"params": {"table": {"weight": table}}}, tokens)
    gradients = jax.grad(lambda e: jnp.square(e - target).sum())(vectors)
    ids = HASH(tokens)
    return update_rows(
      table, moment, ids, gradients.reshape(*ids.shape, width), RATE, vocab_axis=axis
    )

  zeros = np.zeros(rows, np.float32)
  expected = jax.jit(step)(table, zeros, jnp.asarray(tokens), target)
  with jax.set_mesh(mesh):
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, P(*axes)))
    given = put(table, axis), put(zeros, axis), put(tokens, "data"), put(target, "data")
    places = jax.tree.map(lambda x: x.sharding, given[:2])
    program = jax.jit(
      functools.partial(step, axis=axis), donate_argnums=(0, 1), out_shardings=places
    )
    compiled = program.lower(*given).compile()
    of_dense = rowwise(RATE).init(given[0])
    assert of_dense.moments.sharding.is_equivalent_to(places[1], 1)
    found = jax.device_get(compiled(*given))
  # Sums of at most 24 numbers, in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
  of_rows, devices = 4 * tokens.size * layer.dim, 4 if axis == "model" else 8
  assert of_rows < 4 * table.size / devices / 5
  parsed = hlo.parse_hlo(compiled.as_text())
  sent = collectives.collectives(parsed, loops.runs(parsed), dict(mesh.shape))
  assert any("model" in x.axes for x in sent)
  assert max(x.bytes for x in sent) <= of_rows
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes == 4 * rows * (width + 1) // devices
  assert memory.temp_size_in_bytes < 4 * table.size / devices


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"ids": np.ones(3)}, "`ids` must be integers"),
    (
      {"gradients": np.ones((3, D + 1), np.float32)},
      r"`gradients` \[\*B, 5\]; got int\d+ \(3,",
    ),
    ({"moment": np.zeros((V, 1), np.float32)}, r"`moment` must .* \(41,\); got \(41, 1\)"),
    ({"decay": 1.0}, r"`decay` must be in \[0, 1\), or None"),
  ],
)
def test_steps_that_do_not_fit_are_refused_by_name(change, message):
  given = {
    "table": TABLE,
    "moment": np.zeros(V, np.float32),
    "ids": np.arange(3),
    "gradients": np.ones((3, D), np.float32),
    "learning_rate": 0.1,
  }
  with pytest.raises(ValueError, match=message):
    update_rows(**given | change)


@pytest.mark.parametrize("given", [{}, {"decay": 0.9, "weight_decay": 0.1}])
def test_numbers_that_optax_injects_are_those_that_were_given(given):
  params, gradients = {"weight": TABLE}, {"weight": np.where(TABLE > 0, TABLE, 0)}
  own, injected = (make(RATE, **given) for make in (rowwise, optax.inject_hyperparams(rowwise)))
  updates = lambda rule: rule.update(gradients, rule.init(params), params)[0]["weight"]
  expected, found = results(lambda: (updates(own), updates(injected)))
  np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_vector_is_no_table():
  with pytest.raises(ValueError, match=r"tables \[V, D\]; got \(41,\)"):
    rowwise(0.1).init(TABLE[:, 0])


def test_a_step_without_ids_changes_nothing():
  given = TABLE, np.ones(V, np.float32)
  found = results(update_rows, *given, np.zeros((0, 2), int), np.zeros((0, 2, D), np.float32), 0.1)
  jax.tree.map(np.testing.assert_array_equal, found, given)


def test_devices_that_do_not_divide_the_rows_are_refused_with_the_number_that_they_divide():
  with (
    jax.set_mesh(jax.make_mesh((8,), ("model",))),
    pytest.raises(ValueError, match=r"8 devices of 'model'; got 41\. Make a table of 48 rows"),
  ):
    update_rows(TABLE, TABLE[:, 0], STEPS[0], GRADIENTS[0], 0.1, vocab_axis="model")


@pytest.mark.parametrize("axis", ["rows", ("model", "rows"), ("model", "model")])
def test_axes_that_the_mesh_lacks_or_that_are_given_twice_are_refused(axis):
  with (
    jax.set_mesh(jax.make_mesh((8,), ("model",))),
    pytest.raises(ValueError, match=r"`vocab_axis` must be .*, model, or a tuple of different"),
  ):
    update_rows(TABLE, TABLE[:, 0], STEPS[0], GRADIENTS[0], 0.1, vocab_axis=axis)


class Tied(nn.Module):
  """A bag of two tokens that predicts a third, from one table."""

  embedding: nn.Module

  def setup(self):
    self.head = DenseHead(self.embedding.vocab, self.embedding.dim, embedding=self.embedding)

  def __call__(self, pairs_B2, targets_B):
    return -self.head.log_prob(self.embedding(pairs_B2).sum(axis=1), targets_B).mean()


def int8_model(vocab=V, dim=6, group=3):
  model = Tied(Int8Embedding(vocab, dim, group, trained=True))
  pairs, targets = RNG.integers(0, vocab, (16, 2)), RNG.integers(0, vocab, 16)
  return model, jax.jit(model.init)(jax.random.key(1), pairs, targets)["params"], (pairs, targets)


def test_the_gradient_of_int8_levels_is_that_of_their_rows():
  model, params, batch = int8_model()
  dense = Tied(DenseEmbedding(V, 6))
  table = params["embedding"]
  rows = (table["levels"].reshape(V, 2, 3) * table["scale"][..., None]).reshape(V, 6)

  def both(params, rows):
    loss = lambda model: lambda params: model.apply({"params": params}, *batch)
    of_rows = jax.value_and_grad(loss(dense))({"embedding": {"weight": rows}})
    return value_and_grad(loss(model))(params), of_rows

  (loss, gradient), (expected, of_rows) = jax.jit(both)(params, rows)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  weight = of_rows["embedding"]["weight"]
  np.testing.assert_allclose(gradient["embedding"]["levels"], weight, atol=1e-7)
  assert not np.any(gradient["embedding"]["scale"])
  assert optimizer_labels(params) == {"embedding": {"levels": "table", "scale": "table"}}


def test_an_int8_table_on_explicit_axes_stays_where_it_is():
  tokens, table = np.arange(12).reshape(4, 3), Int8Embedding(40, 4, 4, trained=True)
  params = jax.jit(table.init)(jax.random.key(0), tokens)["params"]

  def stepped(params, tokens, axis=None):
    spread, rule = table.clone(vocab_axis=axis), rowwise(0.1)
    loss = lambda params: jnp.square(spread.apply({"params": params}, tokens) - 1).sum()
    updates, _ = rule.update(value_and_grad(loss)(params)[1], rule.init(params), params)
    return optax.apply_updates(params, updates)

  expected, params = jax.device_get((jax.jit(stepped)(params, tokens), params))
  with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), (AxisType.Explicit,) * 2)):
    axis = ("data", "model")
    given = jax.device_put(params, P(axis)), jax.device_put(tokens, P("data"))
    found = jax.jit(functools.partial(stepped, axis=axis))(*given)
  assert all(jax.typeof(x).sharding.spec[0] == axis for x in jax.tree.leaves(found))
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_steps_of_an_int8_table_are_exact_on_average_and_leave_other_rows_alone():
  scale = np.array([[0.01, 0.02]], np.float32).repeat(V, 0)
  levels = RNG.integers(-120, 121, (V, 6)).astype(np.int8)
  levels[:, [0, 5]] = 120  # so that the scales fit
  gradient = RNG.standard_normal((V, 6)).astype(np.float32) * (np.arange(V) % 2)[:, None]
  params = {"embedding": {"levels": levels, "scale": scale}}
  both = {"embedding": {"levels": gradient, "scale": np.zeros_like(scale)}}
  rows = lambda table: table["levels"].reshape(V, 2, 3) * np.asarray(table["scale"])[..., None]

  def stepped(seed):
    rule = rowwise(3e-3, 0.9, seed=seed)
    updates, _ = rule.update(both, rule.init(params), params)
    return optax.apply_updates(params, updates)["embedding"]

  found = jax.jit(jax.vmap(stepped))(np.arange(2000))
  assert found["levels"].dtype == np.int8
  np.testing.assert_array_equal(found["scale"], np.broadcast_to(scale, (2000, V, 2)))
  np.testing.assert_array_equal(
    found["levels"][:, ::2], np.broadcast_to(levels[::2], (2000, 21, 6))
  )
  mean = (np.asarray(found["levels"]).reshape(2000, V, 2, 3) * scale[:, :, None]).mean(0)
  root = np.sqrt((gradient**2).mean(-1, keepdims=True)) + 1e-8
  exact = rows(params["embedding"]) - (3e-3 * gradient / root).reshape(V, 2, 3)
  # Five standard errors of the mean of 2,000 roundings, each off by at most half a level.
  error = 5 * 0.5 * scale.max() / 2000**0.5
  np.testing.assert_allclose(mean, exact, atol=error)


def test_numbers_that_outgrow_the_scale_of_an_int8_table_get_another():
  table = {"levels": np.full((2, 4), 127, np.int8), "scale": np.full((2, 1), 0.01, np.float32)}
  sign = np.array([[-1.0], [1.0]], np.float32)
  gradient = {"levels": np.ones((2, 4), np.float32) * sign, "scale": np.zeros((2, 1), np.float32)}
  rule = rowwise(0.9)

  def stepped(table, gradient):
    updates, _ = rule.update(gradient, rule.init(table), table)
    return optax.apply_updates(table, updates)

  found = jax.jit(stepped)(table, gradient)
  rows = found["levels"] * found["scale"]
  np.testing.assert_allclose(rows, 1.27 - 0.9 * sign * np.ones((2, 4)), atol=0.02)
  assert found["scale"][0, 0] > 0.01 > found["scale"][1, 0]


def test_an_int8_table_trains_in_a_twelfth_of_the_state_and_no_copy_of_floats():
  vocab, dim = 30_000, 256
  batch = np.zeros((512, 2), np.int32), np.zeros(512, np.int32)

  def memory(embedding, rule):
    model, rule = Tied(embedding), optax.chain(optax.clip_by_global_norm(1.0), rule)
    params = jax.eval_shape(model.init, jax.random.key(0), *batch)["params"]

    def step(params, state, batch):
      _, gradient = value_and_grad(lambda params: model.apply({"params": params}, *batch))(params)
      updates, state = rule.update(gradient, state, params)
      return optax.apply_updates(params, updates), state

    program = jax.jit(step, donate_argnums=(0, 1))
    return (
      program.lower(params, jax.eval_shape(rule.init, params), batch).compile().memory_analysis()
    )

  of_int8 = memory(Int8Embedding(vocab, dim, dim, trained=True), rowwise(1e-3, 0.98))
  of_adam = memory(DenseEmbedding(vocab, dim), optax.adamw(1e-3))
  assert of_int8.argument_size_in_bytes < of_adam.argument_size_in_bytes / 11.5
  # The gradient and tiles of scores, as for any table.
  assert of_int8.temp_size_in_bytes < 1.05 * of_adam.temp_size_in_bytes
