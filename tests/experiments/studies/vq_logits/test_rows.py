"""Tests of the rows of the VQ-Logits study: names, starting runs, and sizes of heads."""

import pytest

from experiments.studies.vq_logits.report import PAPER
from experiments.studies.vq_logits.rows import rows
from experiments.studies.vq_logits.settings import SCALES
from vqjax.lab.config import with_vocab

LARGE = {f"{s.name}/{row.name}": row for s in SCALES["paper"].values() for row in rows(s)}
VOCAB = {name: int(setup["vocab"]) for name, setup in PAPER["Setup"].items()}


def at_paper_size(name):
  return with_vocab(LARGE[name].experiment(0), VOCAB[name.split("/")[0]])


def test_heads_of_the_papers_size_have_the_published_parameters():
  head = lambda name: at_paper_size(name).model.head.size().params
  assert head("wikitext/full") == 205_620_480  # 267,735 · 768; the paper prints 205.2 M
  assert head("wikitext/low-rank") == 137_473_536  # (267,735 + 768) · 512
  assert head("wikitext/vq-1024") == 786_432
  assert head("wikitext/adaptive") == 36_077_136  # the paper prints 52.1 M


@pytest.mark.parametrize("name", SCALES["paper"])
def test_all_scales_have_the_same_kinds_of_rows(name):
  kinds = lambda scale: [
    (row.head.__class__, row.needs, row.headline)
    for row in rows(SCALES[scale][name])
    if "product-scratch-" not in row.name
  ]
  assert kinds("smoke") == kinds("cpu") == kinds("paper")
