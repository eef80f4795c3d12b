"""Families of pretrained decoders: their configs, and where each of their tensors goes.

A family is two functions between a Hugging Face config and a `Transformer`, and one table of rules.
A rule is a variable, the names of its tensor in safetensors and in a GGUF, and the layouts there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from vqjax.embeddings import DenseEmbedding
from vqjax.heads import DenseHead
from vqjax.lm.checkpoints.layout import Layout
from vqjax.lm.models import MLP, Attention, LayerNorm, RMSNorm, Rotary, Transformer, rotary
from vqjax.types import Dtype

__all__ = ["decoder_of"]


@dataclasses.dataclass(frozen=True)
class Rule:
  """A variable of the decoder, and the tensor that holds it.

  Attributes:
    path: the variable below "params", with slashes; those below "blocks" have an axis of blocks
      first, and a tensor for each block.
    name: the tensor in safetensors; "{}" stands for the number of the block.
    gguf: the tensor in a GGUF.
    layout: the layouts of the tensor and of a block's variable.
    gguf_layout: the layouts in a GGUF; None: `layout`.
    gguf_offset: number that a GGUF has added to the parameter.
  """

  path: str
  name: str
  gguf: str
  layout: str
  gguf_layout: str | None = None
  gguf_offset: float = 0.0

  def tensor_name(self, kind: str) -> str:
    """The name of the tensor in a file of this kind."""
    return self.name if kind == "safetensors" else self.gguf

  def tensor_layout(self, kind: str) -> Layout:
    """The layout in a file of this kind."""
    return Layout(self.layout if kind == "safetensors" else self.gguf_layout or self.layout)


@dataclasses.dataclass(frozen=True)
class Family:
  """An architecture of Hugging Face.

  Attributes:
    model_type: the name of its config.
    architecture: the name of its class.
    rules: its tensors; those of variables that a decoder lacks do not apply.
    decoder: config -> the decoder.
    config: decoder -> the config; of another architecture, the config of another decoder.
    prefix: what names in safetensors begin with, except for that of the head.
    ignored: beginnings or ends of names of tensors that are no parameters.
  """

  model_type: str
  architecture: str
  rules: tuple[Rule, ...]
  decoder: Callable[[Mapping[str, Any], Dtype], Transformer]
  config: Callable[[Transformer], dict[str, Any]]
  prefix: str = "model."
  ignored: tuple[str, ...] = (".rotary_emb.inv_freq", "rope_freqs.weight", "angles")


EMBEDDING = Rule("embedding/weight", "embed_tokens.weight", "token_embd.weight", "v d -> v d")
HEAD = Rule("head/weight", "lm_head.weight", "output.weight", "v d -> v d")


def _vector(path: str, name: str, gguf: str, offset: float = 0.0) -> Rule:
  return Rule(path, name, gguf, "d -> d", gguf_offset=offset)


def _linear(path: str, name: str, gguf: str, layout: str, gguf_layout: str | None = None) -> list:
  """The rules of a product's weight and of its bias."""
  bias = lambda text: None if text is None else " ".join(_without_input(text))
  return [
    Rule(f"{path}/kernel", f"{name}.weight", f"{gguf}.weight", layout, gguf_layout),
    Rule(f"{path}/bias", f"{name}.bias", f"{gguf}.bias", bias(layout), bias(gguf_layout)),
  ]


def _without_input(layout: str) -> list[str]:
  """The layout of a bias, from that of the weight "OUT in -> in OUT"."""
  left, right = layout.split(" -> ")
  inputs = left.rsplit(") ", 1)[1] if left.startswith("(") else left.rsplit(" ", 1)[1]
  outputs = left.removesuffix(inputs).strip()
  return [outputs, "->", right.removeprefix(inputs.strip("()")).strip()]


def _gated(interleaved: bool, offset: float, post_norms: bool) -> tuple[Rule, ...]:
  """The rules of the families after Llama.

  Args:
    interleaved: a GGUF has the coordinates of each rotated plane side by side.
    offset: number that a GGUF has added to the scales of norms.
    post_norms: branches end in a norm, as in Gemma.
  """
  block, out = "layers.{}.", "blk.{}."
  turned = "(h i 2) d -> d h (2 i)" if interleaved else None
  norm = functools.partial(_vector, offset=offset)
  attention = [
    *_linear(
      "blocks/query", f"{block}self_attn.q_proj", f"{out}attn_q", "(h c) d -> d h c", turned
    ),
    *_linear("blocks/key", f"{block}self_attn.k_proj", f"{out}attn_k", "(h c) d -> d h c", turned),
    *_linear("blocks/value", f"{block}self_attn.v_proj", f"{out}attn_v", "(h c) d -> d h c"),
    Rule(
      "blocks/attention_out/kernel",
      f"{block}self_attn.o_proj.weight",
      f"{out}attn_output.weight",
      "d (h c) -> h c d",
    ),
    _vector("blocks/attention_out/bias", f"{block}self_attn.o_proj.bias", f"{out}attn_output.bias"),
    norm("blocks/query_norm/scale", f"{block}self_attn.q_norm.weight", f"{out}attn_q_norm.weight"),
    norm("blocks/key_norm/scale", f"{block}self_attn.k_norm.weight", f"{out}attn_k_norm.weight"),
  ]
  mlp = [
    *_linear("blocks/mlp_gate", f"{block}mlp.gate_proj", f"{out}ffn_gate", "f d -> d f"),
    *_linear("blocks/mlp_in", f"{block}mlp.up_proj", f"{out}ffn_up", "f d -> d f"),
    *_linear("blocks/mlp_out", f"{block}mlp.down_proj", f"{out}ffn_down", "d f -> f d"),
  ]
  # Gemma's "post_attention_layernorm" follows attention; Llama's precedes the feed-forward layer.
  norms = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
  }
  if post_norms:
    norms |= {
      "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
      "attention_post_norm": ("post_attention_layernorm", "post_attention_norm"),
      "mlp_post_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
    }
  return (
    EMBEDDING,
    HEAD,
    norm("final_norm/scale", "norm.weight", "output_norm.weight"),
    *(
      norm(f"blocks/{path}/scale", f"{block}{name}.weight", f"{out}{gguf}.weight")
      for path, (name, gguf) in norms.items()
    ),
    *attention,
    *mlp,
  )


def _gpt2_rules() -> tuple[Rule, ...]:
  """The rules of GPT-2, whose safetensors have [in, out] weights and whose GGUF [out, in]."""
  products = [
    ("query_key_value", "attn.c_attn", "attn_qkv", "d (n h c)", "(n h c) d", "d n h c", "n h c"),
    ("attention_out", "attn.c_proj", "attn_output", "(h c) d", "d (h c)", "h c d", "d"),
    ("mlp_in", "mlp.c_fc", "ffn_up", "d f", "f d", "d f", "f"),
    ("mlp_out", "mlp.c_proj", "ffn_down", "f d", "d f", "f d", "d"),
  ]
  rules = [
    dataclasses.replace(EMBEDDING, name="wte.weight"),
    Rule("position", "wpe.weight", "position_embd.weight", "t d -> t d"),
    HEAD,
  ]
  for path, name, gguf, file, in_gguf, kernel, bias in products:
    path, name, gguf = f"blocks/{path}", f"h.{{}}.{name}", f"blk.{{}}.{gguf}"
    joined = f"({bias})" if " " in bias else bias
    rules += [
      Rule(f"{path}/kernel", f"{name}.weight", f"{gguf}.weight", f"{file} -> {kernel}",
           f"{in_gguf} -> {kernel}"),
      Rule(f"{path}/bias", f"{name}.bias", f"{gguf}.bias", f"{joined} -> {bias}"),
    ]  # fmt: skip
  norms = [
    ("final_norm", "ln_f", "output_norm"),
    ("blocks/attention_norm", "h.{}.ln_1", "blk.{}.attn_norm"),
    ("blocks/mlp_norm", "h.{}.ln_2", "blk.{}.ffn_norm"),
  ]
  for path, name, gguf in norms:
    rules += [
      _vector(f"{path}/scale", f"{name}.weight", f"{gguf}.weight"),
      _vector(f"{path}/bias", f"{name}.bias", f"{gguf}.bias"),
    ]
  return tuple(rules)


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


def _activation(name: str) -> Callable:
  if name not in ACTIVATIONS:
    raise ValueError(
      f"the config must have an activation among {', '.join(ACTIVATIONS)}; got {name!r}. Others are"
      " not implemented."
    )
  return ACTIVATIONS[name]


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
  config = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
  } | dict(config)
  _refuse(config, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
  dim = config["n_embd"]
  inner = config["n_inner"]
  return _decoder(
    config,
    dtype,
    dim,
    layers=config["n_layer"],
    heads=config["n_head"],
    context=config["n_positions"],
    norm=LayerNorm(config["layer_norm_epsilon"]),
    attention=Attention(scale=None if config.get("scale_attn_weights", True) else 1.0),
    mlp=MLP(
      width=None if inner == 4 * dim else inner,
      activation=_activation(config["activation_function"]),
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
  config = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False} | dict(config)
  return _rotary_decoder(config, dtype)


def _qwen3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  config = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": 128} | dict(config)
  layers = config["num_hidden_layers"]
  windows = {}
  if config.get("use_sliding_window") and config.get("sliding_window"):
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
      "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    windows = {
      "window": config["sliding_window"],
      "local": tuple(kind == "sliding_attention" for kind in kinds),
    }
  return _rotary_decoder(config, dtype, attention={"qk_norm": True}, **windows)


def _gemma3_decoder(config: Mapping[str, Any], dtype: Dtype) -> Transformer:
  config = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
  } | {key: value for key, value in config.items() if value is not None}
  _refuse(config, use_bidirectional_attention=False)
  layers, dim = config["num_hidden_layers"], config["hidden_size"]
  every = config.get("sliding_window_pattern", 6)
  kinds = config.get("layer_types") or [
    "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)
  ]
  local_parameters = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
  return _rotary_decoder(
    config,
    dtype,
    attention={
      "scale": config["query_pre_attn_scalar"] ** -0.5,
      "softcap": config.get("attn_logit_softcapping"),
      "qk_norm": True,
    },
    softcap=config.get("final_logit_softcapping"),
    offset=1.0,
    post_norms=True,
    embedding_scale=dim**0.5,
    window=config["sliding_window"],
    local=tuple(kind == "sliding_attention" for kind in kinds),
    local_rotary=_rotary({"rope_theta": config["rope_local_base_freq"]} | dict(local_parameters)),
  )


def _rotary_decoder(
  config: Mapping[str, Any],
  dtype: Dtype,
  *,
  attention: Mapping[str, Any] | None = None,
  offset: float = 0.0,
  **fields: Any,
) -> Transformer:
  """A decoder of the families after Llama."""
  dim, heads = config["hidden_size"], config["num_attention_heads"]
  has_bias, parameters = config.get("attention_bias", False), config.get("rope_parameters") or {}
  return _decoder(
    config,
    dtype,
    dim,
    layers=config["num_hidden_layers"],
    heads=heads,
    context=config["max_position_embeddings"],
    norm=RMSNorm(config["rms_norm_eps"], offset),
    attention=Attention(
      kv_heads=config.get("num_key_value_heads") or heads,
      head_dim=config.get("head_dim") or dim // heads,
      qkv_bias=has_bias,
      out_bias=has_bias,
      **attention or {},
    ),
    mlp=MLP(
      width=config["intermediate_size"],
      activation=_activation(config.get("hidden_act", "silu")),
      gated=True,
      use_bias=config.get("mlp_bias", False),
    ),
    rotary=_rotary(config | dict(parameters.get("full_attention") or parameters)),
    **fields,
  )


def _rotary(config: Mapping[str, Any]) -> Rotary:
  """Rotary embeddings of a config's `rope_theta` with its scaling, in old words or in new."""
  base, scaling = config.get("rope_theta", 1e4), config.get("rope_scaling") or config
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  if not _is_above_0(base, Real):
    raise ValueError(
      f"`rope_theta` of the config must be a number above 0; got {base!r}. Download config.json"
      " again."
    )
  if scaling.get("partial_rotary_factor", 1.0) != 1.0:
    raise ValueError(
      "`partial_rotary_factor` of the config must be 1; got"
      f" {scaling['partial_rotary_factor']}. Heads that are turned in part are not implemented."
    )
  make = {
    "default": lambda: None,
    "linear": lambda: rotary.LinearScaling(scaling["factor"]),
    "llama3": lambda: rotary.Llama3(
      scaling["factor"],
      scaling["low_freq_factor"],
      scaling["high_freq_factor"],
      scaling["original_max_position_embeddings"],
    ),
    "yarn": lambda: rotary.Yarn(
      scaling["factor"],
      scaling.get("original_max_position_embeddings") or config["max_position_embeddings"],
      scaling.get("beta_fast") or 32.0,
      scaling.get("beta_slow") or 1.0,
    ),
    "divisors": lambda: rotary.Divisors(scaling["divisors"]),
  }
  if kind not in make or scaling.get("attention_factor") is not None:
    raise ValueError(
      f"`rope_type` of the config must be one of {', '.join(make)}, without attention_factor; got"
      f" {kind!r}. Other scalings are not implemented."
    )
  return Rotary(float(base), make[kind]())


def _rotary_config(turn: Rotary) -> dict[str, Any]:
  """`rope_theta` and `rope_scaling` of a config."""
  scaling, fields = turn.scaling, None
  if isinstance(scaling, rotary.LinearScaling):
    fields = {"rope_type": "linear", "factor": scaling.factor}
  elif isinstance(scaling, rotary.Llama3):
    fields = {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low,
      "high_freq_factor": scaling.high,
      "original_max_position_embeddings": scaling.context,
    }
  elif isinstance(scaling, rotary.Yarn):
    fields = {
      "rope_type": "yarn",
      "factor": scaling.factor,
      "original_max_position_embeddings": scaling.context,
      "beta_fast": scaling.fast,
      "beta_slow": scaling.slow,
    }
  # These words are read by all versions of transformers, `rope_parameters` by new ones only.
  return {"rope_theta": turn.base, "rope_scaling": fields}


def _rotary_decoder_config(model: Transformer) -> dict[str, Any]:
  """The config of a decoder of the families after Llama."""
  attention = model.attention
  return {
    "hidden_size": model.dim,
    "num_hidden_layers": model.layers,
    "num_attention_heads": model.heads,
    "num_key_value_heads": attention.kv_heads,
    "head_dim": attention.head_dim or model.dim // model.heads,
    "intermediate_size": model.mlp.width or 4 * model.dim,
    "max_position_embeddings": model.context,
    "rms_norm_eps": model.norm.epsilon,
    "hidden_act": _name(model.mlp.activation, "silu"),
    "attention_bias": attention.qkv_bias,
    "mlp_bias": model.mlp.use_bias,
    **_rotary_config(model.rotary),
  }


def _qwen3_config(model: Transformer) -> dict[str, Any]:
  config = _rotary_decoder_config(model)
  if model.window is not None:
    config |= {
      "use_sliding_window": True,
      "sliding_window": model.window,
      "layer_types": _layer_types(model),
    }
  return config


def _gemma3_config(model: Transformer) -> dict[str, Any]:
  config = _rotary_decoder_config(model)
  return config | {
    "hidden_activation": _name(model.mlp.activation, "gelu_pytorch_tanh"),
    # The power of the square root of n is exact for numbers such as 256, and close for others.
    "query_pre_attn_scalar": round((model.attention.scale or 1.0) ** -2),
    "sliding_window": model.window,
    "layer_types": _layer_types(model),
    "rope_local_base_freq": model.local_rotary.base,
    "final_logit_softcapping": model.head.softcap,
    "attn_logit_softcapping": model.attention.softcap,
  }


def _layer_types(model: Transformer) -> list[str]:
  return ["sliding_attention" if local else "full_attention" for local in model.is_local()]


def _name(activation: Callable, preferred: str) -> str:
  if ACTIVATIONS[preferred] is activation:
    return preferred
  return next((name for name, known in ACTIVATIONS.items() if known is activation), "unknown")


def _refuse(config: Mapping[str, Any], **required: Any) -> None:
  for key, value in required.items():
    if config.get(key, value) != value:
      raise ValueError(
        f"`{key}` of the config must be {value}; got {config[key]}. It is not implemented."
      )


FAMILIES = {
  family.model_type: family
  for family in (
    Family(
      "gpt2",
      "GPT2LMHeadModel",
      _gpt2_rules(),
      _gpt2_decoder,
      _gpt2_config,
      prefix="transformer.",
      ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    Family(
      "llama",
      "LlamaForCausalLM",
      _gated(interleaved=True, offset=0.0, post_norms=False),
      _llama_decoder,
      _rotary_decoder_config,
    ),
    Family(
      "qwen3",
      "Qwen3ForCausalLM",
      _gated(interleaved=False, offset=0.0, post_norms=False),
      _qwen3_decoder,
      _qwen3_config,
    ),
    Family(
      "gemma3_text",
      "Gemma3ForCausalLM",
      _gated(interleaved=False, offset=1.0, post_norms=True),
      _gemma3_decoder,
      _gemma3_config,
    ),
  )
}
"""Families by the `model_type` of their config."""


def family_of(config: Mapping[str, Any]) -> Family:
  """The family of a config; ValueError with the known ones for an unknown architecture."""
  kind = config.get("model_type")
  if kind not in FAMILIES:
    raise ValueError(
      f"`model_type` of the config must be one of {', '.join(FAMILIES)}; got {kind!r}. Other"
      " architectures are not implemented: add a Family to vqjax/lm/checkpoints/families.py."
    )
  return FAMILIES[kind]


def decoder_of(config: Mapping[str, Any], dtype: Dtype = jnp.float32) -> Transformer:
  """The decoder of a config.

  Raises:
    ValueError: the architecture is unknown, or the config lacks a number or contradicts itself.
  """
  family = family_of(config)
  try:
    model = family.decoder(config, jnp.dtype(dtype).type)
  except KeyError as error:
    raise ValueError(
      f"the config of a {family.model_type} must have {error.args[0]}; it has none. Download"
      " config.json again."
    ) from None
  except (TypeError, ZeroDivisionError) as error:
    raise ValueError(
      f"the config of a {family.model_type} must have numbers for sizes; got one of another kind"
      f" ({error}). Download config.json again."
    ) from None
  attention = model.attention
  sizes = {"vocab": model.head.vocab, "dim": model.dim, "layers": model.layers}
  sizes |= {"heads": model.heads, "context": model.context, "inner width": model.mlp.width}
  sizes |= {"key-value heads": attention.kv_heads, "head width": attention.head_dim}
  sizes |= {"window": model.window}
  wrong = {n: x for n, x in sizes.items() if x is not None and not _is_above_0(x, Integral)}
  if not _is_above_0(model.norm.epsilon, Real):
    wrong["epsilon of norms"] = model.norm.epsilon
  if wrong:
    raise ValueError(
      f"the config of a {family.model_type} must have numbers for sizes, above 0; got"
      f" {', '.join(f'{name} {value!r}' for name, value in wrong.items())}. Download config.json"
      " again."
    )
  return model


def _is_above_0(value: Any, kind: type) -> bool:
  return isinstance(value, kind) and not isinstance(value, bool) and value > 0


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
      found = family.decoder(config, jnp.float32)
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
  return own | {
    "softcap": getattr(model.head, "softcap", None),
    "use_bias": getattr(model.head, "use_bias", False),
  }


_NOT_COMPARED = {"parent", "name", "dropout", "remat", "dtype"}
"""Fields of a decoder that do not say what it computes."""
