"""Heads on one model and text, with one budget and one search space for all.

Every row of a setting is trained from scratch for the same number of steps, after a tuning over the
same search space on the validation split, its own or that of another row. Rows that begin with
vectors of contexts all begin with the same ones.
"""

import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from flax import linen as nn

from experiments.studies.comparison.compressed import InFile, InMemory, Method
from experiments.studies.comparison.manuals import Manuals
from experiments.studies.lstm import LSTM, SymmetricUniform
from vqjax import DenseEmbedding, Embedding, Head, assign, convert, heads
from vqjax.assign import trees
from vqjax.embeddings import PackedEmbedding
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import (
  BPETokenizer,
  Loader,
  PennTreebank,
  Source,
  Stories,
  Streams,
  Text,
  TokenizerRecipe,
  Windows,
  WordTokenizer,
)
from vqjax.lab.study.tuning import SearchSpace, stretched
from vqjax.lab.training import SGD
from vqjax.lm.models import LanguageModel, Transformer

V = FROM_TOKENIZER


@dataclasses.dataclass(frozen=True)
class ComparisonSetting:
  """A text, a model, a budget, and the compared heads.

  Attributes:
    name: name of the setting; its rows are called "NAME/ROW".
    rows: names of its rows; the first is the reference of differences.
    headline: rows that are run with every seed; the others have one.
    data: the text.
    tokenizer: its tokenizer.
    loader: how its batches are made.
    dim: model width, D.
    context: tokens of a row of a batch.
    body: (embedding, head) -> the model.
    inputs: initialiser of the input embedding of untied rows; tied tables have the default.
    train: training of each row, before its tuning.
    space: values that each row's tuning tries; where it is one, nothing is tuned.
    tuned_as: row -> the row whose tuning it has, instead of its own.
    vectors: seed -> the vectors of contexts that rows begin with.
    codes: K of the larger codebook.
    small_codes: K of the codebook with at most 1/16 of the dense head's bytes.
    product: (K, M) of the product head with at most 1/16 of the dense head's bytes.
    residual: (K, R) of the residual codebook with at most 1/16 of the dense head's bytes.
    rank: rank of the low-rank head with at most 1/16 of the dense head's bytes.
    cutoffs: cutoffs of the adaptive softmax.
    classes: classes of the class-based head.
    mixture: (M, width of the table) of the mixture with at most the parameters of the dense head.
    seeds: number of seeds of the headline rows.
    seen: number of different tokens of the training text, where a row needs it.
    divisor: what the bytes of the dense head are divided by in rows that compress it.
    folder: folder of the setting's runs.
  """

  name: str
  rows: tuple[str, ...]
  headline: tuple[str, ...]
  data: Source
  tokenizer: TokenizerRecipe
  loader: Loader
  dim: int
  context: int
  body: Callable[[Embedding, Head], LanguageModel]
  inputs: nn.initializers.Initializer
  train: Train
  space: SearchSpace
  codes: int
  small_codes: int
  product: tuple[int, int]
  residual: tuple[int, int]
  rank: int
  cutoffs: tuple[int, int]
  classes: int
  mixture: tuple[int, int]
  seeds: int
  tuned_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
  vectors: Callable[[int], convert.ContextVectors] = convert.ContextVectors
  seen: int = 0
  divisor: int = 16
  folder: str = ""

  def path(self, row: str, seed: int) -> str:
    """The run folder of a row."""
    return f"{self.folder}/{run_name(row, seed)}"


def run_name(row: str, seed: int) -> str:
  """The name of a row's run with a seed."""
  return row + (f"-s{seed}" if seed else "")


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
  """A head, how it begins, and what it learns from.

  Attributes:
    name: name of the row; its runs are called "NAME" and "NAME-s1", its tuning "NAME-tuning".
    label: the row's label in tables.
    head: () -> the head, with an embedding of its own where it is tied.
    start: seed -> `Experiment.init_from`.
    teacher: the row whose trained model of the same seed it is distilled from; None: the text
      alone.
    times: how often the steps of the setting are trained.
    source: the row whose trained model of the same seed is compressed, without a run and a tuning
      of its own; None: the row is trained.
    method: the compression.
  """

  name: str
  label: str
  head: Callable[[], Head]
  start: Callable[[int], Any] = lambda seed: None
  teacher: "ComparisonRow | None" = None
  times: int = 1
  source: "ComparisonRow | None" = None
  method: Method | None = None

  @property
  def is_tied(self) -> bool:
    """Whether the head's rows are the input vectors."""
    return getattr(self.head(), "embedding", None) is not None

  def experiment(
    self, s: ComparisonSetting, seed: int, teacher_seed: int | None = None
  ) -> Experiment:
    """The row's run before its tuning; by default the teacher has the run's seed."""
    head, start, train = self.head(), self.start(seed), stretched(s.train, Fraction(self.times))
    embedding = getattr(head, "embedding", None) or DenseEmbedding(V, s.dim, weight_init=s.inputs)
    model = s.body(embedding, head)
    if self.teacher is not None:
      model = starting_points.Distilled(model, self.teacher.experiment(s, seed).model)
      folder = s.path(self.teacher.name, seed if teacher_seed is None else teacher_seed)
      start = starting_points.FromTeacher(folder, start)
      train = dataclasses.replace(train, trainable=("student",))
    return Experiment(self.name, model, s.data, s.tokenizer, s.loader, train, seed, init_from=start)


def rows(s: ComparisonSetting) -> list[ComparisonRow]:
  """The rows of a setting, in its order."""
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
  learned = lambda: heads.LearnedProductHead(V, d, *s.product, token_bias=True)
  to_learned = with_unigrams(
    contexts(lambda seed: convert.ToLearnedProduct(convert.ToProduct(power=0.5, seed=seed)))
  )
  best = ComparisonRow("dense-contexts", "full softmax, from contexts", dense, to_dense)
  shared = ComparisonRow("tied", "tied full softmax", tied)
  shared_best = ComparisonRow("tied-contexts", "tied full softmax, from contexts", tied, to_dense)
  shared_distilled = ComparisonRow(
    "tied-distilled",
    "tied full softmax, from contexts, distilled",
    tied,
    to_dense,
    teacher=shared_best,
  )
  # Of about their size; the measurements make their own.
  packed, of_rows = heads.PackedHead, {"row_groups": InMemory().classes, "is_ranked": False}
  embedding = lambda: PackedEmbedding(V, d, **of_rows)
  every = [
    best,
    *_compressed(best, lambda: packed(V, d, use_bias=True, **of_rows)),
    shared,
    shared_best,
    shared_distilled,
    ComparisonRow(
      "tied-longer",
      "tied full softmax, from contexts, twice the steps",
      tied,
      to_dense,
      times=2,
    ),
    *(
      row
      for source in (shared, shared_best, shared_distilled)
      for row in _compressed(source, lambda: packed(V, d, use_bias=True, embedding=embedding()))
    ),
    ComparisonRow("dense", "full softmax", dense),
    ComparisonRow(
      "mixture",
      f"mixture of {s.mixture[0]} softmaxes",
      lambda: heads.MixtureHead(V, d, *s.mixture, use_bias=True),
    ),
    ComparisonRow(
      "sigsoftmax",
      "sigsoftmax",
      lambda: heads.DenseHead(V, d, use_bias=True, output=heads.SigSoftmax()),
    ),
    ComparisonRow(
      "product",
      "product codes, from contexts",
      lambda: heads.ProductHead(V, d, *s.product, token_bias=True),
      to_product,
    ),
    ComparisonRow(
      "product-random",
      "product codes without contexts",
      lambda: heads.ProductHead(V, d, *s.product, token_bias=True),
      lambda seed: starting_points.Unigrams(),
    ),
    ComparisonRow("product-learned", "product codes, from contexts, learned", learned, to_learned),
    ComparisonRow(
      "product-distilled",
      "product codes, from contexts, learned, distilled",
      learned,
      to_learned,
      teacher=best,
    ),
    ComparisonRow(
      "dense-distilled",
      "full softmax, from contexts, distilled",
      dense,
      to_dense,
      teacher=best,
    ),
    ComparisonRow(
      "residual",
      "codebook and low rank, from contexts",
      lambda: heads.ResidualCodebookHead(V, d, *s.residual, token_bias=True),
      to_residual,
    ),
    ComparisonRow(
      "codebook",
      f"codebook, K={s.codes}, from contexts",
      codebook(s.codes),
      to_codes(0.5),
    ),
    ComparisonRow(
      "codebook-exchange",
      f"codebook, K={s.small_codes}, exchange on bigrams",
      codebook(s.small_codes),
      exchange,
    ),
    ComparisonRow(
      "sampled",
      "sampled softmax in training",
      lambda: heads.SampledSoftmaxHead(V, d, samples=s.codes),
    ),
    ComparisonRow("adaptive", "adaptive softmax", lambda: heads.AdaptiveHead(V, d, s.cutoffs)),
    ComparisonRow(
      "low-rank",
      f"low rank, r={s.rank}, from contexts",
      lambda: heads.LowRankHead(V, d, s.rank, use_bias=True),
      to_low_rank,
    ),
    ComparisonRow(
      "class-based",
      "class-based",
      lambda: heads.ClassBasedHead(V, d, s.classes, assign.contiguous),
    ),
    ComparisonRow("hierarchical", "tree", lambda: heads.HierarchicalHead(V, d, zipf_tree)),
    ComparisonRow("grouped", "grouped", lambda: heads.GroupedHead(V, d, use_bias=True)),
    ComparisonRow(
      "grouped-frequency",
      "grouped by frequency",
      ordered,
      lambda seed: starting_points.Regrouped(convert.ByFrequency()),
    ),
    ComparisonRow(
      "grouped-clusters",
      "grouped by clusters of contexts",
      ordered,
      lambda seed: starting_points.Regrouped(clusters(seed)),
    ),
    ComparisonRow(
      "unshared", "grouped, unshared", lambda: heads.UnsharedGroupedHead(V, d, use_bias=True)
    ),
    ComparisonRow(
      "dense-unigram",
      "full softmax, bias from unigrams",
      dense,
      lambda seed: starting_points.Unigrams(),
    ),
    ComparisonRow(
      "seen",
      "full softmax of the tokens in the training text",
      codebook(s.seen + 1),
      lambda seed: starting_points.Mapped(alone(seed)),
    ),
  ]
  by_name = {row.name: row for row in every}
  return [by_name[name] for name in s.rows]


def _compressed(source: ComparisonRow, packed: Callable[[], Head]) -> list[ComparisonRow]:
  """The rows of a trained full softmax that is compressed."""
  name, label = source.name, source.label
  return [
    ComparisonRow(
      f"{name}-file",
      f"{label}, in a file",
      source.head,
      source=source,
      method=InFile(),
    ),
    ComparisonRow(
      f"{name}-memory", f"{label}, in memory", packed, source=source, method=InMemory()
    ),
  ]


def deployed(head: Head) -> Head:
  """The head of inference: one with fixed codes in place of learned ones."""
  if not isinstance(head, heads.LearnedProductHead):
    return head
  shape = head.vocab, head.dim, head.codes, head.subspaces
  return heads.ProductHead(*shape, token_bias=head.token_bias)


def zipf_tree(vocab: int) -> trees.BinaryTree:
  """Huffman's tree of a frequency-sorted vocabulary under Zipf's law."""
  return trees.Huffman((10**9 // np.arange(1, vocab + 1)).astype(np.int64))(vocab)


def _lstm(dim: int, context: int) -> dict[str, Any]:
  """Fields of a setting whose model is the small LSTM of Zaremba et al., on one text a row."""
  begin = SymmetricUniform(0.1)
  return {
    "dim": dim,
    "context": context,
    "body": lambda embedding, head: LSTM(
      embedding=embedding, head=head, dim=dim, context=context, weight_init=begin
    ),
    "loader": Streams(),
    "inputs": begin,
  }


def _by_sgd(steps: int, batch: int, row: int) -> Train:
  """Descent at a constant rate for half of the steps, which then falls to 0.056 of it.

  Zaremba's loss is the sum over the `row` tokens of a row and ours is the mean: his clipping, at 3,
  is divided by it.
  """
  return Train(
    steps=steps,
    batch=batch,
    clip=3.0 / row,
    optimizer=SGD(hold=steps // 2, every=max(1, steps // 20), factor=0.75),
    eval_every=steps,
    save_every=max(1, steps // 4),
    keep=1,
    log_every=10,
  )


def _transformer(dim: int, context: int, layers: int, heads: int) -> dict[str, Any]:
  """Fields of a setting whose model is a decoder without dropout, on windows of the text."""
  return {
    # It normalises its hidden states, and lengths of up to 30 would begin at 50 nats.
    "vectors": lambda seed: convert.ContextVectors(seed, equal_lengths=True),
    "dim": dim,
    "context": context,
    "body": lambda embedding, head: Transformer(
      embedding=embedding, head=head, dim=dim, layers=layers, heads=heads, context=context
    ),
    "loader": Windows(),
    "inputs": nn.initializers.normal(0.02),
  }


def _by_adam(steps: int, batch: int, warmup: int) -> Train:
  """AdamW along a cosine."""
  return Train(
    steps=steps,
    batch=batch,
    warmup=warmup,
    weight_decay=0.1,
    eval_every=steps,
    save_every=max(1, steps // 4),
    keep=1,
    log_every=10,
  )


HEADLINE = (
  *("tied-contexts", "tied-contexts-file", "tied-contexts-memory"),
  *("tied-distilled", "tied-distilled-file", "tied-distilled-memory"),
  *("tied", "tied-file", "tied-memory"),
  *("dense-contexts", "dense-contexts-file", "dense-contexts-memory"),
  *("dense", "product-learned", "product-distilled"),
)
PTB = (
  *HEADLINE,
  *(
    "tied-longer",
    "dense-distilled",
    "product",
    "residual",
    "codebook",
    "codebook-exchange",
    "sampled",
    "adaptive",
    "low-rank",
    "class-based",
  ),
  *("hierarchical", "grouped", "unshared", "mixture", "sigsoftmax"),
)
STORIES = (
  *("dense", "dense-unigram", "dense-contexts", "tied", "seen"),
  *("grouped", "grouped-frequency", "grouped-clusters", "unshared", "product-learned"),
)
# Rows without a tuning of their own have that of a dense head: their teacher, or the same training
# of half the steps, and on TinyStories the head that begins at random.
_PTB_TUNINGS = dict.fromkeys(("tied-distilled", "tied-longer"), "tied-contexts")
_STORIES_TUNINGS = dict.fromkeys(("dense-contexts", "product-learned"), "dense")
MANUALS = (
  *("tied-contexts", "tied-contexts-file", "tied-contexts-memory", "tied"),
  *("dense-contexts", "dense", "sampled", "codebook", "product", "product-random"),
  "product-learned",
)
_TINY = {
  # Little of the text that every machine has is evaluated.
  "data": Text(valid_fraction=0.005, test_fraction=0.005),
  "tokenizer": WordTokenizer(vocab=400),
  "codes": 64,
  "small_codes": 24,
  "product": (16, 4),
  "residual": (16, 2),
  "rank": 4,
  "cutoffs": (40, 120),
  "classes": 20,
  "mixture": (2, 15),
  "seen": 390,
  "divisor": 2,
}

_PENN_TREEBANK = ComparisonSetting(
  "ptb",
  PTB,
  HEADLINE,
  data=PennTreebank(),
  tokenizer=WordTokenizer(split=False),
  **_lstm(200, 20),
  train=_by_sgd(9_292, batch=20, row=20),
  space=SearchSpace({"train.learning_rate": (16.0, 25.0, 40.0, 64.0)}),
  codes=1024,
  small_codes=525,
  product=(256, 25),
  residual=(345, 4),
  rank=11,
  cutoffs=(750, 3000),
  classes=100,
  mixture=(4, 185),
  seeds=5,
  tuned_as=_PTB_TUNINGS,
)
# Nothing is tuned on it: the learning rate is the one that most tunings of Penn Treebank chose.
_MANUALS = dataclasses.replace(
  _PENN_TREEBANK,
  name="manuals",
  rows=MANUALS,
  headline=MANUALS[:4],
  data=Manuals(),
  tokenizer=WordTokenizer(vocab=10_000, split=False),
  train=_by_sgd(1_914, batch=20, row=20),
  space=SearchSpace({"train.learning_rate": (40.0,)}),
  seeds=3,
)

_SETTINGS = {
  "smoke": (
    ComparisonSetting(
      "ptb",
      PTB,
      HEADLINE,
      **_lstm(16, 16),
      train=_by_sgd(12, batch=4, row=16),
      space=SearchSpace({"train.learning_rate": (5.0, 10.0)}),
      **_TINY,
      seeds=2,
      tuned_as=_PTB_TUNINGS,
    ),
    ComparisonSetting(
      "stories",
      STORIES,
      (),
      **_transformer(16, 16, layers=1, heads=2),
      train=_by_adam(12, batch=4, warmup=2),
      space=SearchSpace({"train.learning_rate": (3e-3, 1e-2)}),
      **_TINY,
      seeds=1,
      tuned_as=_STORIES_TUNINGS,
    ),
  ),
  "cpu": (
    _PENN_TREEBANK,
    _MANUALS,
    ComparisonSetting(
      "stories",
      STORIES,
      (),
      data=Stories(),
      tokenizer=BPETokenizer(folder="tokenizers/gpt2"),
      **_transformer(64, 128, layers=4, heads=4),
      train=_by_adam(3072, batch=8, warmup=200),
      space=SearchSpace({"train.learning_rate": (2e-3, 4e-3, 8e-3)}),
      codes=4096,
      small_codes=1500,
      product=(256, 8),
      residual=(1024, 2),
      rank=4,
      cutoffs=(2000, 10_000),
      classes=224,
      mixture=(4, 63),
      seen=7935,
      seeds=1,
      tuned_as=_STORIES_TUNINGS,
    ),
  ),
}

SCALES = {
  scale: tuple(dataclasses.replace(s, folder=f"runs/comparison/{scale}/{s.name}") for s in settings)
  for scale, settings in _SETTINGS.items()
}
"""Scale -> settings.

At `cpu`, four passes over Penn Treebank, two over manual pages, three over slices of TinyStories.
"""
