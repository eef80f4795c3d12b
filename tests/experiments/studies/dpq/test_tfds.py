"""Labelled texts and translations, built and read as datasets without TensorFlow."""

import subprocess
import sys

import pytest

from experiments.studies.dpq.data import LabelledTFDS, PairedTFDS
from experiments.studies.dpq.data.tfds import BUILDERS


@pytest.mark.slow
def test_labelled_texts_and_translations_are_prepared_and_read(tmp_path):
  manual = tmp_path / "manual"
  manual.mkdir()
  rows = '"1","A title","a \\\\ line"\n"2","Other","text"\n'
  for name in ("train", "test"):
    (manual / f"{name}.csv").write_text(rows * 20)
  for name in ("train", "tst2012", "tst2013"):
    (manual / f"{name}.en").write_text("a dog\na cat\n")
    (manual / f"{name}.vi").write_text("một con chó\nmột con mèo\n")
  there = tmp_path / "tfds"
  for name in ("vqjax_zhang/yelp_review_polarity", "vqjax_iwslt15"):
    folders = "--manual_dir", str(manual), "--data_dir", str(there)
    command = [sys.executable, "-m", "vqjax.lab.data.build", name, "--imports", BUILDERS, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
  reviews = LabelledTFDS("vqjax_zhang/yelp_review_polarity", data_dir=str(there))
  found = list(reviews.examples("test"))
  assert sorted(set(found)) == [("A title a line", 0), ("Other text", 1)]
  assert len(found) == 40
  assert len(list(reviews.documents("train"))) == 38
  assert reviews.classes == ("1", "2")
  assert reviews.labels("valid").tolist().count(0) in range(3)
  talks = PairedTFDS(
    "vqjax_iwslt15", "vi", "en", valid="validation", test="test", data_dir=str(there)
  )
  assert sorted(talks.pairs("valid")) == [("một con chó", "a dog"), ("một con mèo", "a cat")]
  with pytest.raises(ValueError, match=r"PairedTFDS\.target` must be one of en, vi; got 'fr'"):
    list(PairedTFDS("vqjax_iwslt15", "vi", "fr", data_dir=str(there)).pairs("train"))
