"""The heads of the comparison as rows of a study.

Every row is trained from scratch, after a tuning over the same values on the validation split, its
own or that of another row. Rows that begin with vectors of contexts all begin with the same ones.
"""

import dataclasses
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from flax import linen as nn

from experiments.studies.comparison.compressed import InFile, InMemory
from vqjax import DenseEmbedding, Head, assign, convert, heads
from vqjax.assign import trees
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment
from vqjax.lab.starting_points import Distilled, FromTeacher
from vqjax.lab.study import Derived, Row
from vqjax.lab.study.tuning import stretched

V = FROM_TOKENIZER


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Sizes of the heads for one vocabulary and width.

  Those of `small_codes`, `product`, `residual` and `rank` give heads of at most 1/16 of the dense
  head's bytes.

  Attributes:
    dim: width, D.
    codes: K of the larger codebook.
    small_codes: K of the smaller one.
    product: (K, M) of the product head.
    residual: (K, R) of the residual codebook.
    rank: rank of the low-rank head.
    cutoffs: cutoffs of the adaptive softmax.
    classes: classes of the class-based head.
    mixture: (M, width of the table) of the mixture with at most the parameters of the dense head.
    vectors: seed -> the vectors of contexts that rows begin with.
    seen: number of different tokens of the training text, where a row needs it.
  """

  dim: int
  codes: int
  small_codes: int
  product: tuple[int, int]
  residual: tuple[int, int]
  rank: int
  cutoffs: tuple[int, int]
  classes: int
  mixture: tuple[int, int]
  vectors: Callable[[int], convert.ContextVectors] = convert.ContextVectors
  seen: int = 0


@dataclasses.dataclass(frozen=True)
class Trained:
  """A head that is trained, and how it begins.

  Attributes:
    label: name in tables.
    head: () -> the head, with an embedding of its own where it is tied.
    start: seed -> `Experiment.init_from`.
    teacher: the row whose trained model of the same seed it is distilled from; "": none.
    times: how often the steps of the study are trained.
  """

  label: str
  head: Callable[[], Head]
  start: Callable[[int], Any] = lambda seed: None
  teacher: str = ""
  times: int = 1

  def row(self, tuned_as: str, seeds: int | None) -> Row:
    """The row of a study."""
    return Row(self.made, self.label, tuned_as=tuned_as, seeds=seeds)

  def made(self, base: Experiment, run: Any) -> Experiment:
    """The experiment, of the base and of the runs of other rows."""
    head, start, train = self.head(), self.start(base.seed), base.train
    embedding = getattr(head, "embedding", None) or base.model.embedding
    model: nn.Module = base.model.clone(head=head, embedding=embedding)
    if self.times > 1:
      train = stretched(train, Fraction(self.times))
    if self.teacher:
      teacher, folder = run(self.teacher)
      model, start = Distilled(model, teacher.model), FromTeacher(folder, start)
      train = dataclasses.replace(train, trainable=("student",))
    return dataclasses.replace(base, model=model, init_from=start, train=train)


def rows(
  sizes: Sizes,
  names: Iterable[str],
  headline: Iterable[str] = (),
  tuned_as: dict[str, str] | None = None,
) -> dict[str, Row | Derived]:
  """Rows of a study by their names.

  Args:
    sizes: sizes of the heads.
    names: the rows, each after those that it begins from; "NAME-file" and "NAME-memory" are the
      trained tables of NAME, compressed.
    headline: rows with all seeds of the study; the others have one.
    tuned_as: row -> the row whose tuning it has, in place of its own.
  """
  known, found, shared = _trained(sizes), {}, tuned_as or {}
  for name in names:
    of, _, form = name.rpartition("-")
    if form in ("file", "memory"):
      kind = {"file": InFile, "memory": InMemory}[form]
      found[name] = kind(of, label=f"{known[of].label}, in {'a ' * (form == 'file')}{form}")
    else:
      found[name] = known[name].row(shared.get(name, ""), None if name in headline else 1)
  return found


def _trained(s: Sizes) -> dict[str, Trained]:
  """All heads that are trained."""
  d = s.dim
  dense = lambda: heads.DenseHead(V, d, use_bias=True)
  tied = lambda: heads.DenseHead(V, d, use_bias=True, embedding=DenseEmbedding(V, d))
  contexts = lambda target: lambda seed: starting_points.FromVectors(s.vectors(seed), target(seed))
  # A bias of its own for each token, which begins at the unigrams.
  with_unigrams = lambda start: lambda seed: starting_points.Unigrams(start=start(seed))
  to_dense = with_unigrams(contexts(lambda seed: convert.ToDense()))
  to_product = with_unigrams(contexts(lambda seed: convert.ToProduct(power=0.5, seed=seed)))
  to_codes = lambda alone: with_unigrams(
    contexts(lambda seed: convert.ToCodebook(convert.KMeans(power=0.5, alone=alone, seed=seed)))
  )
  to_residual = with_unigrams(
    contexts(lambda seed: convert.ToResidual(convert.KMeans(power=0.5, alone=0.25, seed=seed)))
  )
  to_low_rank = with_unigrams(contexts(lambda seed: convert.ToLowRank()))
  exchange = with_unigrams(lambda seed: starting_points.Mapped(convert.Brown(token_bias=True)))
  codebook = lambda codes: lambda: heads.CodebookHead(V, d, codes, token_bias=True)
  ordered = lambda: heads.GroupedHead(V, d, use_bias=True, order_init=convert.in_order)
  # All codes but one hold a token each.
  alone = lambda seed: convert.ContextKMeans(alone=1 - 0.5 / (s.seen + 1), seed=seed)
  clusters = lambda seed: convert.ByClusters(convert.ContextKMeans(seed=seed))
  product = lambda: heads.ProductHead(V, d, *s.product, token_bias=True)
  learned = lambda: heads.LearnedProductHead(V, d, *s.product, token_bias=True)
  to_learned = with_unigrams(
    contexts(lambda seed: convert.ToLearnedProduct(convert.ToProduct(power=0.5, seed=seed)))
  )
  residual = lambda: heads.ResidualCodebookHead(V, d, *s.residual, token_bias=True)
  unigrams = lambda seed: starting_points.Unigrams()
  full, its = "full softmax, from contexts", "tied full softmax, from contexts"
  distilled = f"{its}, distilled"
  learned_label = "product codes, from contexts, learned"
  sigsoftmax = lambda: heads.DenseHead(V, d, use_bias=True, output=heads.SigSoftmax())
  return {
    "dense-contexts": Trained(full, dense, to_dense),
    "tied": Trained("tied full softmax", tied),
    "tied-contexts": Trained(its, tied, to_dense),
    "tied-distilled": Trained(distilled, tied, to_dense, teacher="tied-contexts"),
    "tied-longer": Trained(f"{its}, twice the steps", tied, to_dense, times=2),
    "dense": Trained("full softmax", dense),
    "mixture": Trained(
      f"mixture of {s.mixture[0]} softmaxes",
      lambda: heads.MixtureHead(V, d, *s.mixture, use_bias=True),
    ),
    "sigsoftmax": Trained("sigsoftmax", sigsoftmax),
    "product": Trained("product codes, from contexts", product, to_product),
    "product-random": Trained("product codes without contexts", product, unigrams),
    "product-learned": Trained(learned_label, learned, to_learned),
    "product-distilled": Trained(
      f"{learned_label}, distilled", learned, to_learned, teacher="dense-contexts"
    ),
    "dense-distilled": Trained(f"{full}, distilled", dense, to_dense, teacher="dense-contexts"),
    "residual": Trained("codebook and low rank, from contexts", residual, to_residual),
    "codebook": Trained(f"codebook, K={s.codes}, from contexts", codebook(s.codes), to_codes(0.5)),
    "codebook-exchange": Trained(
      f"codebook, K={s.small_codes}, exchange on bigrams", codebook(s.small_codes), exchange
    ),
    "sampled": Trained(
      "sampled softmax in training", lambda: heads.SampledSoftmaxHead(V, d, samples=s.codes)
    ),
    "adaptive": Trained("adaptive softmax", lambda: heads.AdaptiveHead(V, d, s.cutoffs)),
    "low-rank": Trained(
      f"low rank, r={s.rank}, from contexts",
      lambda: heads.LowRankHead(V, d, s.rank, use_bias=True),
      to_low_rank,
    ),
    "class-based": Trained(
      "class-based", lambda: heads.ClassBasedHead(V, d, s.classes, assign.contiguous)
    ),
    "hierarchical": Trained("tree", lambda: heads.HierarchicalHead(V, d, zipf_tree)),
    "grouped": Trained("grouped", lambda: heads.GroupedHead(V, d, use_bias=True)),
    "grouped-frequency": Trained(
      "grouped by frequency", ordered, lambda seed: starting_points.Regrouped(convert.ByFrequency())
    ),
    "grouped-clusters": Trained(
      "grouped by clusters of contexts",
      ordered,
      lambda seed: starting_points.Regrouped(clusters(seed)),
    ),
    "unshared": Trained(
      "grouped, unshared", lambda: heads.UnsharedGroupedHead(V, d, use_bias=True)
    ),
    "dense-unigram": Trained("full softmax, bias from unigrams", dense, unigrams),
    "seen": Trained(
      "full softmax of the tokens in the training text",
      codebook(s.seen + 1),
      lambda seed: starting_points.Mapped(alone(seed)),
    ),
  }


def zipf_tree(vocab: int) -> trees.BinaryTree:
  """Huffman's tree of a frequency-sorted vocabulary under Zipf's law."""
  return trees.Huffman((10**9 // np.arange(1, vocab + 1)).astype(np.int64))(vocab)
