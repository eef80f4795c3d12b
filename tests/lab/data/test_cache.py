"""Tests of the token cache: whole or absent after kills, damage and races."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.fakes import FakeTokenizer
from vqjax.lab.data import (
  BPETokenizer,
  Text,
  WordTokenizer,
  cache,
  encode_document,
  encode_split,
  fingerprint,
  fit_tokenizer,
)
from vqjax.lm import records


@pytest.fixture
def source(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("\n\n".join(f"document number {i} é" for i in range(101)), encoding="utf-8")
  return Text(str(path))


@dataclasses.dataclass
class Wide(FakeTokenizer):
  """A tokenizer of 70,000 tokens that counts its calls and can return a wrong token."""

  vocab: int = 70_000
  token: int = 69_999
  calls: int = 0
  eos = (1,)

  def encode(self, document, *, special):
    assert special
    self.calls += 1
    return [5, self.token, len(document)]


def only_file(kind="npy"):
  (path,) = cache.cache_folder().glob(f"*.{kind}")
  return path


def test_the_cache_holds_the_documents_one_after_another(source):
  tokenizer = fit_tokenizer(source, WordTokenizer())
  split = encode_split(source, tokenizer, "train")
  documents = list(source.documents("train"))
  assert np.array_equal(
    split.tokens, np.concatenate([encode_document(tokenizer, d) for d in documents])
  )
  assert split.text_bytes == sum(len(d.encode("utf-8")) + 1 for d in documents)
  assert (split.documents, split.eos) == (len(documents), *tokenizer.eos)


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_tokens_take_two_bytes_where_they_fit(source, vocab, dtype):
  split = encode_split(source, Wide(vocab=vocab, token=vocab - 1), "train")
  assert isinstance(split.tokens, np.memmap)
  assert split.tokens.dtype == dtype
  assert split.tokens[1] == vocab - 1


def test_text_is_encoded_once(source):
  tokenizer = Wide()
  encode_split(source, tokenizer, "train")
  calls = tokenizer.calls
  encode_split(source, tokenizer, "train")
  assert tokenizer.calls == calls > 0


def test_changed_text_is_encoded_again(source, tmp_path):
  before = encode_split(source, Wide(), "train").tokens.copy()
  (tmp_path / "text.txt").write_text("\n\n".join(f"other {i}" for i in range(200)))
  assert len(encode_split(source, Wide(), "train").tokens) != len(before)


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_truncated_cache_is_built_again(source, left):
  expected = np.array(encode_split(source, Wide(), "train").tokens)
  with only_file().open("r+b") as file:
    file.truncate(128 + int(left * 4 * len(expected)))  # NumPy's header has 128 bytes
  assert np.array_equal(encode_split(source, Wide(), "train").tokens, expected)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 500])
@pytest.mark.parametrize("kind", ["npy", "json"])
def test_a_file_that_is_not_a_cache_is_replaced(source, kind, content):
  expected = np.array(encode_split(source, Wide(), "train").tokens)
  only_file(kind).write_bytes(content)
  assert np.array_equal(encode_split(source, Wide(), "train").tokens, expected)


def test_a_damaged_tokenizer_is_fitted_again(source):
  expected = fingerprint(fit_tokenizer(source, WordTokenizer()))
  path = only_file("tokenizer.json")
  path.write_bytes(path.read_bytes()[:-9])
  assert fingerprint(fit_tokenizer(source, WordTokenizer())) == expected


def test_a_tokenizer_from_the_cache_is_the_fitted_one(source):
  for recipe in (WordTokenizer(), BPETokenizer(vocab=280)):
    fitted, cached = fit_tokenizer(source, recipe), fit_tokenizer(source, recipe)
    assert fingerprint(cached) == fingerprint(fitted)


def test_a_killed_process_leaves_nothing_that_is_read(source, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    encode_split(source, Wide(), "train")
  assert list(cache.cache_folder().iterdir()) == []


@pytest.mark.slow
def test_concurrent_processes_write_one_cache(source):
  code = (
    "import sys; from vqjax.lab.data import *;"
    "s = Text(sys.argv[1]); e = fit_tokenizer(s, WordTokenizer());"
    "print(encode_split(s, e, 'train').tokens.sum())"
  )
  command = [sys.executable, "-c", code, source.path]
  running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
  sums = {process.communicate()[0] for process in running}
  assert len(sums) == 1
  assert all(process.returncode == 0 for process in running)


@pytest.mark.parametrize("token", [-1, 70_000])
def test_a_token_outside_the_vocabulary_is_named(source, token):
  with pytest.raises(ValueError, match=rf"tokens in \[0, 70000\); got {token}"):
    encode_split(source, Wide(token=token), "train")


def test_an_error_of_the_source_is_not_reported_as_one_of_the_cache(tmp_path):
  broken = type("Broken", (Text,), {"fingerprint": lambda self: "broken"})(str(tmp_path / "gone"))
  with pytest.raises(FileNotFoundError, match="must exist"):
    encode_split(broken, Wide(), "train")
  assert list(cache.cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_remedy(source, tmp_path, monkeypatch):
  monkeypatch.setenv("VQJAX_CACHE", str(tmp_path / "text.txt" / "cache"))
  with pytest.raises(OSError, match=r"cannot write the token cache.*set VQJAX_CACHE"):
    encode_split(source, Wide(), "train")


@pytest.mark.parametrize("at", [3, 60, 127, 128, 129, -1])
def test_a_flipped_bit_of_the_tokens_is_built_again_with_a_warning(source, at):
  expected = np.array(encode_split(source, Wide(), "train").tokens)
  content = bytearray(only_file().read_bytes())
  content[at] ^= 4
  only_file().write_bytes(content)
  with pytest.warns(UserWarning, match=r"the cache .* is made again: .* checksum"):
    again = encode_split(source, Wide(), "train").tokens
  assert np.array_equal(again, expected)


def test_a_changed_size_of_a_split_is_built_again_with_a_warning(source):
  encode_split(source, Wide(), "train")
  path = only_file("json")
  path.write_text(path.read_text().replace('"documents": 9', '"documents": 8'))
  with pytest.warns(UserWarning, match=r"json is damaged: its checksum"):
    assert encode_split(source, Wide(), "train").documents > 89


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_split_of_another_version_is_built_again_with_a_warning(source, is_sealed):
  expected = encode_split(source, Wide(), "train")
  path = only_file("json")
  old = {"tokens": 9}
  path.write_text(records.dumps(records.sealed(old) if is_sealed else old))
  with pytest.warns(UserWarning, match=r"made again: .* of another version of vqjax"):
    assert encode_split(source, Wide(), "train").documents == expected.documents


def test_a_tokenizer_with_another_word_is_fitted_again_with_a_warning(source):
  expected = fingerprint(fit_tokenizer(source, WordTokenizer()))
  path = only_file("tokenizer.json")
  path.write_text(path.read_text().replace("document", "dokument", 1))
  with pytest.warns(UserWarning, match=r"tokenizer.json is made again: .* checksum"):
    assert fingerprint(fit_tokenizer(source, WordTokenizer())) == expected
