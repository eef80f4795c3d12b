"""Which documents of a corpus are worth training on: long, in one language, and each once?"""

import dataclasses
import importlib.metadata
import itertools
from collections.abc import Iterator

import py3langid

from vqjax.lab.data.duplicates import Seen, key
from vqjax.lab.data.files import content_hash
from vqjax.lab.data.source import SPLITS, Source

CHUNK = 1024
"""Documents that are compared with all before them at once."""

LANGUAGE_CHARS = 1000
"""Characters from a document's start that say its language; more would cost time alone."""


@dataclasses.dataclass
class Report:
  """How many documents of a split were read, and what became of them; every one counts once.

  Attributes:
    read: documents of the source.
    not_sampled: left out of the sample.
    short: with fewer characters than wanted.
    duplicates: equal to one before, or to a held-out one, but for case and blanks.
    other_language: written in another language.
    kept: the rest.
  """

  read: int = 0
  not_sampled: int = 0
  short: int = 0
  duplicates: int = 0
  other_language: int = 0
  kept: int = 0

  def __str__(self) -> str:
    counts = dataclasses.asdict(self)
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()).replace("_", " ")


@dataclasses.dataclass(frozen=True)
class Filtered(Source):
  """The documents of another source that pass filters, in their order.

  A sample is drawn first, then go short documents, duplicates and other languages. Equal documents
  are in the sample together or not at all. No document is in two splits: of those that are equal
  but for case and blanks, the test split keeps the first, or else the validation split. Near
  duplicates stay. Nothing is held in memory but 8 bytes a document.

  Source: VQ-Logits, Appendix A, whose settings are the defaults. It does not say how languages and
  duplicates were found.

  Attributes:
    source: where the documents come from.
    min_chars: fewest characters that a document has; 0: any.
    language: ISO 639-1 code of the language that `py3langid` must find; None: any.
    deduplicate: drop documents that came before.
    fraction: part of the different documents to sample, by their hashes.
  """

  source: Source
  min_chars: int = 512
  language: str | None = "en"
  deduplicate: bool = True
  fraction: float = 1.0

  def __post_init__(self):
    if self.min_chars < 0:
      raise ValueError(f"data.min_chars {self.min_chars} is negative; give 0 for no limit")
    if not 0 < self.fraction <= 1:
      raise ValueError(f"data.fraction {self.fraction} is outside (0, 1]; 1 samples everything")

  def _documents(self, split: str) -> Iterator[str]:
    yield from self.filtered(split, Report())

  def report(self, split: str) -> Report:
    """What became of the documents of a split; reads them all."""
    report = Report()
    for _ in self.filtered(split, report):
      pass
    return report

  def filtered(self, split: str, report: Report) -> Iterator[str]:
    """`documents`, counted in `report` as they are read.

    Raises:
      ValueError: no document passes; the message has the counts.
    """
    self._check_language()
    seen = self._held_out(split) if self.deduplicate else None
    for chunk in _chunks(self.source.documents(split)):
      for document in self._long_and_new(chunk, seen, report):
        if self.language and py3langid.classify(document[:LANGUAGE_CHARS])[0] != self.language:
          report.other_language += 1
        else:
          report.kept += 1
          yield document
    if not report.kept:
      raise ValueError(
        f"no document of the split {split!r} is left ({report}); loosen data.min_chars,"
        " data.language or data.fraction, or give more documents"
      )

  def _check_language(self) -> None:
    known = sorted({language for language, _ in py3langid.rank("")})
    if self.language is not None and self.language not in known:
      raise ValueError(
        f"data.language {self.language!r} cannot be told; None keeps all, or give one of"
        f" {', '.join(known)}"
      )

  def _held_out(self, split: str) -> Seen:
    """The keys of the splits that keep a document which `split` has too."""
    seen = Seen()
    for other in SPLITS[SPLITS.index(split) + 1 :]:
      for chunk in _chunks(self.source.documents(other)):
        seen.add([k for k in map(key, chunk) if self._samples(k)])
    return seen

  def _samples(self, document_key: int) -> bool:
    return document_key < self.fraction * 2**64

  def _long_and_new(self, chunk: list[str], seen: Seen | None, report: Report) -> list[str]:
    keyed = [(key(document), document) for document in chunk]
    sampled = [(k, document) for k, document in keyed if self._samples(k)]
    long = [(k, document) for k, document in sampled if len(document) >= self.min_chars]
    new = itertools.repeat(True) if seen is None else seen.add([k for k, _ in long])
    left = [document for (_, document), is_new in zip(long, new) if is_new]
    report.read += len(chunk)
    report.not_sampled += len(chunk) - len(sampled)
    report.short += len(sampled) - len(long)
    report.duplicates += len(long) - len(left)
    return left

  def fingerprint(self) -> str:
    """A hash of the source, the settings, and the version of what tells languages."""
    version = importlib.metadata.version("py3langid") if self.language else ""
    settings = f"{self.min_chars} {self.language} {self.deduplicate} {self.fraction}"
    return content_hash([type(self).__name__, self.source.fingerprint(), settings, version])


def _chunks(documents: Iterator[str]) -> Iterator[list[str]]:
  while chunk := list(itertools.islice(documents, CHUNK)):
    yield chunk
