"""What is saved is loaded, onto meshes and with other layers; what is wrong is named."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from tests.jitted import apply
from tests.lm.checkpoints.families import CONFIGS, LLAMA3, LONGROPE, YARN, V, small
from vqjax import CodebookEmbedding, CodebookHead, DenseEmbedding, DenseHead, sharding
from vqjax.lm import checkpoints
from vqjax.lm.models import RMSNorm
from vqjax.lm.sources.families import decoder_of, described


def assert_equal_trees(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
  """A model of each family, and the folder in which it is saved."""
  model, variables = small(request.param)
  folder = tmp_path_factory.mktemp("saved") / "model"
  checkpoints.save(folder, model, variables, shard_bytes=30_000)
  return folder, model, variables


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
  """A saved model with a tied head."""
  model, variables = small("qwen3")
  folder = tmp_path_factory.mktemp("tied") / "model"
  checkpoints.save(folder, model, variables)
  return folder, model, variables


@pytest.fixture
def copied(tied, tmp_path):
  """A copy of the folder, which a test may damage."""
  return shutil.copytree(tied[0], tmp_path / "model")


def test_what_is_saved_is_loaded_bit_for_bit(saved):
  folder, _, variables = saved
  assert len(list(folder.glob("*.safetensors"))) > 1
  found = checkpoints.load(folder)
  assert found.model == decoder_of(
    CONFIGS[json.loads((folder / "config.json").read_text())["model_type"]]
  )
  assert found.tokenizer is None
  assert_equal_trees(found.variables, variables)


def test_each_device_of_a_mesh_holds_its_part(saved):
  folder, model, variables = saved
  mesh = sharding.make_mesh(sharding.MeshShape(data=1, fsdp=2, model=2))
  found = checkpoints.load(folder, mesh=mesh).variables
  assert_equal_trees(found, variables)
  expected = sharding.shardings(model.logical_axes(), variables, mesh)
  jax.tree.map(
    lambda x, s: None if x.sharding == s else pytest.fail(f"{x.sharding}"), found, expected
  )
  blocks = found["params"].get("blocks") or found["params"]["blocks_0"]
  kernel = blocks["mlp_out"]["kernel"]
  assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_another_head_stands_in_for_the_loaded_one(tied):
  folder, _, variables = tied
  head = CodebookHead(V, 32, 7)
  found = checkpoints.load(folder, head=head)
  assert found.model.head == head
  own = found.variables["params"].pop("head")
  assert own["codebook"].shape == (7, 32)
  assert_equal_trees({"params": found.variables["params"]}, variables)
  hidden = lambda model, v: apply(model, v, jnp.arange(5)[None], method="hidden")
  body = {"params": found.variables["params"] | {"head": own}, "codes": found.variables["codes"]}
  np.testing.assert_array_equal(hidden(found.model, body), hidden(tied[1], variables))


def test_a_tied_head_brings_its_embedding(tied):
  embedding = CodebookEmbedding(V, 32, 7)
  head = CodebookHead(V, 32, 7, embedding=embedding)
  model, variables, _ = checkpoints.load(tied[0], head=head)
  assert model.embedding is embedding
  assert variables["params"]["embedding"]["codebook"].shape == (7, 32)


def test_a_dense_head_begins_with_the_rows_to_which_the_loaded_one_is_tied(tied):
  folder, _, variables = tied
  rows = variables["params"]["embedding"]["weight"]
  for layers in ({"head": DenseHead(V, 32)}, {"embedding": CodebookEmbedding(V, 32, 7)}):
    found = checkpoints.load(folder, **layers).variables["params"]
    np.testing.assert_array_equal(found["head"]["weight"], rows)


@pytest.mark.untyped
def test_what_is_not_saved_leaves_nothing(tied, tmp_path):
  _, model, variables = tied

  class Broken:
    bos, eos = None, ()

    def save(self, folder):
      raise ZeroDivisionError

  (tmp_path / "empty").mkdir()
  for name in ("new", "empty"):
    with pytest.raises(ZeroDivisionError):
      checkpoints.save(tmp_path / name, model, variables, Broken())
  assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["empty"]


def test_a_decoder_of_another_class_of_layers_is_not_saved(tied, tmp_path):
  _, model, variables = tied
  for other in (model.clone(norm=RMSNorm(1e-6, 0.5)), model.clone(head=CodebookHead(V, 32, 7))):
    with pytest.raises(ValueError, match=r"`model` must be a decoder that one of gpt2, llama"):
      checkpoints.save(tmp_path / "new", other, variables)
  with pytest.raises(ValueError, match=r"`variables` must be those of `model`.* head/weight"):
    checkpoints.save(tmp_path / "new", model.clone(head=DenseHead(V, 32)), variables)
  with pytest.raises(ValueError, match="`folder` must be new or empty"):
    checkpoints.save(tied[0], model, variables)


@pytest.mark.parametrize(
  ("config", "params"),
  [
    # The numbers of the model cards: 124 M, 8.03 B, 0.6 B (0.44 B without the table) and 268 M.
    ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    (
      {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
      },
      8_030_261_248,
    ),
    (
      {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
      },
      596_049_920,
    ),
    (
      {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
      },
      268_098_176,
    ),
  ],
)
def test_published_models_have_their_published_numbers_of_parameters(config, params):
  model, tokens = decoder_of(config), jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = lambda key, t: model.init(key, t, t, method="loss_terms")
  shapes = jax.eval_shape(init, jax.random.key(0), tokens)
  assert sum(x.size for x in jax.tree.leaves(shapes)) == params


def rewritten(folder, change):
  """The tensors of a folder, changed by a function that gets and returns a dict."""
  file = folder / "model.safetensors"
  safetensors.numpy.save_file(change(safetensors.numpy.load_file(file)), file)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda t: {name: x for name, x in t.items() if ".1.mlp.up" not in name},
      "lacks layers.1.mlp.up_proj.weight. Use",
    ),
    (
      lambda t: t | {"model.layers.3.mlp.up_proj.weight": np.zeros(2, np.float32)},
      "has layers.3.mlp.up_proj.weight, which the config does not ask for",
    ),
    (
      lambda t: t | {"model.layers.0.self_attn.k_proj.weight": np.zeros((36, 32), np.float32)},
      r"layers.0.self_attn.k_proj.weight .* must have shape \[24, 32\].* got \[36, 32\]",
    ),
    (
      lambda t: t | {"model.norm.weight": np.zeros(31, np.float32)},
      r"norm.weight .* must have shape \[32\], by the config; got \[31\]",
    ),
    *(
      (
        lambda t, begin=begin: {begin + name: x for name, x in t.items()},
        rf"model that {wrapper} has wrapped, or remove '{begin}' from the names",
      )
      for begin, wrapper in {"_orig_mod.": "torch.compile", "base_model.model.": "PEFT"}.items()
    ),
    (
      lambda t: {name.replace("q_proj", "q_proj.base_layer"): x for name, x in t.items()},
      r"Merge the adapter of PEFT with merge_and_unload\(\)",
    ),
  ],
)
def test_tensors_that_contradict_the_config_are_named(copied, change, message):
  rewritten(copied, change)
  with pytest.raises(ValueError, match=message):
    checkpoints.load(copied)


def changed_config(folder, **changes):
  file = folder / "config.json"
  config = json.loads(file.read_text()) | changes
  file.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model_type": "mamba"}, "`model_type` .* one of gpt2, llama, .*; got 'mamba'"),
    ({"hidden_size": "absent"}, r"config.json: `hidden_size` is missing. Download config.json"),
    ({"hidden_size": 40}, r"must have shape \[.*40.*\], by the config; got \[.*32.*\]"),
    ({"num_hidden_layers": 4, "layer_types": "absent"}, "lacks layers.3"),
    (
      {"num_attention_heads": 0, "head_dim": None},
      r"`num_attention_heads` must be in \[1, .*got 0",
    ),
    ({"hidden_size": "32", "head_dim": None}, "`hidden_size` must be an integer; got '32'"),
    ({"rms_norm_eps": None}, "`rms_norm_eps` must be a number; got None"),
    ({"rms_norm_eps": float("inf")}, "`rms_norm_eps` must be a number; got inf"),
    ({"tie_word_embeddings": "x"}, "`tie_word_embeddings` must be true or false; got 'x'"),
    ({"attention_bias": {}}, "`attention_bias` must be true or false; got {}"),
    ({"rope_theta": "a"}, "`rope_theta` must be a number; got 'a'"),
    ({"hidden_act": "swish2"}, "`hidden_act` must be 'gelu_new' or .* got 'swish2'"),
    ({"rope_scaling": 5}, "`rope_scaling` must be a JSON object; got 5"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "`short_factor` is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"factor` must be in \[1, .*; got 0"),
    ({"rope_scaling": {"rope_type": "linear"}}, "`factor` is missing, .* linear"),
    ({"rope_scaling": {"factor": 2.0}}, "`rope_type` is missing beside the `factor`"),
    ({"rope_scaling": YARN | {"mscal": 2.0}}, "`rope_scaling.mscal` .* perhaps for `mscale`"),
    ({"layer_types": [None] * 3}, "`layer_types.0` must be 'full_attention' or"),
    ({"layer_types": ["full_attention"]}, "`layer_types` must have an entry for each of 3 blocks"),
    (
      {"rms_norm_epr": 1e-3},
      "`rms_norm_epr` is not a key .* perhaps for `rms_norm_eps`; got 0.001",
    ),
    ({"attention_multiplier": 2.0}, "`attention_multiplier` is not a key that is understood"),
    # Sizes that the tensors cannot have: nothing of the size may be allocated or counted up to.
    ({"num_hidden_layers": 2**31 - 1}, "`num_hidden_layers` must be at most 35, the number of ten"),
    ({"head_dim": 2**31 - 2}, "`head_dim` must be at most 97, the longest axis"),
    ({"vocab_size": 2**63}, r"`vocab_size` must be in \[1, 2,147,483,647\]"),
    ({"hidden_size": 10**18}, r"`hidden_size` must be in \[1, 2,147,483,647\]"),
    ({"num_key_value_heads": 3}, "`num_key_value_heads` must divide `num_attention_heads`"),
  ],
)
def test_configs_that_are_not_understood_are_refused(copied, changes, message):
  changed_config(copied, **changes)
  with pytest.raises(ValueError, match=message):
    checkpoints.load(copied)


def test_a_folder_without_weights_is_refused(tmp_path):
  (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
  with pytest.raises(FileNotFoundError, match=r"must hold weights.*got .* with pytorch_model.bin"):
    checkpoints.load(tmp_path)
  with pytest.raises(ValueError, match="are pickles, which are not read"):
    checkpoints.load(tmp_path / "pytorch_model.bin")
  with pytest.raises(FileNotFoundError, match="which does not exist"):
    checkpoints.load(tmp_path / "absent")


def test_truncated_files_and_flipped_bits_are_noticed(copied):
  file = copied / "model.safetensors"
  content = file.read_bytes()
  damaged = bytearray(content)
  damaged[-1000] ^= 4
  for wrong in (content[:-1], content[:100], content[:4], bytes(damaged), b"\xff" + content[1:]):
    file.write_bytes(wrong)
    with pytest.raises(
      ValueError, match=r"model(.safetensors)? must (be a whole|have the checksum)"
    ):
      checkpoints.load(copied)
  file.write_bytes(content)
  (copied / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"config.json must be JSON"):
    checkpoints.load(copied)


def test_inspection_counts_every_tensor_once(saved):
  folder, model, variables = saved
  found = checkpoints.inspect(folder)
  arrays = jax.tree.leaves(variables)
  assert found.params == sum(x.size for x in arrays)
  assert found.bytes == sum(x.nbytes for x in arrays)
  assert {part.formats for part in found.parts} == {("F32",)}
  assert found.tied == (model.head.embedding is not None)
  tables = V * 32 * (1 if found.tied else 2)
  assert found.vocabulary_share == tables / found.params


def test_a_decoder_is_made_without_reading_weights(tied):
  model = checkpoints.decoder(tied[0], head=CodebookHead(V, 32, 7), remat=True)
  assert model.remat
  assert model.embedding == DenseEmbedding(V, 32)
  read = checkpoints.read_variables(tied[0], model)
  assert_equal_trees(read, tied[2])
  with pytest.raises(
    ValueError, match=r"`model` must be the decoder of .*; got heads 2, which is 4"
  ):
    checkpoints.read_variables(tied[0], model.clone(heads=2))


def test_a_folder_means_what_it_means_to_transformers(tied, copied):
  """The single file, the names of an index, and a head that is the table or differs from it."""
  file = copied / "model.safetensors"
  plain = safetensors.numpy.load_file(file)
  load = lambda: checkpoints.load(copied).variables["params"]
  shard = copied / "model-00001-of-00001.safetensors"
  index = copied / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": dict.fromkeys(plain, shard.name)}))
  with pytest.warns(UserWarning, match="is read, as by transformers"):
    assert_equal_trees(load(), tied[2]["params"])
  safetensors.numpy.save_file({name: 2 * x for name, x in plain.items()}, shard)
  with pytest.warns(UserWarning, match="is read, as by transformers"):
    assert_equal_trees(load(), tied[2]["params"])
  file.unlink()
  twice = jax.tree.map(lambda x: 2 * x, tied[2]["params"])
  assert_equal_trees(load(), twice)
  index.write_text(
    json.dumps({"weight_map": dict.fromkeys([*plain, "lm_head.weight"], shard.name)})
  )
  assert_equal_trees(load(), twice)
  index.unlink()
  shard.unlink()

  table = plain["model.embed_tokens.weight"]
  safetensors.numpy.save_file(plain | {"lm_head.weight": table}, file)
  assert_equal_trees(load(), tied[2]["params"])
  safetensors.numpy.save_file(plain | {"lm_head.weight": table + 1}, file)
  with pytest.warns(UserWarning, match="lm_head.weight differs from model.embed_tokens.weight"):
    np.testing.assert_array_equal(load()["head"]["weight"], table + 1)
  alone = {name: x for name, x in plain.items() if name != "model.embed_tokens.weight"}
  safetensors.numpy.save_file(alone | {"lm_head.weight": table}, file)
  assert_equal_trees(load(), tied[2]["params"])


def test_an_adapter_is_not_left_out(copied):
  (copied / "adapter_config.json").write_text("{}")
  with pytest.raises(ValueError, match=r"got .* with adapter_config.json.* merge_and_unload"):
    checkpoints.load(copied)
  checkpoints.load(copied / "model.safetensors")


def test_an_integer_stands_for_a_number():
  config = CONFIGS["gemma3_text"] | {"final_logit_softcapping": 10**30}
  assert decoder_of(config).head.softcap == 1e30
  assert isinstance(decoder_of(config).head.softcap, float)


@pytest.mark.parametrize(
  ("more", "magnitude"),
  [
    ({}, 0.1 * math.log(4) + 1),
    ({"attention_factor": 1.5}, 1.5),
    ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
    ({"mscale": 2.0}, 0.1 * math.log(4) + 1),  # counts with the other alone
    ({"mscale": 2.0, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
  ],
)
def test_the_magnitude_of_yarn_is_that_of_the_config(more, magnitude):
  config = CONFIGS["qwen3"] | {"rope_scaling": YARN | more}
  model = decoder_of(config)
  np.testing.assert_allclose(model.rotary.scaling.magnitude, magnitude, rtol=1e-15)
  # What is saved is read as the same decoder.
  assert decoder_of(described(model)[1]) == model


ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
  ("family", "changes", "same"),
  [
    # The base of a scaling counts before that of the config; the old name, before the new one.
    (
      "llama",
      {"rope_scaling": LINEAR | {"rope_theta": 5e3}},
      {"rope_scaling": LINEAR, "rope_theta": 5e3},
    ),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 7e3}}, {}),
    # The original length of the config counts before that of a scaling, then the whole context.
    ("llama", {ORIGINAL: 64, "rope_scaling": LLAMA3 | {ORIGINAL: 9}}, {}),
    ("qwen3", {"max_position_embeddings": 160, "rope_scaling": YARN | {ORIGINAL: None}}, {}),
    ("phi3", {"rope_scaling": LONGROPE | {"type": "longrope", "rope_type": None}}, {}),
    ("phi3", {"rope_scaling": LONGROPE | {ORIGINAL: None}}, {}),
    # A key of Gemma 2 that no reader of Gemma 3 computes with.
    ("gemma3_text", {"attn_logit_softcapping": 20.0}, {}),
  ],
)
def test_keys_of_a_config_count_as_in_transformers(family, changes, same):
  found, expected = decoder_of(CONFIGS[family] | changes), decoder_of(CONFIGS[family] | same)
  assert (found.rotary, found.attention) == (expected.rotary, expected.attention)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x", "..", "", "a/b", 5, None])
def test_an_index_names_files_of_its_folder_alone(copied, name):
  (copied / "model.safetensors").rename(copied.parent / "secret.safetensors")
  index = copied / "model.safetensors.index.json"
  index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
  (copied / "other.safetensors").touch()  # the folder is one of weights
  with pytest.raises(ValueError, match=r"index.json: `weight_map"):
    checkpoints.load(copied)
  index.write_text(json.dumps({"weight_map": []}))
  with pytest.raises(ValueError, match=r"index.json: `weight_map` must be a JSON object; got"):
    checkpoints.load(copied)


@pytest.mark.parametrize(
  ("old", "new"), [(b"F32", b"I32"), (b"[32]", b"[16]"), (b'"checksums":"', b'"checksums":"[')]
)
def test_a_header_that_was_changed_is_noticed(copied, old, new):
  """A format and a shape for which the bytes are right, and checksums that are not JSON."""
  file = copied / "model.safetensors"
  content = file.read_bytes()
  length = int.from_bytes(content[:8], "little")
  header = content[8 : 8 + length].rstrip().replace(old, new)
  file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
  with pytest.raises(ValueError, match=r"safetensors must be a whole|must have the checks|I32"):
    checkpoints.load(copied)


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "complex64", "float8_e4m3fn", "foo"])
def test_a_format_that_would_cut_the_weights_is_refused(tied, dtype):
  with pytest.raises(ValueError, match=f"`dtype` must be one of float32, .*; got .?{dtype}"):
    checkpoints.load(tied[0], dtype=dtype)
