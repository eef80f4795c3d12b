"""Tests of SentencePiece: exact decoding and reproducible training."""

import re
import subprocess
import sys

import numpy as np
import pytest

from vqjax.lab.data import (
  SentencePieceTokenizer,
  Text,
  encode_document,
  encode_split,
  fingerprint,
  fit_tokenizer,
  tokenizer_recipes,
)
from vqjax.lab.data.plain_text import docstrings, stdlib_modules

WORDS = "the cat sat on a mat while seven dogs were running after their ball".split()  # noqa: SIM905
PROSE = [" ".join(WORDS[(i * k) % 13] for k in range(2, 9)) + f" {i}." for i in range(211)]
TEXTS = [
  "",
  "the cats ran",
  " two  spaces \n",
  "\n\na\tb\r\n",
  "naïve 東京 🙂",
  "a\u0000b\u2028c ﬁ ①",
  "</s> <unk> <0x41> \u2585",
]


def fit(tokenizer, documents=PROSE):
  return tokenizer.fit(lambda: iter(documents))


@pytest.fixture(scope="module")
def trained():
  prose = [text for path in stdlib_modules()[:40] for text in docstrings(path.read_bytes())]
  return fit(SentencePieceTokenizer(vocab=1009), prose)


def test_any_text_comes_back_exactly_from_a_vocabulary_of_the_requested_size(trained):
  assert trained.vocab == 1009
  assert len(trained.encode("the same file is not")) == 1 + 5  # frequent words are one piece
  for text in TEXTS:
    tokens = encode_document(trained, text)
    assert tokens[-1] == trained.eos[0]
    assert np.count_nonzero(tokens == tokens[-1]) == 1
    assert trained.decode(tokens) == text


@pytest.mark.slow
@pytest.mark.parametrize("lines", [4_000_000, 50])
def test_training_is_the_same_in_every_process(lines):
  code = (
    f"from vqjax.lab.data import SentencePieceTokenizer as S, fingerprint; t = {PROSE};"
    f"print(fingerprint(S(vocab=290, lines={lines}).fit(lambda: iter(t))))"
  )
  other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert other.stdout.strip() == fingerprint(fit(SentencePieceTokenizer(vocab=290, lines=lines)))


def test_a_trained_model_is_loaded_from_the_cache_not_trained_again(tmp_path, monkeypatch):
  (tmp_path / "text.txt").write_text("\n\n".join(PROSE))
  source, tokenizer = Text(str(tmp_path / "text.txt")), SentencePieceTokenizer(vocab=307)
  trained = fit_tokenizer(source, tokenizer)
  monkeypatch.setattr(SentencePieceTokenizer, "fit", None)
  loaded = fit_tokenizer(source, tokenizer)
  assert fingerprint(loaded) == fingerprint(trained)
  assert encode_split(source, loaded, "test").eos == trained.eos[0]


def test_a_vocabulary_out_of_range_names_the_nearest_that_works():
  at_most, at_least = (rf"tokenizer\.vocab` must be at {way} (\d+)" for way in ("most", "least"))
  with pytest.raises(ValueError, match=rf"{at_most}.* got 32000") as error:
    fit(SentencePieceTokenizer())
  largest = int(re.search(at_most, str(error.value))[1])
  assert fit(SentencePieceTokenizer(vocab=largest)).vocab == largest
  with pytest.raises(ValueError, match=f"at most {largest}, "):
    fit(SentencePieceTokenizer(vocab=largest + 1))
  with pytest.raises(ValueError, match=rf"{at_least}.* got 258") as error:
    fit(SentencePieceTokenizer(vocab=258))
  smallest = int(re.search(at_least, str(error.value))[1])
  assert fit(SentencePieceTokenizer(vocab=smallest)).vocab == smallest


def test_damaged_states_missing_models_and_text_without_words_are_refused(tmp_path):
  for state in ("", "not base 64", "bm8gbW9kZWw="):
    with pytest.raises(ValueError, match="must be that of a tokenizer"):
      SentencePieceTokenizer().load(state)
  for documents in ([], ["", " \n\n "]):
    with pytest.raises(ValueError, match="`documents` must have words"):
      fit(SentencePieceTokenizer(), documents)
  with pytest.raises(ValueError, match=r"tokenizer\.lines` must be at least 1; got 0"):
    SentencePieceTokenizer(lines=0)
  with pytest.raises(FileNotFoundError, match=r"tokenizer\.model` must exist .* got 'no\.model'"):
    fit(SentencePieceTokenizer(model="no.model"))
  (tmp_path / "x.model").write_bytes(b"not a model")
  with pytest.raises(ValueError, match=r"x\.model: `content` must be a SentencePiece model"):
    fit(SentencePieceTokenizer(model=str(tmp_path / "x.model")))
  with pytest.raises(FileNotFoundError, match=r"must hold tokenizer\.model; got .* without it"):
    fit(SentencePieceTokenizer(model=str(tmp_path)))
  (tmp_path / "x.model").rename(tmp_path / "tokenizer.model")
  with pytest.raises(ValueError, match=r"/tokenizer\.model: `content` must be a SentencePiece"):
    fit(SentencePieceTokenizer(model=str(tmp_path)))


def test_reserved_characters_and_long_lines_are_trained_on():
  odd = ["\u2585 \u2047 a\u0000b", "long " * 9_001, "\u2581 the"]
  assert fit(SentencePieceTokenizer(vocab=310), [*PROSE, *odd]).vocab == 310


def test_a_sample_has_every_line_equally_often():
  # 7 of 101 lines, drawn from 3,000 orders of them: each 207.9 times but for chance.
  draw = np.random.default_rng(0)
  orders = (draw.permutation(101) for _ in range(3000))
  counts = np.bincount(np.concatenate([tokenizer_recipes._sample(order, 7) for order in orders]))
  # Five standard deviations of a binomial: sqrt(3000 · 7/101 · 94/101) = 13.9.
  assert np.abs(counts - 3000 * 7 / 101).max() < 70


def test_a_published_model_reads_and_writes(real_data):
  for size in (2048, 4096):
    model = real_data / f"tinystories/tok{size}.model"
    if not model.is_file():
      pytest.skip(f"no {model}")
    tokenizer = fit(SentencePieceTokenizer(model=str(model)))
    tokens = tokenizer.encode("Once upon a time, Lily ran.")
    assert tokenizer.vocab == size
    assert tokenizer.decode(tokens) == "Once upon a time, Lily ran."
