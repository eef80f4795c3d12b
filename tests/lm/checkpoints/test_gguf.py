"""Files of llama.cpp and llama2.c hold the same models in other layouts."""

import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jitted import apply
from tests.lm.checkpoints import report
from tests.lm.checkpoints.families import CONFIGS, NAMES, YARN, V, small
from vqjax.lm import checkpoints
from vqjax.lm.models import rotary

gguf = pytest.importorskip("gguf", reason="the extra `checkpoints` is not installed")

ARCH = {name: name for name in CONFIGS}
ARCH |= {"gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2"}
ARCH |= {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}
INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "granite")
MAGNITUDE = 1.25
"""Factor of cosines and sines of LongRoPE."""

PIECES = ["<unk>", "<s>", "</s>", "\u2581", *map(chr, range(34, 127))]


def side_by_side(weight, heads):
  """Rows of queries or keys as llama.cpp's converter permutes them."""
  shape = weight.shape
  return weight.reshape(heads, 2, -1, shape[-1]).swapaxes(1, 2).reshape(shape)


def of_all_experts(tensors):
  """Tensors whose experts are joined, and whose projections are not, as of that converter."""
  found, experts = {}, {}
  for key, value in tensors.items():
    if split := re.fullmatch(r"(.*)block_sparse_moe\.experts\.(\d+)\.(w\d)\.weight", key):
      key = f"{split[1].removeprefix('model.')}feed_forward.experts.{split[3]}.weight"
      experts.setdefault(key, []).append((int(split[2]), value))
    elif split := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", key):
      experts.setdefault(f"{split[1]}.{split[3]}", []).append((int(split[2]), value))
    elif split := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", key):
      end = "bias" if split[3] else "weight"
      value = value if split[3] else value.swapaxes(1, 2)
      parts = (
        {"down": value} if split[2] == "down" else {"gate": value[:, ::2], "up": value[:, 1::2]}
      )
      found |= {f"{split[1]}{n}_proj.{end}": np.ascontiguousarray(x) for n, x in parts.items()}
    else:
      found[key + ".weight" if key.endswith("sinks") else key] = value
  return found | {key: np.stack([x for _, x in sorted(parts)]) for key, parts in experts.items()}


def written(path, name, folder, quantised=None, more=()):
  """Convert a saved folder as llama.cpp's converter does, by its names for tensors.

  `more` has further metadata, or other values for what is there.
  """
  import safetensors.numpy

  config, arch = CONFIGS[name], ARCH[name]
  own = config.get
  writer = gguf.GGUFWriter(path, arch)
  layers = own("num_hidden_layers") or own("n_layer")
  if name == "granite":
    writer.add_attention_scale(own("attention_multiplier"))
    writer.add_embedding_scale(own("embedding_multiplier"))
    writer.add_residual_scale(own("residual_multiplier"))
    writer.add_logit_scale(own("logits_scaling"))
  if name == "gemma2":
    writer.add_attn_logit_softcapping(own("attn_logit_softcapping"))
    writer.add_final_logit_softcapping(own("final_logit_softcapping"))
  if name == "phi3":
    writer.add_rope_dimension_count(6)
    writer.add_rope_scaling_orig_ctx_len(320)
    writer.add_rope_scaling_attn_factors(MAGNITUDE)
    for length in ("short", "long"):
      factors = np.array(own("rope_scaling")[f"{length}_factor"], np.float32)
      writer.add_tensor(f"rope_factors_{length}.weight", factors)
  writer.add_embedding_length(32)
  writer.add_block_count(layers)
  writer.add_head_count(4)
  writer.add_context_length(640)
  writer.add_feed_forward_length(own("intermediate_size", 128))
  if name == "gpt2":
    writer.add_layer_norm_eps(1e-5)
  else:
    writer.add_head_count_kv(2)
    writer.add_key_length(own("head_dim", 8))
    writer.add_layer_norm_rms_eps(own("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(own("rope_theta"))
  if "num_experts_per_tok" in config:
    writer.add_expert_count(own("num_experts") or own("num_local_experts"))
    writer.add_expert_used_count(own("num_experts_per_tok"))
  if name in ("qwen3_moe", "gpt_oss"):
    writer.add_expert_feed_forward_length(own("moe_intermediate_size") or own("intermediate_size"))
  if name == "gpt_oss":
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(160)
  if name in ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "phi3"):
    writer.add_sliding_window(own("sliding_window"))
  writer.add_tokenizer_model("llama")
  writer.add_token_list(PIECES)
  writer.add_token_scores([0.0] * V)
  writer.add_token_types([2, 3, 3, *[1] * 94])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  kinds = {str: "STRING", float: "FLOAT32", int: "UINT32", bool: "BOOL", list: "ARRAY"}
  for key, value in dict(more).items():
    writer.kv_data[0].pop(key, None)
    if value is not None:
      of = gguf.GGUFValueType
      inner = of[kinds[type(value[0])]] if isinstance(value, list) else None
      writer.add_key_value(key, value, of[kinds[type(value)]], inner)
  of_arch = getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_"))
  names = gguf.get_tensor_name_map(of_arch, layers)
  for key, value in of_all_experts(
    safetensors.numpy.load_file(folder / "model.safetensors")
  ).items():
    stem, _, end = key.rpartition(".")
    if name == "gpt2" and ".c_" in key and end == "weight":
      value = np.ascontiguousarray(value.T)
    if name in INTERLEAVED and ("q_proj" in key or "k_proj" in key):
      value = side_by_side(value, 4 if "q_proj" in key else 2)
    if name.startswith("gemma") and key.endswith("norm.weight"):
      value = value + 1
    kind = None
    if quantised and value.ndim == 2 and value.shape[1] % 32 == 0:
      kind = quantised
      value = gguf.quantize(value, kind)
    writer.add_tensor(f"{names.get_name(stem)}.{end}", value, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def plain(name):
  """A model whose config has nothing that the metadata of these files leave out."""
  changes = {} if name == "gpt2" else {"rope_scaling": None, "max_position_embeddings": 640}
  changes |= {"use_sliding_window": False} if name.startswith("qwen") else {}
  changes |= {"sliding_window": None} if name in ("mistral", "mixtral", "phi3") else {}
  changes |= {"norm_topk_prob": True} if name == "qwen3_moe" else {}
  # llama.cpp has these in its code, and a ramp between whole numbers.
  changes |= {"swiglu_limit": 7.0, "rope_scaling": YARN} if name == "gpt_oss" else {}
  if name == "phi3":
    changes |= {"rope_scaling": CONFIGS["phi3"]["rope_scaling"] | {"attention_factor": MAGNITUDE}}
  changes |= {"query_pre_attn_scalar": 12} if name.startswith("gemma") else {}
  changes |= {"final_logit_softcapping": None} if name == "gemma3_text" else {}
  return small(name, **changes)


# llama.cpp has no format for qwen4_exp.
@pytest.mark.parametrize("name", [name for name in NAMES if "qwen4_exp_text" not in name.values])
def test_a_gguf_is_read_as_the_model_that_was_converted(name, tmp_path):
  model, variables = plain(name)
  checkpoints.save(tmp_path / "folder", model, variables)
  written(tmp_path / "model.gguf", name, tmp_path / "folder")
  found = checkpoints.load(tmp_path / "model.gguf")
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 50)))
  # A scale of a norm with 1 added and taken off again is rounded by 2^-24.
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), found.variables, variables)
  expected = apply(model, variables, tokens)
  np.testing.assert_allclose(apply(found.model, found.variables, tokens), expected, atol=2e-4)
  assert [PIECES[token] for token in found.tokenizer.encode("hi")] == ["<s>", "\u2581", "h", "i"]


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_0", 0.2), ("F16", 1e-3)])
def test_quantised_tensors_are_near_the_original(kind, error, tmp_path):
  model, variables = plain("llama")
  checkpoints.save(tmp_path / "folder", model, variables)
  kind = getattr(gguf.GGMLQuantizationType, kind)
  written(tmp_path / "model.gguf", "llama", tmp_path / "folder", kind)
  found = checkpoints.load(tmp_path / "model.gguf").variables["params"]["embedding"]["weight"]
  expected = variables["params"]["embedding"]["weight"]
  # Q8_0 has steps of 1/127 of the largest of 32 numbers, Q4_0 of 1/8, and F16 has 11 bits.
  np.testing.assert_allclose(found, expected, atol=error)
  shown = checkpoints.inspect(tmp_path / "model.gguf")
  assert shown.parts[0].formats == (kind.name,)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  """A saved folder of Llama."""
  model, variables = plain("llama")
  folder = tmp_path_factory.mktemp("llama") / "folder"
  checkpoints.save(folder, model, variables)
  return folder


def changed(llama, tmp_path, **more):
  """The path of its GGUF with changed metadata."""
  keys = {key.replace("__", "."): value for key, value in more.items()}
  written(tmp_path / "model.gguf", "llama", llama, more=keys)
  return tmp_path / "model.gguf"


@pytest.mark.parametrize(
  ("more", "scaling"),
  [
    ({}, None),
    ({"type": "none", "factor": 4.0}, None),
    ({"type": "linear", "factor": 4.0}, rotary.LinearScaling(4.0)),
    # The type is linear where a factor is given without one.
    ({"factor": 4.0}, rotary.LinearScaling(4.0)),
    ({"type": "linear", "factor": 0.0}, None),
    (
      {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 16.0},
      rotary.Yarn(4.0, 64, 16.0),
    ),
  ],
)
def test_the_scaling_of_rotary_embeddings_is_that_of_llama_cpp(llama, tmp_path, more, scaling):
  keys = {f"llama.rope.scaling.{key}": value for key, value in more.items()}
  assert checkpoints.decoder(changed(llama, tmp_path, **keys)).rotary.scaling == scaling


def test_an_old_name_of_the_factor_is_understood(llama, tmp_path):
  path = changed(llama, tmp_path, llama__rope__scale_linear=2.0)
  assert checkpoints.decoder(path).rotary.scaling == rotary.LinearScaling(2.0)


@pytest.mark.parametrize(
  ("more", "problem"),
  [
    ({"llama.block_count": 2**31 - 1}, "`llama.block_count` must be at most 30, the number"),
    ({"llama.block_count": "3"}, "`llama.block_count` must be an integer; got '3'"),
    ({"llama.feed_forward_length": None}, "`llama.feed_forward_length` must be an integer; got No"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon` must be a number; got None"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a number; got nan"),
    ({"llama.rope.freq_base": -1.0}, r"`llama.rope.freq_base` must be in \(1"),
    ({"llama.rope.scaling.factor": -1.0}, r"`llama.rope.scaling.factor` must be in \[1"),
    ({"llama.rope.scaling.type": "longrope"}, "`short_factor` is missing"),
    ({"llama.rope.dimension_count": 4}, "`llama.rope.dimension_count` must be 8, the width"),
    ({"llama.attention.value_length": 4}, "`llama.attention.value_length` must be 8, the width"),
    ({"llama.rope.scaling.attn_factor": 2.0}, "`llama.rope.scaling.attn_factor` is not implemen"),
    ({"llama.attention.sliding_window": 64}, "`llama.attention.sliding_window` is not implement"),
    ({"llama.expert_count": 8}, "`llama.expert_used_count` must be an integer; got None"),
    ({"llama.attention.new": 1}, "`llama.attention.new` is not a key that is understood"),
    # One bit of a name: the reader would take a default.
    ({"llama.rope.freq_base": None, "llama.rope.freq_bare": 5e4}, "`llama.rope.freq_bare` is not"),
    ({"llama.rope.freq_base": None, "mlama.rope.freq_base": 5e4}, "one bit from `llama.rope.freq"),
    (
      {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.cos_token_id": 1},
      "`tokenizer.ggml.cos_token_id` differs by one bit",
    ),
    ({"tokenizer.ggml.scores": None}, "`tokenizer.ggml.scores` is missing, which"),
    ({"tokenizer.ggml.scores": [0.0] * 9}, "scores` must have an entry for each of 97 tokens"),
    ({"tokenizer.ggml.scores": ["x"] * 97}, "scores` must be a list of numbers; got"),
    ({"tokenizer.ggml.token_type": [99] * 97}, "token_type` must hold 0 to 6"),
    ({"tokenizer.ggml.tokens": 5}, "tokens` must be a list of texts; got 5"),
    ({"tokenizer.ggml.model": "gpt2"}, "merges` is missing, which the tokenizer gpt2 needs"),
    ({"tokenizer.ggml.eos_token_id": "2"}, "eos_token_id` must be an integer; got '2'"),
  ],
)
def test_metadata_that_are_not_understood_are_refused(llama, tmp_path, more, problem):
  path = changed(llama, tmp_path, **more)
  with pytest.raises(ValueError, match=problem) as error:
    checkpoints.load(path)
  assert str(error.value).startswith(f"{path}: ")
  assert "config.json" not in str(error.value)


@pytest.mark.parametrize(
  "key", ["general.quantized_by", "someone.quantize_version", "llama.vocab_size", "split.count"]
)
def test_keys_that_change_nothing_are_let_through(llama, tmp_path, key):
  checkpoints.decoder(changed(llama, tmp_path, **{key: 7}))


def test_tensors_that_do_not_follow_each_other_are_refused(llama, tmp_path):
  path = changed(llama, tmp_path)
  content, first = path.read_bytes(), b"output_norm.weight"
  at = content.index(first) + len(first) + 4 + 8 + 4  # rank, length and type
  (offset,) = struct.unpack_from("<Q", content, at)
  for wrong in (0, offset - 32, offset + 32, offset + 4, 2**64 - 32):
    path.write_bytes(content[:at] + struct.pack("<Q", wrong) + content[at + 8 :])
    with pytest.raises(ValueError, match=rf"'output_norm.weight' at {wrong:,}, not {offset:,}"):
      checkpoints.load(path)


def test_damaged_files_are_refused(llama, tmp_path):
  path = changed(llama, tmp_path)
  content = path.read_bytes()
  for wrong in (content[:-5000], content[:500], content[:40], content[:4] + b"\xff" * 20):
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match=r"model.gguf must be a whole GGUF"):
      checkpoints.load(path)


@pytest.mark.parametrize(
  ("counts", "rest", "problem"),
  [
    ((2**62, 0), b"", "behind the end"),
    ((0, 1), struct.pack("<Q", 2**60) + b"key", "behind the end"),
    ((0, 1), struct.pack("<Q3sIIQ", 3, b"key", 9, 5, 2**61), "behind the end"),
    ((0, 1), struct.pack("<Q3sIIQ", 3, b"key", 9, 8, 2**61), "more than the file has"),
    ((0, 1), struct.pack("<Q3sIIQ", 3, b"key", 9, 9, 1), "neither numbers nor texts"),
    ((0, 1), struct.pack("<Q3sI", 3, b"key", 99), "unknown type"),
    ((0, 1), struct.pack("<Q17sII", 17, b"general.alignment", 4, 3), "power of two"),
    ((1, 0), struct.pack("<Q1sIQIQ", 1, b"x", 1, 2**60, 0, 0), "ends behind the file"),
    ((1, 0), struct.pack("<Q1sIQIQ", 1, b"x", 1, 33, 8, 0), "in blocks of 32"),
    ((1, 0), struct.pack("<Q1sIQIQ", 1, b"x", 1, 32, 999, 0), "unknown block type"),
  ],
)
def test_sizes_of_a_header_are_compared_with_the_file(counts, rest, problem, tmp_path):
  path = tmp_path / "model.gguf"
  path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, *counts) + rest)
  with pytest.raises(ValueError, match=rf"model.gguf must be a whole GGUF; got .*{problem}"):
    checkpoints.load(path)


def test_a_file_of_the_other_byte_order_is_refused(tmp_path):
  path = tmp_path / "model.gguf"
  path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
  with pytest.raises(ValueError, match="call gguf-convert-endian"):
    checkpoints.load(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(ValueError, match=r"one of gpt2, llama, .*qwen4_exp_text; got 'mamba'"):
    checkpoints.load(tmp_path / "model.gguf")


@pytest.fixture(scope="module")
def stories(real_data):
  return checkpoints.load(real_data / "stories260K" / "stories260K.bin")


@pytest.mark.slow
def test_stories260k_scores_what_is_known_of_it(stories, real_data):
  model, variables, tokenizer = stories
  text = (real_data / "tinystories" / "gpt2_tokens_test.decoded.txt").read_text("utf-8")
  rows = [tokenizer.encode(story)[:512] for story in text.split("<|endoftext|>")[:40]]
  tokens, known = np.zeros((40, 512), int), np.zeros((40, 511))
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)], known[row, : len(ids) - 1] = ids, 1
  log_prob = apply(model, variables, tokens[:, :-1], tokens[:, 1:], method="log_prob")
  assert known.sum() > 14_000
  np.testing.assert_allclose(-(log_prob * known).sum() / known.sum(), 1.386, atol=0.01)


def test_a_file_of_llama2c_is_also_one_of_transformers(stories, tmp_path):
  model, variables, tokenizer = stories
  checkpoints.save(tmp_path / "folder", model, variables, tokenizer)
  again = checkpoints.load(tmp_path / "folder")
  jax.tree.map(np.testing.assert_array_equal, again.variables, variables)
  assert again.tokenizer.encode("Once upon a time") == tokenizer.encode("Once upon a time")


def test_a_truncated_file_of_llama2c_is_refused(real_data, tmp_path):
  content = (real_data / "stories260K" / "stories260K.bin").read_bytes()
  (tmp_path / "model.bin").write_bytes(content[:-4])
  with pytest.raises(ValueError, match=r"must have 1,056,540 bytes .* got 1,056,536"):
    checkpoints.load(tmp_path / "model.bin")
  (tmp_path / "model.bin").write_bytes(b"")
  with pytest.raises(ValueError, match="must begin with 7 integers; it has 0 bytes"):
    checkpoints.load(tmp_path / "model.bin")
  (tmp_path / "model.bin").write_bytes(content[2:])
  with pytest.raises(ValueError, match="must begin with dim"):
    checkpoints.load(tmp_path / "model.bin")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_gemma_has_the_distribution_and_the_ids_of_llama_cpp(gemma, real_data):
  pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
  text = real_data / "tinystories" / "gpt2_tokens_test.decoded.txt"
  found = report.with_llama_cpp(gemma, text, positions=560)
  # Both are float32 sums in another order, but for llama.cpp's cache of keys, which is float16.
  assert found["mean KL(llama.cpp with its F32 copy, vqjax)"] < 1e-5
  # llama.cpp rounds the inputs of its quantised products to 8 bits.
  assert found["mean KL(llama.cpp with the same file, vqjax)"] < 1e-2
  assert found["lines with equal ids"] == found["lines"]


@pytest.mark.slow
def test_gemma_saved_from_a_gguf_is_that_of_transformers(gemma, real_data, tmp_path):
  torch = pytest.importorskip("torch", reason="`make parity` installs PyTorch")
  transformers = pytest.importorskip("transformers", reason="`make parity` installs transformers")
  model, variables, tokenizer = checkpoints.load(gemma)
  checkpoints.save(tmp_path / "model", model, variables)
  text = (real_data / "tinystories" / "gpt2_tokens_test.decoded.txt").read_text("utf-8")
  tokens = np.array([tokenizer.encode(text[:4000])[:600]])
  found = jax.jit(model.apply)(variables, tokens)
  other = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
  )
  # Logits of up to 40, after 18 blocks of sums of 2048 terms.
  np.testing.assert_allclose(found, report.reference_logits(other.eval(), tokens), atol=5e-3)
