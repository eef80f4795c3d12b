"""Small configs of all families, and random variables for them."""

import jax
import numpy as np
import pytest

from tests import jitted
from vqjax.lm.sources.families import decoder_of

V = 97

GATED = {
  "vocab_size": V,
  "hidden_size": 32,
  "intermediate_size": 56,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 640,
}

LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}

LONGROPE = {
  "rope_type": "longrope",
  "short_factor": [1.0, 1.1, 1.3],
  "long_factor": [1.2, 3.0, 9.0],
  "original_max_position_embeddings": 320,
}

CONFIGS = {
  "gpt2": {
    "model_type": "gpt2",
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 640,
    "tie_word_embeddings": True,
  },
  "llama": GATED
  | {
    "model_type": "llama",
    "rope_theta": 5e4,
    "rope_scaling": LLAMA3,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
  },
  "qwen3": GATED
  | {
    "model_type": "qwen3",
    "head_dim": 12,
    "rope_theta": 1e6,
    "rope_scaling": YARN,
    "use_sliding_window": True,
    "sliding_window": 41,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
  },
  "mistral": GATED
  | {
    "model_type": "mistral",
    "head_dim": 12,
    "rope_theta": 1e6,
    "sliding_window": 43,
    "tie_word_embeddings": False,
  },
  "mixtral": GATED
  | {
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 43,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
  },
  "qwen3_moe": GATED
  | {
    "model_type": "qwen3_moe",
    "head_dim": 12,
    "rope_theta": 1e6,
    "rope_scaling": YARN,
    "moe_intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
  },
  "gpt_oss": GATED
  | {
    "model_type": "gpt_oss",
    "head_dim": 12,
    "rope_theta": 1.5e5,
    "rope_scaling": YARN | {"truncate": False},
    "rms_norm_eps": 1e-5,
    "sliding_window": 41,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "tie_word_embeddings": False,
  },
  "qwen2": GATED
  | {
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "rope_scaling": DYNAMIC,
    "max_position_embeddings": 200,
    "use_sliding_window": True,
    "sliding_window": 41,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
  },
  "phi3": GATED
  | {
    "model_type": "phi3",
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.75,
    "rope_theta": 1e4,
    "rope_scaling": LONGROPE,
    "original_max_position_embeddings": 320,
    "sliding_window": 47,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
  },
  "smollm3": GATED
  | {
    "model_type": "smollm3",
    "num_hidden_layers": 5,
    "rope_theta": 5e6,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
  },
  "olmo2": GATED
  | {
    "model_type": "olmo2",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
  },
  "olmo3": GATED
  | {
    "model_type": "olmo3",
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 5,
    "rope_theta": 5e5,
    "rope_scaling": YARN,
    "sliding_window": 37,
    "tie_word_embeddings": False,
  },
  "granite": GATED
  | {
    "model_type": "granite",
    "attention_multiplier": 0.25,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
  },
  "gemma2": GATED
  | {
    "model_type": "gemma2",
    "head_dim": 12,
    "sliding_window": 37,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 5,
    "rope_theta": 1e4,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
  },
  "gemma3_text": GATED
  | {
    "model_type": "gemma3_text",
    "head_dim": 12,
    "sliding_window": 37,
    "query_pre_attn_scalar": 20,
    "num_hidden_layers": 7,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": None,
    "tie_word_embeddings": True,
  },
  "qwen4_exp_text": GATED
  | {
    "model_type": "qwen4_exp_text",
    "num_hidden_layers": 4,
    "head_dim": 12,
    "rope_parameters": {
      "rope_type": "default",
      "rope_theta": 1e5,
      "partial_rotary_factor": 0.5,
      "mrope_section": [1, 1, 1],
    },
    "eos_token_id": 3,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "output_gate_type": "sigmoid",
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "hc_count": 2,
    "hc_lowrank": 6,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 16,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 12,
    "split_ngram_parts": 4,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
    "tie_word_embeddings": False,
  },
}
"""Configs in the words of Hugging Face; local blocks attend to a prime number of positions."""


NAMES = [
  pytest.param(name, marks=[pytest.mark.slow] if name in ("mixtral", "qwen3_moe") else [])
  for name in CONFIGS
]
"""All families as cases of a test that compiles each; experts are fast in one of them."""


def random_variables(model, scale=0.3, seed=1):
  """Variables with random numbers everywhere, also in norms and biases; codes are initial ones."""
  tokens = np.zeros((1, 1), np.int32)
  options = {"method": "loss_terms", "scale": scale, "seed": seed}
  return jax.device_put(jitted.random_variables(model, tokens, tokens, **options))


def small(name, **changes):
  """The decoder of a family and random variables for it."""
  model = decoder_of(CONFIGS[name] | changes)
  return model, random_variables(model)
