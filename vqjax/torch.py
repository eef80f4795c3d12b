"""Tables of PyTorch's models: what errors cost, and compressed rows, without JAX.

vqjax.torch.collect(model, batches, "moments.safetensors")
# vqjax compress FOLDER --bytes 1/8 --table TENSOR moments.safetensors --out small
model = transformers.AutoModelForCausalLM.from_pretrained("small")  # warns: no tables
vqjax.torch.load_tables(model, "small")
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vqjax.tables import container
from vqjax.tables.torch_reader import TorchTable

__all__ = ["TorchTable", "attach", "collect", "detach", "load_tables"]

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
  manifest = sorted(
    container.read_manifest(folder).tensors.items(), key=lambda table: table[1] not in named
  )
  tables = [(tensor, container.read_table(folder, name)) for name, tensor in manifest]
  # A parameter that the folder holds whole is that of no table.
  files = [safe_open(file, framework="np") for file in folder.glob("*.safetensors")]
  kept = {name for file in files for name in file.keys()}  # noqa: SIM118  not a dictionary
  for tensor, table in tables:
    parameter = _parameter(model, tensor, table.shape, kept | set(found.values()))
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


class _Sums:
  """Sums of outer products of vectors by name, and counts of tokens."""

  def __init__(self, vocab: int):
    self.rows, self.sums = 0, {}
    self.counts = torch.zeros(vocab, dtype=torch.float64)

  def count(self, tokens: torch.Tensor) -> None:
    self.counts += torch.bincount(tokens.flatten().cpu(), minlength=len(self.counts))

  def add(self, **vectors: torch.Tensor) -> None:
    for name, flat in vectors.items():
      flat = flat.double()
      self.sums[name] = self.sums.get(name, 0) + (flat.T @ flat).cpu()
    self.rows += len(flat)

  def tensors(self) -> dict[str, torch.Tensor]:
    means = {name: total / self.rows for name, total in self.sums.items()}
    return means | {"counts": self.counts, "tokens": torch.tensor([self.rows])}


def collect(
  model: torch.nn.Module,
  batches: Iterable[torch.Tensor],
  path: str | os.PathLike[str],
  table: torch.nn.Module | None = None,
  counted: Iterable[torch.Tensor] = (),
) -> None:
  """Run a model of transformers, and write the file of its moments: `vqjax.tables.Moments`.

  Some ten thousand tokens are enough to run. Rows of tokens that no text has get the fewest bits:
  count a few hundred kilobytes of every language that matters.

  Args:
    model: a causal language model of transformers.
    batches: tokens [B, T] that are run and counted.
    path: the file that is written.
    table: an embedding that is an input alone, as those of every block; None: the model's own.
    counted: tokens that are counted, and not run.
  """
  own, head = table or model.get_input_embeddings(), model.get_output_embeddings()
  sums, scale, kept = _Sums(len(own.weight)), getattr(own, "embed_scale", 1.0), {}

  def keep(module, args, output):
    kept["vectors"] = output.detach().requires_grad_()
    return kept["vectors"]

  hooks = [own.register_forward_hook(keep)]
  hooks.append(head.register_forward_pre_hook(lambda _, args: kept.update(states=args[0].detach())))
  later = lambda x: x[:, 1:].flatten(0, 1)  # the first position sees nothing
  for tokens in batches:
    logits = model(tokens).logits[:, 1:].float()
    drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
    torch.log_softmax(logits, -1).gather(-1, drawn[..., None]).sum().backward()
    inputs = later(scale * kept["vectors"].grad)
    if table is not None:
      sums.add(hidden=inputs)
    else:
      sums.add(hidden=later(kept["states"]), inputs=inputs)
    sums.count(tokens)
  for tokens in counted:
    sums.count(tokens)
  for hook in hooks:
    hook.remove()
  save_file(sums.tensors(), path)


def attach(model: Any) -> None:
  """Sum the hidden states of a model of vLLM: `llm.apply_model(vqjax.torch.attach)`.

  Compiled graphs call no hooks and pad their batches, and cached prefixes are not run again: make
  it with `LLM(..., enforce_eager=True, enable_prefix_caching=False)`. It computes without
  gradients, so that an embedding is weighed as the head is. It is tested on a model that is called
  as vLLM 0.17 calls its text models; vLLM itself was not run.
  """
  model.sums = sums = _Sums(model.config.vocab_size)

  def keep(module, args, kwargs, states):
    sums.count(kwargs["input_ids"])
    sums.add(hidden=states[kwargs["positions"] > 0])

  model.hook = model.register_forward_hook(keep, with_kwargs=True)


def detach(model: Any) -> dict[str, torch.Tensor]:
  """The moments since `attach`: `save_file(llm.apply_model(vqjax.torch.detach)[-1], path)`."""
  model.hook.remove()
  return model.sums.tensors()
