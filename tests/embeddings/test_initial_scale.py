"""Initial vectors and rows have mean square length 1, so that tied and untied heads begin alike."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vqjax.embeddings import (
  CodebookEmbedding,
  DenseEmbedding,
  DPQEmbedding,
  GuidedEmbedding,
  Int8Embedding,
  LowRankEmbedding,
  PackedEmbedding,
  ProductEmbedding,
)
from vqjax.heads import (
  AdaptiveHead,
  ClassBasedHead,
  CodebookHead,
  DenseHead,
  DPQHead,
  GroupedHead,
  HierarchicalHead,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  PackedHead,
  ProductHead,
  ResidualCodebookHead,
  SampledSoftmaxHead,
  UnsharedGroupedHead,
)
from vqjax.quantizers import CentroidQuantizer, SoftmaxQuantizer

V, D = 997, 60

EMBEDDINGS = {
  "dense": lambda: DenseEmbedding(V, D),
  "codebook": lambda: CodebookEmbedding(V, D, 499),
  "low-rank": lambda: LowRankEmbedding(V, D, 30),
  "product": lambda: ProductEmbedding(V, D, 31, 12),
  "product-shared": lambda: ProductEmbedding(V, D, 499, 12, shared=True),
  "product-additive": lambda: ProductEmbedding(V, D, 31, 12, additive=True),
  "product-shared-additive": lambda: ProductEmbedding(V, D, 499, 3, shared=True, additive=True),
  "sx": lambda: DPQEmbedding(V, D, SoftmaxQuantizer(31, 12)),
  "sx-additive": lambda: DPQEmbedding(V, D, SoftmaxQuantizer(31, 12, additive=True)),
  "vq": lambda: DPQEmbedding(V, D, CentroidQuantizer(31, 12, normalize=False)),
  "quantized": lambda: PackedEmbedding(V, D, 3),
  "int8": lambda: Int8Embedding(V, D, 20),
  "guided": lambda: GuidedEmbedding(V, D, DenseEmbedding(V, D)),
}
HEADS = {
  "dense": lambda: DenseHead(V, D),
  "sampled": lambda: SampledSoftmaxHead(V, D, samples=16),
  "codebook": lambda: CodebookHead(V, D, 499),
  "residual": lambda: ResidualCodebookHead(V, D, 499, 4),
  "learned-codebook": lambda: LearnedCodebookHead(V, D, 499, 2),
  "product": lambda: ProductHead(V, D, 31, 12),
  "learned-product": lambda: LearnedProductHead(V, D, 31, 12),
  "dpq": lambda: DPQHead(V, D, SoftmaxQuantizer(31, 12)),
  "low-rank": lambda: LowRankHead(V, D, 30),
  "quantized": lambda: PackedHead(V, D, 3),
}
"""Heads whose `logits` are scores, linear in the hidden vectors."""
FACTORED = {
  "adaptive": (
    lambda: AdaptiveHead(V, D, (100, 400)),
    math.log(102) + 0.5 + (300 * math.log(300) + 597 * math.log(597) + 897 / 2) / V,
  ),
  "class-based": (lambda: ClassBasedHead(V, D, 31), math.log(V) + 1),
  "grouped": (lambda: GroupedHead(V, D), math.log(V) + 1),
  "unshared": (lambda: UnsharedGroupedHead(V, D), math.log(V) + 1),
  # log(1 + exp(x)) is 0.806 on average over a standard normal x.
  "tree": (lambda: HierarchicalHead(V, D), math.log2(V) * 0.806),
}
"""Heads that are products of several softmaxes or of decisions, and their expected initial loss.

A softmax over n scores of variance 1 begins at log n + 1/2, a decision at 0.806.
"""


def tolerance(name):
  """A nearest centroid is shorter than the vector; the others sample 360 entries or more."""
  return 0.35 if name in ("vq", "learned-product") else 0.1


HIDDEN = np.random.default_rng(3).normal(size=(512, D)).astype(np.float32)
TOKENS = np.random.default_rng(2).integers(0, V, 512)


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_vectors_have_mean_square_length_one(name):
  embedding = EMBEDDINGS[name]()

  @jax.jit
  def mean_square():
    variables = embedding.init(jax.random.key(0), jnp.arange(V))
    return jnp.square(embedding.apply(variables, jnp.arange(V))).sum(-1).mean()

  assert mean_square() == pytest.approx(1, rel=tolerance(name))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [n for n in EMBEDDINGS if n != "guided"])
def test_a_tied_head_begins_with_the_logits_of_an_untied_one(name):
  embedding = EMBEDDINGS[name]()
  kind = CodebookHead if name == "codebook" else DenseHead
  tied = kind(V, D, *((499,) if name == "codebook" else ()), embedding=embedding)
  check_start(tied, tolerance(name))


@pytest.mark.parametrize("name", HEADS)
def test_logits_begin_with_variance_one(name):
  check_start(HEADS[name](), tolerance(name))


def check_start(head, tolerance):
  """Logits have variance 1 for hidden vectors of unit variance; the loss is then log V + 1/2."""

  @jax.jit
  def start(hidden, tokens):
    variables = head.init(jax.random.key(1), hidden)
    log_prob = head.apply(variables, hidden, tokens, method="log_prob")
    return jnp.var(head.apply(variables, hidden, method="logits")), -log_prob.mean()

  variance, loss = map(float, start(HIDDEN, TOKENS))
  assert variance == pytest.approx(1, rel=tolerance)
  # 512 independent scores of variance 1: a standard error of 0.044.
  assert loss == pytest.approx(math.log(V) + variance / 2, abs=0.15)


@pytest.mark.parametrize("name", FACTORED)
def test_factors_begin_with_scores_of_variance_one(name):
  made, expected = FACTORED[name]
  head = made()

  @jax.jit
  def loss(hidden, tokens):
    variables = head.init(jax.random.key(0), hidden)
    return -head.apply(variables, hidden, tokens, method="log_prob").mean()

  assert loss(HIDDEN, TOKENS) == pytest.approx(expected, abs=0.2)
