"""Models that Hugging Face transformers made have the same logits here, and go back to it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import apply
from tests.lm.checkpoints import report
from tests.lm.checkpoints.families import CONFIGS, V
from vqjax.lm import checkpoints

torch = pytest.importorskip("torch", reason="`make parity` installs PyTorch and transformers")
transformers = pytest.importorskip("transformers", reason="`make parity` installs transformers")
import safetensors.torch  # noqa: E402

PADDING = {"pad_token_id": 0}
"""transformers' defaults are tokens of larger vocabularies."""

TOKENS = np.random.default_rng(0).integers(0, V, (2, 500))


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
  """A random model of transformers, its folder, and its logits at 500 positions."""
  folder = tmp_path_factory.mktemp(request.param)
  model = report.reference(request.param, folder)
  return model, folder, logits(model)


def logits(model):
  return report.reference_logits(model, TOKENS)


@functools.cache
def loaded(folder):
  return checkpoints.load(folder)


def test_logits_are_those_of_transformers_at_500_positions(reference):
  _, folder, expected = reference
  model, variables, _ = loaded(folder)
  found = apply(model, variables, jnp.asarray(TOKENS))
  assert len(list(folder.glob("*.safetensors"))) > 1
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_transformers_loads_what_is_saved_and_computes_the_same(reference, tmp_path):
  original, folder, expected = reference
  model, variables, _ = loaded(folder)
  checkpoints.save(tmp_path / "again", model, variables, shard_bytes=30_000)
  again = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "again", attn_implementation="eager", **PADDING
  )
  assert type(again) is type(original)
  before = {name: tensor.numpy() for name, tensor in original.state_dict().items()}
  after = {name: tensor.numpy() for name, tensor in again.state_dict().items()}
  assert before.keys() == after.keys()
  for name in before:
    np.testing.assert_array_equal(before[name], after[name], err_msg=name)
  np.testing.assert_array_equal(logits(again), expected)


def test_bfloat16_files_are_read_and_written_as_they_are(reference, tmp_path):
  original, *_ = reference
  half = lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x
  state = {name: half(x) for name, x in original.state_dict().items()}
  original.save_pretrained(tmp_path / "half", state_dict=state)
  expected = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "half", dtype=torch.float32, attn_implementation="eager", **PADDING
  )
  wide = checkpoints.load(tmp_path / "half")
  found = apply(wide.model, wide.variables, jnp.asarray(TOKENS))
  np.testing.assert_allclose(found, logits(expected), atol=1e-4)
  half = checkpoints.load(tmp_path / "half", dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(half.variables)} == {jnp.dtype("bfloat16")}
  checkpoints.save(tmp_path / "again", half.model, half.variables)
  read, written = (
    safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("half", "again")
  )
  for name in [name for name in written if name.endswith("ngram_embedding.weight")]:
    shards = [read.pop(name.replace("weight", f"shard_{n}.weight")) for n in range(4)]
    read[name] = torch.cat(shards)
  # transformers wrote the rows of a tied head twice here, which are read once, and hashes.
  rest = read.keys() - written.keys()
  assert all(name == "lm_head.weight" or "ple_embedding" in name for name in rest)
  for name, tensor in written.items():
    assert torch.equal(tensor, read[name]), name
