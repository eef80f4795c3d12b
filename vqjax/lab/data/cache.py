"""The token cache: tokenised text that is never read half-written or outdated."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vqjax.lab.data.files import atomic_file, content_hash
from vqjax.lab.data.labelled import LabelledSource
from vqjax.lab.data.source import Source
from vqjax.lab.data.tokenizers import Encoder, Tokenizer


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


def cache_folder() -> Path:
  """Return $VQJAX_CACHE, or ~/.cache/vqjax."""
  chosen = os.environ.get("VQJAX_CACHE")
  return Path(chosen) if chosen else Path.home() / ".cache" / "vqjax"


def fit_encoder(source: Source, tokenizer: Tokenizer) -> Encoder:
  """Return the tokenizer fitted to the source's training documents; cached."""
  key = content_hash([source.fingerprint(), repr(tokenizer), *tokenizer.files()])
  path = cache_folder() / f"{key}.encoder.json"
  if path.exists():
    # A damaged file is fitted and written again.
    with contextlib.suppress(ValueError, KeyError):
      return tokenizer.load(json.loads(path.read_text(encoding="utf-8"))["state"])
  encoder = tokenizer.fit(lambda: source.documents("train"))
  with _remedy(path), atomic_file(path) as file:
    file.write(json.dumps({"state": encoder.state()}).encode())
  return encoder


def encode_split(source: Source, encoder: Encoder, split: str) -> TokenSplit:
  """Return the tokens of a split, and the classes of its documents if there are any.

  The tokens are memory-mapped from the cache, and encoded first where it does not hold them.

  Raises:
    ValueError: the encoder returns a token outside its vocabulary.
    OSError: the cache cannot be written; the message names VQJAX_CACHE.
  """
  key = content_hash([source.fingerprint(), encoder.fingerprint(), split])
  path = cache_folder() / f"{key}.{split}.npy"
  encoded = _read(path, encoder)
  if encoded is None:
    _write(path, source, encoder, split)
    encoded = _read(path, encoder)
  labels = source.labels(split) if isinstance(source, LabelledSource) else None
  return dataclasses.replace(encoded, labels=labels)


def _dtype(encoder: Encoder) -> np.dtype:
  return np.dtype("<u2" if encoder.vocab <= 2**16 else "<u4")


def _read(path: Path, encoder: Encoder) -> TokenSplit | None:
  """The cached split; None where a file is missing, cut off or something else."""
  try:
    sizes = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    tokens = np.lib.format.open_memmap(path, mode="r")
    if tokens.dtype != _dtype(encoder) or tokens.shape != (sizes["tokens"],):
      return None
    return TokenSplit(tokens, sizes["text_bytes"], sizes["documents"], encoder.eos)
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _write(path: Path, source: Source, encoder: Encoder, split: str) -> None:
  """Encode one document at a time, since a corpus may not fit in memory."""
  sizes = {"tokens": 0, "text_bytes": 0, "documents": 0}
  header = {"descr": _dtype(encoder).str, "fortran_order": False}
  with contextlib.ExitStack() as stack:
    with _remedy(path):
      file = stack.enter_context(atomic_file(path))
      np.lib.format.write_array_header_1_0(file, header | {"shape": (0,)})
    # Only writing is under the remedy: any other OSError is the source's.
    for document in source.documents(split):
      tokens = encoder.encode(document)
      outside = tokens[(tokens < 0) | (tokens >= encoder.vocab)]
      if outside.size:
        raise ValueError(
          f"`encoder` must return tokens in [0, {encoder.vocab}); got {outside[0]}. Use the"
          " tokenizer that belongs to the vocabulary."
        )
      sizes["tokens"] += len(tokens)
      sizes["text_bytes"] += len(document.encode()) + 1
      sizes["documents"] += 1
      with _remedy(path):
        file.write(tokens.astype(_dtype(encoder)).tobytes())
    with _remedy(path):
      # NumPy pads the header so that a longer shape takes no more bytes.
      file.seek(0)
      np.lib.format.write_array_header_1_0(file, header | {"shape": (sizes["tokens"],)})
      stack.pop_all().close()
      with atomic_file(path.with_suffix(".json")) as about:
        about.write(json.dumps(sizes).encode())


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


def count_tokens(split: TokenSplit, encoder: Encoder) -> np.ndarray:
  """The number of occurrences of each token in a split of this encoder, int64 [V].

  Raises:
    ValueError: a token is outside the encoder's vocabulary.
  """
  if split.tokens.size and int(split.tokens.max()) >= encoder.vocab:
    raise ValueError(
      f"`split` must have tokens in [0, {encoder.vocab}); got {split.tokens.max()}. Count with the"
      " tokenizer that made the tokens."
    )
  return np.bincount(split.tokens, minlength=encoder.vocab).astype(np.int64)
