"""A decoder of streams, delta rules, an index and memories computes what `qwen4_exp` does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from tests.jitted import apply, random_variables
from vqjax import CentroidQuantizer, DenseEmbedding, DenseHead, DPQEmbedding
from vqjax.lm import checkpoints
from vqjax.lm.generation import Draft, generate, score
from vqjax.lm.models import MLP, Attention, Experts, RMSNorm, Rotary, Transformer
from vqjax.lm.models.key_index import KeyIndex
from vqjax.lm.models.recurrent import GatedDelta
from vqjax.lm.models.streams import Streams
from vqjax.ngrams import NGramEmbedding, NGramMemory
from vqjax.ops.ngrams import XorHash

VOCAB, END, D, S = 101, 3, 16, 2
RNG = np.random.default_rng(0)
TOKENS = np.where(RNG.random((2, 37)) < 0.15, END, RNG.integers(0, VOCAB, (2, 37)))


def decoder():
  memories = []
  for layer, rows in enumerate((240, 312)):
    ngrams = XorHash.qwen4(VOCAB, END, layer=layer, heads=2, least=50)
    memories.append(NGramMemory(NGramEmbedding(ngrams, DenseEmbedding(rows, 4)), D, streams=S))
  return Transformer(
    DenseEmbedding(VOCAB, D),
    DenseHead(VOCAB, D),
    D,
    layers=4,
    heads=2,
    context=64,
    norm=RMSNorm(offset=1.0),
    attention=Attention(
      kv_heads=1,
      head_dim=8,
      qk_norm=True,
      qkv_bias=False,
      out_bias=False,
      gated=True,
      index=KeyIndex(heads=8, dim=8, budget=8, ratio=2),
    ),
    mlp=MLP(8, jax.nn.silu, gated=True, use_bias=False, experts=Experts(4, 2, shared=12)),
    pre_norms=False,
    rotary=Rotary(),
    streams=Streams(S, rank=4),
    delta=GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
    recurrent=(True, True, True, False),
    memories=tuple(memories),
    memory_blocks=(0, 2),
  )


def params_of(state):
  """The variables of `decoder` from the tensors of transformers."""

  def mixer(name, writes=True):
    read = lambda part: {"kernel": state[f"{name}.{part}.weight"].T}
    own = {"scale": state[f"{name}.hc_norm.weight"], "down": read("input_mix_weight_down")}
    own["up"] = read("input_mix_weight_up")
    return own | ({"write": read("block_inject_weight")} if writes else {})

  def heads(name, count):
    weight = state[name]
    return {"kernel": weight.T.reshape(weight.shape[1], count, -1)}

  params = {
    "embedding": {"weight": state["model.embed_tokens.weight"]},
    "head": {"weight": state["lm_head.weight"]},
    "final_streams": mixer("model.hyper_connection_mixer", writes=False),
  }
  for layer in range(4):
    at = f"model.layers.{layer}."
    flat = lambda name, at=at: {"kernel": state[f"{at}{name}.weight"].T}
    scale = lambda name, at=at: {"scale": state[f"{at}{name}.weight"]}
    both, down = (state[f"{at}mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
    gate, up = np.split(both.swapaxes(1, 2), 2, axis=2)
    own = {
      "attention_streams": mixer(f"{at}attn_hyper_connection"),
      "mlp_streams": mixer(f"{at}mlp_hyper_connection"),
      "router": flat("mlp.gate"),
      "mlp_gate": {"kernel": gate},
      "mlp_in": {"kernel": up},
      "mlp_out": {"kernel": down.swapaxes(1, 2)},
      "shared_gate": flat("mlp.shared_expert.gate_proj"),
      "shared_in": flat("mlp.shared_expert.up_proj"),
      "shared_out": flat("mlp.shared_expert.down_proj"),
      "shared_weight": flat("mlp.shared_expert_gate"),
    }
    if layer < 3:
      own["delta_rule"] = {
        "query_key_value": flat("linear_attn.in_proj_qkv"),
        "gate": heads(f"{at}linear_attn.in_proj_z.weight", 4),
        "rate": flat("linear_attn.in_proj_b"),
        "decay": flat("linear_attn.in_proj_a"),
        "filters": state[f"{at}linear_attn.conv1d.weight"][:, 0].T,
        "decay_bias": state[f"{at}linear_attn.dt_bias"],
        "log_decay": state[f"{at}linear_attn.A_log"],
        "scale": state[f"{at}linear_attn.norm.weight"],
        "out": {"kernel": state[f"{at}linear_attn.out_proj.weight"].T.reshape(4, 8, D)},
      }
    else:
      index = state[f"{at}self_attn.indexer.index_qk_proj.weight"].T
      own |= {
        "query": heads(f"{at}self_attn.q_proj.weight", 2),
        "key": heads(f"{at}self_attn.k_proj.weight", 1),
        "value": heads(f"{at}self_attn.v_proj.weight", 1),
        "attention_out": {"kernel": state[f"{at}self_attn.o_proj.weight"].T.reshape(2, 8, D)},
        "query_norm": scale("self_attn.q_norm"),
        "key_norm": scale("self_attn.k_norm"),
        "index": {
          "query": {"kernel": index[:, :64].reshape(D, 8, 8)},
          "key": {"kernel": index[:, 64:]},
          "query_norm": scale("self_attn.indexer.q_layernorm"),
          "key_norm": scale("self_attn.indexer.k_layernorm"),
        },
      }
    params[f"blocks_{layer}"] = own
  for number, layer in enumerate((0, 2)):
    at = f"model.layers.{layer}.ple."
    params[f"memories_{number}"] = {
      "lookup": {"table": {"weight": state[f"{at}ple_embedding.ngram_embedding.weight"]}},
      "key": state[f"{at}key_proj.weight"].T,
      "value": state[f"{at}value_proj.weight"].T,
      "key_scale": 1 + state[f"{at}norm_key.weight"],
      "query_scale": 1 + state[f"{at}norm_query.weight"],
      "convolved_scale": 1 + state[f"{at}norm_conv.weight"],
      "filters": state[f"{at}conv1d.weight"][:, 0].T,
    }
  return {"params": params}


def reference():
  torch = pytest.importorskip("torch")
  name = "transformers.models.qwen4_exp."
  modeling = pytest.importorskip(f"{name}modeling_qwen4_exp")
  configuration = pytest.importorskip(f"{name}configuration_qwen4_exp")
  config = configuration.Qwen4ExpTextConfig(
    vocab_size=VOCAB, hidden_size=D, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, moe_intermediate_size=8,
    shared_expert_intermediate_size=12, num_experts_per_tok=2, num_experts=4, hc_count=S,
    hc_lowrank=4, ple_layer_ids=[1, 3], ple_embed_dim=16, heads_per_ngram=2,
    ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=12, eos_token_id=END,
    indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
    indexer_compress_ratio=2, max_position_embeddings=64,
  )  # fmt: skip
  torch.manual_seed(0)
  made = modeling.Qwen4ExpForCausalLM(config).eval()
  for parameter in made.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
  with torch.no_grad():
    logits = made(torch.tensor(TOKENS)).logits.numpy()
  return {name: x.numpy() for name, x in made.state_dict().items()}, logits


def test_logits_are_those_of_transformers_at_ends_of_texts_and_beyond_the_budget():
  state, expected = reference()
  found = apply(decoder(), params_of(state), jnp.asarray(TOKENS))
  np.testing.assert_allclose(found, expected, atol=1e-4)


def test_later_tokens_and_padding_change_no_earlier_logits():
  model = decoder()
  variables = random_variables(model, TOKENS[:, :2].astype(np.int32), scale=0.3)
  padded = np.where(np.arange(37) < 23, TOKENS, -1)
  found, whole = (apply(model, variables, jnp.asarray(x)) for x in (padded, TOKENS))
  np.testing.assert_allclose(found[:, :23], whole[:, :23], atol=1e-4)


def test_continuations_have_the_log_probabilities_of_whole_texts():
  model = decoder()
  variables = random_variables(model, TOKENS[:, :2].astype(np.int32), scale=0.3)
  # Within the budget of the index and beyond it, after an end of a text and in the middle of one.
  prompts = [TOKENS[0, :2].tolist(), TOKENS[0, :23].tolist(), TOKENS[1, :9].tolist()]
  made = generate(model, variables, prompts, jax.random.key(0), max_tokens=12)
  texts = [[*prompt, *own.tolist()] for prompt, own in zip(prompts, made.tokens)]
  for prompt, own, whole in zip(prompts, made.log_probs, score(model, variables, texts)):
    np.testing.assert_allclose(own, whole[len(prompt) - 1 :], atol=1e-4)


def test_every_variable_has_axes_and_drafters_are_refused():
  model = decoder()
  variables = random_variables(model, TOKENS[:, :2].astype(np.int32))
  axes = traverse_util.flatten_dict(dict(model.logical_axes()["params"]))
  params = traverse_util.flatten_dict(dict(variables["params"]))
  ranks = lambda flat, rank: {path: rank(x) for path, x in flat.items()}
  assert ranks(axes, len) == ranks(params, np.ndim)
  drafter = Draft(model, variables)
  with pytest.raises(ValueError, match="only keys and values of earlier tokens"):
    generate(model, variables, [[1, 2]], jax.random.key(0), max_tokens=3, drafter=drafter)


def test_terms_of_the_tables_of_memories_are_terms_of_the_loss():
  model = decoder()
  ngrams = model.memories[0].lookup.ngrams
  coded = DPQEmbedding(240, 4, CentroidQuantizer(codes=4, subspaces=2))
  memory = model.memories[0].clone(lookup=NGramEmbedding(ngrams, coded))
  model = model.clone(memories=(memory, model.memories[1]))
  variables = random_variables(model, TOKENS[:, :2].astype(np.int32))
  given = jnp.asarray(TOKENS), jnp.asarray(TOKENS)
  _, terms = apply(model, variables, *given, method="loss_terms")
  assert any(name.startswith("memories_0/") for name in terms), terms


def test_a_vocabulary_whose_tokens_are_hashed_is_not_resized():
  model = decoder()
  with pytest.raises(ValueError, match="hashes of token ids; got 2"):
    checkpoints.resize(model, {"params": {}}, np.arange(5))
