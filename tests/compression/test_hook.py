"""The hook for transformers that the documentation shows collects the moments of this library."""

import pathlib
import re

import numpy as np
import pytest

from vqjax.compression import Moments

torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")


def documented():
  page = pathlib.Path(__file__).parents[2] / "docs/compression.md"
  blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
  (code,) = [block for block in blocks if "def collect" in block]
  names = {}
  exec(code, names)
  return names["collect"]


def test_the_documented_hook_writes_moments(tmp_path):
  config = transformers.Gemma3TextConfig(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
  )  # fmt: skip
  torch.manual_seed(0)
  model = transformers.Gemma3ForCausalLM(config).eval()
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
