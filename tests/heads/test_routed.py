"""The routed head is one distribution, whether a few rows of its weight are read or all."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

from tests import reference
from tests.contract_of_representatives import RepresentativeContract
from vqjax import CodebookHead, DenseEmbedding, DenseHead, RoutedHead
from vqjax.ops import routing

SHUFFLED = np.random.default_rng(0).permutation(101)


def routed_logits(head, variables, hidden):
  """Scores in float64, one token after another."""
  params, codes = variables["params"], variables["codes"]
  weight = params["weight"] if head.embedding is None else params["embedding"]["weight"]
  bias = np.asarray(params.get("bias", np.zeros(head.vocab)), np.float64)
  cluster = np.asarray(codes["assignment"])
  of_cluster = np.asarray(hidden) @ np.asarray(params["centroids"], np.float64).T
  log_size = np.array(
    [np.log(np.exp(bias[cluster == c]).sum()) for c in range(head.clusters)]
  )
  chosen = np.argsort(-(of_cluster + log_size), axis=-1, kind="stable")[..., : head.budget]
  exact = np.asarray(hidden) @ np.asarray(weight, np.float64).T + bias
  is_chosen = (cluster == chosen[..., None]).any(axis=-2)
  return np.where(is_chosen, exact, of_cluster[..., cluster] + bias)


class TestRoutedHead(RepresentativeContract):
  cases: ClassVar = {
    # 15 vectors that choose 33 of 101 rows take all rows.
    "all rows": lambda v, d: RoutedHead(
      v, d, clusters=10, budget=3, use_bias=True, order_init=SHUFFLED if v == 101 else None
    ),
    "few rows": lambda v, d: RoutedHead(v, d, clusters=25, budget=1, use_bias=True),
    "tied": lambda v, d: RoutedHead(
      v, d, clusters=7, budget=2, embedding=DenseEmbedding(v, d)
    ),
  }

  def reference_logits(self, head, variables, hidden):
    return routed_logits(head, variables, hidden)
