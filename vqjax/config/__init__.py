"""How is an experiment written down, changed from a command line, described and identified?"""

from vqjax.config.describe import describe
from vqjax.config.experiment import Experiment, Train, load
from vqjax.config.help import help_text
from vqjax.config.identity import config_hash, difference, flatten
from vqjax.config.override import override
from vqjax.config.vocab import FROM_TOKENIZER, with_vocab

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
