"""Command that writes a small project of one's own: a head, a config, a study and a test.

vqjax new mine
"""

import argparse
import pathlib
import re

from vqjax.commands.console import new_parser, run
from vqjax.lm.records import one_line
from vqjax.outputs import write_text

__all__ = []

HEAD = '''\
"""A head: the row of a token is the sum of a row for its quotient and one for its remainder."""

import jax.numpy as jnp

from vqjax.heads.linear import LinearHead
from vqjax.ops.row_factory import RowFactory
from vqjax.variables import Initializer, Variable, integer_variable, row_init


class MyHead(LinearHead):
  """softmax(hidden · rowᵀ), token v having the row quotient[v // R] + remainder[v % R].

  Attributes:
    remainders: number of rows of the second table, R.
  """

  remainders: int = 64
  row_init: Initializer = row_init

  def declare(self):
    v, d, r = self.vocab, self.dim, self.remainders
    axes = "shared_codes", "width"
    return {
      "quotient": Variable((-(-v // r), d), axes, self.row_init, self.param_dtype),
      "remainder": Variable((r, d), axes, self.row_init, self.param_dtype),
      "token": integer_variable((v,), ("vocab",), lambda: jnp.arange(v), pad_value=0),
    }

  def _rows(self, arrays):
    return RowFactory(arrays["token"], (arrays["quotient"], arrays["remainder"]), compose)


def compose(token_W, tables):
  quotient_QD, remainder_RD = tables
  return quotient_QD[token_W // len(remainder_RD)] + remainder_RD[token_W % len(remainder_RD)]
'''

CONFIG = '''\
"""A small decoder with the head of head.py: vqjax train {name}/config.py"""

from head import MyHead

from vqjax import DenseEmbedding
from vqjax.lab.config import FROM_TOKENIZER, Experiment, Train
from vqjax.lab.data import Text, Windows, WordTokenizer
from vqjax.lm.models import Transformer

V, D = FROM_TOKENIZER, 64


def experiment() -> Experiment:
  return Experiment(
    name="{name}",
    model=Transformer(
      embedding=DenseEmbedding(V, D), head=MyHead(V, D), dim=D, layers=2, heads=4, context=64
    ),
    data=Text(),  # Python's docstrings; Text("notes/") reads a file or folder of your own
    tokenizer=WordTokenizer(vocab=4000),
    loader=Windows(),
    train=Train(steps=600, batch=8, warmup=60, learning_rate=4e-3),
  )
'''

STUDY = '''\
"""The head of head.py beside others: vqjax study {name}/study.py --scale 0.1"""

from config import D, V, experiment

from vqjax import CodebookHead, DenseHead
from vqjax.lab.study import Study


def study() -> Study:
  return Study(
    base=experiment(),
    rows={{
      "dense": {{"model.head": DenseHead(V, D)}},
      "codebook": {{"model.head": CodebookHead(V, D, codes=256)}},
      "mine": {{}},
    }},
    tune={{"train.learning_rate": (2e-3, 4e-3, 8e-3)}},
  )
'''

TEST = '''\
"""pytest {name}"""

import jax
import numpy as np
from head import MyHead


def test_probabilities_sum_to_one_and_are_those_of_log_prob():
  head, hidden_BD = MyHead(101, 8, remainders=7), jax.random.normal(jax.random.key(0), (3, 8))
  variables = head.init(jax.random.key(1), hidden_BD)
  log_prob_BV = jax.nn.log_softmax(head.apply(variables, hidden_BD, method="logits"))
  tokens_B = np.array([0, 50, 100])
  found_B = head.apply(variables, hidden_BD, tokens_B, method="log_prob")
  np.testing.assert_allclose(found_B, log_prob_BV[np.arange(3), tokens_B], rtol=1e-5)
'''

FILES = {"head.py": HEAD, "config.py": CONFIG, "study.py": STUDY, "test_head.py": TEST}


def main(arguments: list[str] | None = None) -> int:
  """Run the command; return 2 for a wrong call."""
  parser = new_parser("new", "Write a small project that trains at once.")
  parser.add_argument("name", type=pathlib.Path, help="its folder, which must not exist")
  return run(parser, arguments, _new)


def _new(options: argparse.Namespace) -> None:
  folder = options.name
  if folder.exists():
    raise FileExistsError(f"`name` must be a new folder; got {folder}, which exists. Give another.")
  if not re.fullmatch(r"[\w.-]+", folder.name) or not folder.name.strip("."):
    raise ValueError(
      f"`name` must be of letters, digits, and the signs _ . -; got {one_line(folder.name)!r}. It"
      " is written into Python files."
    )
  for name, text in FILES.items():
    filled = text if name == "head.py" else text.format(name=folder.name)
    write_text(folder / name, filled)
  shown = one_line(folder)
  print(f"wrote {', '.join(f'{shown}/{name}' for name in FILES)}")
  print(f"vqjax train {shown}/config.py")
