"""A DPQ embedding with each quantiser, after one training batch."""

import pytest

from tests.embeddings.quantized import QUANTIZERS, D, V, after_a_batch
from vqjax import DPQEmbedding


@pytest.fixture(params=QUANTIZERS)
def embedding(request):
  return DPQEmbedding(V, D, QUANTIZERS[request.param])


@pytest.fixture
def variables(embedding):
  return after_a_batch(embedding)
