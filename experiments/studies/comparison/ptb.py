"""Heads on Penn Treebank: the small LSTM of Zaremba et al., four passes, five seeds.

vqjax study experiments/studies/comparison/ptb.py --out experiments/studies/comparison/ptb
"""

from experiments.studies.comparison.rows import Sizes, V, rows
from experiments.studies.lstm import LSTM, SymmetricUniform
from vqjax import DenseEmbedding, DenseHead
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import PennTreebank, Streams, WordTokenizer
from vqjax.lab.study import Study
from vqjax.lab.training import SGD

HEADLINE = (
  *("dense", "dense-contexts", "dense-contexts-file", "dense-contexts-memory"),
  *("tied", "tied-file", "tied-memory"),
  *("tied-contexts", "tied-contexts-file", "tied-contexts-memory"),
  *("tied-distilled", "tied-distilled-file", "tied-distilled-memory"),
  *("product-learned", "product-distilled"),
)
SIZES = Sizes(
  dim=200,
  codes=1024,
  small_codes=525,
  product=(256, 25),
  residual=(345, 4),
  rank=11,
  cutoffs=(750, 3000),
  classes=100,
  mixture=(4, 185),
)


def base(steps: int = 9_292) -> Experiment:
  """The LSTM with a full softmax, without dropout.

  Descent at a constant rate for half of the steps, which then falls to 0.056 of it. Zaremba's loss
  is the sum over the 20 tokens of a row and this one is the mean: his clipping, at 3, is divided
  by it.
  """
  begin, dim, row = SymmetricUniform(0.1), SIZES.dim, 20
  embedding = DenseEmbedding(V, dim, weight_init=begin)
  train = Train(
    steps=steps,
    batch=20,
    clip=3.0 / row,
    optimizer=SGD(hold=steps // 2, every=max(1, steps // 20), factor=0.75),
    eval_every=steps,
    save_every=max(1, steps // 4),
    keep=1,
    log_every=10,
  )
  head = DenseHead(V, dim, use_bias=True)
  model = LSTM(embedding=embedding, head=head, dim=dim, context=row, weight_init=begin)
  text, words = PennTreebank(), WordTokenizer(split=False)
  return Experiment("base", model, text, words, Streams(), train)


def study() -> Study:
  """The study."""
  further = (
    *("tied-longer", "dense-distilled", "product", "residual", "codebook", "codebook-exchange"),
    *("sampled", "adaptive", "low-rank", "class-based", "hierarchical", "grouped", "unshared"),
    *("mixture", "sigsoftmax"),
  )
  # The same training as their teacher's, or of half the steps.
  shared = dict.fromkeys(("tied-distilled", "tied-longer"), "tied-contexts")
  return Study(
    base=base(),
    rows=rows(SIZES, (*HEADLINE, *further), HEADLINE, shared),
    tune={"train.learning_rate": (16.0, 25.0, 40.0, 64.0)},
    seeds=5,
    reference="tied-contexts",
    extensions=0,
  )
