"""VQ-Logits on Penn Treebank, with heads and codes that the paper does not have.

vqjax study experiments/studies/vq_logits/ptb.py --out experiments/studies/vq_logits/ptb
"""

import functools

from configs.vq_logits import ptb
from experiments.studies.vq_logits.recluster import Recluster
from experiments.studies.vq_logits.rows import (
  V,
  converted,
  floors,
  main_rows,
  paper_tuning,
  repeated,
  small,
  small_tuning,
)
from vqjax import convert, heads
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import PennTreebank, WordTokenizer
from vqjax.lab.study import Row, Study

SIZES = {"codes": (256, 512, 1024), "cutoffs": (750, 3000)}
REPEATED = (
  *("dense", "full", "full-scratch", "adaptive", "vq-256", "vq-512", "vq-1024"),
  *("brown-bias-1024", "brown-bias-460", "product-learned"),
)
RANK = 7


def study() -> Study:
  """The study of the small decoder."""
  base = small(PennTreebank(), WordTokenizer(split=False), steps=1800)
  tuning = small_tuning(base, 900)
  rows = main_rows(base, tuning, rank=RANK, **SIZES)
  rows |= _codebooks(base, tuning) | _other_heads(base, tuning)
  return Study(base, repeated(rows, REPEATED), reference="full", measure=floors)


def paper() -> Study:
  """The study of the paper's decoder."""
  base = ptb.experiment()
  rows = main_rows(base, paper_tuning(base), rank=27, **SIZES)
  return Study(base, repeated(rows, REPEATED), reference="full", measure=floors)


def _codebooks(base: Experiment, tuning: Train) -> dict[str, Row]:
  """Other assignments of tokens to codes, and other ways to train a codebook."""
  dim, k, to = base.model.dim, SIZES["codes"][-1], convert.ToCodebook
  codebook = functools.partial(heads.CodebookHead, V, dim, dtype=base.model.dtype)
  plain, bias, small = codebook(k), codebook(k, token_bias=True), codebook(460, token_bias=True)
  anneal = tuning.steps * 2 // 3
  learned = heads.LearnedCodebookHead(V, dim, k, token_bias=True, anneal=anneal)
  weighted, alone = convert.KMeans(power=1.0), convert.KMeans(power=1.0, alone=0.5)
  mass, brown = convert.FrequencyBins(equal_mass=True), convert.Brown(token_bias=True)
  # Tokens move in the first two thirds of the fine-tuning; then the codebook settles.
  every = tuning.steps // 6
  recluster = Recluster(every, 4 * every)
  commitment = bias.clone(commitment=0.25)
  row = lambda label, head, *target, **options: converted(
    tuning, f"K={head.codes}, {label}", head, *target, **options
  )
  return {
    "bias-1024": row("k-means, + bias", bias, to(convert.KMeans())),
    "weighted-1024": row("weighted k-means", plain, to(weighted)),
    "weighted-bias-1024": row("weighted k-means, + bias", bias, to(weighted)),
    "alone-1024": row("half alone, weighted tail", plain, to(alone)),
    "alone-bias-1024": row("half alone, + bias", bias, to(alone)),
    "balanced-bias-1024": row("balanced, + bias", bias, to(convert.Balanced())),
    "brown-bias-1024": row("exchange on bigrams, + bias", bias, to(brown)),
    "brown-bias-460": row("exchange on bigrams, + bias", small, to(brown)),
    "mass-bias-1024": row("bins of equal mass, + bias", bias, to(mass)),
    "distilled-1024": row("half alone, + bias, distilled", bias, to(alone), distillation=1.0),
    "commitment-1024": row("half alone, + bias, commitment 0.25", commitment, to(alone)),
    "reclustered-1024": row("weighted, + bias, re-clustered", bias, to(weighted), recluster),
    "gumbel-1024": row(
      "weighted, + bias, learned mapping", learned, convert.ToLearnedCodebook(weighted)
    ),
  }


def _other_heads(base: Experiment, tuning: Train) -> dict[str, Row]:
  """Heads other than the codebook, with at most 1/16 of the dense head's bytes."""
  shape = V, base.model.dim
  product = heads.ProductHead(*shape, 224, 16, token_bias=True)
  learned = heads.LearnedProductHead(*shape, 224, 16, token_bias=True)
  residual = heads.ResidualCodebookHead(*shape, 200, 4, token_bias=True)
  low_rank = heads.LowRankHead(*shape, RANK)
  to, label = convert.ToProduct(), "product codes, + bias"
  quarter = convert.ToResidual(convert.KMeans(power=1.0, alone=0.25))
  row = functools.partial(converted, tuning)
  return {
    "product": row(label, product, to),
    "product-distilled": row(f"{label}, distilled", product, to, distillation=1.0),
    "product-learned": row("product codes, learned", learned, convert.ToLearnedProduct()),
    "residual": row("codebook and a low-rank part", residual, quarter),
    "low-rank-converted": row("low rank, converted", low_rank, convert.ToLowRank()),
  }
