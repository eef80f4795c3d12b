"""Translation with any embedding (DPQ, Tables 3 and 11)."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.studies.dpq.data import PairedSource, PairedText, Pairs
from experiments.studies.dpq.models import RecurrentTranslator, Translator
from experiments.studies.dpq.sm3 import SM3
from experiments.studies.lstm import SymmetricUniform
from vqjax import DenseHead, Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import SentencePieceTokenizer, TokenizerRecipe, WordTokenizer
from vqjax.lab.training import SGD

V = FROM_TOKENIZER
WORDS = 25
"""Mean number of words in a sentence of IWSLT15, about: the ratio of a summed to a mean loss."""
BEGIN = SymmetricUniform(0.1)
"""Initialiser of embeddings, as in the reference implementation."""


class TransformerSize(NamedTuple):
  """A size of the encoder and the decoder.

  Attributes:
    dim: width, D.
    layers: layers of the encoder, and of the decoder.
    heads: attention heads.
    hidden: width of the feed-forward layers.
    context: most tokens of a sentence.
    dropout: dropout of every branch.
  """

  dim: int
  layers: int
  heads: int
  hidden: int
  context: int
  dropout: float = 0.1


BASE = TransformerSize(512, 6, 8, 2048, 256)
"""Transformer base of Vaswani et al., with the context of the DPQ paper's Appendix C."""


def translation(
  name: str,
  embedding: Embedding,
  size: TransformerSize,
  data: PairedSource,
  tokenizer: TokenizerRecipe,
  train: Train,
  seed: int = 0,
) -> Experiment:
  """Return a run in which source and target share vocabulary and embedding."""
  return Experiment(
    name=name,
    model=Translator(
      embedding=embedding,
      head=DenseHead(V, size.dim, label_smoothing=0.1),
      dim=size.dim,
      layers=size.layers,
      heads=size.heads,
      context=size.context,
      hidden=size.hidden,
      dropout=size.dropout,
    ),
    data=data,
    tokenizer=tokenizer,
    loader=Pairs(),
    train=train,
    seed=seed,
  )


def wmt19(name: str, embedding: Embedding, seed: int = 0) -> Experiment:
  """Return a run on English to German of WMT19 with 32,000 pieces (Appendix C)."""
  train = Train(
    steps=250_000,
    batch=2048,
    accumulate=16,
    learning_rate=0.3,
    warmup=10_000,
    clip=1e6,
    optimizer=SM3(),
    eval_every=5_000,
    save_every=5_000,
  )
  data = files("wmt19", "train", "valid", "test", "en", "de")
  pieces = SentencePieceTokenizer(vocab=32_000)
  return translation(name, embedding, BASE, data, pieces, train, seed)


def files(folder: str, train: str, valid: str, test: str, source: str, target: str) -> PairedText:
  """Return the files FOLDER/SPLIT.LANGUAGE of a translation, under $VQJAX_DATA."""
  pair = lambda split: (f"{folder}/{split}.{source}", f"{folder}/{split}.{target}")
  return PairedText(pair(train), pair(valid), pair(test))


def iwslt15(source: str, target: str) -> Callable[[str, Embedding, int], Experiment]:
  """Return (name, embedding, seed) -> a run on IWSLT15, English and Vietnamese.

  The model is an LSTM with attention on words, as in Luong et al. (2017).

  The learning rate of 1 halves each thousand steps from two thirds of the 12,000 steps on. Their
  loss is the sum over the words of a sentence, and ours is the mean over words: here the rate is
  multiplied and the clipping divided by `WORDS`. One vocabulary has both languages; theirs are two.
  """

  def make(name: str, embedding: Embedding, seed: int = 0) -> Experiment:
    return Experiment(
      name=name,
      model=RecurrentTranslator(
        embedding=embedding, head=DenseHead(V, embedding.dim), dim=embedding.dim, context=50
      ),
      data=files("iwslt15", "train", "tst2012", "tst2013", source, target),
      tokenizer=WordTokenizer(split=False, min_count=5),
      loader=Pairs(),
      train=Train(
        steps=12_000,
        batch=128,
        learning_rate=1.0 * WORDS,
        clip=5.0 / WORDS,
        optimizer=SGD(hold=8_000, every=1_000, factor=0.5),
        eval_every=1_000,
        save_every=1_000,
      ),
      seed=seed,
    )

  return make
