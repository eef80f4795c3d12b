"""Which quantisers are there?"""

from vqjax.quantizers.base import Quantized, Quantizer
from vqjax.quantizers.centroid import CentroidQuantizer, MovingAverage
from vqjax.quantizers.softmax import SoftmaxQuantizer

__all__ = ["CentroidQuantizer", "MovingAverage", "Quantized", "Quantizer", "SoftmaxQuantizer"]
