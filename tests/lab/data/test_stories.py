"""Are stories told apart, held out, and kept out of training?"""

import pytest

from vqjax.lab.data import Stories
from vqjax.lab.data.corpora import END

COPY = "This paragraph is long enough that two stories do not share it by chance."


@pytest.fixture
def stories(tmp_path):
  def make(train, held_out, **fields):
    names = []
    for number, text in enumerate((*train, held_out)):
      path = tmp_path / f"{number}.txt"
      path.write_text(text, encoding="utf-8")
      names.append(str(path))
    return Stories(tuple(names[:-1]), names[-1], **fields)

  return make


HELD_OUT = f"one\n{END}\ntwo\n{COPY}\n{END}\nthree\n{END}\n"


def test_stories_are_told_apart_and_every_second_is_for_the_test(stories):
  source = stories(["a\n\nb", f"c{END}\n d "], HELD_OUT)
  assert list(source.documents("train")) == ["a\n\nb", "c", "d"]
  assert list(source.documents("valid")) == ["one", "three"]
  assert list(source.documents("test")) == [f"two\n{COPY}"]
  assert list(stories(["a"], HELD_OUT, most=1).documents("valid")) == ["one"]


def test_a_paragraph_of_a_held_out_story_is_not_trained_on(stories):
  source = stories([f"before\n\n{COPY}\n\nbehind{END}{COPY}{END}one"], HELD_OUT)
  assert list(source.documents("train")) == ["before\n\nbehind", "one"]


def test_a_split_without_a_story_says_so(stories):
  with pytest.raises(ValueError, match=r"`held_out` must have a story for 'test'"):
    list(stories(["a"], "one").documents("test"))


def test_the_fingerprint_is_of_the_texts(stories):
  first = stories(["a"], HELD_OUT).fingerprint()
  assert stories(["b"], HELD_OUT).fingerprint() != first
  assert stories(["a"], HELD_OUT, most=1).fingerprint() != first
