"""Tests of the tasks that are made of plain text."""

import numpy as np
import pytest

from vqjax.lab.data import Continued, Intruded, Masked, TokenSplit
from vqjax.lab.data.pipeline import NONE
from vqjax.lab.models.bert import MASKED

EOS = 0


def split_of(*documents):
  tokens = np.concatenate([[*words, EOS] for words in documents]).astype(np.uint16)
  return TokenSplit(tokens, text_bytes=1, documents=len(documents), eos=EOS)


@pytest.fixture
def long():
  return split_of(*np.random.default_rng(0).integers(1, 500, (40, 250)).tolist())


def test_masks_hide_most_of_what_is_to_be_guessed(long):
  batches = Masked().batches(long, batch=16, context=64, seed=3)
  found = [next(batches) for _ in range(30)]
  inputs, targets = (np.concatenate([b[name] for b in found]) for name in ("inputs", "targets"))
  chosen = targets != NONE
  assert abs(chosen.mean() - 0.15) < 0.01
  hidden, same = inputs[chosen] == MASKED, inputs[chosen] == targets[chosen]
  assert abs(hidden.mean() - 0.8) < 0.03
  assert abs(same.mean() - 0.1) < 0.03
  assert (inputs[~chosen] >= 0).all()


def test_masks_of_a_step_are_the_same_in_any_process(long):
  options = {"batch": 8, "context": 32, "seed": 1}
  whole = next(Masked().batches(long, **options))
  for rows in (np.arange(4), np.arange(4, 8)):
    part = next(Masked().batches(long, **options, rows=rows))
    for name in ("inputs", "targets"):
      np.testing.assert_array_equal(part[name], whole[name][rows])


def test_masks_of_an_evaluation_are_always_the_same(long):
  first, again = (list(Masked().whole(long, batch=8, context=64)) for _ in range(2))
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a["inputs"], b["inputs"])
  assert Masked().text_bytes(long) is None


def test_masks_of_an_evaluation_do_not_depend_on_the_batch(long):
  found = []
  for size in (3, 8):
    batches = [b["targets"] for b in Masked().whole(long, batch=size, context=32)]
    targets = np.concatenate(batches)
    found.append(targets[(targets >= 0).any(axis=1)])
  rows = min(map(len, found))
  assert rows > 100
  np.testing.assert_array_equal(found[0][:rows], found[1][:rows])


@pytest.mark.parametrize("part", [0.0, 1.5])
def test_a_part_outside_its_range_is_refused(part):
  with pytest.raises(ValueError, match=rf"part` must be in \(0, 1\]; got {part}"):
    Masked(part=part)


def test_half_of_the_pairs_are_halves_of_one_document():
  documents = [[10 * d + i for i in range(1, 6)] for d in range(1, 8)]
  batches = list(Continued().whole(split_of(*documents), batch=4, context=3))
  rows = [
    (first, second, int(target))
    for batch in batches
    for (first, second), target in zip(batch["inputs"].tolist(), batch["targets"], strict=True)
    if target != NONE
  ]
  assert len(rows) == 14
  for first, second, target in rows:
    real = lambda half: [t for t in half if t != NONE]
    assert (real(first)[0] // 10 == real(second)[0] // 10) == bool(target)
    assert [t % 10 for t in real(first)] == [1, 2, 3]
    assert [t % 10 for t in real(second)] == [4, 5]
  assert sum(target for *_, target in rows) == 7


def test_a_stretch_is_of_another_document():
  documents = [[20 * d + i for i in range(1, 11)] for d in range(1, 6)]
  batch = next(iter(Intruded().whole(split_of(*documents), batch=6, context=12)))
  for number in range(5):
    row, (first, last) = batch["inputs"][number], batch["targets"][number]
    assert last - first == 1  # a fifth of ten
    own = row[:10] // 20 == number + 1
    assert (~own).nonzero()[0].tolist() == [first, last]
    assert (row[10:] == NONE).all()
  assert (batch["inputs"][5] == NONE).all()
  assert (batch["targets"][5] == NONE).all()


def test_a_document_that_is_too_short_has_no_stretch():
  batch = next(iter(Intruded().whole(split_of([1, 2], [3, 4, 5, 6]), batch=2, context=5)))
  assert batch["targets"][0].tolist() == [NONE, NONE]
  assert batch["inputs"][0].tolist() == [1, 2, NONE, NONE, NONE]


@pytest.mark.parametrize("loader", [Continued(), Intruded()])
def test_one_document_is_not_enough(loader):
  with pytest.raises(ValueError, match="at least two documents"):
    next(iter(loader.whole(split_of([1, 2, 3]), batch=1, context=4)))
