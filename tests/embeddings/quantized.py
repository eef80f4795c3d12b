"""Quantisers and options that the tests of embeddings share."""

import jax

from vqjax.quantizers import CentroidQuantizer, MovingAverage, Revival, SoftmaxQuantizer

V, D, K, M = 53, 12, 6, 3

QUANTIZERS = {
  "sx": SoftmaxQuantizer(K, M, D),
  "sx shared": SoftmaxQuantizer(K, M, D, shared=True),
  "sx additive": SoftmaxQuantizer(K, 5, D, additive=True),
  "sx narrow": SoftmaxQuantizer(K, M, 6, value_dim=D),
  "vq": CentroidQuantizer(K, M, D),
  "vq averages": CentroidQuantizer(K, M, D, moving_average=MovingAverage()),
  "vq revived": CentroidQuantizer(K, M, D, revival=Revival(0.9, decay=0.1)),
}

TRAINING = {
  "method": "loss_terms",
  "mutable": ["batch_stats", "centroids", "revival"],
  "rngs": {"sample": jax.random.key(6)},
}
