"""Tests of loaders of tokens: positions, rows of processes, resumption."""

import itertools
import json

import numpy as np
import pytest

from vqjax.lab.data import EvaluationBatches, Streams, Windows

LOADERS = [Windows(), Streams()]


def take(iterator, count):
  return list(itertools.islice(iterator, count))


def same(ours, theirs):
  return all(np.array_equal(a[k], b[k]) for a, b in zip(ours, theirs, strict=True) for k in a)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("tokens", "batch", "context"), [(35, 5, 7), (211, 3, 7), (97, 1, 13)])
def test_targets_are_inputs_moved_by_one(numbered, loader, tokens, batch, context):
  # Token n is the number n and follows n - 1; the first, 1, follows eos, which is 0.
  for got in take(loader.batches(numbered(tokens), batch=batch, context=context, seed=3), 50):
    assert got["inputs"].dtype == got["targets"].dtype == np.int32
    assert got["inputs"].shape == got["targets"].shape == (batch, context)
    assert np.array_equal(got["targets"], got["inputs"] + 1)
    assert np.array_equal(np.diff(got["targets"]), np.ones((batch, context - 1)))


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_has_each_token_once_where_batches_divide_the_split(numbered, loader):
  iterator = loader.batches(numbered(210), batch=5, context=7, seed=0)
  for _ in range(3):
    epoch = np.concatenate([got["targets"].ravel() for got in take(iterator, 6)])
    assert sorted(epoch) == list(range(1, 211))


SIZES = ((97, 2, 3), (101, 4, 11), (50, 7, 7))


@pytest.mark.parametrize(("tokens", "batch", "context"), SIZES)
def test_streams_have_no_token_twice_in_an_epoch(numbered, tokens, batch, context):
  steps = tokens // batch // context
  got = take(Streams().batches(numbered(tokens), batch=batch, context=context, seed=1), steps)
  seen = np.concatenate([b["targets"].ravel() for b in got])
  assert len(set(seen.tolist())) == len(seen) > tokens - batch * context


@pytest.mark.parametrize(("tokens", "batch", "context"), SIZES)
def test_windows_have_every_token_of_a_ragged_split_as_often_as_any_other(
  numbered, tokens, batch, context
):
  windows = -(-tokens // context)
  got = take(Windows().batches(numbered(tokens), batch=batch, context=context, seed=1), windows)
  counts = np.bincount(np.concatenate([b["targets"].ravel() for b in got]), minlength=tokens + 1)
  # That many batches are as many epochs as a batch has rows; only the last window overlaps.
  twice = windows * context - tokens
  assert counts[1:].min() == batch
  assert (counts[1:] > batch).sum() == twice


def test_windows_change_their_order_with_the_epoch_and_the_seed(numbered):
  def epoch(iterator):
    return tuple(got["targets"][0, 0] for got in take(iterator, 30))

  iterator = Windows().batches(numbered(210), batch=1, context=7, seed=0)
  first, second = epoch(iterator), epoch(iterator)
  other = epoch(Windows().batches(numbered(210), batch=1, context=7, seed=1))
  assert len({first, second, other}) == 3
  assert first == epoch(Windows().batches(numbered(210), batch=1, context=7, seed=0))


def test_a_stream_continues_in_its_row_until_it_is_reset(numbered):
  batches = take(Streams().batches(numbered(211), batch=3, context=7, seed=0), 31)
  assert [bool(got["reset"].all()) for got in batches] == [i % 10 == 0 for i in range(31)]
  for before, after in itertools.pairwise(batches):
    if not after["reset"].any():
      assert np.array_equal(after["inputs"][:, 0], before["targets"][:, -1])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 40])
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(numbered, loader, stop):
  def start():
    return loader.batches(numbered(211), batch=5, context=7, seed=9)

  whole = take(start(), 60)
  stopped = start()
  take(stopped, stop)
  state = json.loads(json.dumps(stopped.get_state()))
  resumed = start()
  take(resumed, 3)
  resumed.set_state(state)
  assert same(take(resumed, 60 - stop), whole[stop:])


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("rows", [[0], [5, 2], [1, 3, 4], range(6)])
def test_a_process_reads_its_own_rows_and_its_position_is_that_of_all(numbered, loader, rows):
  rows = np.asarray(rows)
  start = lambda **some: loader.batches(numbered(211), batch=6, context=7, seed=2, **some)
  whole, own, other = take(start(), 40), start(rows=rows), start()
  assert same(take(own, 17), [{k: x[rows] for k, x in batch.items()} for batch in whole[:17]])
  other.set_state(json.loads(json.dumps(own.get_state())))
  assert same(take(other, 3), whole[17:20])
  assert same(take(own, 23), [{k: x[rows] for k, x in batch.items()} for batch in whole[17:]])


@pytest.mark.parametrize("loader", LOADERS)
def test_a_split_shorter_than_a_batch_names_the_counts(numbered, loader):
  with pytest.raises(ValueError, match=r"`split` must have 35 tokens .* got 34"):
    loader.batches(numbered(34), batch=5, context=7, seed=0)


@pytest.mark.parametrize("tokens", [1, 6, 7, 8, 34, 35, 36, 211])
@pytest.mark.parametrize(("batch", "context"), [(1, 1), (1, 7), (5, 7), (4, 11)])
def test_evaluation_has_every_token_as_a_target_once_in_order(numbered, tokens, batch, context):
  batches = EvaluationBatches(numbered(tokens), batch, context)
  got = list(batches)
  assert len(got) == len(batches)
  assert same(list(batches), got)
  shape = batch, context
  assert all(one[name].shape == shape for one in got for name in ("inputs", "targets"))
  assert all(one["reset"].all() for one in got)
  mask = np.concatenate([one["targets"].ravel() for one in got]) != -1
  for name, first in (("targets", 1), ("inputs", 0)):
    values = np.concatenate([one[name].ravel() for one in got])[mask]
    assert np.array_equal(values, np.arange(first, first + tokens))
