"""Training of Medusa's blocks is resumed, and its figures are of held-out text."""

import dataclasses
import functools

import numpy as np
import pytest

from tests.fakes import FakeTokenizer
from tests.lm.generation.test_speculation import V, target
from vqjax import DenseHead
from vqjax.lm.drafting import load_medusa, medusa_training
from vqjax.lm.drafting.medusa_training import MedusaJob, MedusaTraining, fit_medusa
from vqjax.lm.lenses import fitting

SETTINGS = MedusaTraining(blocks=2, steps=4, batch=32, rate=0.1, size=4)


class Cycle(FakeTokenizer):
  """A tokenizer of digits of which each follows another in most texts."""

  vocab = V

  def encode(self, text, *, special=True):
    """The token that begins, and those of the digits."""
    return [V - 1, *map(int, text)]


@functools.lru_cache
def text():
  """Digits that go up, with some errors."""
  rng = np.random.default_rng(0)
  digits = np.where(rng.random(700) < 0.1, rng.integers(0, 8, 700), np.arange(700) % 8)
  return "".join(map(str, digits))


def fit(out, settings=SETTINGS, **options):
  """The figures of a drafter of the five most frequent tokens; the lines that were said."""
  lines = []
  job = MedusaJob(out.parent, text(), out, positions=600, window=16, vocab=5, settings=settings)
  return fit_medusa(job, (*target(), Cycle()), lines.append, **options), lines


@pytest.mark.slow
def test_an_interrupted_training_goes_on_where_it_was(tmp_path, monkeypatch):
  # Times differ from call to call, and are written with a drafter.
  monkeypatch.setattr(medusa_training, "timed", lambda drafter, *given: drafter)
  whole, resumed = tmp_path / "whole.safetensors", tmp_path / "resumed.safetensors"
  figures, _ = fit(whole)
  monkeypatch.setattr(fitting, "EVERY", 0.0)
  with monkeypatch.context() as patch:
    saved = []

    def stopped(*args, **kwargs):
      saved.append(savez(*args, **kwargs))
      if len(saved) == 2:
        raise KeyboardInterrupt

    savez = np.savez
    patch.setattr(fitting.np, "savez", stopped)
    with pytest.raises(KeyboardInterrupt):
      fit(resumed)
  assert not resumed.exists()
  again, lines = fit(resumed)
  assert lines[0] == "going on with step 1 of 4"
  assert again == figures
  assert whole.read_bytes() == resumed.read_bytes()
  assert sorted(path.name for path in tmp_path.iterdir()) == [resumed.name, whole.name]
  # Descent on a text of five of eight digits that repeat.
  assert figures["tree"] >= figures["chain"] >= 1
  assert figures["among"][0] > 0.4
  drafter = load_medusa(whole, *target())
  assert (type(drafter.head), drafter.head.vocab) == (DenseHead, 5)
  assert drafter.tree.size <= 4
  assert len(drafter.tokens) == 5


@pytest.mark.slow
def test_one_step_is_enough_for_a_drafter(tmp_path):
  fit(tmp_path / "drafter.safetensors", dataclasses.replace(SETTINGS, steps=1))
  assert (tmp_path / "drafter.safetensors").exists()


@pytest.mark.parametrize(
  ("change", "parts"),
  [
    ({"text": "0123"}, ["--text", "two windows of 16 tokens"]),
    ({"vocab": 0}, ["vocab", "0"]),
    ({"rate": 0}, ["rate", "0"]),
  ],
)
@pytest.mark.untyped
def test_a_wrong_call_is_refused(tmp_path, change, parts):
  given = {
    "model": tmp_path,
    "text": text(),
    "out": tmp_path / "new.safetensors",
    "window": 16,
    "vocab": 5,
  }
  settings = {"blocks": 2} | {name: x for name, x in change.items() if name == "rate"}
  given |= {name: x for name, x in change.items() if name != "rate"}
  call = lambda: MedusaJob(**given, settings=MedusaTraining(**settings))
  with pytest.raises(ValueError, match="must") as error:
    fit_medusa(call(), (*target(), Cycle()), print)
  assert all(part in str(error.value) for part in parts)
