"""Rows of the VQ-Logits study: their sizes, and what is measured of their runs."""

import json

import numpy as np
import pytest

from experiments.studies.vq_logits import wikitext
from experiments.studies.vq_logits.page import PAPER
from tests.fakes import FewWords
from vqjax.lab.config import with_vocab


def test_heads_of_the_papers_size_have_the_published_parameters():
  study, vocab = wikitext.paper(), int(PAPER["Setup"]["wikitext"]["vocab"])
  params = lambda name: with_vocab(study.experiment(name), vocab).model.head.size().params
  assert params("full") == 205_620_480  # 267,735 · 768; the paper prints 205.2 M
  assert params("low-rank") == 137_473_536  # (267,735 + 768) · 512
  assert params("vq-1024") == 786_432
  assert params("adaptive") == 36_077_136  # the paper prints 52.1 M


def test_words_that_are_tokens_have_the_first_tokens_of_their_code():
  tokenizer = FewWords("Sunday", "Monday", "the")
  assignment = np.array([0, 0, 2, 1, 2])
  assert wikitext.code_words(tokenizer, assignment, ("Monday", "Tuesday", "Sunday")) == {
    "Monday": ["Monday"],
    "Sunday": ["Sunday", "the"],
  }


SMOKE = """\
import dataclasses

from experiments.studies.vq_logits import ptb
from vqjax.lab.data import Text, WordTokenizer


def study():
  made = ptb.study()
  text = Text(valid_fraction=0.005, test_fraction=0.005)
  base = dataclasses.replace(made.base, data=text, tokenizer=WordTokenizer(vocab=12_000))
  return dataclasses.replace(made, base=base)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_steps_train_a_codebook_of_the_full_softmax_and_keep_its_floors(process, tmp_path):
  (tmp_path / "smoke.py").write_text(SMOKE)
  small = "--scale", "0.0025", "--only", "vq-256/run", "--out", "out"
  process("vqjax.cli", "study", "smoke.py", *small)
  lines = map(json.loads, (tmp_path / "out/results.jsonl").read_text().splitlines())
  kept = {line["name"]: line for line in lines}
  assert kept.keys() == {f"{row}/{job}" for row in ("dense", "vq-256") for job in ("costs", "run")}
  floors = kept["vq-256/run"]["floors"]
  assert floors["bias"] <= floors["uniform"]
  assert kept["dense/run"]["floors"] is None
