"""Decoders whose embedding and output head are fields."""

from vqjax.lm.models.base import LanguageModel
from vqjax.lm.models.decoder import MLP, Attention, LayerNorm, RMSNorm, Transformer
from vqjax.lm.models.rotary import LinearScaling, Llama3, Rotary, Yarn

__all__ = [
  "MLP",
  "Attention",
  "LanguageModel",
  "LayerNorm",
  "LinearScaling",
  "Llama3",
  "RMSNorm",
  "Rotary",
  "Transformer",
  "Yarn",
]
