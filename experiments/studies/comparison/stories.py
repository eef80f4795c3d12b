"""Heads on slices of TinyStories with GPT-2's tokens: a small decoder, three passes, one seed.

vqjax study experiments/studies/comparison/stories.py --out experiments/studies/comparison/stories
"""

from flax import linen as nn

from experiments.studies.comparison.rows import Sizes, V, rows
from vqjax import DenseEmbedding, DenseHead, convert
from vqjax.lab.config import Experiment, Train
from vqjax.lab.data import BPETokenizer, Stories, Windows
from vqjax.lab.study import Study
from vqjax.lm.models import Transformer

SIZES = Sizes(
  dim=64,
  codes=4096,
  small_codes=1500,
  product=(256, 8),
  residual=(1024, 2),
  rank=4,
  cutoffs=(2000, 10_000),
  classes=224,
  mixture=(4, 63),
  # The decoder normalises its hidden states, and lengths of up to 30 would begin at 50 nats.
  vectors=lambda seed: convert.ContextVectors(seed, equal_lengths=True),
  seen=7935,
)


def base(steps: int = 3072) -> Experiment:
  """The decoder with a full softmax, without dropout."""
  embedding = DenseEmbedding(V, SIZES.dim, weight_init=nn.initializers.normal(0.02))
  model = Transformer(
    embedding=embedding,
    head=DenseHead(V, SIZES.dim, use_bias=True),
    dim=SIZES.dim,
    layers=4,
    heads=4,
    context=128,
  )
  train = Train(
    steps=steps,
    batch=8,
    warmup=200,
    weight_decay=0.1,
    eval_every=steps,
    save_every=max(1, steps // 4),
    keep=1,
    log_every=10,
  )
  tokenizer = BPETokenizer(folder="tokenizers/gpt2")
  return Experiment("base", model, Stories(), tokenizer, Windows(), train)


def study() -> Study:
  """The study."""
  names = (
    *("dense", "dense-unigram", "dense-contexts", "tied", "seen"),
    *("grouped", "grouped-frequency", "grouped-clusters", "unshared", "product-learned"),
  )
  return Study(
    base=base(),
    rows=rows(SIZES, names, tuned_as=dict.fromkeys(("dense-contexts", "product-learned"), "dense")),
    tune={"train.learning_rate": (2e-3, 4e-3, 8e-3)},
    seeds=1,
    extensions=0,
  )
