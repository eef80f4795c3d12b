"""Tests of block-wise top-k, draws and nuclei against a sort of the whole row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.ops import sampling, topk


def blocks_of(scores, width):
  """Blocks of `width` tokens over scores [*B, V], the last one overlapping."""
  vocab = scores.shape[-1]

  def block(index):
    start = jnp.minimum(index * width, vocab - width)
    rows = start + jnp.arange(width)
    block = jnp.where(rows >= index * width, scores[..., rows], -jnp.inf)
    return jnp.moveaxis(block, -1, 0), rows

  return sampling.Blocks(-(-vocab // width), block, scores.shape[:-1])


@pytest.fixture
def scores():
  return jax.random.normal(jax.random.key(0), (4, 37))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("width", [1, 5, 10, 37])
@pytest.mark.parametrize("k", [1, 3, 37])
def test_best_equals_sorting_at_any_block_width(scores, width, k):
  values, tokens, log_z = sampling.best(blocks_of(scores, width), k)
  expected = jnp.sort(scores, axis=-1)[:, ::-1][:, :k]
  np.testing.assert_array_equal(values, expected)
  np.testing.assert_array_equal(jnp.take_along_axis(scores, tokens, -1), expected)
  np.testing.assert_allclose(log_z, jax.nn.logsumexp(scores, axis=-1), rtol=1e-6)


def test_best_beyond_the_vocabulary_says_minus_one(scores):
  values, tokens, _ = sampling.best(blocks_of(scores, 10), 40)
  assert (tokens[:, 37:] == -1).all()
  assert np.isneginf(values[:, 37:]).all()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_nucleus_is_the_smallest_set_that_reaches_its_mass(scores, top_p, scale):
  scores = scale * scores
  kept, _ = sampling.nucleus(blocks_of(scores, 10), top_p).map(lambda s, t: s).block(0)
  whole = sampling.nucleus(blocks_of(scores, 37), top_p).block(0)[0]
  np.testing.assert_array_equal(kept, whole[:10])
  for row, cut in zip(np.asarray(scores, np.float64), np.asarray(whole).T):
    probability = np.exp(row - row.max())
    probability /= probability.sum()
    mass = probability[np.isfinite(cut)]
    assert mass.sum() >= top_p - 1e-6
    assert mass.sum() - mass.min() < top_p + 1e-6


def test_tokens_that_tie_at_the_edge_of_the_nucleus_stay():
  scores = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2]]))
  kept = sampling.nucleus(blocks_of(scores, 4), 0.5).block(0)[0]
  assert np.isfinite(kept).all()
  kept = sampling.nucleus(blocks_of(scores, 4), 0.39).block(0)[0]
  assert np.isfinite(kept).sum() == 1


def test_a_draw_does_not_depend_on_what_other_rows_hold(scores):
  key = jax.random.key(3)
  full = sampling.draw(blocks_of(scores, 10), key)
  changed = sampling.draw(blocks_of(scores.at[1:].set(0.0), 10), key)
  assert full[0] == changed[0]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"temperature": -0.5}, "`temperature` must be .* got -0.5"),
    ({"temperature": float("nan")}, "`temperature` .* got nan"),
    ({"top_k": 0}, "`top_k` must be an int of at least 1; got 0"),
    ({"top_p": 0.0}, r"`top_p` must be in \(0, 1\]; got 0.0"),
    ({"top_p": 1.5}, "`top_p` .* got 1.5"),
  ],
)
def test_options_that_no_distribution_has_are_refused(scores, options, message):
  with pytest.raises(ValueError, match=message):
    sampling.sample(blocks_of(scores, 10), jax.random.key(0), **options)


def test_top_k_and_top_p_together_cut_the_best_first():
  scores = jnp.log(jnp.array([0.5, 0.3, 0.1, 0.06, 0.04]))
  rows = jnp.broadcast_to(scores, (4000, 5))
  tokens = sampling.sample(blocks_of(rows, 2), jax.random.key(0), top_k=3, top_p=0.85)
  # Of the three best, 0.5 / 0.9 and 0.3 / 0.9 reach 0.85 between them.
  counts = np.bincount(tokens, minlength=5)
  assert counts[2:].sum() == 0
  np.testing.assert_allclose(counts[:2] / 4000, [0.625, 0.375], atol=0.04)


@pytest.mark.parametrize("width", [None, 128])
def test_row_blocks_name_every_token_once_and_repeat_none(width):
  wide = jax.random.normal(jax.random.key(1), (4, 300))
  blocks = sampling.row_blocks((4,), 300, 300, lambda cut: cut(wide.T), width=width)
  assert blocks.count == (3 if width else 1)
  seen = []
  for index in range(blocks.count):
    block_scores, tokens = blocks.block(index)
    kept = np.asarray(~np.isneginf(block_scores[:, 0]))
    seen += np.asarray(tokens)[kept].tolist()
    np.testing.assert_array_equal(block_scores[kept].T, wide[:, np.asarray(tokens)[kept]])
  assert seen == list(range(300))


def test_blocks_hold_a_bounded_number_of_scores():
  for rows in (1, 7, 1000, 30_000):
    assert rows * sampling.block_width(rows, 10**6) <= 2**22


def test_a_first_block_of_nothing_does_not_spoil_the_rest(scores):
  masked = scores.at[:, :20].set(-jnp.inf)
  values, tokens, log_z = sampling.best(blocks_of(masked, 10), 3)
  np.testing.assert_array_equal(values, jnp.sort(masked, axis=-1)[:, ::-1][:, :3])
  assert (tokens >= 20).all()
  np.testing.assert_allclose(log_z, jax.nn.logsumexp(masked, axis=-1), rtol=1e-6)


def test_scores_a_rounding_apart_are_told_apart_by_the_nucleus():
  row = np.full(64, 5.0, np.float32)
  for i in range(1, 64):
    row[i] = np.nextafter(row[i - 1], np.float32(0))
  # Each has a mass of 1 / 64: fifteen and a half of them take sixteen.
  kept = sampling.nucleus(blocks_of(jnp.asarray(row)[None], 64), 15.5 / 64).block(0)[0]
  assert np.isfinite(kept[:, 0]).tolist() == [True] * 16 + [False] * 48


@pytest.mark.slow
def test_temperature_comes_before_the_nucleus():
  rows = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.2])), (2000, 3))
  # Squared, the first has 0.25 / 0.38 = 0.66 of the mass; as it is, only half.
  cold = sampling.sample(blocks_of(rows, 2), jax.random.key(0), temperature=0.5, top_p=0.6)
  warm = sampling.sample(blocks_of(rows, 2), jax.random.key(0), top_p=0.6)
  assert set(np.asarray(cold).tolist()) == {0}
  assert set(np.asarray(warm).tolist()) == {0, 1}


def test_the_nucleus_of_many_scores_equals_that_of_stored_ones(scores, monkeypatch):
  stored = sampling.nucleus(blocks_of(scores, 10), 0.7)
  monkeypatch.setattr(sampling, "STORED_SCORES", 0)
  again = sampling.nucleus(blocks_of(scores, 10), 0.7)
  for index in range(4):
    np.testing.assert_array_equal(stored.block(index)[0], again.block(index)[0])


@pytest.mark.parametrize("bits", [1, 4])
def test_the_edge_of_a_nucleus_is_found_among_numbers_of_any_size_and_sign(bits):
  row = np.float32([-3e38, -1e30, -88.5, -2.0, -np.inf, -0.0, 0.0, 1e-30, 1.5, -np.inf])
  mass = np.exp(np.float64(row) - np.log(np.exp(np.float64(row)).sum()))
  for count in range(1, 6):
    # Half of the mass of the last token is missing without it.
    order = np.argsort(-row, kind="stable")
    top_p = mass[order[: count - 1]].sum() + mass[order[count - 1]] / 2
    edge = sampling.nucleus_edge(blocks_of(jnp.asarray(row)[None], 4), top_p, bits=bits)
    assert edge[0] == row[order[count - 1]]


def test_scores_that_are_not_stored_are_computed_ten_times(scores, monkeypatch):
  monkeypatch.setattr(sampling, "STORED_SCORES", 0)
  computed = []

  def block(index):
    jax.debug.callback(lambda index: computed.append(int(index)), index)
    return blocks_of(scores, 37).block(index)

  blocks = sampling.Blocks(1, block, (4,))
  jax.jit(lambda: sampling.nucleus(blocks, 0.7).block(0)[0])()
  jax.effects_barrier()
  # The normaliser, eight passes of the search, and the scores of the nucleus themselves.
  assert len(computed) == 10


@pytest.mark.parametrize("shape", [(50,), (2, 37), (7, 1, 37), ()])
def test_a_mask_of_another_shape_is_refused(scores, shape):
  with pytest.raises(ValueError, match=r"`allowed` must have shape \(37,\) or \(4, 37\); got"):
    sampling.allow(blocks_of(scores, 10), np.ones(shape, bool), 37)


def test_a_numpy_mask_for_each_row_is_fine(scores):
  allowed = np.zeros((4, 37), bool)
  allowed[np.arange(4), [3, 36, 0, 20]] = True
  blocks = sampling.allow(blocks_of(scores, 10), allowed, 37)
  assert sampling.draw(blocks, jax.random.key(0)).tolist() == [3, 36, 0, 20]


def test_sampling_works_with_64_bit_types_on(scores):
  with jax.enable_x64(True):
    wide = jnp.asarray(np.asarray(scores, np.float64))
    values, tokens, _ = sampling.best(blocks_of(wide, 10), 5)
    drawn = sampling.sample(blocks_of(wide, 10), jax.random.key(0), 0.9, top_p=0.5)
  assert (values.dtype, tokens.dtype, drawn.dtype) == ("float32", "int32", "int32")


@pytest.mark.parametrize("value", [-np.inf, 0.0, np.nan])
def test_selection_by_chunks_equals_that_of_all_scores(value):
  # Few distinct scores, so that ties cross the edges of chunks, the last of which is short.
  scores = jnp.round(2 * jax.random.normal(jax.random.key(5), (3, 1009)))
  scores = scores.at[:, 100:400].set(value).at[1].set(value)
  expected_scores, expected_tokens = jax.lax.top_k(scores, 5)
  expected_tokens = np.where(np.isneginf(expected_scores), -1, expected_tokens)
  tokens = jnp.arange(1009, dtype=jnp.int32)
  for found in (
    topk.merge(topk.empty((3,), 5), scores, tokens),
    topk.merge_rows(topk.empty((3,), 5), scores.T, tokens),
  ):
    np.testing.assert_array_equal(found.scores, expected_scores)
    np.testing.assert_array_equal(found.tokens, expected_tokens)


def test_rows_beyond_the_vocabulary_have_no_score():
  wide = jax.random.normal(jax.random.key(1), (300, 4))
  block_scores, _ = sampling.row_blocks((4,), 300, 290, lambda cut: cut(wide), width=300).block(0)
  assert np.isneginf(block_scores[290:]).all()
  np.testing.assert_array_equal(block_scores[:290], wide[:290])
