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
  EvaluationBatches,
  Text,
  WordTokenizer,
  encode_document,
  encode_split,
  fingerprint,
  fit_tokenizer,
  token_cache,
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
  (path,) = token_cache.cache_folder().glob(f"*.{kind}")
  return path


def test_the_cache_holds_the_documents_one_after_another(source):
  tokenizer = fit_tokenizer(source, WordTokenizer())
  split = encode_split(source, tokenizer, "train")
  documents = list(source.documents("train"))
  expected = np.concatenate([encode_document(tokenizer, d) for d in documents])
  assert np.array_equal(split.tokens, expected)
  assert split.text_bytes == sum(len(d.encode("utf-8")) + 1 for d in documents)
  assert (split.documents, split.eos) == (len(documents), *tokenizer.eos)


def test_inputs_of_a_document_are_its_text_where_one_token_begins_and_ends_them(source):
  # The end of a document is the beginning of the next one, and loaders put one before the first.
  tokenizer = fit_tokenizer(source, WordTokenizer())
  assert tokenizer.eos == (tokenizer.bos,)
  split = encode_split(source, tokenizer, "train")
  (batch,) = EvaluationBatches(split, 1, len(split.tokens))
  expected = [token for d in source.documents("train") for token in tokenizer.encode(d)]
  assert batch["inputs"][0].tolist() == expected


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_tokens_take_two_bytes_where_they_fit(source, vocab, dtype):
  split = encode_split(source, Wide(vocab=vocab, token=vocab - 1), "train")
  assert isinstance(split.tokens, np.memmap)
  assert split.tokens.dtype == dtype
  assert split.tokens[1] == vocab - 1


def test_text_is_encoded_once_and_again_when_it_has_changed(source, tmp_path):
  tokenizer = Wide()
  before = np.array(encode_split(source, tokenizer, "train").tokens)
  calls = tokenizer.calls
  encode_split(source, tokenizer, "train")
  assert tokenizer.calls == calls > 0
  (tmp_path / "text.txt").write_text("\n\n".join(f"other {i}" for i in range(200)))
  assert len(encode_split(source, Wide(), "train").tokens) != len(before)


def flipped(at):
  return lambda content: content[:at] + bytes([content[at] ^ 4]) + content[at:][1:]


# NumPy's header has 128 bytes.
DAMAGE = {
  **{f"{n} bytes": ("npy", lambda content, n=n: content[:n]) for n in (0, 128, 500, -1)},
  **{f"bit of byte {at}": ("npy", flipped(at)) for at in (3, 60, 127, 128, 129, -1)},
  "another file": ("npy", lambda content: b"\0" * 500),
  **{f"record {x[:9]}": ("json", lambda content, x=x: x) for x in (b"", b"{}", b"\0" * 500)},
  "another size": ("json", lambda content: content.replace(b'"documents": 9', b'"documents": 8')),
  "another version": ("json", lambda _: records.dumps({"tokens": 9}).encode()),
  "another sealed version": (
    "json",
    lambda _: records.dumps(records.sealed({"tokens": 9})).encode(),
  ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_split_is_built_again_with_a_warning(source, damage):
  kind, change = DAMAGE[damage]
  expected = encode_split(source, Wide(), "train")
  tokens, path = np.array(expected.tokens), only_file(kind)
  path.write_bytes(change(path.read_bytes()))
  with pytest.warns(UserWarning, match=r"is made again: "):
    again = encode_split(source, Wide(), "train")
  assert np.array_equal(again.tokens, tokens)
  assert again.documents == expected.documents > 89


def test_a_damaged_tokenizer_is_fitted_again_with_a_warning(source):
  expected = fingerprint(fit_tokenizer(source, WordTokenizer()))
  path = only_file("tokenizer.json")
  for change in (lambda text: text[:-9], lambda text: text.replace("document", "dokument", 1)):
    path.write_text(change(path.read_text()))
    with pytest.warns(UserWarning, match=r"tokenizer.json is made again: "):
      assert fingerprint(fit_tokenizer(source, WordTokenizer())) == expected


def test_a_tokenizer_from_the_cache_is_the_fitted_one(source):
  for recipe in (WordTokenizer(), BPETokenizer(vocab=280)):
    fitted, cached = fit_tokenizer(source, recipe), fit_tokenizer(source, recipe)
    assert fingerprint(cached) == fingerprint(fitted)


def test_a_killed_process_leaves_nothing_that_is_read(source, monkeypatch):
  monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    encode_split(source, Wide(), "train")
  assert list(token_cache.cache_folder().iterdir()) == []


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
  assert list(token_cache.cache_folder().iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_remedy(source, tmp_path, monkeypatch):
  monkeypatch.setenv("VQJAX_CACHE", str(tmp_path / "text.txt" / "cache"))
  with pytest.raises(OSError, match=r"cannot write the token cache.*set VQJAX_CACHE"):
    encode_split(source, Wide(), "train")


def test_counts_are_the_occurrences_of_each_token_of_the_vocabulary(source):
  tokenizer = fit_tokenizer(source, WordTokenizer())
  split, vocab = encode_split(source, tokenizer, "train"), tokenizer.vocab
  found, of = token_cache.count_tokens(split, tokenizer), dataclasses.replace
  assert found.dtype == np.int64
  np.testing.assert_array_equal(found, np.bincount(split.tokens, minlength=vocab))
  assert found[tokenizer.eos[0]] == split.documents
  empty = token_cache.count_tokens(of(split, tokens=np.zeros(0, np.uint16)), tokenizer)
  assert empty.tolist() == [0] * vocab
  with pytest.raises(ValueError, match=rf"tokens in \[0, {vocab}\); got {vocab}"):
    token_cache.count_tokens(of(split, tokens=np.array([0, vocab], np.uint16)), tokenizer)
