"""The hook for transformers that the documentation shows collects the moments of this library."""

import functools
import pathlib
import re

import numpy as np
import pytest

from vqjax import DenseHead, checkpoints
from vqjax.compression import Moments
from vqjax.compression.calibration import collect

torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")


def documented():
  page = pathlib.Path(__file__).parents[2] / "docs/compression.md"
  blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
  (code,) = [block for block in blocks if "def collect" in block]
  names = {}
  exec(code, names)
  return names["collect"]


@functools.cache
def gemma():
  """A small model of transformers with random weights."""
  config = transformers.Gemma3TextConfig(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
  )  # fmt: skip
  torch.manual_seed(0)
  return transformers.Gemma3ForCausalLM(config).eval()


def test_the_documented_hook_writes_moments(tmp_path):
  model = gemma()
  batches = [torch.randint(1, 97, (2, 9)), torch.randint(1, 97, (1, 9))]
  documented()(model, batches, tmp_path / "moments.safetensors")
  found = Moments.load(tmp_path / "moments.safetensors")
  found.check(97, 32)
  assert found.tokens == 24
  tokens = torch.cat(batches)
  np.testing.assert_array_equal(found.counts, np.bincount(tokens.flatten(), minlength=97))
  with torch.no_grad():
    states = model.model(tokens).last_hidden_state[:, 1:].flatten(0, 1).double().numpy()
  # Sums of float32 hidden states that other batches round otherwise.
  np.testing.assert_allclose(found.hidden, states.T @ states / 24, rtol=1e-4, atol=1e-4)
  assert np.linalg.eigvalsh(found.inputs).max() > 0


def test_the_documented_hook_collects_what_this_library_does(tmp_path, monkeypatch):
  model = gemma()
  model.save_pretrained(tmp_path / "model")
  tokens = torch.randint(1, 97, (4, 9), generator=torch.Generator().manual_seed(1))
  # Instead of a random token both draw the most likely one.
  most_likely = lambda self: self.logits.argmax(-1)
  monkeypatch.setattr(torch.distributions.Categorical, "sample", most_likely)
  monkeypatch.setattr(DenseHead, "sample", lambda self, hidden, key: self.logits(hidden).argmax(-1))
  documented()(model, tokens.split(2), tmp_path / "moments")
  own, variables, _ = checkpoints.load(tmp_path / "model")
  counts = np.bincount(tokens.flatten(), minlength=97)
  options = {"hidden_tokens": 32, "expected_tokens": 1, "fisher_tokens": 32}
  expected = collect(own, variables, tokens.numpy().astype(np.int32), counts, **options)
  found = Moments.load(tmp_path / "moments")
  assert found.tokens == expected.tokens == 32
  # float32 on both sides, by other sums.
  for theirs, ours in ((found.hidden, expected.hidden), (found.inputs, expected.inputs)):
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4 * np.abs(ours).max())
