"""The vocabulary of a GGUF: its tokens, what they are for, and which of them end a text.

Converters write which tokens control a model, and few of its ends; the others are known by their
texts. What is not in the file is as in llama.cpp, except where its rule takes text for a token:
`</s>` ends a text only where it is a control token, since Gemma's and Qwen's vocabularies have the
HTML tag.
Source: src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from vqjax.lm.records import one_line
from vqjax.lm.tokenizers.byte_level import RULES, WordRule

__all__ = []

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens, which are those of SentencePiece."""

ENDS = (
  *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
  *("<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
  *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
  "<｜end▁of▁sentence｜>",
)
"""Tokens that end a text or a turn wherever they are."""

FILL_IN_ENDS = {
  "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
  "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
  "fim_sep": ("<|file_sep|>",),
}
"""Keys of tokens between texts, which end one too, and their texts where the key is missing."""

SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
"""Control tokens that stay in a text."""


@dataclasses.dataclass(frozen=True)
class GgufVocabulary:
  """The tokens of a GGUF and how they are used.

  Attributes:
    kind: "llama" for SentencePiece with scores, "gpt2" for merges of words.
    tokens: the tokens by their ids.
    types: their types; `UNUSED` for rows of the table that stand for no token.
    scores: their scores, for "llama".
    merges: pairs of tokens, for "gpt2".
    rule: how words are split, for "gpt2".
    bos: the id of BOS; None: there is none.
    eos: ids that end a text, the file's own first.
    add_bos: BOS begins a text.
    add_space: a text is encoded as if it began with a space, for "llama".
    rstripped: ids of tokens to which the spaces behind them belong.
  """

  kind: str
  tokens: list[str]
  types: list[int]
  scores: list[float]
  merges: list[tuple[str, str]]
  rule: WordRule
  bos: int | None
  eos: list[int]
  add_bos: bool
  add_space: bool
  rstripped: list[int]


def padding_name(number: int) -> str:
  """What converters call a row of the table that stands for no token."""
  return f"[PAD{number}]"


def read_vocabulary(metadata: Mapping[str, Any], path: pathlib.Path) -> GgufVocabulary | None:
  """The vocabulary in the metadata of a GGUF; None: there is none.

  Raises:
    ValueError: a value has another type or range, or the kind of tokenizer is not implemented.
  """
  read = _Keys(metadata, path)
  tokens, kind = read.list("tokens", str, 0), read.one("model", str)
  if not tokens:
    return None
  name = read.one("pre", str)
  name = "gemma4" if kind == "gemma4" else name
  if kind not in ("llama", "gpt2", "gemma4") or (kind == "gpt2" and name and name not in RULES):
    raise ValueError(
      f"the tokenizer of {path} must be of the kind llama, gpt2 or gemma4, with words split by one"
      f" of {', '.join(RULES)}; got {one_line(kind)} with {one_line(name)}. It is not implemented."
    )
  if kind == "gpt2" and not name:
    warnings.warn(
      f"{path} has no tokenizer.ggml.pre, which names the rule that splits a text into words; it is"
      " read by llama.cpp's default rule, and ids may be other ones than in training. Convert the"
      " model again, or name the rule: gguf-new-metadata --pre-tokenizer NAME OLD NEW",
      stacklevel=2,
    )
  rule = RULES[name or "default"] if kind != "llama" else RULES["default"]
  types = read.list("token_type", int, len(tokens)) or [NORMAL] * len(tokens)
  if wrong := sorted({number for number in types if not 0 <= number <= BYTE}):
    raise read.error("token_type", "numbers of 0 to 6", wrong[0])
  names = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
  number_of = {name: number for number, name in enumerate(names)}
  if len(number_of) < len(names):
    twice = next(name for number, name in enumerate(names) if number_of[name] != number)
    raise read.error("tokens", "different texts", f"{twice!r} twice")
  for number, name in enumerate(names):
    is_padding = name[0] == "[" and name in (padding_name(number), f"[EMPTY_{number}]")
    if is_padding or types[number] == 0:
      types[number] = UNUSED
  is_control = lambda number: number < len(types) and types[number] in (UNKNOWN, CONTROL)
  bos, eos, unknown = (
    read.token(key, len(names), number if kind == "llama" and is_control(number) else None)
    for key, number in {"bos": 1, "eos": 2, "unknown": 0}.items()
  )
  eos = _ends(lambda key: read.token(key, len(names)), eos, number_of, types)
  needed = "scores" if kind == "llama" else "merges"
  if f"tokenizer.ggml.{needed}" not in metadata:
    raise read.error(needed, f"there for the kind {kind}", None)
  if kind == "llama":
    _only_unknown(types, unknown)
  merges = []
  for merge in read.list("merges", str, 0) if kind != "llama" else ():
    at = merge.find(" ", 1)
    if at < 0:
      raise read.error("merges", "pairs with a space between", repr(merge))
    merges.append((merge[:at], merge[at + 1 :]))
  add_bos = read.one("add_bos_token", bool, kind == "llama" or rule.add_bos)
  if add_bos and bos is None and "tokenizer.ggml.add_bos_token" in metadata:
    raise read.error("bos_token_id", "there, since BOS begins a text", None)
  model_name = str(metadata.get("general.name", "")).lower()
  strips = "phi-3" in model_name or "phi3" in model_name
  return GgufVocabulary(
    kind="llama" if kind == "llama" else "gpt2",
    tokens=names,
    types=types,
    scores=read.list("scores", (int, float), len(names)) or [0.0] * len(names),
    merges=merges,
    rule=rule,
    bos=bos,
    eos=eos,
    add_bos=add_bos and bos is not None,
    add_space=read.one("add_space_prefix", bool, kind == "llama"),
    rstripped=[
      number
      for number, name in enumerate(names)
      if strips and types[number] in (CONTROL, USER_DEFINED) and name not in UNSTRIPPED
    ],
  )


UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi 3 to which the spaces behind them do not belong."""


class _Keys:
  """The keys of a tokenizer in the metadata of a GGUF, each with the type that it must have."""

  def __init__(self, metadata: Mapping[str, Any], path: pathlib.Path):
    self._metadata, self._path = metadata, path

  def error(self, key: str, must: str, got: Any) -> ValueError:
    return ValueError(
      f"`tokenizer.ggml.{key}` of {self._path} must be {must}; got {got}. Convert the model again."
    )

  def one(self, key: str, kind: type, default: Any = None) -> Any:
    """A value of a type, or the default where there is no such key."""
    value = self._metadata.get(f"tokenizer.ggml.{key}", default)
    if value is not default and type(value) is not kind:
      raise self.error(key, f"of the type {kind.__name__}", repr(value))
    return value

  def list(self, key: str, kinds: type | tuple[type, ...], count: int) -> list:
    """A list of at least `count` values, of which as many are returned; empty without the key."""
    values = self.one(key, list, [])
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if {*map(type, values)} - {*allowed}:
      wrong = next(value for value in values if type(value) not in allowed)
      names = " or ".join(kind.__name__ for kind in allowed)
      raise self.error(key, f"a list of {names}", repr(wrong))
    if values and len(values) < count:
      raise self.error(key, f"a list with an entry for each of {count:,} tokens", len(values))
    return values[:count] if count else values

  def token(self, key: str, count: int, default: int | None = None) -> int | None:
    """The id of a token, or the default where there is no such key."""
    number = self.one(f"{key}_token_id", int, default)
    if number is not None and not 0 <= number < count:
      raise self.error(f"{key}_token_id", f"a token's number, below {count:,}", number)
    return number


def _ends(
  given: Callable[[str], int | None],
  eos: int | None,
  number_of: Mapping[str, int],
  types: list[int],
) -> list[int]:
  """The ids that end a text; what they are is written into `types`.

  Args:
    given: name of a token -> its id in the file, or None.
    eos: the id of EOS, or None.
    number_of: ids of the tokens.
    types: types of the tokens, which change for those that are known by their text.
  """
  ends = [eos, given("eot"), given("eom")]
  for name in (name for name in ENDS if name in number_of):
    types[number_of[name]] = CONTROL
    ends.append(number_of[name])
  if "</s>" in number_of and types[number_of["</s>"]] == CONTROL:
    ends.append(number_of["</s>"])
  for key, names in FILL_IN_ENDS.items():
    number = given(key)
    found = [number_of[name] for name in names if name in number_of] if number is None else [number]
    ends += found
  # There, the end of a message does not end a turn.
  messages = {"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}
  is_harmony = "<|end|>" in number_of and any(both <= number_of.keys() for both in messages)
  shown = [*SHOWN, "<|end|>"] if is_harmony else SHOWN
  for name in (name for name in shown if name in number_of):
    types[number_of[name]] = USER_DEFINED
  left_out = number_of["<|end|>"] if is_harmony else None
  return [number for number in dict.fromkeys(ends) if number not in (None, left_out)]


def _only_unknown(types: list[int], unknown: int | None) -> None:
  """Let one token be unknown, as SentencePiece must have it, and the others control tokens."""
  others = [number for number, kind in enumerate(types) if kind == UNKNOWN]
  if unknown is None or types[unknown] not in (UNKNOWN, CONTROL):
    unknown = others[0] if others else None
  for number in others:
    types[number] = CONTROL
  if unknown is not None:
    types[unknown] = UNKNOWN
