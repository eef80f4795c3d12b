"""How are files of stories read, such as those of TinyStories?"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from vqjax.lab.data.duplicates import key
from vqjax.lab.data.files import content_hash, data_path, read_lines
from vqjax.lab.data.source import Source

END = "<|endoftext|>"
"""What stands between the stories of a file."""

LONG = 60
"""Characters from which on two equal paragraphs are copies, not a phrase that stories share."""


@dataclasses.dataclass(frozen=True)
class Stories(Source):
  """Stories from files in which `END` stands between them; a file without it is one document.

  Every second story of the file that is held out is for validation, the others are for the test. A
  paragraph of some length that a held-out story has too is left out of training.

  Attributes:
    train: files to train on, here or under $VQJAX_DATA.
    held_out: the file that is held out.
    most: stories of either held-out split that are read; None: all.
  """

  train: tuple[str, ...] = (
    "tinystories/gpt2_tokens_val.decoded.txt",
    "tinystories/stories_ajaykumar.txt",
    "tinystories/stories_val_yuninxia.txt",
  )
  held_out: str = "tinystories/gpt2_tokens_test.decoded.txt"
  most: int | None = None

  def _documents(self, split: str) -> Iterator[str]:
    if split == "train":
      yield from self._training()
      return
    mine = self._held_out()[split == "test" :: 2][: self.most]
    if not mine:
      raise ValueError(
        f"{self.held_out} has no story for {split!r}; give a file with at least two, and a `most`"
        " above 0"
      )
    yield from mine

  def _training(self) -> Iterator[str]:
    known = {key(part) for story in self._held_out() for part in _long_paragraphs(story)}
    for name in self.train:
      for story in stories_of(data_path(name, kind="Stories.train")):
        copied = [part for part in _long_paragraphs(story) if key(part) in known]
        for part in copied:
          story = story.replace(part, "")
        if story.strip():
          yield re.sub(r"\n{3,}", "\n\n", story).strip() if copied else story

  def _held_out(self) -> list[str]:
    return list(stories_of(data_path(self.held_out, kind="Stories.held_out")))

  def fingerprint(self) -> str:
    """A hash of the files and of how many stories are held out."""
    files = [data_path(name, kind="Stories") for name in (*self.train, self.held_out)]
    return content_hash([type(self).__name__, str(self.most), *files])


def stories_of(path: Path) -> Iterator[str]:
  """The stories of a file, which is read line by line: all of TinyStories are two gigabytes."""
  lines: list[str] = []
  for line in read_lines(path):
    first, *others = line.split(END)
    lines.append(first)
    for part in others:
      yield from _told(lines)
      lines = [part]
  yield from _told(lines)


def _told(lines: list[str]) -> Iterator[str]:
  """The story of these lines, if there is one."""
  story = "\n".join(lines).strip()
  if story:
    yield story


def _long_paragraphs(story: str) -> list[str]:
  return [part for part in story.split("\n") if len(part.strip()) >= LONG]
