"""The LSTM language models of Zaremba et al. in two sizes (DPQ, Table 4).

Their loss is the sum over the tokens of a row, and ours is the mean: a learning rate of 1 becomes
`unroll` here, and the clipping is divided by it.
"""

from typing import NamedTuple

from experiments.studies.lstm import LSTM, SymmetricUniform
from vqjax import DenseHead, Embedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Source, Streams, WordTokenizer
from vqjax.lab.training import SGD

V = FROM_TOKENIZER
ROWS = 20
WORDS = WordTokenizer(split=False)


class LSTMSize(NamedTuple):
  """A size of the model, and its schedule.

  Attributes:
    dim: width, D.
    unroll: tokens of a row.
    dropout: dropout of the embeddings and of each layer's output.
    init: parameters are initialised uniformly in [-init, init].
    factor: factor of the learning rate for each epoch after the first `hold`.
    hold: epochs at the full learning rate.
    epochs: number of epochs.
    clip: largest norm of the gradient of the summed loss.
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
    """The initialiser of all parameters, also of embeddings."""
    return SymmetricUniform(self.init)

  @property
  def weight(self) -> float:
    """The weight of DPQ-VQ's regulariser beside a loss that is a mean over tokens."""
    return 1.0 / self.unroll


SMALL = LSTMSize(200, 20, 0.0, 0.1, 0.5, 4, 15, 3.0)
MEDIUM = LSTMSize(650, 35, 0.5, 0.05, 0.8, 6, 35, 5.0)


def language_model(
  name: str,
  embedding: Embedding,
  size: LSTMSize,
  data: Source,
  tokens: int,
  seed: int = 0,
  words: WordTokenizer = WORDS,
) -> Experiment:
  """Return a run on a text of `tokens` training tokens."""
  epoch = tokens // ROWS // size.unroll
  dense = {"use_bias": True, "weight_init": size.begin, "bias_init": size.begin}
  return Experiment(
    name=name,
    model=LSTM(
      embedding=embedding,
      head=DenseHead(V, size.dim, **dense),
      dim=size.dim,
      context=size.unroll,
      dropout=size.dropout,
      weight_init=size.begin,
    ),
    data=data,
    tokenizer=words,
    loader=Streams(),
    train=Train(
      steps=size.epochs * epoch,
      batch=ROWS,
      learning_rate=1.0 * size.unroll,
      clip=size.clip / size.unroll,
      optimizer=SGD(hold=size.hold * epoch, every=epoch, factor=size.factor),
      log_every=50,
      eval_every=epoch,
      save_every=epoch,
    ),
    seed=seed,
  )
