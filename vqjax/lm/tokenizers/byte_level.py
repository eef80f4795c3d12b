r"""Byte-level encodings: how a text is split into words, by the names that a GGUF has for it.

A GGUF names the rule (`tokenizer.ggml.pre`) and holds tokens and merges, but no expressions. Most
names are synonyms of a few rules:

  GPT-2's      contractions, words, numbers and other signs, each with the space before it
  SmolLM's     single digits, then GPT-2's
  Llama 3's    words with any one sign before them, numbers of three digits, ends of lines
  Qwen 2's     Llama 3's with single digits
  GPT-4o's     words that also end before an upper-case letter
  DeepSeek's   several expressions one after another, with Chinese apart

Where llama.cpp approximates the expression of a model's own tokenizer.json, such as \p{Lu} by A-Z,
the table has the model's.
Source: names and rules of src/llama-vocab.cpp of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from vqjax.lm.sources.readers import import_checkpoints_extra

__all__ = []

SPACE = "\u2581"
"""What SentencePiece writes for a space."""


@dataclasses.dataclass(frozen=True)
class AddedToken:
  """A token that is matched as a whole wherever a text has it.

  Attributes:
    text: what it matches.
    number: its id.
    control: decoding leaves it out.
    lstrip: spaces before it belong to it.
    rstrip: spaces behind it belong to it.
    single_word: it is not matched inside of a word, by the `tokenizers` library.
    normalized: it is matched in a text that has been normalised, by the `tokenizers` library.
  """

  text: str
  number: int
  control: bool = True
  lstrip: bool = False
  rstrip: bool = False
  single_word: bool = False
  normalized: bool = False


FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""Flags of an added token that have the names of the `tokenizers` library."""


@dataclasses.dataclass(frozen=True)
class WordRule:
  """How a text becomes words, each of which is merged on its own.

  Attributes:
    patterns: regular expressions; each splits the pieces that those before it made.
    whole: a word that is a token is not made by merges.
    add_bos: BOS begins a text, unless the file says otherwise.
    composed: characters are composed (NFC) first.
    space: what the tokens write for a space; None: they write letters for bytes.
  """

  patterns: tuple[str, ...]
  whole: bool = False
  add_bos: bool = False
  composed: bool = False
  space: str | None = None


CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
DIGIT, DIGITS, THREE = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
THREE_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
LINES, RETURN = r"[^\n]+|\n+", r"[\r\n]"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
BLANKS_BY_POWERS = (
  r"\s*[\r\n]+|" + "".join(rf"\s{{{2**n}}}(?!\S)|" for n in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"
)
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _llama3(number: str, letters: str = r"\p{L}+", signs: str = SIGNS, blanks: str = BLANKS) -> str:
  return rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?{letters}|{number}|{signs}|{blanks}"


def _gpt4o(number: str, end: str = rf"(?i:{CONTRACTIONS})?", more: str = "/", but: str = "") -> str:
  upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
  lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
  sign = r"[^\r\n\p{L}\p{N}]?"
  words = rf"{sign}{upper}*{lower}+{end}|{sign}{upper}+{lower}*{end}"
  return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{more}]*|{BLANKS}"


def _deepseek(ends: str) -> str:
  """A sign with ASCII letters, words of all scripts, signs and what ends them, blanks."""
  ascii_sign = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
  words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
  return rf"{ascii_sign}|{words}| ?[\p{{P}}\p{{S}}]+{ends}|\s+(?!\S)|\s+"


KANA_OR_KANJI = r"[\x{3040}-\x{30ff}\x{4e00}-\x{9fa5}]+"
DEEPSEEK3 = (THREE, KANA_OR_KANJI, _deepseek(r"[\r\n]*|\s*[\r\n]+"))
CHINESE_OR_KOREAN = r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+"
# The letters with two cases that the file of DeepSeek LLM lists.
CASED = (
  r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
  r"\x{a790}-\x{a7fa}\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}"
  r"\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}]]"
)
CJK_SIGNS = r"[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]"
ASIAN = (
  r"[\x{e40}-\x{eff}\x{1000}-\x{109f}\x{1100}-\x{11ff}\x{1780}-\x{17ff}\x{2f00}-\x{2fdf}"
  r"\x{3040}-\x{30ff}\x{3400}-\x{4dbf}\x{4e00}-\x{9fff}\x{a9e0}-\x{a9ff}\x{aa60}-\x{aa7f}"
  r"\x{ac00}-\x{d7af}\x{f900}-\x{faff}\x{ff65}-\x{ff9f}]+"
)
YOUTU = (
  r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
  r"|[！…“”‘’—：；，\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
  rf"|[\x{{3105}}-\x{{312f}}]+|{KANA_OR_KANJI}"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
ASCII_MARKS = r"[\p{P}\$\+<=>\^~\|`]+"
CHAMELEON = ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", DIGIT)

NAMES = {
  "default": WordRule((ASCII_MARKS.replace("`", ""), GPT2, DIGITS, "[0-9][0-9][0-9]")),
  "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert roberta-bpe exaone4 mpt olmo jais trillion"
  " granite-docling jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code": WordRule(
    (GPT2,)
  ),
  "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": WordRule((DIGIT, GPT2)),
  "falcon": WordRule((ASCII_MARKS, GPT2, "[0-9][0-9][0-9]")),
  "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": WordRule(
    (_llama3(THREE),), whole=True, add_bos=True
  ),
  "glm4 glm5": WordRule((_llama3(THREE),), whole=True),
  "chatglm-bpe dbrx smaug-bpe": WordRule((_llama3(THREE),)),
  "jais-2": WordRule((_llama3(THREE, blanks=BLANKS_BY_POWERS),)),
  "minicpm5": WordRule((THREE, _llama3(DIGITS)), whole=True),
  "qwen2": WordRule((_llama3(DIGIT),), composed=True),
  "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": WordRule(
    (_llama3(DIGIT),)
  ),
  "laguna": WordRule((LINES, _llama3(DIGIT))),
  "qwen35": WordRule((_llama3(DIGIT, r"[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
  "seed-coder": WordRule((_llama3(DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
  "ufakzeka": WordRule((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{DIGIT}|{SIGNS}|{BLANKS}",)),
  "bailingmoe bailingmoe2 llada-moe": WordRule(
    (_llama3(DIGIT, blanks=r"\s*[\r\n]|\s+(?!\S)|\s+"),)
  ),
  "exaone-moe": WordRule(
    (
      _llama3(
        DIGIT,
        r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]|\s+(?!\S)|\s+",
      ),
    )
  ),
  "gpt-4o llama4 kanana2 talkie minimax-m2": WordRule((_gpt4o(THREE),)),
  "granite-embed-multi-97m": WordRule((_gpt4o(THREE),), whole=True),
  "tiny_aya cohere2moe": WordRule((r"\d{1,3}(?=(?:\d{3})*\b)", _gpt4o(THREE))),
  "tekken": WordRule((_gpt4o(DIGIT, end=""),), whole=True, add_bos=True),
  "youtu": WordRule((YOUTU, _gpt4o(DIGIT)), whole=True),
  "kimi-k2": WordRule((r"\p{Han}+|" + _gpt4o(THREE, more="", but=r"&&[^\p{Han}]"),)),
  "deepseek-llm": WordRule(
    (RETURN, rf"\s?{CASED}+", rf"\s?{CJK_SIGNS}+", r"\s+$", CHINESE_OR_KOREAN, DIGITS)
  ),
  "deepseek-coder": WordRule((RETURN, r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_OR_KOREAN, DIGIT)),
  "deepseek-v3 hunyuan-dense joyai-llm hy_v4": WordRule(DEEPSEEK3),
  "spark2_5": WordRule((*DEEPSEEK3[:2], _deepseek(r"|[\r\n]"), DIGIT)),
  "afmoe": WordRule((THREE_FROM_THE_END, ASIAN, DEEPSEEK3[2])),
  "superbpe": WordRule((DIGITS, r"(?=(\d{3})+(?!\d))")),
  "poro-chat bloom gpt3-finnish": WordRule((BLOOM,)),
  "viking": WordRule((BLOOM, DIGIT)),
  "chameleon": WordRule((*CHAMELEON, r"[\p{P}!-/:-@\[-`{-~]", GPT2), add_bos=True),
  "gemma4 granite-embed-multi-311m": WordRule((LINES,), add_bos=True, space=SPACE),
  "sarvam-moe": WordRule((LINES,), space=SPACE),
  "whitespace": WordRule((r"\S+",), space=" "),
}
"""Names of a GGUF, with spaces between, -> their rule."""

RULES = {name: rule for names, rule in NAMES.items() for name in names.split()}
"""Name of a GGUF -> its rule."""


def byte_level(
  vocab: Mapping[str, int],
  merges: list[tuple[str, str]],
  rule: WordRule,
  added: Iterable[AddedToken] = (),
) -> Any:
  """A byte-pair encoding of the `tokenizers` library.

  Args:
    vocab: the ids of the tokens, in the letters that stand for bytes.
    merges: the pairs that are merged, the first ones first.
    rule: how a text is split into words.
    added: tokens of `vocab` that are matched as a whole.
  """
  library = import_checkpoints_extra("tokenizers")
  is_text = rule.space is not None
  bpe = library.models.BPE(
    vocab=dict(vocab), merges=merges, ignore_merges=rule.whole, byte_fallback=is_text
  )
  model = library.Tokenizer(bpe)
  normalizers, decoders = library.normalizers, library.decoders
  splits = [library.pre_tokenizers.Split(library.Regex(p), "isolated") for p in rule.patterns]
  if is_text:
    model.normalizer = normalizers.Replace(" ", rule.space)
    spaces = decoders.Replace(rule.space, " ")
    model.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
  else:
    splits.append(library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    model.decoder = decoders.ByteLevel()
  if rule.composed:
    model.normalizer = normalizers.NFC()
  model.pre_tokenizer = library.pre_tokenizers.Sequence(splits)
  add_tokens(model, added)
  return model


def add_tokens(model: Any, added: Iterable[AddedToken]) -> None:
  """Let a `tokenizers` model match tokens as a whole; new ones get the next ids in turn."""
  make = import_checkpoints_extra("tokenizers").AddedToken
  for control, tokens in itertools.groupby(added, key=lambda token: token.control):
    add = model.add_special_tokens if control else model.add_tokens
    flags = lambda token: {name: getattr(token, name) for name in FLAGS}
    add([make(token.text, special=control, **flags(token)) for token in tokens])


def begin_with(model: Any, token: str) -> None:
  """Let each text of a `tokenizers` model begin with a token that it has."""
  processors = import_checkpoints_extra("tokenizers").processors
  model.post_processor = processors.TemplateProcessing(
    single=[token, "$A"], special_tokens=[(token, model.token_to_id(token))]
  )
