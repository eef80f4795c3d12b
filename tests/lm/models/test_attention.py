"""Attention equals its definition whatever the order of the keys, and rotations are relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import strict_modes
from tests.jitted import apply, results
from tests.lm.checkpoints.families import CONFIGS, NAMES, V, small
from vqjax.lm.models import Attention, Rotary
from vqjax.lm.models import attention as attention_module
from vqjax.lm.models.attention import attend
from vqjax.lm.models.rotary import rotate
from vqjax.lm.sources.families import decoder_of


@pytest.mark.parametrize(("softcap", "window"), [(None, None), (None, 4), (0.7, None), (0.7, 4)])
def test_a_cache_in_any_order_is_attended_to_as_a_sequence(softcap, window):
  rng = np.random.default_rng(0)
  query, key, value = (rng.normal(size=(2, 11, heads, 5)) for heads in (6, 2, 2))
  mixed = np.zeros_like(query)
  for batch, at, head in np.ndindex(2, 11, 6):
    first = 0 if window is None else max(0, at - window + 1)
    scores = 0.3 * key[batch, first : at + 1, head // 3] @ query[batch, at, head]
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weight = np.exp(scores - scores.max())
    mixed[batch, at, head] = weight / weight.sum() @ value[batch, first : at + 1, head // 3]
  # Keys in another order for each row, and 3 slots that hold none: theirs is the largest position.
  order = np.stack([rng.permutation(14) for _ in range(2)])
  position = np.where(order < 11, order, 2**30)
  slots = lambda x: np.stack([np.pad(r, ((0, 3), (0, 0), (0, 0)))[o] for r, o in zip(x, order)])
  wide = [np.float32(x) for x in (query[:, 7:], slots(key), slots(value))]
  options = {"scale": 0.3, "softcap": softcap}
  found = results(
    lambda *wide: attend(*wide, jnp.arange(7, 11), position, window, **options), *wide
  )
  # Sums of 11 and of 5 products of numbers of order one.
  np.testing.assert_allclose(found, mixed[:, 7:], atol=16 * 2**-22)


def test_scores_of_turned_vectors_depend_on_the_distance_only():
  query, key = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 10), np.float32)
  turn = lambda x, at: rotate(x, *Rotary().table(jnp.array([at]), 10))
  score = lambda a, b: (turn(query, a) * turn(key, b)).sum()
  far, near, back = results(lambda: (score(500, 493), score(7, 0), score(0, 7)))
  # Angles of up to 500 radians are rounded by 500 · 2^-24.
  np.testing.assert_allclose(far, near, atol=3e-4)
  assert abs(near - back) > 0.01


def test_recomputing_in_tiles_changes_no_variant_of_the_blocks(monkeypatch):
  monkeypatch.setattr(attention_module, "tile_size", lambda *_: 5)
  model, variables = small("gemma3_text", attn_logit_softcapping=3.0)
  tokens = np.random.default_rng(0).integers(0, V, (2, 53))
  found, expected = results(
    lambda v: [m.apply(v, tokens, method="hidden") for m in (model.clone(remat=True), model)],
    variables,
  )
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"attention": Attention(kv_heads=3)}, "`attention.kv_heads` must divide heads 4; got 3"),
    (
      {"attention": Attention(kv_heads=2, head_dim=5)},
      "`attention.head_dim` must be even .* got 5",
    ),
    ({"local": (True,)}, "`local` must have an entry for each of 3 blocks .* got 1"),
    ({"local_rotary": Rotary()}, "`local_rotary` needs `rotary` and a `window`"),
  ],
)
def test_variants_that_contradict_each_other_are_refused(changes, message):
  model = decoder_of(CONFIGS["llama"]).clone(**changes)
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_causal_in_every_family(name):
  model, variables = small(name)
  tokens = np.random.default_rng(0).integers(0, V, (1, 50))
  changed = np.where(np.arange(50) < 30, tokens, (tokens + 1) % V)
  with strict_modes():
    before, after = (
      np.asarray(apply(model, variables, t, method="hidden")) for t in (tokens, changed)
    )
  np.testing.assert_array_equal(before[:, :30], after[:, :30])
  assert (before[:, 30:] != after[:, 30:]).any()
