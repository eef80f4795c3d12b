"""Tests of tokenizers of words and byte pairs."""

import json
import subprocess
import sys

import numpy as np
import pytest

from vqjax.lab.data import BPETokenizer, Text, WordTokenizer, fit_encoder

DOCUMENTS = ["The cat, the dog.", "the end", ""]


def fit(tokenizer, documents=DOCUMENTS):
  return tokenizer.fit(lambda: iter(documents))


def words_of(encoder):
  return [encoder.decode([i]) for i in range(encoder.vocab)]


def test_words_are_numbered_by_frequency_then_alphabet_and_the_rest_is_unknown():
  # the 2, <eos> 3; the others once, in the order of their characters; <unk> never.
  words = ["\n", "the", ",", ".", "The", "cat", "dog", "end", "<unk>"]
  assert words_of(fit(WordTokenizer())) == words
  assert words_of(fit(WordTokenizer(min_count=2))) == ["<unk>", "\n", "the"]
  encoder = fit(WordTokenizer(vocab=3))
  assert words_of(encoder) == ["<unk>", "\n", "the"]
  assert encoder.encode("the bird").tolist() == [2, 0, 1]


def test_words_may_be_folded_and_prepared_words_are_split_at_blanks_only():
  encoder = fit(WordTokenizer(lowercase=True))
  assert encoder.encode("THE").tolist() == encoder.encode("the").tolist()
  encoder = fit(WordTokenizer(split=False), ["n't <unk> u.s. N"])
  assert sorted(words_of(encoder)) == sorted(["n't", "<unk>", "u.s.", "N", "\n"])


def test_every_document_ends_with_eos():
  for tokenizer in (WordTokenizer(), BPETokenizer(vocab=260)):
    encoder = fit(tokenizer)
    for document in DOCUMENTS:
      tokens = encoder.encode(document)
      assert tokens[-1] == encoder.eos
      assert np.count_nonzero(tokens == encoder.eos) == 1


def test_words_come_back_with_a_space_between_and_bytes_exactly():
  encoder = fit(WordTokenizer())
  assert encoder.decode(encoder.encode(DOCUMENTS[0])[:-1]) == "The cat , the dog ."
  encoder = fit(BPETokenizer(vocab=300), [*DOCUMENTS * 9, "naïve"])
  for text in ("", " two  spaces\n", "naïve 東京 🙂", "a\u0000b\u2028c"):
    assert encoder.decode(encoder.encode(text)[:-1]) == text


def test_trained_bpe_has_the_requested_size():
  text = [f"{i} words number {i * i}" for i in range(200)]
  assert fit(BPETokenizer(vocab=400), text).vocab == 400


@pytest.mark.slow
def test_training_bpe_is_the_same_in_every_process():
  code = (
    "from vqjax.lab.data import BPETokenizer as B;"
    "t = [f'{i * i} words and {i % 7} more' for i in range(999)];"
    "print(B(vocab=500).fit(lambda: iter(t)).fingerprint())"
  )
  runs = {
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    for _ in range(3)
  }
  assert len(runs) == 1


def test_an_encoder_is_rebuilt_from_its_state_and_other_text_has_another_fingerprint():
  for tokenizer in (WordTokenizer(), BPETokenizer(vocab=270)):
    encoder = fit(tokenizer)
    again = tokenizer.load(encoder.state())
    assert again.fingerprint() == encoder.fingerprint()
    assert again.encode("the cat 東").tolist() == encoder.encode("the cat 東").tolist()
    other = fit(tokenizer, ["entirely different words", "entirely different"] * 9)
    assert other.fingerprint() != encoder.fingerprint()


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
  alphabet = json.loads(fit(BPETokenizer(vocab=257)).state())["model"]["vocab"]
  names = [*(token for token in alphabet if len(token) == 1), "<|endoftext|>"]
  (tmp_path / "merges.txt").write_text("")
  fitted = []
  for order in (names, names[::-1]):
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(order)}))
    encoder = fit_encoder(Text(str(corpus)), BPETokenizer(folder=str(tmp_path)))
    fitted.append(encoder.encode("a").tolist())
  assert fitted[0] != fitted[1]


@pytest.mark.slow
def test_gpt2_gives_the_published_numbers(real_data):
  folder, stories = real_data / "tokenizers/gpt2", real_data / "tinystories"
  if not (folder.is_dir() and stories.is_dir()):
    pytest.skip(f"no tokenizers/gpt2 and tinystories in {real_data}")
  encoder = fit(BPETokenizer(folder=str(folder)))
  assert (encoder.vocab, encoder.eos) == (50_257, 50_256)
  for name in ("test", "val"):
    expected = np.fromfile(stories / f"gpt2_tokens_{name}.uint16.bin", "<u2")
    text = (stories / f"gpt2_tokens_{name}.decoded.txt").read_text(encoding="utf-8")
    # The decoded file has a line end before and after each <|endoftext|> for the reader's sake.
    decoded = text.removesuffix("\n<|endoftext|>\n").split("\n<|endoftext|>\n")
    assert np.array_equal(np.concatenate([encoder.encode(story) for story in decoded]), expected)
