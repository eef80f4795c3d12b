"""Reassignment of tokens raises the likelihood, and a resumed run repeats it."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.studies.vq_logits.recluster import Codes, Recluster, contexts, reassigned
from tests import tiny
from vqjax import CodebookHead
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import MeshShape, make_mesh

VOCAB, WIDTH, POSITIONS = 53, 5, 600


def problem(seed, codes=7, scale=1.0):
  """Codes that do not know of ten topics of tokens, and hidden vectors that say the topic."""
  rng = np.random.default_rng(seed)
  tokens = np.minimum(rng.zipf(1.3, POSITIONS) - 1, VOCAB - 1).astype(np.int32)
  topic = rng.normal(size=(10, WIDTH))
  hidden = topic[tokens % 10] + 0.3 * rng.normal(size=(POSITIONS, WIDTH))
  codebook = scale * rng.normal(size=(codes, WIDTH))
  assignment = rng.integers(0, codes, VOCAB).astype(np.int32)
  bias = rng.normal(size=VOCAB)
  given = Codes(np.float32(codebook), assignment, np.float32(bias))
  # A tenth of the positions is without a target.
  return given, (np.float32(hidden), np.where(rng.random(POSITIONS) < 0.9, tokens, -1))


def scores(codes, hidden):
  """hidden · codebook[K], and Z of each position, in float64."""
  codebook, bias = np.asarray(codes.codebook, float), np.asarray(codes.bias, float)
  by_code = np.asarray(hidden, float) @ codebook.T
  return by_code, np.exp(by_code[:, codes.assignment] + bias).sum(-1, keepdims=True)


def log_prob(codes, hidden, targets):
  """[positions with a target] in nats, by the definition, in float64."""
  tokens = targets[targets >= 0]
  by_code, z = scores(codes, hidden[targets >= 0])
  own = np.take_along_axis(by_code, codes.assignment[tokens][:, None], axis=-1)
  return (own - np.log(z))[:, 0] + np.asarray(codes.bias, float)[tokens]


contexts_of = jax.jit(contexts)


def move(codes, sample):
  return reassigned(codes, jax.device_get(contexts_of(codes, *sample)))


@pytest.mark.parametrize("scale", [0.1, 4.0])
def test_the_sample_gains_at_least_what_is_promised(scale):
  codes, sample = problem(0, scale=scale)
  found, numbers = move(codes, sample)
  gained = log_prob(found, *sample).sum() - log_prob(codes, *sample).sum()
  assert numbers["moved"] > 0
  assert numbers["gain"] > np.log(7) * numbers["moved"] * 0.999
  # Of 600 positions' float32 log-probabilities near 10, 600 · 10 · 2^-24.
  assert gained >= numbers["gain"] - 4e-4


def test_the_gain_is_the_brute_force_bound():
  codes, (hidden, targets) = problem(1)
  found, numbers = move(codes, (hidden, targets))
  by_code, z = scores(codes, hidden[targets >= 0])
  log_q = np.log((np.exp(by_code) / z).sum(0))
  expected, bias = codes.assignment.copy(), codes.bias.copy()
  total = 0.0
  for v, a in enumerate(codes.assignment):
    own = by_code[targets[targets >= 0] == v]
    gains = own.sum(0) - len(own) * log_q
    best = int(np.argmax(gains))
    if gains[best] - gains[a] > np.log(7):
      total, expected[v] = total + gains[best] - gains[a], best
      bias[v] += log_q[a] - log_q[best]
  assert numbers["split"] == 0
  np.testing.assert_array_equal(found.assignment, expected)
  np.testing.assert_allclose(found.bias, bias, atol=1e-5)
  np.testing.assert_allclose(numbers["gain"], total, rtol=1e-5)


@pytest.mark.slow
def test_codes_without_tokens_split_others_without_changing_a_probability():
  # Of so few positions and such small scores no token gains log K nats by moving.
  codes, (hidden, targets) = problem(2, codes=11, scale=0.1)
  codes = codes._replace(assignment=np.minimum(codes.assignment, 3))
  sample = hidden, np.where(np.arange(POSITIONS) < 12, targets, -1)
  found, numbers = move(codes, sample)
  assert numbers["moved"] == 0
  assert numbers["split"] > 0
  assert np.unique(found.assignment).size == 4 + numbers["split"]
  np.testing.assert_allclose(log_prob(found, *sample), log_prob(codes, *sample), atol=1e-6)


@pytest.mark.slow
def test_a_token_that_splits_off_is_far_from_its_code_and_not_its_most_frequent():
  codes = Codes(np.zeros((2, 2), np.float32), np.zeros(4, np.int32), np.zeros(4, np.float32))
  hidden = np.float32([[1, 0]] * 6 + [[0, 5]] * 2 + [[1, 0.1]])
  found, _ = move(codes, (hidden, np.array([0] * 6 + [1] * 2 + [2])))
  assert found.assignment.tolist() == [0, 1, 0, 0]


@pytest.fixture
def experiment(tmp_path):
  """Forty steps of a codebook decoder."""
  head = CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True)
  return tiny.experiment(tiny.write_text(tmp_path / "text"), head)


@pytest.mark.slow
def test_a_resumed_run_repeats_its_reassignments_bitwise(experiment, tmp_path):
  short = dataclasses.replace(experiment.train, steps=20, eval_every=20)
  moving = dataclasses.replace(experiment, train=short, recluster=Recluster(9, 20, tokens=100))
  fit(moving, tmp_path / "whole")
  # After step 15: the checkpoint before holds step 10, with the moves of step 9.
  tiny.fit_and_interrupt(moving, tmp_path / "parts", 15)
  fit(moving, tmp_path / "parts")
  rows = tiny.rows(tmp_path / "whole")
  assert tiny.rows(tmp_path / "parts") == rows
  assert [row["step"] for row in rows if "recluster" in row] == [9, 18]
  both = [read_run_variables(tmp_path / name)[0] for name in ("parts", "whole")]
  jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.slow
def test_a_mesh_moves_the_same_tokens_and_keeps_its_shardings(experiment):
  split = load_text(experiment).splits["train"]
  found = []
  for mesh in ((1, 1, 1), (2, 2, 2)):
    on = Program(load_text(experiment).experiment, make_mesh(MeshShape(*mesh)))
    state = on.init(keys(0)[0])
    state, row = Recluster(1, 1, tokens=203).on(on, split)(state.replace(step=state.step + 1))
    found.append((row["moved"], jax.device_get(state.variables)))
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, on.abstract_state)
    assert jax.tree.all(same)
  (one, single), (eight, sharded) = found
  assert one == eight > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), single, sharded)


@pytest.mark.parametrize("tokens", [100, 10**6])
def test_segments_follow_one_another_and_fit_into_the_text(experiment, tokens):
  split = load_text(experiment).splits["train"]
  total = len(split.tokens)
  segments = [Recluster(5, 50, tokens).segment(step, split).tokens for step in range(5, 55, 5)]
  assert {len(segment) for segment in segments} == {min(tokens, total)}
  following = np.concatenate(segments[:2])[: min(2 * tokens, total)]
  np.testing.assert_array_equal(following, split.tokens[: 2 * tokens])
