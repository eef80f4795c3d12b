"""Rows of the VQ-Logits study: heads, and how each of them is trained."""

import dataclasses
import functools
from typing import Any, NamedTuple

from experiments.studies.vq_logits.recluster import Recluster
from experiments.studies.vq_logits.settings import VQLogitsSetting
from vqjax import Head, assign, convert, heads
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.training import FromRun

V = FROM_TOKENIZER
WITHOUT_HEAD = "embedding", "position", "blocks", "final_norm"
"""Scope of fine-tuning: all parameters except those of the head."""
WEIGHTED = convert.KMeans(power=1.0)
ALONE = convert.KMeans(power=1.0, alone=0.5)
BROWN = convert.Brown(token_bias=True)


class VQLogitsRow(NamedTuple):
  """A row of the tables of one setting: its label there, its run, and the rows it starts from."""

  label: str
  experiment: Experiment
  needs: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """The row's name; its runs are called "SETTING/NAME"."""
    return self.experiment.name


def rows(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Every row of a setting, each after those that it needs."""
  ablations = _ablations(s) if s.ablations else []
  return main_rows(s) + ablations + ([*_codebooks(s), *_other_heads(s)] if s.further else [])


def _scratch(
  s: VQLogitsSetting, name: str, label: str, head: Head, init_from: Any = None
) -> VQLogitsRow:
  """A head trained from scratch for the steps of a dense run and its fine-tuning."""
  steps = s.dense.train.steps + s.fine_tune.steps
  train = dataclasses.replace(s.dense.train, steps=steps, eval_every=steps, save_every=steps)
  own = {"name": name, "model": s.dense.model.clone(head=head), "train": train}
  return VQLogitsRow(label, dataclasses.replace(s.dense, init_from=init_from, **own))


def _converted(
  s: VQLogitsSetting,
  name: str,
  label: str,
  head: Head,
  target: Any,
  recluster: Recluster | None = None,
  **options: Any,
) -> VQLogitsRow:
  """A head computed from the dense run's weights, then fine-tuned."""
  options |= {"name": name, "train": s.fine_tune}
  made = starting_points.converted(s.dense, s.path("dense"), head, target, **options)
  return VQLogitsRow(label, dataclasses.replace(made, recluster=recluster), needs=("dense",))


def main_rows(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """The rows of the paper's Tables 1, 9 and 10."""
  start = FromRun(s.path("dense"))
  tuned = dataclasses.replace(s.dense, name="full", train=s.fine_tune, init_from=start)
  full, as_paper = s.dense.model.head, convert.ToCodebook(convert.KMeans())
  adaptive = heads.AdaptiveHead(V, s.dim, s.cutoffs, dtype=s.dtype)
  low_rank = heads.LowRankHead(V, s.dim, s.rank)
  codebooks = {k: heads.CodebookHead(V, s.dim, k, dtype=s.dtype) for k in s.codes}
  return [
    VQLogitsRow("Full softmax, before fine-tuning", s.dense),
    VQLogitsRow("Full softmax", tuned, needs=("dense",)),
    _scratch(s, "full-scratch", "Full softmax, from scratch", full),
    _scratch(s, "adaptive", "Adaptive softmax", adaptive),
    _scratch(s, "low-rank", f"Low-rank ({s.rank})", low_rank),
    *(
      _converted(s, f"vq-{k}", f"VQ-Logits (K={k})", head, as_paper)
      for k, head in codebooks.items()
    ),
  ]


def _ablations(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """The rows of the paper's Tables 2, 6 and 7, which vary its smallest codebook."""
  k, to = s.codes[0], convert.ToCodebook
  head = heads.CodebookHead(V, s.dim, k, dtype=s.dtype)
  inputs, as_paper = convert.KMeans(inputs=True), to(convert.KMeans())
  row = lambda kind, label, *target, **options: _converted(
    s, f"vq-{k}-{kind}", label, head, *target, **options
  )
  return [
    row("fixed", "k-means init, fixed C", as_paper, scope=WITHOUT_HEAD),
    _scratch(s, f"vq-{k}-scratch", "random init, learned C", head, starting_points.Mapped(inputs)),
    row("inputs", "k-means on input embeddings", to(inputs)),
    row("bins", "frequency bins", to(convert.FrequencyBins())),
    row("random", "random assignment", to(convert.Fixed(assign.Random(0)))),
    row("head", "C and head layers", as_paper, scope=starting_points.HEAD),
    row("codebook", "only C", as_paper, scope=starting_points.CODEBOOK),
  ]


def _codebooks(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Other assignments of tokens to codes, and other ways to train a codebook."""
  k, steps, to = s.codes[-1], s.fine_tune.steps, convert.ToCodebook
  codebook = functools.partial(heads.CodebookHead, V, s.dim, dtype=s.dtype)
  plain, bias, small = codebook(k), codebook(k, token_bias=True), codebook(460, token_bias=True)
  commitment = bias.clone(commitment=0.25)
  learned = heads.LearnedCodebookHead(V, s.dim, k, token_bias=True, anneal=steps * 2 // 3)
  mass, to_learned = convert.FrequencyBins(equal_mass=True), convert.ToLearnedCodebook(WEIGHTED)
  # Tokens move in the first two thirds of the fine-tuning; then the codebook settles.
  every = max(1, steps // 6)
  recluster = Recluster(every, 4 * every)
  row = lambda name, label, head, *target, **options: _converted(
    s, f"{name}-{head.codes}", f"K={head.codes}, {label}", head, *target, **options
  )
  return [
    row("bias", "k-means, + bias", bias, to(convert.KMeans())),
    row("weighted", "weighted k-means", plain, to(WEIGHTED)),
    row("weighted-bias", "weighted k-means, + bias", bias, to(WEIGHTED)),
    row("alone", "half alone, weighted tail", plain, to(ALONE)),
    row("alone-bias", "half alone, + bias", bias, to(ALONE)),
    row("balanced-bias", "balanced, + bias", bias, to(convert.Balanced())),
    row("brown-bias", "exchange on bigrams, + bias", bias, to(BROWN)),
    row("brown-bias", "exchange on bigrams, + bias", small, to(BROWN)),
    row("mass-bias", "bins of equal mass, + bias", bias, to(mass)),
    row("distilled", "half alone, + bias, distilled", bias, to(ALONE), distillation=1.0),
    row("commitment", "half alone, + bias, commitment 0.25", commitment, to(ALONE)),
    row("reclustered", "weighted, + bias, re-clustered", bias, to(WEIGHTED), recluster),
    row("gumbel", "weighted, + bias, learned mapping", learned, to_learned),
  ]


def _other_heads(s: VQLogitsSetting) -> list[VQLogitsRow]:
  """Heads other than the codebook, with at most 1/16 of the dense head's bytes."""
  product = heads.ProductHead(V, s.dim, 224, 16, token_bias=True)
  learned = heads.LearnedProductHead(V, s.dim, 224, 16, token_bias=True)
  residual = heads.ResidualCodebookHead(V, s.dim, 200, 4, token_bias=True)
  low_rank = heads.LowRankHead(V, s.dim, s.rank)
  to, label = convert.ToProduct(), "product codes, + bias"
  quarter = convert.ToResidual(convert.KMeans(power=1.0, alone=0.25))
  row = functools.partial(_converted, s)
  return [
    row("product", label, product, to),
    row("product-distilled", f"{label}, distilled", product, to, distillation=1.0),
    row("product-learned", "product codes, learned", learned, convert.ToLearnedProduct()),
    row("residual", "codebook and a low-rank part", residual, quarter),
    row("low-rank-converted", "low rank, converted", low_rank, convert.ToLowRank()),
  ]
