"""Which heads do the VQ-Logits tables compare, and how does each come to be?"""

import dataclasses
from collections.abc import Callable

import numpy as np

from experiments.studies.vq_logits.settings import Setting
from vqjax import (
  AdaptiveHead,
  ClassBasedHead,
  CodebookEmbedding,
  CodebookHead,
  DenseEmbedding,
  DenseHead,
  Head,
  HierarchicalHead,
  LearnedCodebookHead,
  LearnedProductHead,
  LowRankHead,
  ProductHead,
  ResidualCodebookHead,
  SampledSoftmaxHead,
  assign,
  convert,
)
from vqjax.assign import trees
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.training import FromRun, Recluster

V = FROM_TOKENIZER


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a table.

  Attributes:
    name: of its run.
    label: what tables call it.
    make: (setting, seed) -> the experiment.
    needs: names of the rows whose runs it starts from.
    headline: whether it is run with every seed.
  """

  name: str
  label: str
  make: Callable[[Setting, int], Experiment]
  needs: tuple[str, ...] = ()
  headline: bool = False


def _dense(s: Setting, seed: int) -> Experiment:
  return s.run("dense", s.model(s.dense_head()), s.train, seed)


def _control(s: Setting, seed: int) -> Experiment:
  start = FromRun(s.path("dense", seed))
  return s.run("full", s.model(s.dense_head()), s.fine_tune, seed, init_from=start)


def _scratch(name: str, label: str, head: Callable[[Setting], Head], init_from=None, **more) -> Row:
  """As many steps as a dense model and its fine-tuning together."""
  make = lambda s, seed: s.run(name, s.model(head(s)), s.whole, seed, init_from=init_from)
  return Row(name, label, make, **more)


def _converted(
  name: str, label: str, head: Callable[[Setting], Head], target, *, headline=False, **options
) -> Row:
  """The dense model with another head, fine-tuned."""

  def make(s: Setting, seed: int) -> Experiment:
    folder = s.path("dense", seed)
    dense = _dense(s, seed)
    return conversion.converted(
      dense, folder, head(s), target, name=name, train=s.fine_tune, **options
    )

  return Row(name, label, make, ("dense",), headline)


def _codebook(codes: int, **fields) -> Callable[[Setting], Head]:
  return lambda s: CodebookHead(V, s.dim, codes, dtype=s.dtype, **fields)


BODY = "embedding", "position", "blocks", "final_norm"
"""Everything but the head."""


def all_rows(s: Setting) -> list[Row]:
  """Every row of a setting."""
  return [*paper_rows(s), *(beyond(s) if s.beyond else ())]


def paper_rows(s: Setting) -> list[Row]:
  """What the paper has: Tables 1, 2, 6, 7, 9 and 10."""
  k = s.ablation_codes
  kmeans = convert.KMeans()
  as_paper = convert.ToCodebook(kmeans)
  mapped = lambda mapping: convert.ToCodebook(mapping)
  rows = [
    Row("dense", "Full softmax, before fine-tuning", _dense, headline=True),
    Row("full", "Full softmax", _control, ("dense",), headline=True),
    _scratch(
      "adaptive", "Adaptive softmax", lambda s: AdaptiveHead(V, s.dim, s.cutoffs, dtype=s.dtype)
    ),
    _scratch("low-rank", f"Low-rank ({s.rank})", lambda s: LowRankHead(V, s.dim, s.rank)),
  ]
  if s.beyond:
    control = lambda s: s.dense_head()
    rows.insert(2, _scratch("full-scratch", "Full softmax, from scratch", control, headline=True))
  for codes in s.codes:
    label = f"VQ-Logits (K={codes})"
    headline = codes == s.codes[-1]
    name = f"vq-{codes}"
    rows.append(_converted(name, label, _codebook(codes), as_paper, headline=headline))
  if not s.ablations:
    return rows
  return [
    *rows,
    _converted(f"vq-{k}-fixed", "k-means init, fixed C", _codebook(k), as_paper, scope=BODY),
    _scratch(
      f"vq-{k}-scratch",
      "random init, learned C",
      _codebook(k),
      conversion.Mapped(convert.KMeans(inputs=True)),
    ),
    _converted(
      f"vq-{k}-inputs",
      "k-means on input embeddings",
      _codebook(k),
      mapped(convert.KMeans(inputs=True)),
    ),
    _converted(f"vq-{k}-bins", "frequency bins", _codebook(k), mapped(convert.FrequencyBins())),
    _converted(
      f"vq-{k}-random", "random assignment", _codebook(k), mapped(convert.Fixed(assign.Random(0)))
    ),
    _converted(f"vq-{k}-head", "C and head layers", _codebook(k), as_paper, scope=conversion.HEAD),
    _converted(f"vq-{k}-codebook", "only C", _codebook(k), as_paper, scope=conversion.CODEBOOK),
    _tied(k),
  ]


def _tied(k: int) -> Row:
  """Input embeddings that are the tokens' codes (Section 6)."""

  def make(s: Setting, seed: int) -> Experiment:
    embedding = CodebookEmbedding(V, s.dim, k, assign.FrequentAlone())
    head = CodebookHead(V, s.dim, k, embedding=embedding, token_bias=True, dtype=s.dtype)
    return s.run(f"vq-{k}-tied", s.model(head, embedding), s.whole, seed)

  return Row(f"vq-{k}-tied", "tied to the input embedding, + bias", make)


def beyond(s: Setting) -> list[Row]:
  """What the paper does not have."""
  return [*_mappings(s), *_trainings(s), *_scratch_codes(s), *_other_heads(), *_baselines()]


WEIGHTED = convert.KMeans(power=1.0)
ALONE = convert.KMeans(power=1.0, alone=0.5)
BROWN = convert.Brown(token_bias=True)


def _mappings(s: Setting) -> list[Row]:
  """Which token sits on which code, with and without a token bias."""
  k, to = s.codes[-1], convert.ToCodebook
  bias = _codebook(k, token_bias=True)
  small = s.small_codes
  mass = convert.FrequencyBins(equal_mass=True)
  return [
    _converted(f"bias-{k}", f"K={k}, k-means, + bias", bias, to(convert.KMeans())),
    _converted(f"weighted-{k}", f"K={k}, weighted k-means", _codebook(k), to(WEIGHTED)),
    _converted(f"weighted-bias-{k}", f"K={k}, weighted k-means, + bias", bias, to(WEIGHTED)),
    _converted(f"alone-{k}", f"K={k}, half alone, weighted tail", _codebook(k), to(ALONE)),
    _converted(f"alone-bias-{k}", f"K={k}, half alone, + bias", bias, to(ALONE)),
    _converted(f"balanced-bias-{k}", f"K={k}, balanced, + bias", bias, to(convert.Balanced())),
    _converted(f"brown-bias-{k}", f"K={k}, exchange on bigrams, + bias", bias, to(BROWN)),
    _converted(
      f"brown-bias-{small}",
      f"K={small}, exchange on bigrams, + bias",
      _codebook(small, token_bias=True),
      to(BROWN),
    ),
    _converted(f"mass-bias-{k}", f"K={k}, bins of equal mass, + bias", bias, to(mass)),
  ]


def _trainings(s: Setting) -> list[Row]:
  """How a codebook is trained: a teacher, a commitment, a mapping that moves or is learned."""
  k, to, steps = s.codes[-1], convert.ToCodebook, s.fine_tune.steps
  bias = _codebook(k, token_bias=True)
  return [
    _converted(
      f"distilled-{k}", f"K={k}, half alone, + bias, distilled", bias, to(ALONE), distillation=1.0
    ),
    _converted(
      f"commitment-{k}",
      f"K={k}, half alone, + bias, commitment 0.25",
      _codebook(k, token_bias=True, commitment=0.25),
      to(ALONE),
    ),
    _reclustered(k, WEIGHTED, steps),
    _converted(
      f"gumbel-{k}",
      f"K={k}, weighted, + bias, learned mapping",
      lambda s: LearnedCodebookHead(V, s.dim, k, token_bias=True, anneal=steps * 2 // 3),
      convert.ToLearnedCodebook(WEIGHTED),
    ),
  ]


def _product(s: Setting) -> Head:
  return ProductHead(V, s.dim, *s.product, token_bias=True)


def _residual(s: Setting) -> Head:
  return ResidualCodebookHead(V, s.dim, *s.residual, token_bias=True)


def _scratch_codes(s: Setting) -> list[Row]:
  """Codes by the tokens' neighbours in the text, trained from scratch."""
  k, contexts = s.codes[-1], conversion.MappedProduct(convert.ToProduct(power=0.5))
  label = "product codes of contexts, + bias, from scratch"
  return [
    _scratch("product-scratch", label, _product, contexts, headline=True),
    *(
      _scratch(
        f"product-scratch-{codes}x{subspaces}",
        f"product codes of contexts ({codes} x {subspaces}), + bias, from scratch",
        lambda s, c=codes, m=subspaces: ProductHead(V, s.dim, c, m, token_bias=True),
        contexts,
      )
      for codes, subspaces in s.other_products
    ),
    _scratch(
      "residual-scratch",
      "codebook of contexts and a low-rank part, + bias, from scratch",
      _residual,
      conversion.Mapped(convert.ContextKMeans(alone=0.25)),
    ),
    _scratch(
      f"contexts-scratch-{k}",
      f"K={k}, half alone, contexts, + bias, from scratch",
      _codebook(k, token_bias=True),
      conversion.Mapped(convert.ContextKMeans(alone=0.5)),
    ),
    _scratch(
      f"brown-scratch-{s.small_codes}",
      f"K={s.small_codes}, exchange on bigrams, + bias, from scratch",
      _codebook(s.small_codes, token_bias=True),
      conversion.Mapped(BROWN),
    ),
  ]


def _other_heads() -> list[Row]:
  """Heads other than the codebook, converted from the dense model."""
  learned = lambda s: LearnedProductHead(V, s.dim, *s.product, token_bias=True)
  to, label = convert.ToProduct(), "product codes, + bias"
  quarter = convert.KMeans(power=1.0, alone=0.25)
  return [
    _converted("product", label, _product, to),
    _converted("product-distilled", f"{label}, distilled", _product, to, distillation=1.0),
    _converted("product-learned", "product codes, learned", learned, convert.ToLearnedProduct()),
    _converted("residual", "codebook and a low-rank part", _residual, convert.ToResidual(quarter)),
    _converted(
      "low-rank-converted",
      "low rank, converted",
      lambda s: LowRankHead(V, s.dim, s.rank),
      convert.ToLowRank(),
    ),
  ]


def _baselines() -> list[Row]:
  """Heads that do not share rows."""
  sampled = lambda s: SampledSoftmaxHead(V, s.dim, samples=s.codes[-1])
  tree = lambda s: HierarchicalHead(V, s.dim, zipf_tree)
  classes = lambda s: ClassBasedHead(V, s.dim, s.classes, assign.contiguous)
  return [
    _tied_dense(),
    _scratch("sampled", "sampled softmax in training", sampled),
    _scratch("hierarchical", "hierarchical softmax", tree),
    _scratch("class-based", "class-based, two steps", classes),
  ]


def zipf_tree(vocab: int) -> trees.Tree:
  """Huffman's tree of tokens that come in order of frequency, by Zipf's law."""
  return trees.Huffman((10**9 // np.arange(1, vocab + 1)).astype(np.int64))(vocab)


def _tied_dense() -> Row:
  def make(s: Setting, seed: int) -> Experiment:
    embedding = DenseEmbedding(V, s.dim, dtype=s.dtype)
    head = DenseHead(V, s.dim, embedding=embedding, dtype=s.dtype)
    return s.run("tied", s.model(head, embedding), s.whole, seed)

  return Row("tied", "tied full softmax", make)


def _reclustered(k: int, mapping: convert.Mapping, steps: int) -> Row:
  """Tokens move to better codes every sixth of the fine-tuning, until its two thirds."""

  def make(s: Setting, seed: int) -> Experiment:
    head = CodebookHead(V, s.dim, k, token_bias=True, dtype=s.dtype)
    every = max(1, steps // 6)
    found = conversion.converted(
      *(_dense(s, seed), s.path("dense", seed), head, convert.ToCodebook(mapping)),
      name=f"reclustered-{k}",
      train=s.fine_tune,
    )
    return dataclasses.replace(found, recluster=Recluster(every, 4 * every, s.recluster_tokens))

  label = f"K={k}, weighted, + bias, re-clustered"
  return Row(f"reclustered-{k}", label, make, ("dense",))
