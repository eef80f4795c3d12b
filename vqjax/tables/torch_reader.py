"""Small tables in PyTorch: lookups and output scores, without JAX.

This file imports only PyTorch and safetensors, so it may be copied to a machine without JAX; tables
of integers need `vqjax/tables/container.py` next to it, and NumPy.

  from vqjax.tables.torch_reader import TorchTable

  small = TorchTable("small.safetensors")
  vectors = small(tokens)           # [*B, D]
  scores = small.scores(hidden)     # [*B, V], with the trained bias
"""

import json
import os
import statistics
import zlib

import torch
from safetensors import SafetensorError, safe_open

__all__ = ["TorchTable"]

FORMAT = "vqjax-table"
VERSION = "1"
CODECS = ("integers", "packed", "int8", "codes")
DTYPES = ("float32", "bfloat16", "float16")
INTEGERS = "table.vqjax."
"""What names of the parts of integers begin with, which another file reads."""

CHUNK = 2**22
TILE = 4096
"""Rows that are unpacked at a time, so that a table [V, D] never exists."""


class TorchTable(torch.nn.Module):
  """The vectors of a small table, and the scores of a head with these vectors.

  Its arrays are buffers: `to` moves them, and no optimiser trains them. Codes, levels and packed
  bits stay as they are; integers are decoded to float32 once. Those of a table that has pages stay
  in the file: the rows of tokens are decoded by the host.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Read a file that `vqjax.SmallTable.save` or `vqjax.CompactEmbedding.save` wrote.

    Raises:
      ValueError: the file has another format or version, or contradicts itself.
    """
    super().__init__()
    path = os.fspath(path)
    try:
      opened = safe_open(path, framework="pt")
    except SafetensorError as error:
      raise ValueError(f"{path} is not a safetensors file ({error}). Copy it again.") from error
    with opened as file:
      meta = file.metadata() or {}
      for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if meta.get(name) != wanted:
          raise ValueError(
            f"`{name}` of {path} must be {wanted!r}; got {meta.get(name)!r}. Write the file with"
            " vqjax.compress(...).save."
          )
      # Pages have checksums of their own, which are compared when they are read.
      if meta.get("pages") != "true" and meta.get("checksum") != _checksum(path):
        raise ValueError(
          f"{path} is damaged: it does not have the checksum that it was saved with. Copy it again,"
          " or save it again."
        )
      if meta.get("codec") not in CODECS:
        raise ValueError(
          f"`codec` of {path} must be one of {', '.join(CODECS)}; got {meta.get('codec')!r}. Read"
          " it with the vqjax that wrote it."
        )
      parts = [name for name in file.keys() if not name.startswith(INTEGERS)]  # noqa: SIM118  it is not a dictionary
      tensors = {name: file.get_tensor(name) for name in parts}
    self.codec, self.dtype = meta["codec"], torch.float32
    self.vocab, self.dim = int(meta["V"]), int(meta["d"])
    self.register_buffer("bias", tensors.pop("bias", None))
    getattr(self, f"_read_{self.codec}")(path, meta, tensors)

  def _read_codes(self, path, meta, tensors):
    if meta.get("dtype") not in DTYPES:
      raise ValueError(
        f"`dtype` of {path} must be one of {', '.join(DTYPES)}; got {meta.get('dtype')!r}. Save"
        " it again."
      )
    self.register_buffer("data", tensors.get("codes"))
    self.register_buffer("values", tensors.get("values"))
    self.register_buffer("basis", tensors.get("basis"))
    self.codes, self.subspaces = int(meta["K"]), int(meta["M"])
    self.additive = meta["additive"] == "true"
    self.dtype = getattr(torch, meta["dtype"])
    self.bits = (self.codes - 1).bit_length()
    count = -(-self.vocab * self.subspaces * self.bits // 8)
    if self.data is None or self.data.shape != (count,) or self.values is None:
      raise ValueError(
        f"`path` must be a file with {count} bytes of codes, and values; got {path}, which has"
        " others. Save it again."
      )

  def _read_int8(self, path, meta, tensors):
    for name in ("levels", "scale"):
      if name not in tensors or len(tensors[name]) != self.vocab:
        raise ValueError(f"`path` must have {self.vocab} {name}; got {path}. Save it again.")
      self.register_buffer(name, tensors[name])

  def _read_integers(self, path, meta, tensors):
    try:
      from container import read_table  # the copy next to this one
    except ImportError:
      try:
        from vqjax.tables.container import read_table
      except ImportError as error:
        raise ImportError(
          f"{path} holds integers, which vqjax/tables/container.py reads: copy that file next to"
          " this one."
        ) from error
    table = read_table(path)
    # A table of n-grams may be larger than memory.
    self.stored = table if table.is_paged else None
    if self.stored is None:
      self.register_buffer("weight", torch.from_numpy(table.rows()))

  def _read_packed(self, path, meta, tensors):
    names = "stream", "rank", "size", "width", "scale", "center", "inverse", "is_trellis"
    if absent := [name for name in names if name not in tensors]:
      raise ValueError(f"`path` must have {', '.join(absent)}; got {path}. Save it again.")
    width = tensors["width"].long()
    # Wide numbers come first in a row.
    order = torch.argsort(-width, dim=-1, stable=True)
    end = torch.empty_like(width).scatter_(1, order, torch.gather(width, 1, order).cumsum(1))
    self.is_trellis = bool(tensors["is_trellis"].all())
    values = _trellis_values() if self.is_trellis else _level_values()
    made = {"stream": tensors["stream"].int(), "rank": tensors["rank"].int(), "end": end.int()}
    made |= {"size": tensors["size"].long(), "width": width.int(), "value": values}
    made |= {name: tensors[name].float() for name in ("scale", "center", "inverse")}
    for name, tensor in made.items():
      self.register_buffer(name, tensor)

  def extra_repr(self) -> str:
    """The sizes, which `print` shows."""
    codes = f", codes={self.codes}, subspaces={self.subspaces}" if self.codec == "codes" else ""
    return f"{self.vocab}, {self.dim}, codec={self.codec}{codes}"

  def codes_of(self, tokens: torch.Tensor) -> torch.Tensor:
    """The codes of tokens: int64 [*B, M].

    Raises:
      IndexError: a token is outside [0, V).
    """
    tokens = self._checked(tokens)
    # Number i has the bits [i·bits, (i + 1)·bits), the lowest first.
    number = tokens[..., None] * self.subspaces + torch.arange(self.subspaces, device=tokens.device)
    codes = torch.zeros_like(number)
    for bit in range(self.bits):
      at = number * self.bits + bit
      codes |= (self.data[at // 8].long() >> (at % 8) & 1) << bit
    return codes

  def _checked(self, tokens):
    tokens = tokens.long()
    if tokens.numel() and not (tokens.min() >= 0 and tokens.max() < self.vocab):
      raise IndexError(
        f"`tokens` must be in [0, {self.vocab}); got {tokens.min()} to {tokens.max()}. Use the"
        " tokenizer of the table."
      )
    return tokens

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """The vectors of tokens: [*B, D].

    Raises:
      IndexError: a token is outside [0, V).
    """
    return self._composed(self._checked(tokens)).to(self.dtype)

  def _composed(self, tokens):
    return getattr(self, f"_rows_{self.codec}")(tokens)

  def _rows_codes(self, tokens):
    codes = self.codes_of(tokens)
    own = torch.arange(self.subspaces, device=codes.device) if len(self.values) > 1 else 0
    parts = self.values[own, codes]
    rows = parts.mean(dim=-2) if self.additive else parts.flatten(-2)
    return rows if self.basis is None else rows @ self.basis.to(rows.dtype)

  def _rows_int8(self, tokens):
    group = self.dim // self.scale.shape[1]
    return self.levels[tokens] * self.scale[tokens].repeat_interleave(group, dim=-1)

  def _rows_integers(self, tokens):
    if self.stored is None:
      return self.weight[tokens]
    return torch.from_numpy(self.stored[tokens.cpu().numpy()]).to(tokens.device)

  def _rows_packed(self, tokens):
    rank, last = self.rank[tokens].long(), self.size.cumsum(0)
    units = -(-self.width.sum(dim=1) // 16)
    group = torch.searchsorted(last, rank, right=True)
    begin = (self.size * units).cumsum(0) - self.size * units
    unit = 1 + begin[group] + (rank - last[group] + self.size[group]) * units[group]
    end, width = self.end[group].long(), self.width[group].long()
    # The 12 bits up to a number's own last one.
    at = unit[..., None] + (end - 12 >> 4)
    of = lambda i: self.stream[(at + i).clamp(max=len(self.stream) - 1)].long()
    window = (of(0) << 16 | of(1)) >> (20 - (end - 12 & 15))
    bits = end.clamp(max=12) if self.is_trellis else width
    state = window & (1 << bits) - 1
    value = self.value[state if self.is_trellis else state + (1 << width)]
    value = torch.where(width > 0, value, torch.zeros_like(value))
    return (self.center[group] + self.scale[group] * value) @ self.inverse

  def scores(self, hidden: torch.Tensor) -> torch.Tensor:
    """The scores of all tokens: hidden · vectors + bias, float32 [*B, V].

    No array [V, D] is built: few hidden vectors sum the scores of M codewords for each token, and
    many are multiplied by a tile of vectors at a time.
    """
    if hidden.shape[-1] != self.dim:
      raise ValueError(
        f"`hidden` must have width {self.dim}, that of the vectors; got {hidden.shape[-1]}. Give"
        " the inputs of the output head."
      )
    rows = hidden.reshape(-1, self.dim).float()
    scores = rows.new_empty(len(rows), self.vocab)
    # To gather costs twice as much as to read in order.
    by_codeword = self.codec == "codes" and not self.additive
    by_codeword = by_codeword and 2 * len(rows) * self.subspaces <= self.dim
    if by_codeword:
      turned = rows if self.basis is None else rows @ self.basis.float().T
      parts = turned.unflatten(-1, (self.subspaces, -1))
      # `to(dtype)` of a model converts the buffer too.
      values = self.values.float().expand(self.subspaces, -1, -1)
      table = torch.einsum("bmc,mkc->bmk", parts, values)
    for first in range(0, self.vocab, TILE):
      tokens = torch.arange(first, min(first + TILE, self.vocab), device=rows.device)
      if by_codeword:
        codes = self.codes_of(tokens)
        tile = sum(table[:, m, codes[:, m]] for m in range(self.subspaces))
      else:
        tile = rows @ self._composed(tokens).float().T
      scores[:, first : first + len(tokens)] = tile
    if self.bias is not None:
      scores += self.bias.float()
    return scores.reshape(*hidden.shape[:-1], self.vocab)


def _trellis_values():
  """The value of each state of `vqjax.ops.trellis`."""
  state = torch.arange(2**12)
  for factor in (3_077, 1_009, 2_221):
    state = (state * factor + 3_512) % 2**12
    state ^= state >> 6
  inverse = statistics.NormalDist().inv_cdf
  return torch.tensor([inverse((rank + 0.5) / 2**12) for rank in range(2**12)])[state]


def _level_values():
  """The value of each level of each width, at 2^width + level."""
  inverse, value = statistics.NormalDist().inv_cdf, [0.0]
  for width in range(9):
    value += [inverse((code + 0.5) / 2**width) for code in range(2**width)]
  return torch.tensor(value)


def _checksum(path: str) -> str:
  """The CRC-32 of a file's header, in one spelling and without the checksum, and of its tensors."""
  with open(path, "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header["__metadata__"].pop("checksum", None)
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    while part := file.read(CHUNK):
      value = zlib.crc32(part, value)
  return f"{value:08x}"
