"""Heads of the VQ-Logits study have the sizes of the paper."""

from experiments.studies.vq_logits.report import PAPER
from experiments.studies.vq_logits.rows import rows
from experiments.studies.vq_logits.settings import SCALES
from vqjax.lab.config import with_vocab


def test_heads_of_the_papers_size_have_the_published_parameters():
  setting, vocab = SCALES["paper"]["wikitext"], int(PAPER["Setup"]["wikitext"]["vocab"])
  made = {row.name: with_vocab(row.experiment, vocab) for row in rows(setting)}
  params = lambda name: made[name].model.head.size().params
  assert params("full") == 205_620_480  # 267,735 · 768; the paper prints 205.2 M
  assert params("low-rank") == 137_473_536  # (267,735 + 768) · 512
  assert params("vq-1024") == 786_432
  assert params("adaptive") == 36_077_136  # the paper prints 52.1 M
