"""Tests of the rows of the VQ-Logits study: names, starting runs, and sizes of heads."""

import jax
import jax.numpy as jnp
import pytest

from experiments.studies.vq_logits.report import PAPER
from experiments.studies.vq_logits.rows import rows
from experiments.studies.vq_logits.run import STUDY
from experiments.studies.vq_logits.settings import SCALES
from vqjax.lab.config import with_vocab

LARGE = {f"{s.name}/{row.name}": row for s in SCALES["paper"].values() for row in rows(s)}
VOCAB = {name: int(setup["vocab"]) for name, setup in PAPER["Setup"].items()}


def at_paper_size(name):
  return with_vocab(LARGE[name].experiment(0), VOCAB[name.split("/")[0]])


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", LARGE)
def test_a_head_of_the_papers_size_has_the_parameters_that_it_declares(name):
  model, tokens = at_paper_size(name).model, jnp.zeros((1, 8), jnp.int32)
  init = lambda key: model.init({"params": key, "sample": key}, tokens, tokens, method="loss_terms")
  params = jax.eval_shape(init, jax.random.key(0))["params"]
  head = params.get("student", params).get("head", {})
  assert sum(x.size for x in jax.tree.leaves(head)) == model.head.size().params


def test_heads_of_the_papers_size_have_the_published_parameters():
  head = lambda name: at_paper_size(name).model.head.size().params
  assert head("wikitext/full") == 205_620_480  # 267,735 · 768; the paper prints 205.2 M
  assert head("wikitext/low-rank") == 137_473_536  # (267,735 + 768) · 512
  assert head("wikitext/vq-1024") == 786_432
  assert head("wikitext/adaptive") == 36_077_136  # the paper prints 52.1 M


@pytest.mark.parametrize("scale", SCALES)
def test_a_work_comes_after_those_that_it_starts_from(scale):
  seen = set()
  for job in STUDY.jobs(scale):
    assert seen.issuperset(job.needs)
    assert job.name not in seen
    seen.add(job.name)


@pytest.mark.parametrize("name", SCALES["paper"])
def test_all_scales_have_the_same_kinds_of_rows(name):
  kinds = lambda scale: [
    (row.head.__class__, row.needs, row.headline)
    for row in rows(SCALES[scale][name])
    if "product-scratch-" not in row.name
  ]
  assert kinds("smoke") == kinds("cpu") == kinds("paper")
