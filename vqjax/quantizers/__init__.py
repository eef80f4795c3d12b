"""Quantisers: layers that replace vectors by codes and learn the codes."""

from vqjax.quantizers.base import Quantized, Quantizer
from vqjax.quantizers.centroid import CentroidQuantizer
from vqjax.quantizers.softmax import EncoderQuantizer, FreeQuantizer, SoftmaxQuantizer

__all__ = [
  "CentroidQuantizer",
  "EncoderQuantizer",
  "FreeQuantizer",
  "Quantized",
  "Quantizer",
  "SoftmaxQuantizer",
]
