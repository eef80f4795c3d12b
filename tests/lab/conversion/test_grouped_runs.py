"""Runs with a grouped head: its groups from the text, converted, distilled, and without teacher."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from vqjax import DenseHead, GroupedHead, convert
from vqjax.lab import conversion
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit, read_variables
from vqjax.lab.training.program import Program, keys
from vqjax.lab.training.run import load_text
from vqjax.sharding import MeshShape, make_mesh


def divergence(logits, logits_of_student):
  log_q = reference.log_softmax(logits)
  return (np.exp(log_q) * (log_q - reference.log_softmax(logits_of_student))).sum(-1).mean()


def initial(experiment):
  """(text, its experiment's model, the variables that its run begins with, the fresh ones)."""
  text = load_text(experiment)
  program = Program(text.experiment, make_mesh(MeshShape(data=1)))
  fresh = jax.device_get(program.init(keys(0)[0]).variables)
  model = text.experiment.model
  return text, model, experiment.init_from(text, model, fresh), fresh


@pytest.mark.slow
def test_groups_from_the_text_change_only_the_order(dense):
  experiment, _ = dense
  head = GroupedHead(FROM_TOKENIZER, 16, order_init=convert.in_order)
  model = experiment.model.clone(head=head)
  start = conversion.Regrouped(convert.ByClusters(convert.ContextKMeans(width=4)))
  scratch = dataclasses.replace(experiment, model=model, init_from=start)
  _, _, variables, fresh = initial(scratch)
  codes = variables["codes"]["head"]
  order = codes["order"]
  assert order.dtype == codes["position"].dtype == np.int32
  assert sorted(order) == list(range(len(order)))
  assert (order != np.arange(len(order))).any()
  np.testing.assert_array_equal(codes["position"][order], np.arange(len(order)))
  jax.tree.map(np.testing.assert_array_equal, variables["params"], fresh["params"])


@pytest.mark.slow
def test_a_converted_head_is_nearer_than_a_fresh_one_and_is_distilled_without_its_teacher(
  dense, short, tmp_path
):
  experiment, folder = dense
  head = GroupedHead(FROM_TOKENIZER, 16, use_bias=True, order_init=convert.in_order)
  target = convert.ToGrouped(by=convert.ByFrequency())
  made = conversion.converted(
    experiment, folder, head, target, name="grouped", distillation=1.0, train=short
  )
  _, model, variables, fresh = initial(made)
  tokens = jnp.arange(32).reshape(4, 8) * 7 % model.head.vocab

  @jax.jit
  def run(given):
    of = lambda part: {name: tree[part] for name, tree in given.items() if part in tree}
    logits = [getattr(model, part).apply(of(part), tokens) for part in ("student", "teacher")]
    return model.apply(given, tokens, tokens, method="loss_terms")[1]["distillation"], *logits

  def diverges(given):
    term, p, q = run(given)
    np.testing.assert_allclose(term, divergence(q, np.asarray(p, np.float64)), rtol=1e-4)
    return float(term)

  scratch = variables | {"params": _with_head(variables, fresh)}
  assert diverges(variables) < diverges(scratch) / 2

  assert fit(made, tmp_path / "run")["status"] == "finished"
  both, _ = read_variables(tmp_path / "run")
  alone = {name: tree["student"] for name, tree in variables.items()}
  order = both["codes"]["student"]["head"]["order"]
  np.testing.assert_array_equal(order, alone["codes"]["head"]["order"])


def _with_head(variables, fresh):
  params = dict(variables["params"])
  return params | {"student": params["student"] | {"head": fresh["params"]["student"]["head"]}}


@pytest.mark.slow
def test_an_order_for_a_head_without_one_is_refused(dense):
  model = dense[0].model.clone(head=DenseHead(FROM_TOKENIZER, 16))
  start = conversion.Regrouped(convert.Shuffled())
  with pytest.raises(ValueError, match=r"by Shuffled\(seed=0\); got a DenseHead without one"):
    initial(dataclasses.replace(dense[0], model=model, init_from=start))
