"""Is attention in tiles the attention to all positions at once, and does it keep no T x T array?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax import DenseEmbedding, GroupedHead
from vqjax.models import Transformer, causal


@pytest.mark.parametrize(("length", "window"), [(13, None), (13, 4), (1, 4), (0, 4)])
def test_tiles_change_neither_what_is_mixed_nor_its_gradients(length, window, monkeypatch):
  monkeypatch.setattr(causal, "tile_size", lambda *_: 5)
  parts = jax.random.normal(jax.random.key(0), (4, 3, length, 2, 7))
  window = None if window is None else jnp.int32(window)

  def mixed_and_gradients(attend):
    whole = lambda q, k, v: attend(q, k, v, window)
    mixed, pull_back = jax.vjp(whole, *parts[:3])
    return mixed, pull_back(parts[3])

  expected, found = (
    jax.jit(mixed_and_gradients, static_argnums=0)(attend)
    for attend in (causal.attend, causal.attend_in_tiles)
  )
  # Sums of 13 numbers of order one, in another order.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), expected, found)


def test_no_array_of_a_training_step_has_a_weight_for_every_two_positions():
  def gradient_text(remat):
    embedding, head = DenseEmbedding(31, 64), GroupedHead(31, 64)
    model = Transformer(embedding, head, 64, layers=2, heads=8, context=509, remat=remat, window=99)
    tokens = jax.ShapeDtypeStruct((32, 509), jnp.int32)
    init = lambda t: model.init(jax.random.key(0), t, t, method="loss_terms")
    loss = lambda v, t: model.apply(v, t, t, method="log_prob").mean()
    return str(jax.make_jaxpr(jax.grad(loss))(jax.eval_shape(init, tokens), tokens))

  assert "509,509]" in gradient_text(remat=False)
  assert "509,509]" not in gradient_text(remat=True)


@pytest.mark.parametrize(
  ("shape", "most", "size"),
  [
    ((32, 512, 8, 16), 2**22, 32),
    ((32, 509, 8, 16), 2**22, 32),
    ((32, 512, 8, 16), 1, 16),
    ((3, 16, 2, 4), 2**22, 16),
    ((1, 1, 1, 1), 1, 1),
    ((1, 7, 1, 2), 1, 2),
    ((0, 7, 1, 2), 9, 7),
    ((3, 0, 1, 2), 9, 1),
  ],
)
def test_tiles_are_equal_parts_of_bounded_size(shape, most, size):
  assert causal.tile_size(shape, most) == size
