"""The rules of the families of pretrained decoders: where each of their tensors goes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from vqjax.lm.sources.layout import Layout

__all__ = []


@dataclasses.dataclass(frozen=True)
class Rule:
  """A variable of the decoder, and the tensor that holds it.

  Attributes:
    path: the variable below "params", with slashes; those below "blocks" have an axis of blocks
      first, and a tensor for each block. It stands for those of "blocks_0", "blocks_1", ..., which
      have none, and "memories" for those of all memories.
    name: the tensor in safetensors; "{}" stands for the number of the block, and another one for
      that of the expert.
    gguf: the tensor in a GGUF.
    layout: the layouts of the tensor and of its part of the variable.
    gguf_layout: the layouts in a GGUF; None: `layout`.
    gguf_offset: number that a GGUF has added to the parameter.
    joined: the variables whose tensors are one tensor, joined along its first axis in this order;
      (): it has a tensor of its own.
    interleaved: they are joined in safetensors alone, and side by side along the last axis.
  """

  path: str
  name: str
  gguf: str
  layout: str
  gguf_layout: str | None = None
  gguf_offset: float = 0.0
  joined: tuple[str, ...] = ()
  interleaved: bool = False

  def tensor_name(self, kind: str) -> str:
    """The name of the tensor in a file of this kind."""
    return self.name if kind == "safetensors" else self.gguf

  def tensor_layout(self, kind: str) -> Layout:
    """The layout in a file of this kind."""
    return Layout(self.layout if kind == "safetensors" else self.gguf_layout or self.layout)

  def stacked_axes(self, kind: str) -> int:
    """The number of leading axes of the variable whose entries have tensors of their own."""
    return self.tensor_name(kind).count("{}")

  def joined_with(self, kind: str) -> tuple[str, ...]:
    """`joined`, in a file of this kind."""
    return () if self.interleaved and kind != "safetensors" else self.joined


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


def gated(interleaved: bool, offset: float, post_norms: bool) -> tuple[Rule, ...]:
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


def routed(
  router: str, experts: str, names: Sequence[str], *, interleaved: bool
) -> tuple[Rule, ...]:
  """The rules of families with a router, whose experts have tensors of their own in safetensors.

  Args:
    router: the router's product.
    experts: what the names of all experts begin with.
    names: those of the gate, of the other projection inwards, and of the one outwards.
    interleaved: as of `gated`.
  """
  more = _linear("blocks/router", f"layers.{{}}.{router}", "blk.{}.ffn_gate_inp", "e d -> d e")
  parts = zip(("gate", "in", "out"), ("gate", "up", "down"), names, strict=True)
  for part, gguf, name in parts:
    name = f"layers.{{}}.{experts}.{{}}.{name}.weight"
    gguf = f"blk.{{}}.ffn_{gguf}_exps.weight"
    more.append(Rule(f"blocks/mlp_{part}/kernel", name, gguf, "y x -> x y", "e y x -> e x y"))
  return _replaced(gated(interleaved=interleaved, offset=0.0, post_norms=False), more)


def _replaced(rules: Sequence[Rule], more: Sequence[Rule]) -> tuple[Rule, ...]:
  """The rules with others for the variables of some."""
  return tuple(({rule.path: rule for rule in rules} | {rule.path: rule for rule in more}).values())


def gpt_oss() -> tuple[Rule, ...]:
  """The rules of gpt-oss: in safetensors the experts of a block are one tensor."""
  more = [
    _vector(
      "blocks/mlp_norm/scale",
      "layers.{}.post_attention_layernorm.weight",
      "blk.{}.post_attention_norm.weight",
    ),
    _vector("blocks/sink", "layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight"),
    *_linear("blocks/router", "layers.{}.mlp.router", "blk.{}.ffn_gate_inp", "e d -> d e"),
  ]
  for end, suffix, axes in (("kernel", "", "e x y"), ("bias", "_bias", "e y")):
    both = tuple(f"blocks/mlp_{part}/{end}" for part in ("gate", "in"))
    names = [(both[0], "gate_up", "gate"), (both[1], "gate_up", "up")]
    for path, name, gguf in (*names, (f"blocks/mlp_out/{end}", "down", "down")):
      joined = {"joined": both, "interleaved": True} if path in both else {}
      name = f"layers.{{}}.mlp.experts.{name}_proj{suffix}"
      gguf = f"blk.{{}}.ffn_{gguf}_exps.{'bias' if suffix else 'weight'}"
      in_gguf = f"{axes if suffix else 'e y x'} -> {axes}"
      more.append(Rule(path, name, gguf, f"{axes} -> {axes}", in_gguf, **joined))
  return _replaced(gated(interleaved=False, offset=0.0, post_norms=False), more)


def phi3() -> tuple[Rule, ...]:
  """The rules of Phi-3: projections that read the same vectors are one tensor."""
  joined = {
    "blocks/{}/kernel": (("query", "key", "value"), "self_attn.qkv_proj", "attn_qkv"),
    "blocks/mlp_{}/kernel": (("gate", "in"), "mlp.gate_up_proj", "ffn_up"),
  }
  rules = {rule.path: rule for rule in gated(interleaved=False, offset=0.0, post_norms=False)}
  for path, (parts, name, gguf) in joined.items():
    paths = tuple(path.format(part) for part in parts)
    for path in paths:
      name_and_gguf = {"name": f"layers.{{}}.{name}.weight", "gguf": f"blk.{{}}.{gguf}.weight"}
      rules[path] = dataclasses.replace(rules[path], **name_and_gguf, joined=paths)
  return tuple(rules.values())


def gpt2() -> tuple[Rule, ...]:
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


def qwen4() -> tuple[Rule, ...]:
  """The rules of `qwen4_exp`, of which no GGUF is read."""
  streams = [("scale", "hc_norm.weight", "d -> d")]
  for part in ("down", "up"):
    streams.append((f"{part}/kernel", f"input_mix_weight_{part}.weight", "y x -> x y"))
  writing = [*streams, ("write/kernel", "block_inject_weight.weight", "y x -> x y")]
  product, heads, vector = "y x -> x y", "(h c) d -> d h c", "d -> d"
  delta = [
    ("query_key_value/kernel", "in_proj_qkv.weight", product),
    ("gate/kernel", "in_proj_z.weight", heads),
    ("rate/kernel", "in_proj_b.weight", product),
    ("decay/kernel", "in_proj_a.weight", product),
    ("filters", "conv1d.weight", "c 1 k -> k (c 1)"),
    ("decay_bias", "dt_bias", vector),
    ("log_decay", "A_log", vector),
    ("scale", "norm.weight", vector),
    ("out/kernel", "out_proj.weight", "d (h c) -> h c d"),
  ]
  attention = [
    *((f"{name}/kernel", f"{name[0]}_proj.weight", heads) for name in ("query", "key", "value")),
    ("attention_out/kernel", "o_proj.weight", "d (h c) -> h c d"),
    *((f"{name}_norm/scale", f"{name[0]}_norm.weight", vector) for name in ("query", "key")),
    *(
      (f"index/{name}_norm/scale", f"indexer.{name[0]}_layernorm.weight", vector)
      for name in ("query", "key")
    ),
  ]
  both = ("blocks/index/query/kernel", "blocks/index/key/kernel")
  index = [
    Rule(path, "layers.{}.self_attn.indexer.index_qk_proj.weight", "", layout, joined=both)
    for path, layout in zip(both, (heads, "c d -> d c"))
  ]
  mlp = [("router/kernel", "gate.weight", product)]
  for part, name in (("gate", "gate"), ("in", "up"), ("out", "down")):
    mlp.append((f"mlp_{part}/kernel", f"experts.{{}}.{name}_proj.weight", product))
    mlp.append((f"shared_{part}/kernel", f"shared_expert.{name}_proj.weight", product))
  mlp.append(("shared_weight/kernel", "shared_expert_gate.weight", product))
  memory = [
    ("lookup/table/weight", "ple_embedding.ngram_embedding.weight", "v d -> v d"),
    *((name, f"{name}_proj.weight", product) for name in ("key", "value")),
    *(
      (f"{name}_scale", f"norm_{of}.weight", vector)
      for name, of in (("key", "key"), ("query", "query"), ("convolved", "conv"))
    ),
    ("filters", "conv1d.weight", "c 1 k -> k (c 1)"),
  ]
  of = lambda path, name, parts: [
    Rule(path + part, name + tensor, "", layout) for part, tensor, layout in parts
  ]
  return (
    EMBEDDING,
    HEAD,
    *of("final_streams/", "hyper_connection_mixer.", streams),
    *of("blocks/attention_streams/", "layers.{}.attn_hyper_connection.", writing),
    *of("blocks/mlp_streams/", "layers.{}.mlp_hyper_connection.", writing),
    *of("blocks/delta_rule/", "layers.{}.linear_attn.", delta),
    *of("blocks/", "layers.{}.self_attn.", attention),
    *index,
    *of("blocks/", "layers.{}.mlp.", mlp),
    *of("memories/", "layers.{}.ple.", memory),
  )
