"""Tests of tokenizers of words and byte pairs."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from vqjax.lab.data import (
  BPETokenizer,
  CheckpointTokenizer,
  JSONTokenizer,
  Text,
  WordTokenizer,
  encode_document,
  fingerprint,
  fit_tokenizer,
)

DOCUMENTS = ["The cat, the dog.", "the end", ""]


def fit(recipe, documents=DOCUMENTS):
  return recipe.fit(lambda: iter(documents))


def words_of(tokenizer):
  return [tokenizer.piece(i) for i in range(tokenizer.vocab)]


def test_words_are_numbered_by_frequency_then_alphabet_and_the_rest_is_unknown():
  # the 2, <eos> 3; the others once, in the order of their characters; <unk> never.
  words = ["<eos>", "the", ",", ".", "The", "cat", "dog", "end", "<unk>"]
  assert words_of(fit(WordTokenizer())) == words
  assert words_of(fit(WordTokenizer(min_count=2))) == ["<unk>", "<eos>", "the"]
  tokenizer = fit(WordTokenizer(vocab=3))
  assert words_of(tokenizer) == ["<unk>", "<eos>", "the"]
  assert encode_document(tokenizer, "the bird").tolist() == [2, 0, 1]
  assert tokenizer.encode("the bird") == [1, 2, 0]


def test_words_may_be_folded_and_prepared_words_are_split_at_blanks_only():
  tokenizer = fit(WordTokenizer(lowercase=True))
  assert tokenizer.encode("THE") == tokenizer.encode("the")
  tokenizer = fit(WordTokenizer(split=False), ["n't <unk> u.s. N"])
  assert sorted(words_of(tokenizer)) == sorted(["n't", "<unk>", "u.s.", "N", "<eos>"])


def test_every_document_ends_with_eos():
  for recipe in (WordTokenizer(), BPETokenizer(vocab=260)):
    tokenizer = fit(recipe)
    (end,) = tokenizer.eos
    for document in (*DOCUMENTS, "a <eos> spelt out"):
      tokens = encode_document(tokenizer, document)
      assert tokens[-1] == end
      assert np.count_nonzero(tokens == end) == 1


def test_words_come_back_with_a_space_between_and_bytes_exactly():
  tokenizer = fit(WordTokenizer())
  assert tokenizer.decode(tokenizer.encode(DOCUMENTS[0])) == "The cat , the dog ."
  tokenizer = fit(BPETokenizer(vocab=300), [*DOCUMENTS * 9, "naïve"])
  for text in ("", " two  spaces\n", "naïve 東京 🙂", "a\u0000b\u2028c"):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_training_bpe_is_the_same_in_every_process():
  text = [f"{i * i} words and {i % 7} more" for i in range(999)]
  code = (
    "from vqjax.lab.data import BPETokenizer as B, fingerprint;"
    f"t = {text}; print(fingerprint(B(vocab=500).fit(lambda: iter(t))))"
  )
  other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  here = fit(BPETokenizer(vocab=500), text)
  assert other.stdout.strip() == fingerprint(here)
  assert here.vocab == 500


def test_a_tokenizer_is_rebuilt_from_its_state_and_other_text_has_another_fingerprint():
  for recipe in (WordTokenizer(), BPETokenizer(vocab=270)):
    tokenizer = fit(recipe)
    again = recipe.load(tokenizer.state())
    assert fingerprint(again) == fingerprint(tokenizer)
    for text in ("the cat 東", "a <eos> spelt out"):
      assert again.encode(text) == tokenizer.encode(text)
    other = fit(recipe, ["entirely different words", "entirely different"] * 9)
    assert fingerprint(other) != fingerprint(tokenizer)


def test_a_vocabulary_without_room_and_missing_files_are_refused(tmp_path):
  for vocab in (-1, 1, 2):
    with pytest.raises(ValueError, match=rf"tokenizer\.vocab` must be .*at least 3; got {vocab}"):
      WordTokenizer(vocab=vocab)
  with pytest.raises(ValueError, match=r"vocab` must be at least 257 .* got 256"):
    fit(BPETokenizer(vocab=256))
  with pytest.raises(FileNotFoundError, match=r"without vocab\.json"):
    fit(BPETokenizer(folder=str(tmp_path)))


def test_a_changed_vocabulary_file_is_read_again(tmp_path):
  corpus = tmp_path / "text.txt"
  corpus.write_text("\n\n".join(f"document {i}" for i in range(99)))
  alphabet = json.loads(fit(BPETokenizer(vocab=257)).model.to_str())["model"]["vocab"]
  names = [*(token for token in alphabet if len(token) == 1), "<|endoftext|>"]
  (tmp_path / "merges.txt").write_text("")
  fitted = []
  for order in (names, names[::-1]):
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(order)}))
    tokenizer = fit_tokenizer(Text(str(corpus)), BPETokenizer(folder=str(tmp_path)))
    fitted.append(tokenizer.encode("a"))
  assert fitted[0] != fitted[1]


@pytest.mark.slow
def test_gpt2_gives_the_published_numbers(real_data):
  folder, stories = real_data / "tokenizers/gpt2", real_data / "tinystories"
  if not (folder.is_dir() and stories.is_dir()):
    pytest.skip(f"no tokenizers/gpt2 and tinystories in {real_data}")
  tokenizer = fit(BPETokenizer(folder=str(folder)))
  assert (tokenizer.vocab, tokenizer.eos) == (50_257, (50_256,))
  for name in ("test", "val"):
    expected = np.fromfile(stories / f"gpt2_tokens_{name}.uint16.bin", "<u2")
    text = (stories / f"gpt2_tokens_{name}.decoded.txt").read_text(encoding="utf-8")
    # The decoded file has a line end before and after each <|endoftext|> for the reader's sake.
    decoded = text.removesuffix("\n<|endoftext|>\n").split("\n<|endoftext|>\n")
    encoded = [encode_document(tokenizer, story) for story in decoded]
    assert np.array_equal(np.concatenate(encoded), expected)


@pytest.fixture
def saved(tmp_path):
  """A folder with the tokenizer.json of a tokenizer of words, with the end <end>."""
  words = {"<unk>": 0, "<end>": 1, "red": 2, "blue": 3}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(["<end>"])
  made.enable_truncation(2)
  made.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def test_a_saved_tokenizer_is_read_from_its_file_or_folder_without_a_model(saved):
  read = fit(JSONTokenizer(str(saved / "tokenizer.json"), end="<end>"))
  assert (read.vocab, read.eos) == (4, (1,))
  assert [*read.encode("red blue red")] == [1, 2, 3, 2]
  assert fingerprint(JSONTokenizer("elsewhere").load(read.state())) == fingerprint(read)
  (saved / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
  assert fingerprint(fit(JSONTokenizer(str(saved)))) == fingerprint(read)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_tokenizer_without_a_model_names_the_class_that_reads_it(saved, name):
  with pytest.raises(ValueError, match=r"must be a pretrained model with its weights.*Take JSON"):
    fit(CheckpointTokenizer(str(saved / name)))


def test_a_saved_tokenizer_without_an_end_or_a_file_is_refused(saved):
  with pytest.raises(ValueError, match=r"`tokenizer.end` .* got ''. Give one such as <end>"):
    fit(JSONTokenizer(str(saved)))
  (saved / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"`tokenizer.path` must be a tokenizer.json"):
    fit(JSONTokenizer(str(saved)))
  (saved / "tokenizer.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"must hold tokenizer.json"):
    fit(JSONTokenizer(str(saved)))
