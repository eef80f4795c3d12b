"""Compressed tables in PyTorch, without JAX.

model = transformers.AutoModelForCausalLM.from_pretrained("small")  # warns that tables are missing
vqjax.torch.load_tables(model, "small")
"""

from __future__ import annotations

import os
import pathlib

import torch

from vqjax.tables import container
from vqjax.tables.torch_reader import TorchTable

__all__ = ["TorchTable", "load_tables"]

ROWS = 2**14
"""Rows that are decoded at a time."""


def load_tables(model: torch.nn.Module, folder: str | os.PathLike[str]) -> dict[str, str]:
  """Put the rows of a folder that `vqjax compress` wrote into a model of any architecture.

  A parameter that two modules share, as of a tied head, is filled once. Rows are cast to the dtype
  of the parameter.

  Args:
    model: the model, such as transformers has, with a parameter for each compressed table.
    folder: the folder, of safetensors.

  Returns:
    The names of the parameters by those of the tables in the folder.

  Raises:
    FileNotFoundError: the folder has no compressed tables.
    ValueError: no parameter, or more than one, has the name and the shape of a table, or a table is
      damaged.
  """
  folder = pathlib.Path(folder)
  if not any(folder.glob("*.safetensors")):
    raise FileNotFoundError(
      f"`folder` must have safetensors; got {folder} without. Compress the model's safetensors, or"
      " load a GGUF with vqjax.lm.checkpoints."
    )
  found, named = {}, dict(model.named_parameters(remove_duplicate=False))
  # Those that the model has under the same name come first: what is left may have other names.
  tables = sorted(
    container.read_manifest(folder).tensors.items(), key=lambda table: table[1] not in named
  )
  for name, tensor in tables:
    table = container.read_table(folder, name)
    parameter = _parameter(model, tensor, table.shape, set(found.values()))
    own, first = model.get_parameter(parameter), 0
    with torch.no_grad():
      for rows in table.blocks(ROWS):
        own[first : first + len(rows)] = torch.from_numpy(rows).to(own)
        first += len(rows)
    found[tensor] = parameter
  return found


def _parameter(
  model: torch.nn.Module, tensor: str, shape: tuple[int, int], filled: set[str]
) -> str:
  """The name of the one parameter with the name and shape of a tensor in a file."""
  named = dict(model.named_parameters(remove_duplicate=False))
  fits = [n for n, own in named.items() if tuple(own.shape) == shape and n not in filled]
  # Some libraries save a model without its outermost module, or with one more.
  end = lambda name, other: name == other or name.endswith(f".{other}")
  ways = (
    lambda name: name == tensor,
    lambda name: end(name, tensor) or end(tensor, name),
    lambda name: name.split(".")[-2:] == tensor.split(".")[-2:],
    lambda name: True,
  )
  for is_it in ways:
    chosen = {id(named[name]): name for name in fits if is_it(name)}
    if len(chosen) == 1:
      return next(iter(chosen.values()))
  raise ValueError(
    f"`model` must have one parameter {tensor} of shape {list(shape)}; it has"
    f" {', '.join(fits) or 'none of this shape'}. Give the model whose tables the folder has."
  )
