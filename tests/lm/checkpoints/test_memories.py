"""N-gram memories of `qwen4_exp` checkpoints add what transformers adds, from any table."""

import json
import shutil

import numpy as np
import pytest

from tests import jitted
from vqjax import Int8, compress
from vqjax.commands import compress as command
from vqjax.lm.checkpoints import load_memories
from vqjax.ops.ngrams import count_rows

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")

VOCAB, END = 101, 3
RNG = np.random.default_rng(0)
TOKENS = np.where(RNG.random((2, 11)) < 0.2, END, RNG.integers(0, VOCAB, (2, 11)))


@pytest.fixture(scope="module")
def model():
  config = configuration.Qwen4ExpTextConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    num_experts_per_tok=2,
    num_experts=4,
    hc_count=2,
    hc_lowrank=4,
    ple_layer_ids=[1, 3],
    ple_embed_dim=16,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    split_ngram_parts=3,
    make_ngram_vocab_size_divisible_by=12,
    eos_token_id=END,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=8,
    indexer_budget=8,
    indexer_compress_ratio=2,
    max_position_embeddings=64,
  )
  torch.manual_seed(0)
  made = modeling.Qwen4ExpForCausalLM(config).eval()
  for parameter in made.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
  return made


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
  path = tmp_path_factory.mktemp("qwen") / "model"
  model.save_pretrained(path)
  return path


def weight(model, layer):
  return model.model.layers[layer].ple.ple_embedding.ngram_embedding.weight


def paged(folder, layer, tmp_path):
  """A table that the command streams from the shards of the folder, by the counts of a text."""
  of, size = load_memories(folder)[layer].layer.lookup.ngrams, {0: 240, 2: 312}[layer]
  np.save(tmp_path / "counts.npy", count_rows(of, RNG.integers(0, VOCAB, 5000), rows=size))
  tensor = f"{folder}:model.layers.{layer}.ple.ple_embedding.ngram_embedding"
  out = tmp_path / f"{layer}.safetensors"
  given = "--pages", "--bits", "30", "--counts", str(tmp_path / "counts.npy"), "--out", str(out)
  assert command.main([tensor, *given]) == 0
  return out


def with_ours(model, memories, monkeypatch):
  """The model, whose memories are those of this library."""
  for number, (layer, variables) in memories.items():
    kept = {}

    def forward(streams, tokens, cache, conv_mask=None, *, of=(layer, variables, kept)):
      del conv_mask
      layer, variables, kept = of
      # A step in decoding has one token.
      before = kept["cache"] if tokens.shape[1] == 1 else layer.cache(len(tokens))
      arrays = streams.detach().numpy(), tokens.numpy().astype(np.int32)
      added, kept["cache"] = jitted.apply(layer, variables, *arrays, before, method="step")
      return torch.tensor(np.asarray(added))

    monkeypatch.setattr(model.model.layers[number].ple, "forward", forward)


def run(model):
  """The logits of a text, and the tokens and logits of its continuation."""
  tokens = torch.tensor(TOKENS)
  made = model.generate(
    tokens, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True,
    eos_token_id=None,
  )  # fmt: skip
  with torch.no_grad():
    logits = model(tokens).logits
  return logits.numpy(), made.sequences.numpy(), torch.stack(made.logits).numpy()


@pytest.mark.parametrize("form", ["dense", "int8", "pages"])
def test_a_decoder_scores_and_generates_as_with_its_own(form, model, folder, tmp_path, monkeypatch):
  tables = {}
  if form == "pages":
    tables = {layer: paged(folder, layer, tmp_path) for layer in (0, 2)}
  elif form == "int8":
    tables = {2: compress(weight(model, 2).detach().numpy(), method=Int8())}
  memories = load_memories(folder, tables)
  assert list(memories) == [0, 2]
  with monkeypatch.context() as m, torch.no_grad():
    for layer, (memory, variables) in memories.items():
      own = memory.lookup.table.apply(
        {k: tree["lookup"]["table"] for k, tree in variables.items() if "lookup" in tree},
        method="table",
      )
      if form == "pages":
        # Its bits are enough to be near.
        np.testing.assert_allclose(own, weight(model, layer), atol=0.02)
      m.setattr(weight(model, layer), "data", torch.tensor(np.asarray(own)))
    expected = run(model)
    with_ours(model, memories, m)
    found = run(model)
  np.testing.assert_array_equal(found[1], expected[1])
  for ours, theirs in zip(found[::2], expected[::2]):
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_what_does_not_fit_is_named(model, folder, tmp_path):
  small = compress(weight(model, 0).detach().numpy(), method=Int8())
  with pytest.raises(ValueError, match=r"layers \[0, 2\]; got one of layer 1"):
    load_memories(folder, {1: small})
  with pytest.raises(ValueError, match=r"layer 2 must be \(312, 4\).*got \(240, 4\)"):
    load_memories(folder, {2: small})
  other = shutil.copytree(folder, tmp_path / "other")
  config = json.loads((other / "config.json").read_text())
  (other / "config.json").write_text(json.dumps(config | {"seed": 7}))
  with pytest.raises(ValueError, match="must have the layer_multipliers of its config"):
    load_memories(other)
  (other / "config.json").write_text(json.dumps(config | {"hc_count": None}))
  with pytest.raises(ValueError, match="lacks hc_count"):
    load_memories(other)
