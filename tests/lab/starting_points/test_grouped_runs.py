"""Runs with a grouped head: its groups from the text, converted, distilled, and without teacher."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import jitted, reference, tiny
from vqjax import GroupedHead, convert
from vqjax.lab import starting_points
from vqjax.lab.config import FROM_TOKENIZER
from vqjax.lab.training import fit, read_run_variables


def divergence(logits, logits_of_student):
  log_q = reference.log_softmax(logits)
  return (np.exp(log_q) * (log_q - reference.log_softmax(logits_of_student))).sum(-1).mean()


@pytest.mark.slow
def test_groups_from_the_text_change_only_the_order(dense):
  head = GroupedHead(FROM_TOKENIZER, 16, order_init=convert.in_order)
  start = starting_points.Regrouped(convert.ByClusters(convert.ContextKMeans(width=4)))
  model = dense[0].model.clone(head=head)
  _, variables, fresh = tiny.begun(dataclasses.replace(dense[0], model=model, init_from=start))
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
  head = GroupedHead(FROM_TOKENIZER, 16, use_bias=True, order_init=convert.in_order)
  target = convert.ToGrouped(by=convert.ByFrequency())
  options = {"name": "grouped", "distillation": 1.0, "train": short}
  made = starting_points.converted(*dense, head, target, **options)
  text, variables, _ = tiny.begun(made)
  model = text.experiment.model
  tokens = np.arange(32).reshape(4, 8) * 7 % model.head.vocab

  @jax.jit
  def run(given):
    of = lambda part: {name: tree[part] for name, tree in given.items() if part in tree}
    logits = [getattr(model, part).apply(of(part), tokens) for part in ("student", "teacher")]
    return model.apply(given, tokens, tokens, method="loss_terms")[1]["distillation"], *logits

  def diverges(given):
    term, p, q = run(given)
    np.testing.assert_allclose(term, divergence(q, np.asarray(p, np.float64)), rtol=1e-4)
    return float(term)

  params, vector = variables["params"], np.zeros((1, 16), np.float32)
  fresh = jitted.init(model.student.head, jax.random.key(0), vector)
  student = params["student"] | {"head": fresh["params"]}
  scratch = variables | {"params": params | {"student": student}}
  assert diverges(variables) < diverges(scratch) / 2

  assert fit(made, tmp_path / "run")["status"] == "finished"
  both, _ = read_run_variables(tmp_path / "run")
  alone = {name: tree["student"] for name, tree in variables.items()}
  order = both["codes"]["student"]["head"]["order"]
  np.testing.assert_array_equal(order, alone["codes"]["head"]["order"])


def test_an_order_for_a_head_without_one_is_refused(dense):
  start = starting_points.Regrouped(convert.Shuffled())
  with pytest.raises(ValueError, match=r"by Shuffled\(seed=0\); got a DenseHead without one"):
    tiny.begun(dataclasses.replace(dense[0], init_from=start))
