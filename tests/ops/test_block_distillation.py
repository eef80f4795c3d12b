"""Is the divergence of a student in blocks exact, its gradients too, and no more than a block?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax import GroupedHead
from vqjax.ops import sampling
from vqjax.ops.block_distillation import block_soft_target_loss
from vqjax.sharding import MeshShape, make_mesh

V, D, E = 101, 6, 9


def operands(*batch):
  """A student's hidden and weight; a teacher's hidden, weight and bias."""
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = (*batch, D), (V, D), (*batch, E), (V, E), (V,)
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def blocks_of(hidden, weight, width=12):
  """Blocks of `width` tokens in an order of their own, the last of them filled up."""
  count = -(-V // width)
  order = np.resize(np.random.default_rng(0).permutation(V), count * width)
  table = jnp.asarray(order.reshape(count, width), jnp.int32)

  def block(index):
    real = index * width + jnp.arange(width) < V
    return jnp.where(real, hidden @ weight[table[index]].T, -jnp.inf), table[index]

  return sampling.Blocks(count, block, hidden.shape[:-1])


def exact(logits, teacher_logits, temperature):
  """(cross-entropy, KL) from all scores, in the precision of its arguments."""
  p, q = (jax.nn.log_softmax(x / temperature) for x in (logits, teacher_logits))
  return -(jnp.exp(q) * p).sum(-1), (jnp.exp(q) * (q - p)).sum(-1)


def check_equal(found, expected, atol=1e-4):
  # Scores of size ten, known to 1e-6, and a hundred roundings of float32 in their sums.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.mark.parametrize(("batch", "temperature", "cap"), [((13,), 1.0, None), ((1, 5), 2.0, 3.0)])
def test_loss_and_gradients_equal_float64(batch, temperature, cap):
  hidden, weight, *teacher = operands(*batch)
  cotangents = tuple(jax.random.normal(jax.random.key(i), batch) for i in (7, 8))

  def loss(hidden, weight):
    blocks = blocks_of(hidden, weight)
    options = {"temperature": temperature, "teacher_softcap": cap}
    return tuple(block_soft_target_loss(blocks, *teacher, **options))

  @jax.jit
  def run(*arrays):
    value, pull = jax.vjp(loss, *arrays)
    return value, pull(cotangents)

  with jax.enable_x64(True):
    h, w, th, tw, tb, *cts = (
      jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, weight, *teacher, *cotangents)
    )
    scores = th @ tw.T + tb
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    expected, pull = jax.vjp(lambda h, w: exact(h @ w.T, scores, temperature), h, w)
    wanted = jax.device_get((expected, pull(tuple(cts))))
  check_equal(run(hidden, weight), wanted)


def test_a_token_that_the_student_cannot_give_is_left_out_of_both():
  hidden, weight, *teacher = operands(4)
  gone = jnp.arange(V) % 7 == 2
  blocks = sampling.allow(blocks_of(hidden, weight), ~gone, V)
  found = block_soft_target_loss(blocks, *teacher)
  scores = teacher[0] @ teacher[1].T + teacher[2]
  check_equal(tuple(found), exact((hidden @ weight.T)[:, ~gone], scores[:, ~gone], 1.0))


def test_the_teacher_has_no_gradient():
  hidden, weight, *teacher = operands(2)
  loss = lambda *teacher: block_soft_target_loss(blocks_of(hidden, weight), *teacher).kl.sum()
  for gradient in jax.grad(loss, (0, 1, 2))(*teacher):
    assert not gradient.any()


def grouped(batch, groups, vocab_axis, dtype=None):
  """(a grouped head's KL with its gradients, the same from all logits, what to call both with)."""
  head = GroupedHead(V, D, groups=groups, use_bias=True, dtype=dtype, vocab_axis=vocab_axis)
  hidden, _, *teacher = operands(*batch)
  params = head.init(jax.random.key(1), hidden)["params"]
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(2), len(leaves))
  noisy = [x + jax.random.normal(key, x.shape) for x, key in zip(leaves, keys)]

  def of_head(module, hidden, *teacher):
    return tuple(module.over_blocks(block_soft_target_loss, hidden, *teacher))

  def kl(params, hidden, *teacher):
    return head.apply({"params": params}, hidden, *teacher, method=of_head)[1].mean()

  def materialised(params, hidden, *teacher):
    logits = head.apply({"params": params}, hidden)
    return exact(logits, teacher[0] @ teacher[1].T + teacher[2], 1.0)[1].mean()

  run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))
  return run(kl), run(materialised), (jax.tree.unflatten(tree, noisy), hidden, *teacher)


def test_a_grouped_student_has_the_gradients_of_all_its_logits(monkeypatch):
  monkeypatch.setattr(sampling, "block_width", lambda rows, vocab: 25)
  found, expected, arrays = grouped((3, 5), 11, None)
  check_equal(found(*arrays), expected(*arrays))


# bfloat16 has 8 bits: scores near ten are off by 0.03, of which the mean over tokens is left.
@pytest.mark.parametrize(("dtype", "atol"), [(None, 1e-4), (jnp.bfloat16, 2e-2)])
def test_on_a_mesh_the_loss_and_its_gradients_are_those_of_one_device(dtype, atol):
  found, expected, arrays = grouped((3, 5), 11, "model", dtype)
  wanted = jax.device_get(expected(*arrays))
  with jax.set_mesh(make_mesh(MeshShape(2, 2, 2))):
    check_equal(jax.device_get(found(*arrays)), wanted, atol)


def test_no_value_of_tokens_times_vocabulary_is_made():
  n, v = 2053, 40_009
  head = GroupedHead(v, D)
  abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.eval_shape(head.init, jax.random.key(0), abstract(n, D))

  def kl(params, *arrays):
    body = lambda module, *a: module.over_blocks(block_soft_target_loss, *a).kl.mean()
    return head.apply(params, *arrays, method=body)

  shapes = abstract(n, D), abstract(n, E), abstract(v, E), abstract(v)
  assert reference.largest_value(jax.grad(kl, (0, 1)), params, *shapes) < n * v / 16


@pytest.mark.parametrize(
  ("change", "options", "message"),
  [
    (lambda h, w, b: (h[:1], w, b), {}, "is not of the rows"),
    (lambda h, w, b: (h[:, :3], w, b), {}, r"teacher_weight \(101, 9\) does not fit"),
    (lambda h, w, b: (h, w, b[:9]), {}, "a bias of shape"),
    (lambda h, w, b: (h, w, b), {"temperature": 0}, "temperature 0 is not positive"),
    (lambda h, w, b: (h, w, b), {"teacher_softcap": -1.0}, "teacher_softcap -1.0 is not positive"),
  ],
)
def test_what_does_not_fit_is_refused(change, options, message):
  hidden, weight, *teacher = operands(2)
  with pytest.raises(ValueError, match=message):
    block_soft_target_loss.__wrapped__(blocks_of(hidden, weight), *change(*teacher), **options)
