"""Do the runs of the VQ-Logits tables build at the paper's own sizes, in shapes alone?"""

import jax
import jax.numpy as jnp
import pytest

from experiments.studies.vq_logits.paper import BODIES
from experiments.studies.vq_logits.run import runs
from vqjax.lab.config import with_vocab

PAPER = {name: run for name, run in runs("paper").items() if run.seed == 0}


@pytest.mark.parametrize("name", PAPER)
def test_a_model_of_the_papers_size_has_the_head_that_it_says(name):
  run = PAPER[name]
  experiment = with_vocab(run.experiment, BODIES[run.setting.name].vocab)
  model, tokens = experiment.model, jnp.zeros((1, 8), jnp.int32)
  init = lambda key: model.init({"params": key, "sample": key}, tokens, tokens, method="loss_terms")
  params = jax.eval_shape(init, jax.random.key(0))["params"]
  head = params.get("student", params).get("head", {})
  assert sum(x.size for x in jax.tree.leaves(head)) == model.head.size().params


def test_the_papers_heads_have_its_parameters():
  head = lambda name: with_vocab(PAPER[name].experiment, 267_735).model.head.size().params
  assert head("wikitext/full") == 205_620_480
  assert head("wikitext/low-rank") == 137_473_536
  assert head("wikitext/vq-1024") == 786_432
  assert head("wikitext/adaptive") == 36_077_136
