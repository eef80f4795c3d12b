"""Rows of the VQ-Logits study: heads, and how each of them is trained."""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.studies.vq_logits.recluster import Recluster
from experiments.studies.vq_logits.settings import VQLogitsSetting
from vqjax import Head, assign, convert, embeddings, heads
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.training import FromRun

V = FROM_TOKENIZER
WITHOUT_HEAD = "embedding", "position", "blocks", "final_norm"
"""Scope of fine-tuning: all parameters except those of the head."""


@dataclasses.dataclass(frozen=True)
class VQLogitsRow:
  """A row of the tables of one setting.

  Attributes:
    name: name of the row; its runs are called "SETTING/NAME".
    label: the row's label in tables.
    head: the head that is measured.
    experiment: seed -> the experiment.
    needs: names of the rows whose runs it starts from; empty for training from scratch.
    headline: whether it is run with every seed of its setting.
  """

  name: str
  label: str
  head: Head
  experiment: Callable[[int], Experiment]
  needs: tuple[str, ...] = ()
  headline: bool = False


def rows(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Every row of a setting, each after those that it needs."""
  if s.further is None:
    return paper_rows(s)
  return [*paper_rows(s), *_codebooks(s), *_other_heads(s)]


def _scratch(
  s: VQLogitsSetting,
  name: str,
  label: str,
  head: Head,
  init_from: Any = None,
  *,
  headline: bool = False,
) -> VQLogitsRow:
  """A head trained from scratch for the steps of a dense run and its fine-tuning."""
  experiment = lambda seed: s.run(name, head, s.whole, seed, init_from=init_from)
  return VQLogitsRow(name, label, head, experiment, headline=headline)


def _converted(
  s: VQLogitsSetting,
  name: str,
  label: str,
  head: Head,
  target: Any,
  *,
  headline: bool = False,
  recluster: Recluster | None = None,
  **options: Any,
) -> VQLogitsRow:
  """A head computed from the dense run's weights, then fine-tuned."""

  def experiment(seed: int) -> Experiment:
    dense = dataclasses.replace(s.dense, seed=seed)
    folder = s.path("dense", seed)
    made = starting_points.converted(
      dense, folder, head, target, name=name, train=s.fine_tune, **options
    )
    return dataclasses.replace(made, recluster=recluster)

  return VQLogitsRow(name, label, head, experiment, needs=("dense",), headline=headline)


def paper_rows(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """The rows of the paper's Tables 1, 2, 6, 7, 9 and 10 and of its Section 6."""
  dense = heads.DenseHead(V, s.dim, dtype=s.dtype)
  before = lambda seed: dataclasses.replace(s.dense, seed=seed)
  tuned = lambda seed: s.run(
    "full", dense, s.fine_tune, seed, init_from=FromRun(s.path("dense", seed))
  )
  listed = [
    VQLogitsRow("dense", "Full softmax, before fine-tuning", dense, before, headline=True),
    VQLogitsRow("full", "Full softmax", dense, tuned, needs=("dense",), headline=True),
    _scratch(s, "full-scratch", "Full softmax, from scratch", dense, headline=True),
  ]
  adaptive = heads.AdaptiveHead(V, s.dim, s.cutoffs, dtype=s.dtype)
  listed += [
    _scratch(s, "adaptive", "Adaptive softmax", adaptive),
    _scratch(s, "low-rank", f"Low-rank ({s.rank})", heads.LowRankHead(V, s.dim, s.rank)),
  ]
  to = convert.ToCodebook
  as_paper = to(convert.KMeans())
  for codes in s.codes:
    head = heads.CodebookHead(V, s.dim, codes, dtype=s.dtype)
    headline = codes == s.codes[-1]
    listed += [
      _converted(s, f"vq-{codes}", f"VQ-Logits (K={codes})", head, as_paper, headline=headline)
    ]
  if not s.ablations:
    return listed

  k = s.codes[0]
  head = heads.CodebookHead(V, s.dim, k, dtype=s.dtype)
  inputs = convert.KMeans(inputs=True)
  codebook = lambda kind, label, target, **options: _converted(
    s, f"vq-{k}-{kind}", label, head, target, **options
  )
  tied = heads.CodebookHead(
    V,
    s.dim,
    k,
    embedding=embeddings.CodebookEmbedding(V, s.dim, k, assign.FrequentAlone()),
    token_bias=True,
    dtype=s.dtype,
  )
  return [
    *listed,
    codebook("fixed", "k-means init, fixed C", as_paper, scope=WITHOUT_HEAD),
    _scratch(s, f"vq-{k}-scratch", "random init, learned C", head, starting_points.Mapped(inputs)),
    codebook("inputs", "k-means on input embeddings", to(inputs)),
    codebook("bins", "frequency bins", to(convert.FrequencyBins())),
    codebook("random", "random assignment", to(convert.Fixed(assign.Random(0)))),
    codebook("head", "C and head layers", as_paper, scope=starting_points.HEAD),
    codebook("codebook", "only C", as_paper, scope=starting_points.CODEBOOK),
    _scratch(s, f"vq-{k}-tied", "tied to the input embedding, + bias", tied),
  ]


WEIGHTED = convert.KMeans(power=1.0)
ALONE = convert.KMeans(power=1.0, alone=0.5)
BROWN = convert.Brown(token_bias=True)


def _codebooks(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Other assignments of tokens to codes, and other ways to train a codebook."""
  k, small, to = s.codes[-1], s.further.small_codes, convert.ToCodebook
  plain = heads.CodebookHead(V, s.dim, k, dtype=s.dtype)
  bias = heads.CodebookHead(V, s.dim, k, token_bias=True, dtype=s.dtype)
  small_bias = heads.CodebookHead(V, s.dim, small, token_bias=True, dtype=s.dtype)
  commitment = heads.CodebookHead(V, s.dim, k, token_bias=True, commitment=0.25, dtype=s.dtype)
  steps = s.fine_tune.steps
  every = max(1, steps // 6)
  learned = heads.LearnedCodebookHead(V, s.dim, k, token_bias=True, anneal=steps * 2 // 3)
  row = lambda name, label, *arguments, **options: _converted(
    s, f"{name}-{k}", f"K={k}, {label}", *arguments, **options
  )
  return [
    row("bias", "k-means, + bias", bias, to(convert.KMeans())),
    row("weighted", "weighted k-means", plain, to(WEIGHTED)),
    row("weighted-bias", "weighted k-means, + bias", bias, to(WEIGHTED)),
    row("alone", "half alone, weighted tail", plain, to(ALONE)),
    row("alone-bias", "half alone, + bias", bias, to(ALONE)),
    row("balanced-bias", "balanced, + bias", bias, to(convert.Balanced())),
    row("brown-bias", "exchange on bigrams, + bias", bias, to(BROWN)),
    _converted(
      s, f"brown-bias-{small}", f"K={small}, exchange on bigrams, + bias", small_bias, to(BROWN)
    ),
    row(
      "mass-bias", "bins of equal mass, + bias", bias, to(convert.FrequencyBins(equal_mass=True))
    ),
    row("distilled", "half alone, + bias, distilled", bias, to(ALONE), distillation=1.0),
    row("commitment", "half alone, + bias, commitment 0.25", commitment, to(ALONE)),
    row(
      "reclustered",
      "weighted, + bias, re-clustered",
      bias,
      to(WEIGHTED),
      # Tokens move in the first two thirds of the fine-tuning; then the codebook settles.
      recluster=Recluster(every, 4 * every, s.further.recluster_tokens),
    ),
    row(
      "gumbel",
      "weighted, + bias, learned mapping",
      learned,
      convert.ToLearnedCodebook(WEIGHTED),
    ),
  ]


def _other_heads(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Heads other than the codebook."""
  product = heads.ProductHead(V, s.dim, *s.further.product, token_bias=True)
  learned = heads.LearnedProductHead(V, s.dim, *s.further.product, token_bias=True)
  residual = heads.ResidualCodebookHead(V, s.dim, *s.further.residual, token_bias=True)
  quarter = convert.KMeans(power=1.0, alone=0.25)
  low_rank = heads.LowRankHead(V, s.dim, s.rank)
  to, label = convert.ToProduct(), "product codes, + bias"
  return [
    _converted(s, "product", label, product, to),
    _converted(s, "product-distilled", f"{label}, distilled", product, to, distillation=1.0),
    _converted(s, "product-learned", "product codes, learned", learned, convert.ToLearnedProduct()),
    _converted(
      s, "residual", "codebook and a low-rank part", residual, convert.ToResidual(quarter)
    ),
    _converted(s, "low-rank-converted", "low rank, converted", low_rank, convert.ToLowRank()),
  ]
