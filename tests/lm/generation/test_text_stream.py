"""Pieces of text are whole characters and end before stop strings."""

import pytest

from tests.fakes import FakeTokenizer
from vqjax.lm.generation import TextStream

TEXT = "naïve café — 漢字 😀🏳️‍🌈 end"


class Bytes(FakeTokenizer):
  """A tokenizer whose tokens are bytes."""

  vocab = 256

  def encode(self, text, *, special=True):
    """The bytes of a text."""
    return list(text.encode())

  def decode(self, tokens):
    """The text of bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("prompt", ["", "é😀"])
def test_pieces_are_whole_characters_and_join_to_the_text(prompt):
  text = TextStream(Bytes(), Bytes().encode(prompt))
  pieces = [text.push(token) for token in Bytes().encode(TEXT)] + [text.finish()]
  assert [piece for piece in pieces if piece] == list(TEXT)
  assert text.text == TEXT


def test_bytes_that_are_no_character_come_with_the_end():
  text = TextStream(Bytes(), [])
  pieces = [text.push(token) for token in [97, 0xE2, 0x82]]
  assert pieces == ["a", "", ""]
  assert text.finish() == "\ufffd"


def test_a_character_that_the_prompt_begins_is_part_of_the_text():
  text = TextStream(Bytes(), "aé😀".encode()[:-2])
  pieces = [text.push(token) for token in "😀b".encode()[2:]]
  assert pieces == ["", "😀", "b"]


class ByteFallback(Bytes):
  """Bytes whose row has no character at all if one of them is not whole, as in `tokenizers`."""

  def decode(self, tokens):
    """The text of bytes, without the spaces before it, as in SentencePiece."""
    try:
      return bytes(tokens).decode().lstrip(" ")
    except UnicodeDecodeError:
      return "\ufffd" * len(tokens)


@pytest.mark.parametrize("cut", [0, 2])
def test_a_text_does_not_depend_on_where_its_row_of_bytes_is_cut(cut):
  written = "😀a  漢字   b".encode()
  text = TextStream(ByteFallback(), "漢😀😀".encode() + written[:cut])
  assert "".join([text.push(token) for token in written[cut:]]) == "😀a  漢字   b"


def test_what_may_begin_a_stop_string_is_held_back():
  text = TextStream(Bytes(), [], ["abd", "xyz"])
  pieces = [text.push(token) for token in b"qabcab"]
  assert pieces == ["q", "", "", "abc", "", ""]
  assert not text.stopped
  assert text.push(ord("d")) == ""
  assert text.stopped
  assert (text.push(ord("x")), text.finish()) == ("", "")
  assert text.text == "qabc"


def test_the_earliest_of_two_stop_strings_ends_the_text():
  text = TextStream(
    type("Whole", (Bytes,), {"decode": lambda _, t: "one.two!three" * len(t)})(), [], ["!", "."]
  )
  assert text.push(0) == "one"


def test_what_was_held_back_comes_with_the_end():
  text = TextStream(Bytes(), [], ["stop"])
  assert "".join(text.push(token) for token in b"so sto") == "so "
  assert text.finish() == "sto"
  assert text.text == "so sto"


def test_a_stop_string_that_is_a_control_token_is_its_id():
  names = {"encode": lambda _, text, special=True: [0] if text == "<end>" else list(text.encode())}
  names |= {"decode": lambda _, tokens: bytes(t for t in tokens if t).decode("utf-8", "replace")}
  names |= {"piece": lambda _, token: chr(token) if token else "<end>"}
  text = TextStream(type("Control", (Bytes,), names)(), [], ["<end>", "<e"])
  assert [text.push(token) for token in b"a<\0b"[:3]] == ["a", "", "<"]
  assert text.stopped
  assert text.text == "a<"
  assert text.finish() == ""
