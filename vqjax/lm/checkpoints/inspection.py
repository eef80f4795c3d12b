"""The parts of a model: sizes, dtypes, and the share of the vocabulary table."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib

from vqjax.lm.checkpoints.loading import variable_sources
from vqjax.lm.sources.readers import open_source

__all__ = ["Inspection", "inspect"]


@dataclasses.dataclass(frozen=True)
class PartSize:
  """The size of a part of a model in its file.

  Attributes:
    name: the part, such as "embedding".
    params: its parameters.
    bytes: its bytes.
    formats: its number formats, those of most bytes first.
  """

  name: str
  params: int
  bytes: int
  formats: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Inspection:
  """What a model file holds, read without its weights.

  Attributes:
    path: the file or folder.
    kind: "safetensors", "gguf" or "llama2.c".
    architecture: the family of the decoder.
    vocab: number of tokens, V.
    dim: model width, D.
    layers: number of blocks.
    heads: query heads of a block.
    kv_heads: key-value heads of a block.
    context: largest number of tokens in a row.
    tied: the head scores with the rows of the embedding.
    parts: the parts, the vocabulary tables first.
  """

  path: str
  kind: str
  architecture: str
  vocab: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  context: int
  tied: bool
  parts: tuple[PartSize, ...]

  @property
  def params(self) -> int:
    """Parameters of all parts."""
    return sum(part.params for part in self.parts)

  @property
  def bytes(self) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in self.parts)

  @property
  def vocabulary_share(self) -> float:
    """Part of the bytes that embedding and head take."""
    tables = (part.bytes for part in self.parts if part.name in ("embedding", "head"))
    return sum(tables) / self.bytes


NAMES = {
  "embedding": "embedding",
  "head": "head",
  "position": "positions",
  "final_norm": "norms",
  "mlp_gate": "feed-forward",
  "mlp_in": "feed-forward",
  "mlp_out": "feed-forward",
}
"""Name of a variable -> the part that it belongs to; the others are norms or of attention."""


def inspect(path: str | pathlib.Path) -> Inspection:
  """The parts of a model; errors as of `load`, without reading the weights."""
  source = open_source(path)
  model = source.decoder()
  params: collections.Counter[str] = collections.Counter()
  formats: dict[str, collections.Counter[str]] = {}
  for names, part in variable_sources(source, model).items():
    own = names[1] if names[0] == "blocks" else names[0]
    name = NAMES.get(own, "norms" if own.endswith("norm") else "attention")
    params[name] += math.prod(part.shape)
    for _, tensor in part.tensors:
      share = len(range(*part.rows.indices(tensor.shape[0]))), tensor.shape[0]
      nbytes = tensor.nbytes * share[0] // share[1]
      formats.setdefault(name, collections.Counter())[tensor.format] += nbytes
  order = list(dict.fromkeys([*NAMES.values(), "attention"]))
  sizes = (
    PartSize(
      name, params[name], formats[name].total(), tuple(f for f, _ in formats[name].most_common())
    )
    for name in order
    if name in params
  )
  return Inspection(
    path=str(path),
    kind=source.kind,
    architecture=source.config["model_type"],
    vocab=model.head.vocab,
    dim=model.dim,
    layers=model.layers,
    heads=model.heads,
    kv_heads=model.attention.kv_heads or model.heads,
    context=model.context,
    tied=model.head.embedding is not None,
    parts=tuple(sizes),
  )
