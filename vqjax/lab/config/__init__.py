"""How is an experiment written down, changed from a command line, described and identified?"""

from vqjax.lab.config.describe import describe
from vqjax.lab.config.experiment import Experiment, Train, load
from vqjax.lab.config.help import help_text
from vqjax.lab.config.identity import config_hash, difference, flatten
from vqjax.lab.config.override import override
from vqjax.lab.config.vocab import FROM_TOKENIZER, with_vocab

__all__ = [
  "FROM_TOKENIZER",
  "Experiment",
  "Train",
  "config_hash",
  "describe",
  "difference",
  "flatten",
  "help_text",
  "load",
  "override",
  "with_vocab",
]
