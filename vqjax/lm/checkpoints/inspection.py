"""The parts of a model: sizes, dtypes, and the share of the vocabulary table."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib

from vqjax.lm.checkpoints.loading import variable_sources
from vqjax.lm.sources.families import FAMILIES
from vqjax.lm.sources.readers import GGUF_FAMILIES, open_source, read_tensors

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
  "router": "feed-forward",
  **dict.fromkeys(("shared_gate", "shared_in", "shared_out", "shared_weight"), "feed-forward"),
  "memories": "n-gram memories",
}
"""Name of a variable -> the part that it belongs to; the others are norms or of attention."""


@dataclasses.dataclass(frozen=True)
class Table:
  """A tensor [V, D] that looks like a vocabulary table.

  Attributes:
    name: its name in the file.
    shape: its shape.
    format: its number format.
    bytes: its bytes.
  """

  name: str
  shape: tuple[int, ...]
  format: str
  bytes: int


@dataclasses.dataclass(frozen=True)
class Tensors:
  """What a file holds whose architecture is not one of this library.

  Attributes:
    path: the file or folder.
    architecture: what its config calls the architecture; None: it has none.
    tables: the tables, found by shape and name, the largest first.
    tensors: number of tensors.
    params: their numbers.
    bytes: their bytes.
  """

  path: str
  architecture: str | None
  tables: tuple[Table, ...]
  tensors: int
  params: int
  bytes: int


NAMES_OF_TABLES = ("embed", "wte", "lm_head", "output.weight", "token_embd", "table.vqjax")
"""What is in the names of vocabulary tables."""

POSITIONS = ("position", "wpe", "patch")
"""What is in the names of tables of something else."""


def inspect_tensors(path: str | pathlib.Path) -> Tensors:
  """The tables of any safetensors or GGUF, without reading the weights.

  A table has two axes, four times as many rows as columns, and a name as of an embedding or a head.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a file is damaged.
  """
  architecture, tensors = read_tensors(path)
  tables = [
    Table(name, tensor.shape, tensor.format, tensor.nbytes)
    for name, tensor in tensors.items()
    if len(tensor.shape) == 2
    and (tensor.table is not None or tensor.shape[0] >= 4 * tensor.shape[1])
    and any(word in name for word in NAMES_OF_TABLES)
    and not any(word in name for word in POSITIONS)
  ]
  return Tensors(
    path=str(path),
    architecture=architecture,
    tables=tuple(sorted(tables, key=lambda table: -math.prod(table.shape))),
    tensors=len(tensors),
    params=sum(math.prod(tensor.shape) for tensor in tensors.values()),
    bytes=sum(tensor.nbytes for tensor in tensors.values()),
  )


def is_known(path: str | pathlib.Path) -> bool:
  """Whether a path is a model of an architecture of this library, which `inspect` takes apart."""
  path = pathlib.Path(path)
  if path.is_file() and path.suffix == ".safetensors" and not (path.parent / CONFIG).is_file():
    return False
  if path.is_dir() and any(path.glob("*.safetensors")) and not (path / CONFIG).is_file():
    return False
  if path.is_dir() or path.suffix in (".safetensors", ".gguf"):
    if not path.exists():
      return True  # which says what is missing
    architecture, _ = read_tensors(path)
    return architecture is None or architecture in {*FAMILIES, *GGUF_FAMILIES}
  return True


CONFIG = "config.json"


def inspect(path: str | pathlib.Path) -> Inspection:
  """The parts of a model; errors as of `load`, without reading the weights."""
  source = open_source(path)
  model = source.decoder()
  params: collections.Counter[str] = collections.Counter()
  formats: dict[str, collections.Counter[str]] = {}
  for names, part in variable_sources(source, model).items():
    owner = names[0].rstrip("_0123456789")
    own = names[1] if owner == "blocks" else owner
    name = NAMES.get(own, "norms" if own.endswith("norm") else "attention")
    params[name] += math.prod(part.shape)
    size = math.prod(part.shape) // len(part.tensors)
    for _, tensor in part.tensors:
      nbytes = tensor.nbytes * size // math.prod(tensor.shape)
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
