"""The LSTM language models of Zaremba et al. in three sizes, with any embedding (DPQ, Table 4).

Their loss is the sum over the tokens of a row, ours the mean: so their rate of 1 is `unroll` here,
and their clipping is divided by it.
"""

from typing import NamedTuple

from vqjax import DenseHead, Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Source, Streams, WordTokenizer
from vqjax.lab.models import LSTM, SymmetricUniform
from vqjax.lab.training import SGD

V = FROM_TOKENIZER
ROWS = 20
WORDS = WordTokenizer(split=False)


class Body(NamedTuple):
  """A size of the model and how it is trained.

  Attributes:
    dim: hidden numbers, D.
    unroll: tokens of a row.
    dropout: of the embedding's vectors and of each layer's output.
    init: parameters begin uniform in ± this.
    factor: of the learning rate, each epoch after the first `hold`.
    hold: epochs at the full rate.
    epochs: in all.
    clip: largest norm of their gradient.
  """

  dim: int
  unroll: int
  dropout: float
  init: float
  factor: float
  hold: int
  epochs: int
  clip: float

  @property
  def begin(self) -> SymmetricUniform:
    """Of all parameters, those of embeddings too."""
    return SymmetricUniform(self.init)

  @property
  def weight(self) -> float:
    """DPQ-VQ's regulariser beside a loss that is a mean over tokens."""
    return 1.0 / self.unroll


SMALL = Body(200, 20, 0.0, 0.1, 0.5, 4, 15, 3.0)
MEDIUM = Body(650, 35, 0.5, 0.05, 0.8, 6, 35, 5.0)
LARGE = Body(1500, 35, 0.65, 0.04, 1 / 1.15, 14, 35, 10.0)
LARGE_DPQ = LARGE._replace(epochs=25, factor=0.7, clip=5.0)


def language_model(
  name: str,
  embedding: Embedding,
  body: Body,
  data: Source,
  tokens: int,
  seed: int = 0,
  words: WordTokenizer = WORDS,
) -> Experiment:
  """A run on a text of `tokens` training tokens."""
  epoch = tokens // ROWS // body.unroll
  dense = {"use_bias": True, "weight_init": body.begin, "bias_init": body.begin}
  return Experiment(
    name=name,
    model=LSTM(
      embedding=embedding,
      head=DenseHead(V, body.dim, **dense),
      dim=body.dim,
      context=body.unroll,
      dropout=body.dropout,
      weight_init=body.begin,
    ),
    data=data,
    tokenizer=words,
    loader=Streams(),
    train=Train(
      steps=body.epochs * epoch,
      batch=ROWS,
      learning_rate=1.0 * body.unroll,
      clip=body.clip / body.unroll,
      optimizer=SGD(hold=body.hold * epoch, every=epoch, factor=body.factor),
      log_every=50,
      eval_every=epoch,
      save_every=epoch,
    ),
    seed=seed,
  )
