"""What the keys of a config may hold: a dataclass for each family, and one check for all formats.

A field is a key that is used, with its type, its range, and the default that the reference
implementation takes. A key that is neither a field nor in `HARMLESS` is refused by its name, so
that nothing that a model computes with is left out in silence. A GGUF is read as the same config,
under names of its own (`Origin`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from vqjax.lm.records import Range, hints_of, one_line, problem_of, shown

__all__ = []


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a config comes from, for messages.

  Attributes:
    file: the file.
    keys: keys of the config -> what the file calls them, where that differs.
    remedy: what to do about a wrong one: a sentence.
  """

  file: str = "the config"
  keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
  remedy: str = "Download config.json again."

  def error(self, problem: str) -> ValueError:
    """An error that names the file; keys in the problem are between backticks."""
    for key, own in self.keys.items():
      problem = problem.replace(f"`{key}`", f"`{own}`")
    return ValueError(f"{self.file}: {one_line(problem)}. {self.remedy}")


AXIS, BLOCKS = "an axis of a tensor", "the number of blocks"
"""What a size is compared with, so that no size asks for more memory than the file has."""

Size = Annotated[int, Range(1, 2**31 - 1)]
Axis = Annotated[int, Range(1, 2**31 - 1), AXIS]
Depth = Annotated[int, Range(1, 2**31 - 1), BLOCKS]
Positive = Annotated[float, Range(0, 1e30, above=True)]
Cap = Annotated[float, Range(1e-6, 1e30)]
Epsilon = Annotated[float, Range(0, 1, above=True)]
Base = Annotated[float, Range(1, 1e30, above=True)]
Factor = Annotated[float, Range(1, 1e6)]
Part = Annotated[float, Range(0, 1, above=True)]
Activation = Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "silu", "relu"]
Kinds = list[Literal["full_attention", "sliding_attention"]]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "su", "divisors")


@dataclasses.dataclass(frozen=True)
class Rope:
  """A scaling of the frequencies of rotary embeddings, `rope_scaling` or `rope_parameters`."""

  rope_type: Literal[ROPE_TYPES] | None = None
  type: Literal[ROPE_TYPES] | None = None
  rope_theta: Base | None = None
  factor: Factor | None = None
  low_freq_factor: Positive | None = None
  high_freq_factor: Positive | None = None
  original_max_position_embeddings: Size | None = None
  beta_fast: Positive | None = None
  beta_slow: Positive | None = None
  attention_factor: Positive | None = None
  mscale: Annotated[float, Range(0, 1e6)] | None = None
  mscale_all_dim: Annotated[float, Range(0, 1e6)] | None = None
  truncate: bool | None = None
  finetuned: bool | None = None
  partial_rotary_factor: Part | None = None
  short_factor: list[Positive] | None = None
  long_factor: list[Positive] | None = None
  divisors: list[Positive] | None = None
  # Of images and videos: the positions of text are equal in all three.
  mrope_section: list[Size] | None = None
  mrope_interleaved: bool | None = None


@dataclasses.dataclass(frozen=True)
class RopeOfKinds:
  """`rope_parameters` with an entry for each kind of blocks."""

  full_attention: Rope
  sliding_attention: Rope | None = None


@dataclasses.dataclass(frozen=True)
class GPT2Config:
  """The config of GPT-2."""

  n_embd: Axis
  n_layer: Depth
  n_head: Axis
  vocab_size: Axis = 50257
  n_positions: Size = 1024
  n_inner: Axis | None = None
  layer_norm_epsilon: Epsilon = 1e-5
  activation_function: Activation = "gelu_new"
  scale_attn_weights: bool = True
  scale_attn_by_inverse_layer_idx: Literal[False] = False
  add_cross_attention: Literal[False] = False
  tie_word_embeddings: bool = True


@dataclasses.dataclass(frozen=True)
class _Rotary:
  """What the families after Llama share."""

  vocab_size: Axis
  hidden_size: Axis
  intermediate_size: Axis
  num_hidden_layers: Depth
  num_attention_heads: Axis
  max_position_embeddings: Size
  original_max_position_embeddings: Size | None = None
  num_key_value_heads: Axis | None = None
  head_dim: Axis | None = None
  rms_norm_eps: Epsilon = 1e-6
  hidden_act: Activation = "silu"
  attention_bias: bool = False
  mlp_bias: bool = False
  rope_theta: Base | None = None
  rope_scaling: Rope | None = None
  rope_parameters: RopeOfKinds | Rope | None = None
  partial_rotary_factor: Part | None = None
  tie_word_embeddings: bool = False


@dataclasses.dataclass(frozen=True)
class LlamaConfig(_Rotary):
  """The config of Llama."""


@dataclasses.dataclass(frozen=True)
class MistralConfig(_Rotary):
  """The config of Mistral."""

  num_key_value_heads: Axis | None = 8
  attention_bias: Literal[False] = False
  mlp_bias: Literal[False] = False
  sliding_window: Size | None = 4096


@dataclasses.dataclass(frozen=True)
class Qwen2Config(_Rotary):
  """The config of Qwen 2 and 2.5, whose queries, keys and values always have a bias."""

  attention_bias: Literal[True] | None = None
  use_sliding_window: bool = False
  sliding_window: Size | None = None
  max_window_layers: Annotated[int, Range(0, 2**31 - 1)] = 28
  layer_types: Kinds | None = None


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
  """The config of Qwen 3."""

  head_dim: Axis | None = 128
  attention_bias: bool = False


@dataclasses.dataclass(frozen=True)
class MixtralConfig(_Rotary):
  """The config of Mixtral."""

  rms_norm_eps: Epsilon = 1e-5
  rope_theta: Base | None = 1e6
  attention_bias: Literal[False] = False
  mlp_bias: Literal[False] = False
  sliding_window: Size | None = None
  num_local_experts: Axis = 8
  num_experts_per_tok: Size = 2


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(_Rotary):
  """The config of Qwen 3 with experts in all blocks, or with another name of their number."""

  mlp_bias: Literal[False] = False
  use_sliding_window: bool = False
  sliding_window: Size | None = 4096
  moe_intermediate_size: Axis = 768
  num_experts: Axis | None = None
  num_local_experts: Axis = 128
  num_experts_per_tok: Size = 8
  norm_topk_prob: bool = False
  decoder_sparse_step: Literal[1] = 1
  mlp_only_layers: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class Qwen4ExpTextConfig(_Rotary):
  """The config of `qwen4_exp`, of text alone."""

  vocab_size: Axis = 248_320
  hidden_size: Axis = 2048
  intermediate_size: Axis | None = None
  num_hidden_layers: Depth = 40
  num_attention_heads: Axis = 16
  num_key_value_heads: Axis | None = 2
  head_dim: Axis | None = 256
  max_position_embeddings: Size = 32_768
  hidden_act: Literal["silu"] = "silu"
  attention_bias: Literal[False] = False
  mlp_bias: Literal[False] = False
  eos_token_id: int | list[int] | None = None
  layer_types: list[Literal["linear_attention", "indexed_attention", "full_attention"]] | None = (
    None
  )
  full_attention_interval: Size = 4
  linear_conv_kernel_dim: Axis = 4
  linear_key_head_dim: Axis = 128
  linear_value_head_dim: Axis = 128
  linear_num_key_heads: Axis = 16
  linear_num_value_heads: Axis = 32
  output_gate_type: Literal["silu", "sigmoid"] | None = None
  moe_intermediate_size: Axis = 512
  shared_expert_intermediate_size: Axis = 512
  num_experts: Axis = 512
  num_experts_per_tok: Size = 10
  norm_topk_prob: bool = True
  hc_count: Axis = 4
  hc_lowrank: Axis = 320
  ple_layer_ids: list[Size] | None = None
  ple_embed_dim: Axis | None = None
  ple_conv_kernel_size: Axis = 4
  ngram_size: Annotated[int, Range(2, 64)] = 3
  heads_per_ngram: Axis = 8
  ngram_vocab_size_base: Axis = 20_000_000
  make_ngram_vocab_size_divisible_by: Size = 128
  seed: int = 1234
  split_ngram_parts: Size = 512
  indexer_n_heads: Axis | None = None
  indexer_kv_heads: Literal[1] | None = None
  indexer_head_dim: Axis | None = None
  indexer_budget: Size | None = None
  indexer_compress_ratio: Size | None = None


@dataclasses.dataclass(frozen=True)
class GptOssConfig(_Rotary):
  """The config of gpt-oss."""

  head_dim: Axis | None = 64
  rms_norm_eps: Epsilon = 1e-5
  hidden_act: Literal["silu"] = "silu"
  rope_theta: Base | None = 1.5e5
  attention_bias: bool = True
  mlp_bias: Literal[True] = True
  sliding_window: Size = 128
  layer_types: Kinds | None = None
  num_local_experts: Axis = 128
  num_experts_per_tok: Size = 4
  swiglu_alpha: Positive = 1.702
  swiglu_limit: Positive = 7.0


@dataclasses.dataclass(frozen=True)
class Phi3Config(_Rotary):
  """The config of Phi-3 and of Phi-4."""

  rms_norm_eps: Epsilon = 1e-5
  attention_bias: Literal[False] = False
  mlp_bias: Literal[False] = False
  original_max_position_embeddings: Size | None = 4096
  sliding_window: Size | None = None


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(_Rotary):
  """The config of SmolLM3, some of whose blocks do not turn by positions."""

  rope_theta: Base | None = 2e6
  no_rope_layers: list[Literal[0, 1]] | None = None
  no_rope_layer_interval: Size = 4
  use_sliding_window: bool = False
  sliding_window: Size | None = None
  layer_types: Kinds | None = None
  tie_word_embeddings: bool = True


@dataclasses.dataclass(frozen=True)
class Olmo2Config(_Rotary):
  """The config of OLMo 2."""

  rms_norm_eps: Epsilon = 1e-5
  mlp_bias: Literal[False] = False


@dataclasses.dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
  """The config of OLMo 3."""

  rope_theta: Base | None = 5e5
  sliding_window: Size = 4096
  layer_types: Kinds | None = None


@dataclasses.dataclass(frozen=True)
class GraniteConfig(_Rotary):
  """The config of Granite."""

  embedding_multiplier: Positive = 1.0
  logits_scaling: Positive = 1.0
  residual_multiplier: Positive = 1.0
  attention_multiplier: Positive = 1.0


@dataclasses.dataclass(frozen=True)
class Gemma2Config(_Rotary):
  """The config of Gemma 2."""

  vocab_size: Axis = 256_000
  hidden_size: Axis = 2304
  intermediate_size: Axis = 9216
  num_hidden_layers: Depth = 26
  num_attention_heads: Axis = 8
  num_key_value_heads: Axis | None = 4
  head_dim: Axis | None = 256
  max_position_embeddings: Size = 8192
  hidden_activation: Activation = "gelu_pytorch_tanh"
  hidden_act: Activation | None = None
  mlp_bias: Literal[False] = False
  query_pre_attn_scalar: Positive = 256
  sliding_window: Size = 4096
  layer_types: Kinds | None = None
  attn_logit_softcapping: Cap | None = 50.0
  final_logit_softcapping: Cap | None = 30.0
  use_bidirectional_attention: Literal[False] | None = None
  tie_word_embeddings: bool = True


@dataclasses.dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
  """The config of Gemma 3, of text alone."""

  vocab_size: Axis = 262_208
  max_position_embeddings: Size = 131_072
  rope_theta: Base | None = 1e6
  rope_local_base_freq: Base = 1e4
  sliding_window_pattern: Size = 6
  attn_logit_softcapping: Cap | None = None
  final_logit_softcapping: Cap | None = None


HARMLESS = frozenset(
  {
    # Names, versions and tokens.
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version"),
    *("transformers.js_config", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "decoder_start_token_id"),
    *("forced_bos_token_id", "forced_eos_token_id", "image_token_id", "image_token_index"),
    *("boi_token_index", "eoi_token_index", "eoi_token_id", "boi_token_id", "tokenizer_class"),
    *("prefix", "finetuning_task", "language", "license", "unsloth_fixed", "unsloth_version"),
    *("is_llama_config", "model_name", "name_or_path"),
    # Words of gpt-oss for what other keys say.
    *("experts_per_token", "initial_context_length"),
    # Training, and how the same numbers are computed.
    *("initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop", "embd_pdrop", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *(
      "output_past",
      "use_return_dict",
      "use_cache",
      "gradient_checkpointing",
      "pretraining_tp",
      "reorder_and_upcast_attn",
    ),
    *("cache_implementation", "attn_implementation", "torchscript", "use_bfloat16"),
    *("chunk_size_feed_forward", "tf_legacy_loss", "rope_interleaved", "use_flash_attn"),
    *("use_kernels", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    # A number of caches of `qwen4_exp`.
    "number_of_conv_states",
    # How weights are stored, which `quantised` reads.
    *("quantization_config", "compression_config"),
    # Sizes that no formula has.
    *("n_ctx", "n_special", "predict_special_tokens", "max_sequence_length", "max_length"),
    *("model_max_length", "seq_length", "max_window_layers", "sliding_window"),
    *("use_sliding_window", "layer_types", "sliding_window_pattern"),
    # Of all configs of transformers before version 5: outputs, classification and generation.
    *("return_dict", "output_hidden_states", "output_attentions", "output_scores"),
    *("return_dict_in_generate", "pruned_heads", "is_encoder_decoder", "is_decoder"),
    *("cross_attention_hidden_size", "tie_encoder_decoder", "id2label", "label2id"),
    *("num_labels", "problem_type", "task_specific_params", "min_length", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens"),
  }
)
"""Keys of a config.json that change nothing in the logits of any family, in transformers too."""


def read_config(
  schema: type,
  config: Mapping[str, Any],
  origin: Origin,
  shapes: Sequence[tuple[int, ...]] | None = None,
) -> dict[str, Any]:
  """The config with the defaults of its schema.

  Args:
    schema: the dataclass of its family.
    config: its keys.
    origin: where it comes from.
    shapes: those of the tensors beside it, with which its sizes are compared; None: unknown.

  Raises:
    ValueError: a key is missing, unknown, or holds another type or a number outside its range.
  """
  problem = problem_of(dict(config), schema, "") or _unknown(schema, config, "")
  for name in ("rope_scaling", "rope_parameters"):
    if problem is None and isinstance(config.get(name), Mapping) and name in _fields(schema):
      problem = _unknown_of_rope(config[name], name)
  if problem is None and shapes is not None:
    problem = _too_large(schema, config, shapes)
  if problem:
    raise origin.error(problem)
  defaults = {
    field.name: field.default
    for field in dataclasses.fields(schema)
    if field.default is not dataclasses.MISSING
  }
  full = defaults | dict(config)
  # JSON writes 30.0 as 30, and JAX takes no integers beyond 64 bits.
  for name, hint in hints_of(schema).items():
    if _is_number(hint) and type(full[name]) is int:
      full[name] = float(full[name])
  return full


def _is_number(hint: Any) -> bool:
  """Whether an annotation is a number that need not be an integer, perhaps with a range."""
  return hint is float or any(map(_is_number, get_args(hint)))


def _fields(schema: type) -> list[str]:
  return [field.name for field in dataclasses.fields(schema)]


def _too_large(
  schema: type, config: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> str | None:
  """The first size that the tensors cannot have, or None."""
  # A tensor without numbers may have any other axis.
  longest = max((max(shape) for shape in shapes if shape and 0 not in shape), default=0)
  limits = {
    AXIS: (longest, "the longest axis of a tensor beside it"),
    BLOCKS: (len(shapes), "the number of tensors beside it"),
  }
  for name, hint in hints_of(schema).items():
    option = get_args(hint)[0] if type(None) in get_args(hint) else hint
    for kind in getattr(option, "__metadata__", ()):
      most, what = limits.get(kind, (math.inf, ""))
      if (config.get(name) or 0) > most:
        return f"`{name}` must be at most {most:,}, {what}; got {shown(config[name])}"
  return None


def _unknown(schema: type, values: Mapping[str, Any], at: str) -> str | None:
  """What is wrong with the names of keys, or None."""
  known = _fields(schema)
  for key, value in values.items():
    harmless = not at and (key in HARMLESS or key.startswith("_"))
    if key not in known and not harmless and value is not None:
      near = difflib.get_close_matches(key, known, 1, 0.8)
      hint = f", perhaps for `{near[0]}`" if near else ""
      return (
        f"`{at}{key}` is not a key that is understood{hint}; got {shown(value)}. Correct it, or"
        " remove it if the model computes nothing with it"
      )
  return None


def _unknown_of_rope(rope: Mapping[str, Any], name: str) -> str | None:
  if isinstance(rope.get("full_attention"), Mapping):
    return _unknown(RopeOfKinds, rope, f"{name}.") or next(
      filter(None, (_unknown(Rope, own, f"{name}.{kind}.") for kind, own in rope.items() if own)),
      None,
    )
  return _unknown(Rope, rope, f"{name}.")
