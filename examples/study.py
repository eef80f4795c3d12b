"""Three heads on your own text, tuned alike, with three seeds each and one page.

python examples/study.py                    the jobs, without training
vqjax study examples/study.py --scale 0.1   a tenth of the steps, to see that all runs
vqjax study examples/study.py
"""

from vqjax import AdaptiveHead, CodebookHead, DenseEmbedding, DenseHead, Int8
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lab.starting_points import FromText
from vqjax.lab.study import Compressed, Study
from vqjax.lm.models import Transformer

V, D = FROM_TOKENIZER, 64


def study() -> Study:
  base = Experiment(
    name="base",
    model=Transformer(
      embedding=DenseEmbedding(V, D), head=DenseHead(V, D), dim=D, layers=2, heads=4, context=64
    ),
    data=Text(),  # Python's docstrings; Text("notes/") reads a file or folder of your own
    tokenizer=WordTokenizer(vocab=4000),
    loader=Windows(),
    train=Train(steps=600, batch=8, warmup=60),
  )
  return Study(
    base=base,
    rows={
      "dense": {},
      "dense-int8": Compressed("dense", bytes=None, method=Int8()),
      "codebook": {"model.head": CodebookHead(V, D, codes=256), "init_from": FromText()},
      "adaptive": {"model.head": lambda base: AdaptiveHead(V, base.model.dim, (500, 2000))},
    },
    tune={"train.learning_rate": (2e-3, 4e-3, 8e-3)},
    seeds=3,
    margin=0.01,
  )


if __name__ == "__main__":
  from vqjax.commands.study import main

  main([__file__, "--list"])
