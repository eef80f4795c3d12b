"""A DPQ embedding with each quantiser, after one training batch."""

import jax
import jax.numpy as jnp
import pytest

from tests.embeddings.quantized import QUANTIZERS, TRAINING, D, V
from vqjax import DPQEmbedding


@pytest.fixture(params=QUANTIZERS)
def embedding(request):
  return DPQEmbedding(V, D, QUANTIZERS[request.param])


@pytest.fixture
def variables(embedding):
  """Variables after a training batch, so that statistics are not the initial ones."""
  fresh = embedding.init(jax.random.key(0), jnp.arange(5))
  _, written = embedding.apply(fresh, jnp.arange(40), False, **TRAINING)
  return fresh | written
