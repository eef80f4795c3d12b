"""The token cache: tokenised text that is never read half-written or outdated."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.source import Source
from vqjax.lab.data.tokenizer_recipes import TokenizerRecipe
from vqjax.lm import records
from vqjax.lm.tokenizers import Tokenizer
from vqjax.outputs import atomic_file

__all__ = ["TokenSplit", "encode_document", "encode_split", "fingerprint", "fit_tokenizer"]


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of a split, documents one after another, each ended by `eos`.

  Attributes:
    tokens: memory-mapped uint16 or uint32 [N].
    text_bytes: UTF-8 bytes of the documents, plus one for the end of each.
    documents: number of documents.
    eos: the token that ends a document.
    labels: int32 [documents], the number of each document's class; None where the source has no
      classes.
  """

  tokens: np.ndarray
  text_bytes: int
  documents: int
  eos: int
  labels: np.ndarray | None = None


@dataclasses.dataclass
class _CachedSplit:
  """Schema of the file beside the tokens; `file` is the checksum of theirs."""

  tokens: int
  text_bytes: int
  documents: int
  file: str


@dataclasses.dataclass
class _CachedTokenizer:
  """Schema of the file of a fitted tokenizer."""

  state: str


def cache_folder() -> Path:
  """Return $VQJAX_CACHE, or ~/.cache/vqjax."""
  chosen = os.environ.get("VQJAX_CACHE")
  return Path(chosen) if chosen else Path.home() / ".cache" / "vqjax"


def fingerprint(tokenizer: Tokenizer) -> str:
  """Return a hash that changes with anything that the tokenizer's ids depend on."""
  return content_hash([type(tokenizer).__name__, tokenizer.state()])


def encode_document(tokenizer: Tokenizer, document: str) -> np.ndarray:
  """Return the tokens of a document and the one that ends it, int64.

  BOS comes first, unless it is the token that ends a document too: then the end of the document
  before begins the next, and loaders put one before the first.
  """
  end = tokenizer.eos[0]
  return np.array([*tokenizer.encode(document, special=tokenizer.bos != end), end], np.int64)


def fit_tokenizer(source: Source, recipe: TokenizerRecipe) -> Tokenizer:
  """Return the tokenizer fitted to the source's training documents; cached."""
  key = content_hash([source.fingerprint(), repr(recipe), *recipe.files()])
  path = cache_folder() / f"{key}.tokenizer.json"
  try:
    kept = records.read(path, _CachedTokenizer)
    if kept is not None:
      return recipe.load(kept["state"])
  except (ValueError, OSError) as error:
    _warn(path, error)
  fitted = recipe.fit(lambda: source.documents("train"))
  with _remedy(path):
    records.write(path, {"state": fitted.state()})
  return fitted


def encode_split(source: Source, tokenizer: Tokenizer, split: str) -> TokenSplit:
  """Return the tokens of a split, and the classes of its documents if there are any.

  The tokens are memory-mapped from the cache, and encoded first where it does not hold them, or
  holds others than were written: a checksum of the file is compared at each call.

  Raises:
    ValueError: the tokenizer returns a token outside its vocabulary.
    OSError: the cache cannot be written; the message names VQJAX_CACHE.
  """
  key = content_hash([source.fingerprint(), fingerprint(tokenizer), split])
  path = cache_folder() / f"{key}.{split}.npy"
  encoded = _read(path, tokenizer)
  if encoded is None:
    _write(path, source, tokenizer, split)
    encoded = _read(path, tokenizer)
  return dataclasses.replace(encoded, labels=source.labels(split))


def _dtype(tokenizer: Tokenizer) -> np.dtype:
  return np.dtype("<u2" if tokenizer.vocab <= 2**16 else "<u4")


def _read(path: Path, tokenizer: Tokenizer) -> TokenSplit | None:
  """The cached split; None where a file is missing, or damaged, which is a warning."""
  try:
    sizes = records.read(path.with_suffix(".json"), _CachedSplit)
    if sizes is None or not path.exists():
      return None
    if records.file_checksum(path) != sizes["file"]:
      raise ValueError(f"{path} does not have the checksum that was written with it")
    tokens = np.lib.format.open_memmap(path, mode="r")
    if tokens.dtype != _dtype(tokenizer) or tokens.shape != (sizes["tokens"],):
      raise ValueError(f"{path} does not have the tokens that were written to it")
    return TokenSplit(tokens, sizes["text_bytes"], sizes["documents"], tokenizer.eos[0])
  except (OSError, ValueError) as error:
    _warn(path, error)
    return None


def _warn(path: Path, error: Exception) -> None:
  problem = str(error).partition(". ")[0]
  warnings.warn(f"the cache {path} is made again: {problem}", stacklevel=4)


def _write(path: Path, source: Source, tokenizer: Tokenizer, split: str) -> None:
  """Encode one document at a time, since a corpus may not fit in memory."""
  sizes: dict[str, Any] = {"tokens": 0, "text_bytes": 0, "documents": 0}
  header = {"descr": _dtype(tokenizer).str, "fortran_order": False}
  with contextlib.ExitStack() as stack:
    with _remedy(path):
      file = stack.enter_context(atomic_file(path))
      np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
    # Only writing is under the remedy: any other OSError is the source's.
    for document in source.documents(split):
      tokens = encode_document(tokenizer, document)
      outside = tokens[(tokens < 0) | (tokens >= tokenizer.vocab)]
      if outside.size:
        raise ValueError(
          f"`tokenizer` must return tokens in [0, {tokenizer.vocab}); got {outside[0]}. Use the"
          " tokenizer that belongs to the vocabulary."
        )
      sizes["tokens"] += len(tokens)
      sizes["text_bytes"] += len(document.encode()) + 1
      sizes["documents"] += 1
      with _remedy(path):
        file.write(tokens.astype(_dtype(tokenizer)).tobytes())
    with _remedy(path):
      # NumPy pads the header so that a longer shape takes no more bytes.
      file.seek(0)
      np.lib.format.write_array_header_1_0(file, header | {"shape": (sizes["tokens"],)})
      file.flush()
      sizes["file"] = records.file_checksum(file.name)
      # Of several processes that write at once each has its own tokens, equal to the others'.
      stack.pop_all().close()
      records.write(path.with_suffix(".json"), sizes)


@contextlib.contextmanager
def _remedy(path: Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    raise OSError(
      error.errno,
      f"cannot write the token cache ({error.strerror}); set VQJAX_CACHE to a folder with room",
      str(path),
    ) from error


def count_tokens(split: TokenSplit, tokenizer: Tokenizer) -> np.ndarray:
  """The number of occurrences of each token in a split of this tokenizer, int64 [V].

  Raises:
    ValueError: a token is outside the tokenizer's vocabulary.
  """
  if split.tokens.size and int(split.tokens.max()) >= tokenizer.vocab:
    raise ValueError(
      f"`split` must have tokens in [0, {tokenizer.vocab}); got {split.tokens.max()}. Count with"
      " the tokenizer that made the tokens."
    )
  return np.bincount(split.tokens, minlength=tokenizer.vocab).astype(np.int64)
