"""Decoders whose embedding and output head are fields."""

from vqjax.lm.models.base import LanguageModel
from vqjax.lm.models.decoder import (
  MLP,
  Attention,
  Experts,
  LayerNorm,
  RMSNorm,
  Swish,
  Transformer,
)
from vqjax.lm.models.rotary import LinearScaling, Llama3, Rotary, Yarn

__all__ = [
  "MLP",
  "Attention",
  "Experts",
  "LanguageModel",
  "LayerNorm",
  "LinearScaling",
  "Llama3",
  "RMSNorm",
  "Rotary",
  "Swish",
  "Transformer",
  "Yarn",
]
