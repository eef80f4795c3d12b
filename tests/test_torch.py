"""Tables of models that this library does not run go into small files, and back into the models."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors import safe_open  # noqa: E402

import vqjax  # noqa: E402
from vqjax.commands import compress, inspect  # noqa: E402
from vqjax.tables import Moments  # noqa: E402

V, D = 211, 32
SIZES = {"vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"head_dim": 8}
CONFIGS = {
  "gemma2": HEADS,
  "phi3": {},
  "mistral": {},
  "olmo2": {},
  "starcoder2": {},
  "cohere": {},
  "granite": {},
  "stablelm": {},
  "glm": HEADS,
  "gpt_neox": {},
  "falcon": {},
  # A table of all blocks, of which two have 4 columns each.
  "gemma3n_text": HEADS
  | {"vocab_size_per_layer_input": V, "hidden_size_per_layer_input": 4, "laurel_rank": 4}
  | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
}
TENSORS = "embed_tokens.weight", "embed_in.weight", "word_embeddings.weight"
TENSORS += "lm_head.weight", "embed_out.weight", "embed_tokens_per_layer.weight"


def log_probs(model, tokens):
  with torch.no_grad():
    return torch.log_softmax(model(tokens).logits.double(), -1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_go_back_into_a_model_of_any_architecture(name, tmp_path, capsys):
  config = transformers.AutoConfig.for_model(name, **SIZES, **CONFIGS[name])
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))  # so that its distributions are not uniform
  model.save_pretrained(tmp_path / "model")
  out, tokens = tmp_path / "out", torch.randint(3, V, (4, 32))
  with safe_open(tmp_path / "model" / "model.safetensors", framework="np") as file:
    tables = [n for n in file.keys() if n.endswith(TENSORS)]  # noqa: SIM118  not a dictionary
  options = [word for table in tables for word in ("--table", table)]
  assert (
    compress.main([str(tmp_path / "model"), "--bytes", "0.3", "--out", str(out), *options]) == 0
  )
  made = json.loads((out / "vqjax.json").read_text())["report"]
  assert made["bytes"] <= 0.3 * made["bytes_before"]
  expected = log_probs(model, tokens)
  again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
  loaded = vqjax.torch.load_tables(again, out)
  # The library saves the head of GPT-NeoX under an older name.
  assert {loaded[table] for table in tables} == {n.replace("embed_out", "lm_head") for n in tables}
  found = log_probs(again, tokens)
  kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
  with capsys.disabled():
    print(f"\n{name}: KL {kl:.5f} nats at {made['bytes']:,} of {made['bytes_before']:,} bytes")
  assert 0 < kl < 0.01
  capsys.readouterr()
  for path in (tmp_path / "model", out, tmp_path / "model" / "model.safetensors"):
    assert inspect.main([str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    if "tables" in printed:
      shown = {table["name"]: tuple(table["shape"]) for table in printed["tables"]}
      width = lambda name: 2 * 4 if "per_layer" in name else D
      assert shown == {name: (V, width(name)) for name in tables}


def test_one_table_of_two_goes_back_under_another_name(tmp_path):
  from vqjax.lm.compression.folders import TensorJob, compress_tensors

  config = transformers.AutoConfig.for_model("gpt_neox", **SIZES)
  transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
  Moments(np.eye(D), np.ones(V), 1).save(tmp_path / "moments")
  names = {"embed_out.weight": tmp_path / "moments"}  # its library calls the parameter lm_head
  compress_tensors(TensorJob(tmp_path / "model", tmp_path / "out", 0.3, names), lambda line: None)
  again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
  assert vqjax.torch.load_tables(again, tmp_path / "out") == {"embed_out.weight": "lm_head.weight"}


def test_a_table_without_its_parameter_is_refused(tmp_path):
  from vqjax.lm.compression.folders import TensorJob, compress_tensors

  config = transformers.AutoConfig.for_model("mistral", **SIZES)
  transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
  moments = Moments(np.eye(D), np.ones(V), 1)
  moments.save(tmp_path / "moments")
  names = {"lm_head.weight": tmp_path / "moments"}
  compress_tensors(TensorJob(tmp_path / "model", tmp_path / "out", 0.3, names), lambda line: None)
  with pytest.raises(ValueError, match=r"`model` must have one parameter lm_head.weight of shape"):
    vqjax.torch.load_tables(torch.nn.Linear(3, 5), tmp_path / "out")
  with pytest.raises(FileNotFoundError, match="`folder` must have safetensors"):
    vqjax.torch.load_tables(torch.nn.Linear(3, 5), tmp_path)
