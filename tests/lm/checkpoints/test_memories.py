"""Folders of `qwen4_exp` score and generate as in transformers, from any table of n-grams."""

import json
import shutil

import jax
import numpy as np
import pytest
import scipy.special
import tokenizers

from tests.jitted import apply
from vqjax import Int8, compress
from vqjax.commands import compress as command
from vqjax.lm import checkpoints
from vqjax.lm.generation import GREEDY, generate
from vqjax.ops.ngrams import count_rows

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")

VOCAB, END = 101, 3
RNG = np.random.default_rng(0)
TOKENS = np.where(RNG.random((2, 11)) < 0.2, END, RNG.integers(0, VOCAB, (2, 11)))
TEXT = RNG.integers(0, VOCAB, 5000)


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
    indexer_n_heads=8,  # of fewer, the scores of blocks are often all 0
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


def paged(folder, layer, tmp_path, *given):
  """A table that the command streams from the shards of the folder, by the counts of a text."""
  if not given:
    lookup = dict(zip((0, 2), checkpoints.decoder(folder).memories))[layer].lookup
    counts = count_rows(lookup.ngrams, TEXT, rows=lookup.table.vocab)
    np.save(tmp_path / "counts.npy", counts)
    given = "--counts", str(tmp_path / "counts.npy")
  tensor = f"{folder}:model.layers.{layer}.ple.ple_embedding.ngram_embedding"
  out = tmp_path / f"{layer}-{given[0]}.safetensors"
  assert command.main([tensor, "--pages", "--bits", "30", "--out", str(out), *given]) == 0
  return out


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
def test_a_decoder_scores_and_generates_as_in_transformers(
  form, model, folder, tmp_path, monkeypatch
):
  tables = {}
  if form == "pages":
    tables = {layer: paged(folder, layer, tmp_path) for layer in (0, 2)}
  elif form == "int8":
    tables = {2: compress(weight(model, 2).detach().numpy(), method=Int8())}
  ours, variables, _ = checkpoints.load(folder, memory_tables=tables)
  for number, layer in enumerate((0, 2)):
    own = ours.memories[number].lookup.table.apply(
      {k: tree[f"memories_{number}"]["lookup"]["table"] for k, tree in variables.items()
       if "lookup" in tree.get(f"memories_{number}", {})},
      method="table",
    )  # fmt: skip
    if form == "pages":
      # Its bits are enough to be near.
      np.testing.assert_allclose(own, weight(model, layer).detach(), atol=0.02)
    monkeypatch.setattr(weight(model, layer), "data", torch.tensor(np.asarray(own)))
  logits, tokens, of_steps = run(model)
  np.testing.assert_allclose(apply(ours, variables, TOKENS), logits, atol=1e-4)
  made = generate(ours, variables, TOKENS.tolist(), jax.random.key(0), GREEDY, max_tokens=6)
  np.testing.assert_array_equal(made.tokens, tokens[:, TOKENS.shape[1] :])
  expected = np.swapaxes(of_steps - scipy.special.logsumexp(of_steps, -1, keepdims=True), 0, 1)
  expected = np.take_along_axis(expected, made.tokens[..., None], -1)[..., 0]
  np.testing.assert_allclose(made.log_probs, expected, atol=1e-4)


def test_the_command_counts_the_rows_that_a_text_reads(folder, tmp_path, capsys):
  own = shutil.copytree(folder, tmp_path / "own")
  words = tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0")
  library = tokenizers.Tokenizer(words)
  library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  library.save(str(own / "tokenizer.json"))
  text = tmp_path / "text.txt"
  text.write_text(" ".join(f"w{n}" for n in TEXT))
  by_text = paged(own, 2, tmp_path, "--text", str(text))
  assert by_text.read_bytes() == paged(own, 2, tmp_path).read_bytes()
  given = "--pages", "--bits", "8", "--text", str(text), "--out", str(tmp_path / "head")
  assert command.main([f"{own}:lm_head.weight", *given]) == 2
  assert "`--text` needs a table of n-grams of" in capsys.readouterr().err
  (own / "tokenizer.json").unlink()
  table = f"{own}:model.layers.2.ple.ple_embedding.ngram_embedding"
  assert command.main([table, *given]) == 2
  assert "must have a tokenizer: tokenizer.json" in capsys.readouterr().err


def test_what_does_not_fit_is_named(model, folder, tmp_path):
  small = compress(weight(model, 0).detach().numpy(), method=Int8())
  with pytest.raises(ValueError, match=r"blocks \[0, 2\]; got one of block 1"):
    checkpoints.load(folder, memory_tables={1: small})
  with pytest.raises(ValueError, match=r"block 2 must be \(312, 4\).*got \(240, 4\)"):
    checkpoints.load(folder, memory_tables={2: small})
  other = shutil.copytree(folder, tmp_path / "other")
  config = json.loads((other / "config.json").read_text())
  for changed, message in (
    ({"seed": 7}, "must have the layer_multipliers of its config in block 0"),
    ({"indexer_budget": None}, "`indexer_budget` is missing"),
    ({"ple_layer_ids": [4]}, "numbers of blocks of linear attention, from 1; got 4"),
    ({"eos_token_id": None}, "`eos_token_id` must be a token of the vocabulary"),
    ({"ple_embed_dim": 18}, "`ple_embed_dim` must be a multiple of the 4 heads"),
    ({"layer_types": ["linear_attention"]}, "an entry for each of 4 blocks"),
  ):
    (other / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=message):
      checkpoints.load(other)
