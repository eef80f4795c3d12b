"""Families of pretrained decoders: their configs, and the rules of their tensors.

A family is two functions between a Hugging Face config and a `Transformer`, and one table of rules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from vqjax.embeddings import DenseEmbedding
from vqjax.heads import DenseHead
from vqjax.lm.models import (
  MLP,
  Attention,
  Experts,
  LayerNorm,
  RMSNorm,
  Rotary,
  Swish,
  Transformer,
  rotary,
)
from vqjax.lm.models.key_index import KeyIndex
from vqjax.lm.models.recurrent import GatedDelta
from vqjax.lm.models.streams import Streams
from vqjax.lm.records import shown
from vqjax.lm.sources import rules, schema
from vqjax.lm.sources.rope import rope_of, rotary_config, rotary_of
from vqjax.lm.sources.rules import Rule
from vqjax.lm.sources.schema import Origin, read_config
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash
from vqjax.types import Dtype

__all__ = ["decoder_of"]


@dataclasses.dataclass(frozen=True)
class Family:
  """An architecture of Hugging Face.

  Attributes:
    model_type: the name of its config.
    architecture: the name of its class.
    rules: its tensors; those of variables that a decoder lacks do not apply.
    schema: what its config may hold.
    decoder: config with all keys -> the decoder.
    config: decoder -> the config; of another architecture, the config of another decoder.
    prefix: what names in safetensors begin with, except for that of the head.
    ignored: beginnings or ends of names of tensors that are no parameters.
  """

  model_type: str
  architecture: str
  rules: tuple[Rule, ...]
  schema: type
  decoder: Callable[[Mapping[str, Any], Dtype], Transformer]
  config: Callable[[Transformer], dict[str, Any]]
  prefix: str = "model."
  ignored: tuple[str, ...] = (
    ".rotary_emb.inv_freq",
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "angles",
  )


def _exact_gelu(x):
  """GELU by the error function."""
  return nn.gelu(x, approximate=False)


ACTIVATIONS = {
  "gelu_new": nn.gelu,
  "gelu_pytorch_tanh": nn.gelu,
  "gelu": _exact_gelu,
  "silu": nn.silu,
  "relu": nn.relu,
}
"""Activations by their names in a config."""


def _decoder(
  config: Mapping[str, Any], dtype: Dtype, dim: int, *, softcap: float | None = None, **fields
) -> Transformer:
  """A decoder with a dense embedding and a dense head, tied if the config says so."""
  # float32 is the default of the layers, which then have no dtype in their description.
  compute = None if dtype == jnp.float32 else dtype
  embedding = DenseEmbedding(config["vocab_size"], dim, param_dtype=dtype)
  tied = embedding if config["tie_word_embeddings"] else None
  head = DenseHead(
    config["vocab_size"], dim, embedding=tied, dtype=compute, param_dtype=dtype, softcap=softcap
  )
  return Transformer(embedding, head, dim, dtype=dtype, **fields)


def _gpt2_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  dim = config["n_embd"]
  _check_divides(config, "n_head", "n_embd")
  inner = config["n_inner"]
  return _decoder(
    config,
    dtype,
    dim,
    layers=config["n_layer"],
    heads=config["n_head"],
    context=config["n_positions"],
    norm=LayerNorm(config["layer_norm_epsilon"]),
    attention=Attention(scale=None if config["scale_attn_weights"] else 1.0),
    mlp=MLP(
      width=None if inner == 4 * dim else inner,
      activation=ACTIVATIONS[config["activation_function"]],
    ),
  )


def _gpt2_config(model: Transformer) -> dict[str, Any]:
  return {
    "n_embd": model.dim,
    "n_layer": model.layers,
    "n_head": model.heads,
    "n_inner": model.mlp.width or 4 * model.dim,
    "n_positions": model.context,
    "layer_norm_epsilon": model.norm.epsilon,
    "activation_function": _name(model.mlp.activation, "gelu_new"),
    "scale_attn_weights": model.attention.scale is None,
  }


def _llama_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  return _rotary_decoder(config, dtype)


def _mistral_decoder(config: Mapping[str, Any], dtype: Dtype, **fields: Any) -> Transformer:
  window = config["sliding_window"]
  local = None if window is None else (True,) * config["num_hidden_layers"]
  return _rotary_decoder(config, dtype, window=window, local=local, **fields)


def _qwen2_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  attention = {"qkv_bias": True, "out_bias": False}
  return _rotary_decoder(config, dtype, attention=attention, **_late_windows(config))


def _qwen3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  return _rotary_decoder(config, dtype, attention={"qk_norm": True}, **_late_windows(config))


def _mixtral_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  return _mistral_decoder(config, dtype, mlp=_experts(config))


def _qwen3_moe_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  if config["mlp_only_layers"]:
    raise ValueError(f"`mlp_only_layers` must be empty; got {shown(config['mlp_only_layers'])}")
  window = config["sliding_window"] if config["use_sliding_window"] else None
  count = config["num_experts"] or config["num_local_experts"]
  return _mistral_decoder(
    config | {"sliding_window": window, "intermediate_size": config["moe_intermediate_size"]},
    dtype,
    attention={"qk_norm": True},
    mlp=_experts(config | {"num_local_experts": count}, normalized=config["norm_topk_prob"]),
  )


def _gpt_oss_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  if not (config["rope_scaling"] or config["rope_parameters"]):
    scaling = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    scaling["original_max_position_embeddings"] = 4096
    config = config | {"rope_scaling": scaling}
  mlp = {"activation": Swish(config["swiglu_alpha"]), "limit": config["swiglu_limit"]}
  return _rotary_decoder(
    config,
    dtype,
    attention={"has_sinks": True},
    mlp=mlp | _experts(config, router_bias=True),
    window=config["sliding_window"],
    local=_local(config, lambda layer: layer % 2 == 0),
  )


def _experts(config: Mapping[str, Any], **fields: bool | int) -> dict[str, Experts]:
  count, chosen = config["num_local_experts"], config["num_experts_per_tok"]
  if chosen > count:
    raise ValueError(f"`num_experts_per_tok` must be at most the {count} experts; got {chosen}")
  return {"experts": Experts(count, chosen, **fields)}


def _late_windows(config: Mapping[str, Any]) -> dict[str, Any]:
  """Windows of the blocks from `max_window_layers` on."""
  if not (config["use_sliding_window"] and config["sliding_window"]):
    return {}
  local = _local(config, lambda layer: layer >= config["max_window_layers"])
  return {"window": config["sliding_window"], "local": local}


def _phi3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  rope = rope_of(config)
  if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
    rope["rope_type"] = "longrope"  # as these were called before
  return _mistral_decoder(config | {"rope_scaling": rope}, dtype, partial=True)


def _smollm3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  layers, interval = config["num_hidden_layers"], config["no_rope_layer_interval"]
  turned = config["no_rope_layers"] or [(n + 1) % interval != 0 for n in range(layers)]
  turned, windows = tuple(map(bool, turned[:layers])), {}
  if len(turned) != layers:
    raise ValueError(
      f"`no_rope_layers` must have an entry for each of {layers} blocks; got {len(turned)}"
    )
  if config["use_sliding_window"] and config["sliding_window"]:
    local = _local(config, lambda layer: not turned[layer])
    windows = {"window": config["sliding_window"], "local": local}
  return _rotary_decoder(config, dtype, turned=None if all(turned) else turned, **windows)


def _olmo2_decoder(config: Mapping[str, Any], dtype: Dtype, **fields: Any) -> Transformer:
  attention = {"qk_norm": True, "joint_norm": True}
  return _rotary_decoder(
    config, dtype, attention=attention, pre_norms=False, post_norms=True, **fields
  )


def _olmo3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  return _olmo2_decoder(
    config,
    dtype,
    window=config["sliding_window"],
    local=_local(config, lambda layer: (layer + 1) % 4 != 0),
    # Only blocks that attend to all positions have a scaling.
    local_rotary=_local_rotary(config, rope_of(config).get("rope_theta") or config["rope_theta"]),
  )


def _granite_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  factor = lambda number: None if number == 1 else number
  return _rotary_decoder(
    config,
    dtype,
    attention={"scale": config["attention_multiplier"]},
    embedding_scale=factor(config["embedding_multiplier"]),
    branch_scale=factor(config["residual_multiplier"]),
    final_scale=factor(1 / config["logits_scaling"]),
  )


def _gemma2_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  return _gemma_decoder(config, dtype, local=_local(config, lambda layer: layer % 2 == 0))


def _gemma3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  every = config["sliding_window_pattern"]
  return _gemma_decoder(
    config,
    dtype,
    # transformers and llama.cpp have the key of Gemma 2, and compute nothing with it.
    attention={"qk_norm": True, "softcap": None},
    local=_local(config, lambda layer: (layer + 1) % every != 0),
    local_rotary=_local_rotary(config, config["rope_local_base_freq"]),
  )


def _gemma_decoder(
  config: Mapping[str, Any],
  dtype: Dtype,
  attention: Mapping[str, Any] | None = None,
  **fields: Any,
) -> Transformer:
  own = {
    "scale": config["query_pre_attn_scalar"] ** -0.5,
    "softcap": config["attn_logit_softcapping"],
  }
  return _rotary_decoder(
    config | {"hidden_act": config["hidden_activation"]},
    dtype,
    attention=own | dict(attention or {}),
    softcap=config["final_logit_softcapping"],
    offset=1.0,
    post_norms=True,
    embedding_scale=config["hidden_size"] ** 0.5,
    window=config["sliding_window"],
    **fields,
  )


def _qwen4_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  kinds, layers = config["layer_types"], config["num_hidden_layers"]
  if kinds is None:
    is_recurrent = [(n + 1) % config["full_attention_interval"] != 0 for n in range(layers)]
  else:
    is_recurrent = [kind == "linear_attention" for kind in kinds]
  if len(is_recurrent) != layers:
    raise ValueError(
      f"`layer_types` must have an entry for each of {layers} blocks, `num_hidden_layers`; got"
      f" {len(is_recurrent)}"
    )
  names = ("n_heads", "head_dim", "budget", "compress_ratio")
  if absent := [name for name in names if config[f"indexer_{name}"] is None]:
    raise ValueError(f"`indexer_{absent[0]}` is missing")
  rope = config["rope_parameters"] or {}
  turned = config["head_dim"] * (rope.get("partial_rotary_factor") or 1)
  if turned > config["indexer_head_dim"]:
    raise ValueError(
      f"`indexer_head_dim` must be at least the {int(turned)} coordinates that are turned; got"
      f" {config['indexer_head_dim']}"
    )
  act = ACTIVATIONS[config["hidden_act"]]
  delta = GatedDelta(
    key_heads=config["linear_num_key_heads"],
    value_heads=config["linear_num_value_heads"],
    key_dim=config["linear_key_head_dim"],
    value_dim=config["linear_value_head_dim"],
    kernel=config["linear_conv_kernel_dim"],
    activation=act,
    gate=nn.sigmoid if config["output_gate_type"] == "sigmoid" else act,
    epsilon=config["rms_norm_eps"],
  )
  blocks = sorted({number - 1 for number in config["ple_layer_ids"] or ()})
  if wrong := [n for n in blocks if n >= layers or not is_recurrent[n]]:
    raise ValueError(
      f"`ple_layer_ids` must be numbers of blocks of linear attention, from 1; got {wrong[0] + 1}"
    )
  experts = config | {"num_local_experts": config["num_experts"]}
  return _rotary_decoder(
    config | {"intermediate_size": config["moe_intermediate_size"]},
    dtype,
    attention={
      "qk_norm": True,
      "gated": True,
      "index": KeyIndex(*(config[f"indexer_{name}"] for name in names)),
    },
    mlp=_experts(
      experts,
      normalized=config["norm_topk_prob"],
      shared=config["shared_expert_intermediate_size"],
    ),
    offset=1.0,
    partial=True,
    pre_norms=False,
    streams=Streams(config["hc_count"], config["hc_lowrank"], config["rms_norm_eps"]),
    delta=delta if any(is_recurrent) else None,
    recurrent=tuple(is_recurrent) if any(is_recurrent) else None,
    memories=tuple(_memory(config, dtype, number) for number in range(len(blocks))),
    memory_blocks=tuple(blocks),
  )


def _memory(config: Mapping[str, Any], dtype: Dtype, number: int) -> NGramMemory:
  """The memory of n-grams that is the config's number `number`."""
  end = config["eos_token_id"]
  end = end[0] if isinstance(end, list) and end else end
  if not isinstance(end, int) or not 0 <= end < config["vocab_size"]:
    raise ValueError(
      "`eos_token_id` must be a token of the vocabulary, or a list of some, for n-grams end there;"
      f" got {shown(config['eos_token_id'])}"
    )
  ngrams = XorHash.qwen4(
    config["vocab_size"],
    end,
    layer=number,
    order=config["ngram_size"],
    heads=config["heads_per_ngram"],
    least=config["ngram_vocab_size_base"],
    seed=config["seed"],
  )
  width, of = divmod(config["ple_embed_dim"] or config["hidden_size"], ngrams.heads)
  if of:
    raise ValueError(
      f"`ple_embed_dim` must be a multiple of the {ngrams.heads} heads of n-grams; got"
      f" {config['ple_embed_dim'] or config['hidden_size']}"
    )
  multiple = config["make_ngram_vocab_size_divisible_by"]
  rows = -(-ngrams.rows // multiple) * multiple
  return NGramMemory(
    NGramEmbedding(ngrams, DenseEmbedding(rows, width, param_dtype=dtype)),
    config["hidden_size"],
    streams=config["hc_count"],
    kernel=config["ple_conv_kernel_size"],
    epsilon=config["rms_norm_eps"],
    offset=1.0,
    param_dtype=dtype,
  )


def _local_rotary(config: Mapping[str, Any], base: float | None) -> Rotary:
  """The rotary embeddings of blocks with a window, whose base a config may name."""
  own = (config["rope_parameters"] or {}).get("sliding_attention") or {}
  return rotary_of(own, config | {"rope_theta": base})


def _local(config: Mapping[str, Any], otherwise: Callable[[int], bool]) -> tuple[bool, ...]:
  """Whether each block attends to a window only."""
  kinds, layers = config["layer_types"], config["num_hidden_layers"]
  if kinds is None:
    return tuple(map(otherwise, range(layers)))
  if len(kinds) != layers:
    raise ValueError(
      f"`layer_types` must have an entry for each of {layers} blocks, `num_hidden_layers`; got"
      f" {len(kinds)}"
    )
  return tuple(kind == "sliding_attention" for kind in kinds)


def _check_divides(config: Mapping[str, Any], key: str, of: str) -> None:
  if config[of] % config[key]:
    raise ValueError(f"`{key}` must divide `{of}`; got {config[key]} and {config[of]}")


def _rotary_decoder(
  config: Mapping[str, Any],
  dtype: Dtype,
  *,
  attention: Mapping[str, Any] | None = None,
  mlp: Mapping[str, Any] | None = None,
  offset: float = 0.0,
  partial: bool = False,
  **fields: Any,
) -> Transformer:
  """A decoder of the families after Llama; if `partial`, a part of each head may be turned."""
  dim, heads = config["hidden_size"], config["num_attention_heads"]
  has_bias = bool(config["attention_bias"])
  if config["head_dim"] is None:
    _check_divides(config, "num_attention_heads", "hidden_size")
  if config["num_key_value_heads"] is not None:
    _check_divides(config, "num_key_value_heads", "num_attention_heads")
  width = config["head_dim"] or dim // heads
  if width % 2:
    raise ValueError(
      f"`head_dim` must be even, for pairs of coordinates are turned; got {width}, or `hidden_size`"
      f" {dim} of {heads} heads"
    )
  turn = rotary_of(rope_of(config), config, width)
  if turn.fraction != 1 and not partial:
    raise ValueError(f"`partial_rotary_factor` must be 1; got {turn.fraction}")
  biases = {"qkv_bias": has_bias, "out_bias": has_bias}
  context = config["max_position_embeddings"]
  if isinstance(turn.scaling, rotary.Dynamic):
    context = int(context * turn.scaling.factor)
  return _decoder(
    config,
    dtype,
    dim,
    layers=config["num_hidden_layers"],
    heads=heads,
    context=context,
    norm=RMSNorm(config["rms_norm_eps"], offset),
    attention=Attention(
      kv_heads=config["num_key_value_heads"] or heads,
      head_dim=width,
      **biases | dict(attention or {}),
    ),
    mlp=MLP(
      width=config["intermediate_size"],
      gated=True,
      use_bias=config["mlp_bias"],
      **{"activation": ACTIVATIONS[config["hidden_act"]]} | dict(mlp or {}),
    ),
    rotary=turn,
    **fields,
  )


def _rotary_decoder_config(model: Transformer) -> dict[str, Any]:
  """The config of a decoder of the families after Llama."""
  attention, scaling = model.attention, model.rotary.scaling
  return {
    "hidden_size": model.dim,
    "num_hidden_layers": model.layers,
    "num_attention_heads": model.heads,
    "num_key_value_heads": attention.kv_heads,
    "head_dim": attention.head_dim or model.dim // model.heads,
    "intermediate_size": model.mlp.width or 4 * model.dim,
    # By a dynamic scaling it is the length up to which nothing is scaled.
    "max_position_embeddings": (
      scaling.context if isinstance(scaling, rotary.Dynamic) else model.context
    ),
    "rms_norm_eps": model.norm.epsilon,
    "hidden_act": _name(model.mlp.activation, "silu"),
    "attention_bias": attention.qkv_bias,
    "mlp_bias": model.mlp.use_bias,
    **rotary_config(model.rotary),
  }


def _window_config(model: Transformer) -> dict[str, Any]:
  """The config of Mistral and Phi-3, all of whose blocks have a window, or none."""
  if model.window is not None and not all(model.is_local()):
    raise ValueError("all blocks must have the window")
  return _rotary_decoder_config(model) | {"sliding_window": model.window}


def _mixtral_config(model: Transformer) -> dict[str, Any]:
  return _window_config(model) | {
    "num_local_experts": model.mlp.experts.count,
    "num_experts_per_tok": model.mlp.experts.chosen,
  }


def _qwen3_moe_config(model: Transformer) -> dict[str, Any]:
  return _window_config(model) | {
    "num_experts": model.mlp.experts.count,
    "num_experts_per_tok": model.mlp.experts.chosen,
    "moe_intermediate_size": model.mlp.width,
    "norm_topk_prob": model.mlp.experts.normalized,
    "use_sliding_window": model.window is not None,
  }


def _gpt_oss_config(model: Transformer) -> dict[str, Any]:
  config = _rotary_decoder_config(model)
  return config | {
    "rope_scaling": config["rope_scaling"] or {"rope_type": "default"},
    "hidden_act": "silu",
    "num_local_experts": model.mlp.experts.count,
    "num_experts_per_tok": model.mlp.experts.chosen,
    "swiglu_alpha": model.mlp.activation.alpha,
    "swiglu_limit": model.mlp.limit,
    "sliding_window": model.window,
    "layer_types": _layer_types(model),
  }


def _qwen_config(model: Transformer) -> dict[str, Any]:
  config = _rotary_decoder_config(model)
  if model.attention.qkv_bias and not model.attention.out_bias:
    del config["attention_bias"]  # of Qwen 2 it is part of the architecture
  if model.window is not None:
    config |= {
      "use_sliding_window": True,
      "sliding_window": model.window,
      "layer_types": _layer_types(model),
    }
  return config


def _phi3_config(model: Transformer) -> dict[str, Any]:
  config = _window_config(model) | {"partial_rotary_factor": model.rotary.fraction}
  if config["rope_scaling"] is not None:
    context = config["rope_scaling"]["original_max_position_embeddings"]
    config["original_max_position_embeddings"] = context
  return config


def _smollm3_config(model: Transformer) -> dict[str, Any]:
  turned = model.turned or (True,) * model.layers
  return _qwen_config(model) | {"no_rope_layers": list(map(int, turned))}


def _olmo3_config(model: Transformer) -> dict[str, Any]:
  config = _rotary_decoder_config(model)
  return config | {"sliding_window": model.window, "layer_types": _layer_types(model)}


def _granite_config(model: Transformer) -> dict[str, Any]:
  width = model.attention.head_dim or model.dim // model.heads
  return _rotary_decoder_config(model) | {
    "attention_multiplier": model.attention.scale or width**-0.5,
    "embedding_multiplier": model.embedding_scale or 1.0,
    "residual_multiplier": model.branch_scale or 1.0,
    "logits_scaling": 1 / (model.final_scale or 1.0),
  }


def _gemma2_config(model: Transformer) -> dict[str, Any]:
  return _rotary_decoder_config(model) | {
    "hidden_activation": _name(model.mlp.activation, "gelu_pytorch_tanh"),
    # The power of the square root of n is exact for numbers such as 256, and close for others.
    "query_pre_attn_scalar": round((model.attention.scale or 1.0) ** -2),
    "sliding_window": model.window,
    "layer_types": _layer_types(model),
    "final_logit_softcapping": model.head.softcap,
    "attn_logit_softcapping": model.attention.softcap,
  }


def _gemma3_config(model: Transformer) -> dict[str, Any]:
  return _gemma2_config(model) | {"rope_local_base_freq": model.local_rotary.base}


def _qwen4_config(model: Transformer) -> dict[str, Any]:
  delta, index, experts = model.delta, model.attention.index, model.mlp.experts
  recurrent = model.recurrent or (False,) * model.layers
  config = {
    name: value for name, value in _rotary_decoder_config(model).items() if name != "rope_scaling"
  }
  config["rope_parameters"] = {
    "rope_type": "default",
    "rope_theta": config.pop("rope_theta"),
    "partial_rotary_factor": model.rotary.fraction,
  }
  config |= {
    "layer_types": ["linear_attention" if own else "indexed_attention" for own in recurrent],
    "moe_intermediate_size": model.mlp.width,
    "shared_expert_intermediate_size": experts.shared,
    "num_experts": experts.count,
    "num_experts_per_tok": experts.chosen,
    "norm_topk_prob": experts.normalized,
    "hc_count": model.streams.count,
    "hc_lowrank": model.streams.rank,
    "indexer_n_heads": index.heads,
    "indexer_kv_heads": 1,
    "indexer_head_dim": index.dim,
    "indexer_budget": index.budget,
    "indexer_compress_ratio": index.ratio,
  }
  if delta is not None:
    config |= {
      "linear_num_key_heads": delta.key_heads,
      "linear_num_value_heads": delta.value_heads,
      "linear_key_head_dim": delta.key_dim,
      "linear_value_head_dim": delta.value_dim,
      "linear_conv_kernel_dim": delta.kernel,
      "output_gate_type": "sigmoid" if delta.gate is nn.sigmoid else None,
    }
  if not model.memories:
    return config
  memory = model.memories[0]
  ngrams, rows = memory.lookup.ngrams, [one.lookup.table.vocab for one in model.memories]
  return config | {
    "eos_token_id": ngrams.end,
    "ple_layer_ids": [number + 1 for number in model.memory_blocks],
    "ple_embed_dim": memory.lookup.dim,
    "ple_conv_kernel_size": memory.kernel,
    "ngram_size": ngrams.order,
    "heads_per_ngram": ngrams.heads // (ngrams.order - 1),
    # The smallest prime of the first memory, of which a smaller base would give the same ones.
    "ngram_vocab_size_base": ngrams.sizes[0],
    "make_ngram_vocab_size_divisible_by": math.gcd(*rows),
    "seed": ngrams.seed,
  }


def _layer_types(model: Transformer) -> list[str]:
  return ["sliding_attention" if local else "full_attention" for local in model.is_local()]


def _name(activation: Callable, preferred: str) -> str:
  if ACTIVATIONS[preferred] is activation:
    return preferred
  return next((name for name, known in ACTIVATIONS.items() if known is activation), "unknown")


FAMILIES = {
  family.model_type: family
  for family in (
    Family(
      "gpt2",
      "GPT2LMHeadModel",
      rules.gpt2(),
      schema.GPT2Config,
      _gpt2_decoder,
      _gpt2_config,
      prefix="transformer.",
      ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(
      "llama",
      "LlamaForCausalLM",
      rules.gated(interleaved=True, offset=0.0, post_norms=False),
      schema.LlamaConfig,
      _llama_decoder,
      _rotary_decoder_config,
    ),
    Family(
      "mistral",
      "MistralForCausalLM",
      rules.gated(interleaved=True, offset=0.0, post_norms=False),
      schema.MistralConfig,
      _mistral_decoder,
      _window_config,
    ),
    Family(
      "qwen2",
      "Qwen2ForCausalLM",
      rules.gated(interleaved=False, offset=0.0, post_norms=False),
      schema.Qwen2Config,
      _qwen2_decoder,
      _qwen_config,
    ),
    Family(
      "qwen3",
      "Qwen3ForCausalLM",
      rules.gated(interleaved=False, offset=0.0, post_norms=False),
      schema.Qwen3Config,
      _qwen3_decoder,
      _qwen_config,
    ),
    Family(
      "mixtral",
      "MixtralForCausalLM",
      rules.routed(
        "block_sparse_moe.gate",
        "block_sparse_moe.experts",
        ("w1", "w3", "w2"),
        interleaved=True,
      ),
      schema.MixtralConfig,
      _mixtral_decoder,
      _mixtral_config,
    ),
    Family(
      "qwen3_moe",
      "Qwen3MoeForCausalLM",
      rules.routed(
        "mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"), interleaved=False
      ),
      schema.Qwen3MoeConfig,
      _qwen3_moe_decoder,
      _qwen3_moe_config,
    ),
    Family(
      "gpt_oss",
      "GptOssForCausalLM",
      rules.gpt_oss(),
      schema.GptOssConfig,
      _gpt_oss_decoder,
      _gpt_oss_config,
    ),
    Family(
      "phi3",
      "Phi3ForCausalLM",
      rules.phi3(),
      schema.Phi3Config,
      _phi3_decoder,
      _phi3_config,
    ),
    Family(
      "smollm3",
      "SmolLM3ForCausalLM",
      rules.gated(interleaved=True, offset=0.0, post_norms=False),
      schema.SmolLM3Config,
      _smollm3_decoder,
      _smollm3_config,
    ),
    Family(
      "olmo2",
      "Olmo2ForCausalLM",
      rules.gated(interleaved=False, offset=0.0, post_norms=True),
      schema.Olmo2Config,
      _olmo2_decoder,
      _rotary_decoder_config,
    ),
    Family(
      "olmo3",
      "Olmo3ForCausalLM",
      rules.gated(interleaved=False, offset=0.0, post_norms=True),
      schema.Olmo3Config,
      _olmo3_decoder,
      _olmo3_config,
    ),
    Family(
      "granite",
      "GraniteForCausalLM",
      rules.gated(interleaved=True, offset=0.0, post_norms=False),
      schema.GraniteConfig,
      _granite_decoder,
      _granite_config,
    ),
    Family(
      "gemma2",
      "Gemma2ForCausalLM",
      rules.gated(interleaved=False, offset=1.0, post_norms=True),
      schema.Gemma2Config,
      _gemma2_decoder,
      _gemma2_config,
    ),
    Family(
      "gemma3_text",
      "Gemma3ForCausalLM",
      rules.gated(interleaved=False, offset=1.0, post_norms=True),
      schema.Gemma3Config,
      _gemma3_decoder,
      _gemma3_config,
    ),
    Family(
      "qwen4_exp_text",
      "Qwen4ExpForCausalLM",
      rules.qwen4(),
      schema.Qwen4ExpTextConfig,
      _qwen4_decoder,
      _qwen4_config,
      ignored=(
        "visual.",
        "mtp.",
        ".layer_multipliers",
        ".ngram_heads_vocab_sizes",
        ".ngram_heads_offsets",
      ),
    ),
  )
}
"""Families by the `model_type` of their config."""


OTHERS = (
  "Other architectures are not run here. Three lines compress their tables, the first of them"
  ' optional: collect(model, batches, "moments"), the hook of docs/compression.md; vqjax compress'
  " FOLDER --bytes 1/8 --table TENSOR [moments] --out small; vqjax.torch.load_tables(model,"
  ' "small"). To run them, add a Family to vqjax/lm/sources/families.py.'
)
"""What an error says of architectures without a family."""


def family_of(config: Mapping[str, Any], origin: Origin | None = None) -> Family:
  """The family of a config; ValueError with the known ones for an unknown architecture."""
  kind = config.get("model_type")
  if not isinstance(kind, str) or kind not in FAMILIES:
    raise dataclasses.replace(
      origin or Origin(),
      remedy=OTHERS,
    ).error(f"`model_type` must be one of {', '.join(FAMILIES)}; got {shown(kind)}")
  return FAMILIES[kind]


DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Number formats that a decoder computes in."""


def decoder_of(
  config: Mapping[str, Any],
  dtype: Dtype = jnp.float32,
  origin: Origin | None = None,
  shapes: Sequence[tuple[int, ...]] | None = None,
) -> Transformer:
  """The decoder of a config.

  Args:
    config: the config, in the words of Hugging Face.
    dtype: number format of the computation.
    origin: where the config comes from, for messages.
    shapes: those of the tensors beside it, with which its sizes are compared; None: unknown.

  Raises:
    ValueError: the architecture is unknown, the config lacks a key, has an unknown or impossible
      one, or contradicts itself, or `dtype` is not one of `DTYPES`.
  """
  origin = origin or Origin()
  family = family_of(config, origin)
  try:
    name = jnp.dtype(dtype).name
  except TypeError:
    name = shown(dtype)
  if name not in DTYPES:
    known = ", ".join(DTYPES)
    raise ValueError(
      f"`dtype` must be one of {known}; got {name}. Quantise tables with vqjax compress."
    )
  full = read_config(family.schema, config, origin, shapes)
  try:
    return family.decoder(full, jnp.dtype(dtype).type)
  except ValueError as error:
    raise origin.error(str(error)) from None


def described(model: Transformer) -> tuple[Family, dict[str, Any]]:
  """The family that computes a decoder, and its config.

  Raises:
    ValueError: no family computes it.
  """
  for family in FAMILIES.values():
    tied = getattr(model.head, "embedding", None) is not None
    try:
      config = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "vocab_size": model.head.vocab,
        "tie_word_embeddings": tied,
      } | family.config(model)
      found = decoder_of(config, jnp.float32)
    except (AttributeError, TypeError, ValueError):
      continue  # the decoder has other parts than those of this family
    if _fields(found) == _fields(model):
      return family, config
  raise ValueError(
    f"`model` must be a decoder that one of {', '.join(FAMILIES)} computes, with a dense embedding"
    " and a dense head; got one with other fields. Save it as a run's checkpoint instead, or bring"
    " its fields to those of a family."
  )


def _fields(model: Transformer) -> dict[str, Any]:
  """What a decoder computes, for comparison."""
  fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
  own = {name: value for name, value in fields.items() if name not in _NOT_COMPARED}
  own |= {"local": model.is_local(), "head": type(model.head), "embedding": type(model.embedding)}
  own["mlp"] = dataclasses.replace(model.mlp, width=model.mlp.width or 4 * model.dim)
  width = model.attention.head_dim or model.dim // model.heads
  scale = width**-0.5 if model.attention.scale is None else model.attention.scale
  own["attention"] = dataclasses.replace(
    model.attention, head_dim=width, scale=float(f"{scale:.12g}")
  )
  own["memories"] = [_fields_of_memory(memory) for memory in model.memories]
  return own | {
    "softcap": getattr(model.head, "softcap", None),
    "use_bias": getattr(model.head, "use_bias", False),
  }


def _fields_of_memory(memory: NGramMemory) -> dict[str, Any]:
  table = memory.lookup.table
  names = ("dim", "streams", "kernel", "epsilon", "offset", "has_table")
  own = {name: getattr(memory, name) for name in names}
  return own | {"ngrams": memory.lookup.ngrams, "table": (type(table), table.vocab, table.dim)}


_NOT_COMPARED = {"parent", "name", "dropout", "remat", "dtype"}
"""Fields of a decoder that do not say what it computes."""
