"""Reassignment of tokens lowers the loss, and a resumed run repeats it."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.studies.vq_logits.recluster import Recluster
from tests import tiny
from vqjax import CodebookEmbedding, CodebookHead, DenseHead
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit, read_run_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run_folder import load_text
from vqjax.sharding import MeshShape, make_mesh


@pytest.fixture
def experiment(tmp_path):
  """Forty steps of a codebook decoder."""
  head = CodebookHead(FROM_TOKENIZER, 16, codes=8, token_bias=True)
  return tiny.experiment(tiny.write_text(tmp_path / "text"), head)


def with_recluster(experiment, recluster, **head):
  model = experiment.model.clone(head=experiment.model.head.clone(**head))
  return dataclasses.replace(experiment, model=model, recluster=recluster)


def assignment(folder):
  return read_run_variables(folder)[0]["codes"]["head"]["assignment"]


@pytest.fixture
def classes(experiment, tmp_path):
  """Experiment on a text in which eight classes of seven words follow one another."""
  rng, folder = np.random.default_rng(0), tmp_path / "classes"
  folder.mkdir()
  frequency = 1 / np.arange(1, 8)
  for i in range(12):
    within = rng.choice(7, size=400, p=frequency / frequency.sum())
    words = [f"w{(i + j) % 8 + 8 * word}" for j, word in enumerate(within)]
    (folder / f"{i:02}.txt").write_text(" ".join(words) + ".\n")
  data = dataclasses.replace(experiment.data, path=str(folder))
  train = dataclasses.replace(experiment.train, steps=60, batch=16, eval_every=60, save_every=60)
  return dataclasses.replace(experiment, data=data, train=train)


@pytest.mark.slow
def test_a_run_that_reclusters_finds_the_classes_and_ends_with_a_lower_loss(classes, tmp_path):
  losses = {}
  for name, recluster in (("fixed", None), ("moving", Recluster(10, 40))):
    run = with_recluster(classes, recluster, codes=16, token_bias=True)
    losses[name] = fit(run, tmp_path / name)["valid"]["nats_per_token"]
  assert losses["moving"] < losses["fixed"] - 0.5
  found = {
    row["step"]: row["recluster"] for row in tiny.rows(tmp_path / "moving") if "recluster" in row
  }
  assert list(found) == [10, 20, 30, 40]
  assert found[10]["moved"] > 20
  assert found[10]["gain_nats"] > 0.05
  assert (assignment(tmp_path / "moving") != assignment(tmp_path / "fixed")).any()


@pytest.mark.slow
def test_a_resumed_run_repeats_its_reassignments_bitwise(experiment, tmp_path):
  short = dataclasses.replace(experiment.train, steps=20, eval_every=20)
  short = dataclasses.replace(experiment, train=short)
  moving = with_recluster(short, Recluster(9, 20, tokens=100))
  fit(moving, tmp_path / "whole")
  # After step 15: the checkpoint before holds step 10, with the moves of step 9.
  tiny.fit_and_interrupt(moving, tmp_path / "parts", 15)
  fit(moving, tmp_path / "parts")
  assert tiny.rows(tmp_path / "parts") == tiny.rows(tmp_path / "whole")
  both = [read_run_variables(tmp_path / name)[0] for name in ("parts", "whole")]
  jax.tree.map(np.testing.assert_array_equal, *both)


def on(experiment, *mesh):
  program = Program(load_text(experiment).experiment, make_mesh(MeshShape(*mesh)))
  return program, program.init(keys(0)[0])


@pytest.mark.slow
def test_a_mesh_moves_the_same_tokens_and_keeps_its_shardings(experiment):
  split = load_text(experiment).splits["train"]
  found = {}
  for mesh in ((1, 1, 1), (2, 2, 2)):
    program, state = on(experiment, *mesh)
    state, row = Recluster(1, 1, tokens=203).on(program, split)(state.replace(step=state.step + 1))
    found[mesh] = jax.device_get(state.variables), row
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, program.abstract_state)
    assert jax.tree.all(same)
  (one, row), (eight, other) = found.values()
  assert row["moved"] == other["moved"] > 0
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one, eight)


def test_segments_follow_one_another_and_fit_into_the_text(experiment):
  text = load_text(experiment)
  program = Program(text.experiment, make_mesh(MeshShape(1, 1, 1)))
  total = len(text.splits["train"].tokens)
  for tokens in (100, total, 10 * total):
    between = Recluster(5, 50, tokens=tokens).on(program, text.splits["train"])
    segments = [between._segment(step).tokens for step in range(5, 55, 5)]
    assert {len(segment) for segment in segments} == {min(tokens, total)}
    np.testing.assert_array_equal(segments[0], text.splits["train"].tokens[:tokens])
    if tokens < total:
      np.testing.assert_array_equal(segments[1], text.splits["train"].tokens[tokens : 2 * tokens])


@pytest.mark.slow
def test_only_an_untied_codebook_head_can_be_reclustered(experiment):
  tied = CodebookEmbedding(FROM_TOKENIZER, 16, codes=8)
  for embedding, head, kind in (
    (experiment.model.embedding, DenseHead(FROM_TOKENIZER, 16), "a DenseHead"),
    (tied, CodebookHead(FROM_TOKENIZER, 16, codes=8, embedding=tied), "a tied CodebookHead"),
  ):
    model = experiment.model.clone(embedding=embedding, head=head)
    program, _ = on(dataclasses.replace(experiment, model=model), 1, 1, 1)
    with pytest.raises(ValueError, match=f"got {kind}. Set recluster to None"):
      Recluster(5, 10).on(program, None)
  own = {"embedding": experiment.model.embedding.clone(), "head": DenseHead(FROM_TOKENIZER, 16)}
  model = starting_points.Distilled(experiment.model, experiment.model.clone(**own))
  train = dataclasses.replace(experiment.train, trainable=("student",))
  program, _ = on(dataclasses.replace(experiment, model=model, train=train), 1, 1, 1)
  with pytest.raises(ValueError, match="got a Distilled, whose head is inside another"):
    Recluster(5, 10).on(program, None)


@pytest.mark.parametrize(
  ("numbers", "message"),
  [
    ((0, 5), "every` must be at least 1; got 0"),
    ((10, 9), "recluster.every = 10, the first step; got 9"),
  ],
)
def test_numbers_outside_their_range_are_refused(numbers, message):
  with pytest.raises(ValueError, match=message):
    Recluster(*numbers)
