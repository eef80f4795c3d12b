"""Initial variables of runs: of a part of another run, or of its table."""

import dataclasses
from collections.abc import Callable

import numpy as np
from flax import linen as nn

from vqjax.convert import part_of, with_part
from vqjax.convert.trained_variables import Variables
from vqjax.embeddings import Embedding
from vqjax.lab.training import read_run_variables
from vqjax.lab.training.checkpoint import check_tokenizer
from vqjax.lab.training.run_folder import EncodedText

__all__ = ["FromPart", "FromTable"]


@dataclasses.dataclass(frozen=True)
class FromPart:
  """Initialises one part of a model, such as its encoder, from another run.

  Attributes:
    folder: the other run's folder.
    part: name of the part in both models.
    best: read its checkpoint of lowest validation loss instead of the newest.
  """

  folder: str
  part: str
  best: bool = False

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """Return the fresh variables with the other run's part.

    Raises:
      FileNotFoundError: the folder has no checkpoint.
      ValueError: the tokenizers differ, or one of the models has no such part.
    """
    del model
    check_tokenizer(self.folder, text)
    other, step = read_run_variables(self.folder, self.best)
    for owner, tree in ((f"checkpoint {step} of {self.folder}", other), ("the model", variables)):
      if self.part not in tree["params"]:
        raise ValueError(
          f"`part` must be one of {', '.join(sorted(tree['params']))} in {owner}; got"
          f" {self.part!r}."
        )
    part = {name: {self.part: tree[self.part]} for name, tree in other.items() if self.part in tree}
    return {name: tree | part.get(name, {}) for name, tree in variables.items()}


@dataclasses.dataclass(frozen=True)
class FromTable:
  """An embedding made from the dense table of a run; the rest is initialised.

  Attributes:
    folder: run folder of the run with the table.
    fill: (embedding, its fresh variables, table) -> its variables, such as `convert.Guide()` or
      `convert.LearnedCodes(...)`.
    best: read the checkpoint of the lowest validation loss; False: the newest.
  """

  folder: str
  fill: Callable[[Embedding, Variables, np.ndarray], Variables]
  best: bool = False

  def __call__(self, text: EncodedText, model: nn.Module, variables: Variables) -> Variables:
    """The fresh variables with this embedding.

    Raises:
      FileNotFoundError: the folder has no checkpoint.
      ValueError: the run has another tokenizer, or its embedding has no table, one of another
        shape, or one that is not finite.
    """
    check_tokenizer(self.folder, text)
    trained, step = read_run_variables(self.folder, self.best)
    table = trained["params"].get("embedding", {}).get("weight")
    source = f"checkpoint {step} of {self.folder}"
    shape = [model.embedding.vocab, model.embedding.dim]
    if table is None or list(table.shape) != shape:
      got = "none" if table is None else list(table.shape)
      raise ValueError(
        f"the table of {source} must have shape {shape}, as the model's embedding; got {got}."
        " Give the embedding the sizes of the run."
      )
    if not np.isfinite(table).all():
      raise ValueError(
        f"the table of {source} must be finite; got nan or infinity. Use another checkpoint."
      )
    fresh = part_of(variables, "embedding")
    return with_part(variables, "embedding", self.fill(model.embedding, fresh, np.asarray(table)))
