"""Tests of texts with a class each, and of their loader."""

import dataclasses

import numpy as np
import pytest

from experiments.studies.dpq.data.documents import Documents
from experiments.studies.dpq.data.labelled import AGNews, DBpedia
from vqjax.lab.data import Text, WordTokenizer, encode_split, fit_tokenizer
from vqjax.lab.data.source import SPLITS

CLASSES = "World\nSports\nBusiness\nSci/Tech\n"


@pytest.fixture
def news(tmp_path):
  """AG News with files in their layouts, a repeated text, and one of the test's."""
  (tmp_path / "classes.txt").write_text(CLASSES)
  own = [f'"{1 + i % 4}","Title {i}","text\\nnumber\\{i}"' for i in range(40)]
  (tmp_path / "subset2k_amrayach_train.csv").write_text("\n".join(own) + "\n")
  (tmp_path / "subset4k_keaml_train.csv").write_text('0,alone\n3,"twice, with a comma"\n')
  (tmp_path / "subset5k_keaml_unbalanced.csv").write_text('3,"Twice, with a comma"\n')
  (tmp_path / "subset5k_lst11111_train.csv").write_text('last,2\n"Held out of course",1\n')
  (tmp_path / "test.csv").write_text('"2","Held out","of course"\n"1","Another","test"\n')
  return AGNews(str(tmp_path))


def test_every_text_is_in_one_split_once(news):
  found = {split: list(news.examples(split)) for split in SPLITS}
  assert found["test"] == [("Held out of course", 1), ("Another test", 0)]
  texts = [text for split in ("train", "valid") for text, _ in found[split]]
  assert len(texts) == len(set(map(str.lower, texts))) == 43
  assert "Held out of course" not in texts
  assert len(found["train"]) > len(found["valid"]) > 0
  assert dict(found["train"] + found["valid"])["last"] == 2
  assert dict(found["train"] + found["valid"])["Title 5 text number 5"] == 1


def test_the_fingerprint_is_of_the_files(news, tmp_path):
  before = news.fingerprint()
  (tmp_path / "test.csv").write_text('"1","Another","test"\n')
  assert news.fingerprint() != before


@pytest.mark.parametrize("label", ["5", "-1", "x"])
def test_bad_rows_are_named(news, tmp_path, label):
  (tmp_path / "subset4k_keaml_train.csv").write_text(f"0,fine\n{label},x\n")
  with pytest.raises(ValueError, match=rf"must be in 0..3; got {label} in row 2"):
    list(news.documents("train"))


def test_the_published_files_have_their_classes(real_data, monkeypatch):
  monkeypatch.setenv("VQJAX_DATA", str(real_data))
  for source, classes in ((AGNews(), 4), (DBpedia(), 14)):
    labels = {split: source.labels(split) for split in SPLITS}
    assert len(source.classes) == classes
    for found in labels.values():
      assert set(found.tolist()) == set(range(classes))
    assert len(labels["train"]) > 7 * len(labels["valid"])


class TestDocuments:
  def split(self, news, **fields):
    tokenizer = fit_tokenizer(news, WordTokenizer(lowercase=True))
    found = encode_split(news, tokenizer, "train")
    return tokenizer, dataclasses.replace(found, **fields)

  def test_every_document_comes_once_an_epoch_whole_and_with_its_class(self, news):
    tokenizer, split = self.split(news)
    batches = Documents().batches(split, batch=1, context=6, seed=0)
    wanted = sorted((text.lower(), label) for text, label in news.examples("train"))
    for _ in range(2):
      found = []
      for _ in range(split.documents):
        one = next(batches)
        row = one["inputs"][0]
        assert (np.diff(row == -1) >= 0).all()
        text = tokenizer.decode(row[row != -1]).replace(" , ", ", ")
        found.append((text, int(one["targets"][0])))
      assert sorted(found) == wanted

  @pytest.mark.parametrize("batch", [1, 7, 100])
  def test_evaluation_has_every_document_once_in_order(self, news, batch):
    _, split = self.split(news)
    whole = Documents().whole(split, batch=batch, context=5)
    got = list(whole)
    assert len(got) == len(whole)
    targets = np.concatenate([one["targets"] for one in got])
    assert {one["inputs"].shape for one in got} == {(batch, 5)}
    assert targets[: split.documents].tolist() == split.labels.tolist()
    assert (targets[split.documents :] == -1).all()
    inputs = np.concatenate([one["inputs"] for one in got])
    assert (inputs[split.documents :] == -1).all()

  def test_a_process_reads_its_rows_of_the_whole_batch(self, news):
    _, split = self.split(news)
    whole = Documents().batches(split, batch=6, context=5, seed=3)
    part = Documents().batches(split, batch=6, context=5, seed=3, rows=np.array([1, 4]))
    for _ in range(12):
      one, other = next(whole), next(part)
      assert all(np.array_equal(one[name][[1, 4]], other[name]) for name in one)

  @pytest.mark.parametrize("context", [5, 2])
  def test_shapes_describe_the_batches(self, news, context):
    _, split = self.split(news)
    shapes = Documents().shapes(6, context)
    for batch in (
      next(Documents().batches(split, batch=6, context=context, seed=0)),
      next(iter(Documents().whole(split, batch=6, context=context))),
    ):
      assert (batch["inputs"][:, 0] != -1).all()
      assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (x.shape, x.dtype) for name, x in shapes.items()
      }

  def test_texts_without_classes_are_refused(self, tmp_path):
    for split in ("train", "valid", "test"):
      (tmp_path / f"{split}.txt").write_text("some text")
    source = Text(str(tmp_path))
    split = encode_split(source, fit_tokenizer(source, WordTokenizer()), "train")
    with pytest.raises(ValueError, match=r"a class for each .* got 0"):
      Documents().batches(split, batch=1, context=5, seed=0)

  def test_a_text_that_holds_the_ending_token_is_refused(self, news):
    _, split = self.split(news)
    tokens = np.concatenate([[split.eos], split.tokens])
    with pytest.raises(ValueError, match="ending tokens"):
      Documents().whole(dataclasses.replace(split, tokens=tokens), batch=1, context=5)
