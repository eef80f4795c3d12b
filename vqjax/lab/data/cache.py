"""How is text tokenised only once, and never read half-written or out of date?"""

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

HEADER = np.dtype(
  [("magic", "S8"), ("tokens", "<i8"), ("text_bytes", "<i8"), ("documents", "<i8"), ("eos", "<i8")]
)
MAGIC = b"vqjaxtk1"


@dataclasses.dataclass(frozen=True)
class TokenSplit:
  """The tokens of a split, documents one after another, each ended by `eos`.

  Attributes:
    tokens: memory-mapped uint16 or uint32.
    text_bytes: UTF-8 bytes of the documents, plus one for the end of each, which a token predicts.
    documents: number of documents.
    eos: the token that ends a document.
    labels: int32 number of each document's class, where the source has classes.
  """

  tokens: np.ndarray
  text_bytes: int
  documents: int
  eos: int
  labels: np.ndarray | None = None


def cache_folder() -> Path:
  """$VQJAX_CACHE, or ~/.cache/vqjax."""
  chosen = os.environ.get("VQJAX_CACHE")
  return Path(chosen) if chosen else Path.home() / ".cache" / "vqjax"


def fit_encoder(source: Source, tokenizer: Tokenizer) -> Encoder:
  """The tokenizer fitted to the source's training documents, from the cache where it is there."""
  key = content_hash([source.fingerprint(), repr(tokenizer), *tokenizer.files()])
  path = cache_folder() / f"{key}.encoder.json"
  if path.exists():
    try:
      return tokenizer.load(json.loads(path.read_text(encoding="utf-8"))["state"])
    except (ValueError, KeyError):
      pass  # damaged: fitted and written again
  encoder = tokenizer.fit(lambda: source.documents("train"))
  with _remedy(path), atomic_file(path) as file:
    file.write(json.dumps({"state": encoder.state()}).encode())
  return encoder


def encode_split(source: Source, encoder: Encoder, split: str) -> TokenSplit:
  """The split's tokens, memory-mapped from the cache; encoded first where it does not hold them.

  And the classes of its documents, where the source has them.

  Raises:
    ValueError: the encoder gives a token outside its vocabulary.
    OSError: the cache cannot be written; the message names VQJAX_CACHE.
  """
  key = content_hash([source.fingerprint(), encoder.fingerprint(), split])
  path = cache_folder() / f"{key}.{split}.tokens"
  dtype = _dtype(encoder.vocab)
  if not _is_whole(path, dtype):
    _write(path, source, encoder, split)
  labels = source.labels(split) if isinstance(source, LabelledSource) else None
  return dataclasses.replace(_read(path, dtype), labels=labels)


def _write(path: Path, source: Source, encoder: Encoder, split: str) -> None:
  """Encodes a document at a time, since a corpus may not fit in memory; the header comes last."""
  tokens = text_bytes = documents = 0
  with contextlib.ExitStack() as stack:
    with _remedy(path):
      file = stack.enter_context(atomic_file(path))
      file.write(bytes(HEADER.itemsize))
    # Not under the remedy: what fails here is the source.
    for document in source.documents(split):
      encoded = _encode(encoder, document)
      tokens += len(encoded)
      text_bytes += len(document.encode()) + 1
      documents += 1
      with _remedy(path):
        file.write(encoded.tobytes())
    header = np.array((MAGIC, tokens, text_bytes, documents, encoder.eos), HEADER)
    with _remedy(path):
      file.seek(0)
      file.write(header.tobytes())
      stack.pop_all().close()


def _encode(encoder: Encoder, document: str) -> np.ndarray:
  tokens = encoder.encode(document)
  wrong = tokens[(tokens < 0) | (tokens >= encoder.vocab)]
  if wrong.size:
    raise ValueError(
      f"token {wrong[0]} is outside the vocabulary of {encoder.vocab}; the tokenizer does not"
      " belong to that vocabulary"
    )
  return tokens.astype(_dtype(encoder.vocab))


def _dtype(vocab: int) -> np.dtype:
  return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def _read(path: Path, dtype: np.dtype) -> TokenSplit:
  header = _header(path)
  shape = (int(header["tokens"]),)
  tokens = np.memmap(path, dtype, "r", HEADER.itemsize, shape) if shape[0] else np.zeros(0, dtype)
  return TokenSplit(tokens, int(header["text_bytes"]), int(header["documents"]), int(header["eos"]))


def _header(path: Path) -> np.ndarray:
  with path.open("rb") as file:
    return np.frombuffer(file.read(HEADER.itemsize), HEADER)[0]


def _is_whole(path: Path, dtype: np.dtype) -> bool:
  """Whether the file is there and as long as its header says."""
  if not path.exists() or path.stat().st_size < HEADER.itemsize:
    return False
  header = _header(path)
  content = path.stat().st_size - HEADER.itemsize
  return bool(header["magic"] == MAGIC) and content == header["tokens"] * dtype.itemsize


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
