"""Decoders whose embedding and output head are fields."""

from vqjax.models.base import LanguageModel
from vqjax.models.decoder import Transformer

__all__ = ["LanguageModel", "Transformer"]
