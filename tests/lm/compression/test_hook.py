"""The hooks for transformers and vLLM collect the moments of this library."""

import functools
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from vqjax import DenseHead
from vqjax.commands import compress
from vqjax.lm import checkpoints
from vqjax.lm.compression.calibration import collect
from vqjax.tables import Moments
from vqjax.tables.container import read_table

torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `parity` is not installed")

from safetensors.torch import save_file  # noqa: E402

from vqjax import torch as hooks  # noqa: E402


@functools.cache
def gemma():
  """A small model of transformers with random weights."""
  config = transformers.Gemma3TextConfig(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
  )  # fmt: skip
  torch.manual_seed(0)
  return transformers.Gemma3ForCausalLM(config).eval()


def test_the_hook_writes_moments(tmp_path):
  model = gemma()
  batches = [torch.randint(1, 97, (2, 9)), torch.randint(1, 97, (1, 9))]
  counted = torch.randint(1, 97, (3, 50))
  hooks.collect(model, batches, tmp_path / "moments.safetensors", counted=[counted])
  found = Moments.load(tmp_path / "moments.safetensors")
  found.check(97, 32)
  assert found.tokens == 24
  tokens = torch.cat(batches)
  all_tokens = np.r_[tokens.flatten(), counted.flatten()]
  np.testing.assert_array_equal(found.counts, np.bincount(all_tokens, minlength=97))
  with torch.no_grad():
    states = model.model(tokens).last_hidden_state[:, 1:].flatten(0, 1).double().numpy()
  # Sums of float32 hidden states that other batches round otherwise.
  np.testing.assert_allclose(found.hidden, states.T @ states / 24, rtol=1e-4, atol=1e-4)
  assert np.linalg.eigvalsh(found.inputs).max() > 0


def test_the_hook_collects_what_this_library_does(tmp_path, monkeypatch):
  model = gemma()
  model.save_pretrained(tmp_path / "model")
  tokens = torch.randint(1, 97, (4, 9), generator=torch.Generator().manual_seed(1))
  # Instead of a random token both draw the most likely one.
  most_likely = lambda self: self.logits.argmax(-1)
  monkeypatch.setattr(torch.distributions.Categorical, "sample", most_likely)
  monkeypatch.setattr(DenseHead, "sample", lambda self, hidden, key: self.logits(hidden).argmax(-1))
  hooks.collect(model, tokens.split(2), tmp_path / "moments")
  own, variables, _ = checkpoints.load(tmp_path / "model")
  counts = np.bincount(tokens.flatten(), minlength=97)
  options = {"hidden_tokens": 32, "expected_tokens": 1, "fisher_tokens": 32}
  expected = collect(own, variables, tokens.numpy().astype(np.int32), counts, **options)
  found = Moments.load(tmp_path / "moments")
  assert found.tokens == expected.tokens == 32
  # float32 on both sides, by other sums.
  for theirs, ours in ((found.hidden, expected.hidden), (found.inputs, expected.inputs)):
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-4 * np.abs(ours).max())


class AsVLLMCalls(torch.nn.Module):
  """A model of transformers that is called as vLLM calls its own: tokens of all requests in a row.

  It is not vLLM: the test says nothing of `LLM.apply_model`, nor of what a version of vLLM does.
  """

  def __init__(self, model):
    super().__init__()
    self.inner, self.config = model.model, model.config

  def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
    starts = (positions == 0).nonzero()[:, 0].tolist()
    with torch.no_grad():
      requests = torch.tensor_split(input_ids, starts[1:])
      return torch.cat([self.inner(tokens[None]).last_hidden_state[0] for tokens in requests])


def test_the_hook_for_vllm_has_the_moments_of_that_for_transformers(tmp_path):
  model = gemma()
  requests = [torch.randint(1, 97, (1, length)) for length in (9, 5, 7)]
  hooks.collect(model, requests, tmp_path / "moments")
  expected = Moments.load(tmp_path / "moments")
  worker = AsVLLMCalls(model)
  hooks.attach(worker)
  # Two steps of the scheduler, with several requests in the first one.
  for some in (requests[:2], requests[2:]):
    positions = torch.cat([torch.arange(tokens.shape[1]) for tokens in some])
    worker(input_ids=torch.cat(some, dim=1)[0], positions=positions, inputs_embeds=None)
  save_file(hooks.detach(worker), tmp_path / "theirs")
  worker(input_ids=requests[0][0], positions=torch.arange(9))  # after `detach`
  found = Moments.load(tmp_path / "theirs")
  assert found.tokens == expected.tokens == 18
  assert found.inputs is None
  np.testing.assert_array_equal(found.counts, expected.counts)
  np.testing.assert_allclose(found.hidden, expected.hidden, rtol=1e-4, atol=1e-4)


def log_probs(model, tokens):
  with torch.no_grad():
    return torch.log_softmax(model(tokens).logits[:, 1:].double(), -1)


def test_tables_of_a_model_that_is_not_run_here_are_compressed(tmp_path):
  config = transformers.Gemma3nTextConfig(
    vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32, hidden_size_per_layer_input=8,
    intermediate_size=40, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
    num_key_value_heads=2, num_kv_shared_layers=0, altup_num_inputs=2, laurel_rank=4,
    activation_sparsity_pattern=[0.0, 0.0], pad_token_id=0,
    layer_types=["sliding_attention", "full_attention"],
  )  # fmt: skip
  torch.manual_seed(0)
  model = transformers.Gemma3nForCausalLM(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
  folder, out = tmp_path / "model", tmp_path / "out"
  model.save_pretrained(folder)
  batches = torch.randint(1, 97, (8, 33)).split(4)
  modules = {"embed_tokens": None, "embed_tokens_per_layer": model.model.embed_tokens_per_layer}
  options = []
  for name, module in modules.items():
    hooks.collect(model, batches, tmp_path / name, table=module)
    options += ["--table", f"model.{name}.weight", str(tmp_path / name)]
  assert compress.main([str(folder), "--bytes", "9KB", "--out", str(out), *options]) == 0
  made = json.loads((out / "vqjax.json").read_text())
  assert 8000 < sum(table["bytes"] for table in made["tables"].values()) <= 9000
  before, after = (load_file(path / "model.safetensors") for path in (folder, out))
  for name in before.keys() & after.keys():
    np.testing.assert_array_equal(before[name], after[name])
  tokens = torch.randint(1, 97, (4, 33))
  expected = log_probs(model, tokens)
  tables = {f"model.{name}.weight": f"model.{name}" for name in modules}
  assert before.keys() - after.keys() == set(tables)
  for name, module in tables.items():
    rows = torch.from_numpy(read_table(out, name).rows())
    model.get_submodule(module).weight.data.copy_(rows)
  found = log_probs(model, tokens)
  kl = (expected.exp() * (expected - found)).sum(-1).mean()
  assert 0 < kl < 0.01


def test_tables_that_are_not_there_are_refused_with_similar_names(tmp_path, capsys):
  gemma().save_pretrained(tmp_path / "model")
  Moments(np.eye(32), np.ones(97), 1).save(tmp_path / "m")
  call = [str(tmp_path / "model"), "--bytes", "1MB", "--out", str(tmp_path / "out"), "--table"]
  assert compress.main([*call, "embed_tokens.weight", str(tmp_path / "m")]) == 2
  line = capsys.readouterr().err
  assert "`--table` must be a tensor [V, D]" in line
  assert "model.embed_tokens.weight" in line
  with pytest.raises(SystemExit):
    compress.main([*call, "a", "b", "--text", "c"])
  assert not (tmp_path / "out").exists()
