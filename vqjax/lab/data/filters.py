"""Filters of a corpus: long documents, in one language, each once."""

import dataclasses
import importlib.metadata
from collections.abc import Iterator

from vqjax.lab.data.corpus_files import content_hash, import_extra, normalised_hash
from vqjax.lab.data.source import SPLITS, Source

__all__ = ["Filtered"]

LANGUAGE_CHARS = 1000
"""Characters from a document's start that its language is detected by; more only take time."""


@dataclasses.dataclass
class FilterCounts:
  """Numbers of documents that were read, dropped by each filter, and kept.

  Attributes:
    read: documents of the source.
    not_sampled: not in the sample.
    short: with too few characters.
    duplicates: equal to an earlier or a held-out one but for case and blanks.
    other_language: in another language.
    kept: the documents that passed all filters.
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

  The filters run in this order: the sample, the length, duplicates, the language. Equal documents
  are in the sample together or not at all. No document is in two splits: of documents that are
  equal but for case and blanks, the test split keeps the first, or else the validation split.
  Near duplicates stay. Deduplication holds a set of 64-bit hashes in memory, about 100 bytes for
  each sampled document.

  Source: VQ-Logits, Appendix A, whose settings are the defaults. It does not say how languages and
  duplicates were detected.

  Attributes:
    source: where the documents come from.
    min_chars: fewest characters of a document; 0: no limit.
    language: ISO 639-1 code of the language that `py3langid` must detect; None: any.
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
      raise ValueError(
        f"`data.min_chars` must be at least 0; got {self.min_chars}. 0 keeps all documents."
      )
    if not 0 < self.fraction <= 1:
      raise ValueError(
        f"`data.fraction` must be in (0, 1]; got {self.fraction}. 1 keeps all documents."
      )

  def _documents(self, split: str) -> Iterator[str]:
    yield from self.filtered(split, FilterCounts())

  def report(self, split: str) -> FilterCounts:
    """Read the documents of a split and return how many each filter drops."""
    report = FilterCounts()
    for _ in self.filtered(split, report):
      pass
    return report

  def filtered(self, split: str, report: FilterCounts) -> Iterator[str]:
    """Yield the documents that pass, counted in `report` as they are read.

    Raises:
      ValueError: no document passes, and the message has the counts; or `language` is unknown.
    """
    if self.language is not None:
      langid = import_extra("py3langid")
      known = sorted({language for language, _ in langid.rank("")})
      if self.language not in known:
        raise ValueError(
          f"`data.language` must be None or one of {', '.join(known)}; got {self.language!r}."
          " Name one of them."
        )
    seen: set[int] = set()
    if self.deduplicate:
      for other in SPLITS[SPLITS.index(split) + 1 :]:
        seen.update(filter(self._samples, map(normalised_hash, self.source.documents(other))))
    for document in self.source.documents(split):
      report.read += 1
      key = normalised_hash(document)
      if not self._samples(key):
        report.not_sampled += 1
      elif len(document) < self.min_chars:
        report.short += 1
      elif key in seen:
        report.duplicates += 1
      else:
        if self.deduplicate:
          seen.add(key)
        if self.language and langid.classify(document[:LANGUAGE_CHARS])[0] != self.language:
          report.other_language += 1
        else:
          report.kept += 1
          yield document
    if not report.kept:
      raise ValueError(
        f"the split {split!r} must keep at least one document; got {report}. Loosen data.min_chars,"
        " data.language or data.fraction, or give more documents."
      )

  def _samples(self, document_hash: int) -> bool:
    return document_hash < self.fraction * 2**64

  def fingerprint(self) -> str:
    """Return a hash of the source, the settings, and the language detector's version."""
    version = ""
    if self.language:
      import_extra("py3langid")
      version = importlib.metadata.version("py3langid")
    settings = f"{self.min_chars} {self.language} {self.deduplicate} {self.fraction}"
    return content_hash([type(self).__name__, self.source.fingerprint(), settings, version])
