"""With which parameters may a run begin, other than the model's own?

`Experiment.init_from` is None, or a frozen dataclass that is called with the text, the model and its
freshly initialised variables, where there is no checkpoint to go on from. It returns the variables
that the run begins with: the same tree with the same shapes and dtypes, of NumPy or jax arrays.
Of several processes each calls it, and all must get the same numbers.
"""

import dataclasses
from typing import Any

from flax import linen as nn

from vqjax.lab.training.saved import check_tokenizer, read_variables
from vqjax.lab.training.text import Text


@dataclasses.dataclass(frozen=True)
class FromRun:
  """Begins where another run of the same model ended.

  Attributes:
    folder: the other run's folder.
    best: take its checkpoint of lowest validation loss, not its newest.
  """

  folder: str
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The other run's variables; FileNotFoundError or ValueError as `read_variables`."""
    del model, variables
    check_tokenizer(self.folder, text)
    return read_variables(self.folder, self.best)[0]


@dataclasses.dataclass(frozen=True)
class FromPart:
  """Begins with a part of what another run has learned, such as its encoder; all else is new.

  Attributes:
    folder: the other run's folder.
    part: what the part is called in both models.
    best: take its checkpoint of lowest validation loss, not its newest.
  """

  folder: str
  part: str
  best: bool = False

  def __call__(self, text: Text, model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """The fresh variables with the other run's part.

    Raises:
      FileNotFoundError: the folder holds no checkpoint.
      ValueError: its tokenizer is another one, or one of the two has no such part.
    """
    del model
    check_tokenizer(self.folder, text)
    other, step = read_variables(self.folder, self.best)
    for where, tree in ((f"checkpoint {step} of {self.folder}", other), ("the model", variables)):
      if self.part not in tree["params"]:
        raise ValueError(f"{where} has no {self.part!r}, only {', '.join(sorted(tree['params']))}")
    taken = {
      name: {self.part: tree[self.part]} for name, tree in other.items() if self.part in tree
    }
    return {name: tree | taken.get(name, {}) for name, tree in variables.items()}
