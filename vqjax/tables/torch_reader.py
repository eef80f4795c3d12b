"""Compact embeddings in PyTorch: lookups and output scores, without JAX.

This file imports only PyTorch and safetensors, so it may be copied to a machine without JAX:

  from vqjax.tables.torch_reader import TorchCompactEmbedding

  small = TorchCompactEmbedding("small.safetensors")
  vectors = small(tokens)           # [*B, D]
  scores = small.scores(hidden)     # [*B, V], with the trained bias
"""

import json
import os
import zlib

import torch
from safetensors import SafetensorError, safe_open

__all__ = []

FORMAT = "vqjax-compact-embedding"
VERSION = "2"
DTYPES = ("float32", "bfloat16", "float16")
CHUNK = 2**22
TILE = 4096
"""Rows that are unpacked at a time, so that a table [V, D] never exists."""


class TorchCompactEmbedding(torch.nn.Module):
  """The vectors of a compact file, and the scores of a head with these vectors.

  It has the attributes of `vqjax.CompactEmbedding`, whose arrays are buffers: `to` moves them, and
  no optimiser trains them. The codes stay packed.
  """

  def __init__(self, path: str | os.PathLike[str]):
    """Read a file that `vqjax.CompactEmbedding.save` wrote.

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
      meta, names = file.metadata() or {}, set(file.keys())
      for name, wanted in (("format", FORMAT), ("version", VERSION)):
        if meta.get(name) != wanted:
          raise ValueError(
            f"`{name}` of {path} must be {wanted!r}; got {meta.get(name)!r}. Write the file with"
            " CompactEmbedding.save."
          )
      if meta.get("checksum") != _checksum(path):
        raise ValueError(
          f"{path} is damaged: it does not have the checksum that it was saved with. Copy it again,"
          " or save it again."
        )
      if meta.get("dtype") not in DTYPES:
        raise ValueError(
          f"`dtype` of {path} must be one of {', '.join(DTYPES)}; got {meta.get('dtype')!r}. Save"
          " it again."
        )
      read = lambda name: file.get_tensor(name) if name in names else None
      self.register_buffer("data", read("codes"))
      self.register_buffer("values", read("values"))
      self.register_buffer("bias", read("bias"))
    self.vocab, self.dim, self.codes, self.subspaces = (int(meta[k]) for k in ("V", "d", "K", "M"))
    self.additive = meta["additive"] == "true"
    self.dtype = getattr(torch, meta["dtype"])
    self.bits = (self.codes - 1).bit_length()
    count = -(-self.vocab * self.subspaces * self.bits // 8)
    if self.data is None or self.data.shape != (count,) or self.values is None:
      raise ValueError(
        f"`path` must be a file with {count} bytes of codes, and values; got {path}, which has"
        " others. Save it again."
      )

  def extra_repr(self) -> str:
    """The sizes, which `print` shows."""
    return f"{self.vocab}, {self.dim}, codes={self.codes}, subspaces={self.subspaces}"

  def codes_of(self, tokens: torch.Tensor) -> torch.Tensor:
    """The codes of tokens: int64 [*B, M].

    Raises:
      IndexError: a token is outside [0, V).
    """
    tokens = tokens.long()
    if tokens.numel() and not (tokens.min() >= 0 and tokens.max() < self.vocab):
      raise IndexError(
        f"`tokens` must be in [0, {self.vocab}); got {tokens.min()} to {tokens.max()}. Use the"
        " tokenizer of the table."
      )
    # Number i has the bits [i·bits, (i + 1)·bits), the lowest first.
    number = tokens[..., None] * self.subspaces + torch.arange(self.subspaces, device=tokens.device)
    codes = torch.zeros_like(number)
    for bit in range(self.bits):
      at = number * self.bits + bit
      codes |= (self.data[at // 8].long() >> (at % 8) & 1) << bit
    return codes

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    """The vectors of tokens: [*B, D].

    Raises:
      IndexError: a token is outside [0, V).
    """
    return self._composed(tokens).to(self.dtype)

  def _composed(self, tokens):
    codes = self.codes_of(tokens)
    own = torch.arange(self.subspaces, device=codes.device) if len(self.values) > 1 else 0
    parts = self.values[own, codes]
    return parts.mean(dim=-2) if self.additive else parts.flatten(-2)

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
    by_codeword = not self.additive and 2 * len(rows) * self.subspaces <= self.dim
    if by_codeword:
      parts = rows.unflatten(-1, (self.subspaces, self.dim // self.subspaces))
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
      scores += self.bias
    return scores.reshape(*hidden.shape[:-1], self.vocab)


def _checksum(path: str) -> str:
  """The CRC-32 of a file's header, in one spelling and without the checksum, and of its tensors."""
  with open(path, "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header["__metadata__"].pop("checksum", None)
    value = zlib.crc32(json.dumps(header, sort_keys=True).encode())
    while part := file.read(CHUNK):
      value = zlib.crc32(part, value)
  return f"{value:08x}"
