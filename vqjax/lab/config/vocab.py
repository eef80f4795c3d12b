"""How does a model learn how many tokens the tokenizer has?"""

import dataclasses
from typing import Any

from vqjax.lab.config.experiment import Experiment
from vqjax.lab.config.tree import fields_of, rebuild, walk

FROM_TOKENIZER = 0
"""The `vocab` a config file writes in its modules: the tokenizer's, filled in by `with_vocab`."""


def with_vocab(experiment: Experiment, vocab: int) -> Experiment:
  """The experiment with every `vocab` of the model that is FROM_TOKENIZER set to `vocab`.

  Raises:
    ValueError: a field named `vocab` says another number.
  """
  changes: dict[int, dict[str, Any]] = {}
  for path, node in walk(experiment.model, "model"):
    given = fields_of(node).get("vocab", vocab)
    if given == FROM_TOKENIZER:
      changes[id(node)] = {"vocab": vocab}
    elif given != vocab:
      raise ValueError(
        f"{path}.vocab is {given} but the tokenizer has {vocab} tokens; remove the override or the"
        " number in the config, or use another tokenizer"
      )
  return dataclasses.replace(experiment, model=rebuild(experiment.model, changes))
