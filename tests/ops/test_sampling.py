"""Tests of block-wise top-k, draws and nuclei against a sort of the whole row."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from tests.ops.exact import normals
from vqjax.ops import device, sampling, topk

SCORES, WIDE = normals(0, (4, 37), (4, 300))


def blocks_of(scores, width):
  """Blocks of `width` tokens over scores [*B, V], the last one overlapping."""
  scores, vocab = jnp.asarray(scores), scores.shape[-1]

  def block(index):
    start = jnp.minimum(index * width, vocab - width)
    rows = start + jnp.arange(width)
    block = jnp.where(rows >= index * width, scores[..., rows], -jnp.inf)
    return jnp.moveaxis(block, -1, 0), rows

  return sampling.Blocks(-(-vocab // width), block, scores.shape[:-1])


def sample(scores, width, **options):
  options = sampling.SamplingOptions(**options)
  return sampling.sample(blocks_of(scores, width), jax.random.key(0), options)


def compiled(run):
  """The results of a program in NumPy."""
  return lambda *args: jax.device_get(jax.jit(run)(*args))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("width", [10, 1, 37, 5])
def test_best_equals_sorting_at_any_block_width(width):
  ks = 1, 3, 37
  run = compiled(lambda x: [sampling.best(blocks_of(x, width), k) for k in ks])
  # In the second, whole blocks of some rows have no score.
  for scores in (SCORES, np.where(np.arange(37) < 20, -np.inf, SCORES)):
    for k, (values, tokens, log_z) in zip(ks, run(scores)):
      expected = -np.sort(-scores, axis=-1)[:, :k]
      np.testing.assert_array_equal(values, expected)
      real = ~np.isneginf(expected)
      own = np.take_along_axis(scores, np.maximum(tokens, 0), -1)
      np.testing.assert_array_equal(own[real], expected[real])
      assert (tokens[~real] == -1).all()
      np.testing.assert_allclose(log_z, scipy.special.logsumexp(scores, axis=-1), rtol=1e-6)


def test_best_beyond_the_vocabulary_says_minus_one():
  values, tokens, _ = compiled(lambda x: sampling.best(blocks_of(x, 10), 40))(SCORES)
  assert (tokens[:, 37:] == -1).all()
  assert np.isneginf(values[:, 37:]).all()


def test_the_nucleus_is_the_smallest_set_that_reaches_its_mass():
  scores, masses = np.concatenate([0.01 * SCORES, SCORES, 30 * SCORES]), (0.05, 0.5, 0.9, 0.999)
  first = lambda x, width, top_p: sampling.nucleus(blocks_of(x, width), top_p).block(0)[0]
  run = compiled(lambda x: [[first(x, width, top_p) for width in (10, 37)] for top_p in masses])
  for top_p, (kept, whole) in zip(masses, run(scores)):
    np.testing.assert_array_equal(kept, whole[:10])
    for row, cut in zip(np.float64(scores), whole.T):
      mass = scipy.special.softmax(row)[np.isfinite(cut)]
      assert mass.sum() >= top_p - 1e-6
      assert mass.sum() - mass.min() < top_p + 1e-6


@pytest.mark.parametrize("width", [4, 6])
def test_of_tokens_that_tie_at_the_edge_of_the_nucleus_the_first_stay(width):
  uneven, even = np.float32([0.4, 0.1, 0.1, 0.1, 0.2, 0.1]), np.full(6, 1 / 6, np.float32)
  masses = 0.39, 0.5, 0.65, 0.8, 0.95

  @jax.jit
  def run(scores):
    cut = [sampling.nucleus(blocks_of(scores, width), mass) for mass in masses]
    return [[blocks.block(np.int32(i)) for i in range(blocks.count)] for blocks in cut]

  found = []
  for blocks in run(np.log([uneven, even])):
    kept = np.zeros((6, 2), int)
    for scores, rows in blocks:
      kept[np.asarray(rows)] |= np.isfinite(scores)
    found.append(["".join(map(str, row)) for row in kept.T])
  assert [row for row, _ in found] == ["100000", "100010", "110010", "111010", "111111"]
  assert [row for _, row in found] == ["111000", "111000", "111100", "111110", "111111"]


def test_a_draw_does_not_depend_on_what_other_rows_hold():
  draw = jax.jit(lambda x: sampling.draw(blocks_of(x, 10), jax.random.key(3))[0])
  assert draw(SCORES) == draw(np.concatenate([SCORES[:1], np.zeros((3, 37), np.float32)]))


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
def test_options_that_no_distribution_has_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    sample(SCORES, 10, **options)


def test_top_k_and_top_p_together_cut_the_best_first():
  rows = np.broadcast_to(np.log([0.5, 0.3, 0.1, 0.06, 0.04]), (4000, 5))
  draw = lambda x: sample(x, 2, top_k=3, top_p=0.85)
  # Of the three best, 0.5 / 0.9 and 0.3 / 0.9 reach 0.85 between them.
  counts = np.bincount(compiled(draw)(rows), minlength=5)
  assert counts[2:].sum() == 0
  np.testing.assert_allclose(counts[:2] / 4000, [0.625, 0.375], atol=0.04)


@pytest.mark.parametrize(("width", "count"), [(None, 1), (128, 3)])
def test_row_blocks_name_every_token_once_and_repeat_none(width, count):
  def run(x):
    blocks = sampling.row_blocks((4,), 300, 300, lambda cut: cut(x.T), width=width)
    return [blocks.block(index) for index in range(blocks.count)]

  parts, seen = compiled(run)(WIDE), []
  assert len(parts) == count
  for scores, tokens in parts:
    kept = ~np.isneginf(scores[:, 0])
    seen += tokens[kept].tolist()
    np.testing.assert_array_equal(scores[kept].T, WIDE[:, tokens[kept]])
  assert seen == list(range(300))


def test_blocks_hold_a_bounded_number_of_scores():
  for rows in (1, 7, 1000, 30_000):
    assert rows * sampling.block_width(rows, 10**6) <= 2**22


def test_scores_a_rounding_apart_are_told_apart_by_the_nucleus():
  row = np.full(64, 5.0, np.float32)
  for i in range(1, 64):
    row[i] = np.nextafter(row[i - 1], np.float32(0))
  # Each has a mass of 1 / 64: fifteen and a half of them take sixteen.
  run = compiled(lambda x: sampling.nucleus(blocks_of(x, 64), 15.5 / 64).block(0)[0])
  assert np.isfinite(run(row[None])[:, 0]).tolist() == [True] * 16 + [False] * 48


def test_the_nucleus_of_many_scores_equals_that_of_stored_ones(monkeypatch):
  def run(x):
    blocks = sampling.nucleus(blocks_of(x, 10), 0.7)
    return [blocks.block(index)[0] for index in range(4)]

  stored = compiled(run)(SCORES)
  unstored = device.current()._replace(stored=0)
  monkeypatch.setattr(device, "current", lambda: unstored)
  np.testing.assert_array_equal(stored, compiled(lambda x: run(x))(SCORES))


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.untyped
def test_the_edge_of_a_nucleus_is_found_among_numbers_of_any_size_and_sign(bits):
  row = np.float32([-3e38, -1e30, -88.5, -2.0, -np.inf, -0.0, 0.0, 1e-30, 1.5, -np.inf])
  mass = np.exp(np.float64(row) - np.log(np.exp(np.float64(row)).sum()))
  find = jax.jit(lambda x, top_p: sampling.nucleus_edge(blocks_of(x, 4), top_p, bits=bits))
  for count in range(1, 6):
    # Half of the mass of the last token is missing without it.
    order = np.argsort(-row, kind="stable")
    top_p = mass[order[: count - 1]].sum() + mass[order[count - 1]] / 2
    # CPUs take numbers below the smallest normal one as 0.
    tiny = np.finfo(np.float32).tiny
    np.testing.assert_allclose(find(row[None], top_p)[0], row[order[count - 1]], rtol=0, atol=tiny)


def test_scores_that_are_not_stored_are_computed_eleven_times(monkeypatch):
  unstored = device.current()._replace(stored=0)
  monkeypatch.setattr(device, "current", lambda: unstored)
  computed = []

  def block(index):
    jax.debug.callback(lambda index: computed.append(int(index)), index)
    return blocks_of(SCORES, 37).block(index)

  blocks = sampling.Blocks(1, block, (4,))
  jax.jit(lambda: sampling.nucleus(blocks, 0.7).block(0)[0])()
  jax.effects_barrier()
  # The normaliser, eight passes of the search, the ties, and the scores of the nucleus themselves.
  assert len(computed) == 11


def test_a_draw_keeps_the_best_token_where_every_reading_of_the_scores_rounds_otherwise():
  readings = itertools.count()
  blocks = blocks_of(SCORES, 10).map(lambda scores, _: scores - 1e-6 * next(readings))
  # Each reading of a traced block subtracts more than the one before.
  run = compiled(lambda key: sampling.draw(sampling.nucleus(blocks, 1e-6), key))
  np.testing.assert_array_equal(run(jax.random.key(0)), SCORES.argmax(axis=-1))
  least = compiled(lambda key: sampling.draw(sampling.at_least(blocks, 1.0, 1.0), key))
  np.testing.assert_array_equal(least(jax.random.key(0)), SCORES.argmax(axis=-1))


@pytest.mark.parametrize("shape", [(50,), (2, 37), (7, 1, 37), ()])
def test_a_mask_of_another_shape_is_refused(shape):
  with pytest.raises(ValueError, match=r"`allowed` must have shape \(37,\) or \(4, 37\); got"):
    sampling.allow(blocks_of(SCORES, 10), np.ones(shape, bool), 37)


def test_sampling_works_with_64_bit_types_on():
  @jax.jit
  def run(x):
    values, tokens, _ = sampling.best(blocks_of(x, 10), 5)
    return values, tokens, sample(x, 10, temperature=0.9, top_p=0.5)

  with jax.enable_x64(True):
    found = run(np.float64(SCORES))
  assert [x.dtype for x in found] == ["float32", "int32", "int32"]


def test_selection_by_chunks_equals_that_of_all_scores():
  # Few distinct scores, so that ties cross the edges of chunks, the last of which is short.
  scores = np.round(2 * normals(5, (3, 1009))[0])

  @compiled
  def run(x):
    empty, tokens = topk.empty((3,), 5), jnp.arange(1009, dtype=jnp.int32)
    found = topk.merge(empty, x, tokens), topk.merge_rows(empty, x.T, tokens)
    return jax.lax.top_k(x, 5), found

  for value in (-np.inf, 0.0, np.nan):
    scores[:, 100:400] = scores[1] = value
    (expected_scores, expected_tokens), both = run(scores)
    expected_tokens = np.where(np.isneginf(expected_scores), -1, expected_tokens)
    for found in both:
      np.testing.assert_array_equal(found.scores, expected_scores)
      np.testing.assert_array_equal(found.tokens, expected_tokens)


def test_rows_beyond_the_vocabulary_have_no_score():
  blocks = lambda x: sampling.row_blocks((4,), 300, 290, lambda cut: cut(x.T), width=300)
  scores = compiled(lambda x: blocks(x).block(0)[0])(WIDE)
  assert np.isneginf(scores[290:]).all()
  np.testing.assert_array_equal(scores[:290], WIDE.T[:290])


def test_rows_are_drawn_at_their_own_temperatures_from_their_own_nuclei():
  scores = np.random.default_rng(3).standard_normal((3, 40), np.float32)
  warm, top_p, count = np.float32([0.5, 1.5, 1.0]), np.float32([0.6, 1.0, 0.3]), 4000

  @jax.jit
  def run(scores, warm, top_p):
    many = jnp.repeat(scores, count, axis=0)
    of_rows = jnp.repeat(warm, count), None, jnp.repeat(top_p, count)
    return sampling.sample_rows(blocks_of(many, 16), jax.random.key(0), *of_rows)

  tokens = np.asarray(run(scores, warm, top_p)).reshape(3, count)
  for row in range(3):
    exact = np.exp(scores[row] / np.float64(warm[row]))
    exact /= exact.sum()
    order = np.argsort(-exact)
    size = 1 + np.searchsorted(np.cumsum(exact[order]), min(top_p[row], 1 - 1e-9))
    kept = np.zeros(40)
    kept[order[:size]] = exact[order[:size]] / exact[order[:size]].sum()
    share = np.bincount(tokens[row], minlength=40) / count
    assert not share[kept == 0].any()
    # Four standard deviations of a share are at most 4 sqrt(0.25 / 4000).
    assert np.abs(share - kept).max() < 0.032
