"""Quantisers: layers that replace vectors by codes and learn the codes."""

from vqjax.quantizers.base import Quantized, Quantizer
from vqjax.quantizers.centroid import CentroidQuantizer, MovingAverage
from vqjax.quantizers.revival import Revival
from vqjax.quantizers.softmax import EncoderQuantizer, FreeQuantizer, SoftmaxQuantizer

__all__ = [
  "CentroidQuantizer",
  "EncoderQuantizer",
  "FreeQuantizer",
  "MovingAverage",
  "Quantized",
  "Quantizer",
  "Revival",
  "SoftmaxQuantizer",
]
