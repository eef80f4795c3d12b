"""Text from tokens that arrive one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from vqjax.lm.tokenizers.reading import Tokenizer

__all__ = ["TextStream"]

BROKEN = "\ufffd"
"""What tokenizers decode bytes to that are not a whole character."""

BEFORE = 5
"""Tokens of the prompt with which the first ones are decoded, because spaces depend on them."""


class TextStream:
  """The text of a growing row of tokens, in pieces, up to the first stop string.

  A piece ends with a whole character, and what may be the beginning of a stop string is held back.

  Attributes:
    text: the pieces so far.
    stopped: whether a stop string has come; the text ends before it.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
    """Begin after a prompt, which is not part of the text."""
    named = {entry: stop_tokens(tokenizer, entry) for entry in stop}
    self._tokenizer = tokenizer
    self._stop = tuple(entry for entry, (_, is_text) in named.items() if is_text)
    self._ends = {token for controls, _ in named.values() for token in controls}
    before = BEFORE
    while before < len(prompt) and not self._begins_text(prompt[-before:]):
      before *= 2
    self._tokens = list(prompt[-before:])
    # Tokens from `_first` are decoded together, which begin with some that have a text of whole
    # characters: tokenizers drop the space before a first one, and some decode a row of bytes that
    # begins within a character to no character at all. The text up to `_read` has been taken.
    self._first, self._read = 0, len(self._tokens)
    self._held = ""
    self.text, self.stopped = "", False

  def push(self, token: int) -> str:
    """The piece that a further token completes, often empty; nothing follows a stop."""
    if self.stopped:
      return ""
    if int(token) in self._ends:
      rest, self.stopped = self.finish(), True
      return rest
    self._tokens.append(int(token))
    text = self._decoded()
    return "" if text.endswith(BROKEN) else self._take(text)

  def finish(self) -> str:
    """The rest, when no token follows."""
    if self.stopped:
      return ""
    piece, rest = self._take(self._decoded()), self._held
    self._held, self.text = "", self.text + rest
    return piece + rest

  def _begins_text(self, tokens: Sequence[int]) -> bool:
    """Whether tokens have a text of their own, which does not begin within a character."""
    text = self._tokenizer.decode(tokens)
    return bool(text) and not text.startswith(BROKEN)

  def _decoded(self) -> str:
    """The text of the tokens that have not been taken."""
    decode, first, read = self._tokenizer.decode, self._first, self._read
    whole, before = decode(self._tokens[first:]), decode(self._tokens[first:read])
    # A prompt may end within a character, which the first tokens complete.
    while not whole.startswith(before) and before.endswith(BROKEN) and read > first:
      read -= 1
      before = decode(self._tokens[first:read])
    return whole[len(before) :]

  def _take(self, text: str) -> str:
    if text and self._begins_text(self._tokens[self._read :]):
      self._first = self._read
    self._read = len(self._tokens)
    text = self._held + text
    found = [at for at in map(text.find, self._stop) if at >= 0]
    if found:
      self.stopped, end = True, min(found)
    else:
      end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
    self._held = "" if self.stopped else text[end:]
    self.text += text[:end]
    return text[:end]


def stop_tokens(tokenizer: Tokenizer, stop: str) -> tuple[list[int], bool]:
  """The control tokens that a stop string names, and whether it occurs as text too.

  Raises:
    ValueError: the string has a control token and more, so that no text has it.
  """
  encoded = tokenizer.encode(stop, special=False)
  named = [token for token in (tokenizer.bos, *tokenizer.eos) if token is not None]
  pieces = {token: tokenizer.piece(token) for token in (*encoded, *named)}
  # Twice, since tokenizers drop the space before a first token.
  is_control = lambda token: not tokenizer.decode([token, token])
  controls = [t for t, piece in pieces.items() if piece and piece in stop and is_control(t)]
  whole = [token for token in controls if pieces[token] == stop]
  left_out = [token for token in controls if token in encoded]
  if left_out and not whole:
    raise ValueError(
      f"`stop` must have strings that can occur in a text; got {stop!r}, of which texts leave"
      f" {pieces[left_out[0]]!r} out. Give {pieces[left_out[0]]!r} alone."
    )
  return whole, not left_out


def _overlap(text: str, stop: str) -> int:
  """Length of the longest end of `text` with which `stop` begins."""
  longest = min(len(text), len(stop) - 1)
  return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def token_text(tokenizer: Tokenizer, token: int) -> str:
  """The text of one token with its spaces, or its name or number where it has none."""
  if not 0 <= token < tokenizer.vocab:
    return f"[{token}]"
  # Between two copies of itself, because tokenizers drop the space before a first token.
  whole, alone = tokenizer.decode([token, token]), tokenizer.decode([token])
  return whole[len(alone) :] or tokenizer.piece(token) or f"[{token}]"


def visible(text: str) -> str:
  """The text in one line, each character of which can be seen."""
  shown = text if text.strip(" ") else text.replace(" ", "␣")
  shown = shown.replace("\n", "⏎").replace("\t", "⇥")
  return "".join(
    char if char.isprintable() else char.encode("unicode_escape").decode() for char in shown
  )
