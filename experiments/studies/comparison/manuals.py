"""Heads on English manual pages of this machine, as a text like Penn Treebank's: two passes.

vqjax study experiments/studies/comparison/manuals.py --out experiments/studies/comparison/manuals

Dropout is tuned for every row, in trainings of all steps. The learning rate is the one that most
tunings of Penn Treebank chose.
"""

import dataclasses
import functools
import gzip
import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from experiments.gemma_compression import long_lines, plain
from experiments.studies.comparison import ptb
from experiments.studies.comparison.rows import rows
from vqjax.lab.config import Experiment
from vqjax.lab.data import Source, WordTokenizer
from vqjax.lab.data.corpus_files import content_hash
from vqjax.lab.data.source import SPLITS
from vqjax.lab.study import Study
from vqjax.lab.training.run_folder import load_text

CHECKSUM = "0b87c0502e64702b1b82fa3624f007b4"
"""The pages of the kept results."""

PAGES = pathlib.Path("/usr/share/man")
PARTS = {"test": (0, 1), "valid": (2, 3)}
"""Split -> twentieths of the families of pages; training has the others."""


@dataclasses.dataclass(frozen=True)
class Manuals(Source):
  """The first words of each family of pages, in lower case, with a document for each sentence.

  A family is the pages whose names begin with the same word, such as git and git-add; they share
  sentences, and are in one split. A long line that is in the training text is left out of the
  others. Numbers are N, and there is no punctuation.

  Attributes:
    checksum: fingerprint of the pages, which differ between machines. It is part of a run's
      identity, so that results of different pages are never in one table.
    most: words of a family, after which no further page is read.
  """

  checksum: str
  most: int = 300

  def _documents(self, split: str) -> Iterator[str]:
    if self.fingerprint() != self.checksum:
      raise ValueError(
        f"`checksum` must be that of the pages in {PAGES}, {self.fingerprint()}; got"
        f" {self.checksum}. Set CHECKSUM, and run every row of these pages anew."
      )
    yield from _sentences(self.most)[split]

  def pages(self) -> dict[str, int]:
    """The number of pages of each split."""
    return {split: len(texts) for split, texts in _texts(self.most).items()}

  def fingerprint(self) -> str:
    """Return a hash of the sentences of the three splits."""
    sentences = _sentences(self.most)
    return content_hash(part for split in SPLITS for part in (split, *sentences[split]))


def words(text: str) -> list[str]:
  """The words of a text; a number is N."""
  found = re.findall(r"[a-z]+(?:'[a-z]+)?|\d+", text.lower())
  return ["N" if word[0].isdigit() else word for word in found]


def split_of(family: str) -> str:
  """The split of a family, which does not depend on what else is installed."""
  digest = hashlib.blake2b(family.encode(), digest_size=8).digest()
  part = int.from_bytes(digest, "little") % 20
  return next((split for split, parts in PARTS.items() if part in parts), "train")


@functools.cache
def _sentences(most: int) -> dict[str, list[str]]:
  """Split -> its sentences, as words with a space between."""
  return {
    split: [
      " ".join(found)
      for text in texts.values()
      for sentence in re.split(r"[.:!?]\s+", text)
      if (found := words(sentence))
    ]
    for split, texts in _texts(most).items()
  }


@functools.cache
def _texts(most: int) -> dict[str, dict[pathlib.Path, str]]:
  """Split -> its pages and their texts."""
  texts: dict[str, dict[pathlib.Path, str]] = {split: {} for split in SPLITS}
  used: dict[str, int] = {}
  for path in sorted(PAGES.glob("man[1-8]/*.gz")):
    family = re.split(r"[^a-z0-9]", path.name.lower())[0]
    if used.get(family, 0) >= most or path.is_symlink() or not path.is_file():
      continue
    # Names of fonts and strings of two letters, which `plain` leaves.
    roff = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    roff = re.sub(r"\\f\(..|\\\*\(..", "", roff)
    text, number = "", used.get(family, 0)
    for line in plain(roff).splitlines():
      if number >= most:
        break
      text, number = f"{text}{line}\n", number + len(words(line))
    if number > used.get(family, 0):
      texts[split_of(family)][path], used[family] = text, number
  seen = long_lines("".join(texts["train"].values()))
  for split in PARTS:
    for path, text in texts[split].items():
      kept = (line for line in text.splitlines(True) if not seen & long_lines(line))
      texts[split][path] = "".join(kept)
  if not all(texts.values()):
    raise FileNotFoundError(
      f"`PAGES` must hold manual pages for each split; got {PAGES}. Install the system's pages."
    )
  return texts


def study() -> Study:
  """The study."""
  headline = "tied-contexts", "tied-contexts-file", "tied-contexts-memory", "tied"
  further = "dense-contexts", "dense", "sampled", "codebook", "product", "product-random"
  base = dataclasses.replace(
    ptb.base(steps=1_914),
    data=Manuals(CHECKSUM),
    tokenizer=WordTokenizer(vocab=10_000, split=False),
  )
  return Study(
    base=base,
    rows=rows(ptb.SIZES, (*headline, *further, "product-learned"), headline),
    tune={"train.learning_rate": (40.0,), "model.dropout": (0.0, 0.15)},
    seeds=3,
    rounds=(1,),
    measure=_text_of,
  )


def _text_of(experiment: Experiment, folder: pathlib.Path) -> dict[str, Any]:
  """What the text was, which differs between machines."""
  del folder
  tokens = {name: len(split.tokens) for name, split in load_text(experiment).splits.items()}
  data = experiment.data
  return {"text": {"checksum": data.fingerprint(), "pages": data.pages(), "tokens": tokens}}
